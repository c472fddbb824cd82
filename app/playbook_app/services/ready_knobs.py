"""Ready knobs: the set of a command's framework, as far as it fits, with what the claims behind its knobs were seen to bring."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from playbook import yaml_files
from playbook.cards.model import Claim, by_claim
from playbook.diagnosis.claims import speed_effect
from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook.records.case import Case
from playbook.records.evidence import Machine
from playbook.records.machine import CPU, short_gpu
from playbook.records.read import DECIDED, Record, verdicts
from playbook.records.standing import Stock
from playbook_bench.machine import requirements
from playbook_bench.tune.knobs import Knob, Knobs, fits
from playbook_bench.variants.command import CommandVariant
from playbook_bench.variants.resolve import Resolved, Runnable
from playbook_trainer.config.tree import TrainerConfig, dump, flatten, load, parse_overrides

_MARKS: Mapping[str, Sequence[str]] = {
    "megatron-core": ("bare_megatron",),
    "megatron-lm": ("pretrain_", "--tensor-model-parallel-size", "--micro-batch-size"),
    "torchtitan": ("torchtitan", "--job.config_file", "run_train.sh"),
    "accelerate": ("--per_device_train_batch_size", "--gradient_checkpointing", "accelerate"),
    "playbook": ("trainer_steps", "playbook_trainer", "trainer/configs/", "playbook train"),
}
"""Words by which a command is known, the surest first."""
_BACKENDS = {"megatron-core": "megatron", "megatron-lm": "megatron", "torchtitan": "torch", "accelerate": "torch", "playbook": "torch"}
"""In the words of scopes."""
_READ_OUR_CONFIGURATIONS = ("megatron-core", "playbook")
_OF_SCALE = frozenset({"gpus", "gpu_memory_gib", "nodes", "interconnect", "gpu"})
"""Parts of a scope that another machine does not meet: what was measured elsewhere still says something, and where is said with it."""
_OF_EXPERTS = re.compile(r"(--)?moe[-.]")
"""Begin of the options and keys that say nothing without experts."""
_OVERRIDE = re.compile(r"[a-z_]\w*(\.\w+)*=", re.ASCII)


def _framework(start: Runnable) -> str:
    """Whose run it is; empty where that has no ready set."""
    if not isinstance(start, CommandVariant):
        return "playbook"
    text = " ".join(start.words)
    return next((name for name, marks in _MARKS.items() if any(mark in text for mark in marks)), "")


def trainer_of(run: Runnable) -> tuple[TrainerConfig, int] | None:
    """Configuration and ranks of a run of our trainer, or of a command that reads its configurations; None of others.

    Raises:
        PlaybookError: there is a configuration, and it cannot be loaded.
    """
    if isinstance(run, Resolved):
        return run.config, run.ranks
    if _framework(run) not in _READ_OUR_CONFIGURATIONS or not isinstance(run, CommandVariant):
        return None
    words = run.words
    at = next((i for i, word in enumerate(words) if word.endswith((".yaml", ".yml")) and not word.startswith("-")), None)
    if at is None:
        return None
    ranks = [found[1] for found in re.finditer(r"--nproc[-_]per[-_]node[= ](\d+)", " ".join(words[:at]))]
    return load(Path(words[at]), parse_overrides([w for w in words[at + 1 :] if _OVERRIDE.match(w)])), int(ranks[-1]) if ranks else 1


def ready(case: Case, start: Runnable, stock: Stock, machine: Machine, goal: str) -> Knobs:
    """The ready set that fits a run: that of its framework, without what it has already and what needs another kind of GPU. `start`: as it
    is launched.

    Raises:
        ConfigError: the framework is not known, or its whole set is in use already.
    """
    words, ours = start.words if isinstance(start, CommandVariant) else (), trainer_of(start)
    values = {**(flatten(dump(ours[0])) if ours else {}), **case.baseline.get("environment", {})}
    framework = _framework(start)
    sets, _ = yaml_files.read(data_root("tables") / "knobs.yaml")
    if framework not in sets:
        raise ConfigError(f"the command is of no framework with a ready set ({', '.join(sets)}); name a file of knobs: --knobs FILE")
    facts, claims = _facts(framework, words, ours, machine), by_claim(stock.cards)
    fitting = {}
    for name, knob in Knobs.model_validate(sets[framework]).knobs.items():
        card, claim = claims.get(knob.claim or "", ("", None))
        scope = {**stock.cards[card].scope, **(claim.scope if isinstance(claim, Claim) else {})} if claim else {}
        if not fits(knob, words, values) or _is_for_others(knob, scope, facts):
            continue
        known = claim is not None and goal != "peak_memory"
        fitting[name] = _with_effect(knob, scope, _effects(claim, stock, facts), facts) if known else knob
    if not fitting:
        raise ConfigError(f"the command has all that the ready set of {framework} would set; name a file of knobs: --knobs FILE")
    both = {name: knob.model_copy(update={"excludes": [e for e in knob.excludes if e in fitting]}) for name, knob in fitting.items()}
    return Knobs(framework=framework, knobs=both)


def _facts(framework: str, words: Sequence[str], ours: tuple[TrainerConfig, int] | None, machine: Machine) -> dict[str, Any]:
    """What is known of the run in the words of scopes."""
    if ours is not None:
        return requirements.facts(machine, *ours)
    mixture = {"moe": any(word.partition("=")[0] == "--num-experts" for word in words)} if framework == "megatron-lm" else {}
    return {**requirements.facts(machine), "backend": _BACKENDS[framework], **mixture}


def _unmet(scope: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """The parts of a scope that what is known does not meet."""
    known = {key: wanted for key, wanted in scope.items() if wanted is not None and key in facts}
    return [missing.detail for missing in requirements.unmet_scope({**known}, facts, waive_machine=False)]


def _is_for_others(knob: Knob, scope: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Whether it is for another kind of GPU, or for experts, of which this run has none."""
    of_experts = all(_OF_EXPERTS.match(target) for text in knob.texts for target in knob.changes(text))
    return bool(_unmet({"gpu": scope.get("gpu")}, facts)) or (of_experts and facts.get("moe") is False)


