"""GRPO of a large DiT for as long as there is time: exact and ours, from the same weights and the same noise.

    python -m bench.gpu_train --seconds 100
    python -m bench.gpu_train --device cpu --compiler eager --size tiny --image 8 --T 4 --batch 8 --seconds 20

No data and no pretraining: the network starts at random, and the reward is how near the mean colour of a sample comes
to the colour of its class. That is no test of quality (`bench.demo` and `bench.grpo` are); it shows that steps of this
size train, what they take, and that both curves go together. Both arms are compiled first; then each has half of the
seconds that are left.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jagg_fx.models import DIT_SIZES, group_advantages, rollout
from torch import Tensor, nn

import jagg_fx
from bench.demo_progress import bar
from bench.demo_report import markdown, save
from bench.step_contenders import Contender, Maker, Nets
from bench.step_measure import Watch, wait
from bench.step_problem import DTYPES, SAMPLER, Problem, make

ARMS = ("exact-steps", "ours")


def colours(classes: int, device: torch.device) -> Tensor:
    """(classes, 3) in [-1, 1]."""
    generator = torch.Generator().manual_seed(3)
    return (2 * torch.rand(classes, 3, generator=generator) - 1).to(device)


def reward(samples: Tensor, y: Tensor, wanted: Tensor) -> Tensor:
    """Minus the squared distance of the mean colour to that of the class, (B,)."""
    return -((samples.float().mean((2, 3)) - wanted[y]) ** 2).mean(1)


def draw(problem: Problem, net: Callable, number: int, group: int, wanted: Tensor) -> float:
    """Puts an on-policy batch into the problem; returns its mean reward. The same number gives the same noise."""
    states, sigmas, _, _, y = problem.batch
    generator = torch.Generator(problem.device).manual_seed(1000 + number)
    kinds = torch.randint(len(wanted), (len(y) // group,), generator=generator, device=problem.device)
    y = kinds.repeat_interleave(group)
    noise = torch.randn(states[0].shape, generator=generator, device=problem.device).to(states.dtype)
    path = rollout(net, noise, sigmas, y, sampler=SAMPLER, generator=generator)
    found = reward(path.samples, y, wanted)
    problem.batch = (path.states, sigmas, path.log_probs, group_advantages(found, group), y)
    return found.mean().item()


def first_step(options: argparse.Namespace, maker: Maker, family: str, wanted: Tensor) -> tuple[Contender, float]:
    """The arm, compiled, and the seconds of its first rollout and gradient."""
    problem = maker.problem
    contender = maker.make(family, options.W if family == "ours" else None)
    began = time.perf_counter()
    draw(problem, maker.nets.get("compiled"), -1, options.group, wanted)
    contender.run(Watch(problem.device))
    problem.clear()
    wait(problem.device)
    return contender, time.perf_counter() - began


def train(options: argparse.Namespace, maker: Maker, contender: Contender, wanted: Tensor, until: float) -> dict:
    """One arm, until the clock says so: rewards, and seconds of the gradient and of the whole step."""
    problem, sampled = maker.problem, maker.nets.get("compiled")
    # Weights of bf16 are too coarse for a small step: the optimiser keeps them in fp32.
    masters: list[nn.Parameter] = [nn.Parameter(p.detach().float()) for p in problem.trained]
    optimiser = torch.optim.AdamW(masters, options.lr, betas=(0.9, 0.99), weight_decay=0)
    found: dict[str, Any] = {"rewards": [], "gradient_seconds": [], "step_seconds": []}
    first = time.perf_counter()
    with bar(f"train, {contender.key}", max(1, round(min(options.seconds, until - first)))) as progress:
        while not found["rewards"] or (time.perf_counter() < until and len(found["rewards"]) < options.steps):
            progress.update(round(time.perf_counter() - first) - progress.n)
            started = time.perf_counter()
            found["rewards"].append(draw(problem, sampled, len(found["rewards"]), options.group, wanted))
            wait(problem.device)
            drawn = time.perf_counter()
            contender.run(Watch(problem.device))
            wait(problem.device)
            found["gradient_seconds"].append(time.perf_counter() - drawn)
            with torch.no_grad():
                for p, master in zip(problem.trained, masters, strict=True):
                    master.grad = None if p.grad is None else p.grad.float()
                nn.utils.clip_grad_norm_(masters, 1.0)
                optimiser.step()
                torch._foreach_copy_(problem.trained, masters)
            problem.clear()
            wait(problem.device)
            found["step_seconds"].append(time.perf_counter() - started)
    return found


def summary(runs: Sequence[dict[str, Any]]) -> str:
    """Rewards at the end of what both had steps for, and of each run; medians of seconds."""
    common = min(len(r["rewards"]) for r in runs)
    width = max(1, common // 10)
    head = ["", "steps", "reward, first", f"at step {common}", "last", "gradient", "step", "first step"]
    lines = [head]
    for r in runs:
        rewards = r["rewards"]
        means = [statistics.fmean(x) for x in (rewards[:width], rewards[common - width : common], rewards[-width:])]
        seconds = [f"{statistics.median(r[k]):.3g} s" for k in ("gradient_seconds", "step_seconds")]
        lines.append([r["family"], str(len(rewards)), *(f"{m:.4f}" for m in means), *seconds,
                      f"{r['compile_seconds']:.0f} s"])  # fmt: skip
    return markdown(lines)


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m bench.gpu_train", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--device", default="cuda")
    p.add_argument("--size", choices=list(DIT_SIZES), default="300M")
    p.add_argument("--image", type=int, choices=[8, 16, 32], default=32, help="of 10 classes")
    p.add_argument("--patch", type=int, default=4)
    p.add_argument("--T", type=int, default=8)
    p.add_argument("--W", type=int, default=4)
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--group", type=int, default=8)
    p.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    p.add_argument("--lr", type=float, default=3e-5)
    p.add_argument("--lora", type=int, default=0)
    p.add_argument("--compiler", choices=["inductor", "eager"], default="inductor")
    p.add_argument("--mode", default="default")
    p.add_argument("--seconds", type=float, default=120.0, help="of everything: compilation, and both arms")
    p.add_argument("--steps", type=int, default=10**9, help="at most, of each arm")
    p.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder for gpu-train.json and .md")
    options = p.parse_args(argv)
    options.checkpoint = False
    if options.batch % options.group or options.group < 2:
        p.error("--batch must be a multiple of --group, which must be at least 2")
    warnings.filterwarnings("ignore", category=jagg_fx.JaggWarning)
    began = time.perf_counter()
    maker = Maker(problem := make(options), Nets(problem, options, lambda gm: None), options)
    start = {name: x.clone() for name, x in problem.net.state_dict().items()}
    wanted = colours(10, problem.device)
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    ready = [first_step(options, maker, family, wanted) for family in ARMS]
    runs: list[dict[str, Any]] = []
    for i, (contender, seconds) in enumerate(ready):
        problem.net.load_state_dict(start)
        now = time.perf_counter()
        until = now + (began + options.seconds - now) / (len(ready) - i)
        found = train(options, maker, contender, wanted, until)
        runs.append({"family": contender.key, "compile_seconds": seconds, **found})
        content = {"settings": settings, "torch": torch.__version__, "runs": runs}
        text = f"DiT {options.size}, {options.dtype}, T={options.T}, batch {options.batch}\n\n{summary(runs)}\n"
        save(options.out, "gpu-train", content, text)
    print(text)


if __name__ == "__main__":
    main()
