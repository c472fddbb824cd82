"""Which version of a package made a command slower, or made it fail: a binary search over virtual environments.

Each version is installed into an environment of its own and compared with the oldest one in a series of `playbook ab`. Where pip takes wheels from, and
which other packages it holds to a version, its own variables say: PIP_INDEX_URL, PIP_NO_INDEX, PIP_FIND_LINKS, PIP_CONSTRAINT.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from playbook.errors import ConfigError, LaunchError
from playbook_bench.judge.bisection import NONE, SLOWER, UNKNOWN, Found, Judged, search
from playbook_bench.launch.local import interruptible
from playbook_bench.machine import detect
from playbook_bench.run import ab
from playbook_bench.run.confirm import Progress
from playbook_bench.run.options import Options

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,100}[A-Za-z0-9])?"
_VERSION = r"[0-9]{1,6}(?:\.[0-9]{1,9}){0,5}"
_SPAN = re.compile(rf"({_NAME})==({_VERSION})\.\.({_VERSION})")
_LISTED = re.compile(r"^Available versions: (.+)$", re.MULTILINE)
_INSTALL_S = 3600


@dataclass(frozen=True)
class Span:
    """A package and the versions from a good to a bad one, both included."""

    name: str
    good: str
    bad: str


def span(text: str) -> Span:
    """`torch==2.10..2.12` as a span.

    Raises:
        ConfigError: it is none, or its versions do not rise.
    """
    match = _SPAN.fullmatch(text)
    if match is None or _key(match[2]) >= _key(match[3]):
        raise ConfigError(f"--packages is '{text[:80]}'; expected NAME==GOOD..BAD with the older, good version first, as torch==2.10..2.12")
    return Span(match[1], match[2], match[3])


def releases(asked: Span) -> list[str]:
    """The released versions of a span, oldest first; pre-releases are left out.

    Raises:
        ConfigError: pip does not list the package, or not both ends.
        LaunchError: pip cannot be run.
    """
    listed = _LISTED.search(_pip("index", "versions", asked.name))
    known = sorted({v for v in listed[1].split(", ") if re.fullmatch(_VERSION, v)} if listed else set(), key=_key)
    inside = [v for v in known if _key(asked.good) <= _key(v) <= _key(asked.bad)]
    if not inside or (_key(inside[0]), _key(inside[-1])) != (_key(asked.good), _key(asked.bad)):
        raise ConfigError(
            f"--packages: pip lists {', '.join(known[-20:]) or 'no version'} of {asked.name}; expected {asked.good} and {asked.bad} among them"
        )
    return inside


def run(
    words: Sequence[str],
    asked: Span,
    requirements: Path | None,
    options: Options,
    progress: Progress,
    command: str,
    margin: float,
    told: Callable[[Judged, int], None] | None = None,
) -> Found:
    """The first version after the good one under which the command is slower by more than `margin`, or fails. The budget is for each version.

    Raises:
        ConfigError: the versions are not there, or the command's program is in no environment.
        LaunchError: an environment of the good version cannot be made, or the command fails in it.
    """
    good, *later = releases(asked)
    with interruptible(), TemporaryDirectory(prefix="playbook-packages-") as folder:
        baseline = _command(words, _environment(Path(folder), asked.name, good, requirements))

        def judge(version: str) -> Judged:
            try:
                candidate = _command(words, _environment(Path(folder), asked.name, version, requirements))
            except LaunchError as e:
                return Judged(version, UNKNOWN, str(e))
            question = ab.Question(baseline, candidate, margin=margin, loss=None, any_work=True)
            fresh = replace(options, profile=options.profile or detect.CPU, began=time.monotonic())
            outcome, answer = ab.compare(question, fresh, progress, command)
            failed = next((r for r in outcome.evidence.measured.runs if r.outcome != "ok"), None)
            sentence = outcome.evidence.derived.verdict.sentence
            if failed is not None and failed.variant == "baseline":
                raise LaunchError(f"the command fails with {asked.name} {good} itself, so nothing can be compared with it: {sentence}")
            return Judged(version, _trouble(answer.verdict, failed.outcome if failed else None), sentence)

        return search(later, judge, told)


def _trouble(verdict: ab.Verdict, failed: str | None) -> str:
    if verdict == "error":
        return failed or UNKNOWN
    return {"slower": SLOWER, "undecided": UNKNOWN}.get(verdict, NONE)


def _environment(folder: Path, name: str, version: str, requirements: Path | None) -> Path:
    """The programs of a new environment that holds this version, and what the requirements name.

    Raises:
        LaunchError: pip does not install it.
    """
    place = folder / version
    venv.create(place, symlinks=True)
    more = ["-r", str(requirements.resolve())] if requirements else []
    _pip("--python", str(place / "bin" / "python"), "install", "--quiet", f"{name}=={version}", *more)
    return place / "bin"


def _command(words: Sequence[str], programs: Path) -> list[str]:
    program = programs / words[0]
    if "/" in words[0] or not program.is_file():
        raise ConfigError(f"'{words[0][:80]}' is no program of the environments; expected python, or one that a package there installs")
    return [str(program), *words[1:]]


def _pip(*words: str) -> str:
    line = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise LaunchError(f"pip cannot be run: {e}") from e
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise LaunchError(f"pip {words[-1]}: {said[-1][:300] if said else 'failed'}")
    return done.stdout


def _key(version: str) -> tuple[int, ...]:
    """For order; zeros at the end do not count, as 2.10 and 2.10.0 are one."""
    parts = [int(p) for p in version.split(".")]
    while len(parts) > 1 and not parts[-1]:
        parts.pop()
    return tuple(parts)
