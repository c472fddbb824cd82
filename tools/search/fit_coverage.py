"""Fit the weights by which the search judges whether the cards cover a question: `tools/search/fit_coverage.py` writes them, `--check`
compares.

A logistic regression with a ridge, by Newton's method, over the signs of all known questions: those of issue threads that ship, and the
tuned half of those written from documents. What known questions say of one comes from the other seven eighths, so that no question is
judged by itself. The same every time.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import yaml

from playbook.cards import search
from playbook.cards.load import load_all
from playbook.cards.terms import Asked, Signs, likeness, load_asked, load_weights, odds, opening, terms
from playbook.paths import data_root, repo_root

DOCUMENTS = repo_root() / "tests" / "cards" / "questions.yaml"
TABLE = "coverage.yaml"
HEAD = """\
# How much each sign of a question speaks for an answer. Written by `tools/search/fit_coverage.py`: run it after changing cards, known
# questions or the words of questions. The signs: `playbook/cards/terms.py`.
"""
FOLDS = 8
RIDGE = 0.3
"""Weight of a sign's square against the likelihood of one question; from 0.2 to 10 the area under the curve stays the same in three
digits."""
TOLERANCE = 0.02
"""How far a weight of `--check` may be off: the last digits depend on the library of linear algebra."""


def known() -> list[Asked]:
    """All questions to fit on."""
    home = {c.id: card.id for card in load_all().values() for c in card.claims}
    rows = yaml.safe_load(DOCUMENTS.read_text(encoding="utf-8"))
    tuned = [q for q in rows if int(hashlib.sha256(q["ask"].encode()).hexdigest(), 16) % 2 == 0]
    documents = [Asked(q["ask"], frozenset(home[c] for c in q["claims"] if c in home), "") for q in tuned]
    return [*load_asked(), *documents]


def signs_of(questions: Sequence[Asked]) -> list[tuple[Signs, bool]]:
    """The signs of each question, what known questions say of it from the other folds, and whether it has a card; without those that share
    no word with any card."""
    index = search.index(load_all())
    folds = [[q for i, q in enumerate(questions) if i % FOLDS != fold] for fold in range(FOLDS)]
    indexes = [replace(index, odds=odds(others), alike=likeness(others, list(index.cards))) for others in folds]
    out = []
    for i, question in enumerate(questions):
        opened = opening(question.text)
        words = terms(opened)
        if ranked := search.rank(indexes[i % FOLDS], words):
            out.append((search.signs(indexes[i % FOLDS], opened, words, ranked), bool(question.cards)))
    return out


def fit(labelled: Sequence[tuple[Signs, bool]]) -> dict[str, float]:
    """The weights of the signs as they are, and the constant."""
    raw = np.array([list(asdict(signs).values()) for signs, _ in labelled])
    mean, spread = raw.mean(axis=0), raw.std(axis=0)
    x = np.hstack([(raw - mean) / spread, np.ones((len(raw), 1))])
    y = np.array([answered for _, answered in labelled], dtype=float)
    ridge = np.diag([RIDGE] * raw.shape[1] + [0.0])
    weights = np.zeros(x.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-x @ weights))
        weights += np.linalg.solve(x.T @ (x * (p * (1 - p))[:, None]) + ridge, x.T @ (y - p) - ridge @ weights)
    plain = weights[:-1] / spread
    return {"constant": float(weights[-1] - plain @ mean), **dict(zip([f.name for f in fields(Signs)], map(float, plain), strict=True))}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the weights, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 where a weight is not the one in the table")
    args = parser.parse_args(argv)
    questions = known()
    weights = fit(signs_of(questions))
    if args.check:
        stored = load_weights()
        off = [name for name in weights if abs(weights[name] - stored.get(name, float("inf"))) > TOLERANCE]
        print(f"not as fitted: {', '.join(off)}; run tools/search/fit_coverage.py" if off else f"{len(weights)} weights are as fitted")
        return int(bool(off))
    rows = "".join(f"{name}: {weight:.3f}\n" for name, weight in weights.items())
    path = Path(str(data_root("tables"))) / TABLE
    path.write_text(HEAD + rows, encoding="utf-8")
    print(f"{len(questions)} questions, {len(weights)} weights: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
