"""Cells as people spell them, as the words that the planner knows; what it does not know stays as it is, for whoever reads it to refuse."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from playbook.errors import ConfigError
from playbook.planner.options import FRAMEWORKS, GRAPH_MODULES, RECOMPUTE

COUNTS = frozenset(
    {"gpus", "seq_len", "mbs", "gbs", "tp", "cp", "pp", "vpp", "ep", "etp", "dp", "layers", "hidden", "heads", "lora", "ulysses"}
)
_NOTHING = frozenset({"", "-", "--", "–", "—", "?", "n/a", "na", "null", "unknown", "tbd"})
_OFF = ("off", "no", "false", "none", "disabled")
_ON = ("on", "yes", "true", "enabled")
_WORDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "dispatcher": {"": _OFF, "alltoall": ("alltoall", "a2a", "all2all"), "allgather": ("allgather",), "deepep": ("deepep",),
    "hybridep": ("hybridep",)},
    "fsdp": {
        "0": ("0", "off", "no", "false", "disabled"), "on": (*_ON, "megatronfsdp", "fullshard"), "zero3": ("zero3",), "none": ("none",
        "ddp"),
        "optimizer": ("optimizer", "distributedoptimizer", "distopt"), "zero1": ("zero1",), "zero2": ("zero2", "shardgradop"),
        "hsdp": ("hsdp", "hybridshard"),
    },
    "recompute": {"none": (*_OFF, "0"), "full": ("full", "all", *_ON), "selective": ("selective",), "core_attn": ("attention", "attn",
    "coreattention")},
    "cuda_graph": {"none": (*_OFF, "0"), "on": (*_ON, "1"), "full_iteration": ("full", "fulliteration")},
    "offload": {"none": (*_OFF, "0")},
    "precision": {
        "bf16": ("bf16", "bfloat16", "bf16mixed"), "fp8": ("fp8", "fp8hybrid"), "mxfp8": ("mxfp8", "fp8mx"), "nvfp4": ("nvfp4", "fp4"),
        "fp8_cs": ("fp8cs", "fp8currentscaling", "fp8tensorwise"), "fp8_ds": ("fp8ds", "fp8delayed", "fp8delayedscaling"),
        "fp8_blockwise": ("fp8blockwise", "fp8block", "blockwisefp8"), "fp8_sc": ("fp8sc", "fp8subchannel"), "fp16": ("fp16", "float16",
        "half"),
    },
    "backend": {"megatron": ("megatron", "megatroncore", "mcore", "megatronlm"), "megatron-bridge": ("megatronbridge", "nemo"),
    "torch": ("torch", "pytorch"),
    **{name: (name,) for name in FRAMEWORKS if FRAMEWORKS[name].backend == "torch"}},
    "attention": {"cudnn": ("cudnn", "fused"), "flash2": ("flash2", "fa2", "flashattention2"), "flash1": ("flash1", "fa1")},
    "status": {"ok": ("ok", "success", "done", "completed")},
    "mem_unit": {"GB": ("gb",), "GiB": ("gib",), "MB": ("mb",), "MiB": ("mib",)},
}  # fmt: skip
"""By column, the word that is known and how else it is written, in lower case without punctuation."""
_KNOWN = {column: {other: word for word, spelled in words.items() for other in spelled} for column, words in _WORDS.items()}


def said(column: str, text: str) -> str:
    """A cell in the planner's words; empty where it says nothing."""
    text = text.strip()
    if text.lower() in _NOTHING:
        return ""
    if column in COUNTS:
        return "" if text.lower() in ("none", "auto") else _count(text)
    return _KNOWN.get(column, {}).get(re.sub("[^a-z0-9]+", "", text.lower()), text)


def _count(text: str) -> str:
    """A whole number without what spreadsheets add: `4,096`, `16.0`, and `8K`, which is 8192, or `1M`, which is 1,048,576."""
    match = re.fullmatch(r"(\d{1,3}(?:,\d{3})+|\d{1,10})(?:\.0{1,10})?\s?([kKmM])?", text, re.ASCII)
    if not match:
        return text
    power = {"": 0, "k": 10, "m": 20}[(match[2] or "").lower()]
    return str(int(match[1].replace(",", "")) << power)


_WHOLE = {"recompute": "full", "cuda_graph": "full_iteration"}
CUSTOM = ("custom", "deepep")
"""What tables call a dispatcher of somebody's own, and the one that stands for it."""


def recompute(text: str, backend: str) -> tuple[str, ...]:
    """A cell of `recompute` as the modules that are computed again.

    Raises:
        ConfigError: a module is not known.
    """
    plain = _underscored(text)
    if re.match(r"full(?![a-z])", plain):
        return ("full",)
    names = {"rmsnorm": "layernorm", "attn": "core_attn", "attention": "core_attn"}
    if backend != "torch":
        names["selective"] = "core_attn"  # Megatron-LM, --recompute-granularity selective without modules
    modules = tuple(dict.fromkeys(names.get(w, w) for w in (w.strip("_") for w in re.split("[+,;/]", plain)) if w and w != "none"))
    return _known("recompute", modules, RECOMPUTE)


def graphs(text: str) -> tuple[str, ...]:
    """A cell of `cuda_graph` as the modules that are captured.

    Raises:
        ConfigError: a module is not known.
    """
    plain = _underscored(text)
    if plain.startswith("full_iteration"):
        return ("full_iteration",)
    named = tuple(w for w in re.split("[+,;]", plain.rpartition(":")[2]) if w and w not in ("none", "on"))
    return _known("cuda_graph", named, GRAPH_MODULES) or (("attn",) if plain == "on" else ())


def settings(words: Iterable[str], backend: str) -> list[str]:
    """Words as plans and published runs are printed, `cuda_graph=attn+moe_router` among them, as those that `playbook layout` takes.

    Raises:
        ConfigError: a module is not known.
    """
    layout_words = []
    for word in words:
        key, equals, value = word.partition("=")
        match key if equals else "":
            case "recompute":
                layout_words.append(f"recompute={','.join(recompute(said(key, value), backend))}")
            case "cuda_graph" | "graphs":
                layout_words.append(f"graphs={','.join(graphs(said('cuda_graph', value)))}")
            case "dispatcher":
                layout_words.append(f"dispatcher={said(key, value).replace(*CUSTOM)}")
            case _:
                layout_words.append(f"{key}={said(key, value)}" if key in COUNTS and said(key, value) else word)
    return layout_words


def _underscored(text: str) -> str:
    return re.sub(r"[\s-]+", "_", text.lower())


def _known(column: str, cells: tuple[str, ...], known: frozenset[str]) -> tuple[str, ...]:
    unknown = [w for w in cells if w not in known]
    if unknown:
        raise ConfigError(
            f"{column} '{unknown[0][:40]}' is not known; expected none, {_WHOLE[column]}, or some of {', '.join(sorted(known))}"
        )
    return cells


def number(text: str) -> str:
    """A measured figure without the marks that say that it is rounded, or what separates its thousands."""
    return (
        re.sub(r"\A[~≈]\s?", "", text)
        if "," not in text
        else re.sub(r"\A[~≈]?\s?(\d{1,3}(?:,\d{3})+)(?=\.|\Z)", lambda m: m[1].replace(",", ""), text)
    )
