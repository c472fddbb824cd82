"""LoRA, QLoRA and ZeRO: parts against hand-made sums and against torch, and one answer from every command."""

from __future__ import annotations

from pathlib import Path

import in_process
import pytest

from playbook.cards import search
from playbook.cards.load import load_all
from playbook.diagnosis.actions import actions
from playbook.diagnosis.setting import Figures, measured, setting
from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook.planner import flops, memory, traffic
from playbook.planner.choice.search import plan_layouts
from playbook.planner.choice.space import Question, held
from playbook.planner.hardware import machine
from playbook.planner.models import MODELS
from playbook.planner.options import FRAMEWORKS, Options
from playbook.planner.parameters import adapter_parameters, decoder, embedding
from playbook.planner.plan import Plan, parse
from playbook.planner.runs.predict import Prediction, predict
from playbook.planner.runs.table import read_runs
from playbook.planner.time.step import step_time

LLAMA, MIXED = MODELS["llama3_8b"], MODELS["qwen3_30b_a3b"]
WIDTH, INNER, KEYS = 4096, 14336, 1024
QUERY, KEY, OUT, UP = WIDTH + WIDTH, WIDTH + KEYS, WIDTH + WIDTH, WIDTH + INNER


def plan_of(words: str, model: str = "llama3_8b") -> Plan:
    return parse(model, words.split())


@pytest.mark.parametrize(
    ("words", "sides"),
    [
        ("", (WIDTH + WIDTH + 2 * KEYS) + OUT + (WIDTH + 2 * INNER) + UP),
        ("lora_targets=q,v", QUERY + KEY),
        ("backend=torch", QUERY + 2 * KEY + OUT + 3 * UP),
        ("backend=torch lora_targets=attention", QUERY + 2 * KEY + OUT),
        ("backend=torch lora_targets=down,mlp", 3 * UP),
    ],
)
def test_adapters_are_pairs_beside_the_matrices_that_are_named(words: str, sides: int) -> None:
    assert adapter_parameters(LLAMA, 0, plan_of(f"lora=16 {words}").options) == 16 * sides


def test_experts_share_an_adapter_in_megatron_and_have_their_own_in_peft_where_they_are_named() -> None:
    one = 2 * MIXED.hidden + 3 * MIXED.expert_ffn  # the hidden width into both products and out of them, gate, up and down
    parts = {
        backend: [
            adapter_parameters(MIXED, 0, Options(backend=backend, lora=8, lora_targets=t))
            for t in (("attention",), ("attention", "experts"))
        ]
        for backend in ("megatron", "torch")
    }
    assert parts["megatron"][1] - parts["megatron"][0] == 8 * one
    assert parts["torch"][1] - parts["torch"][0] == MIXED.experts * 8 * one
    assert adapter_parameters(MIXED, 0, Options(backend="torch", lora=8)) == parts["torch"][0], (
        "peft's all-linear does not reach stacked experts"
    )


def test_a_frozen_weight_costs_four_floating_point_operations_a_token_and_an_adapter_six() -> None:
    o = Options(lora=16)
    adapters = sum(adapter_parameters(LLAMA, i, o) for i in range(LLAMA.layers))
    matrices = decoder(LLAMA) - embedding(LLAMA) - (2 * LLAMA.layers + 1) * WIDTH
    attention = flops.BACKWARD * flops.forward(LLAMA, 4096)["attention"]
    assert flops.trained_per_token(LLAMA, 4096, o) == pytest.approx(4 * matrices + 6 * adapters + attention, rel=1e-12)
    assert flops.trained_per_token(LLAMA, 4096) == flops.per_token(LLAMA, 4096)


