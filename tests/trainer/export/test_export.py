"""`playbook config export`: every key of the tree ends up somewhere, the other trainer's own parser or classes have it, and cards say keys in its words."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys
from contextlib import suppress
from copy import deepcopy
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from in_process import refused, run

from playbook.errors import PlaybookError
from playbook.paths import data_root, repo_root, sources
from playbook_trainer.config import recipes
from playbook_trainer.config.tree import dump, flatten, load
from playbook_trainer.export import sheet as sheets
from playbook_trainer.export import torchtitan
from playbook_trainer.export.launch import Launchable
from playbook_trainer.export.render import TARGETS, change, export
from playbook_trainer.export.sheet import RELEASES, Setting
from tests.support.targets import bridge, megatron
from tests.trainer.export.test_plan_torchtitan import read_back

CONFIGS = data_root("configs")
FILES = [*sorted(CONFIGS.glob("*.yaml")), *(recipes.folder() / r.file for r in recipes.index().recipes)]
LARGE = CONFIGS / "qwen3_30b_a3b_24l.yaml"
MEGATRON = CONFIGS / "qwen3_30b_a3b_24l_megatron.yaml"
VISION = recipes.folder() / "qwen3_vl_30b_a3b_mfsdp.yaml"
FIXTURES = Path(__file__).parents[2] / "fixtures"
SNAPSHOTS = {
    "megatron-lm": recipes.folder() / "deepseek_v3_128k_h100.yaml",
    "megatron-bridge": VISION,
    "torchtitan": LARGE,
}

SWITCHES = {
    "backend": "megatron", "parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.pp": 2, "parallel.vpp": 2, "parallel.ep": 2,
    "parallel.etp": 1, "train.recompute": "full", "megatron.recompute_method": "block", "megatron.recompute_layers": 2,
    "megatron.overlap_expert_parallel": False, "megatron.tp_comm_overlap": True, "precision.fp8": "tensorwise",
    "moe.capacity_factor": 1.5, "moe.aux_loss_coeff": 0.01, "profile.kineto": True,
    "checkpoint.dir": "saved", "checkpoint.every": 5, "tracker.wandb": True, "train.on_nan": "continue", "eval.every": 4,
    "optimizer.schedule": "constant", "train.attention": "flash", "data.num_workers": 3,
}  # fmt: skip
LEAN = {
    "backend": "megatron", "megatron.precision_aware_optimizer": True, "optimizer.moments_dtype": "bf16", "megatron.grad_reduce_dtype": "bf16",
    "megatron.offload_modules": ["expert_fc1", "moe_act"], "train.cuda_graphs": ["moe_router"], "data.pack": False, "parallel.ep": 4,
    "precision.fp8": "none", "train.recompute": "selective", "train.recompute_modules": ["layernorm"],
}  # fmt: skip

OFFLOADED = {"megatron.precision_aware_optimizer": False, "optimizer.moments_dtype": "fp32", "offload.optimizer": True}
HARD = [
    {**OFFLOADED, "megatron.grad_reduce_dtype": "fp32"},
    {**OFFLOADED, "precision.fp8": "tensorwise", "megatron.fp8_param": True},
    {"megatron.data_parallel": "ddp", "precision.fp8": "tensorwise", "megatron.fp8_param": True},
    {"checkpoint.dir": "saved", "checkpoint.every": 0},
    {"megatron.overlap_grad_reduce": False},
    {"megatron.cuda_graph_impl": "full_iteration", "moe.capacity_factor": 1.0},
    {"megatron.cuda_graph_impl": "full_iteration", "moe.capacity_factor": 1.0, "train.on_nan": "skip"},
    {"model": "deepseek_v3_tiny", "model.yarn": None},
    {"optimizer.warmup_steps": 16},
]
HARD_SMALL = [
    (CONFIGS / "qwen3_moe_tiny.yaml", {"parallel.fsdp": False, "optimizer.moments_dtype": "bf16", "train.dtype": "bf16"}),
]
"""Settings of which Megatron-LM refuses some together."""


NAMES = {
    "train.freeze": ["vision"], "train.recompute_modules": ["moe"], "train.cuda_graphs": ["attn"], "megatron.offload_modules": ["moe_act"]
}  # fmt: skip
"""Other values of lists that take names."""
ALIKE = {
    ("moe.experts", "grouped"), ("megatron.kernels", "transformer_engine"), ("train.recompute", "selective"), ("optimizer.master_weights", "fp32")
}  # fmt: skip
"""Values that are the same elsewhere as `auto`; and a selective recompute that names no modules, which no configuration may have."""


def changed(config, key, value):
    """The configuration with one value replaced, checked by nobody."""
    *path, last = key.split(".")
    copy = deepcopy(config)
    node = reduce(getattr, path, copy)
    object.__setattr__(node, last, value)
    node.__dict__[last] = value
    return copy


def alternatives(config, key):
    """Other values that the key may have, by its type."""
    *path, last = key.split(".")
    node = reduce(getattr, path, config)
    field, value = type(node).model_fields[last], getattr(node, last)
    words = [w for w in get_args(field.annotation) if isinstance(w, str)]
    if words == ["auto"]:
        return [True]
    if words:
        return [w for w in words if w != value and (key, w) not in ALIKE]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [2 * value + 1]
    if key in NAMES:
        return [NAMES[key]]
    if isinstance(value, list):
        return [[*value[:-1], value[-1] + 1]] if value and not isinstance(value[0], str) else [value[:-1] or [2, 4]]
    return [f"{value}-other"] if isinstance(value, str) else []


@pytest.mark.parametrize("target", TARGETS)
def test_every_key_of_every_configuration_is_said_or_named(target):
    for path in FILES:
        found = export(load(path), target)
        said = {k for s in found.settings for k in s.keys} | {r.key for r in (*found.missing, *found.irrelevant)}
        known = set(flatten(dump(load(path))))
        assert not [r for r in found.missing if "does not know it" in r.why]
        # What is said is a key of the tree, or a section of it.
        unknown = {k for k in said - known if not any(x.startswith(k.removesuffix("*")) or x == k.removesuffix(".*") for x in known)}
        assert unknown == set()


def test_a_new_field_is_listed_until_somebody_maps_it(monkeypatch):
    original = sheets.dump
    monkeypatch.setattr(sheets, "dump", lambda config: {**original(config), "train": {**original(config)["train"], "new_knob": 1}})
    for target in TARGETS:
        text = export(load(LARGE), target).text()
        assert "# not expressible: train.new_knob: this version of the export does not know it" in text


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("start", [{}, {"backend": "megatron"}], ids=["torch", "megatron"])
@pytest.mark.parametrize("path", [LARGE, VISION], ids=["text", "vision"])
@pytest.mark.sample("text-torch-megatron-lm", "vision-megatron-megatron-bridge", "text-torch-torchtitan")
def test_another_value_changes_what_is_printed_unless_it_is_named_as_without_bearing_or_unsayable(path, start, target):
    config = load(path, {**start, **({"model": "qwen3_30b_a3b"} if path == LARGE else {})})
    plain = export(config, target)
    silent = []
    for key in flatten(dump(config)):
        for value in alternatives(config, key):
            found = export(changed(config, key, value), target)
            named = [r.key for r in (*found.irrelevant, *found.missing)]
            if found.text() == plain.text() and not any(k == key or (k.endswith("*") and key.startswith(k[:-1])) for k in named):
                silent.append(f"{key}={value}")
    assert silent == []


@pytest.mark.parametrize(("target", "path"), SNAPSHOTS.items(), ids=list(SNAPSHOTS))
def test_what_is_printed_is_what_was_reviewed(target, path):
    expected = (FIXTURES / "export" / f"{target}.txt").read_text(encoding="utf-8")
    assert export(load(path), target).text() == expected


PUBLISHED = """
mixed_precision=null model.bf16=true model.params_dtype=torch.bfloat16 model.pipeline_dtype=torch.bfloat16 model.tensor_model_parallel_size=1
model.expert_model_parallel_size=8 model.freeze_language_model=false model.freeze_vision_model=false model.freeze_vision_projection=false
model.init_model_with_meta_device=true model.seq_length=4096 model.gradient_accumulation_fusion=false model.calculate_per_token_loss=true
model.moe_token_dispatcher_type=alltoall model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1
train.train_iters=20 train.global_batch_size=32 train.micro_batch_size=1 validation.eval_iters=5 checkpoint.save=saved
checkpoint.ckpt_format=fsdp_dtensor dist.use_megatron_fsdp=true dist.use_torch_fsdp2=false logger.log_interval=1 logger.log_throughput=true
logger.log_throughput_to_tensorboard=true logger.wandb_project=qwen3-vl logger.wandb_exp_name=qwen3-vl-30b-a3b-mfsdp
ddp.grad_reduce_in_fp32=false ddp.use_megatron_fsdp=true ddp.use_distributed_optimizer=true ddp.data_parallel_sharding_strategy=optim_grads_params
"""


def test_the_recipe_carries_every_published_override_back():
    config = load(VISION, {"checkpoint.dir": "saved", "tracker.wandb": True})
    assert set(PUBLISHED.split()) - set(export(config, "megatron-bridge").lines) == set()


@pytest.mark.full
def test_torchtitan_reads_every_configuration_back():
    """All whose model it has, and whose converters need no package of a GPU; by its own parser, split of the pipeline and checks."""
    more = [
        {}, {"parallel.pp": 2, "parallel.ep": 1}, {"parallel.pp": 2, "parallel.vpp": 2, "train.recompute": "full"}, {"data.kind": "mock", "train.compile.decoder": True},
        {"train.steps": 40, "eval.every": 2, "profile.kineto": True, "tracker.wandb": True, "checkpoint.dir": "saved", "optimizer.schedule": "wsd"},
    ]  # fmt: skip
    asked = []
    for path in FILES:
        for words in more:
            try:
                config = load(path, words)
            except PlaybookError:
                continue  # a layout that this file's model does not have
            each = export(config, "torchtitan")
            batch = config.train.micro_batch_size * config.parallel.pp * data_ranks(config)  # of one pass
            if (
                config.train.global_batch_size % batch == 0
                and config.precision.fp8 == "none"
                and not any(r.key == "model.*" or r.key.startswith("parallel.") for r in each.missing)
            ):
                asked.append((config, each))
    assert len(asked) > 10
    for (config, _), answer in zip(asked, read_back([launched(config, each) for config, each in asked]), strict=True):
        assert "refused" not in answer, (config, answer)
        par, train = config.parallel, config.train
        layers = config.model.num_layers // (par.pp * par.vpp)
        assert answer["layers"] == [[layers] * par.vpp] * par.pp
        assert (answer["tp"], answer["pp"], answer["cp"], answer["ep"]) == (par.tp, par.pp, par.cp, par.ep)
        assert (answer["seq_len"], answer["global_batch"], answer["microbatch"]) == (
            config.data.seq_len, train.global_batch_size, train.micro_batch_size,
        )  # fmt: skip
        assert answer["sp"] == par.sequence_parallel


def data_ranks(config):
    """The fewest data-parallel ranks that hold the experts' ranks."""
    par = config.parallel
    return par.dp_replicate * max(1, par.ep // (par.tp * par.cp))


def launched(config, exported):
    """The file as it is started on the fewest GPUs, with every setting that is a flag said again."""
    par = config.parallel
    gpus = par.pp * par.cp * par.tp * data_ranks(config)
    flags = [word for s in exported.settings if (said := torchtitan.words(s)).startswith("--") for word in shlex.split(said)]
    command = ["torchrun", "--nnodes", "1", "--nproc-per-node", str(gpus), "-m", "torchtitan.train", "--module", "playbook_file"]
    return Launchable("torchtitan", "torchtitan 0.3.0", {}, (*command, "--config", "plan", *flags), {"playbook_file.py": exported.text()})


DESTINATIONS = {
    "num_moe_experts": "num_experts", "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "fp8_param": "fp8_param_gather", "gated_linear_unit": "swiglu", "bias_activation_fusion": "bias_swiglu_fusion",
    "check_for_nan_in_loss": "check_for_nan_in_loss_and_grad",
}  # fmt: skip
DERIVED = {"cpu_offloading", "params_dtype", "nvtx_ranges", "share_embeddings_and_output_weights", "grad_reduce_in_fp32"}


@pytest.mark.full
def test_megatron_lm_reads_back_every_value_and_accepts_them_together():
    """Every recipe's flags and a few harder ones, as Megatron-LM's own parser and checks take them."""
    assert megatron.FOLDER.is_dir(), f"{megatron.FOLDER} is missing; run `make targets`"
    index = recipes.index()
    asked = [(load(recipes.folder() / r.file), r.gpus[0], index.hardware[r.hardware].platform) for r in index.recipes]
    asked += [(load(LARGE, SWITCHES), 8, "hopper"), (load(LARGE, LEAN), 4, "hopper"), (load(CONFIGS / "qwen3_tiny.yaml"), 2, "hopper")]
    asked += [(load(MEGATRON, {"train.global_batch_size": 64, **words}), 8, "hopper") for words in HARD]
    asked += [(load(path, words), 2, "hopper") for path, words in HARD_SMALL]
    exported = [export(config, "megatron-lm", platform) for config, _, platform in asked]
    document = [
        {
            "argv": [word for line in e.lines for word in shlex.split(line)],
            "world": gpus,
            "blackwell": platform != "hopper",
            "environment": dict(e.environment),
            "values": True,
        }
        for e, (_, gpus, platform) in zip(exported, asked, strict=True)
    ]
    for found, answer in zip(exported, megatron.answers(document), strict=True):
        assert "error" not in answer, answer
        for setting in found.settings:
            if setting.value is not None and setting.field not in DERIVED:
                value = answer[DESTINATIONS.get(setting.field, setting.field)]
                single = isinstance(value, list) and len(value) == 1 and not isinstance(setting.value, list)
                assert (value[0] if single else value) == setting.value, setting


def test_the_command_prints_overrides_applied_and_comments_last(capsys):
    code, out, _ = run(capsys, "config", "export", str(LARGE), "parallel.ep=8", "moe.dispatcher=dedup", "--to", "megatron-lm")
    lines = out.splitlines()
    assert code == 0
    assert "--expert-model-parallel-size 8" in lines
    assert any(line.startswith("# not expressible: moe.dispatcher: one copy of a token") for line in lines)
    first = next(i for i, line in enumerate(lines) if line.startswith("# not expressible"))
    assert all(line.startswith("# not expressible") for line in lines[first:])


def test_json_names_the_keys_behind_each_setting(capsys):
    code, out, _ = run(capsys, "config", "export", str(LARGE), "--to", "megatron-bridge", "--json")
    found = json.loads(out)
    assert code == 0
    assert {"keys": ["parallel.ep"], "name": "model.expert_model_parallel_size", "value": 4} in found["settings"]
    assert {r["key"] for r in found["irrelevant"]} >= {"output", "train.device"}


def test_an_unknown_target_or_platform_is_one_line(capsys):
    for words, says in ((["--to", "megatron"], "megatron-lm"), (["--platform", "h100"], "hopper")):
        assert says in refused(capsys, "config", "export", str(LARGE), *words)


def test_exporting_imports_no_torch():
    code = "import sys\nfrom playbook_app.cli import app as cli\ntry:\n    cli.main(sys.argv[1:])\nfinally:\n    assert 'torch' not in sys.modules"
    environment = {"PYTHONPATH": ":".join(sources(repo_root())), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", code, "config", "export", str(LARGE), "--to", "torchtitan"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"moe.dispatcher": "deepep"},
            {
                "megatron-lm": ["--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend deepep"],
                "megatron-bridge": ["model.moe_token_dispatcher_type=flex", "model.moe_flex_dispatcher_backend=deepep"],
                "torchtitan": ["model_registry(moe_comm_backend='deepep')"],
            },
        ),
        (
            {"megatron.overlap_grad_reduce": "for exposed gradient reduction"},
            {"megatron-lm": ["--overlap-grad-reduce"], "megatron-bridge": ["ddp.overlap_grad_reduce=true"]},
        ),
        (
            {"checkpoint.async_save": True, "checkpoint.every": "now and then"},
            {
                "megatron-lm": ["--async-save"],
                "megatron-bridge": ["checkpoint.async_save=true"],
                "torchtitan": ["--checkpoint.async_mode async"],
            },
        ),
        ({"parallel.ep": "higher", "order": "first this"}, {}),
        ({}, {}),
    ],
)
def test_keys_are_said_in_the_words_of_each_trainer_that_has_some(keys: dict[str, Any], said: dict[str, list[str]]) -> None:
    assert change(keys) == said


