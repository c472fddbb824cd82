"""The guide to tuning: its files are written as it shows them, and its console blocks run, by a planned clock."""

from __future__ import annotations

import json

import pytest
from guide_blocks import consoles

from playbook.paths import data_root

SLEPT, INVENTED = "time.perf_counter() - begin", "seconds * random.gauss(1, 0.002)"


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_every_console_block_of_the_guide_runs(shell):
    outputs = []
    for text in consoles(
        data_root("guide") / "tune.md", shell.place, lambda text: text.replace(SLEPT, INVENTED).replace("    time.sleep(seconds)\n", "")
    ):
        done = shell(text)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    assert len(outputs) == 3
    assert "workers=8" in outputs[0]
    found = json.loads(outputs[2])
    assert {row["knob"] for row in found["kept"]} == {"fuse", "workers"}
    assert "kept      fuse=on" in outputs[1]
    assert "refused   graphs=on  crashed" in outputs[1]
