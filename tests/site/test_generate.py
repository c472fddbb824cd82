"""The pages that come from cards and evidence, before the site is built."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from site_tree import CARD, ID, Generated, claim_ref, evidence, generated, page, render, reseal

from playbook.errors import FileError
from playbook.records.evidence import stored_sha
from playbook.records.read import Present, read
from playbook_app.site.text import NBSP, percent, quantity, text


def record(tree: Path) -> Path:
    return tree / "results" / "h200x4" / f"{ID}.json"


def add(tree: Path, evidence_id: str, **changes: Any) -> Path:
    path = tree / "results" / "h200x4" / f"{evidence_id}.json"
    path.write_text(render(evidence(claim_ref(tree / "cards"), evidence_id=evidence_id, **changes)))
    return path


def changed(tree: Path, change: Callable[[dict[str, Any]], None]) -> Generated:
    """The pages once the record has a change and the hash that fits."""
    reseal(record(tree), change)
    return generated(tree)


def reworded(tree: Path, old: str, new: str) -> str:
    """The card's page once the card says something else."""
    card = tree / "cards" / "fixture-card.yaml"
    card.write_text(card.read_text().replace(old, new))
    return generated(tree).page("cards/fixture-card.md")


def test_a_card_shows_verdict_effect_interval_machine_date_and_command(plain: Generated) -> None:
    shown = plain.page("cards/fixture-card.md")
    assert "pb-confirmed" in shown
    assert f"[+7.3 % &#91;+6.2, +8.5&#93;](../evidence/{ID}.md)" in shown
    assert "4 x NVIDIA H200, NVLink" in shown
    assert "2026-11-20" in shown
    assert "2099-05-20" in shown
    assert "playbook confirm fixture-card/X1 --profile h200x4" in shown
    assert ">measured +7.3 %</text>" in shown, "the axis of the drawing names the effect that it shows"


def test_a_changed_figure_changes_the_page(tree: Path, plain: Generated) -> None:
    other = changed(tree, lambda d: d["derived"]["comparison"].update(effect=0.0412))
    for name in ("cards/fixture-card.md", "_generated/claims.md", f"evidence/{ID}.md"):
        assert ["+7.3 %" in made.page(name) for made in (plain, other)] == [True, False], name
        assert ["+4.1 %" in made.page(name) for made in (plain, other)] == [False, True], name


@pytest.mark.parametrize("name", ["cards/fixture-card.md", "cards/index.md", "_generated/claims.md", "evidence/index.md"])
def test_an_altered_record_is_never_a_verdict(tree: Path, name: str) -> None:
    data = json.loads(record(tree).read_text())
    data["derived"]["comparison"]["effect"] = 0.5
    record(tree).write_text(json.dumps(data))
    shown = generated(tree).page(name)
    assert "pb-confirmed" not in shown
    assert "+50.0 %" not in shown
    assert "Altered" in page(tree, f"evidence/{ID}.md")
    assert "pb-altered" in page(tree, "evidence/index.md")
    assert "was altered and does not count" in page(tree, "cards/fixture-card.md")


def test_an_altered_sample_is_noticed(tree: Path) -> None:
    record(tree).write_text(record(tree).read_text().replace('"seconds": 0.1,', '"seconds": 0.2,', 1))
    assert "pb-altered" in generated(tree).page("evidence/index.md")


def test_an_expired_verdict_is_stale(tree: Path) -> None:
    generated(tree, date(2100, 1, 1))
    assert "expired on 2099-05-20" in page(tree, "cards/fixture-card.md")
    assert "pb-stale" in page(tree, "cards/index.md")


def test_a_verdict_of_an_older_trainer_is_stale(tree: Path) -> None:
    reseal(record(tree), lambda d: [run.update(performance_revision=1) for run in d["measured"]["runs"]])
    assert [r.stale(date(2026, 11, 21), None) for r in read([tree / "results"], present=Present({"torch": 1}))] == [None]
    assert "performance revision 2, the runs at 1" in str(
        read([tree / "results"], present=Present({"torch": 2}))[0].stale(date(2026, 11, 21), None)
    )


