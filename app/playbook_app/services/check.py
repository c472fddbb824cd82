"""`playbook cards check` from end to end: cards, then cases, then the trainer's keys, then all evidence.

Each package judges what it owns; here their answers are put side by side. The linter is one table of rules over cards, each a pure
function; adding one is adding a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from playbook.cards import scope
from playbook.cards.load import LOGIC_KINDS, Cards, LoadedCard, check_cards, read_cards
from playbook.cards.model import Claim, Comparison, ConfigFamily, Expect, by_claim, near_metric
from playbook.errors import ConfigError, FileError, Finding
from playbook.lint import conflicts, figures, labels
from playbook.lint.base import LintInput, LintRule
from playbook.paths import data_root, folders
from playbook.records.case import Case, beside, case_problems, receipts
from playbook.records.evidence import Evidence
from playbook.records.read import Record, RecordReader, speaks_for
from playbook.yaml_files import KeyPath, Positions, did_you_mean, load, locate
from playbook_bench import statements
from playbook_bench.judge import effects, receipt
from playbook_bench.machine.requirements import check_name, shares_a_gpu
from playbook_bench.metrics import METRICS
from playbook_bench.run import replay
from playbook_bench.variants.resolve import configurations, resolve_all, trainer_path
from playbook_trainer.config import checks, recipes
from playbook_trainer.config import tree as trainer
from playbook_trainer.config.tree import trainer_keys

RULES: Sequence[LintRule] = (
    *labels.LAYOUT_RULES,
    *labels.RULES,
    *figures.RULES,
    *conflicts.RULES,
    *conflicts.DECISION_RULES,
    *conflicts.WORK_RULES,
)
"""Every rule over cards alone; `playbook_app.services.check` adds those that need cases or evidence."""


def lint(cards: Cards, shelf: Cards, today: str) -> list[Finding]:
    """What the rules find in `cards`, also against the other cards of `shelf`; `today` is YYYY-MM-DD."""
    checked = {e.path.resolve() for e in cards.loaded}
    replaced = {e.card.id for e in cards.loaded}
    others: list[LoadedCard] = [e for e in shelf.loaded if e.path.resolve() not in checked and e.card.id not in replaced]
    view = LintInput(cards.loaded, [*others, *cards.loaded], today)
    findings = [finding for rule in RULES for finding in rule.run(view)]
    return sorted(dict.fromkeys(findings), key=lambda f: (f.file, f.line, f.column))


NUMBERS = ("layers", "moe_layers", "microbatches", "ranks", "steps", "images")
"""The variables that a formula for a count may use; see `playbook.records.case.Rule`."""

RECIPES = "trainer/configs/recipes/"
"""The folder that every `recipe` of a family begins with."""

RANKS = "ranks"
"""The only key of profiles and deltas that is not a key of the trainer: the number of processes."""


@dataclass(frozen=True)
class LoadedCase:
    """A case with the line and column of each value."""

    case: Case
    path: Path
    marks: Positions

    def finding(self, where: KeyPath, message: str) -> Finding:
        """A finding at `where` in the case's file."""
        line, column = locate(self.marks, where)
        return Finding(str(self.path), line, column, message)


_Backends = dict[tuple[Path, str], str]
"""By file and profile of a case, the backends that it trains on: many claims may name one case."""

CASE_RULES = (
    ("claim-out-of-reach", "A claim whose case has no profile inside the claim's scope"),
    ("decision-reason", "A decision that sets a key which no case of the claims that it cites varies"),
    ("evidence-old", "A claim whose newest evidence has expired"),
    ("family-recipe", "A family's recipe that does not exist, does not load, or is of another model, layout, length or batch"),
)
"""The rules that need cases or evidence beside the cards: id and title."""

_DEGREE_KEYS = {
    "parallel.tp": "tp",
    "parallel.pp": "pp",
    "parallel.cp": "cp",
    "parallel.ep": "ep",
    "data.seq_len": "seq_len",
    RANKS: "ranks",
}
"""Profile keys that correspond to a fact of a scope, with the name of that fact."""


