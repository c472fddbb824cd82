"""The order of runs and what a profile makes of a machine."""

import pytest
from guide_blocks import script

from playbook.errors import ConfigError
from playbook.paths import data_root
from playbook.records.case import Case, load_case
from playbook.records.evidence import Machine
from playbook.records.machine import short_gpu
from playbook_bench.machine import detect, requirements
from playbook_bench.run import schedule
from playbook_bench.variants.resolve import resolve_all
from playbook_trainer.config import tree

TOPOLOGY = """
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tNV18\tNV18\t0-31\t0
GPU1\tNV18\t X \tNV18\tNV18\t0-31\t0
GPU2\tNV18\tNV18\t X \tNV18\t0-31\t0
GPU3\tNV18\tNV18\tNV18\t X \t0-31\t0

Legend:
  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
H200 = ["NVIDIA H200", "143771", "580.1", "700.00"]


LOOKS = [4, 6, 8, 10, 12]


def placed(seed, names=schedule.PAIR):
    return [spec for _, specs in schedule.series(seed, names, LOOKS) for spec in specs]


def test_the_seed_gives_the_order():
    drawn = [[s.variant for s in placed(seed)] for seed in range(20)]
    assert drawn == [[s.variant for s in placed(seed)] for seed in range(20)]
    assert len({tuple(order) for order in drawn}) > 15
    assert {order[0] for order in drawn} == set(schedule.PAIR)


def test_at_each_look_each_variant_was_launched_as_often_and_pairs_are_numbered():
    for seed in range(10):
        order = placed(seed)
        assert len(order) == 24
        for look in LOOKS:
            assert sorted((s.pair, s.variant) for s in order[: 2 * look]) == [(n, v) for n in range(look) for v in schedule.PAIR]
    label = "".join(name for name, _ in schedule.series(3, schedule.PAIR, LOOKS))
    assert label == "".join("AB"[s.variant == "candidate"] for s in placed(3))


def test_blocks_of_a_sweep_hold_each_variant_once():
    names = ["1", "2", "4", "8"]
    found = [specs for _, specs in schedule.series(5, names, LOOKS)]
    assert [{s.variant for s in specs} for specs in found] == [set(names)] * 12
    assert [s.pair for specs in found for s in specs] == [b for b in range(12) for _ in names]
    assert len({tuple(s.variant for s in specs) for specs in found}) > 2, "orders are drawn anew"


@pytest.mark.parametrize(("limit", "last"), [(None, 12), (12, 12), (100, 12), (9, 8), (4, 4), (3, 3), (1, 1)])
def test_a_limit_ends_at_the_last_look_that_it_allows(limit, last):
    assert schedule.last_pair([4, 8, 12], limit) == last


def four():
    return detect.machine_of([H200] * 4, TOPOLOGY, "cpu", 64)


def test_machines_of_one_name_are_told_apart_by_their_gpus(tmp_path, monkeypatch):
    found = []
    for uuid in ("GPU-aa", "GPU-bb"):
        script(tmp_path / "nvidia-smi", f"echo NVIDIA H200, 143771, 580.1, 700.00, {uuid}")
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        found.append(detect.place())
    assert [p[1:] for p in found] == [["GPU-aa"], ["GPU-bb"]]
    assert found[0][0] == found[1][0]
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert detect.place() == found[0][:1]


@pytest.mark.parametrize(
    ("variable", "gpus"),
    [
        (None, "0,1,2,3"),
        ("2,3", "2,3"),
        ("3", "3"),
        ("GPU-c, GPU-d4", "GPU-c,GPU-d4"),
        ("GPU-", ""),  # names more than one
        ("1,7,2", "1"),  # CUDA stops at what is no GPU
        ("1,GPU-c", "1"),
        ("1,-1,2", "1"),
        ("2,2", ""),
        ("", ""),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("MIG-1", ""),
    ],
)
def test_a_machine_has_the_gpus_that_cuda_shows(variable, gpus, tmp_path, monkeypatch):
    """On a shared host the others are other people's."""
    rows = "".join(f"echo '{', '.join(H200)}, GPU-{letter}{i + 1}'\n" for i, letter in enumerate("abcd"))
    matrix = TOPOLOGY.replace("NV18", "PHB", 1)  # the first two GPUs have no link
    script(tmp_path / "nvidia-smi", f"if [ $1 = topo ]; then cat <<'END'\n{matrix}END\nexit; fi\n{rows}")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    machine = detect.detect()
    count = len(gpus.split(",")) if gpus else 0
    assert (machine.gpus, machine.name) == (count, f"h200x{count}" if count else "cpu")
    assert machine.interconnect == {2: "nvlink", 4: "pcie"}.get(count, "none")
    assert ",".join(detect.device_ids(machine)) == gpus
    assert requirements.choose_profile(case("cpu", "h200x1", "h200x2", "h200x4"), machine) == machine.name
    assert detect.visible_devices(machine, machine.name) == {"CUDA_VISIBLE_DEVICES": gpus}
    assert detect.visible_devices(requirements.restrict(machine, "cpu"), "cpu") == {"CUDA_VISIBLE_DEVICES": ""}


