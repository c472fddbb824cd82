"""The Qwen3 decoder, dense or MoE, text or vision-language, as one pipeline stage of any layout.

Suffixes: N tokens of this rank (rows end to end), D hidden size, H query heads, G key/value heads, d head size, E experts,
F expert width, K experts per token, R rows routed to this rank's experts, V visual tokens.
Heads, widths and vocabulary rows are this rank's share.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear
from torch.utils.checkpoint import checkpoint

from playbook_trainer.axes import Axes
from playbook_trainer.config.tree import ModelConfig, VisionConfig
from playbook_trainer.data.batch import Batch, VisionBatch
from playbook_trainer.observe.ranges import range_
from playbook_trainer.torch.model import ops
from playbook_trainer.torch.model.attention import attend
from playbook_trainer.torch.model.balance import Balance
from playbook_trainer.torch.model.graphs import Part
from playbook_trainer.torch.model.offload import Trip
from playbook_trainer.torch.model.ops import Ops
from playbook_trainer.torch.model.recompute import recomputed
from playbook_trainer.torch.model.vision import VisionTower
from playbook_trainer.torch.parallel import context, dispatch, tensor
from playbook_trainer.torch.parallel.comm import copy_to
from playbook_trainer.torch.parallel.tensor import Fold, routed


@dataclass(frozen=True)
class Options:
    """Settings that change how the decoder computes (kernels, parallelism, recompute), not what it computes."""

    axes: Axes = field(default_factory=Axes)
    dispatcher: str = "alltoall"
    grouped: bool = False
    recompute: frozenset[str] = frozenset()
    """Names of `train.recompute_modules`, or `full` for whole layers."""
    linear: Callable[[Tensor, Tensor], Tensor] = linear
    """The product of linear layers; norms, router, embedding and head have their own."""
    expert_product: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """(rows, matrices, last row + 1 of each expert) to each row times its expert's matrix; None takes `grouped` or the loop."""
    offload: bool = False
    """What a layer saves for its backward pass waits in host memory."""
    graphs: frozenset[str] = frozenset()
    """Names of `train.cuda_graphs`."""
    attention: str = "auto"
    router_wide: bool = True
    """Route in float32, whatever the precision around it."""
    fused_permutation: bool = False
    fused_vision: bool = False
    """The vision tower's rotary embedding is a Triton kernel."""
    early_probs: bool = False
    """Rows meet their probabilities in the experts' activation instead of in the combine."""
    loss_chunk: int = tensor.CHUNK
    loss_rows: tensor.LossRows = tensor.plain_rows
    ops: Ops = field(default_factory=Ops)
    vision_always: bool = False
    """Run the vision tower for micro-batches without images too: under FSDP every rank must gather its weights the same number of times,
    and in every layout the tower's gradient is then zero, not absent, so that the optimizer treats it alike."""
    chunks: tuple[range, ...] | None = None
    """The layers of this pipeline stage, one stretch for each of its model chunks; None means all layers in one."""


@dataclass
class Sequence:
    """The inputs that all layers share in a micro-batch: rotary tables and document borders."""

    cos_Nd: Tensor
    sin_Nd: Tensor
    batch: Batch
    """Borders of documents, and under context parallelism the plan of attention."""
    real_N: Tensor | None = None
    """Which of the tokens that this rank routes are real, where some are padding and experts are balanced."""


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale, computed in float32."""

    def __init__(self, size: int, eps: float, options: Options | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.norm = (options or Options()).ops.norm
        self.again = options is not None and "layernorm" in options.recompute

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return self.norm(x, self.scale(x.dtype), self.eps)

    def scale(self, dtype: torch.dtype, weight: Tensor | None = None) -> Tensor:
        """The weight in the precision of the computation."""
        return (self.weight if weight is None else weight).to(dtype)

    def kept_until_read(self, x: Tensor) -> AbstractContextManager[Tensor]:
        """As `forward`; where layernorm is recomputed, what reads the result inside the block does not keep it."""
        return recomputed(self.again, partial(self.norm, eps=self.eps), x, self.scale(x.dtype))


class Linear(nn.Module):
    """A linear layer without bias; `options.linear` multiplies."""

    def __init__(self, size_in: int, size_out: int, options: Options) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in))
        self.product = options.linear

    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight.T`."""
        return self.product(x, self.weight)


