"""Offload, FP8 and CUDA graphs against the plain path, on the CPU; those parts that need a GPU are in tests/gpu/test_switches2_gpu.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_switches import MODELS, TEXT, assert_nothing_stays, build, document_batch, observed

from playbook.errors import ConfigError
from playbook_trainer.config import checks
from playbook_trainer.config.tree import load
from playbook_trainer.observe.receipt import Observer, observing
from playbook_trainer.torch.build import check_device
from playbook_trainer.torch.model import graphs, offload
from playbook_trainer.torch.model.decoder import Options


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
    loss, gradients, plain = observed(config, batch, options)
    again, same, observer = observed(config, batch, replace(options, offload=True))
    assert torch.equal(again, loss)
    for name, gradient in gradients.items():
        assert torch.equal(same[name], gradient), name
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


def test_offload_leaves_nothing_behind():
    config = MODELS["moe"]()
    model, batch = build(config, Options(offload=True)), document_batch(config)
    assert_nothing_stays(lambda: model(batch).backward(), lambda: model(batch))


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
    loss, gradients, plain = observed(config, batch, Options())
    model = build(config, GRAPHED)
    assert (
        graphs.capture(model.layers.values(), config, torch.float32, batch.tokens_N.numel(), torch.device("cpu"))
        == len(functions)
        == 3 * config.num_layers
    )
    names = [getattr(f, "func", f).__name__ for f in functions]
    assert names == ["project", "choose", "sort_rows"] * config.num_layers
    observer = Observer(model, {})
    with observing(observer):
        again = model(batch)
        again.backward()
    assert torch.equal(again.detach(), loss)
    assert all(torch.equal(p.grad, gradients[n]) for n, p in model.named_parameters())
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


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"train.device": "cpu"}, "a GPU is needed"),
        ({"data.pad": False}, "data.pad: true"),
        ({"train.recompute": "full"}, "selective or none"),
        ({"train.recompute": "selective", "train.recompute_modules": ["moe"]}, "run the router again"),
        ({"train.dtype": "fp32"}, "dtype: bf16"),
        ({"parallel.tp": 2}, "parallel.tp, pp and cp to 1"),
        ({"offload.activations": True}, "offload.activations: false"),
        ({"train.compile.decoder": True}, "choose one of them"),
        ({"precision.fp8": "rowwise"}, "8-bit casts"),
        ({"train.cuda_graphs": ["moe_preprocess"]}, "name both"),
        ({"train.cuda_graphs": ["moe_router", "moe_preprocess"], "parallel.ep": 2, "moe.dispatcher": "dedup"}, "dispatcher: alltoall"),
        ({"train.cuda_graphs": ["moe_router", "moe_preprocess"], "parallel.etp": 2}, "etp: 1"),
        ({"train.cuda_graphs": ["moe"]}, "another number of rows"),
        ({"train.cuda_graphs": ["mlp"]}, "three kernels"),
        ({"model.num_experts": 0, "model.top_k": 0, "model.ffn_size": 96}, "no router"),
    ],
)
def test_graphs_that_cannot_be_are_refused_by_rule(words, expected):
    config = load(TEXT, {"train.dtype": "bf16", "train.cuda_graphs": ["attn", "moe_router"], **words})
    with pytest.raises(ConfigError, match=expected):
        checks.check(config, 2)


def test_graphs_are_refused_without_a_gpu_and_unknown_parts_always():
    config = load(TEXT, {"train.dtype": "bf16", "train.cuda_graphs": ["attn"]})
    checks.check(config, 1)
    with pytest.raises(ConfigError, match="needs a GPU, and there is none"):
        check_device(config, torch.device("cpu"))
    with pytest.raises(ConfigError, match="did you mean 'moe_router'"):
        load(TEXT, {"train.cuda_graphs": ["moe_routr"]})


def test_an_offloaded_optimizer_and_a_tied_embedding_over_stages_do_not_go_together():
    config = load(TEXT, {"offload.optimizer": True, "parallel.pp": 2, "model.tie_word_embeddings": True})
    with pytest.raises(ConfigError, match="tied embedding"):
        checks.check(config, 2)
