"""Wrong input: each a clear error, at the earliest moment, and nothing left changed after it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import jagg_fx
from jagg_fx.backend import Backend

from .helpers import EAGER
from .losses import MLP, STYLES, Case, linear, quadratic, simple_case

# --------------------------------------------------------------------- option values, refused at once

BAD = {
    "W of zero": {"W": 0},
    "negative W": {"W": -4},
    "fractional W": {"W": 2.5},
    "whole float W": {"W": 4.0},
    "bool W": {"W": True},
    "text W": {"W": "4"},
    "W of None": {"W": None},
    "text tau": {"tau": "high"},
    "tau of None": {"tau": None},
    "tau of NaN": {"tau": float("nan")},
    "bool tau": {"tau": True},
    "unknown gate": {"gate": "sine"},
    "gate of True": {"gate": True},
    "unknown estimator": {"estimator": "magic"},
    "estimator of None": {"estimator": None},
    "unknown weights": {"weights": "sigma"},
    "unknown compiler": {"compiler": "tvm"},
    "time of a float": {"time": 1.5},
    "velocity of a number": {"velocity": 3},
}


MAKE = {
    "transform": lambda **options: jagg_fx.transform(lambda params: None, **options),
    "backend": lambda **options: jagg_fx.backend(**options),
}


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("name", BAD)
def test_bad_values(name: str, make: str) -> None:
    """The message names the option and the value."""
    (option, value) = next(iter(BAD[name].items()))
    with pytest.raises(ValueError, match=rf"(?s){option}.*{value}"):
        MAKE[make](**BAD[name])


@pytest.mark.parametrize("make", MAKE)
def test_unknown_option(make: str) -> None:
    with pytest.raises((TypeError, ValueError), match="windows"):
        MAKE[make](windows=4)


def test_a_backend_cannot_know_a_time_by_its_argument() -> None:
    with pytest.raises(jagg_fx.OptionError, match=r"time='sigma'.*jagg_fx.velocity"):
        jagg_fx.backend(time="sigma")


def test_loss_fn_must_be_callable() -> None:
    with pytest.raises((TypeError, ValueError), match=r"callable|function"):
        jagg_fx.transform(torch.zeros(()), W=4)


def test_errors_are_runtime_errors() -> None:
    assert issubclass(jagg_fx.JaggError, RuntimeError)


# ----------------------------------------------------------------- losses that cannot be transformed


def refuse(loss_fn, subject, args: tuple, match: str, entry: str = "call", **options) -> str:
    """The call raises a JaggError that matches; returns its text."""
    step = jagg_fx.transform(loss_fn, **{"W": 4, **EAGER, **options})
    entries = {"call": step, "grad_and_value": step.grad_and_value, "func": torch.func.grad(step)}
    with pytest.raises(jagg_fx.JaggError, match=match) as caught:
        entries[entry](subject, *args)
    return str(caught.value)


def _refuse_both(core, match: str, **options) -> None:
    case = simple_case(linear, T=4)
    refuse(net_style_of(core), copy.deepcopy(case.net), case.args, match, **options)
    refuse(params_style_of(case, core), case.trainable(), case.args, match, "grad_and_value", **options)


def net_style_of(core):
    return lambda net, *args: core(net, *args)


def params_style_of(case: Case, core):
    return lambda params, *args: core(lambda *a, **k: functional_call(case.net, params, a, k), *args)


def test_loss_is_not_a_scalar() -> None:
    def core(velocity, zs, ts, cs):
        return torch.stack([(velocity(zs[k], ts[k]) * cs[k]).sum() for k in range(4)])

    _refuse_both(core, r"(?i)scalar")


def test_loss_is_not_a_tensor() -> None:
    _refuse_both(lambda velocity, zs, ts, cs: None, r"(?i)scalar|tensor")


def test_aux_without_has_aux() -> None:
    def core(velocity, zs, ts, cs):
        return linear(velocity, zs, ts, cs), ts

    _refuse_both(core, r"has_aux")


def test_has_aux_without_aux() -> None:
    _refuse_both(linear, r"has_aux|aux", has_aux=True)


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("returned", ["vector", "tuple", "nothing"])
def test_what_is_no_loss_is_not_compiled(monkeypatch, returned: str, has_aux: bool) -> None:
    """The compilation of a large network takes minutes: a wrong return value must not wait for it."""
    case = simple_case(linear, T=4)

    def loss_fn(net, zs, ts, cs):
        terms = torch.stack([(net(zs[k], ts[k]) * cs[k]).sum() for k in range(4)])
        return {"vector": terms, "tuple": (terms, terms.sum()), "nothing": None}[returned]

    def compiled(self, gm, inputs, plan):
        raise AssertionError("compiled")

    monkeypatch.setattr(Backend, "_compile", compiled)
    match = r"must return \(loss, aux\)" if has_aux and returned != "tuple" else "must be a scalar tensor; it is"
    refuse(loss_fn, copy.deepcopy(case.net), case.args, match, has_aux=has_aux)


@pytest.mark.parametrize("around", [False, True])
def test_batch_normalisation_in_a_checkpoint_is_named(around: bool) -> None:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def body(self, z, t):
            return self.norm(self.into(z) * t)

        def forward(self, z, t):
            return self.body(z, t) if around else checkpoint(self.body, z, t, use_reentrant=False)

    def loss_fn(net, zs, ts, cs):
        call = (lambda *a: checkpoint(net, *a, use_reentrant=False)) if around else net
        return sum((call(zs[k], ts[k]) * cs[k]).sum() for k in range(4))

    args = simple_case(linear, T=4).args
    text = refuse(loss_fn, Net().double(), args, r"norm \(BatchNorm1d\)")
    assert "changed in place" in text
    assert "GroupNorm" in text
    step = jagg_fx.transform(loss_fn, W=4, gate=None, **EAGER)
    assert torch.isfinite(step(Net().double().eval(), *args))


def test_no_call() -> None:
    case = simple_case(linear, T=4)

    def by_hand(params, zs, ts, cs):
        return sum((torch.tanh(zs[k] @ params["w"]) * cs[k]).sum() for k in range(4))

    refuse(by_hand, {"w": torch.randn(4, 4).double().requires_grad_()}, case.args, r"velocity")


def test_a_time_for_each_token() -> None:
    """Tokens see each other: weights by the times of one token are wrong for what it takes from another."""
    net = nn.MultiheadAttention(4, 1, batch_first=True).double()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = net

        def forward(self, z, t):
            x = z + t[..., None]
            return self.attention(x, x, x, need_weights=False)[0]

    def loss(net, zs, ts):
        return sum((net(z, t) ** 2).sum() for z, t in zip(zs, ts, strict=True))

    start = torch.rand(2, 3).double()
    ts = [start * (1 - 0.2 * k) for k in range(4)]
    refuse(loss, Net(), ([torch.randn(2, 3, 4).double() for _ in ts], ts), r"not per token")


def test_no_call_of_a_module() -> None:
    case = simple_case(linear, T=4)

    def unrelated(net, zs, ts, cs):
        return sum((p**2).sum() for p in net.parameters())

    text = refuse(unrelated, copy.deepcopy(case.net), case.args, r"(?i)no .*call|found")
    assert "velocity" in text


def test_one_call() -> None:
    def core(velocity, zs, ts, cs):
        return (velocity(zs[0], ts[0]) * cs[0]).sum()

    _refuse_both(core, r"(?i)\b(one|once|1|single)\b")


@pytest.mark.parametrize("style", STYLES)
def test_two_candidate_modules_one_without_a_time(style: str) -> None:
    """A prompt encoder in the loop is called as often as the velocity: which one is meant is for the user to say."""
    torch.manual_seed(0)
    nets = nn.ModuleDict({"first": MLP(4), "second": nn.Sequential(nn.Linear(4, 4), nn.Tanh())}).double()
    zs, ts, cs = simple_case(linear, T=4).args

    def loss_fn(subject, zs, ts, cs):
        total = zs.new_zeros(())
        for k in range(4):
            for name in ("first", "second"):
                args = (zs[k], ts[k]) if name == "first" else (zs[k],)
                if style == "params":
                    inner = {n.split(".", 1)[1]: p for n, p in subject.items() if n.startswith(name)}
                    v = functional_call(nets[name], inner, args)
                else:
                    v = subject[name](*args)
                total = total + (v * cs[k]).sum()
        return total

    params = {k: p.detach().clone().requires_grad_() for k, p in nets.named_parameters()}
    text = refuse(loss_fn, params if style == "params" else nets, (zs, ts, cs), r"(?i)two|2|several|candidates")
    assert "velocity=" in text


@pytest.mark.parametrize("entry", ["call", "grad_and_value", "func"])
def test_a_true_chain(entry: str) -> None:
    """z of the next step carries gradient from the last velocity."""
    case = simple_case(linear, T=4)

    def core(velocity, zs, ts, cs):
        z, total = zs[0], zs.new_zeros(())
        for k in range(4):
            v = velocity(z, ts[k])
            z = z - 0.2 * v
            total = total + (v * cs[k]).sum()
        return total

    refuse(params_style_of(case, core), case.trainable(), case.args, r"detach", entry)


def test_a_velocity_that_is_never_called() -> None:
    case = simple_case(linear, T=4)
    refuse(case.loss("params"), case.trainable(), case.args, r"velocity", velocity=MLP(4).double())


def test_a_time_argument_that_does_not_exist() -> None:
    case = simple_case(linear, T=4)
    refuse(case.loss("params"), case.trainable(), case.args, r"sigma_of_step", time="sigma_of_step")
    refuse(case.loss("params"), case.trainable(), case.args, r"(?i)time.*5|5.*time|position", time=5)


def test_wrong_number_of_arguments_says_so() -> None:
    """A user's own mistake in the call is not hidden behind an internal message."""
    case = simple_case(linear, T=4)
    step = jagg_fx.transform(case.loss("params"), W=4, **EAGER)
    with pytest.raises((TypeError, jagg_fx.JaggError), match=r"argument|directions|cs"):
        step(case.trainable(), *case.args[:2])


