"""Models on megatron-core in BF16 on a GPU, of Transformer Engine's layers and of ours, against transformers in FP32 with the same weights.

BF16 rounds, so the yardstick is transformers itself in BF16: a model may be three times as far from FP32 as that, or as far as FLOORS say,
whichever is more. Logits and gradients: norm of the difference over the norm, for gradients that of the worst parameter. Loss: relative.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")
import parity
from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel

from playbook_trainer.config.tree import load
from playbook_trainer.huggingface import weights as hf
from playbook_trainer.megatron import engine, groups, weights
from playbook_trainer.megatron import settings as mapping

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]

WIDE = {"model.hidden_size": 256, "model.num_layers": 3, "model.vocab_size": 512}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {
        "model.head_dim": 64,
        **dict.fromkeys(("model.num_experts", "model.top_k", "model.expert_ffn_size"), 0),
        "model.ffn_size": 512,
    },
    "moe": {"model.head_dim": 64, "model.expert_ffn_size": 128},
    "deepseek": {
        "model": "deepseek_v3_tiny",
        "model.mtp_layers": 0,
        "model.head_dim": 192,
        "model.qk_nope_head_dim": 128,
        "model.qk_rope_head_dim": 64,
        "model.v_head_dim": 128,
        "model.q_lora_rank": 128,
        "model.kv_lora_rank": 64,
        "model.ffn_size": 512,
        "model.expert_ffn_size": 128,
        "model.shared_expert_ffn_size": 128,
    },
}
# Where the choice of experts flips with rounding, gradients say little. These two choose the same experts whatever the numbers are.
MODELS["moe-every-expert"] = {**MODELS["moe"], "model.top_k": 8}
MODELS["deepseek-settled"] = MODELS["deepseek"]
LENGTHS = (97, 31, 128)
FACTOR = 3.0
FLOORS = {"logits": 1e-2, "loss": 2e-3, "gradients": 5e-2}
KERNELS = ("transformer_engine", "local")


@pytest.fixture(autouse=True)
def _exact(alone: torch.device) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def configuration(name: str, kernels: str, **more: Any) -> Any:
    if kernels == "transformer_engine":
        pytest.importorskip("transformer_engine")
    common = {
        "backend": "megatron",
        "train.dtype": "bf16",
        "data.seq_len": sum(LENGTHS),
        "megatron.kernels": kernels,
        "train.device": "cuda",
    }
    return load(ROOT / "trainer/configs/qwen3_moe_tiny.yaml", {"model": "qwen3_moe_tiny", **common, **WIDE, **MODELS[name], **more})


def built(config: Any) -> list[Any]:
    groups.initialise(config)
    engine.seed(config)
    return engine.build_chunks(config, engine.transformer_config(config), torch.device("cuda", 0))


def losses(model: Any, batch: Any) -> torch.Tensor:
    """The loss of every token, zero where it has no label."""
    given = {"labels": batch.labels_N.clamp(min=0)[None], "loss_mask": (batch.labels_N >= 0).float()[None]}
    return model(
        batch.tokens_N[None], batch.positions[None], None, packed_seq_params=engine.packed(batch.cu_seqlens, batch.max_seqlen), **given
    )


def rounded(config: Any, folder: Path, bias: float = 1.0) -> dict[str, torch.Tensor]:
    """Weights that BF16 holds exactly, in the folder too; a `bias` that is large against the scores settles which experts are chosen."""
    state = {
        name: t * (bias if name.endswith("router.bias") else 0.25 if "router" in name else 1.0)
        for name, t in parity.random_state(config.model).items()
    }
    state = {name: t.bfloat16().float() for name, t in state.items()}
    hf.save_safetensors(config.model, state, folder)
    return state


def theirs(config: Any, folder: Path, documents: list[Any], dtype: torch.dtype) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """Logits, summed loss and gradients of transformers on this GPU."""
    model = parity.theirs(folder).to("cuda", dtype)
    for buffer in (b for name, b in model.named_buffers() if name.endswith("correction_bias")):
        buffer.data = buffer.data.float()
    logits, total = [], 0.0
    for document in documents:
        out = model(**{name: t.cuda() for name, t in document.for_theirs().items()})
        logits.append(out.logits[0].detach().float())
        (out.loss * (len(document.tokens) - 1)).backward()
        total += float(out.loss.detach()) * (len(document.tokens) - 1)
    return torch.cat(logits), total, {name: g.float() for name, g in parity.their_gradients(config.model, model).items()}


def ours(config: Any, folder: Path, documents: list[Any]) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """The same of megatron-core's model."""
    import megatron_ranks

    chunks = built(config)
    weights.load(chunks, config.model, folder)
    batch = parity.pack(documents).to(torch.device("cuda"))
    with torch.no_grad():
        given = {"packed_seq_params": engine.packed(batch.cu_seqlens, batch.max_seqlen)}
        logits = chunks[0](batch.tokens_N[None], batch.positions[None], None, **given)[0].float()
    mask = (batch.labels_N >= 0).float()
    loss = (losses(chunks[0], batch).view(-1).float() * mask).sum()
    loss.backward()
    return logits, float(loss.detach()), megatron_ranks.gradients(config, chunks)


