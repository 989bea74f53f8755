"""The main job: GRPO post-training of a small DiT on real images, exact and with `jagg_fx.transform`.

    python -m bench.demo                 about ten minutes on two cores, compilation included
    python -m bench.demo --quick         a smoke run of about a minute
    python -m bench.demo --help          every option

A class-conditional DiT is pretrained by flow matching and stopped early. The reward is the probability that
one classifier gives to the requested class; a second classifier, of another kind and from other images, judges
and takes no part in training. From the same start and the same seeds the DiT is then post-trained on SDE
trajectories with the exact gradient, with JAGG without a gate, with the gate of the paper, and with a random
subset of the timesteps that costs as many backwards as JAGG.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jagg_fx.models import DIT_SIZES, SAMPLERS, DiT, count_parameters, make_grpo_loss, uniform_times
from torch import Tensor

import jagg_fx
from bench import data
from bench.demo_measure import RandomSteps, agreement, best_threads, step_seconds
from bench.demo_progress import clock
from bench.demo_report import Arm, write
from bench.demo_train import (
    HELD_SEED,
    Task,
    accuracy,
    gradient,
    judge_classifier,
    post_train,
    pretrain,
    reward_classifier,
    train_classifier,
)

PATCH_SIZE = {"digits": 2, "fashion-mnist": 4, "cifar10": 4}

QUICK = {
    "compiler": "eager",
    "T": 8,
    "steps": 4,
    "batch": 32,
    "pretrain_steps": 100,
    "classifier_steps": 100,
    "held_batches": 1,
    "rounds": 3,
    "eval_samples": 100,
}
"""What --quick changes, unless an option says otherwise."""


def parser() -> argparse.ArgumentParser:
    """The options of the demo."""
    p = argparse.ArgumentParser(
        prog="python -m bench.demo",
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = p.add_argument_group("data and network").add_argument
    add("--data", choices=list(data.READERS), default="digits", help="labelled images")
    add(
        "--data-dir",
        type=Path,
        default=Path("data"),
        help="folder of your own copy of Fashion-MNIST or CIFAR-10",
    )
    add("--size", choices=list(DIT_SIZES), default="tiny", help="size of the DiT")
    add(
        "--patch-size",
        type=_positive,
        help="pixels per side of a token; by default 2 for digits, 4 otherwise",
    )
    add = p.add_argument_group("method").add_argument
    add("--W", type=int, default=4, help="timesteps per group")
    add("--estimator", default="endpoints", help="estimator of the two JAGG runs")
    add("--gate", default="cosine", help='gate of the gated run, or "none" to leave that run out')
    add("--tau", type=float, default=0.995, help="threshold of the gate")
    add("--compiler", choices=["inductor", "eager"], default="inductor", help="what runs the rewritten graph")
    add = p.add_argument_group("trajectories").add_argument
    add("--sampler", choices=[name for name in SAMPLERS if name != "ode"], default="flow-sde", help="sampler")
    add("--T", type=_positive, default=16, help="timesteps of a trajectory")
    add("--eta", type=float, default=0.7, help="noise level of the sampler")
    add = p.add_argument_group("training").add_argument
    add("--steps", type=_positive, default=60, help="optimiser steps of a run")
    add(
        "--gated-steps",
        type=_positive,
        help="optimiser steps of the gated run; by default a third of --steps",
    )
    add("--batch", type=_positive, default=128, help="samples per step")
    add("--group", type=_positive, default=8, help="samples per prompt")
    add("--lr", type=float, default=3e-4, help="learning rate")
    add("--clip", type=float, default=1e-3, help="clip range of the ratio")
    add(
        "--seeds",
        type=int,
        nargs="+",
        default=[0],
        help="seeds of post-training; every run is repeated for each",
    )
    add("--start-reward", type=float, default=0.5, help="pretraining stops at this reward")
    add("--pretrain-steps", type=_positive, default=2000, help="most steps of pretraining")
    add("--classifier-steps", type=_positive, default=600, help="steps of each classifier")
    add = p.add_argument_group("measurement and output").add_argument
    add("--held-batches", type=_positive, default=3, help="batches on which gradients are compared")
    add("--rounds", type=_positive, default=9, help="interleaved rounds of the step times")
    add("--eval-samples", type=_positive, default=500, help="samples per evaluation")
    add("--threads", type=_positive, help="threads of torch; by default what a short trial prefers")
    add("--out", type=Path, default=Path("out/demo"), help="folder for the table and the pictures")
    add("--quick", action="store_true", help="a smoke run of about a minute: few steps, no code generation")
    return p


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options as given; --quick changes the defaults only."""
    p = parser()
    if p.parse_args(argv).quick:
        p.set_defaults(**QUICK)
    options = p.parse_args(argv)
    if options.batch % options.group or options.group < 2:
        p.error(f"--batch {options.batch} must be a multiple of --group {options.group}, which must be at least 2")
    if options.eval_samples < data.CLASSES:
        p.error(f"--eval-samples {options.eval_samples} must be at least one per class, {data.CLASSES}")
    options.patch_size = options.patch_size or PATCH_SIZE[options.data]
    options.gated_steps = options.gated_steps or max(1, options.steps // 3)
    options.gate = None if options.gate == "none" else options.gate
    return options


def make_arms(options: argparse.Namespace, loss_fn: Callable[..., Tensor]) -> dict[str, tuple[Arm, Any]]:
    """The ways to compute the gradient, by key, each with its loss.

    Raises:
        ValueError: an option that `jagg_fx.transform` does not take.
    """
    name = f"JAGG W={options.W}"
    if options.estimator != "endpoints":
        name += f" {options.estimator}"
    arms: dict[str, tuple[Arm, Any]] = {
        "eager": (Arm("eager", "exact, eager"), loss_fn),
        "exact": (
            Arm("exact", "exact, compiled" if options.compiler == "inductor" else "exact, graph"),
            jagg_fx.transform(loss_fn, options.W, estimator="exact", compiler=options.compiler),
        ),
        "jagg": (
            Arm("jagg", f"{name}, no gate"),
            jagg_fx.transform(loss_fn, options.W, estimator=options.estimator, gate=None, compiler=options.compiler),
        ),
    }
    if options.gate is not None:
        arms["gated"] = (
            Arm("gated", f"{name}, {options.gate} ≥ {options.tau:g}"),
            jagg_fx.transform(
                loss_fn,
                options.W,
                estimator=options.estimator,
                gate=options.gate,
                tau=options.tau,
                compiler=options.compiler,
            ),
        )
    return arms


class Phases:
    """Seconds of each phase of the demo."""

    def __init__(self) -> None:
        self.began = self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """The phase that ends now."""
        now = time.perf_counter()
        self.seconds[name] = now - self.last
        self.last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.seconds.items())
        return f"{self.last - self.began:.0f} s in all: {parts}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the demo; see the options."""
    phases = Phases()
    options = parse(argv)
    # The table says what the gate did; the advice would break into the progress bars.
    warnings.filterwarnings("ignore", message="The gate was shut", category=jagg_fx.JaggWarning)
    try:
        images = data.load(options.data, options.data_dir)
        sampler = SAMPLERS[options.sampler](options.eta)
        loss_fn = make_grpo_loss(sampler, options.clip)
        arms = make_arms(options, loss_fn)
        torch.manual_seed(0)
        channels, *size = images.shape
        net = DiT.from_size(options.size, (size[0], size[1]), channels, options.patch_size, images.classes)
    except (FileNotFoundError, ValueError) as error:
        parser().exit(2, f"error: {error}\n")
    threads = options.threads or best_threads(net, images, options.batch)
    torch.set_num_threads(threads)
    phases.end("data")

    # Two fifths of the images for each classifier, the rest to test both.
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    fifth = len(images) // 5
    training, test = images[: 4 * fifth], images[4 * fifth :]
    reward, judge = (make(images.shape, images.classes) for make in (reward_classifier, judge_classifier))
    for i, (net_, title) in enumerate([(reward, "reward classifier"), (judge, "judge classifier")]):
        part = training[2 * i * fifth : 2 * (i + 1) * fifth]
        train_classifier(net_, part, options.classifier_steps, options.batch, i, title)
        net_.requires_grad_(False)
    phases.end("classifiers")

    times = uniform_times(options.T)
    task = Task(images.shape, images.classes, reward, judge, sampler, times, options.batch, options.group)
    pretrained = pretrain(
        net,
        training,
        task,
        stop_at=options.start_reward,
        steps=options.pretrain_steps,
        batch=options.batch,
        seed=0,
        eval_samples=max(1, options.eval_samples // 2),
    )
    weights = copy.deepcopy(net.state_dict())
    start = task.score(net, options.eval_samples)
    phases.end("pretraining")

    held_generator = torch.Generator().manual_seed(HELD_SEED)
    held = [task.draw(net, held_generator)[0] for _ in range(options.held_batches)]
    for key, (arm, loss) in arms.items():
        if key != "eager":
            with clock(f"compiling {arm.title}") as seconds:
                gradient(loss, net, held[0])
            arm.compile_seconds = seconds.spent
    phases.end("compilation")

    kept = explain(options, arms, loss_fn, net, held[0])
    random = RandomSteps(options.T, kept, seed=0, sampler=sampler, clip_range=options.clip)
    arms["random"] = (Arm("random", f"{kept} random steps, eager"), random)
    phases.end("explain")

    compared = {key: loss for key, (_, loss) in arms.items() if key != "eager"}
    for key, found in agreement(loss_fn, compared, net, held, "compare gradients, start").items():
        arms[key][0].at_start = found
    trained = {key: (loss, options.gated_steps if key == "gated" else options.steps) for key, loss in compared.items()}
    for seed in options.seeds:
        runs = post_train(
            net,
            weights,
            trained,
            task,
            lr=options.lr,
            seed=seed,
            eval_every=max(1, options.steps // 12),
            eval_samples=options.eval_samples,
            title=f"post-training, seed {seed}",
        )
        for key, run in runs.items():
            arms[key][0].runs.append(run)
    phases.end("post-training")

    net.load_state_dict(arms["exact"][0].runs[0].weights)
    held = [task.draw(net, held_generator)[0] for _ in range(options.held_batches)]
    for key, found in agreement(loss_fn, compared, net, held, "compare gradients, end").items():
        arms[key][0].at_end = found
    losses = {key: loss for key, (_, loss) in arms.items()}
    for key, timed in step_seconds(losses, net, held[0], options.rounds, "step times, in turn").items():
        arms[key][0].seconds = timed
    phases.end("measurement")

    notes = [
        f"{options.data}, {len(images)} images of {'x'.join(map(str, images.shape))}; DiT {options.size}, "
        f"{count_parameters(net):,} parameters, {pretrained} steps of flow matching.",
        f"{options.sampler}, T={options.T}, eta={options.eta:g}; {options.batch} samples per step in groups "
        f"of {options.group}, lr {options.lr:g}, clip {options.clip:g}, seeds {options.seeds}.",
        f"On held-out images the reward classifier is right on {accuracy(reward, test):.1%}, the judge on "
        f"{accuracy(judge, test):.1%}. The judge takes no part in training.",
        f"Gradients are compared on {options.held_batches} held batches, at the weights before post-training and "
        "at those after it with the exact gradient.",
        *gate_notes(arms),
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, compiler {options.compiler}; {phases}.",
    ]
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    settings["classes"] = images.classes
    text = write(options.out, [arm for arm, _ in arms.values()], start, settings, notes, phases.seconds)
    print(f"\n{text}\nWritten to {options.out}: results.md, results.json, reward.png, samples.png")


def explain(
    options: argparse.Namespace,
    arms: dict[str, tuple[Arm, Any]],
    loss_fn: Callable[..., Tensor],
    net: DiT,
    batch: tuple[Any, ...],
) -> int:
    """Fills in the saved activations; returns how many backwards JAGG runs."""
    kept = options.T
    for key, gate in (("jagg", None), ("gated", options.gate)):
        if key not in arms:
            continue
        with clock(f"explain {arms[key][0].title}"):
            report = jagg_fx.explain(
                loss_fn, net, *batch, W=options.W, estimator=options.estimator, gate=gate, tau=options.tau
            )
        arms[key][0].saved_bytes = report.saved_bytes_after
        if key == "jagg":
            arms["exact"][0].saved_bytes = report.saved_bytes_before
            kept = sum(len(group.kept) for group in report.groups)
    return kept


def gate_notes(arms: dict[str, tuple[Arm, Any]]) -> list[str]:
    """What the gate did, in words."""
    if "gated" not in arms or arms["gated"][0].fallback is None:
        return []
    arm = arms["gated"][0]
    groups = arms["gated"][1].stats.groups
    cosines = [c for group in groups for c in group.cosines.values()]
    text = f"The gate was shut for {arm.fallback:.0%} of the groups (a shut group takes the exact backward)"
    if cosines:
        middle = statistics.median(cosines)
        text += f"; cosines of the last step: {min(cosines):.3f} to {max(cosines):.3f}, median {middle:.3f}"
    return [text + "."]


if __name__ == "__main__":
    main()
