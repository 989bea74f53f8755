"""Cost against the error of the gradient, for every gate, width and tolerance. `python -m bench.frontier`

Pretrains a small velocity network on digits and takes batches of stored trajectories, SDE ones with a GRPO loss, ODE
ones with an advantage-weighted flow-matching loss. In each batch, every run of steps that a setting may merge is merged
once: endpoints, knots, gated groups and error control differ only in which runs they merge, and their errors add up, so
that all settings are measured on the same backwards. Writes docs/bench/frontier.json, .md and .png (with --dit:
frontier-dit).

Cost: a forward 1, a backward 2, for each step; of exact 3. Error: |estimate - exact| / |exact| over all parameters.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jagg_fx.models import DIT_SIZES, DiT, FlowSDE, make_grpo_loss, uniform_times
from torch import Tensor, nn

from jagg_fx.control import Ratio, Span, choose, spans
from jagg_fx.estimators import Knots, lambdas
from jagg_fx.gates import cosines

from .data import load_digits
from .demo_progress import bar
from .demo_report import markdown, save
from .demo_train import Task, pretrain, reward_classifier, train_classifier
from .gates import Flat, batches, weighted_matching

TOLERANCES = (0.05, 0.1, 0.2, 0.3)
WIDTHS, STRIDES = range(3, 9), (2, 3, 4, 6, 8)
HEAD_TAUS, COSINE_TAUS = (0.02, 0.05, 0.1, 0.2), (0.9, 0.98, 0.995)
HELD = 0.95
Piece = tuple[int, int]  # first and last step of a run that is merged into them


class Recorder(nn.Module):
    """Stands in for the network: remembers its calls, and hands out leaves."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.calls, self.velocities = net, [], []

    def forward(self, *inputs: Tensor) -> Tensor:
        with torch.no_grad():
            v = self.net(*inputs)
        self.calls.append(inputs)
        self.velocities.append(v.requires_grad_())
        return self.velocities[-1]


@dataclass
class Batch:
    """What merging each piece does in one batch. gram: of the errors of all pieces and, last, of the exact gradient."""

    T: int
    at: dict[Piece, int]
    gram: np.ndarray
    head: list[Tensor]  # the error of each piece in the last layer's weight; last, that gradient of the whole step
    own: dict[Piece, Tensor]  # that gradient of each piece
    cosine: list[float]  # the smallest of each piece

    def error(self, merged: Sequence[Piece]) -> float:
        own = [self.at[p] for p in merged if p[1] - p[0] > 1]
        return float(np.sqrt(max(self.gram[np.ix_(own, own)].sum(), 0) / self.gram[-1, -1]))

    def group_head(self, piece: Piece) -> float:
        """What gate='head' sees: relative to the group's own gradient."""
        return float(self.head[self.at[piece]].norm() / self.own[piece].norm())


def groups(T: int, W: int) -> list[Piece]:
    return [(i, min(i + W, T) - 1) for i in range(0, T, W)]


def knots(T: int, stride: int) -> list[Piece]:
    return list(pairwise(Knots(stride).nodes(T)))


def tree(T: int) -> list[Span]:
    return spans(Knots(8).nodes(T))


def pieces(T: int) -> list[Piece]:
    every = [p for W in WIDTHS for p in groups(T, W)] + [p for s in STRIDES for p in knots(T, s)]
    every += [(s.a, s.b) for s in tree(T)]
    return sorted({p for p in every if p[1] - p[0] > 1})


