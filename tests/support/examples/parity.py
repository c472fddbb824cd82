"""The same tiny random model, twice: ours and the one of Hugging Face transformers, and documents to run both on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from playbook.paths import data_root
from playbook.yaml_files import read
from playbook_trainer.config.tree import ModelConfig, load
from playbook_trainer.data.batch import IGNORE, Batch, VisionBatch
from playbook_trainer.data.collate import Grid, mrope_positions, vision_index
from playbook_trainer.huggingface import weights
from playbook_trainer.huggingface.names import InMemory, whole
from playbook_trainer.torch.model.decoder import Decoder, Options


def tiny(name: str, **changes: Any) -> ModelConfig:
    """A shipped tiny model, with fields replaced."""
    overrides = {f"model.{key}": value for key, value in changes.items()}
    return load(data_root("configs") / f"{name}.yaml", overrides).model


def preset(name: str) -> ModelConfig:
    """A named model size."""
    fields, _ = read(data_root("configs") / "models" / f"{name}.yaml")
    return ModelConfig(name=name, **fields)


def deepseek(**changes: Any) -> ModelConfig:
    """The tiny model in the style of DeepSeek-V3, with fields replaced."""
    return ModelConfig.model_validate(preset("deepseek_v3_tiny").model_dump() | changes)


def dense(name: str) -> ModelConfig:
    """The same model with a dense MLP in place of the experts."""
    return tiny(name, num_experts=0, top_k=0, expert_ffn_size=0, ffn_size=96)


def random_state(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights that excite everything: norms away from one, biases away from zero, and far enough from a top-k tie."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for rule in weights.rules(config):
        noise = torch.randn(rule.shape, generator=generator)
        is_scale = "norm" in rule.ours and rule.ours.endswith("weight")
        state[rule.ours] = 1 + 0.2 * noise if is_scale else noise * (1.0 if "router" in rule.ours else 0.06)
    return state


def written(config: ModelConfig, folder: Path, **how: Any) -> dict[str, torch.Tensor]:
    """Such weights, which lie in the folder as published ones do."""
    state = random_state(config)
    weights.save_safetensors(config, state, folder, **how)
    return state


def say(folder: Path, **settings: Any) -> None:
    """Change the configuration of such a folder; what is set to None, it leaves out."""
    said = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps({k: v for k, v in said.items() if v is not None or k not in settings}))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a folder of one file."""
    tensors = load_file(folder / weights.SINGLE)
    change(tensors)
    save_file(tensors, folder / weights.SINGLE)


def ours(config: ModelConfig, state: dict[str, torch.Tensor], options: Options | None = None) -> Decoder:
    """Our model, built without memory and filled with these weights."""
    with torch.device("meta"):
        model = Decoder(config, options or Options())
    model.load_state_dict(state, strict=True, assign=True)
    return model.requires_grad_()


def theirs(folder: Path) -> Any:
    """Their model, read by transformers itself from the folder that we wrote."""
    settings = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, settings.architectures[0]).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def record(file: str, row: dict[str, Any]) -> None:
    """Add a row to the parity tables, where PLAYBOOK_PARITY names their folder (`make parity`)."""
    if folder := os.environ.get("PLAYBOOK_PARITY"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / file).open("a", encoding="utf-8") as f:
            f.write(json.dumps(row | {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}) + "\n")


class Document:
    """One document: text, and images at the places where their start tokens stand."""

    def __init__(self, config: ModelConfig, text: int, grids: list[Grid], seed: int) -> None:
        random = np.random.default_rng(seed)
        vision = config.vision
        parts = [random.integers(0, 256, text)]
        for grid in grids:
            size = int(np.prod(grid)) // vision.spatial_merge_size**2
            image = [[config.vision_start_token_id], np.full(size, config.image_token_id), [config.vision_end_token_id]]
            parts += [*image, random.integers(0, 256, text)]
        self.config, self.grids = config, grids
        self.tokens = np.concatenate(parts).astype(np.int64)
        self.targets = np.where(self.tokens == config.image_token_id, IGNORE, self.tokens)
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 if vision else 0
        patches = sum(int(np.prod(grid)) for grid in grids)
        self.pixels = random.standard_normal((patches, values)).astype(np.float32)

    def positions(self) -> np.ndarray:
        """[n] for text models, [3, n] for vision-language models."""
        if self.config.vision is None:
            return np.arange(len(self.tokens))
        return mrope_positions(self.tokens, self.config.image_token_id, self.grids, self.config.vision.spatial_merge_size)

    def for_theirs(self) -> dict[str, torch.Tensor]:
        """Arguments of the transformers model, which makes its own positions, indices and shifted labels."""
        ids = torch.from_numpy(self.tokens)[None]
        given = {"input_ids": ids, "labels": torch.from_numpy(self.targets)[None]}
        if self.grids:
            given["pixel_values"] = torch.from_numpy(self.pixels)
            given["image_grid_thw"] = torch.tensor(self.grids)
            given["mm_token_type_ids"] = (ids == self.config.image_token_id).int()
        return given


