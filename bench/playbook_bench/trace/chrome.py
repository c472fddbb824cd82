"""A Chrome trace as a stream of its events: one event is in memory at a time, whatever the file's size.

The events are the list `traceEvents` of a document, or the whole document. Each is decoded by json's own scanner out of a piece of text
that grows where an event goes on behind it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

from playbook.errors import PlaybookError
from playbook_bench.trace.containers import Unpacked

_CHUNK = 1 << 20
_MAX_VALUE = 64 << 20
"""Characters of one event, or of one value beside the events."""
_SPACE = re.compile(r"[ \t\n\r\ufeff]*")
_BETWEEN = re.compile(r"[ \t\n\r,]*")
_DECODE = json.JSONDecoder(strict=False).raw_decode
_NEAR = 8
"""Characters before the end of a text within which a value that the end cuts is found to be wrong: `\\u12`, `fals`."""


class _CutError(Exception):
    """The text ended inside the document."""


class Document:
    """A Chrome trace that is being read. `cut`: its end is missing; `head`: its values beside the events, once they have been passed."""

    def __init__(self, stream: Unpacked) -> None:
        self.cut, self.head = False, dict[str, Any]()
        self._stream, self._name = stream, stream.name
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text, self._at, self._over = "", 0, False

    def events(self) -> Iterator[Any]:
        """The events, in order.

        Raises:
            PlaybookError: it is no Chrome trace, or damaged before its end.
        """
        try:
            yield from self._whole()
        except _CutError:
            self.cut = True
        except RecursionError as e:
            raise PlaybookError(f"{self._name}: is nested too deeply to be a Chrome trace") from e

    def _whole(self) -> Iterator[Any]:
        first = self._next()
        if first == "[":
            yield from self._list()
        elif first == "{":
            yield from self._members()
        else:
            what = "is empty, and so" if not first else "is"
            raise PlaybookError(f"{self._name}: {what} not valid JSON; expected the Chrome trace that torch.profiler writes")
        if self._next():
            raise PlaybookError(
                f"{self._name}: goes on behind its end, as where several processes wrote into one file; trace anew, each rank into its own"
            )

    def _members(self) -> Iterator[Any]:
        """The events of a document that is an object; its other values go into `head`.

        Raises:
            PlaybookError: it is no Chrome trace.
        """
        self._at += 1
        listed = False
        while (c := self._need()) != "}":
            if c == ",":
                self._at += 1
                continue
            key = self._value()
            if not isinstance(key, str) or self._need() != ":":
                self._refuse("expected a name and a colon")
            self._at += 1
            if self._need() == "[" and key == "traceEvents":
                listed = True
                yield from self._list()
            else:
                value = self._value()
                if len(self.head) < _CHUNK:
                    self.head[key] = value
        self._at += 1
        if not listed and "entries" not in self.head:  # a dump of the flight recorder has these
            raise PlaybookError(f"{self._name}: has no list 'traceEvents'; expected the Chrome trace that torch.profiler writes")

    def _list(self) -> Iterator[Any]:
        self._at += 1
        while True:
            match = _BETWEEN.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at == len(self._text):
                if not self._more():
                    raise _CutError
            elif self._text[self._at] == "]":
                self._at += 1
                return
            else:
                yield self._value()

    def _need(self) -> str:
        """The next character, which must be there."""
        c = self._next()
        if not c:
            raise _CutError
        return c

    def _next(self) -> str:
        """The next character that is no space; none at the end."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _value(self) -> Any:
        """The next value of the document, read on until it is whole."""
        while True:
            try:
                value, end = _DECODE(self._text, self._at)
            except json.JSONDecodeError as e:
                if not self._more():
                    if e.pos >= len(self._text) - _NEAR or e.msg.startswith("Unterminated"):
                        raise _CutError from e
                    self._refuse(e.msg)
            except ValueError as e:
                self._refuse(str(e)[:80])
            else:
                # A number that touches the end may go on behind it.
                if end < len(self._text) or not self._more():
                    self._at = end
                    return value

    def _more(self) -> bool:
        """Read on; False at the end. A value that does not fit doubles the piece, so that it is not scanned again and again."""
        self._text = self._text[self._at :]
        self._at = 0
        if self._over:
            return False
        if len(self._text) > _MAX_VALUE:
            self._refuse(f"no value ends within {_MAX_VALUE >> 20} million characters")
        target, pieces, size = max(_CHUNK, len(self._text)), [self._text], 0
        while size < target:
            data = self._stream.read(_CHUNK)
            if not data:
                self._over = True
                pieces.append(self._decoder.decode(b"", final=True))
                break
            size += len(data)
            pieces.append(self._decoder.decode(data))
        self._text = "".join(pieces)
        return True

    def _refuse(self, what: str) -> None:
        near = self._text[self._at : self._at + 40]
        raise PlaybookError(f"{self._name}: is not valid JSON ({what} near {near!r}); the file is damaged: copy it, or trace, anew")
