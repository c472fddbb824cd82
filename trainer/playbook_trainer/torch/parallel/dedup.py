"""The dispatcher that sends each token once to every rank that holds one of its experts, and gets one row back from each.

A token and a rank that it goes to are a pair. The pair's row carries the token's probabilities for the rank's experts; the rank gives each of
these experts a copy, weighs and adds up their outputs, and sends home one sum, so that both ways carry one row per pair. With top-8 over
4 ranks a token has 6 experts on other ranks, but goes to 2.7 of them on average (3 x (1 - (3/4)^8)).

Suffixes: N tokens of this rank, K experts per token, D hidden size, P ranks, S pairs sent, T pairs received, R rows of this rank's experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from playbook_trainer.axes import Axis
from playbook_trainer.torch.parallel.comm import all_to_all, exchange_counts


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
class Route:
    """What `combine` needs to return the rows of a dispatch to their tokens."""

    home: Fan
    """Tokens own pairs."""
    away: Fan
    """Pairs received own rows."""
    prob_R: Tensor
    send: list[int]
    receive: list[int]


class Dedup:
    """One row per token and rank, both ways; one wait for the device per layer, to learn how many rows come."""

    def __init__(self, num_experts: int, ep: Axis) -> None:
        self.ep, self.held = ep, num_experts // ep.size

    def dispatch(self, x_ND: Tensor, expert_NK: Tensor, prob_NK: Tensor) -> tuple[Tensor, Tensor, Route]:
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
        route = Route(home, fan, prob_TK.flatten().index_select(0, slot_R), send, receive)
        return _Copy.apply(rows_TD, fan), counts, route

    def combine(self, out_RD: Tensor, route: Route) -> Tensor:
        """Sum each token's weighted rows on this rank, send the sums to the token's rank, and add them there."""
        sums_TD = _Sum.apply(out_RD, route.prob_R, route.away)
        return _Sum.apply(all_to_all(sums_TD, route.receive, route.send, self.ep), None, route.home)

    def _fan_of_pairs(self, expert_TK: Tensor, top: int, away: list[int]) -> tuple[Fan, Tensor, Tensor]:
        """The rows of this rank's experts by expert, the number of each expert's, and each row's place among all (pair, choice)."""
        num_pairs, top_k = expert_TK.shape
        local = expert_TK - self.ep.rank * self.held
        here = (local >= 0) & (local < self.held)
        key_Tk, slot_Tk = torch.sort(torch.where(here, local, self.held), dim=1, stable=True)
        key, num_rows = key_Tk[:, :top].flatten(), sum(away)
        order = torch.argsort(key, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        order_R = order[:num_rows]
        owner_R = order_R // top
        slot_R = owner_R * top_k + slot_Tk[:, :top].flatten()[order_R]
        counts = count_sorted(key[order], self.held)
        return _fan(owner_R, place.view(num_pairs, top), here.sum(1), away), counts, slot_R


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
