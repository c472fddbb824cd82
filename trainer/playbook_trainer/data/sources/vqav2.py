"""VQAv2 in its own layout: questions and annotations as JSON, images as COCO names them.

    <path>/v2_OpenEnded_mscoco_train2014_questions.json
    <path>/v2_mscoco_train2014_annotations.json
    <path>/train2014/COCO_train2014_000000000009.jpg ...

Source: https://visualqa.org/download.html, section Data Format.
"""

from __future__ import annotations

import json
import re
from array import array
from pathlib import Path
from typing import Any

from playbook.errors import DataError
from playbook_trainer.data.sources.text import is_text, read_utf8
from playbook_trainer.data.sources.vqa import Sample, inside

_QUESTIONS = re.compile(r"v2_OpenEnded_mscoco_(\w+)_questions\.json")


class VqaV2:
    """The samples of one COCO subset, in the order of the questions; held as flat text, not as half a million objects.

    Raises:
        DataError: a file is missing or of another form, or a question has no annotation.
    """

    def __init__(self, folder: Path, subset: str | None) -> None:
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


def _subset(folder: Path, wanted: str | None) -> str:
    if not folder.is_dir():
        raise DataError(f"data.path: no folder {folder}; expected one with VQAv2's questions, annotations and images")
    found = sorted(m[1] for p in folder.iterdir() if (m := _QUESTIONS.fullmatch(p.name)))
    if wanted is None and len(found) == 1:
        return found[0]
    if wanted not in found:
        raise DataError(f"data.subset is {wanted}; {folder} holds questions of {', '.join(found) or 'no subset'}: name one of them")
    return str(wanted)


def _list(file: Path, key: str) -> list[dict[str, Any]]:
    try:
        content = json.loads(read_utf8(file))
    except (ValueError, RecursionError) as e:
        raise DataError(f"{file}: not JSON ({e}); expected VQAv2's file with a list under '{key}'") from e
    found = content.get(key) if isinstance(content, dict) else None
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise DataError(f"{file}: expected an object with a list of objects under '{key}'")
    return found


def _integer(entry: dict[str, Any], key: str, file: Path) -> int:
    value = entry.get(key)
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise DataError(f"{file}: expected a non-negative integer under '{key}', found {value!r}")
    return value
