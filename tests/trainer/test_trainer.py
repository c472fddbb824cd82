"""The trainer as a program: what it refuses, what it writes, and what survives being killed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from ranks import run, steps, summary, trained

from playbook_bench.launch.outcome import read_run
from playbook_trainer.__main__ import main
from playbook_trainer.observe.metrics import SHOWN_DATA
from playbook_trainer.revision import PATHS

TEXT, DENSE = "trainer/configs/qwen3_moe_tiny.yaml", "trainer/configs/qwen3_tiny.yaml"
ONE_STEP = ["train.steps=1", "train.warmup_steps=0", "optimizer.warmup_steps=0", "model.num_layers=2"]


def test_refused_before_anything_starts(tmp_path: Path) -> None:
    """By every rank, and told by the first."""
    results = run([TEXT, "parallel.tp=3", f"output={tmp_path / 'out'}"], 3)
    assert [code for code, _, _ in results] == [2] * 3
    assert "4 attention heads do not divide over tp 3" in results[0][2]
    assert "Traceback" not in results[0][2]
    assert not (tmp_path / "out").exists(), "nothing may be written"


def test_files_of_a_run(tmp_path: Path) -> None:
    out = trained(tmp_path / "out", 1, TEXT, "train.steps=6", "train.warmup_steps=2", "eval.every=3")
    rows = steps(out)
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert [r["timed"] for r in rows] == [False, False, True, True, True, True]
    assert all(0 < r["useful_tokens"] <= r["raw_tokens"] == 1024 for r in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    s = summary(out)
    assert {r["step"]: r["eval_loss"] for r in rows if "eval_loss" in r} == {e["step"]: e["loss"] for e in s["eval"]}
    assert s["window"] == {"first": 3, "last": 6}
    assert read_run(out).fields["revisions"] == s["revisions"] == {p: PATHS[p].revision for p in ("loop", "data", "torch.experts")}
    assert [e["step"] for e in s["eval"]] == [3, 6]
    assert s["seconds"]["timed"] == pytest.approx(sum(r["seconds"] for r in rows if r["timed"]))
    assert yaml.safe_load((out / "config.yaml").read_text())["train"]["steps"] == 6


@pytest.mark.full
def test_receipt_shows_which_dispatcher_ran(tmp_path: Path) -> None:
    # Eight choices among sixteen experts on two ranks: nearly every token goes to both, so dedup sends about a quarter of all-to-all's rows.
    common = [*ONE_STEP, "parallel.ep=2", "model.num_experts=16", "model.top_k=8"]
    seen, sent = {}, {}
    for name in ("alltoall", "allgather", "dedup"):
        out = tmp_path / name
        receipt = summary(trained(out, 2, TEXT, *common, f"moe.dispatcher={name}"))["receipt"]
        seen[name] = {
            (c["op"], c["inside"], c["phase"]): c["count"] for c in receipt["collectives"] if c["inside"] in ("dispatch", "combine")
        }
        sent[name] = summary(out)["metrics"]["dispatch_bytes_per_token_layer"]
        per = receipt["numbers"]["moe_layers"] * receipt["numbers"]["microbatches"]
    assert seen["alltoall"] == {
        ("all_to_all", "dispatch", "forward"): 2 * per,  # counts and rows
        ("all_to_all", "combine", "forward"): per,
        ("all_to_all", "dispatch", "backward"): per,
        ("all_to_all", "combine", "backward"): per,
    }
    assert seen["allgather"] == {
        ("all_gather", "dispatch", "forward"): 3 * per,  # tokens, probabilities, choices
        ("reduce_scatter", "combine", "forward"): per,
        ("reduce_scatter", "dispatch", "backward"): 2 * per,
        ("all_gather", "combine", "backward"): per,
    }
    assert seen["dedup"] == {
        ("all_to_all", "dispatch", "forward"): 3 * per,  # counts, tokens, choices with probabilities
        ("all_to_all", "combine", "forward"): per,
        ("all_to_all", "dispatch", "backward"): 2 * per,
        ("all_to_all", "combine", "backward"): per,
    }
    assert 0.2 < sent["dedup"] / sent["alltoall"] < 0.35


@pytest.mark.parametrize(
    ("config", "batch", "words", "low", "high"),
    [
        (TEXT, 2, ["parallel.cp=1", "parallel.cp=2"], 0.4, 0.75),
        # Were the gathered inputs of attention and MLP kept, it would be 0.84.
        (DENSE, 1, ["parallel.tp=2", "parallel.tp=2 parallel.sequence_parallel=true"], 0.7, 0.8),
    ],
    ids=["context", "sequence"],
)
@pytest.mark.full
def test_saved_activations_shrink_with_parallelism(
    config: str, batch: int, words: list[str], low: float, high: float, tmp_path: Path
) -> None:
    saved = []
    for i, layout in enumerate(words):
        out = trained(tmp_path / str(i), 2, config, *ONE_STEP, "model.num_layers=4", f"train.global_batch_size={batch}", *layout.split())
        saved.append(summary(out)["metrics"]["saved_activation_bytes_per_rank"])
    assert low < saved[1] / saved[0] < high


@pytest.mark.full
def test_kineto_trace_names_the_ranges(tmp_path: Path) -> None:
    code, out, _ = run([TEXT, "profile.kineto=true", f"output={tmp_path}"])[0]
    assert code == 0
    assert "ends after step 5, whatever train.steps says" in out
    assert len(steps(tmp_path)) == 5
    names = {e.get("name") for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"step", "forward", "attention", "dispatch", "experts", "combine", "experts.bwd", "attention.bwd", "optimizer"} <= names
    assert not any(r["timed"] for r in steps(tmp_path)), "a traced run is never timed"


def test_help_needs_no_torch() -> None:
    code = "import sys; from playbook_trainer.__main__ import main; main(['nowhere.yaml']); assert 'torch' not in sys.modules"
    results = run([code], command=[sys.executable, "-c"])
    assert results[0][0] == 0, results[0][2]
    assert "nowhere.yaml" in results[0][2]


@pytest.mark.full
def test_a_step_that_waits_for_its_data_says_so(tmp_path: Path) -> None:
    """Pictures that the rank decodes itself are a part of the step worth mentioning; random tokens mostly are none."""
    said: dict[str, int] = {}
    for name, words in {
        "pictures": ["trainer/configs/qwen3_vl_moe_tiny.yaml", "data.num_workers=0"],
        "random": ["trainer/configs/qwen3_moe_tiny.yaml", "data.kind=mock"],
    }.items():
        out = tmp_path / name
        ended = run([*words, *ONE_STEP, "train.steps=3", "train.log_every=1", "train.receipt=false", f"output={out}"], 1)
        assert ended[0][0] == 0, ended
        lines = {int(found[1]): line for line in ended[0][1].splitlines() if (found := re.match(r"step (\d+) ", line))}
        for row in steps(out):
            share = row["data_seconds"] / row["seconds"]
            assert ("  data " in lines[row["step"]]) == (share >= SHOWN_DATA), (share, lines[row["step"]])
            assert share < SHOWN_DATA or f"  data {share:.0%}  mem" in lines[row["step"]]
        said[name] = sum("  data " in line for line in lines.values())
    assert said["pictures"] > 0


@pytest.mark.parametrize(("rank", "local", "said"), [(0, 0, "error: nowhere"), (8, 0, "rank 8: error: nowhere"), (9, 1, "")])
def test_what_one_node_lacks_is_said_there(
    rank: int, local: int, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": 16, "MASTER_ADDR": "x", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["nowhere.yaml"]) == 2
    err = capfd.readouterr().err
    assert err.startswith(said)
    assert bool(err) == bool(said)
