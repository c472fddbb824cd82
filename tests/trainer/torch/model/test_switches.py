"""Each switch of memory and speed against the plain path, on the CPU; those that need a GPU are in tests/gpu/test_switches_gpu.py."""

from __future__ import annotations

import gc
from dataclasses import replace

import parity
import pytest
import torch
from torch.nn.functional import linear

from playbook.errors import ConfigError, FileError
from playbook.paths import data_root
from playbook_trainer.axes import Axis
from playbook_trainer.config import checks
from playbook_trainer.config.tree import CompileConfig, load
from playbook_trainer.data.batch import Batch
from playbook_trainer.observe.metrics import compile_counters
from playbook_trainer.observe.receipt import Observer, observing
from playbook_trainer.torch import optimizer
from playbook_trainer.torch.build import _compiled, check_device, compile_regions
from playbook_trainer.torch.model import graphs, offload
from playbook_trainer.torch.model.attention import attend, cudnn_width
from playbook_trainer.torch.model.decoder import Experts, Options
from playbook_trainer.torch.model.ops import compiled, swiglu
from playbook_trainer.torch.model.recompute import recomputed
from playbook_trainer.torch.parallel import context
from playbook_trainer.torch.parallel.tensor import linear_cross_entropy, plain_rows

TEXT = data_root("configs") / "qwen3_moe_tiny.yaml"
DENSE = {"model.num_experts": 0, "model.top_k": 0, "model.expert_ffn_size": 0, "model.ffn_size": 96}


def build(config, options=None):
    return parity.ours(config, parity.random_state(config), options)


def observed(model, batch):
    """Loss, gradients, and what an observer saw."""
    observer = Observer(model, {})
    with observing(observer):
        loss = model(batch)
        loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, observer


def tensors_alive():
    return len([o for o in gc.get_objects() if isinstance(o, torch.Tensor)])


def document_batch(config, grids=()):
    return parity.pack([parity.Document(config, 40, list(grids), 0), parity.Document(config, 23, [], 1)])


MODELS = {
    "moe": lambda: parity.tiny("qwen3_moe_tiny", num_layers=3),
    "dense": lambda: parity.dense("qwen3_moe_tiny"),
    "vision": lambda: parity.tiny("qwen3_vl_moe_tiny", num_layers=2),
}


@pytest.mark.parametrize(
    ("model", "modules"),
    [
        ("moe", ["layernorm"]),
        ("moe", ["core_attn"]),
        ("moe", ["moe_act"]),
        ("moe", ["moe"]),
        ("dense", ["mlp"]),
        ("vision", ["vision"]),
        ("moe", ["layernorm", "core_attn", "moe_act"]),
        ("moe", ["layernorm", "core_attn", "moe"]),
        ("moe", ["full"]),
        ("vision", ["full"]),
    ],
)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.sample(
    "True-moe-modules0", "True-moe-modules3", "False-dense-modules4", "False-vision-modules5", "True-moe-modules7", "True-moe-modules8"
)
def test_recompute_keeps_less_and_changes_no_bit(model, modules, grouped):
    config = MODELS[model]()
    batch = document_batch(config, [(1, 4, 6)] if model == "vision" else [])
    plain = Options(grouped=grouped)
    loss, gradients, kept = observed(build(config, plain), batch)
    again, same, made = observed(build(config, replace(plain, recompute=frozenset(modules))), batch)
    assert torch.equal(again, loss)
    # Off the GPU a norm is several operators, whose gradients reach its input one by one: recomputed, they are added up before they do.
    # How far apart the two sums are depends on the processor's products: 32 roundings of float32, and none where nothing is added up otherwise.
    tolerance = 32 * torch.finfo(torch.float32).eps if {"layernorm", "full"} & {*modules} else 0.0
    for name, gradient in gradients.items():
        assert float((same[name] - gradient).norm() / gradient.norm()) <= tolerance, name
    assert made.saved.peak < kept.saved.peak
    assert kept.ranges["recompute"] == 0
    assert made.ranges["recompute"] >= len({"layernorm", "core_attn"} & {*modules}) * config.num_layers


