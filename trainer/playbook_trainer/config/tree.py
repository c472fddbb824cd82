"""The trainer's configuration: one YAML tree, mirrored by these models. Torch-free, so that the harness can read it.

Precedence: defaults < file < `key.path=value` overrides. Unknown keys are errors. `model` may be the name of a file in
`trainer/configs/models/`, a folder with the config.json of a published model, or a mapping with `preset` (such a name) and fields that
replace the preset's.

Each key has a neutral value: the one with which the trainer does what it did before the key existed. Hashes of configurations leave out
keys that have their neutral value, so a new key changes no stored hash. `playbook schemas export` writes the default of a key that is new
to the table, and never changes a value there, whatever the key's default becomes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache, lru_cache
from math import gcd
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from playbook.errors import ConfigError, FileError, Finding
from playbook.paths import data_root, shipped
from playbook.yaml_files import Positions, Strict, did_you_mean, models_in, parse, parse_scalar, read, validate
from playbook_trainer.config.huggingface import fields_of
from playbook_trainer.config.sections import FREEZABLE, GRAPH_PARTS, RECOMPUTE_MODULES, MegatronConfig, among
from playbook_trainer.config.sections import DataConfig as DataConfig
from playbook_trainer.config.sections import ModelConfig as ModelConfig
from playbook_trainer.config.sections import VisionConfig as VisionConfig

TORCH_ONLY: JsonDict = {"backend": "torch"}
"""Marks the field of a key that the megatron backend does not read, and therefore refuses unless it is neutral or auto."""
Switch = Literal["auto", True, False]
"""A fast path, or the plain one that is its reference. auto: fast where the device,
the shapes and the layout allow it (`config/automatic.py`)."""


class ParallelConfig(Strict):
    """The layout: two grids over the ranks of a pipeline stage.

    world = tp x cp x dp x pp for attention and world = etp x ep x edp x pp for experts; dp and edp are the ranks that are left.
    """

    tp: int = Field(default=1, gt=0)
    pp: int = Field(default=1, gt=0)
    vpp: int = Field(default=1, gt=0)
    """Chunks of the model on each pipeline stage; more than one makes the schedule interleaved 1F1B."""
    cp: int = Field(default=1, gt=0)
    ep: int = Field(default=1, gt=0)
    etp: int | None = Field(default=None, gt=0)
    """Ranks that share the width of each expert; None takes tp."""
    sequence_parallel: bool = False
    """Cut the activations outside tensor-parallel regions over tp, along the tokens; no effect at tp 1."""
    cp_comm: Literal["allgather", "ring", "ulysses"] = Field(default="allgather", json_schema_extra=TORCH_ONLY)
    """How attention reaches the tokens of other context ranks: all keys and values gathered; blocks of them from rank to rank, overlapped
    with the computation, only where a document needs them; or an all-to-all that exchanges tokens for heads."""
    fsdp: bool = Field(default=True, json_schema_extra=TORCH_ONLY)
    """Shard parameters, gradients and optimizer state over dp x cp (FSDP2); without it, every rank of dp x cp holds a copy."""
    dp_replicate: int = Field(default=1, gt=0)
    """Copies of the model among the data-parallel ranks; parameters are sharded inside each copy (HSDP)."""
    reshard_after_forward: bool = Field(default=True, json_schema_extra=TORCH_ONLY)
    """Free gathered parameters after the forward pass and gather them again in the backward pass (ZeRO-3)."""
    reduce_dtype: Literal["fp32", "bf16"] = Field(default="fp32", json_schema_extra=TORCH_ONLY)
    """Precision in which FSDP adds up the ranks' gradients; they are kept in float32 either way,
    unless optimizer.master_weights is remainder."""
    comm_sms: int = Field(default=0, ge=0, le=64, json_schema_extra=TORCH_ONLY)
    """Multiprocessors for collectives: NCCL takes at most so many, and matrix products leave them alone. 0: both take what they can get,
    and a product that finds multiprocessors taken by a collective runs in two waves, at up to twice the time. Of the torch backend;
    needs a GPU."""
    pipeline_layout: list[int] | None = None
    """Decoder layers of each of the pp x vpp chunks, in the order in which a token passes them, where they are not equal; of the megatron
    backend. The embedding lies in the first chunk and the output layer in the last, and both chunks may be without layers."""

    def copies(self, dp_cp: int, edp: int) -> tuple[int, int]:
        """How many copies there are of the dense parameters among dp x cp ranks, and of an expert's among edp."""
        return (self.dp_replicate, gcd(self.dp_replicate, edp)) if self.fsdp else (dp_cp, edp)


