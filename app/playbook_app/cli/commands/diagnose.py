"""`playbook diagnose`: where a run's speed stands, which wall is likely and how to tell, and what to try first."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import typer

from playbook.diagnosis import rl_plan, rl_step
from playbook.diagnosis.answer import Seen, diagnose
from playbook.diagnosis.seen import KINDS, parsed
from playbook.diagnosis.setting import Figures, Measured, Setting, measured, setting
from playbook.errors import ConfigError, LogError
from playbook.files import read_bytes
from playbook.planner import memory
from playbook.planner.choice.plain_data import words
from playbook.planner.choice.routing import Routing, of_run
from playbook.planner.choice.routing import measured as measured_routing
from playbook.planner.hardware import machine
from playbook.planner.models import find, named
from playbook.planner.options import FRAMEWORKS
from playbook.planner.plan import cut, idle, parse
from playbook.planner.time.cluster import Cluster
from playbook.text import count, key_of, keys_of
from playbook_app.cli.options import AsJson, Experts, Imbalance, Layers, Network, commands, cuts
from playbook_app.cli.output import print_json, print_table, say
from playbook_app.cli.quantities import figure, machines, percent, to_tokens
from playbook_app.services.changes import changed
from playbook_app.services.standing import stock_here
from playbook_bench.logs import NoAdapter, read, rl_steps
from playbook_bench.logs.fields import Facts
from playbook_trainer.config.dry_run import plan_of
from playbook_trainer.config.tree import load
from playbook_trainer.export.plans import SETTINGS

app = commands()

_WARM_UP = 5
"""One of so many steps, the first ones, is not counted, as in `playbook ab`."""
_FEW = 20
"""Steps from which on their spread says something."""
_GROWTH = 0.02
"""Share by which memory must grow for it to be said."""
_SHOWN = 3
_SEQ = 4096
"""Tokens of a sequence where nobody says."""
_LIKE = 0.2
"""Share by which two figures of one log may differ: checkpoints between its steps count in one and not in the other."""
_FEWEST = 0.4
"""Share of a batch's tokens that may count: a trainer may leave out padding and prompts."""
_OTHER_COUNT = 1.8
"""Factor between ways to count FLOPs: attention causal or not, long sequences."""
_TENTH = 0.1
"""Of a sample: what a batch by its tokens may be off."""
_NO_BATCH = "about four million tokens"
_STATED = (
    ("gbs", "gbs", "a global batch of {} samples"),
    ("seq", "seq_len", "sequences of {} tokens"),
    ("gpus", "gpus", "{} GPUs"),
)
"""For each fact of a log the option that names it as well, the word of a layout, and what it is."""
_MAX_SUMMARY = 10_000_000
_METRICS = "metrics.jsonl"
_AB = "playbook ab -- COMMAND --vs"
"""The beginning of a matched pair of the run's own command; what it changes is printed above it."""


@dataclass(frozen=True)
class _Log:
    """What a log says of the speed. Units: seconds; tokens per second and GPU, or tokens of a step of the whole job."""

    seconds: float | None
    tokens: float | None
    rate: float | None
    rate_of_any: float | None
    """Tokens per second of the job or of one GPU: the log does not say which."""
    flops: float | None
    """FLOP/s of one GPU, as the trainer counts them."""
    facts: Facts
    uneven: float | None
    grown: tuple[float, float] | None
    """Peak bytes of its first and of its last quarter, where memory grew."""
    notes: tuple[str, ...]


