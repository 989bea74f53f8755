"""On-policy GRPO of a flow model on real images, with every estimator, in paired seeds.

    python -m bench.grpo              about 25 minutes on one core; goes on where it was stopped
    python -m bench.grpo --help       every option

A class-conditional velocity MLP is pretrained on scikit-learn's digits by flow matching and stopped early, as in
`bench.demo`: the reward is the probability that one classifier gives to the requested class, and a judge of another
kind, trained on other images, takes no part. From there it is post-trained on Flow-SDE trajectories, one optimiser
step a rollout, for all seeds and learning rates of an arm at once (`bench.runs`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import torch
from jagg_fx.models import (
    FlowSDE,
    MLPVelocity,
    clipped_ratio_loss,
    count_parameters,
    group_advantages,
    rollout,
    uniform_times,
)
from torch import Tensor, nn

from bench import data
from bench.compare import Paired, paired
from bench.conditional_tokens import InnerPair
from bench.demo_progress import bar
from bench.demo_train import (
    EVAL_SEED,
    Task,
    accuracy,
    judge_classifier,
    pretrain,
    reward_classifier,
    train_classifier,
)
from bench.runs import Adam, Gradient, Nets, cosine, exact_gradient, relative_error
from jagg_fx.estimators import (
    Base,
    Causal,
    Debiased,
    Endpoints,
    Exact,
    Knots,
    Memory,
    Quadratic,
    Subset,
    Weight,
)

HIDDEN, DEPTH = 96, 2
CLASSIFIER_STEPS = 600
START_REWARD = 0.5
GROUP, CLIP, ETA = 8, 1e-3, 0.7
BETAS = (0.9, 0.99)
STEPS, SEEDS = 60, 8
LRS = (5e-4, 1e-3, 2e-3)
BATCHES = (32, 128)
CHECK_EVERY, CURVE_EVERY = 20, 10
SAMPLES = 1000
SMOOTH = 6
"""Steps over which the picture averages the reward of the batches."""


@dataclass(frozen=True)
class Fraction(Base):
    """The timestep fraction of trainers: of each row a random half of all steps, in any order."""

    name = "timestep fraction"
    whole = True
    sums_to_one = False
    extrapolates = True

    def nodes(self, n: int) -> tuple[int, ...]:
        return ()

    def drawn(self, n: int) -> int:
        return n // 2

    def picks(self, lam: Sequence[Weight], u: Sequence[Tensor]) -> list[Tensor]:
        order = torch.arange(len(lam)).repeat(len(u[0]), 1)
        row = torch.arange(len(u[0]))
        for i, x in enumerate(u):
            j = i + (x * (len(lam) - i)).long().clamp(max=len(lam) - i - 1)
            order[row, i], order[row, j] = order[row, j], order[row, i]
        return list(order[:, : len(u)].T)

    def weights(self, lam: Sequence[Weight], picks: Sequence[Tensor] = ()) -> list[list[Weight]]:
        n = len(lam)
        return [[torch.where(pick == k, n / len(picks), 0.0) for k in range(n)] for pick in picks]


class Arm(NamedTuple):
    """One way to compute the gradient, and what its learning rates are multiplied by."""

    title: str
    estimator: Any
    W: int = 4
    lr_factor: float = 1.0

    def backwards(self, T: int) -> float:
        """Full backwards of a trajectory, the mean over draws and steps."""
        if self.estimator.whole:
            return self.estimator.expected_backwards(T)
        return sum(self.estimator.expected_backwards(min(self.W, T - i)) for i in range(0, T, self.W))

    def forwards(self, T: int) -> float:
        """Of the loss: all steps, but for a subset, whose other steps are not needed."""
        return self.backwards(T) if isinstance(self.estimator, (Subset, Fraction)) else T

    def cost(self, T: int) -> float:
        """Forward 1, backward 2, and the rollout with its T forwards."""
        return T + self.forwards(T) + 2 * self.backwards(T)


ARMS: dict[str, Arm] = {
    "exact": Arm("exact", Exact()),
    "endpoints4": Arm("endpoints W=4", Endpoints()),
    "causal1.5": Arm("causal, 1.5", Causal(1.5)),
    "subset": Arm("random half, one of each two steps", Subset(2)),
    "endpoints8": Arm("endpoints W=8", Endpoints(), 8),
    "knots": Arm("knots, every 3rd", Knots(3)),
    "memory": Arm("memory W=4, every 12th, shrunk", Memory(12, 0.95, True)),
    "debiased1": Arm("debiased W=4, p = 1", Debiased(1.0)),
    "causal1": Arm("causal, 1", Causal(1.0)),
    "quadratic": Arm("quadratic W=4", Quadratic()),
    "fraction": Arm("timestep fraction 1/2", Fraction()),
    "debiased.25": Arm("debiased W=4, p = 1/4", Debiased(0.25)),
    "endpoints4 x1.1": Arm("endpoints W=4, lr x 1.1", Endpoints(), lr_factor=1.1),
    "exact x1.1": Arm("exact, lr x 1.1", Exact(), lr_factor=1.1),
    "inner8": Arm("inner pair, W=8 *", InnerPair(), 8),
    "endpoints2": Arm("endpoints W=2 (exact but for rounding)", Endpoints(), 2),
}
"""Written down before any of them was run at these settings; * is an idea beyond the library's estimators."""

