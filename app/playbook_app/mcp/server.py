"""The MCP server: cards, evidence and layout rules for agents. It reads and computes; it runs nothing and opens no path from an argument.

Arguments are ids and numbers with limits, looked up in what was loaded; answers are typed and bounded.
Source: https://modelcontextprotocol.io/specification
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Annotated, Any, Literal, TypeVar, get_args

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ResourceError, ToolError
from mcp.server.mcpserver.resources import FunctionResource
from mcp.types import CallToolResult, InputRequiredResult, TextContent, Tool, ToolAnnotations
from pydantic import BaseModel, Field, ValidationError

from playbook import __version__
from playbook.cards import search as engine
from playbook.cards.model import Card, by_claim, claim_ids, guidance
from playbook.cards.terms import stated
from playbook.diagnosis.setting import Figures
from playbook.errors import PlaybookError
from playbook.records.read import earlier, with_status
from playbook.records.standing import Stock, in_words, stands
from playbook.skills.export import CARD_FILE, attachments, card_file, rests_on, skill_text, standing
from playbook.skills.model import FILE, Skill
from playbook.yaml_files import did_you_mean, written
from playbook_app.mcp import answers, planning
from playbook_app.mcp.answers import (
    SUMMARIES,
    CardAnswer,
    CardList,
    ClaimAnswer,
    DiagnosisAnswer,
    EvidenceList,
    ExportAnswer,
    LayoutAnswer,
    Library,
    MemoryAnswer,
    PlanAnswer,
    SearchAnswer,
    shallow,
    shortened,
)
from playbook_trainer.export.plans import trained_by

MAX_CHARS = 60_000
"""Longest answer in characters of JSON, about 15,000 tokens. A longer one is refused with advice on how to ask for less."""
MAX_ROWS = 100
_MISTAKES = 4
"""Wrong arguments that an error names."""
_MAX_TEXT = 600
_MAX_LINE = 160
_MAX_ERROR = 2000

_READ_ONLY = ToolAnnotations(read_only_hint=True, open_world_hint=False)
"""The protocol's other hints speak of tools that write."""

_INSTRUCTIONS = (
    "Start with plan_layout for what to run and its speed, or with diagnose for a run that is slow: give it the layout that runs and"
    " what was seen of a step; export_layout gives the flags. Performance guidance for training large models, stated as claims with"
    " verdicts from matched runs: for what to set and why, list_cards and choose by title and summary, or say that none fits; search"
    " serves flags and error texts; then get_card: `decide` says what to set, because of which claims, `rests_on` for each rule"
    " whether a verdict bears it out; `verdicts` where the claims stand, on which machine and backend. A claim without a confirmed"
    " verdict on hardware like the user's is a hypothesis, and so is one whose `stale` says why it no longer counts; say so. Effects"
    " are positive where the candidate is better; where lower is better, a percentage is of baseline over candidate, less one, so"
    " +100 % in memory means that the candidate takes half. Nothing here runs anything: the commands in plans and records do."
)

_CardId = Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=64, description="A card's id, such as list_cards gives.")]
ClaimId = Annotated[str, Field(pattern=r"^[A-Z][0-9]{1,3}(\.[a-z])?$", description="A claim's id, such as W9 or W9.m.")]


def _number(description: str, least: int = 1, most: int = 1_000_000) -> Any:
    return Field(ge=least, le=most, description=description)


def _figure(description: str) -> Any:
    return Field(ge=1e-6, le=1e9, description=description)


_Gpus = Annotated[int, _number("GPUs of the whole job.")]
_Section = Literal["answer", "claims", "pitfalls", "families", "all"]
A = TypeVar("A", bound=BaseModel)