@app.command("diagnose")
def diagnose_run(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run's folder, or its log: its speed, and of a run of ours the layout too.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="A preset, a name of the Hugging Face hub, or a config.json's path.")] = None,
    gpus: Annotated[str | None, typer.Option("--gpus", metavar="N", help="GPUs of the whole job; 64xH100 names the kind too.")] = None,
    hardware: Annotated[
        str | None, typer.Option("--gpu", "--hardware", help="Kind of GPU, such as h100, or a file: a calibration, or a hardware file.")
    ] = None,
    seq: Annotated[
        int | None, typer.Option("--seq", parser=to_tokens, metavar="TOKENS", help="Tokens of a sequence; 4096, if not given.")
    ] = None,
    gbs: Annotated[
        int | None, typer.Option("--gbs", min=1, max=1 << 30, help="Samples of a step; the log's, else four million tokens, if not given.")
    ] = None,
    mfu: Annotated[
        float | None,
        typer.Option("--mfu", parser=percent, metavar="PERCENT", help="Percent of the GPU's dense peak, such as 22, without recompute."),
    ] = None,
    step_time: Annotated[str | None, typer.Option("--step-time", help="Seconds of a step, such as 1.9s or 850ms.")] = None,
    tokens: Annotated[
        float | None, typer.Option("--tokens-per-s", parser=figure, metavar="TOKENS", help="Tokens per second and GPU.")
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option("--layout", help="What the run sets, such as tp=2,ep=8,recompute=full; as plans and published runs are printed."),
    ] = None,
    layers: Layers = None,
    experts: Experts = None,
    network: Network = "",
    imbalance: Imbalance = "",
    saw: Annotated[
        list[str] | None, typer.Option("--saw", help=f"Shares of a step, such as all-to-all=40%,idle=25%; of {', '.join(KINDS)}.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="A trace of some steps: .sqlite of nsys, its .nsys-rep where nsys is installed, or a Chrome trace."),
    ] = None,
    log: Annotated[
        str | None, typer.Option("--log", help="Kind of RUN's log, such as jsonl, hf, megatron or regex:PATTERN; found out, if not given.")
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option("--framework", help=f"Your trainer, and whose flags: {', '.join(FRAMEWORKS)}; of a run of ours, playbook."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say where a run stands between published runs and the prediction, which wall is likely and how to tell, and what to try first."""
    number, kind = machines(gpus, hardware)
    if run is not None and not run.exists():
        raise LogError(f"{run}: there is no such file or folder; expected a log, or the folder of a run")
    settings = [word for text in layout or [] for word in split_settings(text)]
    if run is not None and trace is None and (steps := rl_steps(run, log)):
        step = answer(steps, model, number, kind, settings, seq)
        print_json(step) if as_json else show_rl_step(step)
        return
    request = _Request(model, number, kind, seq, gbs, (*settings, *cuts(layers, experts)), framework, network, imbalance)
    logged = _log(run, log) if run else None
    where = replace(_where(_with_log(request, logged), run), seen=parsed(saw or []))
    figures = Figures(mfu, None if step_time is None else _seconds(step_time), tokens)
    if logged is not None and figures == Figures():
        figures = Figures(step_s=logged.seconds, tokens_per_s_per_gpu=_rate(logged, where), said=str(run))
    speed = measured(where, figures)
    if logged is not None and speed is not None and figures.said:
        _agree(where, speed, logged)
    observed = Seen(
        _walls(trace) if trace else None,
        logged.notes if logged else (),
        logged.uneven if logged else None,
        logged.grown if logged else None,
    )
    diagnosis = diagnose(where, speed, stock_here(), changed, observed)
    print_json(diagnosis) if as_json else _show(diagnosis)


@dataclass(frozen=True)
class _Request:
    """What the command line says of the setting."""

    model: str | None
    gpus: int | None
    hardware: str | None
    seq: int | None
    gbs: int | None
    settings: tuple[str, ...]
    framework: str | None
    network: str = ""
    imbalance: str = ""


def _with_log(request: _Request, log: _Log | None) -> _Request:
    """What is asked, with the GPUs, sequences and batch that a log states: what the run itself wrote goes before what would be assumed.

    Raises:
        ConfigError: the command line names others, or the log's tokens make no sample.
    """
    if log is None:
        return request
    for key, word, unit in _STATED:
        stated, named = getattr(log.facts, key), _named(request, key, word)
        if stated and named and named != stated:
            raise ConfigError(f"the log has {unit.format(stated)}, and --{key} is {named}; leave --{key} out")
        if stated and named is None and request.model:
            request = replace(request, **{key: stated})
    gpus = _named(request, "gpus", "gpus")
    rate = log.rate or (log.rate_of_any if gpus == 1 else None)
    tokens = log.tokens or (rate * log.seconds * gpus if rate and gpus and log.seconds else None)
    if log.facts.gbs and tokens and request.model and _named(request, "seq", "seq_len") is None:
        return replace(request, seq=max(1, round(tokens / log.facts.gbs)))
    if _named(request, "gbs", "gbs") or not (tokens and request.model):
        return request
    each = _named(request, "seq", "seq_len") or _SEQ
    if tokens < each / 2:
        raise ConfigError(f"the log's steps have {tokens:,.0f} tokens, which is no sequence of {each}; name its length with --seq")
    return replace(request, gbs=max(1, ceil(tokens / each - _TENTH)))


def _named(request: _Request, key: str, word: str) -> int | None:
    """A count by a word of the layout, or by its option."""
    return next((int(w.partition("=")[2]) for w in request.settings if re.fullmatch(rf"{word}=[0-9]{{1,10}}", w)), getattr(request, key))


def _rate(log: _Log, where: Setting) -> float | None:
    """Tokens per second and GPU by the log; None where only its step time and the batch tell.

    Raises:
        ConfigError: a rate may be of the job or of one GPU, and nothing says which.
    """
    q = where.question
    if log.tokens and log.seconds:
        return log.tokens / log.seconds / q.gpus
    if log.rate or not log.rate_of_any:
        return log.rate
    named = _NO_BATCH not in "".join(where.assumed)
    job = q.global_batch * q.seq_len / log.seconds if log.seconds else 0.0
    if q.gpus == 1:
        return log.rate_of_any
    each = next((r for r in (log.rate_of_any, log.rate_of_any / q.gpus) if job and abs(r * q.gpus / job - 1) < _LIKE), None)
    if named and each:
        return each
    raise ConfigError(
        f"the log's {log.rate_of_any:,.0f} tokens/s may be of the job or of one GPU; "
        + ("neither fits its batch and its step time: check --gbs, --seq and --gpus" if named else "name the batch with --gbs, which tells")
    )


def _agree(where: Setting, speed: Measured, log: _Log) -> None:
    """Hold the figures that come out against others of the log.

    Raises:
        ConfigError: the log contradicts them.
    """
    q = where.question
    implied = log.tokens / log.seconds / log.rate if log.tokens and log.seconds and log.rate else q.gpus
    if abs(implied / q.gpus - 1) > _LIKE:
        raise ConfigError(
            f"the log's tokens, seconds and rate of a GPU are those of {implied:.3g} GPUs, and --gpus is {q.gpus}; check --gpus"
        )
    share = speed.tokens_per_s_per_gpu * speed.step_s * q.gpus / (q.global_batch * q.seq_len)
    if not _FEWEST < share < 1 + _LIKE:
        raise ConfigError(
            f"the log's steps have {share * q.global_batch * q.seq_len:,.0f} tokens, and {q.global_batch} samples of {q.seq_len} are"
            f" {q.global_batch * q.seq_len:,}; check --gbs, --seq and --gpus"
        )
    flops = speed.tokens_per_s_per_gpu * where.flops_per_token
    if log.flops and not 1 / _OTHER_COUNT < flops / log.flops < _OTHER_COUNT:
        raise ConfigError(
            f"the log says {log.flops / 1e12:,.0f} TFLOP/s on each GPU, and {q.global_batch} samples of {q.seq_len} tokens in"
            f" {speed.step_s:.3g} s on {q.gpus} GPUs are {flops / 1e12:,.0f}; check --model, --gbs, --seq and --gpus"
        )


def _where(request: _Request, run: Path | None) -> Setting:
    """The setting of the command line, or of a run's folder with what the command line says instead."""
    is_ours = run is not None and request.model is None and (run / "config.yaml").is_file()
    config, ran_on, device = _ours(run) if run and is_ours else (None, None, None)
    if request.model is None and not is_ours:
        raise ConfigError("no model is named; give --model, or the folder of a run of `playbook train`")
    gpus = request.gpus or ran_on
    hardware = request.hardware or device
    if hardware is None or (gpus is None and (is_ours or not any(w.startswith("gpus=") for w in request.settings))):
        raise ConfigError("the GPUs are not named; give --gpus N and --gpu KIND, such as --gpus 64 --gpu h100")
    if is_ours and gpus is not None:
        configured = _of_config(config, gpus, machine(hardware, request.network), request.framework or "playbook", _routing(request, run))
        return _again(configured, request) if request.settings or request.seq or request.gbs else configured
    model = request.model or ""
    path = Path(model)
    name = named(model) or (path.resolve().parent.name if path.name == "config.json" else path.stem)
    shape, framework = find(model), request.framework or "megatron-lm"
    shape, settings, less = cut(shape, request.settings)
    name += less  # a model that was cut is another one: no published run is of it
    return setting(
        shape, name, hardware, gpus, seq_len=request.seq, gbs=request.gbs, known=settings, framework=framework, said=model,
        always=SETTINGS.get(request.framework or "", ()), network=request.network, routing=_routing(request, run),
    )  # fmt: skip


def _routing(request: _Request, run: Path | None) -> Routing | None:
    """The routing that is named, else what a run of ours wrote down."""
    if request.imbalance:
        return measured_routing(request.imbalance)
    return of_run(run) if run and (run / _METRICS).is_file() else None


def split_settings(text: str) -> list[str]:
    """`tp=2,recompute=moe_act,layernorm` as words: a comma inside a value stays, and so does a published run's `bf16`, which is the
    default.
    """
    settings: list[str] = []
    for part in (p for p in re.split(r"[,\s]+", text) if p and p != "bf16"):
        if "=" in part or not settings:
            settings.append(part)
        else:
            settings[-1] += f",{part}"
    return settings


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(ms|s|)", text)
    if match is None:
        raise ConfigError(f"--step-time is '{text[:40]}'; expected seconds such as 1.9s, or 850ms")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


def _log(path: Path, adapter: str | None) -> _Log:
    """The steady part of a log."""
    try:
        log = read(path, adapter, running=True)
    except NoAdapter as e:
        hint = f"this fits its lines: --log {shlex.quote(e.pattern)}" if e.pattern else "or JSON lines with step and seconds"
        raise LogError(f"{path}: no line tells of a step; expected the log of one of {e.tried}, {hint}") from None
    steps = log.steps[len(log.steps) // _WARM_UP :]
    seconds = [s.seconds for s in steps]
    middle = None if log.clock == "none" else median(seconds)
    uneven = quantiles(seconds, n=20)[-1] / middle if middle and len(seconds) >= _FEW and log.every == 1 else None
    memory_bytes = [s.memory_bytes for s in steps if s.memory_bytes]
    first, last = (
        max(part, default=0.0)
        for part in (memory_bytes[: len(memory_bytes) // 4], memory_bytes[-(len(memory_bytes) // 4) :] if len(memory_bytes) >= _FEW else [])
    )
    grown = (first, last) if first and last > (1 + _GROWTH) * first else None
    samples = _middle(s.samples for s in steps)
    facts = replace(log.facts, gbs=round(samples)) if samples else log.facts
    notes = (
        f"{path}: {count(len(steps), 'step')} as {log.adapter} wrote them, the first fifth left out",
        *log.caveats,
        *(f"{path}: {unit.format(getattr(facts, key))}" for key, _, unit in _STATED if getattr(facts, key)),
    )
    return _Log(
        middle, _middle(s.tokens for s in steps), _middle(s.tokens_per_s_per_gpu for s in steps), _middle(s.tokens_per_s for s in steps),
        _middle(s.flops_per_s for s in steps), facts, uneven, grown, notes,
    )  # fmt: skip


def _middle(values: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    positive = [v for v in values if v]
    return median(positive) if positive else None


def _ours(folder: Path) -> tuple[Any, int | None, str | None]:
    """A run of this trainer: its configuration, and how many GPUs of which kind where its summary is there."""
    config, path = load(folder / "config.yaml"), folder / "summary.json"
    if not path.is_file():
        return config, None, None
    try:
        summary = json.loads(read_bytes(path, _MAX_SUMMARY))
        gpus, device = int(summary["world_size"]), str(summary["env"]["strict"]["device_name"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as e:
        raise ConfigError(f"{path}: no summary of a run ({type(e).__name__}: {str(e)[:80]}); remove it, or name --model") from e
    if device == "cpu":
        raise ConfigError(f"{folder}: a run on a CPU; expected one on GPUs: there is no prediction to compare it with")
    return config, gpus, device


def _of_config(config: Any, gpus: int, hardware: Cluster, framework: str, routing: Routing | None) -> Setting:
    """The setting of a run of this trainer."""
    plan = plan_of(config, gpus)
    options = plan.options
    if config.backend == "torch":
        options = replace(options, sharding="fsdp2", recompute=("selective",) if set(options.recompute) - {"full"} else options.recompute)
    stated_plan = replace(plan, options=options)
    other = ("gpus", "seq_len", "gbs", "backend", "loss")
    settings = [w for w in words(stated_plan) if (key := key_of(w)) not in other and not idle(stated_plan, [key])]
    # A configuration leaves none open.
    usual = [w for w in (f"mbs={plan.mbs}", f"vpp={plan.vpp}", "recompute=none") if key_of(w) not in keys_of(settings)]
    return setting(
        plan.shape, plan.model, hardware, gpus, seq_len=plan.seq_len, gbs=plan.global_batch, known=[*settings, *usual],
        framework=framework, backend=config.backend, routing=routing,
    )  # fmt: skip


def _again(configured: Setting, request: _Request) -> Setting:
    """The setting of a run's configuration, with what the command line says instead."""
    q = configured.question
    names = keys_of(request.settings)
    unchanged = [word for word in configured.known if key_of(word) not in names]
    return setting(
        q.shape, q.model, q.cluster, q.gpus, seq_len=request.seq or q.seq_len, gbs=request.gbs or q.gbs,
        known=[*unchanged, *request.settings], framework=configured.framework, backend=q.backend, routing=q.routing,
    )  # fmt: skip


def _walls(file: Path) -> dict[str, Any]:
    """The walls of a trace, as `playbook bench trace --file` finds them."""
    from playbook_bench.trace import reports, walls

    return asdict(walls.walls(reports.timeline_from_file(file)))


def _show(diagnosis: Mapping[str, Any]) -> None:
    """Print a diagnosis: speed beside the prediction and published runs, walls, actions, and how sure it is."""
    at, speed, best, yours = diagnosis["setting"], diagnosis["measured"], diagnosis["predicted"]["best"], diagnosis["predicted"]["yours"]
    say(f"{at['model']} on {at['gpus']} {at['hardware']}, {at['precision']}, {at['seq_len']} tokens, global batch {at['gbs']}")
    if speed:
        say(
            f"you        {speed['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU, {speed['mfu']:.0%} MFU, {speed['step_s']:.2f} s a step"
            f" ({speed['said']})"
        )
    for name, each in (("predicted", yours), ("fastest", best)):
        if each:
            tokens = each["tokens_per_s_per_gpu"]
            say(
                f"{name:9}  {tokens['value']:,.0f} tokens/s/GPU [{tokens['low']:,.0f}, {tokens['high']:,.0f}], {each['mfu']:.0%} MFU,"
                f" {each['memory_gib']:.0f} GiB: {' '.join(each['settings'])}"
            )
    _show_obstacle(diagnosis["predicted"]["nothing_fits"])
    runs = diagnosis["published"]
    for row in runs["rows"][:_SHOWN] if runs else ():
        planned = f"; the planner says {row['predicted']:,.0f}" if row["predicted"] else ""
        say(
            f"published  {row['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU, {row['mfu']:.0%} MFU: {row['model']} on {row['gpus']}"
            f" {row['hardware']}, {row['precision']} {row['layout']}"
            f" ({'; '.join(filter(None, (row['id'], row['other'])))}{planned}) {row['link']}"
        )
    say(f"so         {diagnosis['position']['sentence']}")
    walls = [w for w in diagnosis["walls"] if w["beyond"]] or diagnosis["walls"][:1]
    if walls:
        say(f"\nwall, from {diagnosis['walls_from']}")
        rows = [{**w, "wall": w["name"], "share": "?" if w["share"] is None else f"{w['share']:.0%}"} for w in walls]
        print_table(rows, ("wall", "share", "sign"))
    else:
        say("\nwall       not known: name what you run with --layout, or what you saw with --saw or --trace")
    if diagnosis["how_to_tell"]:
        say(f"to tell    {diagnosis['how_to_tell']}")
    for place, action in enumerate(diagnosis["actions"], 1):
        _show_action(place, action)
    say("")
    for words_ in diagnosis["confidence"]["warnings"]:
        say(f"beware     {words_}")
    if diagnosis["confidence"]["unknown"]:
        say(f"confidence {diagnosis['confidence']['level']}; not known: {', '.join(diagnosis['confidence']['unknown'])}")
    for words_ in diagnosis["assumptions"]:
        say(f"assumes    {words_}")


def _show_obstacle(near: Mapping[str, Any] | None) -> None:
    if near:
        say(f"fastest    no layout fits; the nearest needs {near['memory_gib']:.0f} GiB: {' '.join(near['settings'])}")
        say(f"fits       by playbook plan with {', or '.join(near['ways']) or 'nothing that is known here'}")


def _show_action(place: int, action: Mapping[str, Any]) -> None:
    """Print one action: its gain, its claims, what to set, and how to test it."""
    planner, record = action["planner"], action["record"]
    gains = [
        *([f"{planner['value']:+.0%} [{planner['low']:+.0%}, {planner['high']:+.0%}] by the planner"] if planner else []),
        *([f"{record['value']:+.0%} measured on {record['machine']} ({record['claim']})"] if record else []),
    ]
    most = "at most" if action["at_most"] else "expect"
    gained = action["expected"]
    expected = "" if gained is None else f"{most} {gained:+.0%}{', so leave it' if gained < 0 else ''}; "
    unless = ", if your run leaves it out" if action["in_plan"] else ""
    say(f"\n{place}  {action['title']}: {expected}{'; '.join(gains) or 'gain not known'}{unless}")
    for claim in action["claims"]:
        limits = f" ({'; '.join(claim['limits'])})" if claim["limits"] else ""
        effect = claim["sentence"].partition("; claimed")[0]
        say(f"   {claim['id']:6} {claim['standing']}{f': {effect}' if effect else ''}  {claim['card']}{limits}")
    for name, key in (("set", "flags"), ("unset", "without"), ("env", "environment"), ("lacks", "missing")):
        if action[key]:
            say(f"   {name:6} {' '.join(action[key])}")
    short = [f"{_AB} COMMAND so changed" if line.startswith(_AB) else line for line in action["test"]]
    if short:
        say(f"   test   {'; '.join(short)}")
    if action["note"]:
        say(f"   note   {action['note']}")


_MOST_TP = 64


def answer(
    steps: Sequence[rl_step.Step], model: str | None, gpus: int | None, hardware: str | None, layout: Sequence[str], seq: int | None
) -> dict[str, Any]:
    """The answer for a log's steps; with a model and GPUs, the memory of the trainer and of the engine too.

    Raises:
        ConfigError: the model, the GPUs or the layout is not known, or only a part of them is named.
    """
    counted = steps[len(steps) // _WARM_UP :]
    step = rl_step.diagnose(rl_step.middle(counted)) | {"steps": len(counted)}
    if model is None:
        return step
    if hardware is None:
        raise ConfigError("the memory of both engines depends on the GPUs; give --gpus N and --gpu KIND, such as --gpus 8 --gpu h200")
    return step | {"memory": _memory(model, gpus, hardware, [*layout, *([f"seq_len={seq}"] if seq else [])])}


def _memory(model: str, gpus: int | None, hardware: str, layout: Sequence[str]) -> dict[str, Any]:
    """The peak of the trainer and the room of an inference engine on the same GPUs, in GiB."""
    shape, gpu_gib = find(model), machine(hardware).memory_gib
    tp, stored, room = rl_plan.smallest(shape, gpu_gib, _MOST_TP)
    tokens = max(0, int((room - stored.weights) / stored.kv_per_token)) if stored.kv_per_token else None
    return rl_plan.memory(memory.peak(parse(model, layout, gpus=gpus, shape=shape)), gpu_gib, tp, stored, tokens)


def show_rl_step(step_answer: Mapping[str, Any], basis: str = "") -> None:
    """The answer as lines; `basis` says what stands behind it where that is no log."""
    step = "of unknown length" if step_answer["step_s"] is None else f"{step_answer['step_s']:.4g} s a step"
    basis = basis or f"median of {step_answer['steps']}; what follows is arithmetic on the log"
    say(f"a step of reinforcement learning, {step}, {basis}")
    say(f"wall       {step_answer['wall'] or 'not known: the log names no phases, and its lengths alone do not tell'}")
    rows = [{"phase": p["phase"], "seconds": f"{p['seconds']:.4g}", "share": f"{p['share']:.0%}"} for p in step_answer["phases"]]
    if rows:
        print_table(rows, ("phase", "seconds", "share"))
    if tail := step_answer["long_tail"]:
        say(
            f"long tail  the longest response is {tail['longest'] / tail['mean']:.1f} times the mean: where a batch decodes at once,"
            f" {tail['idle_share_of_rollout']:.0%} of the rollout waits for it"
        )
    if idle := step_answer["idle"]:
        say(f"together   GPUs that do both in turn wait in {idle['together']:.0%} of the step, if all responses begin at once")
        say(f"apart      in turns, trainers wait in {idle['trainers_apart']:.0%} and engines in {idle['engines_apart']:.0%} of the step")
        say(f"overlapped a step of the same GPUs for each takes at least the longer part: at most {idle['overlapped']:.2f} times as fast")
    if both := step_answer.get("memory"):
        engine = both["engine"]
        tokens = "" if engine["kv_tokens"] is None else f", and room for {engine['kv_tokens']:,} tokens of keys and values"
        say(
            f"memory     of {both['gpu_gib']:.0f} GiB: the trainer's peak {both['trainer_gib']:.0f} GiB; an engine alone on"
            f" {engine['tp']} GPU, {engine['weights_gib']:.0f} GiB of weights on each{tokens}"
        )
    for place, action in enumerate(step_answer["actions"], 1):
        say(f"{place}  {action}")
    say(f"card       playbook cards show {step_answer['card']}")
