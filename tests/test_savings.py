"""What a step can save besides backwards: known velocities, activations of other groups, calls made as one."""

from __future__ import annotations

import pytest
import torch
from jagg_fx.models import DiT
from torch import Tensor, fx, nn

import jagg_fx
from jagg_fx.backend import Backend
from jagg_fx.options import check as options_of
from jagg_fx.transform import Step

from .helpers import EAGER
from .losses import MLP, quadratic, rough_states
from .reference import relative_error

TOL = 1e-12


def batch(
    T: int = 10, dtype: torch.dtype = torch.float64, rows: bool = False
) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    ts = torch.linspace(0.9, 0.1, T, dtype=dtype)
    zs = rough_states(ts.double(), 3, 4).to(dtype)
    return MLP(4).to(dtype), zs, ts[:, None].expand(T, 3).contiguous() if rows else ts, torch.randn_like(zs)


def loss(net: nn.Module, zs: Tensor, ts: Tensor, targets: Tensor) -> Tensor:
    return quadratic(net, zs, ts, targets)


def velocities_of(net: nn.Module, zs: Tensor, ts: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [net(z, t) for z, t in zip(zs, ts, strict=True)]


# ------------------------------------------------------------------------------------------- velocities=

KINDS = {
    "no gate": {"gate": None},
    "open gate": {"tau": -2.0},
    "shut gate": {"tau": 2.0},
    "drawn steps": {"estimator": "debiased"},
    "knots": {"estimator": "knots", "gate": None},
    "W=8": {"W": 8, "gate": None},
}


EACH = [k if k in ("no gate", "shut gate") else pytest.param(k, marks=pytest.mark.thorough) for k in KINDS]


@pytest.mark.parametrize("kind", EACH)
def test_known_velocities_change_nothing(kind: str) -> None:
    net, *args = batch()
    step = jagg_fx.transform(loss, **EAGER, **KINDS[kind])
    start = step.state_dict()
    want, value = step.grad_and_value(net, *args)
    step.load_state_dict(start)  # the same draws
    got, again = step.grad_and_value(net, *args, velocities=velocities_of(net, *args[:2]))
    assert relative_error(got, want) < TOL
    assert float(value - again) == pytest.approx(0, abs=1e-12)


def test_known_velocities_stand_in_the_order_of_the_calls() -> None:
    """Whatever the order of their times, in one tensor or in a list."""
    net, zs, ts, targets = batch(rows=True)
    order = torch.randperm(len(ts), generator=torch.Generator().manual_seed(1))
    args = (zs[order], ts[order], targets[order])
    step = jagg_fx.transform(loss, **EAGER, gate=None, order="time")
    want, _ = step.grad_and_value(net, *args)
    got, _ = step.grad_and_value(net, *args, velocities=torch.stack(velocities_of(net, *args[:2])))
    assert relative_error(got, want) < TOL


def test_pruned_forwards_are_not_run() -> None:
    """What is handed in for a pruned call is believed: its cotangent follows it."""
    net, *args = batch(T=8)
    calls = []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net

        def forward(self, z: Tensor, t: Tensor) -> Tensor:
            return torch.ops.tests_savings.seen(self.inner(z, t))

    COUNT.append(calls.append)
    counted = Counted()
    step = jagg_fx.transform(loss, **EAGER, gate=None)
    velocities = velocities_of(net, *args[:2])
    step.grad_and_value(counted, *args)
    calls.clear()
    step.grad_and_value(counted, *args)
    assert len(calls) == 8
    step.grad_and_value(counted, *args, velocities=velocities)
    calls.clear()
    step.grad_and_value(counted, *args, velocities=velocities)
    assert len(calls) == 4  # the endpoints of two groups
    COUNT.clear()


COUNT: list = []


@torch.library.custom_op("tests_savings::seen", mutates_args=())
def seen(x: Tensor) -> Tensor:
    for count in COUNT:
        count(1)
    return x.clone()


seen.register_fake(lambda x: torch.empty_like(x))
seen.register_autograd(lambda ctx, g: g)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_stale_velocities_are_caught(dtype: torch.dtype) -> None:
    net, *args = batch(dtype=dtype)
    step = jagg_fx.transform(loss, **EAGER, gate=None)
    velocities = velocities_of(net, *args[:2])
    step(net, *args, velocities=velocities)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.1)
    with pytest.raises(jagg_fx.StaleError, match=r"velocities\[0\].*other parameters"):
        step(net, *args, velocities=velocities)
    step(net, *args)  # the plain step is still there
    fresh = velocities_of(net, *args[:2])
    step(net, *args, velocities=fresh)
    with pytest.raises(jagg_fx.StaleError):
        step(net, *args, velocities=[*fresh[1:], fresh[0]])