def test_an_error_of_the_loss_comes_through() -> None:
    """What the user's own code raises is still readable."""

    def core(velocity, zs, ts, cs):
        raise ValueError("advantages are missing")

    case = simple_case(linear, T=4)
    step = jagg_fx.transform(params_style_of(case, core), W=4, **EAGER)
    with pytest.raises(Exception, match="advantages are missing"):
        step(case.trainable(), *case.args)


# ------------------------------------------------------------------------------ and nothing is left over


def _state(net: nn.Module) -> dict:
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    configs = [torch._dynamo.config, torch._functorch.config, torch._inductor.config]
    state: dict = {c.__name__: c.get_config_copy() for c in configs}
    for name, module in net.named_modules():
        state[f"attributes of {name}"] = {k: id(v) for k, v in vars(module).items()}
        state[f"hooks of {name}"] = [len(h) for k, h in sorted(vars(module).items()) if k.endswith("_hooks")]
    state["patches"] = [nn.Module.__call__, nn.Module.forward, functional_call, torch.func.functional_call]
    state["modes"] = [torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()]
    state["rng"] = torch.get_rng_state().tolist()
    return state


@pytest.mark.parametrize("style", STYLES)
def test_nothing_global_is_left_changed(style: str) -> None:
    case = simple_case(quadratic, T=4)
    subject = case.trainable() if style == "params" else case.net
    before = _state(case.net)
    step = jagg_fx.transform(case.loss(style), W=4, **EAGER)
    step.grad_and_value(subject, *case.args)
    assert _state(case.net) == before
    step(subject, *case.args)
    assert _state(case.net) == before


