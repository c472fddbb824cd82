"""A change of a plan in the words of a trainer: the difference between what its exporter prints before and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import lru_cache, partial
from typing import Any

from playbook.diagnosis.actions import Action
from playbook.diagnosis.answer import Changed
from playbook.errors import PlaybookError
from playbook.planner.models import MODELS
from playbook.planner.options import FRAMEWORKS
from playbook.planner.plan import Plan
from playbook_trainer.config.tree import flatten, from_data
from playbook_trainer.export.plan_megatron import environment, flag_lines, override_lines, platform_of
from playbook_trainer.export.plan_ours import configuration, is_preset
from playbook_trainer.export.render import Exported, export
from playbook_trainer.export.torchtitan import words

_Keys = tuple[tuple[str, Any, Any], ...]


_STANDS_IN = {True: "qwen3_30b_a3b", False: "qwen3_8b"}
"""Models with and without experts whose flags are printed where the trainer does not train the model itself."""


@lru_cache(maxsize=512)
def changed(action: Action, framework: str, hardware: str) -> Changed:
    """What an action changes, for one of the planner's targets; nothing where its exporter has no words for it."""
    framework = framework if framework in _WORDS else FRAMEWORKS[framework].exports_as
    if framework in _WORDS and action.keys:
        return Changed(missing=tuple(f"{key}: has no one name in {framework}" for key, _, _ in action.keys))
    change = _changed(action.off, action.on, action.keys, framework, hardware)
    if not action.done:
        return change
    # What else the plan has may need the same variables; a run that leaves this out may leave that out too.
    bare = replace(action.off.options, ep_overlap=False, graphs=(), dispatcher="alltoall" if action.off.options.dispatcher else "")
    options = {
        f.name: getattr(action.on.options, f.name)
        for f in fields(bare)
        if getattr(action.on.options, f.name) != getattr(action.off.options, f.name)
    }
    off, on = (replace(action.off, options=replace(bare, **each)) for each in ({}, options))
    return replace(change, environment=_changed(off, on, action.keys, framework, hardware).environment)


def _changed(off: Plan, on: Plan, keys: _Keys, framework: str, hardware: str) -> Changed:
    if framework in _WORDS:
        return _of_lines(*(_LINES[framework](p) for p in (off, on)))
    if is_preset(on):
        return _difference(off, on, keys, framework, hardware)
    if keys or framework not in _LINES:  # words of options are the same for every model
        return _difference(_stand_in(off), _stand_in(on), keys, framework, hardware)
    before, after = (environment(p, hardware) for p in (off, on))
    lines = _of_lines(*(_LINES[framework](p) for p in (off, on)))
    return replace(lines, environment=tuple(f"{k}={v}" for k, v in after.items() if before.get(k) != v))


_HUGGING_FACE = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "torch_compile")
_WORDS: Mapping[str, tuple[str, tuple[str, str, str, str]]] = {
    "accelerate": ("{key}={value}", _HUGGING_FACE),
    "deepspeed": ("{key}={value}", ("train_micro_batch_size_per_gpu", *_HUGGING_FACE[1:3], "")),
    "swift": ("--{key} {value}", _HUGGING_FACE),
    "axolotl": ("{key}: {value}", ("micro_batch_size", *_HUGGING_FACE[1:])),
    "llamafactory": ("{key}: {value}", _HUGGING_FACE),
    "verl": (
        "actor_rollout_ref.{key}={value}",
        ("actor.ppo_micro_batch_size_per_gpu", "", "model.enable_gradient_checkpointing", "actor.use_torch_compile"),
    ),
}
"""By framework on transformers' layers: how a setting is written, and its names for the micro-batch, the micro-batches of a step,
recompute of layers and their compilation."""


def _plain_lines(plan: Plan, framework: str) -> list[str]:
    """What of a plan a framework on transformers' layers has settings for."""
    written, names = _WORDS[framework]
    values = (plan.mbs, plan.microbatches, _plain("full" in plan.options.recompute), _plain(plan.options.compiled))
    return [written.format(key=key, value=value) for key, value in zip(names, values, strict=True) if key]


_LINES: Mapping[str, Callable[[Plan], list[str]]] = {
    "megatron-lm": flag_lines, "megatron-bridge": override_lines, **{name: partial(_plain_lines, framework=name) for name in _WORDS},
}  # fmt: skip
"""What a plan is to a trainer, one setting a line, for every model."""


def _of_lines(off: list[str], on: list[str]) -> Changed:
    flags = [line for line in on if line not in off]
    names = {_name(line) for line in flags}
    return Changed(tuple(flags), tuple(line for line in off if line not in on and _name(line) not in names))


def _stand_in(plan: Plan) -> Plan:
    """A layout of a model that every exporter knows, with the plan's options."""
    name = _STANDS_IN[plan.shape.experts > 0]
    plain = Plan(MODELS[name], name, gpus=8, ep=8 if plan.shape.experts else 1, gbs=64, options=plan.options)
    return replace(plain, options=replace(plain.options, recompute=tuple(m for m in plan.options.recompute if m != "mla_up_proj")))


def _difference(off: Plan, on: Plan, keys: _Keys, framework: str, hardware: str) -> Changed:
    before, after = configuration(off), configuration(on)
    unset, set_ = {k: v for k, v, _ in keys}, {k: v for k, _, v in keys}
    try:
        if framework == "playbook":
            first, second = {**flatten(before), **unset}, {**flatten(after), **set_}
            return Changed(tuple(f"{k}={_plain(v)}" for k, v in second.items() if first.get(k) != v))
        return _of_exports(*(_exported(each, more, framework, hardware) for each, more in ((before, unset), (after, set_))))
    except PlaybookError as e:
        return Changed(missing=(str(e).splitlines()[0][:300],))


def _of_exports(off: Exported, on: Exported) -> Changed:
    """What differs between a plan's exports without and with an action: flags set and unset, variables, and what has no words."""
    if on.target == "torchtitan":  # its file has sections; each setting has words of its own
        first, second = ({f"{s.section}.{s.field}".strip("."): s for s in e.settings} for e in (off, on))
        flags = [words(s) for k, s in second.items() if k != "model" and (k not in first or first[k].value != s.value)]
        without = [k for k in first if k not in second]
    else:
        lines = _of_lines(off.lines, on.lines)
        flags, without = list(lines.flags), list(lines.without)
    missing_before = {r.key for r in off.missing}
    return Changed(
        tuple(flags),
        tuple(without),
        tuple(f"{k}={v}" for k, v in on.environment.items() if off.environment.get(k) != v),
        tuple(f"{r.key}: {r.why}" for r in on.missing if r.key not in missing_before),
    )


def _name(line: str) -> str:
    return line.partition("=")[0].partition(" ")[0]


def _exported(data: Mapping[str, Any], keys: Mapping[str, Any], framework: str, hardware: str) -> Exported:
    return export(from_data(dict(data), keys, "plan", {}), framework, platform_of(hardware))  # type: ignore[arg-type]


def _plain(value: Any) -> str:
    """A value as a command line takes it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower() if value is not None else "null"
    return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)
