"""Conversations from files: `messages` as chat models take them, or LLaVA's `conversations`, with their images."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playbook.errors import DataError
from playbook_trainer.data.sources.streams import Items, Mapped
from playbook_trainer.data.sources.text import JsonLines, Record, is_text, read_utf8
from playbook_trainer.data.sources.vqa import inside, refuse_misspelt, refuse_video

_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
"""LLaVA's names of who speaks."""
_IMAGE = "<image>"
"""Where an image stands in a text."""


@dataclass(frozen=True)
class Conversation:
    """Turns as a chat template takes them, and the images in the order in which they are shown; `place` names it in messages."""

    place: str
    messages: Sequence[Mapping[str, Any]]
    images: Sequence[Path]
    tools: Sequence[Any] | None = None
    """Descriptions of functions that may be called, as a chat template takes them."""


def conversations(path: Path) -> Items[Conversation]:
    """The conversations of a .jsonl file, of a .json file with a list, or of a folder's samples.jsonl; images lie in its folder.

    Raises:
        DataError: no such file; on access, an entry that is no conversation, or an image that is missing or lies outside the folder.
    """
    file = path / "samples.jsonl" if path.is_dir() else path
    if not file.is_file() or file.suffix not in (".json", ".jsonl"):
        raise DataError(f"data.path: {path}; expected a .jsonl or .json file of conversations, or a folder with samples.jsonl")
    root = file.parent.resolve()
    records = JsonLines(file) if file.suffix == ".jsonl" else _entries(file)
    return Mapped(lambda record: _conversation(record, root), records)


def _entries(file: Path) -> list[Record]:
    try:
        found = json.loads(read_utf8(file))
    except (ValueError, RecursionError) as e:
        raise DataError(f"{file}: not JSON ({e}); expected a list of conversations") from e
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise DataError(f"{file}: expected a list of objects, each with messages or conversations")
    return [(f"{file}: entry {i}", entry) for i, entry in enumerate(found)]


def _conversation(record: Record, root: Path) -> Conversation:
    place, fields = record
    refuse_video(place, fields)
    given = fields.get("images", fields.get("image"))
    names: list[Any] = list(given) if isinstance(given, list) else [] if given is None else [given]
    messages, shown = [], 0
    for role, content, more in _turns(place, fields):
        items = _items(place, "" if content is None and more.get("tool_calls") else content, marked=bool(names))
        if not names and any(_IMAGE in item.get("text", "") for item in items):
            raise DataError(
                f"{place}: '{_IMAGE}' stands in a text, and no image is named under image or images; name it there, or take the mark out"
            )
        names += [item["image"] for item in items if is_text(item.get("image"))]
        shown += sum(item["type"] == "image" for item in items)
        plain = all(item["type"] == "text" for item in items)
        messages.append({**more, "role": role, "content": "".join(item["text"] for item in items) if plain else items})
    if not names:
        refuse_misspelt(place, fields)
    if not all(is_text(name) for name in names) or shown != len(names):
        raise DataError(
            f"{place}: {len(names)} images are named, and {shown} shown; expected '{_IMAGE}' in a text, or an item of type image, for each"
        )
    tools = fields.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{place}: expected a list of objects under 'tools', each describing a function")
    return Conversation(place, messages, [inside(root, name, place) for name in names], tools or None)


def _turns(place: str, fields: Mapping[str, Any]) -> list[tuple[str, Any, dict[str, Any]]]:
    """Who says what, in either form, and what else a turn has: tool_calls, reasoning_content and whatever its template reads."""
    for key, speaker, content, roles in (("messages", "role", "content", None), ("conversations", "from", "value", _ROLES)):
        turns = fields.get(key)
        if turns is None:
            continue
        if not isinstance(turns, list) or not turns or not all(isinstance(t, dict) and is_text(t.get(speaker)) for t in turns):
            raise DataError(f"{place}: expected a list of turns under '{key}', each with '{speaker}' and '{content}'")
        if roles and (odd := [t[speaker] for t in turns if t[speaker] not in roles]):
            raise DataError(f"{place}: '{odd[0][:40]}' speaks; expected {', '.join(roles)}")
        return [
            (roles[t[speaker]] if roles else t[speaker], t.get(content), {k: v for k, v in t.items() if k not in (speaker, content)})
            for t in turns
        ]
    raise DataError(f"{place}: has neither messages nor conversations")


def _items(place: str, content: Any, *, marked: bool) -> list[dict[str, Any]]:
    """A turn's content as items of text and images; in a `marked` text, images stand at their marks."""
    if is_text(content):
        parts = content.split(_IMAGE) if marked else [content]
        texts = [{"type": "text", "text": part.strip("\n") if len(parts) > 1 else part} for part in parts]
        return [
            item
            for i, text in enumerate(texts)
            for item in ([{"type": "image"}] if i else []) + ([text] if text["text"] or len(parts) == 1 else [])
        ]
    if isinstance(content, list) and all(isinstance(item, dict) for item in content):
        for item in content:
            refuse_video(place, [item.get("type")])
            if item.get("type") not in ("text", "image") or (item["type"] == "text" and not is_text(item.get("text"))):
                raise DataError(f"{place}: an item of type {str(item.get('type'))[:40]!r}; expected text or image")
        return content
    raise DataError(f"{place}: expected a text under content, or a list of items of type text and image")
