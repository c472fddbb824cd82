"""Some 400 hostile configurations, data files, weights and launchers: each is one line and code 2, with nothing left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import parity
import pyarrow as pa
import pytest
import torch
from data_sets import VL, tar, write_parquet

from playbook.paths import data_root
from playbook_trainer.__main__ import main
from playbook_trainer.config.tree import TrainerConfig, dump, flatten, load
from playbook_trainer.huggingface import weights

CONFIGS = data_root("configs")
TEXT, VISION, DENSE = (str(CONFIGS / f"{name}.yaml") for name in ("qwen3_moe_tiny", VL, "qwen3_tiny"))


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a command, and says what is wrong with its end; "" where it is one line and code 2."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")

    def run(*words: str, expected: str = "") -> str:
        try:
            code: Any = main([*words, "output=out"])
        except BaseException as e:
            return f"{type(e).__name__}: {str(e)[:200]}"
        out, err = capsys.readouterr()
        left = sorted(p.name for p in (tmp_path / "cwd").iterdir())
        good = code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and len(err) < 6000
        if good and expected in err and not left:
            return ""
        return f"code {code}, left {left}, said {out[:100]!r} {err[:300]!r}"

    return run


def all_are_refused(cases: dict[str, tuple[str, ...]], refused: Callable[..., str]) -> None:
    found = {name: wrong for name, words in cases.items() if (wrong := refused(*words))}
    assert found == {}, found


def wrong_values(value: Any) -> list[str]:
    """What no key of such a value takes."""
    if isinstance(value, bool):
        return ["maybe", "1", "[]"]
    if isinstance(value, int | float):
        return ["many", "-1e300", "true", "[1]", ".nan"]
    return ["{a: 1}"] if not isinstance(value, dict) else ["7"]


def test_values_of_another_kind(refused: Callable[..., str]) -> None:
    config = load(Path(VISION))
    cases = {}
    for key, value in flatten(dump(config)).items():
        if value is None or key in ("model.name", "output"):
            continue
        for text in wrong_values(value):
            cases[f"{key}={text}"] = (VISION, f"{key}={text}")
    assert len(cases) > 300
    all_are_refused(cases, refused)


def test_choices_that_there_are_not(refused: Callable[..., str]) -> None:
    chosen = {}
    for section, field in TrainerConfig.model_fields.items():
        for key, inner in getattr(field.annotation, "model_fields", {}).items():
            if any(isinstance(option, str) for option in get_args(inner.annotation)):
                chosen[f"{section}.{key}"] = (TEXT, f"{section}.{key}=whatever")
    assert len(chosen) > 20
    all_are_refused(chosen, refused)


LARGE = {
    "data.seq_len": "1000000000000", "data.pack_buffer": "1000000000000", "data.num_workers": "1000000", "train.global_batch_size": "1000000000000000000",
    "train.micro_batch_size": "10000000000", "data.generated.num_samples": "1000000000000000000000", "data.generated.pool_images": "1000000000",
    "data.generated.sigma": "1e9", "data.generated.mean_tokens": "1e30", "data.max_image_pixels": "100000000000", "data.max_source_pixels": "100000000000000",
    "data.max_images_per_sample": "100000000000", "train.log_every": "1000000000000", "train.loss_chunk": "1000000000000000", "model.num_layers": "100000000",
    "model.hidden_size": "1000000000000", "model.vocab_size": "1000000000000000000", "model.num_experts": "1000000000000", "parallel.comm_sms": "1000",
    "model.expert_ffn_size": "100000000000000", "seed": "10000000000000000000",
}  # fmt: skip


def test_sizes_that_no_machine_could_serve(refused: Callable[..., str]) -> None:
    cases = {key: (TEXT, f"{key}={value}") for key, value in LARGE.items()}
    cases["tokens"] = (TEXT, "data.seq_len=16777216", "train.micro_batch_size=128", "train.global_batch_size=128")
    all_are_refused(cases, refused)


FILES: dict[str, bytes] = {
    "empty": b"",
    "text": b"hello",
    "list": b"[1, 2]",
    "number": b"7",
    "binary": bytes(range(256)),
    "latin": "model: qwen3_tinyé".encode("latin-1"),
    "null": b"model: qwen3_tiny\0",
    "tab": b"model:\n\tname: x",
    "unclosed": b"model: [",
    "alias": b"a: &a 1\nb: *a\nmodel: qwen3_tiny",
    "bomb": b"a: &a [x, x]\nb: *a",
    "tag": b"model: !!python/object/apply:os.system [true]",
    "duplicate": b"model: qwen3_tiny\nmodel: qwen3_tiny",
    "deep": b"model: " + b"[" * 3000,
    "deep block": b"\n".join(b" " * i + b"a:" for i in range(300)),
    "large": b"# " + b"x" * 2_100_000,
    "two documents": b"model: qwen3_tiny\n---\nmodel: qwen3_tiny",
    "no model": b"train: {steps: 3}",
    "null model": b"model:",
    "model of a number": b"model: 7",
    "model of a list": b"model: [qwen3_tiny]",
    "unknown model": b"model: qwen3_tny",
    "half a model": b"model: {preset: qwen3_tiny, hidden_size: null}",
    "unknown section": b"model: qwen3_tiny\ntrian: {}",
    "unknown key": b"model: qwen3_tiny\ntrain: {stpes: 3}",
    "section of a number": b"model: qwen3_tiny\ntrain: 7",
    "key of a list": b"model: qwen3_tiny\n? [a]\n: 1",
    "nul key": b"model: qwen3_tiny\n'': 1",
    "long number": b"model: qwen3_tiny\nseed: " + b"9" * 5000,
}


def test_files_that_are_no_configuration(refused: Callable[..., str], tmp_path: Path) -> None:
    cases = {}
    for name, content in FILES.items():
        path = tmp_path / f"{name}.yaml"
        path.write_bytes(content)
        cases[name] = (str(path),)
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for name in ("folder", "pipe", "loop", "missing", "x" * 3000):
        cases[name] = (str(tmp_path / f"{name}.yaml"),)
    cases |= {
        word: (TEXT, word) for word in ("steps", "=3", "train.steps", "train.steps.more=3", "train=3", "model=qwen3_tny", "..=1", "\0=1")
    }
    cases |= {"device": ("/dev/zero",), "nothing": ("/dev/null",), "no file": ("",), "a null": ("\0",)}
    all_are_refused(cases, refused)


def test_data_that_cannot_be_read(refused: Callable[..., str], tmp_path: Path) -> None:
    def file(name: str, content: bytes | str) -> str:
        path = tmp_path / "data" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return f"data.path={path}"

    good = json.dumps({"text": "good"}) + "\n"
    lines = [
        "not json",
        "[]",
        "7",
        "null",
        '"text"',
        "{}",
        '{"text": 7}',
        '{"text": ""}',
        '{"text": null}',
        '{"text": "\\ud800"}',
        "[" * 10**5,
        "\x00",
    ]
    cases = {f"text {line[:20]!r}": (TEXT, file(f"{n}.jsonl", good + line + "\n" + good)) for n, line in enumerate(lines)}
    samples = [
        "{}", "[]", '{"images": 7, "question": "q", "answer": "a"}', '{"images": [7], "question": "q", "answer": "a"}', '{"images": [], "question": "q"}',
        '{"images": ["../x.jpg"], "question": "q", "answer": "a"}', '{"images": ["/etc/passwd"], "question": "q", "answer": "a"}',
        '{"images": ["gone.jpg"], "question": "q", "answer": "a"}', '{"images": [], "question": "q", "answer": "a", "video": "x.mp4"}',
        '{"images": ["a\\u0000b"], "question": "q", "answer": "a"}', '{"images": [], "question": 7, "answer": "a"}',
    ]  # fmt: skip
    for n, line in enumerate(samples):
        file(f"vqa{n}/samples.jsonl", line + "\n")
        cases[f"vqa {line[:40]}"] = (VISION, f"data.path={tmp_path / 'data' / f'vqa{n}'}")
    (tmp_path / "data" / "none").mkdir()
    os.mkfifo(tmp_path / "data" / "pipe.txt")
    write_parquet(tmp_path / "data" / "columns.parquet", pa.table({"other": ["a"] * 20}), 5)
    tar(tmp_path / "data" / "x.tar", [("0.mp4", b"x")] * 1)
    cases |= {
        "empty": (TEXT, file("empty.txt", "")),
        "blank": (TEXT, file("blank.txt", "\n\n\n\n")),
        "no utf8": (TEXT, file("bytes.txt", b"\xff\xfe")),
        "suffix": (TEXT, file("a.pdf", "x")),
        "packed": (TEXT, file("packed/a.jsonl.gz", "x").rpartition("/")[0]),
        "no parquet": (TEXT, file("a.parquet", "x")),
        "other columns": (TEXT, f"data.path={tmp_path / 'data' / 'columns.parquet'}"),
        "no tar": (VISION, file("noise.tar", os.urandom(2000))),
        "video": (VISION, f"data.path={tmp_path / 'data' / 'x.tar'}"),
        "empty folder": (TEXT, f"data.path={tmp_path / 'data' / 'none'}"),
        "empty folder of images": (VISION, f"data.path={tmp_path / 'data' / 'none'}"),
        "pipe": (TEXT, f"data.path={tmp_path / 'data' / 'pipe.txt'}"),
        "gone": (TEXT, "data.path=/nowhere/at/all"),
        "long": (TEXT, f"data.path={'x' * 5000}"),
        "null": (TEXT, "data.path=a\0b"),
        "tokenizer gone": (TEXT, "data.tokenizer=/nowhere/tokenizer.json"),
        "tokenizer broken": (TEXT, f"data.tokenizer={file('t.json', '{}')[10:]}"),
        "tokenizer binary": (TEXT, f"data.tokenizer={file('u.json', os.urandom(99))[10:]}"),
        "images for text": (TEXT, "data.kind=vqa"),
        "subset": (TEXT, "data.subset=x"),
    }
    all_are_refused(cases, refused)


def test_weights_that_cannot_be_read(refused: Callable[..., str], tmp_path: Path) -> None:
    model = parity.tiny("qwen3_tiny")
    cases: dict[str, tuple[str, ...]] = {}

    def folder(name: str, change: Callable[[Path], Any]) -> None:
        path = tmp_path / "weights" / name
        parity.written(model, path)
        change(path)
        cases[name] = (DENSE, f"init.weights={path}")

    def index(name: str, content: Any) -> None:
        folder(name, lambda path: (path / weights.SINGLE).rename(path / weights.INDEX).write_text(json.dumps(content)))

    norm = "model.norm.weight"
    for key, value in {
        "hidden_size": 65,
        "num_hidden_layers": 99,
        "model_type": "llama",
        "hidden_act": "gelu",
        "rms_norm_eps": 1,
        "vocab_size": "x",
    }.items():
        folder(f"config {key}", lambda p, key=key, value=value: parity.say(p, **{key: value}))
    folder("config list", lambda p: (p / "config.json").write_text(f"[{(p / 'config.json').read_text()}]"))
    folder("config gone", lambda p: (p / "config.json").unlink())
    folder("config text", lambda p: (p / "config.json").write_text("hello"))
    folder("config deep", lambda p: (p / "config.json").write_text("[" * 10**5))
    folder("config bytes", lambda p: (p / "config.json").write_bytes(b"\xff"))
    folder("file gone", lambda p: (p / weights.SINGLE).unlink())
    folder("file empty", lambda p: (p / weights.SINGLE).write_bytes(b""))
    folder("file cut", lambda p: (p / weights.SINGLE).write_bytes((p / weights.SINGLE).read_bytes()[:-100]))
    folder("file lies", lambda p: (p / weights.SINGLE).write_bytes(b"\xff" * 7 + b"\x7f" + b"{}"))
    folder("file noise", lambda p: (p / weights.SINGLE).write_bytes(os.urandom(1000)))
    folder("pickle", lambda p: (p / weights.SINGLE).rename(p / "pytorch_model.bin"))
    folder("missing", lambda p: parity.rewrite(p, lambda t: t.pop(norm)))
    folder("unexpected", lambda p: parity.rewrite(p, lambda t: t.update(extra=torch.zeros(1))))
    folder("shape", lambda p: parity.rewrite(p, lambda t: t.update({norm: torch.zeros(3)})))
    folder("kind", lambda p: parity.rewrite(p, lambda t: t.update({norm: t[norm].to(torch.int64)})))
    folder("8 bits", lambda p: parity.rewrite(p, lambda t: t.update({norm: t[norm].to(torch.float8_e4m3fn)})))
    index("index escapes", {"weight_map": {norm: "../x.safetensors"}})
    index("index absolute", {"weight_map": {norm: "/etc/passwd"}})
    index("index of numbers", {"weight_map": {norm: 7}})
    folder("index text", lambda p: (p / weights.SINGLE).rename(p / weights.INDEX).write_text("hello"))
    index("index empty", {})
    index("index of nothing", {"weight_map": {norm: "gone.safetensors"}})
    folder("own tokenizer", lambda p: (p / "tokenizer.json").touch())
    cases["gone"] = (DENSE, "init.weights=/nowhere/at/all")
    cases["a file"] = (DENSE, f"init.weights={__file__}")
    cases["export into weights"] = (DENSE, f"checkpoint.export={tmp_path / 'weights' / 'config gone'}")
    cases["export under a file"] = (DENSE, f"checkpoint.export={__file__}/x")
    cases["precision of none"] = (DENSE, "checkpoint.export_dtype=source")
    all_are_refused(cases, refused)


def test_launchers(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    places = [
        {"RANK": "0"} | {"WORLD_SIZE": size} for size in ("0", "-1", "x", "1.5", "9" * 30, "²")
    ] + [{"WORLD_SIZE": "2", **named} | {"RANK": rank} for rank in ("2", "-1", "x", "", "9" * 30)]  # fmt: skip
    places += [
        {"WORLD_SIZE": "2", "RANK": "0"} | more for more in ({}, {"MASTER_ADDR": "x"}, {"MASTER_PORT": "1"}, {**named, "MASTER_PORT": "x"})
    ]
    places += [{"WORLD_SIZE": "2", "RANK": "0", **named, "MASTER_PORT": port} for port in ("0", "-1", "65536", "9" * 30, "", "29500.0")]
    places += [{"WORLD_SIZE": "2", **named}, {"WORLD_SIZE": "3", "RANK": "0", **named}]  # no rank; a layout that three do not fit
    found = {}
    for place in places:
        with monkeypatch.context() as m:
            for name, value in place.items():
                m.setenv(name, value)
            if wrong := refused(TEXT, "train.global_batch_size=4"):
                found[str(place)] = wrong
    assert found == {}
