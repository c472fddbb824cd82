"""`playbook plan`: the fastest layouts of a model on a cluster, and how predictions compare with runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from playbook import files
from playbook.diagnosis import rl_plan, rl_step
from playbook.diagnosis.claims import of_layout
from playbook.diagnosis.published import Published, Row, of_plan
from playbook.errors import ConfigError, ExitCode
from playbook.planner.choice.anchored import anchored
from playbook.planner.choice.plain_data import PARTS, document, lost, next_run, pipeline_string, words
from playbook.planner.choice.routing import measured
from playbook.planner.choice.search import Answer, Choice, plan_layouts
from playbook.planner.choice.space import Question
from playbook.planner.choice.training import Training, training
from playbook.planner.hardware import machine
from playbook.planner.memory import AT_THE_LIMIT, GIB, at_the_limit
from playbook.planner.models import find, named
from playbook.planner.options import FRAMEWORKS
from playbook.planner.plan import cut
from playbook.planner.runs import check as accuracy
from playbook.planner.runs.predict import speed
from playbook.planner.runs.published import one
from playbook.planner.time.spread import crossing
from playbook.planner.time.step import network_share
from playbook.text import count
from playbook_app.cli.commands.diagnose import show_rl_step, split_settings
from playbook_app.cli.options import AsJson, Experts, Imbalance, Layers, Network, commands, cuts
from playbook_app.cli.output import complain, print_json, print_table, say
from playbook_app.cli.quantities import amount, machines, several, to_tokens
from playbook_app.cli.training import show_curve, takes
from playbook_app.services.other_backend import other_backend, run_by
from playbook_app.services.predicted_case import case_of, text_of
from playbook_app.services.standing import stock_here
from playbook_trainer.export import plans

_TOP_PARTS = 5
_MEMORY = 0.92
_GPUS, _KIND = 8, "h100"
"""What is planned for where nothing is said."""
_SILENT = ("cp", "vpp", "ep", "etp")
"""Degrees that are not shown where all plans have one."""

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
        parsed: list[str] = super().parse_args(ctx, args if named or not args else [self.default, *args])
        return parsed


app = commands(_Plans)

_Model = Annotated[str, typer.Argument(metavar="MODEL", help="A preset, a published name, or the path of a config.json.")]
_Gpus = Annotated[str, typer.Option("--gpus", metavar="N", help="Number of GPUs, or both as 64xH100; with --goal gpus it is found.")]
_Hardware = Annotated[
    str, typer.Option("--hardware", "--gpu", help="Kind of GPU, such as h100, or a file: a calibration, or a hardware file.")
]


@app.callback()
def plan() -> None:
    """The fastest layouts of a model (`playbook plan MODEL`), and how predictions compare with runs."""


@app.command(_DEFAULT)
def plan_for(
    model: _Model,
    gpus: _Gpus = "",
    hardware: _Hardware = "",
    network: Network = "",
    imbalance: Imbalance = "",
    seq: Annotated[
        int, typer.Option("--seq", parser=to_tokens, metavar="TOKENS", help="Tokens of a sequence, such as 4096 or 128K.")
    ] = 4096,
    gbs: Annotated[int, typer.Option("--gbs", min=0, max=1 << 30, help="Samples of a step; 0 for four million tokens.")] = 0,
    goal: Annotated[str, typer.Option("--goal", help="tokens/s, memory (the leanest), or gpus (the fewest that hold it).")] = "tokens/s",
    memory: Annotated[float, typer.Option("--memory", help="Share of the GPU's memory that a plan may allocate.")] = _MEMORY,
    fix: Annotated[
        list[str] | None, typer.Option("--fix", help="A setting to keep, such as tp=1; may be given again, or with commas.")
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", help="megatron, or torch (FSDP2); if not given, that of --framework or --export, else megatron.")
    ] = "",
    framework: Annotated[
        str, typer.Option("--framework", help="The trainer that will run it, such as megatron-lm: decides its backend and its loss.")
    ] = "",
    allow: Annotated[str, typer.Option("--allow", help="Widen: fp8, bf16-moments, bf16-gradients, offload, graphs; with commas.")] = "",
    anchor: Annotated[
        Path | None, typer.Option("--anchor", help="A table of your own measured runs; predictions are scaled to them too.")
    ] = None,
    published: Annotated[
        bool, typer.Option("--published/--no-published", help="Scale predictions to published runs of their kind, and show the nearest.")
    ] = True,
    top: Annotated[int, typer.Option("--top", min=1, max=50, help="Number of plans.")] = 5,
    layers: Layers = None,
    experts: Experts = None,
    export: Annotated[
        str | None, typer.Option("--export", help="Print the best plan as a script: megatron-lm, megatron-bridge, playbook and others.")
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Make the script of --export one for sbatch.")] = False,
    emit_case: Annotated[
        Path | None,
        typer.Option(
            "--emit-case", metavar="FILE.yaml", help="Write a bench case of the best plan and the next, with their predicted speeds."
        ),
    ] = None,
    case_gpus: Annotated[
        int, typer.Option("--case-gpus", min=1, max=1 << 20, help="GPUs at hand, to which --emit-case cuts the plans.")
    ] = 1,
    against: Annotated[
        list[str] | None, typer.Option("--against", help="Your own layout for --emit-case instead of the next plan, such as tp=2,mbs=1.")
    ] = None,
    total: Annotated[
        float | None,
        typer.Option(
            "--tokens", parser=amount, metavar="N", help="Say what training on so many takes, such as 1T: days, GPU hours, energy."
        ),
    ] = None,
    price: Annotated[float | None, typer.Option("--price", min=0, help="Price of a GPU hour, for --tokens.")] = None,
    scale: Annotated[
        str, typer.Option("--scale", metavar="8,16,32", help="The fastest plan for each of these numbers of GPUs, instead of one answer.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Search every layout for the fastest that fits: speed with its 80 % interval, memory by stage, and why the next one lost.

    Numerics stay BF16 with float32 master weights, gradients and moments unless --allow widens them. Exit code 2 where nothing fits.
    """
    shape, _, _ = cut(find(model), cuts(layers, experts))
    name = named(model) or (Path(model).resolve().parent.name if Path(model).name == "config.json" else Path(model).stem)
    trainer = framework or (export if export in FRAMEWORKS and not backend else "") or ""
    backend, fixed = plans.trained_by(trainer, backend or "megatron", split_settings(",".join(fix or [])))
    fixed = fixed if export is None else plans.kept(export, backend, fixed)
    number, kind = machines(gpus or None, hardware or None)
    routing = measured(imbalance) if imbalance else None
    question = Question(
        shape,
        name,
        machine(kind or _KIND, network),
        number or _GPUS,
        seq,
        gbs,
        goal,
        memory,
        backend,
        fixed,
        frozenset(a for a in allow.split(",") if a),
        routing,
    )
    _refuse(
        {
            "--against and --case-gpus speak of the case that --emit-case writes; add --emit-case FILE.yaml, or leave them out": emit_case
            is None
            and bool(against or case_gpus != 1),
            "--slurm speaks of the script that --export prints; add --export, or leave it out": slurm and export is None,
            "--emit-case predicts from constants alone; leave out --anchor": anchor is not None and emit_case is not None,
            "--price speaks of the training that --tokens names; add --tokens, such as 1T, or leave it out": price is not None
            and total is None,
            "--scale has the fastest plan for each number of GPUs; leave out --gpus, --goal, --export and --emit-case": bool(
                scale and (number or goal != "tokens/s" or export or emit_case)
            ),
            "--tokens speaks of the answer that is printed; leave out --export and --emit-case": total is not None
            and bool(export or emit_case),
        }
    )
    if scale:
        return show_curve(question, several(scale), anchor, total, price, published=published, as_json=as_json)
    answer = plan_layouts(question, top)
    if emit_case is None and (anchor is not None or published):
        answer = anchored(answer, anchor, with_published=published)
    if emit_case is not None and answer.choices:
        _emit(answer, emit_case, case_gpus, split_settings(",".join(against or [])))
    elif export is not None and answer.choices:
        say(plans.launchable(answer.choices[0].plan, export, question.cluster.name).text(slurm=slurm).rstrip())
        complain(_exported(answer.choices[0], export, plans.SETTINGS.get(export, ())))
    elif as_json or answer.choices:
        whole = training(answer.choices[0], question.cluster, total, price) if total and answer.choices else None
        runs, other = of_plan(answer) if published else None, other_backend(answer, with_published=published)
        claims = of_layout(stock_here(), answer.choices[0].plan, answer.question.cluster) if answer.choices else []
        if as_json:
            told = document(answer, runs.beside(answer) if runs else None) | {"other_backend": other, "claims": claims}
            print_json(told | ({"training": asdict(whole)} if whole else {}))
        else:
            _show(answer, runs, other, claims, whole, published=published)
    else:
        _explain(answer)
    if not answer.choices:
        raise typer.Exit(ExitCode.USAGE)


