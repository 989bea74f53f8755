"""Each pass on a small graph: count what is there, run it, count again."""

from __future__ import annotations

import operator
from itertools import pairwise

import pytest
import torch
from jagg_fx.passes import PASSES, accumulate, outline, repeats, rewrite, segments
from jagg_fx.passes.joint import (
    Joint,
    body_of,
    choices,
    expressions,
    getitems,
    insert,
    is_call,
    is_region,
    outputs,
    results,
    sort,
    value,
)
from jagg_fx.passes.verify import verify
from torch import nn

from jagg_fx import RefusedError, _torch, transform
from jagg_fx.estimators import Endpoints, Exact
from jagg_fx.plan import Plan

from .capture import example, forward_graph, joint_graph, loss_fn

CALL, COTANGENT = torch.ops.jagg_fx.call.default, torch.ops.jagg_fx.cotangent.default


def regions(gm) -> dict[str, int]:
    """How often each body is called."""
    out: dict[str, int] = {}
    for n in gm.graph.nodes:
        if is_region(n):
            out[n.args[0].target] = out.get(n.args[0].target, 0) + 1
    return out


def after(last: str, plan: Plan, gm=None) -> Joint:
    """The state after the passes up to and with `last`."""
    joint = Joint(gm if gm is not None else joint_graph(), plan)
    for run in PASSES:
        run(joint)
        if run.__module__.endswith("." + last):
            return joint
    raise AssertionError(last)


NO_GATE = Plan(W=4, gate=None)


def test_outline_makes_one_body_and_one_call_per_timestep() -> None:
    gm = forward_graph()
    flat = sum(n.target is torch.nn.functional.silu for n in gm.graph.nodes)
    found = segments.find(gm)
    segments.find_time(found)
    outline.run(gm, found)
    assert flat == 6
    assert regions(gm) == {"velocity_0": 6}
    assert not any(n.target is torch.nn.functional.silu for n in gm.graph.nodes)
    assert [n.args[2] for n in gm.graph.find_nodes(op="call_function", target=CALL)] == list(range(6))


def test_outline_of_any_depth_leaves_a_graph_of_the_same_size() -> None:
    class Deep(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))

        def forward(self, z, t):
            for layer in self.layers:
                z = torch.tanh(layer(z) + t)
            return z

    def calls(depth: int) -> int:
        gm = forward_graph(loss_fn, Deep(depth), torch.randn(6, 3, 4), torch.linspace(1, 0.1, 6))
        found = segments.find(gm)
        segments.find_time(found)
        outline.run(gm, found)
        return sum(n.op == "call_function" for n in gm.graph.nodes)

    assert calls(2) == calls(5)


def test_repeats_finds_a_plain_function_and_its_time() -> None:
    def velocity(w, z, t):
        return torch.tanh(torch.cat([z, t.expand(z.shape[0], 1)], -1) @ w["a"]) @ w["b"]

    def loss(w, zs, ts):
        return sum(((velocity(w, zs[k], ts[k]) - zs[k]) ** 2).mean() for k in range(5))

    w = {"a": torch.randn(5, 7, requires_grad=True), "b": torch.randn(7, 4, requires_grad=True)}
    gm = forward_graph(loss, w, torch.randn(5, 3, 4), torch.linspace(1, 0.1, 5))
    assert segments.find(gm) == []
    found = repeats.find(gm)
    segments.find_time(found)
    assert len(found) == 5
    assert [segments.example(s.time).shape for s in found] == [()] * 5
    assert all(s.nodes[-1].target is operator.matmul for s in found)


def test_repeats_leaves_a_graph_without_repetition_alone() -> None:
    gm = forward_graph(
        lambda w, z: (torch.tanh(z @ w) ** 2).sum(), torch.randn(4, 4, requires_grad=True), torch.randn(2, 4)
    )
    assert repeats.find(gm) == []


def test_find_takes_the_markers_out_and_pairs_forward_and_backward() -> None:
    gm = joint_graph()
    assert len(gm.graph.find_nodes(op="call_function", target=COTANGENT)) == 6
    joint = after("find", NO_GATE, gm)
    assert not any(n.target in (CALL, COTANGENT) for n in joint.graph.nodes)
    assert sorted(joint.sites) == list(range(6))
    for site in joint.sites.values():
        saved = {a.args[0] for a in site.backward.args[2:] if a.op == "call_function" and a.target is operator.getitem}
        assert saved == {site.forward}
    assert len({s.call.time for s in joint.sites.values()}) == 6


