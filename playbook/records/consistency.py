"""Checks that a record does not contradict itself: its plan, its order of runs, its noise and its machine. A record that does counts for
nothing.

A record that was changed and sealed again passes its own hash. These checks, with a replay, find the changes that leave a trace in the
rest of the record. They vouch for no more: whoever can write every field of a record can write one that agrees with itself
(docs/guide/evidence.md).
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from playbook.records.case import LAUNCHED_KINDS
from playbook.records.evidence import Baseline, Evidence, Measured, Plan, Run, noise_key, workload
from playbook.records.machine import label

# The order of pairs and blocks that a seed gives, as rules of versions 1 and 2 drew it: with it, a record cannot choose its order.

_DRAWN_BY_BLOCKS = (1, 2)


def expected(rules: int, seed: int, pair: bool, variants: Sequence[str], count: int) -> list[str] | None:
    """The first `count` entries of a plan's order: halves of ABBA blocks for a pair, else all variants in a drawn order and its reverse;
    None for rules whose order is not known here.
    """
    if rules not in _DRAWN_BY_BLOCKS:
        return None
    draw = random.Random(seed)
    entries: list[str] = []
    while len(entries) < count:
        if pair:
            block = draw.choice(("ABBA", "BAAB"))
            entries += [block[:2], block[2:]]
        else:
            order = draw.sample(list(variants), len(variants))
            entries += [" ".join(order), " ".join(order[::-1])]
    return entries[:count]


# The records that may claim version 1 of the rules: those that are in the repository since version 2 came.
# A record's plan names the rules that judge it, and version 1 sees less: no step change, for one. Dates and fields of a record are its
# writer's, so a list of hashes says which records are that old. Any other record is judged by version 2 (`playbook bench rejudge`).

FIRST_RULES = frozenset(
    [
        "01a7ad6da66275cdf79a0494a4c06f4f6ad7e892ff317859f85f1cff7b73d18e",
        "06525461db29ba99b9b10cda46bada99a71e78aa104d68bbea10abaad9a6a257",
        "099354b5c3116694c690a99aa8d30af80cad414961b10f3844e0bb2456bb7c1e",
        "12417fa0e7627bc9521280cd5ced9669ad76e15e730cebb0cec7844dc033cf60",
        "1288b6e31b6e7768e79ea35584093c73206423049af0276d4f08a8769b2ff13d",
        "14e04ced487a458eea2b39ecc7968da3ed737a97af9dad3a59547cf1eac1093d",
        "1b32003379d2068251ee568e3905dd96b6fb7cbb977768e18fbdf87abcc86caf",
        "1c92911acf05a4e4dc286c99fffce8c9a7382a74e186213b23c8fccb49eb4133",
        "1fb880cfd2330960d513a00a7be67b62ac134c75c8cd3489ff6a5e340fce3464",
        "2277889a99704f1703e8e9d3c264986ccf929fa0d1cc401022c2a1acec8f7e87",
        "2578514ec6a772fdc3fa8814673d0b01b549ecb850654e51c12fdb855dd497ee",
        "258fc1cfa4e3c6cc191d2c416f94276c0bbfcc07bd611e9fc847f53e2eccf9fe",
        "27a682c9df87b149a5910e1f829f385d3c42a7dab3292a98a1b57e414c1adc81",
        "2d088b7026d0b109de5fce11d636fb37b02abba086be87201e974d8aa2feb965",
        "2d8c22c7004e4789de0b34f3fa63ddc9362b5d7d8702d624fbf95615e7d6a39a",
        "2fc40bbc04246e7c236cfa565902bae1122877f4d0af2df48e290f814b946a4a",
        "30ac1aaeb80868e20f5518b74c4141993e9770dd2445a13a9c6d181340caaa89",
        "3532355a7cca4e693249226b7ac1642f47ed99b3b13d3d3f307f3867415148ae",
        "361b5a420a7d5ca5274c82a661d6d3039903f4a3339f3786e567e19ec584e580",
        "3658921b08355db19ede97fb03aa84523f572d616e352c00113e0c86efc31859",
        "38793a2f1cd4318e1789304d30d81b5894e17e23489b0a2c2d6f4c6e2f644241",
        "3b3d85f5ca972cb7a5f56057b01cbcf4f21e184d6f20e076191eff297e6b49f4",
        "3d4254cee59eafb61e419b805c11ba5c4d8592fba08ac8f7ea78e0c913653e89",
        "4105841c90ee452ec48513987192d4abc6f44d61ca32403084d960f1ed5dd0f2",
        "4265ce606d3daeacc92e4596c85e51f38aed34d9631497336bb24246c03d99c1",
        "477e776e1c3f32024fb8498c82ff6a99417f2da9698ea9148cd8187e591c9fa9",
        "486a870fc7319678047529a3c7577a01959c9a74fc57c972e20f9e762aa014d0",
        "4c892a887082c5b5a725207265057e0a4606175231f33aca7b9d3d23620bc765",
        "4f68fc6b0544acd71302ef454932d26fef7ca81bd324cda75541c938ff1606f6",
        "516b92fa8ae6ae292254d8523863dcf081397a9a9602b848b712001969c92186",
        "51bf6628c4827499828fcc1891d04f75008ddf75e2125f1ea9c0ab3dba8190b8",
        "521dedcf7a25376c29a4702c7d0d9d14b50bc931022859072556854f82ff36dc",
        "54f65cfdf6a1ad8cf5d13e705a78c41254978705a8d8b0eefeb5d7d4c186435b",
        "574b0438491c59adbae21d87ff1fc450f73105a940f61743e90fef9fc04c87f4",
        "58f492912ef7844373fac951b6cc1eb4f44588f24cca28cd6f4ba7b022e0867d",
        "5d530c1701873b3439f368a6dc7366b41ae7063fac01885b87816e49da2ceb90",
        "5ecf34fee172450c2fbc673ac969799926687958e5374755b5d5f11da0e2e20d",
        "680826af5a921d3ae65f1b972802bd96518658d4569266a6a9bdb9d61e4a7256",
        "6855846a626791abf2c715f780c3c2e28959c2c86703a950b990712b312cf4b9",
        "731146d25c1f46dbef863094e3e4a6aeac44ebd2a176dce9f8c40cc430265a59",
        "76547d801583354120ec1ad1b4b232e1b2b5d35a73bae24c67128c939259d210",
        "76f2b3cff6bc080cdfd625b9254bc9f421eb5560a03673e6c3b3e19922ed5c1b",
        "7ee1ddf43aa0186db8e876c2cb6eac9d2e37245f17b78c1fc2bdf045bec03745",
        "80c8cf28148fa97ee358588d8f35c882eb77444cf99725d352845db16a358cce",
        "830ba4f1fa8dcc7504b67f6d7ba454e8600716d96f02996112baf0713edb3ded",
        "83ba1524e7028ad47740f340e185e6175d6258d34072025f8c554b36ee265c16",
        "8409ef8cd64cd725a4b65f09c319f681a7eede6f2834de162e5991bc677a4697",
        "95822c27571c652140a2eff003a21a3931021645d1c195d0bc7934371c6fe49e",
        "a55abc96cd4f2593df5015d5589150e29ec9b78752122ea5081992ba7d47e6b0",
        "a75c7dabd4f7dbb6035d5fd34226435ac0aab0753469b115f0b3eb85eb494bfe",
        "a83994cead8bb19a6e9f953d68596eb85c06b7515448fa93fb84ed2e4de21d60",
        "aecf8910f8f624e07d23bc4ad11094857fdfb2c44adbfc253785e41a0f0b2171",
        "b12ed16799ebee2e4a4d8ee8b6223d4ab136146115fe2213ddeff941b3fe398c",
        "b1374a3a62233678a1649f7a907533ae6060041f526a6e43d25aa037de0d6c91",
        "b8eb25c5106e9c95b7a7aa9a95554f3a0fc89145bced7facbe64c31a5adbd27e",
        "bc097d10f744ebec3066dac4ff9287ed6660f8c858128cb0ececad51c2a19d64",
        "be4cf544ce41e0fc040022b971abf887e7be7bf59e8249b9ee9d16b768eccc3e",
        "be8d2d222c6c6a42ee849adf9febf6760dd2fcb2a7b481f53b92b996fcca8c68",
        "d04e02046c86133b78746fdf443ca2eeeede9944491fa4245fb1de99ebc45987",
        "d0b6a0475683ce47074a4f5ea6b01daffc23b1ffaa929fa157942b4f069d0c2c",
        "d0cec7a163c99e40fb7acd06e4b141b4fbf101670f40e5af977db7c056743cc2",
        "d751f374d7d069f4573a5a3bc1aeee4750aa443d9a72498b338ee85d863d5a54",
        "dc5d3e18e4753bc5845a16c27e0dc734cc16842ed3f82007f13d37c412d91bad",
        "e659d6f2d94159966c7b0143174c1af2cdf363233620d6c3cc44b3ab04f800d0",
        "ecf44f98d526f2597f81bee13e6f84ae523a26d184ae7ef0324214b920adad79",
        "ed6df1bb5f53c3aeec9ce4d14a043a43bae67205cf78fb0266e98f6175882b63",
        "ee542b485e721c682c4c6facb89d914e5267a0e61f64644b6c35f26cc860931e",
        "f3d51817b5d2cfdad838066140012177d4d46a588f33e77cf4bd6ac29f73e396",
        "fedeb2fd653e0b8d16b9f55f9e121b2edc3dc31c6093bec382332df2c546252e",
    ]
)
"""Their hashes."""


_NEIGHBOURHOOD = timedelta(hours=2)
"""For how long series in one place share an A/A."""
_CLOCK_TOLERANCE = 0.01
"""Share by which what a launch is made of may exceed its wall time: two clocks of one machine drift by far less."""
_SUM_TOLERANCE = 1e-6
"""Share by which two sums of the same figures may differ."""
_CLOCK_SET_S = 2.0
"""By how much a machine's clock may have been set back between two launches."""
_ROUNDED_S = 0.01