def _refuse(contradictions: Mapping[str, bool]) -> None:
    """Options that contradict each other, by what is said of them."""
    for message in (text for text, wrong in contradictions.items() if wrong):
        raise ConfigError(message)


def _exported(best: Choice, target: str, implied: Sequence[str]) -> str:
    """What an exported plan should reach, and why it may be another than the table's first."""
    speed = best.time.tokens_per_s_per_gpu
    other = (
        f"; searched with {', '.join(implied)}, as {target} trains: the table without it may lead with another layout" if implied else ""
    )
    return (
        f"predicted: {speed.value:,.0f} tokens/s/GPU, 80 % between {speed.low:,.0f} and {speed.high:,.0f}, {best.peak / GIB:.0f} GiB{other}"
    )


def _emit(answer: Answer, path: Path, gpus: int, against: list[str]) -> None:
    """Write the case that tests the best plan against another, and print what was predicted for each."""
    q = answer.question
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*\.yaml", path.name):
        raise ConfigError(
            f"--emit-case {path.name[:80]}: the file's name is the case's id; expected small letters, digits and hyphens, and .yaml"
        )
    case = case_of(answer, path.stem, gpus, against)
    options = {
        "--gpus": q.gpus,
        "--hardware": q.cluster.option,
        "--seq": q.seq_len,
        "--gbs": q.gbs,
        "--backend": q.backend,
        "--memory": "" if q.memory_share == _MEMORY else f"{q.memory_share:g}",
        "--goal": "" if q.goal == "tokens/s" else q.goal,
        "--fix": ",".join(q.fixed),
        "--allow": ",".join(sorted(q.allow)),
        "--against": ",".join(against),
    }
    words = " ".join(f"{k} {v}" for k, v in options.items() if v)
    text = text_of(case, f"playbook plan {q.model} {words} --emit-case {path.name} --case-gpus {gpus}")
    try:
        files.replace(path, text)
    except OSError as e:
        raise ConfigError(f"--emit-case {path}: {e.strerror or e}") from e
    for run in case["values"]:
        p = run["predicted"]
        say(f"{run['at']}: {p['value']:,.0f} tokens/s/GPU predicted, 80 % between {p['low']:,.0f} and {p['high']:,.0f}")
    say(f"wrote {path}; settle it with: playbook bench run {path}")


