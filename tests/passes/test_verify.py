"""Broken rewrites, seeded by hand: each is caught before anything runs."""

from __future__ import annotations

import operator

import pytest
import torch
from jagg_fx.passes.joint import body_of, choices, getitems, is_region, outputs, results, sort, value
from jagg_fx.passes.verify import verify

from jagg_fx import VerifyError, _torch
from jagg_fx.estimators import Endpoints
from jagg_fx.plan import Plan

from .test_passes import NO_GATE, after


def caught(joint, name: str, what: str) -> None:
    with pytest.raises(VerifyError, match=what):
        verify(joint, name)


def _saved(site) -> int:
    """The first argument of a backward that its own forward saved."""
    args = enumerate(site.backward.args)
    return next(i for i, x in args if i > 1 and x.target is operator.getitem and x.args[0] is site.forward)


def test_a_marker_left_behind() -> None:
    joint = after("find", NO_GATE)
    v = joint.sites[0].velocity
    with joint.graph.inserting_before(outputs(joint.graph)):
        joint.graph.call_function(torch.ops.jagg_fx.cotangent.default, (v, 0))
    caught(joint, "find", "markers are left")


def test_a_value_used_before_it_is_made() -> None:
    joint = after("merge", NO_GATE)
    merged = joint.sites[0].backward.args[joint.sites[0].cotangents[0]]
    outputs(joint.graph).prepend(merged)  # after its user
    caught(joint, "merge", "not well formed")


def test_a_backward_that_reads_what_another_call_saved() -> None:
    joint = after("merge", NO_GATE)
    a, b = joint.sites[0], joint.sites[3]
    i = next(
        i for i, x in enumerate(a.backward.args) if i > 1 and x.target is operator.getitem and x.args[0] is a.forward
    )
    a.backward.update_arg(i, b.backward.args[i])
    caught(joint, "merge", r"call 0 reads .*saved by another call")


def test_a_backward_that_a_kept_call_shares_with_a_pruned_one() -> None:
    joint = after("merge", NO_GATE)
    kept, pruned = joint.sites[0], joint.sites[1]
    pruned.forward, pruned.backward = kept.forward, kept.backward
    caught(joint, "merge", "call 0 keeps the backward that it shares with call 1")


def test_a_backward_that_reads_a_foreign_value() -> None:
    joint = after("merge", NO_GATE)
    a = joint.sites[0]
    i = next(
        i for i, x in enumerate(a.backward.args) if i > 1 and x.target is operator.getitem and x.args[0] is a.forward
    )
    with joint.graph.inserting_before(a.backward):
        foreign = joint.graph.call_function(torch.ops.aten.clone.default, (a.backward.args[i],))
    foreign.meta = dict(a.backward.args[i].meta)
    a.backward.update_arg(i, foreign)
    caught(joint, "merge", "neither saved nor an operand")


def test_a_cotangent_made_from_another_backward() -> None:
    joint = after("merge", NO_GATE)
    later, earlier = joint.sites[5].backward, joint.sites[4]
    gradient = next(iter(getitems(later).values()))[0]
    position = earlier.cotangents[0]
    own = earlier.backward.args[position]
    with joint.graph.inserting_before(earlier.backward):
        mixed = joint.graph.call_function(torch.ops.aten.add.Tensor, (own, gradient))
    mixed.meta = dict(own.meta)
    earlier.backward.update_arg(position, mixed)
    caught(joint, "merge", "the backward of call 5 feeds the backward of call 4")


def test_a_pruned_backward_that_is_still_called() -> None:
    joint = after("merge", NO_GATE)
    caught(joint, "prune", "6 backward calls are in the graph, the plan keeps 4")


def test_an_endpoint_pruned_by_mistake() -> None:
    joint = after("prune", NO_GATE)
    from jagg_fx.passes.prune import remove

    remove(joint.graph, joint.sites[3].backward)
    joint.sites[3].backward = None
    caught(joint, "prune", "3 backward calls are in the graph, the plan keeps 4")


@pytest.mark.parametrize("how", ["dropped", "added twice", "not returned"])
def test_a_sum_of_gradients_that_is_not_carried_on(how: str) -> None:
    joint = after("accumulate", NO_GATE)
    site = next(s for s in joint.sites.values() if s.backward in joint.sums)
    body = getattr(joint.gm, site.backward.args[0].target)
    before = body.graph.find_nodes(op="placeholder")[min(joint.sums[site.backward]) - 2]
    (add,) = before.users
    own = next(n for n in add.args if n is not before)
    if how == "dropped":
        add.replace_input_with(before, own)
    elif how == "added twice":
        add.replace_input_with(own, before)
    else:
        outputs(body.graph).replace_input_with(add, own)
    caught(joint, "accumulate", "with its gradient added")


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("the other way round", "call 0 does not choose"),
        ("not asked", "does not ask its gate"),
        ("merged in the second branch", "each once"),
        ("a step left out", "each once"),
    ],
)
def test_a_gate_that_is_not_kept(how: str, what: str) -> None:
    joint = after("branch", Plan(W=3))
    region, first = joint.gated[0], joint.sites[0]
    ((_, (_, exact)),) = choices(body_of(joint.gm, region))
    if how == "the other way round":
        chosen = first.backward.args[first.cotangents[0]]
        chosen.args = (chosen.args[0], chosen.args[2], chosen.args[1])
    elif how == "not asked":
        region.update_arg(2, joint.gated[1].args[2])
        sort(joint.graph)
    elif how == "a step left out":
        (last, *_), total = joint.backwards(exact.graph)[::-1], results(exact.graph)
        outputs(exact.graph).args = (tuple(next(a for a in n.args if a.args[0] is not last) for n in total),)
        exact.graph.eliminate_dead_code()
    else:
        inputs = exact.graph.find_nodes(op="placeholder")
        backward = joint.backwards(exact.graph)[-1]
        merged = region.args[3:].index(next(iter(joint.merged[2].values())))
        backward.update_arg(first.cotangents[0], inputs[merged])
    caught(joint, "branch", what)