AS_OF_VERSION_1 = (
    "it claims rules of version 1, which no record may that is not of their time; `playbook bench rejudge` judges it by those of today"
)


def contradictions(evidence: Evidence) -> list[str]:
    """Where a record disagrees with itself, one line for each; empty for one that the harness wrote."""
    return [text for check in _CHECKS for text in check(evidence)]


def _plan(evidence: Evidence) -> Iterator[str]:
    """Looks and error rate decide how wide the intervals are: they are the case's, not the record's."""
    plan, case = evidence.measured.plan, evidence.measured.case
    if plan is None or case is None or case.content.kind not in LAUNCHED_KINDS:
        return
    looks = case.content.budget.looks if plan.rules >= 3 else case.content.budget.pairs
    if plan.looks != looks:
        yield f"the plan looks after {plan.looks} pairs, its case after {looks}"
    if plan.alpha != Plan.model_fields["alpha"].default:
        yield f"the plan's error rate is {plan.alpha:g}, every series has {Plan.model_fields['alpha'].default:g}"


def _rules(evidence: Evidence) -> Iterator[str]:
    """Version 1 sees less than today's: a record may claim it only where it was made before there were others."""
    plan = evidence.measured.plan
    if plan is not None and plan.rules == 1 and evidence.sha256 not in FIRST_RULES:
        yield AS_OF_VERSION_1


