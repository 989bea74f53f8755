"""Calls in any order of time: sorted, each row and each lane on its own, the gradient is that of the sorted loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import jagg_fx

from .helpers import EAGER, check, exact, run
from .losses import MLP, STYLES, Case, Returns, coupled, read
from .reference import Reference, reference, relative_error
from .test_graph import explain, matmuls

OWN = {**EAGER, "gate": None}
D = torch.float64

pytestmark = pytest.mark.filterwarnings("ignore::jagg_fx.JaggWarning")  # wide groups, groups that save nothing


def shuffled(T: int, rows: int = 3, per_row: bool = False, seed: int = 0, lanes: int = 1) -> tuple[Tensor, ...]:
    """(zs, ts, targets, order): times in random order, per row in another one for each. order sorts them.

    With lanes, each time stands for so many calls in turn: zs and targets have T * lanes entries.
    """
    g = torch.Generator().manual_seed(seed)
    ts = torch.rand(T, rows if per_row else 1, generator=g, dtype=D)
    ts = 0.05 + 0.9 * (ts.argsort(0).argsort(0) + 0.8 * torch.rand(ts.shape, generator=g, dtype=D)) / T
    zs, targets = torch.randn(2, T * lanes, rows, 4, generator=g, dtype=D)
    order = ts.argsort(0, descending=True)
    return zs, ts if per_row else ts.squeeze(1), targets, order.expand(T, rows)


def put(x: Tensor, order: Tensor) -> Tensor:
    """x (T, B, ...) with the rows of each entry in their own order."""
    return torch.stack([x[order[:, b], b] for b in range(order.shape[1])], 1)


def mlp() -> MLP:
    torch.manual_seed(0)
    return MLP(4, 8, 1).double()


def case(core: Callable, args: tuple, net: nn.Module | None = None, **options) -> Case:
    return Case(mlp() if net is None else net, core, args, options=options)


def sorted_reference(core_of: Callable, args: tuple, W: int, net: nn.Module | None = None) -> Reference:
    """The reference for calls that are made in falling time, row by row.

    core_of(inverse) is the loss of the original order, which reads velocity k as rows of the sorted calls.
    """
    zs, ts, targets, order = args
    inverse = order.argsort(0)
    per_row = ts.dim() > 1
    at = put(ts, order) if per_row else ts[order[:, 0]]
    c = case(core_of(inverse), (put(zs, order), at, targets), net)
    return reference(c.core, c.function, c.trainable(), c.args, W=W)


def of_velocities(head: Callable) -> tuple[Callable, Callable]:
    """A loss of all velocities: as the user writes it, and for sorted calls."""

    def core(velocity, zs, ts, targets):
        return head([velocity(z, t) for z, t in zip(zs, ts, strict=True)], targets)

    def in_order(inverse):
        def core(velocity, zs, ts, targets):
            vs = torch.stack([velocity(z, t) for z, t in zip(zs, ts, strict=True)])
            return head(list(put(vs, inverse)), targets)

        return core

    return core, in_order


def head(vs: list[Tensor], targets: Tensor) -> Tensor:
    """Reads each velocity with its own place, and all of them together."""
    own = sum((k + 1) * ((v - u) ** 2).mean() for k, (v, u) in enumerate(zip(vs, targets, strict=True)))
    return own + 0.1 * (sum(vs) ** 2).sum() + 0.1 * (vs[0] * vs[-1]).sum()


def differs(a: Any, b: Any) -> None:
    assert relative_error(a.grads, b.grads) > 1e-4


# ------------------------------------------------------------------------------------------ order="time"


@pytest.mark.parametrize("per_row", [False, True], ids=["scalar", "per row"])
@pytest.mark.parametrize(("T", "W", "style"), [(8, 4, STYLES[0]), (11, 4, STYLES[1]), (7, 5, STYLES[0])])
def test_shuffled_calls_are_sorted(T: int, W: int, per_row: bool, style: str) -> None:
    """T = 11, W = 4: the last three steps in time are the ragged group."""
    args = shuffled(T, per_row=per_row)
    core, in_order = of_velocities(head)
    want = sorted_reference(in_order, args, W)
    c = case(core, args[:3])
    check(run(c, style, W=W, order="time", gate=None, entry="backward"), want, 1e-9, 1e-11)
    differs(want, exact(c))


@pytest.mark.thorough
@given(st.integers(3, 10), st.sampled_from([3, 4, 6]), st.integers(1, 4), st.booleans(), st.integers(0, 999))
@example(9, 4, 1, True, 0)
def test_any_shape(T: int, W: int, rows: int, per_row: bool, seed: int) -> None:
    torch._dynamo.reset()
    args = shuffled(T, rows, per_row, seed)
    core, in_order = of_velocities(head)
    got = run(case(core, args[:3]), "net", W=W, order="time", gate=None)
    check(got, sorted_reference(in_order, args, W), 1e-9, 1e-11)


def test_other_times_at_the_next_step() -> None:
    """One capture, an order of its own in each batch; rising times are the same groups turned around."""
    core, in_order = of_velocities(head)
    net = mlp()
    step = jagg_fx.transform(lambda net, *args: core(net, *args), W=4, order="time", **OWN)
    for seed in range(3):
        args = shuffled(8, seed=seed)
        got, _ = step.grad_and_value(net, *args[:3])
        assert relative_error(got, sorted_reference(in_order, args, 4).grads) < 1e-9


@pytest.mark.parametrize("entry", ["backward", "grad_and_value", "func", "backend"])
@pytest.mark.parametrize("estimator", ["endpoints", "knots"])
def test_entries(entry: str, estimator: str) -> None:
    args = shuffled(7, per_row=True)
    core, in_order = of_velocities(head)
    if estimator == "endpoints":
        want = sorted_reference(in_order, args, 4).grads
    else:
        zs, ts, _, order = args
        sorted_ = case(in_order(order.argsort(0)), (put(zs, order), put(ts, order), args[2]))
        want = run(sorted_, "params", estimator="knots", gate=None).grads
    got = run(case(core, args[:3]), "params", entry, W=4, order="time", gate=None, estimator=estimator)
    assert relative_error(got.grads, want) < 1e-9


def test_a_drawn_step_among_sorted_ones() -> None:
    """Two permutations, one after the other: the steps that are drawn are those of the sorted loss."""
    args = shuffled(9, per_row=True)
    zs, ts, targets, order = args
    core, in_order = of_velocities(head)
    want = run(case(in_order(order.argsort(0)), (put(zs, order), put(ts, order), targets)), "net", **DRAWN)
    got = run(case(core, args[:3]), "net", order="time", **DRAWN)
    assert relative_error(got.grads, want.grads) < 1e-9
    differs(got, exact(case(core, args[:3])))


DRAWN = {"W": 4, "gate": None, "estimator": "debiased", "seed": 3}


def test_loss_and_aux_are_those_of_the_loss() -> None:
    def core(velocity, zs, ts, targets):
        vs = [velocity(z, t) for z, t in zip(zs, ts, strict=True)]
        return head(vs, targets), {"vs": vs, "third": vs[3].mean()}

    args = shuffled(8, per_row=True)
    c = case(core, args[:3])
    c.has_aux = True
    got, want = run(c, "net", W=4, order="time", gate=None, entry="backward"), exact(c)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.aux["third"], want.aux["third"])
    for a, b in zip(got.aux["vs"], want.aux["vs"], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("per_row", [False, True], ids=["scalar", "per row"])
def test_two_lanes_are_sorted_each(per_row: bool) -> None:
    """Guidance: two calls at one time, which are in two lanes whatever the order of the times."""
    zs, ts, targets, order = shuffled(6, per_row=per_row, lanes=2)

    def core(velocity, zs, ts, targets):
        vs = []
        for k in range(6):
            vs += [velocity(zs[2 * k], ts[k]), velocity(zs[2 * k + 1], ts[k])]
        return head(vs, targets)

    both = torch.stack([2 * order, 2 * order + 1], 1).flatten(0, 1)
    inverse = both.argsort(0)

    def in_order(velocity, zs, ts, targets):
        vs = torch.stack([velocity(zs[k], ts[k // 2]) for k in range(12)])
        return head(list(put(vs, inverse)), targets)

    at = put(ts, order) if per_row else ts[order[:, 0]]
    s = case(in_order, (put(zs, both), at, targets))
    want = reference(s.core, s.function, s.trainable(), s.args, W=4, lanes=lambda k: k % 2)
    c = case(core, (zs, ts, targets))
    check(run(c, "net", W=4, order="time", gate=None), want, 1e-9, 1e-11)
    differs(want, exact(c))


# ---------------------------------------------------------------------------------------------------- lane


def equal_in_value(T: int = 6) -> tuple[Tensor, ...]:
    """Two calls a timestep, each with an element of `ts` of its own: the graph cannot see that they are equal."""
    g = torch.Generator().manual_seed(0)
    zs, targets = torch.randn(2, 2 * T, 3, 4, generator=g, dtype=D)
    return zs, torch.linspace(0.9, 0.1, T, dtype=D).repeat_interleave(2), targets


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("lane", "number"),
    [
        (2, lambda k: k % 2),
        ([0, 1] * 6, lambda k: k % 2),
        ((5, 3, 5, 3, 3, 5, 3, 5, 5, 3, 5, 3), lambda k: (0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 1)[k]),
    ],
    ids=["2", "list", "tuple"],
)
@pytest.mark.parametrize("order", ["call", "time"])
def test_lanes_that_are_said(lane: Any, number: Callable, order: str) -> None:
    c = case(coupled, equal_in_value())
    want = reference(c.core, c.function, c.trainable(), c.args, W=4, lanes=number)
    check(run(c, "params", W=4, lane=lane, order=order, gate=None), want, 1e-9, 1e-11)
    differs(want, exact(c))


@pytest.mark.parametrize(
    "lane",
    [[0, 1] * 5, [0, 1] * 7],
    ids=["short", "long"],
)
def test_a_lane_list_of_the_wrong_length(lane: list) -> None:
    with pytest.raises(jagg_fx.RefusedError, match="lane") as e:
        run(case(coupled, equal_in_value()), "params", W=4, lane=lane, gate=None)
    assert str(len(lane)) in str(e.value)


@pytest.mark.parametrize(
    "options",
    [
        *({"lane": x} for x in (0, -1, True, 1.5, "2", [], [0, "1"], [True, False])),
        *({"order": x} for x in ("times", None, 1)),
        *({"audit_every": x} for x in (0, -3, True, 2.0, "3")),
        *({"seed": x} for x in (None, 1.0, True, "0")),
    ],
    ids=repr,
)
def test_options_that_cannot_be_taken(options: dict) -> None:
    for make in (lambda **o: jagg_fx.transform(coupled, **o), jagg_fx.backend):
        if make is jagg_fx.backend and "audit_every" in options:
            continue  # takes none
        with pytest.raises(ValueError, match=next(iter(options))):
            make(W=4, **options)


# ------------------------------------------------------------------------------------- what times may be


@pytest.mark.parametrize("times", ["equal in value", "unsorted"])
def test_times_that_do_not_fit_say_what_to_do(times: str) -> None:
    args = equal_in_value() if times == "equal in value" else shuffled(8)[:3]
    c = case(coupled, args)
    with pytest.raises(jagg_fx.TimesError) as e:
        run(c, "net", W=4, gate=None)
    assert "order='time'" in str(e.value)
    assert "lane" in str(e.value)
    torch._dynamo.reset()
    check(run(c, "net", W=4, tau=-2.0), exact(c), 1e-9, 1e-11)  # a gate sends such groups to exact


def test_times_that_are_really_equal_are_equal_after_sorting_too() -> None:
    """Sorting cannot tell two calls at one time apart: they are lanes, and must be said."""
    c = case(coupled, equal_in_value())
    with pytest.raises(jagg_fx.TimesError, match="lane"):
        run(c, "net", W=4, order="time", gate=None)


def test_gates_see_the_sorted_groups() -> None:
    args = shuffled(8)
    core, in_order = of_velocities(head)
    c = case(core, args[:3])
    check(run(c, "net", W=4, order="time", tau=-2.0), sorted_reference(in_order, args, 4), 1e-9, 1e-11)
    torch._dynamo.reset()
    check(run(c, "net", W=4, order="time", tau=2.0), exact(c), 1e-9, 1e-11)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["int64", "column", "float32"])
def test_times_of_another_kind(kind: str) -> None:
    zs, ts, targets, order = shuffled(8, per_row=True)
    of = {"int64": lambda t: (1000 * t).long(), "column": lambda t: t[:, None], "float32": lambda t: t.float()}[kind]
    net = MLP(4, 8, 1, scale=1000.0 if kind == "int64" else 1.0).double()
    core, in_order = of_velocities(head)

    def cast(core):
        return lambda velocity, zs, ts, targets: core(lambda z, t: velocity(z, of(t)), zs, ts, targets)

    s = case(cast(in_order(order.argsort(0))), (put(zs, order), put(ts, order), targets), net)
    want = run(s, "net", W=4, gate=None)
    got = run(case(cast(core), (zs, ts, targets), net), "net", W=4, order="time", gate=None)
    assert relative_error(got.grads, want.grads) < 1e-9
    differs(got, exact(s))


# -------------------------------------------------------------------------------------- what calls return


class Two(nn.Module):
    """A velocity and something else, a weight of its loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.more, self.kind = MLP(4, 8, 1), nn.Linear(4, 2), kind

    def forward(self, z: Tensor, t: Tensor) -> Any:
        v = self.net(z, t)
        h = torch.tanh(self.more(z)).detach()
        return {"sample": v, "h": h} if self.kind == "dict" else (v, h)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_a_second_output_comes_back_in_order(kind: str) -> None:
    zs, ts, targets, order = shuffled(8, per_row=True)
    torch.manual_seed(0)
    net = Two(kind).double()

    def loss_of(outs, targets):
        vs = [o[0] for o in outs]
        return head(vs, targets) + sum(((k + o[1].sum(1)) * o[0].sum(1)).sum() for k, o in enumerate(outs))

    def outs(velocity, zs, ts):
        found = [velocity(z, t) for z, t in zip(zs, ts, strict=True)]
        return [(o["sample"], o["h"]) if kind == "dict" else o for o in found]

    def core(velocity, zs, ts, targets):
        return loss_of(outs(velocity, zs, ts), targets)

    def in_order(velocity, zs, ts, targets):
        inverse = order.argsort(0)
        vs, hs = (torch.stack(x) for x in zip(*outs(velocity, zs, ts), strict=True))
        return loss_of(list(zip(put(vs, inverse), put(hs, inverse), strict=True)), targets)

    want = run(case(in_order, (put(zs, order), put(ts, order), targets), net), "net", W=4, gate=None)
    got = run(case(core, (zs, ts, targets), net), "net", W=4, order="time", gate=None)
    check(got, want, 1e-9, 1e-11)
    differs(got, exact(case(core, (zs, ts, targets), net)))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["sample", "namedtuple", "tuple", "dict"])