class StrictServer(MCPServer[Any]):
    """A server whose tools refuse unknown arguments. The base class drops them silently, and a misspelt degree would count as 1."""

    async def list_tools(self) -> list[Tool]:
        """The tools; their schemas forbid additional arguments, and say nothing that their names say."""
        tools = await super().list_tools()
        return [
            t.model_copy(
                update={
                    "input_schema": {**shortened(t.input_schema), "additionalProperties": False},
                    "output_schema": shallow(t.output_schema) if t.output_schema else None,
                }
            )
            for t in tools
        ]

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """The tool's answer.

        Raises:
            ToolError: there is no such tool, an argument is not one of its own, or the tool refuses the call.
        """
        properties = next((t.input_schema.get("properties", {}) for t in await self.list_tools() if t.name == name), None)
        unknown = sorted(set(arguments) - set(properties)) if properties is not None else []
        if properties is not None and unknown:
            raise ToolError(f"'{unknown[0][:40]}' is not an argument of {name}; expected some of: {', '.join(properties) or 'none'}")
        try:
            result = await super().call_tool(name, arguments, context)
        except ToolError as e:
            if isinstance(e.__cause__, PlaybookError):  # a mistake of the caller, or a record that cannot be read
                raise ToolError(f"Error executing tool {name}: {str(e.__cause__)[:_MAX_ERROR]}") from e
            if not isinstance(e.__cause__, ValidationError):
                raise
            raise ToolError(_mistakes(name, e.__cause__)) from e
        if name in SUMMARIES and isinstance(result, CallToolResult) and result.structured_content:
            text = SUMMARIES[name](result.structured_content)
            return result.model_copy(update={"content": [TextContent(type="text", text=text)]})
        return result


def _mistakes(name: str, error: ValidationError) -> str:
    """What is wrong with a call's arguments, in one line."""
    messages = [f"{'.'.join(map(str, e['loc']))[:60]}: {e['msg'][:200]}" for e in error.errors(include_url=False)]
    return f"{name}: {'; '.join(messages[:_MISTAKES])}{f'; and {len(messages) - _MISTAKES} more' if len(messages) > _MISTAKES else ''}"


def server(library: Library) -> MCPServer[Any]:
    """Build the server with its tools and resources; `run("stdio")` on it serves."""
    out = StrictServer("playbook", instructions=_INSTRUCTIONS, version=__version__, log_level="WARNING")
    _search(out, library)
    _cards(out, library)
    _evidence(out, library)
    _layout(out, library)
    _runs(out, library)
    _resources(out, library)
    return out


def _search(out: MCPServer[Any], library: Library) -> None:
    """Register the search of cards."""

    @cache
    def index() -> engine.SearchIndex:
        return engine.index(library.cards, engine.load_sections())

    @out.tool(title="Search the cards", annotations=_READ_ONLY)
    def search(
        query: Annotated[str, Field(min_length=1, max_length=engine.MAX_QUERY, description="A symptom, an error text or a goal.")],
        hardware: Annotated[str | None, Field(max_length=64, description="Where it runs, such as h200x4, gb200 or cpu.")] = None,
        model: Annotated[str | None, Field(max_length=64, description="A preset, such as qwen3_30b_a3b or deepseek_v3.")] = None,
        gpus: Annotated[int | None, _number("How many GPUs.", least=0)] = None,
        status: Annotated[
            Literal["confirmed", "refuted", "inconclusive", "not_applicable", "error", "stale", "untested"] | None,
            Field(description="Only claims that stand so on some machine."),
        ] = None,
        limit: Annotated[int, _number("Cards at most.", most=20)] = 5,
    ) -> SearchAnswer:
        """Cards that answer a question, best first: why, where their claims stand, whether they fit the machine; else what is nearest."""
        stock = library.stock()
        only = None if status is None else with_status(stock.cards, stock.records, stock.today, status)
        run = stated(hardware, model, gpus)
        result = engine.search(index(), query, run, only=only, limit=limit)
        rows = [
            {
                "id": h.id,
                "title": h.title,
                "claims": h.claims,
                "standing": {i: _stands(library.cards[h.id], i, stock, run.hardware) for i in h.claims},
                "why": h.why[:_MAX_TEXT],
                "applies": h.applies,
                "sizes": h.sizes,
                "limits": [x[:_MAX_TEXT] for x in h.limits],
            }
            for h in result.hits
        ]
        found = {**result.as_row(), "hits": rows, "diagnosis": engine.diagnosis_of(query, run)}
        return bounded(SearchAnswer(**found), "ask with a smaller limit")


