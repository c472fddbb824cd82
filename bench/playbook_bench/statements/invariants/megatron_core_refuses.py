"""Settings that the installed megatron-core takes or refuses, by building its own configuration object."""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from playbook.errors import ConfigError

_BASE: Mapping[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
    "cuda_graph_impl": "transformer_engine",
    "bf16": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_RENAMED = {"cuda_graph_scope": "cuda_graph_modules"}
"""Fields with the names that later releases gave them."""


def megatron_core_refuses(rows: Sequence[Mapping[str, Any]]) -> tuple[bool, str, dict[str, Any]]:
    """Whether megatron-core's `TransformerConfig` refuses exactly the settings that `rows` mark as refused, for dropless routing.

    Each row has `settings`, fields of that class, and `refused`. Source: megatron-core, `transformer/transformer_config.py`, `__post_init__`.
    """
    config = _class()
    said = {}
    for row in rows:
        words = ", ".join(f"{k} {v}" for k, v in row["settings"].items())
        said[words] = _refusal(config, {**_BASE, **row["settings"]})
    wrong = [
        f"{words} is {'refused: ' + said[words] if said[words] else 'accepted'}"
        for words, row in zip(said, rows, strict=True)
        if bool(said[words]) != row["refused"]
    ]
    refused = sum(map(bool, said.values()))
    # Neither the version nor its words: a record replays beside another version that judges alike.
    sentence = f"megatron-core refuses {refused} of {len(rows)} settings" + (f"; against the claim: {'; '.join(wrong)}" if wrong else "")
    return not wrong, sentence, {"refused": {words: bool(why) for words, why in said.items()}}


def _class() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("megatron.core.transformer.transformer_config").TransformerConfig
    except ImportError as e:
        raise ConfigError(
            "megatron-core is not installed, and the statement is about it; run pip install '.[megatron]' in a clone of Playbook"
        ) from e


def _refusal(config: Any, settings: Mapping[str, Any]) -> str:
    """What the class says against the settings; nothing where it takes them."""
    known = config.__dataclass_fields__
    # The class changes lists that it is given.
    fields = {k if k in known else _RENAMED.get(k, k): [*v] if isinstance(v, list) else v for k, v in settings.items()}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            config(**fields)
        except (AssertionError, ValueError) as e:
            return str(e)
    return ""