def test_a_verdict_on_another_wording_of_the_claim_is_stale(tree: Path) -> None:
    assert "the claim has changed since" in reworded(tree, 'op: ">=", margin: {value: 3,', 'op: ">=", margin: {value: 9,')


def test_the_newest_verdict_speaks_and_a_failed_run_does_not_hide_it(tree: Path) -> None:
    add(tree, "01JD0000000000000000000002", effect=0.0912, created="2026-11-21T10:00:00Z")
    failed = add(tree, "01JD0000000000000000000003", created="2026-11-22T10:00:00Z")
    reseal(failed, lambda d: d["derived"]["verdict"].update(status="error", reason="run_error", sentence="rank 0 was killed"))
    shown = generated(tree).page("_generated/claims.md")
    assert "+9.1 %" in shown
    assert "+7.3 %" not in shown
    assert "rank 0 was killed" in page(tree, "evidence/01JD0000000000000000000003.md")


def test_a_margin_that_is_a_ratio_is_marked_beside_the_effect(tree: Path) -> None:
    shown = reworded(tree, "margin: {value: 3, unit: percent}", "margin: {value: 0.45, unit: ratio}")
    assert "at least −55.0 %</text>" in shown


def test_the_band_of_an_equality_is_drawn_where_the_verdict_has_it(tree: Path) -> None:
    """On logarithms: an interval that ends at -9.7 % is not inside 10 %."""
    shown = reworded(tree, 'op: ">=", margin: {value: 3,', "op: within, margin: {value: 10,")
    assert ">claim&#58; +10.0 %</text>" in shown
    assert ">claim&#58; −9.1 %</text>" in shown


def test_a_claim_without_evidence_says_untested_and_how_to_test_it(tree: Path) -> None:
    record(tree).unlink()
    shown = generated(tree).page("cards/fixture-card.md")
    assert "pb-untested" in shown
    assert "playbook confirm fixture-card/X1" in shown


def test_every_card_and_every_claim_has_its_place(whole: Generated) -> None:
    from playbook.cards.load import load_all

    matrix, index = whole.page("_generated/claims.md"), whole.page("cards/index.md")
    assert set(load_all()) < set(whole.made.cards)
    for card in load_all().values():
        own = whole.page(f"cards/{card.id}.md")
        listed = not card.own_trainer
        assert card.id in matrix
        assert (card.id in index) == (f"cards/{card.id}." in whole.page("llms.txt")) == listed
        for claim in card.claims:
            for name in (claim.id, *([claim.mechanism_check.id] if claim.mechanism_check else [])):
                anchor = name.lower().replace(".", "-")
                assert f"{{ #{anchor} }}" in own
                assert f"{card.id}.md#{anchor}" in matrix
                assert (f"{card.id}.md#{anchor}" in index) == listed


def test_the_evidence_page_shows_launches_receipt_samples_and_replay(plain: Generated) -> None:
    shown = plain.page(f"evidence/{ID}.md")
    assert "require all" in shown
    assert shown.count("<circle") == 16
    assert "playbook bench replay" in shown
    assert json.loads(plain.page(f"evidence/{ID}.json"))["evidence_id"] == ID


def test_what_a_claim_expects_is_said_in_words_that_mean_it(whole: Generated) -> None:
    """`holds` is no metric, and 0.45 times the baseline is not 0.45 times better."""
    full = whole.page("llms-full.txt")
    for shown in (whole.page("cards/long-context-cp-sizing.md"), full):
        assert "| **Expects** | holds |" in shown or "- Expects: holds\n" in shown
        assert "holds</code> holds" not in shown
        assert "holds holds" not in shown
    assert "at least 0.45 times as good" in whole.page("cards/torch-trainer-speed.md")
    assert "times better" not in full


def fell(data: dict[str, Any]) -> None:
    data["derived"]["comparison"] |= {"better": "lower", "baseline": 150.0, "candidate": 100.0, "effect": 0.5, "low": 0.4, "high": 0.6}


def few(data: dict[str, Any]) -> None:
    data["derived"]["comparison"]["pairs_needed"] = 2
    data["measured"]["plan"] = {"rules": 2, "seed": 1, "looks": [4, 8], "alpha": 0.05, "budget_s": 600.0, "stopped": "budget"}