def test_velocities_of_another_number_or_shape_are_refused() -> None:
    net, *args = batch()
    step = jagg_fx.transform(loss, **EAGER, gate=None)
    velocities = velocities_of(net, *args[:2])
    for wrong in (velocities[:-1], [v[:, :2] for v in velocities], [1.0] * 10):
        with pytest.raises(jagg_fx.OptionError, match="10 calls with gradient"):
            step(net, *args, velocities=wrong)
    with pytest.raises(jagg_fx.OptionError, match="one tensor for each call"):
        step(net, *args, velocities=3)
    with pytest.raises(jagg_fx.OptionError, match="gate='head'"):
        jagg_fx.transform(loss, **EAGER, gate="head")(net, *args, velocities=velocities)


def test_a_loss_keeps_its_own_argument_of_that_name() -> None:
    net, *args = batch()

    def own(net, zs, ts, targets, velocities):
        return loss(net, zs, ts, targets) * velocities

    step = jagg_fx.transform(own, **EAGER, gate=None)
    with torch.no_grad():
        assert float(step(net, *args, velocities=torch.tensor(2.0))) == pytest.approx(2 * float(loss(net, *args)))


def test_known_velocities_under_torch_func_and_no_grad() -> None:
    net, *args = batch()
    velocities = velocities_of(net, *args[:2])
    params = dict(net.named_parameters())

    def functional(params, *args):
        return quadratic(lambda z, t: torch.func.functional_call(net, params, (z, t)), *args)

    step = jagg_fx.transform(functional, **EAGER, gate=None)
    want = torch.func.grad(step)(params, *args)
    got = torch.func.grad(step)(params, *args, velocities=velocities)
    assert relative_error(got, want) < TOL
    with torch.no_grad():
        assert float(step(params, *args, velocities=velocities)) == pytest.approx(float(loss(net, *args)))


# ------------------------------------------------------------------------------------------- activations=


@pytest.mark.parametrize("activations", ["group", "recompute"])
@pytest.mark.parametrize("kind", EACH)
def test_less_memory_changes_nothing(kind: str, activations: str) -> None:
    net, *args = batch()
    want, value = jagg_fx.transform(loss, **EAGER, **KINDS[kind]).grad_and_value(net, *args)
    step = jagg_fx.transform(loss, **EAGER, **KINDS[kind], activations=activations)
    got, again = step.grad_and_value(net, *args)
    assert relative_error(got, want) < TOL
    assert float(value - again) == pytest.approx(0, abs=1e-12)
    # the tangent is no part of what was computed with the loss
    out = step(net, *args)
    (3 * out).backward(retain_graph=True)
    out.backward()
    if KINDS[kind].get("estimator") != "debiased":
        assert relative_error({n: p.grad for n, p in net.named_parameters()}, {n: 4 * g for n, g in want.items()}) < TOL


def alive(graph: fx.Graph) -> int:
    """How many calls have values that their backward still waits for, at most, over the order of a graph."""
    nodes = list(graph.nodes)
    at = {n: i for i, n in enumerate(nodes)}
    spans = []
    for node in nodes:
        if node.op == "call_function" and "invoke_subgraph" in str(node.target):
            kept = [u for g in node.users for u in g.users if "invoke_subgraph" in str(u.target)]
            if kept:
                spans.append((at[node], max(at[u] for u in kept)))
    return max(sum(a <= i < b for a, b in spans) for i in range(len(nodes)))


def scaled_by_all(net: nn.Module, zs: Tensor, ts: Tensor, targets: Tensor) -> Tensor:
    """No cotangent is known before every velocity is."""
    return quadratic(net, zs, ts, targets).log()


