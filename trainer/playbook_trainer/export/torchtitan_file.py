"""The Python file that torchtitan 0.3.0 takes a configuration from: `--module FILE --config plan`.

Source: torchtitan 0.3.0, `torchtitan/config/manager.py` (how a file is named), `torchtitan/trainer.py` (sections of `Trainer.Config`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from playbook.planner.shapes import Shape

# A model by its own sizes in torchtitan's builders: Llama, Qwen3 dense and with experts, DeepSeek-V3, GPT-OSS.
# Source: torchtitan 0.3.0, `torchtitan/models/{llama3,qwen3,deepseek_v3,gpt_oss}/__init__.py`,
# `torchtitan/models/common/config_utils.py`.

HAS = "it has Llama, Qwen3, DeepSeek-V3 and GPT-OSS decoders"
"""What torchtitan trains of text."""
_WINDOW = 128
"""Every second layer of its GPT-OSS sees so many tokens."""
_HEADS = (64, 8, 64)
"""Heads, those of keys and values, and their size: its builder of GPT-OSS takes no others."""

Fields = Mapping[str, Any]
"""A published `config.json` or a preset of this trainer."""


class Code(str):
    """Python source, written as it is; other values are written as literals."""

    __slots__ = ()


@dataclass(frozen=True)
class _Family:
    """Names of one package of models. `head` and `norm` are source of the output layer's initial values and of the last norm."""

    package: str
    model: str
    table: str
    layers: str
    rope: str
    theta: float
    norm: str = "RMSNorm.Config(normalized_shape=DIM, param_init=family._NORM_INIT)"
    head: str = "family._output_linear_init(DIM)"


_LLAMA = _Family("llama3", "Llama3Model", "llama3_configs", "_build_llama3_layers", "ComplexRoPE", 500_000.0)
_QWEN = _Family(
    "qwen3",
    "Qwen3Model",
    "qwen3_configs",
    "_build_qwen3_layers",
    "CosSinRoPE",
    1_000_000.0,
    "family._qwen3_norm(DIM)",
    "family._LINEAR_INIT",
)
_DEEPSEEK = _Family("deepseek_v3", "DeepSeekV3Model", "deepseekv3_configs", "_build_dsv3_layers", "ComplexRoPE", 10_000.0)
_GPT_OSS = _Family("gpt_oss", "GptOssModel", "gptoss_configs", "_build_gptoss_layers", "CosSinRoPE", 150_000.0)

_LACKING: tuple[tuple[Callable[[Shape], Any], str], ...] = (
    (lambda s: s.vision, "a vision tower of Qwen3-VL"),
    (lambda s: s.linear, "gated delta net layers without a vision tower"),
    (lambda s: s.mamba, "Mamba layers"),
    (lambda s: s.latent, "experts behind a projection"),
    (lambda s: s.positions, "learned positions"),
    (lambda s: not s.gated, "MLPs without a gate"),
    (lambda s: s.norms != 2 or s.norm_bias, "norms of another number or with a bias"),
    (lambda s: s.mlp_bias, "a bias in MLPs"),
    (lambda s: s.shared_gate, "a gate on shared experts"),
    (lambda s: (s.attention_bias or s.output_bias or s.expert_bias) and not s.sinks, "a bias in attention"),
    (lambda s: s.window and not s.sinks, "windows of attention"),
    (lambda s: s.sinks and (s.window, s.window_every) != (_WINDOW, 2), f"windows of attention other than {_WINDOW} in every second layer"),
    (lambda s: s.sinks and (s.heads, s.kv_heads, s.head_dim) != _HEADS, "heads of GPT-OSS other than 64 of 64 values, 8 of keys"),
    (lambda s: s.mtp and not s.mla, "prediction of more tokens without latent attention"),
    (lambda s: s.experts and not s.mla and (s.dense_layers or s.shared_ffn), "dense layers or shared experts without latent attention"),
    (
        lambda s: s.mla and s.experts and (not s.shared_ffn or s.shared_ffn % s.expert_ffn),
        "shared experts that are no multiple of an expert",
    ),
    (lambda s: s.tied and (s.mla or s.sinks), "one matrix for embedding and output"),
)  # fmt: skip
"""What makes a model one that it has no decoder for."""


