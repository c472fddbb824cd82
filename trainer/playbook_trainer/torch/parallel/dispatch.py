"""Dispatchers: bring routed tokens to the ranks that hold their experts, and back.

    rows, counts, route = dispatch(x, experts, probs)     rows of this rank's experts, sorted by expert
    y = combine(expert_outputs, route)                    weighted sums, one row per token of this rank

Suffixes: N tokens of this rank, K experts per token, D hidden size, R rows that this rank's experts compute, E experts.

`Dedup` sends each token once to every rank that holds one of its experts, and gets one row back from each. A token and a rank that it goes
to are a pair. The pair's row carries the token's probabilities for the rank's experts; the rank gives each of these experts a copy, weighs
and adds up their outputs, and sends home one sum, so that both ways carry one row per pair. With top-8 over 4 ranks a token has 6 experts
on other ranks, but goes to 2.7 of them on average (3 x (1 - (3/4)^8)). Suffixes there: P ranks, S pairs sent, T pairs received.

Rows are never dropped. Adding a dispatcher: one class with `dispatch` and `combine`, and a line in `DISPATCHERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from playbook_trainer.axes import Axis
from playbook_trainer.torch.parallel.comm import all_gather, all_to_all, exchange_counts, gather_plain, reduce_scatter


class Dispatcher(Protocol):
    """Sends token rows to the ranks of their experts and brings the outputs back."""

    fused: bool = False
    early: bool = False
    """Rows meet their probabilities (`route.prob_R`) at their experts, and `combine` only adds them up."""

    def dispatch(self, x_ND: Tensor, expert_NK: Tensor, prob_NK: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Rows (R, D) sorted by local expert, rows per local expert (E / ep), and what `combine` needs."""

    def combine(self, out_RD: Tensor, route: Any) -> Tensor:
        """Weighted expert outputs back at their tokens (N, D)."""


_Sort = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
"""Experts (N, K) to the order of their rows, its inverse, and the number of rows of each expert."""


def make(
    name: str, num_experts: int, ep: Axis, *, fused: bool = False, early: bool = False, wrap_sort: Callable[[_Sort], _Sort] | None = None
) -> Dispatcher:
    """The dispatcher of the configuration; one rank needs none but the local sort. `fused` sorts and weighs rows in Triton kernels, with
    `early` experts weigh them; `wrap_sort` takes the place of the sort of local and alltoall.
    """
    dispatcher = DISPATCHERS["local" if ep.size == 1 else name](num_experts, ep)
    dispatcher.fused, dispatcher.early = fused, early
    if wrap_sort is not None:
        dispatcher.sort = wrap_sort(dispatcher.sort)
    built: Dispatcher = dispatcher
    return built


@dataclass
class Route:
    """What `combine` needs to return the rows of a dispatch to their tokens."""

    shape: tuple[int, int, int]
    order: Tensor
    inverse: Tensor
    prob_NK: Tensor
    send: list[int]
    receive: list[int]
    fused: bool = False
    order_R: Tensor | None = None
    inverse_R: Tensor | None = None
    prob_R: Tensor | None = None
    """Probabilities of the rows at their experts, where experts weigh them."""


class Local(Dispatcher):
    """All experts are here: sort the rows by expert, and unsort them."""

    def __init__(self, num_experts: int, ep: Axis) -> None:
        self.sort: _Sort = partial(sort_rows, num_experts=num_experts)

    def dispatch(self, x_ND: Tensor, expert_NK: Tensor, prob_NK: Tensor) -> tuple[Tensor, Tensor, Route]:
        """Rows sorted by expert."""
        route, counts = _route(x_ND, prob_NK, self.sort(expert_NK), self.fused)
        rows = _expand(x_ND, route)
        if self.early:
            route.prob_R = _sorted_probs(route)
        return rows, counts, route

    def combine(self, out_RD: Tensor, route: Route) -> Tensor:
        """Restore the order of tokens and sum each token's rows."""
        return _weigh(out_RD, route)


