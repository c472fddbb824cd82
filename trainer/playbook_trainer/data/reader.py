"""Documents of samples under the policies for those that are bad or too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from playbook.errors import DataError
from playbook_trainer.config.tree import DataConfig
from playbook_trainer.data.document import Document
from playbook_trainer.data.images import BadImage
from playbook_trainer.data.sources.streams import Items
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
