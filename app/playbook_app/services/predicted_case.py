"""A plan and what it is set against, as a case that registers their predicted speeds before any run; and a plan cut down to fewer GPUs, so
that its kernels can be timed without the cluster that it is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import Any

import yaml

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook.planner import memory, pipeline
from playbook.planner.choice.search import Answer
from playbook.planner.models import MODELS
from playbook.planner.plan import Plan
from playbook.text import count, key_of, keys_of
from playbook_trainer.config.dry_run import dry_run, predicted
from playbook_trainer.config.tree import TrainerConfig, dump, flatten, load, model_names
from playbook_trainer.export.plan_ours import configuration


def scaled(plan: Plan, gpus: int, layers: int, samples: int = 0) -> Plan:
    """The plan on `gpus` GPUs with so many layers and samples per step; what a rank holds of a layer stays.

    The degrees are those that divide the GPUs. What a larger degree would have split is cut from the model itself: heads, widths and
    vocabulary by tensor parallelism, experts by
    expert parallelism, the sequence by context parallelism; so products keep their shapes, and attention over a cut sequence is shorter.
    Transfers between ranks that are left out, and the pipeline's bubble, take no time there.
    """
    shape = plan.shape
    tp = gcd(plan.tp, gpus)
    cp = gcd(plan.cp, gpus // tp)
    etp = gcd(plan.etp, gpus)
    ep = gcd(plan.ep, gpus // etp)
    heads = shape.heads * tp // plan.tp
    experts = max(shape.experts * ep // plan.ep, shape.top_k)
    dense = layers if shape.dense_layers == shape.layers else min(layers, shape.dense_layers)
    cut = replace(
        shape, layers=layers, dense_layers=dense, blocks=shape.blocks[:layers], heads=heads,
        kv_heads=heads if shape.mla else max(1, shape.kv_heads * tp // plan.tp), vocab=shape.vocab * tp // plan.tp,
        ffn=shape.ffn * tp // plan.tp, shared_ffn=shape.shared_ffn * tp // plan.tp, experts=experts,
        expert_ffn=shape.expert_ffn * etp // plan.etp,
    )  # fmt: skip
    routed = ep * etp > 1
    options = replace(plan.options, dispatcher=plan.options.dispatcher if routed else "", ep_overlap=plan.options.ep_overlap and ep > 1)
    return replace(
        plan, shape=cut, gpus=gpus, tp=tp, cp=cp, pp=1, vpp=1, ep=ep, etp=etp, gbs=samples or plan.mbs * gpus // (tp * cp),
        seq_len=plan.seq_len * cp // plan.cp, options=options,
    )  # fmt: skip


def deepest(plan: Plan) -> int:
    """Layers of the plan's fullest pipeline stage."""
    sizes = pipeline.split(plan.shape.layers, plan.pp, plan.vpp)
    return max(sum(map(len, pipeline.indices(sizes, plan.pp, stage))) for stage in range(plan.pp))


_TRAINER_FILE = "planned.yaml"
_MODEL_KEYS: Mapping[str, str] = {
    "layers": "num_layers", "heads": "num_heads", "kv_heads": "num_kv_heads", "ffn": "ffn_size", "experts": "num_experts",
    "expert_ffn": "expert_ffn_size", "shared_ffn": "shared_expert_ffn_size", "vocab": "vocab_size", "dense_layers": "first_dense_layers",
}  # fmt: skip
"""Counts of a shape that scaling cuts, as the trainer's configuration calls them."""
_TOKENS = ("model.eos_token_id", "model.pad_token_id")
"""Tokens that a smaller vocabulary does not have; random tokens need neither."""
_UNLIKE = ("data.seq_len", "train.global_batch_size")
"""Beside the model's counts, what makes the work of two runs differ."""
_FUSED: Mapping[str, Any] = {
    "train.fused_activation": True, "train.fused_norms": True, "train.fused_loss": True, "train.compile.decoder": True,
    "optimizer.fused": True,
}  # fmt: skip
_FUSED_MOE: Mapping[str, Any] = {"moe.apply_probs_on": "activation", "moe.fused_permutation": True, "moe.fused_router": True}
"""Kernels of the torch backend that a prediction takes for granted: megatron-core has their like by default."""