def test_a_trainer_that_can_say_only_part_of_it_says_nothing() -> None:
    """Selective recompute without its modules would be another setting: torchtitan chooses by operator."""
    assert set(change({"train.recompute": "selective", "train.recompute_modules": ["layernorm", "moe"]})) == {
        "megatron-lm",
        "megatron-bridge",
    }


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


@pytest.mark.full
def test_megatron_bridge_has_every_field() -> None:
    sections, seen = bridge.fields_of("ConfigContainer"), set[str]()
    providers = ("GPTModelProvider", "MLAModelProvider", "Qwen3VLModelProvider", "Qwen3VLMoEModelProvider")

    def has(setting: Setting) -> bool:
        if not setting.section:
            return setting.field in sections
        named = ast.unparse(sections[setting.section]).removeprefix("Optional[").rstrip("]").split(" | ")
        return any(setting.field in bridge.fields_of(cls) for cls in (providers if setting.section == "model" else named))

    for path, words in product(FILES, WORDS):
        with suppress(PlaybookError):  # a key that this file's model does not have
            found = export(load(path, words), "megatron-bridge")
            assert [s for s in found.settings if not has(s)] == []
            assert f"# fields as in {RELEASES['megatron-bridge']}" in found.text()
            seen |= {f"{s.section}.{s.field}" for s in found.settings}
    assert len(seen) > 40