class MoeConfig(Strict):
    """Mixture-of-experts settings: dispatch, expert products, router."""

    dispatcher: Literal["allgather", "alltoall", "dedup", "deepep", "hybridep"] = "alltoall"
    """allgather: every rank gets every token. alltoall: each token travels once for each of its experts. dedup: once for each rank that
    holds one of them, and comes back as one sum. deepep, hybridep: of the megatron backend."""
    experts: Literal["auto", "loop", "grouped"] = "auto"
    """Expert matrix products: one call per expert, or one grouped call; auto takes grouped on a GPU."""
    router_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of the router's matrix product and softmax."""
    aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Weight of the loss that balances the experts' load (Switch Transformer's), for each layer and micro-batch;
    it is not part of the loss reported."""
    bias_update_rate: float = Field(default=0.0, ge=0, le=1, json_schema_extra=TORCH_ONLY)
    """Balance without a loss: a bias of each expert, added to the probabilities where experts are chosen and not where they are weighed,
    moves by this much after each step, towards an even load. The megatron backend has model.router_bias instead."""
    load_every: int = Field(default=0, ge=0, json_schema_extra=TORCH_ONLY)
    """Steps between measurements of the experts' load, which go into the step's line of the metrics; 0 means never."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """Tokens that an expert takes, over their even share; what is beyond is dropped. None drops nothing. Of the megatron backend."""
    apply_probs_on: Literal["auto", "output", "activation"] = Field(default="auto", json_schema_extra=TORCH_ONLY)
    """Where an expert's rows are multiplied by their routing probabilities: after its second product (output), or before it (activation),
    where the outputs of experts need not be kept for the backward pass. The dispatcher dedup takes output alone. auto takes activation
    beside train.fused_activation. Megatron-core always takes activation."""
    fused_permutation: Switch = Field(default="auto", json_schema_extra=TORCH_ONLY)
    """Sort rows by expert, and sum each token's rows times their probabilities, in one Triton kernel each instead of gathers and sums;
    needs a GPU."""
    fused_router: Switch = Field(default="auto", json_schema_extra=TORCH_ONLY)
    """Softmax over the experts, choice of the best and division by their sum in one Triton kernel, their gradient in another; needs a GPU,
    and scores in float32."""


class InitConfig(Strict):
    """The source of the initial weights."""

    weights: str | None = None
    """A folder as Hugging Face transformers saves it (config.json and safetensors), to finetune from; None draws them from the seed."""


class OptimizerConfig(Strict):
    """AdamW with linear warm-up, then a schedule of the learning rate."""

    lr: float = Field(default=3e-4, ge=0)
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default_factory=lambda: [0.9, 0.95], min_length=2, max_length=2)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """cosine, linear: decay from the end of the warm-up to the last step, to min_lr_ratio of the rate. wsd: constant, then linear decay
    over the last decay_ratio of the steps (warm-up, stable, decay)."""
    decay_ratio: float = Field(default=0.2, gt=0, le=1)
    """Of schedule wsd."""
    warmup_steps: int = Field(default=2, ge=0)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    moments_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which both moments are kept; the update is computed in float32, on float32 master weights, either way."""
    master_weights: Literal["auto", "fp32", "remainder"] = Field(default="auto", json_schema_extra=TORCH_ONLY)
    """fp32: shards are float32 master weights, cast for each gather. remainder: shards are bf16 weights, and the optimizer holds the 16
    bits that complete each to its float32 master weight (Megatron's store_param_remainders); what bf16 rounds away of frozen ones waits on
    the host. Gathers and reductions then cast nothing, and gradients stay in 16 bits, or in float32 where a step adds to them after the
    reduction. Updates are bit-identical to fp32 with parallel.reduce_dtype bf16, which remainder needs where there are several ranks, as it
    needs train.dtype bf16; auto takes it where that is so, beside optimizer.fused."""
    fused: Switch = Field(default="auto", json_schema_extra=TORCH_ONLY)
    """Clipping and update in one Triton kernel per parameter; needs a GPU, and the state on it."""