def _case(evidence: Evidence) -> Iterator[str]:
    case = evidence.measured.case
    if case is not None and case.id != case.content.id:
        yield f"the case is called {case.id}, its content {case.content.id}"


def _order(evidence: Evidence) -> Iterator[str]:
    """Pairs are those that were fixed before the data, each in its order, none twice and none left out."""
    plan, case = evidence.measured.plan, evidence.measured.case
    if plan is None or case is None or not plan.order:
        return
    if plan.rules >= 3 and case.content.kind == "pair":
        launches = [r for r in sorted(evidence.measured.runs, key=lambda r: r.position) if r.role == "measure"]
        letter = "".join("A" if r.variant == "baseline" else "B" for r in launches)
        if letter != "".join(plan.order):
            yield f"the launches came as {letter}, its order says {''.join(plan.order)}"
        for variant in case.content.variants:
            numbers = [r.pair for r in launches if r.variant == variant]
            if numbers != list(range(len(numbers))):
                yield f"the launches of {variant} are of pairs {_short(numbers)}; expected 0, 1, 2 in their order"
        return
    pairs: dict[int, list[Run]] = {}
    for run in sorted(evidence.measured.runs, key=lambda r: r.position):
        if run.role == "measure" and run.pair is not None:
            pairs.setdefault(run.pair, []).append(run)
    if sorted(pairs) != list(range(len(plan.order))):
        yield f"the order has {len(plan.order)} pairs, the runs are of {len(pairs)}: {_short(sorted(pairs))}"
        return
    pair = case.content.kind == "pair"
    drawn = expected(plan.rules, plan.seed, pair, list(case.content.variants), len(plan.order))
    if drawn is not None and drawn != plan.order:
        yield f"the order is {_short(plan.order)}, its seed gives {_short(drawn)}"
    letters = {"A": "baseline", "B": "candidate"}
    for number, entry in enumerate(plan.order):
        planned = [letters[x] for x in entry if x in letters] if pair else entry.split()
        ran = [run.variant for run in pairs[number]]
        remaining = iter(planned)
        if len(set(ran)) != len(ran) or not all(variant in remaining for variant in ran):
            yield f"pair {number} ran {' '.join(ran)}, its order says {' '.join(planned)}"


