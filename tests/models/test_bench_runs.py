"""The engine that trains many runs at once: its gradients are those of ordinary modules, its Adam is torch's."""

import numpy as np
import pytest
import scipy.linalg
import torch
from jagg_fx.models import FlowSDE, MLPVelocity, grpo_loss, rollout, uniform_times

import jagg_fx
from bench.compare import paired
from bench.conditional_arms import ARMS, Balanced, ByRow, Gauss, InnerPair
from bench.conditional_tokens import train
from bench.grpo import CLIP, frechet, policy_head
from bench.grpo_study import ETA, Fraction
from bench.runs import Adam, Bias, Gradient, Nets, cosine, exact_gradient, plan, relative_error
from jagg_fx.estimators import Corrected, Debiased, Endpoints, Exact, Knots, Memory, Subset, index_lambdas
from jagg_fx.memory import BiasMemory

R, K, B, D, C = 3, 8, 5, 6, 3
TIMES = [0.9, 0.8, 0.65, 0.6, 0.4, 0.3, 0.15, 0.1]


def case(embedding="scalar"):
    torch.manual_seed(0)
    nets = [MLPVelocity(D, 16, 2, C, embedding) for _ in range(R)]
    z, y, target = torch.randn(R, K, B, D), torch.randint(C, (R, B)), torch.randn(R, K, B, D)
    t = torch.tensor(TIMES)
    together = Nets(nets)
    features = together.features(z, t[:, None], y[:, None])

    def head(v):
        # Not separable over steps: the cotangents are those of the whole loss.
        return ((v - target) ** 2).mean((1, 2, 3)) + v.mean(1).square().sum((1, 2))

    def loss(net, z, t, y, target):
        v = torch.stack([net(z[k], t[k], y) for k in range(K)])
        return ((v - target) ** 2).mean() + v.mean(0).square().sum()

    batches = [(z[r], t, y[r], target[r]) for r in range(R)]
    return nets, together, features, head, loss, batches


def in_one(net, gradients, run):
    """The gradient of one run by the names of a module."""
    shell = object.__new__(Nets)
    shell.first, shell.weights = net, gradients
    out = MLPVelocity(D, 16, 2, C, net.time_embedding)
    shell.take(run, out)
    return dict(out.named_parameters())


@pytest.mark.parametrize("embedding", ["scalar", "sinusoidal"])
def test_exact_is_autograd(embedding):
    nets, together, features, head, loss, batches = case(embedding)
    gradients, losses = exact_gradient(together, features, head)
    for r, net in enumerate(nets):
        want = loss(net, *batches[r])
        want.backward()
        assert losses[r] == pytest.approx(want.item(), rel=1e-5)
        got = in_one(net, gradients, r)
        for name, p in net.named_parameters():
            torch.testing.assert_close(got[name].detach(), p.grad, rtol=1e-4, atol=1e-6)


def test_endpoints_are_those_of_transform():
    nets, together, features, head, loss, batches = case()
    gradients, _ = Gradient(Endpoints(), 4)(together, features, TIMES, head)
    step = jagg_fx.transform(loss, W=4, gate=None, compiler="eager")
    found, _ = step.grad_and_value(nets[1], *batches[1])
    got = in_one(nets[1], gradients, 1)
    for name, want in found.items():
        torch.testing.assert_close(got[name].detach(), want, rtol=1e-4, atol=1e-6)
    exact, _ = exact_gradient(together, features, head)
    assert (relative_error(gradients, exact) > 1e-3).all()


@pytest.mark.parametrize("estimator", [Debiased(1.0), Subset(2), Debiased(0.5)])
def test_random_estimators_are_right_in_the_mean(estimator):
    _, together, features, head, _, _ = case()
    exact, _ = exact_gradient(together, features, head)
    gradient = Gradient(estimator, 4)
    draws = 600
    total = [torch.zeros_like(x) for x in exact]
    for _ in range(draws):
        got, _ = gradient(together, features, TIMES, head)
        total = [a + b / draws for a, b in zip(total, got, strict=True)]
    assert (cosine(total, exact) > 0.99).all()
    assert (relative_error(total, exact) < 0.12).all()


