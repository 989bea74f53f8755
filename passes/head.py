"""The last layer of a velocity, for the gate that predicts the gradient's error from it (`jagg_fx.gates.discrepancy`).

Assumes: the nodes of one velocity call in a captured forward graph. Finds the last operation with a weight on the way
to the velocity, and the tail from there on as a graph of its own: tail(h, W, ...) = velocity, linear in h and in W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from jagg_fx import _torch
from jagg_fx.errors import RefusedError

from .segments import Segment, example

# Where an operation with weights takes them. By name: Dynamo records functions and methods.
_WEIGHTED = {"linear": 1, "conv1d": 1, "conv2d": 1, "conv3d": 1, "matmul": 1, "mm": 1, "bmm": 1, "addmm": 2}
# Operations after it that are linear in one tensor, whose other inputs do not come from the call's own values.
_LINEAR = {"add", "sub", "mul", "truediv", "neg", "to", "float", "double", "half", "bfloat16", "type", "contiguous"}
_LINEAR |= {"view", "reshape", "permute", "transpose", "t", "flatten", "unflatten", "unsqueeze", "squeeze", "expand"}
_LINEAR |= {
    "chunk",
    "split",
    "getitem",
    "narrow",
    "select",
    "movedim",
    "clone",
    "iadd",
    "swapaxes",
    "einsum",
    "type_as",
}


@dataclass
class Head:
    """hidden: the input of the last layer, a node of the call or one of its inputs. operands: W, then the rest."""

    hidden: fx.Node
    operands: list[fx.Node]
    tail: fx.GraphModule


def find(segment: Segment, velocity: fx.Node) -> Head:
    """The head of one call. Raises RefusedError where its last layer cannot be told."""
    inside = set(segment.nodes)
    tail: list[fx.Node] = []
    node = velocity
    while True:
        tail.insert(0, node)
        at = _WEIGHTED.get(_name(node))
        tensors = [i for i in node.all_input_nodes if isinstance(example(i), (torch.Tensor, tuple, list))]
        if at is not None and len(node.args) > at and node.args[at] not in inside:
            hidden, weight = node.args[at - 1], node.args[at]
            break
        own = [i for i in tensors if i in inside]
        if _name(node) not in _LINEAR or len(own) != 1:
            raise RefusedError(
                f"gate='head' needs the last layer of the velocity (a linear map or convolution with its weight); on "
                f"the way to it from the output of the call at {segment.where} stands {_name(node)}, which cannot be "
                "passed. Use gate='cosine' or gate=None."
            )
        node = own[0]
    assert isinstance(hidden, fx.Node)
    assert isinstance(weight, fx.Node)
    rest = [i for n in tail for i in n.all_input_nodes if i not in tail and i not in (hidden, weight)]
    rest = list(dict.fromkeys(rest))
    return Head(hidden, [weight, *rest], _graph(tail, [hidden, weight, *rest], velocity))


def _name(node: fx.Node) -> str:
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return target.strip("_")


def _graph(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], result: fx.Node) -> fx.GraphModule:
    graph = fx.Graph()
    env = {n: graph.placeholder(f"x{i}") for i, n in enumerate(inputs)}
    for n in nodes:
        env[n] = graph.node_copy(n, lambda x: env[x])
    graph.output(env[result])
    return _torch.graph_module(torch.nn.Module(), graph)
