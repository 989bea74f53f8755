"""Small networks and losses, each loss in the two styles a user may write it in.

A loss is written once as ``core(velocity, *args)``.  ``params_style`` closes it over a network the way
torch.func users do (``functional_call(net, params, ...)``); in the other style the module itself is the
velocity, ``loss_fn(net, *args)``.  The reference calls the same core with its own recorder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

# ---------------------------------------------------------------------------------------------- networks


def column(t: Tensor, z: Tensor) -> Tensor:
    """A time (scalar or one per row, any dtype) shaped to broadcast over z, in z's dtype."""
    return t.to(z.dtype).reshape(-1, *[1] * (z.dim() - 1))


def embed(t: Tensor, z: Tensor) -> Tensor:
    """A few smooth functions of t for each row of z (B, D)."""
    c = column(t, z).expand(z.shape[0], 1)
    return torch.cat([c, torch.sin(2 * c), torch.cos(2 * c)], dim=1)


class Affine(nn.Module):
    """Affine in (z, t): with states on a line in t, JAGG is exact for any W."""

    def __init__(self, dim: int):
        super().__init__()
        self.A = nn.Linear(dim, dim)
        self.b = nn.Parameter(torch.randn(dim))

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        return self.A(z) + column(t, z) * self.b


class MLP(nn.Module):
    """SiLU layers over [z, functions of t]; ``scale`` divides the time first (1000 for timesteps)."""

    def __init__(self, dim: int, width: int = 16, depth: int = 2, scale: float = 1.0):
        super().__init__()
        sizes = [dim + 3] + [width] * depth
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.out = nn.Linear(width, dim)
        self.scale = scale

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        h = torch.cat([z, embed(t.to(z.dtype) / self.scale, z)], dim=1)
        for layer in self.layers:
            h = nn.functional.silu(layer(h))
        return self.out(h)


class Squashed(nn.Module):
    """Its last layer is not linear: what a velocity ends with cannot be told."""

    def __init__(self, dim: int):
        super().__init__()
        self.out = nn.Linear(dim, dim)

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        return torch.tanh(self.out(z + t))


class Tied(nn.Module):
    """One matrix used by three layers, under two names and once transposed."""

    def __init__(self, dim: int, width: int = 16):
        super().__init__()
        self.into = nn.Linear(dim + 3, width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.out = nn.Linear(width, dim)

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        h = torch.tanh(self.into(torch.cat([z, embed(t, z)], dim=1)))
        h = nn.functional.silu(self.first(h))
        h = nn.functional.silu(self.second(h))
        return self.out(h @ self.first.weight.t())


def frozen_first(dim: int, width: int = 16) -> MLP:
    """An MLP whose first block does not train."""
    net = MLP(dim, width)
    net.layers[0].requires_grad_(False)
    return net


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.down.t()) @ self.up.t()


def lora(dim: int, width: int = 16) -> MLP:
    """A frozen MLP with trainable low-rank adapters on the hidden layers."""
    net = MLP(dim, width).requires_grad_(False)
    for i in range(len(net.layers)):
        net.layers[i] = LoRALinear(net.layers[i])
    return net


class Conv(nn.Module):
    """A convolution over (B, C, H, W), all weights and the output channels-last."""

    def __init__(self, channels: int = 3, width: int = 4):
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.time = nn.Linear(1, width)
        self.last = nn.Conv2d(width, channels, 3, padding=1)
        self.to(memory_format=torch.channels_last)

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        c = column(t, z).reshape(-1, 1).expand(z.shape[0], 1)
        h = self.first(z) + self.time(torch.sin(c))[:, :, None, None]
        return self.last(nn.functional.silu(h)).contiguous(memory_format=torch.channels_last)


@dataclass
class Sample:
    """What diffusers models return."""

    sample: Tensor


class SampleTuple(NamedTuple):
    sample: Tensor
    extra: int


class Returns(nn.Module):
    """A network whose velocity comes wrapped."""

    def __init__(self, net: nn.Module, kind: str):
        super().__init__()
        self.net, self.kind = net, kind

    def forward(self, z: Tensor, t: Tensor) -> Any:
        v = self.net(z, t)
        if self.kind == "sample":
            return Sample(sample=v)
        if self.kind == "namedtuple":
            return SampleTuple(v, 3)
        if self.kind == "tuple":
            return (v,)
        if self.kind == "dict":
            return {"sample": v}
        return v


