"""Estimators as matrices: unbiased, summing to one, exact where they say so. And the memory of a bias."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import jagg_fx
from bench import eager
from jagg_fx.estimators import (
    ESTIMATORS,
    Alternating,
    Causal,
    Corrected,
    Correction,
    Debiased,
    Endpoints,
    Exact,
    Inner,
    Knots,
    Lagrange,
    Memory,
    Quadratic,
    Schedule,
    Subset,
    index_lambdas,
    lambdas,
    resolve,
)
from jagg_fx.memory import BiasMemory

from .losses import MLP, coupled, grid, line_states, simple_case
from .reference import relative_error

PLAIN = [
    *(
        Exact(),
        Endpoints(),
        Corrected(),
        Corrected(0.3),
        Correction(),
        Subset(),
        Subset(3),
        Lagrange(),
        Lagrange("right"),
        Inner(),
    ),
    *(Knots(), Knots(2, 1), Knots(1), Causal(), Causal(1, 3), Causal(2, 3, last=False)),
]
SIZES = range(1, 10)


def positions(n: int, rows: int | None = 3, seed: int = 0) -> list:
    """Uneven positions of n steps in float64, other ones in each row; rows=None: the same for all."""
    g = torch.Generator().manual_seed(seed + 100 * n)
    t = torch.rand(n, rows or 1, generator=g, dtype=torch.float64).sort(0, descending=True).values
    return lambdas(list(t if rows else t.squeeze(1)))


def draw(estimator, lam: Sequence, rows: int = 3, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    n = len(lam)
    return estimator.picks(lam, [torch.rand(rows, generator=g, dtype=torch.float64) for _ in range(estimator.drawn(n))])


def full(estimator, lam: Sequence, picks: Sequence[Tensor] = (), rows: int = 3) -> Tensor:
    """What each step's own Jacobian is multiplied with: (step of the Jacobian, step of the cotangent, row)."""
    n = len(lam)
    out = torch.zeros(n, n, rows, dtype=torch.float64)
    C = estimator.weights(lam, picks)
    nodes = [torch.full((rows,), j) for j in estimator.nodes(n)] + [p.expand(rows) for p in picks]
    assert len(C) == len(nodes)
    for row, node in zip(C, nodes, strict=True):
        assert len(row) == n
        for k, weight in enumerate(row):
            value = torch.as_tensor(weight, dtype=torch.float64).expand(rows)
            out[node, k, torch.arange(rows)] += value
    return out


def eye(n: int, rows: int = 3) -> Tensor:
    return torch.eye(n, dtype=torch.float64).unsqueeze(-1).expand(n, n, rows)


def close(a: Tensor, b: Tensor, tol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tol)


def chances(lam: Sequence) -> list[Tensor]:
    """q_m of the steps of a group, by the formula."""
    q = torch.stack([torch.as_tensor(x, dtype=torch.float64).expand(3) for x in lam])
    q = q * (1 - q)
    return list(q / q.sum(0))


# ------------------------------------------------------------------------------------------ without bias


@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("p", [1.0, 0.5, 0.2])
@pytest.mark.parametrize("n", SIZES)
def test_debiased_is_the_identity_in_the_mean(n: int, p: float, rows: int | None) -> None:
    """Over coin and draw, all of them, in every row."""
    estimator, lam = Debiased(p), positions(n, rows)
    mean = torch.zeros(n, n, 3, dtype=torch.float64)
    for index, variant in enumerate(estimator.variants()):
        share = p if len(estimator.variants()) == 1 or index == 1 else 1 - p
        share = 1.0 if p == 1 else share
        if variant.drawn(n):
            for m, q in list(enumerate(chances(lam)))[1:-1]:
                mean += share * q * full(variant, lam, [torch.tensor(m)])
        else:
            mean += share * full(variant, lam)
    close(mean, eye(n))


