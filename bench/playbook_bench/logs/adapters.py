"""The adapters: one row for each kind of log. The first whose parser finds a row knows the log."""

from __future__ import annotations

from dataclasses import dataclass

from playbook_bench.logs import events, parsers, rl


@dataclass(frozen=True)
class Adapter:
    """How one trainer's log is known and read, and how the trainer is made to log each step with its time."""

    name: str
    reads: str
    files: tuple[str, ...]
    """Names of the files that it reads in a folder, as patterns."""
    parse: parsers.Parser
    each_step: str
    timed: str
    printed: bool = True
    """Whether lines appear as the run goes, so that their arrival can be a clock."""
    binary: bool = False
    """Whether `parse` takes the file's name rather than its text."""


ADAPTERS: tuple[Adapter, ...] = (
    Adapter(
        "playbook",
        "`metrics.jsonl` of `playbook train`",
        ("metrics.jsonl",),
        parsers.playbook,
        "it always does",
        "metrics.jsonl holds it",
    ),
    Adapter(
        "jsonl",
        'JSON lines with named fields: `{"step": 1, "seconds": 0.5, "loss": 2.3, "tokens": 4096}`; those of ms-swift and LLaMA-Factory',
        ("log.jsonl", "logging.jsonl", "trainer_log.jsonl"),
        parsers.json_lines,
        "one line printed for each step",
        "Print `seconds` of the step, or `elapsed` since the start",
    ),
    Adapter(
        "megatron",
        "iteration lines of Megatron-LM, Megatron-DeepSpeed, Megatron-Bridge and Primus",
        (),
        parsers.megatron,
        "`--log-interval 1`; Megatron-Bridge: `logger.log_interval=1`",
        "iteration lines hold it",
    ),
    Adapter(
        "nemo",
        "`Training epoch 0, iteration 9/99` lines of NeMo 2",
        (),
        parsers.nemo,
        "`log_every_n_steps=1` of the Trainer",
        "`TimingCallback` writes `train_step_timing in s`",
    ),
    Adapter(
        "verl",
        "`step:1 - actor/grad_norm:... - timing_s/step:...` lines of verl",
        (),
        parsers.verl,
        "it always does, with `console` in `trainer.logger`",
        "lines hold it",
    ),
    Adapter(
        "slime",
        "`perf 0: {'perf/rollout_time': ...}` lines of slime and miles",
        (),
        rl.slime,
        "it always does",
        "lines hold it",
    ),
    Adapter(
        "openrlhf",
        "`Global step 1: {'timing/generation': ...}` lines of OpenRLHF",
        (),
        rl.openrlhf,
        "`--logger.logging_steps 1`",
        "lines hold it",
    ),
    Adapter(
        "nemo-rl",
        "blocks of NeMo-RL's console, `Step 1/100` between rules and `Total step time: 66.55s` below it",
        (),
        rl.nemo_rl,
        "it always does",
        "lines hold it",
    ),
    Adapter(
        "torchtitan",
        "`step: 10  loss: ...  tps: ...` lines of torchtitan",
        (),
        parsers.torchtitan,
        "`--metrics.log_freq 1`",
        "Keep the logger's time stamps before the lines",
    ),
    Adapter(
        "nanogpt",
        "`iter 10: loss ..., time ...ms` lines of nanoGPT, and `step:10/1750 train_time:...ms` lines of modded-nanoGPT",
        (),
        parsers.nanogpt,
        "`--log_interval=1`",
        "lines hold it",
    ),
    Adapter(
        "olmo-core",
        "blocks of OLMo-core's console, `[step=10/1000,epoch=1]` and one figure a line below it",
        (),
        parsers.olmo_core,
        "`metrics_log_interval=1` of ConsoleLoggerCallback",
        "Keep the logger's time stamps before the lines",
    ),
    Adapter(
        "hf",
        "`trainer_state.json` of the Hugging Face Trainer, or the dictionaries that it prints",
        ("trainer_state.json",),
        parsers.hugging_face,
        "`logging_steps=1`",
        "With `include_num_input_tokens_seen='all'`, trainer_state.json holds `train_runtime` and tokens for each step logged",
    ),
    Adapter(
        "deepspeed",
        "`epoch=0/micro_step=40/global_step=10, RunningAvgSamplesPerSec=...` lines of DeepSpeed",
        (),
        parsers.deepspeed,
        '`"steps_per_print": 1`',
        "Keep the logger's time stamps before the lines",
    ),
    Adapter(
        "lightning",
        "`metrics.csv` of Lightning's CSVLogger, and tables that Weights & Biases exports",
        ("metrics.csv",),
        parsers.table,
        "`log_every_n_steps=1`",
        "Log `step_time` in seconds in the module, or add the ThroughputMonitor callback",
        printed=False,
    ),
    Adapter(
        "tensorboard",
        "TensorBoard's event files, given as a path",
        ("events.out.tfevents.*",),
        events.read,
        "scalars written at each step",
        "The moments at which scalars were written are the clock",
        printed=False,
        binary=True,
    ),
)
