"""Conversations from files: `messages` as chat models take them, or LLaVA's `conversations`, with their images."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from playbook.errors import ConfigError, DataError
from playbook_trainer.data.sources.streams import Items, JsonLines, Mapped, Record, is_text, read_utf8
from playbook_trainer.data.sources.vqa import inside, refuse_misspelt, refuse_video

# The chat template that comes with a tokenizer: Jinja, rendered as transformers does, with the places of what the assistant says.

_Message = Mapping[str, Any]
_MARK = "\ue000mark of an answer\ue001"
"""Stands for an answer, to see where it goes; of characters that no text has."""


class _Generation(Extension):
    """`{% generation %}`, with which some templates mark what the assistant says; it renders as what is in it."""

    tags = {"generation"}  # noqa: RUF012  the library's own form

    def parse(self, parser: Parser) -> list[Node]:
        """The nodes up to the end of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders conversations by the template beside a tokenizer.json: chat_template.jinja, or that of tokenizer_config.json.

    Raises:
        ConfigError: there is none, or it is no template.
    """

    def __init__(self, tokenizer: Path) -> None:
        """Read the template that lies beside the tokenizer: chat_template.jinja, else tokenizer_config.json, else chat_template.json."""
        folder = tokenizer.parent
        settings = _json(folder / "tokenizer_config.json")
        source = settings.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
        if (folder / "chat_template.jinja").is_file():
            source = (folder / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
        if isinstance(source, list):  # several by name
            source = next((each.get("template") for each in source if isinstance(each, dict) and each.get("name") == "default"), None)
        if not isinstance(source, str):
            raise ConfigError(
                f"data.kind is chat, and {folder} has no chat_template.jinja, nor one in tokenizer_config.json; take a chat model's own"
            )
        tokens = {
            key: value.get("content") if isinstance(value, dict) else value for key, value in settings.items() if key.endswith("_token")
        }
        self._given = {key: value for key, value in tokens.items() if isinstance(value, str)}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now(UTC).strftime(form)}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as e:
            raise ConfigError(f"the chat template of {folder} is no Jinja that can be read: {e}") from e

    def render(self, messages: Sequence[_Message], place: str, tools: Sequence[Any] | None = None) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and from where to where in it the assistant speaks, the end of its turn included.

        Raises:
            DataError: the template refuses the conversation, leaves out what a turn says, or nobody answers.
        """
        text, spans = self._text(messages, place, tools), []
        if tools and text == self._text(messages, place, None):
            raise DataError(f"{place}: the chat template does not show 'tools'; take a template that does, or leave them out")
        for i, message in enumerate(messages):
            self._refuse_unseen(messages, i, text, place, tools)
            if message.get("role") != "assistant":
                continue
            before, after = self._text(messages[:i], place, tools, prompt=True), self._text(messages[: i + 1], place, tools)
            if text.startswith(after) and after.startswith(before):
                spans.append((len(before), len(after)))
            else:
                spans.append(self._span(messages, i, (text, before), place, tools))
        if not spans:
            raise DataError(f"{place}: no turn of the assistant, so there is nothing to learn")
        return text, spans

    def _refuse_unseen(self, messages: Sequence[_Message], i: int, text: str, place: str, tools: Sequence[Any] | None) -> None:
        """Refuse calls that the template does not show: an empty answer would be learnt in their place."""
        if messages[i].get("tool_calls"):
            without = [*messages[:i], {k: v for k, v in messages[i].items() if k != "tool_calls"}, *messages[i + 1 :]]
            if self._text(without, place, tools) == text:
                raise DataError(f"{place}: the chat template does not show the tool_calls of turn {i}; take a template that does")

    def _span(
        self, messages: Sequence[_Message], i: int, texts: tuple[str, str], place: str, tools: Sequence[Any] | None
    ) -> tuple[int, int]:
        """Where answer `i` stands in a text that renders it otherwise than where it is the last, as Qwen3's does with thoughts.

        Its content is found by putting a mark in its place; what the template puts around it as the last answer is taught as far as it is
        there.
        """
        text, before = texts
        content = messages[i].get("content")
        marked = self._text([*messages[:i], {**messages[i], "content": _MARK}, *messages[i + 1 :]], place, tools)
        ahead, mark, behind = marked.partition(_MARK)
        if not (mark and isinstance(content, str) and text.startswith(ahead) and text.endswith(behind)):
            raise DataError(
                f"{place}: the chat template renders answer {i} otherwise once more turns follow, or leaves it out; make a sample of each "
                "answer"
            )
        start, end = len(ahead), len(text) - len(behind)
        alone = self._text([*messages[:i], {**messages[i], "content": _MARK}], place, tools)
        lead, _, tail = alone[len(before) :].partition(_MARK) if alone.startswith(before) else ("", "", "")
        start -= len(lead) if lead and ahead.endswith(lead) else 0
        return start, end + (len(tail) if behind.startswith(tail) else 0)

    def _text(self, messages: Sequence[_Message], place: str, tools: Sequence[Any] | None, *, prompt: bool = False) -> str:
        try:
            return self._template.render(messages=list(messages), tools=tools, add_generation_prompt=prompt, **self._given)
        except Exception as e:  # a template may fail in any way
            raise DataError(
                f"{place}: the chat template does not take this conversation: {str(e).splitlines()[0] if str(e) else type(e).__name__}"
            ) from e


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is not readable as JSON ({e}); fetch it again") from e
    return content if isinstance(content, dict) else {}


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
        entries = json.loads(read_utf8(file))
    except (ValueError, RecursionError) as e:
        raise DataError(f"{file}: not JSON ({e}); expected a list of conversations") from e
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"{file}: expected a list of objects, each with messages or conversations")
    return [(f"{file}: entry {i}", entry) for i, entry in enumerate(entries)]


def _conversation(record: Record, root: Path) -> Conversation:
    """A record of either format as a conversation; every image must be named and shown exactly once."""
    place, fields = record
    refuse_video(place, fields)
    images = fields.get("images", fields.get("image"))
    names: list[Any] = list(images) if isinstance(images, list) else [] if images is None else [images]
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