@pytest.mark.parametrize("model", ["llama3_8b", "qwen3_30b_a3b"])
def test_diagnose_plan_and_plan_check_say_the_same_of_a_lora_run(tmp_path: Path, model: str) -> None:
    ep = {"llama3_8b": 1, "qwen3_30b_a3b": 8}[model]
    layout = {"mbs": "1", "ep": str(ep), "lora": "16", "recompute": "none", **({"dispatcher": "alltoall"} if ep > 1 else {})}
    words = tuple(f"{k}={'' if v == 'none' else v}" for k, v in layout.items())
    h100 = machine("h100")
    question = Question(MODELS[model], model, h100, 8, gbs=64, fixed=(*words, "tp=1", "pp=1", "cp=1", "etp=1", "ep_overlap=false"))
    planned = plan_layouts(question).choices[0]
    where = setting(MODELS[model], model, "h100", 8, seq_len=4096, gbs=64, known=words)
    assert where.plan is not None
    run = {"model": model, "hardware": "h100", "gpus": "8", "precision": "bf16", "seq_len": "4096", "gbs": "64", "tp": "1", "cp": "1", "pp": "1",
           "etp": "1", "task": "lora", "routing": "balanced", **layout}  # fmt: skip
    table = tmp_path / "runs.csv"
    table.write_text(f"{','.join(run)}\n{','.join(run.values())}\n", encoding="utf-8")
    checked = predict(read_runs(table)[0][0])
    assert isinstance(checked, Prediction)
    mine = step_time(where.plan, h100)
    speeds = [planned.speed, mine.tokens_per_s_per_gpu.value, checked.tokens_per_s_per_gpu]
    assert speeds == pytest.approx([planned.speed] * 3, rel=1e-9)
    assert [planned.peak, held(where.plan), checked.memory_bytes] == pytest.approx([planned.peak] * 3)
    assert [where.flops_per_token, checked.flops_per_token] == [flops.trained_per_token(MODELS[model], 4096, Options(lora=16))] * 2
    shown = measured(where, Figures(tokens_per_s_per_gpu=planned.speed))
    assert shown is not None
    assert shown.mfu == pytest.approx(planned.time.mfu) == pytest.approx(mine.mfu)
    full = step_time(parse(model, [w for w in (*words, "gpus=8", "gbs=64") if "lora" not in w]), h100)
    assert planned.speed > 1.02 * full.tokens_per_s_per_gpu.value


def test_what_is_proposed_for_a_lora_run_is_lora_and_its_peers_are(capsys) -> None:  # type: ignore[no-untyped-def]
    words = ("--model", "qwen3_30b_a3b", "--gpus", "16", "--gpu", "h100", "--mfu", "10", "--layout", "lora=32,ep=8")
    found = in_process.document(capsys, "diagnose", *words)
    assert "lora=32" in found["predicted"]["best"]["settings"]
    assert found["published"]["rows"]
    assert found["published"]["shared"].startswith("of LoRA of ")


N = 1000
"""Parameters, none of them of experts."""


@pytest.mark.parametrize(
    ("backend", "word", "per_parameter"),
    [
        ("megatron", "ddp", 2 + 4 + 12), ("megatron", "zero1", 2 + 4 + 12 / 8), ("megatron", "zero2", 2 + (4 + 12) / 8), ("megatron", "zero3", 18 / 8),
        ("torch", "ddp", 4 + 4 + 8), ("torch", "fsdp", 16 / 8), ("torch", "zero1", 2 + 2 + 12 / 8), ("torch", "zero2", 2 + (2 + 12) / 8),
        ("torch", "zero3", 16 / 8), ("torch", "hsdp", 16 / 8), ("megatron", "hsdp", 18 / 8),
    ],
)  # fmt: skip
def test_the_stages_of_zero_share_out_what_the_paper_says(backend: str, word: str, per_parameter: float) -> None:
    gpus = 16 if word == "hsdp" else 8  # two nodes, each with a copy
    plan = plan_of(f"gpus={gpus} backend={backend} sharding={word}")
    assert plan.broken() == []
    assert sum(memory.state_bytes(plan, memory.Weights(N, 0, N, N))) == pytest.approx(N * per_parameter)


def test_a_base_in_four_bits_has_half_a_byte_and_its_scales() -> None:
    held_ = memory.Weights(dense=N, experts=0, linear=800, largest=0, frozen_dense=N, adapters=10)
    params, grads, optimizer = memory.state_bytes(plan_of("backend=torch lora=16 base=nf4"), held_)
    assert params == pytest.approx(800 * (0.5 + 4 / 64) + 200 * 2 + 10 * 4)
    assert (grads, optimizer) == (10 * 4, 10 * 8)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "sharding=zero4",
            "sharding zero4 is not known; set sharding to one of ddp, fsdp, fsdp2, hsdp, none, optimizer, zero1, zero2, zero3",
        ),
        ("lora=8 lora_targets=w1", "lora_targets w1 is not known; set lora_targets to one of attention, down, experts"),
        ("lora=8 base=int4", "base int4 is not known; set base to one of nf4"),
        ("lora=8 lora_targets=experts", "adapters of experts on a model without experts"),
        ("lora=8 base=nf4 fp8=blockwise", "a base in 4 bits excludes FP8 products"),
        ("gpus=8 pp=2 gbs=16 backend=torch sharding=zero2", "DeepSpeed's zero2 excludes a pipeline, found pp 2"),
        ("gpus=8 backend=torch sharding=ddp optimizer_offload=100", "an optimizer on the host needs data parallelism that shards"),
        ("gpus=8 backend=torch optimizer_offload=50", "FSDP2 has all of its shards on the host or none, found optimizer_offload 50"),
    ],
)
def test_what_does_not_go_together_is_said(words: str, says: str) -> None:
    found = plan_of(words).broken()
    assert len(found) == 1
    assert found[0].startswith(says)


