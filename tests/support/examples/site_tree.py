"""A small site: one card of the tests' own beside the real ones, and evidence made by the harness's own models."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from playbook.cards import model
from playbook.paths import data_root, repo_root
from playbook.records.evidence import (
    Check,
    ClaimRef,
    Comparison,
    Condition,
    Contrast,
    Curve,
    Derived,
    Evidence,
    Machine,
    Measured,
    PointFigure,
    Run,
    Sample,
    Seconds,
    Verdict,
    seal,
    stored_sha,
)
from playbook_app.site import build as site
from playbook_app.site.text import NBSP
from playbook_bench.run.store import render

ID = "01JD0000000000000000000001"
CARD = """\
id: fixture-card
title: A card for tests
summary: Set the thing, then measure.
symptoms: ["the *thing* takes <b>long</b>", "odd | symptom"]
aliases: [thingamajig]
phase: profile
wall: communication
claims:
  - id: X1
    statement: The new thing is at least three percent better than the old one.
    mechanism: It does half of the work, so it takes less of the time.
    kind: pair
    comparison: {baseline: {moe.dispatcher: alltoall}, candidate: {moe.dispatcher: allgather}}
    metric: useful_tokens_per_s_per_gpu
    expect: {op: ">=", margin: {value: 3, unit: percent}}
    scope: {gpus: ">=2"}
    label: training-equivalent
    sources: [{title: A title, origin: ours, date: 2026-04}]
    case: fixture-case
    mechanism_check:
      id: X1.m
      statement: The new thing sends no more bytes than the old one.
      case: fixture-bytes
      metric: dispatch_bytes_per_token_layer
      expect: {op: ">=", margin: {value: 0, unit: percent}}
      comparison: {baseline: {moe.dispatcher: alltoall}, candidate: {moe.dispatcher: allgather}}
decide:
  - {when: {stage: bring_up}, set: {moe.dispatcher: alltoall}, because: [X1], note: "{: onclick=alert(1) } [click](javascript:alert(1))"}
pitfalls:
  - {symptom: It does not move, cause: "<script>alert(1)</script>", fix: Read the receipt}
"""


def claim_ref(card_folder: Path, card_id: str = "fixture-card", claim_id: str = "X1") -> ClaimRef:
    """A claim, by default the fixture's, as the harness copies it into a record."""
    from playbook.cards.load import read_cards

    card = next(e.card for e in read_cards([card_folder / f"{card_id}.yaml"]).loaded)
    claim: model.Claim = next(c for c in card.claims if c.id == claim_id)
    return ClaimRef(
        id=claim.id,
        card=card.id,
        card_sha="0" * 16,
        statement=claim.statement,
        kind=claim.kind,
        metric=claim.metric,
        expect=claim.expect,
        comparison=claim.comparison,
    )


def run_(position: int, variant: Any) -> Run:
    seconds = [0.100 + 0.001 * i - (0.01 if variant == "candidate" else 0) + 1e-6 * position for i in range(4)]
    return Run(
        run_id=f"r{position}",
        variant=variant,
        role="measure",
        pair=position // 2,
        position=position,
        outcome="ok",
        started=f"2026-11-20T10:00:{5 * position:02d}Z",
        wall_s=5.0,
        ranks=2,
        steps_wanted=4,
        config_sha="c" * 16,
        seconds=Seconds(start_up=1.0, timed=math.fsum(seconds), total=4.9),
        samples=[Sample(step=i, timed=True, loss=5.0 - i / 10, seconds=s, useful_tokens=9, raw_tokens=9) for i, s in enumerate(seconds)],
    )


def evidence(claim: ClaimRef, effect: float = 0.0731, evidence_id: str = ID, **changes: Any) -> Evidence:
    """A confirmed verdict on a machine with four GPUs."""
    comparison = Comparison(
        metric=claim.metric,
        unit="tokens/s",
        better="higher",
        design="launches_abba",
        scale="log_ratio",
        baseline=18000.0,
        candidate=18000.0 * (1 + effect),
        effect=effect,
        low=effect - 0.011,
        high=effect + 0.012,
        pairs=4,
        look=1,
    )
    machine = Machine(
        name="h200x4",
        description="4 x NVIDIA H200, NVLink",
        gpus=4,
        gpu="NVIDIA H200",
        gpu_memory_gib=140.4,
        interconnect="nvlink",
        cpu="Intel(R) Xeon(R) Processor",
        cores=64,
    )
    measured = Measured(
        claim=claim, machine=machine, profile="h200x4", runs=[run_(i, v) for i, v in enumerate(["baseline", "candidate"] * 2)]
    )
    derived = Derived(
        comparison=comparison,
        receipts=[Check(variant="baseline", rule="require all_to_all == 8", observed=8, expected="8", ok=True, runs=4)],
        gates=[Condition(name="same_data", ok=True)],
        verdict=Verdict(status="confirmed", reason="margin", sentence="confirmed: the interval lies above 3 %"),
    )
    made = Evidence(
        evidence_id=evidence_id,
        created="2026-11-20T10:00:00Z",
        expires="2099-05-20",
        command="playbook confirm fixture-card/X1 --profile h200x4",
        measured=measured,
        derived=derived,
        seconds=Seconds(total=60.0),
    )
    return seal(made.model_copy(update=changes))


