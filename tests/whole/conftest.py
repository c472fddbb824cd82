"""What several tests of the harness plant."""

import json
import signal
from typing import ClassVar

import pytest
from planted_case import CASE

from playbook_bench.launch.local import Interrupted, LocalLauncher


@pytest.fixture
def case(tmp_path):
    def write(metric="useful_tokens_per_s_per_gpu", timeout=600, steps=12):
        folder = tmp_path / "bench" / "cases"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "planted.yaml"
        path.write_text(CASE.replace("METRIC", metric).replace("TIMEOUT", str(timeout)).replace("train.steps: 12", f"train.steps: {steps}"))
        return str(path)

    return write


@pytest.fixture
def plant(monkeypatch):
    def set_(**variants):
        monkeypatch.setenv("PLANT", json.dumps(variants))

    return set_


@pytest.fixture
def stops_at():
    """Makes a launcher that stops its command at this launch, as a signal does; `launched` has the folders of all launches, of that command and of the next."""

    def made(number, base=LocalLauncher):
        class StopsOnce(base):
            launched: ClassVar[list[str]] = []

            def run(self, spec, on_step=None):
                self.launched.append(spec.folder.name)
                if len(self.launched) == number:
                    raise Interrupted(signal.SIGTERM)
                return super().run(spec, on_step)

        return StopsOnce

    return made


@pytest.fixture
def card(tmp_path, case):
    def write(op, margin, metric="useful_tokens_per_s_per_gpu", unit="percent"):
        case(metric)
        folder = tmp_path / "cards"
        folder.mkdir(exist_ok=True)
        path = folder / "planted-card.yaml"
        path.write_text(f"""
id: planted-card
title: Planted
summary: Planted
symptoms: [none]
phase: profile
wall: communication
claims:
  - id: Z1
    statement: The planted candidate is as much better as it was planted to be.
    mechanism: It was planted that way, so it must come out.
    kind: pair
    comparison: {{baseline: {{moe.dispatcher: alltoall}}, candidate: {{moe.dispatcher: allgather}}}}
    metric: {metric}
    expect: {{op: "{op}", margin: {{value: {margin}, unit: {unit}}}}}
    label: benchmark-only
    sources: [{{title: Planted, origin: ours, date: "2026-01"}}]
    case: planted
""")
        return str(path)

    return write
