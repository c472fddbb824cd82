"""What the MCP server answers, as typed records: each becomes an output schema that clients can check."""

from __future__ import annotations

from pydantic import BaseModel, Field

from playbook.cards.model import Card, Claim


class Standing(BaseModel):
    """The newest verdict of one machine on one claim."""

    machine: str
    status: str
    sentence: str
    created: str
    stale: str | None
    """Why it no longer speaks for today; null while it does."""
    evidence: str
    repeat: str
    """The command that gave it."""


class SearchHit(BaseModel):
    """One card that answers a question."""

    id: str
    title: str
    claims: list[str]
    """Ids of its claims, nearest to the question first."""
    standing: dict[str, list[str]]
    """Each of these claims to its verdicts, as in a list of cards; empty where it is untested, however sure its words are."""
    why: str
    """The passage that matched best."""
    applies: bool
    """Whether any of its claims speaks for the stated machine; true where none was stated."""
    limits: list[str]
    """Claims that do not speak for it, each with what was found and expected."""


class SearchAnswer(BaseModel):
    """The cards that answer a question, best first."""

    hits: list[SearchHit]


class CardRow(BaseModel):
    """One card in a list."""

    id: str
    title: str
    summary: str
    phase: str
    wall: str
    symptoms: list[str]
    claims: dict[str, list[str]]
    """Claim id to its verdicts, each `status on machine` or, where it no longer counts, `status, stale on machine`; empty where it is untested."""


class CardList(BaseModel):
    """The cards there are."""

    cards: list[CardRow]
    left_out: int = 0


class CardAnswer(BaseModel):
    """One card with where its claims stand."""

    card: Card
    verdicts: dict[str, list[Standing]]


class ClaimAnswer(BaseModel):
    """One claim, or the claim that a mechanism check belongs to."""

    card_id: str
    claim: Claim
    verdicts: dict[str, list[Standing]]
    """Of the claim and of its mechanism check, each on its own."""


class EvidenceRow(Standing):
    """One record."""

    expires: str
    case: str | None


class EvidenceList(BaseModel):
    """The records on one claim, newest first; altered ones are listed as `altered`."""

    claim_id: str
    records: list[EvidenceRow]
    left_out: int = 0


class LayoutAnswer(BaseModel):
    """Whether a layout can run, and what follows from it."""

    legal: bool
    broken: list[str]
    """Each broken rule: what was found, what was expected, what to set."""
    dp: int | None
    """Data-parallel degree; null where the GPUs do not divide."""
    edp: int | None
    """Data-parallel degree of the experts."""
    min_gpus: int
    """The fewest GPUs that hold one copy."""


class StageMemory(BaseModel):
    """What the ranks of one pipeline stage hold. Units: bytes."""

    stage: int
    layers: int
    in_flight: list[int]
    """Microbatches whose activations are held at once, per chunk."""
    held: int
    """Parameters of the stage before data parallelism shards them."""
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    fp8_weights: float
    gathered: float
    vision: float
    loss: float
    replayed: float
    workspace: float
    host: float
    states: float
    transient: float
    peak: float


class MemoryAnswer(BaseModel):
    """Peak allocated memory. Units: bytes per GPU."""

    peak: float
    stage: int
    """The fullest stage."""
    stages: list[StageMemory]


class PlannedProfile(BaseModel):
    """What one case would run on one kind of machine."""

    profile: str
    ranks: int
    launches_least: int
    """Up to the first look."""
    launches_most: int
    """Up to the last look. A series that drifts starts over once, which this leaves out."""
    seconds_per_launch: float | None
    """Median of the stored A/A runs on this profile; null where none is stored."""
    seconds_least: float | None
    seconds_most: float | None
    limit_s: float
    """The case's own budget; the series ends there."""
    noise: str
    """Whether the noise of this machine and case is stored, or has to be measured first."""


class PlannedCase(BaseModel):
    """What the claims of one case need."""

    case: str
    kind: str
    claims: list[str]
    requires: list[str]
    profiles: list[PlannedProfile] = Field(default_factory=list)
    """Empty for arithmetic and invariants, which launch nothing."""


class Plan(BaseModel):
    """What confirming a card would run. Nothing was run to find out."""

    card_id: str
    command: str
    cases: list[PlannedCase]
    without_case: list[str] = Field(default_factory=list)
    """Claims that no case settles."""