_FP8_MODULES = ("linear", "experts")


class PrecisionConfig(Strict):
    """Matrix products in 8 bits. Router, norms, embedding, head, vision tower and all weight gradients keep their precision."""

    fp8: Literal["none", "rowwise", "blockwise", "tensorwise", "delayed", "mxfp8", "nvfp4"] = "none"
    """rowwise: a scale per token and per output feature. blockwise: per 128 values of a token and per 128 x 128 of a weight. Off the GPU,
    the same values are multiplied in float32. The others belong to other hardware or to the megatron backend."""
    fp8_modules: Annotated[list[str], among(_FP8_MODULES)] = Field(default_factory=lambda: list(_FP8_MODULES))
    """linear: projections of attention and dense MLPs. experts: their two products."""


class OffloadConfig(Strict):
    """Offload of activations and optimizer state to host memory."""

    activations: bool = False
    """What each decoder layer but the last saves for its backward pass; copied beside the computation, layer by layer, there and back."""
    optimizer: bool = False
    """Master weights, gradients and moments, all in float32, by FSDP2's CPUOffloadPolicy: each gather copies this rank's shard to the GPU,
    each reduction copies the gradient back, and AdamW runs on the host's cores."""


class CompileConfig(Strict):
    """torch.compile, per region. auto leaves all of them out: beside the Triton kernels no step got shorter,
    and compiling takes seconds.
    """

    vision: Switch = "auto"
    decoder: Switch = Field(default="auto", json_schema_extra=TORCH_ONLY)
    """Norms, rotary embedding, router and expert activation of each layer; not the matrix products and collectives between them."""
    loss: Switch = Field(default="auto", json_schema_extra=TORCH_ONLY)
    """The softmax of the loss, from logits to their gradient."""
    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    dynamic: Literal["auto", "static", "marked"] = "auto"
    """auto: torch's default, dynamic from the second shape on. static: every new shape compiles anew. marked: dynamic from the start."""


