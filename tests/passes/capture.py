"""Joint graphs of a small loss, for tests of single passes."""

from __future__ import annotations

import torch
from torch import fx, nn

from jagg_fx import _torch
from jagg_fx.backend import Backend
from jagg_fx.options import check


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 4)

    def forward(self, z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        t = t.expand(z.shape[0]).unsqueeze(-1)
        return self.b(torch.nn.functional.silu(self.a(torch.cat([z, t], -1))))


def loss_fn(net: nn.Module, zs: torch.Tensor, ts: torch.Tensor) -> torch.Tensor:
    return sum(((net(zs[k], ts[k]) - zs[k]) ** 2).mean() for k in range(zs.shape[0]))  # type: ignore[return-value]


def example(T: int = 6, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Net().to(dtype), torch.randn(T, 3, 4, dtype=dtype), torch.linspace(0.9, 0.1, T, dtype=dtype)


class _Seen(Exception):
    pass


def forward_graph(loss=loss_fn, *args) -> fx.GraphModule:
    """The graph that Dynamo captures."""
    seen: list[fx.GraphModule] = []

    def backend(gm, inputs):
        seen.append(gm)
        raise _Seen

    torch._dynamo.reset()
    try:
        torch.compile(loss, backend=backend, fullgraph=True)(*(args or example()))
    except Exception as error:
        if not isinstance(_torch.unwrap_backend_error(error), _Seen):
            raise
    return seen[0]


def joint_graph(loss=loss_fn, *args, **options) -> fx.GraphModule:
    """The joint graph with our markers, as the passes get it."""
    seen: list[fx.GraphModule] = []

    class Catch(Backend):
        def _compile(self, gm, inputs, plan):
            _torch.compile_eager(gm, inputs, lambda joint: None, lambda joint, *_: seen.append(joint))
            raise _Seen

    torch._dynamo.reset()
    try:
        backend = Catch(check(**{"compiler": "eager", **options}))
        torch.compile(loss, backend=backend, fullgraph=True)(*(args or example()))
    except Exception as error:
        if not isinstance(_torch.unwrap_backend_error(error), _Seen):
            raise
    return seen[-1]  # the bodies of the calls come first