def test_a_machine_is_described_by_what_nvidia_smi_says():
    machine = four()
    assert (machine.name, machine.gpus, machine.interconnect) == ("h200x4", 4, "nvlink")
    assert machine.gpu_memory_gib == pytest.approx(140.4)
    assert machine.description == "4 x NVIDIA H200, NVLink"
    assert detect.machine_of([], "", "EPYC", 2).name == "cpu"
    assert detect.interconnect(TOPOLOGY.replace("NV18", "PHB", 1), 4) == "pcie"
    assert detect.interconnect("", 4) == "pcie"


def test_variables_that_steer_the_libraries_belong_to_the_environment():
    """What the harness sets for its caches does not: folders are others for each folder of results."""
    steers = (
        "NCCL_ALGO",
        "TORCH_LOGS",
        "TORCHINDUCTOR_MAX_AUTOTUNE",
        "TORCHDYNAMO_DISABLE",
        "NVSHMEM_SYMMETRIC_SIZE",
        "CUBLAS_WORKSPACE_CONFIG",
    )
    others = (
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TRITON_CACHE_AUTOTUNING",
        "CUDA_VISIBLE_DEVICES",
        "NCCL_API_KEY",
        "HOME",
        "XTORCH_A",
    )
    strict = detect.strict_environment(four(), dict.fromkeys([*steers, *others], "1"))
    assert sorted(strict["env"]) == sorted(steers)


