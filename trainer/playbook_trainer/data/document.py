"""What rows are made of."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from playbook_trainer.data.images import ImageRef


@dataclass(frozen=True)
class Document:
    """What attention sees as one text: a packed sample, or a piece of one."""

    tokens: NDArray[np.int64]
    loss_from: int = 1
    """The first token that is a target of the loss; no token can predict the very first."""
    images: list[ImageRef] = field(default_factory=list)
    shortened: bool = False
    """Images of the sample were scaled down or left out, or its answer was cut, to fit a row."""
    is_target: NDArray[np.bool_] | None = None
    """Which tokens are targets, where not all from loss_from on are."""

    def __len__(self) -> int:
        return len(self.tokens)
