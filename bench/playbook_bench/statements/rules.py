"""Rules that the harness, a dry run and megatron-core enforce: records, layouts and settings that are refused, and the search that finds a
commit.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from playbook.cards.model import Comparison, Expect, Quantity
from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook.planner.memory import GIB
from playbook.records.case import Case, Delta
from playbook.records.evidence import CaseRef, ClaimRef, Machine, Measured, Plan, Run, Sample, Seconds, Variant, Verdict, digest
from playbook_bench.judge import design, slowdown, verdict
from playbook_bench.judge.verdict import Statement
from playbook_bench.judge.verdict_rules import VERSION
from playbook_trainer.config.dry_run import dry_run
from playbook_trainer.config.tree import load

_STEPS = 8
_STRICT: dict[str, Any] = {"machine": {"gpus": 0}, "trainer": {"torch": "any"}}


def planted(metric: str, tokens: int, data: str, delta: Delta | None = None) -> Measured:
    """A record whose candidate takes half the time per step, at `tokens` times the baseline's work, on `data`."""
    case = Case(
        id="planted-pair",
        summary="Planted records",
        trainer="planted",
        baseline={"train.micro_batch_size": 1},
        candidate={"train.micro_batch_size": 2},
        metric=metric,
        delta=delta or Delta(),
    )
    expect = Expect(op=">=", margin=Quantity(value=5.0, unit="percent"))
    claim = ClaimRef(
        id="X1", card="planted", card_sha="", statement="planted", kind="pair", metric=metric, expect=expect, comparison=Comparison()
    )
    looks = case.budget.looks
    runs = [
        _run("candidate", each.block, i, 0.5, tokens, data) if each.variant else _run("baseline", each.block, i, 1.0, 1, "same")
        for i, each in enumerate(design.launched(design.order(0, 2, looks)[: 2 * looks[0]], 2))
    ]
    machine = Machine(name="cpu", description="planted", gpus=0, cpu="planted", cores=1)
    return Measured(
        claim=claim,
        case=CaseRef(id=case.id, sha=digest(case.model_dump(mode="json"), 16), content=case),
        machine=machine,
        profile="planted",
        plan=Plan(rules=VERSION, seed=0, looks=looks),
        strict={"strict": _STRICT},
        configs={"baseline": {"train": {"micro_batch_size": 1}}, "candidate": {"train": {"micro_batch_size": 2}}},
        runs=runs,
    )


def _run(variant: Variant, pair: int, position: int, step_s: float, tokens: int, data: str) -> Run:
    """A planted launch: `_STEPS` steps of `step_s` seconds, each with `1000 * tokens` tokens, on data with that hash."""

    # A ripple of 0.1 % from step to step and run to run: equal figures to the last digit are nothing that a machine gives.
    def seconds(step: int) -> float:
        return step_s * (1 + 0.001 * ((7 * step + 3 * position) % 5 - 2) + 1e-6 * position)

    samples = [
        Sample(step=i, timed=True, loss=2.0, grad_norm=1.0, seconds=seconds(i), useful_tokens=1000 * tokens, raw_tokens=1000 * tokens)
        for i in range(_STEPS)
    ]
    timed = math.fsum(sample.seconds for sample in samples)
    return Run(
        run_id=f"{variant}-measure-{position}",
        variant=variant,
        role="measure",
        pair=pair,
        position=position,
        outcome="ok",
        returncode=0,
        started="",
        wall_s=2 * timed,
        ranks=1,
        steps_wanted=_STEPS,
        config_sha=variant,
        strict_sha="strict",
        data_sha=data,
        num_parameters=1,
        trained_parameters=1,
        seconds=Seconds(timed=timed, total=timed),
        samples=samples,
    )


def _judge(measured: Measured) -> Verdict:
    return verdict.derive(measured).verdict


def unequal_work_is_refused(metric: str = "step_seconds", factor: int = 2) -> Statement:
    """Whether the harness refuses a pair whose variants differ in work or in data without saying so, and accepts the same pair when they do
    not.
    """
    statuses = {
        "equal work": _judge(planted(metric, 1, "same")),
        "unequal work": _judge(planted(metric, factor, "same")),
        "unequal work, declared, by step time": _judge(planted(metric, factor, "same", Delta(work=True, reason="to be refused"))),
        "other data": _judge(planted(metric, 1, "other")),
    }
    accepted = statuses.pop("equal work")
    refused = {name: v.reason == "invalid_pair" for name, v in statuses.items()}
    holds = accepted.status == "confirmed" and all(refused.values())
    sentence = (
        "a pair at equal work is judged by step time; at unequal work, declared or not, and on other data, it is refused"
        if holds
        else f"equal work is {accepted.status}; refused: {refused}"
    )
    return holds, sentence, {"equal_work": accepted.status, "refused": refused, "work_factor": factor}


