"""Every way in which a sample can be read, against a reader of our own: nothing is lost, nothing is read twice within an epoch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from data_sets import chat_tokenizer, config, jpeg, samples, tar, text_file, write_parquet
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import pre_tokenizers
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen2_vl

from playbook.errors import DataError
from playbook_trainer.config.tree import TrainerConfig
from playbook_trainer.data.batch import IGNORE
from playbook_trainer.data.loader import build_loader, check, with_steps
from playbook_trainer.data.rows import epoch_plan, make_rows
from playbook_trainer.data.sources.streams import Split
from playbook_trainer.data.tokenizer import FileTokenizer

TEXT, VL = "qwen3_moe_tiny", "qwen3_vl_moe_tiny"
EOS, IMAGE = 256, 258
once = settings(max_examples=10)


def settings_of(folder: Path, name: str = TEXT, **words: Any) -> TrainerConfig:
    base = {"data__path": str(folder), "data__pad": False, "train__warmup_steps": 0, "optimizer__warmup_steps": 0, "parallel__ep": 1}
    return config(name, **base | words)


def letters(lengths: list[int]) -> list[str]:
    """Texts of these lengths, in which no place is like another: every three letters count on."""
    text = "".join(chr(97 + n // 676 % 26) + chr(97 + n // 26 % 26) + chr(97 + n % 26) for n in range(sum(lengths) // 3 + 1))
    ends = np.cumsum([0, *lengths])
    return [text[a:b] for a, b in pairwise(ends)]


def cut(texts: list[str], seq_len: int) -> Counter[bytes]:
    """An independent reader's pieces: the bytes of each text and the end mark, in stretches of a row's length."""
    found: Counter[bytes] = Counter()
    for text in texts:
        tokens = [*text.encode(), EOS]
        found.update(np.asarray(tokens[at : at + seq_len]).tobytes() for at in range(0, len(tokens), seq_len))
    return found


def of_rows(given: TrainerConfig, rows: Iterator[int]) -> Counter[bytes]:
    made = make_rows(given, "train")
    return Counter(d.tokens.tobytes() for k in rows for d in made.row(k))


@pytest.mark.parametrize("layout", ["txt", "jsonl", "parquet", "huggingface"])
@once
@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=23),
    batch=st.integers(1, 37),
    seq_len=st.integers(5, 97),
    buffer=st.integers(1, 40),
    pack=st.booleans(),
)
@example(lengths=[3000], batch=8, seq_len=31, buffer=32, pack=True)
@example(lengths=[2000, 1], batch=13, seq_len=17, buffer=1, pack=False)
@example(lengths=[5] * 40, batch=3, seq_len=64, buffer=32, pack=True)
@pytest.mark.sample("txt")
def test_an_epoch_reads_every_piece_of_every_text_once(
    layout: str, lengths: list[int], batch: int, seq_len: int, buffer: int, pack: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All steps but the last hold each piece at most once; what is beyond is of the next epoch, and less than one step."""
    texts, folder = letters(lengths), tmp_path_factory.mktemp("texts")
    path = text_file(folder, texts, layout)
    held_out: dict[str, Any] = {"eval__path": str(path), "eval__every": 1}  # so that nothing is held out
    words: dict[str, Any] = {"data__seq_len": seq_len, "data__pack_buffer": buffer, "data__pack": pack, "train__global_batch_size": batch}
    resolved = with_steps(settings_of(path, train__epochs=1, **words, **held_out))
    expected, steps = cut(texts, seq_len), resolved.train.steps
    assert expected <= of_rows(resolved, iter(range(steps * batch)))
    before = of_rows(resolved, iter(range((steps - 1) * batch)))
    assert before <= expected
    assert before != expected
    if not pack:
        assert steps == -(-expected.total() // batch)
    tokens = sum(lengths) + len(lengths)
    batches = [b for step in islice(build_loader(resolved, dp_rank=0, dp_size=1), steps) for b in step]
    assert sum(b.num_useful for b in batches) >= tokens
    if steps * batch == epoch_plan(resolved).rows(0):
        assert sum(b.num_useful for b in batches) == tokens
        assert sum(b.num_loss for b in batches) == tokens - expected.total(), "all but the first token of each piece"


@once
@given(length=st.integers(200, 5000), batch=st.integers(2, 41), seq_len=st.integers(9, 101))
def test_rows_of_a_step_are_other_places_of_one_text(
    length: int, batch: int, seq_len: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = text_file(tmp_path_factory.mktemp("one"), letters([length]), "txt")
    given = settings_of(path, data__seq_len=seq_len, train__global_batch_size=batch, data__pack=False)
    pieces = cut(letters([length]), seq_len)
    trained = pieces.total() - (pieces.total() // 10 or 1)
    seen = of_rows(given, iter(range(min(batch, trained))))
    assert seen <= pieces, "no place twice"
    whole = of_rows(given, iter(range(2 * trained)))
    assert len(whole) == trained, "a tenth of the pieces is held out"
    assert set(whole.values()) == {2}


@pytest.mark.parametrize("texts", [1, 2, 5, 9])
@pytest.mark.sample("2")
def test_few_long_texts_hold_out_a_tenth_of_their_pieces(texts: int, tmp_path: Path) -> None:
    lengths = [1590 + n for n in range(texts)]
    path = text_file(tmp_path, letters(lengths), "txt")
    given = settings_of(path, data__seq_len=16, data__pack=False, train__global_batch_size=2)
    total = cut(letters(lengths), 16).total()
    splits: tuple[Split, ...] = ("train", "eval")
    seen = {}
    for split in splits:
        rows = make_rows(given, split)
        seen[split] = {d.tokens.tobytes() for k in range(8 * total) for d in rows.row(k)}
    assert not seen["train"] & seen["eval"]
    assert len(seen["train"]) + len(seen["eval"]) == total
    assert 0.08 * total < len(seen["eval"]) < 0.12 * total


def counted(folder: Path, counts: list[int], sizes: list[tuple[int, int]], layout: str) -> list[tuple[int, bytes]]:
    """Samples with so many images each, in a layout; the number of images and the text of each."""
    encoded = [jpeg(0, size) for size in sizes]
    texts = [(f"q{i}" + "?" * (11 * i % 29), f"a{i}" + "!" * (7 * i % 13)) for i in range(len(counts))]
    if layout == "files":
        lines = [
            {"images": [f"{(i + n) % len(sizes)}.jpg" for n in range(count)], "question": q, "answer": a}
            for i, (count, (q, a)) in enumerate(zip(counts, texts, strict=True))
        ]
        samples(folder, lines, {f"{n}.jpg": data for n, data in enumerate(encoded)})
    elif layout == "webdataset":
        for shard in range(2):
            members = []
            for i in range(shard, len(counts), 2):
                members += [(f"{i:03d}.{n}.jpg", encoded[(i + n) % len(sizes)]) for n in range(counts[i])]
                members.append((f"{i:03d}.json", json.dumps(dict(zip(("question", "answer"), texts[i], strict=True))).encode()))
            tar(folder / f"{shard}.tar", members)
    elif layout == "vqav2":
        names = {"questions": "v2_OpenEnded_mscoco_train2014_questions", "annotations": "v2_mscoco_train2014_annotations"}
        (folder / "train2014").mkdir()
        for n, data in enumerate(encoded):
            (folder / "train2014" / f"COCO_train2014_{n:012d}.jpg").write_bytes(data)
        said = {
            "questions": [{"question_id": 7 * i, "image_id": i % len(sizes), "question": q} for i, (q, _) in enumerate(texts)],
            "annotations": [{"question_id": 7 * i, "multiple_choice_answer": a} for i, (_, a) in reversed([*enumerate(texts)])],
        }
        for key, name in names.items():
            (folder / f"{name}.json").write_text(json.dumps({key: said[key]}))
    else:
        images = [[encoded[(i + n) % len(sizes)] for n in range(count)] for i, count in enumerate(counts)]
        table = pa.table({"images": images, "question": [q for q, _ in texts], "answer": [a for _, a in texts]})
        write_parquet(folder / "a.parquet", table, 3)
    return [(count, (q + a).encode()) for count, (q, a) in zip(counts, texts, strict=True)]


def visual(size: tuple[int, int]) -> int:
    """Visual tokens of an image of this width and height, by transformers."""
    height, width = qwen2_vl.smart_resize(size[1], size[0], factor=32, min_pixels=1, max_pixels=65_536)
    return height * width // 32**2


@pytest.mark.parametrize("layout", ["files", "webdataset", "parquet", "vqav2"])
@once
@given(
    counts=st.lists(st.integers(0, 3), min_size=2, max_size=17),
    sizes=st.lists(st.tuples(st.integers(20, 300), st.integers(20, 300)), min_size=1, max_size=3),
    batch=st.integers(1, 11),
    pack=st.booleans(),
)
def test_an_epoch_reads_every_sample_and_image_once(
    layout: str,
    counts: list[int],
    sizes: list[tuple[int, int]],
    batch: int,
    pack: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("samples")
    counts = [1] * len(counts) if layout == "vqav2" else counts
    expected = counted(folder, counts, sizes, layout)
    words: dict[str, Any] = {"data__seq_len": 1024, "data__pack": pack, "train__global_batch_size": batch, "train__epochs": 1}
    given = with_steps(settings_of(folder, VL, **words, eval__path=str(folder), eval__every=1))
    rows, seen, tokens = make_rows(given, "train"), Counter[tuple[int, bytes]](), 0
    every = epoch_plan(given).rows(0)
    for k in range(every):
        for document in rows.row(k):
            text = bytes(t for t in document.tokens.tolist() if t < EOS)
            seen[len(document.images), text] += 1
            tokens += int((document.tokens == IMAGE).sum())
    assert seen == Counter(expected)
    assert tokens == sum(visual(sizes[(i + n) % len(sizes)]) for i, count in enumerate(counts) for n in range(count))
    assert given.train.steps == -(-every // batch)
    batches = [b for step in islice(build_loader(given, dp_rank=0, dp_size=1), every // batch) for b in step]
    if every % batch == 0:
        assert sum(b.num_images for b in batches) == sum(counts)
        assert sum(int((b.labels_N != IGNORE).sum()) for b in batches) == sum(len(f"a{i}") + 7 * i % 13 + 1 for i in range(len(counts)))


Spoken = list[tuple[int, int, bool]]
"""Turns of a conversation: letters that the user says, letters that the assistant says, and whether an image is shown."""


def conversation(number: int, turns: Spoken, form: str) -> tuple[dict[str, Any], list[int], int]:
    """An entry of a file, and by hand: its tokens, with one for each image, and how many of them are learnt."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    said: list[tuple[str, str, bool]] = []
    for n, (asked, answered, shown) in enumerate(turns):
        said += [("user", f"{number}{'abc'[n % 3]}" + "x" * asked, shown), ("assistant", "y" * (answered + 1), False)]
    names = ["0.png" for _, _, shown in said if shown]
    tokens, learnt = list[int](), 0
    for role, text, shown in said:
        spelled = [alphabet.index("Ċ" if c == "\n" else c) for c in f"{role}\n{text}\n"]
        begin, end = spelled[: len(role) + 1], spelled[len(role) + 1 :]
        tokens += [261, *begin, *([259, 258, 260] if shown else []), *end[:-1], 256, end[-1]]
        learnt += len(text) + 2 if role == "assistant" else 0
    marked = [(role, ("<image>" if shown else "") + text) for role, text, shown in said]
    if form == "messages":
        return {"messages": [{"role": role, "content": text} for role, text in marked], "images": names}, tokens, learnt
    who = {"user": "human", "assistant": "gpt"}
    return {"conversations": [{"from": who[role], "value": text} for role, text in marked], "image": names or None}, tokens, learnt


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@once
@given(
    spoken=st.lists(
        st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.booleans()), min_size=1, max_size=3), min_size=2, max_size=14
    ),
    size=st.tuples(st.integers(20, 250), st.integers(20, 250)),
    batch=st.integers(1, 9),
    pack=st.booleans(),
)
@pytest.mark.sample("a.jsonl")
def test_an_epoch_reads_every_conversation_once(
    name: str, spoken: list[Spoken], size: tuple[int, int], batch: int, pack: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("chats")
    Image.new("RGB", size, (10, 20, 30)).save(folder / "0.png")
    made = [conversation(i, turns, ("messages", "conversations")[i % 2]) for i, turns in enumerate(spoken)]
    entries = [entry for entry, _, _ in made]
    (folder / name).write_text(json.dumps(entries) if name.endswith(".json") else "".join(json.dumps(e) + "\n" for e in entries))
    words: dict[str, Any] = {"data__seq_len": 1024, "data__pack": pack, "train__global_batch_size": batch, "train__epochs": 1}
    words |= {"data__kind": "chat", "data__tokenizer": str(chat_tokenizer(folder)), "eval__path": str(folder / name), "eval__every": 1}
    given = with_steps(settings_of(folder / name, VL, **words))
    rows, seen = make_rows(given, "train"), Counter[tuple[int, ...]]()
    every = epoch_plan(given).rows(0)
    for k in range(every):
        seen.update(tuple(document.tokens.tolist()) for document in rows.row(k))
    each = visual(size)
    expected = Counter(tuple(t for token in tokens for t in [token] * (each if token == IMAGE else 1)) for _, tokens, _ in made)
    assert seen == expected
    if every % batch == 0:
        batches = [b for step in islice(build_loader(given, dp_rank=0, dp_size=1), every // batch) for b in step]
        assert sum(b.num_loss for b in batches) == sum(learnt for _, _, learnt in made)
        assert sum(b.num_images for b in batches) == sum(shown for turns in spoken for _, _, shown in turns)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", [1, 7])
@pytest.mark.sample("7-0")
def test_a_run_over_epochs_goes_on_where_it_stood_on_other_ranks(workers: int, at: int, tmp_path: Path) -> None:
    path = text_file(tmp_path, letters([40 + 31 * i % 200 for i in range(60)]), "jsonl")
    given = settings_of(path, data__seq_len=64, train__global_batch_size=4, train__epochs=3, data__num_workers=workers)
    given = with_steps(given)

    def read(dp: int, steps: int, state: Any = None) -> tuple[list[bytes], Any]:
        loaders = [build_loader(given, dp_rank=rank, dp_size=dp, state=state) for rank in range(dp)]
        parts = [[[b.tokens_N.numpy().tobytes() for b in step] for step in islice(loader, steps)] for loader in loaders]
        states = [loader.state() for loader in loaders]
        for loader in loaders:
            loader.close()
        return [b for ranks in zip(*parts, strict=True) for round_ in zip(*ranks, strict=True) for b in round_], states[0]

    whole, _ = read(1, 12)
    first, state = read(2, at)
    second, _ = read(4, 12 - at, state)
    assert first + second == whole


def test_a_sample_that_is_left_out_is_counted_once_an_epoch(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {i}"} if i % 7 else {"txt": 1}) + "\n" for i in range(40)))
    words: dict[str, Any] = {
        "data__on_bad_sample": "skip",
        "data__seq_len": 16,
        "data__pack": False,
        "eval__path": str(tmp_path),
        "eval__every": 1,
    }
    given = with_steps(settings_of(tmp_path, train__epochs=2, train__global_batch_size=1, **words))
    loader = build_loader(given, dp_rank=0, dp_size=1)
    list(islice(loader, given.train.steps))
    assert given.train.steps == 2 * 34
    assert loader.counters()["samples_bad"] == 2 * 6


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ({"images": [], "imgs": ["0.jpg"], "question": "q", "answer": "a"}, "there is a key 'imgs'"),
        ({"images": ["0.jpg"], "question": "<image>q", "answer": "a"}, "'<image>' stands in a text"),
        ({"image": ["0.jpg"], "question": "q", "answer": "a"}, "expected a list of file names under 'images'"),
        ({"video": "a.mp4", "images": [], "question": "q", "answer": "a"}, "only images are supported"),
    ],
)
def test_no_image_is_passed_over(sample: dict[str, Any], said: str, tmp_path: Path) -> None:
    good = {"images": ["0.jpg"], "question": "q", "answer": "a"}
    samples(tmp_path, [good, good, sample], {"0.jpg": jpeg(0)})
    with pytest.raises(DataError, match=said):
        check(settings_of(tmp_path, VL))


def test_a_bad_line_in_mid_run_says_what_may_be_done(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"text {i}"}) for i in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{}", *lines]))
    given = settings_of(tmp_path, data__pack=False, train__global_batch_size=4)
    check(given)  # of which the start reads the first 256
    with pytest.raises(DataError, match=r"a\.jsonl:301: .* or set data\.on_bad_sample: skip"):
        list(islice(build_loader(given, dp_rank=0, dp_size=1), 200))


@pytest.mark.parametrize("text", ["a line of words\n" * 200, "word " * 500, "x" * 2500, "é \n " * 600])
def test_a_long_text_is_read_in_blocks_that_lose_nothing(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token takes some hundred bytes while a text is tokenized: of one of 100 MB, several GiB."""
    longest: list[int] = []
    monkeypatch.setattr("playbook_trainer.data.tokenizer._BLOCK", 1024)
    encode = FileTokenizer.encode
    monkeypatch.setattr(FileTokenizer, "encode", lambda self, part: longest.append(len(part)) or encode(self, part))
    ids = FileTokenizer(chat_tokenizer(tmp_path), 320, prepared=True).encode_long(text)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = {"\n": [alphabet.index("Ċ")], " ": [alphabet.index("Ġ")], "é": [alphabet.index("Ã"), alphabet.index("©")]}
    assert ids.tolist() == [i for c in text for i in spelled.get(c) or [alphabet.index(c)]]
    assert len(longest) > 1
    assert max(longest) <= 1024
