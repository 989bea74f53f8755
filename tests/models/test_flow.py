"""Rectified flow against numpy in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jagg_fx.models import (
    AffineVelocity,
    flow_matching_loss,
    flow_matching_path_loss,
    interpolate,
    predict_data,
    predict_noise,
    velocity_target,
)


def pair(*shape):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]


def test_interpolation_per_row():
    x, noise = pair(3, 2, 2)
    t = np.array([0.0, 0.25, 1.0])
    want = np.stack([(1 - t[i]) * x[i].numpy() + t[i] * noise[i].numpy() for i in range(3)])
    np.testing.assert_allclose(interpolate(x, noise, torch.from_numpy(t)).numpy(), want, atol=1e-15)
    torch.testing.assert_close(interpolate(x, noise, torch.tensor(0.0)), x)
    torch.testing.assert_close(interpolate(x, noise, torch.tensor(1.0)), noise)


@given(t=st.floats(0, 1), h=st.floats(1e-3, 1))
@settings(deadline=None, max_examples=30)
def test_target_is_the_slope_and_points_back(t, h):
    x, noise = pair(2, 3)
    t, h = torch.tensor(t).double(), torch.tensor(h).double()
    z, v = interpolate(x, noise, t), velocity_target(x, noise)
    slope = (interpolate(x, noise, t + h) - z) / h
    torch.testing.assert_close(v, slope, atol=1e-10, rtol=0)
    torch.testing.assert_close(predict_data(v, z, t), x, atol=1e-12, rtol=0)
    torch.testing.assert_close(predict_noise(v, z, t), noise, atol=1e-12, rtol=0)


def test_loss_is_the_mean_squared_error():
    x, noise = pair(4, 3)
    net, t = AffineVelocity(3).double(), torch.rand(4).double()
    v = net(interpolate(x, noise, t), t).detach().numpy()
    want = ((v - (noise - x).numpy()) ** 2).sum() / 12
    assert flow_matching_loss(net, x, noise, t).item() == pytest.approx(want, rel=1e-13)


@pytest.mark.parametrize("shape", [(5,), (5, 4)])
def test_path_loss_is_the_mean_over_times(shape):
    x, noise = pair(4, 3)
    net, times = AffineVelocity(3).double(), torch.rand(shape).double()
    want = sum(flow_matching_loss(net, x, noise, times[i]).item() for i in range(5)) / 5
    assert flow_matching_path_loss(net, x, noise, times).item() == pytest.approx(want, rel=1e-13)


def test_condition_is_handed_on():
    x, noise = pair(2, 3)
    seen = []
    flow_matching_path_loss(lambda z, t, *c: seen.append(c) or z, x, noise, torch.rand(3), "a", 1)
    assert seen == [("a", 1)] * 3


def test_wrong_time():
    x, noise = pair(2, 3)
    with pytest.raises(ValueError, match="one per row"):
        interpolate(x, noise, torch.zeros(2, 3))
