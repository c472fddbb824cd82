"""Settings that megatron-core refuses together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from playbook.lint.base import show
from playbook.lint.labels import excluded, label_problems, table_for, tables
from playbook.yaml_files import did_you_mean


def refused_together(*, megatron_core: str, rows: Sequence[Mapping[str, Any]]) -> tuple[bool, str, dict[str, Any]]:
    """Whether megatron-core refuses exactly the settings that `rows` mark as refused, by the rules of `playbook.planner.rules`.

    Each row has `settings` (as a configuration family writes them) and `refused`. The labels must be those of the named version.
    """
    table = table_for(megatron_core)
    if table is None:
        raise ValueError(f"no label table for megatron-core {megatron_core}{did_you_mean(megatron_core, tables())}")
    wrong, reasons = [], {}
    for row in rows:
        settings, words = row["settings"], ", ".join(f"{k} {show(v)}" for k, v in row["settings"].items())
        unknown = [message for _, message in label_problems(settings, table)]
        if unknown:
            raise ValueError("; ".join(unknown))
        found = excluded(settings, {})
        reasons[words] = found
        if bool(found) != row["refused"]:
            wrong.append(f"{words} is {'refused' if found else 'accepted'}")
    refused = sum(bool(r) for r in reasons.values())
    sentence = f"megatron-core {megatron_core} refuses {refused} of {len(rows)} settings" + (
        f"; against the claim: {'; '.join(wrong)}" if wrong else ""
    )
    return not wrong, sentence, {"settings": [{"settings": k, "refused_because": v} for k, v in reasons.items()]}
