"""Keep the value of an input that the loss changes in place: a buffer refilled with copy_ before each call, say.

Assumes: a captured forward graph whose calls were outlined. Leaves: calls that read a copy of such an input, made
just before the call. A call keeps its inputs for its backward, and a shut gate runs its forward once more: both
need the value that the call saw. Inputs with gradient are left to autograd, which refuses the change.
"""

from __future__ import annotations

import torch
from torch import fx

from .joint import is_region
from .refuse import storage, storages_written
from .segments import carries_gradient, example


def run(gm: fx.GraphModule) -> None:
    changed = storages_written(gm.graph.nodes)
    inputs = [
        ((call.args[0].target, position), call, operand)
        for call in gm.graph.nodes
        if is_region(call)
        for position, operand in enumerate(call.args)
        if isinstance(operand, fx.Node) and not carries_gradient(operand)
    ]
    # A copy is dense, whatever its original was: all calls of one body get one, as the body is traced for one layout.
    copied = {place for place, _, operand in inputs if storage(example(operand)) in changed}
    for place, call, operand in inputs:
        if place in copied:
            call.update_arg(place[1], _copy(gm.graph, call, operand))
    gm.recompile()


def _copy(graph: fx.Graph, call: fx.Node, operand: fx.Node) -> fx.Node:
    with graph.inserting_before(call):
        copy = graph.call_function(torch.clone, (operand,))
    copy.meta = {"example_value": torch.empty_like(example(operand))}
    return copy