@pytest.mark.parametrize(
    ("loss_fn", "activations", "most"),
    [
        # merged into the later endpoint is nothing of the first one: its forward can wait until that backward is done
        pytest.param(loss, "group", (1, 1), id="group"),
        pytest.param(scaled_by_all, "group", (4, 8), id="group, cotangents that need all"),
        pytest.param(scaled_by_all, "recompute", (1, 1), id="recompute"),
    ],
)
def test_activation_graphs_alive_do_not_grow_with_timesteps(loss_fn, activations: str, most: tuple[int, int]) -> None:
    for T, expected in zip((8, 16), most, strict=True):
        net, *args = batch(T=T)
        seen: dict[str, int] = {}

        def watch(name, joint, seen=seen) -> None:
            seen[name] = alive(joint.graph)

        options = options_of(**EAGER, gate=None, activations=activations)
        Step(loss_fn, options, Backend(options, watch)).grad_and_value(net, *args)
        assert seen["slim"] == T // 2
        assert seen["whole"] == expected


def test_another_output_with_gradient_is_refused() -> None:
    net, *args = batch()

    def two(net, *args):
        value = loss(net, *args)
        return value, value * 2

    step = jagg_fx.transform(two, **EAGER, gate=None, has_aux=True, activations="group")
    with pytest.raises(jagg_fx.RefusedError, match=r"2 outputs have one.*Detach"):
        step(net, *args)


def test_a_loss_that_is_not_one_number_is_refused() -> None:
    """At the tangent 1 of what? In a pipeline of torch.compile the reduction may come later."""
    net, *args = batch(T=4)

    def rows(net, zs, ts, targets):
        return sum(((net(z, t) - x) ** 2).mean(1) for z, t, x in zip(zs, ts, targets, strict=True))

    compiled = torch.compile(rows, backend=jagg_fx.backend(**EAGER, gate=None, activations="group"), fullgraph=True)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"must be one number.*shape \(3,\)"):
        compiled(net, *args)


def test_an_unknown_way_to_keep_activations() -> None:
    with pytest.raises(jagg_fx.OptionError, match="'keep', 'group', 'recompute'"):
        jagg_fx.transform(loss, activations="none")


# ------------------------------------------------------------------------------------------- batched=

TOGETHER = {
    "no gate": {"gate": None},
    "ragged": {"gate": None, "W": 8},
    "exact": {"estimator": "exact", "gate": None},
    "knots": {"estimator": "knots", "gate": None},
    "drawn steps": {"estimator": "debiased"},
    "times per row": {"gate": None, "order": "time"},
}
SOME = [k if k in ("no gate", "drawn steps") else pytest.param(k, marks=pytest.mark.thorough) for k in TOGETHER]


@pytest.mark.parametrize("kind", SOME)
def test_calls_made_as_one_change_nothing(kind: str) -> None:
    net, *args = batch(rows=kind == "times per row")
    want, value = jagg_fx.transform(loss, **EAGER, **TOGETHER[kind]).grad_and_value(net, *args)
    step = jagg_fx.transform(loss, **EAGER, **TOGETHER[kind], batched=True)
    start = step.state_dict()
    got, again = step.grad_and_value(net, *args)
    assert relative_error(got, want) < TOL
    assert float(value - again) == pytest.approx(0, abs=1e-12)
    if kind != "exact":
        step.load_state_dict(start)
        got, _ = step.grad_and_value(net, *args, velocities=velocities_of(net, *args[:2]))
        assert relative_error(got, want) < TOL


def regions(loss_fn, net: nn.Module, args: list, **options) -> list[str]:
    """Bodies that the finished graph calls."""
    seen: list[str] = []

    def watch(name, joint) -> None:
        if name == "settle":
            seen.extend(n.args[0].target for n in joint.graph.nodes if "invoke_subgraph" in str(n.target))

    chosen = options_of(**EAGER, **options)
    Step(loss_fn, chosen, Backend(chosen, watch)).grad_and_value(net, *args)
    return seen


def test_two_forwards_and_one_backward_are_left() -> None:
    net, *args = batch(T=12)
    assert len(regions(loss, net, args, gate=None, batched=True)) == 3
    assert len(regions(loss, net, args, gate=None, estimator="exact", batched=True)) == 2


