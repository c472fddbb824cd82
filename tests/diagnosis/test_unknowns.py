"""What is left open is filled in one way by every command, and a diagnosis goes by what its reader saw."""

import json
from bisect import bisect_left
from dataclasses import replace

import in_process
import pytest

from playbook.diagnosis import answer, published
from playbook.diagnosis.actions import actions
from playbook.diagnosis.seen import composition, of_trace, parsed
from playbook.diagnosis.setting import Figures, measured, setting
from playbook.errors import ConfigError
from playbook.planner.choice import space
from playbook.planner.hardware import on_network
from playbook.planner.memory import GIB, verdict
from playbook.planner.models import MODELS
from playbook.planner.plan import parse
from playbook.planner.runs.check import check, document
from playbook.planner.time.cluster import cluster, clusters
from playbook.planner.time.step import step_time

MOE = "qwen3_30b_a3b"


def of(model, hardware, gpus, *layout, seq_len=4096, gbs=None, **other):
    return setting(MODELS[model], model, hardware, gpus, seq_len=seq_len, gbs=gbs, known=layout, **other)


def table(tmp_path, header, *rows):
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([header, *rows]))
    return path


def test_empty_chunks_of_llama_3_405b_are_those_that_balance_its_layers(tmp_path):
    """arXiv 2407.21783, table 4: 400 TFLOP/s on 16,384 H100 at TP 8, PP 16, 8,192 tokens, without recompute."""
    header = "id,model,hardware,gpus,precision,seq_len,mbs,gbs,tp,cp,pp,vpp,recompute,tflops_per_gpu"
    row = "{},llama3_405b,H100,16384,bf16,8192,1,2048,8,1,16,{},{},400"
    kinds = [row.format("open", "", "none"), row.format("eight", 8, "none"), row.format("one", 1, "none"), row.format("both", "", "")]
    found, eight, one, both = check(table(tmp_path, header, *kinds))
    assert found.prediction.plan.vpp == 8
    assert found.difference == pytest.approx(eight.difference)
    assert abs(found.difference) < 0.1
    assert one.difference < -0.3
    assert "vpp unknown: 8" in found.prediction.words
    assert "recompute unknown: the least that fits, layernorm" in both.prediction.words
    mine = of("llama3_405b", "h100", 16384, "tp=8", "pp=16", seq_len=8192, gbs=2048).plan
    assert (mine.vpp, mine.options.recompute) == (8, ("layernorm",))
    assert mine == replace(both.prediction.plan, imbalance=1.0)


def test_chunks_are_one_where_layers_divide_or_the_trainer_splits_them():
    assert space.chunks(parse("llama3_70b", ["gpus=64", "tp=4", "pp=4", "gbs=128"])) == (1, 20)
    uneven = ("gpus=512", "tp=8", "pp=8", "gbs=256")
    assert space.chunks(parse("llama3_405b", [*uneven, "backend=torch"])) == (1,)
    assert space.chunks(parse("llama3_405b", [*uneven])) == (16,)
    assert space.chunks(parse("llama3_405b", ["gpus=512", "tp=8", "pp=8", "gbs=72", "mbs=1"])) == (1,)  # nine micro-batches


@pytest.fixture
def large():
    """A plan of 309 GiB, and its words."""
    words = ("gpus=256", "pp=4", "vpp=1", "ep=32", "mbs=1", "gbs=4096")
    lengths = range(4096, 131072, 128)
    first = bisect_left(lengths, 308.5 * GIB, key=lambda n: space.held(parse("deepseek_v3", [*words, f"seq_len={n}"])))
    plan = parse("deepseek_v3", [*words, f"seq_len={lengths[first]}"])
    assert space.held(plan) < 309.5 * GIB
    return plan, [*words[1:], f"seq_len={plan.seq_len}", "recompute=none", "grad_bytes=4"]


def test_a_run_of_309_gib_on_276_does_not_fit(tmp_path, large):
    plan, stated = large
    gb300 = cluster("gb300")
    assert gb300.memory_gib == pytest.approx(275.9)
    assert verdict(space.held(plan), gb300.memory_gib) == "does not fit"
    where = setting(MODELS["deepseek_v3"], "deepseek_v3", "gb300", 256, seq_len=None, gbs=None, known=stated)
    assert space.held(where.plan) == pytest.approx(309 * GIB, rel=0.002)
    assert not space.fits(where.plan, gb300.memory_gib)
    header = "id,model,hardware,gpus,precision,seq_len,mbs,gbs,pp,ep,vpp,recompute"
    row = f"a,deepseek_v3,GB300,256,bf16,{plan.seq_len},1,4096,4,32,1,{{}}"
    for recompute, fits, says in (("none", False, "does not fit: "), ("", True, "recompute unknown: the least that fits")):
        (found,) = document(check(table(tmp_path, header, row.format(recompute))))["rows"]
        assert found["predicted"]["fits"] is fits is (found["predicted"]["memory_gib"] <= gb300.memory_gib)
        assert sum(w.startswith(says) for w in found["assumed"]) == 1


