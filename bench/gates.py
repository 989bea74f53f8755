"""Which gate predicts the error of a group? The cosine of the paper against the head discrepancy.

`python -m bench.gates` pretrains two velocity networks on digits, and audits groups of stored trajectories: SDE ones
with a GRPO loss, ODE ones with an advantage-weighted flow-matching loss. For every group of every batch: the true
relative error of its gradient, and what each gate sees. Writes docs/bench/gates.json, .md and .png.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jagg_fx.models import (
    DIT_SIZES,
    ODE,
    DiT,
    FlowSDE,
    MLPVelocity,
    group_advantages,
    make_grpo_loss,
    rollout,
    uniform_times,
)
from scipy.stats import spearmanr
from torch import Tensor, nn

import jagg_fx

from .data import load_digits
from .demo_progress import bar
from .demo_report import save
from .demo_train import Task, pretrain, reward_classifier, train_classifier

TOLERANCES = (0.05, 0.1, 0.2, 0.3)
SAFETY = 0.7  # without audits, a gate opens where its prediction is below this share of the tolerance
RULES = {"audited": "tau = tol / ratio", "fixed": f"tau = {SAFETY} tol"}
COSINE = 0.995


class Flat(nn.Module):
    """The MLP velocity on images."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.net = MLPVelocity(int(np.prod(shape)), hidden=128, depth=2, classes=classes, time_embedding="sinusoidal")

    def forward(self, z: Tensor, t: Tensor, y: Tensor) -> Tensor:
        return self.net(z.flatten(1), t, y).reshape(z.shape)


def weighted_matching(net: nn.Module, states: Tensor, sigmas: Tensor, advantages: Tensor, target: Tensor, y: Tensor):
    """Velocities of stored ODE states, pulled to or pushed from the path's own direction by the advantage."""
    total = states.new_zeros(())
    for k in range(len(sigmas) - 1):
        error = (net(states[k], sigmas[k], y) - target).square().flatten(1).mean(1)
        total = total + (advantages * error).mean()
    return total / (len(sigmas) - 1)


