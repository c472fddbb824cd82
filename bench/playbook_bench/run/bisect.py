"""Which commit, or which version of a package, made a run slower or made it fail: a binary search with the gate, or `ab`, as the judge.

Every commit is compared with the good one in a series of its own, by the rules of the gate. A commit that cannot be judged (it does not
read the configuration, fails in another way than the bad one, or differs by too little for the noise) is passed over, as `git bisect skip`
does.

Each version of a package is installed into a virtual environment of its own and compared with the oldest one by `playbook ab`. Where pip
takes wheels from, and which other packages it holds to a version, its own variables say: PIP_INDEX_URL, PIP_NO_INDEX, PIP_FIND_LINKS,
PIP_CONSTRAINT.
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
from typing import Any

from playbook.errors import ConfigError, LaunchError
from playbook.paths import repo_root
from playbook.records.case import Case, load_case
from playbook_bench.judge.slowdown import NONE, SLOWER, UNKNOWN, BisectResult, Judged, search
from playbook_bench.launch import local
from playbook_bench.machine import detect
from playbook_bench.run import ab, gate
from playbook_bench.run.options import Options
from playbook_bench.run.progress import Progress
from playbook_bench.variants import checkout

_ANY = 9.99
"""An allowance for which no launch is too long."""
_LEFT_OPEN = frozenset({"ok", "refused"})


def run(
    case: str | Case,
    good: str,
    bad: str,
    options: Options | None = None,
    progress: Progress | None = None,
    on_judged: Callable[[Judged, int], None] | None = None,
    root: Path | None = None,
    limits: gate.Limits | None = None,
) -> BisectResult:
    """The first commit after `good`, up to `bad`, at which the case's baseline configuration is slower or fails.

    The budget is for each commit, and so are the gate's `limits`. `on_judged` hears of each judgement and of how many commits are left.
    Merges are one step, with all they bring.

    Raises:
        ConfigError: a reference is no commit, or `bad` does not follow `good`.
        LaunchError: git cannot be run, or the good commit fails itself at the first judgement.
    """
    options = options or Options()
    # What a launch takes beside its steps varies more than they do, and would leave good commits open.
    limits = replace(limits or gate.Limits(), allowed={"process": _ANY, **(limits.allowed if limits else {})})
    loaded = case if isinstance(case, Case) else load_case(case)
    repository = gate.repository_of(loaded, root)
    history, reference = commits(repository, good, bad), checkout.commit_of(repository, good)

    done: list[Judged] = []

    def judge(commit: str) -> Judged:
        fresh = replace(options, began=time.monotonic())
        result = gate.run(loaded, reference, fresh, limits, progress, root=repository, judged=commit)
        try:
            trouble = trouble_of(result)
        except LaunchError:
            if not done:
                raise
            trouble = UNKNOWN  # the good commit has run before, so this is chance, and hours of judgements must not be lost to it
        done.append(Judged(commit, trouble, result.sentence))
        return done[-1]

    with local.interruptible():  # between two gates too, or SIGTERM would leave the commit's files behind
        return search(history, judge, on_judged)


def trouble_of(result: gate.GateResult) -> str:
    """What the gate found: none, slower, how the commit's runs ended, or unknown.

    Raises:
        LaunchError: the good commit's own runs fail, so that nothing can be compared with it.
    """
    if result.status != "error":
        return {"regression": SLOWER, "pass": NONE, "undecided": UNKNOWN, "too_noisy": UNKNOWN}[result.status]
    failed = next((r for r in result.runs if r.outcome != "ok"), None)
    if failed is not None and failed.variant == "baseline":
        raise LaunchError(f"the good commit fails itself, so nothing can be compared with it: {result.sentence}")
    return UNKNOWN if failed is None or failed.outcome in _LEFT_OPEN else failed.outcome


def commits(root: Path, good: str, bad: str) -> list[str]:
    """The commits after `good` up to `bad`, oldest first, along first parents.

    Raises:
        ConfigError: one of them is no commit, or `bad` does not follow `good`.
    """
    first, last = checkout.commit_of(root, good), checkout.commit_of(root, bad)
    if first == last or checkout.git(root, ["merge-base", "--is-ancestor", first, last]).returncode:
        raise ConfigError(f"'{bad}' does not follow '{good}'; name the older, good commit first")
    return checkout.git(root, ["rev-list", "--reverse", "--first-parent", last, f"^{first}"]).stdout.split()


def subject(commit: str, root: Path | None = None) -> str:
    """The commit's short hash and first line."""
    return checkout.git((root or repo_root()).resolve(), ["log", "-1", "--format=%h %s", commit]).stdout.strip() or commit


def as_json(result: BisectResult, kind: str = "commit") -> dict[str, Any]:
    """The result as plain data; `kind` is what was judged, commit or version."""
    return {
        "schema": "bisect/1",
        "status": result.status,
        "exit_code": result.exit_code,
        "trouble": result.trouble,
        "suspects": result.suspects,
        "judged": [{kind: j.commit, "trouble": j.trouble, "sentence": j.sentence} for j in result.judged],
    }