def test_a_diagnosis_says_that_a_run_does_not_fit(capsys):
    stated = "mbs=4,gbs=64,recompute=none,grad_bytes=4"
    shown = in_process.document(capsys, "diagnose", "--model", "qwen3_8b", "--gpus", "8", "--gpu", "h100", "--layout", stated)
    assert shown["predicted"]["yours"]["fits"] is False
    assert any(f"{shown['predicted']['yours']['memory_gib']:.0f} GiB" in words for words in shown["confidence"]["warnings"])


def test_the_least_recompute_that_fits_is_taken_where_none_is_stated():
    words = ("tp=2", "ep=8", "mbs=8", "gbs=1024")
    plain = parse(MOE, ["gpus=64", *words])
    room = cluster("h100").memory_gib
    assert not space.fits(plain, room)
    where = of(MOE, "h100", 64, *words)
    assert space.fits(where.plan, room)
    rungs = space.recompute_ladder(MODELS[MOE], "megatron")
    lighter = rungs[: rungs.index(where.plan.options.recompute)]
    assert lighter
    for rung in lighter:
        other = of(MOE, "h100", 64, *words, f"recompute={'+'.join(rung) or 'none'}", "grad_bytes=4")
        assert not space.fits(other.plan, room)
    assert sum("recompute unknown" in w for w in where.assumed) == 1


@pytest.mark.parametrize("gpu", clusters())
def test_no_step_is_above_the_best_product(gpu):
    where = of("llama3_8b", gpu, 8)
    share = 100 * where.question.cluster.bf16_reached
    assert measured(where, Figures(mfu_percent=share - 0.1)).mfu < where.reached
    with pytest.raises(ConfigError, match="Check your token count"):
        measured(where, Figures(mfu_percent=share + 0.1))


def test_a_bubble_of_44_percent_has_more_micro_batches_as_its_remedy():
    where = of("llama3_405b", "h100", 16384, "tp=8", "pp=16", "vpp=1", seq_len=8192, gbs=2048)
    told = answer.predicted_walls(step_time(where.plan, where.question.cluster), where.plan, where.question.cluster)
    assert (told[0].name, round(told[0].share, 2)) == ("bubble", 0.44)
    batch = next(a for a in actions(where, None) if a.id == "batch")
    assert batch.walls == ("bubble",)
    assert batch.on.microbatches == 4 * where.plan.microbatches  # 64 million tokens are the most
    assert batch.gain.value > 0.4
    one = of("llama3_8b", "h100", 8, "pp=8", gbs=1)
    remedy = next(a for a in actions(one, None) if a.id == "batch")
    assert remedy.on.global_batch > 8
    assert "batch" not in {a.id for a in actions(of("llama3_8b", "h100", 8, "pp=2", gbs=512), None)}


def test_a_logs_own_batch_goes_before_what_would_be_assumed(capsys, tmp_path):
    line = " iteration {:8}/     500 | elapsed time per iteration (ms): 6100.0 | global batch size:    96 | lm loss: 2.0E+00 |\n"
    log = tmp_path / "run.log"
    log.write_text("".join(line.format(i) for i in range(1, 31)))
    asked = ("diagnose", str(log), "--model", "qwen3_8b", "--gpus", "8", "--gpu", "h100")
    code, out, err = in_process.run(capsys, *asked)
    assert (code, "6.10 s a step" in out) == (0, True), err
    assert "the log ends at step 30 of 500: the run goes on, or ended early" in out
    shown = in_process.document(capsys, *asked)
    assert shown["setting"]["gbs"] == 96
    assert shown["measured"]["tokens_per_s_per_gpu"] == pytest.approx(96 * 4096 / 8 / 6.1)
    assert not any("about four million tokens" in w for w in shown["assumptions"])
    assert "global batch of 96 samples, and --gbs is 64" in in_process.refused(capsys, *asked, "--gbs", "64")


