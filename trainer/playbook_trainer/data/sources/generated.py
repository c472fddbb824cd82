"""Made-up data whose lengths, sizes and byte counts are like real ones: text, and photographs (real JPEG files) with questions and answers.

Sample i is a function of the generator's seed and i alone. The content teaches a model nothing; it costs what real content costs.
"""

from __future__ import annotations

import io
import math
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from playbook import files
from playbook.errors import DataError
from playbook_trainer.config.sections import GeneratedConfig
from playbook_trainer.data.sources.vqa import Sample

_LONGEST = 1_000_000
"""Tokens of the longest document; the log-normal has no bound."""

# Height and width of photographs, and their shares. Made by us to fit what is published of COCO: a longer side of 640 pixels, 90 % of the
# images between 167,500 and 355,840 pixels, 90 % with height / width between 0.6 and 1.5.
# Source: https://cocodataset.org (sizes); statistics of train2014 in https://github.com/Lextal/SotA-CV, content/datasets/coco_detection.md.
SIZES: tuple[tuple[tuple[int, int], float], ...] = (
    ((480, 640), 0.26),
    ((427, 640), 0.22),
    ((640, 480), 0.10),
    ((426, 640), 0.10),
    ((640, 427), 0.07),
    ((375, 500), 0.07),
    ((425, 640), 0.04),
    ((640, 426), 0.03),
    ((500, 375), 0.03),
    ((360, 640), 0.02),
    ((333, 500), 0.02),
    ((612, 612), 0.02),
    ((640, 640), 0.02),
)

# Words of an answer: 1, 2, 3, more. Source: Antol et al., VQA (arXiv 1505.00468), section 4, real images: 89.32 %, 6.91 %, 2.74 %.
_ANSWER_WORDS = (0.8932, 0.0691, 0.0274, 0.0103)
# Words of a question: most have four to ten (the same paper, section 4); 3 + Poisson(3.2) is our fit, with a mean of 6.2.
LEAST_QUESTION, MORE_QUESTION = 3, 3.2
# Quality and contrast that bring a picture of COCO's size to COCO's 163 KB: train2017.zip has 19,336,861,798 bytes for 118,287 images.
QUALITY, CONTRAST = 85, 55.0
_NUM_WORDS = 5_000


class GeneratedText:
    """Documents as token ids: log-normal lengths, ids by the Zipf-Mandelbrot law.

    Source: the mean of 427 tokens is C4's, 156 billion tokens in 365 million documents (Dodge et al., arXiv 2104.08758, table 1); a sigma
    of 1.1 is ours; exponent 1 and shift 2.7 from Piantadosi, Zipf's word frequency law in natural language (2014), equation 2.
    """

    def __init__(self, config: GeneratedConfig, vocab: int) -> None:
        self._config, self._shares = config, _zipf(vocab)

    def __len__(self) -> int:
        return self._config.num_samples

    def __getitem__(self, i: int) -> NDArray[np.int64]:
        config = self._config
        rng = np.random.default_rng([config.seed, 0, i])
        middle = math.log(config.mean_tokens) - config.sigma**2 / 2
        length = min(_LONGEST, max(1, round(math.exp(rng.normal(middle, config.sigma)))))
        return np.searchsorted(self._shares, rng.random(length)).astype(np.int64)


class GeneratedVqa:
    """Samples over a pool of JPEG files: one image each by default, questions and answers with VQA's lengths in words."""

    def __init__(self, config: GeneratedConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._images = np.cumsum(config.images_per_sample) / sum(config.images_per_sample)
        self._shares = _zipf(_NUM_WORDS)

    def __len__(self) -> int:
        return self._config.num_samples

    def __getitem__(self, i: int) -> Sample:
        config = self._config
        rng = np.random.default_rng([config.seed, 1, i])
        count = int(np.searchsorted(self._images, rng.random())) + 1
        images = [PoolImage(self._folder, config.seed, int(n)) for n in rng.integers(0, config.pool_images, count)]
        question = self._words(rng, LEAST_QUESTION + int(rng.poisson(MORE_QUESTION))) + "?"
        answer = self._words(rng, 1 + int(rng.choice(len(_ANSWER_WORDS), p=_ANSWER_WORDS)))
        return Sample(f"generated sample {i}", images, question, answer, [image.size() for image in images])

    def _words(self, rng: np.random.Generator, count: int) -> str:
        return " ".join(words()[n] for n in np.searchsorted(self._shares, rng.random(count)))


@dataclass(frozen=True)
class PoolImage:
    """One JPEG file of a pool, made when it is first read."""

    folder: Path
    seed: int
    number: int

    def __str__(self) -> str:
        return str(self._path())

    def size(self) -> tuple[int, int]:
        """Height and width, known without the file."""
        rng = np.random.default_rng([self.seed, 2, self.number])
        at = int(rng.choice(len(SIZES), p=[share for _, share in SIZES]))
        return SIZES[at][0]

    def read(self) -> bytes:
        """The file's bytes."""
        path = self._path()
        try:
            return path.read_bytes()
        except FileNotFoundError:
            data = _make_jpeg(self.size(), np.random.default_rng([self.seed, 3, self.number]))
        except OSError as e:  # no fault of an image, and not to be skipped
            raise DataError(f"{path} cannot be read: {e.strerror or e}; set data.path to a folder for the generated images") from e
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Workers may make the same file at once, with the same bytes: the last one's stays. One that is lost is made again.
            files.replace(path, data, durable=False)
        except OSError as e:
            raise DataError(f"{path} cannot be written: {e.strerror or e}; set data.path to a folder for the generated images") from e
        return data

    def _path(self) -> Path:
        return self.folder / f"generated_{self.seed}_{self.number:06d}.jpg"


def pool_folder(path: str | None) -> Path:
    """Where generated images are kept: `data.path`, or the user's cache."""
    if path is not None:
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perf-playbook" / "generated-images"


def _make_jpeg(size: tuple[int, int], rng: np.random.Generator) -> bytes:
    """A JPEG of noise with the amplitude spectrum of photographs, 1 / frequency, in brightness and, weaker, in colour.

    Source: Field, Relations between the statistics of natural images and the response properties of cortical cells (JOSA A, 1987).
    """
    height, width = size
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = 1.0
    planes = []
    for contrast in (CONTRAST, CONTRAST / 3, CONTRAST / 3):
        noise = rng.standard_normal((height, width), dtype=np.float32)
        plane = np.fft.irfft2(np.fft.rfft2(noise) / frequency, s=(height, width))
        planes.append(128 + plane * (contrast / plane.std()))
    pixels = np.stack(planes, axis=-1).clip(0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels, mode="YCbCr").save(out, format="JPEG", quality=QUALITY)
    return out.getvalue()


def _zipf(count: int) -> NDArray[np.float64]:
    """Cumulative shares of ranks 1..count."""
    shares = 1.0 / (np.arange(1, count + 1) + 2.7)
    cumulative = np.cumsum(shares)
    return np.asarray(cumulative / cumulative[-1])


@cache
def words() -> tuple[str, ...]:
    """Made-up words, the frequent ones short; about five letters in the mean."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    shares = np.diff(_zipf(len(letters)), prepend=0.0)
    lengths = [2 + int(rng.poisson(1.5 + 0.35 * math.log(1 + rank))) for rank in range(_NUM_WORDS)]
    return tuple("".join(rng.choice(letters, n, p=shares)) for n in lengths)
