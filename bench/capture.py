"""Where the seconds of compiling a step go, and which of them grow with T. `python -m bench.capture`

Runs the first step of a DiT of a named size under Python's profiler, in a process of its own for each T, with an empty
compile cache. The profiler makes Python slower, so that shares and growth can be read off, not the seconds that a user
waits (`bench.step` has those). Writes docs/bench/capture.json, .md and .png.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from jagg_fx.models import DIT_SIZES

import jagg_fx
from bench import step
from bench.demo_progress import bar
from bench.demo_report import markdown, save
from bench.step_contenders import Maker, Nets
from bench.step_measure import Watch
from bench.step_problem import make

FUNCTIONS = {
    "dynamo": ("torch/_dynamo/convert_frame.py", "_compile"),
    "backend": ("jagg_fx/backend.py", "__call__"),
    "inductor": ("jagg_fx/_torch.py", "compile_inductor"),
    "aot": ("torch/_functorch/aot_autograd.py", "aot_module_simplified"),
    "joint": ("torch/_functorch/_aot_autograd/graph_compile.py", "aot_stage1_graph_capture"),
    "after joint": ("torch/_functorch/_aot_autograd/graph_compile.py", "aot_stage2_compile"),
    "partition": ("torch/_functorch/_aot_autograd/graph_compile.py", "_partition_joint_graph_into_fw_bw"),
    "rewrite": ("passes/__init__.py", "rewrite"),
    "generate": ("torch/_inductor/compile_fx.py", "compile_fx_inner"),
    "lower": ("torch/_inductor/graph.py", "run"),
    "code": ("torch/_inductor/graph.py", "codegen"),
}
"""Functions whose cumulative seconds tell the stages apart, as torch 2.13 names them: file and name."""

STAGES = {
    "Dynamo traces the loss": ("dynamo", "backend"),
    "calls outlined and marked (ours)": ("backend", "inductor"),
    "AOTAutograd, metadata": ("aot", "joint", "after joint"),
    "AOTAutograd, joint graph": ("joint",),
    "rewrite and verifier (ours)": ("rewrite",),
    "other joint passes, partition": ("partition", "rewrite"),
    "Inductor lowers": ("lower",),
    "Inductor writes code": ("code",),
    "C++ compiler, the rest of Inductor": ("generate", "lower", "code"),
}
"""Of each stage the function that holds it, then those inside of it that are stages of their own."""


def seconds(stats: pstats.Stats) -> dict[str, float]:
    """Seconds of every stage."""
    own: dict[str, float] = {}
    for name, (file, function) in FUNCTIONS.items():
        # Several classes of a file may have a method of that name: the one that holds most is meant.
        times = [t[3] for k, t in stats.stats.items() if k[0].endswith(file) and k[2] == function]  # type: ignore[attr-defined]
        if not times:
            raise RuntimeError(
                f"{function} of {file} was not called: torch {torch.__version__} names it otherwise, see FUNCTIONS."
            )
        own[name] = max(times)
    return {stage: own[whole] - sum(own[p] for p in parts) for stage, (whole, *parts) in STAGES.items()}


def first_step(size: str, T: int, W: int) -> dict[str, float]:
    """Compiles and runs one step in this process."""
    options = step.parse(["--size", size, "--T", str(T), "--W", str(W), "--batch", "1", "--contenders", "ours"])
    problem = make(options)
    contender = Maker(problem, Nets(problem, options, lambda gm: None), options).make("ours", W)
    profile, began = cProfile.Profile(), time.perf_counter()
    profile.runcall(contender.run, Watch(problem.device))
    whole = time.perf_counter() - began
    began = time.perf_counter()
    contender.run(Watch(problem.device))
    return {**seconds(pstats.Stats(profile)), "the first step in all": whole, "a step": time.perf_counter() - began}


def report(results: dict) -> str:
    a, b = (r["seconds"] for r in results["rows"])
    Ts = [r["T"] for r in results["rows"]]
    grown = sum(b[s] - a[s] for s in STAGES)
    lines = [["stage", *(f"T={T}" for T in Ts), "more", "of the growth"]]
    for s in [*STAGES, "the first step in all", "a step"]:
        share = f"{(b[s] - a[s]) / grown:.0%}" if s in STAGES else "–"
        lines.append([s, f"{a[s]:.1f} s", f"{b[s]:.1f} s", f"{b[s] - a[s]:.1f} s", share])
    sums = [sum(x[s] for s in STAGES) for x in (a, b)]
    name = "Dynamo traces the loss"
    flat = (sums[1] - (b[name] - a[name])) / sums[0]
    say = (
        f"All stages together grow {sums[1] / sums[0]:.2f} times from T={Ts[0]} to T={Ts[1]}. If Dynamo traced one "
        f"call for all, it would be {flat:.2f} times at the least."
    )
    notes = [
        f"DiT {results['size']}, 32x32x3 in patches of 4, batch 1, fp32, W={results['W']}, no gate; caches empty.",
        "Under Python's profiler, a process for each T: the seconds are longer than those of a user.",
        f"{results['machine']}.",
    ]
    text = ["# Where compiling takes its time", "", markdown(lines), "", say, "", *(f"* {n}" for n in notes), ""]
    return "\n".join([*text, "![seconds by stage](capture.png)", "", f"`{results['command']}`", ""])


def draw(results: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 3))
    left = [0.0 for _ in results["rows"]]
    for s in STAGES:
        width = [r["seconds"][s] for r in results["rows"]]
        axis.barh([f"T={r['T']}" for r in results["rows"]], width, left=left, label=s)
        left = [x + w for x, w in zip(left, width, strict=True)]
    axis.set_xlabel("seconds, under the profiler")
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(DIT_SIZES), default="300M", help="of the DiT (default: %(default)s)")
    parser.add_argument("--T", type=int, nargs=2, default=[4, 16], help="two numbers of timesteps (default: 4 16)")
    parser.add_argument("--W", type=int, default=4, help="timesteps per group (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("docs/bench"), help="folder of the results")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # the T of this process
    o = parser.parse_args()
    if o.one is not None:
        warnings.filterwarnings("ignore", category=jagg_fx.JaggWarning)  # one group of a short trajectory is wide
        print(json.dumps(first_step(o.size, o.one, o.W)))
        return
    rows = []
    with bar("compile", len(o.T)) as progress:
        for T in o.T:
            with tempfile.TemporaryDirectory(prefix="bench-capture-") as cache:
                command = [sys.executable, "-m", "bench.capture", "--size", o.size, "--W", str(o.W), "--one", str(T)]
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            rows.append({"T": T, "seconds": json.loads(done.stdout.splitlines()[-1])})
            progress.update()
    results = {
        "command": shlex.join(["python", "-m", "bench.capture", *sys.argv[1:]]),
        "size": o.size,
        "W": o.W,
        "machine": f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.machine()}",
        "rows": rows,
    }
    text = report(results)
    save(o.out, "capture", results, text)
    draw(results, o.out / "capture.png")
    print(text)


if __name__ == "__main__":
    main()
