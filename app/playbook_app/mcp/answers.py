"""What the MCP server answers from, and its answers as typed models; each becomes an output schema that clients can check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from pydantic import BaseModel, Field

from playbook import __version__
from playbook.cards.load import load_all
from playbook.cards.model import Card
from playbook.errors import PlaybookError
from playbook.paths import data_root
from playbook.records.machine import Here
from playbook.records.read import Record, RecordReader
from playbook.skills.export import Stock
from playbook.skills.model import Skill, load_skills
from playbook.yaml_files import did_you_mean
from playbook_app.services import standing


class Standing(BaseModel):
    """The newest verdict of one machine on one claim."""

    machine: str
    status: str
    stands: str
    """The verdict with what it rests on: machine, and backend or that it is arithmetic."""
    sentence: str
    created: str
    stale: str | None
    """Why the verdict is stale; null if it is not."""
    evidence: str
    repeat: str
    """The command that repeats the measurement."""


class SearchHit(BaseModel):
    """One card that answers a question."""

    id: str
    title: str
    claims: list[str]
    """Ids of its claims, nearest to the question first."""
    standing: dict[str, list[str]]
    """Verdicts by claim id, as in the list of cards; an empty list for a claim that was never tested."""
    why: str
    """The passage that matched best."""
    applies: bool
    """Whether any claim of the card applies to the stated machine; true if no machine was stated."""
    sizes: list[str] = Field(default_factory=list)
    """Which sizes to take for the stated run: by the card, or by the planner, and why."""
    limits: list[str]
    """The claims that do not apply to the stated machine, each with what was found and what its scope expects."""


class PageHit(BaseModel):
    """A section of a guide or skill."""

    source: str
    title: str


class SearchAnswer(BaseModel):
    """The cards that answer a question, best first; where none does, why, and the ids of the nearest, which may be of no use."""

    hits: list[SearchHit]
    none: str = ""
    nearest: list[str] = Field(default_factory=list)
    pages: list[PageHit] = Field(default_factory=list)
    diagnosis: str = ""
    """The command, or the tool's arguments, of the diagnosis that a question about speed asks for."""


class CardRow(BaseModel):
    """One card in a list."""

    id: str
    title: str
    summary: str
    phase: str
    wall: str
    claims: dict[str, list[str]]
    """Verdicts by claim id with what each rests on, as `confirmed, one H200, megatron`; an empty list for a claim that nobody tested."""


class CardList(BaseModel):
    """All cards."""

    cards: list[CardRow]
    left_out: int = 0


class CardAnswer(BaseModel):
    """A section of a card, as in its file, with the verdicts on its claims."""

    card: dict[str, Any]
    rests_on: list[str]
    """For each decision rule, in their order: `measured`, `refuted` or `hypothesis`."""
    verdicts: dict[str, list[Standing]]
    more: list[str]
    """The card's other sections."""


class ClaimAnswer(BaseModel):
    """One claim as in the card's file, or the claim that a mechanism check belongs to."""

    card_id: str
    claim: dict[str, Any]
    verdicts: dict[str, list[Standing]]
    """Verdicts by id: of the claim, and of its mechanism check."""


class EvidenceRow(Standing):
    """One evidence record."""

    expires: str
    case: str | None


class EvidenceList(BaseModel):
    """The records on one claim, newest first; altered ones are listed as `altered`."""

    claim_id: str
    records: list[EvidenceRow]
    left_out: int = 0


class NearLayout(BaseModel):
    """A legal layout, by what it changes."""

    changes: dict[str, Any]


class LayoutAnswer(BaseModel):
    """Whether a layout is legal, and the degrees that follow from it."""

    legal: bool
    broken: list[str]
    """Each broken rule: what was found, what was expected, what to set."""
    dp: int | None
    """Data-parallel degree; null where the GPUs do not divide."""
    edp: int | None
    """Data-parallel degree of the experts."""
    min_gpus: int
    """The smallest number of GPUs that holds one copy of the model."""
    uneven: list[list[int]] | None
    """Decoder layers of each stage, chunk by chunk, where they are not alike; null where they are."""
    nearest: list[NearLayout]
    """The nearest legal layouts of one that is not."""


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
    """Peak allocated memory. Units: bytes per GPU; GiB where the name says so."""

    verdict: str
    """fits, tight or does not fit, where the GPU is named."""
    gpu_gib: float | None
    peak: float
    stage: int
    """The pipeline stage with the highest peak."""
    stages: list[StageMemory]


