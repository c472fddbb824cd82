"""Secrets, by name, by shape and by the variables of this process: found in words, hidden in logs, and nothing else."""

from __future__ import annotations

import pytest

from playbook.records import commands

TOKEN = "hf_" + "aB3" * 12
DRAWN = "x7Kq9-zz41LmPq"


@pytest.mark.parametrize(
    ("names", "are"),
    [
        (("DB_PASS", "AUTH", "WANDB_KEY", "HF_TOKEN", "HFTOKEN", "aws.secret_access_key", "--api-key", "SMTP_PWD"), True),
        (
            (
                "TOKENIZERS_PARALLELISM",
                "max_tokens",
                "tokens",
                "PWD",
                "key",
                "sort_key",
                "AUTHOR",
                "KeyError",
                "pass",
                "token_count",
                "keyboard",
            ),
            False,
        ),
    ],
    ids=["secrets", "something else"],
)
def test_a_name_of_a_secret_is_known(names: tuple[str, ...], are: bool) -> None:
    assert [name for name in names if commands.is_secret(name) is not are] == []


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--api-key", DRAWN],
        ["train", f"--auth-token={DRAWN}"],
        ["train", f"db_pass={DRAWN}"],
        ["train", TOKEN],
        ["train", f"--data=https://me:{DRAWN}@host/set"],
        ["bash", "-c", f"curl -H 'Authorization: Bearer {DRAWN}' host"],
        ["train", "--note", "AKIA" + "ABCD2345" * 2],
        ["train", "ghp_" + "a1B2" * 9],
        ["train", f"run-{DRAWN}"],
    ],
)
def test_words_that_hold_a_secret_are_found_and_not_repeated(words: list[str]) -> None:
    found = commands.of_words(words, {"WANDB_KEY": DRAWN})
    assert found
    assert DRAWN not in found
    assert TOKEN not in found


@pytest.mark.parametrize(
    "words",
    [
        ["python", "train.py", "--max-tokens", "131072", "--token", "7", "--tokenizer", "meta-llama/Llama-3"],
        ["train", "--auth-file", "secrets.json", "--auth", "/etc/auth.json", "--token={token}", "--password", "$PASSWORD"],
        ["train", "--sort-key", "step_time", "lr=1e-4", "disabled", "sk-learn"],
    ],
)
def test_words_without_one_are_kept(words: list[str]) -> None:
    assert commands.of_words(words, {"AUTH": "disabled", "SSH_AUTH_SOCK": "/tmp/agent.7", "MAX_TOKEN": "131072"}) == ""


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        (f"401 for token={DRAWN}: refused", "401 for token=[hidden]: refused"),
        (f"login with {TOKEN} failed", "login with [hidden] failed"),
        (f"'--api-key', '{DRAWN}'", "'--api-key', '[hidden]'"),
        (f'{{"password": "{DRAWN}"}}', '{"password": "[hidden]"}'),
        ("the key is a1b2c3d4e5 here", "the key is [hidden] here"),
        ("step 7: loss 2.0, tokens: 131072, KeyError: 'embedding'", "step 7: loss 2.0, tokens: 131072, KeyError: 'embedding'"),
        ("torch.OutOfMemoryError: CUDA out of memory", "torch.OutOfMemoryError: CUDA out of memory"),
    ],
)
def test_a_log_is_kept_without_its_secrets(line: str, kept: str) -> None:
    assert commands.hidden(line, {"WANDB_KEY": "a1b2c3d4e5"}) == kept
    assert commands.hidden(kept, {}) == kept


def test_a_private_key_is_hidden_to_its_end_or_that_of_the_log() -> None:
    pem = "-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\n-----END RSA PRIVATE KEY-----\nafter"
    assert commands.hidden(pem, {}) == "[hidden]\nafter"
    assert commands.hidden(pem[:40], {}) == "[hidden]"
