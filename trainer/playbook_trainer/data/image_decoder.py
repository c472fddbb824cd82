"""Images to pixels under the policy for bad ones, with a cache; one decoder per worker."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from playbook_trainer.config.tree import DataConfig
from playbook_trainer.data.images import BadImage, ImageRef, decode

_GREY = 128
"""The value of every pixel of an image that stands in for a bad one."""


class ImageDecoder:
    """Decodes and resizes images, caches them if `data.cache` says so, and counts what it did."""

    def __init__(self, data: DataConfig) -> None:
        self._skip, self._max_pixels = data.on_bad_image == "skip", data.max_source_pixels
        self._room = int(data.cache_gib * 2**30) if data.cache == "memory" else 0
        self._cache: dict[tuple[str, int, int], NDArray[np.uint8]] = {}
        self._counts: Counter[str] = Counter()

    def take_counts(self) -> dict[str, int]:
        """What has been counted since the last call: images decoded, found in the cache, and bad by kind."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def pixels(self, image: ImageRef) -> tuple[NDArray[np.uint8], bool]:
        """The resized image, uint8 (height, width, 3), and whether it is the image itself; a grey one stands in for a bad one.

        Raises:
            BadImage: the image is bad and the policy is to fail.
        """
        held = self._cache.get(_name(image)) if self._cache else None
        if held is not None:
            self._counts["images_cached"] += 1
            return held, True
        bad = image.bad
        if not bad:
            try:
                pixels = decode(image, self._max_pixels)
            except BadImage as e:
                if not self._skip:
                    raise
                bad = e.kind
            else:
                self._counts["images_decoded"] += 1
                self._keep(image, pixels)
                return pixels, True
        self._counts[f"bad_images_{bad}"] += 1
        return np.full((image.height, image.width, 3), _GREY, dtype=np.uint8), False

    def _keep(self, image: ImageRef, pixels: NDArray[np.uint8]) -> None:
        if pixels.nbytes <= self._room:
            self._room -= pixels.nbytes
            self._cache[_name(image)] = pixels


def _name(image: ImageRef) -> tuple[str, int, int]:
    # Not the image itself, which may hold its whole encoded file: a photograph takes ten times the room of its pixels, and would not be counted.
    return str(image.file), image.height, image.width