_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,100}[A-Za-z0-9])?"
_VERSION = r"[0-9]{1,6}(?:\.[0-9]{1,9}){0,5}"
_SPAN = re.compile(rf"({_NAME})==({_VERSION})\.\.({_VERSION})")
_LISTED = re.compile(r"^Available versions: (.+)$", re.MULTILINE)
_INSTALL_S = 3600


@dataclass(frozen=True)
class PackageSpan:
    """A package and the versions from a good to a bad one, both included."""

    name: str
    good: str
    bad: str


def package_span(text: str) -> PackageSpan:
    """`torch==2.10..2.12` as a span.

    Raises:
        ConfigError: it is none, or its versions do not rise.
    """
    match = _SPAN.fullmatch(text)
    if match is None or _version_key(match[2]) >= _version_key(match[3]):
        raise ConfigError(f"--packages is '{text[:80]}'; expected NAME==GOOD..BAD with the older, good version first, as torch==2.10..2.12")
    return PackageSpan(match[1], match[2], match[3])


def releases(package: PackageSpan) -> list[str]:
    """The released versions of a span, oldest first; pre-releases are left out.

    Raises:
        ConfigError: pip does not list the package, or not both ends.
        LaunchError: pip cannot be run.
    """
    listed = _LISTED.search(_pip("index", "versions", package.name))
    versions = sorted({v for v in listed[1].split(", ") if re.fullmatch(_VERSION, v)} if listed else set(), key=_version_key)
    inside = [v for v in versions if _version_key(package.good) <= _version_key(v) <= _version_key(package.bad)]
    if not inside or (_version_key(inside[0]), _version_key(inside[-1])) != (_version_key(package.good), _version_key(package.bad)):
        raise ConfigError(
            f"--packages: pip lists {', '.join(versions[-20:]) or 'no version'} of {package.name}; expected {package.good} and "
            f"{package.bad} among them"
        )
    return inside


def run_packages(
    words: Sequence[str],
    package: PackageSpan,
    requirements: Path | None,
    options: Options,
    progress: Progress,
    command: str,
    margin: float,
    on_judged: Callable[[Judged, int], None] | None = None,
) -> BisectResult:
    """The first version after the good one under which the command is slower by more than `margin`, or fails. The budget is for each
    version.

    Raises:
        ConfigError: the versions are not there, or the command's program is in no environment.
        LaunchError: an environment of the good version cannot be made, or the command fails in it.
    """
    good, *later = releases(package)
    with local.interruptible(), TemporaryDirectory(prefix="playbook-packages-") as folder:
        baseline = _command(words, Path(folder) / good, package.name, requirements)

        def judge(version: str) -> Judged:
            try:
                candidate = _command(words, Path(folder) / version, package.name, requirements)
            except LaunchError as e:
                return Judged(version, UNKNOWN, str(e))
            question = ab.CommandPair(baseline, candidate, margin=margin, loss=None, any_work=True)
            fresh = replace(options, profile=options.profile or detect.CPU, began=time.monotonic())
            outcome, answer = ab.compare(question, fresh, progress, command)
            failed = next((r for r in outcome.evidence.measured.runs if r.outcome != "ok"), None)
            sentence = outcome.evidence.derived.verdict.sentence
            if failed is not None and failed.variant == "baseline":
                raise LaunchError(f"the command fails with {package.name} {good} itself, so nothing can be compared with it: {sentence}")
            return Judged(version, _trouble(answer.verdict, failed.outcome if failed else None), sentence)

        return search(later, judge, on_judged)


def _trouble(verdict: ab.Verdict, failed: str | None) -> str:
    if verdict == "error":
        return failed or UNKNOWN
    return {"slower": SLOWER, "undecided": UNKNOWN}.get(verdict, NONE)


def _command(words: Sequence[str], place: Path, name: str, requirements: Path | None) -> list[str]:
    """The command by the programs of a new environment, which holds the version of the package that its folder is called after, and what
    the requirements name.

    Raises:
        ConfigError: its program is in no environment.
        LaunchError: pip does not install the package.
    """
    venv.create(place, symlinks=True)
    more = ["-r", str(requirements.resolve())] if requirements else []
    _pip("--python", str(place / "bin" / "python"), "install", "--quiet", f"{name}=={place.name}", *more)
    program = place / "bin" / words[0]
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
        output = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise LaunchError(f"pip {words[-1]}: {output[-1][:300] if output else 'failed'}")
    return done.stdout


def _version_key(version: str) -> tuple[int, ...]:
    """For order; zeros at the end do not count, as 2.10 and 2.10.0 are one."""
    return tuple(int(part) for part in re.sub(r"(\.0+)+\Z", "", version).split("."))