class AllToAll(Dispatcher):
    """Each (token, expert) row travels to the expert's rank and its output travels back; probabilities stay at home."""

    def __init__(self, num_experts: int, ep: Axis) -> None:
        self.ep = ep
        self.sort: _Sort = partial(sort_rows, num_experts=num_experts)

    def dispatch(self, x_ND: Tensor, expert_NK: Tensor, prob_NK: Tensor) -> tuple[Tensor, Tensor, Route]:
        """Exchange the rows; one wait for the device per layer, to learn how many come."""
        route, counts = _route(x_ND, prob_NK, self.sort(expert_NK), self.fused)
        sent = counts.view(self.ep.size, -1)
        received = exchange_counts(sent, self.ep)
        route.send, route.receive = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        rows = _expand(x_ND, route)
        rows = all_to_all(rows, route.send, route.receive, self.ep)
        local = torch.arange(received.shape[1], device=rows.device).repeat(self.ep.size)
        expert_R = torch.repeat_interleave(local, received.flatten(), output_size=rows.shape[0])
        route.order_R = torch.argsort(expert_R, stable=True)
        route.inverse_R = _invert(route.order_R)
        rows = _Permute.apply(rows, route.order_R, route.inverse_R)
        if self.early:
            prob_R = all_to_all(_sorted_probs(route), route.send, route.receive, self.ep)
            route.prob_R = _Permute.apply(prob_R, route.order_R, route.inverse_R)
        return rows, received.sum(0), route

    def combine(self, out_RD: Tensor, route: Route) -> Tensor:
        """Send the outputs back to the tokens' ranks and sum them there."""
        rows = _Permute.apply(out_RD, route.inverse_R, route.order_R)
        return _weigh(all_to_all(rows, route.receive, route.send, self.ep), route)


@dataclass
class Gathered:
    """What `combine` needs to return the rows of gathered tokens."""

    tokens: int
    token_R: Tensor
    prob_R: Tensor


class AllGather(Dispatcher):
    """Every rank gets every token, computes its own experts' rows, and the weighted sums are reduce-scattered."""

    def __init__(self, num_experts: int, ep: Axis) -> None:
        self.num_experts, self.ep = num_experts, ep

    def dispatch(self, x_ND: Tensor, expert_NK: Tensor, prob_NK: Tensor) -> tuple[Tensor, Tensor, Gathered]:
        """Gather tokens, choices and probabilities; keep the rows whose expert is here."""
        x_all = all_gather(x_ND, self.ep)
        prob_all = all_gather(prob_NK, self.ep)
        expert_all = gather_plain(expert_NK, self.ep)
        local_experts = self.num_experts // self.ep.size
        local = expert_all.flatten() - self.ep.rank * local_experts
        local = torch.where((local >= 0) & (local < local_experts), local, local_experts)
        order = torch.argsort(local, stable=True)
        counts = count_sorted(local[order], local_experts)
        pick = order[: int(counts.sum())]
        token_R = pick // expert_NK.shape[1]
        rows = x_all.index_select(0, token_R)
        return rows, counts, Gathered(x_all.shape[0], token_R, prob_all.flatten()[pick])

    def combine(self, out_RD: Tensor, route: Gathered) -> Tensor:
        """Add up the weighted rows per token, then over the ranks."""
        weighted = out_RD if self.early else (out_RD * route.prob_R.unsqueeze(1)).to(out_RD.dtype)
        total = weighted.new_zeros((route.tokens, weighted.shape[1])).index_add_(0, route.token_R, weighted)
        return reduce_scatter(total, self.ep)


