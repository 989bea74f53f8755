"""The rewrite, as a list of passes over the joint forward-backward graph. Read the list and you know the method.

Each pass is a function `run(joint)` in a file of its own, says in its docstring what it assumes and what it leaves,
and is followed by the verifier, unless it returns False: it had nothing to do. `segments`, `outline`, `deal`, `batch`
and `keep` work before them, on the captured forward graph: they turn the velocity calls into calls of one shared body.
"""

from __future__ import annotations

import torch
from torch import fx

from jagg_fx.plan import Plan

from . import (
    accumulate,
    again,
    batch,
    branch,
    control,
    find,
    gate,
    group,
    isolate,
    known,
    merge,
    prune,
    settle,
    slim,
    whole,
)
from .joint import Joint, copied, is_call, subgraph, view_chain
from .verify import verify

PASSES = (
    find.run,  # the velocity calls, their times, their cotangents
    group.run,  # W consecutive timesteps each; lambda from the times
    gate.run,  # may this group be approximated?
    control.run,  # with tol: which steps keep their backward?
    merge.run,  # its cotangents, summed into the two endpoints
    isolate.run,  # for a part of a gradient: without what did not come through the groups
    branch.run,  # gated groups: both ways behind the gate
    prune.run,  # the backward of every interior timestep goes
    known.run,  # its forward too, where the caller has its velocity
    slim.run,  # and with it what its forward kept for it
    again.run,  # forwards done again, rather than kept, where memory is wanted more than time
    accumulate.run,  # gradients added up where they are made
    whole.run,  # groups one after the other, for the same
    settle.run,  # no operator of ours is left
)


def rewrite(gm: fx.GraphModule, plan: Plan, watch=None, tails=None) -> Joint | None:
    """Rewrite a joint graph in place. Returns None where there is nothing of ours in it.

    watch, if given, is called with the name of each pass and the state after it.
    """
    if not gm.graph.find_nodes(op="call_function", target=torch.ops.jagg_fx.call.default):
        return None
    joint = Joint(gm, plan, tails=tails or {})
    _apply(joint, PASSES, watch)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return joint


def prepare(gm: fx.GraphModule, plan: Plan, tails=None) -> Joint:
    """Only the passes that add: exact backwards stay, merged cotangents stand beside them (for the audit)."""
    joint = Joint(gm, plan, tails=tails or {})
    _apply(joint, PASSES[: PASSES.index(merge.run) + 1])
    gm.recompile()
    return joint


def _apply(joint: Joint, passes, watch=None) -> None:
    for run in passes:
        name = run.__module__.rsplit(".", 1)[-1]
        if run(joint) is not False:  # it had something to do
            verify(joint, name)
        if watch is not None:
            watch(name, joint)


__all__ = ["PASSES", "Joint", "batch", "copied", "is_call", "known", "prepare", "rewrite", "subgraph", "view_chain"]
