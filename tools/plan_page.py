"""Ten decisions and the planner's answers, and a diagnosis: writes the last part of `docs/guide/plans.md` and of `docs/guide/diagnose.md`,
and the answers in the README and in `docs/guide/getting-started.md`.

It also writes `docs/plans.jsonl` and `docs/decisions.jsonl`, the answers of the plan tables and of the pages of decisions, which takes half
an hour; `--page` leaves that out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "app"), str(ROOT / "bench"), str(ROOT / "trainer")]

from playbook_app.cli.app import app, run_command  # noqa: E402
from playbook_app.cli.output import folded  # noqa: E402
from playbook_app.site import doors, published  # noqa: E402

TABLES = ROOT / "docs" / "plans.jsonl"
CHOICES = ROOT / "docs" / "decisions.jsonl"
README = ROOT / "README.md"
START = ROOT / "docs" / "guide" / "getting-started.md"
OF_A_PLAN = {README: (100, ("other ",)), START: (90, ("other ", "claim ", "start "))}
"""By page, the columns that it has room for, and the lines of a plan that it shows below the table."""
PAGE = ROOT / "docs" / "guide" / "plans.md"
MARK = "## Ten decisions"
DIAGNOSIS = ROOT / "docs" / "guide" / "diagnose.md"
ANSWERED = "The answer, written by `python tools/plan_page.py`:"
DECISIONS = (
    ("Qwen3-235B on 64 H100 at 4K", "playbook plan qwen3_235b_a22b --gpus 64 --hardware h100 --seq 4096 --gbs 512"),
    ("DeepSeek-V3 at 128K on 256 H100", "playbook plan deepseek_v3 --gpus 256 --hardware h100 --seq 131072 --gbs 256"),
    ("Qwen3-VL-30B on 8 H200", "playbook plan qwen3_vl_30b_a3b --gpus 8 --hardware h200 --gbs 256"),
    ("Qwen3-30B-A3B on two nodes without NVLink between them", "playbook plan qwen3_30b_a3b --gpus 16 --hardware h100 --gbs 512"),
    ("Llama-3-70B on 128 H100: how many tokens per second", "playbook plan llama3_70b --gpus 128 --hardware h100 --seq 8192 --gbs 512"),
    ("GPT-OSS-120B on 64 GB200", "playbook plan gpt_oss_120b --gpus 64 --hardware gb200 --gbs 1280"),
    ("Mixtral 8x7B on 16 A100", "playbook plan mixtral_8x7b --gpus 16 --hardware a100 --gbs 256"),
    ("Qwen3-Next at 64K on 32 H100", "playbook plan qwen3_next_80b_a3b --gpus 32 --hardware h100 --seq 65536 --gbs 64"),
    (
        "The first of these, resumed on half the GPUs with the same batch",
        "playbook plan qwen3_235b_a22b --gpus 32 --hardware h100 --seq 4096 --gbs 512 --allow offload",
    ),
    ("The smallest cluster that trains Kimi-K2", "playbook plan kimi_k2 --goal gpus --hardware h100"),
)
"""A question as someone would ask it, and the command that answers it."""


def answer(command: str) -> str:
    """What the command prints, in a process that has it loaded."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        run_command(app, shlex.split(command)[1:])
    return shown.getvalue().rstrip()


def sections() -> str:
    """Each question with its command and the answer."""
    parts = [f"### {question}\n\n```text\n$ {command}\n{answer(command)}\n```" for question, command in DECISIONS]
    return "\n\n".join(parts)


def first_answers(page: Path) -> str:
    """The README or the first page with what its commands print today, as in a terminal of its width: of the diagnosis where the run
    stands, of the plan its table and some lines."""
    columns, of_a_plan = OF_A_PLAN[page]

    def answered(shown: re.Match[str]) -> str:
        lines = answer(shown["command"]).splitlines()
        wanted, table = (("so ",), []) if " diagnose " in shown["command"] else (of_a_plan, lines[1:3])
        chosen = [*table, *(line for line in lines if line.startswith(wanted))]
        return "\n".join([shown["line"], *(part for line in chosen for part in folded(line, columns))])

    command = r"(?P<line>\$ (?P<command>playbook (?:diagnose|plan) [^\n#]*?) +# [^\n]*)(?:\n(?!\$ |```)[^\n]*)*"
    return re.sub(command, answered, page.read_text(encoding="utf-8"))


def diagnosis() -> str:
    """The answer to the command of the page's example, on the log that the page shows."""
    page = DIAGNOSIS.read_text(encoding="utf-8").partition(ANSWERED)[0]
    log = page.partition('title="log.jsonl"\n')[2].partition("```")[0]
    command = page.rpartition("```console\n")[2].partition("\n")[0]
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("log.jsonl").write_text(log, encoding="utf-8")
        return answer(command)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--page", action="store_true", help="leave out docs/plans.jsonl and docs/decisions.jsonl")
    page_alone = parser.parse_args().page
    for shown in OF_A_PLAN:
        shown.write_text(first_answers(shown), encoding="utf-8")
    before = DIAGNOSIS.read_text(encoding="utf-8").partition(ANSWERED)[0]
    DIAGNOSIS.write_text(f"{before}{ANSWERED}\n\n```text\n{diagnosis()}\n```\n", encoding="utf-8")
    head = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    about = "Written by `python tools/plan_page.py`; each answer takes one to four seconds on one core. A test asks all ten again.\n"
    PAGE.write_text(f"{head}{MARK}\n\n{about}\n{sections()}\n", encoding="utf-8")
    if not page_alone:
        for path, planned in ((TABLES, map(published.ask, published.questions())), (CHOICES, map(doors.ask, doors.questions()))):
            path.write_text("".join(f"{json.dumps(asdict(answered))}\n" for answered in planned), encoding="utf-8")
