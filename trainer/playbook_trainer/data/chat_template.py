"""The chat template that comes with a tokenizer: Jinja, rendered as transformers does, with the places of what the assistant says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from playbook.errors import ConfigError, DataError

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

        Its content is found by putting a mark in its place; what the template puts around it as the last answer is taught as far as it is there.
        """
        text, before = texts
        content = messages[i].get("content")
        marked = self._text([*messages[:i], {**messages[i], "content": _MARK}, *messages[i + 1 :]], place, tools)
        ahead, found, behind = marked.partition(_MARK)
        if not (found and isinstance(content, str) and text.startswith(ahead) and text.endswith(behind)):
            raise DataError(
                f"{place}: the chat template renders answer {i} otherwise once more turns follow, or leaves it out; make a sample of each answer"
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
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is not readable as JSON ({e}); fetch it again") from e
    return found if isinstance(found, dict) else {}