def test_group_computes_lambda_in_the_graph() -> None:
    joint = after("group", NO_GATE)
    assert [g.calls for g in joint.groups] == [(0, 1, 2, 3), (4, 5)]
    assert [g.pruned for g in joint.groups] == [(1, 2), ()]
    assert [joint.positions[0][0], joint.positions[0][-1]] == [0.0, 1.0]
    assert list(joint.positions) == [0]


def test_merge_changes_the_cotangents_of_the_endpoints_only() -> None:
    gm = joint_graph()
    joint = after("gate", NO_GATE, gm)
    before = {i: s.backward.args[s.cotangents[0]] for i, s in joint.sites.items()}
    joint = after("merge", NO_GATE, joint_graph())
    now = {i: s.backward.args[s.cotangents[0]].name for i, s in joint.sites.items()}
    changed = [i for i in now if now[i] != before[i].name]
    assert changed == [0, 3]


def test_prune_leaves_two_backwards_per_group_and_slim_nothing_saved() -> None:
    gm = joint_graph()
    (forward, six), (backward, also_six) = sorted(regions(gm).items(), key=lambda x: "bw" in x[0])
    assert (six, also_six) == (6, 6)
    assert regions(after("prune", NO_GATE).gm) == {forward: 6, backward: 4}
    joint = after("slim", NO_GATE)
    bodies = {n: len(results(getattr(joint.gm, n).graph)) for n in regions(joint.gm)}
    called = [joint.sites[i].forward.args[0].target for i in range(6)]
    assert bodies[called[1]] == bodies[called[2]] == 1  # the velocity alone
    assert called[1] == called[2]
    assert len({called[i] for i in (0, 3, 4, 5)}) == 1


def test_branch_puts_each_gated_group_behind_one_cond_in_one_shared_region() -> None:
    joint = after("branch", Plan(W=3), joint_graph(loss_fn, *example(6)))
    groups = [n for n in joint.graph.nodes if is_region(n) and str(n.args[0].target).startswith("jagg_group")]
    assert len(groups) == 2
    assert len({n.args[0].target for n in groups}) == 1
    body = getattr(joint.gm, groups[0].args[0].target)
    (cond,) = body.graph.find_nodes(op="call_function", target=_torch.cond)
    merged, exact = (getattr(body, a.target) for a in cond.args[1:3])
    backward = next(n for n in joint.backward_bodies)
    assert regions(merged) == {backward: 1}  # the first node of each group stays outside
    assert regions(joint.gm)[backward] == 2
    assert regions(exact)[backward] == 2
    assert sum(regions(exact).values()) == 3  # one forward again, for the one interior step


def test_gradients_are_summed_inside_of_the_backwards() -> None:
    """One addition less for each parameter and backward in the graph: one body makes them, call after call."""
    before, joint = after("again", NO_GATE), after("accumulate", NO_GATE)
    adds = [len(j.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)) for j in (before, joint)]
    order = {n: i for i, n in enumerate(joint.graph.nodes)}
    kept = sorted((s for s in joint.sites.values() if s.backward is not None), key=lambda s: order[s.backward])
    parameters = 4
    assert adds[0] - adds[1] == parameters * (len(kept) - 1) > 0
    assert kept[0].backward not in joint.sums
    assert len({s.backward.args[0].target for s in kept[1:]}) == 1
    for earlier, site in pairwise(kept):
        assert {site.backward.args[i].args[0] for i in joint.sums[site.backward]} == {earlier.backward}
        assert len(joint.sums[site.backward]) == parameters
    total = [n for n in outputs(joint.graph).all_input_nodes if is_call(n, operator.getitem)]
    assert sum(n.args[0] is kept[-1].backward for n in total) == parameters


def test_a_gradient_that_something_else_reads_stays_outside_of_the_sums() -> None:
    joint = after("again", NO_GATE)
    order = {n: i for i, n in enumerate(joint.graph.nodes)}
    site = max((s for s in joint.sites.values() if s.backward is not None), key=lambda s: order[s.backward])
    index, (read,) = next((i, nodes) for i, nodes in getitems(site.backward).items() if nodes[0].users)
    last = outputs(joint.graph)
    with joint.graph.inserting_before(last):
        twice = joint.graph.call_function(torch.ops.aten.mul.Tensor, (read, 2.0))
    twice.meta["val"] = value(read)
    last.args = ((*results(joint.graph), twice),)
    accumulate.run(joint)
    verify(joint, "accumulate")
    assert len(joint.sums[site.backward]) == 3  # of four parameters
    gradient = twice.args[0]
    assert gradient.args == (site.backward, index)
    body = getattr(joint.gm, site.backward.args[0].target)
    sums = body.graph.find_nodes(op="placeholder")[min(joint.sums[site.backward]) - 2 :]
    assert not set(sums) & set(results(body.graph)[index].all_input_nodes)


