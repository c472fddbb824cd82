"""A layout that fits once the optimizer state lies in host memory."""

from __future__ import annotations

from collections.abc import Sequence

from playbook.planner import memory
from playbook.planner.memory import GIB
from playbook.planner.options import Options
from playbook.planner.plan import Plan
from playbook_bench.judge.verdict import Statement
from playbook_bench.statements.presets import shape


def offload_makes_it_fit(
    *,
    model: str,
    gpu_gib: float,
    gpus: int,
    seq_len: int,
    cp: int,
    pp: int,
    ep: int,
    tp: int = 1,
    vpp: int = 1,
    global_batch_size: int = 0,
    recompute: Sequence[str] = (),
    fp8: str = "",
    dispatcher: str = "",
) -> Statement:
    """Whether a layout exceeds the GPU as it is and fits once the optimizer's state lies in host memory; layers may divide unevenly.

    Of the logits those of the next token count, and not those of prediction depths: so the claim's record has them.

    Raises:
        ConfigError: the layout breaks a rule.
    """
    options = Options(uneven=True, recompute=tuple(recompute), fp8=fp8, dispatcher=dispatcher)
    plan = Plan(
        shape(model), model, gpus=gpus, tp=tp, cp=cp, pp=pp, ep=ep, vpp=vpp, gbs=global_batch_size, seq_len=seq_len, options=options
    )  # fmt: skip
    stages = memory.estimate(plan)
    peaks = [s.peak - s.transient + max(s.loss / (1 + plan.shape.mtp), s.replayed) for s in stages]
    whole, without = max(peaks), max(peak - s.optimizer for peak, s in zip(peaks, stages, strict=True))
    sentence = (
        f"{model} at {seq_len} tokens on {gpus} GPUs of {gpu_gib:g} GiB: {whole / GIB:.1f} GiB allocated at peak,"
        f" {without / GIB:.1f} GiB with the optimizer's state in host memory"
    )
    return without <= gpu_gib * GIB < whole, sentence, {"peak_bytes": whole, "peak_bytes_with_offload": without}
