"""Image-question-answer samples: reading, and fitting each into a row before any image is decoded."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from playbook.errors import DataError
from playbook_trainer.config.tree import DataConfig, ModelConfig
from playbook_trainer.data.collate import Document
from playbook_trainer.data.images import BadImage, ImageFile, ImageRef, header_size, target_size
from playbook_trainer.data.sources.streams import Items, JsonLines, Mapped, Record, is_text, read_utf8
from playbook_trainer.data.tokenizer import Tokenizer

_IMAGE_KEYS = ("image", "images")
LEAST_VISUAL_TOKENS = 4
"""To make room for text, an image is not given a budget below this many visual tokens (whole rows and columns may use less)."""


@dataclass(frozen=True)
class Sample:
    """Images, a question and its answer; `place` names it in messages. Sizes are height and width, where the source knows them."""

    place: str
    images: Sequence[Path | ImageFile]
    question: str
    answer: str
    sizes: Sequence[tuple[int, int]] | None = None


class TooLong(DataError):
    """A sample does not fit into a row, and is left out."""


def folder_samples(folder: Path) -> Items[Sample]:
    """The samples of `folder`/samples.jsonl.

    Raises:
        DataError: no such file; on access, a line that is no sample, or an image that is missing or lies outside the folder.
    """
    file = folder / "samples.jsonl"
    if not folder.is_dir():
        problem = f"{folder} is a file" if folder.exists() else f"there is no {folder}"
        raise DataError(f"data.path: {problem}; expected a folder with samples.jsonl and its images, or .tar or .parquet files")
    if not file.is_file():
        raise DataError(f"data.path: {folder} has no samples.jsonl; expected one JSON object per line with images, question, answer")
    root, lines = folder.resolve(), JsonLines(file)
    if not len(lines):
        raise DataError(f"{file} holds no sample")
    return Mapped(lambda record: _sample(record, root), lines)


def question_answer(place: str, record: dict[str, Any]) -> tuple[str, str]:
    """Question and answer of a record, or DataError with its place."""
    refuse_video(place, record)
    question, answer = record.get("question"), record.get("answer")
    if not is_text(question) or not is_text(answer):
        raise DataError(f"{place}: expected strings of valid Unicode under 'question' and 'answer'")
    if "<image>" in question or "<image>" in answer:
        raise DataError(
            f"{place}: '<image>' stands in a text, where it would be read as text: images come before the question; take the mark out"
        )
    return question, answer


def refuse_misspelt(place: str, fields: dict[str, Any]) -> None:
    """Refuse a record without images that has a key like theirs: it would teach to answer without looking."""
    keys = [key for key, value in fields.items() if value and key not in (*_IMAGE_KEYS, "messages")]
    if alike := [key for key in keys if key.lower().startswith("image") or get_close_matches(key.lower(), _IMAGE_KEYS, 1, cutoff=0.7)]:
        raise DataError(
            f"{place}: no image is named under image or images, and there is a key '{alike[0][:40]}': rename it, or take it out"
        )


def refuse_video(place: str, keys: Any) -> None:
    """Refuse a record with a video: only images are supported."""
    if "video" in keys or "videos" in keys:
        raise DataError(f"{place}: holds a video; only images are supported. Take the sample out, or turn frames into images")


def fit(sample: Sample, tokenizer: Tokenizer, model: ModelConfig, data: DataConfig) -> Document:
    """Images, question and answer as one document that fits into a row; image files are opened for their headers only. The loss is on the
    answer and eos.

    An image whose header is bad takes the least room where bad images are skipped; whatever decoding finds later changes no length.

    Raises:
        BadImage: a header is bad and the policy is to fail.
        TooLong: it does not fit a row, by the rule of `_fit`.
    """
    if len(sample.images) > data.max_images_per_sample and data.on_long_sample == "drop":
        raise TooLong(f"{sample.place}: {len(sample.images)} images, and data.max_images_per_sample is {data.max_images_per_sample}")
    question, answer = tokenizer.encode(sample.question), tokenizer.encode(sample.answer)
    if model.image_token_id in question or model.image_token_id in answer:
        raise DataError(f"{sample.place}: the text contains model.image_token_id {model.image_token_id}; take the model's own tokenizer")
    sizes, bad = _sizes(sample, merge_factor(model), data)
    return _fit(sample, sizes, bad, question, answer, model, data)


def fit_images(place: str, images: Sequence[Path], text: int, model: ModelConfig, data: DataConfig) -> tuple[list[ImageRef], bool]:
    """Images with their target sizes beside `text` tokens, scaled down as far as a row asks for, and whether they were.

    Raises:
        BadImage: a header is bad and the policy is to fail.
        TooLong: they do not fit, or are more than `data.max_images_per_sample`.
    """
    factor, most = merge_factor(model), data.max_images_per_sample
    if len(images) > most:
        raise TooLong(f"{place}: {len(images)} images, and data.max_images_per_sample is {most}")
    sizes, bad = _sizes(Sample(place, images, "", ""), factor, data)
    targets = _targets(sizes, bad, factor, data)
    scaled = text + _visual(targets, factor) > data.seq_len
    if scaled:
        targets = _shrink(targets, sizes, data.seq_len - text, factor, data)
    if text + _visual(targets, factor) > data.seq_len:
        raise TooLong(f"{place}: at least {text + _visual(targets, factor)} tokens, and data.seq_len is {data.seq_len}")
    return [ImageRef(file, *target, kind) for file, target, kind in zip(images, targets, bad, strict=True)], scaled


def _sizes(sample: Sample, factor: int, data: DataConfig) -> tuple[list[tuple[int, int]], list[str]]:
    """Height and width of each image, and why it is bad; "" where it is sound."""
    sizes, bad = [], []
    for i, image in enumerate(sample.images[: data.max_images_per_sample]):
        try:
            sizes.append(sample.sizes[i] if sample.sizes else header_size(image, data.max_source_pixels))
            bad.append("")
        except BadImage as e:
            if data.on_bad_image == "fail":
                raise
            sizes.append((factor, factor))
            bad.append(e.kind)
    return sizes, bad


def merge_factor(model: ModelConfig) -> int:
    """Side length of a visual token, in pixels."""
    assert model.vision is not None
    return model.vision.patch_size * model.vision.spatial_merge_size


def _fit(
    sample: Sample,
    sizes: list[tuple[int, int]],
    bad: list[str],
    question: list[int],
    answer: list[int],
    model: ModelConfig,
    data: DataConfig,
) -> Document:
    """The rule for a sample that is too long, in this order, each step only as far as needed.

    1. With `images: variable`, all images are scaled down by one ratio, to no less than LEAST_VISUAL_TOKENS each.
    2. With `on_long_sample: cut`, images are left out, the last first (as are those beyond max_images_per_sample),
    and the answer is cut at its end.

    The question stays whole, and so does eos. What does not fit then is TooLong.
    """
    factor = merge_factor(model)
    targets = _targets(sizes, bad, factor, data)
    full_length = _length(targets, factor, len(question), len(answer))
    if full_length > data.seq_len:
        targets = _shrink(targets, sizes, data.seq_len - (full_length - _visual(targets, factor)), factor, data)
    least = len(answer) if data.on_long_sample == "drop" else min(1, len(answer))
    while data.on_long_sample == "cut" and len(targets) > 1 and _length(targets, factor, len(question), least) > data.seq_len:
        targets = targets[:-1]
    room = data.seq_len - _length(targets, factor, len(question), 0)
    if room < least:
        raise TooLong(f"{sample.place}: at least {data.seq_len - room + least} tokens, and data.seq_len is {data.seq_len}")
    ids: list[int | None] = []
    for height, width in targets:
        ids += [model.vision_start_token_id, *[model.image_token_id] * (height * width // factor**2), model.vision_end_token_id]
    ids += question
    return Document(
        tokens=np.asarray([*ids, *answer[:room], model.eos_token_id], dtype=np.int64),
        loss_from=max(1, len(ids)),
        images=[ImageRef(file, *target, kind) for file, target, kind in zip(sample.images, targets, bad, strict=False)],
        shortened=full_length > data.seq_len or len(sizes) < len(sample.images),
    )


def _targets(sizes: list[tuple[int, int]], bad: list[str], factor: int, data: DataConfig) -> list[tuple[int, int]]:
    if data.images == "fixed":
        return [(data.fixed_image_size[0], data.fixed_image_size[1])] * len(sizes)
    most = data.max_image_pixels
    least = min(data.min_image_pixels or 0, most)
    return [size if why else target_size(*size, factor, most, least) for size, why in zip(sizes, bad, strict=True)]


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


def _sample(record: Record, root: Path) -> Sample:
    place, fields = record
    question, answer = question_answer(place, fields)
    images = fields.get("images")
    if not isinstance(images, list) or not all(is_text(name) for name in images):
        raise DataError(f"{place}: expected a list of file names under 'images'")
    if not images:
        refuse_misspelt(place, fields)
    return Sample(place, [inside(root, name, place) for name in images], question, answer)


def inside(root: Path, name: str, place: str) -> Path:
    """The image's real path, which must lie in `root`: neither `..`, an absolute path nor a link may lead out."""
    try:
        path = (root / name).resolve()
        exists = path.is_file()
    except (OSError, ValueError, RuntimeError) as e:  # a null byte, a name too long, a loop of links
        raise DataError(f"{place}: image {name[:80]!r} is no file name that can be read: {e}") from e
    if not path.is_relative_to(root):
        raise DataError(f"{place}: image {name!r} lies outside {root}; only files in the folder of samples.jsonl are read")
    if not exists:
        raise DataError(f"{place}: image {name!r} does not exist in {root}")
    return path


