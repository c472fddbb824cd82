"""The hash of a configuration survives growth: new keys at their neutral value, new names, and `auto` on one kind of machine."""

from __future__ import annotations

import copy
import json
import types
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from playbook_trainer.config import automatic
from playbook_trainer.config import tree as neutral_values
from playbook_trainer.config.automatic import Target, config_sha, covered
from playbook_trainer.config.tree import TrainerConfig, dump, load, neutral, rendered

TINY = Path("trainer/configs/qwen3_moe_tiny.yaml")
H200 = Target("NVIDIA H200", transformer_engine=True)


def leaves(model, prefix=""):
    """(dotted key, field) of every value in the tree, inside sections that may be absent too."""
    for name, field in model.model_fields.items():
        kinds = [
            a
            for a in (field.annotation, *typing.get_args(field.annotation))
            if isinstance(a, type) and not isinstance(a, types.GenericAlias)
        ]
        section = next((a for a in kinds if issubclass(a, BaseModel)), None)
        if section is None:
            yield prefix + name, field
        else:
            yield from leaves(section, f"{prefix}{name}.")


def test_every_key_with_a_default_has_a_neutral_value():
    keys = {k for k, field in leaves(TrainerConfig) if not field.is_required()}
    assert keys - neutral().keys() == set(), "run `playbook schemas export`"


def test_a_new_key_is_written_with_its_default_and_a_known_value_stays_whatever_its_default_becomes(monkeypatch):
    known = {**neutral(), "seed": 99, "moe.gone": 1}
    del known["optimizer.eps"]
    monkeypatch.setattr(neutral_values, "neutral", lambda: known)
    written = json.loads(rendered())
    assert (written["seed"], written["optimizer.eps"]) == (99, 1e-8)
    assert "moe.gone" not in written


def test_the_hash_of_a_configuration_stands_still():
    """Pinned: whoever changes it, a stopped series starts over."""
    assert config_sha(load(TINY), Target()) == "f41a94e6c0160b36"


def test_a_new_key_keeps_every_hash_while_it_is_neutral(monkeypatch):
    before = dump(load(TINY))
    grown = copy.deepcopy(before)
    grown["moe"]["brand_new"] = 0
    monkeypatch.setattr(automatic, "neutral", lambda: {**neutral(), "moe.brand_new": 0})
    assert covered(grown, H200) == covered(before, H200)
    grown["moe"]["brand_new"] = 1
    assert covered(grown, H200) != covered(before, H200)


@pytest.mark.parametrize("key", ["optimizer.eps", "data.pack_buffer", "moe.capacity_factor", "parallel.fsdp"])
def test_another_default_changes_the_hash(key):
    """A tree whose default is another one resolves a file that does not name the key to that value, and no neutral value has moved."""
    data = dump(load(TINY))
    section, name = key.split(".")
    data[section][name] = (data[section][name] or 0) + 1
    assert covered(data, Target()) != covered(dump(load(TINY)), Target())


def test_where_results_go_and_who_watches_does_not_count():
    other = load(
        TINY, {"output": "elsewhere", "checkpoint.dir": "c", "tracker.wandb": True, "profile.kineto": True, "train.hang_timeout_s": 1}
    )
    assert config_sha(other, H200) == config_sha(load(TINY), H200)


@pytest.mark.parametrize("words", [{"checkpoint.every": 5}, {"checkpoint.async_save": False}])
def test_how_checkpoints_are_saved_counts_where_they_are(words):
    """Training waits for them, so two ways are two variants."""
    assert config_sha(load(TINY, words), H200) == config_sha(load(TINY), H200)
    saved = {"checkpoint.dir": "c", "checkpoint.keep": 1}
    assert config_sha(load(TINY, {**saved, **words}), H200) != config_sha(load(TINY, saved), H200)


@pytest.mark.parametrize(
    ("target", "words", "meant"),
    [
        (H200, {"train.dtype": "bf16"}, {"moe.experts": "grouped", "train.device": "cuda"}),
        (H200, {"train.dtype": "bf16", "train.device": "cpu"}, {"moe.experts": "loop", "train.attention": "plain"}),
        (Target(), {}, {"moe.experts": "loop", "train.device": "cpu", "train.attention": "plain", "megatron.kernels": "local"}),
        (Target("NVIDIA A100-SXM4-80GB"), {"train.dtype": "bf16"}, {"train.attention": "flash", "megatron.kernels": "local"}),
        (H200, {"backend": "megatron"}, {"moe.experts": "grouped", "megatron.kernels": "transformer_engine"}),
    ],
)
def test_auto_hashes_as_what_it_stands_for(target, words, meant):
    auto, said = load(TINY, {**words}), load(TINY, {**words, **meant})
    assert config_sha(auto, target) == config_sha(said, target)


def test_what_auto_stands_for_tells_machines_apart():
    config = load(TINY, {"train.dtype": "bf16", "train.device": "cuda"})
    names = (None, "NVIDIA A100-SXM4-80GB", "NVIDIA H200")
    assert len({config_sha(config, Target(name)) for name in names}) == len(names)
    assert config_sha(config, Target("h200x4")) == config_sha(config, Target("NVIDIA H200")), "a profile names its GPU in short"
