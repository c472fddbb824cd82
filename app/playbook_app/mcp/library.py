"""What the MCP server answers from: cards, skills, and the evidence that exists when an answer is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date

from playbook import __version__
from playbook.cards.load import load_all
from playbook.cards.model import Card
from playbook.errors import PlaybookError
from playbook.paths import data_root
from playbook.records.read import Reader, Record
from playbook.records.staleness import Here
from playbook.skills.export import Stock
from playbook.skills.model import Skill, load_skills
from playbook.yaml_files import did_you_mean
from playbook_app.services import standing


@dataclass(frozen=True)
class Library:
    """The data behind the answers. Evidence files may appear while the server runs, so every answer reads new and changed ones."""

    cards: Mapping[str, Card]
    skills: Mapping[str, Skill]
    machine: Here
    day: date | None = None
    """By which verdicts are stale; the day of the question, if not given."""
    reader: Reader = field(default_factory=Reader)

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