def batches(net: nn.Module, task: Task, kind: str, count: int) -> list[tuple]:
    generator = torch.Generator().manual_seed(77)
    if kind == "SDE":
        return [task.draw(net, generator)[0] for _ in range(count)]
    found = []
    for _ in range(count):
        prompts = torch.randint(task.classes, (task.batch // task.group,), generator=generator)
        y = prompts.repeat_interleave(task.group)
        noise = torch.randn(task.batch, *task.shape, generator=generator)
        path = rollout(net, noise, task.sigmas, y, sampler=ODE(), generator=generator)
        advantages = group_advantages(task.rewards(path.samples, y), task.group)
        found.append((path.states, path.sigmas, advantages, noise - path.samples, y))
    return found


def audits(loss_fn: Callable, net: nn.Module, drawn: list[tuple], W: int, note: Callable) -> list[dict[str, float]]:
    """One row a group: its batch, its true error, what the head gate says, and one minus the smallest cosine."""
    steps = {gate: jagg_fx.transform(loss_fn, W=W, gate=gate, compiler="eager") for gate in ("head", "cosine")}
    rows = []
    for number, batch in enumerate(drawn):
        head, cosine = (steps[gate].audit(net, *batch) for gate in ("head", "cosine"))
        for a, b in zip(head.groups, cosine.groups, strict=True):
            if a.gate:
                rows.append(
                    {"batch": number, "error": a.relative_error, "head": max(a.gate), "cosine": 1 - min(b.gate)}
                )
        note()
    return rows


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    error, head, cosine = (np.array([r[k] for r in rows]) for k in ("error", "head", "cosine"))
    found: dict[str, Any] = {
        "groups": len(rows),
        "median_error": float(np.median(error)),
        "spread": float(np.quantile(error, 0.9) / np.quantile(error, 0.1)),
        "ratio": float(np.median(error / head)),
        "spearman_head": float(spearmanr(head, error).statistic),
        "spearman_cosine": float(spearmanr(cosine, error).statistic),
        "cosine_open": float((cosine <= 1 - COSINE).mean()),
        "tolerances": {},
    }
    batch = np.array([r["batch"] for r in rows])
    ratio = np.array([np.median((error / head)[batch != b]) for b in batch])  # of the other batches
    for tol in TOLERANCES:
        for rule, tau in (("audited", tol / ratio), ("fixed", SAFETY * tol)):
            good, is_open = error <= tol, head <= tau
            counts = {"good": good, "open": is_open, "both": good & is_open}
            found["tolerances"].setdefault(str(tol), {})[rule] = {k: int(x.sum()) for k, x in counts.items()}
    return found


def shares(counts: dict[str, int]) -> str:
    """Of the groups within the tolerance, the share that is open; of the open ones, the share beyond it."""
    good, is_open, both = (counts[k] for k in ("good", "open", "both"))
    opened = f"{both / good:.0%}" if good else "–"
    return f"{opened}, {(is_open - both) / is_open:.0%}" if is_open else f"{opened}, –"


def markdown(results: dict) -> str:
    lines = [
        "# Gates: what predicts the error of a group",
        "",
        f"`{results['command']}`; digits, {results['batches']} batches of {results['batch']} samples a row; "
        f"{results['machine']}.",
        "Spearman: rank correlation of the gate's value with the true relative error of the group's gradient.",
        "Spread: the 90 % quantile of the true errors over the 10 % quantile. Ratio: true error over the gate's value,",
        "their median; `step.audit` tells that of its batch. The gate opens below tau = tol / ratio, that of the other",
        "batches. `open`: of the groups whose true error is within the tolerance, the share that it opens; `wrong`: of",
        "the groups that it opens, the share whose error is beyond it.",
        "",
        "| network | path | T | W | groups | median error | spread | ratio | Spearman head | Spearman cosine "
        f"| cosine .995 opens | open, wrong at {' | at '.join(map(str, TOLERANCES))} |",
        f"|---|---|---|---|---|---|---|---|---|---|---|{'---|' * len(TOLERANCES)}",
    ]
    for r in results["rows"]:
        s = r["summary"]
        cells = [shares(s["tolerances"][str(tol)]["audited"]) for tol in TOLERANCES]
        lines.append(
            f"| {r['net']} | {r['path']} | {r['T']} | {r['W']} | {s['groups']} | {s['median_error']:.3f} "
            f"| {s['spread']:.2f} "
            f"| {s['ratio']:.2f} | {s['spearman_head']:.2f} | {s['spearman_cosine']:.2f} | {s['cosine_open']:.0%} "
            f"| {' | '.join(cells)} |"
        )
    p = results["pooled"]
    lines += [
        "",
        f"All groups pooled: Spearman head {p['head']:.2f}, cosine {p['cosine']:.2f}; open, wrong, and of how many "
        "groups within the tolerance:",
        "",
        f"| | {' | '.join(map(str, TOLERANCES))} |",
        f"|---|{'---|' * len(TOLERANCES)}",
    ]
    for rule, title in RULES.items():
        own = [[r["summary"]["tolerances"][str(tol)][rule] for r in results["rows"]] for tol in TOLERANCES]
        total = [{k: sum(x[k] for x in found) for k in ("good", "open", "both")} for found in own]
        cells = [f"{shares(x)}, of {x['good']}" for x in total]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    lines += ["", "![gates](gates.png)"]
    return "\n".join(lines) + "\n"


def draw(results: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.5), sharey=True)
    for r in results["rows"]:
        error = [x["error"] for x in r["groups"]]
        label = f"{r['net']} {r['path']} T={r['T']} W={r['W']}"
        for axis, key in zip(axes, ("head", "cosine"), strict=True):
            axis.loglog([x[key] for x in r["groups"]], error, ".", ms=4, label=label)
    axes[0].set(xlabel="head discrepancy", ylabel="true relative error of the group", title="head")
    axes[1].set(xlabel="1 - smallest cosine", title="cosine (the paper)")
    axes[1].axvline(1 - COSINE, color="grey", lw=1, ls="--")
    axes[1].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Audits every setting: one dict each, with its groups."""
    torch.manual_seed(0)
    images = load_digits()
    reward = reward_classifier(images.shape, images.classes)
    train_classifier(reward, images, 300, 128, 0, "reward classifier")
    reward.requires_grad_(False)
    size = DIT_SIZES["tiny"]
    nets = {
        "MLP": Flat(images.shape, images.classes),
        "DiT tiny": DiT(images.shape[1], images.shape[0], 2, size.width, size.depth, size.heads, images.classes),
    }
    rows = []
    for name, net in nets.items():
        task = Task(images.shape, images.classes, reward, reward, FlowSDE(0.7), uniform_times(16), options.batch, 8)
        pretrain(net, images, task, stop_at=0.7, steps=400, batch=128, seed=0, eval_samples=200)  # type: ignore[arg-type]
        for path in ("ODE", "SDE"):
            loss_fn = make_grpo_loss(FlowSDE(0.7), 1e-3) if path == "SDE" else weighted_matching
            for T, W in ((16, 4), (32, 4), (16, 8)):
                own = dataclasses.replace(task, sigmas=uniform_times(T))
                drawn = batches(net, own, path, options.batches)
                with bar(f"{name} {path} T={T} W={W}", len(drawn)) as progress:
                    found = audits(loss_fn, net, drawn, W, progress.update)
                rows.append({"net": name, "path": path, "T": T, "W": W, "groups": found})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("docs/bench"), help="folder of the results (default: %(default)s)"
    )
    parser.add_argument("--batches", type=int, default=10, help="audited batches a setting (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="samples a batch (default: %(default)s)")
    parser.add_argument("--only-write", action="store_true", help="audit nothing: tables of the JSON that is there")
    options = parser.parse_args()
    if options.batches < 2:
        parser.error("--batches must be 2 or more: the ratio of a batch is measured on the others")
    if options.only_write:
        results = json.loads((options.out / "gates.json").read_text(encoding="utf-8"))
    else:
        results = {
            "command": "python -m bench.gates",
            "machine": f"torch {torch.__version__}, {platform.machine()}",
            "batch": options.batch,
            "batches": options.batches,
            "rows": measure(options),
        }
    for row in results["rows"]:
        row["summary"] = summary(row["groups"])
    everything = [g for r in results["rows"] for g in r["groups"]]
    results["pooled"] = {
        k: float(spearmanr([g[k] for g in everything], [g["error"] for g in everything]).statistic)
        for k in ("head", "cosine")
    }
    text = markdown(results)
    save(options.out, "gates", results, text)
    draw(results, options.out / "gates.png")
    print(text)


if __name__ == "__main__":
    main()
