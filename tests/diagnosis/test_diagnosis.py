"""Diagnosis: where a speed stands, which wall is likely, and which actions apply with what gain, as pure functions of a setting."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from in_process import document, printed, refused, run

from playbook.cards.load import load_all
from playbook.cards.search import diagnosis_of
from playbook.cards.terms import Facts
from playbook.diagnosis import published
from playbook.diagnosis.actions import actions
from playbook.diagnosis.answer import Seen, diagnose, predicted_walls, traced_walls
from playbook.diagnosis.claims import said
from playbook.diagnosis.setting import Figures, measured, setting
from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook.planner.choice.search import Choice
from playbook.planner.memory import stages
from playbook.planner.models import MODELS
from playbook.planner.options import FRAMEWORKS
from playbook.planner.time.step import step_time
from playbook.records.read import read
from playbook.records.standing import Stock
from playbook_app.services.changes import changed
from playbook_bench.trace.walls import THRESHOLDS

MOE = "qwen3_30b_a3b"


@pytest.fixture(scope="module")
def known():
    cards = load_all()
    return Stock(cards, read([data_root("results")], cards), datetime.now(UTC).date())


def of(model=MOE, hardware="h100", gpus=64, *layout, framework="megatron-lm", seq_len=4096, gbs=None):
    return setting(MODELS[model], model, hardware, gpus, seq_len=seq_len, gbs=gbs, known=layout, framework=framework)


def found(where):
    return {a.id: a for a in actions(where, None)}


def small(known, figures=Figures(mfu_percent=40), seen=Seen(), *layout, **other):
    where = of("qwen3_8b", "h100", 8, *layout, gbs=64, **other)
    return diagnose(where, measured(where, figures), known, changed, seen)


def test_a_quarter_of_the_peak_is_where_published_runs_are():
    where = of()
    runs = published.nearest(where)
    assert {(r.model, r.hardware, r.precision) for r in runs.rows} == {("Qwen3-30B-A3B", "h100", "bf16")}
    assert runs.by == "tokens"
    assert all(runs.low <= r.tokens_per_s_per_gpu <= runs.high for r in runs.rows)
    assert runs.place(measured(where, Figures(mfu_percent=25))) == 0
    assert runs.place(measured(where, Figures(mfu_percent=12))) == -1
    assert runs.place(measured(where, Figures(mfu_percent=45))) == 1


def test_the_fastest_published_run_and_what_the_planner_says_of_it_are_told(known):
    answer = diagnose(of(), measured(of(), Figures(mfu_percent=25)), known, changed)
    first, *others = answer["published"]["rows"]
    assert 0.5 < first["predicted"] / first["tokens_per_s_per_gpu"] < 0.9
    assert all(r["predicted"] is None for r in others if "gbs=" not in r["layout"]), "a batch that is a guess"
    more = answer["published"]["high"] / answer["measured"]["tokens_per_s_per_gpu"] - 1
    assert f"the fastest {more:.0%} faster than you" in answer["position"]["sentence"]
    share = first["predicted"] / first["tokens_per_s_per_gpu"]
    assert f"of the speed of those published runs the planner predicts {share:.0%}" in answer["position"]["sentence"]
    capped = [a["expected"] for a in answer["actions"] if a["at_most"]]
    assert capped == pytest.approx([more] * len(capped))  # and not at what the slower fastest layout leaves
    assert capped


def test_variables_of_an_action_are_told_whole_where_the_layout_is_unknown(known):
    """The fastest layout has overlap and HybridEP, which need one variable; a run that lacks the one may lack the other."""
    shown = {a["id"]: a for a in diagnose(of(), None, known, changed)["actions"]}
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32" in shown["dispatcher"]["environment"]
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32" in shown["expert-overlap"]["environment"]


def test_what_gpus_measured_stands_before_what_was_checked_without_them(known):
    shown, images = (
        {a["id"]: a for a in diagnose(where, None, known, changed)["actions"]} for where in (of(), of("qwen3_vl_8b", "h200", 8))
    )
    for action in (*shown.values(), *images.values()):
        by_gpus = ["H100" in c["standing"] or "H200" in c["standing"] for c in action["claims"]]
        assert by_gpus == sorted(by_gpus, reverse=True), action["claims"]
    assert [c["id"] for c in images["packing"]["claims"]][-1] == "T11"  # confirmed on a CPU
    assert {"V11.b", "V6.u"} <= {c["id"] for c in shown["cuda-graphs"]["claims"]}
    assert shown["recompute"]["claims"][0]["id"] == "V10.c"
    assert "W1.c" not in {c["id"] for c in shown["recompute"]["claims"]}  # it says that recompute pays


def test_a_model_that_nobody_published_is_compared_by_utilisation_with_like_ones():
    runs = published.nearest(of("qwen3_8b"))
    assert runs.by == "mfu"
    assert runs.shared == "of like models on h100"
    assert all(not r.shape.experts and r.hardware == "h100" for r in runs.rows)
    other = published.nearest(of(MOE, "a100"))
    assert other.shared == f"of {MOE} on other GPUs"


def test_runs_of_another_gpu_or_length_are_named_as_such_or_left_out():
    """4,096 tokens elsewhere say nothing of 128K: the work per token is another."""
    near = of(MOE, "h200")
    runs = published.nearest(near)
    assert runs.shared == f"of {MOE} on other GPUs"
    assert {r.other(near.question) for r in runs.rows} == {"other GPU"}
    assert runs.rows[0].hardware == "h100"  # of the same peak
    assert published.nearest(of(MOE, "h200", seq_len=131072)) is None
    long = of(MOE, "h100", seq_len=131072)
    assert {r.other(long.question) for r in published.nearest(long).rows} == {"other length: 4,096 tokens"}


def test_one_speed_said_in_three_ways_is_the_same():
    where = of(gbs=1024)
    one = measured(where, Figures(mfu_percent=25))
    for figures in (Figures(step_s=one.step_s), Figures(tokens_per_s_per_gpu=one.tokens_per_s_per_gpu)):
        assert measured(where, figures).mfu == pytest.approx(0.25)
    assert one.step_s == pytest.approx(1024 * 4096 / 64 / one.tokens_per_s_per_gpu)
    assert measured(where, Figures()) is None


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        (Figures(mfu_percent=25, step_s=2.0), "expected one figure"),
        (Figures(mfu_percent=250), "of its peak"),
        (Figures(tokens_per_s_per_gpu=700_000), "tokens/s are of one GPU"),
        (Figures(step_s=float("nan")), "expected a number"),
        (Figures(mfu_percent=-3), "expected a number"),
    ],
)
def test_a_speed_that_cannot_be_is_refused(figures, says):
    with pytest.raises(ConfigError, match=says):
        measured(of(), figures)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (("tp=3",), "tp 3"),
        (("colour=red",), "not a setting"),
        (("gpus=8",), "layout has gpus=8, and elsewhere it is 64"),
        (("cp_comm=p2p",), "cp 1"),
    ],
)
def test_a_layout_that_cannot_run_is_refused(layout, says):
    with pytest.raises(ConfigError, match=says):
        of(MOE, "h100", 64, *layout)


def test_the_batch_that_is_not_given_divides_over_the_layout():
    where = of(MOE, "h100", 48, "mbs=3", "ep=8", "pp=2", "vpp=2")
    assert where.plan.broken() == []
    assert any("global batch" in words for words in where.assumed)


def test_actions_apply_to_the_hardware_and_the_model():
    """No FP8 where the GPU has none, no dispatcher where there are no experts, no interleaving without a pipeline."""
    moe = found(of(MOE, "h100", 64, "ep=16", "mbs=2"))
    assert {"dispatcher", "expert-overlap", "cuda-graphs", "grouped-experts", "gradient-overlap"} <= set(moe)
    full = ("ep=16", "mbs=4", "recompute=layernorm,moe")
    assert "fp8" in found(of(MOE, "h100", 64, *full))
    assert "fp8" not in found(of(MOE, "a100", 64, *full))
    dense = found(of("llama3_8b", "h100", 64, "tp=2", "recompute=full"))
    assert {"dispatcher", "expert-overlap", "grouped-experts"} & set(dense) == set()
    assert "interleave" not in dense
    assert "interleave" in found(of("llama3_70b", "h100", 64, "tp=4", "pp=4", "recompute=full", gbs=128))
    assert "tensor-overlap" in dense
    assert "tensor-overlap" not in moe


def test_a_gain_is_the_planners_difference_and_fits():
    where = of(MOE, "h100", 64, "ep=8", "recompute=full")
    for action in found(where).values():
        if action.gain:
            cluster = where.question.cluster
            before, after = (step_time(p, cluster).tokens_per_s_per_gpu.value for p in (action.off, action.on))
            assert action.gain.value == pytest.approx(after / before - 1)
            assert action.gain.low < action.gain.value < action.gain.high
            assert action.peak_bytes <= where.question.capacity
            assert action.on.broken() == []


def test_of_an_unknown_layout_it_is_said_what_leaving_things_out_costs():
    where = of(MOE)
    plan = of(MOE, "h100", 64, "ep=16", "mbs=2", "dispatcher=hybridep", "ep_overlap=true").plan
    best = Choice(plan, step_time(plan, where.question.cluster), tuple(stages(plan)))
    made = {a.id: a for a in actions(where, best)}
    assert {i for i, a in made.items() if a.done} == {"recompute", "dispatcher", "expert-overlap"}
    assert "layout" not in made
    for action in made.values():
        assert action.off.broken() == action.on.broken() == []


def test_what_a_run_has_already_is_not_proposed():
    on = ("ep=8", "dispatcher=hybridep", "ep_overlap=true", "graphs=attn,moe_router,moe_preprocess")
    assert {"dispatcher", "expert-overlap", "cuda-graphs", "recompute"} & set(found(of(MOE, "h100", 64, *on))) == set()


def test_every_framework_has_its_own_flags():
    where = of(MOE, "h100", 64, "ep=8", "recompute=full")
    dispatcher = found(where)["dispatcher"]
    flags = {f: changed(dispatcher, f, "h100") for f in FRAMEWORKS}
    assert flags["megatron-lm"].flags == ("--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend hybridep")
    assert "model.moe_flex_dispatcher_backend=hybridep" in flags["megatron-bridge"].flags
    assert flags["playbook"].flags == ("moe.dispatcher=hybridep",)
    assert flags["torchtitan"].flags == ("model_registry(moe_comm_backend='hybridep')",)


def test_a_model_that_the_trainer_does_not_train_has_flags_too():
    made = found(of("mixtral_8x7b", "h100", 64, "ep=8", "tp=2"))
    assert "--overlap-moe-expert-parallel-comm" in changed(made["expert-overlap"], "megatron-lm", "h100").flags
    assert any(f.startswith("--micro-batch-size") for f in changed(made["micro-batch"], "megatron-lm", "h100").flags)


def test_claims_come_with_their_verdicts_and_what_their_scope_leaves_out(known):
    where = of(MOE, "h100", 64, "ep=8", "recompute=full")
    found = {s.id: s for s in said(known, ("V10.c", "W1.c", "V5"), where.plan, where.question.cluster)}
    assert set(found) == {"V10.c", "W1.c"}  # V5 speaks of GB200
    assert any(limit.startswith("gpus:") for limit in found["V10.c"].limits)
    assert (found["V10.c"].status, found["V10.c"].machine) == ("confirmed", "h200x1")
    assert found["V10.c"].effect[1] < found["V10.c"].effect[0] < found["V10.c"].effect[2]
    dense = of("llama3_8b", "h100", 8, "tp=2")
    assert list(said(known, ("W10", "W9"), dense.plan, dense.question.cluster)) == []


def test_the_answer_names_where_the_run_stands_and_what_is_not_known(known):
    without = small(known)
    assert without["position"]["where"] == "published"
    assert without["predicted"]["yours"] is None
    assert {"the layout", "a trace"} <= set(without["confidence"]["unknown"])
    own = small(known, Figures(mfu_percent=44), Seen(), "tp=2")  # within its layout's interval: nothing to trace first
    assert own["predicted"]["yours"]["settings"][1] == "tp=2"
    assert "the layout" not in own["confidence"]["unknown"]
    assert own["position"]["of_yours"] == pytest.approx(
        own["measured"]["tokens_per_s_per_gpu"] / own["predicted"]["yours"]["tokens_per_s_per_gpu"]["value"]
    )
    shown = [a["expected"] or 0.0 for a in own["actions"]]
    assert shown == sorted(shown, reverse=True)
    assert all(a["test"] for a in own["actions"])
    assert {a["id"]: a for a in own["actions"]}["layout"]["settings"] == own["predicted"]["best"]["settings"]


def test_what_the_fastest_layout_has_too_gains_no_more_than_lies_before_it(known):
    own = small(known, Figures(mfu_percent=55), Seen(), "tp=8", "recompute=full")
    left = own["predicted"]["best"]["tokens_per_s_per_gpu"]["value"] / own["measured"]["tokens_per_s_per_gpu"] - 1
    layout = next(a for a in own["actions"] if a["id"] == "layout")
    assert layout["planner"]["value"] > left
    assert layout["at_most"]
    assert layout["expected"] == pytest.approx(max(0.0, left))
    assert own["confidence"]["warnings"] == ["the run is faster than its layout is predicted to be: is that layout what runs?"]
    assert own["confidence"]["level"] == "low"


def test_a_run_far_below_its_prediction_is_traced_first(known):
    slow = small(known, Figures(mfu_percent=10), Seen(), "tp=2")
    assert slow["actions"][0]["id"] == "trace"
    assert "--trace" in slow["actions"][0]["test"][0]


TRACE = {
    "busy": 0.6, "idle": 0.4, "host_idle": 0.05, "data_wait": 0.3, "exposed": 0.02, "computing": 0.55, "wall": "data wait", "beyond": ["data wait"],
}  # fmt: skip


def test_a_trace_goes_before_the_prediction(known):
    seen = small(known, Figures(mfu_percent=10), Seen(TRACE), "tp=2")
    assert seen["walls_from"] == "trace"
    assert (seen["walls"][0]["name"], seen["walls"][0]["share"]) == ("data wait", 0.3)
    assert seen["how_to_tell"] == ""
    slow = {"host_idle": 0.5, "waits_for": [{"name": "aten::plan"}]}
    hosted = small(known, Figures(mfu_percent=10), Seen({**TRACE, **slow}), "tp=2", "recompute=full")
    assert "most of that passes in aten::plan" in hosted["walls"][0]["sign"]
    assert hosted["walls"][0]["name"] == "host-bound"
    assert "host-bound" in hosted["actions"][0]["walls"]


def test_predicted_walls_are_shares_of_the_step():
    where = of(MOE, "h100", 64, "ep=8", "recompute=full")
    time = step_time(where.plan, where.question.cluster)
    told = {w.name: w for w in predicted_walls(time, where.plan, where.question.cluster)}
    assert told["host-bound"].share == pytest.approx(time.parts["host"] / time.seconds.value)
    assert told["memory"].beyond  # whole layers are computed again
    assert told["data wait"].share is None
    plain = replace(where.plan, options=replace(where.plan.options, recompute=()))
    lean = predicted_walls(step_time(plain, where.question.cluster), plain, where.question.cluster)
    assert {w.name: w.share for w in lean}["memory"] == 0.0


def test_thresholds_are_those_of_a_trace():
    limits = {w.name: w.threshold for w in traced_walls(TRACE)}
    assert {name: limits[name] for name in ("host-bound", "exposed communication", "data wait")}.items() <= THRESHOLDS.items()


def test_where_nothing_fits_the_answer_says_what_would(known):
    where = of("qwen3_235b_a22b", "h100", 16, gbs=16)
    none = diagnose(where, None, known, changed)
    assert none["predicted"]["best"] is None
    assert none["predicted"]["nothing_fits"]["ways"]
    assert none["actions"] == []


@pytest.mark.parametrize(
    ("question", "command"),
    [
        ("my MoE training on 64 H100 is at 25 % MFU", "--model MODEL --gpus 64 --gpu h100 --mfu 25"),
        ("Qwen3-30B-A3B is slow on 8 x H200", "--model qwen3_30b_a3b --gpus 8 --gpu h200"),
        ("MFU of 31.5 with deepseek_v3", "--model deepseek_v3 --gpus N --gpu KIND --mfu 31.5"),
        ("oom at 128k on 8 H100", ""),
        ("why is all-to-all slow", ""),
    ],
)
def test_a_question_about_speed_becomes_a_command(question, command):
    assert diagnosis_of(question, Facts()) == (f"playbook diagnose {command}" if command else "")


ASKED = ("--model", "Qwen/Qwen3-8B", "--gpus", "8", "--gpu", "h100", "--gbs", "64")


def test_the_command_reads_a_log(capsys, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"step": i, "seconds": 6.0 if i % 9 else 20.0, "loss": 2.0}) + "\n" for i in range(1, 41)))
    answer = document(capsys, "diagnose", str(tmp_path), *ASKED, "--layout", "tp=2")
    assert answer["measured"]["step_s"] == pytest.approx(6.0)
    assert any("uneven" in words for words in answer["confidence"]["warnings"])
    assert "6.00 s a step" in printed(capsys, "diagnose", str(log), *ASKED, "--layout", "tp=2")


def test_memory_that_grows_is_said(capsys, tmp_path):
    rows = [{"step": i, "seconds": 6.0, "memory_bytes": (40 + i / 10) * 2**30} for i in range(1, 101)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    warnings = document(capsys, "diagnose", str(tmp_path), *ASKED)["confidence"]["warnings"]
    assert any("memory grew from 44.0 to 50.0 GiB" in words for words in warnings)


def test_the_folder_of_a_run_of_ours_needs_no_model(capsys, tmp_path):
    import yaml

    from playbook_trainer.config.tree import dump, from_data

    parallel, train = {"tp": 2}, {"micro_batch_size": 2, "global_batch_size": 64}
    own = {"backend": "megatron", "model": "qwen3_8b", "data": {"kind": "text", "seq_len": 4096}, "parallel": parallel, "train": train}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dump(from_data(own, {}, "own", {}))))
    (tmp_path / "log.jsonl").write_text("".join(json.dumps({"step": i, "seconds": 6.0}) + "\n" for i in range(1, 11)))
    assert "GPUs are not named" in refused(capsys, "diagnose", str(tmp_path))
    summary = {"world_size": 8, "env": {"strict": {"device_name": "NVIDIA H100 80GB HBM3"}}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    setting_ = document(capsys, "diagnose", str(tmp_path))["setting"]
    assert {"tp=2", "mbs=2"} <= set(setting_["layout"])
    assert (setting_["model"], setting_["gbs"], setting_["gpus"], setting_["hardware"]) == ("qwen3_8b", 64, 8, "h100")
    assert setting_["framework"] == "playbook"
    summary["env"]["strict"]["device_name"] = "cpu"
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert "a run on a CPU" in refused(capsys, "diagnose", str(tmp_path))
    (tmp_path / "summary.json").write_text("[]")
    assert "no summary of a run" in refused(capsys, "diagnose", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--gpus", "8"), "no model is named"),
        (("--model", "qwen3_8b"), "give --gpus N and --gpu KIND"),
        ((*ASKED, "--framework", "colossal"), "expected one of megatron-lm"),
        ((*ASKED, "--step-time", "soon"), "expected seconds such as 1.9s"),
        ((*ASKED, "--mfu", "0.22"), "MFU is 0.22; expected percent from 1 to 100, such as 22"),
        ((*ASKED, "--seq", "long"), "'--seq': found 'long', expected tokens of a sequence, such as 4096, 128K or 1M"),
        ((*ASKED, "nowhere"), "no such file or folder"),
        ((*ASKED, "--gpu", "zx81"), "is not known"),
        ((*ASKED, "--layout", "ep"), "not a setting"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(capsys, words, says):
    code, out, err = run(capsys, "diagnose", *words)
    assert (code, out) == (2, "")
    assert says in err


def test_a_log_without_a_step_is_named_and_only_what_the_command_has_is_offered(capsys, tmp_path):
    (tmp_path / "notes.txt").write_text("hello\n")
    err = refused(capsys, "diagnose", str(tmp_path / "notes.txt"), *ASKED)
    assert f"{tmp_path / 'notes.txt'}: no line tells of a step; expected the log of one of playbook, jsonl" in err
    assert "regex" not in err
