"""Three decisions with their alternatives, each asked of the planner beforehand: FSDP or 3D, how much CP, which dispatcher; and the pages
that show them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from playbook.errors import ConfigError
from playbook.planner.choice.anchored import scale_of, scaled
from playbook.planner.choice.plain_data import words
from playbook.planner.choice.search import search
from playbook.planner.choice.space import Question
from playbook.planner.hardware import machine
from playbook.planner.memory import GIB
from playbook.planner.models import MODELS
from playbook.planner.time.cluster import clusters
from playbook_app.site.cards import Shelf, anchor, badges, each
from playbook_app.site.pages import markdown, render
from playbook_app.site.text import attribute, link, table, text

_DENSE = ("llama3_8b", "qwen3_32b", "llama3_70b")
_SPARSE = ("mixtral_8x7b", "qwen3_30b_a3b", "gpt_oss_120b", "qwen3_next_80b_a3b", "qwen3_235b_a22b", "deepseek_v3")
_VISION = ("qwen3_vl_30b_a3b",)


@dataclass(frozen=True)
class Way:
    """One alternative: what it is called, and what its plans keep; of several, the fastest speaks for it."""

    name: str
    fixed: tuple[str, ...] = ("",)
    backend: str = "megatron"


_LAYOUTS = (
    Way("any layout"),
    Way("data parallel alone", ("tp=1,pp=1,cp=1,ep=1",)),
    Way("FSDP", ("sharding=fsdp2,tp=1,pp=1",), "torch"),
    Way("TP alone", tuple(f"tp={n},pp=1,cp=1,ep=1" for n in (2, 4, 8))),
    Way("PP alone", tuple(f"pp={n},tp=1,cp=1,ep=1" for n in (2, 4, 8, 16))),
    Way("EP alone", tuple(f"ep={n},tp=1,pp=1,cp=1" for n in (2, 4, 8, 16, 32, 64))),
    Way("with CP 2", ("cp=2",)),
)
_CP = tuple(Way(f"CP {n}", (f"cp={n}",)) for n in (1, 2, 4, 8, 16))
_DISPATCHERS = tuple(
    Way(name, (f"dispatcher={word}",))
    for name, word in (("all-to-all", "alltoall"), ("all-gather", "allgather"), ("HybridEP or DeepEP", "hybridep"))
)
WAYS: Mapping[str, tuple[Way, ...]] = {"layout": _LAYOUTS, "cp": _CP, "dispatcher": _DISPATCHERS}


@dataclass(frozen=True)
class DoorQuestion:
    """A decision for a model on so many GPUs, at this length, with steps of four million tokens; an empty network is that of the GPU's
    data sheet.
    """

    door: str
    model: str
    hardware: str
    gpus: int
    seq_len: int
    network: str
    way: str


@dataclass(frozen=True)
class DoorAnswer:
    """The fastest plan of one way; none where `settings` is empty. Units: tokens per second and GPU, GiB."""

    asked: DoorQuestion
    settings: str = ""
    fixed: str = ""
    speed: float = 0.0
    low: float = 0.0
    high: float = 0.0
    mfu: float = 0.0
    gib: float = 0.0


def questions() -> Iterator[DoorQuestion]:
    """Every way of every decision that the pages answer."""
    for model in (*_DENSE, *_SPARSE, *_VISION):
        for hardware in ("h100", "b200"):
            for gpus in (8, 64, 256):
                yield from _of("layout", model, hardware, gpus, 4096)
    for model in (*_DENSE, *_SPARSE):
        for hardware in ("h100", "h200"):
            for gpus in (64, 256):
                for seq_len in (32768, 131072):
                    yield from _of("cp", model, hardware, gpus, seq_len)
    for model in _SPARSE:
        for hardware in ("h100", "b200"):
            for gpus, network in ((8, ""), (64, ""), (64, "100GbE")):
                yield from _of("dispatcher", model, hardware, gpus, 4096, network)


def _of(door: str, model: str, hardware: str, gpus: int, seq_len: int, network: str = "") -> Iterator[DoorQuestion]:
    for way in WAYS[door]:
        if way.name != "EP alone" or MODELS[model].experts:
            yield DoorQuestion(door, model, hardware, gpus, seq_len, network, way.name)


def ask(request: DoorQuestion) -> DoorAnswer:
    """The planner's answer."""
    way = next(w for w in WAYS[request.door] if w.name == request.way)
    return max((_ask(request, words, way.backend) for words in way.fixed), key=lambda a: a.speed)


