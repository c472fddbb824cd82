"""A record as short as it can be, and a run whose record is long."""

from playbook.cards.model import Comparison, Expect
from playbook.paths import data_root
from playbook.records.evidence import ClaimRef, Derived, Machine, Measured, Missing, Run, Seconds, Verdict, seal
from playbook_bench.run import store

MACHINE = Machine(name="cpu", description="", gpus=0, driver="1", cpu="", cores=2)
STRICT = {"s": {"packages": {"torch": "2.13.0"}, "machine": {"driver": "1"}}}


def record(status="confirmed", created="2026-01-01T00:00:00Z", claim="W9", runs=(), expires="2026-06-01", plan=None):
    ref = ClaimRef(
        id=claim, card="c", card_sha="", statement="", kind="pair", metric="step_seconds", expect=Expect(op=">="), comparison=Comparison()
    )
    measured = Measured(
        claim=ref, machine=MACHINE, missing=[Missing(reason="scope", detail="gpus")], runs=list(runs), strict=STRICT, plan=plan
    )
    derived = Derived(verdict=Verdict(status=status, reason="margin", sentence="s"))
    evidence = store.evidence_of(measured, derived, "playbook confirm c", Seconds())
    return seal(evidence.model_copy(update={"created": created, "expires": expires}))


def shipped(holds):
    """The first record that ships of which this holds: a test that asks for one by its id fails with new evidence."""
    return next(path for path in sorted(data_root("results").glob("*/01*.json")) if holds(store.load(path)))


def long_run():
    return Run(
        run_id="r",
        variant="baseline",
        role="measure",
        position=0,
        outcome="ok",
        returncode=0,
        started="",
        wall_s=1,
        ranks=1,
        steps_wanted=1,
        config_sha="c",
        message="x" * 400_000,
        strict_sha="s",
        performance_revision=1,
    )
