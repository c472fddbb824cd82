"""Batches: what the model gets, in which order, from how many ranks and workers, and what happens when something dies."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_sets import config, fingerprint, jpeg, reading, samples
from ranks import alive

from playbook.errors import ConfigError
from playbook.paths import data_root, repo_root, sources
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.data.batch import IGNORE, Batch
from playbook_trainer.data.loader import build_loader
from playbook_trainer.exit_codes import RunError

TEXT, VL = "qwen3_moe_tiny", "qwen3_vl_moe_tiny"


def steps(cfg: TrainerConfig, n: int, **options: Any) -> list[list[Batch]]:
    with reading(cfg, **options) as loader:
        return list(itertools.islice(loader, n))


def documents(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Tokens, labels and positions of each document."""
    cu = batch.cu_seqlens.tolist()
    return [(batch.tokens_N[a:b], batch.labels_N[a:b], batch.positions[..., a:b]) for a, b in itertools.pairwise(cu)]


def rows_of(run: list[list[Batch]]) -> list[bytes]:
    """The tokens of each padded row, in the order in which one rank reads them."""
    return [row.numpy().tobytes() for step in run for batch in step for row in batch.tokens_N.split(512)]


@pytest.mark.parametrize("name", [TEXT, VL])
@pytest.mark.parametrize("pack", [True, False])
def test_documents_are_whole_and_never_see_each_other(name: str, pack: bool) -> None:
    for step in steps(config(name, data__pack=pack, train__micro_batch_size=2, train__global_batch_size=4), 3):
        for batch in step:
            cu = batch.cu_seqlens.tolist()
            assert cu[0] == 0
            assert cu[-1] == len(batch.tokens_N) == batch.positions.shape[-1]
            assert all(a < b for a, b in itertools.pairwise(cu))
            assert batch.max_seqlen == max(b - a for a, b in itertools.pairwise(cu))
            assert batch.num_loss == int((batch.labels_N != IGNORE).sum()) > 0
            for tokens, labels, positions in documents(batch):
                assert (positions[..., 0] == 0).all()
                assert labels[-1] == IGNORE, "no label across a border"
                has = labels != IGNORE
                assert torch.equal(labels[:-1][has[:-1]], tokens[1:][has[:-1]]), "a label is the next token"
                if (tokens == 257).all():
                    assert not has.any(), "padding bears no loss"
                elif name == TEXT:
                    assert has[:-1].all()
                    assert torch.equal(positions, torch.arange(len(tokens)))


def test_padding_is_a_document_and_is_counted() -> None:
    with reading(config(TEXT, data__pack=False)) as loader:
        batches = [batch for step in itertools.islice(loader, 40) for batch in step]
    assert all(len(b.tokens_N) == 256 and len(b.cu_seqlens) <= 3 for b in batches)
    assert any(b.num_useful < 256 for b in batches)
    for batch in batches:
        assert int((batch.tokens_N != 257).sum()) == batch.num_useful
    assert loader.counters()["padding_tokens"] == sum(256 - b.num_useful for b in batches)


def test_without_padding_rows_keep_their_length() -> None:
    lengths = {len(b.tokens_N) for step in steps(config(VL, data__pad=False, data__pack=False), 6) for b in step}
    assert len(lengths) > 3
    assert max(lengths) <= 512


def test_the_loss_is_on_the_answer_alone(tmp_path: Path) -> None:
    samples(tmp_path, [{"images": ["a.png"], "question": "Which?", "answer": "this"}] * 2, {"a.png": jpeg(0, (64, 64))})
    batch = steps(config(VL, data__path=str(tmp_path), train__global_batch_size=1), 1)[0][0]
    tokens, labels, _ = documents(batch)[0]
    assert bytes(labels[labels != IGNORE][:-1].tolist()) == b"this"
    assert labels[labels != IGNORE][-1] == 256
    assert labels[int((labels != IGNORE).nonzero()[0])] == tokens[int((labels != IGNORE).nonzero()[0]) + 1]


def test_images_stand_where_their_tokens_stand() -> None:
    for step in steps(config(VL), 4):
        for batch in step:
            v = batch.vision
            assert v is not None
            assert torch.equal(v.visual_index_V, (batch.tokens_N == 258).nonzero()[:, 0])
            assert v.pixels_PC.shape == (len(v.visual_index_V) * 4, 1536)
            assert v.cu_seqlens.tolist()[-1] == len(v.pixels_PC)
            assert len(v.cu_seqlens) - 1 == batch.num_images == int((batch.tokens_N == 259).sum())
            assert v.max_seqlen == int(v.cu_seqlens.diff().max())
            assert v.rotary_P2.shape == (len(v.pixels_PC), 2)
            assert v.pos_index_4P.shape == v.pos_weight_4P.shape == (4, len(v.pixels_PC))
            assert float(v.pixels_PC.abs().max()) <= 1
            assert float(v.pixels_PC.std()) > 0.1
            assert batch.positions.shape == (3, len(batch.tokens_N))