def test_a_group_of_all_steps_with_its_own_node_each_is_exact():
    _, together, features, head, _, _ = case()
    exact, _ = exact_gradient(together, features, head)
    for estimator, W in ((Knots(1), 4), (Endpoints(), 2), (Subset(4), 4)):
        got, _ = Gradient(estimator, W)(together, features, TIMES, head)
        assert (relative_error(got, exact) < 1e-5).all()


def test_ragged_groups():
    nodes = plan(Endpoints(), TIMES[:6], 4, lambda: torch.rand(R, B))
    assert list(nodes.fixed) == [0, 3, 4, 5]
    torch.testing.assert_close(nodes.weights.sum(0), torch.ones(6))


def test_bias_is_that_of_the_library():
    torch.manual_seed(0)
    for shrink in (False, True):
        ours, theirs = Bias(Memory(2, 0.8, shrink)), BiasMemory(0.8, shrink)
        truth = torch.randn(1, 3, 2)
        for _ in range(7):
            c = [truth + 0.5 * torch.randn(1, 3, 2)]
            ours.take(c)
            theirs.update(c)
            value = theirs.value()
            want = torch.zeros(1, 3, 2) if value is None else value[0]
            torch.testing.assert_close(ours.add_to([torch.zeros(1, 3, 2)])[0], want)


def test_adam_is_that_of_torch():
    torch.manual_seed(0)
    start, gradients = torch.randn(2, 3, 4), torch.randn(5, 2, 3, 4)
    weights = [start.clone()]
    adam = Adam(weights, torch.tensor([1e-2, 3e-2]))
    for g in gradients:
        adam.step([g])
    for run, lr in enumerate((1e-2, 3e-2)):
        w = start[run].clone().requires_grad_()
        optimiser = torch.optim.Adam([w], lr)
        for g in gradients:
            w.grad = g[run].clone()
            optimiser.step()
        torch.testing.assert_close(weights[0][run], w.detach())


def test_weights_go_there_and_back():
    nets, together, *_ = case()
    out = MLPVelocity(D, 16, 2, C)
    together.repeat(2).take(R + 1, out)
    for name, p in nets[1].named_parameters():
        assert torch.equal(p, dict(out.named_parameters())[name])


@pytest.mark.parametrize("n", [4, 5, 7, 8])
def test_balanced_pairs_cancel_the_leading_error(n):
    lam = index_lambdas(n)
    u = (torch.arange(1000) + 0.5) / 1000
    estimator = Balanced()
    picks = estimator.picks(lam, [u, u])
    rows = estimator.weights(lam, picks)
    for power, want in ((0, n), (1, n / 2), (2, sum(x**2 for x in lam)), (3, sum(x**3 for x in lam))):
        at = [torch.tensor(lam)[p] ** power for p in picks]
        estimate = sum(x * torch.stack([c.expand(1000) for c in row]).sum(0) for x, row in zip(at, rows, strict=True))
        assert estimate.mean().item() == pytest.approx(want, abs=2e-2)


def test_gauss_nodes_are_right_beyond_their_number():
    three = ((Gauss(3), n, 5) for n in (4, 8))
    for estimator, n, degree in ((Gauss(), 4, 3), (Gauss(), 8, 3), (InnerPair(), 7, 3), *three):
        lam = index_lambdas(n)
        places = (1 / 6, 5 / 6) if isinstance(estimator, InnerPair) else estimator.off_grid(n)
        for power in range(degree + 1):
            sums = [sum(row) for row in estimator.weights(lam)]
            estimate = sum(x**power * c for x, c in zip(places, sums, strict=True))
            assert estimate == pytest.approx(sum(x**power for x in lam))