class _Plain(yaml.SafeDumper):
    """Writes a value out wherever it stands: cases have no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class _PredictedRun:
    """One plan, scaled, in the trainer's words."""

    name: str
    plan: Plan
    settings: dict[str, Any]


def case_of(answer: Answer, ident: str, gpus: int, against: Iterable[str] = ()) -> dict[str, Any]:
    """The case of the best plan and another, cut to so many GPUs: what each was predicted to reach there, with its 80 % interval.

    The other is the user's own, given `against` in words such as `tp=2`, else the next in the answer that is another run once both are cut.

    Raises:
        ConfigError: this trainer cannot run one of them, or nothing of them fits.
    """
    q, best = answer.question, answer.choices[0].plan
    words = tuple(against)
    settings = keys_of(words)
    unchanged = tuple(word for word in q.fixed if key_of(word) not in settings)
    others = [replace(q, fixed=(*unchanged, *words)).base.require()] if words else [c.plan for c in answer.choices[1:]]
    first, second = next((pair for other in others if (pair := _fitted(best, other, gpus, q.capacity))), (None, None))
    if first is None or second is None:
        raise ConfigError(
            f"nothing to set against the best plan on {gpus} GPUs: cut down, the others are the same run or do not fit; name one with"
            " --against, or raise --top or --case-gpus"
        )
    profile = {k: v for k, v in first.settings.items() if second.settings.get(k, _Absent) == v}
    runs = [(run, {k: v for k, v in run.settings.items() if k not in profile}) for run in (first, second)]
    differ = {k.split(".")[-1] for _, settings in runs for k in settings if (k.startswith("model.") or k in _UNLIKE) and k not in _TOKENS}
    cut = f"each cut to {count(gpus, 'GPU')}: {first.plan.shape.layers} of {best.shape.layers} layers, of each what a rank holds"
    return {
        "id": ident,
        "kind": "prediction",
        "summary": f"{q.model} on {q.gpus} {q.cluster.name}, the best plan and another, {cut}; predicted before any run.",
        "trainer": f"trainer/configs/{_TRAINER_FILE}",
        "values": [{"at": run.name, "set": settings, "predicted": _predicted(run, answer)} for run, settings in runs],
        "metric": "useful_tokens_per_s_per_gpu",
        "also": ["peak_memory_bytes"],
        **({"requires": ["backend:megatron"]} if "megatron" in (p.plan.options.backend for p in (first, second)) else {}),
        "profiles": {f"{q.cluster.name}x{gpus}": {"ranks": gpus, **profile}},
        **(_unlike(differ) if differ else {}),
        "activation": {"variants": {run.name: {"require": [_proof(run.plan)]} for run, _ in runs}},
        "budget": {"pairs": [4, 8], "minutes": 40},
    }


def text_of(case: Mapping[str, Any], command: str) -> str:
    """The case as a file, with the command that wrote it."""
    schema = "# yaml-language-server: $schema=../../schemas/case.schema.json"
    return f"{schema}\n# {command}\n{yaml.dump(dict(case), Dumper=_Plain, sort_keys=False, default_flow_style=None, width=160)}"


def _fitted(best: Plan, other: Plan, gpus: int, capacity: float) -> tuple[_PredictedRun, _PredictedRun] | None:
    """Both plans with as many layers as both hold on the GPUs; None where they are the same run."""
    samples = 2 * lcm(*(cut.mbs * cut.dp for cut in (scaled(p, gpus, 1) for p in (best, other))))
    for layers in range(min(deepest(best), deepest(other)), 0, -1):
        plans = [scaled(p, gpus, layers, samples) for p in (best, other)]
        if all(_holds(plan, capacity) for plan in plans):
            runs = [_PredictedRun(name, plan, _settings(plan)) for name, plan in zip(_names(best, other), plans, strict=True)]
            return None if runs[0].settings == runs[1].settings else (runs[0], runs[1])
    return None


