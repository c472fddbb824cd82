"""Texts cut into pieces of a row's length, and few texts as a data set of their pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from playbook.errors import DataError
from playbook_trainer.data.document import Document
from playbook_trainer.data.sources.streams import Flat, Items, Joined

T = TypeVar("T")


class Pieces(Sequence[Document]):
    """A tokenized text in pieces of `seq_len` tokens, the last one shorter; each is made when it is asked for."""

    def __init__(self, tokens: NDArray[Any], seq_len: int) -> None:
        self._tokens, self._seq_len = tokens, seq_len

    def __len__(self) -> int:
        return -(-len(self._tokens) // self._seq_len)

    @overload
    def __getitem__(self, i: int) -> Document: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Document]: ...
    def __getitem__(self, i: int | slice) -> Document | Sequence[Document]:
        if isinstance(i, slice):
            return [self[n] for n in range(len(self))[i]]
        if not 0 <= i < len(self):
            raise IndexError(i)
        return Document(self._tokens[i * self._seq_len : (i + 1) * self._seq_len].astype(np.int64))


class _Unreadable(Items[Document]):
    """A text that is none, as one piece: whoever reads it learns why."""

    def __init__(self, why: DataError) -> None:
        self._why = why

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> Document:
        raise self._why


def pieces(texts: Flat[T], documents: Callable[[T], Sequence[Document]]) -> Flat[Document]:
    """The pieces of all texts as samples, all held as token ids."""

    def cut(i: int) -> Items[Document]:
        try:
            return documents(texts.items[i])
        except DataError as e:
            return _Unreadable(e)

    return Flat(Joined([cut(i) for i in range(len(texts.items))]), texts.name)
