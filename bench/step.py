"""One GRPO step, every way to its gradient, in one interleaved run.

    python -m bench.step --size tiny --image 8 --T 4 --compiler eager     a smoke run
    python -m bench.step --size 300M --image 32 --T 8 --W 4,8             CIFAR-10 shapes
    python -m bench.step --size 300M --image 64 --T 8 --W 4,8             ImageNet-64 shapes
    python -m bench.step --remake docs/bench/step-NAME.json               tables and pictures again
    python -m bench.step --growth A.json B.json --name step-growth        how the numbers grow from A to B

The unit costs of the network (a forward that keeps nothing, one that saves, a backward), and the step of each
contender: exact as one unrolled loss and with a backward per timestep, with checkpointed blocks, the scheme that one
writes by hand, ours in its forms, and a random half of the timesteps. For each its time and the bound that follows
from the unit costs, compile seconds, graph size, saved bytes, peak memory, and the error of its gradient.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jagg_fx.models import DIT_SIZES

import jagg_fx
from bench import step_report
from bench.demo_progress import bar
from bench.step_contenders import FAMILIES, Contender, Maker, Nets, chosen
from bench.step_measure import (
    EXACT_ALLOCATOR,
    UNITS,
    PassClock,
    Saved,
    Watch,
    cold_cache,
    compile_net,
    peak_bytes,
    timed,
    units,
)
from bench.step_problem import DTYPES, Problem, make

PEAK = "peak bytes:"
"""In front of what a process that only measures memory prints."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m bench.step",
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = p.add_argument_group("what is measured").add_argument
    add("--contenders", help=f"of {', '.join(FAMILIES)}; those with groups take -W4, say; default: all but exact-flat")
    add("--W", type=lambda text: [int(w) for w in text.split(",")], default=[4], help="timesteps per group: 4 or 4,8")
    add("--rounds", type=int, default=7, help="interleaved rounds")
    add("--memory", action="store_true", help="peak memory on a CPU too: a process for each contender")
    add("--minutes", type=float, default=float("inf"), help="compile no further contender after that long")
    add = p.add_argument_group("network and batch").add_argument
    add("--size", choices=list(DIT_SIZES), default="tiny", help="of the DiT")
    add("--image", type=int, default=32, help="side of the images: 32 as CIFAR-10, 64 as ImageNet-64")
    add("--patch", type=int, default=4, help="side of a token in pixels")
    add("--T", type=int, default=8, help="timesteps")
    add("--batch", type=int, default=2, help="samples")
    add("--dtype", choices=list(DTYPES), default="fp32", help="of weights and states")
    add("--lora", type=int, default=0, help="rank of adapters on a frozen base; 0: all weights train")
    add("--checkpoint", action="store_true", help="checkpoint every block, for every contender")
    add = p.add_argument_group("machine").add_argument
    add("--device", default="cpu", help="cpu or cuda")
    add("--threads", type=int, default=0, help="of torch; 0: as many as it takes")
    add("--compiler", choices=["inductor", "eager"], default="inductor", help="eager: graphs without code generation")
    modes = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    add("--mode", choices=modes, default="default", help="of torch.compile, for every compiled contender")
    add("--usual-cache", action="store_true", help="do not empty the compile cache before each contender")
    add = p.add_argument_group("output").add_argument
    add("--out", type=Path, default=Path("docs/bench"), help="folder of the results")
    add("--name", help="of the files; by default made of the settings")
    add("--remake", type=Path, nargs="+", metavar="JSON", help="measure nothing: write tables and pictures again")
    add("--growth", type=Path, nargs=2, metavar="JSON", help="measure nothing: compare two runs, as NAME.md")
    add("--peak", metavar="KEY", help=argparse.SUPPRESS)
    return p


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = parser()
    options = p.parse_args(argv)
    try:
        options.chosen = chosen(options.contenders, options.W, options.checkpoint)
    except ValueError as error:
        p.error(str(error))
    if options.rounds < 1 or min(options.W) < 1 or options.T < 2:
        p.error("--rounds and --W must be at least 1, and --T at least 2")
    if options.name is None:
        parts = [options.size, f"{options.image}px", f"T{options.T}", f"B{options.batch}", options.dtype]
        parts += [torch.device(options.device).type, *([f"lora{options.lora}"] if options.lora else [])]
        parts += ["checkpoint"] * options.checkpoint + [options.mode] * (options.mode != "default")
        options.name = "-".join(["step", *parts])
    return options


