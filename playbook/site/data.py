"""What data the runs of a record read, in words: made up or real is not in a claim's statement, and settles what its verdict speaks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from playbook.records.read import Record
from playbook.site.text import text

_CONTENT = {"text": "text", "vqa": "photographs with questions"}
_OF_ONES_OWN = {"text": "text", "vqa": "images with questions"}


def data_read(record: Record) -> str:
    """The data of each variant, as Markdown; empty where no run has a configuration that names them."""
    configs = record.get("measured", "configs", default={})
    words: dict[str, str] = {}
    for run in record.get("measured", "runs", default=[]):
        config = configs.get(run.get("config_sha"))
        found = _in_words(config.get("data")) if isinstance(config, Mapping) else ""
        if found:
            words.setdefault(str(run.get("variant")), found)
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return "; ".join(f"{found} in {text(variant)}" for variant, found in words.items())


def _in_words(data: Any) -> str:
    if not isinstance(data, Mapping) or data.get("kind") not in ("mock", *_CONTENT):
        return ""
    kind, packed = data["kind"], ", packed" if data.get("pack") is True else ""
    if kind == "mock":
        return "random tokens" + (packed or ", one document to a row")
    if data.get("source") == "generated":
        return f"generated {_CONTENT[kind]}{packed}"
    if data.get("path") is None:
        return f"bundled {_CONTENT[kind]}{packed}"
    return f"{_OF_ONES_OWN[kind]} from a data set of the run's own{packed}"
