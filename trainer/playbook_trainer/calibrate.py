"""What one GPU reaches on the kernels that a training step is made of, and several in collectives, of one machine or of the nodes of a job:
`python -m playbook_trainer.calibrate OUT.json`.

Every row is one kernel at one shape, timed alone with warm caches: an upper bound of what it reaches inside a step. A planner interpolates
between the rows instead of fitting constants to whole runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from playbook.errors import ConfigError
from playbook_trainer.config.environment import GROUPED_GEMM
from playbook_trainer.preflight import Place, joined, meeting, nothing, place, windows

_LINK_BYTES = tuple(1 << power for power in range(16, 31, 2))
"""Bytes of the whole tensor: 64 KiB to 1 GiB."""
_LINK_WINDOW_S = 0.02
_SLOWEST_BYTES_PER_S = 50e9
"""Every rank has to repeat a collective equally often, so the repeats are chosen by its size alone."""


def collective_rows(degree: int, device: str = "cuda", sizes: Sequence[int] = _LINK_BYTES, nodes: int = 1) -> Iterator[dict[str, Any]]:
    """A row for each operation and size between `degree` ranks of this machine, one for each GPU, as if on so many `nodes`: bytes of the
    whole tensor, and seconds of one call.

    An all-gather collects the whole tensor, a reduce-scatter and an all-reduce sum it, an all-to-all sends each rank's own tensor in equal
    parts, and a send carries it from each rank to the next, all at once.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        multiprocessing.spawn(_spawned, (degree, device, tuple(sizes), nodes, str(out)), nprocs=degree)
        yield from json.loads(out.read_text(encoding="utf-8"))


