"""What torch works out of a body is worked out once, whatever T is; and the hooks for that are put back."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import jagg_fx
from jagg_fx import _torch

from .losses import MLP

INVOKE = _torch.invoke_subgraph
FAKES = torch._higher_order_ops.utils.registered_hop_fake_fns


def captured(T: int) -> tuple[int, int]:
    """How often the schema and the shapes of a body were worked out in a capture of T calls."""
    net, zs, ts = MLP(3, 4), torch.randn(T, 2, 3), torch.linspace(0.9, 0.1, T)

    def loss(net, zs, ts):
        return sum((net(zs[k], ts[k]) ** 2).mean() for k in range(T))

    schemas, shapes = mock.Mock(), mock.Mock()
    kind, fake = type(INVOKE), FAKES[INVOKE]
    original = kind.gen_schema
    with (
        mock.patch.object(kind, "gen_schema", lambda *args: (schemas(), original(*args))[1]),
        mock.patch.dict(FAKES, {INVOKE: lambda *args: (shapes(), fake(*args))[1]}),
    ):
        jagg_fx.transform(loss, W=4, gate=None, compiler="eager")(net, zs, ts).backward()
    return schemas.call_count, shapes.call_count


def test_once_whatever_T_is() -> None:
    few = captured(4)
    assert captured(12) == few
    assert min(few) > 0


def fail() -> None:
    with _torch._compile_context():
        assert "gen_schema" in vars(INVOKE)
        raise ZeroDivisionError


def test_hooks_are_put_back() -> None:
    before = FAKES[INVOKE]
    with pytest.raises(ZeroDivisionError):
        fail()
    assert FAKES[INVOKE] is before
    assert "gen_schema" not in vars(INVOKE)


def test_shared_memory_is_left_to_torch() -> None:
    with FakeTensorMode():
        a, b = torch.empty(2, 3), torch.empty(3)
        assert _torch._made_again((a[0], b), [a, b]) is None  # a view of an operand
        assert _torch._made_again((b, b[:1]), [a]) is None  # two of one memory
        assert _torch._made_again(a, [b]) is None
        again = _torch._made_again((a.t(), None, b), [torch.empty(1)])()
        assert [None if x is None else (x.shape, x.stride()) for x in again] == [((3, 2), (1, 3)), None, ((3,), (1,))]
        assert again[0].untyped_storage()._cdata != a.untyped_storage()._cdata