def test_by_row_is_the_identity_in_the_mean():
    lam, u = index_lambdas(4), (torch.arange(4000) + 0.5) / 4000
    estimator = ByRow(0.25)
    picks = estimator.picks(lam, [u])
    nodes = [torch.zeros_like(picks[0]), torch.full_like(picks[0], 3), picks[0]]
    mean = torch.zeros(4, 4)
    for node, row in zip(nodes, estimator.weights(lam, picks), strict=True):
        for k, c in enumerate(row):
            c = torch.as_tensor(c, dtype=torch.float32).expand(4000)
            for j in range(4):
                mean[j, k] += c[node == j].sum() / 4000
    torch.testing.assert_close(mean, torch.eye(4), atol=1e-2, rtol=0)
    assert isinstance(Corrected(0.25).picks(lam, [u])[0], torch.Tensor)


def test_arms_share_seeds_and_data():
    """Endpoints of groups of two are exact, so the whole training is."""
    got = train(ARMS["endpoints"], 2, 0.4, range(2), (1e-2, 2e-2), 6)
    want = train(ARMS["exact"]._replace(make=lambda W, steps: Exact()), 2, 0.4, range(2), (1e-2, 2e-2), 6)
    torch.testing.assert_close(
        torch.tensor(got["steps"]["test"]), torch.tensor(want["steps"]["test"]), rtol=1e-4, atol=0
    )


def test_paired():
    same = paired([1.0, 2, 3], [1.0, 2, 3], lower_is_better=True, relative=True)
    assert (same.gap, same.wins, same.p) == (0, 0, 1)
    worse = paired([1.1 + i for i in range(8)], [1.0 + i for i in range(8)], lower_is_better=True, relative=False)
    assert worse.gap == pytest.approx(0.1)
    assert (worse.wins, worse.pairs) == (0, 8)
    assert worse.p == pytest.approx(2 / 2**8)
    with pytest.raises(ValueError, match="pairs need"):
        paired([1.0], [1.0], lower_is_better=True, relative=True)


def test_the_policy_head_is_the_grpo_loss():
    nets, together, _, _, _, _ = case("sinusoidal")
    T, generator = 4, torch.Generator().manual_seed(0)
    y, advantages, sigmas = torch.randint(C, (R, B)), torch.randn(R, B), uniform_times(T)
    paths = [
        rollout(net, torch.randn(B, D, generator=generator), sigmas, own, sampler=FlowSDE(ETA), generator=generator)
        for net, own in zip(nets, y, strict=True)
    ]
    states = torch.stack([path.states for path in paths])
    # Not quite on-policy, so that the ratio counts.
    old = torch.stack([path.log_probs for path in paths]) + 2 * CLIP * torch.randn(R, T, B)
    features = together.features(states[:, :-1], sigmas[:-1, None], y[:, None])
    gradients, losses = exact_gradient(together, features, policy_head(states, sigmas, old, advantages))
    for r, net in enumerate(nets):
        loss = grpo_loss(net, states[r], sigmas, old[r], advantages[r], y[r], sampler=FlowSDE(ETA), clip_range=CLIP)
        loss.backward()
        assert losses[r].item() == pytest.approx(loss.item(), abs=1e-6)
        got = in_one(net, gradients, r)
        for name, p in net.named_parameters():
            torch.testing.assert_close(got[name].detach(), p.grad, rtol=1e-3, atol=1e-6)


def test_timestep_fraction_takes_half_of_the_steps_of_each_row():
    estimator, lam = Fraction(), index_lambdas(6)
    u = list(torch.rand(3, 5000))
    picks = estimator.picks(lam, u)
    assert all(len(set(row.tolist())) == 3 for row in torch.stack(picks).T[:50])
    weights = torch.stack([torch.stack(row) for row in estimator.weights(lam, picks)])
    torch.testing.assert_close(weights.sum(0).mean(1), torch.ones(6), atol=0.06, rtol=0)
    assert set(weights.unique().tolist()) == {0.0, 2.0}


def test_frechet_distance():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(500, 5)) @ rng.normal(size=(5, 5)) + 1, rng.normal(size=(400, 5))
    root = scipy.linalg.sqrtm(np.cov(a, rowvar=False) @ np.cov(b, rowvar=False))
    want = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(np.cov(a, rowvar=False) + np.cov(b, rowvar=False) - 2 * root)
    assert frechet(a, b) == pytest.approx(want.real)
    assert frechet(a, a) == pytest.approx(0, abs=1e-8)