def read(out: Any, kind: str) -> Tensor:
    if kind in ("sample", "namedtuple"):
        return out.sample
    if kind == "tuple":
        return out[0]
    if kind == "dict":
        return out["sample"]
    return out


class NamedTime(nn.Module):
    """Time is the third argument and called ``timestep``; a condition comes before it."""

    def __init__(self, dim: int):
        super().__init__()
        self.net = MLP(dim)
        self.cond = nn.Linear(dim, dim, bias=False)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, timestep: Tensor) -> Tensor:
        return self.net(hidden_states + self.cond(encoder_hidden_states), timestep)


# ------------------------------------------------------------------------------------------------ losses


def linear(velocity: Callable, zs: Tensor, ts: Tensor, directions: Tensor) -> Tensor:
    """Cotangents that are given data."""
    total = zs.new_zeros(())
    for k in range(zs.shape[0]):
        total = total + (velocity(zs[k], ts[k]) * directions[k]).sum()
    return total


def quadratic(velocity: Callable, zs: Tensor, ts: Tensor, targets: Tensor) -> Tensor:
    """Flow matching: mean squared distance to a target velocity."""
    losses = []
    for k in range(zs.shape[0]):
        losses.append(((velocity(zs[k], ts[k]) - targets[k]) ** 2).mean())
    return torch.stack(losses).mean()


def coupled(velocity: Callable, zs: Tensor, ts: Tensor, targets: Tensor) -> Tensor:
    """Every cotangent depends on every velocity, and only after all calls are made."""
    vs = [velocity(z, t) for z, t in zip(zs, ts, strict=True)]
    per_row = torch.stack([((v - u) ** 2).flatten(1).mean(1) for v, u in zip(vs, targets, strict=True)])
    smooth = sum(((a - b) ** 2).mean() for a, b in pairwise(vs))
    return torch.logsumexp(per_row, dim=0).mean() + 0.1 * smooth


def flow_sde(v: Tensor, z: Tensor, s: Tensor, s_next: Tensor, eta: float) -> tuple[Tensor, Tensor]:
    """Mean and noise std of one Flow-SDE step from sigma = s to s_next < s (any number of dims)."""
    dt = s_next - s
    shape = (-1, *[1] * (z.dim() - 1))
    s, s_next, dt = s.reshape(shape), s_next.reshape(shape), dt.reshape(shape)
    safe = torch.where(s == 1, s_next, s)  # 1 - sigma must not be 0
    noise = eta * torch.sqrt(s / (1 - safe))
    mean = z * (1 + noise**2 * dt / (2 * s)) + v * (1 + noise**2 * (1 - s) / (2 * s)) * dt
    return mean, noise * torch.sqrt(-dt)