class TrainConfig(Strict):
    """The training loop: steps, batch sizes, precision, recompute, kernels."""

    steps: int = Field(default=20, gt=0)
    epochs: float | None = Field(default=None, gt=0, le=10_000)
    """Passes over the training data, instead of `steps`, which are then counted before the run:
    until every sample has been read so often."""
    warmup_steps: int = Field(default=3, ge=0)
    """Steps before the timed window. They train, but are not timed."""
    micro_batch_size: int = Field(default=1, gt=0, le=2**20)
    """Rows of seq_len tokens per rank and micro-batch."""
    global_batch_size: int = Field(default=2, gt=0, le=2**20)
    """Rows per optimizer step over all data-parallel ranks."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    freeze: Annotated[list[str], among(FREEZABLE)] = Field(default_factory=list)
    """Parts of a vision-language model that keep their weights: vision (the tower), projector (its mergers),
    language_model (all the rest)."""
    cuda_graphs: Annotated[list[str], among(GRAPH_PARTS)] = Field(default_factory=list)
    """Parts of each decoder layer that run as one CUDA graph. attn: projections, head norms and rotary embedding, without attention itself.
    moe_router: from the router's product to the chosen experts. moe_preprocess: the order of rows by expert."""
    recompute: Literal["none", "selective", "full"] = "none"
    """selective: what `recompute_modules` names. full: each layer, from its input."""
    recompute_modules: Annotated[list[str], among(RECOMPUTE_MODULES)] = Field(default_factory=list)
    """layernorm and moe_act are not kept for the matrix product that reads them, but made again; core_attn likewise, from queries, keys and
    values; mlp, moe and vision (its blocks) are run again whole."""
    attention: Literal["auto", "plain", "flash", "cudnn"] = "auto"
    """auto: plain off the GPU, flash before Hopper; else cuDNN, for documents of unequal lengths too where Transformer Engine is installed
    and a micro-batch has 16,384 tokens."""
    loss_chunk: int = Field(default=4096, gt=0, le=2**31, json_schema_extra=TORCH_ONLY)
    """Tokens whose logits exist at once."""
    fused_loss: Switch = Field(default="auto", json_schema_extra=TORCH_ONLY)
    """Softmax, loss and gradient of the logits in one Triton kernel, in place on 16-bit logits; needs a GPU."""
    fused_activation: Switch = Field(default="auto", json_schema_extra=TORCH_ONLY)
    """SwiGLU and its gradient in one Triton kernel each; needs a GPU."""
    fused_norms: Switch = Field(default="auto", json_schema_extra=TORCH_ONLY)
    """The decoder's norms, its per-head norms with the rotary embedding, and the vision tower's rotary embedding, in one Triton kernel
    each, their gradients likewise; needs a GPU."""
    compile: CompileConfig = Field(default_factory=CompileConfig)
    deterministic: bool = False
    log_every: int = Field(default=1, gt=0, le=10_000)
    """Steps between reads of the loss from the device; each read waits for the device."""
    on_nan: Literal["stop", "continue", "skip"] = "stop"
    """After a loss or gradient norm that is not finite: end the run; go on; or leave out the update on every rank (skip), which waits for
    the device in every step, and ends the run after ten such steps in a row. A state that is not finite is never saved."""
    hang_timeout_s: float | None = Field(default=540.0, gt=0)
    """Seconds without a step (compilation and evaluation included, writing checkpoints not) after which a rank prints the stacks of its
    threads and ends.
    With `log_every`, the host waits for the device only that often. Less than NCCL's own ten minutes, whose end says less.
    None watches nothing."""
    straggler_every: int = Field(default=100, ge=0)
    """Steps between comparisons of the time that each rank spends at its own work; 0 means never.
    The step compared waits for the device."""
    receipt: bool = True
    """After the timed window, one observed step that records collectives, saved activations and ranges (activation proof)."""


class EvalConfig(Strict):
    """Evaluation on held-out samples."""

    every: int = Field(default=0, ge=0)
    """Optimizer steps between evaluations; 0 means never."""
    batches: int = Field(default=2, gt=0)
    path: str | None = None
    """Data to evaluate on, in the layout of `data.path`; all of both is then used. None holds out every tenth sample of `data.path`."""


class CheckpointConfig(Strict):
    """Saving and resuming. A checkpoint may be resumed in another layout and by another number of ranks."""

    dir: str | None = None
    every: int = Field(default=0, ge=0)
    """Optimizer steps between checkpoints; 0 means none but the one that a signal asks for."""
    keep: int = Field(default=2, gt=0)
    """Complete checkpoints that stay; older ones are removed."""
    keep_best: bool = False
    """Save after each evaluation with the lowest loss so far, and keep that checkpoint beside the newest ones;
    `dir`/best is a link to it."""
    async_save: bool = True
    """Write in the background, from a copy in host memory; training waits for the copy only. The megatron backend always waits."""
    resume: bool = True
    """Continue from the newest complete checkpoint in `dir`, if there is one. Without it, `dir` must hold none."""
    export: str | None = None
    """A new folder for the weights after the last step, as Hugging Face transformers loads them."""
    export_dtype: Literal["auto", "fp32", "bf16", "source"] = "auto"
    """Precision of exported weights. auto: as they are held, on the torch backend float32 master weights. source:
    that of each tensor in `init.weights`."""


class TrackerConfig(Strict):
    """Experiment trackers besides the run's own files. Each gets the whole resolved configuration."""

    tensorboard: bool = False
    """Event files in `output`/tensorboard."""
    wandb: bool = False
    """Weights & Biases."""
    project: str = "playbook"
    name: str | None = None
    """The run's name in Weights & Biases; None lets it choose one."""
    offline: bool = False
    """Weights & Biases writes to `output`/wandb alone, to be uploaded with `wandb sync`."""


