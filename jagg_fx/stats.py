"""What the gates did in the last step, read back without forcing a device to wait."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .control import spans
from .errors import warn
from .plan import Plan


@dataclass(frozen=True)
class GroupStats:
    """One approximated group: its calls, the cosine of each pruned call, whether its gate was open (None: no gate).

    span: |last time - first time|, the mean over the rows, in the unit of the loss.
    """

    number: int
    calls: tuple[int, ...]
    cosines: dict[int, float]
    open: bool | None
    span: float


@dataclass(frozen=True)
class Choice:
    """With tol, what was chosen for one region between two steps that always keep their backward, and why.

    calls: of the region, its ends included. runs: those whose backward ran. merged: the pieces between them that
    were merged, as (first call, last call, predicted error). rejected: the pieces that were too wide, in the same
    form. Errors are relative to the gradient of the step, of the last layer's weight.
    """

    calls: tuple[int, ...]
    runs: tuple[int, ...]
    merged: tuple[tuple[int, int, float], ...]
    rejected: tuple[tuple[int, int, float], ...]

    def __str__(self) -> str:
        pieces = ", ".join(f"{a}-{b} as one ({error:.2g})" for a, b, error in self.merged) or "every step"
        why = f"; too wide: {', '.join(f'{a}-{b} ({error:.2g})' for a, b, error in self.rejected)}"
        return f"calls {listed(self.calls)}: {pieces}{why if self.rejected else ''}"


class Stats:
    """The last step, group by group, and the audits so far. Groups that are exact anyway are not listed.

    With tol: `choices`, region by region; `predicted`, the predicted error of the last layer's gradient; `ratio`, what
    it was multiplied with for that of the whole gradient; `share`, of the backwards that ran.

    audits: (step, Audit) of every step that `audit_every` has audited, the last 1000 of them.
    """

    _CHECK_EVERY = 16  # steps between looks at the gates: each look makes the host wait for the device
    _FIRST_LOOKS = (2, 4)
    WIDE = 0.35  # of the way from noise to data: from there on the error of endpoints shows in training

    def __init__(self, watch_spans: bool = True, plan: Plan | None = None) -> None:
        self._watch_spans = watch_spans  # for endpoints; other estimators are made for wide groups
        self._plan = plan or Plan()
        self.ratio = math.nan
        self.audits: deque[tuple[int, Any]] = deque(maxlen=1000)
        self._table: Tensor | None = None
        self._steps = 0
        self._mostly_shut = 0

    def record(self, table: Tensor, ratio: float = math.nan) -> None:
        self._table, self.ratio = table.detach(), ratio
        self._steps += 1
        if self._steps == 1 and self._watch_spans:
            self._warn_if_wide()
        if self._plan.tol is not None:
            self._warn_if_tight()
        elif (self._steps in self._FIRST_LOOKS or self._steps % self._CHECK_EVERY == 0) and self._mostly_shut < 2:
            self._mostly_shut = self._mostly_shut + 1 if self.fallback_share >= 0.9 else 0
            if self._mostly_shut == 2:
                warn(
                    f"The gate was shut for {self.fallback_share:.0%} of the groups at step {self._steps}, and was so "
                    "when last looked at: they took the exact backward, and little is saved. On SDE "
                    "trajectories the states are not on a line, and the cosine shuts although the gradient may agree "
                    "well: see step.audit(...) for the true error, then use gate=None, a lower tau, or a smaller W.",
                )

    def _warn_if_tight(self) -> None:
        if self._steps in self._FIRST_LOOKS and self.share > 0.95:
            warn(
                f"{self.share:.0%} of the backwards ran at step {self._steps}: tol={self._plan.tol:g} asks for nearly "
                "the exact gradient of this loss, and nothing is saved. See print(step.stats); use a larger tol, or "
                "none."
            )

    def _warn_if_wide(self) -> None:
        groups = self.groups
        if not groups or self._table is None:
            return
        largest = float(self._table[3].abs().nan_to_num().max())
        unit = 1.0 if largest <= 1.5 else 1000.0
        widest = max(groups, key=lambda g: g.span)
        if widest.span / unit > self.WIDE:
            warn(
                f"Group {widest.number} (calls {widest.calls[0]} to {widest.calls[-1]}) spans {widest.span:.3g} of "
                f"time (a trajectory has {unit:g}). The error of the estimate grows with the square of the span, "
                "and beyond a third of a trajectory supervised training is seen to suffer: use a smaller W or more "
                "timesteps, estimator='quadratic' or 'knots', and step.audit(...) to see the true error.",
            )

    @property
    def groups(self) -> list[GroupStats]:
        if self._table is None:
            return []
        cosine, number, is_open, time, _ = self._table.cpu().tolist()
        members: dict[int, list[int]] = {}
        for call, n in enumerate(number):
            if not math.isnan(n):
                members.setdefault(int(n), []).append(call)
        if self._plan.tol is not None:  # not one decision a group
            is_open = [math.nan] * len(is_open)
        return [
            GroupStats(
                n,
                tuple(calls),
                {c: cosine[c] for c in calls if not math.isinf(cosine[c])},
                None if math.isnan(is_open[calls[0]]) else bool(is_open[calls[0]]),
                abs(time[calls[-1]] - time[calls[0]]),
            )
            for n, calls in members.items()
        ]

    @property
    def choices(self) -> list[Choice]:
        if self._table is None or self._plan.tol is None:
            return []
        value, _, ran, *_ = self._table.cpu().tolist()
        found = []
        for group in self.groups:
            calls, nodes = group.calls, self._plan.estimator.nodes(len(group.calls))
            tree = spans(nodes)
            for a, b in itertools.pairwise(nodes):
                own = [s for s in tree if a <= s.a and s.b <= b]
                halved = [s for s in own if ran[calls[s.middle]]]
                tops = [s for s in own if s not in halved and (s.parent is None or tree[s.parent] in halved)]
                inner = {calls[s.middle] for s in halved}
                found.append(
                    Choice(
                        calls[a : b + 1],
                        tuple(sorted({calls[a], calls[b]} | inner)),
                        *(tuple((calls[s.a], calls[s.b], value[calls[s.middle]]) for s in x) for x in (tops, halved)),
                    )
                )
        return found

    @property
    def predicted(self) -> float:
        """Of several networks, the largest. NaN without tol."""
        found = [] if self._table is None else [x for x in self._table[4].cpu().tolist() if not math.isnan(x)]
        return max(found, default=math.nan)

    @property
    def share(self) -> float:
        """With tol: the share of backwards that ran, among the calls of approximated groups."""
        ran = {c for choice in self.choices for c in choice.runs}
        return len(ran) / max(1, sum(len(g.calls) for g in self.groups))

    @property
    def fallback_share(self) -> float:
        """Share of the gated groups whose gate was shut, so that they took the exact backward."""
        gated = [g for g in self.groups if g.open is not None]
        return sum(not g.open for g in gated) / len(gated) if gated else 0.0

    def __repr__(self) -> str:
        groups = self.groups
        if not groups:
            return "Stats(no approximated group in the last step)"
        if self._plan.tol is not None:
            return "\n".join([self._controlled(), *(f"  {c}" for c in self.choices), *self._audited()])
        lines = [f"Stats: {len(groups)} approximated groups, {self.fallback_share:.0%} fell back to exact"]
        for g in groups:
            cos = ", cosine " + ", ".join(f"{c:.5f}" for c in g.cosines.values()) if g.cosines else ""
            state = {True: "open, merged", False: "shut, exact", None: "no gate"}[g.open]
            lines.append(f"  group {g.number}: calls {listed(g.calls)}, span {g.span:.3g}{cos}: {state}")
        return "\n".join(lines + self._audited())

    def _controlled(self) -> str:
        predicted, tol = self.predicted, self._plan.tol
        assert tol is not None
        return (
            f"Stats: {self.share:.0%} of the backwards ran; predicted error {predicted * self.ratio:.3g} of "
            f"tol={tol:g} (last layer {predicted:.3g} of {tol / self.ratio:.3g}, times {self.ratio:.3g})"
        )

    def _audited(self) -> list[str]:
        return [
            f"  audit of step {step}: relative error {audit.relative_error:.3g}, cosine {audit.cosine:.5f}"
            for step, audit in list(self.audits)[-3:]
        ]


def listed(calls: Sequence[int]) -> str:
    """0-3, or 0,2,4,6 for the calls of one lane among several."""
    if list(calls) == list(range(calls[0], calls[-1] + 1)):
        return f"{calls[0]}-{calls[-1]}"
    return ",".join(map(str, calls))


def as_dict(stats: Stats) -> dict[str, Any]:
    """The same for a JSON file."""
    return {
        "fallback_share": stats.fallback_share,
        "groups": [
            {
                "number": g.number,
                "calls": list(g.calls),
                "cosines": list(g.cosines.values()),
                "open": g.open,
                "span": g.span,
            }
            for g in stats.groups
        ],
    }
