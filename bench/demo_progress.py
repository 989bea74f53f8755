"""Progress bars, and a clock for what cannot say how far it is."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

WIDTH = 34
"""Of a bar's title, so that the bars stand under each other."""


def _pace() -> float:
    """Seconds between two updates: a log file should not fill with them."""
    return 0.2 if sys.stderr.isatty() else 10.0


def bar(title: str, total: int) -> Any:
    """A tqdm bar."""
    return tqdm(total=total, desc=title.ljust(WIDTH), mininterval=_pace(), dynamic_ncols=True)


class Seconds:
    """What `clock` yields; `spent` is set when the block ends."""

    spent = 0.0


@contextmanager
def clock(title: str) -> Iterator[Seconds]:
    """Shows the seconds that the block takes, while it runs and when it is done."""
    result, done, began = Seconds(), threading.Event(), time.perf_counter()
    form = "{desc}: {n:.0f} s"
    with tqdm(desc=title.ljust(WIDTH), bar_format=form, dynamic_ncols=True, mininterval=0) as progress:

        def tick() -> None:
            while not done.wait(max(1.0, _pace())):
                progress.n = time.perf_counter() - began
                progress.refresh()

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield result
        finally:
            done.set()
            thread.join()
            result.spent = progress.n = time.perf_counter() - began
            progress.refresh()