def lacking(shape: Shape, fields: Fields) -> Iterator[str]:
    """What the model has and no decoder of torchtitan; nothing where it can be built."""
    yield from (words for has, words in _LACKING if has(shape))
    if fields.get("model_type") == "glm_moe_dsa":
        yield "sparse attention with an indexer"


def limits(shape: Shape, tp: int, cp: int, pp: int) -> Iterator[tuple[str, str]]:
    """Degrees that its models do not take, each by its name with what it has and what to do."""
    table = (
        (
            shape.kv_heads % tp,
            "tp",
            f"tp is {tp} for {shape.kv_heads} heads of keys and values; it has tp that divides them: lower tp",
        ),
        (
            shape.tied and pp > 1,
            "pp",
            f"pp is {pp} for a model with one matrix for embedding and output; it has them on one stage: set pp=1",
        ),
        (
            shape.mtp and (pp > 1 or cp > 1),
            "pp",
            f"pp is {pp} and cp {cp} for a model that predicts more tokens; it has that with pp 1 and cp 1 alone: set pp=1 and cp=1",
        ),
    )
    yield from ((name, words) for holds, name, words in table if holds)


def epsilon(shape: Shape) -> float:
    """What its norms add to the mean of squares."""
    return 1e-6 if _family(shape) is _QWEN else 1e-5


def source(shape: Shape, fields: Fields, seq_len: int) -> list[str]:
    """Python lines that add the model to the table of its family as `plan`; they leave `family` as its package.

    Widths and counts are the shape's. The rotary base and the router's scale are those of `fields` where it has them;
    they are no matter of speed.
    """
    f = _family(shape)
    norms = "RMSNorm, " if f.norm.startswith("RMSNorm") else ""
    init = "_EMBEDDING_SKIP_INIT" if shape.tied else "_EMBEDDING_INIT"
    head = f.head.replace("DIM", str(shape.hidden))
    mtp = f"family._build_mtp_layers(layers[-1], dim={shape.hidden}, num_mtp_layers={shape.mtp})"
    builder = "_build_qwen3_moe_layers" if f is _QWEN and shape.experts else f.layers
    layers = call(f"family.{builder}", {**_layers(shape, fields, f, seq_len), "**backends": Code("")})
    model = {
        "vocab_size": shape.vocab, "dim": shape.hidden, **({"enable_weight_tying": True} if shape.tied else {}),
        "tok_embeddings": Code(f"Embedding.Config(num_embeddings={shape.vocab}, embedding_dim={shape.hidden}, param_init=family.{init})"),
        "norm": Code(f.norm.replace("DIM", str(shape.hidden))),
        "lm_head": Code(f"Linear.Config(in_features={shape.hidden}, out_features={shape.vocab}, param_init={head})"),
        "layers": Code("layers"),
        **({"mtp_layers": Code(mtp)} if shape.mtp else {}),
    }  # fmt: skip
    plain = [] if shape.qk_norm or f is not _QWEN else ["    for layer in layers:", "        layer.attention.qk_norm = None"]
    return [
        f"import torchtitan.models.{f.package} as family",
        f"from torchtitan.models.common import {f.rope}, Embedding, Linear, {norms}".rstrip(", "),
        "",
        "",
        f"def sizes({'num_mtp_layers=0, ' if shape.mla else ''}**backends):",
        '    """The model by its own sizes."""',
        *_indented(f"layers = {layers}"),
        *plain,
        *_indented(f"return {call(f'family.{f.model}.Config', model)}"),
        "",
        "",
        f'family.{f.table}["plan"] = sizes',
    ]


def call(name: str, arguments: Mapping[str, Any]) -> Code:
    """A call with one keyword argument a line; `**name` stands for itself."""
    lines = [
        key if key.startswith("**") else f"{key}={value if isinstance(value, Code) else repr(value)}" for key, value in arguments.items()
    ]
    inner = "".join(f"{line},\n" for line in lines)
    return Code(f"{name}(\n{''.join(f'    {line}' for line in inner.splitlines(keepends=True))})")


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]