def _effects(claim: Any, stock: Stock, facts: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Machine and effect of each verdict that was decided and still counts, from this kind of GPU first; a CPU says nothing of a GPU."""
    rows: list[Record] = [
        row for row in verdicts(stock.records, claim.id) if row.status in DECIDED and row.stale(stock.today, claim) is None
    ]
    here = short_gpu(facts["gpu"]) if facts["gpus"] else CPU
    for row in sorted(rows, key=lambda row: row.machine.partition("x")[0] != here):
        if (effect := speed_effect(row)) is not None and (row.machine.partition("-")[0] == CPU) == (here == CPU):
            yield row.machine, effect[0]


def _with_effect(knob: Knob, scope: Mapping[str, Any], effects: Iterator[tuple[str, float]], facts: Mapping[str, Any]) -> Knob:
    """The knob with what its claim was seen to bring, or with why that is not known here."""
    if other := next((key for key, wanted in scope.items() if key not in _OF_SCALE and _unmet({key: wanted}, facts)), None):
        return knob.model_copy(update={"gain": None, "scope": f"its scope is {other} {scope[other]}"[:200]})
    if (seen := next(effects, None)) is None:
        return knob.model_copy(update={"gain": None, "scope": "not measured on such a machine"})
    open_parts = [f"{key} {wanted}" for key, wanted in scope.items() if key not in facts]
    where = ", ".join([f"measured on {seen[0]}", *(["with " + ", ".join(open_parts)] if open_parts else [])])
    return knob.model_copy(update={"gain": round(100 * seen[1], 1), "scope": where[:200]})
