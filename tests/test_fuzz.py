"""Random losses: the gradient of the reference, or a JaggError; no other exception, no mismatch.

A VerifyError is a JaggError that reports a bug of the rewrite, so it counts as a failure.

``python -m tests.fuzz`` draws thousands; the default profile a few.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field

import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st
from torch import nn

import jagg_fx

from .helpers import check, run, wanted
from .losses import MLP, STYLES, Affine, Case, Conv, Returns, Tied, lora, read

TOL = {torch.float64: (1e-9, 1e-11), torch.float32: (1e-4, 1e-5), torch.bfloat16: (5e-2, 2e-2)}


@dataclass
class Plan:
    """Everything drawn; printed by hypothesis when an example fails."""

    T: int
    W: int
    batch: int
    dim: int
    dtype: torch.dtype
    net: str
    frozen: tuple[int, ...]
    output: str
    times: str
    layout: str
    lanes: int
    detached: bool
    terms: tuple[str, ...]
    coupling: str
    order: str
    aux: bool
    style: str
    entry: str
    options: dict = field(default_factory=dict)
    shuffled: bool = False
    seed: int = 0


NETS = ["affine", "mlp", "deep", "tied", "lora", "conv", "attention", "split", "bare", "views", "widening", "matrices"]
TIMES = ["uniform", "random", "rising", "per row", "expanded", "int64"]
LAYOUTS = ["contiguous", "list", "overlapping", "strided", "transposed", "one state"]
TERMS = [
    "linear",
    "quadratic",
    "cos",
    "norm",
    "clipped",
    "cumulative",
    "masked",
    "skipping",
    "elementwise max",
]
COUPLINGS = ["sum", "mean", "logsumexp", "product", "max"]
ORDERS = ["interleaved", "calls first", "comprehension"]


@st.composite
def plans(draw) -> Plan:
    style = draw(st.sampled_from(STYLES))
    entries = ["backward", "grad_and_value", "backend"] + (["func"] if style == "params" else [])
    options = draw(
        st.sampled_from(
            [
                {"gate": None},
                {"gate": None, "weights": "index"},
                {"gate": "cosine", "tau": 1.5},
                {"gate": "cosine-mean", "tau": -2.0},
                {"gate": "cosine", "tau": 0.9},
                {"gate": None, "estimator": "exact"},
            ]
        )
    )
    lanes = draw(st.sampled_from([1, 1, 1, 2]))
    times, layout = draw(st.sampled_from(TIMES)), draw(st.sampled_from(LAYOUTS))
    if lanes == 2 and draw(st.booleans()):
        options = {**options, "lane": 2}
    # calls in any order, grouped by their time: the same groups as those of the calls in order
    shuffled = times != "rising" and layout not in ("overlapping", "one state") and draw(st.booleans())
    if shuffled:
        options = {**options, "order": "time"}
    return Plan(
        T=draw(st.integers(2, 7)),
        W=draw(st.integers(1, 6)),
        batch=draw(st.integers(1, 4)),
        dim=draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from([torch.float64] * 3 + [torch.float32, torch.bfloat16])),
        net=draw(st.sampled_from(NETS)),
        frozen=tuple(draw(st.lists(st.integers(0, 7), max_size=3))),
        output=draw(st.sampled_from(["tensor"] * 3 + ["sample", "tuple", "dict"])),
        times=times,
        layout=layout,
        lanes=lanes,
        detached=draw(st.booleans()),
        terms=tuple(draw(st.lists(st.sampled_from(TERMS), min_size=1, max_size=3))),
        coupling=draw(st.sampled_from(COUPLINGS)),
        order=draw(st.sampled_from(ORDERS)),
        aux=draw(st.booleans()),
        style=style,
        entry=draw(st.sampled_from(entries)),
        options=options,
        shuffled=shuffled,
        seed=draw(st.integers(0, 2**20)),
    )


class Attention(nn.Module):
    """Tokens that see each other: (B, N, D)."""

    def __init__(self, dim: int):
        super().__init__()
        self.qkv, self.out, self.time = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(1, dim)

    def forward(self, z, t):
        t = t.to(z.dtype).reshape(-1, 1, 1).expand(z.shape[0], 1, 1)
        q, k, v = self.qkv(z + self.time(torch.sin(t))).chunk(3, dim=-1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v)) + z


class Split(nn.Module):
    """Learns a variance beside the velocity, and drops it: the output is a part of a larger tensor."""

    def __init__(self, dim: int):
        super().__init__()
        self.net, self.out = MLP(dim, 5), nn.Linear(dim, 2 * dim)

    def forward(self, z, t):
        return self.out(self.net(z, t)).chunk(2, dim=-1)[0]


class Bare(nn.Module):
    """The velocity is a view of a parameter: no operation at all between them."""

    def __init__(self, dim: int):
        super().__init__()
        self.value = nn.Parameter(torch.randn(dim))

    def forward(self, z, t):
        return self.value.expand_as(z)


class Views(nn.Module):
    """Works on transposed and reshaped views, in place on values of its own, and returns a view."""

    def __init__(self, dim: int):
        super().__init__()
        self.net, self.scale = MLP(dim, 5), nn.Parameter(torch.randn(dim, 1))

    def forward(self, z, t):
        h = self.net(z, t).t()
        h = h * self.scale
        h += 1
        h[0] *= 2
        return h.reshape(-1, z.shape[0]).t()


class Matrices(nn.Module):
    """Weights that are multiplied as they are, transposed, sliced, normalised, and with each other."""

    def __init__(self, dim: int):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(dim, dim)), nn.Parameter(torch.randn(2, dim, dim))

    def forward(self, z, t):
        h = torch.tanh(z @ self.a + t.to(z.dtype).reshape(-1, 1))
        h = torch.tanh(h @ self.b[0].t()) + h @ (self.a @ self.b[1])
        return h * (self.a / (1 + self.a.norm(dim=1, keepdim=True))).diagonal()


class Widening(nn.Module):
    """Computes in float64 inside, whatever comes in."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim))

    def forward(self, z, t):
        c = t.double().reshape(-1, *[1] * (z.dim() - 1))
        return torch.sin(z.double() @ self.weight.double() + c).to(z.dtype)


