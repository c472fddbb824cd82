"""Steps of torchtitan's own MetricsProcessor, which prints its lines and writes its events; the model is a sleep, and a GPU's memory is made up."""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace

import torch.distributed
from torchtitan.components import metrics
from torchtitan.tools.logging import init_logger


def memory() -> SimpleNamespace:
    """Stands for the monitor of a GPU's memory."""
    peak = metrics.DeviceMemStats(9.0, 45.0, 9.5, 47.5, 0, 0)
    return SimpleNamespace(device_name="NVIDIA H100", device_capacity_gib=20.0, get_peak_stats=lambda: peak, reset_peak_stats=lambda: None)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--output", default="titan-run")
    arguments.add_argument("--steps", type=int, default=12)
    arguments.add_argument("--logging-steps", type=int, default=2)
    arguments.add_argument("--step-ms", type=float, default=50.0)
    told = arguments.parse_args()
    init_logger()
    metrics.build_device_memory_monitor = memory
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    config = metrics.MetricsProcessor.Config(log_freq=told.logging_steps, enable_tensorboard=True)
    layout = SimpleNamespace(world_size=1, pp=1, pp_enabled=False, non_data_parallel_size=1)
    processor = metrics.MetricsProcessor(config, parallel_dims=layout, dump_folder=told.output)
    processor.num_flops_per_token = 6_000_000
    for step in range(1, told.steps + 1):
        time.sleep(told.step_ms / 1000)
        processor.ntokens_since_last_log += 4096
        processor.data_loading_times.append(0.001)
        if processor.should_log(step):
            processor.log(step, 8.0 / step, 9.0 / step, 1.5)
    processor.close()


if __name__ == "__main__":
    main()