MAIN = ("exact", "endpoints4", "causal1.5", "subset", "endpoints8", "knots")
"""Run for every T."""


class Job(NamedTuple):
    T: int
    batch: int
    arm: str

    @property
    def key(self) -> str:
        return f"T{self.T}/B{self.batch}/{self.arm}"


def jobs() -> list[Job]:
    """Of the default run, the most telling first."""
    small, large = BATCHES
    found = [Job(16, small, arm) for arm in ARMS]
    found += [Job(16, large, arm) for arm in ARMS if arm != "endpoints2"]
    found += [Job(T, large, arm) for T in (10, 32) for arm in MAIN]
    return found


# Setting


class Flat(nn.Module):
    """A velocity of vectors as one of images."""

    def __init__(self, net: MLPVelocity) -> None:
        super().__init__()
        self.net = net

    def forward(self, z: Tensor, t: Tensor, y: Tensor) -> Tensor:
        return self.net(z.flatten(1), t, y).reshape(z.shape)


class Setting(NamedTuple):
    """What all arms start from.

    Attributes:
        images: all real images.
        reward, judge: classifiers.
        net: pretrained.
        notes: for people.
    """

    images: data.Images
    reward: nn.Module
    judge: nn.Module
    net: MLPVelocity
    notes: list[str]


def prepare() -> Setting:
    """Classifiers and pretraining, as in the demo."""
    images = data.load_digits()
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    fifth = len(images) // 5
    training, test = images[: 4 * fifth], images[4 * fifth :]
    torch.manual_seed(0)
    reward, judge = (make(images.shape, images.classes) for make in (reward_classifier, judge_classifier))
    for i, (net, title) in enumerate([(reward, "reward classifier"), (judge, "judge classifier")]):
        part = training[2 * i * fifth : 2 * (i + 1) * fifth]
        train_classifier(net, part, CLASSIFIER_STEPS, 128, i, title)
        net.requires_grad_(False)
    torch.manual_seed(0)
    velocity = MLPVelocity(images.pixels[0].numel(), HIDDEN, DEPTH, images.classes, "sinusoidal")
    task = Task(images.shape, images.classes, reward, judge, FlowSDE(ETA), uniform_times(16), 128, GROUP)
    flat = Flat(velocity)
    steps = pretrain(
        flat,
        training,
        task,
        stop_at=START_REWARD,
        steps=6000,
        batch=128,
        seed=0,
        eval_samples=500,  # type: ignore[arg-type]
    )
    score = task.score(flat, SAMPLES)
    notes = [
        f"velocity: MLP of {DEPTH} x {HIDDEN}, sinusoidal time, {count_parameters(velocity):,} parameters, "
        f"{steps} steps of flow matching; reward {score.reward:.3f}, judge {score.judge:.3f} before post-training",
        f"held-out images: reward classifier {accuracy(reward, test):.1%}, judge {accuracy(judge, test):.1%}",
    ]
    return Setting(images, reward, judge, velocity, notes)


def features_of(judge: nn.Module, pixels: Tensor) -> Tensor:
    """What the judge's last layer reads."""
    with torch.no_grad():
        return judge[:-1](pixels)  # type: ignore[index]


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """Squared Frechet distance of two Gaussians with the moments of samples (N, F).

    The trace of the root of A B is that of the root of (root A) B (root A), which is symmetric, so that features that
    are always zero do no harm.
    """
    mean, first, second = a.mean(0) - b.mean(0), np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    values, vectors = scipy.linalg.eigh(first)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    cross = np.sqrt(scipy.linalg.eigvalsh(root @ second @ root).clip(0)).sum()
    return float(mean @ mean + np.trace(first) + np.trace(second) - 2 * cross)


