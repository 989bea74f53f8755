"""The same gradient through every entry, and a gradient that lives like any other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

import jagg_fx

from .helpers import EAGER, check, run, wanted
from .losses import MLP, STYLES, Case, coupled, frozen_first, grpo_case, linear, quadratic, read, simple_case
from .reference import relative_error

# torch.func takes a pytree of tensors, so no module
WAYS = [(e, s) for e in ("backward", "grad_and_value", "func", "backend") for s in STYLES]
WAYS.remove(("func", "net"))


@pytest.mark.parametrize(("entry", "style"), WAYS)
def test_same_gradient(entry: str, style: str) -> None:
    case = grpo_case(T=6, beta=0.04)
    check(run(case, style, entry, W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


@pytest.mark.parametrize(("entry", "style"), WAYS)
def test_same_gradient_with_a_gate(entry: str, style: str) -> None:
    """One group open, one shut."""
    from .test_reference import half_rough

    case = half_rough(coupled)
    want = wanted(case, W=4, gate="cosine", tau=0.995)
    assert [g.open for g in want.groups] == [True, False]
    check(run(case, style, entry, W=4), want, 1e-10, 1e-12)


class Wrapped(nn.Module):
    """Its whole body is one other module, which has the same calls."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, z, t):
        return self.net(z, t)


