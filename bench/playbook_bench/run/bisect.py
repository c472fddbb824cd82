"""Which commit made a case slower, or made it fail: a binary search with the regression gate as the judge.

Every commit is compared with the good one in a series of its own, by the rules of the gate. A commit that cannot be judged (it does not read
the configuration, fails in another way than the bad one, or differs by too little for the noise) is passed over, as `git bisect skip` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from playbook.errors import ConfigError, LaunchError
from playbook.paths import repo_root
from playbook.records.case import Case, load_case
from playbook_bench.judge.bisection import NONE, SLOWER, UNKNOWN, Found, Judged, search
from playbook_bench.launch import local
from playbook_bench.run import gate
from playbook_bench.run.options import Options
from playbook_bench.run.series import Progress
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
    told: Callable[[Judged, int], None] | None = None,
    root: Path | None = None,
    limits: gate.Limits | None = None,
) -> Found:
    """The first commit after `good`, up to `bad`, at which the case's baseline configuration is slower or fails.

    The budget is for each commit, and so are the gate's `limits`. `told` hears of each judgement and of how many commits are left. Merges are one step, with all they bring.

    Raises:
        ConfigError: a reference is no commit, or `bad` does not follow `good`.
        LaunchError: git cannot be run, or the good commit fails itself at the first judgement.
    """
    options = options or Options()
    # What a launch takes beside its steps varies more than they do, and would leave good commits open.
    limits = replace(limits or gate.Limits(), allowed={"process": _ANY, **(limits.allowed if limits else {})})
    found_case = case if isinstance(case, Case) else load_case(case)
    repository = gate.repository_of(found_case, root)
    history, reference = commits(repository, good, bad), checkout.commit_of(repository, good)

    done: list[Judged] = []

    def judge(commit: str) -> Judged:
        fresh = replace(options, began=time.monotonic())
        found = gate.run(found_case, reference, fresh, limits, progress, root=repository, judged=commit)
        try:
            trouble = trouble_of(found)
        except LaunchError:
            if not done:
                raise
            trouble = UNKNOWN  # the good commit has run before, so this is chance, and hours of judgements must not be lost to it
        done.append(Judged(commit, trouble, found.sentence))
        return done[-1]

    with local.interruptible():  # between two gates too, or SIGTERM would leave the commit's files behind
        return search(history, judge, told)


def trouble_of(found: gate.GateResult) -> str:
    """What the gate found: none, slower, how the commit's runs ended, or unknown.

    Raises:
        LaunchError: the good commit's own runs fail, so that nothing can be compared with it.
    """
    if found.status != "error":
        return {"regression": SLOWER, "pass": NONE, "undecided": UNKNOWN, "too_noisy": UNKNOWN}[found.status]
    failed = next((r for r in found.runs if r.outcome != "ok"), None)
    if failed is not None and failed.variant == "baseline":
        raise LaunchError(f"the good commit fails itself, so nothing can be compared with it: {found.sentence}")
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


def as_json(found: Found, kind: str = "commit") -> dict[str, Any]:
    """The result as plain data; `kind` is what was judged, commit or version."""
    return {
        "schema": "bisect/1",
        "status": found.status,
        "exit_code": found.exit_code,
        "trouble": found.trouble,
        "suspects": found.suspects,
        "judged": [{kind: j.commit, "trouble": j.trouble, "sentence": j.sentence} for j in found.judged],
    }
