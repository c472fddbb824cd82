"""Activation proof: formulas without eval, and rules that fail closed."""

import re

import pytest

from playbook.errors import ConfigError, FileError
from playbook.paths import repo_root
from playbook.records.case import GROUP_WORDS, RANGES, Activation, Case, Receipt, Rule, case_problems, load_case
from playbook.records.evidence import CollectiveCount, Observed, Run
from playbook_bench.judge import receipt
from playbook_trainer.axes import groups
from playbook_trainer.config.tree import ParallelConfig

NUMBERS = {"layers": 4.0, "microbatches": 2.0, "ranks": 3.0}


@pytest.mark.parametrize(
    ("formula", "value"),
    [("8", 8), ("4 * layers * microbatches", 32), ("(layers + 1) // 2 - ranks", -1), ("-layers / 2", -2), ("layers % ranks", 1)],
)
def test_formulas(formula, value):
    assert receipt.evaluate(formula, NUMBERS) == value


@pytest.mark.parametrize(
    "formula",
    [
        "__import__('os').system('true')",
        "layers.__class__",
        "2 ** 99999",
        "layers if ranks else 0",
        "True",
        "lambda: 1",
        "1 +",
        "(" * 150,
        "1 + " * 80 + "1",
        "nothing",
        "1 / 0",
    ],
)
def test_anything_else_is_refused(formula):
    with pytest.raises(ConfigError):
        receipt.evaluate(formula, NUMBERS)


OBSERVED = Observed(
    numbers=NUMBERS,
    ranges={"dispatch": 8},
    collectives=[
        CollectiveCount(op="all_to_all", group="ep", inside="dispatch", count=8),
        CollectiveCount(op="all_to_all", group="ep", inside="experts/combine", count=4),
        CollectiveCount(op="all_gather", group="dp", inside=None, phase="forward", count=5),
    ],
    counters={"images_decoded": 3, "padding_tokens": 0},
    kernels={"cudnn_generated_fort_native_sdpa_sm90_flash_fprop": 4, "void deep_ep::intranode::dispatch": 8, "nvjet_tst_192x192": 9},
)


@pytest.mark.parametrize(
    ("rule", "forbid", "ok"),
    [
        (Rule(collective="all_to_all", count="3 * layers"), False, True),
        (Rule(collective="all_to_all", inside="dispatch", count="layers * microbatches"), False, True),
        (Rule(collective="all_to_all", inside="combine", count=4), False, True),
        (Rule(collective="all_to_all", inside="dispatch", count=9), False, False),
        (Rule(collective="all_to_all", inside="dispatch", count=9, op="<="), False, True),
        (Rule(collective="all_to_all", count="1e400"), False, False),
        (Rule(collective="all_to_all", count="1e400", op="<="), False, False),
        (Rule(collective="all_to_all", group="dp"), False, False),
        (Rule(collective="all_gather", inside="dispatch"), True, True),
        (Rule(collective="all_gather"), True, False),
        (Rule(collective="all_gather", phase="forward", count=5), False, True),
        (Rule(collective="all_gather", phase="backward"), True, True),
        (Rule(counter="images_decoded"), False, True),
        (Rule(counter="images_decoded"), True, False),
        (Rule(counter="padding_tokens"), True, True),
        (Rule(counter="unheard_of"), False, False),
        (Rule(counter="unheard_of"), True, False),
        (Rule(range="dispatch", count=8), False, True),
        (Rule(range="vision"), True, True),
        (Rule(kernel="sdpa_.*fprop", count="layers"), False, True),
        (Rule(kernel="deep_ep::(intranode|internode)::dispatch", count=9), False, False),
        (Rule(kernel="sdpa|nvjet", count=13), False, True),
        (Rule(kernel="hybrid_ep"), False, False),
        (Rule(kernel="hybrid_ep"), True, True),
        (Rule(kernel="nvjet"), True, False),
    ],
)
def test_rules(rule, forbid, ok):
    assert receipt.judge_rule(rule, forbid, "baseline", OBSERVED).ok is ok


def run(observed):
    return Run(
        run_id="r",
        variant="candidate",
        role="measure",
        position=0,
        outcome="ok",
        returncode=0,
        started="",
        wall_s=1,
        ranks=1,
        steps_wanted=1,
        config_sha="c",
        observed=observed,
    )


def test_absence_is_proven_only_where_something_was_looked_at():
    activation = Activation(candidate=Receipt(forbid=[Rule(collective="all_to_all")]))
    assert not receipt.judge_run(activation, run(None))[0].ok
    assert receipt.judge_run(activation, run(Observed(numbers=NUMBERS)))[0].ok


@pytest.mark.parametrize("observed", [None, OBSERVED])
@pytest.mark.parametrize("count", ["4 * layerz", "1 / (layers - layers)"])
def test_a_count_that_the_receipt_cannot_give_proves_nothing(observed, count):
    activation = Activation(candidate=Receipt(require=[Rule(collective="all_to_all", count=count)]))
    (check,) = receipt.judge_runs(activation, [run(observed)])
    assert (check.ok, check.observed, check.expected) == (False, None, f"== {count}")


def test_kernels_that_nobody_looked_at_prove_nothing():
    """A run on the CPU, or one whose profiler failed, names no kernel: neither their presence nor their absence follows."""
    blind = Observed(numbers=NUMBERS)
    assert not receipt.judge_rule(Rule(kernel="nvjet"), True, "baseline", blind).ok
    assert not receipt.judge_rule(Rule(kernel="nvjet"), False, "baseline", blind).ok


