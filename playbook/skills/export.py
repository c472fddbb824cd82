"""Export of skills as self-contained folders: SKILL.md, card.yaml with the newest verdicts, and copies of linked files."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path, PurePosixPath
from typing import Any

from playbook import __version__
from playbook.cards.model import Card, by_claim, claim_ids
from playbook.errors import PlaybookError
from playbook.records.read import verdicts
from playbook.records.standing import Stock, bases, in_words
from playbook.skills.model import FILE, LINK, Skill, links, outside
from playbook.yaml_files import did_you_mean, written

CARD_FILE = "card.yaml"
_REFERENCES = "references"


def export(skills: Iterable[Skill], out: Path, stock: Stock) -> list[Path]:
    """Write each skill as a folder of its own below `out`; returns the folders.

    Raises:
        PlaybookError: one of the folders exists, a link or card is missing, or nothing can be written. Nothing is replaced.
    """
    chosen = {skill.name: files(skill, stock) for skill in skills}
    existing = [str(out / name) for name in chosen if (out / name).exists() or (out / name).is_symlink()]
    if existing:
        raise PlaybookError(f"{', '.join(existing)} exists; an export replaces nothing: remove it, or name another folder")
    written = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in chosen.items():
            written.append(_write(out / name, content))
    except OSError as e:
        raise PlaybookError(f"{out} cannot be written: {e.strerror or e}; name a folder that can") from e
    return written


def files(skill: Skill, stock: Stock) -> dict[str, str]:
    """The files of an exported skill by their path in its folder.

    Raises:
        PlaybookError: it names a card or links to a file that does not exist, or to two files of one name.
    """
    content, moved = attachments(skill)
    return {**content, CARD_FILE: card_file(skill.cards, stock), FILE: skill_text(skill, moved, stock.today)}


def attachments(skill: Skill) -> tuple[dict[str, str], dict[str, str]]:
    """The other files of the skill's folder and copies of what it links to, by path; and where each outside link leads now.

    Raises:
        PlaybookError: a link leads to no file, or two linked files share a name.
    """
    content: dict[str, str] = {}
    folder = skill.path.parent
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != FILE and p.resolve().is_relative_to(folder.resolve())):
        content[path.relative_to(folder).as_posix()] = path.read_text(encoding="utf-8")
    moved: dict[str, str] = {}
    for line, target in links(skill):
        plain = target.partition("#")[0]
        if target.startswith("https://") or not plain.startswith(".."):
            continue
        source = outside(skill, target)
        if source is None:
            raise PlaybookError(f"{skill.path}:{line}: link '{target}' leads to no file that ships; run `playbook skills check`")
        name = f"{_REFERENCES}/{source.name}"
        text = _reference(source)
        if content.setdefault(name, text) != text:
            raise PlaybookError(f"{skill.path}:{line}: two linked files are called {source.name}; a skill can carry one of them")
        moved[plain] = name
    return content, moved


def card_file(ids: Sequence[str], stock: Stock) -> str:
    """The cards, and for each of their claims the newest verdict of each machine, as YAML.

    Raises:
        PlaybookError: there is no such card.
    """
    missing = [i for i in ids if i not in stock.cards]
    if missing:
        raise PlaybookError(f"card '{missing[0]}' does not exist{did_you_mean(missing[0], stock.cards)}")
    cards = [stock.cards[i] for i in ids]
    data = {
        "exported": {"by": f"playbook {__version__}", "on": stock.today.isoformat()},
        "cards": [card.model_dump(mode="json", exclude_defaults=True) for card in cards],
        "rests_on": {card.id: rests_on(card, stock) for card in cards},
        "verdicts": {i: standing(card, i, stock) for card in cards for i in claim_ids(card)},
    }
    return written(data)


def rests_on(card: Card, stock: Stock) -> list[str]:
    """What each decision rule of a card rests on, in their order: measured, refuted or hypothesis."""
    return [*bases(card, stock.records, by_claim(stock.cards), stock.today)]


def standing(card: Card, claim_id: str, stock: Stock) -> list[dict[str, Any]]:
    """The newest verdict of each machine on a claim, and whether it is stale; empty for a claim that was never tested."""
    claim = by_claim({card.id: card})[claim_id][1]
    return [
        {
            "machine": r.machine,
            "status": r.status,
            "stands": in_words(r, old),
            "sentence": str(r.get("derived", "verdict", "sentence", default=""))[:600],
            "created": r.created,
            "stale": old,
            "evidence": r.id,
            "repeat": str(r.get("command", default=""))[:300],
        }
        for r in verdicts(stock.records, claim_id)
        for old in [r.stale(stock.today, claim)]
    ]


def skill_text(skill: Skill, moved: Mapping[str, str], today: date) -> str:
    """SKILL.md as exported: links that `attachments` has moved lead to files beside it."""

    def here(match: re.Match[str]) -> str:
        plain, mark, anchor = match["target"].partition("#")
        return f"[{match['label']}]({moved.get(plain, plain)}{mark}{anchor})"

    body = LINK.sub(here, "\n".join(skill.lines[skill.body_start :]))
    head = "\n".join(skill.lines[: skill.body_start])
    note = (
        f"## What lies beside this file\n\n[{CARD_FILE}]({CARD_FILE}) holds the cards {', '.join(f'`{c}`' for c in skill.cards)} and the"
        f" newest verdicts on their claims, as of {today.isoformat()}. Where the `playbook` command is installed, ask it instead:"
        " it knows what was measured since."
    )
    return f"{head}\n{body.rstrip()}\n\n{note}\n"


def _reference(source: Path) -> str:
    """A linked file with its own links removed, since their targets are not exported."""
    text = source.read_text(encoding="utf-8")
    if source.suffix != ".md":
        return text
    return LINK.sub(lambda m: m[0] if m["target"].startswith("https://") else m["label"], text)


def _write(folder: Path, content: Mapping[str, str]) -> Path:
    """Write a folder completely or not at all: it is filled under a temporary name and then renamed."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        for name, text in content.items():
            path = part / PurePosixPath(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder
