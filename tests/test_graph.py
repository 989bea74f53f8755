"""What the rewrite removes: counted in the rewritten graph, and in the work that is really done."""

from __future__ import annotations

import collections

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import jagg_fx

from .helpers import EAGER
from .losses import MLP, Affine, Case, quadratic, simple_case
from .reference import group_indices


def region_calls(gm: torch.fx.GraphModule) -> collections.Counter:
    """How often each shared body is called from the main graph."""
    return collections.Counter(
        str(node.args[0].target if isinstance(node.args[0], torch.fx.Node) else node.args[0])
        for node in gm.graph.nodes
        if node.op == "call_function" and "invoke_subgraph" in str(node.target)
    )


def backwards(T: int, W: int) -> int:
    return sum(min(2, len(g)) for g in group_indices(T, W))


def explain(case: Case, style: str = "params", **options):
    subject = case.trainable() if style == "params" else case.net
    return jagg_fx.explain(case.loss(style), subject, *case.args, **{**EAGER, **options})


@pytest.mark.parametrize(("T", "W", "style"), [(4, 4, "params"), (9, 4, "net"), (8, 8, "params")])
def test_two_backward_calls_per_full_group(T: int, W: int, style: str) -> None:
    case = simple_case(quadratic, T=T)
    report = explain(case, style, W=W, gate=None)
    assert isinstance(report.before, torch.fx.GraphModule)
    assert isinstance(report.after, torch.fx.GraphModule)
    before, after = region_calls(report.before), region_calls(report.after)
    assert sum(before.values()) == 2 * T, before  # T forwards, T backwards
    assert sum(after.values()) == T + backwards(T, W), after
    assert len(report.sites) == T
    assert len(report.groups) == len(group_indices(T, W))


def test_bodies_do_not_multiply_with_the_number_of_timesteps() -> None:
    """Compile time does not grow with depth times T: the bodies are the same few at T=4 and T=16."""
    few, work = {}, {}
    for T, depth in ((4, 3), (16, 3), (16, 1)):
        report = explain(simple_case(quadratic, net=MLP(4, depth=depth), T=T), W=4, gate=None)
        few[T, depth] = (len(region_calls(report.before)), len(region_calls(report.after)))
        calls = [n for n in report.after.graph.nodes if n.op == "call_function"]
        names = [str(n.target) for n in calls if not n.name.startswith(("gates", "checked"))]  # not of the loss
        # sums of gradients, unpacking of results and views of weights are per parameter; all else is the loss
        free = ("getitem", "add", "aten.t.", "aten.view.", "permute", "transpose")
        work[T, depth] = len([n for n in names if not any(f in n for f in free)])
        assert not [n for n in names if any(op in n for op in ("mm", "silu", "sigmoid", "sin", "cat"))]
    assert few[4, 3] == few[16, 3] == few[16, 1]
    assert few[4, 3][0] == 3  # a forward body, a backward body, and one that adds to the sums of earlier ones
    assert few[4, 3][1] <= 4  # and a forward that saves nothing, for the interior
    assert work[16, 3] == work[16, 1]


def test_interior_activations_are_not_saved() -> None:
    """Wide hidden layers and a small loss: what is saved is activations, and half the calls save none."""
    case = simple_case(quadratic, net=MLP(4, 32, depth=4), T=8, batch=64)
    report = explain(case, W=4, gate=None)
    assert 0 < report.saved_bytes_after < 0.6 * report.saved_bytes_before
    exact = explain(case, W=1, gate=None)
    assert exact.saved_bytes_after <= exact.saved_bytes_before


def test_gates_keep_no_interior_activation_either() -> None:
    case = simple_case(quadratic, net=MLP(4, 32, depth=4), T=8, batch=64)
    report = explain(case, W=4)
    assert report.saved_bytes_after < 0.6 * report.saved_bytes_before


def matmuls(run) -> int:
    """Matrix products that are executed, whoever runs them: a linear layer has 1 forward, 2 backward."""
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        run()
    return sum(e.count for e in prof.key_averages() if e.key in ("aten::mm", "aten::addmm", "aten::bmm"))


@pytest.mark.parametrize(("entry", "style"), [("backward", "params"), ("grad_and_value", "net")])
def test_work_that_is_done(style: str, entry: str) -> None:
    """The affine network has one matrix: one product forward, one backward (z needs no gradient)."""
    T, W = 9, 4
    case = simple_case(quadratic, net=Affine(4), T=T)
    subject = case.trainable() if style == "params" else case.net
    counts = {}
    for name, options in {
        "endpoints": {"W": W, "gate": None},
        "exact": {"W": 1, "gate": None},
        "open": {"W": W, "tau": -2.0},
        "shut": {"W": W, "tau": 2.0},
    }.items():
        torch._dynamo.reset()
        step = jagg_fx.transform(case.loss(style), **EAGER, **options)

        def go(step=step):
            if entry == "backward":
                step(subject, *case.args).backward()
            else:
                step.grad_and_value(subject, *case.args)

        go()  # capture
        counts[name] = matmuls(go)
    interior = T - backwards(T, W)
    assert counts["exact"] == 2 * T
    assert counts["endpoints"] == T + backwards(T, W)
    assert counts["open"] == T + backwards(T, W)
    # a shut gate computes the interior once more, inside its branch, and goes back through it; the
    # dropped products of an affine forward (nothing of it is needed for the gradient) may be left out
    assert 2 * T <= counts["shut"] <= 2 * T + interior


def test_new_times_are_not_a_new_trace() -> None:
    """Capture is the slow part: a second batch with other times must not pay for it."""
    import time

    case = simple_case(quadratic, T=6)
    params = case.trainable()
    step = jagg_fx.transform(case.loss("params"), W=4, **EAGER)
    seconds = []
    for shift in (0.0, 0.01, 0.02):
        zs, ts, third = case.args
        start = time.perf_counter()
        step.grad_and_value(params, zs + shift, ts + shift, third)
        seconds.append(time.perf_counter() - start)
    assert max(seconds[1:]) < seconds[0] / 3, seconds


def test_no_gate_leaves_no_branch() -> None:
    case = simple_case(quadratic, T=4)

    def branches(report):
        graphs = [m.graph for m in report.after.modules() if isinstance(m, torch.fx.GraphModule)]
        return [n for g in graphs for n in g.nodes if n.target is torch.ops.higher_order.cond]

    assert not branches(explain(case, W=4, gate=None))
    assert branches(explain(case, W=4))


def test_the_report_prints_the_method() -> None:
    """Timesteps, groups and what was dropped; not a wall of nodes."""
    report = explain(simple_case(quadratic, net=MLP(4, depth=6), T=16), W=4, gate=None)
    text = str(report)
    assert len(text.splitlines()) < 80
    for word in ("16", "W=4", "endpoints"):
        assert word in text, text
    assert "get_attr" not in text
    assert "invoke_subgraph" in str(report.after.graph) or "invoke_subgraph" in report.after.code


def test_explain_changes_nothing() -> None:
    case = simple_case(quadratic, T=4)
    params = case.trainable()
    before = [p.clone() for p in params.values()]
    jagg_fx.explain(case.loss("params"), params, *case.args, W=4, **EAGER)
    assert all(p.grad is None for p in params.values())
    assert all(torch.equal(a, b) for a, b in zip(before, params.values(), strict=True))