def test_every_launch_keeps_compiled_kernels_and_which_form_of_one_was_fastest(tmp_path):
    """Triton would try the forms anew in every process."""
    for resolved in resolve_all(load_case("recompute-saved-bytes"), "cpu").values():
        settings = resolved.settings(3, tmp_path)
        assert settings["TRITON_CACHE_AUTOTUNING"] == "1"
        assert settings["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


def test_variables_that_a_series_finds_are_told_and_secrets_are_not(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_API_KEY", "secret")
    found = detect.context()["env"]
    assert found["NCCL_ALGO"] == "Ring"
    assert "NCCL_API_KEY" not in found
    assert "PATH" not in found


@pytest.mark.parametrize(
    ("name", "short"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GB200", "gb200"), ("Tesla V100-SXM2", "v100")]
)
def test_short_gpu_names(name, short):
    assert short_gpu(name) == short


def case(*profiles, **fields):
    return Case(id="x", summary="s", profiles={p: {} for p in profiles}, **fields)


@pytest.mark.parametrize(
    ("profiles", "wanted", "chosen"),
    [
        (("cpu", "h200x1", "h200x4"), None, "h200x4"),
        (("cpu", "h200x1", "h200x2"), None, "h200x2"),
        (("cpu", "b200x4"), None, "cpu"),
        (("h200x8",), None, None),
        (("cpu", "h200x4"), "cpu", "cpu"),
        (("h200x4",), "cpu", None),
    ],
)
def test_the_largest_profile_that_fits_is_chosen(profiles, wanted, chosen):
    assert requirements.choose_profile(case(*profiles), four(), wanted) == chosen


def test_a_profile_cuts_the_machine_down():
    assert requirements.restrict(four(), "cpu").gpus == 0
    two = requirements.restrict(four(), "h200x2")
    assert (two.name, two.gpus, two.interconnect) == ("h200x2", 2, "nvlink")
    assert requirements.restrict(four(), "h200x1").interconnect == "none"
    with pytest.raises(ConfigError, match="needs 8 x H200; this machine has 4 x NVIDIA H200"):
        requirements.restrict(four(), "h200x8")


def test_what_is_missing_is_named():
    missing = requirements.unmet_requirements(["yaml", "no_such_package_at_all", "backend:torch", "backend:nothing"])
    assert [m.detail for m in missing] == [
        "package no_such_package_at_all is not installed",
        "backend nothing is not offered by this trainer",
    ]


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Stand-ins for the packages of a megatron machine, which fail when somebody imports them; all but HybridEP's module."""
    for name in ("torch", "transformer_engine", "megatron/core", "deep_ep"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    return tmp_path


def megatron(**overrides):
    path = data_root("configs") / "qwen3_moe_tiny.yaml"
    return tree.load(path, {"backend": "megatron", "parallel.ep": 2, **overrides})


def test_a_backend_and_a_dispatcher_say_which_packages_they_lack(packages):
    assert requirements.unmet_requirements(["backend:megatron", "deep_ep"]) == []
    assert requirements.unmet_by(megatron(**{"moe.dispatcher": "deepep"})) == []
    hybrid = [m.detail for m in requirements.unmet_by(megatron(**{"moe.dispatcher": "hybridep"}))]
    assert hybrid == ["dispatcher hybridep: package deep_ep.hybrid_ep_buffer is not installed"]
    (packages / "deep_ep" / "hybrid_ep_buffer.py").touch()
    assert requirements.unmet_by(megatron(**{"moe.dispatcher": "hybridep"})) == []
    (packages / "transformer_engine" / "__init__.py").unlink()
    (packages / "transformer_engine").rmdir()
    lacking = [m.detail for m in requirements.unmet_by(megatron())]
    assert lacking == ["backend megatron: package transformer_engine is not installed"]
    assert requirements.unmet_by(megatron(**{"megatron.kernels": "local"})) == []
    assert requirements.unmet_by(tree.load(data_root("configs") / "qwen3_moe_tiny.yaml")) == []


def test_a_scope_is_asked_of_the_machine_alone_until_a_configuration_is_known():
    scope = {"gpus": ">=2", "ep": "2..8"}
    machine_only = requirements.unmet_scope(scope, requirements.facts(four()), waive_machine=False)
    assert machine_only == []
    on_cpu = requirements.facts(requirements.restrict(four(), "cpu"))
    assert len(requirements.unmet_scope(scope, on_cpu, waive_machine=False)) == 1
    assert requirements.unmet_scope(scope, on_cpu, waive_machine=True) == []


def pair(**fields):
    base = {
        "id": "x",
        "summary": "s",
        "trainer": "trainer/configs/qwen3_moe_tiny.yaml",
        "profiles": {"cpu": {"ranks": 2, "parallel.ep": 2}},
        "baseline": {"moe.dispatcher": "alltoall"},
        "candidate": {"moe.dispatcher": "allgather"},
    }
    return Case(**{**base, **fields})


def test_variants_differ_in_what_is_declared_and_nothing_else():
    both = resolve_all(pair(), "cpu")
    assert (both["baseline"].config.moe.dispatcher, both["candidate"].config.moe.dispatcher) == ("alltoall", "allgather")
    assert both["baseline"].config.train.device == "cpu"
    assert both["baseline"].sha != both["candidate"].sha
    sneaky = pair(variant_profiles={"cpu": {"candidate": {"train.micro_batch_size": 2}}})
    with pytest.raises(ConfigError, match=r"differ in train\.micro_batch_size"):
        resolve_all(sneaky, "cpu")
    with pytest.raises(ConfigError, match="same run"):
        resolve_all(pair(candidate={"moe.dispatcher": "alltoall"}), "cpu")
    with pytest.raises(ConfigError, match=r"declare delta\.ranks"):
        resolve_all(pair(variant_profiles={"cpu": {"candidate": {"ranks": 4}}}), "cpu")
    with pytest.raises(ConfigError, match="has no profile 'gpu'"):
        resolve_all(pair(), "gpu")


@pytest.mark.parametrize(
    "trainer",
    ["../../etc/passwd", "trainer/configs/../../pyproject.toml", "/etc/passwd", "trainer/configs/none.yaml", "trainer/configs/\0"],
)
def test_a_case_reads_no_file_outside_the_configurations(trainer):
    with pytest.raises(ConfigError):
        resolve_all(pair(trainer=trainer), "cpu")


def test_a_machine_record_names_no_folder_outside_the_results():
    with pytest.raises(ValueError, match="name"):
        Machine(name="../x", description="", gpus=0, cpu="", cores=1)
