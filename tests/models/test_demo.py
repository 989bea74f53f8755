"""The parts of the demo that can be wrong quietly: options, comparisons, the table. `--quick` runs it whole."""

import json

import pytest
import torch
from jagg_fx.models import DiT, FlowSDE, make_grpo_loss, uniform_times

from bench.data import Images
from bench.demo import QUICK, main, parse
from bench.demo_measure import Agreement, RandomSteps, agreement, best_threads
from bench.demo_report import Arm, markdown, rows, write
from bench.demo_train import CHECK_EVERY, Run, Score, Task, post_train, pretrain
from tests.models.test_data import random_bytes

SHAPE = (1, 8, 8)


class Likes(torch.nn.Module):
    """A classifier that always answers `choice`."""

    def __init__(self, choice):
        super().__init__()
        self.choice = choice

    def forward(self, x):
        return torch.full((len(x), 3), -50.0).index_fill(1, torch.tensor(self.choice), 50.0)


def task(reward=0, judge=1, T=4):
    return Task(SHAPE, 3, Likes(reward), Likes(judge), FlowSDE(), uniform_times(T), batch=6, group=3)


def net():
    torch.manual_seed(0)
    made = DiT(8, 1, 4, 16, 1, 4, classes=3)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return made


def test_score_counts_the_requested_class():
    score = task().score(net(), 6)
    assert score.reward == pytest.approx(1 / 3)
    assert score.judge == pytest.approx(1 / 3)
    assert score.samples.shape == (6, *SHAPE)
    assert torch.equal(score.samples, task().score(net(), 6).samples)


def test_a_drawn_batch_is_on_policy_and_grouped():
    made = net()
    batch, reward = task().draw(made, torch.Generator().manual_seed(1))
    states, sigmas, log_probs, advantages, y = batch
    assert states.shape == (5, 6, *SHAPE)
    assert torch.equal(y.reshape(2, 3), y.reshape(2, 3)[:, :1].expand(2, 3))
    assert reward == pytest.approx((y == 0).float().mean().item())
    ratio = make_grpo_loss(FlowSDE(), 1e-3)(made, states, sigmas, log_probs, torch.ones(6), y)
    assert ratio.item() == pytest.approx(-1, abs=1e-4)
    assert advantages.abs().max() < 1e-3


def test_agreement_of_the_exact_gradient_and_of_half_of_it():
    made = net()
    batch, _ = task().draw(made, torch.Generator().manual_seed(1))
    batch = (*batch[:3], torch.randn(6), batch[4])
    exact = make_grpo_loss(FlowSDE(), 1e-3)
    others = {"same": exact, "half": lambda *a: exact(*a) / 2, "against": lambda *a: -exact(*a)}
    found = agreement(exact, others, made, [batch, batch], "")
    assert found["same"] == pytest.approx((1, 0))
    assert found["half"] == pytest.approx((1, 0.5))
    assert found["against"] == pytest.approx((-1, 2))


def test_random_steps_average_to_the_loss():
    made = net()
    batch, _ = task().draw(made, torch.Generator().manual_seed(1))
    batch = (*batch[:2], batch[2] - torch.tensor([0.0, 0.1, 0.2, 0.3])[:, None], torch.ones(6), batch[4])
    options = {"sampler": FlowSDE(), "clip_range": 10.0}
    want = make_grpo_loss(**options)(made, *batch).item()
    subset = RandomSteps(4, 2, seed=0, **options)
    values = [subset(made, *batch).item() for _ in range(200)]
    assert len({round(v, 5) for v in values}) == 6
    assert sum(values) / 200 == pytest.approx(want, abs=0.02)


def test_threads_are_tried_and_nothing_is_left_behind():
    before, made = torch.get_num_threads(), net()
    try:
        images = Images(torch.randn(20, *SHAPE), torch.arange(20) % 3, 3)
        assert best_threads(made, images, 4, rounds=1) in {1, before}
        assert all(p.grad is None for p in made.parameters())
    finally:
        torch.set_num_threads(before)


def test_pretraining_stops_at_the_reward():
    images = Images(torch.randn(20, *SHAPE), torch.arange(20) % 3, 3)
    options = {"batch": 4, "seed": 0, "eval_samples": 3}
    assert pretrain(net(), images, task(), stop_at=0.3, steps=150, **options) == CHECK_EVERY
    assert pretrain(net(), images, task(), stop_at=0.4, steps=60, **options) == 60


