"""Loads cards, and checks in them what a schema cannot say.

Files in, findings out. Nothing is skipped: a file that is no card is a finding too. The command line adds what the harness and
the trainer know (`cases`, `metrics`) and checks further along the line.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

from playbook import files
from playbook.cards import scope
from playbook.cards.model import OPS, Card, Claim, Expect, claim_ids, near_metric
from playbook.errors import ConfigError, FileError, Finding
from playbook.paths import OWN_FILE, folders, own_file
from playbook.yaml_files import KeyPath, Positions, did_you_mean, load, locate

LOGIC_KINDS = ("arithmetic", "invariant")


@dataclass(frozen=True)
class LoadedCard:
    """A card with the place of each of its values."""

    card: Card
    path: Path
    marks: Positions

    def finding(self, where: KeyPath, message: str) -> Finding:
        """A finding at `where` in the card's file."""
        return Finding(str(self.path), *locate(self.marks, where), message)


@dataclass
class Cards:
    """What a set of paths holds: the cards that load, and what is wrong with the rest."""

    loaded: list[LoadedCard] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def claims(self) -> Iterator[tuple[LoadedCard, int, Claim]]:
        """Every claim with its card and its place in it."""
        for entry in self.loaded:
            yield from ((entry, i, claim) for i, claim in enumerate(entry.card.claims))


def read_cards(paths: Sequence[Path]) -> Cards:
    """The cards of files and folders; whatever is no card becomes a finding."""
    cards = Cards()
    for path in dict.fromkeys(_files(paths, cards.findings)):
        try:
            card, marks = load(path, Card)
        except FileError as e:
            cards.findings += e.findings
        else:
            cards.loaded.append(LoadedCard(card, path, marks))
    return cards


def load_all(paths: Sequence[Path] = ()) -> dict[str, Card]:
    """Every card below the paths, by id; where there are none, every card that ships, and the user's own.

    Raises:
        FileError: one of them is invalid.
    """
    cards = read_cards(paths or folders("cards"))
    if findings := cards.findings or [*_duplicates(cards, Cards())]:
        raise FileError(findings)
    return {entry.card.id: entry.card for entry in cards.loaded}


def check_cards(cards: Cards, shelf: Cards, cases: Collection[str] | None = None, metrics: Collection[str] | None = None) -> list[Finding]:
    """Everything wrong with `cards`. `shelf` holds all the cards there are, where links and ids are looked up.

    `cases` and `metrics` are the known case ids and metric names; None leaves them unasked.
    """
    known_cards = {e.card.id for e in (*shelf.loaded, *cards.loaded)}
    known_claims = {i for e in (*shelf.loaded, *cards.loaded) for i in claim_ids(e.card)}
    findings = [*cards.findings, *_duplicates(cards, shelf)]
    for entry in cards.loaded:
        findings += _name(entry)
        findings += [entry.finding(("scope", key), message) for key, message in scope.problems(entry.card.scope)]
        findings += _links(entry, known_cards, known_claims)
        findings += _disputes(entry)
        for i, claim in enumerate(entry.card.claims):
            findings += _claim(entry, i, claim, cases, metrics)
    return findings


def _files(paths: Iterable[Path], findings: list[Finding]) -> Iterator[Path]:
    """The card files below the paths; what is no card becomes a finding."""
    for path in paths:
        if not path.is_dir():
            if path.suffix == ".yaml" or not path.exists():
                yield path  # what is missing or unreadable is reported by the reader
            else:
                findings.append(Finding(str(path), 1, 1, "is not a card: expected a file that ends in .yaml"))
            continue
        try:
            entries = sorted(path.iterdir())
        except OSError as e:
            findings.append(Finding(str(path), 1, 1, f"cannot be read: {e.strerror or e}"))
            continue
        if not entries:
            findings.append(Finding(str(path), 1, 1, "is an empty folder; expected at least one card (*.yaml)"))
        for entry in entries:
            if entry.suffix == ".yaml" and not entry.is_dir():
                yield entry
            else:
                kind = "a folder" if entry.is_dir() else "a file"
                findings.append(Finding(str(entry), 1, 1, f"is {kind} among the cards; only cards (*.yaml) belong here, move it elsewhere"))


