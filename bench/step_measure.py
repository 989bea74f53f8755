"""Seconds, bytes and sizes of one step, for `bench.step`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch._inductor.utils
from jagg_fx.passes import deal, outline, refuse, regions, segments
from torch import Tensor, fx

from bench.step_contenders import Contender
from bench.step_problem import Problem
from jagg_fx import passes

# Time


class Watch(contextlib.AbstractContextManager):
    """Adds up the seconds of the blocks that it is entered for; on a GPU by events, so that nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def _mark(self) -> None:
        if self._gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def __enter__(self) -> Watch:
        self._mark()
        return self

    def __exit__(self, *_: object) -> None:
        self._mark()

    def seconds(self) -> float:
        """Call it when the device is idle."""
        pairs = list(zip(self._marks[::2], self._marks[1::2], strict=True))
        if self._gpu:
            return sum(a.elapsed_time(b) for a, b in pairs) / 1000
        return sum(b - a for a, b in pairs)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(problem: Problem, contender: Contender) -> dict[str, float]:
    """One step: its seconds, the processor's seconds, and those of its backwards. `.grad` stays filled."""
    problem.clear()
    watch = Watch(problem.device)
    if problem.device.type == "cuda":
        torch.compiler.cudagraph_mark_step_begin()  # what the last step returned is not read any more
    wait(problem.device)
    began, cpu = time.perf_counter(), time.process_time()
    contender.run(watch)
    wait(problem.device)
    found = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    if contender.apart:
        found["backward_seconds"] = watch.seconds()
    return found


UNITS = ("forward", "saving", "backward", "accumulating")
"""A forward that keeps nothing, one that saves, a backward into empty `.grad`, one that adds to what is there."""


def units(problem: Problem, net: Any, step: int) -> dict[str, float]:
    """Seconds of one call of the network, of each of the `UNITS`."""
    problem.clear()
    args, found = problem.call(step), {}

    def clocked(name: str, fn: Callable[[], Any]) -> Any:
        wait(problem.device)
        began = time.perf_counter()
        out = fn()
        wait(problem.device)
        found[name] = time.perf_counter() - began
        return out

    if problem.device.type == "cuda":
        torch.compiler.cudagraph_mark_step_begin()
    with torch.no_grad():
        clocked("forward", lambda: net(*args))
    for name in UNITS[2:]:
        v = clocked("saving", lambda: net(*args))
        cotangent = torch.ones_like(v)
        clocked(name, lambda v=v, g=cotangent: v.backward(g))
        del v
    problem.clear()
    return found


# Compilation


class PassClock:
    """Sums the seconds of our passes, of the verifier within them, and notes how large the graphs are.

    Attributes:
        passes: seconds of all passes, before and in the joint graph, without the verifier.
        verifier: seconds of the verifier.
        before, after: nodes of the largest joint graph, as torch made it and rewritten; 0 if none was seen.
    """

    def __init__(self) -> None:
        self.passes = self.verifier = 0.0
        self.before = self.after = 0

    def count(self, gm: fx.GraphModule) -> None:
        """Notes a graph that nobody rewrites."""
        self._note(len(gm.graph.nodes), len(gm.graph.nodes))

    def _note(self, before: int, after: int) -> None:
        if before >= self.before:
            self.before, self.after = before, after

    @contextlib.contextmanager
    def running(self) -> Iterator[PassClock]:
        """Times what is compiled within."""
        early = [(module, "run") for module in (regions, refuse, outline, deal)]
        hooks = [(passes, "verify"), (import_module("jagg_fx.backend"), "rewrite"), (segments, "find"), *early]
        saved = [(owner, name, getattr(owner, name)) for owner, name in hooks]
        try:
            for owner, name, original in saved:
                setattr(owner, name, self._timed(name, original))
            yield self
        finally:
            for owner, name, original in saved:
                setattr(owner, name, original)

    def _timed(self, name: str, original: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            nodes = len(args[0].graph.nodes) if name == "rewrite" else 0
            began, verifier = time.perf_counter(), self.verifier
            try:
                out = original(*args, **kwargs)
            finally:
                spent = time.perf_counter() - began
                if name == "verify":
                    self.verifier += spent
                else:
                    self.passes += spent - (self.verifier - verifier)
            if name == "rewrite" and out is not None:
                self._note(nodes, len(args[0].graph.nodes))
            return out

        return run


@contextlib.contextmanager
def cold_cache(folder: Path | None) -> Iterator[None]:
    """An empty compile cache in `folder`, kept when the block ends; None: the usual cache."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    utils: Any = torch._inductor.utils
    fresh = utils.fresh_cache if hasattr(utils, "fresh_cache") else utils.fresh_inductor_cache
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with fresh(dir=str(folder), delete=False):
        yield
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


def compile_net(problem: Problem, net: Any, part: str) -> float:
    """Seconds that the compiled network's first call takes more than the next; part: "grad" or "no grad"."""
    args = problem.call(0)

    def once() -> float:
        problem.clear()
        wait(problem.device)
        began = time.perf_counter()
        if part == "grad":
            net(*args).sum().backward()
        else:
            with torch.no_grad():
                net(*args)
        wait(problem.device)
        return time.perf_counter() - began

    first = once()
    seconds = first - once()
    problem.clear()
    return max(0.0, seconds)


# Memory


class Saved:
    """The most bytes that autograd kept at one time for a backward, parameters and the batch not counted."""

    def __init__(self, problem: Problem) -> None:
        own = [*problem.net.parameters(), *problem.net.buffers(), *problem.batch, *problem.velocities]
        self._own = {x.untyped_storage().data_ptr() for x in own}
        self._alive: dict[int, int] = {}  # how often each storage is kept
        self._now = self.peak = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[Saved]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor):
            yield self

    def _pack(self, x: Tensor) -> _Kept:
        storage = x.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        kept = _Kept(x)
        if key not in self._own:
            if not self._alive.get(key):
                self._now += size
                self.peak = max(self.peak, self._now)
            self._alive[key] = self._alive.get(key, 0) + 1
            weakref.finalize(kept, self._drop, key, size).atexit = False
        return kept

    def _drop(self, key: int, size: int) -> None:
        self._alive[key] -= 1
        if not self._alive[key]:
            self._now -= size


class _Kept:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


EXACT_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""For a process whose resident set is measured: what is freed goes back at once, and is not counted."""


def peak_bytes(problem: Problem, contender: Contender) -> int:
    """The most memory that one step takes beyond what is there before it, gradients included.

    On a GPU as the allocator counts; else the resident set of this process, so measure in a fresh one, with the
    environment of `EXACT_ALLOCATOR`. The step must have run before: compiling takes memory too.
    """
    problem.clear()
    gc.collect()
    watch = Watch(problem.device)
    if problem.device.type == "cuda":
        torch.compiler.cudagraph_mark_step_begin()
        wait(problem.device)
        torch.cuda.reset_peak_memory_stats(problem.device)
        before = torch.cuda.memory_allocated(problem.device)
        contender.run(watch)
        wait(problem.device)
        return torch.cuda.max_memory_allocated(problem.device) - before
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back
    before = _resident("VmRSS")
    contender.run(watch)
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