class Thousandth(nn.Module):
    """Integer timesteps, divided inside."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, z, timestep):
        return self.net(z, timestep.to(z.dtype) / 1000)


def make_net(plan: Plan) -> tuple[nn.Module, tuple[int, ...]]:
    """The network and the shape of one row of its states."""
    d = plan.dim
    net, shape = {
        "affine": lambda: (Affine(d), (d,)),
        "mlp": lambda: (MLP(d, 5), (d,)),
        "deep": lambda: (MLP(d, 4, depth=4), (d,)),
        "tied": lambda: (Tied(d, 5), (d,)),
        "lora": lambda: (lora(d, 5), (d,)),
        "conv": lambda: (Conv(d, 2), (d, 3, 3)),
        "attention": lambda: (Attention(d), (3, d)),
        "split": lambda: (Split(d), (d,)),
        "bare": lambda: (Bare(d), (d,)),
        "views": lambda: (Views(d), (d,)),
        "widening": lambda: (Widening(d), (d,)),
        "matrices": lambda: (Matrices(d), (d,)),
    }[plan.net]()
    if plan.net != "lora":
        parameters = list(net.parameters())
        for i in plan.frozen:
            if i < len(parameters) - 1:  # the last one trains always
                parameters[i].requires_grad_(False)
    if plan.times == "int64":
        net = Thousandth(net)
    return Returns(net, plan.output).to(plan.dtype), shape


def make_times(plan: Plan, g: torch.Generator) -> torch.Tensor:
    T, B = plan.T, plan.batch
    if plan.times in ("uniform", "expanded"):
        return torch.linspace(0.95, 0.1, T, dtype=torch.float64)
    shape = (T, B) if plan.times == "per row" else (T,)
    gaps = 0.2 + torch.rand(shape, generator=g, dtype=torch.float64)
    ts = gaps.cumsum(0) / (1.2 * T + 0.1)
    if plan.times == "int64":
        return (1000 * ts).long().flip(0)
    return ts if plan.times == "rising" else ts.flip(0)


def make_states(plan: Plan, shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor | list[torch.Tensor]:
    T, B = plan.T, plan.batch
    draw = torch.randn(T + 1, B, *shape, generator=g, dtype=torch.float64).to(plan.dtype)
    if plan.layout == "list":
        return list(draw[:T])
    if plan.layout == "overlapping":
        return draw  # the loss takes zs[:-1] and zs[1:]
    if plan.layout == "strided":
        wide = torch.randn(2 * T, B, *shape, 2, generator=g, dtype=torch.float64).to(plan.dtype)
        return wide[::2, ..., 1]
    if plan.layout == "transposed":
        return draw[:T].transpose(0, 1).contiguous().transpose(0, 1)
    if plan.layout == "one state":
        return draw[:1].expand(T, *draw.shape[1:])
    return draw[:T].clone()


def term(kind: str, v, z, target, weight):
    """A scalar of one velocity, through ordinary ops."""
    if kind == "in place":
        x = v * 1
        x -= target
        x.mul_(2)
        return x.square().float().mean()
    x = v.float() if v.dtype == torch.bfloat16 else v
    target, z = target.to(x.dtype), z.to(x.dtype)
    if kind == "linear":
        return (x * target).sum()
    if kind == "quadratic":
        return ((x - target) ** 2).mean()
    if kind == "cos":
        return torch.cos(x + z).mean()
    if kind == "norm":
        return (x + 2 * target).flatten(1).norm(dim=1).mean()
    if kind == "clipped":
        ratio = torch.exp(0.1 * (x * target).flatten(1).mean(1))
        return torch.max(-weight * ratio, -weight * ratio.clamp(0.98, 1.02)).mean()
    if kind == "cumulative":
        return (x.flatten(1).cumsum(1) * target.flatten(1)).mean()
    if kind == "masked":
        return torch.where(z > 0, x, torch.zeros_like(x)).square().mean()
    if kind == "skipping":
        return (x[..., :1] * target[..., :1]).sum() + x[0].sum()
    if kind == "elementwise max":
        return torch.maximum(x, target).mean()
    raise ValueError(kind)


def make_core(plan: Plan):
    def core(velocity, zs, ts, targets, weight, cond):
        T = plan.T
        after = None
        if plan.layout == "overlapping":
            zs, after = zs[:-1], zs[1:]

        def call(k, lane):
            t = ts[k]
            if plan.times == "expanded":
                t = t.expand(plan.batch)
            z = zs[k] if lane == 0 else zs[k] + cond
            return read(velocity(z, t), plan.output)

        def value(k, vs):
            v = vs[0]
            if plan.lanes == 2:
                free = vs[1].detach() if plan.detached else vs[1]
                v = free + 1.5 * (v - free)
            target = targets[k] if after is None else targets[k] + after[k]
            return sum(term(kind, v, zs[k], target, weight) for kind in plan.terms)

        if plan.order == "comprehension":
            vs = [[call(k, lane) for lane in range(plan.lanes)] for k in range(T)]
            losses = [value(k, v) for k, v in enumerate(vs)]
        elif plan.order == "calls first":
            vs = []
            for k in range(T):
                vs.append([call(k, lane) for lane in range(plan.lanes)])
            losses = []
            for k in range(T - 1, -1, -1):  # and read them backwards
                losses.append(value(k, vs[k]))
        else:
            losses = []
            for k in range(T):
                losses.append(value(k, [call(k, lane) for lane in range(plan.lanes)]))
        stacked = torch.stack(losses)
        loss = {
            "sum": stacked.sum,
            "mean": stacked.mean,
            "logsumexp": lambda: stacked.logsumexp(0),
            "product": lambda: (1 + 0.1 * torch.tanh(stacked)).prod(),
            "max": lambda: stacked.max() + 0.1 * stacked.mean(),
        }[plan.coupling]()
        if plan.aux:
            aux = {"terms": stacked.detach()}
            if plan.entry != "func":  # torch.func takes nothing but tensors
                aux["count"] = T
            return loss, aux
        return loss

    return core


def make_case(plan: Plan) -> Case:
    torch.manual_seed(plan.seed)
    g = torch.Generator().manual_seed(plan.seed)
    net, shape = make_net(plan)
    ts = make_times(plan, g)
    if ts.is_floating_point():
        ts = ts.to(torch.float32 if plan.dtype == torch.bfloat16 else plan.dtype)
    zs = make_states(plan, shape, g)
    targets = torch.randn(plan.T, plan.batch, *shape, generator=g, dtype=torch.float64).to(plan.dtype)
    weight = torch.randn(plan.batch, generator=g, dtype=torch.float64)
    weight = weight.to(torch.float32 if plan.dtype == torch.bfloat16 else plan.dtype)
    cond = torch.randn(shape, generator=g, dtype=torch.float64).to(plan.dtype)
    return Case(net, make_core(plan), (zs, ts, targets, weight, cond), has_aux=plan.aux)


@given(plan=plans())
def test_right_or_refused(plan: Plan) -> None:
    torch._dynamo.reset()
    case = make_case(plan)
    for_reference = {k: v for k, v in plan.options.items() if k not in ("tau", "order", "lane")}
    want = wanted(
        case,
        W=plan.W,
        tau=plan.options.get("tau", 0.995),
        lanes=(lambda k: k % 2) if plan.lanes == 2 else None,
        **for_reference,
    )
    if plan.options["gate"]:
        # rows and batch, or two readings of a mean, may disagree about a gate near tau
        assume(want.decisive(plan.options["tau"], 1e-6 if plan.dtype == torch.float64 else 1e-2))
    size = sum(float((g.double() ** 2).sum()) for g in want.grads.values() if g is not None) ** 0.5
    parts = sum(float(g.double().norm()) for g in want.cotangents if g is not None)
    # else the rounding of parts that cancel is compared with nothing
    assume(size > max(1e-2, torch.finfo(plan.dtype).eps / TOL[plan.dtype][0]) * parts)
    order = list(range(plan.T))
    if plan.shuffled:
        random.Random(plan.seed).shuffle(order)
        zs, ts, targets, *rest = case.args
        zs = [zs[k] for k in order] if isinstance(zs, list) else zs[order]
        case = dataclasses.replace(case, args=(zs, ts[order], targets[order], *rest))
    try:
        got = run(case, plan.style, plan.entry, W=plan.W, **plan.options)
    except jagg_fx.VerifyError:
        raise  # says itself that it is a bug: no answer to a loss that is in order
    except jagg_fx.JaggError as e:
        event("refused: " + str(e).splitlines()[0][:60])
        return
    event("right gradient")
    tol, loss_tol = TOL[plan.dtype]
    check(got, want, tol, loss_tol)
    if plan.aux:
        last = plan.T - 1
        read = [last - order[last - i] for i in range(plan.T)] if plan.order == "calls first" else order
        assert got.aux.keys() == want.aux.keys()
        torch.testing.assert_close(got.aux["terms"], want.aux["terms"][read], rtol=loss_tol, atol=loss_tol)