def _duplicates(cards: Cards, shelf: Cards) -> Iterator[Finding]:
    """Card and claim ids that a second file uses; each is reported where it comes second."""
    checked = {e.path.resolve() for e in cards.loaded}
    ids: dict[str, LoadedCard] = {}
    claims: dict[str, LoadedCard] = {}
    order = [e for e in shelf.loaded if e.path.resolve() not in checked] + cards.loaded
    for entry in order:
        report = entry.path.resolve() in checked
        first = ids.setdefault(entry.card.id, entry)
        if first is not entry and report:
            yield entry.finding(("id",), f"card id '{entry.card.id}' is already used by {first.path}; every card needs its own")
        for i, claim in enumerate(entry.card.claims):
            check = claim.mechanism_check
            for where, claim_id in ((("id",), claim.id), (("mechanism_check", "id"), check.id if check else None)):
                owner = claims.setdefault(claim_id, entry) if claim_id else entry
                if owner is not entry and report:
                    yield entry.finding(
                        ("claims", i, *where), f"claim id '{claim_id}' is already used by {owner.path}; every claim needs its own"
                    )


def clashes(path: Path) -> list[Finding]:
    """Claim ids of a card from elsewhere that a shipped card of another id uses: its verdicts would be shown as that card's."""
    cards, shelf = read_cards([path]), read_cards(folders("cards"))
    card_ids = {e.card.id for e in cards.loaded}
    return list(_duplicates(cards, Cards([e for e in shelf.loaded if e.card.id not in card_ids])))


def _name(entry: LoadedCard) -> Iterator[Finding]:
    if entry.path.stem != entry.card.id:
        yield entry.finding(
            ("id",),
            f"card id '{entry.card.id}' differs from the file's name '{entry.path.name}'; rename the file to '{entry.card.id}.yaml'",
        )


def _links(entry: LoadedCard, cards: Collection[str], claims: Collection[str]) -> Iterator[Finding]:
    for kind in ("supersedes", "contradicts", "see"):
        for i, link in enumerate(getattr(entry.card.related, kind)):
            if link == entry.card.id:
                yield entry.finding(("related", kind, i), f"'{link}' is this card itself; name another one")
            elif link not in cards:
                yield entry.finding(("related", kind, i), f"card '{link}' does not exist{did_you_mean(link, cards)}")
    for where, claim, owner in _claims_named(entry.card):
        if claim == owner:
            yield entry.finding(where, f"claim '{claim}' names itself; name another one")
        elif claim not in claims:
            yield entry.finding(where, f"claim '{claim}' does not exist{did_you_mean(claim, claims)}")


def _disputes(entry: LoadedCard) -> Iterator[Finding]:
    """What stands must be one of the claims in dispute, and the claims must say themselves that they disagree."""
    named = {c.id: {*c.contradicts, *c.supersedes} for c in entry.card.claims}
    for d, dispute in enumerate(entry.card.disputes):
        if dispute.stands not in dispute.claims:
            yield entry.finding(
                ("disputes", d, "stands"),
                f"'{dispute.stands}' is not among the claims in dispute, {', '.join(dispute.claims)}; name one of them",
            )
        for i, claim in enumerate(dispute.claims):
            others = set(dispute.claims) - {claim}
            if not (named.get(claim, set()) & others or any(claim in named.get(o, set()) for o in others)):
                yield entry.finding(
                    ("disputes", d, "claims", i),
                    f"'{claim}' is in dispute, and no claim of this card links it to the others by contradicts or supersedes; add the link",
                )


def _claims_named(card: Card) -> Iterator[tuple[KeyPath, str, str | None]]:
    """Every claim id that a card refers to: its place, the id, and the claim that refers to it."""
    for d, decision in enumerate(card.decide):
        yield from ((("decide", d, "because", i), claim, None) for i, claim in enumerate(decision.because))
    for d, dispute in enumerate(card.disputes):
        yield from ((("disputes", d, "claims", i), claim, None) for i, claim in enumerate(dispute.claims))
    for (c, owner), kind in product(enumerate(card.claims), ("contradicts", "supersedes", "depends_on")):
        yield from ((("claims", c, kind, i), claim, owner.id) for i, claim in enumerate(getattr(owner, kind)))


def _claim(entry: LoadedCard, i: int, claim: Claim, cases: Collection[str] | None, metrics: Collection[str] | None) -> Iterator[Finding]:
    place: KeyPath = ("claims", i)
    yield from (entry.finding((*place, "scope", key), message) for key, message in scope.problems(claim.scope))
    if claim.case is None:
        yield entry.finding((*place, "id"), f"claim '{claim.id}' has no case; add `case:`, or write one in bench/cases/")
    yield from _tested(entry, place, claim.kind, claim.case, claim.metric, claim.expect, cases, metrics)
    check = claim.mechanism_check
    if check:
        yield from _tested(entry, (*place, "mechanism_check"), "pair", check.case, check.metric, check.expect, cases, metrics)
        if not check.id.startswith(f"{claim.id}."):
            yield entry.finding(
                (*place, "mechanism_check", "id"), f"id '{check.id}' does not belong to claim '{claim.id}'; expected '{claim.id}.m'"
            )


