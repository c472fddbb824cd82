from __future__ import annotations

import pytest
import torch
from torch.nn.functional import embedding

from playbook_trainer.observe.ranges import listening, range_


class Recorder:
    def __init__(self, weight):
        self.weight, self.seen = weight, []

    def push(self, name):
        self.seen.append(("push", name, self.total()))

    def pop(self, name):
        self.seen.append(("pop", name, self.total()))

    def total(self):
        return 0.0 if self.weight.grad is None else self.weight.grad.sum().item()


def looked_up(weight):
    with range_("embedding") as span:
        return span.exit(embedding(torch.tensor([0, 1]), span.until(weight))).sum()


@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_lookup_ends_in_the_backward_pass_when_its_gradient_has_been_added(in_flight):
    weight = torch.zeros(4, 2, requires_grad=True)
    recorder = Recorder(weight)
    with listening(recorder):
        for _ in range(2):
            losses = [looked_up(weight) for _ in range(in_flight)]
            with torch.no_grad():
                looked_up(weight)
            for loss in losses:
                loss.backward()
    backward = [entry for entry in recorder.seen if entry[1] == "embedding.bwd"]
    assert backward == [(what, "embedding.bwd", 4.0 * (i + (what == "pop"))) for i in range(2 * in_flight) for what in ("push", "pop")]
    assert len(recorder.seen) - len(backward) == 2 * 2 * (in_flight + 1)


def test_a_lookup_in_frozen_weights_has_no_backward_range():
    weight = torch.zeros(4, 2)
    recorder = Recorder(weight)
    with listening(recorder):
        assert not looked_up(weight).requires_grad
    assert [name for _, name, _ in recorder.seen] == ["embedding", "embedding"]


def test_two_lookups_in_one_pass_end_with_the_one_gradient():
    weight = torch.zeros(4, 2, requires_grad=True)
    recorder = Recorder(weight)
    with listening(recorder):
        (looked_up(weight) + looked_up(weight)).backward()
    assert [what for what, name, _ in recorder.seen if name == "embedding.bwd"] == ["push", "push", "pop", "pop"]
