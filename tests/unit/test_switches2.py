"""Offload, FP8 and CUDA graphs against the plain path, on the CPU; those parts that need a GPU are in tests/gpu/test_switches2_gpu.py."""

from __future__ import annotations

import gc
from dataclasses import replace

import parity
import pytest
import torch
from test_switches import MODELS, build, document_batch

from playbook_trainer.models import offload
from playbook_trainer.models.decoder import Options
from playbook_trainer.receipt import Observer, observing


@pytest.fixture(autouse=True)
def _small_tensors_travel(monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST", 256)


def observed(config, batch, options):
    """Loss, gradients, and what an observer saw."""
    model = build(config, options)
    observer = Observer(model, {})
    with observing(observer):
        loss = model(batch)
        loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, observer


@pytest.mark.parametrize("model", ["moe", "dense", "vision"])
@pytest.mark.parametrize("recompute", [[], ["layernorm", "core_attn"], ["full"]])
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


def test_offload_that_is_switched_off_inside_is_noticed(monkeypatch):
    monkeypatch.setattr(offload.Trip, "_travels", lambda self, t, modules: False)
    config = parity.tiny("qwen3_moe_tiny")
    _, _, observer = observed(config, document_batch(config), Options(offload=True))
    assert observer.counters["offloaded_activation_bytes"] == 0


def test_offload_leaves_nothing_behind():
    config = parity.tiny("qwen3_moe_tiny")
    model = build(config, Options(offload=True))
    batch = document_batch(config)

    def step():
        model(batch).backward()

    step()
    gc.collect()
    gc.disable()
    try:
        before = len([o for o in gc.get_objects() if isinstance(o, torch.Tensor)])
        for _ in range(3):
            step()
        assert len([o for o in gc.get_objects() if isinstance(o, torch.Tensor)]) == before
        model(batch)  # a forward pass without a backward pass
        assert len([o for o in gc.get_objects() if isinstance(o, torch.Tensor)]) == before
    finally:
        gc.enable()


def test_without_gradients_nothing_travels():
    config = parity.tiny("qwen3_moe_tiny")
    model = build(config, Options(offload=True))
    observer = Observer(model, {})
    with torch.no_grad(), observing(observer):
        model(document_batch(config))
    assert not observer.counters