def test_wrapped_outputs(kind: str) -> None:
    args = shuffled(7)
    core, in_order = of_velocities(head)

    def unwrap(core):
        return lambda velocity, *rest: core(lambda z, t: read(velocity(z, t), kind), *rest)

    net = Returns(mlp(), kind)
    got = run(case(unwrap(core), args[:3], net), "net", W=4, order="time", gate=None)
    check(got, sorted_reference(lambda i: unwrap(in_order(i)), args, 4, net), 1e-9, 1e-11)


def test_a_second_output_of_one_call_only() -> None:
    """What is read of this call stays with it, where it is in the loss; the velocities are sorted, all of them."""

    def loss_of(outs, targets):
        return head([o[0] for o in outs], targets) + (outs[2][1].sum() * outs[0][0]).sum()

    def core(velocity, zs, ts, targets):
        return loss_of([velocity(z, t) for z, t in zip(zs, ts, strict=True)], targets)

    zs, ts, targets, order = shuffled(8)

    def in_order(velocity, zs, ts, targets):
        outs = {k: velocity(zs[k], ts[k]) for k in order[:, 0].tolist()}
        return loss_of([outs[k] for k in range(8)], targets)

    torch.manual_seed(0)
    net = Two("tuple").double()
    s = case(in_order, (zs, ts, targets), net)
    want = reference(s.core, s.function, s.trainable(), s.args, W=4)
    got = run(case(core, (zs, ts, targets), net), "params", W=4, order="time", gate=None)
    check(got, want, 1e-9, 1e-11)


