"""Qwen3-VL on megatron-core with Transformer Engine: against the torch backend, over its layouts, and 100 steps of several ways side by side."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import Job, assert_near, train_all
from nodes import four_or_two, on_gpus_of_their_own
from ranks import ROOT, steps

from playbook_app.site.curves import ALLOWED, distances, series_of
from playbook_app.site.reference import CURVES
from playbook_trainer.axes import Axes
from playbook_trainer.config.tree import load, parse_overrides
from playbook_trainer.data.loader import build_loader
from playbook_trainer.torch.model.decoder import Decoder, Options
from playbook_trainer.torch.parallel.sharding import fill, initial_value

pytest.importorskip("megatron.core")
from playbook_trainer.megatron import engine, groups, inputs, vision_language, weights

# As small as kernels for 16-bit numbers take it.
SIZE = ["model.hidden_size=256", "model.head_dim=64", "model.mrope_section=[12,10,10]", "model.expert_ffn_size=128"]
MOE = ["trainer/configs/qwen3_vl_moe_tiny.yaml", *SIZE, "data.num_workers=0", "train.dtype=bf16", "train.global_batch_size=4"]
DENSE = ["trainer/configs/qwen3_vl_tiny.yaml", *SIZE[:3], "model.ffn_size=512", *MOE[-3:]]
FEW = ["train.steps=4", "train.warmup_steps=1", "train.receipt=false"]
MEGATRON = ["backend=megatron"]
SEQUENCE = ["parallel.tp=2", "parallel.sequence_parallel=true"]
# On {n} GPUs, of which {half} is a half.
LAYOUTS: dict[str, tuple[list[str], list[str]]] = {
    "full-recompute": (MOE, ["train.recompute=full"]),
    "selective-recompute": (MOE, ["train.recompute=selective", "train.recompute_modules=[layernorm,moe_act,vision]"]),
    "ep": (MOE, ["parallel.ep={n}"]),
    "tp2-sp-ep-etp1": (MOE, [*SEQUENCE, "parallel.ep={n}", "parallel.etp=1"]),
    "pp2-ep": (MOE, ["parallel.pp=2", "parallel.ep={half}"]),
    "pp2-uneven": (MOE, ["parallel.pp=2", "parallel.pipeline_layout=[3,1]"]),
    "cp2": (MOE, ["parallel.cp=2"]),
    "ddp": (MOE, ["megatron.data_parallel=ddp"]),
    "fsdp2": (MOE, ["megatron.data_parallel=fsdp2"]),
    "megatron-fsdp": (MOE, ["megatron.data_parallel=megatron_fsdp"]),
    "megatron-fsdp-ep": (MOE, ["megatron.data_parallel=megatron_fsdp", "parallel.ep={n}"]),
    "megatron-fsdp-full": (MOE, ["megatron.data_parallel=megatron_fsdp", "train.recompute=full"]),
    "megatron-fsdp-vision": (
        MOE,
        ["megatron.data_parallel=megatron_fsdp", "train.recompute=selective", "train.recompute_modules=[vision]"],
    ),
    "dense-tp2-pp": (DENSE, ["parallel.tp=2", "parallel.pp={half}"]),
    "dense-tp2-sp": (DENSE, SEQUENCE),
    "frozen": (MOE, ["train.freeze=[vision]"]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("words", [MOE, DENSE], ids=["moe", "dense"])
def test_logits_and_gradients_are_as_near_to_float32_as_the_torch_backends(words: list[str], alone: torch.device) -> None:
    config = load(ROOT / words[0], parse_overrides([*words[1:], *MEGATRON]))
    groups.initialise(config)
    engine.seed(config)
    batch = next(iter(build_loader(config, dp_rank=0, dp_size=1)))[0]
    assert batch.vision is not None

    def ours(dtype: torch.dtype) -> torch.nn.Module:
        with torch.device("meta"):
            model = Decoder(config.model, Options(grouped=dtype == torch.bfloat16))
        model.to_empty(device=alone)
        fill(model, Axes(), initial_value(config.model, config.seed), alone)
        model.activation_dtype = dtype
        return model.to(dtype)

    def theirs() -> torch.nn.Module:
        model = vision_language.build(config, engine.transformer_config(config), pre_process=True, post_process=True)
        model = model.to(device=alone, dtype=torch.bfloat16)
        weights.draw([model], config.model, config.seed)
        return model

    def run(model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if isinstance(model, Decoder):
            logits = model(batch.to(alone), logits=True)
        else:
            own = inputs.make(batch, config, groups.axes(config)).to(alone)
            packed = engine.packed(own.borders, own.longest)
            logits = model(own.tokens, own.positions, None, positions_3N=own.positions, vision=own.vision, packed_seq_params=packed)[0]
        loss = torch.nn.functional.cross_entropy(logits.float(), batch.labels_N.to(alone), ignore_index=-100)
        loss.backward()
        names = {"embedding.word_embeddings.weight": "embed.weight"}
        grads = {names.get(n, n): p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
        return logits.detach().float(), grads

    (exact, exact_grads), (plain, plain_grads), (found, found_grads) = (
        run(m) for m in (ours(torch.float32), ours(torch.bfloat16), theirs())
    )

    def far(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).norm() / b.norm())

    print(f"logits: megatron {far(found, exact):.1e}, torch {far(plain, exact):.1e}")
    assert far(found, exact) < 2 * far(plain, exact) + 1e-3
    shared = [n for n in exact_grads if n.startswith("vision.") or n == "embed.weight"]
    assert len(shared) > 20
    assert set(shared) <= found_grads.keys()
    rows = {n: (far(found_grads[n], exact_grads[n]), far(plain_grads[n], exact_grads[n])) for n in shared if exact_grads[n].norm() > 0}
    worst = max(rows, key=lambda n: rows[n][0] - 2 * rows[n][1])
    print(f"gradients: megatron {rows[worst][0]:.1e}, torch {rows[worst][1]:.1e} ({worst})")
    assert all(a < 2 * b + 2e-2 for a, b in rows.values()), worst


def one_gpu(name: str) -> Job:
    """What a layout is compared with."""
    model, alike = LAYOUTS[name][0], ["train.freeze=[vision]"] if name == "frozen" else []
    return Job(f"one-{'dense' if model is DENSE else 'moe'}{'-frozen' if alike else ''}", 1, (*model, *FEW, *MEGATRON, *alike))


@pytest.fixture(scope="module")
def layouts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str | None]]:
    """All selected layouts and one GPU of the same backend beside them, trained by the same processes."""
    root = tmp_path_factory.mktemp("layouts")
    n = four_or_two()
    jobs: dict[str, Job] = {}
    tests = [item for item in request.session.items if item.module is request.module and "layouts" in item.fixturenames]
    for name in [item.callspec.params["name"] for item in tests]:
        (model, words), one = LAYOUTS[name], one_gpu(name)
        jobs |= {one.name: one, name: Job(name, n, (*model, *FEW, *MEGATRON, *(w.format(n=n, half=n // 2) for w in words)))}
    return root, train_all(list(jobs.values()), root, timeout=560, stall=60, workers=4)


@pytest.mark.multigpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_agrees_with_one_gpu(name: str, layouts: tuple[Path, dict[str, str | None]]) -> None:
    (root, errors), one = layouts, one_gpu(name).name
    assert (errors[name], errors[one]) == (None, None)
    assert_near(root / name, root / one, 5e-3, 5e-2)


# In 32 bits, without products of Transformer Engine (whose float32 is TF32), nothing but the order of sums differs.
PRECISIONS = {"bf16": ([], 5e-3, 5e-2), "fp32": (["train.dtype=fp32"], 1e-5, 1e-4)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str | None]]:
    """Both models in both precisions on both backends, side by side."""
    root = tmp_path_factory.mktemp("backends")
    jobs = []
    for model, words in {"moe": MOE, "dense": DENSE}.items():
        for precision, (more, *_) in PRECISIONS.items():
            kernels = ["megatron.kernels=local"] if precision == "fp32" else []
            jobs.append(Job(f"{model}-{precision}-megatron", 1, (*words, *FEW, *more, *MEGATRON, *kernels)))
            jobs.append(Job(f"{model}-{precision}-torch", 1, (*words, *FEW, *more)))
    return root, train_all(jobs, root, timeout=150, stall=80, workers=4)


@pytest.mark.gpu
@pytest.mark.timeout(200)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", ["moe", "dense"])
def test_steps_agree_with_the_torch_backend(model: str, precision: str, trained: tuple[Path, dict[str, str | None]]) -> None:
    root, errors = trained
    _, loss, norm = PRECISIONS[precision]
    name = f"{model}-{precision}"
    assert errors[f"{name}-torch"] is errors[f"{name}-megatron"] is None, (errors[f"{name}-torch"], errors[f"{name}-megatron"])
    assert_near(root / f"{name}-megatron", root / f"{name}-torch", loss, norm)


# The same stream and the same first weights; what differs is who computes where.
FSDP: dict[str, list[str]] = {"torch FSDP2": [], "Megatron-FSDP": [*MEGATRON, "megatron.data_parallel=megatron_fsdp"]}
WAYS: dict[int, dict[str, list[str]]] = {
    2: {
        **FSDP,
        "TP 2 x EP 2": [*MEGATRON, *SEQUENCE, "parallel.ep=2", "parallel.etp=1"],
        "PP 2": [*MEGATRON, "parallel.pp=2"],
    },
    4: {
        **FSDP,
        # One rank of dp reads all four rows: two at a time keep both stages busy.
        "TP 2 x PP 2 x EP 2": [*MEGATRON, *SEQUENCE, "parallel.pp=2", "parallel.ep=2", "parallel.etp=1", "train.micro_batch_size=2"],
        "PP 2 x EP 2": [*MEGATRON, "parallel.pp=2", "parallel.ep=2"],
    },
}
"""By the number of GPUs."""
RATES = ("1e-3", "1.000001e-3", "0.999999e-3")
"""Learning rates of the repeats of a way. Most ways repeat to the last bit, and then say nothing of how far roundings carry: these are of the same seed, weights
and stream, and differ by less than the order of a sum does. As many as time leaves: every way has to run once, and two of them twice."""
HUNDRED = ["train.steps=100", "train.warmup_steps=2", "train.receipt=false", "data.seq_len=1024", "data.cache=memory"]
WIDER = ["model.num_experts=16", "model.top_k=4", "model.vision.hidden_size=128", "model.vision.ffn_size=256"]


@pytest.mark.slow
@pytest.mark.multigpu
@pytest.mark.timeout(600)
def test_ways_of_sharding_train_alike_for_a_hundred_steps(tmp_path: Path) -> None:
    """Writes the curves for the page on parity, where PLAYBOOK_PARITY names its folder; PLAYBOOK_SECONDS ends it with the runs that there are by then."""
    ranks = four_or_two()
    ways = WAYS[ranks]
    names = {(way, i): f"{number}-{i}" for i in range(len(RATES)) for number, way in enumerate(ways)}
    long = f"train.micro_batch_size={4 // ranks}"  # as few launches as four rows over the ranks allow: hosts are what takes the time
    jobs = [Job(name, ranks, (*MOE, *WIDER, *HUNDRED, long, f"optimizer.lr={RATES[i]}", *ways[way])) for (way, i), name in names.items()]
    errors = train_all(jobs, tmp_path, timeout=float(os.environ.get("PLAYBOOK_SECONDS", "540")), stall=400, workers=4)
    made = {"torch": version("torch").split("+")[0], "megatron": version("megatron-core"), "weights": "bf16"}
    made |= {} if on_gpus_of_their_own() else {"gpus": 1}
    rows: list[dict[str, Any]] = []
    for (way, i), name in names.items():
        if errors[name] is None:
            loss = [s["loss"] for s in steps(tmp_path / name)]
            rows.append({"run": way, "repeat": i, "lr": float(RATES[i]), "ranks": ranks, "loss": loss, **made})
    if folder := os.environ.get("PLAYBOOK_PARITY"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / CURVES
        before = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        others = [row for row in before if not rows or series_of(row) != series_of(rows[0])]
        path.write_text("".join(json.dumps(row) + "\n" for row in [*others, *rows]))
    wrong = {key: errors[name] for key, name in names.items() if errors[name] and not (key[1] > 0 and errors[name] == "was not reached")}
    assert not wrong, wrong
    assert sum(row["repeat"] == 1 for row in rows) >= 2, "too few repeats to tell how far they are apart"
    assert all(row["loss"][-1] < row["loss"][0] - 1 for row in rows), "nothing was learnt"
    within, across = distances(rows)
    print(f"repeats {within:.2e}; " + ", ".join(f"{pair} {far:.2e} ({far / within:.2f})" for pair, far in across.items()))
    assert max(across.values()) <= ALLOWED * within
