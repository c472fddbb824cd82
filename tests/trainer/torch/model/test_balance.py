"""Balance of experts: against megatron-core's own functions, under recompute, and in runs that count, stop and go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import torch
import torch.distributed as dist
from forking import Forks
from ranks import steps, trained
from torch import Tensor

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook_trainer.axes import Axes
from playbook_trainer.config import checks
from playbook_trainer.config.tree import ModelConfig, TrainerConfig, load
from playbook_trainer.data.collate import Document as DataDocument
from playbook_trainer.data.collate import collate
from playbook_trainer.observe.metrics import spread
from playbook_trainer.torch.model.balance import Balance, attach, balancing_loss, update_biases, updated_bias
from playbook_trainer.torch.model.decoder import Decoder, Options
from playbook_trainer.torch.model.ops import route

TEXT = data_root("configs") / "qwen3_moe_tiny.yaml"
TOKENS, EXPERTS, TOP_K = 60, 8, 2
CPU = torch.device("cpu")


def scores(seed: int = 0) -> Tensor:
    """Of a router that prefers some experts."""
    drawn = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return (2 * drawn + torch.linspace(0, 2, EXPERTS)).requires_grad_()


@pytest.mark.parametrize("normalize", [True, False])
def test_the_loss_and_its_gradient_are_megatrons(normalize: bool) -> None:
    utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    coefficient, share, given = 0.01, 0.25, torch.randn(TOKENS, TOP_K, generator=torch.Generator().manual_seed(1))

    theirs = scores()
    chosen, prob = utils.compute_routing_scores_for_aux_loss(theirs, TOP_K, "softmax")
    loss = utils.switch_load_balancing_loss_func(prob, chosen.sum(0), TOKENS, TOP_K, EXPERTS, coefficient)
    weighed, _ = utils.topk_routing_with_score_function(theirs, TOP_K, use_pre_softmax=not normalize)
    utils.MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(share)
    experts = theirs.topk(TOP_K, dim=1).indices
    (utils.MoEAuxLossAutoScaler.apply(weighed, loss).gather(1, experts) * given).sum().backward()

    own = scores()
    balance = Balance(EXPERTS, Axes(), coefficient * share, bias=False, device=CPU)
    expert_NK, prob_NK = balance.route(own, route(own, TOP_K, normalize), normalize)
    (prob_NK * given).sum().backward()

    assert torch.equal(expert_NK, experts)
    assert float(coefficient * balancing_loss(own, chosen.sum(0), TOKENS, TOP_K)) == pytest.approx(float(loss), abs=1e-6)
    assert own.grad is not None
    torch.testing.assert_close(own.grad, theirs.grad, rtol=0, atol=1e-6)
    plain = scores()
    (route(plain, TOP_K, normalize)[1] * given).sum().backward()
    assert float((own.grad - plain.grad).abs().max()) > 1e-5  # type: ignore[operator]


def test_the_loss_is_one_where_all_are_alike() -> None:
    even = torch.full((EXPERTS,), TOKENS * TOP_K / EXPERTS)
    assert float(balancing_loss(torch.zeros(TOKENS, EXPERTS), even, TOKENS, TOP_K)) == pytest.approx(1)
    worst = torch.tensor([TOKENS, TOKENS, *[0] * (EXPERTS - 2)])
    assert float(balancing_loss(torch.tensor([[50.0, 50.0, *[0.0] * 6]]).repeat(TOKENS, 1), worst, TOKENS, TOP_K)) == pytest.approx(4)


def test_the_bias_moves_as_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(utils.parallel_state, "get_tensor_and_data_parallel_group", lambda **_: None)
    load_LE = torch.tensor([[3.0, 5.0, 4.0, 4.0], [0.0, 16.0, 0.0, 0.0]])
    bias_LE = torch.randn(2, 4)
    expected = utils.get_updated_expert_bias(load_LE.clone(), bias_LE.clone(), 1e-3)
    torch.testing.assert_close(updated_bias(bias_LE, load_LE, 1e-3), expected, rtol=0, atol=0)
    assert torch.equal(torch.sign(expected - bias_LE), torch.tensor([[1.0, -1.0, 0.0, 0.0], [1.0, -1.0, 1.0, 1.0]]))


def test_the_bias_chooses_and_does_not_weigh() -> None:
    given, balance = scores().detach(), Balance(EXPERTS, Axes(), 0.0, bias=True, device=CPU)
    assert balance.bias_E is not None
    plain = route(given, TOP_K, True)
    same = balance.route(given, plain, True)
    torch.testing.assert_close(same, plain)
    balance.bias_E[3] = 2.0  # more than any probability
    expert_NK, prob_NK = balance.route(given, plain, False)
    assert (expert_NK[:, 0] == 3).all()
    torch.testing.assert_close(prob_NK, given.softmax(1).gather(1, expert_NK))


def test_figures_of_a_load() -> None:
    even, bad = [4.0, 4.0, 4.0, 4.0], [16.0, 0.0, 0.0, 0.0]
    ranks = {"ep2": 1.0, "ep4": 1.0}
    assert spread(torch.tensor([even])) == {"max_over_mean": 1.0, "entropy": pytest.approx(1), "idle": 0, **ranks}
    assert spread(torch.tensor([even, bad])) == {"max_over_mean": 4.0, "entropy": pytest.approx(0), "idle": 3, "ep2": 1.5, "ep4": 2.5}
    assert spread(torch.tensor([[0] * 4, bad]))["ep2"] == 2.0, "layers without experts do not count"


def decoder(model_config: ModelConfig, options: Options | None = None) -> Decoder:
    return parity.ours(model_config, parity.random_state(model_config), options)


def config(**words: Any) -> TrainerConfig:
    return load(TEXT, {key.replace("__", "."): value for key, value in words.items()})


@pytest.mark.parametrize("recompute", [frozenset(), frozenset({"full"}), frozenset({"moe"})], ids=["kept", "full", "moe"])
def test_gradients_and_counts_are_those_of_the_sum_of_losses_also_under_recompute(recompute: frozenset[str]) -> None:
    model_config = parity.tiny("qwen3_moe_tiny")
    batch = parity.pack([parity.Document(model_config, 40, [], 0), parity.Document(model_config, 23, [], 1)])

    own = decoder(model_config, Options(recompute=recompute))
    given = config(moe__aux_loss_coeff=40.0, moe__load_every=1, train__micro_batch_size=1, train__global_batch_size=2)
    balances = attach(own, given, Axes(), CPU)
    for balance in balances.values():
        balance.is_counting = True
    own(batch).backward()

    plain, seen = decoder(model_config), []
    for layer in plain.layers.values():
        layer.moe.router.register_forward_hook(lambda router, given, _: seen.append(given[0] @ router.weight.t()))
    total = plain(batch)
    for each in seen:
        load_E = torch.bincount(each.topk(model_config.top_k, dim=1).indices.flatten(), minlength=model_config.num_experts)
        total = total + 20.0 * balancing_loss(each, load_E, len(each), model_config.top_k)
    total.backward()
    found, expected = ({name: p.grad for name, p in model.named_parameters()} for model in (own, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert all(float(balance.load_E.sum()) == len(batch.tokens_N) * model_config.top_k for balance in balances.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"model__num_experts": 0, "model__top_k": 0, "model__expert_ffn_size": 0, "model__ffn_size": 96}, "the model is dense"),
        ({"train__cuda_graphs": ["moe_router"]}, "moe_router hides the scores"),
        ({"moe__bias_update_rate": 0.1, "checkpoint__export": "x"}, "no such bias"),
        ({"moe__bias_update_rate": 0.1, "moe__fused_router": True}, "chooses by score alone"),
        ({"backend": "megatron", "moe__bias_update_rate": 0.1}, "moe.bias_update_rate"),
        ({"backend": "megatron", "moe__load_every": 1}, "moe.load_every"),
    ],
)
def test_what_does_not_go_together_is_refused(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checks.check(config(**{"moe__aux_loss_coeff": 0.01, **words}), 1, check_packages=False)


QUICK = [
    str(TEXT),
    "train.receipt=false",
    "train.warmup_steps=1",
    "data.seq_len=64",
    "optimizer.warmup_steps=0",
    "train.deterministic=true",
    "optimizer.schedule=constant",
]


@pytest.mark.full
def test_a_run_that_goes_on_has_the_same_bias_and_writes_down_the_load(forks: Forks, tmp_path: Path) -> None:
    balanced = ["moe.aux_loss_coeff=0.01", "moe.bias_update_rate=0.01", "moe.load_every=2", "train.recompute=full", "model.num_layers=2"]

    def rows(name: str, *stops: int) -> list[dict[str, Any]]:
        saving = [f"checkpoint.dir={tmp_path / name}-saved", "checkpoint.every=2", f"output={tmp_path / name}"]
        for stop in stops:
            assert forks.run([*QUICK, *balanced, *saving, f"train.steps={stop}"]) == [0], forks.text(0)
        return [{key: row.get(key) for key in ("step", "loss", "grad_norm", "expert_load")} for row in steps(tmp_path / name)]

    whole, resumed = rows("whole", 4), rows("resumed", 2, 4)
    assert resumed == whole
    assert [row["step"] for row in whole if row["expert_load"]] == [2, 4]
    assert all(1 < row["expert_load"]["max_over_mean"] <= 4 and 0 < row["expert_load"]["entropy"] < 1 for row in whole[1::2])
    index = json.loads((tmp_path / "whole-saved" / "step_00000004" / "checkpoint.json").read_text())
    assert "balance.layers.0.moe.router.bias" in index["tensors"]
    saved = [f"checkpoint.dir={tmp_path / 'whole'}-saved", f"output={tmp_path / 'dropped'}", "train.steps=9"]
    assert forks.run([*QUICK, "model.num_layers=2", "moe.aux_loss_coeff=0.01", *saved]) == [2]
    assert "moe.bias_update_rate 0 would drop them" in forks.text(0)


@pytest.mark.full
def test_both_balance_what_a_router_does_not(tmp_path: Path) -> None:
    load = {}
    for name, words in {"none": [], "loss": ["moe.aux_loss_coeff=1"], "bias": ["moe.bias_update_rate=0.003"]}.items():
        run = [*QUICK, "train.steps=35", "moe.load_every=35", "data.seq_len=128", "model.num_layers=2", *words]
        load[name] = steps(trained(tmp_path / name, 1, *run))[-1]["expert_load"]
    for name in ("loss", "bias"):
        assert load[name]["max_over_mean"] < 0.8 * load["none"]["max_over_mean"], load
        assert load[name]["entropy"] > 2 * load["none"]["entropy"], load


BALANCED = [
    "moe.aux_loss_coeff=0.5",
    "moe.bias_update_rate=0.001",
    "moe.load_every=1",
    "train.global_batch_size=4",
    "train.steps=3",
    "data.seq_len=128",
    "data.pack=false",
    "seed=0",
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The steps of one rank."""
    return steps(trained(tmp_path_factory.mktemp("alone"), 1, *QUICK, *BALANCED))


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.cp=2", "parallel.ep=2"],
        ["parallel.tp=2", "parallel.sequence_parallel=true"],
        ["parallel.tp=2", "parallel.etp=1"],
        ["parallel.pp=2", "train.recompute=full"],
    ],
    ids=lambda words: " ".join(words),
)
def test_every_layout_balances_as_one_rank(layout: list[str], alone: list[dict[str, Any]], tmp_path: Path) -> None:
    for a, b in zip(alone, steps(trained(tmp_path, 2, *QUICK, *BALANCED, *layout)), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert b["expert_load"] == pytest.approx(a["expert_load"], abs=1e-6)


def test_padding_counts_for_nothing() -> None:
    """Gradients, choices and bias of padded rows are those of the same documents without padding."""
    given = config(moe__aux_loss_coeff=40.0, moe__bias_update_rate=0.01, data__seq_len=96, data__pack=False)
    rows = [[DataDocument(np.arange(start, start + n) % 250)] for start, n in ((0, 90), (7, 3), (31, 11), (3, 40))]
    model_config = given.model
    found = {}
    for pad in (True, False):
        batch = collate(rows, model_config, given.data.model_copy(update={"pad": pad}))
        assert (batch.real_N is not None) == pad
        model = decoder(model_config)
        balances = attach(model, given, Axes(), CPU)
        model(batch).backward()
        loads = torch.stack([balance.load_E for balance in balances.values()])
        update_biases(list(balances.values()), 0.01, Axes())
        biases = torch.stack([balance.bias_E for balance in balances.values() if balance.bias_E is not None])
        found[pad] = loads, biases, [p.grad for p in model.parameters()]
    torch.testing.assert_close(found[True][:2], found[False][:2], rtol=0, atol=0)
    assert float(found[True][0][0].sum()) == (90 + 3 + 11 + 40) * model_config.top_k
    torch.testing.assert_close(found[True][2], found[False][2], rtol=1e-4, atol=1e-5)
