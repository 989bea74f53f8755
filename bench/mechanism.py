"""How far every estimator is from the exact gradient, against the span of a group. `python -m bench.mechanism`.

All T steps are one group, evenly spaced over a window of t around 0.5, with states on a line; estimators of a whole
lane see the same steps. The loss is flow matching. Errors are |estimate - exact| / |exact| over all parameters. For
estimators that draw or alternate, RMS over draws, and bias: the error of the mean of the draws.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from jagg_fx.models import AffineVelocity, MLPVelocity, interpolate, velocity_target
from torch import Tensor, nn

from bench.demo_progress import bar
from bench.demo_report import markdown, save
from bench.eager import backward
from jagg_fx.estimators import Causal, Correction, Debiased, Estimator, Knots, Memory, Quadratic, Subset, resolve
from jagg_fx.memory import BiasMemory

SPANS = (0.05, 0.1, 0.2, 0.4, 0.8)
PUBLISHED: dict[str, Any] = {
    "affine_fp32": [6.2e-8, 8.4e-8],
    "spans": SPANS,
    "errors": [0.000106, 0.000404, 0.001467, 0.004932, 0.0235],
    "slope": 1.92,
}
"""A public check of the mechanism of endpoints, with a network and data of its own."""

CONTENDERS: dict[str, Estimator] = {
    "endpoints": resolve("endpoints"),
    "debiased": Debiased(),
    "debiased, p = 1/2": Debiased(0.5),
    "memory, 40 measurements": Memory(every=1),
    "quadratic": Quadratic(),
    "knots, stride 3": Knots(3),
    "causal, factor 1": Causal(1.0),
    "causal, factor 1.5": Causal(1.5),
    "random half of the steps": Subset(),
    "exact": resolve("exact"),
}
MEASUREMENTS = 40


@dataclass
class Row:
    """What was found of one estimator: one number a span."""

    title: str
    backwards: float
    affine: dict[str, float] = field(default_factory=dict)
    rms: list[float] = field(default_factory=list)
    bias: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)  # what the bias of as many unbiased draws would come out as

    @property
    def slope(self) -> float | None:
        return slope(SPANS, self.rms)


@dataclass
class Problem:
    """A velocity and a batch of stored states on straight lines."""

    net: nn.Module
    times: Tensor
    states: list[Tensor]
    target: Tensor

    def gradient(self, estimator: str | Estimator, **options: Any) -> list[Tensor]:
        self.net.zero_grad()
        backward(self.net, self.states, self.times, self.loss, estimator, len(self.states), **options)
        return [p.grad for p in self.net.parameters() if p.grad is not None]

    def loss(self, velocities: Sequence[Tensor]) -> Tensor:
        return torch.stack([((v - self.target) ** 2).mean() for v in velocities]).mean()


def problem(kind: str, span: float, seed: int, dtype: torch.dtype, options: argparse.Namespace) -> Problem:
    torch.manual_seed(seed)
    net = MLPVelocity(options.dim, options.hidden) if kind == "mlp" else AffineVelocity(options.dim)
    x, noise = torch.randn(2, options.batch, options.dim, dtype=torch.float64)
    times = torch.linspace(0.5 + span / 2, 0.5 - span / 2, options.T, dtype=torch.float64)
    states = [interpolate(x, noise, t).to(dtype) for t in times]
    return Problem(net.to(dtype), times.to(dtype), states, velocity_target(x, noise).to(dtype))


def draws(problem: Problem, estimator: Estimator, number: int, seed: int) -> list[Tensor]:
    """Flat estimates; as many as differ for estimators that draw nothing."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(estimator, Memory):
        return [_with_memory(problem, estimator, generator) for _ in range(max(1, number // 8))]
    steps = range(number if is_random(estimator, len(problem.states)) else len(estimator.variants()))
    return [_flat(problem.gradient(estimator, step=i, generator=generator)) for i in steps]


def is_random(estimator: Estimator, n: int) -> bool:
    """Whether it draws, and does not only alternate."""
    return any(v.drawn(n) for v in estimator.variants())


def _with_memory(problem: Problem, estimator: Memory, generator: torch.Generator) -> Tensor:
    """Endpoints with the bias as it is known after some measurements at the same weights."""
    memory = BiasMemory(estimator.beta, estimator.shrink)
    for _ in range(MEASUREMENTS):
        memory.update(problem.gradient(Correction(), generator=generator))
    b = memory.value()
    assert b is not None
    return _flat(problem.gradient("endpoints")) + _flat(b)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.detach().flatten().double() for x in tensors])


def errors(exact: Tensor, found: Sequence[Tensor]) -> tuple[float, float, float]:
    """RMS, bias, and the bias to expect of the mean of so many draws without any."""
    stacked = torch.stack(list(found)) - exact
    mean, size = stacked.mean(0), exact.norm()
    spread = (stacked - mean).pow(2).sum(1).mean() / max(1, len(found) - 1)
    return float(stacked.pow(2).sum(1).mean().sqrt() / size), float(mean.norm() / size), float(spread.sqrt() / size)


def slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Of log y on log x; None where an error is only rounding."""
    if min(y) < 1e-12:
        return None
    return statistics.linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope


def measure(options: argparse.Namespace) -> list[Row]:
    rows = []
    with bar("errors", len(CONTENDERS) * (len(SPANS) + 2)) as progress:
        for title, estimator in CONTENDERS.items():
            row = Row(title, estimator.expected_backwards(options.T))
            if isinstance(estimator, Memory):
                row.backwards = Memory().expected_backwards(options.T)
            for name, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
                found = [_errors("affine", 0.8, s, dtype, estimator, options)[0] for s in range(options.seeds)]
                row.affine[name] = max(found)
                progress.update()
            for span in SPANS:
                each = [_errors("mlp", span, s, torch.float64, estimator, options) for s in range(options.seeds)]
                for into, values in zip((row.rms, row.bias, row.floor), zip(*each, strict=True), strict=True):
                    into.append(statistics.fmean(values))
                progress.update()
            rows.append(row)
    return rows


def _errors(
    kind: str, span: float, seed: int, dtype: torch.dtype, estimator: Estimator, options: argparse.Namespace
) -> tuple[float, float, float]:
    case = problem(kind, span, seed, dtype, options)
    number = options.draws if kind == "mlp" else 8
    return errors(_flat(case.gradient("exact")), draws(case, estimator, number, seed))


def table(rows: Sequence[Row], T: int) -> str:
    head = ["", f"backwards of {T}", "affine, fp32", "affine, fp64", *(f"span {s}" for s in SPANS), "slope", "bias, .4"]
    low, high = PUBLISHED["affine_fp32"]
    errors_ = [f"{e:.3g}" for e in PUBLISHED["errors"]]
    lines = [head, ["endpoints, published", "", f"{low:.1e} to {high:.1e}", "", *errors_, str(PUBLISHED["slope"]), ""]]
    at = SPANS.index(0.4)
    for row in rows:
        bias = f"{row.bias[at]:.2g}"
        if is_random(CONTENDERS[row.title], T) and row.bias[at] < 2 * row.floor[at]:
            bias = f"none seen (< {2 * row.floor[at]:.1g})"
        values = [f"{row.affine[k]:.1e}" for k in ("fp32", "fp64")] + [f"{e:.3g}" for e in row.rms]
        lines.append([row.title, f"{row.backwards:g}", *values, "" if row.slope is None else f"{row.slope:.2f}", bias])
    return markdown(lines)


TITLE = "# Error of every estimator against the span of a group"
COMMAND = "`python -m bench.mechanism` makes this table, mechanism.json and mechanism.png."


def notes(options: argparse.Namespace) -> list[str]:
    return [
        f"{options.T} steps as one group, evenly spaced around t = .5, states on a line; flow matching on a network of "
        f"two hidden layers of {options.hidden}, fp64; {options.batch} states; mean of {options.seeds} seeds.",
        "Error: |estimate - exact| / |exact|, RMS over draws where the estimator draws or alternates. Slope: of its "
        "logarithm on that of the span. Bias: the error of the mean of the draws; 'none seen' where it is below "
        f"twice what the noise of {options.draws} draws leaves.",
        "Affine: the largest RMS error over seeds, span .8. The published numbers are those of another network.",
        f"Memory: endpoints and b after {MEASUREMENTS} measurements at the same weights, {options.draws // 8} times "
        "over; the cost stands for every = 12.",
        "Smooth Jacobians and cotangents that hardly change from step to step, as here, are the best case of debiased "
        "and memory (their noise falls with the third power) and of random steps. Policy gradients are not like that.",
    ]


def picture(path: Path, rows: Sequence[Row]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7.5, 5), constrained_layout=True)
    panel.plot(SPANS, PUBLISHED["errors"], "k--", marker=".", label="endpoints, published (slope 1.92)")
    for row, marker in zip((r for r in rows if r.slope is not None), "os^<>DPX*", strict=False):
        # hollow, and of two sizes: some lines lie on each other
        style = {"marker": marker, "markersize": 11 if marker in "oD" else 6, "markerfacecolor": "none"}
        panel.plot(SPANS, row.rms, **style, label=f"{row.title} (slope {row.slope:.2f})")
    panel.set(xscale="log", yscale="log", xlabel="span of the group in t", ylabel="RMS error of the gradient, relative")
    panel.set_xticks(SPANS, [str(s) for s in SPANS])
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--T", type=int, default=8, help="steps, all of them one group")
    parser.add_argument("--dim", type=int, default=8, help="of a state")
    parser.add_argument("--hidden", type=int, default=64, help="width of the network, two hidden layers")
    parser.add_argument("--batch", type=int, default=64, help="states at each step")
    parser.add_argument("--seeds", type=int, default=3, help="networks and batches; errors are means over them")
    parser.add_argument("--draws", type=int, default=64, help="estimates of each random estimator")
    parser.add_argument("--out", type=Path, default=Path("docs/bench"), help="folder of the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options)
    text = "\n".join([TITLE, "", table(rows, options.T), "", *(f"* {note}" for note in notes(options)), "", COMMAND])
    settings = {k: v for k, v in vars(options).items() if k != "out"} | {"torch": torch.__version__}
    content = {
        "settings": settings,
        "published": PUBLISHED,
        "spans": SPANS,
        "estimators": [asdict(r) | {"slope": r.slope} for r in rows],
    }
    save(options.out, "mechanism", content, text + "\n")
    picture(options.out / "mechanism.png", rows)
    print(text)


if __name__ == "__main__":
    main()
