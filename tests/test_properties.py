"""The properties of the estimator over drawn T, W, time grids, batches, widths, dtypes and networks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from .helpers import check, exact, run, wanted
from .losses import (
    MLP,
    STYLES,
    Affine,
    Case,
    Tied,
    coupled,
    frozen_first,
    grpo_case,
    linear,
    lora,
    quadratic,
    simple_case,
)

TOLERANCE = {torch.float64: (1e-10, 1e-12), torch.float32: (2e-5, 1e-6)}
NETS: dict[str, Callable[[int, int], torch.nn.Module]] = {
    "mlp": MLP,
    "tied": Tied,
    "frozen": frozen_first,
    "lora": lora,
    "affine": lambda dim, width: Affine(dim),
}


@st.composite
def times(draw, steps: st.SearchStrategy[int], rows: int) -> torch.Tensor:
    """A grid of distinct times: uniform, shifted, random, rising or falling, shared or per row."""
    T = draw(steps)
    seed = draw(st.integers(0, 2**16))
    g = torch.Generator().manual_seed(seed)
    kind = draw(st.sampled_from(["uniform", "shifted", "random", "per row"]))
    if kind == "uniform":
        ts = torch.linspace(0.95, 0.05, T, dtype=torch.float64)
    elif kind == "shifted":
        s = torch.linspace(1.0, 0.05, T, dtype=torch.float64)
        ts = 3 * s / (1 + 2 * s)  # the shift of SD3: crowded near 1
    else:
        shape = (T, rows) if kind == "per row" else (T,)
        gaps = 0.05 + torch.rand(shape, generator=g, dtype=torch.float64)
        ts = gaps.cumsum(0)
        ts = (ts / (ts[-1:] + 0.05)).flip(0)
    if draw(st.booleans()):
        ts = ts.flip(0)
    return ts


@st.composite
def cases(draw, steps=None, kinds=tuple(NETS), dtypes=tuple(TOLERANCE)) -> Case:
    batch = draw(st.integers(1, 4))
    dim, width = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    ts = draw(times(steps or st.integers(2, 9), batch))
    dtype = draw(st.sampled_from(dtypes))
    seed = draw(st.integers(0, 2**16))
    torch.manual_seed(seed)
    net = NETS[draw(st.sampled_from(kinds))](dim, width)
    return simple_case(
        draw(st.sampled_from([linear, quadratic, coupled])),
        net=net,
        ts=ts.to(dtype),
        batch=batch,
        dim=dim,
        seed=seed,
        noise=draw(st.sampled_from([0.0, 0.1, 1.0])),
        dtype=dtype,
    )


def tolerances(case: Case) -> tuple[float, float]:
    return TOLERANCE[case.args[0].dtype]


def well_conditioned(case: Case, want) -> bool:
    """Rounding is compared with the gradient: leave out the batches where parts of it cancel away."""
    total = sum(float((g**2).sum()) for g in want.grads.values() if g is not None) ** 0.5
    parts = sum(float(g.norm()) for g in want.cotangents if g is not None)
    return total > 1e-3 * parts


@given(
    case=cases(),
    W=st.integers(3, 8),
    style=st.sampled_from(STYLES),
    weights=st.sampled_from(["time", "index"]),
)
def test_endpoints_equal_the_reference(case: Case, W: int, style: str, weights: str) -> None:
    torch._dynamo.reset()
    want = wanted(case, W=W, weights=weights)
    assume(well_conditioned(case, want))
    check(run(case, style, W=W, gate=None, weights=weights), want, *tolerances(case))


@given(
    case=cases(),
    style=st.sampled_from(STYLES),
    options=st.sampled_from(
        [
            {"W": 1},
            {"W": 2},
            {"W": 2, "gate": None},
            {"W": 4, "estimator": "exact"},
            {"W": 4, "tau": 1.5},
            {"W": 3, "tau": 1.5, "gate": "cosine-mean"},
        ]
    ),
)
def test_exact_settings_equal_autograd(case: Case, style: str, options: dict) -> None:
    torch._dynamo.reset()
    assume(well_conditioned(case, wanted(case, W=1)))
    check(run(case, style, **options), exact(case), *tolerances(case))


@given(
    case=cases(dtypes=(torch.float64,)),
    W=st.integers(3, 8),
    style=st.sampled_from(STYLES),
    gate=st.sampled_from(["cosine", "cosine-mean"]),
    tau=st.sampled_from([0.5, 0.9, 0.99, 0.995]),
)
def test_gates_equal_the_reference(case: Case, W: int, style: str, gate: str, tau: float) -> None:
    torch._dynamo.reset()
    want = wanted(case, W=W, gate=gate, tau=tau)
    # where rows or readings of the cosine disagree, see test_reference for what is promised
    assume(want.decisive(tau, 1e-6) and well_conditioned(case, want))
    check(run(case, style, W=W, gate=gate, tau=tau), want, *tolerances(case))


@given(case=cases(kinds=("affine",)), W=st.integers(2, 8), style=st.sampled_from(STYLES))
def test_affine_on_a_line_is_exact(case: Case, W: int, style: str) -> None:
    torch._dynamo.reset()
    zs, ts, _ = case.args
    flat = simple_case(case.core, net=case.net, ts=ts, batch=zs.shape[1], dim=zs.shape[2], dtype=zs.dtype)
    want = exact(flat)
    assume(well_conditioned(flat, wanted(flat, W=1)))
    tol = (1e-12, 1e-12) if zs.dtype == torch.float64 else (1e-5, 1e-6)
    check(run(flat, style, W=W, gate=None), want, *tol)


@given(
    T=st.integers(2, 9),
    W=st.integers(2, 5),
    batch=st.integers(2, 4),
    beta=st.sampled_from([0.0, 0.04]),
    kl=st.sampled_from(["mean", "velocity"]),
    clip=st.sampled_from([1e-4, 0.2]),
    seed=st.integers(0, 2**16),
    entry=st.sampled_from(["backward", "grad_and_value", "func", "backend"]),
)
def test_grpo_through_any_entry(T, W, batch, beta, kl, clip, seed, entry) -> None:
    torch._dynamo.reset()
    case = grpo_case(T=T, batch=batch, beta=beta, kl=kl, clip=clip, seed=seed)
    want = wanted(case, W=W)
    assume(well_conditioned(case, want))
    check(run(case, "params", entry, W=W, gate=None), want, 1e-9, 1e-12)
