"""The run that finds the velocity leaves no trace in what the loss keeps beside it."""

from __future__ import annotations

import functools
from collections import defaultdict

import torch

from jagg_fx.discover import discover

from .losses import MLP, linear, simple_case

COUNT = 0
TABLE = defaultdict(list)


class Trainer:
    def __init__(self):
        self.steps, self.last = 0, {}

    def loss(self, net, *args):
        self.steps += 1
        self.last["loss"] = terms(net, *args).detach()
        return terms(net, *args)


def terms(net, zs, ts, cs):
    return linear(lambda *a: net(*a), zs, ts, cs)


def test_the_run_without_data_leaves_no_trace() -> None:
    case = simple_case(linear, T=4)
    log, calls, seen = [1.0], 0, torch.zeros(1)

    def closed(net, *args):
        nonlocal calls
        global COUNT
        calls, COUNT = calls + 1, COUNT + 1
        loss = terms(net, *args)
        log.append(loss.detach())
        TABLE["loss"].append(loss.detach())
        seen.add_(1)
        return loss

    assert discover(closed, (case.net, *case.args), {}) == (case.net,)
    assert (log, calls, COUNT, dict(TABLE), seen.item()) == ([1.0], 0, 0, {}, 0.0)

    trainer = Trainer()
    assert discover(functools.partial(trainer.loss), (case.net, *case.args), {}) == (case.net,)
    assert (trainer.steps, trainer.last) == (0, {})


def test_a_network_that_keeps_what_it_saw_keeps_no_tensor_without_data() -> None:
    class Keeps(MLP):
        def forward(self, z, t):
            self.kept = super().forward(z, t)
            return self.kept

    case = simple_case(linear, T=4)
    net = Keeps(4).double()
    assert discover(terms, (net, *case.args), {}) == (net,)
    assert not hasattr(net, "kept")
