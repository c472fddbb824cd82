"""Logs of reinforcement learning: parsers of slime, OpenRLHF and NeMo-RL, and what verl, these and TRL call the phases of a step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from playbook.diagnosis.rl_step import Step
from playbook_bench.logs.fields import figures, lines, number

_Row = tuple[int, dict[str, Any]]
_ITEM = re.compile(r"'([\w./@ -]{1,100})': (?:np\.\w{1,20}\()?([-+]?[\d.]{1,30}(?:e[+-]?\d{1,3})?)")
_SLIME = re.compile(r"\b(perf|rollout) (\d{1,15}): \{")
_OPENRLHF = re.compile(r"\bGlobal step (\d{1,15}): \{")
_NEMO_STEP = re.compile(r"={5,60} Step (\d{1,15})/(\d{1,15}) ={5,60}")
_NEMO_ITEM = re.compile(r"• ([\w ./-]{1,80}): ([-+]?[\d.]{1,30})(?:s\b|$| )")
_NEMO_TOTAL = "Total step time"

NAMES: Mapping[str, tuple[str, ...]] = {
    "rollout": ("timing_s/gen", "perf/rollout_time", "timing/generation", "generation", "exposed_generation", "timing_s/generate"),
    "reward": ("timing_s/reward", "reward_calculation", "timing_s/reward_calculation"),
    "log-probabilities": (
        *("timing_s/old_log_prob", "timing_s/ref", "timing_s/values", "timing_s/adv", "timing_s/fwd_logprobs_values_reward"),
        *("perf/log_probs_time", "perf/ref_log_probs_time", "timing/make_experience"),
        *("policy_and_reference_logprobs", "logprob_inference_prep"),
    ),
    "update": (
        *("timing_s/update_actor", "timing_s/update_critic", "timing_s/policy_train", "perf/actor_train_time", "timing/ppo_train"),
        *("policy_training", "training_prep"),
    ),
    "weight transfer": (
        *("timing_s/update_weights", "timing_s/sync_weights", "perf/update_weights_time", "perf/sleep_time", "perf/wake_up_time"),
        *("timing/broadcast", "weight_sync", "prepare_for_generation/total"),
    ),
}
"""For each phase, the names whose seconds add up to it. OpenRLHF's `make_experience` holds rewards as well."""
_WAIT = "perf/train_wait_time"
"""slime: all between two updates of the trainer, the rollout and the transfer among it."""
_TOTALS = ("timing_s/step", "perf/step_time", "timing/step_total", "Total step time", "step_time", "timing_s/total")
_LENGTHS = (
    ("timing_s/agent_loop/generate_sequences/mean", "timing_s/agent_loop/generate_sequences/max"),
    ("response_length/mean", "response_length/max"),
    ("rollout/response_len/mean", "rollout/response_len/max"),
    ("completions/mean_length", "completions/max_length"),
)
"""Mean and longest response: in seconds where turns with tools make tokens no measure, else in tokens."""


def slime(text: str) -> Iterator[_Row]:
    """`perf 2: {'perf/rollout_time': 98.6, ...}`, one from the engine and one from the trainer for each rollout, and `rollout 2: {...}`.

    The three are one row.
    """
    rollouts: dict[str, dict[str, Any]] = {}
    for line_number, line in lines(text):
        start = _SLIME.search(line)
        if start is None:
            continue
        row = rollouts.setdefault(start[2], {"step": start[2]})
        row.update(_ITEM.findall(line[start.end() :]))
        if start[1] == "perf" and "perf/step_time" in row:
            yield line_number, rollouts.pop(start[2])
            rollouts.clear()


def openrlhf(text: str) -> Iterator[_Row]:
    """`Global step 5: {'policy_loss': ..., 'timing/generation': 41.2, ..., 'timing/step_total': 77.0}`."""
    for line_number, line in lines(text):
        start = _OPENRLHF.search(line)
        if start is not None and (items := dict(_ITEM.findall(line[start.end() :]))):
            yield line_number, {"step": start[1], **items}


def nemo_rl(text: str) -> Iterator[_Row]:
    """Blocks of NeMo-RL: a rule with `Step 3/100`, then one figure a line, such as `• policy_training: 25.05s (37.6%)`."""
    row: dict[str, Any] = {}
    first = 0
    for line_number, line in lines(text):
        if head := _NEMO_STEP.search(line):
            if _NEMO_TOTAL in row:
                yield first, row
            first, row = line_number, {"step": head[1], "total_steps": head[2]}
        elif row and (item := _NEMO_ITEM.search(line)):
            row.setdefault(item[1], item[2])
    if _NEMO_TOTAL in row:
        yield first, row


def steps(rows: Iterator[_Row]) -> list[Step]:
    """The steps of a log that names phases or lengths of responses; none of one that does not."""
    return [s for s in (_step(row) for _, row in rows) if len(s.phases) > 1 or s.longest is not None]


def _step(row: Mapping[str, Any]) -> Step:
    values = {name: value for name, raw in row.items() if (value := number(raw)) is not None and value >= 0}
    phases = {phase: sum(values[n] for n in names if n in values) for phase, names in NAMES.items() if any(n in values for n in names)}
    if "rollout" not in phases and _WAIT in values:
        phases["rollout"] = max(0.0, values[_WAIT] - phases.get("weight transfer", 0.0))
    total = next((values[n] for n in _TOTALS if n in values), figures(row).get("seconds"))
    mean, longest = next(((values[a], values[b]) for a, b in _LENGTHS if a in values and b in values), (None, None))
    return Step(total, phases, mean, longest)
