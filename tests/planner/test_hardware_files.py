"""What `--hardware` and `--network` name: calibrations, hardware files, networks; and that better hardware is never slower."""

import itertools
import json
import random
from dataclasses import replace

import pytest

from playbook.errors import PlaybookError
from playbook.paths import repo_root
from playbook.planner.choice.anchored import anchored
from playbook.planner.choice.search import plan_layouts, search
from playbook.planner.choice.space import Question, layouts
from playbook.planner.hardware import counted, machine, of_text, on_network
from playbook.planner.models import MODELS
from playbook.planner.plan import parse
from playbook.planner.runs.check import check
from playbook.planner.time import collectives, constants
from playbook.planner.time.cluster import cluster, clusters
from playbook.planner.time.step import network_share, step_time

H200 = repo_root() / "playbook" / "clusters" / "h200.json"
LINKS = repo_root() / "playbook" / "clusters" / "h200_links.json"
DATA_SHEETS = ("h100_pcie", "h100_nvl", "gh200", "l40s", "rtx_4090", "mi325x", "mi355x")


def written(folder, text, name="hardware.yaml"):
    path = folder / name
    path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    return str(path)


def calibration(*kinds, slower=1.0):
    data = json.loads(H200.read_text(encoding="utf-8"))
    rows = [r for r in data["rows"] if not kinds or r["kind"] in kinds]
    return data | {
        "rows": [{k: v * slower if k == "seconds" else v / slower if k.endswith("_per_s") else v for k, v in r.items()} for r in rows]
    }


def test_the_shipped_calibration_read_as_a_file_is_the_table_s_own_gpu():
    table, measured = cluster("h200"), machine(str(H200))
    assert measured.laws == table.laws
    assert measured.host_speed == pytest.approx(1.0)
    assert measured.memory_gib == pytest.approx(table.memory_gib, abs=0.1)
    assert measured.calibrated
    assert not table.calibrated
    assert len(measured.notes) == 1
    assert "NVIDIA H200" in measured.notes[0]
    assert measured.notes[0].endswith("from the table of GPUs: links")
    assert machine(str(H200)) is measured


def test_rings_that_were_measured_between_nodes_are_the_network(tmp_path):
    sizes = [1 << power for power in range(20, 31, 2)]
    rows = [
        {"kind": "collective", "operation": "all_gather", "ranks": 4, "nodes": 4, "bytes": b, "seconds": 40e-6 + b * 0.75 / 20e9}
        for b in sizes
    ]
    data = calibration()
    measured = machine(written(tmp_path, data | {"rows": [*data["rows"], *rows]}, "nodes.json"))
    assert measured.nic_bytes_per_s * constants.NIC_RING.value == pytest.approx(20e9)
    assert measured.rings == cluster("h200").rings  # none of them is within a node
    assert measured.about_network(64) == ("network: 20 GB/s for each GPU between 4 nodes, measured (nodes.json)",)


def test_what_a_calibration_has_no_rows_of_stays_as_the_table_has_it(tmp_path):
    part = machine(written(tmp_path, calibration("host_launch", slower=2.0), "host.json"))
    assert part.laws.forward == cluster("h200").laws.forward
    assert part.host_speed == pytest.approx(0.5)
    assert "products" in part.notes[0]


def test_measured_links_are_the_rings_that_plans_count_with():
    assert machine(str(LINKS)).rings[2] == pytest.approx(cluster("h200").rings[2], rel=0.02)