# VQAv2 in its own layout: questions and annotations as JSON, images as COCO names them.
# <path>/v2_OpenEnded_mscoco_train2014_questions.json <path>/v2_mscoco_train2014_annotations.json
# <path>/train2014/COCO_train2014_000000000009.jpg ...
# Source: https://visualqa.org/download.html, section Data Format.

_QUESTIONS = re.compile(r"v2_OpenEnded_mscoco_(\w+)_questions\.json")


class VqaV2:
    """The samples of one COCO subset, in the order of the questions; held as flat text, not as half a million objects.

    Raises:
        DataError: a file is missing or of another form, or a question has no annotation.
    """

    def __init__(self, folder: Path, subset: str | None) -> None:
        """Read questions and answers of the subset in `folder`; they are held as one run of UTF-8 bytes, images are opened on access."""
        self._subset = _subset(folder, subset)
        self._folder, self._images = folder, (folder / self._subset).resolve()
        if not self._images.is_dir():
            raise DataError(f"data.path: {folder} has no folder {self._subset} with COCO's images")
        questions = folder / f"v2_OpenEnded_mscoco_{self._subset}_questions.json"
        annotations = folder / f"v2_mscoco_{self._subset}_annotations.json"
        answers = {_integer(a, "question_id", annotations): a.get("multiple_choice_answer") for a in _list(annotations, "annotations")}
        self._ids, self._ends, texts = array("q"), array("q"), []
        size = 0
        for entry in _list(questions, "questions"):
            number, question = _integer(entry, "question_id", questions), entry.get("question")
            answer = answers.get(number)
            if not is_text(question) or not is_text(answer):
                raise DataError(f"{questions}: question {number} has no text, or no multiple_choice_answer in {annotations.name}")
            self._ids.append(_integer(entry, "image_id", questions))
            for text in (question.encode(), answer.encode()):
                size += len(text)
                texts.append(text)
                self._ends.append(size)
        self._text = b"".join(texts)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, i: int) -> Sample:
        start, middle, end = self._ends[2 * i - 1] if i else 0, self._ends[2 * i], self._ends[2 * i + 1]
        place = f"{self._folder}: question {i}"
        image = inside(self._images, f"COCO_{self._subset}_{self._ids[i]:012d}.jpg", place)
        return Sample(place, [image], self._text[start:middle].decode(), self._text[middle:end].decode())


