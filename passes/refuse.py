"""Refuse what a velocity may not do: draw random numbers, or change a buffer or an input in place.

Looks at the captured forward graph, before the calls are outlined.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from jagg_fx import _torch
from jagg_fx.errors import RefusedError

from .segments import Segment, example, where

_RANDOM = {"rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randperm"}
_RANDOM |= {
    "bernoulli",
    "multinomial",
    "normal",
    "poisson",
    "rrelu",
    "alpha_dropout",
    "feature_alpha_dropout",
    "gumbel_softmax",
    # as methods that fill a tensor
    "uniform",
    "exponential",
    "cauchy",
    "log_normal",
    "geometric",
    "random",
}


_IN_PLACE = re.compile(r"[a-z0-9_]*[a-z0-9]_|setitem|__i\w+__|i(add|sub|mul|truediv|floordiv|pow|and|or|xor)")


def run(gm: fx.GraphModule, segments: Sequence[Segment]) -> None:
    """Raise RefusedError, naming the operation, the module and the line, for the first unsafe operation."""
    for segment in segments:
        if any(node.kwargs.get("use_reentrant") for node in segment.outputs()):
            raise RefusedError(
                f"The velocity call at {segment.where} stands in a reentrant checkpoint. That has no gradient in eager "
                "mode unless an input carries one, and cannot be captured as a call. Say checkpoint(..., "
                "use_reentrant=False)."
            )
        outside = {storage(example(n)) for n in segment.inputs()} - {None}
        for node, foreign in _with_bodies(gm, segment.nodes, outside):
            found = _random(node) or _changes(node, foreign)
            if found:
                reason, cure = found
                raise RefusedError(
                    f"{reason} in {_module(node)} ({where(node, inner=True)}), inside the velocity call at "
                    f"{segment.where}. The calls of a group stand in for each other, and a shut gate runs a forward "
                    f"again: both need a velocity that depends on its inputs alone and changes nothing. {cure}"
                )


def _with_bodies(gm: fx.GraphModule, nodes: Sequence[fx.Node], outside: set):
    """Every node, and those in the bodies of higher-order operators (checkpointing), with what is outside the call.

    outside: storages that the velocity call did not make. A body has stand-ins for them, its own inputs.
    """
    for node in nodes:
        yield node, outside
        for arg in node.all_input_nodes:
            body = getattr(gm, str(arg.target), None) if arg.op == "get_attr" else None
            if isinstance(body, fx.GraphModule):
                inputs = body.graph.find_nodes(op="placeholder")
                given = pytree.arg_tree_leaves(*node.args)[-len(inputs) :]
                inside = {
                    storage(example(i))
                    for i, x in zip(inputs, given, strict=False)
                    if isinstance(x, fx.Node) and storage(example(x)) in outside
                }
                yield from _with_bodies(body, list(body.graph.nodes), outside | inside - {None})


_NO_CHANGE = "Use net.eval() or another layer (GroupNorm, LayerNorm); write on a clone, or outside of the loss."
_NO_NOISE = "Use net.eval(); or draw once, before the loop, and pass the same numbers to every call."
_NO_DROPOUT = "Use net.eval(), or set the dropout to 0."


def _random(node: fx.Node) -> tuple[str, str] | None:
    """What an operation draws, and what to do about it."""
    if node.op not in ("call_function", "call_method"):
        return None
    name = _name(node)
    base = name.split(".")[0].rstrip("_")
    named: dict = {**dict(enumerate(node.args)), **node.kwargs}
    if "dropout" in base:
        if named.get("training", named.get(2, True)) and named.get("p", named.get(1, 0.5)):
            return f"Dropout ({base}) is active", _NO_DROPOUT
        return None
    if base == "scaled_dot_product_attention" and named.get("dropout_p", named.get(4, 0.0)):
        return "Dropout of attention is active", _NO_DROPOUT
    if base == "rrelu" and not named.get("training", named.get(3, False)):
        return None
    if base in _RANDOM or _torch.is_random(node.target):
        return f"Random numbers are drawn ({base})", _NO_NOISE
    return None


def _changes(node: fx.Node, outside: set) -> tuple[str, str] | None:
    """What an operation changes that its call did not make, and what to do about it."""
    name = _name(node)
    named: dict = {**dict(enumerate(node.args)), **node.kwargs}
    if name == "batch_norm" and named.get("training", named.get(5, False)) and named.get(1) is not None:
        return "Batch normalisation is in train mode (it changes its running statistics)", _NO_CHANGE
    for arg in written(node):
        if storage(example(arg)) in outside:
            return f"{_what(arg)} is changed in place ({name})", _NO_CHANGE
    return None


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node of a captured forward graph changes in place."""
    named: dict = {**dict(enumerate(node.args)), **node.kwargs}
    changed: list = []
    if _IN_PLACE.fullmatch(_name(node)):
        changed.append(named.get(0))
    changed += [named.get(i) for i in _torch.mutated_arguments(node.target)]
    changed.append(node.kwargs.get("out"))
    return [x for x in changed if isinstance(x, fx.Node)]


def storages_written(nodes: Iterable[fx.Node]) -> set:
    """The storages that these nodes change in place."""
    return {storage(example(n)) for node in nodes for n in written(node)} - {None}


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _what(node: fx.Node) -> str:
    shape = tuple(example(node).shape)
    found = re.search(r"buffers_([A-Za-z0-9_]+?)_?$", node.name)
    return f"The buffer {found[1]} of shape {shape}" if found else f"An input of shape {shape} ({node.name})"


def storage(value) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _module(node: fx.Node) -> str:
    """Name of the innermost module that an operation belongs to."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return "a function"
    path, kind = next(reversed(stack.values()))
    name = re.split(r"cell_contents|__self__|\[.*?\]", path)[-1].strip(".")
    kind = getattr(kind, "__name__", str(kind).rsplit(".", 1)[-1])
    return f"{name} ({kind})" if name else kind
