"""Steps live in training loops: other shapes, several steps, threads, copies, scalers, autocast."""

from __future__ import annotations

import copy
import functools
import threading

import pytest
import torch

import jagg_fx

from .helpers import EAGER, check, exact, run, wanted
from .losses import MLP, STYLES, Case, coupled, grpo_case, lora, quadratic, simple_case
from .reference import reference, relative_error


@pytest.mark.parametrize("style", STYLES)
def test_changed_timesteps_batch_and_dtype(style: str) -> None:
    """One step, called with other shapes and precisions, and back again."""
    nets = {torch.float64: MLP(4).double(), torch.float32: MLP(4)}
    step = None
    for T, batch, dtype in [
        (6, 3, torch.float64),
        (9, 3, torch.float64),
        (9, 5, torch.float64),
        (9, 1, torch.float64),
        (6, 3, torch.float32),
        (6, 3, torch.float64),
    ]:
        case = simple_case(coupled, net=nets[dtype], T=T, batch=batch, dtype=dtype, noise=0.3)
        subject = case.trainable() if style == "params" else case.net
        step = step or jagg_fx.transform(case.loss(style), W=4, gate=None, **EAGER)
        grads, loss = step.grad_and_value(subject, *case.args)
        want = wanted(case, W=4)
        tol = 1e-10 if dtype == torch.float64 else 1e-5
        assert relative_error(grads, want.grads) < tol
        assert abs(float(loss.detach()) - float(want.loss)) < tol


def test_many_steps_of_one_factory() -> None:
    """Losses made by one function share its code object: none may meet another's graph or options."""
    cases = [simple_case(quadratic, T=4, noise=0.5, seed=s) for s in range(10)]
    for i, case in enumerate(cases):
        W = [1, 4, 3, 4][i % 4]
        options = {"W": W, "gate": None}
        check(run(case, **options), wanted(case, W=W), 1e-10, 1e-12)


@pytest.mark.parametrize("entry", ["grad_and_value", "backend"])
def test_same_loss_with_other_options(entry: str) -> None:
    """One function, transformed with several options one after the other."""
    case = simple_case(quadratic, T=6, noise=0.5)
    loss_fn = case.loss("params")
    for options in ({"W": 1}, {"W": 4}, {"W": 4, "weights": "index"}, {"W": 6}, {"W": 4}):
        want = wanted(case, **options)
        params = case.trainable()
        if entry == "backend":
            backend = jagg_fx.backend(gate=None, **EAGER, **options)
            torch.compile(loss_fn, backend=backend, fullgraph=True)(params, *case.args).backward()
            grads = {k: p.grad for k, p in params.items()}
        else:
            step = jagg_fx.transform(loss_fn, gate=None, **EAGER, **options)
            grads, _ = step.grad_and_value(params, *case.args)
        assert relative_error(grads, want.grads) < 1e-10, options


def test_parameters_change_between_calls() -> None:
    """Nothing of the first call's weights is kept."""
    case = simple_case(coupled, T=5, noise=0.3)
    step = jagg_fx.transform(case.loss("net"), W=4, gate=None, **EAGER)
    for _ in range(3):
        grads, _ = step.grad_and_value(case.net, *case.args)
        assert relative_error(grads, wanted(case, W=4).grads) < 1e-10
        with torch.no_grad():
            for p in case.net.parameters():
                p.add_(0.1 * torch.randn_like(p))


def test_freezing_between_calls() -> None:
    case = simple_case(coupled, T=5, noise=0.3)
    step = jagg_fx.transform(case.loss("net"), W=4, gate=None, **EAGER)
    step.grad_and_value(case.net, *case.args)
    case.net.layers[0].requires_grad_(False)
    grads, _ = step.grad_and_value(case.net, *case.args)
    assert grads["layers.0.weight"] is None
    assert relative_error({k: g for k, g in grads.items() if g is not None}, wanted(case, W=4).grads) < 1e-10


def test_grad_scaler() -> None:
    """A scaled loss, unscaled again before the optimiser: the usual fp16 loop."""
    case = simple_case(quadratic, T=4, noise=0.3, dtype=torch.float32)
    net = copy.deepcopy(case.net)
    step = jagg_fx.transform(case.loss("net"), W=4, gate=None, **EAGER)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler.scale(step(net, *case.args)).backward()
    scaler.unscale_(optimiser)
    got = {k: p.grad.clone() for k, p in net.named_parameters()}
    assert relative_error(got, wanted(case, W=4).grads) < 1e-5
    scaler.step(optimiser)
    scaler.update()


