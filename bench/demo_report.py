"""The table and the pictures of the demo."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bench.demo_measure import Agreement
from bench.demo_train import Run, Score


@dataclass
class Arm:
    """One way to compute the gradient, and all that was measured of it.

    Attributes:
        key, title: for files and for people.
        runs: one per seed; empty where the arm was only timed.
        at_start, at_end: agreement with the exact gradient, at the weights before and after post-training.
        seconds: of loss and backward, interleaved with the other arms.
        compile_seconds: of the first call.
        saved_bytes: activations kept between forward and backward.
    """

    key: str
    title: str
    runs: list[Run] = field(default_factory=list)
    at_start: Agreement | None = None
    at_end: Agreement | None = None
    seconds: list[float] = field(default_factory=list)
    compile_seconds: float | None = None
    saved_bytes: int | None = None

    @property
    def median_seconds(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def fallback(self) -> float | None:
        shares = [share for run in self.runs for share in run.fallback]
        return statistics.fmean(shares) if shares else None

    def final(self, what: str) -> float | None:
        """Mean over seeds of the last score: "reward" or "judge"."""
        last = [getattr(run.scores[-1][1], what) for run in self.runs]
        return statistics.fmean(last) if last else None


EMPTY = "–"
SAMPLE_COLUMNS, SAMPLE_ROWS = 2, 3
"""Of the picture of samples: blocks side by side, and rows of samples within each."""


def _number(value: float | None, form: str, unit: str = "") -> str:
    return EMPTY if value is None else f"{value:{form}}{unit}"


def rows(arms: list[Arm], start: Score) -> list[list[str]]:
    """The table as text, the head first."""
    exact_seconds = [a.median_seconds for a in arms if a.key in ("eager", "exact") and a.median_seconds]
    fastest = min(exact_seconds, default=None)
    exact_bytes = next((a.saved_bytes for a in arms if a.key == "exact"), None)

    def change(before: float, after: float | None, form: str) -> str:
        return EMPTY if after is None else f"{before:{form}} → {after:{form}}"

    def quality(found: Agreement | None) -> list[str]:
        return (
            [EMPTY, EMPTY]
            if found is None
            else [
                f"{found.cosine:.4f}",
                f"{found.error:.3f}" if found.error > 1e-3 else f"{found.error:.0e}",
            ]
        )

    table = [["", *(arm.title for arm in arms)]]
    table.append(["optimiser steps", *(str(len(a.runs[0].rewards)) if a.runs else EMPTY for a in arms)])
    table.append(["reward", *(change(start.reward, a.final("reward"), ".3f") for a in arms)])
    table.append(["judge's accuracy", *(change(start.judge, a.final("judge"), ".1%") for a in arms)])
    for when in ("start", "end"):
        pairs = [quality(getattr(a, f"at_{when}")) for a in arms]
        table.append([f"gradient cosine, {when}", *(p[0] for p in pairs)])
        table.append([f"relative gradient error, {when}", *(p[1] for p in pairs)])
    table.append(["groups that fell back", *(_number(a.fallback, ".0%") for a in arms)])
    table.append(["loss + backward, median", *(_number(a.median_seconds, ".3f", " s") for a in arms)])
    table.append(
        [
            "speed against the fastest exact",
            *(_number(fastest / s if fastest and s else None, ".2f", "x") for s in (a.median_seconds for a in arms)),
        ]
    )
    table.append(
        [
            "saved activations",
            *(_number(None if a.saved_bytes is None else a.saved_bytes / 2**20, ".1f", " MiB") for a in arms),
        ]
    )
    table.append(
        [
            "saved activations against exact",
            *(_number(a.saved_bytes / exact_bytes if a.saved_bytes and exact_bytes else None, ".2f") for a in arms),
        ]
    )
    table.append(["compilation", *(_number(a.compile_seconds, ".0f", " s") for a in arms)])
    return table


def save(folder: Path, name: str, content: Any, text: str) -> None:
    """Writes name.json and name.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(text, encoding="utf-8")


