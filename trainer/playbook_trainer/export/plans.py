"""Plans exported: one table of trainers, for the command line, the diagnosis and MCP alike."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from playbook.errors import ConfigError
from playbook.planner import memory
from playbook.planner.choice.plain_data import words
from playbook.planner.models import MODELS
from playbook.planner.options import FRAMEWORKS
from playbook.planner.plan import Plan
from playbook.planner.time.cluster import Cluster, cluster
from playbook.text import key_of, keys_of
from playbook.yaml_files import did_you_mean
from playbook_trainer.export import plan_accelerate, plan_bridge, plan_deepspeed, plan_megatron, plan_ours, torchtitan
from playbook_trainer.export.launch import Launchable, refuse

TARGETS: Mapping[str, Callable[[Plan, str], Launchable]] = {
    "megatron-lm": plan_megatron.launchable,
    "megatron-bridge": plan_bridge.launchable,
    "torchtitan": torchtitan.launchable,
    "accelerate": plan_accelerate.launchable,
    "deepspeed": plan_deepspeed.launchable,
    "playbook": plan_ours.launchable,
}
"""By trainer, the function that makes of a plan and a kind of GPU what is started."""
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "megatron-lm": ("loss=native",),
    **{name: f.implied for name, f in FRAMEWORKS.items() if f.exports_as == "accelerate"},
    **{name: (*f.implied, "cp=1") for name, f in FRAMEWORKS.items() if f.exports_as == "deepspeed"},
}
"""By trainer, settings that all its runs have unless others are named, for the search to reckon with: what a diagnosis takes for granted
too. Source: `megatron/training/arguments.py` of megatron-core 0.19.2, which refuses Transformer Engine's loss."""

_BESIDE = frozenset({"gpus", "seq_len", "gbs", "backend"})
"""Settings that `playbook diagnose` takes by options of their own."""


def launchable(plan: Plan, target: str, hardware: str) -> Launchable:
    """A legal plan as something to start with one trainer on one kind of GPU; it names the command that sets its log beside the prediction.

    Raises:
        ConfigError: the target is not known, the plan breaks a rule, or the target or the GPU cannot do it.
    """
    if target not in TARGETS.keys() | FRAMEWORKS.keys():
        others = ", ".join(f"{name} (as {f.exports_as})" for name, f in FRAMEWORKS.items() if name not in TARGETS)
        raise ConfigError(f"--export is '{target[:40]}'; expected one of {', '.join(TARGETS)}; or {others}")
    target = target if target in TARGETS else FRAMEWORKS[target].exports_as
    gpu = cluster(hardware)
    blackwell = gpu.name.startswith(("b", "gb"))
    fp8 = plan.options.fp8
    refuse(
        target,
        [f"{fp8} on {gpu.name}, which has no such products"] if fp8 and (not gpu.has_fp8 or (fp8 == "mxfp8" and not blackwell)) else [],
    )
    start = TARGETS[target](plan.require(), gpu.name)
    run = as_run(plan, target)
    return replace(start, notes=(*_layout(run, target, gpu), *start.notes), beside=_beside(run, target, gpu.name, start.log))


def kept(target: str, backend: str, fixed: Sequence[str]) -> tuple[str, ...]:
    """What a reader fixed, and of the settings that all runs of this trainer have those that the reader leaves open; those of another
    backend mean nothing.
    """
    named = keys_of(fixed)
    if target in FRAMEWORKS and FRAMEWORKS[target].backend != backend:
        return tuple(fixed)
    return (*fixed, *(word for word in SETTINGS.get(target, ()) if key_of(word) not in named))


def trained_by(framework: str, backend: str, fixed: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The backend of the framework that will train a plan, and what to keep with what all its runs have; `backend` where none is named.

    Raises:
        ConfigError: no such framework is known.
    """
    if not framework:
        return backend, tuple(fixed)
    if framework not in FRAMEWORKS:
        raise ConfigError(f"framework is '{framework[:40]}'{did_you_mean(framework[:40], FRAMEWORKS)}")
    backend = backend if framework == "playbook" else FRAMEWORKS[framework].backend
    return backend, kept(framework, backend, fixed)


def as_run(plan: Plan, target: str) -> Plan:
    """The plan as this trainer runs it: Megatron-LM computes the loss by itself where Transformer Engine's was planned."""
    return replace(plan, loss="native") if target == "megatron-lm" and plan.loss == "te" else plan


def _layout(plan: Plan, target: str, gpu: Cluster) -> tuple[str, str]:
    """The layout and what it holds, at the head of a script; which layout a table leads with may be another."""
    settings, implied = words(plan), SETTINGS.get(target, ())
    peak = memory.peak(plan)
    same = [word for word in implied if word in settings]
    other = f"; {target} runs with {', '.join(same)}, so plan 1 of a table without that may be another" if same else ""
    fit = memory.verdict(peak, gpu.memory_gib)
    return (f"layout: {' '.join(settings)}{other}", f"memory: {fit}, {peak / memory.GIB:.1f} of {gpu.memory_gib:g} GiB by estimate")


def _beside(plan: Plan, target: str, hardware: str, log: str) -> str:
    """The command that reads the run's log; a run of this trainer says everything else itself,
    and the torch targets name theirs in their notes.
    """
    if target in ("torchtitan", "accelerate", "deepspeed"):
        return ""
    if target == "playbook":
        return shlex.join(["playbook", "diagnose", log, "--gpu", hardware])
    model = plan.model if plan.model in MODELS else "config.json"
    layout = ",".join(w for w in words(plan) if w.partition("=")[0] not in _BESIDE)
    command = ["playbook", "diagnose", log, "--model", model, "--gpus", str(plan.gpus), "--gpu", hardware, "--seq", str(plan.seq_len)]
    return shlex.join([*command, "--gbs", str(plan.global_batch), "--framework", target, *(["--layout", layout] if layout else [])])