def test_eval_networks_pass() -> None:
    """BatchNorm and dropout are ordinary layers in eval mode."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.norm, self.drop = MLP(4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)

        def forward(self, z, t):
            return self.norm(self.drop(self.net(z, t)))

    net = Net().eval()
    net.norm.running_mean.normal_()
    case = simple_case(quadratic, net=net, T=4, noise=0.3)
    check(run(case, "net", W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


def test_threads() -> None:
    """Several threads call one step at once."""
    case = simple_case(coupled, T=5, noise=0.3)
    step = jagg_fx.transform(case.loss("params"), W=4, gate=None, **EAGER)
    want, errors = wanted(case, W=4), []
    step.grad_and_value(case.trainable(), *case.args)

    def work():
        try:
            for _ in range(5):
                grads, _ = step.grad_and_value(case.trainable(), *case.args)
                errors.append(relative_error(grads, want.grads))
        except Exception as e:  # reported by the assertion below: a thread cannot fail a test
            errors.append(e)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(errors) == 15, errors
    assert all(isinstance(e, float) and e < 1e-10 for e in errors), errors


@pytest.mark.parametrize("first", [True, False], ids=["called before", "fresh"])
def test_copies_work(first: bool) -> None:
    case = simple_case(coupled, T=5, noise=0.3)
    step = jagg_fx.transform(case.loss("params"), W=4, gate=None, **EAGER)
    if first:
        step.grad_and_value(case.trainable(), *case.args)
    grads, _ = copy.copy(step).grad_and_value(case.trainable(), *case.args)
    assert relative_error(grads, wanted(case, W=4).grads) < 1e-10


def test_vmap_is_refused() -> None:
    case = simple_case(coupled, T=4)
    step = jagg_fx.transform(case.loss("params"), W=4, **EAGER)
    zs, ts, third = case.args
    with pytest.raises(jagg_fx.JaggError, match="vmap"):
        torch.func.vmap(step, in_dims=(None, 0, None, None))(case.trainable(), torch.stack([zs, zs]), ts, third)


@pytest.mark.parametrize("way", ["autograd", "func"])
def test_double_backward_is_refused(way: str) -> None:
    case = simple_case(coupled, T=4)
    step = jagg_fx.transform(case.loss("params"), W=4, gate=None, **EAGER)
    params = case.trainable()

    def norm(params):
        return sum((g**2).sum() for g in torch.func.grad(step)(params, *case.args).values())

    def by_autograd():
        grads = torch.autograd.grad(step(params, *case.args), list(params.values()), create_graph=True)
        sum((g**2).sum() for g in grads).backward()

    go = by_autograd if way == "autograd" else lambda: torch.func.grad(norm)(params)
    with pytest.raises(RuntimeError, match=r"(?i)twice|double|second|higher"):
        go()


def test_a_gradient_by_autograd_grad() -> None:
    case = grpo_case(T=4, net=lora(4))
    step = jagg_fx.transform(case.loss("params"), W=4, gate=None, **EAGER)
    params = case.trainable()
    grads = torch.autograd.grad(step(params, *case.args), list(params.values()))
    assert relative_error(dict(zip(params, grads, strict=True)), wanted(case, W=4).grads) < 1e-10


class Prompted(torch.nn.Module):
    """A prompt encoder that runs once, and a velocity that reads its output at every timestep."""

    def __init__(self):
        super().__init__()
        self.encoder, self.body = torch.nn.Linear(3, 4), MLP(4)

    def forward(self, z, t, prompt):
        return self.body(z + torch.tanh(prompt), t)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("options", [{"W": 2}, {"W": 4, "gate": None}, {"W": 4, "tau": 1.5}], ids=str)
def test_a_trained_prompt(options: dict, style: str) -> None:
    """The cotangent of an input of the calls is interpolated with that of the parameters."""
    torch.manual_seed(0)
    net = Prompted().double()
    zs, ts, cs = simple_case(quadratic, T=5, noise=0.3).args
    tokens = torch.randn(3, 3, dtype=torch.float64)

    def core(velocity, encode, zs, ts, cs):
        prompt = encode(tokens)
        return sum(((velocity(zs[k], ts[k], prompt) - cs[k]) ** 2).mean() for k in range(5))

    def on_params(params, *args):
        def encode(x):
            return torch.nn.functional.linear(x, params["encoder.weight"], params["encoder.bias"])

        return core(lambda *a: torch.func.functional_call(net, params, a), encode, *args)

    def on_net(net, *args):
        return core(net, net.encoder, *args)

    params = {k: p.detach().clone().requires_grad_() for k, p in net.named_parameters()}

    def function(params, *inputs):
        return torch.func.functional_call(net, params, inputs)

    def encode(x):
        return torch.nn.functional.linear(x, params["encoder.weight"], params["encoder.bias"])

    W = options["W"] if options.get("tau", 0) < 1 else 1
    want = reference(lambda velocity, *args: core(velocity, encode, *args), function, params, (zs, ts, cs), W=W)
    step = jagg_fx.transform(on_params if style == "params" else on_net, **EAGER, **options)
    grads, _ = step.grad_and_value(params if style == "params" else net, zs, ts, cs)
    assert relative_error(grads, want.grads) < 1e-10


@pytest.mark.parametrize("style", STYLES)
def test_both_outputs_of_a_network_are_read(style: str) -> None:
    """A velocity and a learned variance, both in the loss: no cotangent may be lost."""

    class Two(torch.nn.Module):
        def __init__(self, joined: bool):
            super().__init__()
            self.body, self.variance, self.joined = MLP(4), MLP(4), joined

        def forward(self, z, t):
            v, s = self.body(z, t), torch.tanh(self.variance(z, t))
            return torch.cat([v, s], 1) if self.joined else (v, s)

    def loss_of(split):
        def core(velocity, zs, ts, cs):
            total = zs.new_zeros(())
            for k in range(5):
                v, s = split(velocity(zs[k], ts[k]))
                total = total + ((v - cs[k]) ** 2 * torch.exp(-s) + s).mean()
            return total

        return core

    torch.manual_seed(0)
    joined = Two(True).double()
    apart = copy.deepcopy(joined)
    apart.joined = False
    args = simple_case(quadratic, T=5, noise=0.3).args
    want = wanted(Case(joined, loss_of(lambda out: out.chunk(2, 1)), args), W=4)
    try:
        got = run(Case(apart, loss_of(lambda out: out), args), style, W=4, gate=None)
    except jagg_fx.JaggError as e:
        assert "output" in str(e)  # noqa: PT017
        return
    check(got, want, 1e-10, 1e-12)


@pytest.mark.parametrize("kind", ["flag", "step number", "scale", "float time"])
def test_calls_that_differ_in_python_values(kind: str) -> None:
    """Calls with other code are other velocities, with groups of their own: a group of one is exact, and where
    no group is left, a warning says that nothing is saved."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = MLP(4)
            self.bias = torch.nn.Parameter(torch.randn(6, 4))

        def forward(self, z, t, extra=None):
            v = self.body(z, torch.as_tensor(t, dtype=z.dtype))
            if extra is None:
                return v
            if kind == "step number":
                return v + self.bias[extra]
            if kind == "scale":
                return v * (1 + extra)
            return torch.sin(v) if extra else v

    def core(velocity, zs, ts, cs):
        total = zs.new_zeros(())
        for k in range(5):
            if kind == "float time":
                v = velocity(zs[k], 0.9 - 0.1 * k)
            else:
                extra = {"step number": k, "scale": 0.1 * k, "flag": k % 2 == 0}[kind]
                v = velocity(zs[k], ts[k], extra)
            total = total + ((v - cs[k]) ** 2).mean()
        return total

    case = simple_case(core, net=Net(), T=5, noise=0.3)
    if kind == "flag":
        check(run(case, W=4, gate=None), wanted(case, W=4, lanes=lambda k: k % 2), 1e-10, 1e-12)
    else:
        with pytest.warns(jagg_fx.JaggWarning, match="nothing is saved"):
            got = run(case, W=4, gate=None)
        check(got, exact(case), 1e-10, 1e-12)


