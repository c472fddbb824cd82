"""`playbook plan`: predictions of step time and memory, and how they compare with runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from playbook.cli.options import AsJson, Network, commands
from playbook.cli.output import print_json, print_table, say
from playbook.cli.plans.layouts import plan_for
from playbook.errors import ConfigError
from playbook.text import count

if TYPE_CHECKING:
    from playbook.planner.runs.check import Row

_DEFAULT = "layouts"
_LISTED = 20
"""The most runs of which each has a line."""


class _Plans(TyperGroup):  # type: ignore[misc]
    """`playbook plan MODEL` is short for `playbook plan layouts MODEL`, and its help has the options of that."""

    default = _DEFAULT

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What stands behind the command's name in its usage."""
        return ["MODEL [OPTIONS], or", *super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options of the default, then the commands."""
        default = self.commands[self.default]
        default.format_options(typer.Context(default, parent=ctx, info_name=self.default), formatter)
        self.format_commands(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments, with the command that is left out where they begin with none."""
        named = args and (args[0] in self.commands or args[0] == "--help")
        found: list[str] = super().parse_args(ctx, args if named or not args else [self.default, *args])
        return found


app = commands()
_plan_app = commands()
app.add_typer(_plan_app, name="plan", cls=_Plans)
_plan_app.command(_DEFAULT)(plan_for)

_Runs = Annotated[Path, typer.Argument(metavar="RUNS.csv", help="A table of runs, one a row; empty cells are unknown.")]
_Hardware = Annotated[
    str, typer.Option("--hardware", "--gpu", help="A kind of GPU or a file of it, for the rows that name that kind or none.")
]
_Anchor = Annotated[Path | None, typer.Option("--anchor", help="A table of measured runs to scale the predictions to.")]
_LeaveOut = Annotated[
    bool, typer.Option("--leave-one-out", help="Scale each row to the other rows (of --anchor, if given), its own configuration left out.")
]
_LeaveSource = Annotated[bool, typer.Option("--leave-source-out", help="The same, with everything of the row's own source left out.")]


@_plan_app.callback()
def plan() -> None:
    """The fastest layouts of a model (`playbook plan MODEL`), and how predictions compare with runs."""


@_plan_app.command("check")
def plan_check(
    runs: _Runs,
    hardware: _Hardware = "",
    network: Network = "",
    anchor: _Anchor = None,
    leave_one_out: _LeaveOut = False,
    leave_source_out: _LeaveSource = False,
    as_json: AsJson = False,
) -> None:
    """Predict every row of a table of runs, and compare with what was measured: errors by group, order of layouts, what cannot be told.

    Errors count the newest release of each configuration. No prediction reads what its row measured.
    """
    from playbook.planner.hardware.named import machine
    from playbook.planner.runs.check import check, document

    if network and not hardware:
        raise ConfigError("--network speaks of the machines that --hardware names; add --hardware KIND or FILE")
    on = machine(hardware, network) if hardware else None
    rows = check(runs, on=on, anchor=anchor, leave_out="source" if leave_source_out else "configuration" if leave_one_out else "")
    if as_json:
        print_json(document(rows))
    else:
        _show(rows)


@_plan_app.command("run")
def plan_run(
    name: Annotated[str, typer.Argument(metavar="ID", help="A published run, as plans and diagnoses name it, such as r294.")],
    as_json: AsJson = False,
) -> None:
    """Show one published run: what was set and measured, its page, and what is predicted for it."""
    from playbook.planner.runs.published import one

    found = one(name)
    if as_json:
        print_json(found)
        return
    wide = max(map(len, found))
    for key, value in found.items():
        for part in value if isinstance(value, list) else [value]:
            if part and key != "schema":
                say(f"{key:{wide}}  {f'{part:,.0f} tokens/s/GPU' if isinstance(part, float) else part}")


def _show(rows: list[Row]) -> None:
    from playbook.planner.runs.check import groups, impossible, ranking, total

    told = [r for r in rows if r.prediction]
    say(
        f"{count(len(rows), 'run')}: {len(told)} predicted, {sum(r.counts for r in rows)} of them measured and the newest of their configuration"
    )
    if told and len(rows) <= _LISTED:
        print_table([_run_line(r) for r in told], tuple(_run_line(told[0])))
        say("")
    for words in dict.fromkeys(w for r in told if r.prediction for w in r.prediction.cluster.notes):
        say(words)
    whole = total(rows)
    if whole:
        figures = [*groups(rows), whole]
        print_table([_line(g) for g in figures], tuple(_line(whole)))
    order = ranking(rows)
    if order:
        say(
            f"order of layouts in {count(order['groups'], 'group')} of 3 or more: the choice is within 5 % of the best in"
            f" {order['winner_within_5_percent']:.0%}, {order['mean_regret']:.1%} slower on average; correlation of ranks {order['order']:.2f} within"
            f" groups, {order['spearman']:.2f} over all rows"
        )
    over = impossible(rows)
    if over:
        say(f"ran, but do not fit by the planner: {', '.join(r.run.id for r in over)}")
    for why, number in Counter(r.why for r in rows if r.why).most_common():
        say(f"{number} not predicted: {why}")


def _run_line(row: Row) -> dict[str, str]:
    from playbook.planner.runs.predict import speed

    interval, measured = row.interval, speed(row.prediction, row.measured) if row.prediction else None
    found = {"run": row.run.id, "predicted tokens/s/GPU": f"{interval.value:,.0f}", "80 %": f"{interval.low:,.0f} to {interval.high:,.0f}"}
    if measured is None:
        return {**found, "measured": "-", "difference": "-", "inside": "-"}
    return {**found, "measured": f"{measured:,.0f}", "difference": f"{row.difference:+.1%}", "inside": "yes" if row.covered else "no"}


def _line(group: dict[str, Any]) -> dict[str, str]:
    constant = group["constant_mfu"]
    return {
        "group": group["group"], "runs": str(group["runs"]), "median error": f"{group['median_error']:.1%}", "p90": f"{group['p90_error']:.1%}",
        "bias": f"{group['bias']:+.1%}", "in 80 % interval": f"{group['covered']:.0%}", "high / low": f"{group['width']:.2f}",
        "constant MFU": f"{constant['median_error']:.1%}", "its p90": f"{constant['p90_error']:.1%}",
    }  # fmt: skip