class Mixing(nn.Module):
    """Rows see each other, and so they must where calls are made as one: but calls must not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        h = torch.tanh(self.a(z) + t)
        return self.b(h - h.mean(0, keepdim=True))


def test_rows_of_one_call_may_depend_on_each_other() -> None:
    _, *args = batch()
    net = Mixing().double()
    want, _ = jagg_fx.transform(loss, **EAGER, gate=None).grad_and_value(net, *args)
    got, _ = jagg_fx.transform(loss, **EAGER, gate=None, batched=True).grad_and_value(net, *args)
    assert relative_error(got, want) < TOL


def test_attention_of_many_calls_is_one() -> None:
    torch.manual_seed(0)
    net = DiT(8, 1, 4, 16, 1, 2).double()
    for p in net.parameters():  # a DiT starts at zero
        nn.init.normal_(p, std=0.3)
    zs, cs = torch.randn(2, 5, 3, 1, 8, 8, dtype=torch.float64)
    args = net, zs, torch.linspace(0.9, 0.1, 5, dtype=torch.float64), cs
    want, _ = jagg_fx.transform(loss, **EAGER, gate=None, W=5).grad_and_value(*args)
    attentions: list[int] = []

    def watch(name, joint) -> None:
        bodies = [m for n, m in joint.gm.named_children() if n.startswith("partitioned_fw")]
        attentions.extend(sum("attention" in str(n.target) for n in m.graph.nodes) for m in bodies)

    options = options_of(5, **EAGER, gate=None, batched=True)
    got, _ = Step(loss, options, Backend(options, watch)).grad_and_value(*args)
    assert relative_error(got, want) < TOL
    assert set(attentions) == {1}  # one block, however many calls


def test_lanes_are_made_apart() -> None:
    net, *args = batch(T=6)

    def guided(net, zs, ts, targets):
        return sum(
            ((1.5 * net(z, t) - 0.5 * net(-z, t) - x) ** 2).mean() for z, t, x in zip(zs, ts, targets, strict=True)
        )

    want, _ = jagg_fx.transform(guided, **EAGER, gate=None).grad_and_value(net, *args)
    got, _ = jagg_fx.transform(guided, **EAGER, gate=None, batched=True).grad_and_value(net, *args)
    assert relative_error(got, want) < TOL


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "gate=None"),
        ({"gate": None, "estimator": "memory"}, "'memory'"),
        ({"gate": None, "activations": "group"}, "one after the other"),
        ({"gate": None, "batched": 2}, "True or False"),
    ],
)
def test_options_that_do_not_go_with_calls_made_as_one(options: dict, text: str) -> None:
    with pytest.raises(jagg_fx.OptionError, match=text):
        jagg_fx.transform(loss, **{"batched": True, **options})


def test_calls_that_cannot_be_made_as_one_are_refused() -> None:
    net, *args = batch(T=4)

    def chained(net, zs, ts, targets):
        z, total = zs[0], 0.0
        for k in range(4):
            v = net(z, ts[k])
            z = zs[k] + 0.1 * v.detach()
            total = total + ((v - targets[k]) ** 2).mean()
        return total

    def own(net, zs, ts, targets):
        weight = next(net.parameters())
        return sum(((net(zs[k] * weight.mean(), ts[k]) - targets[k]) ** 2).mean() for k in range(4))

    for loss_fn, text in ((chained, "stored states, or use batched=False"), (own, "carries gradient")):
        with pytest.raises(jagg_fx.RefusedError, match=text):
            jagg_fx.transform(loss_fn, **EAGER, gate=None, batched=True)(net, *args)


@pytest.mark.parametrize("options", [{"batched": True}, {"activations": "group"}, {"activations": "recompute"}])
def test_audit_and_explain_see_each_call(options: dict) -> None:
    net, *args = batch(T=6)
    want = jagg_fx.transform(loss, **EAGER, gate=None).audit(net, *args)
    got = jagg_fx.transform(loss, **EAGER, gate=None, **options).audit(net, *args)
    assert got.relative_error == pytest.approx(want.relative_error)
    assert [g.relative_error for g in got.groups] == pytest.approx([g.relative_error for g in want.groups])
    report = jagg_fx.explain(loss, net, *args, gate=None, **options)
    assert len(report.sites) == 6
    assert [g.kept for g in report.groups] == [(0, 3), (4, 5)]
    assert "at most" in str(report)


@pytest.mark.inductor
def test_savings_with_generated_code() -> None:
    net, *args = batch(T=5, dtype=torch.float32)
    velocities = velocities_of(net, *args[:2])
    want, _ = jagg_fx.transform(loss, **EAGER, gate=None).grad_and_value(net, *args)
    for activations in ("group", "recompute"):
        step = jagg_fx.transform(loss, gate=None, activations=activations)
        got, _ = step.grad_and_value(net, *args, velocities=velocities)
        assert relative_error(got, want) < 1e-5
    got, _ = jagg_fx.transform(loss, gate=None, batched=True).grad_and_value(net, *args)
    assert relative_error(got, want) < 1e-5
