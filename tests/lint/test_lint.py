"""Every planted contradiction is found by the rule that is meant for it; its repaired twin passes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process import run

from playbook.cards.load import read_cards
from playbook.cards.model import Expect, Quantity
from playbook.errors import ConfigError
from playbook.lint.base import gpus_named, overlap
from playbook.lint.conflicts import effect
from playbook.lint.figures import is_text_number, rounding
from playbook.lint.labels import evaluate, label_problems, layout_problems, table_for, tables
from playbook.paths import data_root, repo_root
from playbook.records.evidence import stored_sha
from playbook_app.services import check
from playbook_app.services.check import CASE_RULES, check_all, rule_rows

FIXTURES = Path(__file__).parent.parent / "fixtures" / "lint"
TODAY = "2026-11-21"
EXPECTED = {
    "01-gpu-floor-formula": {"layout-formula"},
    "02-experts-do-not-fit-gpus": {"layout-family", "layout-decision"},
    "03-edp-stated-wrong": {"layout-family"},
    "04-dp-stated-wrong": {"layout-family"},
    "05-virtual-stages-without-pipeline": {"layout-family"},
    "06-unequal-work-ranked": {"work-ranking"},
    "07-opposite-claims": {"conflict-claims"},
    "08-unknown-recompute-labels": {"label-unknown"},
    "09-invented-virtual-stages": {"conflict-row"},
    "10-advice-against-evidence": {"conflict-avoid", "conflict-decisions"},
    "11-graph-spelling": {"label-unknown"},
    "12-training-state-bytes": {"number-state", "number-conflict"},
    "13-one-key-two-values": {"conflict-decisions"},
    "14-implied-peaks-differ": {"number-peak"},
    "15-one-run-two-descriptions": {"conflict-measurement"},
    "16-one-subject-twice": {"duplicate-subject"},
    "17-stale-source": {"source-old"},
    "18-units-and-text-numbers": {"number-unit", "number-text"},
    "19-dispatcher-on-wrong-hardware": {"dispatcher-hardware"},
    "20-recompute-excludes-graph": {"label-incompatible"},
    "21-no-case-reaches": {"claim-out-of-reach"},
    "22-rules-that-contradict": {"conflict-decisions", "decision-dispute", "decision-reason", "decision-threshold"},
}


def findings(folder, today=TODAY):
    return check_all([folder], today)[2]


def test_every_fixture_names_its_rules():
    assert {p.name for p in FIXTURES.iterdir()} == set(EXPECTED)
    assert sum(name < "17" for name in EXPECTED) == 16


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_planted_contradiction_is_found_at_its_place(name):
    found = findings(FIXTURES / name / "planted")
    assert {f.rule for f in found} == EXPECTED[name], [str(f) for f in found]
    for f in found:
        line = Path(f.file).read_text(encoding="utf-8").splitlines()[f.line - 1]
        assert f.line > 1
        assert 0 < f.column <= len(line)


def test_a_layout_that_cannot_be_comes_with_the_nearest_that_can():
    (found,) = [f for f in findings(FIXTURES / "02-experts-do-not-fit-gpus" / "planted") if f.rule == "layout-family"]
    told = dict(zip(["degree", "value"], str(found).rpartition("the nearest legal layout has ")[2].split()[:2], strict=True))
    assert told == {"degree": "ep", "value": "16"}
    assert not list(layout_problems("repaired", {"tp": 2, "pp": 16, "ep": 16}, 256, "deepseek_v3"))


def test_six_rules_of_thumb_that_shipped_are_found_where_they_stand():
    """CP by length, the dispatcher by GPU, BF16 for experts of any width, FSDP of either backend, stages by nodes, overlap of whatever is exposed."""
    folder = FIXTURES / "22-rules-that-contradict" / "planted"
    lines = (folder / "rules-of-thumb.yaml").read_text(encoding="utf-8").splitlines()
    planted = {(n, line.rpartition("# ")[2]) for n, line in enumerate(lines, 1) if "# " in line}
    assert {(f.line, f.rule) for f in findings(folder)} == planted


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_repaired_twin_passes(name):
    assert [str(f) for f in findings(FIXTURES / name / "repaired")] == []


def test_contradictions_are_found_across_separate_checks():
    """A new card is judged against the cards that are there, not only against those named beside it."""
    second = FIXTURES / "13-one-key-two-values" / "planted"
    cards, shelf = read_cards([second / "domain-ranks.yaml"]), read_cards([second])
    assert [f.rule for f in check.lint(cards, shelf, TODAY)] == ["conflict-decisions"]


def test_a_relation_that_says_so_excuses_opposite_claims(tmp_path):
    folder = FIXTURES / "07-opposite-claims"
    planted = (folder / "planted" / "pipeline-ceiling.yaml").read_text(encoding="utf-8")
    other = (folder / "planted" / "sharding-ahead.yaml").read_text(encoding="utf-8")
    (tmp_path / "sharding-ahead.yaml").write_text(other, encoding="utf-8")
    narrower = planted.replace('gpus: ">=4"', 'gpus: "2"')
    assert narrower != planted
    (tmp_path / "pipeline-ceiling.yaml").write_text(narrower, encoding="utf-8")
    assert "conflict-claims" not in {f.rule for f in findings(tmp_path)}


def memory_card(name, claim, op, candidate, decide=""):
    return f"""\
