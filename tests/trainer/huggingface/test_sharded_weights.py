"""Every rank of every layout reads from a Hugging Face folder what it holds, and nothing else; hostile folders are refused."""

from contextlib import ExitStack
from pathlib import Path

import parity
import pytest
import torch
from grids import rank_axes
from safetensors.torch import load_file, save_file

from playbook.errors import ConfigError
from playbook_trainer.axes import Axes
from playbook_trainer.config.tree import ParallelConfig
from playbook_trainer.huggingface import weights as hf
from playbook_trainer.huggingface.names import slices
from playbook_trainer.torch import weights
from playbook_trainer.torch.build import stage_chunks
from playbook_trainer.torch.model.decoder import Decoder, Options
from playbook_trainer.torch.parallel.sharding import local_boxes, part

MAKE = {
    "text-moe": lambda: parity.tiny("qwen3_moe_tiny"),
    "text-dense-tied": lambda: parity.tiny("qwen3_tiny"),
    "vl-moe": lambda: parity.tiny("qwen3_vl_moe_tiny", expert_ffn_size=80),
    "vl-dense-tied": lambda: parity.tiny("qwen3_vl_tiny"),
}
LAYOUTS = [
    {"tp": 2},
    {"pp": 2},
    {"tp": 2, "pp": 2},
    {"ep": 2},
    {"ep": 4},
    {"tp": 2, "ep": 2},
    {"tp": 2, "ep": 2, "etp": 1},
    {"ep": 2, "etp": 2},
]


def members(layout):
    """The axes of each rank of a layout, without processes."""
    world = max(layout.get("tp", 1), layout.get("ep", 1) * layout.get("etp", layout.get("tp", 1))) * layout.get("pp", 1)
    for rank in range(world):
        yield rank_axes(world, rank, ParallelConfig(**layout))


def shard(config, axes):
    with torch.device("meta"):
        model = Decoder(config, Options(axes=axes, chunks=stage_chunks(config.num_layers, axes.pp, 1)))
    return model.to_empty(device="cpu")


@pytest.fixture(scope="module", params=MAKE)
def saved(request, tmp_path_factory):
    config, folder = MAKE[request.param](), tmp_path_factory.mktemp("weights")
    return config, parity.written(config, folder, max_shard_bytes=300_000), folder


@pytest.mark.parametrize(
    ("saved", "layout"),
    [(name, layout) for name in MAKE for layout in LAYOUTS if "ep" not in layout or "moe" in name],
    indirect=["saved"],
    ids=lambda v: v if isinstance(v, str) else "-".join(f"{k}{n}" for k, n in v.items()),
)
@pytest.mark.sample("text-moe-tp2-ep2", "vl-moe-ep2-etp2", "vl-dense-tied-tp2-pp2")
def test_a_rank_reads_its_own_part_and_not_one_byte_more(saved, layout):
    config, state, folder = saved
    seen = set()
    for axes in members(layout):
        model = shard(config, axes)
        files = weights.load(model, axes, folder)
        held = 0
        for name, param in model.named_parameters():
            assert torch.equal(param, part(state[name], name, axes)), name
            held += param.nbytes
            seen.add(name)
        assert files.bytes_read == held, "bytes read from the files are the bytes that the rank holds"
        assert files.largest_read <= max(p.nbytes for p in model.parameters())
    assert seen == set(state)


def test_boxes_of_all_ranks_cover_every_parameter_once(saved):
    _, state, _ = saved
    axes_of = list(members({"tp": 2}))
    for name, tensor in state.items():
        count = torch.zeros(tensor.shape)
        for axes in axes_of:
            for here, box in local_boxes(part(tensor, name, axes), name, axes):
                assert torch.equal(part(tensor, name, axes)[slices(here)], tensor[slices(box)])
                count[slices(box)] += 1
        assert count.unique().numel() == 1


def test_one_rank_writes_what_it_read(saved, tmp_path):
    config, _, folder = saved
    model = shard(config, Axes())
    weights.load(model, Axes(), folder)
    weights.save(model, Axes(), tmp_path / "out", max_shard_bytes=300_000)
    ours = {k: v for f in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(f).items()}
    theirs = {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert not (tmp_path / "out" / ".writing").exists()
    with pytest.raises(ConfigError, match="already holds weights"):
        weights.save(model, Axes(), tmp_path / "out")


def test_sixteen_bit_weights_survive_the_way_through_our_float32(saved, tmp_path):
    config, state, _ = saved
    hf.save_safetensors(config, {n: t.bfloat16() for n, t in state.items()}, tmp_path / "in")
    model = shard(config, Axes())
    weights.load(model, Axes(), tmp_path / "in")
    weights.save(model, Axes(), tmp_path / "out", dtype=torch.bfloat16)
    read, out = (load_file(tmp_path / f / hf.SINGLE) for f in ("in", "out"))
    torch.testing.assert_close(out, read, rtol=0, atol=0)


def test_tied_models_take_a_second_copy_of_the_embedding_only_if_it_is_one(tmp_path):
    config = parity.tiny("qwen3_tiny")
    state = parity.written(config, tmp_path)
    tensors = load_file(tmp_path / hf.SINGLE)
    save_file({**tensors, "lm_head.weight": state["embed.weight"].clone()}, tmp_path / hf.SINGLE)
    weights.load(shard(config, Axes()), Axes(), tmp_path)
    save_file({**tensors, "lm_head.weight": state["embed.weight"] + 1}, tmp_path / hf.SINGLE)
    with pytest.raises(ConfigError, match="tie_word_embeddings: false"):
        weights.load(shard(config, Axes()), Axes(), tmp_path)


def test_another_model_is_refused_with_every_field_that_differs(saved):
    config, _, folder = saved
    other = config.model_copy(update={"num_layers": 8, "hidden_size": 32, "tie_word_embeddings": not config.tie_word_embeddings})
    with pytest.raises(ConfigError) as error:
        hf.check_folder(other, folder)
    for words in ("num_hidden_layers 4, here 8 (model.num_layers)", "hidden_size 64, here 32 (model.hidden_size)", "tie_word_embeddings"):
        assert words in str(error.value)


def only_pickle(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


def no_config(folder):
    (folder / "config.json").unlink()


def integers(folder):
    path = sorted(folder.glob("model-*"))[0]
    save_file({k: v.to(torch.int32) for k, v in load_file(path).items()}, path)


HOSTILE = {only_pickle: "is a pickle", no_config: "has no config.json", integers: "not read: .*I32"}


@pytest.mark.parametrize("spoil", HOSTILE, ids=lambda f: f.__name__)
def test_hostile_folders_are_refused(spoil, tmp_path):
    config = parity.tiny("qwen3_moe_tiny")
    parity.written(config, tmp_path, max_shard_bytes=300_000)
    with ExitStack() as stack:
        hf.open_folder(config, tmp_path, stack)
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=HOSTILE[spoil]):
        hf.check_folder(config, tmp_path)


def test_folders_that_cannot_be_looked_into_are_one_message():
    config, folder = parity.tiny("qwen3_tiny"), Path("a" * 5000)
    with pytest.raises(ConfigError, match="a cannot be read: "):
        hf.check_folder(config, folder)
    with pytest.raises(ConfigError, match="a cannot be written: "):
        hf.refuse_to_overwrite(folder)
