"""Check, run and read performance claims about training large models.

Exit codes: 0 confirmed, passed or done; 1 refuted, or a regression; 2 wrong usage, an invalid file, or a
fault that a check found; 3 inconclusive or undecided; 4 not applicable on this machine; 5 a run failed, or a replay differs.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from playbook import __version__
from playbook_app.cli import exit_codes
from playbook_app.cli.output import say

COMMANDS = {
    "search": "Find the cards that answer a question.",
    "cards": "Cards: what is claimed, in which scope, why, and its status.",
    "layout": "Layouts: which are possible, what they store, compute and send.",
    "plan": "Plans: the fastest layouts of a model, and how predictions compare with runs.",
    "diagnose": "Diagnose a slow run: where it stands, the likely wall, what to try first.",
    "config": "Configurations: list recipes, export to other trainers.",
    "calibrate": "Measure what one GPU reaches on the kernels of a step.",
    "train": "Train, or say what each rank would hold.",
    "demo": "See four claims tested on this machine's CPU in minutes.",
    "confirm": "Test claims by matched runs on this machine or a cluster.",
    "ab": "Compare two commands that log their steps: faster, slower, equivalent or undecided.",
    "tune": "Find the settings that make a run faster, and prove each that is kept.",
    "bench": "Cases: run one, replay a record, measure noise, trace.",
    "preflight": "Check every GPU and link of a node, or of a job, before training.",
    "gate": "Compare the working tree with a commit on one case.",
    "bisect": "Find the commit that made a case slower or made it fail.",
    "evidence": "Evidence: records of verdicts.",
    "skills": "Agent Skills: how to act on cards, one folder per task.",
    "mcp": "Serve cards, evidence and layout rules to an agent.",
    "site": "The documentation site.",
    "schemas": "JSON Schemas of the files.",
    "version": "Print the version.",
}
"""Each command in the order of the work, with its line in the help. Its module in `playbook_app.cli.commands` has its name."""

_GROUPS = {
    "Find": ("search", "cards", "evidence"),
    "Plan": ("diagnose", "plan", "layout", "config"),
    "Measure": ("demo", "confirm", "ab", "tune", "bench", "calibrate", "preflight"),
    "Guard": ("gate", "bisect"),
}
"""The help's groups; what stands in none comes last."""

_EXAMPLES = (
    ("playbook diagnose --model qwen3_30b_a3b --gpus 64 --gpu h100 --mfu 25", "where a run stands, and what to try"),
    ('playbook search "oom at 128k on h100"', "which cards answer, with their claims"),
    ("playbook cards show recompute", "what to set, and where each claim stands"),
    ("playbook evidence show W9", "what was measured on a claim"),
    ("playbook confirm moe-dispatcher-choice/W9", "test a claim on this machine"),
)


class Commands(TyperGroup):  # type: ignore[misc]
    """The commands. A module is imported when one of its commands is called, so that `playbook --help` needs none of them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: dict[str, Any] = {**dict.fromkeys(COMMANDS), **self.commands}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, or None."""
        if cmd_name in COMMANDS and self.commands[cmd_name] is None:
            command = typer.main.get_group(import_module(f"playbook_app.cli.commands.{cmd_name}").app).commands[cmd_name]
            command.help = command.help or COMMANDS[cmd_name]
            self.commands[cmd_name] = command
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands from the table, by groups, and examples."""
        grouped = {name for names in _GROUPS.values() for name in names}
        others = tuple(name for name in COMMANDS if name not in grouped)
        for title, names in {**_GROUPS, "More": others}.items():
            with formatter.section(title):
                formatter.write_dl([(name, COMMANDS[name]) for name in names])
        with formatter.section("Examples"):
            formatter.write_dl(list(_EXAMPLES))


def _version(requested: bool) -> None:
    if requested:
        version()
        raise typer.Exit


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None, help=__doc__
)


@app.callback()
def playbook(
    print_version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    cards: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Your own cards, beside those that ship; see playbook cards init.")
    ] = None,
    cases: Annotated[Path | None, typer.Option(metavar="DIR", help="Your own cases, beside those that ship.")] = None,
) -> None:
    """What all commands share: whose cards and cases they read. The processes that a command starts read the same."""
    for kind, folder in (("CARDS", cards), ("CASES", cases)):
        if folder is not None:
            os.environ[f"PLAYBOOK_{kind}"] = str(folder.resolve())


@app.command()
def version() -> None:
    """Print the version."""
    say(__version__)


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point: runs the command and exits with its code; a user's mistake is a message, not a traceback."""
    gc.set_threshold(
        50_000, 20, 20
    )  # records and cards are many small objects that stay: looking for cycles among them took a sixth of the time
    sys.exit(exit_codes.run(app, sys.argv[1:] if argv is None else argv))
