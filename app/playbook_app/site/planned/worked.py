"""Worked examples for the pages that explain: one setting varied, the planner's figures beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from playbook.planner import memory
from playbook.planner.choice.explain import PARTS
from playbook.planner.memory import GIB
from playbook.planner.plan import parse
from playbook.planner.time.cluster import Cluster, cluster, clusters
from playbook.planner.time.step import step_time
from playbook_app.site.figures.strips import bars
from playbook_app.site.text import code, number, percent, table, text

_MOE = ("gpus=64", "gbs=1024", "recompute=full")


@dataclass(frozen=True)
class _Example:
    """A model on some GPUs with settings that stay, and the settings that each row has."""

    model: str
    hardware: str
    base: Sequence[str]
    rows: Sequence[Sequence[str]]


_EXAMPLES = {
    "worked fsdp": _Example("llama3_8b", "h100", ("gpus=8", "gbs=64", "backend=torch"), (("sharding=none",), ("sharding=fsdp2",))),
    "worked ep": _Example(
        "qwen3_30b_a3b",
        "h100",
        _MOE,
        (("ep=1", "dispatcher=alltoall"), *((f"ep={n}", "dispatcher=hybridep") for n in (2, 4, 8, 16, 32, 64))),
    ),
    "worked cp": _Example(
        "qwen3_30b_a3b",
        "h100",
        ("gpus=64", "gbs=64", "seq_len=65536", "ep=8", "dispatcher=hybridep", "recompute=full"),
        [(f"cp={n}",) for n in (1, 2, 4, 8, 16)],
    ),
    "worked pp": _Example(
        "llama3_70b",
        "h100",
        ("gpus=64", "gbs=256", "tp=4", "recompute=full"),
        [("pp=1",), ("pp=2",), ("pp=4",), ("pp=8",), ("pp=8", "vpp=5")],
    ),
    "worked tp": _Example("llama3_70b", "h100", ("gpus=64", "gbs=1024", "pp=4", "recompute=full"), [(f"tp={n}",) for n in (1, 2, 4, 8)]),
}


def worked() -> dict[str, str]:
    """Markdown by the name of the comment that it replaces: an example each, and what the hardware should reach."""
    return {**{name: _table(example) for name, example in _EXAMPLES.items()}, "what links should reach": _links()}


def _table(example: _Example) -> str:
    where = cluster(example.hardware)
    said = (
        f"`{example.model}` on {example.hardware.upper()}s, {', '.join(f'`{w}`' for w in example.base)}; {where.memory_gib:.0f} GiB a GPU:"
    )
    rows = [_row(example, words, where) for words in example.rows]
    body = table(["Set", "Memory", "GiB>", "Tokens/s per GPU>", "Against the first>", "Where the step goes"], _compared(rows))
    return f'{said}\n\n<div class="pb-matrix pb-families" markdown="1">\n\n{body}\n\n</div>'


def _row(example: _Example, words: Sequence[str], where: Cluster) -> tuple[float, list[str]]:
    plan = parse(example.model, [*example.base, *words])
    if plan.broken():
        raise AssertionError(f"{example.model} {words}: {plan.broken()}")  # an example of ours
    time, stages = step_time(plan, where), [s.peak / GIB for s in memory.stages(plan)]
    shares = sorted(((v / time.seconds.value, k) for k, v in time.parts.items()), reverse=True)[:4]
    most = max(stages)
    gib = f"**{most:.0f}**, does not fit" if most > where.memory_gib else f"{most:.0f}"
    cells = [code(" ".join(words)), f"{bars(stages, max(where.memory_gib, most))}", f'{gib} {{ data-label="GiB" }}']
    speed = time.tokens_per_s_per_gpu.value
    tail = [f'{number(round(speed))} {{ data-label="tokens/s per GPU" }}', ", ".join(f"{text(PARTS[k])} {v:.0%}" for v, k in shares)]
    return speed, [*cells, *tail]


def _compared(rows: Sequence[tuple[float, list[str]]]) -> list[list[str]]:
    first = rows[0][0]
    return [
        [*cells[:-1], f'{percent(speed / first - 1)} {{ data-label="against the first" }}' if i else "", cells[-1]]
        for i, (speed, cells) in enumerate(rows)
    ]


def _links() -> str:
    """What each GPU should reach, one direction."""
    rows = [
        [
            name,
            number(round(c.bf16_flops_per_s / 1e12)),
            number(round(c.memory_bytes_per_s / 1e9)),
            number(round(c.link_bytes_per_s / 1e9)),
            number(c.domain),
            number(c.nic_bytes_per_s / 1e9),
        ]
        for name, c in ((n, cluster(n)) for n in clusters())
    ]
    head = ["GPU", "BF16 TFLOP/s>", "Memory GB/s>", "NVLink GB/s>", "GPUs in a domain>", "Network GB/s per GPU>"]
    return table(head, rows)
