"""Tables of runs: read whatever they hold, predicted from what was set, compared with what was measured."""

import csv
import json

import in_process
import pytest

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook.planner.runs.check import check, document, groups, ranking, total
from playbook.planner.runs.published import ERRORS, RUNS, errors_of
from playbook.planner.runs.table import read_runs

PUBLISHED = data_root("tables") / "published_runs.csv"
RESULTS = ("tflops_per_gpu", "tokens_per_s_per_gpu", "step_time_s", "mfu_pct", "mem_gb", "mem_unit", "mem_kind", "status", "quality")
HEADER = "id,model,hardware,gpus,precision,seq_len,mbs,gbs,tp,pp,ep,tokens_per_s_per_gpu"
RUN = "a,Qwen3-30B-A3B,H100,16,bf16,4096,1,1024,1,1,16,13011"


@pytest.fixture
def write(tmp_path):
    def write(*lines, name="runs.csv"):
        path = tmp_path / name
        path.write_bytes("\n".join(lines).encode() if all(isinstance(x, str) for x in lines) else lines[0])
        return path

    return write


def rows_of(path):
    with path.open(newline="") as f:
        return list(csv.DictReader(f))


def test_a_prediction_never_reads_what_was_measured(tmp_path):
    rows = rows_of(PUBLISHED)[::7]
    blank = tmp_path / "blank.csv"
    full = tmp_path / "full.csv"
    for path, keep in ((full, True), (blank, False)):
        with path.open("w", newline="") as f:
            out = csv.DictWriter(f, rows[0])
            out.writeheader()
            out.writerows(row if keep else row | dict.fromkeys(RESULTS, "") for row in rows)
    predicted = [{e["id"]: e["predicted"] for e in document(check(path))["rows"]} for path in (full, blank)]
    assert predicted[0] == predicted[1]
    assert sum(p is not None for p in predicted[0].values()) > len(rows) / 2


def test_every_published_run_is_predicted_or_says_why_not(published):
    found = published
    assert len(found) == len(rows_of(PUBLISHED))
    for row in found:
        assert (row.prediction is None) != (row.why is None)
        if row.prediction:
            assert row.interval.low < row.interval.value < row.interval.high
            model_flops = row.prediction.tokens_per_s_per_gpu * row.prediction.flops_per_token
            assert model_flops < row.prediction.peak_tflops * 1e12
    assert total(found)["median_error"] < total(found)["constant_mfu"]["median_error"]


@pytest.fixture(scope="module")
def published():
    return check(PUBLISHED)


def test_errors_on_published_runs_stay_within_their_bounds(published):
    found = total(published)
    assert found["runs"] > 250
    assert found["median_error"] < 0.18
    assert found["p90_error"] < 0.4
    assert 0.75 <= found["covered"] <= 0.9
    for group in groups(published):
        assert group["runs"] <= 10 or group["p90_error"] < group["constant_mfu"]["p90_error"], group["group"]


def test_layouts_of_published_runs_are_chosen_well(published):
    found = ranking(published)
    assert found["winner_within_5_percent"] >= 0.9
    assert found["mean_regret"] < 0.02


def test_anchored_errors_and_intervals_stay_within_their_bounds():
    found = total(check(PUBLISHED, leave_out="configuration"))
    assert found["median_error"] < 0.1
    assert found["p90_error"] < 0.3
    assert 0.75 <= found["covered"] <= 0.9
    assert found["width"] < 1.5


def test_a_whole_source_left_out_is_no_worse_than_constants_alone(published):
    found, alone = total(check(PUBLISHED, leave_out="source")), total(published)
    assert found["median_error"] < alone["median_error"]
    assert found["p90_error"] < alone["p90_error"]
    assert 0.75 <= found["covered"] <= 0.9


def test_a_source_left_out_has_no_say(write):
    header = HEADER.replace("id,", "id,source_group,")
    (row,) = check(write(header, RUN.replace("a,", "a,us,", 1)))
    speed = row.prediction.tokens_per_s_per_gpu
    same = [
        RUN.replace("a,", f"{name},{group},", 1).replace("1024", gbs).rpartition(",")[0]
        for name, group, gbs in (("b", "us", "512"), ("c", "they", "256"))
    ]
    table = write(header, *(f"{r},{speed / 2}" for r in same))
    asked = write(header, RUN.replace("a,", "a,us,", 1), name="asked.csv")
    (both,), (others,) = check(asked, anchor=table, leave_out="configuration"), check(asked, anchor=table, leave_out="source")
    assert both.scale.log < others.scale.log < 0


def test_the_shipped_errors_of_published_runs_are_current():
    stored, fresh = (json.loads(text) for text in ((data_root("tables") / ERRORS).read_text(), errors_of(data_root("tables") / RUNS)))
    assert stored.keys() == fresh.keys()
    for name, row in fresh.items():
        assert stored[name] == pytest.approx(row, abs=2e-4), f"{name}: run `python tools/planner/published_errors.py`"