def noisy(data: dict[str, Any]) -> None:
    """The condition A/A names the deviation of logarithms; 14 % there and 15 % above it would be two figures for one."""
    data["derived"]["comparison"].update(floor=0.14, deviation=0.08, mde=0.2)


def computing(data: dict[str, Any]) -> None:
    for i, run in enumerate(data["measured"]["runs"]):
        run["observed"] = {"counters": {"gpu_computing_percent": 30.0 + i % 3 if run["variant"] == "baseline" else 98.0}}


def waiting(data: dict[str, Any]) -> None:
    for run in data["measured"]["runs"]:
        for sample in run["samples"]:
            sample["data_seconds"] = sample["seconds"] * (0.11 if run["variant"] == "candidate" else 0.001)


def stolen(data: dict[str, Any]) -> None:
    for run in data["measured"]["runs"]:
        run["telemetry"] = {"stolen_percent": 12.2 if run["variant"] == "baseline" else 0.4}


@pytest.mark.parametrize(
    ("change", "about", "says"),
    [
        (fell, "Change of the metric itself", ["| Change of the metric itself | −33.3 % |"]),
        (few, "| Pairs needed | 4 |", ["| Pairs needed | 4 |"]),  # no fewer than a verdict needs
        (
            noisy,
            "| Deviation of the stored A/A | 14.0 % |",
            [
                "| Deviation of the stored A/A | 14.0 % |",
                "| Deviation of the paired differences | 8.0 % |",
                "| Least distance from the margin that so many pairs settle | 22.1 % |",
            ],
        ),
        (computing, "the GPU computed", ["the GPU computed 31 % of the step in baseline, 98 % of the step in candidate"]),
        (waiting, "on data.", ["The host spent 11 % of the step in candidate on data."]),
        (stolen, "hypervisor", ["The hypervisor kept processor time from this machine: 12 % from baseline."]),
    ],
)
def test_the_evidence_page_says_what_its_record_holds_and_nothing_of_what_it_does_not(
    tree: Path, plain: Generated, change: Any, about: str, says: list[str]
) -> None:
    shown = changed(tree, change).page(f"evidence/{ID}.md")
    assert about not in plain.page(f"evidence/{ID}.md")
    assert [line for line in says if line not in shown] == []


def test_an_interval_between_looks_says_so_wherever_it_is_shown(tree: Path, plain: Generated) -> None:
    def stopped(data: dict[str, Any]) -> None:
        data["derived"]["comparison"].update(look=None, pairs=2)
        data["derived"]["verdict"].update(status="inconclusive", reason="budget", sentence="+7.3 %; stopped after 2 pairs")

    pages = ("_generated/claims.md", "cards/fixture-card.md", "evidence/index.md", f"evidence/{ID}.md")
    assert not any("between looks" in plain.page(name) for name in pages)
    other = changed(tree, stopped)
    assert all("&#93; between looks" in other.page(name) for name in pages)


@pytest.mark.parametrize(
    ("baseline", "candidate", "shown"),
    [
        ({"kind": "mock", "pack": False}, {"kind": "mock", "pack": False}, "random tokens, one document to a row"),
        ({"kind": "text", "source": "generated", "pack": True}, {"kind": "vqa", "source": "generated", "pack": True},
         "generated text, packed in baseline; generated photographs with questions, packed in candidate"),
        ({"kind": "vqa", "source": "auto", "path": None, "pack": False}, {"kind": "mock", "source": "auto", "pack": True},
         "bundled photographs with questions in baseline; random tokens, packed in candidate"),
        ({"kind": "text", "source": "parquet", "path": "/data/web"}, {"kind": "text", "source": "parquet", "path": "/data/web"},
         "text from a data set of the run's own"),
        ({"kind": ["<b>"]}, 7, None),
    ],
)  # fmt: skip
def test_the_evidence_page_says_what_data_were_read(baseline: Any, candidate: Any, shown: str | None, tree: Path) -> None:
    """A claim may say text or photographs; what the runs read is made up more often than not."""

    def read_these(data: dict[str, Any]) -> None:
        data["measured"]["configs"] = {"b" * 16: {"data": baseline}, "c" * 16: {"data": candidate}}
        for run in data["measured"]["runs"]:
            run["config_sha"] = ("b" if run["variant"] == "baseline" else "c") * 16

    rows = [line for line in changed(tree, read_these).page(f"evidence/{ID}.md").splitlines() if line.startswith("| Data |")]
    assert rows == ([f"| Data | {shown} |"] if shown else [])