class Attention(nn.Module):
    """Grouped-query attention with per-head norms of queries and keys."""

    def __init__(self, config: ModelConfig, options: Options) -> None:
        super().__init__()
        self.axes, self.backend = options.axes, options.attention
        self.norm_rotate, self.again = options.ops.norm_rotate, "core_attn" in options.recompute
        tp, hd = options.axes.tp.size, config.head_dim
        heads, kv_heads = config.num_heads // tp, config.num_kv_heads // tp
        self.head_dim = hd
        self.q_proj = Linear(config.hidden_size, heads * hd, options)
        self.k_proj = Linear(config.hidden_size, kv_heads * hd, options)
        self.v_proj = Linear(config.hidden_size, kv_heads * hd, options)
        self.o_proj = Linear(heads * hd, config.hidden_size, options)
        self.q_norm = RMSNorm(hd, config.rms_norm_eps)
        self.k_norm = RMSNorm(hd, config.rms_norm_eps)
        self.part = Part(self.project) if "attn" in options.graphs else self.project

    def forward(self, x_ND: Tensor, seq: Sequence) -> Tensor:
        """Causal attention within each document."""
        with range_("attention") as r:
            with tensor.entered(r.enter(x_ND), self.axes) as all_ND:
                q_NHd, k_NGd, v_NGd = self.part(all_ND, seq.cos_Nd, seq.sin_Nd, *self.part_weights())
            with recomputed(self.again, partial(self.core, seq=seq), q_NHd, k_NGd, v_NGd) as out_NHd:
                out_ND = self.o_proj(out_NHd.flatten(1))
            return r.exit(tensor.leave(out_ND, self.axes))

    def part_weights(self) -> list[Tensor]:
        """The weights that `project` takes as arguments."""
        return [m.weight for m in (self.q_proj, self.k_proj, self.v_proj, self.q_norm, self.k_norm)]

    def project(self, x_ND: Tensor, cos_Nd: Tensor, sin_Nd: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (N, H, d), keys and values (N, G, d): normalised by head and rotated."""
        *matrices, q_scale, k_scale = weights
        q_NHd, k_NGd, v_NGd = (self.q_proj.product(x_ND, w).unflatten(1, (-1, self.head_dim)) for w in matrices)
        q_NHd, k_NGd = (
            self.norm_rotate(x, n.scale(x.dtype, w), cos_Nd, sin_Nd, n.eps)
            for x, n, w in ((q_NHd, self.q_norm, q_scale), (k_NGd, self.k_norm, k_scale))
        )
        return q_NHd, k_NGd, v_NGd

    def core(self, q_NHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, *, seq: Sequence) -> Tensor:
        """Attention of queries over keys and values: (N, H, d)."""
        if self.axes.cp.size > 1:
            return context.attend_across(q_NHd, k_NGd, v_NGd, seq.batch, self.axes.cp, self.backend)
        cu, top = seq.batch.cu_seqlens, seq.batch.max_seqlen
        return attend(q_NHd, k_NGd, v_NGd, cu, cu, top, top, causal=True, backend=self.backend)


class Mlp(nn.Module):
    """The dense SwiGLU layer; w13 holds gate rows, then up rows."""

    def __init__(self, config: ModelConfig, options: Options) -> None:
        super().__init__()
        self.axes, self.swiglu = options.axes, options.ops.swiglu
        width = config.ffn_size // self.axes.tp.size
        self.w13 = Linear(config.hidden_size, 2 * width, options)
        self.w2 = Linear(width, config.hidden_size, options)

    def forward(self, x_ND: Tensor) -> Tensor:
        """silu(gate) * up, projected back."""
        with range_("mlp") as r:
            with tensor.entered(r.enter(x_ND), self.axes) as all_ND:
                h_NF = self.w13(all_ND)
            return r.exit(tensor.leave(self.w2(self.swiglu(h_NF)), self.axes))


class Router(nn.Module):
    """Top-k routing, by default in float32, whatever the precision around it."""

    def __init__(self, config: ModelConfig, options: Options) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.top_k, self.normalize = config.top_k, config.norm_topk_prob
        self.product = ops.wide_linear if options.router_wide else linear
        self.route = options.ops.route
        self.part = Part(self.choose) if "moe_router" in options.graphs else self.choose
        self.balance: Balance | None = None

    def forward(self, x_ND: Tensor, real_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Experts (N, K) and their probabilities (N, K), float32 unless the router is narrow."""
        with range_("router") as r:
            if self.balance is None:
                expert_NK, prob_NK = self.part(r.enter(x_ND), *self.part_weights())
            else:
                scores_NE = self.product(r.enter(x_ND), self.weight)
                expert_NK, prob_NK = self.balance.route(
                    scores_NE, self.route(scores_NE, self.top_k, self.normalize), self.normalize, real_N
                )
            return expert_NK, r.exit(prob_NK)

    def part_weights(self) -> list[Tensor]:
        """The weights that `choose` takes as arguments."""
        return [self.weight]

    def choose(self, x_ND: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the scores and choose each token's top-k experts."""
        return self.route(self.product(x_ND, weight), self.top_k, self.normalize)


def grouped_product(rows_RD: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
    """Each expert's rows times its matrix, in one call: (R, F)."""
    return grouped_mm(rows_RD, weight_EFD.transpose(1, 2), offs=ends_E)


class Experts(nn.Module):
    """This rank's experts, stacked; w13 holds gate rows, then up rows."""

    def __init__(self, config: ModelConfig, options: Options) -> None:
        super().__init__()
        local_experts = config.num_experts // options.axes.ep.size
        width = config.expert_ffn_size // options.axes.etp.size
        self.w13 = nn.Parameter(torch.empty(local_experts, 2 * width, config.hidden_size))
        self.w2 = nn.Parameter(torch.empty(local_experts, config.hidden_size, width))
        self.product = options.expert_product or (grouped_product if options.grouped else None)
        self.ops, self.again = options.ops, "moe_act" in options.recompute

    def forward(self, rows_RD: Tensor, counts: Tensor, prob_R: Tensor | None = None) -> Tensor:
        """Each expert's SwiGLU on its own rows, times the rows' probabilities where they are given;
        `counts` gives the rows per expert, in order.
        """
        with range_("experts") as r:
            rows_RD = r.enter(rows_RD)
            if self.product is None:
                return r.exit(self._loop(rows_RD, counts, prob_R))
            return r.exit(self._grouped(rows_RD, counts, prob_R, self.product))

    def activated(self, h_RF: Tensor, prob_R: Tensor | None) -> AbstractContextManager[Tensor]:
        """The activated hidden rows, input of the second product; recomputed in the backward pass if `moe_act` is."""
        if prob_R is None:
            return recomputed(self.again, self.ops.swiglu, h_RF)
        return recomputed(self.again, self.ops.weighted_swiglu, h_RF, prob_R)

    def _grouped(
        self, rows_RD: Tensor, counts: Tensor, prob_R: Tensor | None, product: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        h_RF = product(rows_RD, self.w13.to(rows_RD.dtype), ends)
        with self.activated(h_RF, prob_R) as act_RF:
            return product(act_RF, self.w2.to(rows_RD.dtype), ends)

    def _loop(self, rows_RD: Tensor, counts: Tensor, prob_R: Tensor | None) -> Tensor:
        # Not by index: the gradient of each index would be a stack of its own, zeros but for one expert, to be added to the others.
        w13, w2 = self.w13.to(rows_RD.dtype).unbind(), self.w2.to(rows_RD.dtype).unbind()
        sizes = counts.tolist()
        h_RF = torch.cat([linear(rows, w) for rows, w in zip(rows_RD.split(sizes), w13, strict=True)])
        # Of all rows at once: compiled code would be compiled again for an expert with one row, and for one with none.
        with self.activated(h_RF, prob_R) as act_RF:
            return torch.cat([linear(rows, w) for rows, w in zip(act_RF.split(sizes), w2, strict=True)])


class Moe(nn.Module):
    """Router, dispatch, experts, combine."""

    def __init__(self, config: ModelConfig, options: Options) -> None:
        super().__init__()
        self.router = Router(config, options)
        self.experts = Experts(config, options)
        self.fold = Fold(options.axes)
        wrap = Part if "moe_preprocess" in options.graphs else None
        self.dispatcher = dispatch.make(
            options.dispatcher,
            config.num_experts,
            options.axes.ep,
            fused=options.fused_permutation,
            early=options.early_probs,
            wrap_sort=wrap,
        )

    def forward(self, x_ND: Tensor, real_N: Tensor | None = None) -> Tensor:
        """The weighted sum of each token's experts."""
        x_ND = self.fold.own(x_ND)
        expert_NK, prob_NK = self.router(x_ND, real_N)
        with range_("dispatch") as r:
            rows_RD, counts, route = self.dispatcher.dispatch(*self.fold.gather(r.enter(x_ND), expert_NK, prob_NK))
            rows_RD = r.exit(rows_RD)
        out_RD = self.experts(rows_RD, counts, route.prob_R if self.dispatcher.early else None)
        with range_("combine") as r:
            return r.exit(self.fold.reduce(self.dispatcher.combine(r.enter(out_RD), route)))


class Layer(nn.Module):
    """Attention and MoE (or dense MLP), each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, options: Options) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, options=options)
        self.attn = Attention(config, options)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, options=options)
        self.again = ("moe" if config.num_experts else "mlp") in options.recompute
        if config.num_experts:
            self.moe = Moe(config, options)
        else:
            self.mlp = Mlp(config, options)

    def forward(self, x_ND: Tensor, seq: Sequence) -> Tensor:
        """One decoder layer."""
        with self.attn_norm.kept_until_read(x_ND) as h_ND:
            x_ND = x_ND + self.attn(h_ND, seq)
        moe: Any = getattr(self, "moe", None)
        mlp = self.mlp if moe is None else partial(moe, real_N=seq.real_N)
        with self.mlp_norm.kept_until_read(x_ND) as h_ND:
            return x_ND + (checkpoint(mlp, h_ND, use_reentrant=False) if self.again else mlp(h_ND))


class VocabWeight(nn.Module):
    """A (vocabulary, hidden) matrix; with tensor parallelism, this rank's rows of it.

    What is done with it is the caller's argument, so that FSDP gathers the matrix for exactly that call.
    """

    def __init__(self, config: ModelConfig, options: Options) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size // options.axes.tp.size, config.hidden_size))

    def forward(self, use: Any, *args: Any) -> Tensor:
        """`use(weight, *args)`."""
        return use(self.weight, *args)


class Decoder(nn.Module):
    """One pipeline stage: embedding (first), its layers, norm and head (last)."""

    def __init__(self, config: ModelConfig, options: Options | None = None) -> None:
        """Build the layers of this rank's chunks; the embedding and the vision tower on the first stage, norm and head on the last."""
        super().__init__()
        self.config, self.options = config, options or Options()
        self.activation_dtype = torch.float32
        axes = self.options.axes
        self.chunks = self.options.chunks or (range(config.num_layers),)
        # Tied, the matrix has one name on every stage that holds it; on one stage it is one parameter.
        if axes.is_first_stage or (config.tie_word_embeddings and axes.is_last_stage):
            self.embed = VocabWeight(config, self.options)
        if axes.is_first_stage and config.vision is not None:
            self.vision = VisionTower(
                config.vision,
                config.hidden_size,
                recompute="vision" in self.options.recompute,
                attention=self.options.attention,
                fused=self.options.fused_vision,
            )
        self.layers = nn.ModuleDict({str(i): Layer(config, self.options) for stretch in self.chunks for i in stretch})
        if axes.is_last_stage:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            if not config.tie_word_embeddings:
                self.head = VocabWeight(config, self.options)

    @property
    def output(self) -> VocabWeight:
        """The output layer's matrix: the embedding's, where the two are tied."""
        return self.embed if self.config.tie_word_embeddings else self.head

    def forward(self, batch: Batch, x_ND: Tensor | None = None, *, chunk: int = 0, logits: bool = False) -> Tensor:
        """The summed loss (last chunk of the last stage), or the hidden states for the next stage.

        Shapes: x (N, D) from the previous stage, None for the model's first chunk; logits (N, vocabulary) if asked for, on one stage only.
        """
        axes = self.options.axes
        dtype = self.activation_dtype
        visual: list[Tensor] = []
        index = batch.vision.visual_index_V if batch.vision is not None else None
        if x_ND is None:
            with range_("embedding") as r:
                x_ND = r.exit(self.embed(lambda w, t: tensor.embed(t, r.until(w), axes), batch.tokens_N).to(dtype))
            if self.config.vision is not None and batch.vision is not None and index is not None:
                image_VD, *visual = self.share(batch.vision, self.vision(batch.vision, dtype))
                x_ND = x_ND.index_copy(0, index, image_VD.to(dtype))
            elif self.config.vision is not None and self.options.vision_always:
                image_VD, unused = self.vision(blank_image(self.config.vision, x_ND.device), dtype)
                x_ND = x_ND + 0 * sum(t.sum() for t in (image_VD, *unused))
        with range_("decoder") as r:
            x_ND = r.enter(x_ND)
            seq, whole = self.sequence(batch, dtype), "full" in self.options.recompute
            trip = Trip(x_ND.device, keep=(seq.cos_Nd, seq.sin_Nd)) if self.options.offload else None
            for number in self.chunks[chunk]:
                layer = self.layers[str(number)]
                run = partial(checkpoint, layer, use_reentrant=False) if whole else layer
                # What the last layer saves is wanted at once.
                stays = number == self.config.num_layers - 1
                x_ND = run(x_ND, seq) if trip is None else trip.through(layer, run, x_ND, seq, stays=stays)
                if number < len(visual) and index is not None:
                    x_ND = x_ND.index_add(0, index, visual[number].to(dtype))
            if trip is not None:
                trip.end(x_ND)
            x_ND = r.exit(x_ND)
        if not (axes.is_last_stage and chunk == len(self.chunks) - 1):
            return x_ND
        x_ND = self.norm(x_ND)
        if logits:
            return self.output(lambda w, x: x @ w.t(), tensor.enter(x_ND, axes))
        with range_("loss") as r:
            size, rows = self.options.loss_chunk, self.options.loss_rows
            use = lambda w, x: tensor.linear_cross_entropy(x, w.to(dtype), batch.labels_N, axes.tp, size, rows)  # noqa: E731
            return r.exit(self.output(use, tensor.enter(r.enter(x_ND), axes)))

    def share(self, vision: VisionBatch, encoded: tuple[Tensor, list[Tensor]]) -> list[Tensor]:
        """The features of this rank's visual tokens: for the input, then for each DeepStack layer."""
        visual = [encoded[0], *encoded[1]]
        if self.options.axes.sequence_parallel:
            # Each tp rank has encoded all images and uses some of the tokens: with the sum of the gradients all go on alike.
            visual = list(copy_to(torch.stack(visual), self.options.axes.tp).unbind())
        return visual if vision.visual_take_V is None else [v_VD.index_select(0, vision.visual_take_V) for v_VD in visual]

    def sequence(self, batch: Batch, dtype: torch.dtype) -> Sequence:
        """Rotary tables and borders of a micro-batch."""
        angle = rotary_angles(batch.positions, self.config)
        cos, sin = angle.cos(), angle.sin()
        return Sequence(cos.to(dtype), sin.to(dtype), batch, routed(batch.real_N, self.options.axes))


def blank_image(config: VisionConfig, device: torch.device) -> VisionBatch:
    """The smallest image there is, for a tower that has to run without one; its output is multiplied by zero."""
    patches = config.spatial_merge_size**2
    values = config.in_channels * config.temporal_patch_size * config.patch_size**2
    return VisionBatch(
        pixels_PC=torch.zeros(patches, values, device=device),
        cu_seqlens=torch.tensor([0, patches], dtype=torch.int32, device=device),
        max_seqlen=patches,
        rotary_P2=torch.zeros(patches, 2, dtype=torch.int64, device=device),
        pos_index_4P=torch.zeros(4, patches, dtype=torch.int64, device=device),
        pos_weight_4P=torch.zeros(4, patches, device=device),
        visual_index_V=torch.zeros(0, dtype=torch.int64, device=device),
    )


def rotary_angles(positions: Tensor, config: ModelConfig) -> Tensor:
    """The angle by which each pair of features turns, (N, d) in float32, both halves alike.

    With three rows of positions (time, height, width), frequencies are interleaved t h w t h w ... as far as `mrope_section` gives height
    and width their share, and belong to time beyond.

    Source: RoPE, arXiv 2104.09864; interleaved M-RoPE, Qwen3-VL technical report, arXiv 2511.21631, section 2.1.
    """
    half = config.head_dim // 2
    steps = torch.arange(half, device=positions.device, dtype=torch.float32)
    freq = config.rope_theta ** (-2 * steps / config.head_dim)
    if positions.dim() == 1:
        angle = positions.float().unsqueeze(1) * freq
    else:
        angle_3N = positions.float().unsqueeze(2) * freq
        angle = angle_3N[0].clone()
        for axis in (1, 2):
            stop = 3 * (config.mrope_section or [0, 0, 0])[axis]
            angle[:, axis:stop:3] = angle_3N[axis, :, axis:stop:3]
    return torch.cat([angle, angle], dim=1)
