"""`playbook plan MODEL`: the fastest layouts of a model on a cluster, with speed, memory and what they rest on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from playbook import files
from playbook.cli.options import AsJson, Imbalance, Network, machines, tokens
from playbook.cli.output import USAGE, print_json, print_table, say
from playbook.errors import ConfigError
from playbook.planner.shapes import DEEPEST
from playbook.text import count

if TYPE_CHECKING:
    from playbook.diagnosis.published import Published, Row
    from playbook.planner.choice.explain import Answer
    from playbook.planner.choice.search import Choice
    from playbook.planner.plan import Plan

_GIB = 1 << 30
_TOP_PARTS = 5
_MEMORY = 0.92
_GPUS, _KIND = 8, "h100"
"""What is planned for where nothing is said."""
_SILENT = ("cp", "vpp", "ep", "etp")
"""Degrees that are not shown where all plans have one."""

_Model = Annotated[str, typer.Argument(metavar="MODEL", help="A preset, a published name, or the path of a config.json.")]
_Gpus = Annotated[str, typer.Option("--gpus", metavar="N", help="Number of GPUs, or both as 64xH100; with --goal gpus it is found.")]
_Hardware = Annotated[
    str, typer.Option("--hardware", "--gpu", help="Kind of GPU, such as h100, or a file: a calibration, or a hardware file.")
]
_Seq = Annotated[int, typer.Option("--seq", parser=tokens, metavar="TOKENS", help="Tokens of a sequence, such as 4096 or 128K.")]
_Gbs = Annotated[int, typer.Option("--gbs", min=0, max=1 << 30, help="Samples of a step; 0 for four million tokens.")]
_Goal = Annotated[str, typer.Option("--goal", help="tokens/s, memory (the leanest), or gpus (the fewest that hold it).")]
_Memory = Annotated[float, typer.Option("--memory", help="Share of the GPU's memory that a plan may allocate.")]
_Fix = Annotated[list[str] | None, typer.Option("--fix", help="A setting to keep, such as tp=1; may be given again, or with commas.")]
_Backend = Annotated[str, typer.Option("--backend", help="megatron, or torch (FSDP2).")]
_Allow = Annotated[str, typer.Option("--allow", help="Widen: fp8, bf16-moments, bf16-gradients, offload, graphs; with commas.")]
_Anchor = Annotated[Path | None, typer.Option("--anchor", help="A table of your own measured runs; predictions are scaled to them too.")]
_Published = Annotated[
    bool, typer.Option("--published/--no-published", help="Scale predictions to published runs of their kind, and show the nearest.")
]
_Top = Annotated[int, typer.Option("--top", min=1, max=50, help="Number of plans.")]
_Layers = Annotated[
    int | None, typer.Option("--layers", min=1, max=DEEPEST, help="Cut the model to so many layers, to try it on few GPUs.")
]
_Export = Annotated[
    str | None, typer.Option("--export", help="Print the best plan as a script: megatron-lm, megatron-bridge, playbook and others.")
]
_Slurm = Annotated[bool, typer.Option("--slurm", help="Make the script of --export one for sbatch.")]
_EmitCase = Annotated[
    Path | None,
    typer.Option("--emit-case", metavar="FILE.yaml", help="Write a bench case of the best plan and the next, with their predicted speeds."),
]
_CaseGpus = Annotated[int, typer.Option("--case-gpus", min=1, max=1 << 20, help="GPUs at hand, to which --emit-case cuts the plans.")]
_Against = Annotated[
    list[str] | None, typer.Option("--against", help="Your own layout for --emit-case instead of the next plan, such as tp=2,mbs=1.")
]


def plan_for(
    model: _Model,
    gpus: _Gpus = "",
    hardware: _Hardware = "",
    network: Network = "",
    imbalance: Imbalance = "",
    seq: _Seq = 4096,
    gbs: _Gbs = 0,
    goal: _Goal = "tokens/s",
    memory: _Memory = _MEMORY,
    fix: _Fix = None,
    backend: _Backend = "megatron",
    allow: _Allow = "",
    anchor: _Anchor = None,
    published: _Published = True,
    top: _Top = 5,
    layers: _Layers = None,
    export: _Export = None,
    slurm: _Slurm = False,
    emit_case: _EmitCase = None,
    case_gpus: _CaseGpus = 1,
    against: _Against = None,
    as_json: AsJson = False,
) -> None:
    """Search every layout for the fastest that fits: speed with its 80 % interval, memory by stage, and why the next one lost.

    Numerics stay BF16 with float32 master weights, gradients and moments unless --allow widens them. Exit code 2 where nothing fits.
    """
    from playbook.planner.choice import explain, plain_data
    from playbook.planner.choice.routing import measured
    from playbook.planner.choice.space import Question
    from playbook.planner.hardware.named import machine
    from playbook.planner.models import find, named

    shape = find(model) if layers is None else find(model).of_depth(layers)
    name = named(model) or (Path(model).resolve().parent.name if Path(model).name == "config.json" else Path(model).stem)
    fixed = _fixed(tuple(_words(fix or [])), export)
    allowed = frozenset(a for a in allow.split(",") if a)
    number, kind = machines(gpus or None, hardware or None)
    routing = measured(imbalance) if imbalance else None
    question = Question(
        shape, name, machine(kind or _KIND, network), number or _GPUS, seq, gbs, goal, memory, backend, fixed, allowed, routing
    )
    if emit_case is None and (against or case_gpus != 1):
        raise ConfigError(
            "--against and --case-gpus speak of the case that --emit-case writes; add --emit-case FILE.yaml, or leave them out"
        )
    if slurm and export is None:
        raise ConfigError("--slurm speaks of the script that --export prints; add --export, or leave it out")
    found = explain.answer(question, top)
    if anchor is not None and emit_case is not None:
        raise ConfigError("--emit-case predicts from constants alone; leave out --anchor")
    if emit_case is None and (anchor is not None or published):
        found = _anchored(found, anchor, published)
    if emit_case is not None and found.choices:
        _emit(found, emit_case, case_gpus, _words(against or []))
    elif export is not None and found.choices:
        _print_export(found.choices[0].plan, export, question.cluster.name, slurm=slurm)
    elif as_json or found.choices:
        runs = _nearest(found) if published else None
        print_json(plain_data.document(found, runs.document(question) if runs else None)) if as_json else _show(
            found, runs, published=published
        )
    else:
        _explain(found)
    if not found.choices:
        raise typer.Exit(USAGE)


def _fixed(words: tuple[str, ...], export: str | None) -> tuple[str, ...]:
    """What the reader fixed, and what every run of the trainer has that the plan is for."""
    if export is None:
        return words
    from playbook_trainer.export.plans import SETTINGS

    named = {word.partition("=")[0] for word in words}
    return words + tuple(word for word in SETTINGS.get(export, ()) if word.partition("=")[0] not in named)


def _words(given: list[str]) -> list[str]:
    """`tp=1,ep=8` as two words; a comma inside a value, such as `recompute=moe_act,layernorm`, stays."""
    words: list[str] = []
    for part in (p for text in given for p in text.split(",") if p):
        if "=" in part or not words:
            words.append(part)
        else:
            words[-1] += f",{part}"
    return words


def _anchored(found: Answer, path: Path | None, published: bool) -> Answer:
    from playbook.planner.choice.anchored import anchored

    return anchored(found, path, with_published=published)


def _nearest(found: Answer) -> Published | None:
    from playbook.diagnosis.published import of_plan

    return of_plan(found)


def _print_export(plan: Plan, target: str, hardware: str, *, slurm: bool) -> None:
    from playbook_trainer.export.plans import launchable

    say(launchable(plan, target, hardware).text(slurm=slurm).rstrip())


def _emit(found: Answer, path: Path, gpus: int, against: list[str]) -> None:
    from playbook.cli.plans.emit import case_of, text_of

    q = found.question
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*\.yaml", path.name):
        raise ConfigError(
            f"--emit-case {path.name[:80]}: the file's name is the case's id; expected small letters, digits and hyphens, and .yaml"
        )
    case = case_of(found, path.stem, gpus, against)
    said = {"--gpus": q.gpus, "--hardware": q.cluster.option, "--seq": q.seq_len, "--gbs": q.gbs, "--backend": q.backend}
    said |= {} if q.memory_share == _MEMORY else {"--memory": f"{q.memory_share:g}"}
    said |= {} if q.goal == "tokens/s" else {"--goal": q.goal}
    said |= {"--fix": ",".join(q.fixed), "--allow": ",".join(sorted(q.allow)), "--against": ",".join(against)}
    words = " ".join(f"{k} {v}" for k, v in said.items() if v)
    text = text_of(case, f"playbook plan {q.model} {words} --emit-case {path.name} --case-gpus {gpus}")
    try:
        files.replace(path, text)
    except OSError as e:
        raise ConfigError(f"--emit-case {path}: {e.strerror or e}") from e
    for run in case["values"]:
        p = run["predicted"]
        say(f"{run['at']}: {p['value']:,.0f} tokens/s/GPU predicted, 80 % between {p['low']:,.0f} and {p['high']:,.0f}")
    say(f"wrote {path}; settle it with: playbook bench run {path}")


def _show(found: Answer, runs: Published | None, *, published: bool) -> None:
    from playbook.planner.choice.explain import PARTS, lost, next_run
    from playbook.planner.choice.plain_data import pipeline_string
    from playbook.planner.time.step import network_share

    q, best = found.question, found.choices[0]
    say(
        f"{q.model} on {q.gpus} {q.cluster.name}, {q.seq_len} tokens, global batch {q.global_batch}: {found.counts.enumerated:,} combinations,"
        f" {found.counts.legal:,} legal layouts, {found.counts.fitting:,} fit {q.capacity / _GIB:.1f} GiB, {found.counts.timed:,} plans timed"
    )
    rows = [_line(i, c, tied=len(found.ties) > 1 and i in found.ties) for i, c in enumerate(found.choices)]
    ahead = runs.ahead(q.gpus, best.speed) if runs and q.goal == "tokens/s" else None
    rows = [*([_measured(ahead)] if ahead else []), *rows]
    print_table(rows, [k for k in rows[0] if k not in _SILENT or any(row[k] != "1" for row in rows)])
    if ahead:
        say(f"\npublished is faster than plan 1 is predicted to be: {_foretold(ahead)}; start from what its page says")
    parts = sorted(best.time.parts.items(), key=lambda p: -p[1])
    step = best.time.seconds.value
    say(
        f"\ntime     {step:.2f} s a step: {', '.join(f'{PARTS[k]} {v / step:.0%}' for k, v in parts[:_TOP_PARTS])}, the rest"
        f" {sum(v for _, v in parts[_TOP_PARTS:]) / step:.0%}"
    )
    sent = network_share(best.plan, q.cluster)
    if sent is not None:
        say(f"network  costs {sent:.0%} of the step: what it would save if GPUs of other nodes were as near as those of one")
    if q.routing:
        say(f"experts  {q.routing.about(best.plan, q.cluster)}")
    layout = pipeline_string(best.plan)
    if layout:
        say(f"pipeline {layout}")
    peaks = [s.peak / _GIB for s in best.stages]
    shown = ", ".join(f"{p:.0f}" for p in peaks) if len(peaks) <= 16 else f"{min(peaks):.0f} to {max(peaks):.0f}"
    say(f"memory   {shown} of {q.cluster.memory_gib:.0f} GiB by stage")
    if len(found.choices) > 1 and q.goal == "tokens/s":
        say(f"second   {lost(best, found.choices[1])}")
    measure = next_run(found)
    if measure:
        say(
            f"ties     {count(len(found.ties), 'plan')} marked * cannot be told apart; next, run 1 and"
            f" {found.choices.index(measure[1]) + 1} for 20 steps each: they differ most in {PARTS[measure[2]]}"
        )
    if found.anchored:
        say(f"anchored {found.anchored}")
    if published and not runs:
        say(f"ran      no published run of {q.model} on {q.cluster.name} in {'fp8' if best.plan.options.fp8 else 'bf16'}")
    for row in runs.rows if runs else ():
        other = row.other(q)
        say(
            f"ran      {row.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, {row.seq_len:,} tokens, on {row.gpus or '?'} {row.hardware}{f' ({other})' if other else ''}:"
            f" {row.layout or 'nothing of its layout is said'} ({row.id}, {row.link})"
        )
    for words in best.time.assumptions:
        say(f"assumes  {words}")
    say(f"check    playbook layout memory --model {q.model} {_settings(best.plan)}")


def _settings(plan: Plan) -> str:
    from playbook.planner.choice.plain_data import words

    return " ".join(words(plan))


def _line(place: int, choice: Choice, *, tied: bool) -> dict[str, str]:
    plan, speed = choice.plan, choice.time.tokens_per_s_per_gpu
    o = plan.options
    extra = [o.dispatcher if o.dispatcher not in ("", "alltoall") else "", "overlap" if o.ep_overlap else "", o.fp8]
    extra += ["optimizer on host" if o.optimizer_offload else "", f"recompute {'+'.join(o.recompute)}" if o.recompute else ""]
    degrees = {"tp": plan.tp, "cp": plan.cp, "pp": plan.pp, "vpp": plan.vpp, "ep": plan.ep, "etp": plan.etp, "dp": plan.dp, "mbs": plan.mbs}
    return {
        "": f"{place + 1}{'*' if tied else ''}",
        **{k: str(v) for k, v in degrees.items()},
        "tokens/s/GPU": f"{speed.value:,.0f}",
        "80 %": f"{speed.low:,.0f} to {speed.high:,.0f}",
        "MFU": f"{choice.time.mfu:.0%}",
        "GiB": f"{choice.peak / _GIB:.0f}",
        "with": ", ".join(filter(None, extra)),
    }


def _measured(row: Row) -> dict[str, str]:
    """A published run as the first line of the table: degrees that it does not state have a dash."""
    degrees = {k: row.run.word(k) or "-" for k in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp", "mbs")}
    silent = {k: "1" if k in _SILENT and v == "-" else v for k, v in degrees.items()}
    return {
        "": "published", **silent, "tokens/s/GPU": f"{row.tokens_per_s_per_gpu:,.0f}", "80 %": "measured", "MFU": f"{row.mfu:.0%}", "GiB": "-",
        "with": ", ".join(word.partition("=")[2] if word.startswith("dispatcher") else word.replace("=", " ") for word in row.options),
    }  # fmt: skip


def _foretold(row: Row) -> str:
    """How far the prediction of a published run lies from it."""
    if row.predicted is None:
        return f"{row.id} states no batch, so it has no prediction"
    far = row.predicted / row.tokens_per_s_per_gpu - 1
    return f"of {row.id} the planner says {row.predicted:,.0f}, {abs(far):.0%} too {'slow' if far < 0 else 'fast'}, that run left out"


def _explain(found: Answer) -> None:
    """Nothing fits: the nearest, and what is in the way."""
    q, near = found.question, found.obstacle
    if near is None:
        rules = "".join(f"\n  - {sentence}" for sentence in found.broken)
        raise ConfigError(
            f"no layout of {q.model} is legal on {q.gpus} GPUs with a global batch of {q.global_batch}; change --gpus, --gbs or --fix."
            f" What most layouts break:{rules}"
        )
    say(
        f"nothing fits: {found.counts.legal:,} legal layouts of {q.model} on {q.gpus} {q.cluster.name}, none under {q.capacity / _GIB:.1f} GiB"
    )
    say(f"nearest  {_settings(near.plan)}")
    stage, gib = near.stage, {k: v / _GIB for k, v in near.stage.row().items() if isinstance(v, float)}
    say(
        f"needs    {stage.peak / _GIB:.1f} GiB on stage {stage.stage}, {(stage.peak - q.capacity) / _GIB:.1f} too many: parameters"
        f" {gib['parameters']:.1f}, gradients {gib['gradients']:.1f}, optimizer {gib['optimizer']:.1f}, activations {gib['activations']:.1f},"
        f" loss or replay {gib['transient']:.1f}"
    )
    say(
        f"fits     with {', or '.join(near.ways)}" if near.ways else "fits     with nothing that is known here: a smaller model or sequence"
    )