def test_commands_in_prose_are_shown_as_code_and_stay_text(tree: Path) -> None:
    shown = reworded(tree, "fix: Read the receipt", "fix: Run `playbook bench list <b>` and read `it")
    assert "Run <code>playbook bench list &#60;b&#62;</code> and read &#96;it" in shown


@pytest.mark.parametrize("over", ["timed steps", None])
def test_the_evidence_page_says_what_held_clocks_down(over: str | None, tree: Path) -> None:
    """Of records whose readings are of the timed steps; those from before are of start-up as well."""

    def limit(data: dict[str, Any]) -> None:
        for run in data["measured"]["runs"]:
            slow = run["variant"] == "candidate"
            clock, share = (1695.0, 94.5) if slow else (1980.0, 3.0)
            run["telemetry"] = {"clock_sm_mhz": {"p50": clock}, "limited_percent": {"power": share, "heat": 0.0, "odd": "?"}}
            if over:
                run["telemetry"]["over"] = over

    shown = changed(tree, limit).page(f"evidence/{ID}.md")
    said = "In the timed steps, the GPUs' clocks were held down by power in 3 % of baseline (1,980 MHz), 94 % of candidate (1,695 MHz)."
    assert [said in shown, "held down" in shown] == [bool(over)] * 2


def trace(**changes: Any) -> dict[str, Any]:
    row = {"path": "decoder/dispatch", "phase": "forward", "count": 4.0, "num_ops": 8.0, "host_ms": 3.0, "busy_ms": 12.34, "sum_ms": 13.0}
    rows = [
        {**row, "self_ms": 12.34, "exposed_comm_ms": 2.0},
        {**row, "phase": "backward", "busy_ms": 23.45, "self_ms": 0.0, "exposed_comm_ms": 0.0},
    ]
    totals = {"num_steps": 2, "span_ms": 99.0, "busy_ms": 80.0, "idle_ms": 19.0, "communication_ms": 5.0, "exposed_comm_ms": 2.0}
    table = {
        "collector": "nsys",
        "measures": "gpu",
        **totals,
        "coverage": {"forward": 0.987, "backward": 0.954, "total": 0.97},
        "rows": rows,
    }
    variant = {
        "outcome": "ok",
        "config_sha": "c" * 16,
        "ranks": 4,
        "rank": 0,
        "files": [],
        "table": {**table, "unattributed": [], "notes": []},
    }
    data = {
        "schema_version": "trace/1",
        "trace_id": "abcdef12",
        "created": "2026-11-20T11:00:00+00:00",
        "case": "fixture-case",
        "profile": "h200x4",
        "collector": "nsys",
        "collector_version": "2025.3.1",
        "command": "playbook bench trace fixture-case",
        "machine": {"name": "h200x4", "description": "4 x H200", "gpus": 4, "gpu": "NVIDIA H200", "cpu": "c", "cores": 64},
        "variants": {"baseline": variant, "candidate": variant},
        **changes,
    }
    return {**data, "sha256": stored_sha(data)}


def traced(tree: Path, *traces: dict[str, Any]) -> Generated:
    """The pages once these traces are among the results."""
    folder = tree / "results" / "traces"
    folder.mkdir()
    for i, data in enumerate(traces):
        (folder / f"{i}.json").write_text(json.dumps(data))
    return generated(tree)


def test_a_trace_is_on_the_card_with_its_collector_and_coverage(tree: Path) -> None:
    shown = traced(tree, trace()).page("cards/fixture-card.md")
    for part in ("12.34", "23.45", "nsys", "2025&#46;3.1", "98.7 %", "95.4 %", "../evidence/abcdef12.md"):
        assert part in shown
    assert "Exposed comm. ms" in page(tree, "evidence/abcdef12.md")