def rows(config: ModelConfig) -> list[list[Document]]:
    """Documents of micro-batches: two of 64 tokens, or with a tower four of up to 192, of which two have no image."""
    if config.vision is None:
        return [[Document(config, n, [], 100 * row + n) for n in lengths] for row, lengths in enumerate(((7, 19, 38), (30, 1, 33)))]

    def images(seed: int) -> list[Document]:
        each = ((20, [(1, 4, 6), (1, 2, 4)]), (30, []), (13, [(1, 6, 4)]))
        return [Document(config, text, grids, seed + i) for i, (text, grids) in enumerate(each)]

    return [images(0), [Document(config, 60, [], 5)], images(9), [Document(config, 90, [], 13)]]


def vision_batch(config: ModelConfig, grids: list[Grid], pixels: np.ndarray, visual: np.ndarray) -> VisionBatch:
    """The images of a batch with their indices."""
    vision = config.vision
    index = vision_index(grids, vision.spatial_merge_size, round(vision.num_position_embeddings**0.5))
    return VisionBatch(pixels_PC=torch.from_numpy(pixels), visual_index_V=torch.from_numpy(visual), **index)


def pack(documents: list[Document]) -> Batch:
    """The documents end to end, as one batch of our model."""
    config = documents[0].config
    tokens = np.concatenate([d.tokens for d in documents])
    labels = np.concatenate([np.append(d.targets[1:], IGNORE) for d in documents])
    lengths = [len(d.tokens) for d in documents]
    grids = [grid for d in documents for grid in d.grids]
    vision = None
    if grids:
        visual = np.flatnonzero(tokens == config.image_token_id)
        vision = vision_batch(config, grids, np.concatenate([d.pixels for d in documents]), visual)
    return Batch(
        tokens_N=torch.from_numpy(tokens),
        labels_N=torch.from_numpy(labels),
        positions=torch.from_numpy(np.concatenate([d.positions() for d in documents], axis=-1)),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
        num_useful=len(tokens),
        num_loss=int((labels != IGNORE).sum()),
        num_images=len(grids),
        vision=vision,
    )


def run_theirs(model: Any, documents: list[Document]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of each document run alone, end to end, and the summed loss; gradients are left in the model."""
    logits, total = [], torch.zeros(())
    for document in documents:
        out = model(**document.for_theirs())
        logits.append(out.logits[0].detach())
        if count := int((document.targets[1:] != IGNORE).sum()):  # theirs is a mean, and NaN where there is nothing to predict
            (out.loss * count).backward()
            total += out.loss.detach() * count
    return torch.cat(logits), total


def their_gradients(config: ModelConfig, model: Any) -> dict[str, torch.Tensor]:
    """Their gradients under our names. In memory, transformers stacks experts as we do."""
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    out = {}
    for rule in weights.rules(config):
        first = next(iter(rule.theirs))
        if rule.ours.endswith("router.bias"):
            continue  # no gradient moves it
        if ".experts." in first:
            base = first.split("experts.")[0] + "experts."
            out[rule.ours] = grads.pop(base + ("gate_up_proj" if rule.ours.endswith("w13") else "down_proj"))
        else:
            out[rule.ours] = rule.read(InMemory({name: grads.pop(name) for name in rule.theirs}), whole(rule.shape))
    assert not grads, f"parameters without a rule: {sorted(grads)}"
    return out


def worst_gradient(found: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative difference over all parameters (norm of the difference over the norm), and whose it is."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name] is not None, f"{name} got no gradient"
        assert gradient.norm() > 0, f"{name} has a gradient of zero, so the comparison would say nothing"
    return max((float((found[name] - e).norm() / e.norm()), name) for name, e in expected.items())