class Tripled(torch.autograd.Function):
    """A user's own backward, which is not the derivative: it must be kept as it is."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return 3 * g


class Dressed(torch.nn.Module):
    """An MLP with something around it that real networks have."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.net, self.label = kind, MLP(4), torch.nn.Embedding(5, 4)
        if kind == "hooks":
            self.net.register_forward_hook(lambda module, inputs, output: 2 * output)
            self.net.layers[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.5,))
        elif kind == "weight norm":
            torch.nn.utils.parametrizations.weight_norm(self.net.layers[0])
        elif kind == "spectral norm":
            torch.nn.utils.parametrizations.spectral_norm(self.net.layers[0])
            self.eval()
        elif kind == "encoder layer":
            self.tokens = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, z, t, labels, extra):
        if self.kind == "labels":
            return self.net(z + self.label(labels), t)
        if self.kind == "nested inputs":
            return self.net(z * extra["a"] + extra["b"][0], t)
        if self.kind == "own backward":
            return Tripled.apply(self.net(z, t))
        if self.kind == "encoder layer":
            return self.net(self.tokens(z[:, None]).squeeze(1), t)
        return self.net(z, t)


KINDS = ["hooks", "weight norm", "spectral norm", "encoder layer", "labels", "nested inputs", "own backward"]