def _spawned(rank: int, degree: int, device: str, sizes: Sequence[int], nodes: int, out: str) -> None:
    """Measure on one rank of this machine; rank 0 writes the rows as JSON to `out`."""
    node, local = divmod(rank, degree // nodes)
    placed = Place(rank, degree, local, str(node))
    with joined(placed, dist.FileStore(f"{out}.store", degree), device):
        measured = job_rows(placed, device, sizes)
        if rank == 0:
            Path(out).write_text(json.dumps(measured), encoding="utf-8")
        dist.barrier()


def job_rows(placed: Place, device: str, sizes: Sequence[int] = _LINK_BYTES) -> list[dict[str, Any]]:
    """Rows of collectives within each node of a job, then between the GPUs of one place on every node, all such groups at once; the seconds
    are the slowest rank's.

    Raises:
        ConfigError: its nodes have different numbers of ranks.
    """
    places: list[tuple[str, int]] = [("", 0)] * placed.ranks
    dist.all_gather_object(places, (placed.host, placed.local))
    rows = list[dict[str, Any]]()
    for key, crosses in ((0, False), (1, True)):
        members: dict[str | int, list[int]] = {}
        for rank, place_ in enumerate(places):
            members.setdefault(place_[key], []).append(rank)
        degrees = {len(ranks) for ranks in members.values()}
        if len(degrees) > 1:
            raise ConfigError(f"nodes with {', '.join(map(str, sorted(degrees)))} ranks; expected equally many: srun --ntasks-per-node=8")
        groups = [(ranks, dist.new_group(ranks)) for ranks in members.values()] if degrees != {1} else []
        for ranks, group in groups:
            if placed.rank in ranks:
                nodes = {"nodes": len(ranks)} if crosses else {}
                rows += [row | nodes for row in _group_rows(ranks.index(placed.rank), ranks, group, device, sizes)]
    return rows


def _group_rows(place_: int, ranks: Sequence[int], group: Any, device: str, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row for each collective of one group at each size."""
    degree = len(ranks)
    for size in sizes:
        whole = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        part = torch.zeros(size // 2 // degree, dtype=torch.bfloat16, device=device)
        whole = whole[: part.numel() * degree]
        ahead, behind = ranks[(place_ + 1) % degree], ranks[(place_ - 1) % degree]
        for name, run in _collectives(ahead, behind, group, whole, part, torch.zeros_like(whole)).items():
            longest = torch.tensor([_collective_seconds(run, size, device == "cuda")], dtype=torch.float64, device=device)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
            yield {"kind": "collective", "operation": name, "ranks": degree, "bytes": size, "seconds": float(longest)}


def _collectives(ahead: int, behind: int, group: Any, whole: Tensor, part: Tensor, other: Tensor) -> dict[str, Callable[[], Any]]:
    def send() -> None:
        sent, taken = dist.P2POp(dist.isend, whole, ahead, group), dist.P2POp(dist.irecv, other, behind, group)
        for request in dist.batch_isend_irecv([sent, taken]):
            request.wait()

    return {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send": send,
    }


def _collective_seconds(run: Callable[[], Any], size: int, cuda: bool) -> float:
    """Median time of one call; on a GPU calls follow one another without waiting for the host."""
    repeats = max(3, min(100, int(_LINK_WINDOW_S * _SLOWEST_BYTES_PER_S / size))) if cuda else 1
    wait = torch.cuda.synchronize if cuda else nothing
    run()
    wait()
    return windows(run, repeats, wait)


SCHEMA = "calibration/1"
_WINDOW_S = 0.012
"""A timed window repeats the kernel for about so long."""
_WINDOWS = 5
"""The median of so many windows is kept."""

TOKENS = (1024, 4096, 16384)
_LINEAR = (  # (in, out) of linear layers between 2 and 8 thousand wide, and of an output head
    (2048, 512), (2048, 4096), (2048, 12288), (2048, 151936), (4096, 4096), (4096, 6144), (4096, 24576), (4096, 128256), (5120, 5120),
    (6144, 2048), (7168, 1536), (7168, 4096), (7168, 36864), (8192, 8192), (8192, 10240), (8192, 57344), (12288, 4096),
)  # fmt: skip
_SMALL_TOKENS = (128, 512, 2048)
EXPERTS = (  # (in, width of an expert, experts on a rank)
    (2048, 768, 16), (2048, 768, 128), (4096, 1536, 16), (7168, 2048, 8), (2880, 2880, 8), (4096, 14336, 2),
)  # fmt: skip
_ROWS_PER_EXPERT = (64, 256, 1024, 4096)
HEADS = ((32, 4, 128), (64, 8, 128), (16, 16, 128), (64, 8, 64))
LENGTHS = (1024, 4096, 16384, 65536)
WIDTHS = (2048, 7168)


def seconds(run: Callable[[], Any]) -> float:
    """Median time of one call on the GPU, in seconds; kernels follow one another without waiting for the host."""
    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    repeats = max(1, min(200, int(_WINDOW_S / max(time.perf_counter() - began, 1e-6))))
    times = []
    for _ in range(_WINDOWS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(times)


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32 if dtype is torch.float32 else torch.bfloat16).to(dtype)


def _row(kind: str, seconds: float, *, flops: float = 0.0, num_bytes: float = 0.0, **shape: Any) -> dict[str, Any]:
    rates = {"flops_per_s": flops / seconds} if flops else {}
    rates |= {"bytes_per_s": num_bytes / seconds} if num_bytes else {}
    return {"kind": kind, **shape, "seconds": seconds, **rates}


def _passes(
    kind: str, run: Callable[[], Tensor], inputs: Sequence[Tensor], grad: Tensor, unit: str, forward: float, backward: float, **shape: Any
) -> list[dict[str, Any]]:
    """A row for the forward pass alone and one for the backward pass, which do so much of `unit`."""
    with torch.no_grad():
        forward_s = seconds(run)
    both_s = seconds(lambda: torch.autograd.grad(run(), inputs, grad))
    return [
        _row(kind, forward_s, phase="forward", **{unit: forward}, **shape),
        _row(kind, both_s - forward_s, phase="backward", **{unit: backward}, **shape),
    ]


def linear() -> Iterator[dict[str, Any]]:
    """Products of linear layers in bfloat16: output, gradient of the input, gradient of the weight."""
    for wide_in, wide_out in _LINEAR:
        for tokens in (*_SMALL_TOKENS, *TOKENS) if wide_out < 100_000 else TOKENS[:2]:
            x, w, g = _normal(tokens, wide_in), _normal(wide_out, wide_in), _normal(tokens, wide_out)
            passes = {"forward": lambda: x @ w.t(), "input_gradient": lambda: g @ w, "weight_gradient": lambda: g.t() @ x}  # noqa: B023
            for name, run in passes.items():
                shape = {"tokens": tokens, "wide_in": wide_in, "wide_out": wide_out}
                yield _row("linear", seconds(run), flops=2.0 * tokens * wide_in * wide_out, phase=name, **shape)


def linear_fp8() -> Iterator[dict[str, Any]]:
    """Products in 8-bit floating point with one scale for each tensor, without the quantisation of the operands."""
    one = torch.ones((), device="cuda")
    for wide_in, wide_out in _LINEAR:
        if wide_out > 100_000:
            continue
        for tokens in TOKENS:
            x, w = _normal(tokens, wide_in, dtype=torch.float8_e4m3fn), _normal(wide_out, wide_in, dtype=torch.float8_e4m3fn)
            run = lambda: torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)  # noqa: B023, E731
            shape = {"tokens": tokens, "wide_in": wide_in, "wide_out": wide_out}
            yield _row("linear_fp8", seconds(run), flops=2.0 * tokens * wide_in * wide_out, phase="forward", **shape)


def grouped() -> Iterator[dict[str, Any]]:
    """One product for all experts of a rank (`torch._grouped_mm`), both layers of a SwiGLU expert, every expert with the same rows."""
    from playbook_trainer.torch.model.decoder import grouped_product

    for (hidden, width, experts), rows in product(EXPERTS, _ROWS_PER_EXPERT):
        total = rows * experts
        ends = torch.arange(rows, total + 1, rows, device="cuda", dtype=torch.int32)
        for wide_in, wide_out in ((hidden, 2 * width), (width, hidden)):
            x = _normal(total, wide_in).requires_grad_()
            w, g = _normal(experts, wide_out, wide_in).requires_grad_(), _normal(total, wide_out)
            shape = {"rows_per_expert": rows, "experts": experts, "wide_in": wide_in, "wide_out": wide_out}
            work = 2.0 * total * wide_in * wide_out
            yield from _passes("grouped", lambda: grouped_product(x, w, ends), (x, w), g, "flops", work, 2 * work, **shape)  # noqa: B023


def _megatron_grouped() -> Iterator[dict[str, Any]]:
    """The same by Transformer Engine's GroupedLinear, as megatron-core calls it;
    the environment chooses cuBLAS or CUTLASS before the process starts.
    """
    from transformer_engine.pytorch import GroupedLinear

    library = "cutlass" if os.environ.get(GROUPED_GEMM) == "1" else "cublas"
    for (hidden, width, experts), rows in product(EXPERTS, _ROWS_PER_EXPERT):
        total, splits = rows * experts, [rows] * experts
        layer = GroupedLinear(experts, hidden, 2 * width, bias=False, params_dtype=torch.bfloat16, device="cuda")
        x, g = _normal(total, hidden).requires_grad_(), _normal(total, 2 * width)
        shape: dict[str, Any] = {
            "library": library,
            "rows_per_expert": rows,
            "experts": experts,
            "wide_in": hidden,
            "wide_out": 2 * width,
        }
        work = 2.0 * total * hidden * 2 * width
        inputs = (x, *layer.parameters())
        yield from _passes("megatron_grouped", lambda: layer(x, splits), inputs, g, "flops", work, 2 * work, **shape)  # noqa: B023


def attention() -> Iterator[dict[str, Any]]:
    """Causal attention of one row, by cuDNN and by flash; half of the square is counted."""
    kernels = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    for (heads, kv_heads, width), length in product(HEADS, LENGTHS):
        q = _normal(1, heads, length, width).requires_grad_()
        k, v = (_normal(1, kv_heads, length, width).requires_grad_() for _ in range(2))
        g = _normal(1, heads, length, width)
        work = 4.0 * heads * length * length * width / 2
        shape = {"length": length, "heads": heads, "kv_heads": kv_heads, "head_dim": width}
        for name, kernel in kernels.items():

            def run() -> Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)  # noqa: B023

            with sdpa_kernel(kernel):
                rows = _passes("attention", run, (q, k, v), g, "flops", work, 2.5 * work, kernel=name, **shape)
            yield from rows


def _elementwise() -> Iterator[dict[str, Any]]:
    """Norms, activation, permutation, copies: bytes that must move, over time."""
    from playbook_trainer.torch.kernels import dense, experts

    for width, tokens in product(WIDTHS, TOKENS):
        x, scale, g = _normal(tokens, width).requires_grad_(), torch.ones(width, device="cuda").requires_grad_(), _normal(tokens, width)
        moved = 2.0 * tokens * width
        shape = {"tokens": tokens, "width": width}
        yield from _passes("norm", lambda: dense.norm(x, scale, 1e-6), (x, scale), g, "num_bytes", 2 * moved, 3 * moved, **shape)  # noqa: B023
        h = _normal(tokens, 2 * width).requires_grad_()
        yield from _passes("swiglu", lambda: dense.swiglu(h), (h,), g, "num_bytes", 3 * moved, 5 * moved, **shape)  # noqa: B023
        yield _row("copy", seconds(x.detach().clone), num_bytes=2 * moved, tokens=tokens, width=width)
        k = 8
        permutation = torch.randperm(tokens * k, device="cuda")
        rows = _normal(tokens * k, width)
        permute = seconds(lambda: experts.spread(x.detach(), permutation, k))  # noqa: B023
        unpermute = seconds(lambda: experts.collect(rows, permutation, None, k))  # noqa: B023
        yield _row("permute", permute, num_bytes=(1 + k) * moved, tokens=tokens, width=width, top_k=k)
        yield _row("unpermute", unpermute, num_bytes=(1 + k) * moved, tokens=tokens, width=width, top_k=k)


def loss() -> Iterator[dict[str, Any]]:
    """Output head, softmax, loss and its gradients, in chunks of rows."""
    from playbook_trainer.axes import Axis
    from playbook_trainer.torch.kernels.dense import fused_rows
    from playbook_trainer.torch.parallel.tensor import CHUNK, linear_cross_entropy

    for (hidden, words), tokens in product(((2048, 151936), (7168, 129280)), TOKENS[1:]):
        x, w = _normal(tokens, hidden).requires_grad_(), _normal(words, hidden).requires_grad_()
        labels = torch.randint(0, words, (tokens,), device="cuda")
        run = lambda: torch.autograd.grad(linear_cross_entropy(x, w, labels, Axis("tp"), CHUNK, fused_rows), (x, w))  # noqa: B023, E731
        yield _row("loss", seconds(run), flops=6.0 * tokens * hidden * words, phase="both", tokens=tokens, hidden=hidden, words=words)


def optimizer() -> Iterator[dict[str, Any]]:
    """One fused AdamW update of 2**28 bfloat16 weights with int16 remainders, bfloat16 gradients, and moments in float32,
    then in bfloat16.
    """
    from playbook_trainer.torch.kernels import adamw

    group = {"betas": (0.9, 0.95), "eps": 1e-8, "lr": 1e-4, "weight_decay": 0.1}
    count, scale = 1 << 28, adamw.no_scale(torch.device("cuda"))
    for moments_dtype in (torch.float32, torch.bfloat16):
        m, v, g = (torch.zeros(count, device="cuda", dtype=t) for t in (moments_dtype, moments_dtype, torch.bfloat16))
        p, remainder = torch.zeros(count, device="cuda", dtype=torch.bfloat16), torch.zeros(count, device="cuda", dtype=torch.int16)
        num_bytes = count * (2 + 2 * (2 * m.element_size() + 4))
        update_s = seconds(lambda: adamw.update(p, g, m, v, scale, group, 1, remainder))  # noqa: B023
        yield _row("optimizer", update_s, num_bytes=num_bytes, values=count, moments=str(moments_dtype).removeprefix("torch."))


def host() -> Iterator[dict[str, Any]]:
    """Host time of one operator launched from Python, in seconds, and host-device copies."""
    x = torch.zeros(16, device="cuda")
    torch.cuda.synchronize()
    for _ in range(2):
        began = time.perf_counter()
        for _ in range(2000):
            x.add_(1.0)
        issued = (time.perf_counter() - began) / 2000
        torch.cuda.synchronize()
    yield _row("host_launch", issued, operator="add_")
    pinned, device = torch.zeros(1 << 28, dtype=torch.uint8).pin_memory(), torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    yield _row("host_to_device", seconds(lambda: device.copy_(pinned, non_blocking=True)), num_bytes=1 << 28)
    yield _row("device_to_host", seconds(lambda: pinned.copy_(device, non_blocking=True)), num_bytes=1 << 28)


def between() -> Iterator[dict[str, Any]]:
    """Collectives between all GPUs of this machine, where it has several, and between two of them."""
    count = torch.cuda.device_count()
    if count < 2:
        raise RuntimeError("collectives need two GPUs")
    for degree in sorted({2, count}):
        yield from collective_rows(degree)


FAMILIES: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "host": host, "elementwise": _elementwise, "optimizer": optimizer, "attention": attention, "loss": loss, "grouped": grouped,
    "linear": linear, "linear_fp8": linear_fp8, "megatron_grouped": _megatron_grouped, "collectives": between,
}  # fmt: skip


def measure(names: Sequence[str], budget_s: float) -> dict[str, Any]:
    """Rows of the named families, as many as the seconds hold; a family that cannot run here, or is cut, says why under `missing`."""
    began, rows, missing = time.monotonic(), list[dict[str, Any]](), dict[str, str]()
    for name in names:
        try:
            for row in FAMILIES[name]():
                rows.append({k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()})
                if time.monotonic() - began > budget_s:
                    raise TimeoutError(f"cut after {budget_s:g} s")
        except (ImportError, RuntimeError, TimeoutError, AttributeError, ValueError, TypeError) as e:
            missing[name] = f"{type(e).__name__}: {str(e).splitlines()[0][:300]}"
        torch.cuda.empty_cache()
        print(f"[{time.monotonic() - began:4.0f} s] {name}: {missing.get(name, 'done')}", file=sys.stderr, flush=True)  # noqa: T201
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": {"name": properties.name, "memory_bytes": properties.total_memory, "processors": properties.multi_processor_count},
        "packages": {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()} | _versions(),
        "host": {"python": platform.python_version()},
        "rows": rows,
        "missing": missing,
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in ("triton", "transformer-engine", "megatron-core"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument(
        "--only", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES), help="families of kernels; all of them, if not given"
    )
    parser.add_argument("--budget", type=float, default=300.0, help="seconds")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU to calibrate on; torch finds no CUDA device", file=sys.stderr)  # noqa: T201
        return 2
    placed = place(os.environ)
    found = measure(arguments.only, arguments.budget) if placed is None else _measure_job(placed, arguments.only, arguments.budget)
    if found is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _measure_job(placed: Place, names: Sequence[str], budget_s: float) -> dict[str, Any] | None:
    """At rank 0 of a job what its own GPU reaches, while the others wait, and what collectives take within and between nodes; None at the
    others.
    """
    with joined(placed, meeting(placed), "cuda"):
        found = measure([n for n in names if n != "collectives"], budget_s) if placed.rank == 0 else None
        dist.all_reduce(torch.zeros(1))  # the others wait on the CPU
        links = job_rows(placed, "cuda") if "collectives" in names else []
        return found | {"rows": [*found["rows"], *links]} if found is not None else None


if __name__ == "__main__":
    sys.exit(main())