@pytest.mark.parametrize("how", ["dropped", "into another's place"])
def test_a_branch_that_does_not_carry_a_sum_on(how: str) -> None:
    joint = after("accumulate", Plan(W=3))
    call = next(n for n in joint.sums if n in joint.graph.nodes and n.args[0].target in joint.branch_bodies)
    ((_, branches),) = choices(body_of(joint.gm, call))
    for branch in branches:
        backward = joint.backwards(branch.graph)[0]
        position = min(joint.sums[backward])
        if how == "dropped":
            with branch.graph.inserting_before(backward):
                zero = branch.graph.call_function(torch.ops.aten.zeros_like.default, (backward.args[position],))
            zero.meta["val"] = value(backward.args[position])
            backward.update_arg(position, zero)
        else:
            first, second, *rest = results(branch.graph)
            outputs(branch.graph).args = ((second, first, *rest),)
    caught(joint, "accumulate", "with its gradient added")


def test_a_site_that_names_an_erased_backward() -> None:
    joint = after("prune", NO_GATE)
    from jagg_fx.passes.prune import remove

    remove(joint.graph, joint.sites[3].backward)
    caught(joint, "branch", "call 3 still names a backward that was erased")


def test_a_pruned_forward_that_still_saves() -> None:
    joint = after("prune", NO_GATE)
    caught(joint, "slim", r"forward of pruned call 1 still computes \d+ values")


def test_an_operand_too_few() -> None:
    joint = after("slim", NO_GATE)
    node = next(n for n in joint.graph.nodes if is_region(n))
    node.args = node.args[:-1]
    caught(joint, "slim", "operands, its body takes")


def test_an_operand_of_the_wrong_dtype() -> None:
    joint = after("merge", NO_GATE)
    position = joint.sites[0].cotangents[0]
    own = joint.sites[0].backward.args[position]
    own.meta["val"] = own.meta["val"].float()
    caught(joint, "merge", "torch.float32 .* its body takes torch.float64")


def _branches(joint):
    body = next(m for n, m in joint.gm.named_children() if n.startswith("jagg_group"))
    (cond,) = body.graph.find_nodes(op="call_function", target=_torch.cond)
    return [getattr(body, a.target) for a in cond.args[1:3]]


def test_a_branch_that_returns_its_input() -> None:
    joint = after("branch", Plan(W=4))
    for branch in _branches(joint):
        out = branch.graph.output_node()
        first = branch.graph.find_nodes(op="placeholder")[0]
        out.args = ((first, *results(branch.graph)[1:]),)
    caught(joint, "branch", "returns one of its inputs")


def test_branches_that_disagree_in_strides() -> None:
    joint = after("branch", Plan(W=4))
    node = next(n for n in results(_branches(joint)[0].graph) if n.meta["val"].ndim == 2)
    node.meta["val"] = node.meta["val"].t().contiguous().t()
    caught(joint, "branch", "disagree")


class Doubled(Endpoints):
    """Counts every interior step twice."""

    def weights(self, lam, picks=()):
        return [[2.0 * x if 0 < k < len(lam) - 1 else x for k, x in enumerate(r)] for r in super().weights(lam)]


class Beyond(Endpoints):
    """Sums to one, with weights far outside of [0, 1]."""

    def weights(self, lam, picks=()):
        first, last = super().weights(lam)
        return [[first[0], *(x + 3.0 for x in first[1:-1]), 0.0], [0.0, *(x - 3.0 for x in last[1:-1]), 1.0]]


@pytest.mark.parametrize(("estimator", "what"), [(Doubled(), "sum to one"), (Beyond(), r"leave \[0, 1\]")])
def test_weights_that_break_their_promise(estimator, what: str) -> None:
    joint = after("merge", NO_GATE)
    joint.plan = Plan(W=4, estimator=estimator, gate=None)
    caught(joint, "merge", what)


def test_a_cotangent_of_another_group() -> None:
    joint = after("merge", NO_GATE)
    foreign = joint.own[joint.groups[1].calls[0]][0]
    merged = next(iter(joint.merged[0].values()))
    user = joint.sites[0].backward
    with joint.graph.inserting_before(user):
        both = joint.graph.call_function(torch.ops.aten.add.Tensor, (merged, foreign))
    both.meta["val"] = merged.meta["val"]
    joint.merged[0] = {joint.sites[0].cotangents[0]: both}
    joint.graph.lint()
    caught(joint, "merge", "call 0, in group 0, has one of group 1")
