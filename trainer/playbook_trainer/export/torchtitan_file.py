"""The Python file that torchtitan 0.3.0 takes a configuration from: `--module FILE --config plan`.

Source: torchtitan 0.3.0, `torchtitan/config/manager.py` (how a file is named), `torchtitan/trainer.py` (sections of `Trainer.Config`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from playbook_trainer.export.torchtitan_model import Code, call

RELEASE = "torchtitan 0.3.0"
FUNCTION = "plan"
"""What `--config` names."""

CLASSES: Mapping[str, str] = {
    "checkpoint": "CheckpointManager.Config", "comm": "CommConfig", "compile": "CompileConfig", "dataloader": "HuggingFaceTextDataLoader.Config",
    "debug": "DebugConfig", "lr_scheduler": "LRSchedulersContainer.Config", "metrics": "MetricsProcessor.Config", "optimizer": "default_adamw",
    "parallelism": "ParallelismConfig", "profiler": "Profiler.Config", "training": "TrainingConfig", "validator": "Validator.Config",
}  # fmt: skip
"""By section, what builds it from its fields."""
RECOMPUTE: Mapping[str, Code] = {"none": Code("None"), "selective": Code("SelectiveAC.Config()"), "full": Code("FullAC.Config()")}
"""By mode, its policy of activation checkpointing."""

DISPATCHERS = {"": "standard", "alltoall": "standard", "deepep": "deepep", "hybridep": "hybridep"}
"""Its backends of expert communication."""

_IMPORTS: Mapping[str, str] = {
    "CheckpointManager": "torchtitan.components.checkpoint", "CommConfig": "torchtitan.config", "CompileConfig": "torchtitan.config",
    "CrossEntropyLoss": "torchtitan.components.loss", "DebugConfig": "torchtitan.config", "Float8LinearConverter": "torchtitan.components.quantization",
    "FullAC": "torchtitan.distributed.activation_checkpoint", "HuggingFaceTextDataLoader": "torchtitan.hf_datasets.text_datasets",
    "LRSchedulersContainer": "torchtitan.components.optimizer", "MTPLoss": "torchtitan.models.deepseek_v3.mtp",
    "MXFP8LinearConverter": "torchtitan.components.quantization", "MetricsProcessor": "torchtitan.components.metrics",
    "ParallelismConfig": "torchtitan.config", "Profiler": "torchtitan.tools.profiler", "SelectiveAC": "torchtitan.distributed.activation_checkpoint",
    "Trainer": "torchtitan.trainer", "TrainingConfig": "torchtitan.config", "Validator": "torchtitan.components.validate",
    "default_adamw": "torchtitan.components.optimizer", "replace": "dataclasses",
}  # fmt: skip

_RANDOM = '''

class NoTokenizer(BaseTokenizer):
    """Random tokens need none."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *_, **__):
        return []

    def decode(self, *_, **__):
        return ""

    def get_vocab_size(self):
        return 0


class RandomTokens(BaseDataLoader):
    """Rows of random tokens, other ones on each data-parallel rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab_size: int

    def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **_):
        self.vocab_size, self.rank, self.shape = config.vocab_size, dp_rank, (local_batch_size, seq_len)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.rank)
        positions = torch.arange(self.shape[1]).repeat(self.shape[0], 1)
        while True:
            rows = torch.randint(self.vocab_size, (self.shape[0], self.shape[1] + 1), generator=generator)
            yield {"input": rows[:, :-1].contiguous(), "positions": positions.clone()}, rows[:, 1:].contiguous()

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass
'''
_RANDOM_IMPORTS = """from dataclasses import dataclass

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer"""


def stages(sizes: Sequence[int]) -> Code:
    """Names of the modules of each chunk of a pipeline, from its decoder layers: the embedding goes with the first, norm and output layer with the last."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    names = [f'*(f"layers.{{i}}" for i in range({end - size}, {end}))' for size, end in zip(sizes, ends, strict=True)]
    names[0] = f'"tok_embeddings", {names[0]}'
    names[-1] += ', "norm", "lm_head"'
    return Code("[\n" + "".join(f"    [{name}],\n" for name in names) + "]")


def document(title: str, model: Sequence[str], sections: Mapping[str, Mapping[str, Any] | Code], *, random: bool = False) -> str:
    """The file: its title, the model's lines (see `torchtitan_model.source`), and the function that returns the configuration.

    Sections are fields of `Trainer.Config`: those of `CLASSES` by their fields, others as source. `random` adds tokens that need no data set and no tokenizer.
    """
    fields = {name: value if isinstance(value, Code) else call(CLASSES[name], value) for name, value in sections.items()}
    body = call("Trainer.Config", {name: _written(value) for name, value in fields.items()})
    imports: dict[str, list[str]] = {}
    for name, module in _IMPORTS.items():
        if f"{name}." in body or f"{name}(" in body:
            imports.setdefault(module, []).append(name)
    lines = [f'"""{title}"""', "", *(_RANDOM_IMPORTS.splitlines() if random else [])]
    lines += [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(imports.items())]
    lines += [*model, *(_RANDOM.splitlines() if random else []), "", "", f"def {FUNCTION}():"]
    return "\n".join([*lines, *(f"    {line}" for line in f"return {body}".splitlines())]) + "\n"


def _written(value: Code) -> Code:
    """A section without fields on one line."""
    return Code(value.replace("(\n)", "()"))