def _family(shape: Shape) -> _Family:
    if shape.mla:
        return _DEEPSEEK
    if shape.sinks:
        return _GPT_OSS
    plain = not shape.qk_norm and not shape.experts and shape.heads * shape.head_dim == shape.hidden
    return _LLAMA if plain else _QWEN


def _layers(shape: Shape, fields: Fields, f: _Family, seq_len: int) -> dict[str, Any]:
    """Arguments of the family's builder of layers."""
    rotated = shape.mla.rope_dim if shape.mla else shape.head_dim
    rope = call(f"{f.rope}.Config", {"dim": rotated, "max_seq_len": seq_len, "theta": _number(fields, "rope_theta") or f.theta})
    both = {"n_layers": shape.layers, "dim": shape.hidden, "n_heads": shape.heads, "rope": rope}
    if shape.mla:
        return {**both, **_latent(shape, fields)}
    grouped = {"n_kv_heads": shape.kv_heads}
    experts = {"num_experts": shape.experts, "top_k": shape.top_k}
    if f is _GPT_OSS:
        return {
            "n_layers": shape.layers,
            "dim": shape.hidden,
            "hidden_dim": shape.expert_ffn,
            **experts,
            "load_balance_coeff": 1e-3,
            "rope": rope,
        }
    if f is _LLAMA:
        return {**both, **grouped, "hidden_dim": shape.ffn}
    width = {"moe_hidden_dim": shape.expert_ffn, **experts} if shape.experts else {"hidden_dim": shape.ffn}
    return {**both, **grouped, "head_dim": shape.head_dim, **width}


def _latent(shape: Shape, fields: Fields) -> dict[str, Any]:
    """Latent attention and its experts. The router is DeepSeek-V3's unless the fields say another;
    DeepSeek-V2's is softmax without a norm.
    """
    mla = shape.mla
    assert mla is not None, "asked of latent attention alone"
    second = fields.get("model_type") == "deepseek_v2"
    groups, of_groups = _number(fields, "n_group", "router_groups"), _number(fields, "topk_group", "router_group_top_k")
    limited = {"router_num_expert_groups": int(groups), "router_num_limited_groups": int(of_groups)}
    scores = [fields.get("scoring_func"), fields.get("router_score"), "softmax" if second else "sigmoid"]
    return {
        "n_dense_layers": shape.dense_layers, "q_lora_rank": mla.q_rank, "kv_lora_rank": mla.kv_rank, "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim, "v_head_dim": mla.v_dim, "mscale": 1.0, "dense_hidden_dim": shape.ffn,
        "moe_hidden_dim": shape.expert_ffn,
        "num_experts": shape.experts, "num_shared_experts": shape.shared_ffn // max(shape.expert_ffn, 1), "router_top_k": shape.top_k,
        "router_score_func": next(s for s in scores if s in ("softmax", "sigmoid")),
        **(limited if groups > 1 and shape.experts % groups == 0 and 0 < of_groups <= groups else {}),
        "router_route_scale": _number(fields, "routed_scaling_factor", "router_scale") or 1.0,
        "router_route_norm": bool(fields.get("norm_topk_prob", not second)),
    }  # fmt: skip


def _number(fields: Fields, *names: str) -> float:
    """The first of the fields that is a number above zero; 0 where none is."""
    values = (fields.get(name) for name in names)
    return next((float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < float("inf")), 0.0)


RELEASE = "torchtitan 0.3.0"
FUNCTION = "plan"
"""What `--config` names."""

CLASSES: Mapping[str, str] = {
    "checkpoint": "CheckpointManager.Config", "comm": "CommConfig", "compile": "CompileConfig",
    "dataloader": "HuggingFaceTextDataLoader.Config",
    "debug": "DebugConfig", "lr_scheduler": "LRSchedulersContainer.Config", "metrics": "MetricsProcessor.Config",
    "optimizer": "default_adamw",
    "parallelism": "ParallelismConfig", "profiler": "Profiler.Config", "training": "TrainingConfig", "validator": "Validator.Config",
}  # fmt: skip
"""By section, what builds it from its fields."""
RECOMPUTE: Mapping[str, Code] = {"none": Code("None"), "selective": Code("SelectiveAC.Config()"), "full": Code("FullAC.Config()")}
"""By mode, its policy of activation checkpointing."""

