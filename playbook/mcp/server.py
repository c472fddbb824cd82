"""The MCP server: cards, evidence and layout rules for agents. It reads and computes; it runs nothing and opens no path from an argument.

Arguments are ids and numbers with limits, looked up in what was loaded; answers are typed and bounded.
Source: https://modelcontextprotocol.io/specification
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ResourceError, ToolError
from mcp.server.mcpserver.resources import FunctionResource
from mcp.types import CallToolResult, InputRequiredResult, Tool, ToolAnnotations
from pydantic import BaseModel, Field

from playbook.cards import search as engine
from playbook.cards.model import Card
from playbook.cards.pages import load_pages
from playbook.cards.terms import stated
from playbook.errors import PlaybookError
from playbook.mcp.answers import (
    CardAnswer,
    CardList,
    CardRow,
    ClaimAnswer,
    EvidenceList,
    EvidenceRow,
    LayoutAnswer,
    MemoryAnswer,
    PageHit,
    Plan,
    SearchAnswer,
    SearchHit,
    StageMemory,
    Standing,
)
from playbook.planner import layout, memory
from playbook.planner.models import MODELS
from playbook.planner.options import Options
from playbook.planner.plan import Plan as LayoutPlan
from playbook.records.read import Record, earlier, with_status
from playbook.skills.check import claim_ids
from playbook.skills.export import CARD_FILE, Stock, attachments, card_file, skill_text, standing
from playbook.skills.model import FILE, Skill
from playbook.yaml_files import did_you_mean

MAX_CHARS = 60_000
"""Longest answer in characters of JSON, about 15,000 tokens. A longer one is refused with advice on how to ask for less."""
MAX_ROWS = 100
_MAX_TEXT = 600

_READ_ONLY = {"read_only_hint": True, "destructive_hint": False, "idempotent_hint": True, "open_world_hint": False}

_INSTRUCTIONS = (
    "Performance guidance for training large models, stated as claims with verdicts from matched runs. Start with search (or list_cards), then"
    " get_card: `decide` says what to set and which claims it rests on, `verdicts` where those stand and on which machine. A claim without a confirmed"
    " verdict on hardware like the user's is a hypothesis, and so is one whose `stale` says why it no longer counts; say so. Effects are positive where"
    " the candidate is better; where lower is better, a percentage is of baseline over candidate, less one, so +100 % stands for half. Nothing here runs anything: the commands in plans and records do."
)

_CardId = Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=64, description="A card's id, such as list_cards gives.")]
ClaimId = Annotated[str, Field(pattern=r"^[A-Z][0-9]{1,3}(\.[a-z])?$", description="A claim's id, such as W9 or W9.m.")]
_Degree = Annotated[int, Field(ge=1, le=1_000_000)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]
Tokens = Annotated[int, Field(ge=1, le=1_000_000_000)]
Model = Annotated[str | None, Field(max_length=64, description=f"One of {', '.join(sorted(MODELS))}; or give the four counts.")]
Status = Literal["confirmed", "refuted", "inconclusive", "not_applicable", "error", "stale", "untested"]
Module = Literal["full", "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
A = TypeVar("A", bound=BaseModel)
Answer = CallToolResult | InputRequiredResult


@dataclass(frozen=True)
class Library:
    """The data behind the answers. Evidence files may appear while the server runs, so every answer reads new and changed ones."""

    cards: Mapping[str, Card]
    skills: Mapping[str, Skill]
    records: Callable[[], Sequence[Record]]
    today: Callable[[], date]
    plan: Callable[[Card], Plan]
    version: str

    def stock(self) -> Stock:
        """Cards with the evidence that exists now."""
        return Stock(self.cards, self.records(), self.today(), self.version)

    def card(self, card_id: str) -> Card:
        """The card with this id; an unknown id raises an error that names the nearest ones."""
        if card_id not in self.cards:
            raise PlaybookError(f"card '{card_id}' does not exist{did_you_mean(card_id, self.cards)}")
        return self.cards[card_id]


class Strict(MCPServer[Any]):
    """A server whose tools refuse unknown arguments. The base class drops them silently, and a misspelt degree would count as 1."""

    async def list_tools(self) -> list[Tool]:
        """The tools; their schemas forbid additional arguments."""
        found = await super().list_tools()
        return [t.model_copy(update={"input_schema": {**t.input_schema, "additionalProperties": False}}) for t in found]

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None) -> Answer:
        """The tool's answer.

        Raises:
            ToolError: there is no such tool, an argument is not one of its own, or the tool refuses the call.
        """
        known = next((t.input_schema.get("properties", {}) for t in await self.list_tools() if t.name == name), None)
        unknown = sorted(set(arguments) - set(known)) if known is not None else []
        if known is not None and unknown:
            raise ToolError(f"'{unknown[0][:40]}' is not an argument of {name}; expected some of: {', '.join(known) or 'none'}")
        return await super().call_tool(name, arguments, context)


def server(library: Library) -> MCPServer[Any]:
    """Build the server with its tools and resources; `run("stdio")` on it serves."""
    out = Strict("playbook", instructions=_INSTRUCTIONS, version=library.version, log_level="WARNING")
    _search(out, library)
    _cards(out, library)
    _evidence(out, library)
    _layout(out)
    _memory(out)
    _resources(out, library)
    return out


def _search(out: MCPServer[Any], library: Library) -> None:
    index = engine.index(library.cards, load_pages())

    @out.tool(title="Search the cards", annotations=ToolAnnotations(**_READ_ONLY))
    def search(
        query: Annotated[str, Field(min_length=1, max_length=engine.MAX_QUERY, description="A symptom, an error text or a goal.")],
        hardware: Annotated[str | None, Field(max_length=64, description="Where it runs, such as h200, h200x4, gb200 or cpu.")] = None,
        model: Annotated[str | None, Field(max_length=64, description=f"One of {', '.join(sorted(MODELS))}.")] = None,
        gpus: Annotated[int | None, Field(ge=0, le=1_000_000, description="How many GPUs.")] = None,
        status: Annotated[Status | None, Field(description="Only claims that stand so on some machine.")] = None,
        limit: Annotated[int, Field(ge=1, le=20)] = 5,
    ) -> SearchAnswer:
        """Cards that answer a question, best first, with the reason, the status of their claims, and whether they apply to the stated machine; no hits where none does."""
        with _told():
            stock = library.stock()
            only = None if status is None else with_status(stock.cards, stock.records, stock.today, status)
            found = engine.search(index, query, stated(hardware, model, gpus), only=only, limit=limit)
            rows = [
                SearchHit(
                    **{**asdict(h), "why": h.why[:_MAX_TEXT], "limits": [x[:_MAX_TEXT] for x in h.limits]},
                    standing={i: _stands(library.cards[h.id], i, stock) for i in h.claims},
                )
                for h in found.hits
            ]
            pages = [PageHit(source=p.source, title=p.title) for p in found.pages]
            answer = SearchAnswer(hits=rows, none=found.none, nearest=found.nearest, pages=pages)
            return bounded(answer, "ask with a smaller limit")


def _cards(out: MCPServer[Any], library: Library) -> None:
    @out.tool(title="List the cards", annotations=ToolAnnotations(**_READ_ONLY))
    def list_cards() -> CardList:
        """Every card: id, title, summary, symptoms, and the status of its claims by machine."""
        with _told():
            return _card_list(library)

    @out.tool(title="Get a card", annotations=ToolAnnotations(**_READ_ONLY))
    def get_card(card_id: _CardId) -> CardAnswer:
        """One card: claims, decision rules, configuration families, pitfalls, and the newest verdict of each machine."""
        with _told():
            card, stock = library.card(card_id), library.stock()
            return bounded(CardAnswer(card=card, verdicts=_verdicts(card, claim_ids(card), stock)), "ask get_claim for one of its claims")

    @out.tool(title="Get a claim", annotations=ToolAnnotations(**_READ_ONLY))
    def get_claim(card_id: _CardId, claim_id: ClaimId) -> ClaimAnswer:
        """One claim with statement, mechanism, scope, sources, and verdicts; the id of a mechanism check such as `W9.m` gives the claim that it belongs to."""
        with _told():
            return bounded(claim_answer(library, card_id, claim_id), "read the card's file")


def _evidence(out: MCPServer[Any], library: Library) -> None:
    @out.tool(title="List evidence", annotations=ToolAnnotations(**_READ_ONLY))
    def list_evidence(claim_id: ClaimId, limit: Annotated[int, Field(ge=1, le=MAX_ROWS)] = 20) -> EvidenceList:
        """The records on one claim, newest first: machine, verdict, date, whether it is stale, and the command that repeats it."""
        with _told():
            return evidence_list(library, claim_id, limit)

    @out.tool(title="Plan a confirmation", annotations=ToolAnnotations(**_READ_ONLY))
    def plan_confirmation(card_id: _CardId) -> Plan:
        """What confirming a card would run: cases, profiles, number of launches, and a rough cost from stored A/A runs. Nothing is run."""
        with _told():
            return bounded(library.plan(library.card(card_id)), "plan its claims one by one on the command line")


def _layout(out: MCPServer[Any]) -> None:
    @out.tool(title="Check a layout", annotations=ToolAnnotations(**_READ_ONLY))
    def check_layout(
        gpus: _Degree,
        seq_len: Tokens,
        micro_batch_size: _Degree,
        global_batch_size: _Degree,
        model: Model = None,
        heads: _Degree | None = None,
        kv_heads: _Degree | None = None,
        layers: _Degree | None = None,
        experts: Count | None = None,
        tp: _Degree = 1,
        pp: _Degree = 1,
        cp: _Degree = 1,
        ep: _Degree = 1,
        etp: _Degree = 1,
        vpp: _Degree = 1,
    ) -> LayoutAnswer:
        """Whether parallel degrees fit the GPUs and the model: broken rules with what to set, DP, expert DP, and the fewest GPUs."""
        with _told():
            given = {"heads": heads, "kv_heads": kv_heads, "layers": layers, "experts": experts}
            degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp}
            batch = {"seq_len": seq_len, "micro_batch_size": micro_batch_size, "global_batch_size": global_batch_size}
            return _layout_answer(gpus, shape(model, given), degrees, vpp=vpp, batch=batch, model=model)


def _memory(out: MCPServer[Any]) -> None:
    @out.tool(title="Estimate memory", annotations=ToolAnnotations(**_READ_ONLY))
    def estimate_memory(
        model: Annotated[str, Field(max_length=64, description=f"One of {', '.join(sorted(MODELS))}.")],
        gpus: _Degree,
        seq_len: Tokens = 4096,
        micro_batch_size: _Degree = 1,
        global_batch_size: Annotated[int, Field(ge=0, le=1_000_000_000, description="0 stands for one pipeline's worth.")] = 0,
        tp: _Degree = 1,
        pp: _Degree = 1,
        cp: _Degree = 1,
        ep: _Degree = 1,
        etp: _Degree = 1,
        vpp: _Degree = 1,
        sharding: Literal["none", "optimizer", "fsdp", "fsdp2"] = "optimizer",
        recompute: Annotated[list[Module], Field(max_length=8)] = [],  # noqa: B006  (read only; None would widen the schema)
        fp8: Literal["", "blockwise", "mxfp8", "tensorwise", "delayed"] = "",
        uneven: bool = False,
    ) -> MemoryAnswer:
        """Peak allocated bytes per GPU, stage by stage, of a legal layout; memory that the allocator reserves beyond that is not counted."""
        with _told():
            shape(model, {})
            plan = LayoutPlan(
                MODELS[model], model, gpus, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, vpp=vpp, mbs=micro_batch_size, gbs=global_batch_size,
                seq_len=seq_len, options=Options(sharding=sharding, recompute=tuple(recompute), fp8=fp8, uneven=uneven),
            )  # fmt: skip
            stages = [StageMemory(**s.row()) for s in memory.estimate(plan)]
            most = max(stages, key=lambda s: s.peak)
            return bounded(MemoryAnswer(peak=most.peak, stage=most.stage, stages=stages), "ask with a smaller pp")


def _resources(out: MCPServer[Any], library: Library) -> None:
    """Register cards with their verdicts, and skills with the files that they link to. Every address is fixed; none is built from an argument."""

    def cards(*ids: str) -> str:
        return card_file(ids, library.stock())

    for card in library.cards.values():
        _resource(out, f"card://{card.id}", card.id, card.summary, partial(cards, card.id))
    for skill in library.skills.values():
        copies = attachments(skill)[0]
        parts: dict[str, Callable[[], str]] = {name: partial(copies.__getitem__, name) for name in copies}
        parts[CARD_FILE] = partial(cards, *skill.cards)
        parts[FILE] = partial(_skill_now, skill, library)
        for name, read in parts.items():
            description = skill.front.description if name == FILE else f"Part of the skill {skill.name}."
            _resource(out, f"skill://{skill.name}/{name}", f"{skill.name}/{name}", description, read)


def _skill_now(skill: Skill, library: Library) -> str:
    return skill_text(skill, library.today())


def _resource(out: MCPServer[Any], uri: str, name: str, description: str, read: Callable[[], str]) -> None:
    """Register one resource, which is read on request."""

    def told() -> str:
        with _told(ResourceError):
            return read()

    kind = "text/markdown" if uri.endswith(".md") else "application/json" if uri.endswith(".json") else "application/yaml"
    out.add_resource(FunctionResource(uri=uri, name=name, description=description, mime_type=kind, fn=told))


def _card_list(library: Library) -> CardList:
    """One row for each card, cut at the length of an answer."""
    stock = library.stock()
    rows = []
    for card in list(library.cards.values())[:MAX_ROWS]:
        stands = {i: _stands(card, i, stock) for i in claim_ids(card)}
        texts = {k: str(getattr(card, k))[:_MAX_TEXT] for k in ("id", "title", "summary", "phase", "wall")}
        rows.append(CardRow(**texts, symptoms=[s[:_MAX_TEXT] for s in card.symptoms[:10]], claims=stands))
    while len(CardList(cards=rows).model_dump_json()) > MAX_CHARS:
        rows.pop()
    return CardList(cards=rows, left_out=len(library.cards) - len(rows))


def claim_answer(library: Library, card_id: str, claim_id: str) -> ClaimAnswer:
    """The claim with this id, or the claim whose mechanism check has it.

    Raises:
        PlaybookError: there is no such card or claim.
    """
    card = library.card(card_id)
    for claim in card.claims:
        ids = [claim.id, *([claim.mechanism_check.id] if claim.mechanism_check else [])]
        if claim_id in ids:
            return ClaimAnswer(card_id=card.id, claim=claim, verdicts=_verdicts(card, ids, library.stock()))
    raise PlaybookError(f"card '{card_id}' has no claim '{claim_id}'{did_you_mean(claim_id, claim_ids(card))}")


def evidence_list(library: Library, claim_id: str, limit: int) -> EvidenceList:
    """The newest evidence records on a claim.

    Raises:
        PlaybookError: no card has such a claim.
    """
    home = next((c for c in library.cards.values() if claim_id in claim_ids(c)), None)
    if home is None:
        known = [i for c in library.cards.values() for i in claim_ids(c)]
        raise PlaybookError(f"claim '{claim_id}' does not exist{did_you_mean(claim_id, known)}")
    claim = next(c for own in home.claims for c in (own, own.mechanism_check) if c and c.id == claim_id)
    found = earlier(library.records(), claim_id)
    rows = [
        EvidenceRow(
            machine=r.machine,
            status=r.status,
            sentence=("; ".join(r.problems) or r.sentence)[:_MAX_TEXT],
            created=r.created,
            stale=r.stale(library.today(), claim),
            evidence=r.id,
            repeat=str(r.get("command", default=""))[:_MAX_TEXT],
            expires=str(r.get("expires", default="")),
            case=r.get("measured", "case", "id"),
        )
        for r in found[:limit]
    ]
    while len(EvidenceList(claim_id=claim_id, records=rows).model_dump_json()) > MAX_CHARS:
        rows.pop()
    return EvidenceList(claim_id=claim_id, records=rows, left_out=len(found) - len(rows))


def shape(model: str | None, given: Mapping[str, int | None]) -> dict[str, int]:
    """Layers, experts and other counts of a model: the given ones, the rest from the table of models.

    Raises:
        PlaybookError: the model is not in the table, or counts are missing.
    """
    if model is not None and model not in MODELS:
        other = f"; or leave it out and give {', '.join(given)}" if given else ""
        raise PlaybookError(f"model '{model}' is not known{did_you_mean(model, MODELS)}{other}")
    known = {k: getattr(MODELS[model], k) for k in given} if model else {}
    counts = {**known, **{k: v for k, v in given.items() if v is not None}}
    missing = [k for k in given if k not in counts]
    if missing:
        raise PlaybookError(f"{', '.join(missing)} missing; give them, or name a model ({', '.join(sorted(MODELS))})")
    return counts


def _layout_answer(
    gpus: int, counts: Mapping[str, int], degrees: Mapping[str, int], *, vpp: int, batch: Mapping[str, int], model: str | None = None
) -> LayoutAnswer:
    """The rules that a layout breaks, as `playbook layout check` finds them, and the degrees that follow; with a model its widths count."""
    numbers: dict[str, Any] = {**counts, **degrees, **batch}
    options = Options(sp=degrees["tp"] > 1)
    broken = layout.check(gpus=gpus, vpp=vpp, options=options, shape=MODELS[model] if model else None, **numbers)
    attention = degrees["tp"] * degrees["pp"] * degrees["cp"]
    expert = degrees["etp"] * degrees["ep"] * degrees["pp"]
    return LayoutAnswer(
        legal=not broken,
        broken=broken,
        dp=None if gpus % attention else gpus // attention,
        edp=None if gpus % expert else gpus // expert,
        min_gpus=layout.min_gpus(**degrees),
    )


def bounded(answer: A, instead: str) -> A:
    """The answer itself, if it is short enough for an agent's context.

    Raises:
        PlaybookError: it is too long; `instead` says how to ask for less.
    """
    length = len(answer.model_dump_json())
    if length > MAX_CHARS:
        raise PlaybookError(f"the answer has {length} characters; at most {MAX_CHARS} are given: {instead}")
    return answer


def _stands(card: Card, claim_id: str, stock: Stock) -> list[str]:
    return [f"{s['status']}{', stale' if s['stale'] else ''} on {s['machine']}" for s in standing(card, claim_id, stock)]


def _verdicts(card: Card, ids: Sequence[str], stock: Stock) -> dict[str, list[Standing]]:
    return {i: [Standing(**s) for s in standing(card, i, stock)[:MAX_ROWS]] for i in ids}


@contextmanager
def _told(kind: type[Exception] = ToolError) -> Iterator[None]:
    """Turn a mistake of the caller, or an unreadable record, into an error message for the agent."""
    try:
        yield
    except PlaybookError as e:
        raise kind(str(e)[:2000]) from e