def _cards(out: MCPServer[Any], library: Library) -> None:
    """Register the tools that read cards and claims."""

    @out.tool(title="List the cards", annotations=_READ_ONLY)
    def list_cards() -> CardList:
        """Every card: id, title, summary, and the status of its claims by machine."""
        return _card_list(library)

    @out.tool(title="Get a card", annotations=_READ_ONLY)
    def get_card(
        card_id: _CardId,
        section: Annotated[_Section, Field(description="answer: what to set, because of which claims, and their verdicts.")] = "answer",
    ) -> CardAnswer:
        """One card: decision rules with the newest verdict of each machine on each claim, or another section of it."""
        card, stock = library.card(card_id), library.stock()
        statuses = _verdicts(card, claim_ids(card), stock) if section in ("answer", "all") else {}
        rules = rests_on(card, stock) if section in ("answer", "all") else []
        more = [s for s in get_args(_Section) if s != section]
        return bounded(CardAnswer(card=_part(card, section), rests_on=rules, verdicts=statuses, more=more), "ask for one of its sections")

    @out.tool(title="Get a claim", annotations=_READ_ONLY)
    def get_claim(card_id: _CardId, claim_id: ClaimId) -> ClaimAnswer:
        """One claim with statement, mechanism, scope, sources, verdicts; the id of a mechanism check, such as `W9.m`, gives its claim."""
        return bounded(claim_answer(library, card_id, claim_id), "read the card's file")


def _evidence(out: MCPServer[Any], library: Library) -> None:
    @out.tool(title="List evidence", annotations=_READ_ONLY)
    def list_evidence(claim_id: ClaimId, limit: Annotated[int, _number("Records at most.", most=MAX_ROWS)] = 20) -> EvidenceList:
        """The records on one claim, newest first: machine, verdict, date, whether it is stale, and the command that repeats it."""
        return evidence_list(library, claim_id, limit)

    @out.tool(title="Plan a confirmation", annotations=_READ_ONLY)
    def plan_confirmation(card_id: _CardId) -> answers.ConfirmationPlan:
        """What confirming a card would run: cases, profiles, launches, and a rough cost from recorded ones. Nothing is run."""
        return bounded(answers.plan(library.card(card_id), library.records()), "plan its claims one by one on the command line")


