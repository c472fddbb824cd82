"""Clocks are read of the GPUs that a profile uses, and of no others."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from guide_blocks import script

from playbook_bench.machine import detect, requirements
from playbook_bench.machine.telemetry import Telemetry, Ticks, stolen_percent, summarize, ticks
from playbook_bench.run.series import threads_per_rank
from playbook_bench.variants.resolve import Resolved
from playbook_trainer.config import tree as trainer_config

TOOL = """echo "$@" > {said}
while true; do echo "$(date '+%Y/%m/%d %H:%M:%S.000'), 1980, 431.58, 47, 0x0000000000000000"; sleep 0.1; done
"""
FOUR = detect.machine_of([["NVIDIA H200", "143771", "580.1", "700"]] * 4, "", "a processor", 64)


@pytest.mark.parametrize(("visible", "profile", "devices"), [(None, "h200x4", "0,1,2,3"), ("3", "h200x1", "3"), ("2,3", "h200x1", "2")])
def test_only_the_gpus_of_the_profile_are_read(
    visible: str | None, profile: str, devices: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "nvidia-smi", TOOL.format(said=tmp_path / "said"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    began = time.time()
    with Telemetry(FOUR, profile, tmp_path) as telemetry:
        deadline = time.monotonic() + 200
        while not telemetry.between(began - 2, time.time() + 2) and time.monotonic() < deadline:
            time.sleep(0.05)
        found = telemetry.between(began - 2, time.time() + 2)
    assert f"-i {devices} " in (tmp_path / "said").read_text()
    assert found["clock_sm_mhz"]["p50"] == 1980


@pytest.mark.parametrize(("profile", "visible"), [("cpu", "0,1,2,3"), ("h200x4", "")])
def test_nothing_is_started_on_a_cpu_or_where_all_gpus_are_hidden(
    profile: str, visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with Telemetry(FOUR, profile, tmp_path) as telemetry:
        assert (telemetry.devices, telemetry.between(0.0, time.time())) == ([], {})
    assert not list(tmp_path.iterdir())


def test_lines_of_other_times_and_shapes_do_not_count() -> None:
    when = datetime(2026, 11, 22, 9, 0, 0)
    lines = ["2026/11/22 09:00:00.000, 1980, 400.0, 47, 0x0", "2026/11/22 08:00:00.000, 345, 80.0, 30, 0x1", "rubbish", "1, 2", ""]
    seen = summarize(lines, when.timestamp() - 1, when.timestamp() + 1)
    assert seen["clock_sm_mhz"] == {"p5": 1980.0, "p50": 1980.0, "p95": 1980.0}
    assert seen["throttle_reasons"] == ["0x0"]
    assert seen["limited_percent"] == {"power": 0.0, "heat": 0.0, "hardware": 0.0}


def test_limits_of_the_clock_are_counted() -> None:
    """Of the readings that name reasons: an idle GPU, and clocks that somebody has set, are none of them."""
    when = datetime(2026, 11, 22, 9, 0, 0)
    reasons = ["0x0000000000000004", "0x0000000000000005", "0x0000000000000084", "0x0000000000000068", "0x1", "0x2", "0x0", "0x0", "[N/A]"]
    lines = [f"2026/11/22 09:00:00.000, {clock}, 690.0, 60, {each}" for clock, each in zip(range(1600, 1690, 10), reasons, strict=True)]
    seen = summarize(lines, when.timestamp(), when.timestamp())
    assert seen["limited_percent"] == {"power": 37.5, "heat": 12.5, "hardware": 12.5}
    assert summarize(lines[-1:], when.timestamp(), when.timestamp())["limited_percent"] == {}


def test_a_line_counts_by_its_fraction_of_a_second() -> None:
    began = datetime(2026, 11, 22, 9, 0, 0).timestamp()
    lines = ["2026/11/22 09:00:01.900, 345, 80.0, 30, 0x1", "2026/11/22 09:00:02.100, 1980, 400.0, 47, 0x0"]
    assert summarize(lines, began + 1.5, began + 2.0)["clock_sm_mhz"]["p50"] == 345
    assert summarize(lines, began + 1.0, began + 1.5) == {}, "a line of 1.9 s was read as one of 1.0 s"


@pytest.mark.parametrize(
    ("profile", "words", "ranks", "threads"),
    [("h200x4", {}, 4, 1), ("h200x1", {}, 1, 1), ("h200x4", {"offload.optimizer": True}, 4, 16), ("cpu", {}, 2, 32), ("cpu", {}, 1, 64)],
)
def test_a_rank_beside_a_gpu_has_one_thread(profile: str, words: dict[str, object], ranks: int, threads: int) -> None:
    """As torchrun would have it, unless the host updates the weights."""
    plain = trainer_config.load(Path("trainer/configs/qwen3_moe_tiny.yaml"), {})
    other = trainer_config.load(Path("trainer/configs/qwen3_moe_tiny.yaml"), words)
    variants = [Resolved("baseline", plain, ranks, {}), Resolved("candidate", other, ranks, {})]
    assert threads_per_rank(requirements.restrict(FOUR, profile), variants) == threads


def test_processor_time_that_other_machines_had(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 5 20 9000 30 1 4 10 50 0\ncpu0 1 2 3\n")
    before = ticks(stat)
    assert before == Ticks(140, 10), "guest time is in user already, idle and iowait nobody wanted"
    stat.write_text("cpu  160 5 40 9900 30 1 4 30 50 0\n")
    assert stolen_percent(before, ticks(stat)) == 20.0
    assert stolen_percent(before, before) is None
    assert stolen_percent(before, None) is None


@pytest.mark.parametrize("text", ["", "cpu", "cpu 1 2 3", "cpu a b c d e f g h", "intr 1 2 3 4 5 6 7 8"])
def test_a_system_that_does_not_count_like_linux_says_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "stat").write_text(text)
    assert ticks(tmp_path / "stat") is None
    assert ticks(tmp_path / "absent") is None


class NVMLError(Exception):
    """As the driver raises it."""


SAID = {
    "nvmlDeviceGetCount": 2,
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=143771 << 20),
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlSystemGetDriverVersion": "580.1",
    "nvmlDeviceGetPowerManagementLimit": 700_000,
    "nvmlDeviceGetClockInfo": 1980,
    "nvmlDeviceGetPowerUsage": 431_580,
    "nvmlDeviceGetTemperature": 47,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 4,
}
"""Of a machine with two GPUs."""


def driver(**more: object) -> SimpleNamespace:
    """As pynvml."""
    calls = {name: Mock(return_value=value) for name, value in SAID.items()}
    by_number = {"nvmlDeviceGetHandleByIndex": int, "nvmlDeviceGetUUID": "GPU-{}".format}
    begin_and_end = {"nvmlInit": Mock(), "nvmlShutdown": Mock(), "NVMLError": NVMLError}
    return SimpleNamespace(NVML_CLOCK_SM=0, NVML_TEMPERATURE_GPU=0, **calls, **by_number, **begin_and_end | more)


def test_what_the_driver_says_is_what_nvidia_smi_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert detect.gpus() == [["NVIDIA H200", "143771", "580.1", "700.00", f"GPU-{i}"] for i in range(2)]
    assert detect.detect().description == "2 x NVIDIA H200, PCIe"
    assert detect.place()[1:] == ["GPU-0", "GPU-1"]
    one = detect.machine_of([["NVIDIA H200", "143771", "580.1", "700"]], "", "a processor", 64)
    with Telemetry(one, "h200x1", tmp_path) as telemetry:
        found = telemetry.between(time.time() - 2, time.time() + 2)
    assert (found["clock_sm_mhz"]["p50"], found["power_w"]["p50"], found["limited_percent"]["power"]) == (1980, 431.58, 100.0)


def test_nvidia_smi_is_asked_where_the_driver_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (None, driver(nvmlInit=Mock(side_effect=NVMLError("driver not loaded")))):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        assert detect.gpus() is None