def _tested(
    entry: LoadedCard,
    place: KeyPath,
    kind: str,
    case: str | None,
    metric: str,
    expect: Expect,
    cases: Collection[str] | None,
    metrics: Collection[str] | None,
) -> Iterator[Finding]:
    """Findings on how a claim or a mechanism check is tested: its case, metric and expectation go together."""
    if case is not None and cases is not None and case not in cases:
        yield entry.finding((*place, "case"), f"case '{case}' does not exist in bench/cases/{did_you_mean(case, cases)}")
    logic = kind in LOGIC_KINDS
    if logic != (metric == "holds"):
        yield entry.finding(
            (*place, "metric"), f"metric '{metric}' does not fit kind '{kind}'; arithmetic and invariant claims, and only they, use 'holds'"
        )
    elif metrics is not None and not logic and metric not in metrics:
        yield entry.finding((*place, "metric"), f"metric '{metric}' is not known{near_metric(metric, metrics)}")
    if logic != (expect.op == "holds"):
        yield entry.finding(
            (*place, "expect"), f"op '{expect.op}' does not fit kind '{kind}'; arithmetic and invariant claims, and only they, use 'holds'"
        )
    elif expect.op not in OPS[kind]:
        yield entry.finding((*place, "expect"), f"op '{expect.op}' does not fit kind '{kind}'; expected one of {', '.join(OPS[kind])}")
    elif (expect.op == "excludes") != (metric == "fits" and kind != "pair"):
        yield entry.finding((*place, "metric"), f"op '{expect.op}' does not fit metric '{metric}' here; 'excludes' and 'fits' go together")
    elif not logic and expect.op not in ("excludes", "inside") and expect.margin is None:
        yield entry.finding((*place, "expect"), f"op '{expect.op}' needs a margin, such as {{value: 5, unit: percent}}")
    elif kind == "pair" and (expect.at or expect.infeasible):
        yield entry.finding((*place, "expect"), "'at' and 'infeasible' name variants of a sweep or an interaction; a pair has neither")
    elif logic and (expect.margin is not None or expect.at or expect.infeasible):
        yield entry.finding((*place, "expect", "margin"), "a claim that holds or does not has no margin; remove it")


_CARD = """\
id: {name}
title: More loader workers
summary: Whether loader workers are what the step waits for, in our training script.
symptoms: [the GPU waits for data]
phase: profile
wall: host
claims:
  - id: {claim}
    statement: Eight loader workers make a step at least 3 % faster than two.
    mechanism: With two workers the step waits for samples; with eight they are ready.
    kind: pair
    comparison:
      baseline: {{workers: 2}}
      candidate: {{workers: 8}}
    metric: step_seconds
    expect: {{op: ">=", margin: {{value: 3, unit: percent}}}}
    label: benchmark-only
    sources:
      - {{title: Our own measurement, origin: ours, date: "{month}"}}
    case: {name}
"""
_CASE = """\
id: {name}
kind: command
summary: Our training script with two loader workers and with eight.
command: [python, train.py, --workers, "{{workers}}"]
baseline: {{workers: 2}}
candidate: {{workers: 8}}
steps: {{count: 50, warm_up: 10}}
metric: step_seconds
profiles: {{cpu: {{}}}}  # and h200x8, or what your machines are
# What the new path prints proves that it ran; without rules the verdict says that nothing does.
# activation:
#   candidate: {{require: [{{log: 8 workers}}]}}
"""


def begin(folder: Path, name: str, claims: Collection[str]) -> list[Path]:
    """Write `cards/NAME.yaml` and `cases/NAME.yaml` there; where no `playbook.toml` tells of own cards yet, one in the working folder
    that does.

    `claims` are the ids that are taken.

    Raises:
        ConfigError: one of the two files is there already.
    """
    claim = next(f"U{number}" for number in range(1, 1000) if f"U{number}" not in claims)
    words = {"name": name, "claim": claim, "month": datetime.now(UTC).strftime("%Y-%m")}
    written = {folder / "cards" / f"{name}.yaml": _CARD, folder / "cases" / f"{name}.yaml": _CASE}
    if existing := [path for path in written if path.exists()]:
        raise ConfigError(f"{existing[0]} is there already; choose another name")
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        files.create(path, text.format(**words))
    if own_file() is not None:
        return [*written]
    own_toml = Path(OWN_FILE)
    files.create(own_toml, "".join(f"{kind} = {json.dumps((folder / kind).as_posix())}\n" for kind in ("cards", "cases")))
    return [*written, own_toml]