def collect(net: nn.Module, last: nn.Linear, loss_fn: Callable, batch: tuple) -> Batch:
    recorder = Recorder(net)
    g = torch.autograd.grad(loss_fn(recorder, *batch), recorder.velocities)
    hidden: list[Tensor] = []
    hook = last.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    v = [net(*inputs) for inputs in recorder.calls]
    hook.remove()
    parameters = list(net.parameters())

    def pull(k: int, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of one step in all parameters, flat, and in the last layer's weight."""
        found = torch.autograd.grad(v[k], parameters, cotangent, retain_graph=True, allow_unused=True)
        flat = [torch.zeros_like(p) if x is None else x for x, p in zip(found, parameters, strict=True)]
        weight = next(x for x, p in zip(flat, parameters, strict=True) if p is last.weight)
        return torch.cat([x.flatten() for x in flat]), weight

    single = [pull(k, x) for k, x in enumerate(g)]
    T = len(g)
    errors, heads, cosine, own = [], [], [], {}
    for a, b in pieces(T):
        lam: list[Any] = lambdas([inputs[1] for inputs in recorder.calls[a : b + 1]])
        ends = [sum(w * x for w, x in zip(row, g[a : b + 1], strict=True)) for row in ([1 - x for x in lam], lam)]
        (fa, ha), (fb, hb) = pull(a, ends[0]), pull(b, ends[1])
        inside = single[a : b + 1]
        own[a, b] = sum(h for _, h in inside)
        errors.append(fa + fb - sum(f for f, _ in inside))
        heads.append(ha + hb - own[a, b])
        C = [[1 - x for x in lam], lam]
        cosine.append(min(map(float, cosines([x.detach() for x in v[a : b + 1]], C, (0, b - a)))))
    stack = torch.stack([*errors, sum(f for f, _ in single)]).double()
    heads.append(sum(h for _, h in single))
    return Batch(T, {p: i for i, p in enumerate(pieces(T))}, (stack @ stack.T).numpy(), heads, own, cosine)


def runs(merged: Sequence[Piece], T: int) -> int:
    """How many backwards run where these pieces are merged, and every other step runs."""
    return T - sum(b - a - 1 for a, b in merged)


def settings(T: int) -> Iterator[tuple[str, str, Callable[[Batch], list[Piece]]]]:
    """Family, name, and which pieces a setting merges in a batch."""
    yield "exact", "exact", lambda batch: []
    for W in WIDTHS:
        own = [p for p in groups(T, W) if p[1] - p[0] > 1]
        yield "endpoints", f"W={W}", lambda batch, own=own: own
        for tau in HEAD_TAUS if W in (4, 8) else ():
            name = f"W={W}, head <= {tau}"
            yield f"W={W}, head", name, lambda b, own=own, tau=tau: [p for p in own if b.group_head(p) <= tau]
        for tau in COSINE_TAUS if W == 4 else ():
            name = f"W={W}, cosine >= {tau}"
            yield f"W={W}, cosine", name, lambda b, own=own, tau=tau: [p for p in own if b.cosine[b.at[p]] >= tau]
    for stride in STRIDES:
        own = [p for p in knots(T, stride) if p[1] - p[0] > 1]
        yield "knots", f"knots, stride {stride}", lambda batch, own=own: own


def controlled(batch: Batch, limit: float) -> tuple[list[Piece], float]:
    """The pieces that error control merges, and the error that it predicts."""
    own = tree(batch.T)
    errors = [batch.head[batch.at[s.a, s.b]] for s in own]
    halved, predicted = choose(errors, own, batch.head[-1], torch.tensor(limit))
    merged = [s for s, h in zip(own, halved, strict=True) if not h and (s.parent is None or halved[s.parent])]
    return [(s.a, s.b) for s in merged], float(predicted)


def measure(found: Sequence[Batch], repeats: int, audit_every: int) -> list[dict[str, Any]]:
    T, rows = found[0].T, []

    def row(family: str, name: str, merged: list[list[Piece]], batches: Sequence[Batch], **more: Any) -> None:
        errors = [b.error(m) for b, m in zip(batches, merged, strict=True)]
        cost = float(np.mean([(T + 2 * runs(m, T)) / (3 * T) for m in merged]))
        held = {str(tol): float(np.mean([e <= tol for e in errors])) for tol in TOLERANCES}
        quantiles = dict(zip(("median", "q95"), map(float, np.quantile(errors, (0.5, HELD))), strict=True))
        rows.append({"family": family, "name": name, "cost": cost, "held": held, **quantiles, **more})

    for family, name, merges in settings(T):
        merged = [merges(b) for b in found]
        most = max(len(m) for m in merged)
        row(family, name, merged, found, fallback=1 - float(np.mean([len(m) for m in merged])) / most if most else 0.0)
    for tol in TOLERANCES:
        # each pass in an order of its own: else audits would see the same few batches again and again
        orders = np.random.default_rng(0)
        ratio, merged, steps = Ratio(), [], [found[i] for _ in range(repeats) for i in orders.permutation(len(found))]
        for k, batch in enumerate(steps):
            own, predicted = controlled(batch, ratio.limit(tol))
            merged.append(own)
            if k % audit_every == 0 or k & (k - 1) == 0:
                ratio.update(batch.error(own), predicted)
        row("tol", f"tol={tol}", merged, steps, ratio=ratio.value)
    return rows


def best(rows: Sequence[dict], tol: float) -> dict:
    """The cheapest setting other than error control that holds tol in 95 % of the batches."""
    fixed = [r for r in rows if r["family"] != "tol" and r["held"][str(tol)] >= HELD]
    return min(fixed, key=lambda r: r["cost"])


def report(results: dict) -> str:
    head = ["path", "T", "tol", "steps within tol", "cost", "r", "best other setting, with hindsight", "its cost"]
    lines, fine, cheap = [head], 0, 0
    for r in results["rows"]:
        for tol in TOLERANCES:
            own = next(x for x in r["settings"] if x["name"] == f"tol={tol}")
            other = best(r["settings"], tol)
            held = own["held"][str(tol)]
            fine, cheap = fine + (held >= HELD), cheap + (own["cost"] <= other["cost"] * 1.005)
            cells = [r["path"], r["T"], tol, f"{held:.0%}", f"{own['cost']:.2f}", f"{own['ratio']:.2f}"]
            lines.append([*map(str, cells), other["name"], f"{other['cost']:.2f}"])
    total = len(lines) - 1
    say = (
        f"Error control held its tolerance in 95 % of the steps in {fine} of {total} rows, at or below the cost of the "
        f"best other setting in {cheap}. Where the error matters, say tol; where only the cost does, use knots."
    )
    notes = [
        f"{results['net']} velocity on digits, {results['batches']} batches of {results['batch']} samples, error "
        f"control on them {results['repeats']} times over with an audit every {results['audit_every']} steps.",
        "Cost: a forward 1, a backward 2, over that of exact. r: what predictions are multiplied with, at the end.",
        "The best other setting is chosen on the batches that it is judged on: endpoints, knots, both gates.",
    ]
    text = ["# Cost against error", "", markdown(lines), "", say, "", *(f"* {n}" for n in notes), ""]
    return "\n".join([*text, f"![cost against error]({results['name']}.png)", "", f"`{results['command']}`", ""])


def draw(results: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(results["rows"]), figsize=(4 * len(results["rows"]), 4), sharey=True, squeeze=False
    )
    for axis, r in zip(axes[0], results["rows"], strict=True):
        families = dict.fromkeys(x["family"] for x in r["settings"] if x["family"] != "exact")
        for family in families:
            points = sorted((x["cost"], x["q95"]) for x in r["settings"] if x["family"] == family and x["q95"] > 0)
            style = {"lw": 2.5, "color": "black", "marker": "o"} if family == "tol" else {"lw": 1, "marker": "."}
            axis.plot(*zip(*points, strict=True), label=family, **style) if points else None
        axis.set(title=f"{r['path']}, T={r['T']}", xlabel="cost, of exact", yscale="log")
    axes[0][0].set_ylabel("error of the gradient, 95 % quantile")
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/bench"), help="folder of the results")
    parser.add_argument("--batches", type=int, default=40, help="stored trajectories a setting (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="samples a batch (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="passes of error control over them")
    parser.add_argument("--audit-every", type=int, default=20, help="steps between audits (default: %(default)s)")
    parser.add_argument(
        "--dit", action="store_true", help="a small transformer in place of the MLP, ten times the time"
    )
    parser.add_argument("--quick", action="store_true", help="4 batches, T=16 alone: to see that it runs")
    options = parser.parse_args()
    count = 4 if options.quick else options.batches
    name = "frontier-dit" if options.dit else "frontier"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = load_digits()
    reward = reward_classifier(images.shape, images.classes)
    train_classifier(reward, images, 300, 128, 0, "reward classifier")
    reward.requires_grad_(False)
    size = DIT_SIZES["tiny"]
    dit = DiT(images.shape[1], images.shape[0], 2, size.width, size.depth, size.heads, images.classes)
    net: nn.Module = dit if options.dit else Flat(images.shape, images.classes)
    last = [m for m in net.modules() if isinstance(m, nn.Linear)][-1]
    task = Task(images.shape, images.classes, reward, reward, FlowSDE(0.7), uniform_times(16), options.batch, 8)
    pretrain(net, images, task, stop_at=0.7, steps=400, batch=128, seed=0, eval_samples=200)  # type: ignore[arg-type]
    rows = []
    for path in ("ODE", "SDE"):
        loss_fn = make_grpo_loss(FlowSDE(0.7), 1e-3) if path == "SDE" else weighted_matching
        for T in (16,) if options.quick else (16, 32):
            found = []
            with bar(f"{path} T={T}", count) as progress:
                for batch in batches(net, dataclasses.replace(task, sigmas=uniform_times(T)), path, count):
                    found.append(collect(net, last, loss_fn, batch))
                    progress.update()
            rows.append({"path": path, "T": T, "settings": measure(found, options.repeats, options.audit_every)})
    results = {
        "name": name,
        "command": shlex.join(["python", "-m", "bench.frontier", *sys.argv[1:]]),
        "net": "DiT tiny" if options.dit else "MLP",
        "torch": torch.__version__,
        "batches": count,
        "batch": options.batch,
        "repeats": options.repeats,
        "audit_every": options.audit_every,
        "rows": rows,
    }
    text = report(results)
    save(options.out, name, results, text)
    draw(results, options.out / f"{name}.png")
    print(text)


if __name__ == "__main__":
    main()