def test_a_trace_of_a_sweep_has_a_column_for_each_value(tree: Path) -> None:
    one = trace()["variants"]["baseline"]
    host = {**one, "table": {**one["table"], "measures": "host"}}
    failed = {**one, "outcome": "oom", "table": None}
    shown = traced(tree, trace(variants={"1": failed, "2": host, "4": host})).page("cards/fixture-card.md")
    assert "| Range | Phase | 1 | 2 | 4 |" in shown
    assert shown.count("[12.34](../evidence/abcdef12.md)") == 2
    assert "host busy time" in shown
    assert "share in named parts: 1 no table; 2 forward 98.7 %, backward 95.4 %; 4 forward" in shown


def test_a_trace_of_this_machine_stands_beside_that_of_a_gpu_and_replaces_an_older_one_of_its_own(tree: Path) -> None:
    """Whoever follows a skill without a GPU traces on the CPU; the trace that the card speaks of has to stay."""
    on_cpu = (
        trace(trace_id=trace_id, profile="cpu", created=f"2026-11-{day}T11:00:00+00:00", collector="kineto")
        for trace_id, day in (("00000001", 21), ("00000002", 22))
    )
    shown = traced(tree, trace(), *on_cpu).page("cards/fixture-card.md")
    for part in ("fixture-case on h200x4", "../evidence/abcdef12.md", "fixture-case on cpu", "../evidence/00000002.md"):
        assert part in shown
    assert "../evidence/00000001.md" not in shown


def test_text_from_files_never_becomes_markup(plain: Generated) -> None:
    shown = plain.page("cards/fixture-card.md") + plain.page("cards/index.md")
    assert "<script>alert" not in shown
    assert "<b>long</b>" not in shown
    assert "](javascript:" not in shown
    assert "{: onclick" not in shown


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("results/h200x4/bad.json", "{"),
        ("results/h200x4/bad.json", "[]"),
        ("results/h200x4/bad.json", '{"schema_version": "evidence/9"}'),
        ("results/h200x4/bad.json", '{"schema_version": "evidence/1", "evidence_id": "../x"}'),
        ("cards/bad.yaml", "id: bad\n"),
    ],
)
def test_a_file_that_is_no_record_or_no_card_stops_the_build_with_its_path(tree: Path, file: str, content: str) -> None:
    (tree / file).write_text(content)
    with pytest.raises(FileError, match=file.rpartition("/")[2]):
        generated(tree)


def test_a_well_hashed_record_of_another_shape_is_a_clear_error(tree: Path) -> None:
    reseal(record(tree), lambda d: d["derived"].update(receipts=["x"]))
    with pytest.raises(FileError, match=r"derived\.receipts\.0"):
        generated(tree)


def test_pages_whose_source_is_gone_are_removed_and_others_left_alone(tree: Path) -> None:
    other = CARD.replace("fixture-card", "other-card").replace("X1", "X2").replace("thingamajig", "doohickey")
    (tree / "cards" / "other-card.yaml").write_text(other)
    generated(tree)
    record(tree).unlink()
    (tree / "cards" / "fixture-card.yaml").unlink()
    generated(tree)
    assert not (tree / "docs" / "cards" / "fixture-card.md").exists()
    assert not (tree / "docs" / "evidence" / f"{ID}.json").exists()
    assert (tree / "docs" / "guide" / "verdicts.md").exists()


def test_an_unchanged_page_is_not_written_again(tree: Path) -> None:
    generated(tree)
    path = tree / "docs" / "cards" / "fixture-card.md"
    before = path.stat().st_mtime_ns
    generated(tree)
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.0824, "s", "82.4 ms"),
        (1.5, "s", "1.5 s"),
        (1536, "bytes", "1.5 KiB"),
        (0, "bytes", "0 bytes"),
        (0.25, "share", "25.0 %"),
        (None, "s", "none"),
    ],
)
def test_values_carry_their_unit(value: float | None, unit: str, shown: str) -> None:
    assert quantity(value, unit) == shown


@pytest.mark.parametrize(("share", "shown"), [(0.0312, "+3.1 %"), (-0.0312, "−3.1 %"), (-0.0001, "0.0 %")])
def test_shares_carry_their_sign(share: float, shown: str) -> None:
    assert percent(share).replace(NBSP, " ") == shown


def test_a_newline_cannot_start_a_block() -> None:
    assert "\n" not in text("a\n\n# b")