class Bench:
    """One run. `content` is its JSON, and is written after every stage, so that a run cut short leaves what it has."""

    def __init__(self, options: argparse.Namespace, command: str, cache: Path) -> None:
        self.options, self.cache = options, None if options.usual_cache else cache
        self.began = time.perf_counter()
        self.problem: Problem = make(options)
        self.clock = PassClock()
        self.nets = Nets(self.problem, options, lambda gm: self.clock.count(gm))
        self.maker = Maker(self.problem, self.nets, options)
        self.contenders: dict[str, Contender] = {}
        self.parts: dict[str, dict[str, Any]] = {}
        self.entries: dict[str, dict[str, Any]] = {}
        left_out = ("chosen", "contenders", "remake", "growth", "peak", "out", "usual_cache", "minutes")
        settings = {k: v for k, v in vars(options).items() if k not in left_out}
        settings |= {"cold": not options.usual_cache, "threads": torch.get_num_threads()}
        self.content: dict[str, Any] = {
            "command": command,
            "settings": settings,
            "machine": machine(self.problem.device),
            "parameters": sum(p.numel() for p in self.problem.net.parameters()),
            "trained": sum(p.numel() for p in self.problem.trained),
            "units": {kind: {name: [] for name in UNITS} for kind in ("eager", "compiled")},
            "networks": self.parts,
            "contenders": [],
        }

    def write(self) -> str:
        self.content["contenders"] = list(self.entries.values())
        self.content["machine"]["load_after"] = os.getloadavg()[0]
        return step_report.write(self.content, self.options.out)

    @contextlib.contextmanager
    def compiling(self, name: str) -> Iterator[PassClock]:
        """A fresh clock, and a cold cache of this name."""
        self.clock = PassClock()
        with cold_cache(self.cache / name if self.cache else None), self.clock.running() as clock:
            yield clock

    def compile(self) -> None:
        """Runs every contender a few times: what it takes to compile, what it saves, how wrong it is."""
        reference = self.problem.reference()
        with bar("compile and check", len(self.options.chosen) + 2) as progress:
            with self.compiling("network") as clock:
                for part in ("grad", "no grad"):
                    seconds = compile_net(self.problem, self.nets.get("compiled"), part)
                    self.parts[part] = {"compile_seconds": seconds, "nodes": clock.after}
                    progress.update()
            for family, W in self.options.chosen:
                entry = self._new(family, W)
                progress.set_postfix_str(entry["key"], refresh=False)
                if time.perf_counter() - self.began > 60 * self.options.minutes:
                    entry["note"] = "not run: no time left"
                else:
                    self._first(entry, reference)
                self.write()
                progress.update()

    def _new(self, family: str, W: int | None) -> dict[str, Any]:
        key, title = (f"{x}{mark}{W}" if W else x for x, mark in ((family, "-W"), (FAMILIES[family][0], ", W=")))
        entry = {"key": key, "title": title, "family": family, "W": W, "note": ""}
        empty = ("compile_seconds", "nodes_before", "nodes_after", "pass_seconds", "verifier_seconds", "saved_bytes")
        entry |= dict.fromkeys((*empty, "peak_bytes", "error", "cosine", "cost", "exact"))
        entry |= {"seconds": [], "cpu_seconds": [], "backward_seconds": []}
        self.entries[key] = entry
        return entry

    def _first(self, entry: dict[str, Any], reference: list[torch.Tensor]) -> None:
        problem = self.problem
        try:
            with self.compiling(entry["key"]) as clock:
                contender = self.maker.make(entry["family"], entry["W"])
                # CUDA graphs are recorded in the second and third call.
                first = [
                    timed(problem, contender)["seconds"] for _ in range(2 if self.options.mode == "default" else 4)
                ]
            entry["error"], entry["cosine"] = problem.error(reference)
            saved = Saved(problem)
            problem.clear()
            with saved.watching():
                contender.run(Watch(problem.device))
            if problem.device.type == "cuda":
                entry["peak_bytes"] = peak_bytes(problem, contender)
        except Exception as failed:  # whatever one contender meets, the others are still measured
            lines = str(failed).strip().splitlines() or [""]
            entry["note"] = f"not run: {type(failed).__name__}: {lines[0]:.120}".replace("|", "/")
            return
        finally:
            problem.clear()
            gc.collect()
        compiled = not entry["family"].endswith("-eager")
        shared = sum(self.parts[part]["compile_seconds"] for part in contender.parts)
        entry["compile_seconds"] = sum(first) - len(first) * min(first) + shared if compiled else None
        before, after = clock.before, clock.after
        if not before and contender.parts:
            before = after = self.parts["grad"]["nodes"]
        entry |= {"nodes_before": before, "nodes_after": after, "cost": contender.cost, "exact": contender.exact}
        entry |= {"pass_seconds": clock.passes, "verifier_seconds": clock.verifier}
        entry["saved_bytes"] = saved.peak if contender.apart else None
        self.contenders[entry["key"]] = contender

    def rounds(self) -> None:
        """Every contender once a round, in an order that turns: a busy moment of the machine meets them all."""
        keys = list(self.contenders)
        with bar("rounds", self.options.rounds * (len(keys) + 2)) as progress:
            for i in range(self.options.rounds):
                for kind, found in self.content["units"].items():
                    for name, seconds in units(self.problem, self.nets.get(kind), i % self.problem.T).items():
                        found[name].append(seconds)
                    progress.update()
                at = i % max(1, len(keys))
                for key in keys[at:] + keys[:at]:
                    for name, seconds in timed(self.problem, self.contenders[key]).items():
                        self.entries[key][name].append(seconds)
                    self.problem.clear()
                    progress.update()
                self.write()

    def memory(self, argv: Sequence[str]) -> None:
        """The peak of every contender, each in a process of its own."""
        with bar("memory", len(self.contenders)) as progress:
            for key, contender in self.contenders.items():
                environment = {**os.environ, **EXACT_ALLOCATOR}
                if self.cache is not None:
                    # What this process compiled is not compiled again.
                    caches = sorted((self.cache / ("network" if contender.parts else key)).iterdir())
                    environment["TORCHINDUCTOR_CACHE_DIR"] = str(caches[-1])
                command = [sys.executable, "-m", "bench.step", *argv, "--peak", key]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                lines = [line for line in done.stdout.splitlines() if line.startswith(PEAK)]
                if lines:
                    self.entries[key]["peak_bytes"] = int(lines[-1].removeprefix(PEAK))
                else:
                    progress.write(f"{key}: no peak memory: {done.stderr.strip().splitlines()[-1:]}")
                self.write()
                progress.update()


