"""Documents of samples under the policies for those that are bad or too long, and texts cut into documents of a row's length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from playbook.errors import DataError
from playbook_trainer.config.tree import DataConfig
from playbook_trainer.data.document import Document
from playbook_trainer.data.images import BadImage
from playbook_trainer.data.sources.streams import Flat, Items, Joined
from playbook_trainer.data.sources.vqa import TooLong

T = TypeVar("T")

_MOST_LOST = 10_000
"""Samples in a row that may be left out; where as many are, data and configuration do not fit each other."""


class Lost(NamedTuple):
    """A sample that is left out."""

    counter: str
    """`samples_dropped` (too long) or `samples_bad` (not readable as a sample)."""
    why: str
    """Its place, and what is wrong with it."""


class Reader(Generic[T]):
    """Documents of samples under the policies for those that are bad or too long; remembers which ones it left out."""

    def __init__(self, documents: Callable[[T], Sequence[Document]], data: DataConfig) -> None:
        self._documents, self._skip = documents, data.on_bad_sample == "skip"
        self.lost: list[Lost] = []
        self._in_vain: list[Lost] = []

    def read(self, items: Items[T], i: int) -> Sequence[Document]:
        """The documents of item `i`; none where it is left out.

        Raises:
            DataError: it is bad and the policy is to fail, or too many in a row are left out.
        """
        try:
            documents = self._documents(items[i])
        except BadImage:  # which data.on_bad_image is about
            raise
        except TooLong as e:
            lost = Lost("samples_dropped", str(e))
        except DataError as e:
            if not self._skip:
                raise DataError(f"{e}; or set data.on_bad_sample: skip, which leaves such samples out and counts them") from e
            lost = Lost("samples_bad", str(e))
        else:
            self._in_vain.clear()
            return documents
        self.lost.append(lost)
        self._in_vain.append(lost)
        if len(self._in_vain) == _MOST_LOST:
            raise DataError(none_left(self._in_vain))
        return []


def none_left(lost: Sequence[Lost]) -> str:
    """What to say where all of the samples in a row are left out."""
    return (
        f"the data has {len(lost)} samples in a row of which none can be used, first {lost[0].why}; raise data.seq_len or "
        "data.max_images_per_sample, set data.on_long_sample: cut, or mend the data"
    )


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