class PlannedLayout(BaseModel):
    """One plan. Units: GiB, tokens per second and GPU with their 80 % interval."""

    memory_gib: float
    tokens_per_s_per_gpu: dict[str, float]
    mfu: float
    network_share: float | None
    """What of its step the network between nodes costs."""
    settings: list[str]
    """What `playbook layout memory` takes."""


class PlanAnswer(BaseModel):
    """The fastest plans that fit, best first, and the GPUs that they take: the fewest, where those were asked for."""

    gpus: int
    seq_len: int
    global_batch_size: int
    limit_gib: float
    """What a plan may allocate of a GPU's memory."""
    plans: list[PlannedLayout]
    published: dict[str, Any] | None
    """The nearest published runs of the model on the GPU: what was measured, the prediction for each without its own figure, and which of
    them is `ahead` of the first plan.
    """
    other_backend: dict[str, Any] | None
    """The best plan of the backend that was not asked for, how far it is from the first, and which trainers run it."""
    ties: list[int]
    """Places of plans that cannot be told from the first, from 1."""
    runner_up: str | None
    """Why the second lost."""
    nearest: dict[str, Any] | None
    """Where nothing fits: what comes nearest, and what would fit."""
    assumptions: list[str]


class ExportAnswer(BaseModel):
    """A layout in the words of a trainer."""

    target: str
    verdict: str
    """fits, tight or does not fit, on the GPU that is named, with the loss that this trainer runs."""
    memory_gib: float
    gpu_gib: float
    text: str
    """A shell script: environment, files and the launcher's line."""


class DiagnosisAnswer(BaseModel):
    """Where a run stands, which wall is likely, and what to try, best first.

    Units: tokens per second and GPU, seconds, GiB; shares of 1.
    """

    position: str
    measured: dict[str, Any] | None
    predicted: dict[str, Any]
    """The run's own layout where it is known, and the fastest, each with settings; what comes nearest where nothing fits."""
    published: dict[str, Any] | None
    """The nearest published runs, and the range that all of their kind reach."""
    walls: list[dict[str, Any]]
    """Those above their thresholds, the largest first; the largest where none is."""
    how_to_tell: str
    actions: list[dict[str, Any]]
    """Each with the gain to expect and where it comes from, claims with verdicts, flags, and the commands that test it."""
    confidence: dict[str, Any]
    assumptions: list[str]


@dataclass(frozen=True)
class Library:
    """The data behind the answers. Evidence files may appear while the server runs, so every answer reads new and changed ones."""

    cards: Mapping[str, Card]
    skills: Mapping[str, Skill]
    machine: Here
    day: date | None = None
    """By which verdicts are stale; the day of the question, if not given."""
    reader: RecordReader = field(default_factory=RecordReader)

    @property
    def today(self) -> date:
        """The day of an answer."""
        return self.day or standing.today()

    def records(self) -> Sequence[Record]:
        """The evidence that exists now.

        Raises:
            FileError: a file is no record.
        """
        return standing.records_here(self.cards, self.machine, reader=self.reader)

    def stock(self) -> Stock:
        """Cards with the evidence that exists now."""
        return Stock(self.cards, self.records(), self.today, __version__)

    def card(self, card_id: str) -> Card:
        """The card with this id; an unknown id raises an error that names the nearest ones."""
        if card_id not in self.cards:
            raise PlaybookError(f"card '{card_id}' does not exist{did_you_mean(card_id, self.cards)}")
        return self.cards[card_id]


def library_here() -> Library:
    """Cards and skills that ship, with evidence from this folder's runs and from the repository."""
    return Library(load_all(), load_skills(data_root("skills")), standing.here())
