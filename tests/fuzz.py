"""The long run of test_fuzz.py, with its progress and its tally: ``python -m tests.fuzz [COUNT] [--seed S]``.

Each of COUNT random losses ends with the gradient of the reference, with a JaggError, or stops the run with the
plan that failed (hypothesis shrinks it first).  Runs of different seeds draw different losses, so that a run may
be shared among processes.  The tally, refusals by their first line, is printed at the end and every fifty losses.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from unittest import mock

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import UnsatisfiedAssumption

from . import test_fuzz

LEFT_OUT = "left out: a gate at its threshold, or a gradient of rounding alone"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=2000, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    tally: Counter[str] = Counter()
    start = time.monotonic()

    @seed(chosen.seed)
    @settings(
        max_examples=chosen.count,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(plan=test_fuzz.plans())
    def each(plan: test_fuzz.Plan) -> None:
        try:
            test_fuzz.test_right_or_refused.hypothesis.inner_test(plan=plan)
        except UnsatisfiedAssumption:
            tally[LEFT_OUT] += 1
            raise
        if (tally.total() - tally[LEFT_OUT]) % 50 == 0:
            show(tally, time.monotonic() - start)

    # `event` speaks once per loss that was judged
    with mock.patch.object(test_fuzz, "event", lambda what: tally.update([what])):
        each()
    show(tally, time.monotonic() - start)
    print("No mismatch, and no exception but JaggError.")


def show(tally: Counter[str], seconds: float) -> None:
    print(f"{tally.total() - tally[LEFT_OUT]} losses in {seconds / 60:.1f} min", flush=True)
    for what, n in tally.most_common():
        print(f"  {n:6d}  {what}", flush=True)


if __name__ == "__main__":
    main()
