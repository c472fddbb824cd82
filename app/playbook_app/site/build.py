"""Making the site's pages from cards and evidence, before the site is built. No figure on a page is typed by hand.

Written below the docs folder: `cards/` (index and one page per card), `evidence/` (one page and one copy per record) and `_generated/`
(claims, one H200, calculator, families, recipes, models, metrics, commands, configuration), `llms.txt`, `llms-measured.txt` and
`llms-full.txt`. A page whose source is gone is removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from playbook.cards.load import load_all
from playbook.cards.model import by_claim, guidance
from playbook.errors import FileError, Finding
from playbook.paths import data_root, repo_root
from playbook.records.read import EVIDENCE, Present, Record, read
from playbook_app.site.cards import Flags, Shelf, card_page, no_flags
from playbook_app.site.doors import DOORS, door_pages
from playbook_app.site.evidence import evidence_page, list_page, trace_page
from playbook_app.site.indexes import llms, llms_full, llms_measured, plain_card, question_box, questions
from playbook_app.site.lists import (
    coverage,
    example_of_verdicts,
    facts,
    index_page,
    matrix_page,
    one_gpu_page,
    phases,
    record_and_trace,
    summary,
    travel_page,
)
from playbook_app.site.models import calculator_page, families_page, models_page, recipes_page
from playbook_app.site.pages import render
from playbook_app.site.published import data, form, published_page, tables_page, worked
from playbook_app.site.reference import CommandHelp, configuration_page, parity_page

_OWNED = ("cards", "evidence", "_generated")


@dataclass(frozen=True)
class Reference:
    """Tables that the harness, the command line and the trainer own, as plain data."""

    metrics: Sequence[Mapping[str, Any]] = ()
    commands: Sequence[CommandHelp] = ()
    schema: Mapping[str, Any] = field(default_factory=dict)
    field_docs: Mapping[tuple[str, str], str] = field(default_factory=dict)
    present: Present = field(default_factory=Present)
    """This machine's software and the trainer's revisions, by which verdicts go stale."""
    recipes: Sequence[Mapping[str, Any]] = ()
    """Configuration files with their estimates, as `playbook_app.site.models` shows them."""
    flags: Flags = no_flags


@dataclass(frozen=True)
class GeneratedSite:
    """What was generated."""

    cards: dict[str, str]
    """Card ids with their titles, in order of title."""
    phases: dict[str, list[str]]
    """For each phase of the work, in words, the ids of its cards of guidance."""
    trainer: list[str]
    """Ids of the cards about Playbook's own trainer."""
    statuses: dict[str, int]
    """How many records there are of each status."""
    inserts: dict[str, str]
    """Markdown that replaces a comment of that name on a page, such as `coverage`."""
    plain: dict[str, str]
    """Each card as plain Markdown, by its path in the built site: the page's own path with `.md` added."""
    question_box: str
    """What the question box searches, for `search/cards.json` of the built site."""
    compared: str
    """What the forms compare with, for `search/diagnosis.json` of the built site; empty without plans."""
    questions: dict[str, list[str]]
    """What people ask that a card answers, by the card's page."""
    files: list[Path]