def bisect_finds_the_commit(commits: int = 12) -> Statement:
    """Whether the search names the right commit wherever it is planted, slow or failing, and the right few where some cannot be judged."""
    history = [f"c{i}" for i in range(commits)]
    most, wrong = 0, []
    for first in range(commits):
        for trouble in (slowdown.SLOWER, "oom", "crash"):
            for unjudged in (set[int](), {i for i in range(commits - 1) if i % 3 == 0}):

                def judge(commit: str, first: int = first, trouble: str = trouble, unjudged: set[int] = unjudged) -> slowdown.Judged:
                    i = int(commit[1:])
                    return slowdown.Judged(
                        commit, slowdown.UNKNOWN if i in unjudged else trouble if i >= first else slowdown.NONE, "planted"
                    )

                result = slowdown.search(history, judge)
                most = max(most, len(result.judged)) if not unjudged else most
                judged = [i for i in range(commits) if i not in unjudged]
                last_good = max((i for i in judged if i < first), default=-1)
                expected = history[last_good + 1 : min(i for i in judged if i >= first) + 1]
                if result.suspects != expected or result.trouble != trouble:
                    wrong.append(f"planted at {first} ({trouble}): {result.suspects}")
    least = commits.bit_length() + 1
    holds = not wrong and most <= least
    sentence = f"{commits} commits: each planted one is found with at most {most} judgements" if holds else f"wrong: {'; '.join(wrong[:3])}"
    return holds, sentence, {"commits": commits, "judgements": most, "allowed": least, "wrong": len(wrong)}


def layouts_are_judged_by_dry_run(config: str, gpus: int, legal: Mapping[str, Any], illegal: Sequence[Mapping[str, Any]]) -> Statement:
    """Whether a dry run accepts a legal layout on so many GPUs, with what each rank holds, and refuses each that has one thing wrong.

    `config` names a file of `trainer/configs`; `legal` overrides it, and each member of `illegal` comes on top of that.
    """
    path = data_root("configs") / f"{config}.yaml"
    report = dry_run(load(path, legal), gpus)
    peak = max(s.peak for s in report.stages)
    refusals: dict[str, str | None] = {}
    for fault in illegal:
        name = ", ".join(f"{k}={v}" for k, v in fault.items())
        try:
            dry_run(load(path, {**legal, **fault}), gpus)
            refusals[name] = None
        except ConfigError as e:
            refusals[name] = str(e)
    missed = [name for name, message in refusals.items() if message is None]
    sentence = f"{report.layout['model']} on {gpus} GPUs, {len(report.stages)} stages: {peak / GIB:.1f} GiB on the fullest rank; " + (
        f"accepted although wrong: {'; '.join(missed)}" if missed else f"all {len(illegal)} faults are refused"
    )
    return bool(illegal) and not missed and peak > 0, sentence, {"layout": report.layout, "peak_bytes": peak, "refused": refusals}


_BASE: Mapping[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
    "cuda_graph_impl": "transformer_engine",
    "bf16": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_RENAMED = {"cuda_graph_scope": "cuda_graph_modules"}
"""Fields with the names that later releases gave them."""


def megatron_core_refuses(rows: Sequence[Mapping[str, Any]]) -> Statement:
    """Whether megatron-core's `TransformerConfig` refuses exactly the settings that `rows` mark as refused, for dropless routing.

    Each row has `settings`, fields of that class, and `refused`. Source: megatron-core, `transformer/transformer_config.py`,
    `__post_init__`.
    """
    config = _class()
    refusals = {}
    for row in rows:
        words = ", ".join(f"{k} {v}" for k, v in row["settings"].items())
        refusals[words] = _refusal(config, {**_BASE, **row["settings"]})
    wrong = [
        f"{words} is {'refused: ' + refusals[words] if refusals[words] else 'accepted'}"
        for words, row in zip(refusals, rows, strict=True)
        if bool(refusals[words]) != row["refused"]
    ]
    refused = sum(map(bool, refusals.values()))
    # Neither the version nor its words: a record replays beside another version that judges alike.
    sentence = f"megatron-core refuses {refused} of {len(rows)} settings" + (f"; against the claim: {'; '.join(wrong)}" if wrong else "")
    return not wrong, sentence, {"refused": {words: bool(why) for words, why in refusals.items()}}


def _class() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("megatron.core.transformer.transformer_config").TransformerConfig
    except ImportError as e:
        raise ConfigError(
            "megatron-core is not installed, and the statement is about it; run pip install '.[megatron]' in a clone of Playbook"
        ) from e


def _refusal(config: Any, settings: Mapping[str, Any]) -> str:
    """What the class says against the settings; nothing where it takes them."""
    known_fields = config.__dataclass_fields__
    # The class changes lists that it is given.
    fields = {k if k in known_fields else _RENAMED.get(k, k): [*v] if isinstance(v, list) else v for k, v in settings.items()}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            config(**fields)
        except (AssertionError, ValueError) as e:
            return str(e)
    return ""