@pytest.mark.parametrize("pattern", ["(", "(a|b)*", "(ab)+c", "a*b*c*d*e*"])
def test_a_pattern_that_is_none_or_may_take_for_ever_is_refused(pattern):
    rules = Activation(baseline=Receipt(require=[Rule(kernel=pattern)]), candidate=Receipt(require=[Rule(kernel="x")]))
    case = Case(id="x", summary="s", trainer="t", metric="fits", profiles={"cpu": {}}, activation=rules)
    assert [where for where, _ in case_problems(case)] == [("activation", "baseline", "require", 0, "kernel")]


@pytest.mark.parametrize(
    ("kind", "rule", "key"),
    [
        ("require", Rule(collective="all_to_all", count=0, op=">="), "count"),
        ("require", Rule(collective="all_to_all", count="-1", op=">="), "count"),
        ("require", Rule(kernel=".*"), "kernel"),
        ("forbid", Rule(kernel=""), "kernel"),
        ("forbid", Rule(range="dispach"), "range"),
        ("forbid", Rule(collective="all_to_all", inside="dispach"), "inside"),
        ("forbid", Rule(collective="all_to_all", inside="dispatch.bwd"), "inside"),
        ("forbid", Rule(collective="all_to_all", group="epp"), "group"),
        ("forbid", Rule(range="dispatch", phase="backward"), "phase"),
    ],
)
def test_a_rule_that_holds_whatever_runs_is_refused(kind, rule, key):
    activation = Activation(every=Receipt.model_validate({kind: [rule]}))
    case = Case(id="x", summary="s", trainer="t", metric="fits", profiles={"cpu": {}}, activation=activation)
    assert [where for where, _ in case_problems(case)] == [("activation", "every", kind, 0, key)]


def test_rules_may_speak_of_everything_that_the_trainer_tells():
    sources = [p.read_text(encoding="utf-8") for p in (repo_root() / "trainer/playbook_trainer").rglob("*.py")]
    ranges = {name for text in sources for name in re.findall(r'range_\("([a-z_]+)"', text)}
    assert {"prefetch", "attention", "experts"} <= ranges <= RANGES
    assert {word for name in groups(1, ParallelConfig()) for word in name.split("_")} <= GROUP_WORDS


def test_one_bad_launch_spoils_the_line():
    activation = Activation(candidate=Receipt(require=[Rule(collective="all_to_all", count=12)]))
    good, bad = run(OBSERVED), run(Observed(numbers=NUMBERS))
    lines = receipt.judge_runs(activation, [good, bad, good])
    assert [(line.ok, line.observed, line.runs) for line in lines] == [(False, 0, 3)]


CASE = """
id: x
summary: y
trainer: trainer/configs/qwen3_moe_tiny.yaml
baseline: {moe.dispatcher: alltoall}
candidate: {moe.dispatcher: allgather}
metric: step_seconds
profiles: {cpu: {ranks: 2}}
activation:
  baseline: BASELINE
  candidate: {forbid: [{collective: all_to_all}]}
"""


@pytest.mark.parametrize(
    ("baseline", "message"),
    [
        ("{}", "nothing proves that the baseline ran"),
        ("{require: [{range: forward}]}", "nothing proves that the baseline ran"),
        ("{require: [{collective: all_to_all, counter: recompiles}]}", "exactly one of"),
        ("{forbid: [{collective: all_gather, count: 3}]}", "a forbidden thing has no count"),
    ],
)
def test_a_case_without_proof_is_invalid(tmp_path, baseline, message):
    path = tmp_path / "x.yaml"
    path.write_text(CASE.replace("BASELINE", baseline))
    with pytest.raises(FileError, match=message) as e:
        load_case(path)
    assert all(f.line > 1 for f in e.value.findings)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "delta: {environment: {candidte: {NCCL_ALGO: Ring}}, reason: r}",
            "variant 'candidte' is not known; expected baseline or candidate",
        ),
        ("variant_profiles: {cpu: {candidte: {train.steps: 9}}}", "variant 'candidte' is not known"),
        ("variant_profiles: {cpuu: {candidate: {train.steps: 9}}}", "profile 'cpuu' is not among profiles; did you mean 'cpu'"),
    ],
)
def test_what_is_said_of_no_variant_is_not_passed_over(tmp_path, more, message):
    path = tmp_path / "x.yaml"
    path.write_text(CASE.replace("BASELINE", "{require: [{collective: all_to_all}]}") + more + "\n")
    with pytest.raises(FileError, match=message):
        load_case(path)


@pytest.mark.parametrize(("count", "shown"), [(4, "== 4"), ("2 * layers", "== 2 * layers = 8"), (None, ">= 1")])
def test_what_was_expected_is_shown_as_it_was_written_and_as_a_number(count, shown):
    rule = Rule(collective="all_to_all") if count is None else Rule(collective="all_to_all", count=count)
    assert receipt.judge_rule(rule, False, "baseline", OBSERVED).expected == shown


def test_the_share_that_a_gpu_computes_is_the_median_of_its_own_variant():
    def computed(variant, percent):
        counters = {} if percent is None else {"gpu_computing_percent": percent}
        return run(Observed(numbers=NUMBERS, counters=counters)).model_copy(update={"variant": variant})

    runs = [computed("baseline", 50.0), *(computed("candidate", p) for p in (90.0, 70.0, None, 95.0)), run(None)]
    assert (receipt.computing(runs, "baseline"), receipt.computing(runs, "candidate")) == (50.0, 90.0)
    assert receipt.computing(runs[-1:], "candidate") is None