# Training


def policy_head(states: Tensor, sigmas: Tensor, old: Tensor, advantages: Tensor) -> Callable[[Tensor], Tensor]:
    """The GRPO loss of every run from its velocities (R, T, B, D): that of `jagg_fx.models.grpo_loss`.

    states (R, T + 1, B, D), sigmas (T + 1,), old (R, T, B), advantages (R, B).
    """
    runs, steps, rows = old.shape
    sampler, flat = FlowSDE(ETA), (runs * steps * rows, states.shape[-1])
    z, z_next = states[:, :-1].reshape(flat), states[:, 1:].reshape(flat)
    sigma, sigma_next = (
        s.expand(runs, -1)[:, :, None].expand(old.shape).reshape(-1) for s in (sigmas[:-1], sigmas[1:])
    )
    weight = advantages[:, None].expand(old.shape).reshape(-1)

    def head(v: Tensor) -> Tensor:
        step = sampler.step(v.reshape(flat), z, sigma, sigma_next)
        log_prob = sampler.log_prob(z_next, step.mean, step.std)
        return clipped_ratio_loss(log_prob, old.reshape(-1), weight, CLIP).reshape(old.shape).mean((1, 2))

    return head


class Rollouts:
    """On-policy trajectories of all runs."""

    def __init__(self, setting: Setting, T: int) -> None:
        self.setting, self.sigmas = setting, uniform_times(T)
        self.sampler = FlowSDE(ETA)

    def draw(self, nets: Nets, y: Tensor, generator: torch.Generator, noise: Tensor | None = None) -> Any:
        """The trajectory, rows of all runs after one another; y (R, B)."""
        runs, rows = y.shape
        dim = self.setting.net.dim

        def velocity(z: Tensor, sigma: Tensor) -> Tensor:
            features = nets.features(z.reshape(runs, rows, dim), sigma, y)
            return nets.velocity(features).reshape(-1, dim)

        noise = torch.randn(runs * rows, dim, generator=generator) if noise is None else noise
        return rollout(velocity, noise, self.sigmas, sampler=self.sampler, generator=generator)

    @torch.no_grad()
    def rewards(self, samples: Tensor, y: Tensor) -> Tensor:
        """(R, B) from samples (R B, D)."""
        return self.setting.reward(samples).softmax(1).gather(1, y.reshape(-1, 1)).reshape(y.shape)

    def score(self, nets: Nets, samples: int) -> tuple[Tensor, Tensor]:
        """Held-out reward of every run (R,), and the samples (R, samples, D): the same noise for all runs."""
        generator = torch.Generator().manual_seed(EVAL_SEED)
        found = []
        for i in range(nets.runs):
            one = nets.copy()
            one.weights = [w[i : i + 1] for w in nets.weights]
            generator.manual_seed(EVAL_SEED)
            y = (torch.arange(samples) % self.setting.images.classes)[None]
            found.append(self.draw(one, y, generator).samples)
        x = torch.stack(found)
        y = (torch.arange(samples) % self.setting.images.classes).expand(nets.runs, -1)
        return self.rewards(x.flatten(0, 1), y).mean(1), x