def _show(
    answer: Answer,
    runs: Published | None,
    other: dict[str, Any] | None,
    claims: list[dict[str, Any]],
    whole: Training | None,
    *,
    published: bool,
) -> None:
    """Print the answer as tables and lines: plans, published runs, parts of the step, memory, ties and assumptions; beside it the other
    backend's best, claims on the first plan's layout that GPUs have measured, and a training.
    """
    q, best = answer.question, answer.choices[0]
    say(
        f"{q.model} on {q.gpus} {q.cluster.name}, {q.seq_len} tokens, global batch {q.global_batch}"
        f"{'' if q.gbs else ' (four million tokens; --gbs names yours)'}: {answer.counts.enumerated:,}"
        f" combinations, {answer.counts.legal:,} legal layouts, {answer.counts.fitting:,} fit {q.capacity / GIB:.1f} GiB,"
        f" {answer.counts.timed:,} plans timed"
    )
    ahead = runs.ahead(q.gpus, best.speed) if runs and q.goal == "tokens/s" else None
    rows = [*([_measured(ahead)] if ahead else []), *(_line(i, c, answer) for i, c in enumerate(answer.choices))]
    print_table(rows, [k for k in rows[0] if k not in _SILENT or any(row[k] != "1" for row in rows)])
    if ahead:
        say(f"\npublished is faster than plan 1 is predicted to be: {_foretold(ahead)}; start from what its page says")
    parts = sorted(best.time.parts.items(), key=lambda p: -p[1])
    step = best.time.seconds.value
    say(
        f"\ntime     {step:.2f} s a step: {', '.join(f'{PARTS[k]} {v / step:.0%}' for k, v in parts[:_TOP_PARTS])}, the rest"
        f" {sum(v for _, v in parts[_TOP_PARTS:]) / step:.0%}"
    )
    if whole:
        say(f"train    {takes(whole, q.cluster)}")
    sent = network_share(best.plan, q.cluster)
    if sent is not None:
        over = "".join(f"; {name} crosses it in every layer" for name in crossing(best.plan, q.cluster))
        say(f"network  costs {sent:.0%} of the step: what it would save if GPUs of other nodes were as near as those of one{over}")
    if q.routing:
        say(f"experts  {q.routing.about(best.plan, q.cluster)}")
    layout = pipeline_string(best.plan)
    if layout:
        say(f"pipeline {layout}")
    peaks = [s.peak / GIB for s in best.stages]
    shown = ", ".join(f"{p:.0f}" for p in peaks) if len(peaks) <= 16 else f"{min(peaks):.0f} to {max(peaks):.0f}"
    near = f"; within {AT_THE_LIMIT:.0%} of the limit of {q.capacity / GIB:.1f}, as far as estimates err"
    say(f"memory   {shown} of {q.cluster.memory_gib:.0f} GiB by stage{near if at_the_limit(best.peak, q.capacity) else ''}")
    for line in _against(answer, other, claims):
        say(line)
    measure = next_run(answer)
    if measure:
        say(
            f"ties     {count(len(answer.tied_indices), 'plan')} marked * cannot be told apart; next, run 1 and"
            f" {answer.choices.index(measure[1]) + 1} for 20 steps each: they differ most in {PARTS[measure[2]]}"
        )
    if answer.anchored:
        say(f"anchored {answer.anchored}")
    if published:
        _ran(q, runs, fp8=bool(best.plan.options.fp8))
    for assumption in best.time.assumptions:
        say(f"assumes  {assumption}")
    say(f"check    playbook layout memory --model {q.model} {' '.join(words(best.plan))}")
    trainers = dict.fromkeys([*run_by(best.plan, q.cluster.name), *((other or {}).get("trainers") or [])])
    if trainers:
        say(f"start    add --export TRAINER to this command for a script of the best layout that TRAINER takes: {', '.join(trainers)}")