def test_an_anchor_takes_a_constant_error_away(write):
    runs = [f"r{i},Qwen3-30B-A3B,H100,16,bf16,4096,{i},{64 * i},1,1,16," for i in range(1, 6)]
    first = check(write(HEADER, *(r + "1000" for r in runs)))
    twice = write(HEADER, *(f"{r}{2 * p.prediction.tokens_per_s_per_gpu}" for r, p in zip(runs, first, strict=True)))
    assert total(check(twice))["median_error"] == pytest.approx(0.5)
    assert total(check(twice, leave_out="configuration"))["median_error"] < 0.1
    assert total(check(twice, anchor=twice))["median_error"] < 0.1


def test_an_anchor_counts_the_more_the_more_it_is_alike(write):
    header = HEADER.replace("id,", "id,source_group,")
    asked = RUN.replace("a,", "a,us,", 1)
    others = [asked, asked.replace("us,", "they,"), asked.replace("us,", "they,").replace("H100", "A100")]
    scales = []
    for other in (row.replace("1024", "512") for row in others):
        (found,) = check(write(header, other))
        halved = other.rpartition(",")[0] + f",{found.prediction.tokens_per_s_per_gpu / 2}"
        (row,) = check(write(header, asked), anchor=write(header, halved, name="anchor.csv"))
        scales.append(row.scale)
    assert scales[0].log < scales[1].log < scales[2].log == 0
    assert scales[0].left < scales[1].left < scales[2].left == 1


def test_layouts_are_ranked_within_their_problem(write):
    runs = [f"t{tp},Mixtral-8x7B,H100,64,bf16,4096,1,256,{tp},1,8,{1000 / tp}" for tp in (1, 2, 4)]
    found = ranking(check(write(HEADER, *runs)))
    assert found["groups"] == 1
    assert found["mean_regret"] == 0
    assert found["order"] == pytest.approx(1)


def test_a_model_may_be_a_file_beside_the_table(write, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 8192, "vocab_size": 32000,
    }))  # fmt: skip
    found = check(write(HEADER, "a,config.json,H100,8,bf16,4096,1,64,1,1,,50000"))
    assert found[0].prediction
    assert found[0].prediction.plan.shape.layers == 8


def test_timed_iterations_of_vtrain_are_taken(write):
    header = "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)"
    (row,) = check(write(header, "2,16,8,1024,16,24,1024,1,1,2,372.16"))
    assert row.measured.step_time_s == pytest.approx(0.37216)
    assert row.prediction.plan.options.recompute == ("full",)


def test_unknown_cells_are_said_and_widen_the_interval(write):
    stated, unknown = check(write(HEADER + ",dispatcher,cuda_graph", RUN + ",deepep,none", RUN.replace("a,", "b,", 1) + ",,"))
    assert unknown.prediction.spread > stated.prediction.spread
    assert any("dispatcher unknown" in w for w in unknown.prediction.words)
    assert not any("dispatcher unknown" in w for w in stated.prediction.words)


@pytest.mark.parametrize("gpu", ["H100", "H200", "B200"])
def test_runs_of_ones_own_scale_a_prediction_however_certain_it_is(write, gpu):
    row = f"{{}},qwen3_8b,{gpu},8,bf16,4096,1,64,1,1,,{{}}"
    (asked,) = check(write(HEADER, row.format("asked", "")), anchor=write(HEADER, row.format("mine", 4000), name="mine.csv"))
    assert asked.interval.value < asked.prediction.tokens_per_s_per_gpu
    assert asked.scale.left < 1


def test_a_table_that_names_megatron_lm_leaves_its_loss_open(write):
    rows = (
        f"{i},qwen3_8b,H100,8,bf16,4096,1,64,1,1,,9000,{r}" for i, r in enumerate(("megatron,te", "megatron,", "megatron,native", "nemo,"))
    )
    fused, left_open, own, bridge = check(write(f"{HEADER},backend,loss", *rows))
    speeds = [r.prediction.tokens_per_s_per_gpu for r in (fused, left_open, own)]
    assert speeds == sorted(speeds, reverse=True)
    assert left_open.prediction.spread > fused.prediction.spread
    assert [any("loss unknown" in w for w in r.prediction.words) for r in (fused, left_open, own, bridge)] == [False, True, False, False]


