"""Logs as trainers write them: their formats, our figures. Shared by the tests of adapters."""

from __future__ import annotations

import json
import re

LOSSES = (2.5, 2.41, 2.37, 2.3, 2.26, 2.21, 2.18, 2.14)
SECONDS = (0.75, 0.5, 0.52, 0.49, 0.51, 0.5, 0.53, 0.5)
TOKENS = 4096


def moments() -> list[float]:
    """Seconds from the start of training to the end of each step."""
    return [round(sum(SECONDS[: i + 1]), 4) for i in range(len(SECONDS))]


def stamp(at: float) -> str:
    """Seconds as the loggers of Python write them."""
    return f"{at:06.3f}".replace(".", ",")


def json_lines() -> str:
    rows = [{"step": i, "seconds": s, "loss": x, "tokens": TOKENS} for i, (s, x) in enumerate(zip(SECONDS, LOSSES, strict=True), 1)]
    return "starting\n" + "".join(json.dumps(row) + "\n" for row in rows) + '{"event": "done"}\n'


def playbook() -> str:
    rows = [
        {"step": i, "timed": i > 2, "loss": x, "grad_norm": 1.5, "lr": 1e-3, "seconds": s, "useful_tokens": TOKENS, "raw_tokens": 4100}
        for i, (s, x) in enumerate(zip(SECONDS, LOSSES, strict=True), 1)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def megatron(every: int = 1, skipped: tuple[int, ...] = ()) -> str:
    """Megatron-LM's lines of 2024 and after; lines of other ranks and timers stand between them."""
    out = ["training ...", "[before the start of training step] datetime: 2026-01-05 10:00:00 "]
    for i, (s, x) in enumerate(zip(SECONDS, LOSSES, strict=True), 1):
        n = i * every
        learned = "" if n in skipped else f" lm loss: {x:.6E} | load_balancing_loss: 1.069903E+00 |"
        norm = "" if n in skipped else " grad norm: 2.853 |"
        out.append(
            f" [2026-01-05 10:00:{i:02d}.250000] iteration {n:8d}/{len(SECONDS) * every:8d} | consumed samples: {n * 128:12d} |"
            f" elapsed time per iteration (ms): {s * 1000:.1f} | throughput per GPU (TFLOP/s/GPU): 220.4 | learning rate: 3.000000E-06 |"
            f" global batch size:   128 |{learned} loss scale: 1.0 |{norm} num zeros: 0.0 |"
            f" number of skipped iterations: {int(n in skipped):3d} | number of nan iterations:   0 |"
        )
        if i == 1:
            out.append("[Rank 0] (after 1 iterations) memory (MB) | allocated: 54250.97 | max allocated: 54250.98 | reserved: 61480.0")
        out.append("time (ms) | forward-compute: 193.77 | backward-compute: 73.02 | optimizer: 63.01")
    out.append(" validation loss at iteration 8 | lm loss value: 2.2E+00 | lm loss PPL: 9.0E+00 |")
    return "\n".join(out) + "\n"


def megatron_2020() -> str:
    """Without date, samples and throughput."""
    return "".join(
        f" iteration {i:8d}/{len(SECONDS):8d} | elapsed time per iteration (ms): {s * 1000:.1f} | learning rate: 1.000E-04 |"
        f" lm loss: {x:.6E} | loss scale: 1.0 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
        for i, (s, x) in enumerate(zip(SECONDS, LOSSES, strict=True), 1)
    )


def megatron_bridge() -> str:
    """Rank 0 prints a line of its own before the last rank's."""
    return "".join(
        f"Step Time : {line.split('(ms): ')[1][:3]}s GPU utilization: 528.1MODEL_TFLOP/s/GPU\n{line}\n"
        if "elapsed time" in line
        else f"{line}\n"
        for line in megatron().splitlines()
    )


def primus() -> str:
    """Primus: no date, and the mean so far behind time and throughput."""
    return re.sub(r" \[2026[^]]*\]|(?<=: )(\d+\.\d)(?= \| (?:throughput|learning))", lambda m: f"{m[1]}/555.5" if m[1] else "", megatron())


def torchtitan(colours: bool = True, every: int = 1, prefix: str = "[rank0]:") -> str:
    """torchtitan's lines; with `every` above 1, step 1 has one of its own, as there."""
    red, green, reset = ("\x1b[31m", "\x1b[32m", "\x1b[39m") if colours else ("", "", "")
    out = [f"{prefix}[titan] 2026-02-24 10:00:00,000 - root - INFO - Training starts at step 1"]
    for i, (at, x) in enumerate(zip(moments(), LOSSES, strict=True), 1):
        n = i if every == 1 else max(1, (i - 1) * every)
        out.append(
            f"{prefix}[titan] 2026-02-24 10:00:{stamp(at)} - root - INFO - {red}step: {n:2}  {green}loss: {x:8.5f}  "
            f"grad_norm: {1.5:7.4f}  memory: {9.46:5.2f}GiB(64.99%)  tps: 7,282  tflops: 1,000.52  mfu: 0.17%{reset}"
        )
    out.append(
        f"{prefix}[titan] 2026-02-24 10:01:00,000 - root - INFO - validate step: {n:2}  loss:  2.1000  memory:  9.46GiB(64.99%)  tps: 9,000"
    )
    return "\n".join(out) + "\n"


def trainer_state(timed: bool = True) -> str:
    """Hugging Face's `trainer_state.json`; timed: with include_num_input_tokens_seen."""
    history = [
        {"epoch": i / 4, "grad_norm": 1.5, "learning_rate": 5e-5, "loss": x, "step": i}
        | ({"num_input_tokens_seen": TOKENS * i, "train_runtime": at, "train_tokens_per_second": 8000.1} if timed else {})
        for i, (at, x) in enumerate(zip(moments(), LOSSES, strict=True), 1)
    ]
    history.append({"epoch": 2.0, "eval_loss": 2.2, "eval_runtime": 0.1, "step": 8})
    history.append({"epoch": 2.0, "step": 8, "total_flos": 1e12, "train_loss": 2.3, "train_runtime": 4.5, "train_steps_per_second": 1.78})
    return json.dumps({"global_step": 8, "log_history": history, "logging_steps": 1, "max_steps": 8}, indent=2)


def trainer_console() -> str:
    """What the Trainer prints, with its progress bar on the same terminal: version 5 quotes the numbers."""
    out = ["\r  0%|          | 0/8 [00:00<?, ?it/s]"]
    for i, x in enumerate(LOSSES, 1):
        out.append(
            f"\r                       \r{{'loss': '{x:.4g}', 'grad_norm': '1.5', 'learning_rate': '5e-05', 'epoch': '{i / 4:.4g}'}}\n"
        )
        out.append(f"\r {i * 12}%|#         | {i}/8 [00:00<00:01,  1.9it/s]")
    out.append("\n{'train_runtime': '4.3', 'train_samples_per_second': '7.4', 'train_loss': '2.3', 'epoch': '2'}\n")
    return "".join(out)


def swift(old: bool = False) -> str:
    """ms-swift's `logging.jsonl`, with a validation, its closing line and the whole history at the end; old: with a speed in place of a clock."""
    rows = []
    for i, (at, x) in enumerate(zip(moments(), LOSSES, strict=True), 1):
        clock = (
            {"global_step": i}
            if old
            else {"global_step/max_steps": f"{i}/8", "percentage": f"{i * 12.5:.2f}%", "elapsed_time": f"{at:.0f}s"}
        )
        rows.append({"loss": x, "grad_norm": 1.5, "memory(GiB)": 20.5, "train_speed(iter/s)": round(i / at, 6), "epoch": i / 8} | clock)
    end = {"epoch": 1.0, "global_step/max_steps": "8/8", "elapsed_time": "4s"}
    rows += [{"eval_loss": 2.2, "eval_runtime": 0.5} | end, {"train_runtime": 4.5, "train_loss": 2.3} | end]
    rows += [{"last_model_checkpoint": "output/checkpoint-8", "global_step": 8, "log_history": [{"loss": 2.5, "step": 1}]}]
    return "".join(json.dumps(row) + "\n" for row in rows)


def nanogpt(first: int = 0) -> str:
    """nanoGPT's lines, with its validation between them."""
    rows = [
        f"iter {first + i}: loss {x:.4f}, time {s * 1000:.2f}ms, mfu 38.20%" for i, (s, x) in enumerate(zip(SECONDS, LOSSES, strict=True))
    ]
    return "\n".join(["step 0: train loss 10.9886, val loss 10.9898", *rows]) + "\n"


def modded_nanogpt() -> str:
    """modded-nanoGPT's lines of early 2025: milliseconds since the start."""
    rows = [
        f"step:{i}/8 train_loss:{x:.4f} train_time:{at * 1000:.0f}ms step_avg:{at * 1000 / i:.2f}ms"
        for i, (at, x) in enumerate(zip(moments(), LOSSES, strict=True), 1)
    ]
    return "\n".join([*rows, "step:8/8 val_loss:3.2784 train_time:4300ms step_avg:537.50ms"]) + "\n"


def nemo() -> str:
    """NeMo 2's lines, whose steps begin at 0."""
    rows = [
        f"Training epoch 0, iteration {i}/7 | lr: 6.897e-06 | global_batch_size: 128 | global_step: {i} | max_memory_reserved: 127785762816 |"
        f" max_memory_allocated: 115792977920 | reduced_train_loss: {x:.4g} | train_step_timing in s: {s:.4g} | TFLOPS_per_GPU: 1.249e+03 |"
        f" consumed_samples: {128 * (i + 1)}" + (" | val_loss: 2.861" if i > 4 else "")
        for i, (s, x) in enumerate(zip(SECONDS, LOSSES, strict=True))
    ]
    return "\n".join(["[NeMo I 2025-04-01 10:00:00 nemo_logging:393] Setting up optimizers", *rows]) + "\n"


def verl() -> str:
    """verl's console, with the validation before its first step, by a worker of Ray."""
    who = "\x1b[36m(TaskRunner pid=42)\x1b[0m "
    rows = [
        f"{who}step:{i} - actor/pg_loss:{-0.01 * i:.3f} - actor/grad_norm:np.float64(1.5) - perf/max_memory_allocated_gb:38.5 - training/global_step:{i}"
        f" - critic/returns/min:-2.01 - timing_s/gen:{s / 2} - timing_s/step:{s} - perf/total_num_tokens:{TOKENS} - perf/time_per_step:{s}"
        " - perf/throughput:8192.0"
        for i, s in enumerate(SECONDS, 1)
    ]
    return "\n".join([f"{who}step:0 - val-core/openai/gsm8k/reward/mean@1:0.2", *rows]) + "\n"


def slime() -> str:
    """slime's lines: the engine's, the responses', an update's and the trainer's, by actors of Ray."""
    out = []
    for i, s in enumerate(SECONDS):
        out += [
            f"(RolloutManager pid=9) [2026-01-05 12:20:29] rollout.py:44 - perf {i}: {{'perf/rollout_time': {s * 0.6}, 'perf/tokens_per_gpu_per_sec': 179.4}}",
            f"(RolloutManager pid=9) rollout.py:51 - rollout {i}: {{'rollout/response_len/mean': 512.5, 'rollout/response_len/max': 4096, 'rollout/raw_reward': 0.3}}",
            f"(MegatronTrainRayActor pid=7) model.py:90 - step {2 * i}: {{'train/loss': 0.002, 'train/grad_norm': 0.6}}",
            f"(MegatronTrainRayActor pid=7) train_metric_utils.py:44 - perf {i}: {{'perf/sleep_time': {s * 0.05}, 'perf/update_weights_time': {s * 0.05},"
            f" 'perf/train_wait_time': {s * 0.7}, 'perf/log_probs_time': {s * 0.1}, 'perf/actor_train_time': {s * 0.2}, 'perf/step_time': {s}}}",
        ]
    return "\n".join(out) + "\n"


def openrlhf() -> str:
    """OpenRLHF's line for each step."""
    rows = [
        f"(PPOTrainer pid=3) INFO: Global step {i}: {{'policy_loss': -0.01, 'actor_grad_norm': 1.5, 'timing/make_experience': {s * 0.2}, 'timing/ppo_train': {s * 0.3},"
        f" 'timing/broadcast': {s * 0.1}, 'rollout/response_length_mean': 811.0, 'timing/generation': {s * 0.4}, 'timing/step_total': {s}}}"
        for i, s in enumerate(SECONDS, 1)
    ]
    return "\n".join(rows) + "\n"


def nemo_rl() -> str:
    """NeMo-RL's console: a block for each step, with its validation's block after the first."""
    out = []
    for i, s in enumerate(SECONDS, 1):
        out.append(
            f"\n{'=' * 25} Step {i}/{len(SECONDS)} {'=' * 25}\n\n\U0001f4ca Training Results:\n  • Loss: 0.1032\n  • Avg Reward: 0.3486\n\n\u23f1\ufe0f  Timing:\n"
            f"  • Total step time: {s * 100:.2f}s\n  • policy_training: {s * 60:.2f}s (60.0%)\n  • exposed_generation: {s * 30:.2f}s (30.0%)\n"
            f"  • policy_and_reference_logprobs: {s * 5:.2f}s (5.0%)\n  • weight_sync: {s:.2f}s (1.0%)\n"
        )
    return "".join(out)


def trl() -> str:
    """What TRL's GRPOTrainer saves: lengths of completions and a step's time, and no phases."""
    history = [
        {
            "step": i, "epoch": i / 8, "loss": x, "grad_norm": 1.5, "num_tokens": float(TOKENS * i), "completions/mean_length": 212.5,
            "completions/max_length": 850.0, "completions/clipped_ratio": 0.0, "reward": 0.4, "step_time": s,
        }
        for i, (s, x) in enumerate(zip(SECONDS, LOSSES, strict=True), 1)
    ]  # fmt: skip
    return json.dumps({"global_step": 8, "max_steps": 8, "log_history": history})


def wandb() -> str:
    """A run's history as W&B's API gives it to pandas: its own counter of rows, and rows of a validation and of the end."""
    pairs = enumerate(zip(moments(), LOSSES, strict=True), 1)
    rows = [f"{i + (i > 4)},{i + (i > 4)},{1e9 + at},{at},{i},{x},1.5,," for i, (at, x) in pairs]
    rows.insert(4, "5,4,1000000002.3,2.3,4,,,2.2,")
    return (
        "\n".join(
            [
                ",_step,_timestamp,_runtime,train/global_step,train/loss,train/grad_norm,eval/loss,train/train_runtime",
                *rows,
                "9,10,1000000009,9,8,,,,4.5",
            ]
        )
        + "\n"
    )


def deepspeed() -> str:
    """DeepSpeed's two lines a step: what its optimizer did, and its timer."""
    out = []
    for i, at in enumerate(moments(), 1):
        moment = f"[2023-11-07 01:55:{stamp(at)}] [INFO]"
        out.append(f"{moment} [logging.py:96:log_dist] [Rank 0] step={i}, skipped=0, lr=[4.9e-05, 4.9e-05], mom=[(0.9, 0.95), (0.9, 0.95)]")
        out.append(
            f"{moment} [timer.py:260:stop] epoch=0/micro_step={4 * i}/global_step={i}, RunningAvgSamplesPerSec=25.025771473496132,"
            f" CurrSamplesPerSec=25.704280480541442, MemAllocated=4.32GB, MaxMemAllocated=38.5GB"
        )
    return "\n".join(out) + "\n"


def olmo_core() -> str:
    """Blocks of OLMo-core's console, one a step."""
    out = []
    for i, (at, x) in enumerate(zip(moments(), LOSSES, strict=True), 1):
        where = "host:0\tolmo_core.train.callbacks.console_logger:91\tINFO"
        out.append(f"2025-06-01 12:00:{at:06.3f}\t{where}\t[step={i}/8,epoch=1,eta=0:00:0{8 - i}]")
        out += [f"    optim/total grad norm={1.5}", f"    train/CE loss={x}", "    throughput/device/TPS=8,192"]
        out += [f"    throughput/total tokens={TOKENS * i:,}", "    gpu_memory/GPU active mem (GiB)=38.50"]
    out.append(f"2025-06-01 12:00:09.000\t{where}\tTraining complete")
    return "\n".join(out) + "\n"


def nanotron() -> str:
    """nanotron's lines, which round what they print to three digits."""
    rows = [
        f"08/31/2024 14:37:{i:02} [INFO|DP=0|PP=0|TP=0]: iteration: {i} / 8 | consumed_tokens: {1.05 * i:.3g}M | elapsed_time_per_iteration_ms: {s * 1000:.3g} |"
        f" tokens_per_sec: 2.09M | tokens_per_sec_per_gpu: 26.2K | global_batch_size: 512 | lm_loss: {x} | lr: 0.00015 | model_tflops_per_gpu: 187 |"
        f" hardware_tflops_per_gpu: 187 | grad_norm: 2.96 | cuda_max_memory_reserved: 52.1G | hd_free_memory_tb: 1.18T"
        for i, (s, x) in enumerate(zip(SECONDS, LOSSES, strict=True), 1)
    ]
    return "\n".join(["08/31/2024 14:37:00 [INFO|DP=0|PP=0|TP=0]: [Start training] sequence_length: 2048", *rows]) + "\n"


def composer(epochs: bool = False) -> str:
    """Blocks of Composer's console; rates come after some batches, hours since the start have four decimals, and a validation has its own blocks."""
    out = []
    for i, (at, x) in enumerate(zip(moments(), LOSSES, strict=True), 1):
        rates = ["throughput/tokens_per_sec: 131072.0000", "throughput/device/tokens_per_sec: 16384.0000"] if i > 3 else []
        figures = [
            f"time/batch: {i - 1}",
            f"time/token: {TOKENS * (i - 1)}",
            "memory/peak_reserved_mem: 4.0643",
            f"loss/train/total: {x:.4f}",
            *rates,
        ]
        figures += [f"time/train: {at / 36:.4f}", "time/val: 0.0000", "lr-DecoupledAdamW/group0: 0.0001"]
        out += [f"{'[epoch=1]' if epochs else ''}[batch={i}/8]:", *(f"\t Train {figure}" for figure in figures)]
        out += ["[Eval batch=1/1] Eval on eval data:", "\t Eval metrics/eval/LanguageCrossEntropy: 2.2000"] if i == 4 else []
    return "\n".join(out) + "\n"


def mmengine() -> str:
    """mmengine's lines, whose iterations begin again with each epoch."""
    half = list(zip(SECONDS, LOSSES, strict=True))
    rows = [
        f"2024/04/24 10:0{e}:{i:02d} - mmengine - INFO - Epoch(train)   [{e}][{i * 50:4d}/220]  base_lr: 2.0000e-02 lr: 2.0000e-02  eta: 0:10:00"
        f"  time: {s:.4f}  data_time: 0.0012  memory: 3512  grad_norm: 1.5000  loss: {x:.4f}  loss_cls: {x / 2:.4f}"
        for e in (1, 2)
        for i, (s, x) in enumerate(half[4 * e - 4 : 4 * e], 1)
    ]
    return (
        "\n".join(
            [
                *rows[:4],
                "2024/04/24 10:02:00 - mmengine - INFO - Epoch(val) [1][50/50]    acc: 70.1  data_time: 0.001  time: 0.01",
                *rows[4:],
            ]
        )
        + "\n"
    )


def timm() -> str:
    """timm's lines, from batch 0 to the last of each epoch."""
    rows = [
        f"Train: {e} [{n:4d}/120 ({n * 100 // 119:3d}%)]  Loss:  {x:.2f} ({x:.2f})  Time: {s:.3f}s,  {256 / s:7.2f}/s  ({s:.3f}s,  {256 / s:7.2f}/s)"
        f"  LR: 1.000e-05  Data: 0.010 (0.012)"
        for e in (0, 1)
        for n, s, x in zip((0, 50, 100, 119), SECONDS[4 * e :], LOSSES[4 * e :], strict=False)
    ]
    return "\n".join([*rows[:4], "Test: [   0/50]  Time: 0.9 (0.9)  Loss:   1.0 (1.0)  Acc@1: 80.0 (80.0)", *rows[4:]]) + "\n"


def torchtune() -> str:
    """torchtune's lines: a rate, and no time."""
    return "".join(
        f"Step {i} | loss:{x} lr:2e-05 tokens_per_second_per_gpu:{TOKENS / s:.2f} grad_norm:1.5 peak_memory_active:14.25 peak_memory_reserved:15.1 \n"
        for i, (s, x) in enumerate(zip(SECONDS, LOSSES, strict=True), 1)
    )


def micro_batches() -> str:
    """Lines of LitGPT: four of a step, and the step's number is that of updates so far."""
    rows = [
        f"Epoch 1 | iter {4 * i + m} step {i + (m == 4)} | loss train: {x - m / 1000:.3f}, val: n/a | iter time: {s * 250:.2f} ms{' (step)' if m == 4 else ''}"
        for i, (s, x) in enumerate(zip(SECONDS, LOSSES, strict=True))
        for m in (1, 2, 3, 4)
    ]
    return "\n".join(rows) + "\n"


def printed_blocks() -> str:
    """Dictionaries of TRL's trainers as a pretty printer shows them, one figure a line, each with the bar that is drawn after it."""
    out = []
    for i, x in enumerate(LOSSES, 1):
        items = {"loss": x, "grad_norm": 1.5, "learning_rate": 5e-05, "num_tokens": TOKENS * i, "epoch": i / 8}
        out.append("{\n" + ",\n".join(f"    '{name}': {value}" for name, value in items.items()) + "\n}\n")
        out.append(f"\r {i * 12}%|#         | {i}/8 [00:0{i}<00:01,  1.9it/s]\n")
    return "".join(out) + "{'train_runtime': 4.3, 'train_samples_per_second': 7.4, 'train_loss': 2.3, 'epoch': 1}\n"


def lightning(monitor: bool = False) -> str:
    """CSVLogger's `metrics.csv`: columns in order of the alphabet, validation and callbacks in rows of their own."""
    if not monitor:
        rows = [f"0,{i},{s},{x}," for i, (s, x) in enumerate(zip(SECONDS, LOSSES, strict=True))]
        return "\r\n".join(["epoch,step,step_time,train_loss,val_loss", *rows, "0,7,,,2.2"]) + "\r\n"
    pairs = [(f"0,{i},{8 * i + 8},{at},,", f"0,{i},,,{x},") for i, (at, x) in enumerate(zip(moments(), LOSSES, strict=True))]
    return (
        "\r\n".join(["epoch,step,train/samples,train/time,train_loss,val_loss", *(row for pair in pairs for row in pair), "0,7,,,,2.2"])
        + "\r\n"
    )


def own_format() -> str:
    return "".join(f"iter {i} took {s * 1000:.1f}ms loss={x}\n" for i, (s, x) in enumerate(zip(SECONDS, LOSSES, strict=True)))


OWN_PATTERN = r"regex:^iter (?P<step>\d+) took (?P<ms>[\d.]+)ms loss=(?P<loss>\S+)$"
MICRO_PATTERN = r"regex:iter (?P<micro>\d+) step (?P<step>\d+) \| loss train: (?P<loss>[\d.]+),.*iter time: (?P<ms>[\d.]+) ms"


def of_adapter(name: str) -> str:
    """The excerpt that an adapter reads: that of the adapter's own name, or of the trainer's where two share one."""
    excerpt: str = globals()[{"jsonl": "json_lines", "hf": "trainer_state"}.get(name, name.replace("-", "_"))]()
    return excerpt
