"""What the planner says of a rank, against counts by hand: every tensor that a layer keeps, every weight that a rank holds, every byte that it sends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from playbook.planner import activations, memory, pipeline, traffic
from playbook.planner.models import MODELS
from playbook.planner.options import Options
from playbook.planner.plan import Plan, parse
from playbook.planner.shapes import Vision


def plan_of(model: str, words: str) -> Plan:
    return parse(model, words.split())


# Of DeepSeek-V3 a CP rank has 4096 tokens here and a TP rank half of them; 64 of 128 heads; a copy for FP8 has one byte per value.
MLA = plan_of("deepseek_v3", "gpus=4 tp=2 cp=2 mbs=2 etp=2 imbalance=1.5 fp8=blockwise")
MLA_ATTENTION = {
    "attention norm in": 2 * 2048 * 7168,
    "attention norm out": 1 * 2048 * 7168,
    "compressed q, k, v": 2 * 2048 * (1536 + 512 + 64),
    "q, k, v": 2 * 4096 * 64 * (192 + 192 + 128),
    "attention out": 4096 * 64 * ((2 + 1) * 128 + 4),
    "mlp norm in": 2 * 2048 * 7168,
}
ROUTED = 2048 * 8 * 1.5
# A full layer of Qwen3-Next has 2 key-value heads, so each of 4 TP ranks has a whole one, 4 of 16 query heads and their gates.
GATED = plan_of("qwen3_next_80b_a3b", "gpus=4 tp=4 sp=false")
# Llama's MLP in FP8, its norms whole on both TP ranks.
DENSE = plan_of("llama3_8b", "gpus=2 tp=2 sp=false fp8=mxfp8")

KEPT = [
    (
        MLA,
        10,
        MLA_ATTENTION
        | {
            "mlp norm out": 2 * 2048 * 7168,
            "router": (4 + 4) * 2048 * 256,
            "dispatched tokens": 1 * ROUTED * 2 * 7168,
            "expert fc1 out": 2 * ROUTED * (2048 + 2048),
            "expert act out": 1 * ROUTED * 2048,
            "shared experts": 4096 * (2 * 1024 + 2 * 1024 + 1 * 1024),
        },
    ),
    (
        MLA,
        2,
        MLA_ATTENTION | {"mlp norm out": 1 * 2048 * 7168, "mlp fc1 out": 2 * 4096 * (9216 + 9216), "mlp act out": 1 * 4096 * 9216},
    ),
    (
        GATED,
        3,
        {
            "attention norm in": 2 * 4096 * 2048,
            "attention norm out": 2 * 4096 * 2048,
            "q, k, v": 2 * 4096 * 256 * (4 + 1 + 1 + 4 + 4 + 1),  # q, k, v, the gate, and q and k once more after their norms
            "attention out": 4096 * 4 * (2 * 256 + 4),
            "mlp norm in": 2 * 4096 * 2048,
            "mlp norm out": 2 * 4096 * 2048,
            "router": (4 + 4) * 4096 * 512,
            "dispatched tokens": 2 * 4096 * 10 * 2048,
            "expert fc1 out": 2 * 4096 * 10 * (512 + 512),
            "expert act out": 2 * 4096 * 10 * 512,
            "shared experts": 2 * 4096 * (128 + 128 + 128),
        },
    ),
    (
        DENSE,
        0,
        {
            "attention norm in": 2 * 4096 * 4096,
            "attention norm out": 1 * 4096 * 4096,
            "q, k, v": 2 * 4096 * 128 * (16 + 4 + 4),
            "attention out": 4096 * 16 * ((2 + 1) * 128 + 4),
            "mlp norm in": 2 * 4096 * 4096,
            "mlp norm out": 1 * 4096 * 4096,
            "mlp fc1 out": 2 * 4096 * (7168 + 7168),
            "mlp act out": 1 * 4096 * 7168,
        },
    ),
]


@pytest.mark.parametrize(("plan", "layer", "tensors"), KEPT, ids=["mla experts", "mla dense", "gated", "dense"])
def test_a_layer_keeps_each_of_its_tensors(plan: Plan, layer: int, tensors: dict[str, float]) -> None:
    assert activations.saved(plan, layer) == pytest.approx(tensors)
    assert activations.kept(plan, layer) == pytest.approx(sum(tensors.values()))
    assert activations.layer(plan, layer).again == 0


def test_logits_are_held_as_the_loss_holds_them() -> None:
    """Half of the vocabulary on each of two TP ranks, for 4096 tokens."""
    for loss, size in (("te", 2), ("native", 2 + 4 + 4)):
        assert activations.loss(replace(MLA, loss=loss)) == 2 * size * 4096 * 129280 / 2, "one depth beside the next token"


# Weights of DeepSeek-V3 on 16 ranks, tp 2, pp 2, ep 2 x etp 2. What TP splits, what it repeats, and what the experts' grid of 4 splits:
UP = 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
DOWN = 7168 * 1536 + 7168 * (512 + 64) + 1536 + 512
FIRST = UP + 3 * 7168 * 18432, DOWN + 2 * 7168, 0
SPARSE = UP + 3 * 7168 * 2048, DOWN + 2 * 7168 + 7168 * 256, 256 * 3 * 7168 * 2048
MTP = SPARSE[0] + 2 * 7168 * 7168, SPARSE[1] + 3 * 7168, SPARSE[2]
TABLE = 129280 * 7168


def held(plan: Plan, stage: int, **tower: bool) -> memory.Weights:
    return memory.weights(plan, stage, pipeline.indices(pipeline.split(plan.shape.layers, plan.pp, plan.vpp), plan.pp, stage), **tower)


@pytest.mark.parametrize(
    ("stage", "layers", "tables", "norm"),
    [
        (0, [FIRST] * 3 + [SPARSE] * 28, 1, 0),
        # Depths of MTP embed the next token by a copy of the embedding, beside the output layer.
        (1, [SPARSE] * 30 + [MTP], 2, 7168),
    ],
)
def test_a_stage_holds_its_layers_and_its_tables(stage: int, layers: list[tuple[int, int, int]], tables: int, norm: int) -> None:
    found = held(plan_of("deepseek_v3", "gpus=16 tp=2 pp=2 ep=2 etp=2 uneven=true"), stage)
    assert found.dense == sum(split // 2 + repeated for split, repeated, _ in layers) + tables * TABLE // 2 + norm
    assert found.experts == sum(experts // 4 for _, _, experts in layers)
    assert found.linear == sum(split // 2 + experts // 4 for split, _, experts in layers)
    assert found.largest == max(split // 2 + repeated + experts // 4 for split, repeated, experts in layers)


def test_prediction_layers_use_the_embedding_that_their_stage_has() -> None:
    alone = held(plan_of("deepseek_v3", "gpus=1"), 0)
    whole = sum(map(sum, [FIRST] * 3 + [SPARSE] * 58 + [MTP])) + 2 * TABLE + 7168
    assert alone.dense + alone.experts == whole
    # Where the last stage has no decoder layer, the final norm is with the last of them.
    two = replace(MODELS["deepseek_v3"], layers=2, dense_layers=2)
    plan = Plan(two, gpus=4, pp=4, options=Options(uneven=True))
    depth = sum(FIRST) + 2 * 7168 * 7168 + 3 * 7168
    assert [held(plan, stage).dense for stage in range(4)] == [TABLE, sum(FIRST), sum(FIRST) + 7168, 2 * TABLE + depth]


def test_the_final_norm_is_with_the_last_layer_of_interleaved_stages_too() -> None:
    plan = plan_of("deepseek_v3", "gpus=2 layers=8 pp=2 vpp=2")
    first, last = held(plan, 0), held(plan, 1)
    assert first.dense + first.experts == sum(map(sum, [FIRST] * 2 + [SPARSE] * 2)) + TABLE
    assert last.dense + last.experts == sum(map(sum, [FIRST] + [SPARSE] * 3 + [MTP])) + 2 * TABLE + 7168


@pytest.mark.parametrize("dense", [1, 2])
def test_a_stage_without_layers_has_its_tables_and_depths_alone(dense: int) -> None:
    """Of four stages for two layers the first has the embedding, the last the output layer and one depth like the last layer."""
    plan = Plan(replace(MODELS["deepseek_v3"], layers=2, dense_layers=dense), gpus=4, pp=4, options=Options(uneven=True))
    stages = memory.estimate(plan)
    assert [s.layers for s in stages] == [0, 1, 1, 0]
    assert (held(plan, 0).largest, stages[0].activations) == (0, 0)
    assert [s.transient for s in stages] == [0, 0, 0, activations.loss(plan)]
    assert stages[3].activations == sum(activations.saved(plan, 1).values())
    assert memory.peak(plan) == max(s.peak for s in stages) > min(s.peak for s in stages)


def test_tied_tables_are_one_where_one_stage_has_both_ends() -> None:
    """Qwen3-0.6B with an odd vocabulary: a TP rank has the larger half."""
    tied = replace(MODELS["qwen3_0_6b"], vocab=1001, layers=2, dense_layers=2)
    layer = 1024 * (16 + 8 + 8 + 16) * 128 + 3 * 1024 * 3072, 2 * 128 + 2 * 1024
    for tp, table in ((1, 1001 * 1024), (2, 1001 * 1024 // 2)):
        per_layer = layer[0] // tp + layer[1]
        assert held(Plan(tied, gpus=tp, tp=tp), 0).dense == 2 * per_layer + table + 1024
        ends = [held(Plan(tied, gpus=2 * tp, tp=tp, pp=2), stage).dense for stage in (0, 1)]
        assert ends == [per_layer + table, per_layer + table + 1024]
    odd = replace(tied, vocab=3, hidden=5, ffn=7, heads=4, kv_heads=2, head_dim=3, qk_norm=False, tied=False)
    # Of 5 x (4 + 2 + 2 + 4) x 3 + 3 x 5 x 7 = 285 weights of a layer and 15 of a table, two ranks have 143 and 8, four 72 and 4.
    for tp, (part, table) in {2: (143, 8), 4: (72, 4)}.items():
        assert held(Plan(odd, gpus=tp, tp=tp), 0) == memory.Weights(2 * (part + 10) + 2 * table + 5, 0, 2 * part, part + 10)


def test_experts_that_do_not_divide_are_rounded_up() -> None:
    small = replace(MODELS["qwen3_30b_a3b"], layers=1, experts=1, hidden=3, expert_ffn=5, heads=4, kv_heads=4, head_dim=1, vocab=2)
    found = held(Plan(small, gpus=8, ep=2, etp=2), 0)
    assert found.experts == 12  # of 3 x 3 x 5 = 45
    assert found.linear == 4 * 3 * 4 + 12


def test_a_vision_tower_is_on_the_first_stage() -> None:
    tower = Vision(depth=1, hidden=2, ffn=3, positions=5, patch_values=7, merge=2, deepstack=1)
    with_tower = replace(MODELS["qwen3_8b"], vision=tower)
    embedded = 7 * 2 + 2 + 5 * 2
    block = 4 * 2 * 2 + 4 * 2 + 2 * 2 * 3 + 3 + 2 + 4 * 2
    merger = 8 * 8 + 8 + 8 * 4096 + 4096
    weights = embedded + block + 2 * merger + 2 * 2 + 2 * 8
    for tp, whole in ((1, False), (2, False), (2, True)):
        plan = Plan(with_tower, gpus=2 * tp, tp=tp, pp=2)
        plain = replace(plan, shape=replace(with_tower, vision=None))
        more = [held(plan, s, whole_tower=whole).dense - held(plain, s, whole_tower=whole).dense for s in (0, 1)]
        assert more == [weights if whole else -(-weights // tp), 0]


STATE = memory.Weights(dense=960, experts=240, linear=0, largest=100)


@pytest.mark.parametrize(
    ("words", "params", "grads", "optimizer"),
    [
        # dp 4 x cp 2 = 8 ranks have the same dense weights, edp 4 the same experts; a moment has two of its kind.
        ("", 1200, 1200, 960 / 8 + 240 / 4),
        ("sharding=none", 1200, 1200, 1200),
        ("sharding=fsdp", 960 / 8 + 240 / 4, 960 / 8 + 240 / 4, 960 / 8 + 240 / 4),
        ("optimizer_instances=2", 1200, 1200, 960 / 4 + 240 / 2),
        ("sharding=fsdp optimizer_instances=2", 960 / 4 + 240 / 2, 960 / 4 + 240 / 2, 960 / 4 + 240 / 2),
    ],
)
@pytest.mark.parametrize("sizes", [(4, 4, 4), (2, 2, 1)])
def test_states_are_counted_on_the_ranks_that_share_them(
    words: str, sizes: tuple[int, int, int], params: float, grads: float, optimizer: float
) -> None:
    grad, master, moment = sizes
    plan = plan_of("qwen3_30b_a3b", f"gpus=8 cp=2 ep=2 grad_bytes={grad} master_bytes={master} moment_bytes={moment} {words}")
    assert memory.state_bytes(plan, STATE) == pytest.approx((2 * params, grad * grads, (master + 2 * moment) * optimizer))


def test_an_estimate_adds_up_what_a_rank_of_each_stage_has() -> None:
    """Two stages of two chunks each, the loss and one depth of prediction on the last, FP8 copies, everything recomputed."""
    plan = plan_of("deepseek_v3", "gpus=8 layers=8 pp=2 vpp=2 ep=2 gbs=64 fp8=blockwise recompute=full")
    kept, tensors = 2 * 4096 * 7168, sum(activations.saved(plan, 7).values())
    states = [sum(memory.state_bytes(plan, held(plan, stage))) for stage in (0, 1)]
    first, last = memory.estimate(plan)
    assert (first.stage, first.layers, last.stage, last.layers) == (0, 4, 1, 4)
    assert (first.in_flight, last.in_flight) == ([3, 2], [2, 1])
    assert first.activations == (3 + 2) * 2 * kept
    assert last.activations == 2 * 2 * kept + 1 * 3 * kept
    assert first.fp8_weights == 2 * held(plan, 0).linear
    assert first.states == pytest.approx(states[0] + first.fp8_weights)
    assert (first.transient, first.gathered) == (tensors - kept, 0)
    assert last.transient == max(tensors - kept, 2 * 2 * 4096 * 129280)  # logits of the next token, and of one depth
    for stage in (first, last):
        assert stage.peak == pytest.approx(stage.states + stage.activations + stage.transient + 2.2 * (1 << 30))
        assert stage.row()["peak"] == stage.peak
    (whole,) = memory.estimate(replace(plan, pp=1, vpp=1, options=Options(sharding="fsdp")))
    assert whole.gathered == 2 * 2 * held(replace(plan, pp=1, vpp=1), 0).largest
    assert whole.peak == pytest.approx(whole.states + whole.gathered + whole.activations + whole.transient + 2.2 * (1 << 30))


# What a rank sends. A ring of n ranks sends (n - 1) / n of what it gathers. 4096 tokens per CP rank, 2048 per TP rank, 16 bits a value.
SPREAD = plan_of("deepseek_v3", "gpus=32 tp=2 cp=4 pp=2 ep=4 etp=2 mbs=4 imbalance=1.25 uneven=true")
ROW = 2 * 7168


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (
            3,
            {
                "tp": (4 * 4096 * ROW / 2, 6 * 4096 * ROW / 2),
                # Keys of 192 and values of 128 for 64 heads, to three others; back they go once more, and their gradients.
                "cp": (3 * 4096 * 64 * 320 * 2, 2 * 3 * 4096 * 64 * 320 * 2),
                "ep": (2 * 2048 * 8 * 1.25 * ROW * 3 / 4, 2 * 2048 * 8 * 1.25 * ROW * 3 / 4),
                "etp": (2 * 2048 * 8 * 1.25 * ROW, 2 * 2048 * 8 * 1.25 * ROW),
            },
        ),
        (
            2,
            {"tp": (4 * 4096 * ROW / 2, 6 * 4096 * ROW / 2), "cp": (3 * 4096 * 64 * 320 * 2, 2 * 3 * 4096 * 64 * 320 * 2)},
        ),
    ],
)
def test_a_layer_sends_by_each_kind_of_parallelism(layer: int, expected: dict[str, tuple[float, float]]) -> None:
    sent = traffic.per_layer(SPREAD, layer)
    assert {k: (s.forward, s.backward) for k, s in sent.items()} == {k: pytest.approx(v) for k, v in expected.items()}
    assert all(s.total == s.forward + s.backward for s in sent.values())


def test_without_sequence_parallelism_the_backward_pass_gathers_no_inputs() -> None:
    """An all-reduce sends as much as a gather and a scatter."""
    whole = traffic.tensor(plan_of("llama3_8b", "gpus=2 tp=2 sp=false"), 2)
    assert whole == traffic.Sent(4 * 4096 * 2 * 4096 / 2, 4 * 4096 * 2 * 4096 / 2)


def test_gathered_experts_need_no_other_collective() -> None:
    gathered = replace(SPREAD, options=replace(SPREAD.options, dispatcher="allgather"))
    sent = traffic.per_layer(gathered, 10)
    assert "etp" not in sent
    assert sent["ep"] == traffic.Sent(2 * 7 * 2048 * ROW, 2 * 7 * 2048 * ROW)


def test_heads_are_exchanged_all_to_all() -> None:
    """Query, key, value and output, of which a rank keeps a quarter of its own."""
    mla = replace(SPREAD, options=replace(SPREAD.options, cp_comm="a2a"))
    one = 2 * 4096 * 64 * (192 + 192 + 128 + 128) * 3 / 4
    assert traffic.context(mla) == traffic.Sent(one, one)
    grouped = plan_of("llama3_8b", "gpus=8 tp=2 cp=4 cp_comm=a2a")
    one = 2 * 1024 * 128 * (16 + 4 + 4 + 16) * 3 / 4
    assert traffic.context(grouped) == traffic.Sent(one, one)


def test_a_stage_passes_on_its_share_of_the_sequence() -> None:
    assert traffic.boundary(SPREAD) == traffic.Sent(2048 * ROW, 2048 * ROW)
    assert traffic.boundary(plan_of("llama3_8b", "gpus=4 tp=2 pp=2 sp=false")).forward == 4096 * 2 * 4096
    assert traffic.boundary(plan_of("llama3_8b", "gpus=2 tp=2")) == traffic.Sent(0.0, 0.0)


@pytest.mark.parametrize(
    ("words", "gradients", "parameters"),
    [
        # 8 ranks share the dense weights, 4 the experts; three microbatches.
        ("", 960 * 7 / 8 + 240 * 3 / 4, 960 * 7 / 8 + 240 * 3 / 4),
        ("sharding=none", 2 * (960 * 7 / 8 + 240 * 3 / 4), 0),
        ("sharding=fsdp", 3 * (960 * 7 / 8 + 240 * 3 / 4), 3 * 2 * (960 * 7 / 8 + 240 * 3 / 4)),
        (
            "optimizer_instances=2",
            960 * 3 / 4 + 240 * 1 / 2 + 2 * (960 / 4 + 240 / 2) / 2,
            960 * 3 / 4 + 240 * 1 / 2,
        ),
        (
            "sharding=fsdp optimizer_instances=2",
            3 * (960 * 3 / 4 + 240 * 1 / 2) + 2 * (960 / 4 + 240 / 2) / 2,
            3 * 2 * (960 * 3 / 4 + 240 * 1 / 2),
        ),
    ],
)
def test_gradients_and_parameters_go_round_the_ranks_that_share_them(words: str, gradients: float, parameters: float) -> None:
    plan = plan_of("qwen3_30b_a3b", f"gpus=8 cp=2 ep=2 gbs=12 {words}")
    assert traffic.data_parallel(plan, STATE) == pytest.approx({"gradients": 4 * gradients, "parameters": 2 * parameters})


def test_a_token_goes_to_as_many_nodes_as_its_experts_lie_in() -> None:
    """Two experts drawn among three nodes: both in one node once in three draws."""
    assert traffic.distinct(3, 2) == pytest.approx(1 / 3 * 1 + 2 / 3 * 2)


# torchtitan keeps the 1st, 3rd, 5th ... output of a layer's products; the router's is not counted.
SELECTIVE = [
    ("llama3_8b", "gpus=8", 2 * 4096 * (4096 + 1024 + 14336 + 4096)),  # queries, values, gate, down
    ("qwen3_30b_a3b", "gpus=8", 2 * 4096 * (4096 + 512)),
    ("qwen3_30b_a3b", "gpus=8 ep=8", 2 * 4096 * (4096 + 512 + 2 * 8 * 2048)),  # and what two all-to-alls bring
    ("deepseek_v3", "gpus=64 ep=64", 2 * 4096 * (1536 + 576 + 7168 + 2048 + 2 * 8 * 7168)),  # compressed queries, keys, output, up
]


@pytest.mark.parametrize(("model", "words", "outputs"), SELECTIVE)
def test_selective_recompute_keeps_what_torchtitan_keeps(model: str, words: str, outputs: float) -> None:
    plan = plan_of(model, f"{words} backend=torch sharding=fsdp2 recompute=selective")
    shape, index = plan.shape, plan.shape.layers - 1
    width = shape.head_dim if shape.mla is None else shape.mla.v_dim
    kept = activations.entry(plan, index) + outputs + 4096 * shape.heads * (2 * width + 4)
    assert activations.layer(plan, index).stays == kept
