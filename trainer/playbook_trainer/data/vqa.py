"""Image-question-answer samples: reading, and fitting each into a row before any image is decoded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from playbook.errors import DataError
from playbook_trainer.config import DataConfig, ModelConfig
from playbook_trainer.data.images import ImageRef, header_size, target_size
from playbook_trainer.data.text import is_text, json_lines, read_utf8
from playbook_trainer.data.tokenizer import Tokenizer

LEAST_VISUAL_TOKENS = 4
"""To make room for text, an image is not given a budget below this many visual tokens (whole rows and columns may use less)."""


@dataclass(frozen=True)
class Sample:
    """One line of samples.jsonl; image sizes are height and width of the file."""

    place: str
    images: list[Path]
    question: str
    answer: str


@dataclass(frozen=True)
class Fitted:
    """A sample that fits into a row: its images with their target sizes, and its text as tokens."""

    images: list[ImageRef]
    question: list[int]
    answer: list[int]
    length: int
    shortened: bool
    """Something of the sample was scaled, cut or left out to fit."""


def read_samples(folder: Path) -> list[Sample]:
    """The samples of `folder`/samples.jsonl.

    Raises:
        DataError: no such file, a line that is no sample, or an image that is missing or lies outside the folder.
    """
    file = folder / "samples.jsonl"
    if not file.is_file():
        raise DataError(f"data.path: {folder} has no samples.jsonl; expected one JSON object per line with images, question, answer")
    root = folder.resolve()
    samples = []
    for number, record in json_lines(file, read_utf8(file)):
        place = f"{file}:{number}"
        images, question, answer = (record.get(key) for key in ("images", "question", "answer"))
        if not is_text(question) or not is_text(answer):
            raise DataError(f"{place}: expected strings of valid Unicode under 'question' and 'answer'")
        if not isinstance(images, list) or not all(is_text(name) for name in images):
            raise DataError(f"{place}: expected a list of file names under 'images'")
        samples.append(Sample(place, [_inside(root, name, place) for name in images], question, answer))
    if not samples:
        raise DataError(f"{file} holds no sample")
    return samples


def fit_samples(samples: list[Sample], tokenizer: Tokenizer, model: ModelConfig, data: DataConfig) -> list[Fitted]:
    """Every sample with its target sizes and tokens, so that its length is known; image files are opened for their headers only."""
    size_of = cache(header_size)
    fitted = []
    for sample in samples:
        sizes = [size_of(path) for path in sample.images]
        fitted.append(_fit(sample, sizes, tokenizer.encode(sample.question), tokenizer.encode(sample.answer), model, data))
    return fitted


def merge_factor(model: ModelConfig) -> int:
    """Pixels along one side of a visual token."""
    assert model.vision is not None
    return model.vision.patch_size * model.vision.spatial_merge_size


def _fit(
    sample: Sample, sizes: list[tuple[int, int]], question: list[int], answer: list[int], model: ModelConfig, data: DataConfig
) -> Fitted:
    """The rule for a sample that is too long, in this order, each step only as far as needed.

    1. images beyond max_images_per_sample are left out, the last first;
    2. with `images: variable`, all images are scaled down by one ratio, to no less than LEAST_VISUAL_TOKENS each;
    3. images are left out, the last first, until image tokens leave a place for one answer token and eos;
    4. the question is cut at its end; 5. the answer is cut at its end. Eos always stays.
    """
    factor = merge_factor(model)
    kept = sizes[: data.max_images_per_sample]
    targets = [_target(size, factor, data) for size in kept]
    wanted = _length(targets, factor, len(question), len(answer))
    if wanted > data.seq_len:
        targets = _shrink(targets, kept, data.seq_len - (wanted - _visual(targets, factor)), factor, data)
        while len(targets) > 1 and _length(targets, factor, 0, min(1, len(answer))) > data.seq_len:
            targets = targets[:-1]
    room = data.seq_len - _length(targets, factor, 0, 0)
    cut_answer = answer[:room]
    cut_question = question[: room - len(cut_answer)]
    return Fitted(
        images=[ImageRef(path, *target) for path, target in zip(sample.images, targets, strict=False)],
        question=cut_question,
        answer=cut_answer,
        length=_length(targets, factor, len(cut_question), len(cut_answer)),
        shortened=wanted > data.seq_len or len(kept) < len(sizes),
    )


def _target(size: tuple[int, int], factor: int, data: DataConfig) -> tuple[int, int]:
    if data.images == "fixed":
        return data.fixed_image_size[0], data.fixed_image_size[1]
    return target_size(*size, factor, data.max_image_pixels)


def _shrink(
    targets: list[tuple[int, int]], sizes: list[tuple[int, int]], room: int, factor: int, data: DataConfig
) -> list[tuple[int, int]]:
    if data.images == "fixed" or not targets:
        return targets
    ratio = max(room, 0) / _visual(targets, factor)
    budgets = [max(LEAST_VISUAL_TOKENS, int(h * w // factor**2 * ratio)) for h, w in targets]
    return [
        target_size(*size, factor, min(budget * factor**2, h * w)) for size, budget, (h, w) in zip(sizes, budgets, targets, strict=True)
    ]


def _visual(targets: list[tuple[int, int]], factor: int) -> int:
    return sum(h * w for h, w in targets) // factor**2


def _length(targets: list[tuple[int, int]], factor: int, question: int, answer: int) -> int:
    # Each image stands between vision_start and vision_end; eos ends the answer.
    return _visual(targets, factor) + 2 * len(targets) + question + answer + 1


def _inside(root: Path, name: str, place: str) -> Path:
    """The image's real path, which must lie in `root`: neither `..`, an absolute path nor a link may lead out."""
    try:
        path = (root / name).resolve()
        found = path.is_file()
    except (OSError, ValueError, RuntimeError) as e:  # a null byte, a name too long, a loop of links
        raise DataError(f"{place}: image {name[:80]!r} is no file name that can be read: {e}") from e
    if not path.is_relative_to(root):
        raise DataError(f"{place}: image {name!r} lies outside {root}; only files in the folder of samples.jsonl are read")
    if not found:
        raise DataError(f"{place}: image {name!r} does not exist in {root}")
    return path
