"""Kernels in traces of either tool and in the trainer's receipt: what their names say, and arithmetic on the intervals that they run in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

COMMUNICATION = re.compile(
    r"nccl|rccl(?!r)|mscclKernel|gloo|c10d|deep_ep|deepep|hybrid_ep|nvshmem|multimem|cross_device_reduce|(one|two)_?shot_?all_?reduce",
    re.IGNORECASE,
)
"""Libraries that send: those of collectives, and those of experts' exchanges, whose kernels lie below namespaces of their own."""

_COLLECTIVES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("all-to-all", re.compile(r"all_?to_?all|dispatch|combine", re.IGNORECASE)),
    ("all-gather", re.compile(r"all_?gather", re.IGNORECASE)),
    ("reduce-scatter", re.compile(r"reduce_?scatter", re.IGNORECASE)),
    ("all-reduce", re.compile(r"all_?reduce", re.IGNORECASE)),
    ("send-recv", re.compile(r"send_?recv|isend|irecv", re.IGNORECASE)),
)
"""Kinds of collectives by name, the first that fits; NCCL's kernel for an all-to-all is the one that sends and receives pairs."""


CLASSES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("collectives", COMMUNICATION),
    ("copies", re.compile(r"^(memcpy|memset)\b", re.IGNORECASE)),
    (
        "attention",
        re.compile(
            r"flash|fmha|fused_attn|sdpa|attention|compute_dot_do_o|convert_dq|qkv_tma|(^|_)attn_(fwd|bwd)|^bwd_(kernel_(dk_dv|dq|fuse)"
            r"|(pre|post)process)",
            re.IGNORECASE,
        ),
    ),
    (
        "grouped products",
        re.compile(r"group(ed)?_?(problem|gemm|mm|kernel)|gemm_?grouped|moe_?gemm|grouped_mm|GroupProblem", re.IGNORECASE),
    ),
    (
        "products",
        re.compile(
            r"gemm|gemv|nvjet|cutlass|cublas|matmul|xmma|cijk_|wgrad|dgrad|conv2d|conv3d|(^|::|_)(add|b|badd)?mm(_|$)|scaled_mm"
            r"|scudnn|[hsi](884|1688|16816)|convol|winograd|naive_conv|gridwise_conv|miopen\w*conv|wvsplitk",
            re.IGNORECASE,
        ),
    ),
    (
        "elementwise",
        re.compile(
            r"elementwise|norm|reduce|softmax|copy|cat_|Cat[A-Z]|triton_(poi|red|per|for|tem)|multi_tensor|adam|sgd|rope|rotary|rotate"
            r"|permute|sort|scan|cub::"
            r"|gather|scatter|index|embedding|dropout|cast|transpose|cross_entropy|topk|router|fill|cumsum|unique|where|silu|swiglu"
            r"|gelu|relu|sigmoid"
            r"|quantiz|padding|aten::|element_mul|scal_kernel|row_id_map|chunk|grad_weight|segment|spread|offset|(^|::)bn_(fw|bw)|pool"
            r"|nchw|nhwc|im2(d2)?col|col2im|miopen|tensorop|op[1-5]d?tensor|upsample|conv1d|conv_depthwise|fft|^_(collect|choose"
            r"|gradient|stats|weighted|turn)",
            re.IGNORECASE,
        ),
    ),
)
"""Classes of device work by name, the first that fits. Products keep the tensor cores busy; elementwise work (and reductions, sorts,
optimizer) moves memory."""
OTHER = "other"


_ATEN = "at::native::"


def _path(name: str) -> str:
    """A name without its arguments: up to the first bracket outside its template parameters, in which casts such as `(int)4` may stand."""
    depth = 0
    text = name.replace("(anonymous namespace)", "")
    for i, c in enumerate(text):
        if c == "(" and depth <= 0 and i:
            return text[:i]
        depth += (c == "<") - (c == ">")
    return text


@lru_cache(maxsize=1 << 16)
def communicates(name: str) -> bool:
    """Whether a kernel or operator sends, by its name without arguments."""
    return bool(COMMUNICATION.search(_path(name)))


@lru_cache(maxsize=1 << 16)
def collective(name: str) -> str:
    """The kind of a collective's kernel by its name without arguments; `OTHER` where no pattern knows it."""
    path = _path(name)
    return next((kind for kind, pattern in _COLLECTIVES if pattern.search(path)), OTHER)


@lru_cache(maxsize=1 << 16)
def kernel_class(name: str) -> str:
    """The class of a kernel or operator by its name without arguments; `OTHER` where no pattern knows it.

    PyTorch's own kernels are known by what stands before their template parameters, which name operators of any class.
    """
    path = _path(name)
    outer = path.partition("<")[0]
    texts = [outer, path] if _ATEN in outer else [path]
    return next((kind for text in texts for kind, pattern in CLASSES if pattern.search(text)), OTHER)


T = TypeVar("T", int, float)

Interval = tuple[int, int]


def union(intervals: Iterable[tuple[T, T]]) -> list[tuple[T, T]]:
    """The intervals merged, sorted and without overlap."""
    out: list[tuple[T, T]] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if out and start <= out[-1][1]:
            if end > out[-1][1]:
                out[-1] = (out[-1][0], end)
        else:
            out.append((start, end))
    return out


def length(intervals: Iterable[tuple[T, T]]) -> T:
    """Total length of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def subtract(a: Sequence[tuple[T, T]], b: Sequence[tuple[T, T]]) -> list[tuple[T, T]]:
    """What of `a` lies outside `b`; both sorted and without overlap."""
    out: list[tuple[T, T]] = []
    i = 0
    for start, end in a:
        while i < len(b) and b[i][1] <= start:
            i += 1
        at, j = start, i
        while j < len(b) and b[j][0] < end:
            if b[j][0] > at:
                out.append((at, b[j][0]))
            at = max(at, b[j][1])
            j += 1
        if at < end:
            out.append((at, end))
    return out
