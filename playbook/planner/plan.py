"""A plan: a model, a number of GPUs, degrees and options, read from `key=value` words and checked against every rule; and the legal plans
nearest to one that is not: fewest doublings or halvings away.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import islice, product
from math import lcm, log2
from typing import Any

from playbook.errors import ConfigError
from playbook.planner import layout
from playbook.planner.models import MODELS
from playbook.planner.options import DEEPSPEED, HYBRID, NODE, SHARDING_WORDS, Options
from playbook.planner.shapes import DEEPEST, LARGEST, Shape

_DECIMAL = re.compile(r"(?=\.?[0-9])[0-9]{0,10}\.?[0-9]{0,30}\Z", re.ASCII)
"""Plain decimals: the page's script, Python and C disagree about what else is a number."""

WIDTHS = {"grad_bytes": (2, 4), "master_bytes": (2, 4), "moment_bytes": (1, 2, 4)}
"""Bytes that a state may take. Source: Megatron-LM, `megatron/core/optimizer/optimizer_config.py` (types of the states)."""

LOSSES = {"te": 2, "native": 10, "compiled": 4, "torch": 14}
"""Bytes per logit that the loss holds: Transformer Engine writes the gradient over the bf16 logits; Megatron's own fused loss adds
the logits in fp32 and their exponentials beside them; torch's, compiled, has the logits and their gradient in bf16, and otherwise three
fp32 tensors beside the logits. Source: `docs/experiments/do-exported-plans-start.md` (four peaks of Megatron-LM); Transformer Engine,
`pytorch/cross_entropy.py`; Megatron-LM, `megatron/core/fusions/fused_cross_entropy.py`; torchtitan,
`components/loss.py`."""


