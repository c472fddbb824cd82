"""The hash of a configuration: equal where the same is computed, whatever the version of the tree. Torch-free."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from playbook.renamed_keys import first_name, modern
from playbook_trainer.config import automatic
from playbook_trainer.config.automatic import Target
from playbook_trainer.config.neutral import neutral
from playbook_trainer.config.tree import TrainerConfig, dump, flatten

_WATCHING = ("output", "checkpoint", "tracker", "profile", "train.hang_timeout_s")
"""Keys that the hash leaves out: they say where results go and what observes the run, and change nothing that is computed."""
_SAVING = ("checkpoint.every", "checkpoint.async_save")
"""Keys that count all the same where checkpoints are saved: how often, and whether training waits."""


def config_sha(config: TrainerConfig, target: Target) -> str:
    """A hash of the resolved value of every key that is not neutral, for a run on the machine `target`."""
    return sha_of(dump(config), target)


def sha_of(data: Mapping[str, Any], target: Target) -> str:
    """The same for a resolved configuration as plain data, such as a record holds, of this version of the tree or an earlier one."""
    line = json.dumps(covered(data, target), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(line.encode()).hexdigest()[:16]


def covered(data: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """The keys that the hash covers, dotted, with their values. Renamed ones go by their first name, so that no hash changes with a name."""
    plain = neutral()
    whole = {**plain, **flatten(modern(data))}
    resolved = automatic.resolve(whole, target)
    watched = {key for key in resolved if any(key == name or key.startswith(f"{name}.") for name in _WATCHING)}
    watched -= set(_SAVING) if resolved["checkpoint.dir"] else set()
    return dict(
        first_name(key, value) for key, value in resolved.items() if key not in watched and (key not in plain or value != plain[key])
    )