def check_all(paths: Sequence[Path], today: str | None = None) -> tuple[Cards, dict[str, LoadedCase], list[Finding]]:
    """The cards of `paths` (all that ship and the user's own, if empty), the cases, and everything that is wrong with them.

    `today` (YYYY-MM-DD) is the day by which age is judged.
    """
    shelf = read_cards(folders("cards"))
    cards = read_cards(paths) if paths else shelf
    read = [read_cases(folder) for folder in folders("cases")]
    cases = {name: loaded for of_folder, _ in read for name, loaded in of_folder.items()}
    findings = [finding for _, wrong in read for finding in wrong]
    cases_of_cards, more = _cases_beside(cards)
    findings += more
    broken = {Path(f.file).stem for f in findings}
    problems = check_cards(cards, shelf, cases=set(cases).union(broken, *cases_of_cards.values()), metrics=METRICS)
    backends: _Backends = {}
    for entry, i, claim in cards.claims():
        problems += _claim_and_case(entry, i, claim, {**cases, **cases_of_cards.get(entry.path, {})}, backends)
    problems += _reasons(cards, shelf, {i: loaded.case for i, loaded in cases.items()})
    brought = {loaded.path: loaded for of_card in cases_of_cards.values() for loaded in of_card.values()}
    named = {c.case for _, _, claim in cards.claims() for c in (claim, claim.mechanism_check) if c}
    for loaded in (*cases.values(), *brought.values()):
        if not paths or loaded.case.id in named or loaded.path.parent != data_root("cases"):  # what ships is checked whole by itself
            findings += check_case(loaded)
    cases |= {loaded.case.id: loaded for loaded in brought.values()}
    day = today or datetime.now(UTC).strftime("%Y-%m-%d")
    problems += lint(cards, shelf, day)
    problems += _recipes(cards)
    records, unreadable = _records(data_root("results"))
    if not paths:  # a check of one's own cards does not judge everybody's records anew
        findings += unreadable + replay.unsound(records)
    problems += _expired(cards, records, day)
    return cards, cases, problems + findings


_READER = RecordReader()
"""Keeps the records that it has read, since a process may check many cards."""


def _records(folder: Path) -> tuple[list[Record], list[Finding]]:
    """All evidence of a folder, and what of it does not read."""
    try:
        return _READER.read([folder]), []
    except FileError as e:
        return [], list(e.findings)


def read_cases(folder: Path) -> tuple[dict[str, LoadedCase], list[Finding]]:
    """The cases of a folder by id, and what does not load."""
    cases: dict[str, LoadedCase] = {}
    findings: list[Finding] = []
    for path in sorted(folder.iterdir()):
        if path.suffix != ".yaml" or path.is_dir():
            findings.append(Finding(str(path), 1, 1, "is no case; only cases (*.yaml) belong here, move it elsewhere"))
            continue
        _read_case(path, cases, findings)
    return cases, findings


def _read_case(path: Path, cases: dict[str, LoadedCase], findings: list[Finding]) -> None:
    try:
        case, marks = load(path, Case)
    except FileError as e:
        findings += e.findings
        return
    loaded = LoadedCase(case, path, marks)
    if path.stem != case.id:
        findings.append(loaded.finding(("id",), f"case id '{case.id}' differs from the file's name; rename the file to '{case.id}.yaml'"))
    cases[case.id] = loaded


def _cases_beside(cards: Cards) -> tuple[dict[Path, dict[str, LoadedCase]], list[Finding]]:
    """Cases that lie beside a card file, by card, as `playbook confirm CARD.yaml` finds them; and findings for those that do not load."""
    case_folders = [folder.resolve() for folder in folders("cases")]
    read: dict[Path, dict[str, LoadedCase]] = {}
    cases_of_cards: dict[Path, dict[str, LoadedCase]] = {}
    findings: list[Finding] = []
    for entry, _, claim in cards.claims():
        names = [claim.case, claim.mechanism_check.case if claim.mechanism_check else None]
        for path in (case_file for name in names if name and (case_file := beside(entry.path, name))):
            if path.parent in case_folders:
                continue
            if path not in read:
                read[path] = {}
                _read_case(path, read[path], findings)
            cases_of_cards.setdefault(entry.path, {}).update(read[path])
    return cases_of_cards, findings


def check_case(loaded: LoadedCase) -> list[Finding]:
    """What is wrong with one case: its fields, its function, its trainer configuration, its keys, its layouts."""
    case = loaded.case
    findings = [loaded.finding(where, message) for where, message in case_problems(case)]
    if findings:
        return findings
    if case.kind in LOGIC_KINDS:
        return list(_function(loaded))
    for where, name in ((("metric",), str(case.metric)), *((("also", i), name) for i, name in enumerate(case.also))):
        if name not in METRICS:
            findings.append(loaded.finding(where, f"metric '{name}' is not known{near_metric(name, METRICS)}"))
    if case.command:
        return findings + [loaded.finding(("profiles", p), text) for p in case.profiles for text in _unresolved(case, p)]
    try:
        trainer_path(case)
    except ConfigError as e:
        return [*findings, loaded.finding(("trainer",), str(e))]
    findings += _formulas(loaded)
    return findings + (list(_unknown_keys(loaded)) or list(_layouts(loaded)))


