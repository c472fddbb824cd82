"""What `cards check` finds: each fault at its place, none skipped."""

from __future__ import annotations

import re
import shutil

import pytest

from playbook.cards import load as validate
from playbook.cards.load import check_cards, read_cards
from playbook.errors import FileError
from playbook.paths import data_root
from playbook_app.services import check

CARD = data_root("cards") / "moe-dispatcher-choice.yaml"


def place(text, needle):
    """line:column of the first occurrence."""
    at = text.index(needle)
    return f":{text.count(chr(10), 0, at) + 1}:{at - text.rfind(chr(10), 0, at)}: "


def findings(tmp_path, text, name=CARD.name):
    (tmp_path / name).write_text(text, encoding="utf-8")
    return [str(f) for f in check.check_all([tmp_path])[2] if not f.warning]


def alone(text):
    """A card under ids that no shipped card uses, so that only the planted fault is found."""
    text = text.replace("id: moe-dispatcher-choice", "id: planted").replace(
        "title: Choosing the MoE token dispatcher", "title: A planted fault"
    )
    text = re.sub(r"aliases: \[[^\]]*\]", "aliases: [planted fault]", text)
    for old, new in (("W9", "Z9"), ("W10", "Z10"), ("V5", "Z5"), ("I1", "Y1"), ("I2", "Y2")):
        text = re.sub(rf"\b{old}\b", new, text)
    # What the card says against its own claims, the copy would say against the card's.
    return text.replace("related: {see:", "related: {contradicts: [moe-dispatcher-choice], see:")