@pytest.mark.parametrize("k", [None, 1, 2, 3, 5])
@pytest.mark.parametrize("n", SIZES)
def test_subset_is_the_identity_in_the_mean(n: int, k: int | None) -> None:
    estimator, lam = Subset(k), positions(n)
    steps = 60  # divisible by the sizes of all strata: the draws of a fine grid have the right frequencies
    fine = [(torch.arange(steps) + 0.5) / steps] * estimator.drawn(n)
    picks = estimator.picks([0.5] * n, fine)
    ways = list(itertools.product(*(p.unique(return_counts=True)[0].tolist() for p in picks)))
    mean = sum(full(estimator, lam, [torch.tensor(m) for m in way]) for way in ways) / len(ways)
    close(mean, eye(n))
    sizes = [max(float(torch.as_tensor(w).max()) for w in row) for row in estimator.weights(lam, draw(estimator, lam))]
    assert max(sizes) - min(sizes) <= 1
    assert estimator.expected_backwards(n) == min(n, (n + 1) // 2 if k is None else k)


@pytest.mark.parametrize("n", range(3, 10))
def test_correction_is_corrected_less_endpoints(n: int) -> None:
    lam = positions(n)
    for m in range(1, n - 1):
        picks = [torch.tensor(m)]
        other = full(Corrected(), lam, picks if Corrected().drawn(n) else [])
        close(full(Correction(), lam, picks), other - full(Endpoints(), lam))


@pytest.mark.parametrize("n", [3, 4, 5, 8])
@pytest.mark.parametrize("estimator", [Corrected(), Corrected(0.5), Correction()])
def test_draws_have_their_frequencies(estimator: Corrected, n: int) -> None:
    lam, fine = positions(n), (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    want = chances(lam)
    for row in range(3):
        one = [x[row] if isinstance(x, Tensor) else x for x in lam]
        for pick in estimator.picks(one, [fine] * estimator.drawn(n)):
            assert pick.dtype == torch.int64
            for m in range(n):
                assert abs(float((pick == m).double().mean()) - float(want[m][row])) < 1e-4


@pytest.mark.parametrize("estimator", PLAIN, ids=repr)
def test_draws_are_distinct_steps_beside_the_nodes(estimator) -> None:
    for n, u in itertools.product(SIZES, [0.0, 0.3, 0.7, 1 - 2**-24, 1.0]):  # 1.0: what rounding may give
        for lam in (positions(n), index_lambdas(n), [float("nan") * x if n > 1 else x for x in positions(n)]):
            picks = estimator.picks(lam, [torch.full((3,), u)] * estimator.drawn(n))
            assert len(picks) == estimator.drawn(n)
            for row in range(3):
                found = [*estimator.nodes(n), *(int(p.expand(3)[row]) for p in picks)]
                assert len(set(found)) == len(found)
                assert all(0 <= j < n for j in found)


# ---------------------------------------------------------------------------------------------- the rules


@pytest.mark.parametrize("estimator", PLAIN, ids=repr)
def test_weights_of_dealt_steps(estimator) -> None:
    """A rewrite puts drawn steps into fixed places, and the other steps, in their order, into the other places."""
    for n in SIZES:
        lam, slots = positions(n, None), estimator.slots(n)
        assert len(set(slots) - set(estimator.nodes(n))) == estimator.drawn(n)
        for seed in range(5):
            picks = draw(estimator, lam, 1, seed)
            steps = [int(p) for p in picks]
            rest = iter(k for k in range(n) if k not in steps)
            order = [steps[slots.index(k)] if k in slots else next(rest) for k in range(n)]
            dealt = estimator.weights([lam[k] for k in order], slots)
            C = estimator.weights(lam, picks)
            for row, want in zip(dealt, C, strict=True):
                for weight, k in zip(row, order, strict=True):
                    assert float(weight) == pytest.approx(float(want[k]), abs=1e-12)


@given(st.sampled_from(PLAIN), st.integers(1, 12), st.integers(0, 1000), st.booleans())
def test_promises(estimator, n: int, seed: int, by_index: bool) -> None:
    lam = index_lambdas(n) if by_index else positions(n, 3, seed)
    C = full(estimator, lam, draw(estimator, lam, seed=seed))
    if estimator.sums_to_one:
        close(C.sum(0), torch.ones(n, 3, dtype=torch.float64), 1e-9)
    if not estimator.extrapolates:
        assert bool(((C >= 0) & (C <= 1)).all())
    nodes = estimator.nodes(n)
    assert list(nodes) == sorted(set(nodes))
    if len(nodes) == n:  # passes take such a group for exact
        assert estimator.weights(lam) == Exact().weights(lam)
    assert estimator.expected_backwards(n) == len(nodes) + estimator.drawn(n)
    usable = estimator.usable(lam)
    assert usable is None or bool(usable)
    assert estimator.variants() == (estimator,)


@pytest.mark.parametrize("estimator", PLAIN, ids=repr)
def test_zeros_and_ones_known_in_advance_are_numbers(estimator) -> None:
    """A NaN in a weight must be a tensor's: a step that is no part of a sum is skipped."""
    for n in range(1, 9):
        lam = positions(n)
        C = estimator.weights(lam, draw(estimator, lam))
        own = range(len(estimator.nodes(n)))
        for j, k in itertools.product(own, estimator.nodes(n)):
            assert isinstance(C[j][k], float), (n, j, k)


@pytest.mark.parametrize("shape", [(), (3,), (3, 1, 1), (3, 5)])
@pytest.mark.parametrize("estimator", PLAIN, ids=repr)
def test_traced_once_and_right_for_other_times(estimator, shape: tuple[int, ...]) -> None:
    """No Python decision depends on the data; draws per row meet times of any shape."""
    n = 7

    def run(u: Tensor, *inner: Tensor) -> list:
        lam = [0.0, *inner, 1.0]
        picks = estimator.picks(lam, [u] * estimator.drawn(n))
        usable = estimator.usable(lam)
        flat = [w for row in estimator.weights(lam, picks) for w in row if isinstance(w, Tensor)]
        return [*picks, *flat, *([] if usable is None else [usable])]

    def data(seed: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(seed)
        times = torch.rand(n - 2, *shape, generator=g, dtype=torch.float64)
        return [torch.rand(3, generator=g), *times]

    graph = make_fx(run)(*data(0))
    for got, want in zip(graph(*data(1)), run(*data(1)), strict=True):
        torch.testing.assert_close(got, want)
        assert tuple(want.shape) in {(), (3,), (3, 1), shape}


@pytest.mark.parametrize("estimator", [e for e in PLAIN if e.usable(positions(6)) is not None], ids=repr)
def test_unfit_times_are_not_usable(estimator) -> None:
    def usable(*times: float) -> bool:
        rows = torch.tensor([[0.9, t] for t in times], dtype=torch.float64)  # the first row is always the same
        rows[:, 0] = torch.linspace(0.9, 0.1, len(times))
        return bool(estimator.usable(lambdas(list(rows))))

    assert usable(0.9, 0.7, 0.6, 0.5, 0.3, 0.1)
    assert usable(0.1, 0.3, 0.5, 0.6, 0.7, 0.9)
    assert not usable(0.5, 0.5, 0.5, 0.5, 0.5, 0.5)
    assert not usable(0.5, 0.7, 0.6, 0.5, 0.3, 0.5)  # the ends are equal
    assert not usable(0.9, 0.95, 0.2, 0.7, 0.05, 0.1)
    assert not usable(0.9, 0.7, float("nan"), 0.5, 0.3, 0.1)


@pytest.mark.parametrize("estimator", [e for e in PLAIN if e.usable(positions(6)) is not None], ids=repr)
def test_equal_times_are_two_lanes(estimator) -> None:
    def fit(*lam: float) -> bool:
        return bool(estimator.usable([0.0, *torch.tensor(lam, dtype=torch.float64), 1.0]))

    assert fit(0.2, 0.4, 0.6)
    assert not fit(0.0, 0.4, 0.6)  # a step that is never drawn, and so never corrected; two knots at one time
    assert not fit(0.2, 0.4, 1.0)
    if not estimator.drawn(5):  # dealt steps are in no order
        assert not fit(0.2, 0.4, 0.4)
        assert not fit(0.4, 0.4, 0.3)  # outside of its two knots, though inside of the ends


# ------------------------------------------------------------------------------------------ where exact


def estimate(estimator, lam: Sequence, J: Tensor, g: Tensor, seed: int = 0) -> Tensor:
    """sum over j of J_j sum over k of C[j, k] g_k; J (n, params), g (n,)."""
    rows = 1
    C = full(estimator, lam, draw(estimator, lam, rows, seed), rows)[..., 0]
    return J.T @ (C @ g)


def jacobians(lam: Sequence, degree: int) -> tuple[Tensor, Tensor]:
    """J_k a polynomial in lambda with random vectors, and random cotangents."""
    x = torch.stack([torch.as_tensor(l, dtype=torch.float64) for l in lam])
    g = torch.Generator().manual_seed(5)
    parts = torch.randn(degree + 1, 11, generator=g, dtype=torch.float64)
    J = sum(x[:, None] ** d * parts[d] for d in range(degree + 1))
    return J, torch.randn(len(lam), generator=g, dtype=torch.float64)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("estimator", "degree"),
    [
        *((e, 1) for e in (Endpoints(), Corrected(), Knots(), Knots(2, 1), Causal(1), Causal(1, 3, last=False))),
        *((Lagrange(side), 2) for side in ("left", "right")),
        (Exact(), 5),
        (Subset(100), 5),
    ],
    ids=repr,
)
def test_exact_for_polynomials(estimator, degree: int, n: int) -> None:
    """Whatever is drawn: no variance where the Jacobian is affine."""
    lam = positions(n, None)
    J, g = jacobians(lam, degree)
    for seed in range(5):
        torch.testing.assert_close(estimate(estimator, lam, J, g, seed), J.T @ g, rtol=0, atol=1e-10)
    if n > 5 and degree < 5 and estimator != Endpoints():
        J, g = jacobians(lam, degree + 1)
        assert not torch.allclose(estimate(estimator, lam, J, g), J.T @ g, rtol=1e-3)


@pytest.mark.parametrize("factor", [0.0, 1.5])
def test_causal_with_another_factor_is_not_exact(factor: float) -> None:
    lam = positions(8, None)
    J, g = jacobians(lam, 1)
    assert not torch.allclose(estimate(Causal(factor), lam, J, g), J.T @ g, rtol=1e-3)


def test_causal_nodes_come_before_their_steps() -> None:
    assert Causal().nodes(9) == (0, 1, 3, 5, 7, 8)
    assert Causal(last=False).nodes(9) == (0, 1, 3, 5, 7)
    for estimator in (Causal(), Causal(1.5, 3, last=False)):
        C = full(estimator, positions(9))
        for j, k in itertools.combinations(range(9), 2):
            assert not bool(C[k, j].any())  # the later step k has no part of the earlier g_j


def test_nodes() -> None:
    assert Knots().nodes(16) == (0, 3, 6, 9, 12, 15)
    assert Knots(3, 1).nodes(9) == (0, 1, 4, 7, 8)
    assert (Lagrange().nodes(8), Lagrange("right").nodes(8)) == ((0, 3, 7), (0, 4, 7))
    assert [Inner().nodes(n) for n in (1, 2, 4, 5, 8)] == [(0,), (0, 1), (0, 3), (1, 3), (1, 6)]
    assert Lagrange().nodes(5) == Lagrange("right").nodes(5) == (0, 2, 4)
    assert Subset(3).nodes(4) == (0, 1)
    assert [resolve(name).expected_backwards(4) for name in ("endpoints", "exact", "debiased", "subset")] == [
        2,
        4,
        3,
        2,
    ]
    assert [resolve(name).expected_backwards(16) for name in ("knots", "causal", "memory")] == [6, 9, 2.25]
    assert Debiased(0.25).expected_backwards(4) == 2.25


# ------------------------------------------------------------------------------- variants and options


def test_alternating_counts_the_steps_of_each() -> None:
    e = Alternating("inner", "quadratic", every=2)
    names = [e.variants()[e.at(step, 0.5)] for step in range(6)]
    assert names == [Inner(), Lagrange("left"), Inner(), Lagrange("right"), Inner(), Lagrange("left")]
    assert e.expected_backwards(8) == 2.5
    third = Alternating("quadratic", "exact", every=3)
    sides = [getattr(third.variants()[third.at(step, 0.5)], "side", "exact") for step in range(6)]
    assert sides == ["left", "right", "exact", "left", "right", "exact"]
    for bad in ({"every": 1}, {"usual": "memory"}, {"other": "nothing"}):
        with pytest.raises(jagg_fx.OptionError):
            Alternating(**{"usual": "inner", "other": "exact", **bad})


def test_the_error_of_inner_nodes_is_a_seventh_for_eight_even_steps() -> None:
    """A Jacobian that is quadratic in t, cotangents all alike."""
    lam = index_lambdas(8)
    jacobians = [x * x for x in lam]

    def error(e) -> float:
        rows = e.weights(lam)
        return sum(jacobians[j] * sum(row) for j, row in zip(e.nodes(8), rows, strict=True)) - sum(jacobians)

    assert error(Inner()) / error(Endpoints()) == pytest.approx(1 / 7)


def test_variants_by_step_and_coin() -> None:
    assert Debiased().variants() == (Corrected(),)
    assert Debiased().at(3, 0.99) == 0
    assert [Debiased(0.25).at(0, coin) for coin in (0.0, 0.24, 0.25, 0.9)] == [1, 1, 0, 0]
    assert [Quadratic().variants()[Quadratic().at(step, 0.5)].side for step in range(3)] == ["left", "right", "left"]
    memory = Memory(every=3)
    assert [s for s in range(8) if memory.measures(s)] == [0, 3, 6]
    assert {memory.at(step, 0.0) for step in range(8)} == {0}
    assert memory.variants() == (Endpoints(), Correction())
    assert not Debiased().measures(0)
    assert not memory.sums_to_one
    assert Debiased(0.5).extrapolates
    with pytest.raises(AssertionError, match="changes from step to step"):
        Debiased(0.5).nodes(4)


def test_schedule() -> None:
    schedule = Schedule(((3, "endpoints"), (5, Debiased(0.5)), (None, Knots())))
    assert schedule.variants() == (Endpoints(), Corrected(0.5), Knots())
    assert [schedule.at(step, 0.9) for step in range(7)] == [0, 0, 0, 0, 0, 2, 2]
    assert [schedule.at(step, 0.1) for step in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    assert schedule.whole
    assert schedule.expected_backwards(16) == 6
    assert Schedule(((3, "endpoints"), (4, "debiased"))).expected_backwards(4) == 2.25
    assert Schedule(((3, "endpoints"), (4, "debiased"))).at(100, 0.0) == 1
    assert hash(schedule) == hash(copy.deepcopy(schedule))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Debiased(0), "estimator='endpoints' for never"),
        (lambda: Debiased(1.5), "p=1.5"),
        (lambda: Debiased(True), "p=True"),
        (lambda: Corrected(float("nan")), "p=nan"),
        (lambda: Subset(0), "1 or more"),
        (lambda: Subset(1.5), "k=1.5"),
        (lambda: Knots(0), "Use W - 1"),
        (lambda: Knots(3, 3), "below the stride"),
        (lambda: Knots(phase=-1), "phase=-1"),
        (lambda: Causal(-1), "factor=-1"),
        (lambda: Causal(float("inf")), "factor=inf"),
        (lambda: Causal(stride=0), "Use 2"),
        (lambda: Causal(last=1), "last=1"),
        (lambda: Lagrange("middle"), "'left' or 'right'"),
        (lambda: Memory(0), "every=0"),
        (lambda: Memory(beta=1), "never take"),
        (lambda: Memory(beta=-0.1), "beta=-0.1"),
        (lambda: Memory(shrink=2), "shrink=2"),
        (lambda: Schedule(()), "needs a stage"),
        (lambda: Schedule(("endpoints",)), "pairs"),
        (lambda: Schedule(((5, "endpoints"), (5, "exact"))), "a step after 5"),
        (lambda: Schedule(((None, "endpoints"), (5, "exact"))), "until=None"),
        (lambda: Schedule(((5, "endpoint"),)), "endpoint.*not known"),
        (lambda: Schedule(((5, "memory"),)), "memory cannot"),
        (lambda: resolve("jagg"), "Use one of"),
        (lambda: resolve(Knots), "is a class"),
        (lambda: resolve(3), "found int"),
        (lambda: BiasMemory(beta=2), "beta=2"),
    ],
)
def test_options_that_cannot_be(make, text: str) -> None:
    with pytest.raises(jagg_fx.OptionError, match=text):
        make()