def _layout(out: MCPServer[Any], library: Library) -> None:
    """Register what answers on layouts: check, search, memory and export."""

    @out.tool(title="Check a layout", annotations=_READ_ONLY)
    def check_layout(model: planning.Model, gpus: _Gpus, settings: planning.Settings) -> LayoutAnswer:
        """Whether parallel degrees fit the GPUs and the model: broken rules with what to set, DP, expert DP, and the fewest GPUs."""
        return planning.layout_answer(planning.plan_of(model, gpus, settings))

    @out.tool(title="Plan a layout", annotations=_READ_ONLY)
    def plan_layout(
        model: planning.Model,
        gpus: _Gpus,
        hardware: planning.Gpu,
        seq_len: Annotated[int, _number("Tokens of a row.", most=1_000_000_000)] = 4096,
        global_batch_size: Annotated[int, _number("0: four million tokens.", 0, 1_000_000_000)] = 0,
        goal: Annotated[Literal["tokens/s", "memory", "gpus"], Field(description="Fastest, leanest, fewest GPUs.")] = "tokens/s",
        backend: Annotated[Literal["megatron", "torch"], Field(description="torch: FSDP2.")] = "megatron",
        framework: Annotated[
            str,
            Field(
                max_length=20,
                description="Trainer you will export to (megatron-lm, megatron-bridge, torchtitan, ...); it decides the loss, the memory"
                " and which plan is first; set it before export_layout.",
            ),
        ] = "",
        allow: Annotated[
            list[Literal["fp8", "bf16-moments", "bf16-gradients", "offload", "graphs"]], Field(max_length=5, description="Beyond BF16.")
        ] = [],  # noqa: B006
        fix: Annotated[
            list[Annotated[str, Field(max_length=200)]],
            Field(max_length=20, description="To keep, such as tp=1."),
        ] = [],  # noqa: B006
        top: Annotated[int, _number("Plans.", most=20)] = 3,
        network: planning.Network = "",
    ) -> PlanAnswer:
        """The fastest layouts that fit: speed with its 80 % interval, memory, settings; or what would."""
        trained_on, kept = trained_by(framework, backend, tuple(fix))
        answer = planning.plan_answer(
            model, gpus, hardware, network, seq_len=seq_len, global_batch_size=global_batch_size, goal=goal, backend=trained_on,
            allow=frozenset(allow), fix=kept, top=top,
        )  # fmt: skip
        claims = planning.claims_on(answer, model, hardware, network, library.stock())
        return bounded(answer.model_copy(update={"claims": claims}), "ask for fewer plans")

    @out.tool(title="Estimate memory", annotations=_READ_ONLY)
    def estimate_memory(
        model: planning.Model, gpus: _Gpus, settings: planning.Settings, hardware: planning.Gpu | None = None
    ) -> MemoryAnswer:
        """Peak allocated bytes per GPU, stage by stage, of a legal layout, without what the allocator reserves beyond that."""
        return bounded(planning.memory_answer(planning.plan_of(model, gpus, settings), hardware), "ask with a smaller pp")

    @out.tool(title="Export a layout", annotations=_READ_ONLY)
    def export_layout(
        model: planning.Model,
        gpus: _Gpus,
        hardware: planning.Gpu,
        settings: planning.Settings,
        framework: Annotated[
            Literal["megatron-lm", "megatron-bridge", "torchtitan", "accelerate", "deepspeed", "playbook"],
            Field(description="Whose script."),
        ] = "megatron-lm",
    ) -> ExportAnswer:
        """A legal layout, such as a plan's settings, as a script that starts it with a trainer."""
        plan = planning.plan_of(model, gpus, settings)
        return bounded(planning.export_answer(plan, framework, hardware), "ask for another framework")


