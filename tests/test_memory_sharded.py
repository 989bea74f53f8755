"""The memory of sharded parameters is sharded like them, and holds the same numbers: two processes, gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from jagg_fx.memory import BiasMemory

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this build of torch has no gloo"
)


def _rank(rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    mesh, g = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(0)
    plain, sharded = BiasMemory(0.5), BiasMemory(0.5)
    for i in range(6):
        c = [torch.randn(4, 3, generator=g) + 1, torch.randn(5, generator=g)]
        if i == 2:
            c[0][3, 1] = float("inf")  # on one rank alone: both must leave the memory as it is
        plain.update(c)
        sharded.update([distribute_tensor(c[0], mesh, [Shard(0)]), distribute_tensor(c[1], mesh, [Replicate()])])
    restored = BiasMemory(0.5)
    restored.load_state_dict(sharded.state_dict())
    want = plain.value()
    for memory in (sharded, restored):
        got = memory.value()
        assert got[0].placements == (Shard(0),)
        assert got[0].to_local().shape == (2, 3)
        assert got[1].placements == (Replicate(),)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.full_tensor(), b)
        assert memory.counters() == pytest.approx(plain.counters(), rel=1e-5)
    assert want[0].norm() > 0
    dist.destroy_process_group()


def test_sharded_like_the_parameters(tmp_path: Path) -> None:
    mp.spawn(_rank, (str(tmp_path / "meeting"),), nprocs=2)  # raises what a process raised
