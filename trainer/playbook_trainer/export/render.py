"""A configuration printed for another trainer: flags, overrides or a Python file, with what cannot be said as comments."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playbook.errors import PlaybookError
from playbook.paths import data_root
from playbook_trainer.config.environment import Platform, variables
from playbook_trainer.config.tree import TrainerConfig, dump, flatten, load
from playbook_trainer.export import megatron, torchtitan
from playbook_trainer.export.sheet import RELEASES, Remark, Setting, Sheet, Target

TARGETS: tuple[Target, ...] = ("megatron-lm", "megatron-bridge", "torchtitan")

_FLAGS = {
    "layernorm_epsilon": "norm-epsilon",
    "num_moe_experts": "num-experts",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "fp8": "fp8-format",
    "fp4": "fp4-format",
    "fp8_param": "fp8-param-gather",
    "use_nsys_profiler": "profile",
}
"""Fields of megatron-core whose flag is not their own name."""

_ON = {
    "gated_linear_unit": "swiglu",
    "grad_reduce_in_fp32": "accumulate-allreduce-grads-in-fp32",
    "use_pytorch_profiler": "profile --use-pytorch-profiler",
}
_OFF = {
    "add_bias_linear": "disable-bias-linear",
    "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "gradient_accumulation_fusion": "no-gradient-accumulation-fusion",
    "grad_reduce_in_fp32": "grad-reduce-in-bf16",
    "overlap_p2p_comm": "no-overlap-p2p-communication",
    "check_for_nan_in_loss": "no-check-for-nan-in-loss-and-grad",
    "apply_rope_fusion": "no-rope-fusion",
    "bias_dropout_fusion": "no-bias-dropout-fusion",
    "bias_activation_fusion": "no-bias-swiglu-fusion",
    "masked_softmax_fusion": "no-masked-softmax-fusion",
}
_SILENT_ON = frozenset(("share_embeddings_and_output_weights", "overlap_p2p_comm", "check_for_nan_in_loss", "cpu_offloading", *_OFF)) - {
    "grad_reduce_in_fp32",
    "add_bias_linear",
}
"""Switches that Megatron-LM has on unless a flag says otherwise."""


@dataclass(frozen=True)
class Exported:
    """What a configuration is for another trainer."""

    target: Target
    lines: list[str]
    missing: list[Remark]
    irrelevant: list[Remark]
    settings: list[Setting]
    environment: Mapping[str, str]

    def text(self) -> str:
        """The document: settings, then, as comments, what cannot be said."""
        head = [f"# {name}={value} in the environment" for name, value in self.environment.items()]
        head.append(f"# fields as in {RELEASES[self.target]}")
        return "\n".join([*head, *self.lines, *(f"# not expressible: {r.key}: {r.why}" for r in self.missing)]) + "\n"

    def document(self) -> dict[str, Any]:
        """The same as plain data, with the keys behind each setting."""
        return {
            "target": self.target,
            "lines": self.lines,
            "environment": dict(self.environment),
            "release": RELEASES[self.target],
            "settings": [
                {"keys": list(s.keys), "name": ".".join(filter(None, (s.section, s.field))), "value": s.value} for s in self.settings
            ],
            "not_expressible": [{"key": r.key, "why": r.why} for r in self.missing],
            "irrelevant": [{"key": r.key, "why": r.why} for r in self.irrelevant],
        }


def export(
    config: TrainerConfig, target: Target, platform: Platform = "hopper", only: Callable[[Setting | Remark], bool] | None = None
) -> Exported:
    """The configuration for another trainer; a key that nothing there says is listed, unless it is neutral. `only` chooses what is said."""
    sheet = torchtitan.sheet_of(config) if target == "torchtitan" else megatron.sheet_of(config, target)
    if only:
        sheet.settings, sheet.missing = list(filter(only, sheet.settings)), list(filter(only, sheet.missing))
    render: Mapping[Target, Callable[[Sheet], list[str]]] = {
        "megatron-lm": flags,
        "megatron-bridge": overrides,
        "torchtitan": torchtitan.file,
    }
    return Exported(target, render[target](sheet), sheet.missing, sheet.irrelevant, sheet.settings, variables(config, platform))


def flags(sheet: Sheet) -> list[str]:
    """Megatron-LM's command line, one flag a line, each word as a shell takes it."""
    lines = [flag(setting.field, setting.value) for setting in sheet.settings]
    if sheet.config.model.attention == "gqa":
        lines.append(["--group-query-attention"])
    return list(dict.fromkeys(" ".join(map(shlex.quote, words)) for words in lines if words))


