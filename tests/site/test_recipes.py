"""Recipes: each loads, can run at the size that it states, fits the GPUs that it names, and is what the cards say."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import document, run

from playbook.cards.load import load_all
from playbook.errors import ConfigError
from playbook_app.cli.commands import site
from playbook_app.services import check
from playbook_app.site.models import recipes_page
from playbook_trainer.config import recipes
from playbook_trainer.config.dry_run import dry_run
from playbook_trainer.config.tree import load, parse_overrides

INDEX = recipes.index()
FILES = sorted(p for p in recipes.folder().glob("*.yaml") if p.name != recipes.INDEX)
WORLDS = [(recipe, gpus) for recipe in INDEX.recipes for gpus in recipe.gpus]
FAMILIES = [(card.id, family) for card in load_all().values() for family in card.families if family.recipe]


def peak(config, gpus):
    return site.peak_gib(dry_run(config, gpus))


@pytest.mark.parametrize(("recipe", "gpus"), WORLDS, ids=lambda v: getattr(v, "file", v))
def test_each_recipe_can_run_at_its_world_size_and_fits_its_gpus(recipe, gpus):
    assert peak(load(recipes.folder() / recipe.file), gpus) < INDEX.hardware[recipe.hardware].memory_gib


@pytest.mark.parametrize("recipe", INDEX.recipes, ids=lambda r: r.file)
def test_each_small_version_fits_four_gpus(recipe):
    config = load(recipes.folder() / recipe.file, recipe.small)
    assert peak(config, recipes.SMALL_GPUS) < INDEX.hardware[recipes.SMALL_HARDWARE].memory_gib


def test_a_source_has_one_date_on_cards_and_recipes():
    dates = {s.title.casefold(): s.date for card in load_all().values() for c in card.claims for s in c.sources}
    named = {r.file: (r.source.title.partition(":")[0].casefold(), r.source.date) for r in INDEX.recipes}
    differ = {file: (date, dates[title]) for file, (title, date) in named.items() if dates.get(title, date) != date}
    assert differ == {}


def test_every_file_is_in_the_index_once():
    assert sorted(r.file for r in INDEX.recipes) == [p.name for p in FILES]


@pytest.mark.parametrize(
    ("file", "least"), [("deepseek_v3_128k_h100", 256), ("deepseek_v3_256k_h100", 512), ("qwen3_235b_a22b_128k_gb200", 128)]
)
def test_long_context_needs_the_gpus_that_its_source_names_and_uneven_pipelines(file, least):
    path = recipes.folder() / f"{file}.yaml"
    assert dry_run(load(path), least).layout["gpus"] == least
    with pytest.raises(ConfigError, match="ranks do not divide into"):
        dry_run(load(path), least // 2)
    with pytest.raises(ConfigError, match="layers do not divide into"):
        dry_run(load(path, {"parallel.pipeline_layout": None}), least)


def test_the_published_overrides_of_megatron_fsdp_are_all_there():
    config = load(recipes.folder() / "qwen3_vl_30b_a3b_mfsdp.yaml")
    assert config.backend == "megatron"
    assert (config.train.dtype, config.train.freeze, config.train.recompute) == ("bf16", [], "full")
    assert (config.megatron.recompute_method, config.megatron.recompute_layers) == ("uniform", None)
    assert (config.parallel.tp, config.parallel.ep, config.moe.dispatcher, config.data.seq_len) == (1, 8, "alltoall", 4096)
    assert (config.megatron.data_parallel, config.megatron.sharding_strategy) == ("megatron_fsdp", "optim_grads_params")
    assert config.megatron.grad_reduce_dtype == "bf16"
    train, eval_ = config.train, config.eval
    assert (train.steps, train.global_batch_size, train.micro_batch_size, train.log_every, eval_.batches) == (20, 32, 1, 1, 5)
    assert (config.optimizer.lr, config.optimizer.min_lr_ratio, config.optimizer.warmup_steps) == (2e-5, 0.1, 10)
    assert config.tracker.tensorboard


def test_the_experiments_differ_as_the_log_says():
    def of(name):
        return load(recipes.folder() / f"qwen3_vl_30b_a3b_series_{name}.yaml")

    unpacked, packed, compiled = of("1_unpacked"), of("2_packed"), of("3_compiled")
    text, cached, padded = of("4_text"), of("5_cached_images"), of("6_padded_text")
    assert (unpacked.data.pack, packed.data.pack, packed.data.pack_buffer) == (False, True, 204)
    assert packed.data == compiled.data
    assert (packed.train.compile.vision, compiled.train.compile.vision) == ("auto", True)
    assert (text.data.kind, text.data.seq_len) == ("text", 12288)
    assert (compiled.data.cache, cached.data.cache) == ("none", "memory")
    assert (cached.data.pad_to_multiple, padded.data.pad_to_multiple) == (None, 256)


@pytest.mark.parametrize(("card", "family"), FAMILIES, ids=lambda v: getattr(v, "name", v))
def test_a_family_and_its_recipe_agree(card, family):
    assert list(check.disagreements(family, family.recipe)) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"recipe": "trainer/configs/recipes/qwen3_vl_30b_a3b_mfsdb.yaml"}, "does not exist; did you mean"),
        ({"layout": {"tp": 1, "pp": 1, "ep": 4}}, "has ep 8, and family 'Megatron-FSDP from the example' says 4"),
        ({"model": "qwen3_vl_235b_a22b"}, "has model qwen3_vl_30b_a3b"),
        ({"gpus": 16, "layout": {"edp": 1}}, "has edp 2"),
        ({"settings": {"global_batch_size": 256}}, "has global_batch_size 32"),
        ({"settings": {"recompute": ["moe"]}}, "has recompute []"),
        ({"settings": {"pack": False}}, "has pack True"),
    ],
)
def test_a_family_that_says_something_else_is_found(change, says):
    family = next(f for _, f in FAMILIES if f.name == "Megatron-FSDP from the example").model_copy(update=change)
    (message,) = check.disagreements(family, family.recipe)
    assert says in message


def test_a_file_outside_the_index_is_an_error_that_says_what_to_add():
    with pytest.raises(ConfigError, match="add its title, source and GPUs"):
        recipes.find("other.yaml")


def test_the_page_shows_every_recipe_with_commands_that_say_what_the_index_says():
    rows = site.recipe_rows()
    page = recipes_page(rows)
    assert all(max(row["peaks_gib"].values()) < row["memory_gib"] and row["small_peak_gib"] < row["small_memory_gib"] for row in rows)
    for row, recipe in zip(rows, INDEX.recipes, strict=True):
        assert page.count(f"{{ #{recipe.file.removesuffix('.yaml').replace('_', '-')} }}") == 1
        words = row["run_small"].split()
        assert parse_overrides(words[words.index(row["path"]) + 1 :]) == recipe.small
        assert f"--nodes {-(-recipe.gpus[0] // INDEX.hardware[recipe.hardware].gpus_per_node)} " in row["slurm"]
        assert row["run"] is None or recipe.gpus[0] <= 8


def test_the_list_names_files_that_load(capsys):
    rows = document(capsys, "config", "list")
    assert [row["title"] for row in rows] == [r.title for r in INDEX.recipes]
    for row, recipe in zip(rows, INDEX.recipes, strict=True):
        assert load(Path(row["file"])) == load(recipes.folder() / recipe.file)
    assert "8 or 16" in run(capsys, "config", "list")[1]


def test_an_estimate_that_leaves_little_says_so():
    (row, *_) = site.recipe_rows()
    near, far = (row | {"peaks_gib": dict.fromkeys(row["gpus"], peak), "memory_gib": 100.0} for peak in (96.0, 94.0))
    assert ("96, **tight**" in recipes_page([near]), "tight** |" in recipes_page([far])) == (True, False)
