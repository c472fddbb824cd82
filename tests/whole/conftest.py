"""What several tests of the harness plant."""

import json

import pytest
from planted_case import CASE


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
