"""The learning rate of each step: linear warm-up, then a cosine or a constant rate."""

import pytest

from playbook_trainer.config.tree import OptimizerConfig
from playbook_trainer.torch.optimizer import learning_rate


@pytest.mark.parametrize(
    ("words", "rates"),
    [
        ({}, [0.25, 0.5, 0.75, 1.0, 1.0, 0.55, 0.1, 0.1]),
        ({"schedule": "constant"}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "linear"}, [0.25, 0.5, 0.75, 1.0, 1.0, 0.55, 0.1, 0.1]),
        ({"schedule": "linear", "warmup_steps": 1}, [1.0, 1.0, 0.82, 0.64, 0.46, 0.28, 0.1, 0.1]),
        ({"schedule": "wsd", "warmup_steps": 2, "decay_ratio": 0.5}, [0.5, 1.0, 1.0, 1.0, 0.7, 0.4, 0.1, 0.1]),
        ({"warmup_steps": 0, "min_lr_ratio": 0.0}, [1.0, 0.9330127, 0.75, 0.5, 0.25, 0.0669873, 0.0, 0.0]),
    ],
)
def test_a_rate_rises_from_the_first_step_and_then_falls_as_its_schedule_says(words, rates):
    config = OptimizerConfig(**{"lr": 1.0, "warmup_steps": 4, "min_lr_ratio": 0.1, **words})
    steps = 6
    assert [learning_rate(i, steps, config) for i in range(8)] == pytest.approx(rates)