def test_batches_without_images_have_no_vision() -> None:
    for overrides in ({"data__kind": "mock"}, {"data__kind": "text"}):
        batch = steps(config(VL, **overrides), 1)[0][0]
        assert batch.vision is None
        assert batch.num_images == 0
        assert batch.positions.shape == (3, 512)
    assert steps(config(VL, data__kind="mock"), 1)[0][0].num_useful == 512


@pytest.mark.parametrize(("dp", "mbs", "workers"), [(2, 1, 0), (4, 2, 0), (1, 4, 2), (2, 2, 1)])
@pytest.mark.sample("2-1-0")
def test_the_rows_of_a_step_do_not_depend_on_ranks_micro_batches_or_workers(dp: int, mbs: int, workers: int) -> None:
    overrides = {"train__global_batch_size": 8, "data__max_image_pixels": 4_096}
    expected = steps(config(VL, **overrides), 2)
    cfg = config(VL, **overrides, train__micro_batch_size=mbs, data__num_workers=workers)
    ranks = [steps(cfg, 2, dp_rank=rank, dp_size=dp) for rank in range(dp)]
    for s in range(2):
        # Micro-batch j of rank r comes before micro-batch j of rank r + 1, and that before micro-batch j + 1.
        found = [[ranks[r][s][j]] for j in range(8 // (dp * mbs)) for r in range(dp)]
        assert rows_of(found) == rows_of([expected[s]])


def test_resuming_in_a_later_epoch() -> None:
    cfg = config(TEXT, data__seq_len=4096, train__global_batch_size=64)
    whole = steps(cfg, 6)
    rest = steps(cfg, 1, start_row=5 * 64)
    assert [fingerprint(b) for b in rest[0]] == [fingerprint(b) for b in whole[5]]


@pytest.mark.full
def test_iterating_again_starts_again() -> None:
    with reading(config(VL, data__num_workers=1, data__max_image_pixels=4_096), split="eval") as loader:
        first = [fingerprint(b) for s in itertools.islice(loader, 2) for b in s]
        second = [fingerprint(b) for s in itertools.islice(loader, 2) for b in s]
    assert first == second


def test_the_seed_decides_the_order_and_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = steps(config(TEXT, seed=1), 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    np.random.seed(3)
    assert fingerprint(steps(config(TEXT, seed=1), 1)[0][0]) == fingerprint(first[0][0])
    assert fingerprint(steps(config(TEXT, seed=2), 1)[0][0]) != fingerprint(first[0][0])


def test_batch_sizes_must_divide() -> None:
    with pytest.raises(ConfigError, match="global_batch_size is 4"):
        build_loader(config(TEXT), dp_rank=0, dp_size=3)


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.timeout(2000)
def test_a_worker_that_is_killed_ends_the_run_with_an_error() -> None:
    before = set(children(os.getpid()))
    with reading(config(VL, data__num_workers=1)) as loader:
        iterator = iter(loader)
        next(iterator)
        (worker,) = set(children(os.getpid())) - before
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(RunError, match="worker"):
            list(itertools.islice(iterator, 20))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.timeout(2000)
@pytest.mark.full
def test_workers_die_with_a_killed_rank() -> None:
    program = (
        "import os, sys; from pathlib import Path; from playbook_trainer.config.tree import load\n"
        "from playbook_trainer.data.loader import build_loader\n"
        "from torch.utils.data._utils import worker\n"
        "worker.MP_STATUS_CHECK_INTERVAL = 6000  # the DataLoader's own watchdog would end them, too\n"
        "loader = build_loader(load(Path(sys.argv[1]), {'data.num_workers': 2}), dp_rank=0, dp_size=1)\n"
        "steps = iter(loader); next(steps)\n"
        "holder = os.fork()  # of the pipes, whose end the workers would see\n"
        "if not holder: os.read(0, 1); os._exit(0)\n"
        "print(holder, flush=True); sys.stdin.read()\n"
    )
    root = repo_root()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sources(root))}
    command = [sys.executable, "-c", program, str(data_root("configs") / f"{VL}.yaml")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as rank:
        assert rank.stdout is not None
        holder = int(rank.stdout.readline())
        workers = set(children(rank.pid)) - {holder}
        assert len(workers) == 2
        rank.kill()
        rank.wait()
        deadline = time.monotonic() + 60
        while any(alive(w) for w in workers) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(alive(w) for w in workers)
