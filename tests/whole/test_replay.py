"""Evidence in the repository: it replays, it notices a change, and swapping the variants turns a verdict over."""

import json
import math
from datetime import date
from pathlib import Path

import in_process
import pytest

from playbook.cards import load
from playbook.cards.model import by_claim
from playbook.errors import ConfigError, FileError, StoreError
from playbook.paths import DEFAULT_RESULTS, data_root
from playbook.records.case import Activation, Case, list_cases, load_case
from playbook.records.evidence import ClaimRef, Evidence, Measured, noise_key, seal, stored_sha
from playbook.records.read import EVIDENCE, read, standings
from playbook.skills.export import standing
from playbook_app.mcp.answers import library_here
from playbook_app.mcp.server import claim_answer, evidence_list
from playbook_app.services.standing import stock_here
from playbook_bench import statements
from playbook_bench.judge import verdict
from playbook_bench.machine import requirements
from playbook_bench.run import replay, store
from playbook_bench.statements.rules import planted as planted_record

FOUND = {r.path: r.content for r in reversed(read([data_root("results")])) if r.schema == EVIDENCE}
RECORDS = list(FOUND)
SWAP = {"baseline": "candidate", "candidate": "baseline"}
TRAINS = ("finetune-saves-and-evaluates", "tracker-gets-configuration", "offline-run-gets-configuration", "vlm-first-step-after-text")
"""Invariants that train, which `make test` leaves out."""


def trains(path: Path) -> bool:
    case = FOUND[path].measured.case
    return case is not None and case.id in TRAINS


@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem, marks=pytest.mark.full if trains(p) else ()) for p in RECORDS])
def test_each_record_replays(path):
    case = FOUND[path].measured.case
    if lacking := requirements.unmet_requirements(case.content.requires, trains=False) if case and not FOUND[path].measured.runs else []:
        pytest.skip(lacking[0].detail)  # a statement about a library that is not installed here
    assert replay.replay(path) == (True, [])


def has_noise_of_forked_ranks(measured: Measured) -> bool:
    """Of this series' own configuration. A deterministic check needs no noise, and a record of runs that disagreed may have none."""
    own = measured.aa is not None and {r.config_sha for r in measured.aa.runs} <= measured.configs.keys()
    return own and any("launch" in s for s in measured.strict.values())


FORKED = [p for p in RECORDS if has_noise_of_forked_ranks(FOUND[p].measured)]


@pytest.mark.parametrize("path", FORKED, ids=lambda p: p.stem)
def test_a_stored_noise_of_forked_ranks_is_found_by_the_key_of_their_runs(path):
    measured = FOUND[path].measured
    first = next(r for r in measured.runs if r.role == "burn_in")
    assert measured.aa.noise_key == noise_key(first, measured.strict)


def swapped(evidence: Evidence):
    """What was measured, with the names of the variants exchanged and the claim left as it is."""
    measured = evidence.measured
    case = measured.case.content
    activation = Activation(baseline=case.activation.candidate, candidate=case.activation.baseline)
    turned = case.model_copy(update={"baseline": case.candidate, "candidate": case.baseline, "activation": activation})
    runs = [r if r.role == "aa" else r.model_copy(update={"variant": SWAP[r.variant]}) for r in measured.runs]
    # A fresh A/A ran the former baseline; what is left of it is noise, not a variant.
    runs = [r for r in runs if r.role != "aa"]
    return measured.model_copy(update={"case": measured.case.model_copy(update={"content": turned}), "runs": runs})


def turns_over(evidence: Evidence) -> bool:
    """Only a verdict from measured runs, on a claim with a direction, turns over; and only where the margin lies between the interval and its reverse.

    A small effect is "at most 15 %" either way round, and neither way "at least 100 times"; a wide interval may settle one way round only.
    """
    claim, comparison = evidence.measured.claim, evidence.derived.comparison
    settled = evidence.derived.verdict.status in ("confirmed", "refuted")
    if not settled or comparison is None or claim is None or claim.expect.op not in (">=", "<="):
        return False
    value, unit = claim.expect.margin.value, claim.expect.margin.unit
    margin = {"percent": value / 100, "ratio": value - 1}.get(unit, value)
    ends = (comparison.low, comparison.high)
    reverse = [1 / (1 + end) - 1 if comparison.scale == "log_ratio" else -end for end in ends]
    holds = [end >= margin if claim.expect.op == ">=" else end <= margin for end in reverse]
    return all(held != (evidence.derived.verdict.status == "confirmed") for held in holds)


MEASURED = [path for path in RECORDS if turns_over(FOUND[path])]


def test_at_least_six_claims_are_settled_by_measured_runs():
    assert len({FOUND[path].measured.claim.id for path in MEASURED}) >= 6


