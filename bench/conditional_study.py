"""What `bench.conditional_tokens` runs, and what it measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.compare import Paired, paired, rounded
from bench.conditional_arms import IDEAS, LISTED

STEPS, BATCH = 800, 48
LRS = (8e-3, 16e-3, 32e-3)
WIDTHS = (4, 8)
SPANS = (0.1, 0.2, 0.3, 0.4, 0.45, 0.6, 0.8)
FRESH_SPANS = (0.1, 0.2, 0.3, 0.4, 0.45)


class Job(NamedTuple):
    """One training of all seeds and learning rates of an arm."""

    stage: str
    arm: str
    W: int
    span: float
    embedding: str = "scalar"

    @property
    def key(self) -> str:
        return f"{self.stage}/{self.embedding}/W{self.W}/{self.span:g}/{self.arm}"


EVERYWHERE = ("exact", "endpoints", "subset2", "debiased1", "quadratic", "memory12", "gauss")
"""Arms of the picture, run at every span; the others at the two spans of `CORE`."""
CORE = (0.2, 0.4)
FRESH = {4: ("exact", "endpoints", "gauss", "gauss+quadratic"), 8: ("exact", "endpoints", "gauss", "inner+quadratic")}
"""Chosen after looking at the first results: the best with at most 2.25 backwards at W = 4 and 2.5 at W = 8."""
AGAIN = {4: ("exact", "gauss>quadratic")}
"""Chosen after looking at the fresh seeds too, so on seeds that are fresh once more."""
STAGES = {"first": 0, "fresh": 1000, "again": 2000}
"""Where the seeds of a stage begin."""
SINUSOIDAL = {
    4: ("exact", "endpoints", "subset2", "debiased1", "quadratic", "gauss"),
    8: ("exact", "endpoints", "inner", "inner+quadratic", "debiased1"),
}
"""Run with the sinusoidal embedding of 1000 t as well."""


def jobs() -> list[Job]:
    """Of the default run, the most telling first."""
    found = [Job("first", arm, W, span) for W in WIDTHS for span in (0.4, 0.2) for arm in LISTED]
    found += [Job("first", arm, W, 0.4) for W in WIDTHS for arm in IDEAS]
    found += [Job("first", arm, W, span) for W in WIDTHS for span in (0.45, 0.2, 0.3, 0.1) for arm in FRESH[W]]
    found += [Job("fresh", arm, W, span) for W in WIDTHS for span in reversed(FRESH_SPANS) for arm in FRESH[W]]
    found += [Job("first", arm, W, span) for W in AGAIN for span in reversed(FRESH_SPANS) for arm in AGAIN[W]]
    found += [Job("again", arm, W, span) for W in AGAIN for span in reversed(FRESH_SPANS) for arm in AGAIN[W]]
    found += [Job("first", arm, 4, span, "sinusoidal") for span in CORE for arm in SINUSOIDAL[4]]
    found += [Job("first", arm, 8, 0.4, "sinusoidal") for arm in SINUSOIDAL[8]]
    found += [Job("first", arm, 7, span) for span in (0.4, 0.45) for arm in ("exact", "endpoints", "inner")]
    found += [Job("first", arm, W, span) for span in (0.6, 0.8, 0.45, 0.3, 0.1) for W in WIDTHS for arm in EVERYWHERE]
    found += [Job("first", arm, W, 0.2) for W in WIDTHS for arm in IDEAS]
    return list(dict.fromkeys(found))


def best_lr(result: dict[str, Any], reading: str) -> int:
    """Which learning rate has the smallest mean validation error."""
    means = torch.tensor(result[reading]["validate"]).mean(1).nan_to_num(torch.inf)
    return int(means.argmin())


class Results:
    """What was measured, kept in a JSON file that is written after every training."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings, self.runs = path, settings, {}
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["settings"] == settings:
                self.runs = content["runs"]

    def add(self, job: Job, result: dict[str, Any]) -> None:
        self.runs[job.key] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"settings": self.settings, "runs": self.runs}
        self.path.write_text(json.dumps(rounded(content, 6)) + "\n", encoding="utf-8")

    def has(self, job: Job) -> bool:
        return job.key in self.runs

    def lr(self, job: Job) -> float:
        """The learning rate that the first seeds chose."""
        first = self.runs[job._replace(stage="first").key]
        return LRS[best_lr(first, "steps")]

    def compare(self, job: Job, reading: str = "steps", lr: int | None = None) -> Paired | None:
        """With exact, each arm at its own best learning rate, or both at number `lr`."""
        exact = job._replace(arm="exact")
        if not self.has(job) or not self.has(exact) or reading not in self.runs[job.key]:
            return None
        chosen = []
        for key in (job.key, exact.key):
            result = self.runs[key]
            chosen.append(result[reading]["test"][best_lr(result, reading) if lr is None else lr])
        return paired(*chosen, lower_is_better=True, relative=True)
