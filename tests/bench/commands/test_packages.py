"""Bisecting the versions of a package: five wheels of a few lines, which take as long as their steps say and print these at the end: a log that
says what a launch did not take is refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from pathlib import Path

import pytest
from in_process import run

from playbook.errors import ConfigError
from playbook_bench.run import bisect

_MODULE = """
import time

def train():
    if {fails!r}:
        raise SystemExit("no such kernel")
    time.sleep(10 * {seconds})
    for step in range(10):
        print('{{"step": %d, "seconds": %s, "loss": 1.0, "tokens": 64}}' % (step + 1, {seconds} + step % 3 / 2**20), flush=True)
"""
VERSIONS = ("1.0", "1.1", "1.2", "1.10", "2.0")


def wheel(folder: Path, version: str, seconds: float, *, fails: bool = False) -> None:
    files = {
        "planned_log.py": _MODULE.format(seconds=seconds, fails=fails),
        f"planned_log-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: planned-log\nVersion: {version}\n",
        f"planned_log-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text)}"
        for name, text in files.items()
    ]
    record = f"planned_log-{version}.dist-info/RECORD"
    with zipfile.ZipFile(folder / f"planned_log-{version}-py3-none-any.whl", "w") as out:
        for name, text in (files | {record: "\n".join([*rows, f"{record},,", ""])}).items():
            out.writestr(name, text)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes all wheels from."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.full
@pytest.mark.parametrize(("slow", "fails", "trouble"), [("1.2", False, "slower"), ("1.10", True, "crash")])
def test_the_planted_version_among_five_is_named(
    index: Path, capsys: pytest.CaptureFixture[str], slow: str, fails: bool, trouble: str
) -> None:
    since = VERSIONS.index(slow)
    for place, version in enumerate(VERSIONS):
        wheel(index, version, 0.01 if place < since else 0.012, fails=fails and place >= since)
    command = ["python", "-c", "import planned_log; planned_log.train()"]
    code, out, _ = run(capsys, "bisect", "--packages", "planned-log==1.0..2.0", "--json", "--", *command)
    answer = json.loads(out)
    assert (answer["suspects"], answer["trouble"], code) == ([slow], trouble, 0)
    assert len(answer["judged"]) <= 3, "halves, not one version after the other"


@pytest.mark.full
def test_versions_are_ordered_as_numbers_and_both_ends_are_asked_for(index: Path) -> None:
    for version in VERSIONS:
        wheel(index, version, 0.01)
    assert bisect.releases(bisect.package_span("planned-log==1.1..2.0.0")) == ["1.1", "1.2", "1.10", "2.0"]
    with pytest.raises(ConfigError, match=r"pip lists 1\.0, 1\.1.*expected 1\.0 and 3\.0"):
        bisect.releases(bisect.package_span("planned-log==1.0..3.0"))


@pytest.mark.parametrize("text", ["torch", "torch==2.10", "torch==2.12..2.10", "torch==2.10..2.10.0", "-r x==1..2", "a b==1..2"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected NAME==GOOD\.\.BAD"):
        bisect.package_span(text)


@pytest.mark.parametrize(
    "words",
    [
        ["main"],
        ["a", "b"],
        ["a", "b", "--case", "x", "--packages", "torch==1..2"],
        ["--packages", "torch==1..2"],
        ["a", "b", "--requirements", "x", "--case", "y"],
    ],
)
def test_half_a_question_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "bisect", *words)
    assert code == 2
    assert "expected" in err
