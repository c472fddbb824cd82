"""`--launcher slurm` where there is no Slurm: the script that it would submit, and every mistake as one message with exit code 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import submitit
from guide_blocks import script
from in_process import printed, refused, run

from playbook.paths import repo_root
from playbook_app.cli import app, jobs
from playbook_bench.launch import slurm
from playbook_trainer.config import environment
from playbook_trainer.config import tree as trainer_config

FIXTURES = Path(__file__).parents[1] / "fixtures" / "slurm"
TINY = str(repo_root() / "trainer/configs/qwen3_moe_tiny.yaml")
W9 = ("confirm", "moe-dispatcher-choice/W9", "--launcher", "slurm")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working directory of its own, on a machine without Slurm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def file(elsewhere):
    def write(text):
        (elsewhere / "cluster.yaml").write_text(text, encoding="utf-8")

    return write


def test_the_script_is_printed_and_nothing_is_submitted(capsys, elsewhere):
    code, out, err = run(capsys, *W9, "--budget", "30m", "--cluster", str(FIXTURES / "cluster.yaml"), "--print")
    assert (code, err) == (0, "")
    shown = out.replace(str(elsewhere), "HERE").replace(f"{repo_root()}", "PLAYBOOK")
    assert shown == (FIXTURES / "confirm.sh").read_text(encoding="utf-8")
    assert list(elsewhere.iterdir()) == []


def test_a_word_with_a_line_break_stays_in_its_comment(capsys, elsewhere):
    out = printed(capsys, *W9, "--profile", "cpu\ntouch gone", "--print")
    assert not [line for line in out.splitlines() if line.startswith("touch")]


def test_the_script_of_training_holds_the_variables_of_its_layout(capsys, elsewhere):
    words = ("train", TINY, "parallel.tp=2", "parallel.fsdp=false", "--launcher", "slurm", "--print")
    code, out, err = run(capsys, *words, "--ranks-per-node", "2", "--nodes", "4")
    assert code == 0
    assert "checkpoint.dir is not set" in err
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" in out
    assert "#SBATCH --nodes=4\n" in out
    assert "# playbook train --launcher srun --cluster" in out


def test_a_recipe_is_submitted_from_a_machine_without_its_packages(capsys, file):
    file("platform: nvl72\ngpus_per_node: 4\n")
    recipe = str(repo_root() / "trainer/configs/recipes/qwen3_vl_235b_a22b_fsdp_first_gb200.yaml")
    out = printed(capsys, "train", recipe, "--launcher", "slurm", "--nodes", "16", "--print")
    assert "#SBATCH --nodes=16\n" in out
    for line in ("CUDA_DEVICE_MAX_CONNECTIONS=32", "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN=64", "USE_MNNVL=1", "NVLINK_DOMAIN_SIZE=72"):
        assert f"export {line}\n" in out
    fewer = refused(capsys, "train", recipe, "--launcher", "slurm", "--nodes", "15", "--print", listed=True)
    assert "60 ranks do not divide into ep 64" in fewer


@pytest.mark.parametrize(
    ("platform", "keys", "expected"),
    [
        ("hopper", {"parallel.tp": 2, "parallel.fsdp": False}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ("hopper", {"parallel.tp": 2}, {}),
        ("nvl72", {"parallel.cp": 2, "parallel.fsdp": False}, {}),
        ("cpu", {"parallel.tp": 2, "parallel.fsdp": False}, {}),
        (
            "hopper",
            {"moe.dispatcher": "hybridep", "parallel.ep": 16},
            {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": "8"},
        ),
        (
            "nvl72",
            {"moe.dispatcher": "hybridep", "parallel.ep": 64},
            {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": "64"},
        ),
        ("hopper", {"backend": "megatron", "parallel.cp": 2}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (
            "hopper",
            {"backend": "megatron", "parallel.tp": 2, "megatron.overlap_expert_parallel": True},
            {"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        ),
        ("hopper", {"backend": "megatron", "parallel.tp": 2, "megatron.data_parallel": "megatron_fsdp"}, {}),
        ("hopper", {"backend": "megatron", "parallel.ep": 4}, {}),
        ("blackwell", {"backend": "megatron", "parallel.tp": 2}, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}),
        ("blackwell", {"backend": "megatron", "megatron.data_parallel": "fsdp2"}, {}),
        ("hopper", {"backend": "megatron", "megatron.offload_modules": ["moe_act"]}, {"NVTE_CPU_OFFLOAD_V1": "1"}),
        ("hopper", {"backend": "megatron", "train.cuda_graphs": ["moe_router"]}, {"NCCL_GRAPH_REGISTER": "0"}),
    ],
)
def test_a_layout_asks_for_its_own_variables(platform, keys, expected):
    config = trainer_config.load(Path(TINY), keys)
    assert environment.variables(config, platform) == expected
    own = slurm.Cluster(platform=platform, environment={"NCCL_NVLS_ENABLE": "1"})
    assert slurm.environment(own, config) == {**slurm.PLATFORMS[platform], **expected, "NCCL_NVLS_ENABLE": "1"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("partitoin: h200\n", "cluster.yaml:1:1: unknown key 'partitoin'; did you mean 'partition'?"),
        ("time: soon\n", "cluster.yaml:1:1: 'time': expected a time such as 90m, 2h, 02:30:00 or 1-00:00:00, found 'soon'"),
        ("time: 0m\n", "a time limit is at least a minute"),
        ("time: 3m\n", "a job is told two to three minutes before its limit; expected at least 5m, found '3m'"),
        ("nodes: 0\n", "cluster.yaml:1:1: 'nodes': input should be greater than 0, found 0"),
        ("platform: hoper\n", "did you mean 'hopper'?"),
        ('partition: "a\\nrm -rf b"\n', "'partition': string should match pattern"),
        ('setup: ["a\\nb"]\n', "string should match pattern"),
        ("environment: {A B: c}\n", "string should match pattern"),
        ("sbatch: {nodes: '3'}\n", "nodes is set from the other keys or from the command line"),
        ("- a\n", "expected a mapping of keys to values, found a list"),
        ("container: {image: nvcr.io/x}\n", "a container holds ranks of `playbook train` alone"),
    ],
)
def test_a_bad_cluster_file_is_one_message(capsys, file, elsewhere, text, says):
    file(text)
    assert says in refused(capsys, *W9)
    assert [p.name for p in elsewhere.iterdir()] == ["cluster.yaml"], "nothing half-written"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (W9, "Slurm's sbatch, srun, squeue is not on PATH"),
        ((*W9, "--cluster", "nowhere.yaml"), "nowhere.yaml:1:1: cannot be read"),
        ((*W9[:-1], "pbs"), "--launcher is 'pbs'; expected one of local, slurm, srun"),
        ((*W9[:-1], "srun"), "--launcher srun runs inside an allocation, and SLURM_JOB_ID is not set here"),
        (("confirm", "--launcher", "slurm", "--job", "12"), "job '12' was not submitted with the results folder"),
        (("confirm", "--launcher", "slurm", "--job", "../1"), "job '../1' was not submitted"),
        (("train", TINY, "--launcher", "slurm", "--job", "12"), "wait for it in the folder that it was submitted from\n"),
        (("confirm", "moe-dispatcher-choise", "--launcher", "slurm"), "card 'moe-dispatcher-choise' is not known; did you mean"),
        ((*W9, "--results", "50%n", "--print"), "50%n' has a character that Slurm does not take as it is in the path of a log"),
        ((*W9, "--results", "a\nrm b #", "--print"), "a\\nrm b #' has a character that Slurm does not take"),
        (("train", TINY, "--launcher", "slurm"), "say --ranks-per-node, or gpus_per_node in the cluster's file"),
        (("train", TINY, "--launcher", "slurm", "--ranks-per-node", "8"), "this configuration cannot run on 8 ranks"),
        (("train", TINY, "parallel.tpp=2", "--launcher", "slurm", "--ranks-per-node", "8"), "unknown key 'tpp'"),
        (("train", TINY, "--launcher", "slurm", "--ranks-per-node", "4"), "Slurm's sbatch, srun, squeue is not on PATH"),
    ],
)
def test_a_mistake_is_one_message_and_nothing_stays_behind(capsys, elsewhere, words, says):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err
    assert list(elsewhere.iterdir()) == []


def test_a_journal_of_the_callers_is_the_one_that_the_job_keeps(capsys, elsewhere):
    own, given = (run(capsys, *W9, "--print", *words)[1] for words in ((), ("--journal", "mine")))
    assert "/jobs/NAME/journal\n" in own
    assert f"--journal {elsewhere / 'mine'} " in given
    assert "/jobs/NAME/journal" not in given


def test_a_job_that_reached_its_time_limit_too_often_says_so(monkeypatch, capsys, tmp_path):
    def cut(*_, **__):
        raise submitit.core.utils.UncompletedJobError("Job not requeued because: timed-out too many times.")

    monkeypatch.setattr(app, "app", cut)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert jobs.Job(["train"], str(tmp_path))() == 5
    said = capsys.readouterr().err
    assert said.startswith("error: the job is given up (Job not requeued because: timed-out too many times.)")
    assert said.count("\n") == 1
    assert json.loads((tmp_path / "result.json").read_text())["exit_code"] == 5


@pytest.fixture
def submitted(elsewhere):
    """The folder of a job with the number 7."""
    folder = elsewhere / ".playbook/results/jobs/confirm-1"
    folder.mkdir(parents=True)
    (folder / "7_submission.sh").touch()
    return folder


def test_waiting_for_a_job_where_there_is_no_slurm_is_one_line(capsys, submitted):
    assert refused(capsys, "confirm", "--launcher", "slurm", "--job", "7").startswith("error: Slurm's squeue is not on PATH")


@pytest.mark.parametrize(
    ("state", "said"),
    [("JobState=NODE_FAIL", " (NODE_FAIL: one of its nodes went away)"), ("JobState=CANCELLED", " (CANCELLED)"), ("gone", "")],
)
def test_how_a_job_without_a_result_ended_is_said(state, said, capsys, elsewhere, submitted, monkeypatch):
    for name, text in (("squeue", "exit 0"), ("scontrol", f"echo 'JobId=7 {state} Reason=None'")):
        script(elsewhere / name, text)
    monkeypatch.setenv("PATH", str(elsewhere), prepend=":")
    monkeypatch.setattr(jobs, "_POLL_S", 0.01)
    code, _, err = run(capsys, "confirm", "--launcher", "slurm", "--job", "7")
    assert (code, err) == (5, f"job 7 ended without a result{said}; its log is {submitted}/7_0_log.out\n")


def test_a_missing_submitit_is_one_line(capsys, elsewhere, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    said = refused(capsys, *W9, "--print")
    assert said == "error: package submitit is not installed; run pip install '.[slurm]' in a clone of Playbook\n"


@pytest.mark.parametrize(
    ("text", "expected"), [("90m", 90), ("2h", 120), ("2:30:00", 150), ("02:30", 150), ("0:00:30", 1), ("1-01:00:00", 1500)]
)
def test_times_are_read_in_minutes(text, expected):
    assert slurm.minutes(text) == expected


def test_a_container_is_an_option_of_srun_and_its_own_python(monkeypatch):
    from playbook_bench.launch.slurm import Allocation

    monkeypatch.setattr(slurm, "allocation", lambda: Allocation("7", ("n1", "n2"), "10.0.0.1"))
    image = slurm.Container(image="nvcr.io/nvidia/pytorch:26.01-py3", mounts=["/shared:/shared", "/data:/data"])
    launcher = slurm.launcher(slurm.Cluster(gpus_per_node=8, container=image), 0)
    words = launcher.step(16, Path("/shared/run"), launcher.command)
    assert "--container-image=nvcr.io/nvidia/pytorch:26.01-py3" in words
    assert "--container-mounts=/shared:/shared,/data:/data" in words
    assert words[-3:] == ["python3", "-m", "playbook_trainer"]
    assert launcher.variables == {"PYTHONPATH": ""}


def test_a_cluster_file_that_ships_with_the_tests_fits_its_schema():
    from jsonschema import Draft202012Validator

    from playbook import yaml_files

    schema = json.loads((repo_root() / "schemas/cluster.schema.json").read_text(encoding="utf-8"))
    assert not list(Draft202012Validator(schema).iter_errors(yaml_files.read(FIXTURES / "cluster.yaml")[0]))