def train(
    arm: Arm, setting: Setting, T: int, batch: int, lrs: Sequence[float], steps: int, seeds: int
) -> dict[str, Any]:
    """All seeds and learning rates of an arm; lists are (learning rates, seeds) unless said otherwise."""
    copies, classes = len(lrs), setting.images.classes
    runs = copies * seeds
    nets = Nets([setting.net] * runs)
    rollouts = Rollouts(setting, T)
    rates = torch.tensor(lrs).repeat_interleave(seeds) * arm.lr_factor
    adam = Adam(nets.weights, rates, BETAS)
    gradient = Gradient(arm.estimator, arm.W)
    generator = torch.Generator().manual_seed(0)
    times = rollouts.sigmas[:-1].tolist()
    curve, batch_rewards, seconds = [], [], []
    checks: list[dict[str, Any]] = []

    def shaped(x: Tensor) -> list[list[float]]:
        return x.reshape(copies, seeds).tolist()

    for step in range(steps + 1):
        if isinstance(arm.estimator, Exact) and step % CURVE_EVERY == 0 and step < steps:
            curve.append({"step": step, "reward": shaped(rollouts.score(nets, SAMPLES)[0])})
        if step == steps:
            break
        prompts = torch.randint(classes, (seeds, batch // GROUP), generator=generator)
        y = prompts.repeat_interleave(GROUP, 1).repeat(copies, 1)
        # The same noise for the copies of a seed; the noise of the steps differs, but not between arms.
        noise = torch.randn(seeds, batch, setting.net.dim, generator=generator).repeat(copies, 1, 1).flatten(0, 1)
        path = rollouts.draw(nets, y, generator, noise)
        rewards = rollouts.rewards(path.samples, y)
        advantages = group_advantages(rewards.flatten(), GROUP).reshape(runs, batch)
        states = path.states.reshape(T + 1, runs, batch, -1).transpose(0, 1)
        old = path.log_probs.reshape(T, runs, batch).transpose(0, 1)
        began = time.perf_counter()
        head = policy_head(states, path.sigmas, old, advantages)
        features = nets.features(states[:, :-1], path.sigmas[:-1, None], y[:, None])
        found, _ = gradient(nets, features, times, head)
        seconds.append(time.perf_counter() - began)
        if step % CHECK_EVERY == 0 and not isinstance(arm.estimator, Exact):
            want, _ = exact_gradient(nets, features, head)
            agreement = {"cosine": shaped(cosine(found, want)), "error": shaped(relative_error(found, want))}
            checks.append({"step": step} | agreement)
        adam.step(found)
        batch_rewards.append(rewards.mean(1))
    reward, x = rollouts.score(nets, SAMPLES)
    curve.append({"step": steps, "reward": shaped(reward)})
    y = torch.arange(SAMPLES) % classes
    images = x.reshape(runs, SAMPLES, *setting.images.shape)
    real = features_of(setting.judge, setting.images.pixels).numpy()
    judged, distance = [], []
    for own in images:
        with torch.no_grad():
            judged.append((setting.judge(own).argmax(1) == y).float().mean())
        finite = bool(own.isfinite().all())
        distance.append(frechet(features_of(setting.judge, own).numpy(), real) if finite else float("nan"))
    return {
        "reward": shaped(reward),
        "judge": shaped(torch.stack(judged)),
        "frechet": shaped(torch.tensor(distance)),
        "curve": curve,
        # (steps, learning rates): the mean over seeds
        "batch_reward": [r.reshape(copies, seeds).mean(1).tolist() for r in batch_rewards],
        "mean_batch_reward": shaped(torch.stack(batch_rewards).mean(0)),
        "agreement": checks,
        "gradient_seconds": statistics.median(seconds),
    }


# Results


class Results:
    """What was measured, kept in a JSON file that is written after every arm."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.content = path, {"settings": settings, "notes": [], "runs": {}}
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["settings"] == settings:
                self.content = content
        self.runs: dict[str, Any] = self.content["runs"]

    def add(self, job: Job, result: dict[str, Any]) -> None:
        self.runs[job.key] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(_rounded(self.content)) + "\n", encoding="utf-8")

    def of(self, job: Job) -> dict[str, Any] | None:
        return self.runs.get(job.key)

    def best_lr(self, T: int, batch: int) -> int:
        """Where exact has its highest mean reward."""
        exact = self.runs[Job(T, batch, "exact").key]
        return int(np.nan_to_num(np.mean(exact["reward"], axis=1), nan=-1).argmax())

    def compare(self, job: Job, what: str, lr: int) -> Paired | None:
        """`what` of an arm minus that of exact, at the same learning rate."""
        arm, exact = self.of(job), self.of(job._replace(arm="exact"))
        if arm is None or exact is None:
            return None
        return paired(arm[what][lr], exact[what][lr], lower_is_better=what == "frechet", relative=False)

    def at_equal(self, job: Job, cost: Callable[[Arm, int], float], lr: int) -> Paired | None:
        """Final held-out reward minus that of exact after as many steps as cost the same, on the same noise."""
        arm, exact = self.of(job), self.of(job._replace(arm="exact"))
        if arm is None or exact is None:
            return None
        share = cost(ARMS[job.arm], job.T) / cost(ARMS["exact"], job.T)
        steps = [point["step"] for point in exact["curve"]]
        rewards = np.array([point["reward"][lr] for point in exact["curve"]])
        before = [np.interp(share * steps[-1], steps, own) for own in rewards.T]
        return paired(arm["reward"][lr], before, lower_is_better=False, relative=False)


def _rounded(x: Any) -> Any:
    if isinstance(x, float):
        return float(f"{x:.5g}")
    if isinstance(x, dict):
        return {k: _rounded(v) for k, v in x.items()}
    return [_rounded(v) for v in x] if isinstance(x, (list, tuple)) else x


def cell(found: Paired | None) -> str:
    if found is None:
        return "–"
    half = (found.high - found.low) / 2
    return f"{found.gap:+.4f} ± {half:.4f} ({found.wins}/{found.pairs}, {found.p:.2g})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def markdown(results: Results) -> str:
    """Every comparison, as text."""
    s = results.content["settings"]
    lines = [
        "# On-policy GRPO on digits: every estimator against exact",
        "",
        f"`python -m bench.grpo`; Flow-SDE, eta {ETA:g}, {s['steps']} steps, {s['seeds']} paired seeds, groups of "
        f"{GROUP} samples, learning rates {', '.join(f'{lr:g}' for lr in s['lrs'])}.",
        "",
        *(f"* {note}" for note in results.content["notes"]),
        "* A cell is: arm minus exact at the same learning rate ± half of the 95 % t-interval (seeds won / seeds, p of "
        f"the sign-flip test, never below {2 / 2 ** s['seeds']:.2g}).",
        "* Rewards are those of held-out noise, "
        f"{SAMPLES} samples; `frechet` is the Frechet distance to the real images in the judge's features.",
        "* `cost` of a trajectory: forward 1, backward 2, rollout included. `seconds` are of the gradient alone, "
        "median of the steps, all seeds and learning rates together, on a machine that did other work too.",
        "* `equal backwards` and `equal cost`: exact is read after as many steps as cost the same (its curve is "
        f"interpolated between scores every {CURVE_EVERY} steps), both at exact's best rate.",
        "",
    ]
    for T, batch in dict.fromkeys((job.T, job.batch) for job in jobs()):
        if results.of(Job(T, batch, "exact")) is None:
            lines += [f"T = {T}, batch {batch}: not run.", ""]
            continue
        lines += _section(results, T, batch)
    missing = [job.key for job in jobs() if results.of(job) is None]
    lines += ["Not run: " + (", ".join(missing) if missing else "nothing") + "."]
    return "\n".join(lines) + "\n"


def _section(results: Results, T: int, batch: int) -> list[str]:
    lrs, best = results.content["settings"]["lrs"], results.best_lr(T, batch)
    exact = results.runs[Job(T, batch, "exact").key]
    level = ", ".join(
        f"lr {lr:g}: reward {np.mean(exact['reward'][i]):.3f}, judge {np.mean(exact['judge'][i]):.3f}, "
        f"frechet {np.mean(exact['frechet'][i]):.0f}"
        for i, lr in enumerate(lrs)
    )
    lines = [f"## T = {T}, batch {batch}", "", f"Exact: {level}.", ""]
    rewards, others = [], []
    for key, arm in ARMS.items():
        job = Job(T, batch, key)
        result = results.of(job)
        if result is None or key == "exact":
            continue
        cells = [cell(results.compare(job, "reward", i)) for i in range(len(lrs))]
        rewards.append([arm.title, f"{arm.backwards(T):g}", *cells])
        start, end = (np.mean(result["agreement"][i]["cosine"][best]) if result["agreement"] else 1.0 for i in (0, -1))
        others.append(
            [
                arm.title,
                f"{arm.cost(T):g}",
                f"{result['gradient_seconds']:.3f}",
                f"{start:.3f} → {end:.3f}",
                cell(results.compare(job, "judge", best)),
                f"{np.mean(result['frechet'][best]):.0f}",
                cell(results.at_equal(job, Arm.backwards, best)),
                cell(results.at_equal(job, Arm.cost, best)),
            ]
        )
    lines += table(["estimator", f"backwards of {T}", *(f"reward, lr {lr:g}" for lr in lrs)], rewards)
    head = ["estimator", f"cost (exact {ARMS['exact'].cost(T):g})", "seconds", "gradient cosine", "judge"]
    head += ["frechet", "reward, equal backwards", "reward, equal cost"]
    lines += ["", f"At lr {lrs[best]:g}, exact's best; exact's gradient takes {exact['gradient_seconds']:.3f} s:", ""]
    return [*lines, *table(head, others), ""]


def draw(results: Results, path: Path) -> None:
    """Reward against steps and against backwards at exact's best learning rate, and the differences at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    known = [(16, b) for b in BATCHES if results.of(Job(16, b, "exact")) is not None]
    if not known:
        return
    figure, panels = plt.subplots(len(known), 3, figsize=(15, 4.4 * len(known)), constrained_layout=True, squeeze=False)
    for (T, batch), (steps, backwards, final) in zip(known, panels, strict=True):
        best = results.best_lr(T, batch)
        lr = results.content["settings"]["lrs"][best]
        keys = [key for key in ARMS if results.of(Job(T, batch, key)) is not None]
        for number, key in enumerate(keys):
            result = results.runs[Job(T, batch, key).key]
            y = np.array(result["batch_reward"])[:, best]
            y = np.convolve(y, np.full(SMOOTH, 1 / SMOOTH), mode="valid")
            x = np.arange(len(y)) + (SMOOTH - 1) / 2
            if key in MAIN or key == "memory":
                for panel, scale in ((steps, 1.0), (backwards, ARMS[key].backwards(T))):
                    panel.plot(x * scale, y, color=f"C{number % 10}", label=ARMS[key].title)
            if key != "exact":
                for i in range(len(results.content["settings"]["lrs"])):
                    found = results.compare(Job(T, batch, key), "reward", i)
                    assert found is not None
                    bar_ = [[found.gap - found.low], [found.high - found.gap]]
                    final.errorbar(found.gap, number + 0.2 * (i - 1), xerr=bar_, fmt="o", markersize=3, color=f"C{i}")
        steps.set(
            title=f"T = {T}, batch {batch}, lr {lr:g}",
            xlabel="steps",
            ylabel=f"reward of the batches, mean of {SMOOTH} steps",
        )
        backwards.set(xlabel="backwards a trajectory")
        steps.legend(fontsize=7)
        final.axvline(0, color="black", linewidth=0.7)
        final.set_yticks(range(1, len(keys)), [ARMS[key].title for key in keys[1:]], fontsize=7)
        final.set_xscale("symlog", linthresh=0.01)
        final.set(title="final reward minus exact, low to high lr", xlabel="95 % interval")
        for panel in (steps, backwards, final):
            panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what is not in the JSON yet, then writes the tables and the picture."""
    p = argparse.ArgumentParser(prog="python -m bench.grpo", description=__doc__.split("\n\n")[0])
    p.add_argument("--steps", type=int, default=STEPS, help="optimiser steps")
    p.add_argument("--seeds", type=int, default=SEEDS, help="paired seeds")
    p.add_argument("--lrs", type=float, nargs="+", default=list(LRS), help="learning rates")
    p.add_argument("--minutes", type=float, default=float("inf"), help="start no arm after that long")
    p.add_argument("--threads", type=int, default=1, help="threads of torch")
    p.add_argument("--out", type=Path, default=Path("docs/bench"), help="folder of the results")
    p.add_argument("--only-write", action="store_true", help="train nothing")
    options = p.parse_args(argv)
    torch.set_num_threads(options.threads)
    settings = {"steps": options.steps, "seeds": options.seeds, "lrs": options.lrs, "hidden": HIDDEN, "depth": DEPTH}
    results = Results(options.out / "grpo.json", settings)
    missing = [] if options.only_write else [job for job in jobs() if results.of(job) is None]
    if missing:
        began = time.perf_counter()
        setting = prepare()
        results.content["notes"] = setting.notes
        with bar("GRPO", len(missing)) as progress:
            for job in missing:
                if time.perf_counter() - began > 60 * options.minutes:
                    break
                progress.set_postfix_str(job.key, refresh=False)
                arm = ARMS[job.arm]
                results.add(job, train(arm, setting, job.T, job.batch, options.lrs, options.steps, options.seeds))
                progress.update()
    (options.out / "grpo.md").write_text(markdown(results), encoding="utf-8")
    draw(results, options.out / "grpo.png")


if __name__ == "__main__":
    main()
