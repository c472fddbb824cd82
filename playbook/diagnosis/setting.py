"""What is trained where, what is known of its layout, and how fast it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

from playbook.errors import ConfigError
from playbook.planner import flops
from playbook.planner.choice import space
from playbook.planner.choice.routing import Routing
from playbook.planner.choice.space import Question
from playbook.planner.hardware import machine
from playbook.planner.options import FRAMEWORKS
from playbook.planner.plan import Plan, idle, parse, whole
from playbook.planner.runs import spelling
from playbook.planner.shapes import Shape
from playbook.planner.time.cluster import Cluster
from playbook.text import keys_of

_ALLOWED = {
    "moment_bytes": "bf16-moments",
    "grad_bytes": "bf16-gradients",
    "optimizer_offload": "offload",
    "graphs": "graphs",
    "fp8": "fp8",
}
"""Settings that go beyond what the planner proposes unasked, with the permission that each is."""


_WAY = ("lora", "lora_targets", "base", "frozen")
"""Settings that say what is trained: whatever is proposed keeps them."""
_LEAST, _MOST = 1e-6, 1e9


@dataclass(frozen=True)
class Setting:
    """A model on a cluster. `known` are words such as `tp=2` that the run sets; without any, its layout is unknown."""

    question: Question
    known: tuple[str, ...]
    framework: str
    assumed: tuple[str, ...]
    said: str
    """The model as the question names it."""
    plan: Plan | None = None
    """What runs: what is known of it, and what was taken for granted where it says nothing; None where nothing is known."""
    seen: Mapping[str, float] = field(default_factory=dict)
    """Shares of the step that were seen, by the words of `playbook.diagnosis.seen`."""

    @property
    def precision(self) -> str:
        """`fp8` or `bf16`."""
        return "fp8" if self.plan and self.plan.options.fp8 else "bf16"

    @property
    def peak(self) -> float:
        """FLOP/s that utilisation is a share of: the dense peak of the precision."""
        gpu = self.question.cluster
        return gpu.fp8_flops_per_s if self.precision == "fp8" else gpu.bf16_flops_per_s

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs, without recompute and without gradients of frozen weights."""
        return flops.trained_per_token(self.question.shape, self.question.seq_len, self.question.base.options)

    @property
    def reached(self) -> float:
        """The share of the peak that the best matrix product reaches on this GPU: no step of training is above it."""
        gpu = self.question.cluster
        return gpu.fp8_reached if self.precision == "fp8" else gpu.bf16_reached


def setting(
    shape: Shape,
    model: str,
    hardware: Cluster | str,
    gpus: int | None,
    *,
    seq_len: int | None,
    gbs: int | None,
    known: Sequence[str] = (),
    framework: str = "megatron-lm",
    always: Sequence[str] = (),
    backend: str | None = None,
    said: str = "",
    network: str = "",
    routing: Routing | None = None,
) -> Setting:
    """The setting of a question, with what is taken for granted where it says nothing.

    `known` are words of a layout as `playbook plan` and published runs print them; those for GPUs, sequence and batch stand for `gpus`,
    `seq_len`
    and `gbs`. `always` are words that all runs of the framework have, where the layout and the framework do not name the setting.

    Raises:
        ConfigError: hardware, framework or a word of the layout is not known, contradicts another, or the layout breaks a rule.
    """
    if framework not in FRAMEWORKS:
        raise ConfigError(f"framework is '{framework[:40]}'; expected one of {', '.join(FRAMEWORKS)}")
    backend = backend or FRAMEWORKS[framework].backend
    counts, known = _counts(spelling.settings(known, backend), {"gpus": gpus, "seq_len": seq_len, "gbs": gbs})
    gpus, seq_len, gbs = counts["gpus"], counts["seq_len"], counts["gbs"]
    if gpus is None:
        raise ConfigError("the GPUs are not named; give --gpus N, such as --gpus 64")
    names = [word.partition("=")[0] for word in known]
    elsewhere = sorted({"layers", "backend"} & set(names))
    if elsewhere:
        raise ConfigError(f"layout has {', '.join(elsewhere)}; the model and the framework say that")
    implied = FRAMEWORKS[framework].beside(names) if backend == FRAMEWORKS[framework].backend else ()
    implied += tuple(word for word in always if word.partition("=")[0] not in (*names, *keys_of(implied)))
    allow = frozenset(_ALLOWED[name] for name in names if name in _ALLOWED)
    fixed = tuple(word for word in known if word == "sharding=fsdp" or word.partition("=")[0] in _WAY)
    fixed += implied
    where = machine(hardware, network) if isinstance(hardware, str) else hardware
    question = Question(shape, model, where, gpus, seq_len or 4096, gbs or 0, backend=backend, allow=allow, fixed=fixed, routing=routing)
    if routing and "imbalance" in names:
        raise ConfigError("layout has imbalance, and --imbalance says it too; leave one of them out")
    assumed = [*where.notes, *([where.network] if network else where.about_network(gpus))]
    assumed += [] if seq_len else ["sequences of 4096 tokens"]
    if "fp8" in allow and not question.cluster.has_fp8:
        raise ConfigError(f"layout has fp8, and {question.cluster.name} has no 8-bit products; leave it out")
    if not gbs:
        question = replace(question, gbs=_batch(question, known))
        assumed.append(f"a global batch of {question.global_batch} samples: about four million tokens")
    if known and "mbs" not in names:
        assumed.append("micro-batches of 1")
    if known:
        assumed.append("what the layout does not name is at its default: no CUDA graphs, the optimizer's state sharded")
    plan, filled = _own(question, known) if known else (None, ())
    assumed += [routing.about(plan, where)] if routing and plan else [routing.words] if routing else []
    return Setting(question, tuple(known), framework, (*assumed, *filled), said or model, plan)


