"""An exported folder holds what its source held, and computes the same in transformers 4 and 5."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import parity
import pytest
import torch
from ranks import SUPPORT, environment, trained
from safetensors.torch import load_file, save_file

from playbook_trainer.config.sections import YarnConfig
from playbook_trainer.huggingface import weights

COMPANIONS = {
    "tokenizer_config.json": '{"chat_template": "{{ messages }}"}',
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"eos_token_id": [256, 7]}',
    "preprocessor_config.json": "{}",
    "vocab.json": "{}",
}
SAID = {"max_window_layers": 28, "eos_token_id": [256, 7], "video_token_id": 300, "id2label": {"x": 1}, "of_a_later_version": False}


@pytest.mark.parametrize(("precision", "kind"), [("source", torch.bfloat16), ("fp32", torch.float32)])
def test_an_export_keeps_what_came_with_the_weights(precision: str, kind: torch.dtype, tmp_path: Path) -> None:
    given, out = tmp_path / "given", tmp_path / "out"
    parity.written(parity.tiny("qwen3_tiny"), given)
    save_file({k: v.bfloat16() for k, v in load_file(given / weights.SINGLE).items()}, given / weights.SINGLE, metadata={"format": "pt"})
    parity.say(given, **SAID, torch_dtype="bfloat16")
    settings = json.loads((given / "config.json").read_text())
    for name, text in COMPANIONS.items():
        (given / name).write_text(text)
    (given / "training_args.bin").write_bytes(b"no weights")
    words = [
        "trainer/configs/qwen3_tiny.yaml",
        "train.steps=2",
        "train.warmup_steps=1",
        "train.receipt=false",
        "data.kind=mock",
        "optimizer.lr=0",
    ]
    trained(tmp_path / "run", 1, *words, f"init.weights={given}", f"checkpoint.export={out}", f"checkpoint.export_dtype={precision}")
    name = str(kind).removeprefix("torch.")
    assert json.loads((out / "config.json").read_text()) == settings | {"torch_dtype": name, "dtype": name}
    assert {p.name for p in out.iterdir()} == {*COMPANIONS, "config.json", weights.SINGLE}
    assert all((out / name).read_text() == text for name, text in COMPANIONS.items())
    before, after = load_file(given / weights.SINGLE), load_file(out / weights.SINGLE)
    torch.testing.assert_close(after, {key: tensor.to(kind) for key, tensor in before.items()}, rtol=0, atol=0)


KINDS = {
    "dense": (lambda: parity.tiny("qwen3_tiny"), []),
    "moe": (lambda: parity.tiny("qwen3_moe_tiny"), []),
    "vl": (lambda: parity.tiny("qwen3_vl_tiny"), [(1, 4, 6)]),
    # Not square: transformers 4 takes stacked experts for swapped ones, and transformers 5 tells by their shape, which no published size leaves open.
    "vl-moe": (lambda: parity.tiny("qwen3_vl_moe_tiny", expert_ffn_size=48), [(1, 4, 6), (1, 2, 2)]),
    "deepseek": (lambda: parity.deepseek(mtp_layers=0), []),
    "deepseek-yarn": (lambda: parity.deepseek(mtp_layers=0, yarn=YarnConfig(factor=4, original_seq_len=64)), []),
}


@pytest.mark.full
def test_folders_compute_the_same_in_transformers_4_and_5(tmp_path: Path) -> None:
    """The older one with what it needs, in a folder of its own that this test fills."""
    old = tmp_path / "transformers4"
    wanted = ["transformers>=4.57,<4.58", "huggingface-hub>=0.34,<1", "tokenizers>=0.22,<0.23"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(old), *wanted]
    if subprocess.run(pip, capture_output=True, check=False).returncode:
        pytest.skip("no package registry can be reached")
    jobs, documents = [], []
    for name, (make, grids) in KINDS.items():
        config = make()
        parity.written(config, tmp_path / name)
        documents.append(parity.Document(config, 20, grids, seed=3))
        given = {k: v for k, v in documents[-1].for_theirs().items() if k != "labels"}
        jobs.append((str(tmp_path / name), given))
    torch.save(jobs, tmp_path / "jobs.pt")
    answers = []
    for number, more in enumerate(([str(old)], [])):
        env = environment()
        env["PYTHONPATH"] = os.pathsep.join([*more, env["PYTHONPATH"]])
        command = [
            sys.executable,
            str(SUPPORT / "ranks" / "logits_of_folders.py"),
            str(tmp_path / "jobs.pt"),
            str(tmp_path / f"{number}.pt"),
        ]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        answers.append(torch.load(tmp_path / f"{number}.pt"))
    assert [version.split(".")[0] for version, _ in answers] == ["4", "5"]
    for name, a, b in zip(KINDS, answers[0][1], answers[1][1], strict=True):
        assert float((a - b).abs().max()) < 1e-4, name
        assert float(a.std()) > 0.1, name
