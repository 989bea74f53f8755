"""Check the regions that a user made (torch.compiler.nested_compile_region).

Dynamo (seen in torch 2.13) compares shapes and guards before it lets a call reuse the body of an earlier one, but
neither the grad mode, nor autocast, nor which inputs require grad: a reference call under no_grad and a call with
gradient would share a body without gradient.
"""

from __future__ import annotations

import torch
from torch import fx

from jagg_fx.errors import RefusedError

from .joint import is_region
from .segments import example
from .segments import where as where_in_loss


def contexts(graph: fx.Graph) -> dict[fx.Node, tuple]:
    """Grad mode and autocast around every node of a captured forward graph."""
    found: dict[fx.Node, tuple] = {}
    grad: object = None
    autocast: list[str] = []
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name == "_set_grad_enabled":
            grad = node.args[0]
        elif name == "_enter_autocast":
            autocast.append(repr(node.args))
        elif name == "_exit_autocast":
            autocast.pop()
        found[node] = (grad in (None, True), tuple(autocast))
    return found


def run(gm: fx.GraphModule) -> None:
    """Raise RefusedError for inference mode, and if two calls of one region differ in grad mode, autocast or flags."""
    looks: dict[object, set] = {}
    where = contexts(gm.graph)
    for node in gm.graph.nodes:
        if getattr(node.target, "__name__", "") == "_enter_inference_mode":
            after = [n for n in gm.graph.nodes if n > node and n.meta.get("stack_trace")]
            place = f" (before {where_in_loss(after[0])})" if after else ""
            raise RefusedError(
                f"The loss enters torch.inference_mode{place}. Tensors made in it cannot be part of a "
                "gradient, and a trace that fails inside of it would leave it on. Use torch.no_grad() in its place."
            )
        if is_region(node):
            flags = tuple(isinstance(v := example(n), torch.Tensor) and v.requires_grad for n in node.args[2:])
            looks.setdefault(node.args[0].target, set()).add((where[node], flags))
    for target, found in looks.items():
        if len(found) > 1:
            raise RefusedError(
                f"Calls of one nested compile region ({target}) differ in grad mode, autocast or in which inputs "
                "require grad, and torch gave them one body: the gradient would be wrong. Take torch.compiler."
                "nested_compile_region off this function; calls are found and compiled once without it."
            )