DISPATCHERS = {"": "standard", "alltoall": "standard", "deepep": "deepep", "hybridep": "hybridep"}
"""Its backends of expert communication."""

_IMPORTS: Mapping[str, str] = {
    "CheckpointManager": "torchtitan.components.checkpoint", "CommConfig": "torchtitan.config", "CompileConfig": "torchtitan.config",
    "CrossEntropyLoss": "torchtitan.components.loss", "DebugConfig": "torchtitan.config",
    "Float8LinearConverter": "torchtitan.components.quantization",
    "FullAC": "torchtitan.distributed.activation_checkpoint", "HuggingFaceTextDataLoader": "torchtitan.hf_datasets.text_datasets",
    "LRSchedulersContainer": "torchtitan.components.optimizer", "MTPLoss": "torchtitan.models.deepseek_v3.mtp",
    "MXFP8LinearConverter": "torchtitan.components.quantization", "MetricsProcessor": "torchtitan.components.metrics",
    "ParallelismConfig": "torchtitan.config", "Profiler": "torchtitan.tools.profiler",
    "SelectiveAC": "torchtitan.distributed.activation_checkpoint",
    "Trainer": "torchtitan.trainer", "TrainingConfig": "torchtitan.config", "Validator": "torchtitan.components.validate",
    "default_adamw": "torchtitan.components.optimizer", "replace": "dataclasses",
}  # fmt: skip

_RANDOM = '''

class NoTokenizer(BaseTokenizer):
    """Random tokens need none."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *_, **__):
        return []

    def decode(self, *_, **__):
        return ""

    def get_vocab_size(self):
        return 0


class RandomTokens(BaseDataLoader):
    """Rows of random tokens, other ones on each data-parallel rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab_size: int

    def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **_):
        self.vocab_size, self.rank, self.shape = config.vocab_size, dp_rank, (local_batch_size, seq_len)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.rank)
        positions = torch.arange(self.shape[1]).repeat(self.shape[0], 1)
        while True:
            rows = torch.randint(self.vocab_size, (self.shape[0], self.shape[1] + 1), generator=generator)
            yield {"input": rows[:, :-1].contiguous(), "positions": positions.clone()}, rows[:, 1:].contiguous()

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass
'''
_RANDOM_IMPORTS = """from dataclasses import dataclass

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer"""


def stages(sizes: Sequence[int]) -> Code:
    """Names of the modules of each chunk of a pipeline, from its decoder layers:
    the embedding goes with the first, norm and output layer with the last.
    """
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    names = [f'*(f"layers.{{i}}" for i in range({end - size}, {end}))' for size, end in zip(sizes, ends, strict=True)]
    names[0] = f'"tok_embeddings", {names[0]}'
    names[-1] += ', "norm", "lm_head"'
    return Code("[\n" + "".join(f"    [{name}],\n" for name in names) + "]")


def document(title: str, model: Sequence[str], sections: Mapping[str, Mapping[str, Any] | Code], *, random: bool = False) -> str:
    """The file: its title, the model's lines (see `torchtitan_model.source`), and the function that returns the configuration.

    Sections are fields of `Trainer.Config`: those of `CLASSES` by their fields, others as source.
    `random` adds tokens that need no data set and no tokenizer.
    """
    fields = {name: value if isinstance(value, Code) else call(CLASSES[name], value) for name, value in sections.items()}
    # A section without fields on one line.
    body = call("Trainer.Config", {name: Code(value.replace("(\n)", "()")) for name, value in fields.items()})
    imports: dict[str, list[str]] = {}
    for name, module in _IMPORTS.items():
        if f"{name}." in body or f"{name}(" in body:
            imports.setdefault(module, []).append(name)
    lines = [f'"""{title}"""', "", *(_RANDOM_IMPORTS.splitlines() if random else [])]
    lines += [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(imports.items())]
    lines += [*model, *(_RANDOM.splitlines() if random else []), "", "", f"def {FUNCTION}():"]
    return "\n".join([*lines, *(f"    {line}" for line in f"return {body}".splitlines())]) + "\n"