def test_a_hardware_file_says_what_the_machine_is(tmp_path):
    written(tmp_path, calibration(), "measured.json")
    text = "calibration: measured.json\ngpus_per_node: 4\nnvlink_domain: 2\nadapters_per_gpu: 0.5\nnetwork: RoCE-200\nhost_speed: 1.25\n"
    found = machine(written(tmp_path, text))
    assert (found.node, found.domain, found.host_speed, found.nic_bytes_per_s) == (4, 2, 1.25, 12.5e9)
    assert found.laws == cluster("h200").laws
    assert found.option.endswith("hardware.yaml")
    assert [n.partition(",")[0] for n in found.notes] == ["measured", "stated"]
    said = step_time(parse("qwen3_8b", ["gpus=8", "gbs=8"]), found).assumptions
    assert sum("network" in words for words in said) == 1
    assert "network RoCE-200: 12.5 GB/s for each GPU between nodes" in said
    assert on_network(found, "100GbE").nic_bytes_per_s == 12.5e9 / 4
    measured = machine(written(tmp_path, "gpu: h100\nnetwork_gb_s: 40\n", "rate.yaml"))
    assert collectives.ring(measured, 16, 8, 16e12) == pytest.approx(15e12 / 40e9, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpu: h1000\n", "hardware 'h1000' is not known"),
        ("gpus_per_node: 8\n", "neither gpu nor calibration"),
        ("gpu: h100\nnetwork: zigbee\n", "network is 'zigbee'"),
        ("gpu: h100\nnetwork: IB-400\nnetwork_gb_s: 40\n", "expected one of them"),
        ("gpu: h100\nnvlink: 4\n", "unknown key 'nvlink'"),
        ("gpu: h100\nnvlink_domain: 0\n", "nvlink_domain"),
        ("gpu: h100\nhost_speed: .nan\n", "host_speed"),
        ("gpu: h100\ncalibration: nowhere.json\n", "nowhere.json: No such file"),
        ("gpu: b200\ncalibration: measured.json\n", "measured on NVIDIA H200, and gpu is b200"),
    ],
)
def test_a_file_that_means_nothing_is_refused_in_one_message(tmp_path, text, says):
    written(tmp_path, calibration("host_launch"), "measured.json")
    with pytest.raises(PlaybookError, match=says):
        machine(written(tmp_path, text))


def test_a_calibration_faster_than_its_gpu_is_of_another(tmp_path):
    with pytest.raises(PlaybookError, match="is it a calibration of this GPU"):
        machine(written(tmp_path, calibration("linear", slower=0.5), "fast.json"))


def test_a_spoilt_calibration_is_read_or_refused(tmp_path):
    chance, refused = random.Random(5), 0
    small = calibration("host_launch", "linear", "collective", "attention", "grouped")
    for _ in range(60):
        data = json.loads(json.dumps(small))
        for _ in range(chance.choice((1, 3))):
            row = chance.choice(data["rows"])
            row[chance.choice(list(row))] = chance.choice((-1, 0, 1e300, 1e-12, True, None, "x", [], {}, "forward", 3))
        data |= chance.choice(({}, {"device": 3}, {"rows": []}, {"device": {"name": "\x1b[31mH200"}}, {"packages": []}))
        try:
            found = machine(written(tmp_path, data, "spoilt.json"))
            assert step_time(parse("qwen3_8b", ["gpus=8", "gbs=8"]), found).seconds.value > 0
            assert all(words.isprintable() for words in found.notes)
        except PlaybookError:
            refused += 1
    assert 20 < refused < 60
    for text in ("", "{", "[" * 100_000, '{"schema": "calibration/1"}', "\x00"):
        with pytest.raises(PlaybookError):
            machine(written(tmp_path, text, "spoilt.json"))


def test_text_of_a_file_opens_no_other(tmp_path):
    path = written(tmp_path, calibration("host_launch"), "measured.json")
    with pytest.raises(PlaybookError, match="text has no folder"):
        of_text(json.dumps({"gpu": "h200", "calibration": path}))
    with pytest.raises(PlaybookError, match="is not known"):
        of_text(path)
    assert of_text(json.dumps({"gpu": "h200", "nvlink_domain": 4})).domain == 4
    assert counted(path, 3) == (path, 3)


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_a_gpu_from_its_data_sheet_says_so(name):
    found = cluster(name)
    assert found.transferred
    assert all(found.provenance[k].startswith("data sheet") for k in ("bf16_tflops", "memory_gb_s"))
    assert any(name in words for words in step_time(parse("qwen3_8b", ["gpus=8", "tp=4", "gbs=8"]), found).assumptions)


