"""`playbook demo`: four claims tested on this machine's CPU."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Annotated

import typer

from playbook.errors import ExitCode
from playbook.paths import default_results
from playbook.text import count
from playbook_app.cli.options import (
    Results,
    commands,
)
from playbook_app.cli.output import complain, say
from playbook_bench.launch.forked import ForkLauncher
from playbook_bench.machine import detect, requirements
from playbook_bench.run import confirm as harness
from playbook_bench.run import report
from playbook_bench.run.options import Options
from playbook_bench.run.store import Outcome
from playbook_bench.run.targets import count_inapplicable

app = commands()

DEMO = ("moe-dispatcher-choice/W9.m", "long-context-cp-sizing/L1.m", "vlm-real-data/V3", "vlm-real-data/T1")
"""Two claims that one count of bytes settles, then two about speed."""

"""Exit codes that a demo ends with, too; other verdicts are its success."""
_DEMO_S = 270.0
"""After so many seconds no launch is started any more, so that the demo ends within five minutes."""


class DemoProgress(report.TerminalProgress):
    """A block for each claim: what it says, then what was found."""

    def finished(self, outcome: Outcome) -> None:
        """Print the block."""
        self.close()
        claim = outcome.evidence.measured.claim
        if claim is not None:
            self.out.print(f"\n{claim.card}/{claim.id}: {claim.statement}", markup=False)
        super().finished(outcome)


@app.command()
def demo(
    targets: Annotated[
        list[str] | None, typer.Argument(metavar="CARD/CLAIM", help="Other claims than the four; the CPU must be able to test them.")
    ] = None,
    results: Results = None,
) -> None:
    """Test four claims on this machine's CPU, within five minutes; exit code 0 once one has a verdict of any kind, 4 where none applies
    here.
    """
    lacking_packages = requirements.unmet_requirements([])
    if lacking_packages and not targets:
        complain(f"the demo trains a small model, and cannot: {lacking_packages[0].detail}")
        raise typer.Exit(ExitCode.INAPPLICABLE)
    chosen = targets or list(DEMO)
    out = report.console()
    say(
        f"{count(len(chosen), 'claim')} of the cards, tested on this CPU in less than five minutes: a tiny model trains with and"
        " without one change."
    )
    say("Bytes are counted once, in seconds. Speed is noisy: a claim about it takes 18 launches or more, a minute or two in all.")
    say(f"To come: {', '.join(chosen)}")
    progress = DemoProgress(out)
    options = Options(detect.CPU, results or default_results(), budget_s=_DEMO_S, launcher=ForkLauncher())
    try:
        outcomes = harness.run(chosen, options, progress)
    finally:
        progress.close()
    lacking, total = count_inapplicable(detect.CPU)
    playbook = "playbook" if shutil.which("playbook") else os.path.relpath(sys.argv[0])
    last = outcomes[-1]
    claim = last.evidence.measured.claim
    say(f"\n{lacking} of {total} claims need GPUs or another machine; there, `{playbook} confirm CARD` tests them in the same way.")
    say("Three things to do next:")
    say(f"  {playbook} search 'all-to-all takes a third of the step'   find the card for what you see")
    say(f"  {playbook} cards show {claim.card if claim else 'vlm-real-data'}   read what to set, why, and what was measured where")
    say(f"  {playbook} evidence show {last.path}   look at what the last verdict rests on")
    code = harness.exit_code(outcomes)
    raise typer.Exit(code if code in (ExitCode.FAILED, ExitCode.INAPPLICABLE) else 0)
