"""A dry run accepts a legal layout and refuses each that has one thing wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook_trainer.config.dry_run import dry_run
from playbook_trainer.config.tree import load


def layouts_are_judged_by_dry_run(
    config: str, gpus: int, legal: Mapping[str, Any], illegal: Sequence[Mapping[str, Any]]
) -> tuple[bool, str, dict[str, Any]]:
    """Whether a dry run accepts a legal layout on so many GPUs, with what each rank holds, and refuses each that has one thing wrong.

    `config` names a file of `trainer/configs`; `legal` overrides it, and each member of `illegal` comes on top of that.
    """
    path = data_root("configs") / f"{config}.yaml"
    report = dry_run(load(path, legal), gpus)
    peak = max(s.peak for s in report.stages)
    said: dict[str, str | None] = {}
    for fault in illegal:
        name = ", ".join(f"{k}={v}" for k, v in fault.items())
        try:
            dry_run(load(path, {**legal, **fault}), gpus)
            said[name] = None
        except ConfigError as e:
            said[name] = str(e)
    missed = [name for name, message in said.items() if message is None]
    sentence = f"{report.layout['model']} on {gpus} GPUs, {len(report.stages)} stages: {peak / (1 << 30):.1f} GiB on the fullest rank; " + (
        f"accepted although wrong: {'; '.join(missed)}" if missed else f"all {len(illegal)} faults are refused"
    )
    return bool(illegal) and not missed and peak > 0, sentence, {"layout": report.layout, "peak_bytes": peak, "refused": said}