def _against(answer: Answer, other: dict[str, Any] | None, claims: list[dict[str, Any]]) -> Iterator[str]:
    """What the first plan is set against: the second, the other backend's best, and what was measured."""
    if len(answer.choices) > 1 and answer.question.goal == "tokens/s":
        yield f"second   {lost(answer.choices[0], answer.choices[1])}"
    if other:
        yield f"other    {other['sentence']}"
    for claim in claims:
        yield f"claim    {claim['words']}"


def _ran(q: Question, runs: Published | None, *, fp8: bool) -> None:
    """Print the nearest published runs, a line each."""
    if not runs:
        say(f"ran      no published run of {q.model} on {q.cluster.name} in {'fp8' if fp8 else 'bf16'}")
    for row in runs.rows if runs else ():
        say(f"ran      {row.words(q)} {row.link}")


def _line(place: int, choice: Choice, answer: Answer) -> dict[str, str]:
    """One plan as a row of the table; a star marks plans that cannot be told apart."""
    plan, speed = choice.plan, choice.time.tokens_per_s_per_gpu
    tied = len(answer.tied_indices) > 1 and place in answer.tied_indices
    o = plan.options
    extra = [
        o.dispatcher if o.dispatcher not in ("", "alltoall") else "",
        "overlap" if o.ep_overlap else "",
        o.fp8,
        "Megatron-FSDP, slower than predicted where measured (M1.s)" if o.sharding == "fsdp" else "",
        "optimizer on host" if o.optimizer_offload else "",
        f"recompute {'+'.join(o.recompute)}" if o.recompute else "",
        "memory at the limit" if at_the_limit(choice.peak, answer.question.capacity) else "",
    ]
    degrees = {"tp": plan.tp, "cp": plan.cp, "pp": plan.pp, "vpp": plan.vpp, "ep": plan.ep, "etp": plan.etp, "dp": plan.dp, "mbs": plan.mbs}
    return {
        "": f"{place + 1}{'*' if tied else ''}",
        **{k: str(v) for k, v in degrees.items()},
        "tokens/s/GPU": f"{speed.value:,.0f}",
        "80 %": f"{speed.low:,.0f} to {speed.high:,.0f}",
        "MFU": f"{choice.time.mfu:.0%}",
        "GiB": f"{choice.peak / GIB:.0f}",
        "with": ", ".join(filter(None, extra)),
    }


