"""Which release of another trainer exports are for; tests hold the exports against that release's own code."""

from __future__ import annotations

from collections.abc import Mapping

from playbook_trainer.export.sheet import Target

RELEASES: Mapping[Target, str] = {
    "megatron-lm": "megatron-core 0.19.2",
    "megatron-bridge": "megatron-bridge 0.6.2",
    "torchtitan": "torchtitan 0.3.0",
}
"""By target, a package and its version."""
