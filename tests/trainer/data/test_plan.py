"""Planning rows, reading text and samples, fitting long ones, tokenizers: what is known before any image is decoded."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from data_sets import TEXT, VL, config, jpeg, reading, samples, write_parquet
from hypothesis import given
from hypothesis import strategies as st

from playbook.errors import ConfigError, DataError
from playbook_trainer.config.tree import parse_overrides
from playbook_trainer.data.loader import check, data_sha, merge_states
from playbook_trainer.data.packing import Lane, Packing, order_key, permute
from playbook_trainer.data.rows import make_rows
from playbook_trainer.data.sources.generated import GeneratedText
from playbook_trainer.data.sources.streams import read_documents
from playbook_trainer.data.tokenizer import ByteTokenizer


class Lengths:
    """A stream whose samples are (number, length); `chunk` says how many of them lie together."""

    def __init__(self, lengths: list[int], chunk: int = 1) -> None:
        self.lengths, self.size = lengths, chunk
        self.num_chunks = -(-len(lengths) // chunk)
        self.opened: list[int] = []

    def chunk(self, number: int) -> list[tuple[int, int]]:
        self.opened.append(number)
        return list(enumerate(self.lengths))[number * self.size : (number + 1) * self.size]


class Piece(tuple[int, int]):
    def __len__(self) -> int:
        return self[1]


def lane(stream: Lengths, room: int, buffer: int, **options: Any) -> Lane[Any, Piece]:
    return Lane(stream, lambda items, i: [Piece(items[i])], Packing(room, buffer), **{"number": 0, "lanes": 1, "seed": [1], **options})


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 40), st.integers(1, 7))
def test_packing_places_each_sample_once_and_never_overfills(lengths: list[int], buffer: int, chunk: int) -> None:
    one = lane(Lengths(lengths, chunk), 100, buffer)
    seen: list[int] = []
    while len(seen) < 3 * len(lengths) + buffer:  # what waits at the end of an epoch is at most the buffer
        row = one.row()
        assert 0 < sum(p[1] for p in row) <= 100
        seen += [p[0] for p in row]
    counts = Counter(seen + [one._waiting[i][1][0] for i in range(len(one._waiting))])
    drawn = sum(counts.values())
    assert set(counts.values()) <= {drawn // len(lengths), -(-drawn // len(lengths))}


def test_a_longer_look_ahead_packs_denser() -> None:
    lengths = np.random.default_rng(0).integers(10, 90, 500).tolist()
    filled = {}
    for buffer in (1, 4, 32):
        one = lane(Lengths(lengths), 100, buffer)
        filled[buffer] = sum(p[1] for _ in range(250) for p in one.row())
    assert filled[1] < filled[4] < filled[32] <= 250 * 100


@pytest.mark.parametrize(("buffer", "chunk"), [(0, 1), (8, 1), (8, 16)])
def test_a_lane_goes_on_from_its_state_without_opening_what_came_before(buffer: int, chunk: int) -> None:
    lengths = np.random.default_rng(1).integers(1, 60, 400).tolist()
    whole = lane(Lengths(lengths, chunk), 64, buffer)
    made = [whole.row() for _ in range(30)]
    for at in (0, 1, 17):
        first = lane(Lengths(lengths, chunk), 64, buffer)
        for _ in range(at):
            first.row()
        state = json.loads(json.dumps(first.state()))
        assert len(state) <= 1 + 3 * (1 + max(1, buffer))
        stream = Lengths(lengths, chunk)
        second = lane(stream, 64, buffer, state=state)
        assert [second.row() for _ in range(30 - at)] == made[at:]
        again = set(first._stream.opened) & set(stream.opened)  # type: ignore[attr-defined]
        assert len(again) <= 2 + buffer, "the chunks of what waits, and of the place"
    assert [lane(Lengths(lengths), 64, buffer, seed=[2]).row() for _ in range(5)] != made[:5]


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_a_shuffled_order_holds_each_number_once(count: int, key: int) -> None:
    assert sorted(permute(i, count, key) for i in range(count)) == list(range(count))


def test_shuffled_orders_are_unlike_each_other_and_far_from_sorted() -> None:
    orders = [[permute(i, 1000, order_key(1, epoch)) for i in range(1000)] for epoch in range(3)]
    for order in orders:
        assert abs(np.corrcoef(order, range(1000))[0, 1]) < 0.15
    assert max(sum(a == b for a, b in zip(orders[i], orders[j], strict=True)) for i, j in ((0, 1), (1, 2), (0, 2))) < 10
    assert 0 <= permute(10**9, 10**12, 5) < 10**12


def test_plain_text_is_split_at_two_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("One.\n\nStill one.\n\n\nTwo.\r\n\r\n\r\n\r\nThree.\n", encoding="utf-8")
    assert read_documents(tmp_path / "book.txt") == ["One.\n\nStill one.", "Two.", "Three."]


@pytest.mark.full
def test_train_and_eval_share_nothing_and_eval_is_a_tenth() -> None:
    seen = {}
    for split in ("train", "eval"):
        rows = make_rows(config(VL, data__pack=False), split)
        seen[split] = {
            rows.row(k)[0].tokens.tobytes() + repr(rows.row(k)[0].images).encode() for k in range(230 if split == "train" else 25)
        }
    assert not seen["train"] & seen["eval"]
    assert len(seen["eval"]) == 25
    assert len(seen["train"]) == 230


TOO_LONG = [
    {"images": ["a.png"], "question": "short?", "answer": "yes"},
    {"images": ["a.png", "b.png"], "question": "q" * 20, "answer": "no"},
    {"images": ["a.png"], "question": "Q" * 200, "answer": "a" * 30},
    {"images": ["b.png"], "question": "q" * 30, "answer": "b" * 300},
    {"images": ["b.png"] * 5, "question": "five?", "answer": "5"},
    {"images": [], "question": "held out", "answer": ""},
]


def test_a_sample_that_is_too_long_is_dropped_whole_unless_its_answer_may_be_cut(tmp_path: Path) -> None:
    path = str(samples(tmp_path / "set", TOO_LONG, {"a.png": jpeg(0, (256, 256)), "b.png": jpeg(1, (128, 256))}))
    base = {"data__path": path, "data__seq_len": 80, "data__pack": False, "train__global_batch_size": 1}
    for policy, texts, dropped in (
        ("drop", {b"short?yes", b"q" * 20 + b"no"}, {":3", ":4", ":5"}),
        ("cut", {b"short?yes", b"q" * 20 + b"no", b"q" * 30 + b"b" * 45, b"five?5"}, {":3"}),
    ):
        rows = make_rows(config(VL, **base, data__on_long_sample=policy), "train")
        found, lost = [], []
        for k in range(len(texts)):
            found += rows.row(k)
            lost += rows.lost()
        assert all(len(d.tokens) <= 80 and d.tokens[-1] == 256 for d in found)
        by_text = {bytes(t for t in d.tokens.tolist() if t < 256): d for d in found}
        assert set(by_text) == texts
        while len(lost) < 3 * len(dropped):
            rows.row(k := k + 1)
            lost += rows.lost()
        assert {each.counter for each in lost} == {"samples_dropped"}
        assert {each.why.split(": ")[0].rpartition("samples.jsonl")[2] for each in lost} == dropped
        assert [(i.height, i.width) for i in by_text[b"short?yes"].images] == [(256, 256)]
        two = by_text[b"q" * 20 + b"no"].images
        assert len(two) == 2
        assert two[0].height * two[0].width < 256 * 256, "scaled down, both kept"
        assert by_text[b"q" * 20 + b"no"].shortened
        for document in found:
            visual = sum(i.height * i.width for i in document.images) // 32**2
            assert int((document.tokens == 258).sum()) == visual
    assert len(by_text[b"five?5"].images) == 3, "max_images_per_sample"


def test_data_of_which_nothing_fits_is_refused(tmp_path: Path) -> None:
    path = str(samples(tmp_path / "set", [{"images": [], "question": "q" * 100, "answer": "a"}] * 20, {}))
    with pytest.raises(DataError, match=r"20 samples in a row of which none can be used, first .*jsonl:1: at least 102 tokens"):
        check(config(VL, data__path=path, data__seq_len=64))


def test_of_long_documents_few_are_read_before_a_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    read, whole = [], GeneratedText.__getitem__

    def counting(self: GeneratedText, i: int) -> Any:
        read.append(i)
        return whole(self, i)

    monkeypatch.setattr(GeneratedText, "__getitem__", counting)
    long = {"data__generated__mean_tokens": 131071, "data__generated__sigma": 0}
    check(config(TEXT, data__source="generated", data__path=None, **long))
    assert len(read) == 8, "a million tokens"


@pytest.mark.parametrize("workers", [0, 2])
def test_one_bad_row_is_left_out_by_policy_counted_and_named_once_also_after_resuming(tmp_path: Path, workers: int) -> None:
    lines = [json.dumps({"text": f"document {i}"}) for i in range(40)]
    lines[7] = '{"text": 5}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    base = {"data__path": str(tmp_path / "a.jsonl"), "data__seq_len": 32, "data__pack_buffer": 4, "data__num_workers": workers}
    with pytest.raises(DataError, match=r"a\.jsonl:8: expected a non-empty string"):
        check(config(TEXT, **base))
    cfg = config(TEXT, **base, data__on_bad_sample="skip")
    check(cfg)

    def read(steps: int, state: Any = None) -> tuple[list[bytes], dict[str, int], list[str], Any]:
        with reading(cfg, state=state) as loader:
            batches = [b.tokens_N.numpy().tobytes() for step in islice(loader, steps) for b in step]
            return batches, loader.counters(), loader.take_news(), loader.state()

    whole, counted, named, _ = read(16)
    assert counted["samples_bad"] == len(named) > 0
    assert all("a.jsonl:8: expected a non-empty string" in line for line in named)
    first, before, _, state = read(7)
    second, after, _, _ = read(9, merge_states([state]))
    assert first + second == whole
    assert before["samples_bad"] + after["samples_bad"] == counted["samples_bad"]


def test_the_layout_of_a_sample(tmp_path: Path) -> None:
    lines = [{"images": ["a.png", "b.png"], "question": "Qu", "answer": "An"}, {"images": [], "question": "", "answer": ""}]
    path = str(samples(tmp_path / "set", lines, {"a.png": jpeg(0, (64, 32)), "b.png": jpeg(1, (32, 96))}))
    document = make_rows(config(VL, data__path=path), "train").row(0)[0]
    assert document.tokens.tolist() == [259, 258, 258, 260, 259, 258, 258, 258, 260, *b"Qu", *b"An", 256]
    assert document.loss_from == 11


def test_fixed_images_all_have_the_given_size() -> None:
    rows = make_rows(config(VL, data__images="fixed", data__fixed_image_size=[64, 96]), "train")
    assert {(i.height, i.width) for k in range(20) for d in rows.row(k) for i in d.images} == {(64, 96)}


def test_mock_rows_are_full_and_cut_at_real_lengths() -> None:
    rows = make_rows(config(VL, data__kind="mock"), "train")
    real_rows = make_rows(config(VL), "train")
    real = {len(d.tokens) for k in range(60) for d in real_rows.row(k)}
    for k in range(10):
        row = rows.row(k)
        assert sum(len(d.tokens) for d in row) == 512
        assert len(row) > 1
        assert all(len(d.tokens) in real for d in row[:-1])
        assert all(not d.images and d.tokens.max() < 258 for d in row)


@pytest.mark.parametrize("name", ["../secret.png", "/etc/hostname", "link.png", "missing.png", "a\0b", "x" * 5000, "loop.png"])
def test_images_outside_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    folder = samples(tmp_path / "set", [{"images": [name], "question": "q", "answer": "a"}] * 2, {})
    (tmp_path / "secret.png").write_bytes(jpeg(0))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "loop.png").symlink_to("loop.png")
    with pytest.raises(DataError, match=r"samples\.jsonl:1"):
        check(config(VL, data__path=str(folder)))


@pytest.mark.parametrize(
    "line",
    [
        "[1]",
        "{",
        '{"images": [], "question": "\\ud800", "answer": "a"}',
        "[" * 100_000,
        '{"images": "a", "question": "q", "answer": "a"}',
        '{"images": [1], "question": "q", "answer": "a"}',
        '{"images": []}',
    ],
)
def test_a_line_that_is_no_sample_is_placed(tmp_path: Path, line: str) -> None:
    (tmp_path / "samples.jsonl").write_text('\n{"images": [], "question": "q", "answer": "a"}\n' + line, encoding="utf-8")
    with pytest.raises(DataError, match=r"samples\.jsonl:3"):
        check(config(VL, data__path=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (TEXT, {"data__path": "no/such/file.txt"}, "no file or folder"),
        (VL, {"data__path": "no/such/folder"}, "there is no no/such/folder; expected a folder with samples.jsonl"),
        (VL, {"data__path": __file__, "data__source": "files"}, "is a file; expected a folder with samples.jsonl"),
        (VL, {"model__vision_start_token_id": 258}, "model.vision_start_token_id and model.image_token_id are both 258"),
        (VL, {"model__eos_token_id": 258}, "model.eos_token_id and model.image_token_id are both 258"),
        (TEXT, {"data__kind": "vqa"}, "no vision tower"),
        (VL, {"data__seq_len": 7}, "at least 8 tokens"),
        (VL, {"data__images": "fixed", "data__fixed_image_size": [100, 100]}, "multiple of 32"),
        (VL, {"data__images": "fixed", "data__fixed_image_size": [640, 640], "data__seq_len": 403}, "at least 404"),
        (VL, {"data__max_image_pixels": 1000}, "max_image_pixels"),
        (TEXT, {"data__tokenizer": "no/such/tokenizer.json"}, "no file"),
        (TEXT, {"model__vocab_size": 200}, "eos_token_id"),
        (TEXT, {"model__eos_token_id": 0}, "bytes"),
    ],
)
def test_check_refuses_what_cannot_run(name: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        check(config(name, **overrides))


def test_text_that_is_not_utf8_or_too_little_to_hold_out(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("only one document", encoding="utf-8")
    path = str(tmp_path / "one.txt")
    check(config(TEXT, data__path=path))
    with pytest.raises(DataError, match="held out"):
        check(config(TEXT, data__path=path, eval__every=5))
    (tmp_path / "one.txt").write_bytes(b"\xff\xfe bad")
    with pytest.raises(DataError, match="UTF-8"):
        check(config(TEXT, data__path=path))


def tokenizer_file(path: Path, words: int) -> Path:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    vocab = {"[UNK]": 0} | {f"w{i}": i for i in range(1, words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<|image|>", special=True)])
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_file_is_read_and_its_ids_must_fit(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "w3 w5 w7"}\n{"text": "held"}\n', encoding="utf-8")
    small = str(tokenizer_file(tmp_path / "small.json", 100))
    rows = make_rows(config(TEXT, data__path=str(tmp_path / "t.jsonl"), data__tokenizer=small), "train")
    assert rows.row(0)[0].tokens.tolist() == [3, 5, 7, 256]
    with pytest.raises(ConfigError, match="ids up to 400"):
        check(config(TEXT, data__tokenizer=str(tokenizer_file(tmp_path / "large.json", 400))))
    (tmp_path / "broken.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match=r"broken\.json"):
        check(config(TEXT, data__tokenizer=str(tmp_path / "broken.json")))
    with pytest.raises(DataError, match=r"a is no tokenizer\.json"):  # a path that cannot be looked at
        check(config(TEXT, data__tokenizer="a" * 5000))


def test_special_tokens_of_prepared_text_are_tokens(tmp_path: Path) -> None:
    name = str(tokenizer_file(tmp_path / "t.json", 258))
    (tmp_path / "t.jsonl").write_text('{"text": "w3 <|image|> w7"}\n' * 2, encoding="utf-8")
    rows = make_rows(config(TEXT, data__path=str(tmp_path / "t.jsonl"), data__tokenizer=name), "train")
    assert rows.row(0)[0].tokens.tolist() == [3, 258, 7, 256]
    with pytest.raises(DataError, match=r"turns text into model\.image_token_id 258"):
        check(config(VL, data__kind="text", data__path=str(tmp_path / "t.jsonl"), data__tokenizer=name))


@pytest.mark.parametrize("published", [True, False])
def test_published_weights_never_read_bytes(tmp_path: Path, published: bool) -> None:
    if published:
        (tmp_path / "tokenizer.json").touch()
    size = 320 if published else 151_936
    with pytest.raises(ConfigError, match=r"data\.tokenizer is byte, and the weights in"):
        check(config(TEXT, init__weights=str(tmp_path), model__vocab_size=size))
    check(config(TEXT, init__weights=str(tmp_path), model__vocab_size=size, data__kind="mock"))
    (tmp_path / "tokenizer.json").unlink(missing_ok=True)
    check(config(TEXT, init__weights=str(tmp_path)))


def test_another_tokenizer_than_that_of_the_weights_is_refused(tmp_path: Path) -> None:
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    own, other = tokenizer_file(tmp_path / "own" / "tokenizer.json", 100), tokenizer_file(tmp_path / "other" / "tokenizer.json", 90)
    (tmp_path / "t.jsonl").write_text('{"text": "w3 w5 w7"}\n' * 2, encoding="utf-8")
    words = {"init__weights": str(own.parent), "data__path": str(tmp_path / "t.jsonl")}
    check(config(TEXT, **words, data__tokenizer=str(own)))
    with pytest.raises(ConfigError, match="is another than the one that the weights in"):
        check(config(TEXT, **words, data__tokenizer=str(other)))
    other.write_text(json.dumps(json.loads(own.read_text()), indent=3))
    check(config(TEXT, **words, data__tokenizer=str(other)))


@pytest.mark.parametrize("layout", ["sub-folder", "beside parquet"])
def test_no_file_is_passed_over(layout: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 20)
    if layout == "sub-folder":
        (tmp_path / "more").mkdir()
        (tmp_path / "more" / "b.jsonl").write_text('{"text": "y"}\n' * 20)
    else:
        write_parquet(tmp_path / "c.parquet", pa.table({"text": ["z"] * 20}), 20)
    with pytest.raises(DataError, match="would not be read"):
        check(config(TEXT, data__path=str(tmp_path)))


def test_an_empty_override_is_no_null() -> None:
    assert parse_overrides(["data.path=null"]) == {"data.path": None}
    with pytest.raises(ConfigError, match=r"override 'data.path=' has no value"):
        parse_overrides(["data.path="])


def test_text_cannot_forge_an_image_token(tmp_path: Path) -> None:
    name = str(tokenizer_file(tmp_path / "t.json", 258))  # its special token gets id 258, the model's image token
    lines = [{"images": [], "question": "w1 <|image|>", "answer": "w2"}, {"images": [], "question": "w1", "answer": "w2"}]
    path = str(samples(tmp_path / "set", lines, {}))
    document = make_rows(config(VL, data__path=path, data__tokenizer=name), "train").row(0)[0]
    assert 258 not in document.tokens.tolist()


def test_byte_tokens_are_the_bytes() -> None:
    assert bytes(ByteTokenizer().encode("naïve ☕")).decode() == "naïve ☕"


def test_data_sha_sees_text_images_seed_and_sizes_but_not_layout(tmp_path: Path) -> None:
    lines = [{"images": ["a.png"], "question": f"q{i}", "answer": "a"} for i in range(12)]
    folder = samples(tmp_path / "set", lines, {"a.png": jpeg(0, (96, 96))})
    base = {"data__path": str(folder), "data__seq_len": 128}
    first = data_sha(config(VL, **base))
    assert data_sha(config(VL, **base)) == first
    assert data_sha(config(VL, **base, train__micro_batch_size=2, data__num_workers=3)) == first
    assert data_sha(config(VL, **base, seed=5)) != first
    assert data_sha(config(VL, **base, data__max_image_pixels=4096)) != first
    (folder / "a.png").write_bytes(jpeg(1, (96, 96)))
    assert data_sha(config(VL, **base)) != first
