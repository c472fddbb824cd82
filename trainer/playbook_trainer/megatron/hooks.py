"""Ranges of megatron-core's passes and layers, by hooks on its modules: embedding, decoder, attention, mlp, router, dispatch, experts,
combine, loss, backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from playbook_trainer.observe.ranges import range_, tally

_DISPATCHER = {
    "dispatch_preprocess": "dispatch",
    "token_dispatch": "dispatch",
    "dispatch_postprocess": "dispatch",
    "combine_preprocess": "combine",
    "token_combine": "combine",
    "combine_postprocess": "combine",
}
"""Methods of a token dispatcher. Source: megatron-core, `megatron/core/transformer/moe/token_dispatcher.py`."""


@contextmanager
def announced(model: nn.Module) -> Iterator[None]:
    """Inside this block, the model's layers announce their ranges."""
    with ExitStack() as stack:
        _wrap(stack, schedules, "backward_step", "backward", marks=False)
        _tally_products(stack)
        for module in model.modules():
            if hasattr(module, "compute_language_model_loss"):
                # What leaves a stage must be a tensor of its own, so nothing is marked there.
                for layers in filter(None, (module.decoder, getattr(module, "mtp", None))):
                    _hook(stack, layers, "decoder", marks=bool(module.post_process))
                if hasattr(module, "embedding"):
                    _announce_lookup(stack, module)
                if module.post_process:
                    _announce_loss(stack, module)
            elif isinstance(module, Attention):
                _hook(stack, module, "attention")
            elif isinstance(module, TransformerLayer) and isinstance(module.mlp, MLP):
                _hook(stack, module.mlp, "mlp")
            elif isinstance(module, MoELayer):
                _hook(stack, module.router, "router")
                _hook(stack, module.experts, "experts")
                for method, name in _DISPATCHER.items():
                    _wrap(stack, module.token_dispatcher, method, name)
        yield


def _tally_products(stack: ExitStack) -> None:
    """Count the router's float32 products where Transformer Engine makes them: no operator of torch tells of those."""
    product = getattr(moe_utils, "te_general_gemm", None)
    if product is None:
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        out = product(*args, **kwargs)
        if out[0].dtype == torch.float32:
            tally("float32_products")
        return out

    _replace(stack, moe_utils, "te_general_gemm", call)


def _announce_lookup(stack: ExitStack, model: Any) -> None:
    """The first lookup of a forward pass; those of prediction layers come later, inside of these:
    one gradient is added for all, behind the first.
    """
    waiting, opened = list[range_](), list[range_]()

    def begin(*_: Any) -> None:
        waiting[:] = [range_("embedding")]

    def before(lookup: Any, _: Any) -> None:
        if waiting:
            opened.append(waiting.pop().__enter__())
            # Read in the forward pass, where FSDP has put the gathered weight in place.
            opened[0].until(lookup.weight)

    def after(_: nn.Module, args: Any, out: Any) -> Any:
        if not opened:
            return out
        span = opened.pop()
        marked = _on_first(out, span.exit)
        span.__exit__(None, None, None)
        return marked

    lookup = model.embedding.word_embeddings
    stack.callback(model.register_forward_pre_hook(begin).remove)
    stack.callback(lookup.register_forward_pre_hook(before).remove)
    stack.callback(lookup.register_forward_hook(after, always_call=True).remove)


def _announce_loss(stack: ExitStack, model: Any) -> None:
    """The head's product and the loss of its logits, each a range of the forward pass;
    one in the backward pass, since nothing may be marked between.

    The loss's backward pass writes its gradient over what it has kept of the logits, which autograd refuses of a tensor that was marked.
    """
    compute, entered = model.compute_language_model_loss, list[range_]()

    def head(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        entered[:] = [range_("loss").__enter__()]
        return _on_first(args, entered[0].enter), kwargs

    def after_head(*_: Any) -> None:
        entered[0].__exit__(None, None, None)

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        with range_("loss"):
            out = compute(*args, **kwargs)
        return entered.pop().exit(out) if entered else out

    stack.callback(model.output_layer.register_forward_pre_hook(head, with_kwargs=True).remove)
    stack.callback(model.output_layer.register_forward_hook(after_head, always_call=True).remove)
    _replace(stack, model, "compute_language_model_loss", loss)


def _hook(stack: ExitStack, module: nn.Module, name: str, *, marks: bool = True) -> None:
    """Open the range `name` around each call of `module`; `marks` also follows it through the backward pass."""
    opened: list[range_] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        span = range_(name).__enter__()
        opened.append(span)
        hidden = kwargs.get("hidden_states")  # as the decoder is given its input
        if marks and isinstance(hidden, Tensor):
            return args, {**kwargs, "hidden_states": span.enter(hidden)}
        return _on_first(args, span.enter) if marks else args, kwargs

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        span = opened.pop()
        marked = _on_first(out, span.exit) if marks else out
        span.__exit__(None, None, None)
        return marked

    for handle in (
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True, always_call=True),
    ):
        stack.callback(handle.remove)


def _wrap(stack: ExitStack, owner: Any, method: str, name: str, *, marks: bool = True) -> None:
    original = getattr(owner, method, None)
    if original is None:
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        with range_(name) as span:
            if not marks:
                return original(*args, **kwargs)
            return _on_first(original(*_on_first(args, span.enter), **kwargs), span.exit)

    _replace(stack, owner, method, call)


def _replace(stack: ExitStack, owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Until the stack closes; a method of the owner's class is the class's own again then."""
    instance_attribute = vars(owner).get(name)
    setattr(owner, name, function)
    stack.callback(*(setattr, owner, name, instance_attribute) if instance_attribute is not None else (delattr, owner, name))


def _on_first(values: Any, mark: Callable[[Tensor], Tensor]) -> Any:
    """The values with the first of them marked, if it is a tensor."""
    if isinstance(values, Tensor):
        return mark(values)
    if isinstance(values, tuple) and values and isinstance(values[0], Tensor):
        return (mark(values[0]), *values[1:])
    return values
