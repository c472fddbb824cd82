"""The two grids of ranks: who works with whom, and what counts in the gradient norm."""

from __future__ import annotations

from itertools import product

import pytest
from grids import rank_axes

from playbook_trainer.axes import groups
from playbook_trainer.config.tree import ParallelConfig
from playbook_trainer.torch.parallel.sharding import counts_in_norm, is_partial_over_tp

ALONE = [(r,) for r in range(8)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            {"tp": 2, "cp": 2, "ep": 4, "etp": 1},
            {
                "tp": [(0, 1), (2, 3), (4, 5), (6, 7)],
                "cp": [(0, 2), (1, 3), (4, 6), (5, 7)],
                "dp": [(0, 4), (1, 5), (2, 6), (3, 7)],
                "dp_cp": [(0, 2, 4, 6), (1, 3, 5, 7)],
                "ep": [(0, 1, 2, 3), (4, 5, 6, 7)],
                "edp": [(0, 4), (1, 5), (2, 6), (3, 7)],
            },
        ),
        # Expert tensor ranks are neighbours, and stages are apart.
        (
            {"pp": 2, "ep": 2, "etp": 2},
            {
                "etp": [(0, 1), (2, 3), (4, 5), (6, 7)],
                "ep": [(0, 2), (1, 3), (4, 6), (5, 7)],
                "pp": [(0, 4), (1, 5), (2, 6), (3, 7)],
            },
        ),
        # Copies are made of neighbours, and experts may span them.
        (
            {"dp_replicate": 2, "ep": 2},
            {
                "shard": [(0, 1, 2, 3), (4, 5, 6, 7)],
                "replicate": [(0, 4), (1, 5), (2, 6), (3, 7)],
                "edp_shard": [(0, 2), (1, 3), (4, 6), (5, 7)],
                "edp_replicate": [(0, 4), (1, 5), (2, 6), (3, 7)],
            },
        ),
        ({"dp_replicate": 2, "ep": 8}, {"edp_replicate": ALONE, "edp_shard": ALONE}),
    ],
)
def test_grids_of_eight_ranks_by_hand(sizes, expected):
    found = groups(8, ParallelConfig(**sizes))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("world", [4, 8, 16])
def test_every_grid_holds_each_rank_once(world):
    for tp, cp, pp, ep, etp in product((1, 2, 4), repeat=5):
        if world % (tp * cp * pp) or world % (ep * etp * pp):
            continue
        g = groups(world, ParallelConfig(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp))
        for name, members in g.items():
            assert sorted(r for ranks in members for r in ranks) == list(range(world)), name
        for stage in range(pp):
            ranks = set(range(stage * world // pp, (stage + 1) * world // pp))
            assert all(ranks.issuperset(m) or ranks.isdisjoint(m) for name, members in g.items() if name != "pp" for m in members)


@pytest.mark.parametrize(
    "sizes", [{"tp": 2, "ep": 2, "etp": 1, "dp_replicate": 2}, {"tp": 2, "etp": 4}, {"etp": 2, "ep": 2, "fsdp": False}]
)
def test_each_part_of_a_parameter_counts_once(sizes):
    par = ParallelConfig(**sizes)
    ranks = [rank_axes(8, r, par) for r in range(8)]
    for name in (
        "norm.weight",
        "layers.0.attn.q_proj.weight",
        "layers.0.moe.experts.w13",
        "layers.0.moe.router.weight",
        "vision.merger.fc1.weight",
    ):
        counted = [axes for axes in ranks if counts_in_norm(name, axes)]
        if "experts" in name:
            parts = [(a.ep.rank, a.etp.rank, a.edp_shard.rank) for a in counted]
            whole = ranks[0].ep.size * ranks[0].etp.size * ranks[0].edp_shard.size
        else:
            cut = "q_proj" in name
            parts = [(a.tp.rank if cut else 0, a.shard.rank) for a in counted]
            whole = ranks[0].shard.size * (ranks[0].tp.size if cut else 1)
        assert len(parts) == len(set(parts)) == whole, name


Q_NORM, NORM, ROUTER = "layers.0.attn.q_norm.weight", "layers.0.attn_norm.weight", "layers.0.moe.router.weight"
TOWER_NORM = "vision.blocks.0.norm1.weight"


@pytest.mark.parametrize(
    ("sizes", "partial"),
    [
        ({"ep": 2}, set()),
        ({"tp": 2}, {Q_NORM}),
        ({"tp": 2, "etp": 1}, {Q_NORM, ROUTER}),
        ({"tp": 2, "sequence_parallel": True}, {Q_NORM, NORM, "norm.weight", ROUTER}),
    ],
)
def test_gradients_are_partial_where_a_rank_sees_its_own_heads_or_tokens(sizes, partial):
    axes = rank_axes(4, 0, ParallelConfig(**sizes))
    assert {n for n in (Q_NORM, NORM, "norm.weight", ROUTER, TOWER_NORM) if is_partial_over_tp(n, axes)} == partial