@dataclass(frozen=True)
class Plan:
    """What is trained and how it is spread. `gbs` 0 stands for one pipeline's worth of microbatches.

    `etp` is 1 unless set, where megatron takes tp. The three `*_bytes` are per parameter (moments: each of the two); `imbalance` multiplies
    the tokens of the fullest rank's experts.
    `even_rows` says that every expert gets equally many tokens, as benchmarks force them to. `gradients_added` says that a kernel of its
    own adds each gradient to what earlier micro-batches left, where the product does not; `experts_at_once` that one CUTLASS kernel
    multiplies all experts, but for their weights' gradients. Only a configuration of this project's trainer says either.
    """

    shape: Shape
    model: str = ""
    gpus: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    mbs: int = 1
    gbs: int = 0
    seq_len: int = 4096
    grad_bytes: int = 4
    master_bytes: int = 4
    moment_bytes: int = 4
    loss: str = "te"
    imbalance: float = 1.0
    even_rows: bool = True
    gradients_added: bool = False
    experts_at_once: bool = False
    options: Options = field(default_factory=Options)

    @property
    def dp(self) -> int:
        """Data-parallel degree of everything but the experts."""
        return self.gpus // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Data-parallel degree of the experts."""
        return self.gpus // (self.etp * self.ep * self.pp)

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        return self.gbs or self.mbs * max(self.dp, 1) * self.pp

    @property
    def microbatches(self) -> int:
        """Microbatches per step of one data-parallel rank."""
        return max(1, self.global_batch // (self.mbs * max(self.dp, 1)))

    @property
    def sequence_parallel(self) -> bool:
        """Whether norms and residuals are split over TP; by default wherever there is a TP."""
        return self.tp > 1 and self.options.sp is not False

    def broken(self) -> list[str]:
        """The rules that the plan breaks, each as found, expected and what to do."""
        shape, o = self.shape, self.options
        return layout.check(
            gpus=self.gpus, heads=shape.heads, kv_heads=shape.kv_heads, layers=shape.layers, experts=shape.experts, seq_len=self.seq_len,
            micro_batch_size=self.mbs, global_batch_size=self.global_batch, tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep, etp=self.etp,
            vpp=self.vpp, shape=shape, options=_split(o, self.sequence_parallel),
        )  # fmt: skip

    def require(self) -> Plan:
        """The plan itself, if it breaks no rule.

        Raises:
            ConfigError: it breaks one.
        """
        problems = self.broken()
        if problems:
            raise ConfigError("this layout cannot run:\n" + "\n".join(f"  - {p}" for p in problems))
        return self


@lru_cache(maxsize=4096)
def _split(options: Options, sequence_parallel: bool) -> Options:
    return replace(options, sp=sequence_parallel)


_NEEDED: Mapping[str, tuple[str, Callable[[Plan], bool]]] = {
    "cp_comm": ("cp 1", lambda p: p.cp > 1),
    "cp_sizes": ("cp 1", lambda p: p.cp > 1),
    "sp": ("tp 1", lambda p: p.tp > 1),
    "overlap_p2p": ("pp 1", lambda p: p.pp > 1),
    "uneven": ("pp 1", lambda p: p.pp > 1),
    "dispatcher": ("ep and etp 1", lambda p: p.ep * p.etp > 1 or not p.shape.experts),
    "capacity": ("a model without experts", lambda p: p.shape.experts > 0),
    "imbalance": ("a model without experts", lambda p: p.shape.experts > 0),
    "shared_overlap": ("a model without shared experts", lambda p: p.shape.shared_ffn > 0),
    "optimizer_instances": (
        "data parallelism that shards nothing, or by fsdp2 in megatron",
        lambda p: p.options.sharding in ("optimizer", "fsdp") or (p.options.sharding == "fsdp2" and p.options.backend == "torch"),
    ),
    "compiled": ("the megatron backend", lambda p: p.options.backend == "torch"),
    "lora_targets": ("no lora", lambda p: p.options.lora > 0),
    "base": ("no lora", lambda p: p.options.lora > 0),
    "offload_percent": ("no offload of layers", lambda p: p.options.offload),
    "precision_aware": ("the torch backend", lambda p: p.options.backend == "megatron"),
}
"""Settings that do nothing in some plans: with what, and where they do something."""


def idle(plan: Plan, given: Iterable[str]) -> list[str]:
    """The settings among those `given` that have no effect on the plan, each as found and what to do."""
    return [f"{key} has no effect with {_NEEDED[key][0]}; leave it out" for key in given if key in _NEEDED and not _NEEDED[key][1](plan)]


DEGREES = ("tp", "cp", "pp", "ep", "etp", "vpp")
_OPTIONS = {f.name: f for f in fields(Options)}
_NUMBERS = {f.name for f in fields(Plan)} - {
    "shape",
    "model",
    "options",
    "loss",
    "imbalance",
    "even_rows",
    "gradients_added",
    "experts_at_once",
} | {
    "layers",
    "experts",
    "ulysses",
}
KEYS = tuple(sorted(_NUMBERS | set(_OPTIONS) | {"loss", "imbalance"}))


def parse(model: str, words: Iterable[str], *, gpus: int | None = None, shape: Shape | None = None) -> Plan:
    """A plan from a model's name and words such as `tp=2`; rules are not checked here. A `shape` stands for the model where it is no
    preset.

    Raises:
        ConfigError: a model, key or value that is not known.
    """
    if shape is None and model not in MODELS:
        raise ConfigError(f"model '{model[:40]}' is not known; expected one of {', '.join(MODELS)}")
    values: dict[str, str] = {} if gpus is None else {"gpus": str(gpus)}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in KEYS:
            raise ConfigError(f"'{word[:40]}' is not a setting; expected key=value with a key of {', '.join(KEYS)}")
        if values.get(key, value) != value:
            raise ConfigError(f"{key} is given twice, as {values[key]} and {value[:40]}; give it once")
        values[key] = value
    values = _in_own_words(values)
    numbers: dict[str, Any] = {k: whole(k, v) for k, v in values.items() if k in _NUMBERS}
    options = Options(**{k: _option(k, v) for k, v in values.items() if k in _OPTIONS})
    shape = _cut(MODELS[model] if shape is None else shape, numbers.pop("layers", None), numbers.pop("experts", None))
    loss, imbalance = values.get("loss", "torch" if options.backend == "torch" else "te"), _ratio(values.get("imbalance", "1"))
    if loss not in LOSSES:
        raise ConfigError(f"loss is '{loss[:40]}'; set it to one of {', '.join(LOSSES)}")
    return Plan(
        shape, model, loss=loss, imbalance=imbalance, even_rows=imbalance == 1, gradients_added=False, experts_at_once=False,
        options=options, **numbers,
    )  # fmt: skip


def _in_own_words(values: Mapping[str, str]) -> dict[str, str]:
    """The settings with what words of other trainers stand for, and what follows from the backend where nothing says it.

    DeepSpeed accumulates gradients in bf16. Source: DeepSpeed 0.19.6, `runtime/engine.py` (`get_data_types`).
    """
    backend = values.get("backend", "megatron")
    named = values.get("sharding", "fsdp2" if backend == "torch" else "")
    settings = {**values, **({"sharding": SHARDING_WORDS.get(backend, {}).get(named, named)} if named else {})}
    if named == HYBRID and "optimizer_instances" not in values:
        gpus, pp = (whole(key, values.get(key, "1")) for key in ("gpus", "pp"))
        settings["optimizer_instances"] = str(max(1, gpus // (NODE * pp)))
    if "ulysses" in settings:
        settings |= _heads_apart(settings.pop("ulysses"), settings)
    if backend == "torch" and named in DEEPSPEED:
        settings.setdefault("grad_bytes", "2")
    return settings


def _heads_apart(text: str, values: Mapping[str, str]) -> dict[str, str]:
    """What `ulysses=N` stands for: context parallelism that shares out heads by an all-to-all, within the ring that `cp` names, where it
    names one.

    Source: DeepSpeed Ulysses, arXiv 2309.14509; USP, arXiv 2405.07719, section 3.2.

    Raises:
        ConfigError: N is no count, or the layout says otherwise how heads are shared out.
    """
    heads, ring = whole("ulysses", text), whole("cp", values.get("cp", "1"))
    if "cp_comm" in values or "cp_sizes" in values:
        raise ConfigError("ulysses stands for cp_comm=a2a, and the layout names cp_comm or cp_sizes too; leave one of them out")
    if heads == 1:
        return {}
    both = {"cp_comm": "a2a+p2p", "cp_sizes": f"{heads},{ring}"} if ring > 1 else {"cp_comm": "a2a"}
    return {"cp": str(heads * ring), **both}


def cut(shape: Shape, words: Iterable[str]) -> tuple[Shape, tuple[str, ...], str]:
    """The shape with as many layers and experts as words such as `layers=8` and `experts=16` say, the other words, and what to add to the
    model's name.

    Raises:
        ConfigError: a number that is none, or experts of a model that has none.
    """
    words = tuple(words)
    sizes = {key: whole(key, value) for key, equals, value in (w.partition("=") for w in words) if key in _CUTS and equals}
    others = tuple(w for w in words if w.partition("=")[0] not in sizes)
    name = f" of {' and '.join(f'{sizes[key]} {key}' for key in _CUTS if key in sizes)}" if sizes else ""
    return _cut(shape, sizes.get("layers"), sizes.get("experts")), others, name


def _cut(shape: Shape, layers: int | None, experts: int | None) -> Shape:
    shape = shape if layers is None else shape.of_depth(layers)
    return shape if experts is None else shape.of_experts(experts)


_CUTS = ("layers", "experts")


def whole(key: str, text: str) -> int:
    """The whole number of a setting.

    Raises:
        ConfigError: it is none, or not one that the setting takes.
    """
    least, most = 0 if key == "gbs" else 1, DEEPEST if key == "layers" else LARGEST
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= most):
        raise ConfigError(f"{key} is '{text[:40]}'; expected a whole number from {least} to {most}")
    if key in WIDTHS and int(text) not in WIDTHS[key]:
        raise ConfigError(f"{key} is {text}; set it to one of {', '.join(map(str, WIDTHS[key]))}")
    return int(text)


def _ratio(text: str) -> float:
    value = float(text) if _DECIMAL.match(text) else 0.0
    if not 1 <= value <= 1000:
        raise ConfigError(f"imbalance is '{text[:40]}'; expected a ratio from 1 to 1000")
    return value


def _option(key: str, text: str) -> Any:
    """An option as its field's type wants it: a switch, a whole number, a list or a word."""
    kind = str(_OPTIONS[key].type)
    if "bool" in kind:
        if text not in ("true", "false"):
            raise ConfigError(f"{key} is '{text[:40]}'; set it to true or false")
        return text == "true"
    if kind == "int":
        return whole(key, text)
    if kind.startswith("tuple"):
        parts = [p for p in text[:1000].split(",") if p]
        return tuple(whole(key, p) for p in parts) if "int" in kind else tuple(parts)
    return text[:100]


CHOICES = 5
"""Values tried per degree: those nearest to the one asked for, and 1."""

OTHER_GPUS = 1.0
"""Added for another number of GPUs, in doublings: machines are harder to change than degrees."""

UNEVEN = 0.5
"""Added for stages of unlike numbers of layers."""


@dataclass(frozen=True)
class Near:
    """A legal plan, what it changes, and how far that is in doublings."""

    plan: Plan
    changes: dict[str, Any]
    distance: float


def nearest(plan: Plan, count: int = 3) -> list[Near]:
    """Up to `count` legal plans, nearest first; the plan itself where it is legal, none where options alone stand in the way."""
    return list(islice(_legal(plan), count))


_Candidate = tuple[float, int, tuple[int, ...], int, bool | None]
"""Settings of a plan that may be legal, ordered by how near they are: distance, GPUs, degrees, global batch, uneven stages. Building the
plan itself waits until its turn comes."""


def _legal(plan: Plan) -> Iterator[Near]:
    """All legal candidates, nearest first."""
    for distance, gpus, (tp, cp, pp, ep, etp, vpp), gbs, uneven in sorted(_candidates(plan)):
        options = replace(plan.options, uneven=uneven)
        candidate = replace(plan, gpus=gpus, gbs=gbs, options=options, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, vpp=vpp)
        if not candidate.broken():
            yield Near(candidate, _changes(plan, candidate), distance)


def _candidates(plan: Plan) -> Iterator[_Candidate]:
    """Settings whose two grids fill the GPUs, with a global batch that divides."""
    tps, cps, pps, eps, etps, vpps = (_choices(plan, key) for key in DEGREES)
    for size, tp, cp, pp in product(_gpu_choices(plan), tps, cps, pps):
        if size % (tp * cp * pp):
            continue
        for ep, etp, vpp in product(eps, etps, vpps if pp > 1 else [1]):
            if size % (etp * ep * pp) == 0:
                yield _candidate(plan, size, (tp, cp, pp, ep, etp, vpp))


def _candidate(plan: Plan, size: int, degrees: tuple[int, ...]) -> _Candidate:
    """A candidate with a pipeline layout where layers do not divide, and the nearest global batch that does."""
    tp, cp, pp, *_, vpp = degrees
    distance = sum(_apart(getattr(plan, k), v) for k, v in zip(DEGREES, degrees, strict=True))
    distance += _apart(plan.gpus, size) + OTHER_GPUS if size != plan.gpus else 0
    # The interleaved schedule takes micro-batches in groups of pp.
    uneven, batch, rows = plan.options.uneven, plan.gbs, plan.mbs * (size // (tp * cp * pp)) * (pp if vpp > 1 else 1)
    moved = (pp, vpp) != (plan.pp, plan.vpp) or uneven is False
    if plan.shape.layers % (pp * vpp) and not uneven and moved:
        uneven, distance = None if uneven is None else True, distance + UNEVEN
    if batch % rows:
        batch = max(1, round(batch / rows)) * rows
        distance += _apart(plan.gbs, batch)
    return round(distance, 9), size, degrees, batch, uneven


def _choices(plan: Plan, key: str) -> list[int]:
    """The values of a degree that the model allows, nearest first."""
    shape, stated = plan.shape, int(getattr(plan, key))
    most = max(plan.gpus, 1)
    allowed = {
        "tp": [n for n in range(1, min(shape.heads, most) + 1) if shape.heads % n == 0],
        "cp": [n for n in powers(most) if n == 1 or plan.seq_len % (2 * n) == 0],
        "pp": [n for n in range(1, min(shape.layers + 2, most) + 1) if most % n == 0 or n == stated],
        "ep": [n for n in range(1, min(shape.experts, most) + 1) if shape.experts % n == 0] or [1],
        "etp": [n for n in powers(most) if (shape.expert_ffn or 1) % n == 0],
        "vpp": list(range(1, shape.layers + 1)),
    }[key]
    near = sorted(allowed, key=lambda n: (_apart(stated, n), n))[:CHOICES]
    return near if 1 in near else [*near, 1]


def _gpu_choices(plan: Plan) -> list[int]:
    """The GPUs asked for, and the multiples of one copy on either side."""
    unit = lcm(plan.tp * plan.cp * plan.pp, plan.etp * plan.ep * plan.pp)
    below = plan.gpus // unit * unit
    return sorted(n for n in {plan.gpus, below, below + unit} if 0 < n <= LARGEST)


def powers(most: int) -> list[int]:
    """The powers of two from 1 to `most`."""
    return [1 << i for i in range(most.bit_length())]


def _apart(a: int, b: int) -> float:
    """Doublings between two values, rounded so that values equally far away tie on every platform."""
    return round(abs(log2(a) - log2(b)), 9)


def _changes(plan: Plan, nearest: Plan) -> dict[str, Any]:
    """Settings that differ, by name."""
    changed = {k: getattr(nearest, k) for k in ("gpus", *DEGREES, "gbs") if getattr(nearest, k) != getattr(plan, k)}
    return changed | ({"uneven": True} if nearest.options.uneven and plan.options.uneven is False else {})
