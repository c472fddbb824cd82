"""Which GPU or link of a job is slow, from readings with a planted fault."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from in_process import run

from playbook.errors import ConfigError
from playbook.planner.time.cluster import cluster
from playbook_bench.machine import preflight
from playbook_bench.machine.preflight import Reading
from playbook_trainer import preflight as trainer

HEALTHY = {
    "product_flops_per_s": 665e12,
    "memory_bytes_per_s": 3.02e12,
    "launches_per_s": 140e3,
    "host_to_device_bytes_per_s": 55e9,
    "device_to_host_bytes_per_s": 55e9,
}
"""What four H100s reached."""
LINK = 260e9


def readings(hosts=2, gpus=4, slow=(), sensors=()):
    """Readings of a healthy job, with the planted ones in place of theirs."""
    places = [(f"n{host}", gpu) for host in range(hosts) for gpu in range(gpus)]
    found = [Reading(*place, metric, value) for place in places for metric, value in HEALTHY.items()]
    for pairs in trainer.rounds(places):
        for a, b in pairs:
            rate = LINK if places[a][0] == places[b][0] else 45e9
            found += [Reading(*places[x], "link_bytes_per_s", rate, places[y]) for x, y in ((a, b), (b, a))]
    ends = {(r.host, r.gpu, r.metric, r.other): r for r in slow}
    return [ends.get((r.host, r.gpu, r.metric, r.other), r) for r in found] + list(sensors)


def link(one, other, rate):
    return [Reading(*one, "link_bytes_per_s", rate, other), Reading(*other, "link_bytes_per_s", rate, one)]


@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
def test_a_healthy_job_of_any_size_passes(name):
    healthy = preflight.expected(cluster(name))
    scale = {m: healthy.get(m, v) / v for m, v in {**HEALTHY, "link_bytes_per_s": LINK}.items()}
    for hosts, gpus in ((1, 1), (1, 8), (2, 4), (5, 8)):
        usual = [r if r.other and r.other[0] != r.host else replace(r, value=r.value * scale[r.metric]) for r in readings(hosts, gpus)]
        assert preflight.faults(usual, healthy) == []


@pytest.mark.parametrize("metric", sorted(HEALTHY))
def test_a_slow_gpu_is_named_with_its_figure(metric):
    slow = Reading("n1", 2, metric, HEALTHY[metric] * 0.45)
    (fault,) = preflight.faults(readings(slow=[slow]), {})
    label = preflight.LIMITS[metric].label
    assert fault.startswith(f"n1 GPU 2: {label} ")
    assert "45% of the median of 8" in fault


def test_a_gpu_alone_is_held_against_its_kind():
    healthy = preflight.expected(cluster("h100"))
    slow = [Reading("n0", 0, "product_flops_per_s", 303e12)]
    (fault,) = preflight.faults(readings(1, 1, slow), healthy)
    assert "303 TFLOP/s" in fault
    assert "of what this kind of GPU reaches" in fault
    assert preflight.faults(readings(1, 1, slow), {}) == []  # nothing to compare it with


@pytest.mark.parametrize(("one", "other"), [(("n0", 1), ("n0", 3)), (("n0", 2), ("n1", 2))])
def test_a_slow_link_is_named_once_by_both_ends(one, other):
    (fault,) = preflight.faults(readings(slow=link(one, other, 9e9)), {})
    assert fault.startswith(f"{one[0]} GPU {one[1]} to {'' if one[0] == other[0] else other[0] + ' '}GPU {other[1]}: link 9 GB/s")


def test_heat_and_memory_that_another_process_holds_are_named_and_a_power_cap_is_not():
    sensors = [
        Reading("n0", 0, "throttle_reasons", float(0x4)),
        Reading("n0", 1, "throttle_reasons", float(0x44)),
        Reading("n0", 2, "memory_taken_bytes", 1.6e9),
        Reading("n0", 3, "memory_taken_bytes", 0.555e9),
    ]
    faults = preflight.faults(readings(sensors=sensors), {})
    assert [f.partition(":")[0] for f in faults] == ["n0 GPU 1", "n0 GPU 2"]
    assert "heat" in faults[0]
    assert "another process" in faults[1]


@pytest.mark.parametrize("sizes", [[1], [2], [3], [8], [4, 4], [3, 3, 3], [8] * 5, [2, 4]])
def test_every_pair_of_a_machine_and_every_two_neighbours_talk_once_and_nobody_twice_at_a_time(sizes):
    places = [(f"n{host}", gpu) for host, size in enumerate(sizes) for gpu in range(size)]
    rounds = trainer.rounds(places)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))
    within = {frozenset((a, b)) for a, x in enumerate(places) for b, y in enumerate(places) if a < b and x[0] == y[0]}
    assert within <= set(met)
    across = {frozenset((places[a][0], places[b][0])) for a, b in map(sorted, set(met) - within)}
    count = len(sizes)
    assert len(across) == (0 if count == 1 else 1 if count == 2 else count)


def test_what_is_expected_is_of_the_product_that_is_measured():
    tokens, wide_in, wide_out = trainer._PRODUCT
    assert 2.0 * tokens * wide_in * wide_out == preflight._PRODUCT_FLOPS


def test_the_place_of_a_process_is_its_launchers_or_none():
    torchrun = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "SLURMD_NODENAME": "n1"}
    assert trainer.place(torchrun) == trainer.Place(3, 4, 1, "n1")
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n1"}
    assert trainer.place(step) == trainer.Place(2, 4, 0, "n1")
    batch_script = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n0"}
    assert trainer.place(batch_script) is None


@pytest.mark.parametrize(
    "lacking", [{"WORLD_SIZE": "4"}, {"WORLD_SIZE": "4", "RANK": "x", "LOCAL_RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "two"}]
)
def test_a_launcher_that_says_half_is_refused_by_name(lacking):
    with pytest.raises(ConfigError, match=next(iter(lacking))):
        trainer.place(lacking)


@pytest.mark.full
def test_ranks_of_torchrun_give_one_answer_with_their_link():
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "playbook",
        "preflight",
        "--seconds",
        "0.1",
        "--json",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=2000, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    (answer,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert answer["schema"] == "preflight/1"
    assert [(r["gpu"], r["other"][1]) for r in answer["readings"] if r["metric"] == "link_bytes_per_s"] == [(0, 1), (1, 0)]


@pytest.mark.full
def test_the_command_checks_a_machine_without_gpus_and_says_what_it_compares(capsys):
    words = [sys.executable, "-m", "playbook", "preflight", "--seconds", "0.1"]
    done = subprocess.run(
        [*words, "--json"], capture_output=True, text=True, check=False, timeout=1200, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["schema"], answer["faults"]) == (0, "preflight/1", [])
    assert {r["metric"] for r in answer["readings"]} == {"product_flops_per_s", "memory_bytes_per_s", "launches_per_s"}
    code, _, err = run(capsys, *words[3:], "--hardware", "h1000")
    assert code == 2
    assert "h1000" in err