@pytest.mark.parametrize(
    ("words", "gone"),
    [("sharding=zero2", (0, 2 / 8, 12 / 8)), ("sharding=zero1", (0, 0, 12 / 8)), ("sharding=fsdp", (4 / 8, 4 / 8, 8 / 8))],
)
def test_an_optimizer_on_the_host_takes_what_its_trainer_moves(words: str, gone: tuple[float, float, float]) -> None:
    both = [memory.estimate(plan_of(f"gpus=8 backend=torch {words} {more}"))[0] for more in ("", "optimizer_offload=100")]
    count = both[0].held
    left = [(getattr(both[0], k) - getattr(both[1], k)) / count for k in ("parameters", "gradients", "optimizer")]
    assert left == pytest.approx(gone)
    assert both[1].host > 0 == both[0].host


def test_copies_send_their_share_once_and_shards_travel_within_a_node() -> None:
    h100 = machine("h100", "IB-400")
    whole, hybrid = (step_time(plan_of(f"gpus=64 gbs=512 backend=torch seq_len=1024 sharding={s}"), h100) for s in ("fsdp", "hsdp"))
    assert hybrid.parts["dp"] < whole.parts["dp"], "gathers stay within a node, and copies add gradients once a step"
    zero = {
        s: step_time(plan_of(f"gpus=8 gbs=128 mbs=1 seq_len=1024 backend=torch sharding={s}"), h100).parts["dp"]
        for s in ("zero1", "zero2", "zero3")
    }
    assert zero["zero1"] < zero["zero2"] < zero["zero3"], "gradients once a step, each micro-batch, and parameters too"


def test_ulysses_is_an_all_to_all_over_heads_beside_a_ring_or_without_one() -> None:
    alone, both = plan_of("gpus=8 ulysses=4 seq_len=32768"), plan_of("gpus=8 ulysses=4 cp=2 seq_len=32768")
    assert (alone.cp, alone.options.cp_comm, alone.broken()) == (4, "a2a", [])
    assert (both.cp, both.options.cp_comm, both.options.cp_sizes, both.broken()) == (8, "a2a+p2p", (4, 2), [])
    rows, head = 32768 // 8 * 2, LLAMA.head_dim
    exchanged, ring = rows * (2 * 32 + 2 * 8) * head * 3 / 4, rows * 2 * 8 * head
    assert traffic.context(both) == traffic.Sent(exchanged + ring, exchanged + 2 * ring)
    assert memory.estimate(both)[0].activations == memory.estimate(plan_of("gpus=8 cp=8 seq_len=32768"))[0].activations
    spread = [
        step_time(plan_of(f"gpus=16 mbs=1 seq_len=131072 {w}"), machine("h100", "IB-400")).parts["cp"]
        for w in ("ulysses=16 backend=torch", "ulysses=8 cp=2")
    ]
    assert spread[1] < spread[0], "heads stay within a node"
    assert plan_of("ulysses=1 gpus=8") == plan_of("gpus=8")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("gpus=64 ulysses=64", "32 heads do not divide over tp 1 x cp 64 for cp_comm a2a"),
        ("gpus=16 ulysses=16", "the 8 key-value heads of a tp rank do not divide over cp 16 for cp_comm a2a"),
        ("gpus=64 ulysses=16 cp=2", "the 8 key-value heads of a tp rank do not divide over cp 16 for cp_comm a2a+p2p"),
        ("gpus=64 ulysses=64 cp=1 backend=torch", "32 heads do not divide"),
        ("gpus=16 ulysses=16 backend=torch", ""),
    ],
)
def test_ulysses_divides_heads(words: str, says: str) -> None:
    found = [sentence for sentence in plan_of(f"{words} seq_len=131072").broken() if "heads" in sentence]
    assert [sentence[: len(says)] for sentence in found] == ([says] if says else [])