def _launches(evidence: Evidence) -> Iterator[str]:
    """No launch counts twice: neither its name, nor its place, nor its times, which no two launches share to the last digit."""
    runs = evidence.measured.runs
    for what, values in (("run id", [r.run_id for r in runs]), ("position", [r.position for r in runs])):
        if twice := [v for v, n in Counter(values).items() if n > 1]:
            yield f"{what} {_short(twice)} is used twice"
    command = evidence.measured.case is not None and bool(evidence.measured.case.content.command)
    for launched in (runs, evidence.measured.aa.runs if evidence.measured.aa else []):
        ended = [r for r in launched if len(r.samples) > 1]
        times = Counter(tuple(s.seconds for s in r.samples) for r in ended)
        # A command may make up its times, such as a simulator: then every launch repeats.
        if any(n > 1 for n in times.values()) and not (command and len(times) < len({r.config_sha for r in ended}) + 1):
            yield "two launches have the same step times to the last digit; no two runs do"
    ordered = itertools.pairwise(sorted(runs, key=lambda r: r.position))
    if late := next((after for before, after in ordered if _began(after) < _began(before) + before.wall_s - _CLOCK_SET_S), None):
        yield f"run {late.run_id} began before the one before it had ended; launches follow one another"


def _began(run: Run) -> float:
    try:
        return datetime.fromisoformat(run.started).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return math.nan


def _clock(evidence: Evidence) -> Iterator[str]:
    """Timed steps add up to the timed window, and a launch holds its steps: each takes time, and all together no longer than the launch."""
    measured = evidence.measured
    command = measured.case is not None and bool(measured.case.content.command)
    runs = [r for r in (*measured.runs, *(measured.aa.runs if measured.aa else [])) if r.outcome == "ok" and r.samples]
    problems = (problem for run in runs for problem in _clock_of(run, measured.strict.get(run.strict_sha, {}), command))
    yield from itertools.islice(problems, 1)  # the first says enough


def _clock_of(run: Run, strict: Mapping[str, Any], command: bool) -> Iterator[str]:
    timed = math.fsum(s.seconds for s in run.samples if s.timed)
    if not math.isclose(timed, run.seconds.timed, rel_tol=_SUM_TOLERANCE) or not timed > 0:
        yield f"the timed steps of run {run.run_id} take {timed:.6g} s, its timed window {run.seconds.timed:.6g} s"
    trainer = strict.get("trainer")
    covered = trainer.get("log_every") if isinstance(trainer, Mapping) else None
    every = covered if isinstance(covered, int) else 1
    steps = run.samples[0].seconds + every * math.fsum(s.seconds for s in run.samples[1:])  # a first line may be of one step alone
    if steps > (1 + _CLOCK_TOLERANCE) * run.wall_s:
        yield f"the steps of run {run.run_id} take {steps:.6g} s, the whole launch {run.wall_s:.6g} s"
    if run.seconds.total > (1 + _CLOCK_TOLERANCE) * run.wall_s or _phases(run) > (1 + _CLOCK_TOLERANCE) * run.seconds.total:
        yield f"the phases of run {run.run_id} take {max(_phases(run), run.seconds.total):.6g} s, the whole launch {run.wall_s:.6g} s"
    if command and abs(run.wall_s - run.seconds.total) > _SUM_TOLERANCE * run.wall_s:
        yield f"the seconds of run {run.run_id} are {run.seconds.total:.6g}, its launch took {run.wall_s:.6g} s"


