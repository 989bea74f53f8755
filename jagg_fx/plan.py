"""Groups of timesteps, and what becomes of each call: plain data, no graph."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from .estimators import Endpoints, Estimator


@dataclass(frozen=True)
class Call:
    """One call of a velocity in the loss.

    index: order of the call in the loss, from 0. site: which network or function. time: equal for two calls
    at the same timestep (two lanes of guidance, say). where: file and line of the call.
    """

    index: int
    site: str
    time: Hashable
    where: str
    body: str = ""  # calls of one group share the body that they run
    weights: frozenset = frozenset()  # the trained tensors that this call shares with others: tells networks apart
    lane: int = -1  # where the lane was settled before, by `passes/deal.py`


@dataclass(frozen=True)
class Group:
    """Consecutive timesteps of one lane of one network. calls: their indices, in the order of the loss."""

    number: int
    calls: tuple[int, ...]
    nodes: tuple[int, ...]  # positions in `calls` that keep their backward
    exact: bool = False  # every call keeps its own cotangent

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(self.calls[j] for j in self.nodes)

    @property
    def pruned(self) -> tuple[int, ...]:
        return tuple(c for c in self.calls if c not in self.kept)


@dataclass(frozen=True)
class Plan:
    """What the rewrite is to do: the options that shape the graph, and nothing else."""

    W: int = 4
    estimator: Estimator = field(default_factory=Endpoints)
    gate: str | None = "cosine"
    tau: float = 0.995
    weights: str = "time"
    order: str = "call"
    lane: int | tuple[int, ...] | None = None
    activations: str = "keep"
    batched: bool = False
    tol: float | None = None  # error control: the estimator's nodes are those that always keep their backward

    def key(self) -> str:
        """Everything of the plan that changes a graph, as text: part of the compile cache's key."""
        return repr(dataclasses.astuple(dataclasses.replace(self, estimator=None))) + repr(self.estimator)  # type: ignore[arg-type]

    def variants(self) -> list[Plan]:
        """A plan for each estimator that this one's alternates between; gates only where its own design has them."""
        gate = self.gate if self.estimator.gated else None
        found = self.estimator.variants()
        return [dataclasses.replace(self, estimator=v, gate=gate if v.gated else None) for v in found]

    def lanes(self, calls: Sequence[Call]) -> list[list[int]]:
        """The calls of each lane of each network, in the order of the loss.

        A lane is said by `lane`: a number of calls per timestep, taken in turn, or the lane of every call. Else
        a call whose time was seen before at the same network belongs to another lane (guidance calls the
        network twice per timestep). Lanes and networks are never mixed in one group.
        """
        seen: Counter = Counter()
        lanes: dict[Hashable, list[int]] = {}
        for call in calls:
            if call.lane >= 0:
                lanes.setdefault(call.lane, []).append(call.index)
                continue
            network = (call.site, call.body, call.weights)
            lane = seen[network, call.time]
            seen[network, call.time] += 1
            if isinstance(self.lane, int):
                lane = call.index % self.lane
            elif self.lane is not None:
                lane = self.lane[call.index]
            lanes.setdefault((network, lane), []).append(call.index)
        return list(lanes.values())

    def cut(self, lane: Sequence[int]) -> list[tuple[int, ...]]:
        """A lane in groups: of W, the last one ragged, or the whole of it where the estimator says so."""
        W = max(len(lane), 1) if self.estimator.whole else self.W
        return [tuple(lane[i : i + W]) for i in range(0, len(lane), W)]

    def groups(self, calls: Sequence[Call]) -> list[Group]:
        """The groups of all lanes. Drawn steps sit in fixed slots by now (`passes/deal.py`)."""
        cut = [group for lane in self.lanes(calls) for group in self.cut(lane)]
        e = self.estimator
        return [
            Group(i, c, (*e.nodes(len(c)), *e.slots(len(c))), exact=len(e.nodes(len(c))) == len(c))
            for i, c in enumerate(cut)
        ]
