"""The plain formulas of error control: spans, weights, the choice where numbers fail, the ratio of the audits."""

from __future__ import annotations

import pytest
import torch

from jagg_fx.control import Ratio, choose, joined, relative, spans, weights

from .test_tol import matrix

D = torch.float64


def test_the_ratio() -> None:
    ratio = Ratio()
    assert ratio.limit(0.1) == 0.1 / Ratio.FIRST
    ratio.update(0.3, 0.2)
    assert ratio.value == pytest.approx(3.0)  # one measurement counts twice
    for _ in range(18):
        ratio.update(0.1, 0.1)
    assert ratio.value == pytest.approx(1.5 * 20 / 19)
    ratio.update(0.1, 0.1)
    assert ratio.value == pytest.approx(20 / 19)
    for error, predicted in ((float("nan"), 0.1), (0.1, float("inf"))):
        ratio.update(error, predicted)
    assert len(ratio.measured) == 19
    ratio.update(0.0, 0.0)  # exact: the oldest is forgotten
    assert len(ratio.measured) == 18


@pytest.mark.parametrize("nodes", [(0, 8), (0, 8, 10), (0, 1, 2), (0, 15), (0, 2)])
def test_every_step_between_nodes_is_the_middle_of_one_span(nodes: tuple[int, ...]) -> None:
    tree = spans(nodes)
    assert sorted(s.middle for s in tree) == sorted(set(range(nodes[-1] + 1)) - set(nodes))
    for s in tree:
        assert s.parent is None or s.middle in (  # a half of its parent
            (tree[s.parent].a + tree[s.parent].middle) // 2,
            (tree[s.parent].middle + tree[s.parent].b) // 2,
        )
    both = joined([tree, tree])
    assert [s.parent for s in both[len(tree) :] if s.parent is not None] == [
        s.parent + len(tree) for s in tree if s.parent is not None
    ]


def test_weights_interpolate_between_what_runs() -> None:
    lam = [0.0, *torch.linspace(0, 1, 11, dtype=D)[1:-1].square().unbind(), 1.0]
    tree = spans((0, 8, 10))
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        runs: list = [None] * 11
        for s in tree:
            parent = s.parent is None or bool(runs[tree[s.parent].middle])
            runs[s.middle] = torch.tensor(parent and bool(torch.rand((), generator=g) < 0.6))
        C = weights(lam, runs)
        kept = {k for k, r in enumerate(runs) if r is None or r}
        times = torch.stack([torch.as_tensor(x, dtype=D) for x in lam])[:, None]
        torch.testing.assert_close(C, matrix(kept)(times)[..., 0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_halve_everything(bad: float) -> None:
    tree = spans((0, 4))
    errors = [torch.zeros(2), torch.tensor([bad, 0.0]), torch.zeros(2)]
    for whole in (torch.ones(2) * bad, torch.ones(2)):
        halved, _ = choose(errors, tree, whole, torch.tensor(10.0))
        assert all(halved)
    assert relative([torch.ones(4)], torch.ones(1))[0] == 2