def gaussian_logp(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Mean over latent dimensions of the log density, one number per row."""
    std = std.expand_as(mean)
    logp = -((x - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    return logp.flatten(1).mean(1)


def clipped(ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    return torch.max(-advantage * ratio, -advantage * torch.clamp(ratio, 1 - clip, 1 + clip)).mean()


def grpo(eta: float = 0.7, clip: float = 0.2, beta: float = 0.0, kl: str = "mean") -> Callable:
    """The clipped-ratio loss on stored states; ``beta`` adds a KL read from the mean or from v itself."""

    def core(velocity: Callable, traj: Tensor, sigmas: Tensor, old: Tensor, adv: Tensor, v_ref: Tensor) -> Tensor:
        T = sigmas.shape[0] - 1
        total = traj.new_zeros(())
        for k in range(T):
            v = velocity(traj[k], sigmas[k])
            mean, std = flow_sde(v, traj[k], sigmas[k], sigmas[k + 1], eta)
            logp = gaussian_logp(traj[k + 1], mean, std)
            total = total + clipped(torch.exp(logp - old[k]), adv, clip) / T
            if beta:
                if kl == "velocity":
                    total = total + beta * ((v - v_ref[k]) ** 2).mean() / T
                else:
                    mean_ref, _ = flow_sde(v_ref[k], traj[k], sigmas[k], sigmas[k + 1], eta)
                    total = total + beta * ((mean - mean_ref) ** 2 / (2 * std**2)).mean() / T
        return total

    return core


# ------------------------------------------------------------------------------------------------- cases


@dataclass
class Case:
    """A network, a loss and one batch."""

    net: nn.Module
    core: Callable
    args: tuple
    has_aux: bool = False
    options: dict = field(default_factory=dict)  # options the transform needs to see this loss rightly

    def function(self, params: dict[str, Tensor], *inputs: Any, **kwargs: Any) -> Any:
        return functional_call(self.net, params, inputs, kwargs)

    def trainable(self) -> dict[str, Tensor]:
        """Fresh leaves with the values of the parameters that train."""
        return {k: p.detach().clone().requires_grad_() for k, p in self.net.named_parameters() if p.requires_grad}

    def loss(self, style: str) -> Callable:
        return params_style(self.net, self.core) if style == "params" else net_style(self.core)


def params_style(net: nn.Module, core: Callable) -> Callable:
    def loss_fn(params: dict[str, Tensor], *args: Any) -> Any:
        def velocity(*inputs: Any, **kwargs: Any) -> Any:
            return functional_call(net, params, inputs, kwargs)

        return core(velocity, *args)

    return loss_fn


def net_style(core: Callable) -> Callable:
    def loss_fn(net: nn.Module, *args: Any) -> Any:
        return core(net, *args)

    return loss_fn


STYLES = ["params", "net"]


def grid(T: int, high: float = 0.9, low: float = 0.1, dtype: torch.dtype = torch.float64) -> Tensor:
    """T falling times, evenly spaced."""
    return torch.linspace(high, low, T, dtype=torch.float64).to(dtype)


def line_states(ts: Tensor, batch: int, *shape: int, seed: int = 0) -> Tensor:
    """z_t = (1 - t) x + t eps at each time: (T, B, ...)."""
    g = torch.Generator().manual_seed(seed)
    x, eps = torch.randn(2, batch, *shape, generator=g, dtype=torch.float64)
    t = ts.double().reshape(ts.shape[0], -1, *[1] * len(shape))
    return ((1 - t) * x + t * eps).to(ts.dtype if ts.is_floating_point() else torch.float64)


def rough_states(ts: Tensor, batch: int, *shape: int, seed: int = 0, noise: float = 1.0) -> Tensor:
    """States off the line by independent noise, as on an SDE trajectory but rougher."""
    g = torch.Generator().manual_seed(seed + 1)
    z = line_states(ts, batch, *shape, seed=seed)
    return z + noise * torch.randn(z.shape, generator=g, dtype=torch.float64).to(z.dtype)


def simple_case(
    core: Callable,
    *,
    net: nn.Module | None = None,
    ts: Tensor | None = None,
    T: int = 8,
    batch: int = 3,
    dim: int = 4,
    seed: int = 0,
    noise: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """A linear, quadratic or coupled loss over states on a line (or off it by ``noise``)."""
    torch.manual_seed(seed)
    net = (MLP(dim) if net is None else net).to(dtype)
    ts = grid(T, dtype=dtype) if ts is None else ts
    zs = rough_states(ts, batch, dim, seed=seed, noise=noise).to(dtype)
    g = torch.Generator().manual_seed(seed + 2)
    third = torch.randn(zs.shape, generator=g, dtype=torch.float64).to(dtype)
    return Case(net, core, (zs, ts, third))


def grpo_case(
    *,
    net: nn.Module | None = None,
    T: int = 8,
    batch: int = 4,
    dim: int = 4,
    eta: float = 0.7,
    clip: float = 0.2,
    beta: float = 0.0,
    kl: str = "mean",
    seed: int = 0,
    drift: float = 0.02,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """A Flow-SDE trajectory of an older policy (parameters off by ``drift``), and its clipped loss."""
    torch.manual_seed(seed)
    net = (MLP(dim) if net is None else net).to(dtype)
    old_params = {k: p.detach() + drift * torch.randn_like(p) for k, p in net.named_parameters()}
    sigmas = grid(T + 1, 0.95, 0.1, dtype)
    z = torch.randn(batch, dim, dtype=dtype)
    traj, old, v_ref = [z], [], []
    with torch.no_grad():
        for k in range(T):
            v = functional_call(net, old_params, (z, sigmas[k]))
            mean, std = flow_sde(v, z, sigmas[k], sigmas[k + 1], eta)
            z_next = mean + std * torch.randn_like(z)
            old.append(gaussian_logp(z_next, mean, std))
            v_ref.append(v)
            z = z_next
            traj.append(z)
    reward = torch.randn(batch, dtype=dtype)
    adv = (reward - reward.mean()) / reward.std()
    args = (torch.stack(traj), sigmas, torch.stack(old), adv, torch.stack(v_ref))
    return Case(net, grpo(eta, clip, beta, kl), args)
