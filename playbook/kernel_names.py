"""What names of kernels and operators say, for traces of either tool and for the trainer's receipt alike."""

from __future__ import annotations

import re

COMMUNICATION = re.compile(r"nccl|gloo|c10d|deep_ep|deepep|hybrid_ep|nvshmem|multimem", re.IGNORECASE)
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
        re.compile(r"flash|fmha|fused_attn|sdpa|attention|compute_dot_do_o|convert_dq|qkv_tma", re.IGNORECASE),
    ),
    (
        "grouped products",
        re.compile(r"group(ed)?_?(problem|gemm|mm|kernel)|gemm_?grouped|moe_?gemm|grouped_mm|GroupProblem", re.IGNORECASE),
    ),
    (
        "products",
        re.compile(
            r"gemm|gemv|nvjet|cutlass|cublas|matmul|xmma|cijk_|wgrad|dgrad|conv2d|conv3d|(^|::|_)(add|b|badd)?mm(_|$)|scaled_mm",
            re.IGNORECASE,
        ),
    ),
    (
        "elementwise",
        re.compile(
            r"elementwise|norm|reduce|softmax|copy|cat_|Cat[A-Z]|triton_(poi|red|per|for|tem)|multi_tensor|adam|sgd|rope|rotary|rotate|permute|sort|scan|cub::"
            r"|gather|scatter|index|embedding|dropout|cast|transpose|cross_entropy|topk|router|fill|cumsum|unique|where|silu|swiglu|gelu|relu|sigmoid"
            r"|quantiz|padding|aten::|element_mul|scal_kernel|row_id_map|chunk|grad_weight|segment|spread|offset|^_(collect|choose|gradient|stats|weighted|turn)",
            re.IGNORECASE,
        ),
    ),
)
"""Classes of device work by name, the first that fits. Products keep the tensor cores busy; elementwise work (and reductions, sorts, optimizer) moves memory."""
OTHER = "other"


def collective(name: str) -> str:
    """The kind of a collective's kernel by its name without arguments; `OTHER` where no pattern knows it."""
    bare = name.split("(", 1)[0]
    return next((kind for kind, pattern in _COLLECTIVES if pattern.search(bare)), OTHER)


def kernel_class(name: str) -> str:
    """The class of a kernel or operator by its name without arguments; `OTHER` where no pattern knows it."""
    bare = name.replace("(anonymous namespace)", "").split("(", 1)[0]
    return next((kind for kind, pattern in CLASSES if pattern.search(bare)), OTHER)