def looks_like_vqav2(folder: Path) -> bool:
    """Whether the folder holds a VQAv2 questions file."""
    return any(_QUESTIONS.fullmatch(p.name) for p in folder.iterdir())


def _subset(folder: Path, name: str | None) -> str:
    if not folder.is_dir():
        raise DataError(f"data.path: no folder {folder}; expected one with VQAv2's questions, annotations and images")
    subsets = sorted(m[1] for p in folder.iterdir() if (m := _QUESTIONS.fullmatch(p.name)))
    if name is None and len(subsets) == 1:
        return subsets[0]
    if name not in subsets:
        raise DataError(f"data.subset is {name}; {folder} holds questions of {', '.join(subsets) or 'no subset'}: name one of them")
    return str(name)


def _list(file: Path, key: str) -> list[dict[str, Any]]:
    try:
        content = json.loads(read_utf8(file))
    except (ValueError, RecursionError) as e:
        raise DataError(f"{file}: not JSON ({e}); expected VQAv2's file with a list under '{key}'") from e
    entries = content.get(key) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"{file}: expected an object with a list of objects under '{key}'")
    return entries


def _integer(entry: dict[str, Any], key: str, file: Path) -> int:
    value = entry.get(key)
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise DataError(f"{file}: expected a non-negative integer under '{key}', found {value!r}")
    return value
