"""The interleaved schedule: every pass once, after the pass that it needs, and no more held than the order allows."""

from __future__ import annotations

import pytest

from playbook_trainer.torch.parallel.pipeline import Pass, forward_order, schedule, training_order


@pytest.mark.parametrize(("pp", "vpp", "microbatches"), [(2, 2, 2), (2, 2, 8), (2, 3, 4), (3, 2, 6), (4, 2, 4), (4, 2, 16), (4, 3, 8)])
def test_every_pass_runs_once_and_after_what_it_needs(pp: int, vpp: int, microbatches: int) -> None:
    chunks, done = pp * vpp, set()
    for tick in schedule(training_order, pp, vpp, microbatches):
        for rank, now in enumerate(tick):
            if now is None:
                continue
            assert now.chunk % pp == rank
            assert now not in done
            need = now.needs(chunks)
            assert need is None or need in done
            assert now.forward or Pass(True, now.chunk, now.microbatch) in done
        done.update(p for p in tick if p is not None)
    assert len(done) == 2 * chunks * microbatches


def test_bubble_shrinks_with_chunks() -> None:
    # Idle passes of a stage: (pp - 1) forward and backward ones of a chunk, whatever vpp. Source: arXiv 2104.04473, section 2.2.
    for vpp in (2, 4):
        ticks = schedule(training_order, 4, vpp, 8)
        assert len(ticks) - 2 * 8 * vpp == 2 * (4 - 1)


def test_evaluation_runs_any_number_of_batches() -> None:
    ticks = schedule(forward_order, 2, 2, 3)
    assert sum(p is not None for tick in ticks for p in tick) == 12