def _unresolved(case: Case, profile: str) -> Iterator[str]:
    """Why the variants of a command are no comparison, or why no machine runs them on the profile, or nothing."""
    try:
        check_name(profile)
        resolve_all(case, profile)
    except ConfigError as e:
        yield str(e)


def _claim_and_case(entry: LoadedCard, i: int, claim: Claim, cases: Mapping[str, LoadedCase], backends: _Backends) -> Iterator[Finding]:
    place: KeyPath = ("claims", i)
    yield from _same(entry, place, claim.kind, claim.case, claim.metric, claim.comparison, cases)
    yield from _margin(entry, place, claim.metric, claim.expect)
    yield from _out_of_reach(entry, place, claim, cases, backends)
    yield from _rule(entry, place, claim, cases)
    check = claim.mechanism_check
    if check:
        yield from _margin(entry, (*place, "mechanism_check"), check.metric, check.expect)
        yield from _same(entry, (*place, "mechanism_check"), "pair", check.case, check.metric, check.comparison, cases)


def _same(
    entry: LoadedCard, place: KeyPath, kind: str, name: str | None, metric: str, comparison: Comparison, cases: Mapping[str, LoadedCase]
) -> Iterator[Finding]:
    """Findings where a claim and its case differ in kind, metric or comparison."""
    loaded = cases.get(name or "")
    if loaded is None:
        return  # reported as a case that does not exist, or as a case file that does not load
    case = loaded.case
    if case.kind != kind:
        yield entry.finding((*place, "case"), f"case '{case.id}' is of kind '{case.kind}', the claim of kind '{kind}'; make them agree")
    if case.metric is not None and metric not in (case.metric, *case.also):
        expected = "' or '".join((case.metric, *case.also))
        yield entry.finding((*place, "metric"), f"metric '{metric}' differs from '{expected}' in case '{case.id}'; make them agree")
    for variant, ours in (("baseline", comparison.baseline), ("candidate", comparison.candidate)):
        theirs = case.compared(variant)
        if ours != theirs:
            where = (*place, "comparison", variant)
            yield entry.finding(where, f"{variant} {_delta(ours)} differs from {_delta(theirs)} in case '{case.id}'; make them agree")


def _rule(entry: LoadedCard, place: KeyPath, claim: Claim, cases: Mapping[str, LoadedCase]) -> Iterator[Finding]:
    """Findings where a rule on a curve names variants that the case does not have."""
    loaded = cases.get(claim.case or "")
    if (
        loaded is not None
        and claim.kind == loaded.case.kind
        and claim.kind in ("sweep", "interaction", "prediction")
        and not case_problems(loaded.case)
    ):
        for message in effects.claim_problems(claim.expect, list(loaded.case.variants), claim.kind):
            yield entry.finding((*place, "expect"), message)


def _margin(entry: LoadedCard, place: KeyPath, metric: str, expect: Expect) -> Iterator[Finding]:
    """A finding where the unit of the margin does not fit the metric."""
    if metric in METRICS and expect.margin is not None:
        try:
            effects.threshold(METRICS[metric], expect.margin)
        except ConfigError as e:
            yield entry.finding((*place, "expect", "margin"), str(e))


def _out_of_reach(
    entry: LoadedCard, place: KeyPath, claim: Claim, cases: Mapping[str, LoadedCase], backends: _Backends
) -> Iterator[Finding]:
    """A finding where the layouts of all profiles of the case lie outside the scope of the claim."""
    loaded = cases.get(claim.case or "")
    if loaded is None or not loaded.case.profiles or scope.problems(claim.scope):
        return
    case, reasons = loaded.case, []
    for name, keys in case.profiles.items():
        varied = {k for delta in case.variants.values() for k in delta}
        fixed = {k: v for k, v in keys.items() if k not in varied}
        facts: dict[str, Any] = {fact: fixed[key] for key, fact in _DEGREE_KEYS.items() if isinstance(fixed.get(key), int)}
        facts |= {"gpus": 1 if shares_a_gpu(name, facts["ranks"]) else facts["ranks"]} if "ranks" in facts else {}
        if (loaded.path, name) not in backends:
            backends[loaded.path, name] = _backends(case, name)
        facts |= {"backend": backend} if (backend := backends[loaded.path, name]) else {}
        unmet = scope.unmet({k: v for k, v in claim.scope.items() if k in facts}, facts)
        if not unmet:
            return
        reasons.append(f"{name} has {unmet[0]}")
    at = entry.finding(
        (*place, "scope"), f"no profile of case '{case.id}' lies in this scope: {'; '.join(reasons)}; add one, or widen the scope"
    )
    yield replace(at, rule=CASE_RULES[0][0])


