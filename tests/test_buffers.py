"""States that a loss changes in place between two calls: each call keeps the value that it saw."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import jagg_fx

T = 4


class Net(nn.Module):
    """Keeps its input itself for the backward of its first layer."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, z, t):
        return self.out(torch.tanh(self.into(z) * (1 + t)))


def plain(net, zs, ts, room, now):
    return sum((net(zs[k], ts[k]) - 1).square().sum() / (k + 1) for k in range(T))


def refilled(net, zs, ts, room, now):
    """One buffer for the states, a view whose rows do not lie side by side, and one for the time."""
    state, loss = room[:, :4], 0.0
    for k in range(T):
        state.copy_(zs[k])
        now.fill_(ts[k])
        loss = loss + (net(state, now) - 1).square().sum() / (k + 1)
    return loss


def stepped(net, zs, ts, room, now):
    z, loss = zs[0], 0.0
    for k in range(T):
        v = net(z, ts[k])
        loss = loss + v.square().sum() / (k + 1)
        z = z - 0.1 * v.detach()
    return loss


def stored(net, zs, ts, room, now):
    """States are written into the trajectory as the loss goes."""
    loss = 0.0
    for k in range(T):
        v = net(zs[k], ts[k])
        loss = loss + v.square().sum() / (k + 1)
        if k + 1 < T:
            zs[k + 1] = zs[k] - 0.1 * v.detach()
    return loss


def gradient(loss_fn, net: nn.Module, args: tuple, **options) -> Tensor:
    net, args = copy.deepcopy(net), tuple(a.clone() for a in args)
    jagg_fx.transform(loss_fn, compiler="eager", **options)(net, *args).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


@pytest.fixture
def given() -> tuple:
    torch.manual_seed(0)
    zs, ts = torch.randn(T, 2, 4).double(), torch.linspace(0.9, 0.3, T).double()
    return Net().double(), (zs, ts, torch.zeros(2, 8).double(), torch.zeros(1).double())


@pytest.mark.parametrize("options", [{"gate": None}, {"tau": 2.0}], ids=str)
@pytest.mark.parametrize(("loss_fn", "same"), [(refilled, plain), (stored, stepped)])
def test_a_call_keeps_the_state_that_it_saw(given, loss_fn, same, options: dict) -> None:
    torch.testing.assert_close(
        gradient(loss_fn, *given, **options), gradient(same, *given, **options), rtol=1e-12, atol=1e-14
    )


def derived(net, zs, ts, room, now):
    """What a call reads is computed anew from the buffer."""
    return refilled(lambda z, t: net(z * 1.0, t * 1.0), zs, ts, room, now)


@pytest.mark.parametrize("loss_fn", [refilled, stored, derived])
@pytest.mark.parametrize("options", [{"order": "time", "gate": None}, {"estimator": "debiased"}], ids=str)
def test_calls_that_change_places_cannot(given, loss_fn, options: dict) -> None:
    with pytest.raises(jagg_fx.RefusedError, match="changed in place"):
        gradient(loss_fn, *given, **options)


def test_a_refilled_state_at_stored_times_is_not_left_in_its_place(given) -> None:
    """The state is one tensor for all calls, so that only the times would change places."""

    def loss_fn(net, zs, ts, room, now):
        loss = 0.0
        for k in range(T):
            now.copy_(zs[k])
            loss = loss + (net(now, ts[k]) - 1).square().sum() / (k + 1)
        return loss

    net, (zs, ts, *_) = given
    with pytest.raises(jagg_fx.RefusedError, match="changed in place"):
        gradient(loss_fn, net, (zs, ts, zs[0], zs[0]), order="time", gate=None)