def test_ulysses_and_cp_comm_are_not_named_together() -> None:
    with pytest.raises(ConfigError, match="ulysses stands for cp_comm=a2a"):
        plan_of("gpus=8 ulysses=4 cp_comm=p2p")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_implies_what_it_trains_with(name: str) -> None:
    framework = FRAMEWORKS[name]
    where = setting(LLAMA, "llama3_8b", "h100", 8, seq_len=4096, gbs=64, known=("mbs=1",), framework=name)
    assert where.plan is not None
    assert where.plan.options.backend == framework.backend
    if framework.exports_as in ("deepspeed", "accelerate"):
        assert (where.plan.loss, where.plan.options.compiled) == ("torch", False)
        assert where.plan.options.sharding == {"deepspeed": "zero3", "accelerate": "fsdp2"}[framework.exports_as]
    named = setting(LLAMA, "llama3_8b", "h100", 8, seq_len=4096, gbs=64, known=("mbs=1", "sharding=ddp", "recompute=full"), framework=name)
    assert named.plan is not None
    assert named.plan.options.sharding == "none"


def test_torch_rows_have_torchs_loss_and_no_graphs_of_megatron(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(
        "id,model,hardware,gpus,precision,seq_len,mbs,gbs,fsdp,backend,recompute,ep,release_or_date\n"
        "new,llama3_8b,h100,8,bf16,8192,1,8,fsdp,torchtitan,selective,,2026-01\nold,llama3_8b,h100,8,bf16,8192,1,8,fsdp,torchtitan,selective,,2024-12\n"
        "zero,llama3_8b,h100,8,bf16,8192,1,8,zero2,axolotl,full,,\nmoe,qwen3_30b_a3b,b200,8,bf16,4096,1,64,fsdp,torchtitan,none,8,2026-01\n"
        "hsdp,llama3_8b,h100,64,bf16,8192,1,64,hsdp,torchtitan,full,,2026-01\n", encoding="utf-8",
    )  # fmt: skip
    found = {run.id: predict(run) for run, _ in read_runs(table)}
    plans = {k: p.plan for k, p in found.items() if isinstance(p, Prediction)}
    assert {k: p.loss for k, p in plans.items()} == {
        "new": "compiled",
        "old": "torch",
        "zero": "torch",
        "moe": "compiled",
        "hsdp": "compiled",
    }
    assert (plans["zero"].options.sharding, plans["zero"].options.compiled, plans["zero"].grad_bytes) == ("zero2", False, 2)
    assert plans["hsdp"].options.optimizer_instances == 8
    assert plans["moe"].options.graphs == ()
    assert not any("graphs unknown" in word or "hybridep" in word for word in found["moe"].words)  # type: ignore[union-attr]
    logits = 8192 * LLAMA.vocab
    assert held(plans["old"]) - held(plans["new"]) == (14 - 4) * logits


def test_deepep_sends_a_token_once_to_each_rank_that_wants_it() -> None:
    sent = {d: traffic.experts(plan_of(f"gpus=64 ep=8 dispatcher={d}", "deepseek_v3")).forward for d in ("alltoall", "deepep", "hybridep")}
    assert sent["deepep"] == sent["hybridep"] == pytest.approx(sent["alltoall"] * 8 * (1 - (7 / 8) ** 8) / 8)


def test_a_run_in_fp8_is_offered_bf16_and_not_another_fp8() -> None:
    def offered(*words: str) -> set[str]:
        where = setting(MIXED, "qwen3_30b_a3b", "h100", 8, seq_len=4096, gbs=1024, known=("ep=8", "mbs=1", *words))
        return {a.id for a in actions(where, None)} & {"fp8", "bf16"}

    assert offered("fp8=blockwise") == {"bf16"}
    assert "bf16" not in offered()


def test_a_dense_model_is_not_sent_to_claims_about_mixtures() -> None:
    hits = search.search(search.index(load_all()), "Llama 3 8B is slow on 8 H100").hits
    assert hits
    for hit in hits:
        out = {limit.partition(":")[0] for limit in hit.limits if "moe: found False" in limit}
        assert hit.claims[0] not in out
        assert hit.applies or out < set(hit.claims)


@pytest.mark.parametrize(("sharding", "gib"), [("zero1", 93.09), ("zero2", 93.09), ("zero3", 79.50)])
def test_what_deepspeed_held_on_one_gpu_is_predicted_within_5_percent(sharding, gib):
    """Sixteen layers of Llama-3.1-8B, full recompute, one row of 4,096 tokens: docs/parity/fine-tuning-one-gpu.jsonl."""
    path = data_root("tables") / "predictions.csv"
    run = next(r for r, _ in read_runs(path) if r.id == f"one-llama31-8b-16-layers-{sharding}")
    assert predict(run).memory_bytes / memory.GIB == pytest.approx(gib, rel=0.05)
