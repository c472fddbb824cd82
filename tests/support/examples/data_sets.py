"""Small data sets in every layout, for tests."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from playbook.paths import data_root
from playbook_trainer.config.tree import TrainerConfig, load
from playbook_trainer.data.batch import Batch
from playbook_trainer.data.loader import Loader, build_loader
from playbook_trainer.data.rows import make_rows

TEXT, VL = "qwen3_moe_tiny", "qwen3_vl_moe_tiny"
TEXTS = [f"document {i} " * (1 + i % 5) for i in range(60)]

CHAT_TOKENS = ["<|im_end|>", "<|pad|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>"]
CHAT_TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for item in message.content %}
{%- if item.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ item.text }}{% endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As Qwen3-VL's own, in short."""


def config(name: str, **overrides: Any) -> TrainerConfig:
    keys = {"data.num_workers": 0} | {key.replace("__", "."): value for key, value in overrides.items()}
    return load(data_root("configs") / f"{name}.yaml", keys)


def reading(given: TrainerConfig, **options: Any) -> closing[Loader]:
    """A loader, of one rank unless the options say another, that is closed after use."""
    return closing(build_loader(given, **{"dp_rank": 0, "dp_size": 1, **options}))


def encoded(picture: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, format=kind, **options)
    return out.getvalue()


def fingerprint(batch: Batch) -> tuple[bytes, ...]:
    """Every number that the model gets."""
    parts = [batch.tokens_N, batch.labels_N, batch.positions, batch.cu_seqlens]
    if batch.vision is not None:
        v = batch.vision
        parts += [v.pixels_PC, v.cu_seqlens, v.rotary_P2, v.pos_index_4P, v.pos_weight_4P, v.visual_index_V]
    return tuple(t.contiguous().numpy().tobytes() for t in parts)


def jpeg(number: int, size: tuple[int, int] = (64, 48)) -> bytes:
    return encoded(Image.new("RGB", size, (number % 256, 20, 30)))


def png(width: int, height: int) -> bytes:
    """A header that claims any size, with too little behind it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def shard(path: Path, numbers: range) -> Path:
    members = []
    for n in numbers:
        members += [(f"{n:04d}.jpg", jpeg(n)), (f"{n:04d}.json", json.dumps({"question": f"q{n}", "answer": f"a{n}"}).encode())]
    return tar(path, members)


def vqa_table(numbers: range, *, struct: bool = False) -> Any:
    images = [{"bytes": jpeg(n), "path": None} if struct else jpeg(n) for n in numbers]
    return pa.table({"image": images, "question": [f"q{n}" for n in numbers], "answer": [f"a{n}" for n in numbers], "extra": list(numbers)})


def write_parquet(path: Path, table: Any, rows: int) -> Path:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path, row_group_size=rows)
    return path


def write_vqav2(folder: Path, subset: str = "train2014", count: int = 12) -> Path:
    (folder / subset).mkdir(parents=True)
    for n in range(count):
        (folder / subset / f"COCO_{subset}_{n:012d}.jpg").write_bytes(jpeg(n))
    questions = [{"image_id": n, "question_id": 10 * n, "question": f"q{n}"} for n in range(count)]
    annotations = [{"question_id": 10 * n, "image_id": n, "multiple_choice_answer": f"a{n}"} for n in reversed(range(count))]
    (folder / f"v2_OpenEnded_mscoco_{subset}_questions.json").write_text(json.dumps({"questions": questions}))
    (folder / f"v2_mscoco_{subset}_annotations.json").write_text(json.dumps({"annotations": annotations}))
    return folder


def samples(folder: Path, lines: Iterable[Any], images: Mapping[str, bytes]) -> Path:
    """The folder, with these lines in its samples.jsonl and these images beside it."""
    folder.mkdir(exist_ok=True, parents=True)
    for name, data in images.items():
        (folder / name).write_bytes(data)
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def text_file(folder: Path, texts: list[str], layout: str) -> Path:
    """The texts in a layout, in two files where it takes several; blank lines and columns of other names are passed over."""
    if layout == "txt":
        (folder / "a.txt").write_text("\n\n\n".join(texts))
        return folder / "a.txt"
    if layout == "huggingface":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder / "saved")
        return folder / "saved"
    half = len(texts) // 2
    for name, part in (("a", texts[:half]), ("b", texts[half:])):
        if layout == "jsonl":
            (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n\n" for text in part))
        elif part:
            write_parquet(folder / f"{name}.parquet", pa.table({"text": part, "other": list(range(len(part)))}), 3)
    return folder


def text_source(kind: str, folder: Path) -> dict[str, Any]:
    """A configuration whose 60 documents are TEXTS."""
    return {"data__path": str(text_file(folder, TEXTS, kind))}


def vqa_source(kind: str, folder: Path) -> dict[str, Any]:
    """A configuration whose samples are q0 a0 to q29 a29 (others, where generated), one image each."""
    if kind == "webdataset":
        shard(folder / "0.tar", range(14))
        shard(folder / "1.tar", range(14, 30))
    elif kind == "parquet":
        write_parquet(folder / "a.parquet", vqa_table(range(14)), 3)
        write_parquet(folder / "b.parquet", vqa_table(range(14, 30), struct=True), 3)
    elif kind == "vqav2":
        write_vqav2(folder / "set", count=30)
        return {"data__path": str(folder / "set")}
    elif kind == "generated":
        return {"data__path": str(folder), "data__source": "generated", "data__generated": {"pool_images": 3, "num_samples": 50}}
    return {"data__path": str(folder)}


def words_of(cfg: TrainerConfig, split: Any, rows: int) -> Counter[bytes]:
    """The text of every document of the first rows."""
    made = make_rows(cfg, split)
    return Counter(bytes(t for t in d.tokens.tolist() if t < 256) for k in range(rows) for d in made.row(k))


def chat_tokenizer(folder: Path) -> Path:
    """Bytes, and the special tokens at the ids of the tiny model, with a chat template beside it."""
    folder.mkdir(exist_ok=True, parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in CHAT_TOKENS])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder / "tokenizer.json"
