"""Check, run and read performance claims about training large models.

Exit codes: 0 confirmed, passed or done; 1 refuted, or a regression; 2 wrong usage, an invalid file, or a
fault that a check found; 3 inconclusive or undecided; 4 not applicable on this machine; 5 a run failed, or a replay differs.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from playbook import __version__
from playbook.errors import ExitCode, FileError, PlaybookError
from playbook_app.cli.output import complain, say

_INTERRUPTED = 130
READER_LEFT = 141
"""128 + SIGPIPE, the code of a command whose reader has closed the pipe."""


def run_command(app: Callable[..., Any], argv: Sequence[str]) -> int:
    """Run a command and return its exit code.

    Errors become one message; a crash ends with 5, since Python's own code for it, 1, means `refuted`.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, who does not want to hear
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (for as long as the process lives)
    try:
        code = _code(app, argv)
        sys.stdout.flush()
    except PlaybookError as e:
        _tell(str(e) if isinstance(e, FileError) else f"error: {e}")
        return ExitCode.USAGE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as e:
        if e.errno == errno.EPIPE:
            return _without_reader()
        _tell(f"error: {e.filename or 'the output'} cannot be read or written: {e.strerror or e}; free some space, or name another place")
        _abandon(sys.stdout)
        return ExitCode.USAGE
    except Exception:
        _tell(f"{traceback.format_exc()}error: this is a fault of playbook, not of what it was given; please report the lines above")
        return ExitCode.FAILED
    return code


def _code(app: Callable[..., Any], argv: Sequence[str]) -> int:
    code: Any
    try:
        code = app(list(argv), prog_name="playbook", standalone_mode=True)
    except SystemExit as e:
        if isinstance(e.__context__, BrokenPipeError):  # typer ends with 1 then, which would read as `refuted`
            return _without_reader()
        code = e.code
    if isinstance(code, str):
        _tell(code)
        return ExitCode.FAILED
    return code or 0


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):
        complain(text)


def _without_reader() -> int:
    """Give up the output after the reader has closed the pipe, as in `playbook cards list | head -1`."""
    for stream in (sys.stdout, sys.stderr):
        _abandon(stream)
    return READER_LEFT


def _abandon(stream: Any) -> None:
    """Redirect the stream to the null device, so that flushing the rest of its buffer at exit cannot fail."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor, as in a test, has nothing to flush to
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


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
"""Each command in the order of the work, with its line in the help."""
BESIDE = {"demo": "confirm", "bisect": "gate"}
"""Commands in the module of the command that they build on; every other has a module of its name in `playbook_app.cli.commands`."""

_GROUPS = {
    "Find": ("search", "cards", "evidence"),
    "Plan": ("diagnose", "plan", "layout", "config"),
    "Measure": ("demo", "confirm", "ab", "tune", "bench", "calibrate", "preflight"),
    "Guard": ("gate", "bisect"),
    "More": ("train", "skills", "mcp", "site", "schemas", "version"),
}
"""The help's groups."""

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
            module = typer.main.get_group(import_module(f"playbook_app.cli.commands.{BESIDE.get(cmd_name, cmd_name)}").app)
            command = module.commands.get(cmd_name, module)
            command.help = command.help or COMMANDS[cmd_name]
            self.commands[cmd_name] = command
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands from the table, by groups, and examples."""
        for title, names in _GROUPS.items():
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
    sys.exit(run_command(app, sys.argv[1:] if argv is None else argv))