def _phases(run: Run) -> float:
    return run.seconds.start_up + run.seconds.warm_up + run.seconds.timed


def _totals(evidence: Evidence) -> Iterator[str]:
    """The series took as long as its launches: none was left out, but where it started over, or a launch failed, those are in the total
    too.
    """
    measured, plan = evidence.measured, evidence.measured.plan
    if plan is None or not measured.runs:
        return
    launches = math.fsum(r.wall_s for r in measured.runs)
    noise = math.fsum(r.wall_s for r in measured.aa.runs) if measured.aa else 0.0
    whole = measured.aa is not None or plan.rules >= 3
    total, alone = evidence.seconds.total, whole and not (plan.extended or evidence.judged_from or measured.failed_before)
    if total < launches - _ROUNDED_S or (alone and total > launches + noise + _ROUNDED_S):
        yield f"the series took {total:.6g} s, its launches {launches:.6g} s"


def _noise(evidence: Evidence) -> Iterator[str]:
    """The A/A that floors the noise is one of this machine, and of a configuration of this series or of its neighbourhood."""
    measured, aa = evidence.measured, evidence.measured.aa
    if aa is None:
        return
    if aa.machine != measured.machine.name:
        yield f"the A/A is of {aa.machine}, the runs of {measured.machine.name}"
    if (measured.profile or aa.profile) != aa.profile:
        yield f"the A/A is of profile {aa.profile}, the runs of {measured.profile}"
    config_shas = {r.config_sha for r in measured.runs}
    foreign = {r.config_sha for r in aa.runs} - config_shas
    if foreign and aa.place is not None:
        yield from _neighbourhood(measured, aa)
        return
    recorded = [r for r in measured.runs if r.strict_sha in measured.strict]
    if recorded and aa.noise_key not in {noise_key(r, measured.strict) for r in recorded}:
        yield f"the A/A has the noise key {aa.noise_key[:16]}: it was measured in another environment or configuration than every run"
    if foreign:
        yield f"the A/A ran configuration {_short(sorted(foreign))}, none of the series did"


def _neighbourhood(measured: Measured, aa: Baseline) -> Iterator[str]:
    """An A/A of another configuration is of the same workload, and was measured within hours of the series."""
    workloads = {workload(r, measured.configs[r.config_sha]) for r in measured.runs if r.config_sha in measured.configs}
    if any(workload(r, aa.config) not in workloads for r in aa.runs):
        yield "the A/A is of another configuration, and of another environment, backend or number of ranks than every run"
    times = [[datetime.fromisoformat(r.started) for r in runs if r.started] for runs in (measured.runs, aa.runs)]
    if not all(times) or abs(min(times[0]) - max(times[1])) > _NEIGHBOURHOOD:
        yield f"the A/A is of another configuration and was not measured within {_NEIGHBOURHOOD} of the series"


def _machine(evidence: Evidence) -> Iterator[str]:
    """The machine is the one that the runs' environments name, under the name that such a machine has."""
    machine = evidence.measured.machine
    if machine.name != label(machine.gpu, machine.gpus):
        yield f"the machine is called {machine.name}; one with {machine.gpus} x {machine.gpu} is {label(machine.gpu, machine.gpus)}"
    fields = machine.model_dump(mode="json")
    for sha, strict in evidence.measured.strict.items():
        recorded = strict.get("machine", {})
        differing = [k for k, v in recorded.items() if k in fields and fields[k] != v] if isinstance(recorded, Mapping) else ["machine"]
        if fields["memory_gib"] is not None and "memory_gib" not in recorded:
            differing.append("memory_gib")
        if differing:
            yield f"environment {sha[:16]} is of another machine: {', '.join(differing)} differ"


def _short(values: Sequence[Any]) -> str:
    return ", ".join(str(v)[:40] for v in values[:4]) + (", ..." if len(values) > 4 else "")


_CHECKS: tuple[Callable[[Evidence], Iterator[str]], ...] = (_plan, _rules, _case, _order, _launches, _clock, _totals, _noise, _machine)