def _names(*plans: Plan) -> Iterator[str]:
    """What tells the plans apart, such as `first-tp2-mbs4`."""
    keys = [k for k in ("tp", "cp", "pp", "ep", "etp", "mbs") if len({getattr(p, k) for p in plans}) > 1]
    for place, plan in zip(("first", "second"), plans, strict=True):
        recompute = f"recompute-{'+'.join(plan.options.recompute) or 'none'}"
        differs = len({p.options.recompute for p in plans}) > 1
        yield "-".join([place, *(f"{k}{getattr(plan, k)}" for k in keys), *([recompute] if differs else [])])


def _holds(plan: Plan, capacity: float) -> bool:
    """Whether the plan fits by the planner and by the dry run of what would be trained."""
    if max(s.peak for s in memory.stages(plan)) > capacity:
        return False
    report = dry_run(_config(_settings(plan)), plan.gpus)
    return max(s.peak for s in report.stages) <= capacity


def _config(settings: Mapping[str, Any]) -> TrainerConfig:
    return load(data_root("configs") / _TRAINER_FILE, settings)


def _settings(plan: Plan) -> dict[str, Any]:
    """What the plan sets in the trainer's configuration, with dotted keys.

    Raises:
        ConfigError: this trainer does not train the model, or has no such recompute.
    """
    o, cut = plan.options, plan.shape
    if plan.model not in model_names() or cut.vision is not None:
        raise ConfigError(
            f"--emit-case: this trainer times no text of {plan.model}; expected a preset of a language model, such as qwen3_8b"
        )
    if o.backend == "torch" and "selective" in o.recompute:
        raise ConfigError(
            "--emit-case: torchtitan's selective recompute is not in this trainer; add --fix recompute= or --fix recompute=full"
        )
    whole = MODELS[plan.model]
    usual = flatten(dump(_config({"model": plan.model}))) | {"parallel.etp": plan.tp}
    settings = {
        k: v
        for k, v in flatten(configuration(plan) | {"model": plan.model}).items()
        if k not in ("data.kind", "train.dtype") and usual.get(k, _Absent) != v
    }
    settings |= {f"model.{word}": getattr(cut, k) for k, word in _MODEL_KEYS.items() if getattr(cut, k) != getattr(whole, k)}
    if not cut.experts:
        settings.pop("model.first_dense_layers", None)
    if cut.vocab != whole.vocab:
        settings |= dict.fromkeys(_TOKENS, 0)
    kernels = {} if o.backend == "megatron" else {**_FUSED, **_FUSED_MOE} if cut.experts else _FUSED
    return {**settings, **kernels}


def _predicted(run: _PredictedRun, answer: Answer) -> dict[str, float]:
    """What a dry run of it predicts: the routing that the trainer has, where a plan supposes an even one, and the kernels and copies of
    its backend.
    """
    step = predicted(_config(run.settings), run.plan.gpus, answer.question.cluster)
    assert step is not None, "only float32 has no law"
    speed = step.tokens_per_s_per_gpu
    return {k: float(f"{getattr(speed, k):.4g}") for k in ("value", "low", "high")}


def _unlike(differ: set[str]) -> dict[str, Any]:
    """What a case declares whose runs are not of one model and batch: each is held against its own prediction, not against the other."""
    reason = f"each run is held against its own prediction; cut to a rank's share, they differ in {', '.join(sorted(differ))}"
    return {
        "delta": {"data": True, "parameters": True, "work": True, "reason": reason},
        "guardrails": {"loss": {"relative": None, "reason": reason}},
    }


def _proof(plan: Plan) -> dict[str, Any]:
    """Layers, micro-batches and whole recompute tell in how often attention runs; graphs in their replays."""
    if plan.options.graphs:
        return {"counter": "graph_replays"}
    twice = "2 * " if "full" in plan.options.recompute else ""
    return {"range": "attention", "count": f"{twice}layers * microbatches", **({"op": ">="} if plan.shape.mtp else {})}


class _Absent:
    """Stands for a setting that is not there."""