def flag(field: str, value: Any) -> list[str]:
    """A field as words of Megatron-LM's command line; none where the flag's absence says it."""
    name = _FLAGS.get(field, field.replace("_", "-"))
    if value is None:
        return []
    if value is True:
        words = _ON.get(field, "" if field in _SILENT_ON else name)
        return [f"--{word.removeprefix('--')}" for word in words.split()]
    if value is False:
        return [f"--{_OFF[field]}"] if field in _OFF else []
    if field == "moe_layer_freq" and isinstance(value, list):
        return [f"--{name}", f"([0]*{value.count(0)}+[1]*{value.count(1)})"]
    return [f"--{name}", *(map(_number, value) if isinstance(value, list) else [_number(value)])]


def overrides(sheet: Sheet) -> list[str]:
    """Megatron-Bridge's overrides, one a line, as its recipes take them after `--recipe`."""
    return [f"{'.'.join(filter(None, (s.section, s.field)))}={override(s.value)}" for s in sheet.settings]


def override(value: Any) -> str:
    """A value as Megatron-Bridge's command line takes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(override, value))}]"
    return f"'{value}'" if isinstance(value, str) and "|" in value else _number(value)


def _number(value: Any) -> str:
    """A number as both parsers read it back; other values as they are."""
    return f"{value:.12g}" if isinstance(value, float) else str(value)


# A change of a few keys in the words of other trainers.

_BASES: Mapping[Target, str] = {
    "megatron-lm": "qwen3_30b_a3b_24l_megatron.yaml",
    "megatron-bridge": "qwen3_30b_a3b_24l_megatron.yaml",
    "torchtitan": "qwen3_30b_a3b_24l.yaml",
}
"""What is changed, for each trainer: the shipped configuration of its backend."""


def change(keys: Mapping[str, Any]) -> dict[str, list[str]]:
    """The settings of each trainer that say the keys; a trainer that has no words for one of them is left out.

    The backend is no setting elsewhere. Keys whose value is no value of the configuration, such as `higher`, say nothing. One that is a
    switch and has a reason in place of its value counts as on.
    """
    by_target: dict[str, list[str]] = {target: _said(keys, target, data_root("configs") / base) for target, base in _BASES.items()}
    return {target: lines for target, lines in by_target.items() if lines}


def _said(keys: Mapping[str, Any], target: Target, base: Path) -> list[str]:
    """The settings of a target that say these keys on top of a base configuration; none where one of the keys has no words there."""
    usual = flatten(dump(load(base)))
    keys = {k: v for k, v in keys.items() if k != "backend"}
    tree_keys = {k: True if isinstance(usual.get(k), bool) and isinstance(v, str) else v for k, v in keys.items() if k in usual}
    stated = tree_keys if _config(base, tree_keys) else {k: v for k, v in tree_keys.items() if _config(base, {k: v})}
    config = _config(base, stated)
    if not stated or config is None:
        return []
    settings = [s for s in export(config, target).settings if set(s.keys) & set(stated)]
    if not set(stated) <= {k for s in settings for k in s.keys}:
        return []
    sheet = Sheet(config, target)
    sheet.settings = settings
    if target == "megatron-lm":
        return [line for line in flags(sheet) if line != "--group-query-attention"]
    if target == "megatron-bridge":
        return overrides(sheet)
    return [torchtitan.words(s) for s in settings]


def _config(base: Path, keys: Mapping[str, Any]) -> TrainerConfig | None:
    """The base with the keys; how checkpoints are saved means something only where there is a folder for them."""
    saves = {"checkpoint.dir": "checkpoints"} if any(k.startswith("checkpoint.") for k in keys) else {}
    try:
        return load(base, {**saves, **keys})
    except PlaybookError:
        return None