def test_40_percent_of_all_to_all_that_were_seen_or_that_a_trace_shows_change_wall_and_first_action(capsys, tmp_path):
    """Each step of 1,000 microseconds has 400 of DeepEP's kernels beside which nothing is computed."""
    events = []
    for i in range(3):
        t = 1000 * i
        events.append({"ph": "X", "pid": 7, "tid": 7, "cat": "user_annotation", "name": f"ProfilerStep#{i}", "ts": t, "dur": 1000})
        for j, (name, start, last) in enumerate((("nvjet_sm90_tst", 0, 600), ("deep_ep::internode::dispatch", 600, 400))):
            own = {"correlation": 2 * i + j + 1}
            events.append(
                {
                    "ph": "X",
                    "pid": 7,
                    "tid": 7,
                    "cat": "cuda_runtime",
                    "name": "cudaLaunchKernel",
                    "ts": max(0, t + start - 5),
                    "dur": 3,
                    "args": own,
                }
            )
            events.append(
                {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 1, "ts": t + start, "dur": last, "args": {**own, "device": 0}}
            )
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    asked = ("diagnose", "--model", MOE, "--gpus", "64", "--gpu", "h100", "--mfu", "15", "--layout", "ep=8,mbs=2,gbs=1024,recompute=full")
    told = ((), ("--saw", "all-to-all=40%,idle=25%"), ("--trace", str(tmp_path / "trace.json")))
    plain, seen, traced = (in_process.document(capsys, *asked, *more) for more in told)
    assert plain["walls"][0]["name"] != "exposed communication"
    gains = [next(a["planner"]["value"] for a in found["actions"] if a["id"] == "dispatcher") for found in (plain, seen)]
    assert gains[1] > gains[0]
    for found in (seen, traced):
        assert found["setting"]["seen"]["all-to-all"] == pytest.approx(0.4, abs=0.01)
        assert found["walls"][0]["name"] == "exposed communication"
        assert found["walls"][0]["share"] > 0.39
        assert "exposed communication" in found["actions"][0]["walls"]
        assert plain["actions"][0]["id"] != found["actions"][0]["id"]
    assert "all-to-all 40%" in traced["walls"][0]["sign"]
    assert "a trace" not in traced["confidence"]["unknown"]
    assert "trace" not in {a["id"] for a in traced["actions"]}


def test_shares_of_what_was_seen_leave_the_rest_to_the_prediction():
    parts = {"products": 3.0, "host": 1.0, "ep": 1.0, "dp": 1.0}
    assert composition(parts, {}) == {k: pytest.approx(v / 6) for k, v in parts.items()}
    shares = composition(parts, {"all-to-all": 0.4, "data": 0.1})
    assert shares == {"ep": pytest.approx(0.4), "products": pytest.approx(0.3), "host": pytest.approx(0.1), "dp": pytest.approx(0.1)}
    assert composition(parts, {"communication": 0.5, "all-to-all": 0.4})["dp"] == pytest.approx(0.1)
    several = of_trace({"exposed": 0.2, "host_idle": None, "collectives": {"all-gather": 0.2, "reduce-scatter": 0.2, "other": 0.1}})
    assert several == {"communication": 0.2, "all-gather": pytest.approx(0.1), "reduce-scatter": pytest.approx(0.1)}


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("sleep=3%", "is not known"),
        ("idle", "with its percentage"),
        ("idle=1%,idle=2%", "each once"),
        ("idle=60%,data=60%", "120% of a step"),
    ],
)
def test_what_cannot_have_been_seen_is_refused(word, says):
    with pytest.raises(ConfigError, match=says):
        parsed([word])


@pytest.mark.parametrize(
    ("network", "rate"),
    [("100GbE", 1.5625e9), ("RoCE-200", 25e9), ("IB-400", 50e9), ("EFA-3200", 50e9), ("none", 1.5625e9), ("ib-400", 50e9)],
)
def test_a_network_is_a_rate_for_each_gpu(network, rate):
    assert on_network(cluster("h100"), network).nic_bytes_per_s == pytest.approx(rate)
    assert on_network(cluster("h100"), network) is on_network(cluster("H100"), network)


def test_a_slower_network_is_slower_and_is_said_once():
    words = (MOE, "h100", 64, "ep=32", "gbs=1024")
    fast, slow, unsaid = of(*words, network="IB-400"), of(*words, network="none"), of(*words)
    seconds = [step_time(w.plan, w.question.cluster).seconds.value for w in (fast, slow, unsaid)]
    assert seconds[1] > 2 * seconds[0] == 2 * seconds[2]
    for where in (fast, slow, unsaid):
        assert sum("network" in w for w in where.assumed) == 1
    assert "taken as 100GbE" in slow.assumed[0]
    with pytest.raises(ConfigError, match="network is 'zigbee'"):
        of(*words, network="zigbee")


def test_no_wall_is_claimed_where_nothing_is_known_of_the_run(capsys):
    asked = ("diagnose", "--model", MOE, "--gpus", "64", "--gpu", "h100", "--mfu", "25")
    assert in_process.document(capsys, *asked)["walls"] == []
    assert "wall       not known" in in_process.run(capsys, *asked)[1]


def test_layouts_of_published_runs_are_read_as_they_are_printed():
    rows = [r for r in published._rows() if r.layout]
    assert len(rows) > 50
    refused = []
    for row in rows:
        try:
            setting(row.shape, row.preset, row.hardware, row.gpus, seq_len=row.seq_len, gbs=None, known=row.layout.split())
        except ConfigError as e:
            refused.append((row.id, str(e)))
    assert [r for r in refused if "this layout cannot run" not in r[1] and "no effect" not in r[1]] == []
