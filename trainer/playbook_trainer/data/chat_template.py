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

    def render(self, messages: Sequence[_Message], place: str) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and from where to where in it the assistant speaks, the end of its turn included.

        Raises:
            DataError: the template refuses the conversation, or renders an answer otherwise once more turns follow, or nobody answers.
        """
        text, spans = self._text(messages, place), []
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before, after = self._text(messages[:i], place, prompt=True), self._text(messages[: i + 1], place)
            if not text.startswith(after) or not after.startswith(before):
                raise DataError(
                    f"{place}: the chat template renders answer {i} otherwise once more turns follow; make a sample of each answer"
                )
            spans.append((len(before), len(after)))
        if not spans:
            raise DataError(f"{place}: no turn of the assistant, so there is nothing to learn")
        return text, spans

    def _text(self, messages: Sequence[_Message], place: str, *, prompt: bool = False) -> str:
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=prompt, **self._given)
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