@pytest.mark.parametrize("kind", KINDS)
def test_networks_as_users_have_them(kind: str) -> None:
    def core(velocity, zs, ts, cs):
        labels = torch.tensor([1, 2, 1])
        total = zs.new_zeros(())
        for k in range(zs.shape[0]):
            v = velocity(zs[k], ts[k], labels, {"a": cs[0], "b": [cs[k]]})
            total = total + ((v - cs[k]) ** 2).mean()
        return total

    case = simple_case(core, net=Dressed(kind), T=5, noise=0.3)
    check(run(case, STYLES[len(kind) % 2], W=4, gate=None), wanted(case, W=4), 1e-10, 1e-12)


def test_noise_drawn_by_the_loss() -> None:
    """Outside of the velocity randomness is harmless: the same draws as in eager autograd."""

    def core(velocity, zs, ts, cs):
        noise = torch.randn_like(zs[0])
        return sum(((velocity(zs[k], ts[k]) - cs[k] + noise) ** 2).mean() for k in range(5))

    case = simple_case(core, T=5, noise=0.3)
    torch.manual_seed(5)
    want = wanted(case, W=4)
    torch.manual_seed(5)
    check(run(case, W=4, gate=None), want, 1e-10, 1e-12)


def test_keyword_arguments_of_the_loss() -> None:
    """What the loop passes by name: tensors and plain numbers, which may change from step to step."""
    plain = simple_case(quadratic, T=4, noise=0.3)

    def loss_fn(net, zs, *, ts, targets, scale=1.0):
        return scale * quadratic(net, zs, ts, targets)

    zs, ts, targets = plain.args
    step = jagg_fx.transform(loss_fn, W=4, gate=None, **EAGER)
    want = wanted(plain, W=4)
    for scale in (1.0, 2.5, -1.0):
        grads, loss = step.grad_and_value(plain.net, zs, ts=ts, targets=targets, scale=scale)
        assert relative_error(grads, {k: scale * g for k, g in want.grads.items()}) < 1e-10
        assert abs(float(loss) - scale * float(want.loss)) < 1e-12


def test_the_loss_is_an_object() -> None:
    """A callable object with its own settings, a bound method, a functools.partial."""

    class Objective:
        def __init__(self, scale: float):
            self.scale = scale

        def __call__(self, net, *args):
            return self.scale * quadratic(net, *args)

        def method(self, net, *args):
            return self.scale * quadratic(net, *args)

    plain = simple_case(quadratic, T=4, noise=0.3)
    want = {k: 3 * g for k, g in wanted(plain, W=4).grads.items()}
    objective = Objective(3.0)
    bound = functools.partial(lambda scale, net, *args: scale * quadratic(net, *args), 3.0)
    for loss_fn in (objective, objective.method, bound):
        grads, _ = jagg_fx.transform(loss_fn, W=4, gate=None, **EAGER).grad_and_value(plain.net, *plain.args)
        assert relative_error(grads, want) < 1e-10


def test_a_loss_module() -> None:
    """All calls inside one module, as DDP needs it: loss_fn(module, ...) is the module's own forward."""

    class LossModule(torch.nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, *args):
            return quadratic(self.net, *args)

    plain = simple_case(quadratic, T=4, noise=0.3)
    module = LossModule(plain.net)
    step = jagg_fx.transform(lambda module, *args: module(*args), W=4, gate=None, **EAGER)
    grads, _ = step.grad_and_value(module, *plain.args)
    assert relative_error({k[4:]: g for k, g in grads.items()}, wanted(plain, W=4).grads) < 1e-10


def test_an_input_that_trains() -> None:
    """A condition with gradient (a trained prompt) is interpolated like the parameters: exact at W=2."""
    torch.manual_seed(0)
    net = MLP(4).double()
    prompt = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))

    def core(velocity, zs, ts, cs, prompt):
        return sum(((velocity(zs[k] + prompt, ts[k]) - cs[k]) ** 2).mean() for k in range(4))

    plain = simple_case(quadratic, net=net, T=4)
    case = Case(net, core, (*plain.args, prompt))
    exact(case)
    (want,) = torch.autograd.grad(core(net, *case.args), [prompt])
    step = jagg_fx.transform(case.loss("net"), W=2, gate=None, **EAGER)
    step(net, *case.args).backward()
    torch.testing.assert_close(prompt.grad, want, rtol=1e-10, atol=1e-12)