id: {name}
title: Card {name}
summary: What one module is worth.
symptoms: [out of memory]
phase: fit
wall: memory
claims:
  - id: {claim}
    statement: Recomputing this one module changes the peak of memory by the stated amount.
    mechanism: Some modules save large activations and others save none.
    kind: pair
    comparison: {{baseline: {{train.recompute_modules: []}}, candidate: {{train.recompute_modules: [{candidate}]}}}}
    metric: peak_memory_bytes
    expect: {{op: "{op}", margin: {{value: 1, unit: percent}}}}
    label: training-equivalent
    sources: [{{title: Test, origin: ours, date: 2026-06}}]
{decide}"""


def found_in(folder, **texts):
    """What the linter finds in these cards, which are well formed."""
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    cards = read_cards([folder])
    assert not cards.findings
    return check.lint(cards, cards, TODAY)


def test_a_decision_for_a_metric_that_a_claim_denies_is_found(tmp_path):
    decide = "decide:\n  - {when: {memory: short}, set: {train.recompute_modules: [core_attn, moe_act]}, because: [Y1]}\n"
    found = found_in(tmp_path, one=memory_card("one", "Y1", ">=", "moe_act", decide), two=memory_card("two", "Y2", "<=", "core_attn"))
    assert [(f.rule, Path(f.file).name) for f in found] == [("conflict-evidence", "one.yaml")]


def test_what_ships_has_no_finding_and_no_warning():
    assert [str(f) for f in check_all([], TODAY)[2]] == []


@pytest.mark.full
def test_expired_evidence_is_a_warning():
    found = check_all([data_root("cards") / "vlm-real-data.yaml"], "2031-01-01")[2]
    assert "evidence-old" in {f.rule for f in found}
    assert all(f.warning for f in found)


@pytest.mark.full
def test_a_run_elsewhere_that_settled_nothing_does_not_hide_an_expired_verdict(tmp_path, monkeypatch):
    records = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(check.data_root("results").glob("*/*.json"))]
    record = next(r for r in records if ((r.get("measured") or {}).get("claim") or {}).get("id") == "T1")
    record["measured"]["plan"]["rules"] = 2
    folder = tmp_path / "results" / "elsewhere"
    folder.mkdir(parents=True)

    def write(name: str) -> None:
        record["sha256"] = stored_sha(record)
        (folder / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")

    for name, status, expires in (("a", "confirmed", "2030-01-01"), ("b", "not_applicable", "2040-01-01")):
        record["derived"]["verdict"]["status"], record["expires"] = status, expires
        write(name)
    real = check.data_root
    monkeypatch.setattr(check, "data_root", lambda kind: tmp_path / "results" if kind == "results" else real(kind))
    found = [f.message for f in check_all([data_root("cards") / "vlm-real-data.yaml"], "2031-01-01")[2] if f.rule == "evidence-old"]
    assert found == ["the newest evidence of T1 expired on 2030-01-01; run `playbook confirm` again"]
    record["measured"]["claim"] |= {"card": "a-card-of-mine", "statement": "Something else."}
    record["derived"]["verdict"]["status"] = "confirmed"
    write("c")
    assert found == [f.message for f in check_all([data_root("cards") / "vlm-real-data.yaml"], "2031-01-01")[2] if f.rule == "evidence-old"]


@pytest.mark.parametrize(("change", "rule"), [("date: 2026-06", "date: 2027-06"), ("date: 2026-06", "date: 2026-19")])
def test_a_source_with_an_impossible_date_is_found(tmp_path, change, rule):
    text = (FIXTURES / "17-stale-source" / "repaired" / "sources-in-time.yaml").read_text(encoding="utf-8")
    (tmp_path / "sources-in-time.yaml").write_text(text.replace(change, rule), encoding="utf-8")
    assert [f.rule for f in findings(tmp_path)] == ["source-date"]


def test_a_figure_with_a_source_of_the_future_is_found(tmp_path):
    figure = "{name: mfu, value: {value: 20, unit: percent}, sources: [{title: Test, origin: ours, date: 2031-01}]}"
    found = found_in(tmp_path, one=memory_card("one", "Y1", ">=", "moe_act", f"figures: [{figure}]\n"))
    assert [f.rule for f in found] == ["source-date"]


@pytest.mark.parametrize(("model", "rules"), [("kimi_k2", []), ("deepseek_v3", []), ("qwen3_30b_a3b", ["label-incompatible"])])
def test_up_projections_are_recomputed_where_attention_is_latent(tmp_path, model, rules):
    settings = "{recompute_modules: [mla_up_proj]}"
    family = f"families: [{{name: row, hardware: H200, model: {model}, gpus: 8, layout: {{tp: 1}}, settings: {settings}}}]\n"
    assert [f.rule for f in found_in(tmp_path, one=memory_card("one", "Y1", ">=", "moe_act", family))] == rules


def test_the_command_prints_the_rule_and_leaves_with_2(capsys):
    code, out, _ = run(capsys, "cards", "check", str(FIXTURES / "03-edp-stated-wrong" / "planted"), "--json")
    assert code == 2
    row = json.loads(out)["findings"][0]
    assert row["rule"] == "layout-family"
    assert "expected 1" in row["message"]


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--strict"], 2)])
def test_warnings_count_only_when_asked(options, code, capsys):
    found, _, err = run(capsys, "cards", "check", str(FIXTURES / "17-stale-source" / "planted"), *options)
    assert found == code
    assert "warning: X1 rests on sources of 2019-03" in err


def test_rule_ids_are_unique_and_documented():
    rows = rule_rows()
    ids = [r["id"] for r in rows]
    assert len(set(ids)) == len(ids)
    page = (repo_root() / "docs" / "guide" / "linter.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `([a-z-]+)` \| (\w+) \| (.+) \|$", page, re.MULTILINE)
    assert documented == [(r["id"], r["weight"], r["finds"]) for r in rows]


def test_every_rule_has_a_fixture_or_a_test_here():
    tested = set().union(*EXPECTED.values()) | {
        "conflict-evidence",
        "evidence-old",
        "source-date",
        "work-claim",
        "claim-unsettled",
        "family-recipe",
    }
    assert {r.id for r in check.RULES} | {i for i, _ in CASE_RULES} == tested


@pytest.mark.parametrize(
    ("comparison", "rule"),
    [
        ("{baseline: {moe.dispatcher: a}, candidate: {moe.dispatcher: a}}", "claim-unsettled"),
        (
            "{baseline: {train.global_batch_size: 4, data.seq_len: 4096}, candidate: {train.global_batch_size: 4, data.seq_len: 8192}}",
            "work-claim",
        ),
    ],
)
def test_a_claim_that_compares_nothing_or_unequal_work_is_found(tmp_path, comparison, rule):
    text = re.sub(r"comparison: .*", f"comparison: {comparison}", memory_card("one", "Y1", ">=", "moe_act"))
    assert rule in {f.rule for f in found_in(tmp_path, one=text)}


# --- the parts ---------------------------------------------------------------------------------------------------------------------


def test_tables_differ_by_version():
    assert list(tables()) == ["0.16.1", "0.19.2"]
    old, new = table_for("0.16.1"), table_for(None)
    assert old is not None
    assert new is not None
    assert list(label_problems({"recompute_modules": ["gdn_norm_out"]}, new)) == []
    assert list(label_problems({"recompute_modules": ["gdn_norm_out"]}, old))
    assert "write cuda_graph_scope" in next(label_problems({"cuda_graph_modules": ["attn"]}, old))[1]
    assert list(label_problems({"recompute": "MLP side first, then norm", "cuda_graph": "narrow scope first"}, new)) == []
    assert "write mla_up_proj" in next(label_problems({"recompute": "up_proj"}, new))[1]
    assert "write layernorm" in next(label_problems({"train.recompute_modules": "moe_act norm"}, new))[1]
    tower = {"train.recompute_modules": ["layernorm", "vision"]}
    assert list(label_problems({**tower, "backend": "megatron"}, new)) == []
    assert list(label_problems({**tower, "backend": "torch"}, new)) == []
    assert "'vision'" in next(label_problems({"recompute_modules": ["layernorm", "vision"]}, new))[1]


@pytest.mark.parametrize(
    ("a", "b", "meet"),
    [
        ({"gpus": ">=4"}, {"gpus": "2..3"}, False),
        ({"gpus": ">=4"}, {"gpus": [2, 8]}, True),
        ({"gpu": "H100|H200"}, {"gpu": ["h200"]}, True),
        ({"gpu": "B200"}, {"gpu": "GB200"}, False),
        ({"ep": "<8"}, {"ep": 8}, False),
        ({"stage": "steady"}, {"model": "x"}, True),
    ],
)
def test_situations_overlap(a, b, meet):
    assert overlap(a, b) is meet
    assert overlap(b, a) is meet


def test_effects_are_intervals():
    def margin(op, value, unit="percent"):
        return effect(Expect(op=op, margin=Quantity(value=value, unit=unit)))

    assert margin(">=", 0) == ("log", 0.0, float("inf"))
    assert margin("<=", 1.0, "ratio") == ("log", float("-inf"), 0.0)
    low, high = margin("within", 5)[1:]
    assert low == -high
    assert effect(Expect(op="holds")) is None


def test_rounded_numbers_stand_for_intervals():
    def span(value, approx=True):
        return rounding(Quantity(value=value, unit="percent", approx=approx))

    assert span(460.0) == (455.0, 465.0)
    assert span(18.0) == (17.5, 18.5)
    assert span(18.5, approx=False) == (18.5, 18.5)
    assert span(18.5) == pytest.approx((18.45, 18.55))


def test_gpu_names_are_whole_words():
    assert gpus_named("GB200 or GB300 NVL72") == {"GB200", "GB300"}
    assert gpus_named("H100 or B200 class") == {"H100", "B200"}


@pytest.mark.parametrize(
    ("texts", "are"),
    [
        (("~300", "19 %", "~59", "~19%", "250 GB", "15-25%", "1.2 s"), True),
        (("p2p", "0.19.2", "h200x4", "2 nodes of 8", "up_proj", "2..8", ">=4"), False),
    ],
    ids=["numbers", "words"],
)
def test_numbers_as_text_are_seen(texts, are):
    assert [text for text in texts if is_text_number(text) is not are] == []


@pytest.mark.parametrize(
    "text", ["__import__('os')", "tp ** 9999999", "tp.real", "(lambda: 1)()", "1 / 0", "x", "(" * 500, "'a' * 9", "max(*[tp])"]
)
def test_a_formula_is_arithmetic_and_nothing_else(text):
    with pytest.raises(ConfigError):
        evaluate(text, {"tp": 2})


degree = st.sampled_from([1, 2, 4, 8])


@pytest.mark.parametrize(
    ("model", "degrees", "says"),
    [
        ("llama3_8b", {"ep": 8}, "ep 8 on a model without experts"),
        ("mixtral_8x22b", {"tp": 3}, "8 key-value heads and tp 3"),
        ("mixtral_8x22b", {"tp": 5}, "48 attention heads"),
        ("qwen3_30b_a3b", {"ep": 3}, "128 experts"),
    ],
)
def test_degrees_that_a_model_does_not_take_are_found(model, degrees, says):
    found = list(layout_problems("row", degrees, None, model))
    assert len(found) == 1
    assert says in found[0]


@given(tp=degree, pp=degree, cp=degree, ep=degree, copies=st.integers(1, 4))
def test_a_layout_on_a_multiple_of_both_grids_has_no_problem(tp, pp, cp, ep, copies):
    gpus = tp * pp * cp * ep * copies
    right = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp": gpus // (tp * pp * cp), "edp": gpus // (ep * pp)}
    assert list(layout_problems("it", right, gpus)) == []
    for wrong in ("dp", "edp"):
        assert list(layout_problems("it", {**right, wrong: right[wrong] + 1}, gpus))


def test_a_claim_about_a_backend_that_its_case_does_not_train_on_is_out_of_reach(tmp_path):
    (path,) = (FIXTURES / "21-no-case-reaches" / "repaired").iterdir()
    text = path.read_text(encoding="utf-8")
    (tmp_path / path.name).write_text(text.replace('scope: {ep: ">=2"}', 'scope: {ep: ">=2", backend: megatron}'), encoding="utf-8")
    (found,) = findings(tmp_path)
    assert found.rule == "claim-out-of-reach"
    assert "backend: found torch, expected megatron" in found.message