def test_names() -> None:
    assert all(resolve(name).name == name for name in ESTIMATORS)
    assert all(resolve(resolve(name)) == resolve(name) for name in ESTIMATORS)


class Middle:
    """What a user may write: no more than the first version of the protocol had."""

    name = "middle"

    def nodes(self, n: int) -> tuple[int, ...]:
        return (n // 2,)

    def weights(self, lam):
        return [[1.0] * len(lam)]


def test_objects_of_users() -> None:
    estimator = resolve(Middle())
    assert (estimator.name, estimator.nodes(5), estimator.weights([0.0, 1.0])) == ("middle", (2,), [[1.0, 1.0]])
    assert (estimator.whole, estimator.drawn(5), estimator.at(3, 0.5)) == (False, 0, 0)
    assert estimator.variants() == (estimator,)
    assert bool(estimator.usable(positions(5)))
    assert estimator.expected_backwards(5) == 1

    class Lane(Middle):
        whole = True

        def drawn(self, n: int) -> int:
            return 1

        def usable(self, lam):
            return None

    assert (resolve(Lane()).whole, resolve(Lane()).drawn(4), resolve(Lane()).usable([])) == (True, 1, None)


# ---------------------------------------------------------------------------------------- the eager engine


@pytest.mark.filterwarnings("ignore::jagg_fx.JaggWarning")  # wide groups
@pytest.mark.parametrize(("T", "W", "rows"), [(8, 4, None), (7, 3, None), (6, 6, 3)])
def test_the_eager_engine_equals_the_transform(T: int, W: int, rows: int | None) -> None:
    ts = grid(T) if rows is None else torch.rand(T, rows, dtype=torch.float64).sort(0).values
    case = simple_case(coupled, net=MLP(4), ts=ts)
    step = jagg_fx.transform(case.loss("net"), W=W, gate=None, compiler="eager")
    want, loss = step.grad_and_value(case.net, *case.args)
    got_loss, got = engine(case, "endpoints", W)
    torch.testing.assert_close(got_loss, loss.detach(), rtol=1e-13, atol=0)
    assert relative_error(got, want) < 1e-13


def engine(case, estimator, W: int, **options) -> tuple[Tensor, dict[str, Tensor | None]]:
    net = copy.deepcopy(case.net)
    net.zero_grad()
    zs, ts, *rest = case.args

    def head(velocities: Sequence[Tensor]) -> Tensor:
        known = iter(velocities)
        return case.core(lambda z, t: next(known), zs, ts, *rest)

    loss = eager.backward(net, zs, ts, head, estimator, W, **options)
    return loss, {k: p.grad for k, p in net.named_parameters()}


def test_the_mean_of_the_eager_engine_is_exact() -> None:
    """Drawn rows come from the steps that the picks name."""
    case = simple_case(coupled, net=MLP(4), T=4, batch=2)
    _, want = engine(case, "exact", 4)
    g = torch.Generator().manual_seed(0)
    for estimator, tol in (("debiased", 0.01), ("subset", 0.2)):
        runs = [engine(case, estimator, 4, generator=g)[1] for _ in range(100)]
        mean = {k: torch.stack([r[k] for r in runs]).mean(0) for k in want}
        single = sum(relative_error(r, want) for r in runs) / len(runs)
        assert relative_error(mean, want) < min(tol, 0.25 * single)


def test_affine_on_a_line_by_rows() -> None:
    """Through the engine, with times per row: the corrected estimate is exact in each draw."""
    from .losses import Affine

    ts = torch.rand(6, 3, dtype=torch.float64).sort(0).values
    case = simple_case(coupled, net=Affine(4), ts=ts)
    assert torch.allclose(case.args[0], line_states(ts, 3, 4))
    _, want = engine(case, "exact", 6)
    for estimator in ("debiased", "quadratic", "knots", Causal(1)):
        assert relative_error(engine(case, estimator, 6)[1], want) < 1e-11


# -------------------------------------------------------------------------------------------- the memory


def noise(seed: int, scale: float = 1.0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(30, 20, generator=g), scale * torch.randn(50, generator=g)]


def test_memory_of_a_constant() -> None:
    memory, c = BiasMemory(), noise(0)
    assert memory.value() is None
    for i in range(10):
        memory.update(c)
        if i < 3:
            assert memory.value() is None  # too few to tell signal from noise
    for got, want in zip(memory.value(), c, strict=True):
        torch.testing.assert_close(got, want)
    found = memory.counters()
    assert found["measured"] == 10
    assert found["slope"] == pytest.approx(1, abs=1e-5)
    assert found["norm"] == pytest.approx(found["last"], rel=1e-5)


def test_memory_is_a_mean_from_the_start() -> None:
    memory = BiasMemory(shrink=False)
    memory.update(noise(0))
    torch.testing.assert_close(memory.value()[0], noise(0)[0])
    memory.update(noise(1))
    want = (0.95 * noise(0)[0] + noise(1)[0]) / 1.95
    torch.testing.assert_close(memory.value()[0], want)


def test_memory_shrinks_noise_and_keeps_signal() -> None:
    signal, kept, lost, raw = noise(0), BiasMemory(0.9), BiasMemory(0.9), BiasMemory(0.9, shrink=False)
    for i in range(1, 200):
        kept.update([s + x for s, x in zip(signal, noise(i), strict=True)])
        lost.update(noise(i))
        raw.update(noise(i))
    # b has the variance .1 / 1.9 of one correction: signal / (signal + noise) = .95
    assert float(kept.slope) == pytest.approx(0.95, abs=0.05)
    assert abs(float(lost.slope)) < 0.2
    assert lost.value()[0].norm() < 0.25 * raw.value()[0].norm()


def test_slope_of_the_memory_by_its_formula() -> None:
    memory, cs = BiasMemory(0.8), [torch.cat([x.flatten() for x in noise(i)]).double() for i in range(6)]
    cb = bb = mean = 0.0
    for i, c in enumerate(cs):
        memory.update([c])
        if i:
            b = mean / (1 - 0.8**i)
            cb, bb = 0.8 * cb + 0.2 * float(c @ b), 0.8 * bb + 0.2 * float(b @ b)
        mean = 0.8 * mean + 0.2 * c
    assert float(memory.slope) == pytest.approx(cb / bb, rel=1e-9)
    shrunk = max(0.0, min(1.0, cb / bb)) * mean / (1 - 0.8**6)
    torch.testing.assert_close(memory.value()[0], shrunk)


def test_memory_survives_an_overflow() -> None:
    memory = BiasMemory()
    for _ in range(5):
        memory.update(noise(0))
    memory.update([noise(0)[0] * float("inf"), noise(0)[1]])
    torch.testing.assert_close(memory.value()[0], noise(0)[0])
    memory.update(noise(0))
    torch.testing.assert_close(memory.value()[1], noise(0)[1])


def test_memory_state_round_trip(tmp_path) -> None:
    memory, other = BiasMemory(), BiasMemory()
    for i in range(5):
        memory.update(noise(i))
    torch.save(memory.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    for m in (memory, other):
        m.update(noise(7))
    assert memory.counters() == other.counters()
    for a, b in zip(memory.value(), other.value(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(jagg_fx.OptionError, match="missing"):
        other.load_state_dict({"measured": 3})
    with pytest.raises(jagg_fx.OptionError, match="does not fit"):
        other.update(noise(0)[:1])


def test_memory_keeps_bf16_in_fp32() -> None:
    memory = BiasMemory(shrink=False)
    memory.update([x.bfloat16() for x in noise(0)])
    assert memory.value()[0].dtype == torch.float32