def test_arms_learn_in_turn_without_touching_each_other():
    start = net().state_dict()
    exact = make_grpo_loss(FlowSDE(), 1e-3)
    options = {"lr": 1e-2, "seed": 3, "eval_every": 2, "eval_samples": 3, "title": ""}
    uneven = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    uneven_task = Task(SHAPE, 3, uneven, Likes(1), FlowSDE(), uniform_times(4), batch=6, group=3)
    alone = post_train(net(), start, {"a": (exact, 3)}, uneven_task, **options)["a"]
    beside = {"a": (exact, 3), "b": (lambda *x: 2 * exact(*x), 5), "c": (exact, 3)}
    runs = post_train(net(), start, beside, uneven_task, **options)
    for name in ("a", "c"):
        assert runs[name].rewards == alone.rewards
        assert all(torch.equal(runs[name].weights[key], alone.weights[key]) for key in start)
    assert [step for step, _ in runs["a"].scores] == [2, 3]
    assert [step for step, _ in runs["b"].scores] == [2, 4, 5]
    assert len(runs["b"].step_seconds) == len(runs["b"].gradient_seconds) == 5
    assert any((alone.weights[key] != start[key]).any() for key in start)


def measured():
    samples = torch.rand(30, *SHAPE) * 2 - 1
    run = Run([0.5, 0.6], [0.1, 0.1], [0.2, 0.2], [], [(1, Score(0.6, 0.7, samples)), (2, Score(0.8, 0.9, samples))])
    shut = Run([0.5], [0.1], [0.2], [0.75], [(1, Score(0.5, 0.6, samples))])
    return [
        Arm("eager", "exact, eager", seconds=[2.0, 9.0, 2.0]),
        Arm("exact", "exact, compiled", [run], Agreement(1, 0), seconds=[3.0], saved_bytes=4 * 2**20),
        Arm("jagg", "JAGG", [run, run], Agreement(0.99, 0.1), seconds=[1.0], saved_bytes=2**20, compile_seconds=61.2),
        Arm("gated", "gated", [shut], seconds=[4.0], saved_bytes=2**20),
    ], Score(0.4, 0.5, samples)


def test_table():
    arms, start = measured()
    table = {row[0]: row[1:] for row in rows(arms, start)}
    assert table["reward"] == ["–", "0.400 → 0.800", "0.400 → 0.800", "0.400 → 0.500"]
    assert table["judge's accuracy"][1] == "50.0% → 90.0%"
    assert table["gradient cosine, start"] == ["–", "1.0000", "0.9900", "–"]
    assert table["groups that fell back"] == ["–", "–", "–", "75%"]
    assert table["loss + backward, median"] == ["2.000 s", "3.000 s", "1.000 s", "4.000 s"]
    assert table["speed against the fastest exact"] == ["1.00x", "0.67x", "2.00x", "0.50x"]
    assert table["saved activations against exact"] == ["–", "1.00", "0.25", "0.25"]
    assert table["compilation"][2] == "61 s"
    assert len({len(line) for line in markdown(rows(arms, start)).splitlines()}) == 1


def test_files(tmp_path):
    arms, start = measured()
    text = write(tmp_path / "new", arms, start, {"classes": 10}, ["a note"], {"data": 1.0})
    assert text == (tmp_path / "new/results.md").read_text(encoding="utf-8")
    assert "a note" in text
    content = json.loads((tmp_path / "new/results.json").read_text())
    assert content["arms"]["jagg"]["final_reward"] == pytest.approx(0.8)
    assert content["arms"]["gated"]["fallback_share"] == 0.75
    for name in ("reward.png", "samples.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")


def test_quick_changes_defaults_only():
    options = parse(["--quick", "--steps", "7"])
    assert options.steps == 7
    assert QUICK["T"] == options.T
    assert options.compiler == "eager"
    assert parse([]).compiler == "inductor"
    assert parse(["--gate", "none"]).gate is None
    assert parse(["--steps", "30"]).gated_steps == 10
    assert parse(["--data", "cifar10"]).patch_size == 4


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "cifar10", "--data-dir", "nowhere"], "data_batch_1"),
        (["--W", "0"], "W=0"),
        (["--gate", "sine"], "sine"),
        (["--estimator", "guess"], "guess"),
        (["--eta", "0"], "eta"),
        (["--patch-size", "3"], "patch_size"),
        (["--steps", "0"], "at least 1"),
        (["--batch", "12"], "multiple of --group"),
        (["--eval-samples", "3"], "--eval-samples"),
        (["--data", "mnist"], "invalid choice"),
    ],
)
def test_wrong_options_end_with_a_message(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_fashion_mnist_is_read_from_the_folder_given(tmp_path, capsys):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(random_bytes(10).tobytes())
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"")
    with pytest.raises(SystemExit):
        main(["--data", "fashion-mnist", "--data-dir", str(tmp_path)])
    assert "not an idx file" in capsys.readouterr().err
