"""`playbook tune` on a script with planted knobs, by a planned clock."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from playbook.paths import repo_root
from playbook_app.cli.app import app

SCRIPT = repo_root() / "tests" / "support" / "ranks" / "tuned_script.py"
USELESS = [f"--idle{i}" for i in range(6)]
KNOBS = "knobs:\n" + "\n".join(
    [
        '  idle0: {argument: --idle0, values: ["off", "on"]}',
        '  crash: {argument: --crash, values: [false, true]}',
        '  cut: {argument: --cut, values: ["off", "on"]}',
        '  big: {argument: --big, values: [false, true]}',
        '  careful: {argument: --careful, values: ["off", "on"]}',
        '  fuse: {argument: --fuse, values: ["off", "on"], require: [{log: "fused kernel is on"}]}',
        *(f'  idle{i}: {{argument: --idle{i}, values: ["off", "on"]}}' for i in range(1, 6)),
        '  workers: {environment: WORKERS, values: [null, "8"]}',
        "",
    ]
)


def tune(tmp_path, *options, knobs=KNOBS):
    path = tmp_path / "knobs.yaml"
    path.write_text(knobs)
    words = ["tune", "--knobs", str(path), "--results", str(tmp_path / "results"), "--seed", "3", "--json", *options]
    done = CliRunner().invoke(app, [*words, "--", sys.executable, str(SCRIPT), "--launch", "{run}"])
    return done


@pytest.mark.usefixtures("planned")
def test_the_right_two_are_kept_and_every_other_says_why_not(tmp_path):
    done = tune(tmp_path)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert {row["knob"] for row in found["kept"]} == {"fuse", "workers"}
    print(done.stderr)
    reasons = {row["knob"]: row["reason"] for row in found["refused"]}
    assert reasons["crash"].startswith("crashed") and "not built" in reasons["crash"]
    assert reasons["big"].startswith("out of memory")
    assert "loss" in reasons["cut"]
    assert found["final"]["verdict"] == "faster"
    assert found["final"]["effect_percent"]["low"] < 18.7 < found["final"]["effect_percent"]["high"]