# ------------------------------------------------------------------------------------------- refusals


class Mixes(nn.Module):
    """A row of the velocity depends on the other rows of the batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how = MLP(4, 8, 1), how

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        if self.how == "mean":
            z = z - z.mean(0)
        else:
            z = torch.softmax(z @ z.T, 1) @ z
        return self.net(z, t)


@pytest.mark.parametrize("estimator", ["endpoints", "debiased"])
@pytest.mark.parametrize("how", ["mean", "attention"])
def test_rows_that_mix(how: str, estimator: str) -> None:
    """They cannot change places one by one, all together they can."""
    torch.manual_seed(0)
    net = Mixes(how).double()
    core, in_order = of_velocities(head)
    step = jagg_fx.transform(lambda net, *a: core(net, *a), W=4, order="time", estimator=estimator, **OWN)
    for _ in range(2):  # refused for good, not for one step
        with pytest.raises(jagg_fx.RefusedError, match="row"):
            step.grad_and_value(net, *shuffled(8, per_row=True)[:3])
    args = shuffled(8)
    got, _ = step.grad_and_value(net, *args[:3])
    if estimator == "endpoints":
        assert relative_error(got, sorted_reference(in_order, args, 4, net).grads) < 1e-9


def test_a_shared_input_may_be_anything() -> None:
    """A prompt that all calls share, whose rows the network mixes in, stays where it is."""

    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.embed = MLP(4, 8, 1), nn.Linear(5, 4)

        def forward(self, z: Tensor, t: Tensor, prompt: Tensor) -> Tensor:
            return self.net(z + self.embed(prompt).mean(0), t)

    torch.manual_seed(0)
    net, prompt = Prompted().double(), torch.randn(6, 5, dtype=D)
    args = shuffled(8, per_row=True)
    core, in_order = of_velocities(head)

    def with_prompt(core):
        return lambda velocity, *rest: core(lambda z, t: velocity(z, t, prompt), *rest)

    got = run(case(with_prompt(core), args[:3], net), "net", W=4, order="time", gate=None)
    check(got, sorted_reference(lambda i: with_prompt(in_order(i)), args, 4, net), 1e-9, 1e-11)


def refused(core: Callable, args: tuple, text: str, **options) -> None:
    with pytest.raises(jagg_fx.RefusedError, match=text):
        run(case(core, args), "net", **{"W": 4, "order": "time", "gate": None, **options})


def test_a_rollout_inside_of_the_loss() -> None:
    def core(velocity, zs, ts, targets):
        z, total = zs[0], 0.0
        for k in range(len(ts) - 1):
            v = velocity(z, ts[k])
            total = total + ((v - targets[k]) ** 2).mean()
            z = z + (ts[k + 1] - ts[k]) * v.detach()
        return total

    zs, ts, targets = shuffled(8)[:3]
    args = (zs, ts.sort(descending=True).values, targets)
    refused(core, args, "velocity")
    torch._dynamo.reset()
    refused(core, args, "velocity", order="call", estimator="debiased")
    torch._dynamo.reset()
    c = case(core, args)
    want = reference(c.core, c.function, c.trainable(), c.args, W=4)
    check(run(c, "net", W=4, gate=None), want, 1e-9, 1e-11)  # in its own order it may


@pytest.mark.parametrize("what", ["state", "time"])
def test_an_input_that_changes_in_place(what: str) -> None:
    def core(velocity, zs, ts, targets):
        zs, ts, total = zs.clone(), ts.clone(), 0.0
        for k in range(len(ts)):
            v = velocity(zs[k], ts[k])
            total = total + ((v - targets[k]) ** 2).mean()
            if k + 1 < len(ts):
                (zs if what == "state" else ts)[k + 1].mul_(0.9)
        return total

    refused(core, shuffled(8)[:3], "place")


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"order": "time"}, {"order": "call", "estimator": "debiased"}], ids=repr)
def test_one_state_that_is_refilled(options: dict) -> None:
    def core(velocity, zs, ts, targets):
        z, total = zs[0].clone(), 0.0
        for k in range(len(ts)):
            total = total + ((velocity(z, ts[k]) - targets[k]) ** 2).mean()
            if k + 1 < len(ts):
                z.copy_(zs[k + 1])
        return total

    with pytest.raises(jagg_fx.JaggError, match="place"):
        run(case(core, shuffled(8)[:3]), "net", W=4, gate=None, **options)


def test_calls_of_other_shapes() -> None:
    def core(velocity, zs, ts, targets):
        vs = [velocity(zs[k][: 2 + k % 2], ts[k]) for k in range(len(ts))]
        return sum((v - targets[k][: 2 + k % 2]).pow(2).mean() for k, v in enumerate(vs))

    args = shuffled(8)
    c = case(core, args[:3])
    try:  # two shapes are two lanes, or none
        got = run(c, "net", W=4, order="time", gate=None)
    except jagg_fx.RefusedError:
        return
    at = [[k for k in args[3][:, 0].tolist() if k % 2 == parity] for parity in (0, 1)]

    def in_order(velocity, zs, ts, targets):
        vs = {k: velocity(zs[k][: 2 + k % 2], ts[k]) for lane in at for k in lane}
        return sum((v - targets[k][: 2 + k % 2]).pow(2).mean() for k, v in vs.items())

    s = case(in_order, args[:3])
    want = reference(s.core, s.function, s.trainable(), s.args, W=4, lanes=lambda i: i // 4)
    check(got, want, 1e-9, 1e-11)


# ------------------------------------------------------------------------------------- around the calls


def test_a_reference_call_in_the_loop() -> None:
    """Under no_grad, of another network or of the same one: data to the loss."""
    old = mlp()
    zs, ts, targets, order = shuffled(8, per_row=True)

    def core(velocity, zs, ts, targets):
        vs = []
        for z, t in zip(zs, ts, strict=True):
            with torch.no_grad():
                r = old(z, t) + velocity(0.5 * z, t)
            vs.append(velocity(z, t) - 0.3 * r)
        return head(vs, targets)

    def in_order(velocity, zs, ts, targets):
        vs = []
        for z, t in zip(zs, ts, strict=True):
            with torch.no_grad():
                r = old(z, t) + velocity(0.5 * z, t)
            vs.append(velocity(z, t) - 0.3 * r)
        return head(list(put(torch.stack(vs), order.argsort(0))), targets)

    net = MLP(4, 8, 1).double()
    s = case(in_order, (put(zs, order), put(ts, order), targets), net)
    want = reference(s.core, s.function, s.trainable(), s.args, W=4)
    check(run(case(core, (zs, ts, targets), net), "net", W=4, order="time", gate=None), want, 1e-9, 1e-11)


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["loop", "call"])
def test_autocast(where: str) -> None:
    """bf16 inside of the calls, around all of them or around each alone."""

    def autocast(on: bool):
        return torch.autocast("cpu", torch.bfloat16, enabled=on)

    def vs_of(velocity, zs, ts):
        with autocast(where == "loop"):
            vs = []
            for z, t in zip(zs, ts, strict=True):
                with autocast(True):
                    v = velocity(z, t)
                vs.append(v.float())
            return vs

    def core(velocity, zs, ts, targets):
        return head(vs_of(velocity, zs, ts), targets)

    zs, ts, targets, order = shuffled(8, per_row=True)
    zs, ts, targets = zs.float(), ts.float(), targets.float()

    def in_order(velocity, zs, ts, targets):
        return head(list(put(torch.stack(vs_of(velocity, zs, ts)), order.argsort(0))), targets)

    net = MLP(4, 8, 1)
    want = run(case(in_order, (put(zs, order), put(ts, order), targets), net), "net", W=4, gate=None)
    got = run(case(core, (zs, ts, targets), net), "net", W=4, order="time", gate=None)
    assert relative_error(got.grads, want.grads) < 1e-2
    plain = exact(case(core, (zs, ts, targets), net))
    assert relative_error(got.grads, plain.grads) > 2e-2


# ------------------------------------------------------------------------------------------------ the work


def test_half_of_the_backwards_are_left() -> None:
    c = case(coupled, shuffled(9)[:3])
    after = explain(c, W=4, order="time", gate=None).sides[1]
    assert (after.forward_calls, after.backward_calls) == (9, 5)
    torch._dynamo.reset()
    counts = {}
    for name, options in {"sorted": {"W": 4, "order": "time"}, "exact": {"W": 1}}.items():
        step = jagg_fx.transform(c.loss("net"), **OWN, **options)
        step(c.net, *c.args).backward()
        counts[name] = matmuls(lambda step=step: step(c.net, *c.args).backward())
    one = counts["exact"] / 9
    forward = 2  # of the network's two layers
    assert counts["sorted"] == 9 * forward + 5 * (one - forward)


def test_no_more_is_saved_than_for_sorted_calls() -> None:
    torch.manual_seed(0)
    net = MLP(4, 32, depth=4).double()
    args = shuffled(8, rows=64, per_row=True)[:3]
    report = explain(case(coupled, args, net), W=4, order="time", gate=None)
    assert 0 < report.saved_bytes_after < 0.6 * report.saved_bytes_before
