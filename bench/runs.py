"""Many training runs of a small velocity at once: seeds x learning rates as one leading dimension.

A tiny network spends its time on overheads, so all paired runs of an arm train together. Weights are
`(R, ...)` tensors, a layer is one `torch.baddbmm`, Adam is elementwise with one learning rate a run. The
gradient of an estimator has the form of `jagg_fx.estimators`,

    sum over nodes j of  J_j^T  sum over steps k of  C[j, k] g_k

and costs here what the text says: velocities of all steps without gradient, cotangents g of the whole loss on
leaf velocities, then one forward and backward of the nodes alone.

Shapes: R runs, K steps, B rows, D latent dimensions, F input features. Steps are put side by side along the
rows, `(R, K * B, F)`: a multilayer perceptron treats rows alone, so that is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jagg_fx.models import MLPVelocity
from jagg_fx.models.embedding import sinusoidal_embedding
from torch import Tensor

from jagg_fx.estimators import Estimator, Exact, Memory, index_lambdas, lambdas
from jagg_fx.memory import BiasMemory

Head = Callable[[Tensor], Tensor]
"""Velocities (R, K, B, D) to the loss of every run, (R,)."""

Extra = Callable[[Sequence[float]], Tensor]


class Nets:
    """R networks as `jagg_fx.models.MLPVelocity` computes them.

    Args:
        nets: of one shape; their weights are copied.

    Attributes:
        weights: per layer a matrix (R, in, out) and a bias (R, 1, out). Rows of the first matrix: the latent,
            the time features, then the classes, whose embedding adds to the first hidden layer.
    """

    def __init__(self, nets: Sequence[MLPVelocity]) -> None:
        self.first = nets[0]
        self.weights: list[Tensor] = []
        with torch.no_grad():
            for layers in zip(*(layers_of(net) for net in nets), strict=True):
                matrices = torch.stack([layer.weight.T for layer in layers])
                if layers[0] is nets[0].first and nets[0].label is not None:
                    matrices = torch.cat([matrices, torch.stack([net.label.weight for net in nets])], dim=1)
                self.weights += [matrices, torch.stack([layer.bias[None] for layer in layers])]

    @property
    def runs(self) -> int:
        return self.weights[0].shape[0]

    def features(self, z: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """What the first layer reads: (..., F) from z (..., D), t and classes y, both broadcastable to (...)."""
        if self.first.time_embedding == "sinusoidal":
            time = sinusoidal_embedding(t, self.first.hidden)
        else:
            time = t[..., None]
        parts = [z, time.to(z.dtype).expand(*z.shape[:-1], -1)]
        if self.first.classes is not None:
            parts.append(F.one_hot(y, self.first.classes + 1).to(z.dtype).expand(*z.shape[:-1], -1))
        return torch.cat(parts, dim=-1)

    def velocity(self, features: Tensor, weights: Sequence[Tensor] | None = None) -> Tensor:
        """(R, N, D) from features (R, N, F)."""
        h, weights = features, self.weights if weights is None else weights
        for i in range(0, len(weights), 2):
            h = torch.baddbmm(weights[i + 1], h if i == 0 else F.silu(h), weights[i])
        return h

    def repeat(self, times: int) -> Nets:
        """The same networks `times` over, the whole list after itself: R becomes times * R."""
        made = object.__new__(Nets)
        made.first, made.weights = self.first, [w.repeat(times, 1, 1) for w in self.weights]
        return made

    def copy(self) -> Nets:
        return self.repeat(1)

    def take(self, run: int, net: MLPVelocity) -> None:
        """Writes the weights of one run into `net`."""
        with torch.no_grad():
            for i, layer in enumerate(layers_of(net)):
                matrix = self.weights[2 * i][run]
                if i == 0 and net.label is not None:
                    net.label.weight.copy_(matrix[-net.label.num_embeddings :])
                    matrix = matrix[: -net.label.num_embeddings]
                layer.weight.copy_(matrix.T)
                layer.bias.copy_(self.weights[2 * i + 1][run, 0])


def layers_of(net: MLPVelocity) -> list[torch.nn.Linear]:
    return [net.first, *net.middle, net.last]


class Adam:
    """Adam of every run with its own learning rate; elementwise, so that one set of tensors serves all.

    Source: Kingma and Ba 2015 (arXiv 1412.6980), the defaults of torch.optim.Adam.
    """

    def __init__(self, weights: Sequence[Tensor], lrs: Tensor, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        self.weights, self.lrs, self.betas, self.steps = weights, lrs[:, None, None], betas, 0
        self.mean = [torch.zeros_like(w) for w in weights]
        self.square = [torch.zeros_like(w) for w in weights]

    def step(self, gradients: Sequence[Tensor], factor: float = 1.0) -> None:
        """One step, the learning rates times `factor`."""
        self.steps += 1
        first, second = self.betas
        rate = self.lrs * (factor / (1 - first**self.steps))
        root = (1 - second**self.steps) ** 0.5
        for w, g, m, s in zip(self.weights, gradients, self.mean, self.square, strict=True):
            m.lerp_(g, 1 - first)
            s.mul_(second).addcmul_(g, g, value=1 - second)
            w.addcdiv_(rate * m, (s.sqrt() / root).add_(1e-8), value=-1)


# Gradients


@dataclass(frozen=True)
class Nodes:
    """What keeps its backward, and what becomes of each cotangent.

    Attributes:
        fixed: steps that are nodes for every row.
        picks: (J', R, B) int64, a step for each row: the drawn nodes, after the fixed ones.
        weights: C, `(J, K)` for all rows alike or `(J, K, R, B)`.
        extra: features (R, J'', B, F) of nodes that are no step at all, after the drawn ones.
    """

    fixed: Sequence[int]
    weights: Tensor
    picks: Tensor | None = None
    extra: Tensor | None = None


def exact_gradient(nets: Nets, features: Tensor, head: Head) -> tuple[list[Tensor], Tensor]:
    """Gradients of every weight, and the losses (R,), by autograd; features (R, K, B, F)."""
    weights = [w.detach().requires_grad_() for w in nets.weights]
    runs, steps, rows, _ = features.shape
    losses = head(nets.velocity(features.reshape(runs, steps * rows, -1), weights).reshape(runs, steps, rows, -1))
    return list(torch.autograd.grad(losses.sum(), weights)), losses.detach()


def cotangents(nets: Nets, features: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """(g, losses): g (R, K, B, D), of the whole loss at every velocity. No backward of a network."""
    runs, steps, rows, _ = features.shape
    with torch.no_grad():
        v = nets.velocity(features.reshape(runs, steps * rows, -1)).reshape(runs, steps, rows, -1)
    v.requires_grad_()
    losses = head(v)
    return torch.autograd.grad(losses.sum(), v)[0], losses.detach()


def node_gradient(nets: Nets, features: Tensor, g: Tensor, nodes: Nodes) -> list[Tensor]:
    """`sum_j J_j^T sum_k C[j, k] g_k`: a forward and a backward of the nodes alone."""
    runs, _, _, width = features.shape
    chosen = [features[:, list(nodes.fixed)]]
    if nodes.picks is not None:
        index = nodes.picks.movedim(0, 1)[..., None].expand(-1, -1, -1, width)
        chosen.append(features.gather(1, index))
    if nodes.extra is not None:
        chosen.append(nodes.extra)
    inputs = torch.cat(chosen, dim=1)
    if nodes.weights.dim() == 2:
        merged = torch.einsum("jk,rkbd->rjbd", nodes.weights, g)
    else:
        merged = torch.einsum("jkrb,rkbd->rjbd", nodes.weights, g)
    weights = [w.detach().requires_grad_() for w in nets.weights]
    v = nets.velocity(inputs.reshape(runs, -1, width), weights)
    return list(torch.autograd.grad(v, weights, merged.reshape(v.shape)))


# Estimators


def plan(estimator: Estimator, times: Sequence[float], W: int, uniforms: Callable[[], Tensor]) -> Nodes:
    """Nodes and weights of all steps: groups of W one after the other, the last one ragged, or one whole group.

    Args:
        estimator: a variant, one that does not change from step to step.
        times: of every step, the same for all rows.
        uniforms: makes one draw for every row, (R, B) in [0, 1).
    """
    steps, size = len(times), len(times) if estimator.whole else W
    fixed: list[int] = []
    fixed_rows: list[list[Any]] = []
    picks: list[Tensor] = []
    drawn_rows: list[list[Any]] = []
    for start in range(0, steps, size):
        inside = [torch.tensor(t, dtype=torch.float64) for t in times[start : start + size]]
        lam = [x if isinstance(x, float) else x.item() for x in lambdas(inside)]
        n = len(lam)
        u = [uniforms() for _ in range(estimator.drawn(n))]
        # The library draws per row of a batch, (B,): the rows of all runs are one long batch to it.
        chosen = estimator.picks(lam, [x.flatten() for x in u]) if u else []
        weights = estimator.weights(lam, chosen) if u else estimator.weights(lam)
        padded = [[*[0.0] * start, *row, *[0.0] * (steps - start - n)] for row in weights]
        nodes = estimator.nodes(n)
        fixed += [start + j for j in nodes]
        fixed_rows += padded[: len(nodes)]
        picks += [start + pick.reshape(x.shape) for pick, x in zip(chosen, u, strict=True)]
        drawn_rows += padded[len(nodes) :]
    rows = fixed_rows + drawn_rows
    if not picks:
        return Nodes(fixed, torch.tensor(rows, dtype=torch.float32).reshape(-1, steps))
    weights = torch.zeros(len(rows), steps, *picks[0].shape)
    for j, row in enumerate(rows):
        for k, c in enumerate(row):
            if isinstance(c, Tensor):
                weights[j, k] = c.reshape(picks[0].shape)
            elif c:
                weights[j, k] = c
    return Nodes(fixed, weights, torch.stack(picks))


class Bias:
    """`jagg_fx.memory.BiasMemory` for R runs at once, with a slope for each run."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self.measured, self.least = memory, 0, BiasMemory().least if memory.shrink else 1
        self.mean: list[Tensor] = []
        self.cross = self.own = torch.zeros(1)

    def b(self) -> list[Tensor]:
        """The running bias, before it is shrunk."""
        scale = 1 / (1 - self.memory.beta**self.measured)
        return [scale * m for m in self.mean]

    def take(self, c: Sequence[Tensor]) -> None:
        """Takes a measurement in."""
        rest = 1 - self.memory.beta
        if self.measured:
            before = self.b()
            self.cross = self.cross + rest * (dot(c, before) - self.cross)
            self.own = self.own + rest * (dot(before, before) - self.own)
        else:
            self.mean = [torch.zeros_like(x) for x in c]
        for m, x in zip(self.mean, c, strict=True):
            m.lerp_(x, rest)
        self.measured += 1

    def add_to(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        if self.measured < self.least:
            return list(gradients)
        alpha = torch.ones(1)
        if self.memory.shrink:
            alpha = (self.cross / self.own).nan_to_num(0.0).clamp(0, 1)
        return [g + alpha[:, None, None] * b for g, b in zip(gradients, self.b(), strict=True)]


class Gradient:
    """The gradient of an estimator, with what it keeps from step to step.

    Args:
        estimator: of `jagg_fx.estimators`; or one of whose variants has `off_grid(n)`, positions in a group of n of
            nodes that are no step: `extra` then makes their features, (R, J, B, F), from the positions.
        W: steps in a group.
        seed: of the draws, which are apart from those of the data.
    """

    def __init__(self, estimator: Any, W: int, seed: int = 0) -> None:
        self.estimator, self.W, self.step = estimator, W, 0
        self.generator = torch.Generator().manual_seed(seed)
        self.bias = Bias(estimator) if isinstance(estimator, Memory) else None
        self._kept: dict[int, Nodes] = {}

    def __call__(
        self, nets: Nets, features: Tensor, times: Sequence[float], head: Head, extra: Extra | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """Gradients of every weight and the losses (R,), of the next step; shapes as in `Nodes`."""
        step, self.step = self.step, self.step + 1
        if isinstance(self.estimator, Exact):
            return exact_gradient(nets, features, head)
        g, losses = cotangents(nets, features, head)
        which = self.estimator.at(step, torch.rand((), generator=self.generator).item())
        gradients = self.of(which, nets, features, times, g, extra)
        if self.bias is not None:
            if self.estimator.measures(step):
                measured = len(self.estimator.variants()) - 1
                self.bias.take(self.of(measured, nets, features, times, g, extra))
            gradients = self.bias.add_to(gradients)
        return gradients, losses

    def of(
        self, which: int, nets: Nets, features: Tensor, times: Sequence[float], g: Tensor, extra: Extra | None = None
    ) -> list[Tensor]:
        """The gradient of one variant from the cotangents (R, K, B, D)."""
        nodes, variant = self._kept.get(which), self.estimator.variants()[which]
        if nodes is None:
            rows = (features.shape[0], features.shape[2])
            if hasattr(variant, "off_grid"):
                nodes = Nodes((), torch.tensor(variant.weights(index_lambdas(len(times)))))
            else:
                nodes = plan(variant, times, self.W, lambda: self._uniforms(*rows))
            if nodes.picks is None:
                self._kept[which] = nodes
        if extra is not None and hasattr(variant, "off_grid"):
            nodes = replace(nodes, extra=extra(variant.off_grid(len(times))))
        return node_gradient(nets, features, g, nodes)

    def _uniforms(self, runs: int, rows: int) -> Tensor:
        """Stratified: each row of a run has another one of `rows` equal parts of [0, 1)."""
        order = torch.rand(runs, rows, generator=self.generator).argsort(1)
        return ((order + torch.rand(runs, rows, generator=self.generator)) / rows).clamp(max=1 - 1e-7)


# Comparisons of gradients, run by run


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Inner products (R,) of two gradients."""
    return torch.stack([(x * y).sum((1, 2)) for x, y in zip(a, b, strict=True)]).sum(0)


def cosine(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """(R,)."""
    return dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()


def relative_error(estimate: Sequence[Tensor], exact: Sequence[Tensor]) -> Tensor:
    """`|estimate - exact| / |exact|`, (R,)."""
    difference = [a - b for a, b in zip(estimate, exact, strict=True)]
    return (dot(difference, difference) / dot(exact, exact)).sqrt()