def test_what_a_norm_makes_is_not_kept():
    config = parity.dense("qwen3_moe_tiny")
    batch = document_batch(config)
    saved, less = (observed(build(config, Options(recompute=frozenset(r))), batch)[2].saved.peak for r in ((), ("layernorm",)))
    # Off the GPU, what the operators of a norm keep among themselves goes as well.
    assert saved - less >= 2 * config.num_layers * batch.tokens_N.numel() * config.hidden_size * 4


def test_a_recomputed_output_may_be_read_through_views_and_by_several():
    torch.manual_seed(0)
    x, w, a, b = (torch.randn(6, 6, requires_grad=True) for _ in range(4))

    def run(on):
        for t in (x, w, a, b):
            t.grad = None
        with recomputed(on, lambda s, t: torch.tanh(s @ t), x, w) as y:
            z = (y[1:3] @ a).sum() + (y.t() @ b).square().sum() + (y * y).sum()
        z.backward()
        return z.detach(), [t.grad.clone() for t in (x, w, a, b)]

    (one, plain), (two, again) = run(False), run(True)
    assert torch.equal(one, two)
    assert all(torch.equal(p, q) for p, q in zip(plain, again, strict=True))


@pytest.mark.parametrize(
    "options",
    [Options(recompute=frozenset({"layernorm", "moe_act", "core_attn"})), Options(offload=True)],
    ids=["recompute", "offload"],
)
def test_after_the_first_pass_none_leaves_a_tensor_to_the_collector(options):
    config = MODELS["moe"]()
    model, batch = build(config, options), document_batch(config)
    model(batch).backward()
    gc.collect()
    gc.disable()
    try:
        before = tensors_alive()
        for _ in range(3):
            model(batch).backward()
            if options.offload:  # whose forward pass may stay alone
                model(batch)
        assert tensors_alive() == before
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("key", "given", "right"),
    [
        ("train.recompute_modules", "up_proj", "mla_up_proj"),
        ("train.recompute_modules", "norm", "layernorm"),
        ("train.recompute_modules", "attention", "core_attn"),
        ("train.recompute_modules", "swiglu", "moe_act"),
        ("train.recompute_modules", "moe_actt", "moe_act"),
        ("train.cuda_graphs", "moe_routr", "moe_router"),
        ("train.freeze", "vision_tower", "vision"),
        ("train.freeze", "llm", "language_model"),
    ],
)
def test_a_wrong_name_of_a_part_is_answered_with_the_right_one(key, given, right):
    with pytest.raises((ConfigError, FileError), match=f"did you mean '{right}'"):
        load(TEXT, {"train.recompute": "selective", key: [given]})