@pytest.mark.parametrize("path", MEASURED, ids=lambda p: p.stem)
def test_swapping_the_variants_turns_the_verdict_over(path):
    evidence = FOUND[path]
    found = evidence.derived.verdict
    again = verdict.derive(swapped(evidence)).verdict
    assert again.status == {"confirmed": "refuted", "refuted": "confirmed"}[found.status]


@pytest.fixture
def record(tmp_path):
    """A record of planted runs, made by the harness's own invariant."""
    measured = planted_record("step_seconds", 1, "same")
    took = store.Seconds(total=math.fsum(run.wall_s for run in measured.runs))
    evidence = store.evidence_of(measured, verdict.derive(measured), "playbook confirm planted", took)
    return store.write(evidence, tmp_path)


def altered(path: Path, change) -> Path:
    """A copy with a change and a hash that fits."""
    data = json.loads(path.read_text())
    change(data)
    target = path.with_name(f"{store.new_id()}.json")
    target.write_text(store.render(seal(Evidence.model_validate_json(json.dumps(data)))))
    return target


def test_one_altered_sample_is_noticed_by_the_hash_and_by_what_follows_from_it(record):
    data = json.loads(record.read_text())
    data["measured"]["runs"][0]["samples"][3]["seconds"] *= 1.001
    record.write_text(json.dumps(data))
    differences = replay.replay(record)[1]
    assert any(d.startswith("derived.comparison") for d in differences)
    assert any(d.startswith("sha256") for d in differences)


@pytest.mark.parametrize("figure", ["effect", "low", "high", "mean", "baseline"])
def test_one_altered_figure_is_noticed_even_with_its_hash(record, figure):
    def change(data):
        data["derived"]["comparison"][figure] *= 1 + 1e-6

    same, differences = replay.replay(altered(record, change))
    assert not same
    assert differences[0].startswith(f"derived.comparison.{figure}")


def test_a_computed_estimate_may_have_moved_a_little_with_the_code_and_a_count_or_a_verdict_may_not(tmp_path):
    path = max(p for p in RECORDS if (case := FOUND[p].measured.case) and case.id == "published-runs-alone")  # the newest

    def moved(change):
        copy = tmp_path / path.name
        copy.write_bytes(path.read_bytes())
        return replay.replay(altered(copy, lambda data: change(data["derived"])))

    assert moved(lambda d: d["figures"]["p90_error"].update(value=1.05 * d["figures"]["p90_error"]["value"])) == (True, [])
    assert not moved(lambda d: d["figures"]["p90_error"].update(value=0.5 * d["figures"]["p90_error"]["value"]))[0]
    assert not moved(lambda d: d["figures"].update(runs=d["figures"]["runs"] + 1))[0]
    assert not moved(lambda d: d["verdict"].update(status="refuted"))[0]
    assert not moved(lambda d: d["verdict"].update(sentence=d["verdict"]["sentence"].replace("published", "measured")))[0]
    assert not moved(lambda d: d["verdict"].update(sentence=d["verdict"]["sentence"].replace("median_error ", "median_error 1")))[0]


def test_a_figure_off_by_less_than_the_tolerance_is_the_same(record):
    def change(data):
        data["derived"]["comparison"]["effect"] *= 1 + 1e-12

    assert replay.replay(altered(record, change))[0]


@pytest.mark.parametrize(("key", "value"), [("runs", 5), ("case", {"id": ["x"]}), ("machine", {"name": "cpu", "gpus": "four"})])
def test_a_record_of_other_types_is_refused_by_name(tmp_path, key, value):
    data = json.loads(RECORDS[0].read_text(encoding="utf-8"))
    data["measured"][key] = value
    (tmp_path / "odd.json").write_text(json.dumps({**data, "sha256": stored_sha(data)}), encoding="utf-8")
    with pytest.raises(FileError, match=rf"odd\.json.* has measured\.{key}"):
        read([tmp_path])


def test_an_expiry_date_beyond_the_calendar_is_none(tmp_path):
    data = json.loads(RECORDS[0].read_text(encoding="utf-8")) | {"expires": "2026-13-41"}
    (tmp_path / "far.json").write_text(json.dumps({**data, "sha256": stored_sha(data)}), encoding="utf-8")
    assert read([tmp_path])[0].stale(date(2026, 11, 22), None) == "without expiry date"


