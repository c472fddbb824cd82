"""Conversations by the tokenizer's own template: rendered as transformers does, with the loss on the assistant's turns."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import parity
import pytest
from data_sets import CHAT_TEMPLATE as TEMPLATE
from data_sets import VL, chat_tokenizer, config, jpeg
from ranks import ROOT, environment, steps, summary
from transformers import AutoTokenizer

from playbook.errors import ConfigError, DataError
from playbook_trainer.data.batch import IGNORE
from playbook_trainer.data.collate import collate
from playbook_trainer.data.loader import check
from playbook_trainer.data.rows import make_rows
from playbook_trainer.huggingface import weights

ASKED = "What is wrong here?"
BOTH = [
    {
        "messages": [{"role": "user", "content": "<image>" + ASKED}, {"role": "assistant", "content": "A tear."}, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}],
        "images": ["0.jpg"],
    },
    {
        "image": "0.jpg",
        "conversations": [{"from": "human", "value": "<image>\n" + ASKED}, {"from": "gpt", "value": "A tear."}, {"from": "human", "value": "Sure?"}, {"from": "gpt", "value": "Yes."}],
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": "0.jpg"}, {"type": "text", "text": ASKED}]},
            {"role": "assistant", "content": "A tear."}, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
        ],
    },
]  # fmt: skip


def data(folder: Path, entries: list[Any], name: str = "a.jsonl") -> dict[str, Any]:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "0.jpg").write_bytes(jpeg(0, (96, 64)))
    text = json.dumps(entries) if name.endswith(".json") else "".join(json.dumps(e) + "\n" for e in entries)
    (folder / name).write_text(text)
    return {
        "data__kind": "chat",
        "data__path": str(folder / name),
        "data__tokenizer": str(chat_tokenizer(folder / "model")),
        "data__seq_len": 256,
    }


@pytest.mark.parametrize("form", range(3))
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_every_form_is_the_same_document_with_the_loss_on_the_answers(form: int, name: str, tmp_path: Path) -> None:
    cfg = config(VL, **data(tmp_path, [BOTH[form]] * 2, name), data__pack=False)
    check(cfg)
    (document,) = make_rows(cfg, "train").row(0)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    image = [{"type": "image"}, {"type": "text", "text": ASKED}]
    said = [("user", image), ("assistant", "A tear."), ("user", "Sure?"), ("assistant", "Yes.")]
    text = theirs.apply_chat_template([{"role": role, "content": content} for role, content in said], tokenize=False)
    expected = theirs(text.replace("<|image_pad|>", "<|image_pad|>" * 6), add_special_tokens=False)["input_ids"]
    assert document.tokens.tolist() == expected
    labels = collate([[document]], cfg.model, cfg.data).labels_N
    assert theirs.decode(labels[labels != IGNORE].tolist()) == "A tear.<|im_end|>\nYes.<|im_end|>\n"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"messages": []}, "expected a list of turns under 'messages'"),
        ({"text": "x"}, "has neither messages nor conversations"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "'robot' speaks; expected human, gpt, system"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no turn of the assistant"),
        ({"messages": [{"role": "user", "content": 7}]}, "expected a text under content"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "holds a video|type 'video'"),
        ({**BOTH[0], "images": []}, "1 image tokens|0 images are named|0 images"),
        ({**BOTH[0], "images": ["0.jpg", "0.jpg"]}, "2 images are named, and 1 shown"),
        ({**BOTH[0], "images": ["../0.jpg"]}, "lies outside"),
        ({"messages": [{"role": "user", "content": "<|image_pad|>"}, {"role": "assistant", "content": "x"}]}, "makes 1 image tokens"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}], "imges": ["0.jpg"]},
            "there is a key 'imges'",
        ),
    ],
)
def test_what_is_no_conversation_is_named(entry: dict[str, Any], expected: str, tmp_path: Path) -> None:
    if entry.get("images") == []:
        entry = {"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "x"}]}
    with pytest.raises(DataError, match=rf"a\.jsonl:1: .*({expected})"):
        check(config(VL, **data(tmp_path, [entry] * 2)))


REWRITES = TEMPLATE.replace("{{ message.content }}", "{{ message.content if loop.last or message.role == 'user' else '...' }}")


@pytest.mark.parametrize(
    ("template", "words", "said"),
    [
        (REWRITES, {}, "renders answer 1 otherwise once more turns follow, or leaves it out"),
        ("{% for", {}, "no Jinja that can be read"),
        (None, {}, r"has no chat_template\.jinja"),
        (None, {"data__tokenizer": "byte"}, r"set data\.tokenizer to the tokenizer\.json of a chat model"),
    ],
)
def test_a_template_must_be_there_and_must_not_rewrite_earlier_answers(
    template: str | None, words: dict[str, Any], said: str, tmp_path: Path
) -> None:
    given, path = data(tmp_path, [BOTH[0]] * 2), tmp_path / "model" / "chat_template.jinja"
    if template is None:
        path.unlink()
    else:
        path.write_text(template)
    with pytest.raises(DataError if template == REWRITES else ConfigError, match=said):
        check(config(VL, **given | words))


@pytest.mark.full
def test_the_guide_runs_on_the_tiny_model(tmp_path: Path) -> None:
    """Its own configuration and its own lines of data; only sizes and steps are less."""
    guide = (ROOT / "docs/guide/fine-tune.md").read_text()
    lines, settings = (re.findall(rf"```{kind}.*?\n(.*?)```", guide, re.DOTALL)[0] for kind in ("json", "yaml"))
    (tmp_path / "fine-tune.yaml").write_text(settings)
    photographs, folder = tmp_path / "photographs", tmp_path / "Qwen3-VL-2B-Instruct"
    photographs.mkdir()
    for n in (0, 1):
        (photographs / f"{n}.jpg").write_bytes(jpeg(n, (96, 64)))
    (photographs / "conversations.jsonl").write_text(lines * 10)
    parity.written(parity.tiny("qwen3_vl_tiny"), folder)
    chat_tokenizer(folder)
    less = ["train.steps=3", "train.warmup_steps=1", "optimizer.warmup_steps=0", "train.global_batch_size=2"]
    less += ["data.seq_len=256", "data.num_workers=0", "eval.every=2", "checkpoint.every=2"]
    command = [sys.executable, "-m", "playbook_trainer", "fine-tune.yaml", *less]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = steps(tmp_path / "runs/fine-tune")
    assert [r["images"] > 0 for r in rows] == [True] * 3
    assert rows[1]["eval_loss"] > 0
    assert summary(tmp_path / "runs/fine-tune")["data"]["samples_dropped"] == 0
    exported = {p.name for p in (tmp_path / "Qwen3-VL-2B-tuned").iterdir()}
    assert exported >= {"config.json", "tokenizer.json", "chat_template.jinja", weights.SINGLE}


QWEN3 = """{%- if tools %}{{- '<|im_start|>system\\n' }}{% for tool in tools %}{{- tool | tojson }}{% endfor %}{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{% if loop.last %}{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}{{- message.content }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function.name + '</tool_call>' }}{% endfor %}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As Qwen3's own, in short: thoughts of the last answer alone, tools and calls."""
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
CALLS = {
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
    "messages": [
        {"role": "user", "content": "Blue?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "blue"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "It says so."},
    ],
}


def rendered(folder: Path, entry: dict[str, Any]) -> tuple[Any, list[int], str]:
    """The tokenizer as transformers reads it, the tokens of the one document, and the text that bears the loss."""
    words = data(folder, [entry] * 2)
    (folder / "model" / "chat_template.jinja").write_text(QWEN3)
    cfg = config(VL, **words, data__pack=False)
    (document,) = make_rows(cfg, "train").row(0)
    theirs = AutoTokenizer.from_pretrained(folder / "model")
    labels = collate([[document]], cfg.model, cfg.data).labels_N
    return theirs, document.tokens.tolist(), theirs.decode(labels[labels != IGNORE].tolist())


def test_tools_calls_and_thoughts_are_rendered_as_transformers_does(tmp_path: Path) -> None:
    theirs, tokens, said = rendered(tmp_path, CALLS)
    text = theirs.apply_chat_template(CALLS["messages"], tools=CALLS["tools"], tokenize=False)
    assert tokens == theirs(text, add_special_tokens=False)["input_ids"]
    assert said == "<tool_call>look</tool_call><|im_end|>\n<think>\nIt says so.\n</think>\n\nYes.<|im_end|>\n"


def test_two_answers_of_a_template_that_thinks_in_the_last_alone(tmp_path: Path) -> None:
    turns = [("user", "One?"), ("assistant", "First."), ("user", "Two?"), ("assistant", "Second.")]
    _, _, said = rendered(tmp_path, {"messages": [{"role": role, "content": content} for role, content in turns]})
    assert said == "First.<|im_end|>\n<think>\n\n</think>\n\nSecond.<|im_end|>\n"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (CALLS, "does not show 'tools'"),
        ({"messages": CALLS["messages"]}, "does not show the tool_calls of turn 1"),
        ({**BOTH[0], "images": None, "imgs": ["0.jpg"]}, "no image is named under image or images"),
    ],
)
def test_what_a_template_does_not_show_is_refused(entry: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        check(config(VL, **data(tmp_path, [entry] * 2)))
