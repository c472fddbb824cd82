"""From the attention grid to the expert grid and back, around the dispatcher.

Every rank of an etp group computes its own columns of the same rows, so all of them need the same tokens, and no token may reach two etp
groups. Three cases:

    in common   etp = tp, tokens not cut: the tp ranks have the same tokens already, and the partial sums are all-reduced
    cut         sequence parallelism: tokens are gathered over etp, the partial sums reduce-scattered
    to be cut   etp differs from tp, tokens not cut: each tp rank takes its share first, and the shares are joined again at the end

Gathering before the dispatch moves each token once per etp rank; gathering the routed rows, as Megatron-LM does, would move top-k times that.
Suffixes: n tokens of this rank on the attention grid, N of its etp group, K experts per token, D hidden size.
"""

from __future__ import annotations

from torch import Tensor

from playbook_trainer.axes import Axes
from playbook_trainer.torch.parallel.comm import all_gather, copy_to, gather_plain, join, reduce_from, reduce_scatter, split


class Fold:
    """Parallel folding: redistributes tokens between the attention layout (tp) and the expert layout (etp) around a MoE layer."""

    def __init__(self, axes: Axes) -> None:
        self.tp, self.etp = axes.tp, axes.etp
        self.cut = axes.expert_tokens_cut
        self.splits = self.cut and not axes.sequence_parallel

    def own(self, x_nD: Tensor) -> Tensor:
        """The tokens that this rank routes."""
        return split(x_nD, self.tp) if self.splits else x_nD

    def gather(self, x_nD: Tensor, expert_nK: Tensor, prob_nK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of this rank's etp group, with their experts and probabilities."""
        if not self._gathers:
            return copy_to(x_nD, self.etp), expert_nK, copy_to(prob_nK, self.etp)
        return all_gather(x_nD, self.etp), gather_plain(expert_nK, self.etp), all_gather(prob_nK, self.etp)

    def reduce(self, y_ND: Tensor) -> Tensor:
        """The sums over etp of this rank's tokens, from its columns' part of the sums of the whole group's."""
        y_nD = reduce_scatter(y_ND, self.etp) if self._gathers else reduce_from(y_ND, self.etp)
        return join(y_nD, self.tp) if self.splits else y_nD

    @property
    def _gathers(self) -> bool:
        # At tp 1, or with tokens cut, the ranks of an etp group hold different tokens.
        return self.cut or self.tp.size == 1