GRAPHS = {"train.dtype": "bf16", "train.cuda_graphs": ["attn", "moe_router"]}
SPLIT = {"optimizer.master_weights": "remainder", "train.dtype": "bf16", "parallel.reduce_dtype": "bf16"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"train.recompute": "selective"}, "names no modules"),
        ({"train.recompute": "full", "train.recompute_modules": ["moe"]}, "needs train.recompute: selective"),
        ({"train.recompute": "selective", "train.recompute_modules": ["mla_up_proj"]}, "grouped-query attention"),
        ({"train.recompute": "selective", "train.recompute_modules": ["shared_experts"]}, "no shared experts"),
        ({"train.recompute": "selective", "train.recompute_modules": ["mlp"]}, "they are 'moe'"),
        ({"train.recompute": "selective", "train.recompute_modules": ["vision"]}, "no vision tower"),
        ({"train.recompute": "selective", "train.recompute_modules": ["moe", "moe_act"]}, "leave out 'moe_act'"),
        ({"optimizer.moments_dtype": "bf16", "optimizer.betas": [0.9, 0.999]}, "stand still"),
        ({"train.fused_loss": True, "train.dtype": "fp32"}, "16-bit logits"),
        ({"train.fused_loss": True, "train.compile.loss": True, "train.dtype": "bf16"}, "choose one"),
        ({"train.fused_loss": True, "train.dtype": "bf16", "train.device": "cpu"}, "needs a GPU"),
        ({"moe.fused_permutation": True, "train.device": "cpu"}, "needs a GPU"),
        ({"moe.fused_permutation": True, "parallel.ep": 2, "moe.dispatcher": "allgather"}, "not allgather"),
        ({"moe.fused_router": True, "train.device": "cpu"}, "needs a GPU"),
        ({"moe.fused_router": True, "moe.router_dtype": "bf16"}, "set moe.router_dtype: fp32"),
        ({"moe.fused_router": True, "model.num_experts": 1024}, "not 2 of 1024"),
        ({"moe.fused_router": True, "model.num_experts": 64, "model.top_k": 17}, "not 17 of 64"),
        ({"moe.fused_router": True, **DENSE}, "the model is dense"),
        ({"moe.apply_probs_on": "activation", "parallel.ep": 2, "moe.dispatcher": "dedup"}, "not dedup"),
        ({"optimizer.fused": True, "offload.optimizer": True}, "choose one"),
        (SPLIT | {"train.dtype": "fp32"}, "optimizer.master_weights remainder: .*: set train.dtype: bf16"),
        (SPLIT | {"parallel.reduce_dtype": "fp32"}, "optimizer.master_weights remainder: .*: set parallel.reduce_dtype: bf16"),
        (SPLIT | {"parallel.fsdp": False}, "optimizer.master_weights remainder: .*: set parallel.fsdp: true"),
        (SPLIT | {"offload.optimizer": True}, "optimizer.master_weights remainder: .*: set offload.optimizer: false"),
        ({"optimizer.fused": True, "train.device": "cpu"}, "needs a GPU"),
        ({"train.fused_activation": True, "train.device": "cpu"}, "needs a GPU"),
        ({"train.fused_norms": True, "model.head_dim": 48, "model.num_heads": 2, "model.num_kv_heads": 1}, "power of two"),
        ({"train.attention": "cudnn"}, "16-bit numbers"),
        ({"train.attention": "cudnn", "train.dtype": "bf16", "parallel.cp": 2}, "does not serve cp_comm allgather"),
        ({"train.attention": "cudnn", "train.dtype": "bf16", "parallel.cp": 2, "parallel.cp_comm": "ring"}, "does not serve cp_comm ring"),
        ({"moe.fused_permutation": True, **DENSE}, "moe.fused_permutation is about experts"),
        ({"moe.apply_probs_on": "activation", **DENSE}, "moe.apply_probs_on is about experts"),
        ({"moe.experts": "grouped", **DENSE}, "moe.experts is about experts"),
        ({"moe.router_dtype": "bf16", "train.dtype": "bf16", **DENSE}, "moe.router_dtype is about experts"),
        ({"moe.router_dtype": "bf16"}, "leaves the router in train.dtype, which is fp32"),
        ({"train.compile.vision": True}, "the model has no vision tower"),
        ({"train.compile.loss": True, "parallel.tp": 2}, "no collectives"),
        ({"offload.optimizer": True, "parallel.pp": 2, "model.tie_word_embeddings": True}, "tied embedding"),
        ({"precision.fp8": "mxfp8"}, "from Blackwell on"),
        ({"precision.fp8": "nvfp4"}, "4-bit units"),
        ({"precision.fp8": "delayed"}, "megatron backend"),
        ({"precision.fp8": "tensorwise"}, "megatron backend"),
        ({"precision.fp8": "blockwise"}, "no grouped product"),
        ({"precision.fp8": "blockwise", "precision.fp8_modules": ["linear"]}, "multiples of 128"),
        ({"precision.fp8": "rowwise", "precision.fp8_modules": []}, "nothing to do"),
        ({"precision.fp8": "rowwise", "moe.experts": "loop"}, "one grouped product"),
        ({"precision.fp8": "rowwise", "model.hidden_size": 72}, "model.hidden_size 72"),
        (GRAPHS | {"train.device": "cpu"}, "a GPU is needed"),
        (GRAPHS | {"data.pad": False}, "data.pad: true"),
        (GRAPHS | {"train.recompute": "full"}, "selective or none"),
        (GRAPHS | {"train.recompute": "selective", "train.recompute_modules": ["moe"]}, "run the router again"),
        (GRAPHS | {"train.dtype": "fp32"}, "dtype: bf16"),
        (GRAPHS | {"parallel.tp": 2}, "parallel.tp, pp and cp to 1"),
        (GRAPHS | {"offload.activations": True}, "offload.activations: false"),
        (GRAPHS | {"train.compile.decoder": True}, "choose one of them"),
        (GRAPHS | {"precision.fp8": "rowwise"}, "8-bit casts"),
        (GRAPHS | {"train.cuda_graphs": ["moe_preprocess"]}, "name both"),
        (
            GRAPHS | {"train.cuda_graphs": ["moe_router", "moe_preprocess"], "parallel.ep": 2, "moe.dispatcher": "dedup"},
            "dispatcher: alltoall",
        ),
        (GRAPHS | {"train.cuda_graphs": ["moe_router", "moe_preprocess"], "parallel.etp": 2}, "etp: 1"),
        (GRAPHS | {"train.cuda_graphs": ["moe"]}, "another number of rows"),
        (GRAPHS | {"train.cuda_graphs": ["mlp"]}, "three kernels"),
        (GRAPHS | {"model.num_experts": 0, "model.top_k": 0, "model.ffn_size": 96}, "no router"),
    ],
)
def test_switches_that_cannot_work_are_refused_by_rule(words, expected):
    config = load(TEXT, words)
    with pytest.raises(ConfigError, match=expected):
        checks.check(config, 2)