def _reasons(cards: Cards, shelf: Cards, cases: Mapping[str, Case]) -> Iterator[Finding]:
    """Findings for decisions that set what none of the cited claims is about; arithmetic and rules speak for what they say."""
    claims = by_claim({e.card.id: e.card for e in (*shelf.loaded, *cards.loaded)})
    for entry in cards.loaded:
        for i, rule in enumerate(entry.card.decide):
            cited = [cases[name] for b in rule.because if b in claims and (name := claims[b][1].case) in cases and name]
            if len(cited) < len(rule.because) or any(c.kind in LOGIC_KINDS for c in cited):
                continue
            varied = {key for case in cited for delta in case.variants.values() for key in delta}
            for key in (str(k) for k in rule.set):
                if "." in key and key not in varied:
                    message = (
                        f"sets {key} because of {', '.join(rule.because)}, whose cases vary {', '.join(sorted(varied))} and not it;"
                        " cite a claim on it, or leave it out"
                    )
                    yield replace(entry.finding(("decide", i, "set", key), message), rule=CASE_RULES[1][0])


def _backends(case: Case, profile: str) -> str:
    """The trainer's backends that a profile's variants are for; nothing for a command, or for what does not resolve."""
    try:
        return "" if case.command else " ".join({run.config.backend for run in configurations(case, profile).values()})
    except (ConfigError, FileError):
        return ""  # reported for the case


def _expired(cards: Cards, records: Sequence[Record], today: str) -> Iterator[Finding]:
    """Warnings for claims whose newest record has expired."""
    for entry, i, claim in cards.claims():
        sound = [(r, r.content) for r in records if isinstance(r.content, Evidence) and not r.altered]
        records_of_claim = [
            (r.precedence[0] > 1, content.expires) for r, content in sound if speaks_for(content.measured, entry.card.id, claim)
        ]
        # One that settles nothing takes no verdict's place, however new it is; one that is judged again is valid no longer than its runs.
        _, expires = max(records_of_claim, default=(False, "9999"))
        if expires < today:
            at = entry.finding(("claims", i, "id"), f"the newest evidence of {claim.id} expired on {expires}; run `playbook confirm` again")
            yield replace(at, rule=CASE_RULES[2][0], warning=True)


def _delta(values: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{k}: {v}" for k, v in values.items()) + "}"


def _function(loaded: LoadedCase) -> Iterator[Finding]:
    case = loaded.case
    table = statements.names(case.kind)
    if case.function not in table:
        yield loaded.finding(
            ("function",), f"function '{case.function}' is not in the harness's table{did_you_mean(str(case.function), table)}"
        )


def _formulas(loaded: LoadedCase) -> Iterator[Finding]:
    """Findings for counts that are not formulas over the known variables."""
    for where, receipt_rule in receipts(loaded.case):
        for i, rule in enumerate(receipt_rule.require):
            try:
                receipt.evaluate(str(rule.count or 0), dict.fromkeys(NUMBERS, 1.0))
            except ConfigError as e:
                yield loaded.finding((*where, "require", i, "count"), str(e))


def _unknown_keys(loaded: LoadedCase) -> Iterator[Finding]:
    allowed = trainer_keys() | {RANKS}
    places = _deltas(loaded.case)
    places += [(("profiles", name), keys) for name, keys in loaded.case.profiles.items()]
    for name, variants in loaded.case.variant_profiles.items():
        places += [(("variant_profiles", name, variant), delta) for variant, delta in variants.items()]
    for where, keys in places:
        for key in keys:
            if key not in allowed:
                yield loaded.finding((*where, key), f"the trainer has no key '{key}'{did_you_mean(key, allowed)}")


