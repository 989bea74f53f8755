"""Tables and picture of `bench.grpo`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.compare import Paired, table
from bench.grpo_study import ARMS, BATCHES, CURVE_EVERY, ETA, GROUP, MAIN, SAMPLES, Arm, Job, Results, jobs

SMOOTH = 6
"""Steps over which the picture averages the reward of the batches."""


def cell(found: Paired | None) -> str:
    if found is None:
        return "–"
    half = (found.high - found.low) / 2
    return f"{found.gap:+.4f} ± {half:.4f} ({found.wins}/{found.pairs}, {found.p:.2g})"


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