@pytest.mark.parametrize("style", STYLES)
def test_nothing_is_left_changed_after_an_exception(style: str) -> None:
    def core(velocity, zs, ts, cs):
        z, total = zs[0], zs.new_zeros(())
        for k in range(4):
            v = velocity(z, ts[k])
            z = z - 0.2 * v
            total = total + (v * cs[k]).sum()
        return total

    plain = simple_case(linear, T=4)
    case = Case(plain.net, core, plain.args)
    subject = case.trainable() if style == "params" else case.net
    before = _state(case.net)
    with pytest.raises(jagg_fx.JaggError):
        jagg_fx.transform(case.loss(style), W=4, **EAGER)(subject, *case.args)
    assert _state(case.net) == before


def test_an_unknown_option_is_named_with_its_neighbour() -> None:
    for make in (jagg_fx.transform, jagg_fx.explain):
        with pytest.raises(jagg_fx.OptionError, match=r"gates= is not an option.*gate=\?"):
            make(lambda net: net, gates=None)
    with pytest.raises(jagg_fx.OptionError, match="not an option"):
        jagg_fx.backend(estimater="exact")


def test_a_state_of_something_else_is_refused() -> None:
    step = jagg_fx.transform(lambda net: net, estimator="memory")
    with pytest.raises(jagg_fx.OptionError, match="no state of a step"):
        step.load_state_dict({"foo": 1})
    with pytest.raises(jagg_fx.OptionError, match="memory"):
        step.load_state_dict(jagg_fx.transform(lambda net: net).state_dict())


def test_a_memory_of_parameters_that_are_elsewhere_is_refused() -> None:
    case = simple_case(linear, T=4, noise=0.3)
    loss_fn = case.loss("net")
    step = jagg_fx.transform(
        lambda scale, *args: scale * loss_fn(case.net, *args), estimator="memory", compiler="eager"
    )
    with pytest.raises(jagg_fx.RefusedError, match="first argument"):
        step(2.0, *case.args)


def test_a_loss_that_fails_by_itself_is_told_apart_from_one_that_cannot_be_captured() -> None:
    case = simple_case(linear, T=4)
    zs, ts, cs = case.args
    step = jagg_fx.transform(case.loss("net"), W=4, compiler="eager")
    with pytest.raises(jagg_fx.CaptureError, match="itself fails"):
        step(case.net, zs, ts, cs[..., :3])


def test_one_timestep_has_nothing_to_group() -> None:
    net = nn.Linear(3, 3)

    class Velocity(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net

        def forward(self, z, t):
            return self.inner(z) * t

    step = jagg_fx.transform(lambda v, z, t: (v(z, t) ** 2).mean(), compiler="eager")
    with pytest.raises(jagg_fx.CaptureError, match=r"more than once.*[Oo]ne timestep|Only one velocity call"):
        step(Velocity(), torch.randn(2, 3), torch.tensor(0.5))


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        (lambda z: nn.functional.dropout(z, 0.5), "set the dropout to 0"),
        (lambda z: z + torch.randn_like(z), "draw once, before the loop"),
        (lambda z: z.mul_(2), "write on a clone"),
    ],
)
def test_the_cure_is_that_of_what_was_found(change, cure: str) -> None:
    case = simple_case(linear, T=4)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = copy.deepcopy(case.net)

        def forward(self, z, t):
            return self.inner(change(z), t)

    def loss_fn(net, zs, ts, cs):
        return sum((net(zs[k], ts[k]) * cs[k]).sum() for k in range(4))

    assert cure in refuse(loss_fn, Net(), case.args, "inside the velocity call")