def far(found: tuple[Any, float, dict[str, Any]], expected: tuple[Any, float, dict[str, Any]]) -> dict[str, Any]:
    """How far apart two computations are, and whose gradient is the farthest."""
    each = {name: float((found[2][name].cuda() - e.cuda()).norm() / e.norm()) for name, e in expected[2].items()}
    worst = max(each, key=lambda name: each[name])
    return {
        "logits": float((found[0] - expected[0]).norm() / expected[0].norm()),
        "loss": abs(found[1] / expected[1] - 1),
        "gradients": each[worst],
        "worst": worst,
    }


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Any], Any, dict[str, Any]]]:
    """Of a model: the folder of its weights, documents, what transformers makes of them in FP32, and how far from that it is in BF16."""
    known: dict[str, tuple[Path, list[Any], Any, dict[str, Any]]] = {}

    def measure(name: str) -> tuple[Path, list[Any], Any, dict[str, Any]]:
        if name not in known:
            folder, config = tmp_path_factory.mktemp("theirs") / "m", configuration(name, "local")
            rounded(config, folder, bias=100.0 if name == "deepseek-settled" else 1.0)
            documents = [parity.Document(config.model, n, [], seed=n) for n in LENGTHS]
            exact = theirs(config, folder, documents, torch.float32)
            known[name] = folder, documents, exact, far(theirs(config, folder, documents, torch.bfloat16), exact)
        return known[name]

    return measure


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", MODELS)
def test_bf16_is_as_near_to_fp32_as_transformers_in_bf16(
    name: str, kernels: str, measured: Callable[[str], tuple[Path, list[Any], Any, dict[str, Any]]]
) -> None:
    config = configuration(name, kernels)
    folder, documents, exact, yardstick = measured(name)
    found = far(ours(config, folder, documents), exact)
    print(f"\n{name} {kernels}: {found}\n  transformers in bf16: {yardstick}")
    how = {"kernels": kernels, "device": torch.cuda.get_device_name(), "dtype": "bf16", "megatron_core": version("megatron-core")}
    limits = {key: max(FACTOR * yardstick[key], floor) for key, floor in FLOORS.items()}
    row = {"model": name, "against": "transformers", "ranks": 1, **{k: found[k] for k in limits}, "tolerance": limits["gradients"], **how}
    parity.record("megatron-gpu.jsonl", row)
    assert all(found[key] <= limit for key, limit in limits.items()), (found, limits)


# `prediction` has all that DeepSeek-V3 has.
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ["dense", "moe", "loop", "prediction"])
def test_weights_go_in_and_out_bit_by_bit(name: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "prediction", {**MODELS["deepseek"], "model.mtp_layers": 1})
    monkeypatch.setitem(MODELS, "loop", {**MODELS["moe"], "moe.experts": "loop"})
    config = configuration(name, kernels)
    given = rounded(config, tmp_path / "m")
    chunks = built(config)
    weights.load(chunks, config.model, tmp_path / "m")
    weights.save(chunks, config.model, tmp_path / "out", max_shard_bytes=1_000_000)
    found = hf.load_safetensors(config.model, tmp_path / "out")
    assert all(torch.equal(found[key].float(), given[key]) for key in given)
    dtypes = {t.dtype for key, t in found.items() if not key.endswith("router.bias")}
    assert dtypes == {torch.bfloat16}, "weights leave in the precision of training"


def test_weights_in_8_bits_leave_in_16(tmp_path: Path) -> None:
    config = configuration("dense", "transformer_engine", **{"precision.fp8": "tensorwise", "megatron.fp8_param": True})
    given = rounded(config, tmp_path / "m")
    chunks = built(config)
    narrow = [name for name, p in chunks[0].named_parameters() if hasattr(p, "_quantizer")]
    assert narrow, "no parameter is kept in 8 bits"
    weights.load(chunks, config.model, tmp_path / "m")
    weights.save(chunks, config.model, tmp_path / "out")
    found = hf.load_safetensors(config.model, tmp_path / "out")
    worst = max(float((found[key].float() - given[key]).norm() / given[key].norm()) for key in given)
    print(f"\n{len(narrow)} parameters in 8 bits, worst relative difference {worst:.3f}")
    assert 0 < worst < 0.05, "three bits of mantissa"


@pytest.mark.parametrize("kind", ["megatron_fsdp", "fsdp2"])
def test_parameters_that_are_shared_out_are_saved_whole(kind: str, tmp_path: Path) -> None:
    config = configuration("moe", "transformer_engine", **{"megatron.data_parallel": kind})
    given = rounded(config, tmp_path / "m")
    chunk = built(config)[0]
    weights.load([chunk], config.model, tmp_path / "m")
    settings = DistributedDataParallelConfig(**mapping.data_parallel(config, DistributedDataParallelConfig))
    if kind == "megatron_fsdp":
        pytest.importorskip("einops")
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel as Wrapper
    else:
        Wrapper = TorchFullyShardedDataParallel
    wrapped = Wrapper(chunk.config, settings, chunk)
    weights.save([wrapped], config.model, tmp_path / "out")
    found = hf.load_safetensors(config.model, tmp_path / "out")
    assert all(torch.equal(found[key].float(), given[key]) for key in given)


@pytest.mark.parametrize("kernels", KERNELS)
def test_multi_token_prediction_gives_every_parameter_a_gradient(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron_ranks

    monkeypatch.setitem(MODELS, "prediction", {**MODELS["deepseek"], "model.mtp_layers": 1})
    config = configuration("prediction", kernels)
    chunks = built(config)
    batch = parity.pack([parity.Document(config.model, n, [], seed=n) for n in LENGTHS]).to(torch.device("cuda"))
    loss = losses(chunks[0], batch).float().mean()
    loss.backward()
    assert torch.isfinite(loss)
    found = megatron_ranks.gradients(config, chunks)
    silent = [name for name, gradient in found.items() if ".experts." not in name and not gradient.norm() > 0]
    assert not silent
