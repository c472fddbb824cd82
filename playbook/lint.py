"""The linter: one table of rules over cards. Each rule is a pure function; adding one is adding a row."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from playbook import lint_conflicts, lint_figures, lint_labels, lint_layout, lint_work
from playbook.errors import Finding
from playbook.lint_base import Rule, Shelf
from playbook.validate import Cards, LoadedCard

RULES: Sequence[Rule] = (
    *lint_layout.RULES,
    *lint_labels.RULES,
    *lint_figures.RULES,
    *lint_conflicts.RULES,
    *lint_work.RULES,
)
"""Every rule over cards alone; `playbook.cli_check` adds those that need cases or evidence."""


def run(cards: Cards, shelf: Cards, today: str | None = None) -> list[Finding]:
    """What the rules find in `cards`, also against the other cards of `shelf`; `today` is YYYY-MM-DD."""
    checked = {e.path.resolve() for e in cards.loaded}
    replaced = {e.card.id for e in cards.loaded}
    others: list[LoadedCard] = [e for e in shelf.loaded if e.path.resolve() not in checked and e.card.id not in replaced]
    view = Shelf(cards.loaded, [*others, *cards.loaded], today or datetime.now(UTC).strftime("%Y-%m-%d"))
    found = [finding for rule in RULES for finding in rule.run(view)]
    return sorted(dict.fromkeys(found), key=lambda f: (f.file, f.line, f.column))
