"""Compute the forward of a kept timestep a second time, right before its backward, in place of keeping what it saved.

Assumes: pruned and slimmed, whole steps (`whole.py` runs next). Leaves, with activations="recompute": no value that a
forward saved for a backward but those of a second forward that serves this backward alone. A group of W then costs
W + 6 in place of W + 4 (forward 1, backward 2), and one activation graph is alive at a time. A gated group recomputes
inside of its branch already, for its pruned timesteps; its nodes in there keep what they saved until then.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from .joint import Joint, body_of, call_region, fresh, is_call, item
from .slim import narrowed, slim


def run(joint: Joint) -> bool:
    if joint.plan.activations != "recompute":
        return False
    made: dict[tuple, str] = {}
    again: dict[tuple, str] = {}
    for site in joint.sites.values():
        if site.backward is None or site.forward not in joint.forwards:
            continue
        saved: list[int] = sorted({a.args[1] for a in site.backward.args if _saved_by(site.forward, a)})  # type: ignore[misc, type-var]
        if not saved:
            continue
        second = _second(joint, site.forward, tuple(saved), again)
        with joint.graph.inserting_before(site.backward):
            call = call_region(joint.graph, getattr(joint.gm, second), second, site.forward.args[2:])
            values = {old: item(joint.graph, call, new) for new, old in enumerate(saved)}
        for position, arg in enumerate(site.backward.args):
            if _saved_by(site.forward, arg):
                site.backward.update_arg(position, values[arg.args[1]])
        first = slim(joint, site.forward, made)
        joint.forwards[joint.forwards.index(site.forward)] = first
        joint.forwards.append(call)
        site.forward = call  # what its backward reads now
    return True


def _saved_by(forward: fx.Node, arg: Any) -> bool:
    return is_call(arg, operator.getitem) and arg.args[0] is forward


def _second(joint: Joint, forward: fx.Node, saved: tuple[int, ...], made: dict[tuple, str]) -> str:
    key = (forward.args[0].target, saved)  # type: ignore[union-attr]
    if key not in made:
        made[key] = fresh(joint.gm, f"{key[0]}_again")
        joint.gm.register_module(made[key], narrowed(body_of(joint.gm, forward), saved))
    return made[key]