def generate(
    out: Path,
    results: Sequence[Path],
    *,
    cards: Path | None = None,
    reference: Reference | None = None,
    today: date | None = None,
    base: str = "",
) -> GeneratedSite:
    """Write every generated page below `out`, from the cards of a folder and the records below the results folders. `base` is the site's
    address.

    Raises:
        FileError: a card or a record that does not load; none is left out in silence.
    """
    all_cards = load_all([cards] if cards else [])
    now = reference or Reference()
    records = read([r for r in results if r.is_dir()], all_cards, now.present)
    home = {claim: card for claim, (card, _) in by_claim(all_cards).items()}
    whole = Shelf(all_cards, records, today or datetime.now(UTC).date(), home, now.flags)
    shelf = replace(whole, cards=guidance(all_cards))
    plans, guides = out / "plans.jsonl", [path for path in sorted((out / "guide").glob("*.md")) if path.is_file()]
    pages = {
        "cards/index.md": index_page(shelf),
        "_generated/claims.md": matrix_page(whole),
        "_generated/one-h200.md": one_gpu_page(shelf),
        "_generated/travel.md": travel_page(shelf),
        "_generated/calculator.md": calculator_page(),
        "_generated/families.md": families_page(whole),
        "_generated/models.md": models_page(data_root("configs")),
        "_generated/published.md": published_page(data_root("tables") / "published_runs.csv"),
        "evidence/index.md": list_page(whole),
        **{f"cards/{card.id}.md": card_page(whole, card) for card in all_cards.values()},
        **_reference(now),
        "_generated/parity.md": parity_page(out / "parity"),
        **({"_generated/plans.md": tables_page(plans)} if plans.is_file() else {}),
        **door_pages(out / "decisions.jsonl", shelf),
        "llms.txt": llms(shelf, guides, base),
        "llms-measured.txt": llms_measured(shelf),
        "llms-full.txt": llms_full(shelf, guides),
        **{f"evidence/{record.id}.md": _record_page(whole, record) for record in shelf.records},
    }
    written = [_write(out / name, content.encode()) for name, content in pages.items()]
    written += [_write(out / "evidence" / f"{record.id}.json", record.path.read_bytes()) for record in shelf.records]
    _remove_others(out, set(written))
    titles = {c.id: c.title for c in sorted(all_cards.values(), key=lambda c: c.title)}
    return GeneratedSite(
        cards=titles,
        phases={phase: [c.id for c in phase_cards] for phase, phase_cards in phases(shelf)},
        trainer=[i for i in titles if i not in shelf.cards],
        statuses=summary(shelf.records),
        inserts={
            "coverage": coverage(whole),
            "cards by phase": render("phases.md", phases=phases(shelf)),
            "example of verdicts": example_of_verdicts(shelf),
            "diagnosis form": form(plans),
            "facts": facts(whole),
            "record and trace": record_and_trace(whole),
            **worked(),
        },
        plain={f"cards/{card.id}.html.md": plain_card(shelf, card) for card in shelf.cards.values()},
        question_box=question_box(shelf.cards),
        compared=data(plans),
        questions=questions(shelf.cards) | {f"_generated/{door.page}.html": list(door.asked) for door in DOORS},
        files=written,
    )


def _record_page(shelf: Shelf, record: Record) -> str:
    try:
        return evidence_page(shelf, record, _shown(record.path)) if record.schema == EVIDENCE else trace_page(record)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as e:
        raise FileError(
            [Finding(str(record.path), 1, 1, f"is a record of another shape than this version writes ({e!r}); remove it")]
        ) from e


def _reference(reference: Reference) -> dict[str, str]:
    pages = {
        "metrics": render("metrics.md", metrics=reference.metrics) if reference.metrics else "",
        "commands": render("commands.md", commands=reference.commands) if reference.commands else "",
        "configuration": configuration_page(reference.schema, reference.field_docs) if reference.schema else "",
        "recipes": recipes_page(reference.recipes) if reference.recipes else "",
    }
    return {f"_generated/{name}.md": page for name, page in pages.items() if page}


def _shown(path: Path) -> str:
    """The path as a reader in the repository would type it."""
    full = path.resolve()
    return str(full.relative_to(repo_root())) if full.is_relative_to(repo_root()) else path.name


def _write(path: Path, content: bytes) -> Path:
    """Write the page if its content differs. Equal files keep their time stamp, so `mkdocs serve` does not rebuild without end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_bytes() != content:
        path.write_bytes(content)
    return path


def _remove_others(out: Path, keep: set[Path]) -> None:
    for folder in _OWNED:
        for path in (out / folder).rglob("*"):
            if path.is_file() and path not in keep:
                path.unlink()
