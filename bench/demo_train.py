"""The phases of the demo: two classifiers, flow-matching pretraining, GRPO post-training."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jagg_fx.models import DiT, Sampler, flow_matching_loss, group_advantages, rollout
from torch import Tensor, nn

from bench.data import Images
from bench.demo_progress import bar

CLASSIFIER_LR = 2e-3
CLASSIFIER_NOISE = 0.8
"""Largest std of the noise on training images; with .3 the reward is easier to fool, and the judge sees it."""

PRETRAIN_LR = 2e-3
PRETRAIN_WARMUP = 50
EMA = 0.98
CHECK_EVERY = 25
"""Pretraining looks at the reward this often, to stop while there is still something to learn."""

EVAL_SEED = 123_456
HELD_SEED = 654_321
"""Rollouts for evaluation and for gradient comparisons: apart from those of training, which count from 0."""


# Classifiers


def reward_classifier(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """What the reward is the probability of: a multilayer perceptron."""
    pixels = shape[0] * shape[1] * shape[2]
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(pixels, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def judge_classifier(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """What judges and is never trained on: a convolutional network."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), classes),
    )


def train_classifier(net: nn.Module, images: Images, steps: int, batch: int, seed: int, title: str) -> None:
    """Cross-entropy on slightly noisy images."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(net.parameters(), CLASSIFIER_LR)
    with bar(title, steps) as progress:
        for _ in range(steps):
            drawn = images.draw(batch, generator)
            level = CLASSIFIER_NOISE * torch.rand(batch, 1, 1, 1, generator=generator)
            noise = level * torch.randn(drawn.pixels.shape, generator=generator)
            loss = F.cross_entropy(net(drawn.pixels + noise), drawn.labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            progress.update()


@torch.no_grad()
def accuracy(net: nn.Module, images: Images) -> float:
    """Share of images whose class the network tells."""
    guesses = torch.cat([net(part).argmax(1) for part in images.pixels.split(1000)])
    return (guesses == images.labels).float().mean().item()


# Rollouts and scores


@dataclass(frozen=True)
class Task:
    """What a rollout needs, the same for every arm."""

    shape: tuple[int, int, int]
    classes: int
    reward: nn.Module
    judge: nn.Module
    sampler: Sampler
    sigmas: Tensor
    batch: int
    group: int

    def draw(self, net: nn.Module, generator: torch.Generator) -> tuple[tuple[Tensor, ...], float]:
        """One on-policy batch: the arguments of the loss after the network, and the mean reward."""
        prompts = torch.randint(self.classes, (self.batch // self.group,), generator=generator)
        y = prompts.repeat_interleave(self.group)
        noise = torch.randn(self.batch, *self.shape, generator=generator)
        path = rollout(net, noise, self.sigmas, y, sampler=self.sampler, generator=generator)
        rewards = self.rewards(path.samples, y)
        assert path.log_probs is not None
        advantages = group_advantages(rewards, self.group)
        return (path.states, path.sigmas, path.log_probs, advantages, y), rewards.mean().item()

    @torch.no_grad()
    def rewards(self, samples: Tensor, y: Tensor) -> Tensor:
        """Probability of the requested class, (B,)."""
        return self.reward(samples).softmax(1).gather(1, y[:, None]).squeeze(1)

    @torch.no_grad()
    def score(self, net: nn.Module, samples: int) -> Score:
        """Reward and the judge's accuracy on the same noise every time, the classes in turn."""
        generator = torch.Generator().manual_seed(EVAL_SEED)
        y = torch.arange(samples) % self.classes
        noise = torch.randn(samples, *self.shape, generator=generator)
        x = rollout(net, noise, self.sigmas, y, sampler=self.sampler, generator=generator).samples
        judged = (self.judge(x).argmax(1) == y).float().mean().item()
        return Score(self.rewards(x, y).mean().item(), judged, x)


class Score(NamedTuple):
    """Mean reward, the judge's accuracy, and the samples they are of."""

    reward: float
    judge: float
    samples: Tensor


# Pretraining


