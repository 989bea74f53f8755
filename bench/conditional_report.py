"""Tables and picture of `bench.conditional_tokens`."""

from __future__ import annotations

from pathlib import Path

import torch

from bench.compare import Paired, table
from bench.conditional_arms import ARMS, IDEAS
from bench.conditional_study import (
    AGAIN,
    BATCH,
    CORE,
    EVERYWHERE,
    FRESH,
    FRESH_SPANS,
    LRS,
    SINUSOIDAL,
    SPANS,
    WIDTHS,
    Job,
    Results,
    best_lr,
)

DIVERGED = 10.0
"""A test MSE of more than this many times that of exact."""


def cell(found: Paired | None) -> str:
    if found is None:
        return "–"
    if not found.gap < DIVERGED:
        return f"diverged ({found.wins}/{found.pairs})"
    return f"{100 * found.gap:+.2f} ({found.wins}/{found.pairs}, {found.p:.2g})"


def markdown(results: Results) -> str:
    """Every comparison, as text."""
    s = results.settings
    lines = [
        "# Conditional tokens: gap of the test MSE against exact, in percent",
        "",
        f"`python -m bench.conditional_tokens`; {s['pairs']} paired seeds, {s['steps']} steps, {BATCH} groups a step, "
        f"learning rate of every arm and reading chosen from {', '.join(f'{lr:g}' for lr in LRS)} on validation data.",
        "A cell is: gap in % (pairs won by the arm / pairs, p of the sign-flip test). Positive: worse than exact. "
        "With 8 pairs p cannot be below .0078.",
        "",
    ]
    for W in WIDTHS:
        lines += [f"## W = {W}, equal steps", ""]
        rows = []
        for key, arm in ARMS.items():
            cells = [cell(results.compare(Job("first", key, W, span))) for span in SPANS]
            if key != "exact" and any(c != "–" for c in cells):
                rows.append([arm.title + (" *" if key in IDEAS else ""), f"{arm.backwards(W):g}", *cells])
        lines += [*table(["estimator", "backwards", *(f"span {x:g}" for x in SPANS)], rows), ""]
    lines += ["\\* thought of while looking at results; believe the fresh seeds below.", ""]
    lines += ["## Fresh seeds and data", "", f"{s['fresh']} pairs, learning rates as chosen on the first seeds.", ""]
    rows = []
    chosen = [("fresh", W, key) for W in WIDTHS for key in FRESH[W][1:]]
    chosen += [("again", W, key) for W in AGAIN for key in AGAIN[W][1:]]
    for stage, W, key in chosen:
        for span in FRESH_SPANS:
            job = Job(stage, key, W, span)
            found = results.compare(job)
            if found is not None:
                interval = f"{100 * found.low:+.2f} to {100 * found.high:+.2f}"
                wins, lrs = f"{found.wins}/{found.pairs}", [results.lr(job), results.lr(job._replace(arm="exact"))]
                title = ARMS[key].title + (" **" if stage == "again" else "")
                row = [str(W), title, f"{ARMS[key].backwards(W):g}", f"{span:g}"]
                row += [f"{100 * found.gap:+.2f}", interval, wins, f"{found.p:.3g}"]
                rows.append([*row, " / ".join(f"{lr:g}" for lr in lrs)])
    head = ["W", "estimator", "backwards", "span", "gap %", "95 %", "wins", "p", "lr of arm / exact"]
    lines += [*table(head, rows), ""]
    lines += ["\\*\\* chosen after looking at the other rows, so on 24 seeds of its own.", ""]
    lines += ["## What a gradient costs", ""]
    lines += [
        "Forward 1, backward 2, per group. `equal backwards` and `equal cost` read each arm after as many steps as "
        "cost what endpoints cost in the whole training; the learning rate is chosen for that reading.",
        "",
    ]
    for W in WIDTHS:
        rows = []
        for key, arm in ARMS.items():
            cells = [
                cell(results.compare(Job("first", key, W, span), reading))
                for span in CORE
                for reading in ("backwards", "cost")
            ]
            if key != "exact" and any(c != "–" for c in cells):
                rows.append([arm.title, f"{arm.forwards(W):g}", f"{arm.backwards(W):g}", f"{arm.cost(W):g}", *cells])
        head = ["estimator", "forwards", "backwards", "cost"]
        head += [f"span {span:g}, equal {what}" for span in CORE for what in ("backwards", "cost")]
        lines += [f"W = {W} (exact: {W} forwards, {W} backwards, {3 * W})", "", *table(head, rows), ""]
    lines += ["## Both arms at the same learning rate, equal steps", ""]
    rows = []
    for W in WIDTHS:
        for key, arm in ARMS.items():
            job = Job("first", key, W, 0.4)
            cells = [cell(results.compare(job, lr=i)) for i in range(len(LRS))]
            if key != "exact" and any(c != "–" for c in cells):
                rows.append([str(W), arm.title, *cells])
    lines += [*table(["W", "estimator", *(f"span .4, lr {lr:g}" for lr in LRS)], rows), ""]
    lines += ["## A sinusoidal embedding of 1000 t in place of t", ""]
    rows = []
    for W, keys in SINUSOIDAL.items():
        for key in keys[1:]:
            cells = [cell(results.compare(Job("first", key, W, span, "sinusoidal"))) for span in CORE]
            rows.append([str(W), ARMS[key].title, f"{ARMS[key].backwards(W):g}", *cells])
    lines += [*table(["W", "estimator", "backwards", *(f"span {x:g}" for x in CORE)], rows), ""]
    lines += ["## W = 7, where the steps next to the ends are the points whose leading error cancels", ""]
    rows = []
    for key in ("endpoints", "inner"):
        cells = [cell(results.compare(Job("first", key, 7, span))) for span in (0.4, 0.45)]
        rows.append([ARMS[key].title, "2", *cells])
    lines += [*table(["estimator", "backwards", "span 0.4", "span 0.45"], rows), ""]
    lines += ["Test MSE of exact: " + ", ".join(_levels(results)) + "."]
    return "\n".join(lines) + "\n"


