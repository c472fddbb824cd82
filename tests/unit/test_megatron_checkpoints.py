"""Which layouts a checkpoint of the megatron backend can be resumed with."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("megatron.core")

from playbook.paths import data_root
from playbook_trainer.config import TrainerConfig, dump, load
from playbook_trainer.megatron.checkpoints import MegatronHeader, difference

FORM = "torch_dist"


def config(**parallel: Any) -> TrainerConfig:
    keys = {f"parallel.{k}": v for k, v in parallel.items()}
    return load(data_root("configs") / "qwen3_moe_tiny.yaml", {"backend": "megatron", **keys})


def resumed(saved: TrainerConfig, now: TrainerConfig) -> str | None:
    """Why a run cannot go on from what another has saved."""
    told = dump(saved)
    header = MegatronHeader(step=2, world_size=4, parallel=told["parallel"], model=told["model"], data={"row": 0}, format=FORM)
    return difference(header, now, FORM)


@pytest.mark.parametrize(("saved", "now"), [(None, 2), (2, None)])
def test_an_etp_that_is_not_set_is_that_of_tp(saved: int | None, now: int | None) -> None:
    assert resumed(config(tp=2, etp=saved), config(tp=2, etp=now)) is None


def test_another_etp_is_another_layout() -> None:
    assert (
        resumed(config(tp=2), config(tp=2, etp=1))
        == "was saved with etp 2 where this run has 1, and this backend resumes with the same ones"
    )