def _runs(out: MCPServer[Any], library: Library) -> None:
    """Register what answers on runs: diagnosis, and a tuning."""

    @out.tool(title="Diagnose a run", annotations=_READ_ONLY)
    def diagnose(
        model: planning.Model,
        gpus: _Gpus,
        hardware: planning.Gpu,
        mfu: Annotated[float | None, _figure("Percent of the dense peak.")] = None,
        step_time_s: Annotated[float | None, _figure("Or seconds of a step.")] = None,
        tokens_per_s: Annotated[float | None, _figure("Or tokens per second and GPU.")] = None,
        layout: planning.Settings = [],  # noqa: B006
        saw: Annotated[
            list[Annotated[str, Field(max_length=200)]], Field(max_length=20, description="Shares of a step, such as all-to-all=40%.")
        ] = [],  # noqa: B006
        network: planning.Network = "",
        seq_len: Annotated[int, _number("0: 4096.", 0, 1_000_000_000)] = 0,
        global_batch_size: Annotated[int, _number("0: four million tokens.", 0, 1_000_000_000)] = 0,
        framework: Annotated[str, Field(max_length=20, description="Your trainer, such as torchtitan; else flags are Megatron-LM's.")] = "",
    ) -> DiagnosisAnswer:
        """Where a run's speed stands, the likely wall and how to tell, ranked actions with verdict, gain, flags and test."""
        answer = planning.diagnosis_answer(
            model, gpus, hardware, network, seq_len=seq_len, global_batch_size=global_batch_size, settings=layout, framework=framework,
            saw=saw, figures=Figures(mfu, step_time_s, tokens_per_s), stock=library.stock(),
        )  # fmt: skip
        return bounded(answer, "name the layout")

    @out.tool(title="Tune: what to launch next", annotations=_READ_ONLY)
    def tune_next(
        knobs: Annotated[
            list[Annotated[str, Field(max_length=1200)]],
            Field(min_length=1, max_length=32, description="name=today|other|..., in the order to try, such as fuse=off|on."),
        ],
        seen: Annotated[
            list[Annotated[str, Field(max_length=100)]],
            Field(
                max_length=600,
                description="What each launch so far gave, in order: '0.512 loss=2.31 tokens=4096' (seconds of a step), oom, crash, nan,"
                " hang, or 'time up' to try no more.",
            ),
        ] = [],  # noqa: B006
        seed: Annotated[int, _number("The same in every call.", 0)] = 0,
        false_keep_percent: Annotated[
            float, Field(ge=0.1, le=50, description="Percent: the chance that what is kept holds a change that does not help.")
        ] = 5.0,
    ) -> planning.TuneAnswer:
        """The next launch of a tuning, or what is proven to make the run faster. Keep nothing that is not in `kept`."""
        return bounded(planning.tune_answer(knobs, seen, seed, false_keep_percent), "name fewer knobs")


def _resources(out: MCPServer[Any], library: Library) -> None:
    """Register cards with their verdicts, and skills with the files that they link to.

    Every address is fixed; none is built from an argument.
    """

    def whole(card_id: str) -> str:
        return card_file([card_id], library.stock())

    def brief(*ids: str) -> str:
        """What the cards say to do, with verdicts; the whole of each is a resource of its own."""
        stock = library.stock()
        cards = [library.card(i) for i in ids]
        data = {
            "cards": [_part(c, "answer") for c in cards],
            "rests_on": {c.id: rests_on(c, stock) for c in cards},
            "verdicts": {i: standing(c, i, stock) for c in cards for i in claim_ids(c)},
        }
        return written(data)

    for card in guidance(library.cards).values():
        _resource(out, f"card://{card.id}", card.id, card.title, partial(whole, card.id))
    for skill in library.skills.values():
        copies = attachments(skill)[0]
        parts: dict[str, Callable[[], str]] = {name: partial(copies.__getitem__, name) for name in copies}
        parts[CARD_FILE] = partial(brief, *skill.cards)
        parts[FILE] = partial(_skill_now, skill, library)
        for name, read in parts.items():
            description = skill.front.description[:_MAX_LINE] if name == FILE else f"Part of the skill {skill.name}."
            _resource(out, f"skill://{skill.name}/{name}", f"{skill.name}/{name}", description, read)


def _skill_now(skill: Skill, library: Library) -> str:
    return skill_text(skill, attachments(skill)[1], library.today)


def _resource(out: MCPServer[Any], uri: str, name: str, description: str, read: Callable[[], str]) -> None:
    """Register one resource, which is read on request."""

    def told() -> str:
        try:
            return read()
        except PlaybookError as e:
            raise ResourceError(str(e)[:_MAX_ERROR]) from e

    kind = "text/markdown" if uri.endswith(".md") else "application/json" if uri.endswith(".json") else "application/yaml"
    out.add_resource(FunctionResource(uri=uri, name=name, description=description, mime_type=kind, fn=told))


