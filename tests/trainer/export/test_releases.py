"""What `playbook config export` prints, against the dataclasses of pinned releases, which this test installs into a folder of its own."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from playbook.errors import PlaybookError
from playbook.paths import data_root
from playbook_trainer.config import recipes
from playbook_trainer.config.tree import load
from playbook_trainer.export.releases import LACKS, RELEASES
from playbook_trainer.export.render import Exported, export
from playbook_trainer.export.sheet import Setting, Target

FILES = [*sorted(data_root("configs").glob("*.yaml")), *(recipes.folder() / r.file for r in recipes.index().recipes)]
WORDS: list[dict[str, Any]] = [
    {},
    {
        "checkpoint.dir": "saved",
        "checkpoint.export": "out",
        "tracker.wandb": True,
        "eval.every": 2,
        "profile.kineto": True,
        "backend": "megatron",
    },
    {
        "optimizer.schedule": "wsd",
        "train.deterministic": True,
        "precision.fp8": "tensorwise",
        "backend": "megatron",
        "data.tokenizer": "tokenizer.json",
    },
    {"data.kind": "mock", "train.compile.loss": True, "init.weights": "in", "optimizer.schedule": "linear"},
    {"backend": "megatron", "offload.optimizer": True, "optimizer.moments_dtype": "bf16", "train.cuda_graphs": ["moe_router"]},
]


def exported(target: Target) -> Iterator[Exported]:
    for path in FILES:
        for words in WORDS:
            try:
                yield export(load(path, words), target)
            except PlaybookError:
                continue  # a key that this file's model does not have


def check(target: Target, has: Any) -> None:
    """Every setting is a field there or is said to be unchecked, and what is said to be unchecked is none."""
    seen: set[str] = set()
    for each in exported(target):
        for setting in each.settings:
            name = f"{setting.section}.{setting.field}"
            assert has(setting) != (name in LACKS[target]), (target, setting)
            assert (name in each.unchecked) == (name in LACKS[target] and setting.value is not None)
            seen.add(name)
        assert f"# fields as in {RELEASES[target]}" in each.text()
    assert len(seen) > 40


@pytest.mark.full
def test_megatron_core_has_what_is_not_said_to_be_unchecked() -> None:
    pytest.importorskip("megatron.core")
    import megatron.core
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    if RELEASES["megatron-lm"] != f"megatron-core {megatron.core.__version__}":
        pytest.skip(f"megatron-core {megatron.core.__version__} is installed, and {RELEASES['megatron-lm']} was compared with")
    classes = {"model": MLATransformerConfig, "ddp": DistributedDataParallelConfig, "optimizer": OptimizerConfig}
    known = {section: {f.name for f in dataclasses.fields(cls)} for section, cls in classes.items()}
    check("megatron-lm", lambda s: s.field in known.get(s.section, ()))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("releases")
    wanted = [RELEASES[target].replace(" ", "==") for target in ("megatron-bridge",)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(folder), *wanted]
    if subprocess.run(pip, capture_output=True, check=False).returncode:
        pytest.skip("no package registry can be reached")
    return folder


def dataclasses_in(*files: Path) -> dict[str, tuple[dict[str, ast.expr], list[str]]]:
    """By the name of a class its annotated fields and its bases; nothing is imported, since a GPU's packages would be."""
    found = {}
    for node in (node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)):
        own = {n.target.id: n.annotation for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        found[node.name] = (own, [ast.unparse(base).rpartition(".")[2] for base in node.bases])
    return found


@pytest.mark.full
def test_megatron_bridge_has_what_is_not_said_to_be_unchecked(sources: Path) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    core = {
        "MCoreGPTDatasetConfig": GPTDatasetConfig,
        "MCoreDistributedDataParallelConfig": DistributedDataParallelConfig,
        "MCoreOptimizerConfig": OptimizerConfig,
        "MLATransformerConfig": MLATransformerConfig,
    }
    bridge = sources / "megatron" / "bridge"
    classes = dataclasses_in(*sorted((bridge / "models").rglob("*.py")), *sorted((bridge / "training").rglob("*.py")))

    def fields(*names: str) -> set[str]:
        found: set[str] = set()
        for name in names:
            if name in core:
                found |= {f.name for f in dataclasses.fields(core[name])}
            elif name in classes:
                found |= {*classes[name][0], *fields(*classes[name][1])}
        return found

    sections = {name: ast.unparse(annotation) for name, annotation in classes["ConfigContainer"][0].items()}
    known = {
        name: fields(*ast.unparse(ast.parse(text)).replace("Optional[", "").strip("]").split(" | ")) for name, text in sections.items()
    }
    known["model"] |= fields("MLATransformerConfig", "Qwen3VLModelProvider", "Qwen3VLMoEModelProvider")

    def has(setting: Setting) -> bool:
        return setting.field in (known.get(setting.section, ()) if setting.section else sections)

    check("megatron-bridge", has)