def test_gradients_are_summed_across_gated_groups_and_in_both_branches() -> None:
    """Every parameter has one chain of sums through the nodes outside and the groups; no addition is left between."""
    joint = after("accumulate", Plan(W=3), joint_graph(loss_fn, *example(6)))
    calls = joint.backwards(joint.graph)
    groups = [n for n in calls if n.args[0].target in joint.branch_bodies]
    assert [len(calls), len(groups)] == [4, 2]
    for earlier, call in pairwise(calls):
        assert {call.args[i].args[0] for i in joint.sums[call]} == {earlier}
        assert len(joint.sums[call]) == 4  # parameters
    assert len({n.args[0].target for n in groups}) == 1
    ((_, branches),) = choices(body_of(joint.gm, groups[0]))
    assert [len(joint.backwards(b.graph)) for b in branches] == [1, 2]
    for gm in (joint.gm, *branches):
        last = joint.backwards(gm.graph)[-1]
        if gm is not joint.gm:
            assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
        assert sum(is_call(n, operator.getitem) and n.args[0] is last for n in results(gm.graph)) == 4


def test_no_gate_leaves_no_branch() -> None:
    gm = joint_graph()
    rewrite(gm, NO_GATE)
    every = [gm, *(m for m in gm.modules() if isinstance(m, torch.fx.GraphModule))]
    assert not any(n.target is _torch.cond for g in every for n in g.graph.nodes)


@pytest.mark.parametrize("plan", [Plan(W=1, gate=None), Plan(W=2, gate=None), Plan(W=4, estimator=Exact())])
def test_an_exact_plan_keeps_every_backward(plan: Plan) -> None:
    gm = joint_graph()
    joint = rewrite(gm, plan)
    assert sum(s.backward is not None for s in joint.sites.values()) == 6


def test_a_second_rewrite_changes_nothing() -> None:
    gm = joint_graph()
    rewrite(gm, NO_GATE)
    once = gm.code
    assert rewrite(gm, NO_GATE) is None
    assert gm.code == once


def test_every_pass_leaves_a_graph_that_the_verifier_accepts() -> None:
    names: list[str] = []
    rewrite(joint_graph(), Plan(W=4), lambda name, joint: names.append(name))
    assert names == [p.__module__.rsplit(".", 1)[-1] for p in PASSES]


def test_an_input_of_its_own_that_carries_gradient_is_refused() -> None:
    """Its gradient would be lost where the backward is pruned."""
    net, zs, ts = example(4)
    own = torch.randn(4, 3, 4, dtype=torch.float64, requires_grad=True)

    def loss(net, zs, ts, own):
        return sum((net(zs[k] + own[k], ts[k]) ** 2).mean() for k in range(4))

    with pytest.raises(RefusedError, match=r"call \d .*carries gradient"):
        transform(loss, W=4, gate=None, compiler="eager")(net, zs, ts, own)
    transform(loss, W=2, compiler="eager")(net, zs, ts, own).backward()  # exact groups lose nothing
    assert own.grad.abs().min() > 0


def test_insert_traces_plain_tensor_code() -> None:
    gm = joint_graph()
    joint = after("find", NO_GATE, gm)
    velocity = joint.sites[0].velocity
    nodes = insert(gm.graph, lambda v: [v * 2, v.sum()], [velocity], "probe")
    sort(gm.graph)
    gm.graph.lint()
    assert [n.meta["val"].shape for n in nodes] == [(3, 4), ()]
    assert all(n.name.startswith("probe") for n in nodes)


def test_expressions_number_equal_computations_alike() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    a, b, c = (graph.call_function(torch.ops.aten.select.int, (x, 0, i)) for i in (1, 1, 2))
    r, s = (graph.call_function(torch.ops.aten.rand_like.default, (x,)) for _ in range(2))
    graph.output((a, b, c, r, s))
    number = expressions(graph)
    assert number[a] == number[b] != number[c]
    assert number[r] != number[s]


def test_plan_key_tells_everything_apart_that_shapes_a_graph() -> None:
    plans = [
        Plan(),
        Plan(W=8),
        Plan(tau=0.9),
        Plan(gate=None),
        Plan(gate="cosine-mean"),
        Plan(weights="index"),
        Plan(estimator=Exact()),
    ]
    assert len({p.key() for p in plans}) == len(plans)
    assert Plan().key() == Plan(estimator=Endpoints()).key()


def test_verify_accepts_what_the_passes_make() -> None:
    joint = after("slim", Plan(W=4))
    verify(joint, "slim")