def _counts(words: Sequence[str], options: Mapping[str, int | None]) -> tuple[dict[str, int | None], list[str]]:
    """GPUs, sequence and batch by the options and by the words of a layout, and the other words.

    Raises:
        ConfigError: a word is no count, or both name one and differ.
    """
    counts, others = dict(options), []
    for word in words:
        key, _, value = word.partition("=")
        if key not in options:
            others.append(word)
            continue
        stated = whole(key, value)
        if counts[key] not in (None, stated):
            raise ConfigError(f"layout has {word[:40]}, and elsewhere it is {counts[key]}; expected one value")
        counts[key] = stated
    return counts, others


def _own(question: Question, words: Sequence[str]) -> tuple[Plan, tuple[str, ...]]:
    """The plan that runs, and what of it was filled in.

    Raises:
        ConfigError: a word is no setting, or the layout breaks a rule.
    """
    names = [word.partition("=")[0] for word in words]
    implied = [word for word in question.fixed if word.partition("=")[0] not in names]
    plan = _plan(question, [*words, *implied])
    plan = question.routing.on(plan) if question.routing else plan
    if plan.shape.experts and plan.ep * plan.etp > 1 and not plan.options.dispatcher:
        plan = replace(plan, options=replace(plan.options, dispatcher="alltoall"))
    nothing = idle(plan, names)
    if nothing:
        raise ConfigError(f"layout: {nothing[0]}")
    plan, chunked = space.chunked(plan, names)
    plan, filled = space.fitted(plan.require(), question.cluster.memory_gib, names)
    return plan, (*chunked, *filled)


def _plan(question: Question, layout_words: Sequence[str]) -> Plan:
    backend = ["backend=torch", *([] if any(w.startswith("loss=") for w in layout_words) else ["loss=compiled"])]
    words = [f"gpus={question.gpus}", f"seq_len={question.seq_len}", f"gbs={question.gbs}", *layout_words]
    return parse(question.model, [*words, *(backend if question.backend == "torch" else [])], shape=question.shape)


def _batch(question: Question, words: Sequence[str]) -> int:
    """About four million tokens, as a multiple of what one micro-step of the known layout takes."""
    if not words:
        return question.global_batch
    plan = _plan(replace(question, gbs=1), words)
    unit = max(1, plan.mbs * max(1, plan.dp) * (plan.pp if plan.vpp > 1 else 1))
    return max(1, round(question.global_batch / unit)) * unit


@dataclass(frozen=True)
class Measured:
    """How fast the run is. Units: tokens per second and GPU, seconds, bytes; `said` is where it comes from."""

    tokens_per_s_per_gpu: float
    mfu: float
    step_s: float
    said: str


@dataclass(frozen=True)
class Figures:
    """How fast a run is, in one of three ways; `said` is the log that they come from, which may state a rate and a step time."""

    mfu_percent: float | None = None
    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    said: str = ""


def measured(where: Setting, figures: Figures) -> Measured | None:
    """The speed from one of three figures; None where none is given.

    Raises:
        ConfigError: several are given and no log states them, one is no positive number, or it is more than the GPUs can reach.
    """
    figures_by_name = {"MFU": figures.mfu_percent, "step time": figures.step_s, "tokens per second and GPU": figures.tokens_per_s_per_gpu}
    stated = {k: v for k, v in figures_by_name.items() if v is not None}
    if not stated:
        return None
    if len(stated) > 1 and not figures.said:
        raise ConfigError(f"found {' and '.join(stated)}; expected one figure for the speed")
    name, value = list(stated.items())[-1]
    if not (isfinite(value) and _LEAST <= value <= _MOST):
        raise ConfigError(f"{name} is {value:g}; expected a number from {_LEAST:g} to {_MOST:g}")
    if name == "MFU" and value < 1:
        raise ConfigError(f"MFU is {value:g}; expected percent from 1 to 100, such as {100 * value:g}")
    q = where.question
    tokens = q.global_batch * q.seq_len / q.gpus
    speed = {
        "MFU": value / 100 * where.peak / where.flops_per_token,
        "step time": tokens / value,
        "tokens per second and GPU": value,
    }[name]
    share = speed * where.flops_per_token / where.peak
    if share > where.reached:
        raise ConfigError(
            f"{name} {value:g} means {speed:,.0f} tokens/s on each GPU, {share:.0%} of its peak in {where.precision}; expected at most"
            f" {where.reached:.0%}, which the best matrix product reaches on {q.cluster.name}. Check your token count: batch "
            f"({q.global_batch} samples of"
            f" {q.seq_len}), GPUs ({q.gpus}), that tokens/s are of one GPU, and that FLOPs are without recompute"
        )
    return Measured(speed, share, figures.step_s or tokens / speed, figures.said or name)