def _levels(results: Results) -> list[str]:
    found = []
    for W in WIDTHS:
        for span in SPANS:
            result = results.runs.get(Job("first", "exact", W, span).key)
            if result is not None:
                test = torch.tensor(result["steps"]["test"][best_lr(result, "steps")]).mean().item()
                found.append(f"W={W} span {span:g} {test:.4f}")
    return found


def draw(results: Results, path: Path) -> None:
    """Gap against span, one line an estimator, with 95 % intervals; fresh seeds as open circles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(12, 4.6), constrained_layout=True, sharey=True)
    for panel, W in zip(panels, WIDTHS, strict=True):
        shown = [key for key in dict.fromkeys((*EVERYWHERE, *FRESH[W])) if key != "exact"]
        for number, key in enumerate(shown):
            for stage, style in (("first", "-"), ("fresh", "")):
                points = [(x, results.compare(Job(stage, key, W, x))) for x in SPANS]
                known = [(x, c) for x, c in points if c is not None]
                if not known:
                    continue
                gaps = [100 * c.gap for _, c in known]
                bars = [[100 * (c.gap - c.low) for _, c in known], [100 * (c.high - c.gap) for _, c in known]]
                panel.errorbar(
                    [x + 0.004 * (number - 2) + (0.002 if stage == "fresh" else 0) for x, _ in known],
                    gaps,
                    bars,
                    linestyle=style,
                    marker="." if stage == "first" else "o",
                    markerfacecolor="none" if stage == "fresh" else None,
                    color=f"C{number}",
                    capsize=2,
                    linewidth=1,
                    label=f"{ARMS[key].title} ({ARMS[key].backwards(W):g})" if stage == "first" else None,
                )
        panel.axhline(0, color="black", linewidth=0.7)
        panel.set_yscale("symlog", linthresh=1)
        panel.set(title=f"W = {W}", xlabel="span of a group in t")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7, title="estimator (backwards); circles: fresh seeds", title_fontsize=7)
    panels[0].set_ylabel("test MSE against exact, %")
    figure.savefig(path, dpi=130)
    plt.close(figure)
