"""Form groups of W consecutive timesteps, and the position lambda of each step in its group.

Assumes: sites found. Leaves: `joint.groups`; for groups that will be approximated, nodes that compute the
positions from the time tensors (per row of the batch). Refuses a group whose calls do not share what they
differentiate: pruning one of them would lose a gradient that no endpoint can stand in for.
"""

from __future__ import annotations

from jagg_fx.errors import RefusedError
from jagg_fx.estimators import index_lambdas, lambdas
from jagg_fx.gates import row_shape

from .joint import Joint, Site, expressions, getitems, insert, sort, value


def run(joint: Joint) -> None:
    joint.groups = joint.plan.groups([s.call for _, s in sorted(joint.sites.items())])
    number = expressions(joint.graph)
    for group in joint.groups:
        if group.exact:
            continue
        sites = [joint.sites[c] for c in group.calls]
        _check_shared(sites, number)
        if joint.plan.weights == "index" and not joint.plan.estimator.drawn(len(sites)):  # else the "times" are dealt
            joint.positions[group.number] = index_lambdas(len(sites))
            continue
        for site in sites:
            _check_time(site)
        inner = insert(joint.graph, lambda *t: lambdas(t)[1:-1], [s.time for s in sites], "lambda")
        joint.positions[group.number] = [0.0, *inner, 1.0]
    sort(joint.graph)


def _check_shared(sites: list[Site], number: dict) -> None:
    for site in sites:
        for i in getitems(site.backward):
            if any(number[site.operands[i]] != number[s.operands[i]] for s in sites):
                raise RefusedError(
                    f"Velocity call {site.call.index} ({site.call.where}) gets an input of its own that carries "
                    f"gradient ({site.operands[i].name}, shape {tuple(value(site.operands[i]).shape)}). A group "
                    "keeps the backward of its endpoints only, so this gradient would be lost. Detach that input, "
                    "or compute it once before the loop, so that all calls share it."
                )


def _check_time(site: Site) -> None:
    t, v = value(site.time), value(site.velocity)
    if t.numel() == 1 or row_shape(t) == tuple(v.shape[:1]):
        return  # not a time for each token: J of one token depends on the times of the others
    raise RefusedError(
        f"The time of the velocity call at {site.call.where} has shape {tuple(t.shape)}, its velocity "
        f"{tuple(v.shape)}: weights are made from the times, one for the whole batch or one per row (not per token). "
        "Give a time of shape () or (batch,), or say which argument is the time with `time=`, or use weights='index'."
    )