def machine(device: torch.device) -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)}, {name}"
    load = os.getloadavg()[0]
    found = {"name": name, "cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}
    return {**found, "load_before": load, "load_after": load}


def only_peak(options: argparse.Namespace) -> None:
    """One contender in this process: a step that compiles, then one whose memory is measured."""
    problem = make(options)
    nets = Nets(problem, options, lambda gm: None)
    ((family, W),) = chosen(options.peak, options.W, checkpoint=False)
    contender = Maker(problem, nets, options).make(family, W)
    contender.run(Watch(problem.device))
    print(PEAK, peak_bytes(problem, contender))


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    options = parse(argv)
    if options.remake or options.growth:
        _again(options)
        return
    # The table says what a gate did and how wide a group is.
    warnings.filterwarnings("ignore", category=jagg_fx.JaggWarning)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.peak:
        only_peak(options)
        return
    with tempfile.TemporaryDirectory(prefix="bench-step-") as cache:
        try:
            bench = Bench(options, shlex.join(["python", "-m", "bench.step", *argv]), Path(cache))
        except ValueError as error:
            parser().exit(2, f"error: {error}\n")
        bench.compile()
        bench.rounds()
        if options.memory and bench.problem.device.type != "cuda":
            bench.memory(argv)
        print(bench.write())
    print(f"Written to {options.out}: {options.name}.json, .md, .png")


def _again(options: argparse.Namespace) -> None:
    for path in options.remake or ():
        print(step_report.write(step_report.Results.read(path).content, path.parent))
    if options.growth:
        text = step_report.growth(*map(step_report.Results.read, options.growth))
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{options.name}.md").write_text(text, encoding="utf-8")
        print(text)


if __name__ == "__main__":
    main()