def markdown(table: list[list[str]]) -> str:
    """A Markdown table, its columns lined up so that it reads as plain text too."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in table]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def write(
    folder: Path,
    arms: list[Arm],
    start: Score,
    settings: dict[str, Any],
    notes: list[str],
    phases: dict[str, float],
) -> str:
    """Writes results.md, results.json, reward.png and samples.png; returns the Markdown."""
    lines = [markdown(rows(arms, start)), "", *(f"* {note}" for note in notes)]
    text = "\n".join(lines) + "\n"
    content = {
        "settings": settings,
        "start": {"reward": start.reward, "judge": start.judge},
        "phases_seconds": phases,
        "arms": {arm.key: _plain(arm) for arm in arms},
        "notes": notes,
    }
    save(folder, "results", content, text)
    draw_rewards(folder / "reward.png", arms, start)
    draw_samples(folder / "samples.png", arms, start, int(settings["classes"]))
    return text


def _plain(arm: Arm) -> dict[str, Any]:
    return {
        "title": arm.title,
        "final_reward": arm.final("reward"),
        "final_judge": arm.final("judge"),
        "gradient_at_start": arm.at_start and arm.at_start._asdict(),
        "gradient_at_end": arm.at_end and arm.at_end._asdict(),
        "fallback_share": arm.fallback,
        "median_seconds": arm.median_seconds,
        "seconds": arm.seconds,
        "compile_seconds": arm.compile_seconds,
        "saved_bytes": arm.saved_bytes,
        "runs": [
            {
                "batch_rewards": run.rewards,
                "gradient_seconds": run.gradient_seconds,
                "step_seconds": run.step_seconds,
                "fallback": run.fallback,
                "scores": [{"step": i, "reward": s.reward, "judge": s.judge} for i, s in run.scores],
            }
            for run in arm.runs
        ],
    }


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_rewards(path: Path, arms: list[Arm], start: Score) -> None:
    """Held-out reward against optimiser steps and against seconds, mean over seeds with the range shaded."""
    plt = _pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), sharey=True, constrained_layout=True)
    for arm in arms:
        if not arm.runs:
            continue
        steps = [0, *(i for i, _ in arm.runs[0].scores)]
        rewards = np.array([[start.reward, *(s.reward for _, s in run.scores)] for run in arm.runs])
        clocks = np.array([np.cumsum([0.0, *run.step_seconds])[steps] for run in arm.runs]).mean(0)
        for panel, x in zip(panels, (steps, clocks), strict=True):
            (line,) = panel.plot(x, rewards.mean(0), marker="o", markersize=3, label=arm.title)
            if len(arm.runs) > 1:
                panel.fill_between(x, rewards.min(0), rewards.max(0), color=line.get_color(), alpha=0.15)
    panels[0].set(xlabel="optimiser steps", ylabel="reward on held-out noise")
    panels[1].set(xlabel="seconds of rollouts and steps (compilation not counted)")
    panels[0].legend(loc="lower right")
    for panel in panels:
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_samples(path: Path, arms: list[Arm], start: Score, classes: int) -> None:
    """The same noise before and after, one column per requested class."""
    plt = _pyplot()
    blocks = [("before", start.samples)]
    blocks += [(f"after: {arm.title}", arm.runs[0].scores[-1][1].samples) for arm in arms if arm.runs]
    lines = -(-len(blocks) // SAMPLE_COLUMNS)
    figure, panels = plt.subplots(
        lines, SAMPLE_COLUMNS, figsize=(5 * SAMPLE_COLUMNS, 1.9 * lines), constrained_layout=True, squeeze=False
    )
    for panel in panels.flat:
        panel.axis("off")
    for panel, (title, samples) in zip(panels.flat, blocks, strict=False):
        count = min(SAMPLE_ROWS, len(samples) // classes) * classes
        panel.imshow(_mosaic(samples[:count], classes), cmap="gray", vmin=0, vmax=1)
        panel.set_title(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _mosaic(samples: Tensor, columns: int) -> np.ndarray:
    """(N, C, H, W) in [-1, 1] -> one picture, row by row, a pixel between neighbours."""
    x = ((samples.clamp(-1, 1) + 1) / 2).permute(0, 2, 3, 1).numpy()
    x = np.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)), constant_values=1)
    n, height, width, channels = x.shape
    picture = x.reshape(n // columns, columns, height, width, channels).transpose(0, 2, 1, 3, 4)
    picture = picture.reshape(n // columns * height, columns * width, channels)
    return picture[..., 0] if channels == 1 else picture