def _ask(request: DoorQuestion, fixed: str, backend: str) -> DoorAnswer:
    """The planner's fastest plan with these settings; one without speed where no layout has them."""
    shape = MODELS[request.model]
    settings = tuple(w for w in fixed.split(",") if w and (shape.experts or not w.startswith("ep=")))
    question = Question(
        shape, request.model, machine(request.hardware, request.network), request.gpus, request.seq_len, backend=backend, fixed=settings
    )
    try:
        choices = search(question, 1).choices
    except ConfigError:  # no layout has this setting
        choices = []
    if not choices:
        return DoorAnswer(request)
    best = choices[0]
    time = scaled(best.time, scale_of(question, best.time, fp8=bool(best.plan.options.fp8)))
    speed = time.tokens_per_s_per_gpu
    figures = (speed.value, speed.low, speed.high, time.mfu, best.peak / GIB)
    return DoorAnswer(request, " ".join(words(best.plan)), ",".join(settings), *(float(f"{v:.6g}") for v in figures))


def read(path: Path) -> list[DoorAnswer]:
    """The answers of a file of lines."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [DoorAnswer(**{**row, "asked": DoorQuestion(**row["asked"])}) for row in rows]


@dataclass(frozen=True)
class Door:
    """A page that answers one decision: its title, the answer in a sentence, cards and pages with the evidence, and what would change the
    answer.
    """

    page: str
    door: str
    title: str
    lead: str
    asked: tuple[str, ...]
    cards: tuple[str, ...]
    pages: tuple[tuple[str, str], ...]
    changes: tuple[str, ...]


DOORS = (
    Door(
        "fsdp-or-3d",
        "layout",
        "FSDP or 3D parallelism?",
        "FSDP beats 3D parallelism that nobody has tuned, and is simpler; the fastest layout is seldom FSDP: data parallelism where the"
        " model fits, EP for experts, PP and TP for what is larger, CP for long rows alone.",
        ("FSDP or TP and PP", "which layout", "FSDP, ZeRO or 3D parallelism for my model and GPUs"),
        ("fsdp-vs-3d-parallel", "parallel-folding", "pipeline-scaling"),
        (
            ("Is FSDP faster than untuned 3D parallelism?", "../experiments/fsdp-or-3d-parallelism.md"),
            ("How Megatron-FSDP did", "../experiments/megatron-fsdp.md"),
        ),
        (
            "a slow network between nodes: FSDP and EP send more across it than PP does",
            "a global batch smaller than four million tokens: the pipeline waits more, and data parallelism has less to do",
            "longer rows: activations no longer fit, and CP or recompute comes in",
            "an older trainer: overlap of transfers is taken for granted here",
        ),
    ),
    Door(
        "how-much-cp",
        "cp",
        "How much context parallelism?",
        "None where rows fit without it. At 32K to 128K tokens begin with CP 4 or 8: by the planner that is mostly within 5 % of the"
        " fastest layout, since it spares recompute and TP. By itself each doubling costs speed, as four H200s have shown.",
        ("how much CP for 32K, 64K or 128K tokens", "which context parallel degree on 64 H100"),
        ("long-context-cp-sizing", "long-context-memory"),
        (("How much does context parallelism cost?", "../experiments/context-parallelism.md"),),
        (
            "more memory for a GPU, recompute of norms and experts, or an optimizer on the host: a smaller CP fits",
            "documents shorter than the row: attention costs less, and CP with it",
            "CP that leaves the node: its ring crosses the network",
        ),
    ),
    Door(
        "which-dispatcher",
        "dispatcher",
        "Which dispatcher of tokens to experts?",
        "All-to-all to bring a run up. Where dispatch is exposed, or EP leaves the node, try HybridEP or DeepEP as a matched pair; the"
        " planner gives both the same speed.",
        ("which dispatcher across nodes", "all-to-all, all-gather, DeepEP or HybridEP"),
        ("moe-dispatcher-choice", "communication-overlap"),
        (("Which dispatcher is fastest on four H200s?", "../experiments/moe-dispatchers.md"),),
        (
            "transfers of experts that overlap with computation: less is left to win",
            "narrow experts and a small top-k: the set-up of HybridEP is not earned back",
            "uneven routing: the fullest rank sets the pace, `--imbalance` has it in the plan",
        ),
    ),
)


_NEAR = 0.05
"""Two plans whose predicted speeds differ by less are for a pair of runs to tell apart."""
_SHOWN = 6
"""Claims of a card that stand on the page of a decision."""


def door_pages(path: Path, shelf: Shelf) -> dict[str, str]:
    """Each page by its path; none without answers."""
    if not path.is_file():
        return {}
    rows = read(path)
    return {f"_generated/{door.page}.md": _page(door, [r for r in rows if r.asked.door == door.door], shelf) for door in DOORS}


def _page(door: Door, rows: Sequence[DoorAnswer], shelf: Shelf) -> str:
    shown = [{**asdict(r.asked), **{k: v for k, v in asdict(r).items() if k != "asked"}} for r in rows]
    data = json.dumps({"door": door.door, "rows": shown}, separators=(",", ":")).replace("<", "\\u003c")
    return render(
        "door.md",
        door=door,
        summary=_summary(rows),
        form=markdown(_form(door, rows[0])),
        data=markdown(data),
        evidence=markdown(_evidence(door, shelf)),
    )


def _summary(rows: Sequence[DoorAnswer]) -> str:
    """How often each way is as good as the fastest one."""
    cases: dict[tuple[object, ...], list[DoorAnswer]] = {}
    for r in rows:
        cases.setdefault((r.asked.model, r.asked.hardware, r.asked.gpus, r.asked.seq_len, r.asked.network), []).append(r)
    fitting = [c for c in cases.values() if any(r.speed for r in c)]
    ways = [w for w in dict.fromkeys(r.asked.way for r in rows) if not w.startswith("any")]
    near = {w: sum(r.asked.way == w and r.speed > (1 - _NEAR) * max(o.speed for o in c) for c in fitting for r in c) for w in ways}
    counts = ", ".join(f"{w} in {n}" for w, n in near.items())
    return f"Of {len(fitting)} cases that the planner was asked, these come within {_NEAR:.0%} of the fastest plan: {counts}."


def _form(door: Door, first: DoorAnswer) -> str:
    """The form of a decision, filled with the first case."""
    a = first.asked
    gpus = "".join(f"<option{' selected' if g == a.hardware else ''}>{attribute(g)}</option>" for g in clusters())
    links = (
        '<label>Between nodes<select name="network"><option value="">data sheet</option><option>100GbE</option></select></label>'
        if door.door == "dispatcher"
        else ""
    )
    return (
        '<form id="pb-door" class="pb-filters pb-diagnose" data-search-exclude hidden>'
        f'<label>Model<input name="model" list="pb-models" value="{a.model}" autocomplete="off" spellcheck="false"></label>'
        '<datalist id="pb-models"></datalist>'
        '<label>GPUs<input name="gpus" type="number" min="1" step="1" value="64" inputmode="numeric"></label>'
        f'<label>of kind<select name="hardware">{gpus}</select></label>'
        f'<label>Tokens of a row<input name="seq_len" type="number" min="1" step="1" value="{a.seq_len}" inputmode="numeric"></label>'
        f"{links}</form>"
    )


def _evidence(door: Door, shelf: Shelf) -> str:
    """The claims of the door's cards, those with verdicts first."""
    lines = []
    for card in (shelf.cards[name] for name in door.cards if name in shelf.cards):
        claims = sorted(each(card), key=lambda c: "untested" in badges(shelf, c))[:_SHOWN]
        rows = [[link(text(c.id), f"../cards/{card.id}.md#{anchor(c.id)}"), text(c.statement), badges(shelf, c)] for c in claims]
        lines.append(
            f"**{link(text(card.title), f'../cards/{card.id}.md')}**\n\n"
            + '<div class="pb-matrix" markdown="1">\n\n'
            + table(["Claim", "Statement", "Verdict"], rows)
            + "\n\n</div>"
        )
    return "\n\n".join(lines)