@pytest.mark.parametrize(
    ("dated", "overlap", "hybrid"),
    [("2025-04", False, False), ("25.09", True, False), ("26.04.01", True, True), ("2026", True, True), ("", True, True)],
)
def test_what_a_run_is_older_than_is_not_tried(write, dated, overlap, hybrid):
    header = HEADER.replace("id,", "id,release_or_date,")
    far, near = (RUN.replace("a,", f"{name},{dated},", 1).replace(",16,13011", f",{ep},13011") for name, ep in (("a", 16), ("b", 8)))
    words = ["; ".join(row.prediction.words) for row in check(write(header, far, near))]
    assert ("overlap of expert communication unknown" in words[0]) is overlap
    assert ("hybridep" in words[1]) is hybrid


HOSTILE = {
    "no file": (None, "cannot be read"),
    "empty": ("", "no column model, hardware, gpus"),
    "a header alone": (HEADER, "no run"),
    "other columns": ("modle,hardware,gpus\nx,y,1", "'modle' is not a column; did you mean 'model'"),
    "a column twice": (HEADER + ",tp\n" + RUN + ",1", "'tp' stands twice"),
    "a short row": (HEADER + "\na,b", "line 2: 2 cells; expected 12"),
    "an id twice": (f"{HEADER}\n{RUN}\n{RUN}", "line 3: id 'a' stands in line 2 too"),
    "no number": (HEADER + "\n" + RUN.replace("13011", "fast"), "tokens_per_s_per_gpu is 'fast'"),
    "not a number": (HEADER + "\n" + RUN.replace("13011", "nan"), "tokens_per_s_per_gpu is 'nan'"),
    "an open quote": (HEADER + '\n"' + RUN, "expected comma-separated values"),
    "binary": (b"\xff\xfe\x00", "not UTF-8"),
    "a zero byte": (b"a\0b", "zero byte"),
    "a long cell": (HEADER + "\n" + "x" * 5000, "more than 2000 characters"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_no_table_gets_one_message(tmp_path, name):
    content, message = HOSTILE[name]
    path = tmp_path / "runs.csv"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="(?s)" + message.replace("(", r"\(")):
        read_runs(path)


@pytest.mark.parametrize("cell", ["0", "-1", "1.5", "x", "9" * 40, "²"])
def test_a_degree_that_is_no_count_is_refused_in_its_row(write, cell):
    (row,) = check(write(HEADER, RUN.replace(",16,13011", f",{cell},13011")))
    assert "line 2: ep is" in row.why


def test_the_command_prints_a_table_or_one_document(write, capsys):
    path = write(HEADER, RUN, "b,NoSuchModel,H100,8,bf16,4096,1,8,1,1,1,5")
    shown = in_process.printed(capsys, "plan", "check", str(path))
    assert "2 runs: 1 predicted" in shown
    assert "not predicted: model 'NoSuchModel' is not known" in shown
    found = in_process.document(capsys, "plan", "check", str(path))
    assert found["schema"] == "plan-check/1"
    first, second = found["rows"]
    assert set(first["predicted"]) == {"tokens_per_s_per_gpu", "tflops_per_gpu", "memory_gib", "fits"}
    assert second["predicted"] is None
    assert "NoSuchModel" in second["why"]


def test_each_run_of_a_short_table_has_a_line(write, capsys):
    near, far = (RUN.replace("a,", f"{name},", 1).replace("13011", speed) for name, speed in (("near", "9000"), ("far", "1000")))
    path = write(HEADER, near, far, RUN.replace("a,", "open,", 1).replace("13011", ""), "b,NoSuchModel,H100,8,bf16,4096,1,8,1,1,1,5")
    lines = in_process.printed(capsys, "plan", "check", str(path)).splitlines()
    shown = {line.split()[0]: line.split() for line in lines if line}
    assert shown["near"][-3] == "9,000"
    assert shown["near"][-1] == "yes"
    assert (shown["far"][-3], shown["far"][-1]) == ("1,000", "no")
    assert float(shown["far"][-2].strip("+%")) == pytest.approx(100 * next(r for r in check(path) if r.run.id == "far").relative, abs=0.1)
    assert shown["open"][-3:] == ["-", "-", "-"]
    assert list(shown).index("far") < list(shown).index("group")
    many = write(HEADER, *(RUN.replace("a,", f"a{i},", 1) for i in range(21)))
    assert "a20" not in in_process.printed(capsys, "plan", "check", str(many))


@pytest.mark.parametrize(("older", "newer"), [("26.04", "26.08"), ("26.04", "2026-08-12"), ("2026-04-12", "26.08"), ("", "2023")])
def test_the_newest_release_counts(write, older, newer):
    header = HEADER.replace("id,", "id,source_group,release_or_date,")
    old, new = (RUN.replace("a,", f"run-{r},us,{r},", 1) for r in (older, newer))
    assert [r.counts for r in check(write(header, old, new))] == [False, True]


def test_published_runs_name_their_source_and_date():
    for row in rows_of(PUBLISHED):
        assert row["source"]
        assert row["release_or_date"] or row["source_group"] == "llm-foundry"