@pytest.mark.parametrize("words", [{"precision.fp8": "rowwise"}, {"train.cuda_graphs": ["attn"], "train.dtype": "bf16"}])
def test_switches_that_can_work_are_not_refused(words):
    checks.check(load(TEXT, words), 1)


@pytest.mark.parametrize(
    "words",
    [
        {"train.cuda_graphs": ["attn"]},
        {"moe.fused_permutation": True},
        {"moe.fused_router": True},
        {"train.fused_loss": True},
        {"train.fused_activation": True},
        {"train.fused_norms": True},
        {"optimizer.fused": True},
        {"train.attention": "cudnn"},
    ],
)
def test_switches_that_need_a_gpu_are_refused_without_one(words):
    with pytest.raises(ConfigError, match="needs a GPU"):
        check_device(load(TEXT, {"train.dtype": "bf16", **words}), torch.device("cpu"))


def test_context_parallel_attention_is_computed_as_asked_for_or_refused(monkeypatch):
    """Gathered keys go to the kernel of train.attention; a ring has its own, which on a GPU is flash."""
    asked = []
    monkeypatch.setattr(context, "all_gather", lambda x, axis: torch.cat([x] * axis.size))
    monkeypatch.setattr(context, "attend", lambda q, *_, backend="auto", **__: asked.append(backend) or q)
    axis, cu, places = Axis("cp", 2), torch.tensor([0, 8], dtype=torch.int32), torch.arange(8)
    plan = context.split(Batch(places, places, places, cu, 8, 8, 8, 0), axis, "allgather")
    x = torch.zeros(4, 2, 4)
    context.attend_across(x, x, x, plan, axis, "plain")
    assert asked == ["plain"] * 2
    config = load(TEXT, {"train.dtype": "bf16", "train.attention": "plain", "parallel.cp": 2, "parallel.cp_comm": "ring"})
    check_device(config, torch.device("cpu"))
    with pytest.raises(ConfigError, match="computed by flash on a GPU"):
        check_device(config, torch.device("cuda"))


@pytest.mark.parametrize(("moments", "low", "high"), [(torch.float32, 0, 2e-5), (torch.bfloat16, 1e-4, 5e-3)])
def test_adamw_is_torchs_but_for_the_rounding_of_its_moments(moments, low, high, monkeypatch):
    monkeypatch.setattr(optimizer, "PIECE", 7)
    torch.manual_seed(0)
    one, two = (torch.nn.Parameter(torch.ones(25, 25)) for _ in range(2))
    how = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    theirs, ours = torch.optim.AdamW([one], **how), optimizer.AdamW([{"params": [two]}], moments=moments, **how)
    for _ in range(5):
        one.grad = torch.randn(25, 25)
        two.grad = one.grad.clone()
        theirs.step()
        ours.step()
    assert low <= float((two - one).norm() / (one - 1).norm()) < high
    if moments == torch.float32:
        torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-7)
    assert ours.state[two]["exp_avg"].dtype == ours.state[two]["exp_avg_sq"].dtype == moments