def _deltas(case: Case) -> list[tuple[KeyPath, Mapping[str, Any]]]:
    """All configuration deltas of the case, with their places."""
    places: list[tuple[KeyPath, Mapping[str, Any]]] = [(("baseline",), case.baseline), (("candidate",), case.candidate)]
    places += [(("values", i, "set"), value.set) for i, value in enumerate(case.values)]
    for i, factor in enumerate(case.factors):
        places += [(("factors", i, level, "set"), getattr(factor, level).set) for level in ("low", "high")]
    return places


def _layouts(loaded: LoadedCase) -> Iterator[Finding]:
    """Findings for variants that do not resolve, differ in undeclared keys, or do not divide their ranks."""
    for profile in loaded.case.profiles:
        try:
            problems = list(_variant_problems(loaded.case, profile))
        except FileError as e:
            problems = [f"profile '{profile}': {f.message}" for f in e.findings]
        except ConfigError as e:
            text = " ".join(str(e).split())
            problems = [text if profile in text else f"profile '{profile}': {text}"]
        yield from (loaded.finding(("profiles", profile), p) for p in problems)


def _variant_problems(case: Case, profile: str) -> Iterator[str]:
    for variant, run in configurations(case, profile).items():
        problems = checks.layout_problems(run.config, run.ranks) + checks.feature_problems(run.config)
        yield from (f"{variant} on profile '{profile}': {p}" for p in problems)


def _recipes(cards: Cards) -> Iterator[Finding]:
    """Findings for families whose recipe is missing or disagrees with the family."""
    for entry in cards.loaded:
        for i, family in enumerate(entry.card.families):
            if family.recipe is not None:
                for message in disagreements(family, family.recipe):
                    yield replace(entry.finding(("families", i, "recipe"), message), rule=CASE_RULES[3][0])


def disagreements(family: ConfigFamily, recipe: str) -> Iterator[str]:
    """Messages for the values in which a recipe and its family disagree."""
    path = recipes.folder() / recipe.removeprefix(RECIPES)
    if not path.is_file():
        have = [RECIPES + p.name for p in recipes.folder().glob("*.yaml") if p.name != recipes.INDEX]
        yield f"recipe '{recipe}' does not exist{did_you_mean(recipe, have)}"
        return
    try:
        config = trainer.load(path)
    except FileError as e:
        yield f"recipe '{recipe}' does not load: {e.findings[0].message}"
        return
    gpus = family.gpus or recipes.find(path.name).gpus[0]
    for key, (stated, configured) in _compared(family, config, gpus).items():
        if stated is not None and stated != configured:
            yield f"recipe '{recipe}' has {key} {configured}, and family '{family.name}' says {stated}; make them agree"


def _compared(family: ConfigFamily, config: trainer.TrainerConfig, gpus: int) -> dict[str, tuple[Any, Any]]:
    """By key, the value that the family states (None if it states none) and the value of the configuration."""
    par, settings = config.parallel, family.settings
    etp = par.etp or par.tp
    degrees = {
        "tp": par.tp,
        "cp": par.cp,
        "pp": par.pp,
        "vpp": par.vpp,
        "ep": par.ep,
        "etp": etp,
        "dp": gpus // (par.tp * par.cp * par.pp),
        "edp": gpus // (etp * par.ep * par.pp),
    }
    numbers = {
        "seq_len": config.data.seq_len,
        "micro_batch_size": config.train.micro_batch_size,
        "global_batch_size": config.train.global_batch_size,
        **{key: getattr(config.data, key) for key in ("pack", "pack_buffer", "pad_to_multiple", "cache")},
    }
    dispatcher = settings.get("dispatcher", settings.get("moe_flex_dispatcher_backend"))
    recompute = settings.get("recompute")
    modules = sorted(config.train.recompute_modules)
    return {
        "model": (family.model, config.model.name),
        **{key: (family.layout.get(key), value) for key, value in degrees.items()},
        **{key: (settings.get(key), value) for key, value in numbers.items()},
        "dispatcher": (dispatcher, config.moe.dispatcher),
        "recompute": (sorted(recompute) if isinstance(recompute, list) else None, modules),
        "pipeline": (settings.get("pipeline"), "uneven" if par.pipeline_layout else "even"),
    }


def rule_rows() -> list[dict[str, str]]:
    """Every rule: its id, whether it is an error or a warning, and what it finds."""
    rows = [{"id": r.id, "weight": "warning" if r.warning else "error", "finds": r.title} for r in RULES]
    return rows + [{"id": i, "weight": "warning" if i == "evidence-old" else "error", "finds": title} for i, title in CASE_RULES]
