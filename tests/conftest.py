"""Profiles of hypothesis, and a clean compiler before each test."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# Each example captures a graph (about a second): "default" is what `make test` runs, and draws the same
# examples every time; "fuzz" is for long runs and never repeats itself.
_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("default", max_examples=6, derandomize=True, database=None, **_COMMON)
settings.register_profile("fuzz", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Losses of different tests share code objects, and with them Dynamo's limit of recompilations."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # the networks are tiny: threads only cost time, and change the rounding


# These build no graph, and cost nothing.
_CHEAP = ("tests/models", "tests/passes", "tests/test_estimators.py", "tests/test_reference_selfcheck.py")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with many sets of parameters, all but one are thorough: `make test` has to end in minutes.

    The one is drawn by the name of the test, for ever the same: over the suite all kinds of parameters are seen.
    """
    of: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.nodeid.startswith(_CHEAP) and not item.get_closest_marker("thorough"):
            of.setdefault(item.nodeid.split("[")[0], []).append(item)
    for name, same in of.items():
        for i, item in enumerate(same):
            if i != zlib.crc32(name.encode()) % len(same):
                item.add_marker("thorough")
