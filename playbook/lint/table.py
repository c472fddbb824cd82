"""The linter: one table of rules over cards. Each rule is a pure function; adding one is adding a row."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from playbook.cards.load import Cards, LoadedCard
from playbook.errors import Finding
from playbook.lint import conflicts, figures, labels, layout
from playbook.lint.base import LintInput, LintRule

RULES: Sequence[LintRule] = (
    *layout.RULES,
    *labels.RULES,
    *figures.RULES,
    *conflicts.RULES,
    *conflicts.DECISION_RULES,
    *conflicts.WORK_RULES,
)
"""Every rule over cards alone; `playbook_app.services.check` adds those that need cases or evidence."""


def run(cards: Cards, shelf: Cards, today: str | None = None) -> list[Finding]:
    """What the rules find in `cards`, also against the other cards of `shelf`; `today` is YYYY-MM-DD."""
    checked = {e.path.resolve() for e in cards.loaded}
    replaced = {e.card.id for e in cards.loaded}
    others: list[LoadedCard] = [e for e in shelf.loaded if e.path.resolve() not in checked and e.card.id not in replaced]
    view = LintInput(cards.loaded, [*others, *cards.loaded], today or datetime.now(UTC).strftime("%Y-%m-%d"))
    findings = [finding for rule in RULES for finding in rule.run(view)]
    return sorted(dict.fromkeys(findings), key=lambda f: (f.file, f.line, f.column))