def sort_rows(expert_NK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The order of the rows (token, choice) by expert, its inverse, and the rows of each expert; no shape depends on the routing."""
    flat = expert_NK.flatten()
    order = torch.argsort(flat, stable=True)
    return order, _invert(order), count_sorted(flat[order], num_experts)


def _route(x_ND: Tensor, prob_NK: Tensor, sort: tuple[Tensor, Tensor, Tensor], fused: bool) -> tuple[Route, Tensor]:
    order, inverse, counts = sort
    shape = (x_ND.shape[0], prob_NK.shape[1], x_ND.shape[1])
    return Route(shape, order, inverse, prob_NK, [], [], fused), counts


def _invert(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


def _expand(x_ND: Tensor, route: Route) -> Tensor:
    if route.fused:
        from playbook_trainer.torch.kernels import experts

        return experts.expand(x_ND, route.inverse, route.shape[1])
    return _Expand.apply(x_ND, route.order, route.inverse, route.shape[1])


def _sorted_probs(route: Route) -> Tensor:
    return _Permute.apply(route.prob_NK.flatten(), route.order, route.inverse)


def _weigh(rows: Tensor, route: Route) -> Tensor:
    """Each token's rows added up, weighted unless their experts have done so."""
    if route.fused:
        from playbook_trainer.torch.kernels import experts

        if route.prob_R is not None:
            return experts.join(rows, route.inverse, route.shape[1])
        return experts.weigh(rows, route.inverse, route.prob_NK)
    rows_NKD = _Permute.apply(rows, route.inverse, route.order).view(route.shape)
    return rows_NKD.sum(1) if route.prob_R is not None else _WeightedSum.apply(rows_NKD, route.prob_NK)


class _Expand(torch.autograd.Function):
    """Token rows, each K times, in the sorted order. Its backward gathers and adds, where autograd would scatter with atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        rows = grads[0].index_select(0, inverse)
        return rows.view(-1, ctx.k, rows.shape[1]).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """Rows in another order; its backward is the inverse gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


class _WeightedSum(torch.autograd.Function):
    """Each token's K rows, weighted and added; einsum's backward pass takes ten times as long for these shapes."""

    @staticmethod
    def forward(ctx: Any, rows_NKD: Tensor, prob_NK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_NKD, prob_NK)
        return (rows_NKD * prob_NK.unsqueeze(2).to(rows_NKD.dtype)).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        rows_NKD, prob_NK = ctx.saved_tensors
        grad_N1D = grads[0].unsqueeze(1)
        grad_prob = (rows_NKD * grad_N1D).sum(2, dtype=torch.float32)
        return grad_N1D * prob_NK.unsqueeze(2).to(rows_NKD.dtype), grad_prob.to(prob_NK.dtype)


@dataclass(frozen=True)
class Fan:
    """An assignment of rows to owners, with any number of rows per owner.

    Owners are ordered by their number of rows, most first. The first `counts[j]` of them have more than j, and `place[:counts[j], j]` tells
    where their j-th rows are: adding up takes one gather per j, touches each row once, and always adds in the same order.
    """

    owner: Tensor
    """int64 [rows], the owner of each row."""
    place: Tensor
    """int64 [owners, most rows of one]; beyond an owner's number of rows, anything."""
    rank: Tensor
    """int64 [owners], each owner's place in the order."""
    counts: list[int]


@dataclass(frozen=True)
class DedupRoute:
    """What `combine` needs to return the rows of a dispatch to their tokens."""

    home: Fan
    """Tokens own pairs."""
    away: Fan
    """Pairs received own rows."""
    prob_R: Tensor
    send: list[int]
    receive: list[int]


class Dedup(Dispatcher):
    """One row per token and rank, both ways; one wait for the device per layer, to learn how many rows come."""

    def __init__(self, num_experts: int, ep: Axis) -> None:
        self.ep, self.held = ep, num_experts // ep.size

    def dispatch(self, x_ND: Tensor, expert_NK: Tensor, prob_NK: Tensor) -> tuple[Tensor, Tensor, DedupRoute]:
        """Exchange the pairs, then copy each to its experts here."""
        num, top = expert_NK.shape[0], min(expert_NK.shape[1], self.held)
        chosen_NP = x_ND.new_zeros((num, self.ep.size), dtype=torch.int64)
        chosen_NP.scatter_add_(1, expert_NK // self.held, torch.ones_like(expert_NK))
        goes_NP = chosen_NP > 0
        # Of the pairs with each rank, how many have more than 0, 1, ... experts there: splits, rows and the fans' counts all follow.
        sent_Pk = _more_than(chosen_NP, top)
        received_Pk = exchange_counts(sent_Pk, self.ep)
        home_k = _more_than(goes_NP.sum(1, keepdim=True), min(expert_NK.shape[1], self.ep.size)).flatten()
        numbers = torch.cat([sent_Pk[:, 0], received_Pk[:, 0], received_Pk.sum(0), home_k]).tolist()
        p, q = self.ep.size, 2 * self.ep.size
        send, receive, away, home_counts = numbers[:p], numbers[p:q], numbers[q : q + top], numbers[q + top :]
        home = _fan_of_tokens(goes_NP, home_counts, sum(send))
        # A rank tells its experts from others' by their numbers, which travel with the probabilities in one message.
        wide = torch.promote_types(prob_NK.dtype, torch.float32)
        meta_NJ = torch.cat([prob_NK.to(wide), expert_NK.to(wide)], dim=1)
        rows_TD = all_to_all(_Copy.apply(x_ND, home), send, receive, self.ep)
        meta_TJ = all_to_all(_Copy.apply(meta_NJ, home), send, receive, self.ep)
        prob_TK, expert_TK = meta_TJ.chunk(2, dim=1)
        fan, counts, slot_R = self._fan_of_pairs(expert_TK.detach().long(), top, away)
        route = DedupRoute(home, fan, prob_TK.flatten().index_select(0, slot_R), send, receive)
        return _Copy.apply(rows_TD, fan), counts, route

    def combine(self, out_RD: Tensor, route: DedupRoute) -> Tensor:
        """Sum each token's weighted rows on this rank, send the sums to the token's rank, and add them there."""
        sums_TD = _Sum.apply(out_RD, route.prob_R, route.away)
        return _Sum.apply(all_to_all(sums_TD, route.receive, route.send, self.ep), None, route.home)

    def _fan_of_pairs(self, expert_TK: Tensor, top: int, away: list[int]) -> tuple[Fan, Tensor, Tensor]:
        """The rows of this rank's experts by expert, the number of each expert's, and each row's place among all (pair, choice)."""
        num_pairs, top_k = expert_TK.shape
        local = expert_TK - self.ep.rank * self.held
        is_local = (local >= 0) & (local < self.held)
        key_Tk, slot_Tk = torch.sort(torch.where(is_local, local, self.held), dim=1, stable=True)
        key, num_rows = key_Tk[:, :top].flatten(), sum(away)
        order = torch.argsort(key, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        order_R = order[:num_rows]
        owner_R = order_R // top
        slot_R = owner_R * top_k + slot_Tk[:, :top].flatten()[order_R]
        counts = count_sorted(key[order], self.held)
        return _fan(owner_R, place.view(num_pairs, top), is_local.sum(1), away), counts, slot_R


def count_sorted(key: Tensor, num: int) -> Tensor:
    """How often 0, 1, ... num - 1 occur in sorted keys; bincount would wait for the device."""
    ends = torch.searchsorted(key, torch.arange(num, device=key.device), right=True)
    return ends.diff(prepend=ends.new_zeros(1))


def _more_than(numbers_XP: Tensor, top: int) -> Tensor:
    """For each column, how many of its numbers exceed 0, 1, ... top - 1; int64 (P, top)."""
    steps = torch.arange(top, device=numbers_XP.device)
    return (numbers_XP.unsqueeze(2) > steps).sum(0)


def _fan_of_tokens(goes_NP: Tensor, counts: list[int], num_pairs: int) -> Fan:
    """Pairs by rank, then by token; without a wait for the device, since their number is known."""
    num, ranks = goes_NP.shape
    flat = goes_NP.t().flatten()
    number = flat.cumsum(0) - 1
    token = torch.arange(num, device=flat.device).repeat(ranks)
    owner = token.new_empty(num_pairs + 1).scatter_(0, torch.where(flat, number, num_pairs), token)[:num_pairs]
    place_NP = torch.where(flat, number, flat.numel()).view(ranks, num).t().sort(dim=1).values
    return _fan(owner, place_NP, goes_NP.sum(1), counts)


def _fan(owner: Tensor, place: Tensor, degree: Tensor, counts: list[int]) -> Fan:
    order = torch.argsort(degree, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=order.device)
    return Fan(owner, place.index_select(0, order), rank, counts)


def _add_up(rows: Tensor, weight: Tensor | None, fan: Fan) -> Tensor:
    """Each owner's rows, weighted and added in float32 or wider."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = rows.new_zeros((fan.rank.numel(), rows.shape[1]), dtype=wide)
    for j, count in enumerate(fan.counts):
        at = fan.place[:count, j]
        part = rows.index_select(0, at)
        if weight is None:
            total[:count].add_(part)
        else:
            total[:count].addcmul_(part.to(wide), weight.index_select(0, at).unsqueeze(1).to(wide))
    return total.index_select(0, fan.rank).to(rows.dtype)


class _Copy(torch.autograd.Function):
    """A copy of its owner for each row; the backward pass adds up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fan: Fan) -> Tensor:
        ctx.fan = fan
        return x.index_select(0, fan.owner)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return _add_up(grads[0], None, ctx.fan), None


class _Sum(torch.autograd.Function):
    """The weighted sum of each owner's rows; the backward pass copies, and gives each weight its row's product with the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor | None, fan: Fan) -> Tensor:
        ctx.fan = fan
        ctx.save_for_backward(*(() if weight is None else (rows, weight)))
        return _add_up(rows, weight, fan)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor | None, None]:
        grad = grads[0].index_select(0, ctx.fan.owner)
        saved = ctx.saved_tensors  # read once: under recompute a second read is an error
        if not saved:
            return grad, None, None
        rows, weight = saved
        wide = torch.promote_types(rows.dtype, weight.dtype)
        return (grad * weight.unsqueeze(1)).to(rows.dtype), (rows.to(wide) * grad).sum(1).to(weight.dtype), None


DISPATCHERS: dict[str, Any] = {"local": Local, "alltoall": AllToAll, "allgather": AllGather, "dedup": Dedup}