@pytest.mark.parametrize("chunk", [5, 16, 4096])
def test_chunked_loss_against_float64(chunk):
    torch.manual_seed(0)
    x, w = torch.randn(48, 16), torch.randn(96, 16)
    labels = torch.randint(0, 96, (48,))
    labels[::7] = -100
    ours = [t.clone().requires_grad_() for t in (x, w)]
    exact = [t.double().requires_grad_() for t in (x, w)]
    loss = linear_cross_entropy(*ours, labels, Axis("tp"), chunk)
    loss.backward()
    reference = torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), labels, reduction="sum")
    reference.backward()
    assert float((loss - reference).abs() / reference) < 1e-6
    for a, b in zip(ours, exact, strict=True):
        assert float((a.grad - b.grad).norm() / b.grad.norm()) < 1e-6


def test_narrow_router_differs_by_rounding_only():
    config = MODELS["moe"]()
    batch = document_batch(config)
    wide, narrow = (build(config, Options(router_wide=w)) for w in (True, False))
    torch.testing.assert_close(narrow(batch), wide(batch), rtol=1e-6, atol=0)  # in 32 bits both are the same computation


LENGTHS = [(40, 23), (31, 8), (50, 50), (12, 61), (44, 9)]


@pytest.mark.full
def test_marked_shapes_compile_once_and_static_ones_for_ever():
    config = parity.tiny("qwen3_vl_moe_tiny", num_layers=1)
    plain, grown = build(config), {}
    for dynamic in ("marked", "static"):
        torch._dynamo.reset()
        settings = CompileConfig(decoder=True, loss=True, vision=True, backend="eager", dynamic=dynamic)
        ops = compiled(lambda f, s=settings: _compiled(f, config=s))
        model, counts = build(config, Options(ops=ops, loss_rows=_compiled(plain_rows, config=settings))), []
        compile_regions(model, settings)
        for number, (a, b) in enumerate(LENGTHS):
            batch = parity.pack([parity.Document(config, a, [(1, 4, 4 + 2 * number)], number), parity.Document(config, b, [], number + 9)])
            loss = model(batch)
            loss.backward()
            counts.append(compile_counters()["recompiles"])
            torch.testing.assert_close(loss.detach(), plain(batch).detach(), rtol=1e-5, atol=0)
        grown[dynamic] = counts[-1] - counts[1]
    assert grown["marked"] == 0
    assert grown["static"] >= 3


def test_experts_with_one_row_or_none_are_not_compiled_anew():
    """The activation is of all rows at once, also where the products are one after the other: no size of 0 or 1 reaches compiled code."""
    config, seen = MODELS["moe"](), []

    def spied(h_RF):
        seen.append(h_RF.shape[0])
        return swiglu(h_RF)

    model = build(config, Options(ops=replace(compiled(lambda f: f), swiglu=spied)))
    experts = next(m for m in model.modules() if isinstance(m, Experts))
    rows = torch.randn(9, config.hidden_size)
    counts = torch.zeros(config.num_experts, dtype=torch.int64)
    counts[0], counts[1], counts[-1] = 1, 5, 3
    out = experts(rows, counts)
    assert seen == [9]
    for e, part, found in zip((0, 1, -1), rows.split([1, 5, 3]), out.split([1, 5, 3]), strict=True):
        torch.testing.assert_close(linear(swiglu(linear(part, experts.w13[e])), experts.w2[e]), found)


