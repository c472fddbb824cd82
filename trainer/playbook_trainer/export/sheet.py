"""What a configuration says in another trainer's words: every key of the tree is a setting there, has no bearing there,
or cannot be said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from playbook_trainer.config import automatic
from playbook_trainer.config.automatic import SWITCHES
from playbook_trainer.config.tree import TrainerConfig, dump, flatten, neutral

Target = Literal["megatron-lm", "megatron-bridge", "torchtitan"]
READING = " ".join(
    f"data.{name}"
    for name in [
        "source",
        "subset",
        "text_key",
        "pack_buffer",
        "images",
        "fixed_image_size",
        "max_image_pixels",
        "min_image_pixels",
        "max_source_pixels",
        "max_images_per_sample",
        "on_bad_image",
        "on_long_sample",
        "on_bad_sample",
        "cache",
        "cache_gib",
        "generated.*",
    ]
)
"""Keys of this trainer's reader of data, as words; every target has another."""
MEGATRON = "a setting of the megatron backend"
_NO_VALUE = object()


@dataclass(frozen=True)
class Setting:
    """A field of the other trainer with its value. `keys` of the tree that it says; none where this trainer has no choice."""

    keys: tuple[str, ...]
    section: str
    field: str
    value: Any


@dataclass(frozen=True)
class Remark:
    """Why a key of the tree has no setting."""

    key: str
    why: str


class Sheet:
    """Collects what becomes of each key of a configuration."""

    def __init__(self, config: TrainerConfig, target: Target) -> None:
        self.config, self.target = automatic.switched(config, automatic.Target()), target
        self.values = flatten(dump(config))
        self.auto = {key for key in SWITCHES if self.values[key] == "auto"}
        """Switches that leave the choice to the target."""
        self.settings: list[Setting] = []
        self.missing: list[Remark] = []
        self.irrelevant: list[Remark] = []

    def put(self, keys: str, section: str, field: str, value: Any) -> None:
        """A setting that says these keys, given as words; none where all of them leave the choice to the target."""
        if keys and set(keys.split()) <= self.auto:
            return
        self.settings.append(Setting(tuple(keys.split()), section, field, value))

    def table(self, section: str, *rows: tuple[str, str, Any]) -> None:
        """Settings of a section: of each its keys, its field and its value."""
        for keys, field, value in rows:
            self.put(keys, section, field, value)

    def lack(self, keys: str, why: str) -> None:
        """Keys that cannot be said there."""
        self.missing += [Remark(key, why) for key in keys.split()]

    def skip(self, keys: str, why: str) -> None:
        """Keys that have no bearing there; `section.*` stands for all below it."""
        self.irrelevant += [Remark(key, why) for key in keys.split()]

    def plain(self, key: str, plain: Any, why: str) -> None:
        """A key that asks for nothing at this value, and that cannot be said at any other."""
        if self.values.get(key, plain) == plain:
            self.skip(key, f"at {shown(plain)} it asks for nothing")
        else:
            self.lack(key, why)

    def settle(self, reasons: Mapping[str, str]) -> None:
        """Keys of which nothing was said: each asks for nothing at its neutral value, and cannot be said at any other;
        `reasons` tell why by key.
        """
        mentioned = {key for setting in self.settings for key in setting.keys} | {r.key for r in (*self.missing, *self.irrelevant)}
        for key in self.values:
            if not mentioned.isdisjoint(_words_for(key)):
                continue
            if key in self.auto:
                self.skip(key, "auto: the target chooses")
            else:
                self.plain(key, neutral().get(key, _NO_VALUE), reasons.get(key, "this version of the export does not know it"))


def shown(value: Any) -> str:
    """A value as the configuration's files have it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _words_for(key: str) -> list[str]:
    """The words that cover a key: its own, and `section.*` of what it is and lies in."""
    parts = key.split(".")
    return [key, *(".".join(parts[:n]) + ".*" for n in range(1, len(parts) + 1))]


# Which release of another trainer exports are for; tests hold the exports against that release's own code.

RELEASES: Mapping[Target, str] = {
    "megatron-lm": "megatron-core 0.19.2",
    "megatron-bridge": "megatron-bridge 0.6.2",
    "torchtitan": "torchtitan 0.3.0",
}
"""By target, a package and its version."""
