"""How evenly a router spreads tokens over the experts: counts of a step, a loss that evens them out,
and a bias that does so without a gradient.

Suffixes: N tokens of this rank, E experts, K experts per token, L decoder layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softmax

from playbook_trainer.axes import Axes
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.observe.ranges import tally


def balancing_loss(scores_NE: Tensor, load_E: Tensor, tokens: int | Tensor, top_k: int, real_N: Tensor | None = None) -> Tensor:
    """E times the sum over experts of their share of all choices times their mean probability: 1 where all are alike, E / K at the worst.

    `load_E` counts the choices of all `tokens` tokens of the micro-batch, of which `scores_NE` are this rank's;
    the ranks' losses add up to the whole.
    Where `real_N` is given, only such tokens are among them.

    Source: Switch Transformer, arXiv 2101.03961, section 2.2; megatron-core, `moe_utils.py`, switch_load_balancing_loss_func.
    """
    prob_NE = softmax(scores_NE.float(), dim=1)
    prob_E = (prob_NE if real_N is None else prob_NE * real_N.unsqueeze(1)).sum(0)
    return (prob_E * load_E).sum() * (scores_NE.shape[1] / (top_k * tokens**2))


def updated_bias(bias_E: Tensor, load_E: Tensor, rate: float) -> Tensor:
    """The bias moved by `rate`: up for experts below the mean load, down for those above.

    Source: auxiliary-loss-free load balancing, arXiv 2408.15664, algorithm 1; megatron-core, `moe_utils.py`, get_updated_expert_bias.
    """
    return bias_E + torch.sign(load_E.mean(-1, keepdim=True) - load_E) * rate


def attach(model: Any, config: TrainerConfig, axes: Axes, device: torch.device) -> dict[int, Balance]:
    """Give the routers of a pipeline stage what the configuration asks for; nothing, and no router changes, where it asks for nothing."""
    moe, train = config.moe, config.train
    if not config.model.num_experts or not (moe.aux_loss_coeff or moe.bias_update_rate or moe.load_every):
        return {}
    # Gradients of micro-batches are added up over the step, and this is the mean over micro-batches.
    weight = moe.aux_loss_coeff * train.micro_batch_size / train.global_batch_size
    balances = {int(n): Balance(config.model.num_experts, axes, weight, moe.bias_update_rate > 0, device) for n in model.layers}
    for number, balance in balances.items():
        model.layers[str(number)].moe.router.balance = balance
    return balances


class Balance:
    """What one router counts and what evens its load out; it changes nothing where neither a loss nor a bias is asked for."""

    def __init__(self, num_experts: int, axes: Axes, loss_weight: float, bias: bool, device: torch.device) -> None:
        self.axes, self.loss_weight, self.is_counting = axes, loss_weight, bias
        self.load_E = torch.zeros(num_experts, device=device)
        """How often each expert was chosen on this rank, since it was last set to zero."""
        self.bias_E = torch.zeros(num_experts, device=device) if bias else None

    def route(
        self, scores_NE: Tensor, chosen: tuple[Tensor, Tensor], normalize: bool, real_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The experts (N, K) and probabilities (N, K) to use: those `chosen` by score alone, or with the bias;
        the gradient of the loss hangs on the latter.

        The bias chooses, and does not weigh. Where some tokens are padding, `real_N` tells the others, which alone count.
        """
        by_score_NK, prob_NK = chosen
        expert_NK = by_score_NK
        if self.bias_E is not None:
            all_NE = softmax(scores_NE, dim=1)
            expert_NK = (all_NE.detach() + self.bias_E).topk(by_score_NK.shape[1], dim=1).indices
            prob_NK = all_NE.gather(1, expert_NK)
            prob_NK = prob_NK / prob_NK.sum(1, keepdim=True) if normalize else prob_NK
        # Neither in an evaluation nor a second time, where the forward pass is run again in the backward pass.
        if self.is_counting and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.load_E += _count(expert_NK, self.load_E, real_N)
        if self.loss_weight and torch.is_grad_enabled():
            load_E, tokens, top_k = _count(by_score_NK, self.load_E, real_N), len(scores_NE), by_score_NK.shape[1]
            for axis in (self.axes.cp, *([self.axes.tp] if self.axes.expert_tokens_cut else [])):
                tokens *= axis.size
                axis.all_reduce(load_E)
            tally("balance_losses")
            # How many tokens are real, over all ranks that share the micro-batch, is a number on the device.
            counted = tokens if real_N is None else load_E.sum() / top_k
            prob_NK = _WithLoss.apply(prob_NK, balancing_loss(scores_NE, load_E, counted, top_k, real_N), self.loss_weight)
        return expert_NK, prob_NK


def _count(expert_NK: Tensor, like_E: Tensor, real_N: Tensor | None) -> Tensor:
    flat = expert_NK.flatten()
    ones = like_E.new_ones(()).expand(len(flat)) if real_N is None else real_N.to(like_E.dtype).repeat_interleave(expert_NK.shape[1])
    return torch.zeros_like(like_E).index_add_(0, flat, ones)


class _WithLoss(torch.autograd.Function):
    """A tensor as it is; in the backward pass, `weight` is the gradient of a loss beside it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        return grads[0], torch.full_like(ctx.saved_tensors[0], ctx.weight), None


def load(layers: Mapping[int, Balance], num_layers: int, axes: Axes) -> Tensor:
    """This rank's share of the choices [L, E] of the whole model; the sum over all ranks counts each token once."""
    choices = torch.zeros(num_layers, len(next(iter(layers.values())).load_E), device=next(iter(layers.values())).load_E.device)
    if axes.tp.rank == 0 or axes.expert_tokens_cut:  # other tensor-parallel ranks route the same tokens
        for number, balance in layers.items():
            choices[number] = balance.load_E
    return choices


def reset(layers: Iterable[Balance]) -> None:
    """Count from zero."""
    for balance in layers:
        balance.load_E.zero_()


@torch.no_grad()
def update_biases(layers: Sequence[Balance], rate: float, axes: Axes) -> None:
    """Move the biases by the load of the step over all data-parallel ranks, then count from zero."""
    load_LE = torch.stack([balance.load_E for balance in layers])
    for axis in (axes.dp_cp, *([axes.tp] if axes.expert_tokens_cut else [])):
        axis.all_reduce(load_LE)
    for balance, load_E in zip(layers, load_LE, strict=True):
        assert balance.bias_E is not None
        balance.bias_E.copy_(updated_bias(balance.bias_E, load_E, rate))
    reset(layers)