def pretrain(
    net: DiT,
    images: Images,
    task: Task,
    *,
    stop_at: float,
    steps: int,
    batch: int,
    seed: int,
    eval_samples: int,
) -> int:
    """Flow matching until the reward of the averaged weights is at `stop_at`; returns the number of steps."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(net.parameters(), PRETRAIN_LR, weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda i: min(1.0, (i + 1) / PRETRAIN_WARMUP))
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(EMA))
    done, reward = 0, 0.0
    with bar("pretrain by flow matching", steps) as progress:
        while done < steps and reward < stop_at:
            drawn = images.draw(batch, generator)
            t = torch.rand(batch, generator=generator)
            noise = torch.randn(drawn.pixels.shape, generator=generator)
            loss = flow_matching_loss(net, drawn.pixels, noise, t, drawn.labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            average.update_parameters(net)
            done += 1
            progress.update()
            if done % CHECK_EVERY == 0:
                reward = task.score(average.module, eval_samples).reward
                note = f"loss {loss.item():.3f}, reward {reward:.3f}, stops at {stop_at:g}"
                progress.set_postfix_str(note, refresh=False)
        net.load_state_dict(average.module.state_dict())
    return done


# Post-training


@dataclass
class Run:
    """One post-training run.

    Attributes:
        rewards: mean reward of the batch of every step.
        gradient_seconds: loss and backward of every step.
        step_seconds: rollout, loss, backward and optimiser of every step.
        fallback: share of gated groups that took the exact backward, every step; empty without a gate.
        scores: (step, Score) on the held noise.
        weights: at the end.
    """

    rewards: list[float] = field(default_factory=list)
    gradient_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    fallback: list[float] = field(default_factory=list)
    scores: list[tuple[int, Score]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def gradient(loss_fn: Callable[..., Tensor], net: nn.Module, batch: tuple[Any, ...]) -> None:
    """Leaves the gradient of the loss in `.grad`."""
    net.zero_grad(set_to_none=True)
    loss_fn(net, *batch).backward()


class Learner:
    """Weights, optimiser and random numbers of one arm; the network itself is shared, so that it compiles once."""

    def __init__(self, net: nn.Module, loss_fn: Callable[..., Tensor], task: Task, lr: float, seed: int) -> None:
        self.net, self.loss_fn, self.task = net, loss_fn, task
        self.generator = torch.Generator().manual_seed(seed)
        self.optimiser = torch.optim.Adam(net.parameters(), lr, betas=(0.9, 0.99))
        self.run = Run(weights=copy.deepcopy(net.state_dict()))

    def step(self) -> float:
        """One rollout and one optimiser step; returns the reward of the batch."""
        run = self.run
        self.net.load_state_dict(run.weights)
        began = time.perf_counter()
        batch, reward = self.task.draw(self.net, self.generator)
        drawn = time.perf_counter()
        gradient(self.loss_fn, self.net, batch)
        ready = time.perf_counter()
        self.optimiser.step()
        run.step_seconds.append(time.perf_counter() - began)
        run.gradient_seconds.append(ready - drawn)
        run.rewards.append(reward)
        stats = getattr(self.loss_fn, "stats", None)
        if stats is not None and any(group.open is not None for group in stats.groups):
            run.fallback.append(stats.fallback_share)
        run.weights = copy.deepcopy(self.net.state_dict())
        return reward

    def score(self, samples: int) -> None:
        """Adds a score of the weights as they are."""
        self.net.load_state_dict(self.run.weights)
        self.run.scores.append((len(self.run.rewards), self.task.score(self.net, samples)))


def post_train(
    net: nn.Module,
    start: dict[str, Tensor],
    arms: Mapping[str, tuple[Callable[..., Tensor], int]],
    task: Task,
    *,
    lr: float,
    seed: int,
    eval_every: int,
    eval_samples: int,
    title: str,
) -> dict[str, Run]:
    """GRPO from the weights `start`, one optimiser step per rollout, all arms step by step in turn.

    In turn, because seconds are compared: a busy moment of the machine then meets every arm.

    Args:
        arms: a loss and its number of steps, by name.
    """
    net.load_state_dict(start)
    learners = {name: Learner(net, loss_fn, task, lr, seed) for name, (loss_fn, _) in arms.items()}
    with bar(title, sum(steps for _, steps in arms.values())) as progress:
        for step in range(1, max(steps for _, steps in arms.values()) + 1):
            for name, (_, steps) in arms.items():
                if step > steps:
                    continue
                reward = learners[name].step()
                if step % eval_every == 0 or step == steps:
                    learners[name].score(eval_samples)
                progress.set_postfix_str(f"step {step}, {name} reward {reward:.3f}", refresh=False)
                progress.update()
    return {name: learner.run for name, learner in learners.items()}