SWEEP = "01JD0000000000000000000009"
LENGTHS = {"4096": (3000.0, 61.0), "8192": (2940.0, 62.5), "16384": (2710.0, 66.0)}
"""Tokens per second and GiB at each length of the sweep's record."""


def add_sweep(tree: Path) -> Path:
    """A record of the shipped sweep over sequence lengths, with its curve, its peak memory, and a length that did not fit."""
    points = [PointFigure(variant=v, outcome="ok", launches=4, value=rate, effect=rate / 3000 - 1) for v, (rate, _) in LENGTHS.items()]
    contrasts = [
        Contrast(
            name=f"{v} over 4096", weights={v: 1.0, "4096": -1.0}, effect=rate / 3000 - 1, low=rate / 3000 - 1.02, high=rate / 3000 - 0.98
        )
        for v, (rate, _) in LENGTHS.items()
        if v != "4096"
    ]
    curve = Curve(
        metric="useful_tokens_per_s_per_gpu",
        unit="tokens/s",
        better="higher",
        design="launches_blocks",
        scale="log_ratio",
        points=[*points, PointFigure(variant="32768", outcome="oom", launches=1)],
        contrasts=contrasts,
        blocks=4,
    )
    made = evidence(claim_ref(tree / "cards", "long-context-cp-sizing", "L7"), evidence_id=SWEEP)
    runs = [
        run_(i, v).model_copy(update={"metrics": {"peak_memory_bytes": gib * 2**30}}) for i, (v, (_, gib)) in enumerate(LENGTHS.items())
    ]
    sealed = seal(
        made.model_copy(
            update={
                "measured": made.measured.model_copy(update={"runs": runs}),
                "derived": made.derived.model_copy(update={"comparison": None, "curve": curve}),
            }
        )
    )
    path = tree / "results" / "h200x4" / f"{SWEEP}.json"
    path.write_text(render(sealed))
    return path


def reseal(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a record and give it the hash that fits."""
    data = json.loads(path.read_text())
    change(data)
    data["sha256"] = stored_sha(data)
    path.write_text(json.dumps(data))


def make_tree(root: Path, shipped: bool = True) -> Path:
    """A repository with the real pages, the real cards if `shipped`, and one more, and one record."""
    repo = repo_root()
    made = shutil.ignore_patterns("cards", "evidence", "_generated", "__pycache__")
    shutil.copytree(repo / "docs", root / "docs", ignore=made)
    config = (repo / "mkdocs.yml").read_text()
    assert "results: [bench/results]" in config
    (root / "mkdocs.yml").write_text(config.replace("results: [bench/results]", "results: [results]\n  cards: cards"))
    (root / "cards").mkdir()
    if shipped:
        shutil.copytree(data_root("cards"), root / "cards", dirs_exist_ok=True)
    (root / "cards" / "fixture-card.yaml").write_text(CARD)
    folder = root / "results" / "h200x4"
    folder.mkdir(parents=True)
    (folder / f"{ID}.json").write_text(render(evidence(claim_ref(root / "cards"))))
    return root


def page(tree: Path, name: str) -> str:
    """The page, with plain spaces for the ones that keep a number and its unit on one line."""
    return (tree / "docs" / name).read_text().replace(NBSP, " ")


class Generated(NamedTuple):
    """A tree whose pages are made, and what their making gave."""

    tree: Path
    made: site.GeneratedSite

    def page(self, name: str) -> str:
        """One of its pages."""
        return page(self.tree, name)


def generated(tree: Path, today: date = date(2026, 11, 21), **more: Any) -> Generated:
    """The tree with its pages, which are written into its `docs`."""
    return Generated(tree, site.generate(tree / "docs", [tree / "results"], cards=tree / "cards", today=today, **more))


def build(root: Path, more: Sequence[Path] = ()) -> Path:
    """The site, built strictly, with records of `more` folders; a build that fails shows its output."""
    path = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, "PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1", "PLAYBOOK_SITE_RESULTS": os.pathsep.join(map(str, more))}
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(root / "mkdocs.yml"), "-d", str(root / "built")]
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=2000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "built"