def _measured(row: Row) -> dict[str, str]:
    """A published run as the first line of the table: degrees that it does not state have a dash."""
    degrees = {k: row.run.word(k) or "-" for k in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp", "mbs")}
    silent = {k: "1" if k in _SILENT and v == "-" else v for k, v in degrees.items()}
    return {
        "": "published", **silent, "tokens/s/GPU": f"{row.tokens_per_s_per_gpu:,.0f}", "80 %": "measured",
        "MFU": f"{row.mfu:.0%}", "GiB": "-",
        "with": ", ".join(word.partition("=")[2] if word.startswith("dispatcher") else word.replace("=", " ") for word in row.options),
    }  # fmt: skip


def _foretold(row: Row) -> str:
    """How far the prediction of a published run lies from it."""
    if row.predicted is None:
        return f"{row.id} states no batch, so it has no prediction"
    far = row.predicted / row.tokens_per_s_per_gpu - 1
    return f"of {row.id} the planner says {row.predicted:,.0f}, {abs(far):.0%} too {'slow' if far < 0 else 'fast'}, that run left out"


def _explain(answer: Answer) -> None:
    """Nothing fits: the nearest, and what is in the way."""
    q, near = answer.question, answer.obstacle
    if near is None:
        rules = "".join(f"\n  - {sentence}" for sentence in answer.broken_rules)
        raise ConfigError(
            f"no layout of {q.model} is legal on {q.gpus} GPUs with a global batch of {q.global_batch}; change --gpus, --gbs or --fix."
            f" What most layouts break:{rules}"
        )
    say(
        f"nothing fits: {answer.counts.legal:,} legal layouts of {q.model} on {q.gpus} {q.cluster.name}, none under"
        f" {q.capacity / GIB:.1f} GiB"
    )
    say(f"nearest  {' '.join(words(near.plan))}")
    stage, gib = near.stage, {k: v / GIB for k, v in near.stage.row().items() if isinstance(v, float)}
    say(
        f"needs    {stage.peak / GIB:.1f} GiB on stage {stage.number}, {(stage.peak - q.capacity) / GIB:.1f} too many: parameters"
        f" {gib['parameters']:.1f}, gradients {gib['gradients']:.1f}, optimizer {gib['optimizer']:.1f}, activations"
        f" {gib['activations']:.1f}, loss or replay {gib['transient']:.1f}"
    )
    say(
        f"fits     with {', or '.join(near.ways)}" if near.ways else "fits     with nothing that is known here: a smaller model or sequence"
    )


@app.command("check")
def plan_check(
    runs: Annotated[Path, typer.Argument(metavar="RUNS.csv", help="A table of runs, one a row; empty cells are unknown.")],
    hardware: Annotated[
        str, typer.Option("--hardware", "--gpu", help="A kind of GPU or a file of it, for the rows that name that kind or none.")
    ] = "",
    network: Network = "",
    anchor: Annotated[Path | None, typer.Option("--anchor", help="A table of measured runs to scale the predictions to.")] = None,
    leave_one_out: Annotated[
        bool,
        typer.Option("--leave-one-out", help="Scale each row to the other rows (of --anchor, if given), its own configuration left out."),
    ] = False,
    leave_source_out: Annotated[
        bool, typer.Option("--leave-source-out", help="The same, with everything of the row's own source left out.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Predict every row of a table of runs, and compare with what was measured: errors by group, order of layouts, what cannot be told.

    Errors count the newest release of each configuration. No prediction reads what its row measured.
    """
    if network and not hardware:
        raise ConfigError("--network speaks of the machines that --hardware names; add --hardware KIND or FILE")
    on = machine(hardware, network) if hardware else None
    rows = accuracy.check(runs, on=on, anchor=anchor, leave_out="source" if leave_source_out else "configuration" if leave_one_out else "")
    if as_json:
        print_json(accuracy.document(rows))
    else:
        _show_runs(rows)


@app.command("rl")
def plan_rl(
    model: _Model,
    gpus: _Gpus = "",
    hardware: _Hardware = "",
    network: Network = "",
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts of a step.")] = 128,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Responses of a prompt.")] = 8,
    prompt: Annotated[int, typer.Option("--prompt", parser=to_tokens, metavar="TOKENS", help="Tokens of a prompt.")] = 512,
    mean: Annotated[int, typer.Option("--mean", parser=to_tokens, metavar="TOKENS", help="Tokens of a response, on average.")] = 2048,
    longest: Annotated[
        int | None,
        typer.Option("--longest", parser=to_tokens, metavar="TOKENS", help="Tokens of the longest; by default four times the mean."),
    ] = None,
    passes: Annotated[int, typer.Option("--passes", min=0, max=4, help="Forward passes for old and reference log-probabilities.")] = 2,
    as_json: AsJson = False,
) -> None:
    """What a step of reinforcement learning should take by arithmetic: its phases, the wall, what waits by placement, both engines' memory.

    Rollout and weight transfer are by bandwidth alone, log-probabilities and update by the planner's fastest layout; rewards are left out.
    """
    number, kind = machines(gpus or None, hardware or None)
    shape, cluster, count_gpus = find(model), machine(kind or _KIND, network), number or _GPUS
    rollouts = rl_plan.Rollouts(prompts * samples, prompt, mean, 4 * mean if longest is None else longest)
    if rollouts.longest < mean:
        raise ConfigError(f"the longest response has {longest} tokens and the mean {mean}; expected at least as many (--longest)")
    best = plan_layouts(Question(shape, model, cluster, count_gpus, prompt + mean, rollouts.responses), 1).choices
    if not best:
        raise ConfigError(f"no layout of {model} fits {count_gpus} {cluster.name}; expected more GPUs, or name another model")
    step = rl_plan.step(shape, cluster, count_gpus, rollouts, best[0].speed, passes)
    engine = rl_plan.placed(shape, cluster, count_gpus, rollouts)
    answer = rl_step.diagnose(step) | {
        "steps": 1,
        "trainer": words(best[0].plan),
        "memory": rl_plan.memory(best[0].peak, cluster.memory_gib, engine.tp, engine.stored, int(engine.at_once * (prompt + mean))),
    }
    if as_json:
        return print_json(answer)
    show_rl_step(answer, "by arithmetic: rollout and transfer by bandwidth alone, the rest by the planner, without rewards")


@app.command("run")
def plan_run(
    name: Annotated[str, typer.Argument(metavar="ID", help="A published run, as plans and diagnoses name it, such as r294.")],
    as_json: AsJson = False,
) -> None:
    """Show one published run: what was set and measured, its page, and what is predicted for it."""
    run = one(name)
    if as_json:
        print_json(run)
        return
    wide = max(map(len, run))
    for key, value in run.items():
        for part in value if isinstance(value, list) else [value]:
            if part and key != "schema":
                say(f"{key:{wide}}  {f'{part:,.0f} tokens/s/GPU' if isinstance(part, float) else part}")


def _show_runs(rows: list[accuracy.Row]) -> None:
    """Print predictions beside measured runs: a row for each where they are few, errors by group, and the order of layouts."""
    predicted = [r for r in rows if r.prediction]
    say(
        f"{count(len(rows), 'run')}: {len(predicted)} predicted, {sum(r.counts for r in rows)} of them measured and the newest of their"
        " configuration"
    )
    written = [r.run.sealed for r in rows if r.run.sealed]
    if written:
        days = sorted({s.day for s in written})
        open_ = sum(not r.counts for r in predicted)
        say(
            f"written down {' to '.join(dict.fromkeys((days[0], days[-1])))}, seal {written[-1].seal[:16]} holds; {count(open_, 'row')}"
            " without a figure yet"
        )
    if predicted and (written or len(rows) <= _LISTED):
        print_table([_run_line(r) for r in predicted], tuple(_run_line(predicted[0])))
        say("")
    for note in dict.fromkeys(w for r in predicted if r.prediction for w in r.prediction.cluster.notes):
        say(note)
    whole = accuracy.total(rows)
    if whole:
        figures = [*accuracy.groups(rows), whole]
        print_table([_group_line(g) for g in figures], tuple(_group_line(whole)))
    order = accuracy.ranking(rows)
    if order:
        say(
            f"order of layouts in {count(order['groups'], 'group')} of 3 or more: the choice is within 5 % of the best in"
            f" {order['winner_within_5_percent']:.0%}, {order['mean_regret']:.1%} slower on average; correlation of ranks"
            f" {order['order']:.2f} within groups, {order['spearman']:.2f} over all rows"
        )
    over = accuracy.impossible(rows)
    if over:
        say(f"ran, but do not fit by the planner: {', '.join(r.run.id for r in over)}")
    for why, number in Counter(r.why for r in rows if r.why).most_common():
        say(f"{number} not predicted: {why}")


def _run_line(row: accuracy.Row) -> dict[str, str]:
    interval, measured = row.interval, speed(row.prediction, row.measured) if row.prediction else None
    predicted = {
        "run": row.run.id,
        "predicted tokens/s/GPU": f"{interval.value:,.0f}",
        "80 %": f"{interval.low:,.0f} to {interval.high:,.0f}",
    }
    if measured is None:
        return {**predicted, "measured": "-", "difference": "-", "inside": "-"}
    return {**predicted, "measured": f"{measured:,.0f}", "difference": f"{row.difference:+.1%}", "inside": "yes" if row.covered else "no"}


def _group_line(group: dict[str, Any]) -> dict[str, str]:
    constant = group["constant_mfu"]
    return {
        "group": group["group"], "runs": str(group["runs"]), "median error": f"{group['median_error']:.1%}",
        "p90": f"{group['p90_error']:.1%}",
        "bias": f"{group['bias']:+.1%}", "in 80 % interval": f"{group['covered']:.0%}", "high / low": f"{group['width']:.2f}",
        "constant MFU": f"{constant['median_error']:.1%}", "its p90": f"{constant['p90_error']:.1%}",
    }  # fmt: skip
