"""What the gates did in the last step, read back without forcing a device to wait."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .errors import JaggWarning


@dataclass(frozen=True)
class GroupStats:
    """One approximated group: its calls, the cosine of each interior call, whether its gate was open."""

    number: int
    calls: tuple[int, ...]
    cosines: dict[int, float]
    open: bool | None


class Stats:
    """The gates of the last step. Groups that are exact anyway (one or two steps) are not listed."""

    _CHECK_EVERY = 16  # steps between looks at the gates: each look makes the host wait for the device

    def __init__(self) -> None:
        self._table: Tensor | None = None
        self._steps = 0
        self._mostly_shut = 0

    def record(self, table: Tensor) -> None:
        self._table = table.detach()
        self._steps += 1
        if self._steps % self._CHECK_EVERY == 0 and self._mostly_shut < 2:
            self._mostly_shut = self._mostly_shut + 1 if self.fallback_share >= 0.9 else 0
            if self._mostly_shut == 2:
                warnings.warn(
                    f"The gate was shut for {self.fallback_share:.0%} of the groups in each look at the last "
                    f"{2 * self._CHECK_EVERY} steps: they took the exact backward, and little is saved. On SDE "
                    "trajectories the states are not on a line, and the cosine shuts although the "
                    "gradient may agree well: see "
                    "step.audit(...) for the true error, then use gate=None, a lower tau, or a smaller W.",
                    JaggWarning,
                    stacklevel=2,
                )

    @property
    def groups(self) -> list[GroupStats]:
        if self._table is None:
            return []
        cosine, number, is_open = self._table.cpu().tolist()
        members: dict[int, list[int]] = {}
        for call, n in enumerate(number):
            if not math.isnan(n):
                members.setdefault(int(n), []).append(call)
        return [
            GroupStats(
                n,
                tuple(calls),
                {c: cosine[c] for c in calls[1:-1]},
                None if math.isnan(is_open[calls[0]]) else bool(is_open[calls[0]]),
            )
            for n, calls in members.items()
        ]

    @property
    def fallback_share(self) -> float:
        """Share of the gated groups whose gate was shut, so that they took the exact backward."""
        gated = [g for g in self.groups if g.open is not None]
        return sum(not g.open for g in gated) / len(gated) if gated else 0.0

    def __repr__(self) -> str:
        groups = self.groups
        if not groups:
            return "Stats(no gated group in the last step)"
        lines = [f"Stats: {len(groups)} gated groups, {self.fallback_share:.0%} fell back to exact"]
        for g in groups:
            cos = ", ".join(f"{c:.5f}" for c in g.cosines.values())
            state = {True: "open, merged", False: "shut, exact", None: "no gate"}[g.open]
            lines.append(f"  group {g.number}: calls {g.calls[0]}-{g.calls[-1]}, cosine {cos}: {state}")
        return "\n".join(lines)


def as_dict(stats: Stats) -> dict[str, Any]:
    """The same for a JSON file."""
    return {
        "fallback_share": stats.fallback_share,
        "groups": [
            {"number": g.number, "calls": list(g.calls), "cosines": list(g.cosines.values()), "open": g.open}
            for g in stats.groups
        ],
    }
