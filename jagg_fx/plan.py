"""Groups of timesteps, and what becomes of each call: plain data, no graph."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from .errors import RefusedError
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


@dataclass(frozen=True)
class Group:
    """Consecutive timesteps of one lane of one network. calls: their indices, in the order of the loss."""

    number: int
    calls: tuple[int, ...]
    nodes: tuple[int, ...]  # positions in `calls` that keep their backward

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

    def key(self) -> str:
        """Everything of the plan that changes a graph, as text: part of the compile cache's key."""
        return repr(dataclasses.astuple(dataclasses.replace(self, estimator=None))) + repr(self.estimator)  # type: ignore[arg-type]

    def lanes(self, calls: Sequence[Call]) -> list[list[int]]:
        """The calls of each lane of each network, in the order of the loss.

        A lane is said by `lane`: a number of calls per timestep, taken in turn, or the lane of every call. Else
        a call whose time was seen before at the same network belongs to another lane (guidance calls the
        network twice per timestep). Lanes and networks are never mixed in one group.
        """
        if isinstance(self.lane, tuple) and calls and calls[-1].index >= len(self.lane):
            raise RefusedError(
                f"lane={self.lane} names the lanes of {len(self.lane)} calls; this loss makes a call number "
                f"{calls[-1].index} with gradient, at {calls[-1].where}. Give one lane for every velocity call that "
                "carries gradient, in their order, or the number of calls per timestep."
            )
        seen: Counter = Counter()
        lanes: dict[Hashable, list[int]] = {}
        for call in calls:
            network = (call.site, call.body, call.weights)
            lane = seen[network, call.time]
            seen[network, call.time] += 1
            if isinstance(self.lane, int):
                lane = call.index % self.lane
            elif self.lane is not None:
                lane = self.lane[call.index]
            lanes.setdefault((network, lane), []).append(call.index)
        return list(lanes.values())

    def groups(self, calls: Sequence[Call]) -> list[Group]:
        """Cut the calls of each lane into groups of W, the last one ragged."""
        cut = [tuple(lane[i : i + self.W]) for lane in self.lanes(calls) for i in range(0, len(lane), self.W)]
        return [Group(i, c, tuple(self.estimator.nodes(len(c)))) for i, c in enumerate(cut)]
