"""Every claim of the documents that the playbook started from is in a card. The list is typed here, one id a line."""

from __future__ import annotations

import json

import pytest

from playbook_app.cli import app

# fmt: off
WANTED = [
    "H1",
    "L1",
    "L2",
    "L3",
    "L4",
    "L5",
    "L6",
    "L7",
    "L8",
    "L9",
    "L10",
    "L11",
    "L12",
    "L13",
    "M1",
    "M2",
    "M3",
    "M4",
    "T1",
    "T2",
    "T3",
    "T4",
    "T5",
    "T6",
    "T7",
    "T8",
    "T9",
    "T10",
    "T11",
    "T12",
    "V1",
    "V2",
    "V3",
    "V4",
    "V5",
    "V6",
    "V7",
    "V8",
    "V9",
    "V10",
    "V11",
    "V12",
    "V13",
    "V14",
    "V15",
    "V16",
    "W1",
    "W2",
    "W3",
    "W4",
    "W5",
    "W6",
    "W7",
    "W8",
    "W9",
    "W10",
    "W11",
    "W12",
    "W13",
    "W14",
    "W15",
    "W16",
    "W17",
    "W18",
    "W19",
    "W20",
    "W21",
]
# fmt: on


def test_every_claim_is_in_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        app.main(["cards", "list", "--claims", "--json"])
    assert not stop.value.code
    rows = json.loads(capsys.readouterr().out)
    held = [row["id"] for row in rows]
    assert sorted(held) == sorted(set(held)), "an id is used twice"
    assert set(WANTED) <= set(held), f"no card holds {sorted(set(WANTED) - set(held))}"


def test_the_list_names_each_claim_once() -> None:
    assert len(WANTED) == len(set(WANTED))
