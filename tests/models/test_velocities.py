"""Networks against a second implementation in float64, written without torch.nn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jagg_fx.models import (
    DIT_SIZES,
    AffineVelocity,
    DiT,
    DiTBlock,
    MLPVelocity,
    count_parameters,
    grid_embedding,
    sinusoidal_embedding,
)


def randomise(net):
    """A new DiT returns zero; give every parameter a value, so that a wrong term shows."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / math.sqrt(p.shape[-1]))
    return net.double()


def arrays(net):
    return {name: p.detach().numpy() for name, p in net.state_dict().items()}


def silu(x):
    return x / (1 + np.exp(-x))


def waves(position, dim):
    out = np.empty((len(position), dim))
    for k in range(dim // 2):
        angle = position / 10_000 ** (k / (dim // 2))
        out[:, k], out[:, dim // 2 + k] = np.cos(angle), np.sin(angle)
    return out


def test_affine_is_its_formula():
    net = AffineVelocity((2, 3)).double()
    z, t = torch.randn(4, 2, 3, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    want = np.empty((4, 6))
    for i in range(4):
        want[i] = net.A.detach().numpy() @ z[i].numpy().reshape(6) + net.b.detach().numpy() * t[i].item()
        want[i] += net.c.detach().numpy()
    np.testing.assert_allclose(net(z, t).detach().numpy().reshape(4, 6), want, atol=1e-13)
    assert AffineVelocity(5)(torch.randn(7, 5), torch.tensor(0.5)).shape == (7, 5)
    assert all(p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("time_embedding", ["scalar", "sinusoidal"])
@pytest.mark.parametrize("depth", [1, 3])
def test_mlp_is_its_formula(time_embedding, depth):
    net = MLPVelocity(4, hidden=6, depth=depth, classes=3, time_embedding=time_embedding).double()
    z, t, y = torch.randn(5, 4).double(), torch.rand(5).double(), torch.tensor([0, 1, 2, 3, 0])
    w = arrays(net)
    time = t.numpy()[:, None] if time_embedding == "scalar" else waves(1000 * t.numpy(), 6)
    h = np.concatenate([z.numpy(), time], 1) @ w["first.weight"].T + w["first.bias"] + w["label.weight"][y]
    for i in range(depth - 1):
        h = silu(h) @ w[f"middle.{i}.weight"].T + w[f"middle.{i}.bias"]
    want = silu(h) @ w["last.weight"].T + w["last.bias"]
    np.testing.assert_allclose(net(z, t, y).detach().numpy(), want, atol=1e-11)


def dit_reference(net, z, t, y):
    """DiT in numpy, one image, one patch and one head at a time."""
    w = arrays(net)
    (channels, height, width), p, depth = net.shape, net.patch_size, len(net.blocks)
    rows, columns, dim = height // p, width // p, w["patch_in.weight"].shape[0]
    heads = net.blocks[0].heads

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    out = np.empty(z.shape)
    for b in range(len(z)):
        cond = linear(silu(linear(waves(1000 * t[b : b + 1], 256), "time.0")), "time.2")[0]
        cond = silu(cond + w["label.weight"][y[b]])
        place_row, place_column = waves(np.arange(rows), dim // 2), waves(np.arange(columns), dim // 2)
        x = np.empty((rows * columns, dim))
        for r in range(rows):
            for c in range(columns):
                patch = z[b, :, r * p : r * p + p, c * p : c * p + p].reshape(-1)
                place = np.concatenate([place_row[r], place_column[c]])
                np.testing.assert_allclose(net.place[r * columns + c].numpy(), place, atol=1e-6)
                # The network keeps its places in fp32, so its own are taken from here on.
                x[r * columns + c] = linear(patch, "patch_in") + net.place[r * columns + c].numpy()
        for i in range(depth):
            m = linear(cond, f"blocks.{i}.modulation").reshape(6, dim)
            a = linear(norm(x) * (1 + m[1]) + m[0], f"blocks.{i}.qkv")
            mixed = np.empty_like(x)
            for head in range(heads):
                part = slice(head * dim // heads, (head + 1) * dim // heads)
                q, k, v = a[:, :dim][:, part], a[:, dim : 2 * dim][:, part], a[:, 2 * dim :][:, part]
                score = np.exp(q @ k.T / math.sqrt(dim // heads))
                mixed[:, part] = score / score.sum(1, keepdims=True) @ v
            x = x + m[2] * linear(mixed, f"blocks.{i}.proj")
            h = linear(norm(x) * (1 + m[4]) + m[3], f"blocks.{i}.mlp.0")
            h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
            x = x + m[5] * linear(h, f"blocks.{i}.mlp.2")
        shift, scale = linear(cond, "modulation").reshape(2, dim)
        tokens = linear(norm(x) * (1 + scale) + shift, "patch_out")
        for r in range(rows):
            for c in range(columns):
                patch = tokens[r * columns + c].reshape(channels, p, p)
                out[b, :, r * p : r * p + p, c * p : c * p + p] = patch
    return out


def test_dit_is_its_formula():
    net = randomise(DiT((4, 6), 2, 2, width=16, depth=2, heads=4, classes=3))
    z, t, y = torch.randn(3, 2, 4, 6).double(), torch.rand(3).double(), torch.tensor([2, 0, 3])
    want = dit_reference(net, z.numpy(), t.numpy(), y.numpy())
    assert abs(want).max() > 0.1
    np.testing.assert_allclose(net(z, t, y).detach().numpy(), want, atol=1e-10)


def test_dit_patches_invert():
    net = DiT((4, 6), 3, 2, width=8, depth=1, heads=2)
    z = torch.randn(2, 3, 4, 6)
    torch.testing.assert_close(net.unpatchify(net.patchify(z)), z)


def test_dit_starts_as_the_identity():
    x, cond = torch.randn(2, 5, 16), torch.randn(2, 16)
    torch.testing.assert_close(DiTBlock(16, 4)(x, cond), x)
    net = DiT(4, 1, 2, 16, 1, 4, classes=3)
    assert net(torch.randn(2, 1, 4, 4), torch.tensor(0.3), torch.tensor([0, 1])).abs().max() == 0


def make(kind):
    if kind == "affine":
        return AffineVelocity(4).double(), torch.randn(3, 4).double(), ()
    if kind == "mlp":
        return MLPVelocity(4, classes=5).double(), torch.randn(3, 4).double(), (torch.tensor([0, 4, 5]),)
    net = randomise(DiT(4, 1, 2, 16, 2, 4, classes=5))
    return net, torch.randn(3, 1, 4, 4).double(), (torch.tensor([0, 4, 5]),)


@pytest.mark.parametrize("kind", ["affine", "mlp", "dit"])
def test_time_per_row_or_for_all(kind):
    net, z, cond = make(kind)
    t = torch.tensor([0.1, 0.5, 1.0]).double()
    whole = net(z, t, *cond)
    for i in range(3):
        row = net(z[i : i + 1], t[i], *(c[i : i + 1] for c in cond))
        torch.testing.assert_close(whole[i : i + 1], row, atol=1e-12, rtol=0)
    torch.testing.assert_close(net(z, t[1], *cond), net(z, t[1].expand(3), *cond), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["mlp", "dit"])
def test_no_class_is_the_last_row(kind):
    net, z, _ = make(kind)
    t, null = torch.tensor(0.5).double(), torch.full((3,), 5)
    torch.testing.assert_close(net(z, t), net(z, t, null), atol=1e-12, rtol=0)
    assert (net(z, t) - net(z, t, null - 1)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["affine", "mlp", "dit"])
def test_compiles_as_one_graph(kind):
    net, z, cond = make(kind)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    t = torch.rand(3).double()
    torch.testing.assert_close(compiled(z, t, *cond), net(z, t, *cond))


def test_sizes():
    with torch.device("meta"):
        count = {name: count_parameters(DiT.from_size(name, 8, 1, 2, 10)) for name in DIT_SIZES}
    assert 1e5 < count["tiny"] < 3e5
    assert count["tiny"] < count["mini"] < count["small"] < count["base"] < count["300M"]
    assert 2.9e8 < count["300M"] < 3.2e8
    assert DiT.from_size("tiny", 8, 1, 2, 10).null_class == 10


@given(t=st.lists(st.floats(0, 1), min_size=1, max_size=4), half=st.integers(1, 8))
@settings(deadline=None, max_examples=25)
def test_sinusoidal_embedding(t, half):
    t = np.array(t)
    got = sinusoidal_embedding(torch.from_numpy(t), 2 * half).numpy()
    np.testing.assert_allclose(got, waves(1000 * t, 2 * half), atol=1e-9)


def test_half_precision_time_is_embedded_in_fp32():
    t = torch.tensor([0.3, 0.7], dtype=torch.bfloat16)
    torch.testing.assert_close(sinusoidal_embedding(t, 8), sinusoidal_embedding(t.float(), 8))


def test_grid_embedding_tells_every_place_apart():
    places = grid_embedding(3, 5, 8)
    assert places.shape == (15, 8)
    assert torch.cdist(places, places).add(torch.eye(15)).min() > 0.1


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: AffineVelocity(()), "at least 1"),
        (lambda: AffineVelocity(3)(torch.zeros(2, 4), torch.tensor(0.0)), "takes"),
        (lambda: AffineVelocity(3)(torch.zeros(2, 3), torch.zeros(2, 1)), "one per row"),
        (lambda: MLPVelocity(3, depth=0), "at least 1"),
        (lambda: MLPVelocity(3, time_embedding="none"), "must be one of"),
        (lambda: MLPVelocity(3)(torch.zeros(2, 4), torch.tensor(0.0)), "takes"),
        (lambda: MLPVelocity(3)(torch.zeros(2, 3), torch.tensor(0.0), torch.zeros(2).long()), "classes=None"),
        (lambda: DiT(7, 1, 2, 8, 1, 2), "patch_size that divides"),
        (lambda: DiT(8, 1, 2, 8, 1, 3), "multiple of heads"),
        (lambda: DiT.from_size("huge", 8, 1, 2), "choose one of tiny"),
        (lambda: DiT(4, 1, 2, 8, 1, 2)(torch.zeros(2, 1, 4, 6), torch.tensor(0.0)), "this DiT takes"),
        (lambda: DiT(4, 1, 2, 8, 1, 2)(torch.zeros(2, 1, 4, 4), torch.zeros(2, 1)), r"\(\) or \(B,\)"),
        (
            lambda: DiT(4, 1, 2, 8, 1, 2)(torch.zeros(1, 1, 4, 4), torch.zeros(1), torch.zeros(1)),
            "classes=None",
        ),
        (lambda: DiT(4, 1, 2, 8, 1, 2).null_class, "no null class"),
        (lambda: sinusoidal_embedding(torch.zeros(1), 3), "even"),
        (lambda: grid_embedding(2, 2, 6), "multiple of 4"),
    ],
)
def test_wrong_input(make_it, message):
    with pytest.raises(ValueError, match=message):
        make_it()
