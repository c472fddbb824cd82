"""Keys and values of the trainer's configuration that have had another name. Files and records with the old spelling still load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "moe.weigh": "moe.apply_probs_on",
        "optimizer.master": "optimizer.master_weights",
        "megatron.aux_loss_coeff": "moe.aux_loss_coeff",
    }
)
"""Old dotted key to today's, the oldest of a key first."""
VALUES: Mapping[tuple[str, Any], Any] = MappingProxyType(
    {
        ("optimizer.master_weights", "whole"): "fp32",
        ("optimizer.master_weights", "split"): "remainder",
    }
)
"""(Today's key, old value) to today's value."""

REMOVED: Mapping[str, Any] = MappingProxyType(
    {
        "megatron.fused": True,
        "megatron.fsdp_double_buffer": False,
        "megatron.overlap_p2p": True,
        "megatron.shared_expert_overlap": False,
        "megatron.first_last_layers_bf16": False,
        "megatron.delay_wgrad": False,
    }
)
"""Keys that are gone, and the value that holds since. A file or record that names one with that value loads; with another, the key is
unknown."""


def modern(data: Mapping[str, Any]) -> dict[str, Any]:
    """The tree, or a part of it from the root, in today's spelling. Where a key is there in both spellings, today's counts.

    What is unchanged is shared with `data`, which stays as it is.
    """
    out = dict(data)
    for old, new in KEYS.items():
        *sections, name = old.split(".")
        holder = _section(out, sections)
        if isinstance(holder, dict) and name in holder:
            value = _own(out, sections).pop(name)
            *others, today = new.split(".")
            _own(out, others).setdefault(today, value)
    for (key, value), today in VALUES.items():
        *sections, name = key.split(".")
        holder = _section(out, sections)
        if isinstance(holder, dict) and holder.get(name) == value:
            _own(out, sections)[name] = today
    for key, value in REMOVED.items():
        *sections, name = key.split(".")
        holder = _section(out, sections)
        if isinstance(holder, dict) and name in holder and holder[name] is value:
            del _own(out, sections)[name]
    return out


def modern_delta(delta: Mapping[str, Any]) -> dict[str, Any]:
    """A variant's delta (dotted keys to values) in today's spelling."""
    keys = {modern_key(key): value for key, value in delta.items()}
    return {
        key: next((today for (name, old), today in VALUES.items() if (name, old) == (key, value)), value) for key, value in keys.items()
    }


def modern_key(key: str) -> str:
    """Today's spelling of a dotted key."""
    return KEYS.get(key, key)


def first_name(key: str, value: Any) -> tuple[str, Any]:
    """The oldest spelling of a dotted key and its value."""
    first = next((old for (name, old), today in VALUES.items() if name == key and today == value), value)
    return next((old for old, new in KEYS.items() if new == key), key), first


def old_names(data: Mapping[str, Any]) -> list[str]:
    """What of the tree is in an old spelling: a line for each, which names today's."""
    lines = []
    for old, new in KEYS.items():
        *sections, name = old.split(".")
        holder = _section(data, sections)
        if isinstance(holder, Mapping) and name in holder:
            lines.append(f"{old} is now called {new}")
    for (key, value), today in VALUES.items():
        *sections, name = key.split(".")
        holder = _section(data, sections)
        if isinstance(holder, Mapping) and holder.get(name) == value:
            lines.append(f"{key}: {value} is now called {today}")
    return lines


def _section(data: Any, names: Sequence[str]) -> Any:
    for name in names:
        data = data.get(name) if isinstance(data, Mapping) else None
    return data


def _own(data: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The section, as a copy in `data` that may be changed; an empty one where there is none."""
    for name in names:
        section = data.get(name)
        inner = dict(section) if isinstance(section, Mapping) else {}
        data[name] = inner
        data = inner
    return data