@pytest.mark.parametrize(("entry", "style"), WAYS)
def test_a_module_around_the_network(entry: str, style: str) -> None:
    case = simple_case(quadratic, net=Wrapped(Wrapped(MLP(4))), T=4, noise=0.3)
    check(run(case, style, entry, W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


@pytest.mark.parametrize(("entry", "style"), [w for w in WAYS if w[1] == "net"])
def test_frozen_parameters_get_none(entry: str, style: str) -> None:
    case = simple_case(quadratic, net=frozen_first(4), T=4)
    got = run(case, style, entry, W=4, gate=None)
    assert got.grads["layers.0.weight"] is None
    check(got, wanted(case, W=4), 1e-10, 1e-12)


def test_torch_func_grad_keeps_the_structure_of_params() -> None:
    """Nested parameters come back nested, by torch.func.grad and by grad_and_value."""
    case = simple_case(linear, T=4, noise=0.3)

    def loss_fn(params, *args):
        flat = {**params["head"], **params["body"][0]}
        return linear(lambda z, t: functional_call(case.net, flat, (z, t)), *args)

    flat = case.trainable()
    head = {k: v for k, v in flat.items() if "layers" not in k}
    params = {"body": [{k: v for k, v in flat.items() if "layers" in k}], "head": head}
    step = jagg_fx.transform(loss_fn, W=4, gate=None, **EAGER)
    want = wanted(case, W=4)
    for grads in (torch.func.grad(step)(params, *case.args), step.grad_and_value(params, *case.args)[0]):
        assert set(grads) == {"body", "head"}
        got = {**grads["head"], **grads["body"][0]}
        assert relative_error(got, want.grads) < 1e-10


def test_torch_func_differentiates_plain_tensors() -> None:
    """functorch users pass tensors that do not require grad."""
    case = simple_case(linear, T=4, noise=0.3)
    params = {k: p.detach() for k, p in case.trainable().items()}
    step = jagg_fx.transform(case.loss("params"), W=4, gate=None, **EAGER)
    want = wanted(case, W=4)
    assert relative_error(torch.func.grad(step)(params, *case.args), want.grads) < 1e-10
    grads, loss = step.grad_and_value(params, *case.args)
    assert relative_error(grads, want.grads) < 1e-10
    torch.testing.assert_close(loss, want.loss, rtol=1e-12, atol=0)


def test_a_list_of_parameters() -> None:
    net = MLP(4).double()
    names = [k for k, _ in net.named_parameters()]

    def loss_fn(params, *args):
        named = dict(zip(names, params, strict=True))
        return quadratic(lambda z, t: functional_call(net, named, (z, t)), *args)

    case = Case(net, quadratic, simple_case(quadratic, T=4, noise=0.3).args)
    params = list(case.trainable().values())
    grads, _ = jagg_fx.transform(loss_fn, W=4, gate=None, **EAGER).grad_and_value(params, *case.args)
    assert isinstance(grads, list)
    assert relative_error(dict(zip(names, grads, strict=True)), wanted(case, W=4).grads) < 1e-10


@pytest.mark.parametrize("style", STYLES)
def test_backward_accumulates_scales_and_fires_hooks(style: str) -> None:
    """What GradScaler, DDP and gradient accumulation build on: .grad, hooks, a scaled loss."""
    case = simple_case(quadratic, T=4, noise=0.3)
    want = wanted(case, W=4)
    subject = case.trainable() if style == "params" else copy.deepcopy(case.net)
    named = subject if style == "params" else dict(subject.named_parameters())
    first = next(iter(named.values()))
    seen, after = [], []
    first.register_hook(lambda g: seen.append(g.clone()))
    first.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    step = jagg_fx.transform(case.loss(style), W=4, gate=None, **EAGER)
    step(subject, *case.args).backward()
    (8.0 * step(subject, *case.args)).backward()
    got = {k: p.grad for k, p in named.items()}
    assert relative_error(got, {k: 9 * g for k, g in want.grads.items()}) < 1e-10
    name = next(iter(want.grads))
    assert len(seen) == len(after) == 2
    torch.testing.assert_close(seen[1], 8 * want.grads[name], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(after[1], 9 * want.grads[name], rtol=1e-9, atol=1e-12)


def test_the_loss_is_part_of_a_larger_one() -> None:
    """A regulariser outside of the step adds its own gradient; the step's is scaled by the chain rule."""
    case = simple_case(quadratic, T=4, noise=0.3)
    want = wanted(case, W=4)
    params = case.trainable()
    step = jagg_fx.transform(case.loss("params"), W=4, gate=None, **EAGER)
    loss = step(params, *case.args)
    (loss**2 + sum((p**2).sum() for p in params.values())).backward()
    total = {k: 2 * want.loss * g + 2 * params[k].detach() for k, g in want.grads.items()}
    assert relative_error({k: p.grad for k, p in params.items()}, total) < 1e-10


@pytest.mark.parametrize("style", STYLES)
def test_parameters_read_by_the_loss_itself(style: str) -> None:
    """Weight decay inside the loss: a path to the parameters that is no velocity call."""
    case = simple_case(quadratic, T=4, noise=0.3)
    plain = wanted(case, W=4)
    subject = case.trainable() if style == "params" else copy.deepcopy(case.net)

    def loss_fn(subject, *args):
        tensors = subject.values() if style == "params" else subject.parameters()
        return case.loss(style)(subject, *args) + 0.5 * sum((p**2).sum() for p in tensors)

    grads, _ = jagg_fx.transform(loss_fn, W=4, gate=None, **EAGER).grad_and_value(subject, *case.args)
    values = case.trainable()
    assert relative_error(grads, {k: g + values[k].detach() for k, g in plain.grads.items()}) < 1e-10


def test_an_optimiser_learns_with_it() -> None:
    case = simple_case(quadratic, T=4)
    net = copy.deepcopy(case.net)
    step = jagg_fx.transform(case.loss("net"), W=4, **EAGER)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        optimiser.zero_grad()
        loss = step(net, *case.args)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


# ------------------------------------------------------------------------- saying what the velocity is


@pytest.mark.parametrize("entry", ["backward", "grad_and_value", "func", "backend"])
def test_velocity_marks_a_call(entry: str) -> None:
    """A plain function of tensors, which nothing but the mark can find."""

    def core(velocity, zs, ts, cs):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            total = total + (jagg_fx.velocity(velocity, zs[k], ts[k]) * cs[k]).sum()
        return total

    class Plain(Case):
        def loss(self, style):
            def loss_fn(params, *args):
                def field(z, t):
                    h = torch.tanh(z @ params["a"] + t * params["b"])
                    return h @ params["c"]

                return core(field, *args)

            return loss_fn

        def function(self, params, z, t):
            return torch.tanh(z @ params["a"] + t * params["b"]) @ params["c"]

    plain = simple_case(linear, T=5, noise=0.3)
    net = nn.ParameterDict({k: torch.randn(4, 4).double() for k in "ac"} | {"b": torch.randn(4).double()})
    case = Plain(net, core, plain.args)
    check(run(case, "params", entry, W=4, gate=None), _wanted_plain(case), 1e-10, 1e-12)


def _wanted_plain(case: Case):
    from .reference import reference

    return reference(linear, case.function, case.trainable(), case.args, W=4)


@pytest.mark.parametrize("style", STYLES)
def test_velocity_marks_a_module(style: str) -> None:
    def core(velocity, zs, ts, cs):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            total = total + (jagg_fx.velocity(velocity, zs[k], t=ts[k]) * cs[k]).sum()
        return total

    plain = simple_case(linear, T=5, noise=0.3)
    case = Case(plain.net, core, plain.args)
    check(run(case, style, W=4, gate=None), wanted(plain, W=4), 1e-10, 1e-12)


def test_velocity_alone_is_the_call() -> None:
    net = MLP(4).double()
    z, t = torch.randn(3, 4).double(), torch.tensor(0.5).double()
    assert torch.equal(jagg_fx.velocity(net, z, t), net(z, t))
    assert torch.equal(jagg_fx.velocity(net, z, t=t), net(z, t))
    doubled = jagg_fx.velocity(lambda z, t, *, scale: scale * net(z, t), z, t, scale=2)
    assert torch.equal(doubled, 2 * net(z, t))


def test_velocity_option_names_a_function() -> None:
    """``velocity=f``: f is called by the loss through a global or a closure, unmarked."""
    net = MLP(4).double()

    def field(params, z, t):
        return functional_call(net, params, (z, t))

    def loss_fn(params, *args):
        return linear(lambda z, t: field(params, z, t), *args)

    plain = simple_case(linear, T=5, noise=0.3)
    case = Case(net, linear, plain.args)
    step = jagg_fx.transform(loss_fn, W=4, gate=None, velocity=field, **EAGER)
    grads, _ = step.grad_and_value(case.trainable(), *case.args)
    assert relative_error(grads, wanted(case, W=4).grads) < 1e-10


@pytest.mark.parametrize("style", STYLES)
def test_velocity_option_picks_one_of_two_modules(style: str) -> None:
    """A learned value head is called as often as the velocity; the option tells them apart."""
    torch.manual_seed(0)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.v, self.head = MLP(4), nn.Linear(4, 4)

    both = Both().double()
    zs, ts, cs = simple_case(linear, T=4, noise=0.3).args

    def loss_fn(params, zs, ts, cs):
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            if style == "params":
                inner = {k[2:]: p for k, p in params.items() if k.startswith("v.")}
                outer = {k[5:]: p for k, p in params.items() if k.startswith("head.")}
                v = functional_call(both.v, inner, (zs[k], ts[k]))
                out = functional_call(both.head, outer, (v,))
            else:
                v = params.v(zs[k], ts[k])
                out = params.head(v)
            total = total + (out * cs[k]).sum()
        return total

    params = {k: p.detach().clone().requires_grad_() for k, p in both.named_parameters()}

    def core(velocity, zs, ts, cs):
        outer = {k[5:]: p for k, p in params.items() if k.startswith("head.")}
        return sum((functional_call(both.head, outer, (velocity(zs[k], ts[k]),)) * cs[k]).sum() for k in range(4))

    def function(params, z, t):
        return functional_call(both.v, {k[2:]: p for k, p in params.items() if k.startswith("v.")}, (z, t))

    from .reference import reference

    want = reference(core, function, params, (zs, ts, cs), W=4)
    step = jagg_fx.transform(loss_fn, W=4, gate=None, velocity=both.v, **EAGER)
    subject = params if style == "params" else both
    grads, _ = step.grad_and_value(subject, zs, ts, cs)
    assert relative_error(grads, want.grads) < 1e-10


def test_a_submodule_is_the_velocity() -> None:
    """loss_fn(module, ...) whose velocity is a part of the module."""

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.transformer = MLP(4)
            self.unused = nn.Linear(2, 2)

    policy = Policy().double()

    def loss_fn(policy, *args):
        return linear(lambda z, t: read(policy.transformer(z, t), "tensor"), *args)

    plain = simple_case(linear, T=4, noise=0.3)
    case = Case(policy.transformer, linear, plain.args)
    grads, _ = jagg_fx.transform(loss_fn, W=4, gate=None, **EAGER).grad_and_value(policy, *case.args)
    want = {f"transformer.{k}": g for k, g in wanted(case, W=4).grads.items()}
    assert relative_error(grads, want) < 1e-10
    assert grads["unused.weight"] is None


@pytest.mark.inductor
def test_backend_inductor() -> None:
    case = simple_case(quadratic, net=MLP(2, 4, depth=1), T=4, batch=2, dim=2, noise=0.3)
    check(run(case, "net", "backend", W=4, gate=None, compiler="inductor"), wanted(case, W=4), 1e-10, 1e-12)