REPLAYED = [e.measured.case.content for e in FOUND.values() if e.measured.case and not e.measured.runs]
COMPUTED = [case for case in map(load_case, list_cases()) if case.kind in ("arithmetic", "invariant") and case not in REPLAYED]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.id, marks=pytest.mark.full if case.id in TRAINS else ())
        for case in COMPUTED
        if not requirements.unmet_requirements(case.requires)
    ],
)
def test_arithmetic_and_invariant_cases_without_a_record_that_replays_give_a_verdict(case):
    holds, sentence, figures = statements.run(case)
    assert isinstance(holds, bool)
    assert sentence
    assert figures
    assert all(math.isfinite(v) for v in figures.values() if isinstance(v, float))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("min_gpus_families", {"families": [{}]}),  # a key is missing
        ("min_gpus_families", {"families": ["x"]}),  # text where keys are expected
        ("dp_floor", {"no_such_argument": 1}),
        ("dp_floor", {"gpus": 256, "pp": 0, "tp": 1, "seq_lens": [4096]}),
    ],
)
def test_arithmetic_that_cannot_be_done_is_a_mistake_in_the_case(function, arguments):
    with pytest.raises(ConfigError, match=f"case 'x': {function} does not take these arguments"):
        statements.run(Case(id="x", kind="arithmetic", summary="s", function=function, arguments=arguments))


def test_unequal_work_is_refused_and_the_check_itself_can_fail(monkeypatch):
    case = Case(id="x", kind="invariant", summary="s", function="unequal_work_is_refused")
    assert statements.run(case)[0]
    monkeypatch.setattr(verdict, "pair_conditions", lambda *a, **k: [])
    assert not statements.run(case)[0]


def changed(tmp_path, change):
    """The file of a record with matched runs whose measurements were changed, under the newest rules for its design and with a hash that fits."""
    data = next(
        d for d in (json.loads(p.read_text(encoding="utf-8")) for p in RECORDS) if d["measured"]["aa"] and d["derived"]["comparison"]
    )
    data["measured"]["plan"]["rules"] = 2
    change(data["measured"])
    data["sha256"] = stored_sha(data)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: [r.update(ranks=0) for r in m["runs"]], "measured in another environment or configuration than every run"),
        (lambda m: [s.update(useful_tokens=-1) for r in m["aa"]["runs"] for s in r["samples"]], "runs that cannot be judged"),
    ],
)
def test_a_record_with_figures_that_no_run_gives_is_one_message(tmp_path, change, says):
    try:
        same, lines = replay.replay(changed(tmp_path, change))
    except StoreError as e:
        same, lines = False, [str(e)]
    assert not same
    assert says in lines[0]


def test_a_record_with_runs_of_no_variant_differs(tmp_path):
    path = changed(tmp_path, lambda m: [r.update(variant="another") for r in m["runs"] if r["variant"] == "candidate"])
    assert not replay.replay(path)[0]


@pytest.fixture
def planted(tmp_path, monkeypatch, capsys):
    """What every reader says of a shipped claim without records, once a card from elsewhere has a confirmed one of that id; the claim is as shipped but for `changes`."""
    shelf = load.load_all()
    tested = {e.measured.claim.id for e in FOUND.values() if e.measured.claim}
    name, (home, claim) = next((i, c) for i, c in by_claim(shelf).items() if i not in tested)
    source = next(e for e in FOUND.values() if e.derived.verdict.status == "confirmed" and not e.measured.runs)
    own = {f: claim.model_dump(mode="json")[f] for f in ("id", "statement", "metric", "expect", "comparison")}
    monkeypatch.chdir(tmp_path)

    def plant(**changes):
        ref = ClaimRef.model_validate({**source.measured.claim.model_dump(mode="json"), **own, "card": "a-card-of-mine", **changes})
        foreign = source.model_copy(update={"evidence_id": store.new_id(), "expires": "2999-01-01"})
        store.write(seal(foreign.model_copy(update={"measured": source.measured.model_copy(update={"claim": ref})})), DEFAULT_RESULTS)
        rows = json.loads(in_process.run(capsys, "cards", "list", "--claims", "--json")[1])
        library = library_here()
        return {
            next(r["status"] for r in rows if (r["card"], r["id"]) == (home, name)),
            json.loads(in_process.run(capsys, "cards", "show", home, "--json")[1])["status"][name]["status"],
            *(r["status"] for r in claim_answer(library, home, name).verdicts[name]),
            *(r["status"] for r in evidence_list(library, name, 9).records),
            *(r["status"] for r in standing(shelf[home], name, stock_here())),
            *standings(library.records(), claim, date(2026, 1, 1)),
        }

    return plant


@pytest.mark.full
def test_a_card_from_elsewhere_that_numbers_a_claim_alike_gives_a_shipped_one_no_verdict(planted):
    assert planted(statement="Something else.") == {"untested"}


@pytest.mark.full
def test_a_claim_that_came_from_another_card_keeps_its_verdict(planted):
    assert planted() == {"confirmed"}
