"""Shapes of models: the counts that decide which layouts are possible, how much they store and how much they compute."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from playbook.errors import ConfigError

LARGEST = 1 << 30
"""No degree, length or count above this is taken from outside."""

DEEPEST = 1000
"""Layers that a model may be given from outside, so that no estimate takes long."""


@dataclass(frozen=True)
class Mla:
    """Ranks and head sizes of compressed keys and values (multi-head latent attention)."""

    q_rank: int = 1536
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128


@dataclass(frozen=True)
class LinearAttention:
    """Gated delta net layers; every `full_every`-th layer has full attention instead."""

    key_heads: int = 16
    value_heads: int = 32
    head_dim: int = 128
    conv: int = 4
    full_every: int = 4


@dataclass(frozen=True)
class Mamba:
    """State-space layers (Mamba-2): heads of `head_dim` values, and `groups` that share keys and queries of `state` values."""

    heads: int = 64
    head_dim: int = 64
    groups: int = 8
    state: int = 128
    conv: int = 4


@dataclass(frozen=True)
class Vision:
    """A vision tower with its mergers; `deepstack` counts the mergers that feed inner decoder layers."""

    depth: int = 27
    hidden: int = 1152
    ffn: int = 4304
    positions: int = 2304
    patch_values: int = 3 * 2 * 16 * 16
    merge: int = 2
    deepstack: int = 3


@dataclass(frozen=True)
class Shape:
    """A decoder's counts; `kv_heads` equals `heads` where keys and values are compressed instead of grouped (MLA).

    `dense_layers` counts the layers with a plain MLP, which come first; all of them in a model without experts. `tied` models have one
    matrix for embedding and output layer. An MLP that is not `gated` has two matrices instead of three. `attention_bias` is of queries,
    keys
    and values. With a `window`, every `window_every`-th layer has full attention instead (0: none has). `positions` are learned embeddings.
    Experts read and write `latent` values where that is not 0, between two projections. `blocks` has a letter for each layer of a hybrid
    model, whose layers are half as much: `M` Mamba, `*` attention, `E` experts, `-` MLP. A `qk_norm_wide` has a weight for each value of
    all heads.
    """

    layers: int
    heads: int
    kv_heads: int
    experts: int
    source: str
    hidden: int = 0
    vocab: int = 0
    head_dim: int = 128
    ffn: int = 0
    dense_layers: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    qk_norm: bool = False
    qk_norm_wide: bool = False
    attention_gate: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    norms: int = 2
    gated: bool = True
    positions: int = 0
    expert_bias: bool = False
    sinks: bool = False
    window: int = 0
    window_every: int = 2
    tied: bool = False
    mtp: int = 0
    mla: Mla | None = None
    linear: LinearAttention | None = None
    mamba: Mamba | None = None
    latent: int = 0
    blocks: str = ""
    vision: Vision | None = None

    def __hash__(self) -> int:
        """Computed once: a search looks thousands of things up by shape."""
        cached_hash: int | None = self.__dict__.get("_hash")
        if cached_hash is None:
            cached_hash = hash(tuple(getattr(self, f.name) for f in fields(self)))
            self.__dict__["_hash"] = cached_hash
        return cached_hash

    @property
    def up(self) -> int:
        """Matrices of an MLP from the model's width to its own: gate and up projection, or one."""
        return 2 if self.gated else 1

    @property
    def expert_hidden(self) -> int:
        """Values of a token that experts read and write."""
        return self.latent or self.hidden

    def of_depth(self, layers: int) -> Shape:
        """The same model with so many layers; dense ones come first, and a hybrid's pattern goes on or ends."""
        dense = layers if self.dense_layers == self.layers else min(layers, self.dense_layers)
        return replace(self, layers=layers, dense_layers=dense, blocks=(self.blocks * layers)[:layers])

    def of_experts(self, experts: int) -> Shape:
        """The same model with so many experts in a layer; a token goes to as many as before, or to all of them.

        Raises:
            ConfigError: the model has no experts.
        """
        if not self.experts:
            raise ConfigError(f"experts is {experts}, and the model has none; leave it out")
        return replace(self, experts=experts, top_k=min(self.top_k, experts))