def plans(chance, number):
    for _ in range(number):
        model = chance.choice(["qwen3_30b_a3b", "deepseek_v3", "llama3_70b", "qwen3_8b", "qwen3_235b_a22b"])
        gpus, backend = chance.choice([16, 64, 128]), chance.choice(["megatron", "megatron", "torch"])
        question = Question(MODELS[model], model, cluster("h100"), gpus, 4096, 256, backend=backend)
        found = list(layouts(question))
        yield from chance.sample(found, min(4, len(found)))


def test_a_faster_network_is_never_slower_and_a_slower_host_never_faster():
    chance = random.Random(11)
    networks = ("none", "25GbE", "RoCE-100", "RoCE-200", "IB-400", "IB-800")
    worse = 0
    for plan in plans(chance, 8):
        plan = replace(plan, options=replace(plan.options, recompute=chance.choice(((), ("full",))), ep_overlap=chance.random() < 0.3))
        base = cluster(chance.choice(clusters()))
        joined = sorted((on_network(base, name) for name in networks), key=lambda c: c.nic_bytes_per_s)
        times = [step_time(plan, each).seconds.value for each in joined]
        assert all(slow >= fast * (1 - 1e-9) for slow, fast in itertools.pairwise(times)), plan
        hosts = [step_time(plan, replace(base, host_speed=speed)).seconds.value for speed in (0.3, 0.7, 1.0, 1.6, 3.0)]
        assert all(slow >= fast * (1 - 1e-9) for slow, fast in itertools.pairwise(hosts)), plan
        worse += times[0] > times[-1] and hosts[0] > hosts[-1]
    assert worse > 8


@pytest.mark.full
def test_a_slow_network_keeps_experts_and_tensors_within_a_node():
    model, found = "qwen3_235b_a22b", {}
    for network in ("100GbE", "IB-400"):
        question = Question(MODELS[model], model, on_network(cluster("h100"), network), 128)
        found[network] = search(question, 3).choices
        assert network_share(found[network][0].plan, question.cluster) > {"100GbE": 0.05, "IB-400": 0.001}[network]
    for choice in found["100GbE"]:
        assert choice.plan.tp <= 8
        assert choice.plan.ep * choice.plan.etp <= 8
    assert found["IB-400"][0].speed > 1.05 * found["100GbE"][0].speed
    assert network_share(parse(model, ["gpus=8", "ep=8", "gbs=8"]), cluster("h100")) is None


def test_published_runs_do_not_scale_a_machine_that_was_measured():
    asked = Question(MODELS["qwen3_30b_a3b"], "qwen3_30b_a3b", cluster("h100"), 8, gbs=64)
    assert anchored(plan_layouts(asked, 1)).anchored
    assert not anchored(plan_layouts(replace(asked, cluster=replace(asked.cluster, calibrated=True)), 1)).anchored


def test_a_table_of_runs_is_predicted_for_the_machine_that_is_named(tmp_path):
    table = tmp_path / "runs.csv"
    head = "id,model,hardware,gpus,tp,pp,ep,mbs,gbs,seq_len,tokens_per_s_per_gpu"
    table.write_text(
        f"{head}\na,Llama3 8B,h100,16,1,1,1,1,64,4096,9000\nb,Llama3 8B,,16,1,1,1,1,64,4096,9000\nc,Llama3 8B,h200,16,1,1,1,1,64,4096,9000\n"
    )
    slow = on_network(cluster("h100"), "10GbE")
    plain, told = check(table), check(table, on=slow)
    assert plain[1].prediction is None
    assert told[1].prediction.tokens_per_s_per_gpu == told[0].prediction.tokens_per_s_per_gpu
    assert told[0].prediction.tokens_per_s_per_gpu < 0.9 * plain[0].prediction.tokens_per_s_per_gpu
    assert told[2].prediction.tokens_per_s_per_gpu == plain[2].prediction.tokens_per_s_per_gpu