def _card_list(library: Library) -> CardList:
    """One row for each card, cut at the length of an answer."""
    stock, cards = library.stock(), list(guidance(library.cards).values())
    rows: list[dict[str, Any]] = [
        {
            **{k: str(getattr(card, k))[:_MAX_TEXT] for k in ("id", "title", "summary", "phase", "wall")},
            "claims": {i: _stands(card, i, stock) for i in claim_ids(card)},
        }
        for card in cards[:MAX_ROWS]
    ]
    while len(CardList(cards=rows).model_dump_json()) > MAX_CHARS:
        rows.pop()
    return CardList(cards=rows, left_out=len(cards) - len(rows))


_PARTS: dict[str, tuple[str, ...]] = {
    "answer": ("id", "title", "summary", "scope", "decide", "disputes", "interactions"),
    "claims": ("claims",),
    "pitfalls": ("pitfalls", "related"),
    "families": ("families", "rankings", "formulas", "figures"),
}


def _part(card: Card, section: str) -> dict[str, Any]:
    """The fields of one section; `answer` has the claims' statements alone."""
    plain = card.model_dump(mode="json", exclude_defaults=True)
    if section == "all":
        return plain
    fields = {k: plain[k] for k in _PARTS[section] if k in plain}
    if section == "answer":
        fields["claims"] = {c.id: c.statement for claim in card.claims for c in (claim, claim.mechanism_check) if c}
    return fields


def claim_answer(library: Library, card_id: str, claim_id: str) -> ClaimAnswer:
    """The claim with this id, or the claim whose mechanism check has it.

    Raises:
        PlaybookError: there is no such card or claim.
    """
    card = library.card(card_id)
    for claim in card.claims:
        ids = [claim.id, *([claim.mechanism_check.id] if claim.mechanism_check else [])]
        if claim_id in ids:
            plain = claim.model_dump(mode="json", exclude_defaults=True)
            return ClaimAnswer(card_id=card.id, claim=plain, verdicts=_verdicts(card, ids, library.stock()))
    raise PlaybookError(f"card '{card_id}' has no claim '{claim_id}'{did_you_mean(claim_id, claim_ids(card))}")


def evidence_list(library: Library, claim_id: str, limit: int) -> EvidenceList:
    """The newest evidence records on a claim.

    Raises:
        PlaybookError: no card has such a claim.
    """
    claims = by_claim(library.cards)
    if claim_id not in claims:
        raise PlaybookError(f"claim '{claim_id}' does not exist{did_you_mean(claim_id, claims)}")
    _, claim = claims[claim_id]
    records = earlier(library.records(), claim_id)
    rows = [
        {
            "machine": r.machine,
            "status": r.status,
            "stands": in_words(r, old),
            "sentence": ("; ".join(r.problems) or r.sentence)[:_MAX_TEXT],
            "created": r.created,
            "stale": old,
            "evidence": r.id,
            "repeat": str(r.get("command", default=""))[:_MAX_TEXT],
            "expires": str(r.get("expires", default="")),
            "case": r.get("measured", "case", "id"),
        }
        for r in records[:limit]
        for old in [r.stale(library.today, claim)]
    ]
    while len(EvidenceList(claim_id=claim_id, records=rows).model_dump_json()) > MAX_CHARS:
        rows.pop()
    return EvidenceList(claim_id=claim_id, records=rows, left_out=len(records) - len(rows))


def bounded(answer: A, instead: str) -> A:
    """The answer itself, if it is short enough for an agent's context.

    Raises:
        PlaybookError: it is too long; `instead` says how to ask for less.
    """
    length = len(answer.model_dump_json())
    if length > MAX_CHARS:
        raise PlaybookError(f"the answer has {length} characters; at most {MAX_CHARS} are given: {instead}")
    return answer


def _stands(card: Card, claim_id: str, stock: Stock, gpus: Sequence[str] = ()) -> list[str]:
    return stands(stock.records, by_claim({card.id: card})[claim_id][1], stock.today, gpus)


def _verdicts(card: Card, ids: Sequence[str], stock: Stock) -> dict[str, list[dict[str, Any]]]:
    return {i: standing(card, i, stock)[:MAX_ROWS] for i in ids}
