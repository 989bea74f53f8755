"""The picture of the README: the graph of a loss before and after the rewrite. `python -m bench.picture`."""

from __future__ import annotations

import argparse

import torch
from jagg_fx.models import MLPVelocity

import jagg_fx
from jagg_fx.draw import draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="docs/graph.png", help="where to write the picture (default: %(default)s)")
    parser.add_argument("--T", type=int, default=8, help="timesteps (default: %(default)s)")
    parser.add_argument("--W", type=int, default=4, help="timesteps per group (default: %(default)s)")
    options = parser.parse_args()
    net = MLPVelocity(4, hidden=16, depth=1)

    def loss_fn(net, zs, ts):
        return sum((net(zs[k], ts[k]) ** 2).mean() for k in range(options.T))

    zs, ts = torch.randn(options.T, 2, 4), torch.linspace(0.9, 0.1, options.T)
    report = jagg_fx.explain(loss_fn, net, zs, ts, W=options.W, gate=None)
    print(report)
    draw(report, options.out)
    print(f"\nwrote {options.out}")


if __name__ == "__main__":
    main()