@pytest.fixture
def text():
    return alone(CARD.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("old", "new", "at", "says"),
    [
        ("    kind: pair", "    kind: pair\n    kind: pair", None, "duplicate key 'kind'"),
        ("phase: profile", "phaze: profile", "phaze", "unknown key 'phaze'; did you mean 'phase'?"),
        ("phase: profile", "phase: profiling", "phase", "'phase' is 'profiling'; did you mean 'profile'?"),
        ("value: 5,", "value: five,", "value: five", "input should be a valid number, found 'five'"),
        ("case: moe-dispatch-bytes", "case: moe-dispatch-byte", "case: moe-dispatch-byte", "does not exist in bench/cases/; did you mean 'moe-dispatch-bytes'?"),
        ("because: [Z9]", "because: [Z99]", "Z99", "claim 'Z99' does not exist; did you mean 'Z9'?"),
        ("see: [fsdp-vs-3d-parallel,", "see: [fsdp-vs-3d,", "fsdp-vs-3d,", "card 'fsdp-vs-3d' does not exist"),
        ("ep: \"2..8\"", "ep: \"8..2\"", "ep: \"8..2\"", "scope 'ep': '8..2' is empty"),
        ("scope: {gpus: \">=2\", ep", "scope: {gpu_count: 2, ep", "gpu_count", "unknown scope key 'gpu_count'"),
        ("metric: useful_tokens_per_s_per_gpu", "metric: useful_tokens_per_s", "metric: useful", "metric 'useful_tokens_per_s' is not known; did you mean"),
        ("{op: \"<=\", margin: {value: 5, unit: percent}}", "{op: \"<=\"}", "expect: {op: \"<=\"}", "op '<=' needs a margin"),
        ("{op: \"<=\", margin: {value: 5, unit: percent}}", "{op: holds}", "expect: {op: holds}", "op 'holds' does not fit kind 'pair'"),
        ("{op: \"<=\", margin: {value: 5, unit: percent}}", "{op: \"<=\", margin: {value: 5, unit: gib}}", "margin", "does not fit useful_tokens"),
        ("candidate: {moe.dispatcher: allgather}", "candidate: {moe.dispatcher: all}", "candidate: {moe", "differs from {moe.dispatcher: allgather} in case"),
        ("layout: {tp: 1, pp: 1, cp: 1, ep: 8}", "layout: {tp: 1, pp: 3, cp: 1, ep: 8}", "layout: {tp: 1, pp: 3", "8 ranks do not divide into tp 1 x pp 3"),
        ("layout: {tp: 1, pp: 1, cp: 1, ep: 8}", "layout: {tp: 1, ep: 8, edp: 2}", "layout: {tp: 1, ep: 8", "edp is 2, but 8 GPUs leave 1"),
        ("layout: {tp: 1, pp: 1, cp: 1, ep: 8}", "layout: {tpp: 1}", "layout: {tpp", "unknown degree 'tpp'"),
        ("    kind: pair", "    kind: arithmetic", None, "does not fit kind 'arithmetic'"),
        ("id: Z9.m", "id: Z8.m", "id: Z8.m", "does not belong to claim 'Z9'; expected 'Z9.m'"),
        ("id: planted", "id: moe-dispatcher-choice", "id: moe", "is already used by"),
        ("- id: Z10", "- id: V14", "id: V14", "claim id 'V14' is already used by"),
        ("id: planted", "id: Planted", "id: Planted", "string should match pattern"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found_at_its_place(tmp_path, text, old, new, at, says):
    assert old in text
    changed = text.replace(old, new, 1)
    found = findings(tmp_path, changed, "planted.yaml")
    hits = [f for f in found if says in f]
    assert hits, found
    if at:
        assert any(place(changed, at) in f for f in hits), (place(changed, at), hits)


def test_a_card_without_faults_has_no_findings(tmp_path, text):
    assert findings(tmp_path, text, "planted.yaml") == []


def test_a_card_that_replaces_itself_is_not_a_duplicate(tmp_path):
    assert [str(f) for f in check.check_all([CARD])[2] if not f.warning] == []


def test_a_name_that_differs_from_the_id_is_found(tmp_path, text):
    assert any("differs from the file's name" in f for f in findings(tmp_path, text, "other.yaml"))


def test_nothing_in_a_folder_is_skipped(tmp_path, text):
    (tmp_path / "planted.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "notes.txt").write_text("", encoding="utf-8")
    (tmp_path / "old.yml").write_text(text, encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe")
    (tmp_path / "list.yaml").write_text("- 1\n", encoding="utf-8")
    (tmp_path / "gone.yaml").symlink_to(tmp_path / "nowhere.yaml")
    files = {f.file.rsplit("/", 1)[1] for f in read_cards([tmp_path]).findings}
    assert files == {"notes.txt", "old.yml", "sub", "bad.yaml", "list.yaml", "gone.yaml"}


@pytest.mark.parametrize("name", ["missing.yaml", "missing", "notes.txt", "empty"])
def test_a_path_that_holds_no_card_is_a_finding(tmp_path, name):
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    cards = read_cards([tmp_path / name])
    assert len(cards.findings) == 1
    assert not cards.loaded


def test_two_files_with_the_same_ids_are_both_named(tmp_path, text):
    (tmp_path / "planted.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "second.yaml").write_text(text, encoding="utf-8")
    cards = read_cards([tmp_path])
    found = [str(f) for f in check_cards(cards, cards)]
    assert sum("is already used by" in f and "second.yaml" in f for f in found) >= 4


def test_load_all_refuses_a_shelf_with_a_broken_card(tmp_path, monkeypatch):
    (tmp_path / "broken.yaml").write_text("id: 1\n", encoding="utf-8")
    monkeypatch.setattr(validate, "folders", lambda kind: [tmp_path])
    with pytest.raises(FileError, match=r"broken\.yaml"):
        validate.load_all()


CASE = """\
id: planted
summary: All-gather against all-to-all.
trainer: trainer/configs/qwen3_30b_a3b_24l.yaml
baseline: {moe.dispatcher: alltoall}
candidate: {moe.dispatcher: allgather}
metric: useful_tokens_per_s_per_gpu
profiles:
  cpu: {ranks: 2, parallel.ep: 2, model: qwen3_moe_tiny, train.steps: 15, train.dtype: fp32}
  h200x4: {ranks: 4, parallel.ep: 4, moe.fused_permutation: false}
activation:
  baseline: {require: [{collective: all_to_all, group: ep, count: "5 * moe_layers * microbatches"}]}
  candidate: {forbid: [{collective: all_to_all, group: ep}]}
"""

CASE_FAULTS = [
    ("metric: useful_tokens_per_s_per_gpu", "metric: speed", "6:1: metric 'speed' is not known"),
    ("configs/qwen3_30b_a3b_24l.yaml", "configs/qwen3_30b.yaml", "does not exist; did you mean"),
    ("trainer/configs/qwen3_30b_a3b_24l.yaml", "../../etc/passwd", "is not a path below trainer/configs/"),
    ("trainer/configs/qwen3_30b_a3b_24l.yaml", "trainer/configs/../../pyproject.toml", "is not a path below trainer/configs/"),
    ("parallel.ep: 2", "parallel.eq: 2", "8:19: the trainer has no key 'parallel.eq'; did you mean 'parallel.ep'?"),
    ("train.steps: 15", "train.steps: many", "profile 'cpu'"),
    ("parallel.ep: 2", "parallel.ep: 3", "do not divide over ep 3"),
    ("{ranks: 4,", "{ranks: 3,", "9:3: baseline on profile 'h200x4': 3 ranks do not divide into ep 4"),
    ("{ranks: 4,", "{ranks: zero,", "ranks is 'zero'"),
    (", moe.fused_permutation: false", "", "the variants differ in moe.fused_permutation"),
    ("5 * moe_layers", "5 * moe_layer", "'moe_layer' is not in the receipt"),
    ("5 * moe_layers * microbatches", "__import__('os')", "uses Call"),
    ("dispatcher: allgather", "dispatcher: alltoall", "resolve to the same run"),
    ("id: planted", "id: another", "1:1: case id 'another' differs from the file's name"),
    ("summary:", "sumary:", "2:1: unknown key 'sumary'; did you mean 'summary'?"),
]


def case_findings(folder, text):
    """What is wrong with a case of this text."""
    (folder / "planted.yaml").write_text(text, encoding="utf-8")
    cases, found = check.read_cases(folder)
    return [str(f) for f in found + [f for c in cases.values() for f in check.check_case(c)]]


def test_a_case_without_faults_has_no_findings(tmp_path):
    assert case_findings(tmp_path, CASE) == []


@pytest.mark.parametrize(("old", "new", "says"), CASE_FAULTS)
def test_a_planted_fault_in_a_case_is_found(tmp_path, old, new, says):
    assert old in CASE
    found = case_findings(tmp_path, CASE.replace(old, new, 1))
    assert any(says in f for f in found), found
    assert all(re.match(r".+\.yaml:\d+:\d+: ", f) for f in found)


def test_a_file_among_the_cases_that_is_none_is_a_finding(tmp_path):
    shutil.copy(data_root("cases") / "cp-dp-floor.yaml", tmp_path)
    (tmp_path / "readme.txt").write_text("x", encoding="utf-8")
    cases, found = check.read_cases(tmp_path)
    assert list(cases) == ["cp-dp-floor"]
    assert [f.message for f in found] == ["is no case; only cases (*.yaml) belong here, move it elsewhere"]


def test_trainer_keys_are_those_of_the_tree():
    keys = check.trainer_keys()
    assert {"parallel.ep", "model.vision.depth", "model.preset", "train.compile.backend", "model", "backend"} <= keys
    assert "parallel.epp" not in keys


DISPUTE = """
disputes:
  - subject: which of two sources to follow
    claims: [Z9, Z10]
    stands: Z10
    why: It is the later one.
"""


@pytest.mark.full
def test_claims_in_dispute_link_each_other_and_one_of_them_stands(tmp_path, text):
    text = re.sub(r"^disputes:\n.*?(?=^interactions:)", "", text, flags=re.DOTALL | re.MULTILINE)  # its own make room for a planted one
    unlinked = findings(tmp_path, text + DISPUTE, "planted.yaml")
    assert sum("is in dispute, and no claim of this card links it" in f for f in unlinked) == 2
    linked = (
        text.replace(
            "    case: moe-dispatcher-deepep-vs-alltoall\n", "    case: moe-dispatcher-deepep-vs-alltoall\n    contradicts: [Z9]\n"
        )
        + DISPUTE
    )
    assert findings(tmp_path, linked, "planted.yaml") == []
    other = findings(tmp_path, linked.replace("stands: Z10", "stands: V1"), "planted.yaml")
    assert [f for f in other if place(linked, "stands:").split(":")[1] in f and "'V1' is not among the claims in dispute, Z9, Z10" in f]
    assert any(
        "claim 'Z99' does not exist" in f
        for f in findings(tmp_path, linked.replace("claims: [Z9, Z10]", "claims: [Z99, Z10]"), "planted.yaml")
    )


def test_a_claim_may_use_a_further_metric_of_its_case_and_no_other(tmp_path):
    also = CASE.replace("metric: useful_tokens_per_s_per_gpu\n", "metric: useful_tokens_per_s_per_gpu\nalso: [peak_memory_bytes]\n")
    assert case_findings(tmp_path, also) == []
    assert any("metric 'peak_memory' is not known" in f for f in case_findings(tmp_path, also.replace("peak_memory_bytes", "peak_memory")))


def test_environment_variables_that_a_case_sets_are_a_part_of_what_its_claim_compares(tmp_path):
    shipped = (data_root("cards") / "allocator-fragmentation.yaml").read_text(encoding="utf-8")
    moved = shipped.replace('candidate: {PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:True"}', "candidate: {}")
    assert any(
        "candidate {} differs from {PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True} in case" in f for f in findings(tmp_path, moved)
    )


OWN_CASE = """\
id: our-floor
kind: arithmetic
summary: Data parallelism that is left on 256 GPUs at PP 8.
function: dp_floor
arguments: {gpus: 256, pp: 8, tp: 1, seq_lens: [4096]}
"""


def of_another_repository(root, text, case):
    """A card with a case of its own beside it, as `playbook confirm CARD.yaml` takes them."""
    (root / "cards").mkdir()
    (root / "bench" / "cases").mkdir(parents=True)
    (root / "bench" / "cases" / "our-floor.yaml").write_text(case, encoding="utf-8")
    text = text.replace("case: moe-dispatcher-deepep-vs-alltoall", "case: our-floor")
    (root / "cards" / "planted.yaml").write_text(text, encoding="utf-8")
    return [f for f in check.check_all([root / "cards"])[2] if not f.warning]


def test_a_card_is_checked_against_the_cases_that_lie_beside_it(tmp_path, text):
    found = [f.message for f in of_another_repository(tmp_path, text, OWN_CASE)]
    assert not [m for m in found if "does not exist" in m], found
    assert "case 'our-floor' is of kind 'arithmetic', the claim of kind 'pair'; make them agree" in found


def test_faults_of_a_case_beside_its_card_are_found_there(tmp_path, text):
    found = of_another_repository(tmp_path, text, OWN_CASE.replace("dp_floor", "dp_flor"))
    at = [f"{f.file}:{f.line}: {f.message}" for f in found if f.file.endswith("our-floor.yaml")]
    assert at == [f"{tmp_path}/bench/cases/our-floor.yaml:4: function 'dp_flor' is not in the harness's table; did you mean 'dp_floor'?"]
    shutil.rmtree(tmp_path / "cards")
    shutil.rmtree(tmp_path / "bench")
    broken = of_another_repository(tmp_path, text, OWN_CASE.replace("kind:", "knid:"))
    assert any("unknown key 'knid'" in f.message for f in broken)
    assert not any("does not exist" in f.message for f in broken)