def test_heads_filled_with_zeros_attend_alike():
    """What the vision tower does for cuDNN, which is wrong or slow at other head sizes than 64 and 128."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(30, 4, 18) for _ in range(3))
    cu = torch.tensor([0, 7, 30], dtype=torch.int32)
    narrow = attend(q, k, v, cu, cu, 23, 23, causal=False)
    wide = attend(*(torch.nn.functional.pad(t, (0, 46)) for t in (q, k, v)), cu, cu, 23, 23, causal=False, scale=18**-0.5)
    assert torch.allclose(wide[..., :18], narrow, atol=1e-6)
    assert not wide[..., 18:].any()
    assert [cudnn_width(d) for d in (18, 64, 72, 128, 160)] == [64, 64, 128, 128, 160]


@pytest.fixture(autouse=True)
def _small_tensors_travel(monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST", 256)


@pytest.mark.parametrize("model", ["moe", "dense", "vision"])
@pytest.mark.parametrize("recompute", [[], ["layernorm", "core_attn"], ["full"]])
@pytest.mark.sample("recompute0-moe", "recompute1-vision")
def test_offloaded_activations_leave_the_device_and_change_no_bit(model, recompute):
    config = MODELS[model]()
    batch = document_batch(config, [(1, 4, 6)] if model == "vision" else [])
    options = Options(recompute=frozenset(recompute))
    loss, gradients, plain = observed(build(config, options), batch)
    again, same, observer = observed(build(config, replace(options, offload=True)), batch)
    assert torch.equal(again, loss)
    torch.testing.assert_close(same, gradients, rtol=0, atol=0)
    assert observer.ranges["offload"] == observer.ranges["prefetch"] == config.num_layers - 1
    gone = observer.counters["offloaded_activation_bytes"]
    assert plain.counters["offloaded_activation_bytes"] == 0
    assert 0 < plain.saved.peak - observer.saved.peak <= gone
    # A layer keeps at least its input.
    assert gone >= (config.num_layers - 1) * batch.tokens_N.numel() * config.hidden_size * 4


def test_a_storage_travels_once_and_parameters_stay():
    layer = torch.nn.Linear(64, 64, bias=False)
    x = torch.randn(32, 64, requires_grad=True)
    trip = offload.Trip(x.device, keep=())
    observer = Observer(layer, {})
    with observing(observer):
        y = trip.through(layer, lambda t: layer(t) * t[:, :1] + torch.tanh(t.t()).t(), x)
        trip.end(y)
        y.sum().backward()
    # x (for both products and as a column), the linear's output and tanh's; never the weight.
    assert observer.counters["offloaded_activation_bytes"] == 3 * x.numel() * 4


def test_without_gradients_nothing_travels():
    config = MODELS["moe"]()
    model = build(config, Options(offload=True))
    observer = Observer(model, {})
    with torch.no_grad(), observing(observer):
        model(document_batch(config))
    assert observer.counters["offloaded_activation_bytes"] == 0


GRAPHED = Options(graphs=frozenset({"attn", "moe_router", "moe_preprocess"}))


def stand_in(monkeypatch, functions):
    """Capture without a GPU: the functions themselves, called with the samples once as a capture would."""

    def capture(callables, samples):
        for f, sample in zip(callables, samples, strict=True):
            functions.append(f)
            f(*sample)
        return callables

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)


def test_graphed_parts_are_the_whole_model_cut_otherwise(monkeypatch):
    functions = []
    stand_in(monkeypatch, functions)
    config = MODELS["moe"]()
    batch = document_batch(config)
    loss, gradients, plain = observed(build(config), batch)
    model = build(config, GRAPHED)
    assert (
        graphs.capture(model.layers.values(), config, torch.float32, batch.tokens_N.numel(), torch.device("cpu"))
        == len(functions)
        == 3 * config.num_layers
    )
    names = [getattr(f, "func", f).__name__ for f in functions]
    assert names == ["project", "choose", "sort_rows"] * config.num_layers
    again, same, observer = observed(model, batch)
    assert torch.equal(again, loss)
    torch.testing.assert_close(same, gradients, rtol=0, atol=0)
    assert observer.counters["graph_replays"] == 3 * config.num_layers
    assert plain.counters["graph_replays"] == 0


def test_another_shape_or_an_evaluation_replays_nothing(monkeypatch):
    stand_in(monkeypatch, [])
    config = MODELS["moe"]()
    batch = document_batch(config)
    model = build(config, GRAPHED)
    graphs.capture(model.layers.values(), config, torch.float32, batch.tokens_N.numel() + 1, torch.device("cpu"))
    observer = Observer(model, {})
    with observing(observer):
        model(batch).backward()
    graphs.capture(model.layers.values(), config, torch.float32, batch.tokens_N.numel(), torch.device("cpu"))
    with observing(observer), torch.no_grad():
        model(batch)
    assert observer.counters["graph_replays"] == 0
