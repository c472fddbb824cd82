"""Decisions: the command line and MCP answer alike, and the answer's best plan is exported and accepted by the trainer that it is for."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest
from plan_page import DECISIONS

from playbook.planner.plan import Plan
from playbook_app.cli.app import app, run_command
from playbook_app.mcp.planning import plan_answer, plan_of
from playbook_trainer.export.plans import SETTINGS
from tests.support.targets.checkers import CHECKERS, differences, exportable
from tests.support.targets.megatron import Export

pytestmark = [pytest.mark.full, pytest.mark.timeout(6000)]

MORE = (
    "llama3_8b --gpus 8 --hardware h100 --seq 8192 --gbs 128",
    "llama3_405b --gpus 512 --hardware h100 --seq 8192 --gbs 512",
    "qwen3_8b --gpus 2 --hardware h200 --gbs 32",
    "gpt_oss_20b --gpus 8 --hardware h200 --gbs 256",
    "moonlight_16b_a3b --gpus 8 --hardware h100 --gbs 256",
    "mpt_7b --gpus 16 --hardware a100 --seq 2048 --gbs 512",
    "deepseek_v2_lite --gpus 4 --hardware h100 --gbs 64",
)
"""Questions that the guide does not ask."""
SLOW = ("--gpus 64 ", "--seq 131072")
"""Of the guide's questions, those whose search takes longest; their models are exported in `tests/trainer/export`."""
ASKED = [*(shlex.split(c)[2:] for _, c in DECISIONS if not any(word in c for word in SLOW)), *(q.split() for q in MORE)]


@pytest.fixture(scope="module")
def exports() -> dict[str, list[Export]]:
    """By target, the exports of the best plans that it can express; each answer is asked for twice."""
    kept = {target: SETTINGS.get(target, ()) for target in CHECKERS}
    plans = {fix: [*_plans(fix)] for fix in dict.fromkeys(kept.values())}
    return {target: [*exportable(plans[fix], target, [])] for target, fix in kept.items()}


def _plans(fix: tuple[str, ...]) -> Iterator[tuple[Plan, str]]:
    """What the tool `plan_layout` answers where these settings are kept, and the kind of GPU asked for."""
    for model, *words in ASKED:
        options = dict(zip(words[::2], words[1::2], strict=True))
        answer = plan_answer(
            model, int(options.get("--gpus", 8)), options["--hardware"], seq_len=int(options.get("--seq", 4096)),
            global_batch_size=int(options.get("--gbs", 0)), goal=options.get("--goal", "tokens/s"), backend="megatron",
            allow=frozenset(filter(None, options.get("--allow", "").split(","))), fix=fix, top=1,
        )  # fmt: skip
        if answer.plans:
            yield plan_of(model, answer.gpus, answer.plans[0]["settings"]), options["--hardware"]


@pytest.mark.parametrize("words", ASKED, ids=" ".join)
def test_every_decision_is_exported_by_the_command_line_as_by_mcp(capsys, exports, words) -> None:
    told = 0
    for target, each in exports.items():
        found = next(
            (e for p, hardware, e in each if words[0] == p.model and words[words.index("--hardware") + 1] == hardware and _asks(words, p)),
            None,
        )
        code = run_command(app, ["plan", *words, "--export", target])
        shown = capsys.readouterr().out
        assert (code == 0) == (found is not None), (target, code)
        assert found is None or shown.rstrip() == found.text().rstrip()
        told += found is not None
    assert told


def _asks(words, plan) -> bool:
    """Whether a plan answers these words: decisions about one model differ in GPUs, length or batch."""
    sizes = {"--gpus": plan.gpus, "--seq": plan.seq_len, "--gbs": plan.gbs}
    return all(str(sizes[k]) == v for k, v in zip(words[1::2], words[2::2], strict=True) if k in sizes)


@pytest.mark.parametrize("target", CHECKERS)
def test_every_export_of_a_decision_is_accepted(exports, target: str) -> None:
    assert exports[target]
    assert differences(target, exports[target]) == []
