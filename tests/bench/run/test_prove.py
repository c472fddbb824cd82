"""Proofs of a case are checked by one short launch of each variant, without a series."""

from __future__ import annotations

import json

import pytest

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook_app.cli.app import main
from playbook_bench.run.aa import prove


@pytest.mark.full
def test_each_variant_is_launched_once_and_a_proof_that_it_does_not_meet_is_shown_with_what_was_seen(tmp_path, capsys):
    text = (data_root("cases") / "recompute-saved-bytes.yaml").read_text(encoding="utf-8")
    wrong = text.replace('count: "layers * microbatches"', 'count: "7 * layers * microbatches"')
    assert wrong != text
    case = tmp_path / "recompute-saved-bytes.yaml"
    case.write_text(wrong, encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "check", str(case), "--profile", "cpu", "--json"])
    assert ended.value.code == 5
    printed = capsys.readouterr()
    rows = json.loads(printed.out)
    assert [(r["variant"], r["outcome"], r["ok"]) for r in rows] == [("baseline", "ok", True), ("candidate", "ok", False)]
    assert "expected == 7 * layers * microbatches = 56" in printed.err


def test_a_case_that_launches_nothing_has_no_proofs():
    with pytest.raises(ConfigError, match="has no proofs to check"):
        prove(["cp-dp-floor"], profile="cpu")