class ProfileConfig(Strict):
    """Annotation and tracing. A run with nvtx or kineto exists to be traced: it ends after its warm-up and `steps`, whatever train.steps
    says, and times nothing.
    """

    nvtx: bool = False
    kineto: bool = False
    steps: int = Field(default=2, gt=0)
    """Traced steps, taken after the warm-up."""

    @property
    def traced(self) -> bool:
        """Whether this run records a trace; such a run times nothing and ends after the traced steps."""
        return self.nvtx or self.kineto


class TrainerConfig(Strict):
    """The root of the configuration."""

    backend: Literal["torch", "megatron"] = "torch"
    seed: int = Field(default=1234, ge=0, lt=2**32)
    """Of the first weights and of the order of the data."""
    model: ModelConfig
    init: InitConfig = Field(default_factory=InitConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    moe: MoeConfig = Field(default_factory=MoeConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    offload: OffloadConfig = Field(default_factory=OffloadConfig)
    megatron: MegatronConfig = Field(default_factory=MegatronConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = Field(default_factory=TrackerConfig)
    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    output: str = "runs/latest"

    def wants_fsdp(self, dp_cp: int, edp: int) -> bool:
        """Whether FSDP2 holds the torch backend's weights: always where more than one rank has the dense ones (dp x cp) or those of an
        expert (edp).

        It also serves one rank: it keeps master weights in float32, if need be on the host,
        and hands out copies in the precision of training.
        Where one rank's weights have that precision already (`remainder`), it would only copy weights and gradients.
        """
        if dp_cp > 1 or edp > 1 or self.offload.optimizer:
            return True
        return self.train.dtype == "bf16" and self.optimizer.master_weights != "remainder"


def load(path: Path, overrides: Mapping[str, Any] | None = None) -> TrainerConfig:
    """The resolved configuration of `path`, of this folder or shipped, with `overrides` (dotted keys to values) applied.

    Raises:
        FileError: the file or the model's preset does not fit the tree.
        ConfigError: an override does not fit; the file by itself does.
    """
    path = path if os.path.lexists(path) else shipped("configs", path) or path
    try:
        return _resolve(path, overrides or {})
    except FileError as e:
        _resolve(path, {})
        raise ConfigError("\n".join(f"override: {f.message}" for f in e.findings)) from e


def _read(path: Path) -> tuple[Any, Positions]:
    """The file's content, which others read too and nobody may change; every variant of a case reads the same few files."""
    try:
        stat = path.stat()
    except (OSError, ValueError):  # which reading it will say
        return read(path)
    return _parsed(path, (stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=256)
def _parsed(path: Path, stamp: tuple[int, int]) -> tuple[Any, Positions]:
    return read(path)


def _resolve(path: Path, overrides: Mapping[str, Any]) -> TrainerConfig:
    data, marks = _read(path)
    if not isinstance(data, dict):
        raise FileError([Finding(str(path), 1, 1, "expected a mapping of sections; see trainer/configs/ for examples")])
    return from_data(data, overrides, str(path), marks)


def from_data(data: dict[str, Any], overrides: Mapping[str, Any], file: str, marks: Positions) -> TrainerConfig:
    """The resolved configuration of plain data; `file` and `marks` say where it comes from."""
    data = deepcopy(data)
    # Sections first: model=NAME after model.num_layers=2 would take that back without a word.
    for key, value in sorted(overrides.items(), key=lambda item: item[0].count(".")):
        _set(data, key, value, file)
    if data.get("model") is None:
        raise FileError([Finding(file, *(marks.get(("model",)) or (1, 1)), f"'model' is missing; add one of: {', '.join(model_names())}")])
    data = {**data, "model": _expand_model(data["model"], marks, file)}
    return validate(data, marks, TrainerConfig, file)


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`["parallel.ep=4"]` as `{"parallel.ep": 4}`; values are YAML, so a quoted one is text.

    Raises:
        ConfigError: a word without '='.
    """
    out: dict[str, Any] = {}
    for word in words:
        key, sep, text = word.partition("=")
        if not sep or not key:
            raise ConfigError(f"override '{word}' has no '='; write key.path=value, for example train.steps=50")
        if not text:
            raise ConfigError(
                f"override '{word}' has no value (a shell variable that is not set?); write {key}=null for none, {key}='\"\"' for an empty "
                "text"
            )
        out[key] = _override(key, text)
    return out


def _override(key: str, text: str) -> Any:
    if text[:1] in ("[", "{"):
        return parse(text, f"override {key}")[0]
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else parse_scalar(text)


def model_names() -> list[str]:
    """The named model sizes."""
    return sorted(p.stem for p in _sizes().glob("*.yaml"))


def _is_model(name: str) -> bool:
    """Whether a size has this name: as a member of `model_names()`, without a look at all of them."""
    return Path(name).name == name and os.path.lexists(_sizes() / f"{name}.yaml")


def _sizes() -> Path:
    return data_root("configs") / "models"


def dump(config: TrainerConfig) -> dict[str, Any]:
    """The resolved configuration as plain data."""
    return config.model_dump(mode="json")


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):  # a look for any Mapping takes ten times as long, and there are many values
            out.update(flatten(value, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = value
    return out


def _set(data: dict[str, Any], key: str, value: Any, file: str) -> None:
    parts = key.split(".")
    node: Any = data
    for i, part in enumerate(parts[:-1]):
        if node.get(part) is None:
            node[part] = {}
        if part == "model" and isinstance(node[part], str):
            node[part] = {"preset": node[part]}
        node = node[part]
        if not isinstance(node, dict):
            inner = ".".join(parts[: i + 1])
            raise FileError([Finding(file, 1, 1, f"override '{key}': '{inner}' is a value, not a section")])
    node[parts[-1]] = value


def _published(name: str) -> Path | None:
    """The folder that `model` names, if it is one with a config.json of Hugging Face transformers."""
    folder = Path(name).parent if Path(name).name == "config.json" else Path(name)
    try:
        return folder.resolve() if (folder / "config.json").is_file() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _expand_model(value: Any, marks: Positions, file: str) -> Any:
    """A preset's fields with the file's own on top; anything else is left for validation to judge."""
    fields = {"preset": value} if isinstance(value, str) else value
    if not isinstance(fields, dict) or "preset" not in fields:
        return value
    preset = fields["preset"]
    overrides = {k: v for k, v in fields.items() if k != "preset"}
    is_preset = isinstance(preset, str) and _is_model(preset)
    if isinstance(preset, str) and not is_preset and (folder := _published(preset)) is not None:
        return {"name": folder.name, **fields_of(folder / "config.json"), **overrides}
    line, column = marks.get(("model", "preset")) or marks.get(("model",)) or (1, 1)
    if not is_preset:
        raise FileError([Finding(file, line, column, f"model '{preset}' is not known{did_you_mean(str(preset), model_names())}")])
    base, _ = _read(_sizes() / f"{preset}.yaml")
    for part in ("vision", "yarn"):
        if isinstance(overrides.get(part), dict) and isinstance(base.get(part), dict):
            overrides[part] = {**base[part], **overrides[part]}
    return {"name": preset, **base, **overrides}


FILE = "trainer.neutral.json"
"""Below schemas/. Keys that every model must name, such as `model.hidden_size`, have no line and always count."""


@cache
def neutral() -> Mapping[str, Any]:
    """By dotted key, the value that a hash of a configuration leaves out."""
    values: dict[str, Any] = json.loads((data_root("schemas") / FILE).read_text(encoding="utf-8"))
    return values


def declared(section: type[BaseModel] = TrainerConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key of the tree with its field; sections too, each before its keys."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        for inner in models_in(field.annotation):
            yield from declared(inner, f"{prefix}{name}.")


def trainer_keys() -> set[str]:
    """Every dotted key of the trainer's tree, sections included."""
    return {"model.preset", *dict(declared())}


def rendered() -> str:
    """The content of the table for the tree of today: known values as they are, the default of each new key;
    keys that are gone have no line.
    """
    defaults = {key: field.get_default(call_default_factory=True) for key, field in declared() if not field.is_required()}
    lines = [f"  {json.dumps(k)}: {json.dumps(neutral().get(k, v))}" for k, v in defaults.items() if not isinstance(v, BaseModel)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


@cache
def torch_only() -> tuple[str, ...]:
    """Keys that the megatron backend does not read."""
    return tuple(key for key, field in declared() if field.json_schema_extra == TORCH_ONLY)
