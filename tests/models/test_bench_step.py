"""`bench.step`: its contenders compute what they say, its bound and table follow from its numbers."""

import argparse
import copy
import json

import pytest
import torch
from jagg_fx.models import (
    DIT_SIZES,
    DiTSize,
    LoRALinear,
    MLPVelocity,
    add_lora,
    group_advantages,
    rollout,
    uniform_times,
)

import jagg_fx
from bench import gpu_check, gpu_train, step
from bench.step_contenders import FAMILIES, Cost, Maker, Nets, chosen
from bench.step_measure import PassClock, Saved, Watch, peak_bytes, timed, units
from bench.step_problem import SAMPLER, Problem, checkpointed, make
from bench.step_report import Results, figures, growth, table, text

T, B, W = 4, 3, 4
TINY = ["--size", "micro", "--image", "8", "--T", "4", "--compiler", "eager", "--threads", "1"]


@pytest.fixture(autouse=True)
def _micro(monkeypatch):
    monkeypatch.setitem(DIT_SIZES, "micro", DiTSize(8, 1, 2))


def small():
    """A problem with a network that is captured in a second."""
    net = MLPVelocity(6, 16, 1, classes=3)
    sigmas, y = uniform_times(T), torch.ones(B, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    path = rollout(net, torch.randn(B, 6), sigmas, y, sampler=SAMPLER, generator=generator, keep_velocities=True)
    batch = (path.states, sigmas, path.log_probs, group_advantages(torch.randn(B), B), y)
    return Problem(net, batch, list(path.velocities))


SAVINGS = ("known", "batched", "known-batched", "group", "recompute")


def run_all(families):
    """Errors and saved bytes by family; each run of an unbroken loss, and exact where it says so."""
    problem, options = small(), argparse.Namespace(compiler="eager", mode="default")
    reference, clock = problem.reference(), PassClock()
    maker = Maker(problem, Nets(problem, options, clock.count), options)
    want = problem.loss(problem.net, *problem.batch).item()
    errors, saved = {}, {}
    for family, width in chosen(",".join(families), [W], checkpoint=True):
        try:
            contender = maker.make(family, width)
            with clock.running():
                found = timed(problem, contender)
        except (jagg_fx.OptionError, jagg_fx.CaptureError):
            assert family in SAVINGS
            continue
        errors[family], cosine = problem.error(reference)
        assert contender.key == (family if width is None else f"{family}-W4")
        assert (errors[family] < 1e-5) == contender.exact, family
        assert abs(cosine) < 1.001
        assert ("backward_seconds" in found) == contender.apart
        watching = Saved(problem)
        problem.clear()
        with watching.watching():
            loss = contender.run(Watch(problem.device))
        if not family.startswith("half"):
            assert loss.item() == pytest.approx(want, rel=1e-5)
        del loss
        problem.clear()
        saved[family] = watching.peak
        assert watching._now == 0
    assert not clock.after or clock.passes > 0 < clock.verifier
    return errors, saved


@pytest.mark.filterwarnings("ignore::jagg_fx.JaggWarning")
def test_contenders():
    names = ["unrolled-eager", "steps", "steps-eager"]
    errors, saved = run_all([*(f"exact-{n}" for n in names), "author", "author-eager", "ours", "half", "half-eager"])
    assert errors["author"] == pytest.approx(errors["ours"], rel=1e-3)  # one estimate, whoever computes it
    assert errors["author-eager"] == pytest.approx(errors["ours"], rel=1e-3)
    assert saved["exact-steps-eager"] * T == pytest.approx(saved["exact-unrolled-eager"], rel=0.2)
    assert saved["ours"] < 0.8 * saved["exact-unrolled-eager"]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::jagg_fx.JaggWarning")
def test_savings_and_gates():
    errors, _ = run_all(["exact-unrolled", "exact-batched", "author-eager", "open", "open-head", "shut", *SAVINGS])
    for family in errors.keys() - {"exact-unrolled", "exact-batched", "shut"}:
        assert errors[family] == pytest.approx(errors["author-eager"], rel=1e-3)


def test_the_clock_leaves_nothing_changed():
    before = jagg_fx.passes.verify
    with PassClock().running():
        assert jagg_fx.passes.verify is not before
    assert jagg_fx.passes.verify is before


def test_choosing_contenders():
    assert chosen("ours,exact-steps,ours-W2", [4, 8], False) == [
        ("ours", 4), ("ours", 8), ("exact-steps", None), ("ours", 2)]  # fmt: skip
    assert ("exact-flat", None) not in chosen(None, [4], False)
    assert ("exact-checkpoint", None) not in chosen(None, [4], True)
    for wrong in ("our", "ours-Wx", "exact-steps-W4"):
        with pytest.raises(ValueError, match="no contender"):
            chosen(wrong, [4], False)


def options_of(*more):
    return step.parse([*TINY, *more])


def test_checkpointed_twin_shares_its_weights():
    problem = make(options_of("--batch", "1"))
    reference = problem.reference()
    assert all(g.abs().max() > 0 for g in reference[:4])  # nothing hides behind a zero layer
    maker = Maker(problem, Nets(problem, options_of(), lambda gm: None), options_of())
    contender = maker.make("exact-checkpoint-eager", None)
    timed(problem, contender)
    assert contender.cost == Cost(4, 4, 4)
    assert problem.error(reference)[0] < 1e-5
    assert peak_bytes(problem, contender) > 0
    twin = checkpointed(problem.net)
    assert [id(p) for p in twin.parameters()] == [id(p) for p in problem.net.parameters()]


def test_lora():
    torch.manual_seed(0)
    net = MLPVelocity(6, 16, 1)
    z, t = torch.randn(B, 6), torch.tensor(0.5)
    before = net(z, t)
    add_lora(net, rank=2, alpha=4)
    torch.testing.assert_close(net(z, t), before)
    layer = next(m for m in net.modules() if isinstance(m, LoRALinear))
    with torch.no_grad():
        layer.up.weight.normal_()
    x = torch.randn(B, layer.down.in_features)
    merged = layer.base.weight + 2 * layer.up.weight @ layer.down.weight
    torch.testing.assert_close(layer(x), x @ merged.T + layer.base.bias)
    assert {n.rsplit(".", 2)[-2] for n, p in net.named_parameters() if p.requires_grad} == {"down", "up"}
    with pytest.raises(ValueError, match="rank"):
        add_lora(MLPVelocity(6, 16, 1), 0)
    problem = make(options_of("--lora", "2", "--dtype", "bf16", "--checkpoint"))
    found = units(problem, problem.net, 1)
    assert found.keys() == {"forward", "saving", "backward", "accumulating"}
    assert all(p.grad is None for p in problem.net.parameters())
    problem.loss(problem.net, *problem.batch).backward()
    assert 0 < problem.error(problem.reference())[0] < 0.3  # of rounding to bf16


def entry(family, width, cost, seconds, **more):
    title = FAMILIES[family][0] + (f", W={width}" if width else "")
    numbers = dict.fromkeys(("nodes_before", "nodes_after", "saved_bytes", "peak_bytes", "compile_seconds"))
    numbers |= {"pass_seconds": 0.5, "verifier_seconds": 0.25, "error": 0.1, "cosine": 0.9}
    key = f"{family}-W{width}" if width else family
    return {"key": key, "family": family, "W": width, "title": title, "cost": cost, "seconds": seconds,
            "cpu_seconds": seconds, "backward_seconds": [s / 2 for s in seconds], "exact": False, "note": "",
            **numbers, **more}  # fmt: skip


def content():
    def unit(*seconds):
        return {n: [s, s, s] for n, s in zip(("forward", "saving", "backward", "accumulating"), seconds, strict=True)}

    settings = {"name": "step-x", "size": "tiny", "image": 8, "patch": 4, "T": 8, "batch": 2, "dtype": "fp32",
                "lora": 0, "checkpoint": False, "device": "cpu", "threads": 1, "compiler": "eager", "mode": "default",
                "cold": True}  # fmt: skip
    machine = {"name": "a machine", "cores": 2, "torch": "2", "load_before": 0.0, "load_after": 0.0}
    return {
        "command": "python -m bench.step",
        "settings": settings,
        "machine": machine,
        "parameters": 1000,
        "trained": 1000,
        "units": {"eager": unit(2.0, 2.0, 4.0, 4.0), "compiled": unit(1.0, 1.0, 2.0, 3.0)},
        "contenders": [
            entry("exact-unrolled", None, [0, 8, 8], [60.0, 40.0, 50.0], saved_bytes=800, compile_seconds=10.0),
            entry("exact-steps-eager", None, [0, 8, 8], [40.0, 30.0, 38.0]),
            entry("ours", 4, [4, 4, 4], [20.0, 15.0, 19.0], saved_bytes=400, nodes_before=9, nodes_after=5),
            entry("batched", 4, None, [], note="not run: OptionError: batched= is not | an option"),
        ],
    }


def test_bound():
    r = Results(content())
    assert r.bound([0, 8, 8]) == 8 * 1 + 2 + 7 * 3  # the compiled network is the faster
    assert r.bound([4, 4, 4]) == 4 + 4 + 2 + 3 * 3
    assert r.bound([3, 0, 0]) == 3
    found = {name: row[4] for name, row in figures(r)}
    assert found["exact / ours"] == 38 / 19
    assert found["the same of the bounds"] == 31 / 19
    assert found["ours / its bound"] == 1
    assert found["backward alone, exact / ours"] == 2
    assert found["saved activations, ours / exact unrolled"] == 0.5
    assert found["seconds of passes and verifier"] == 0.75
    assert "gate open / no gate" not in found


def test_table_from_a_file(tmp_path):
    path = tmp_path / "step-x.json"
    path.write_text(json.dumps(content()))
    step.main(["--remake", str(path)])
    made = (tmp_path / "step-x.md").read_text()
    assert (tmp_path / "step-x.png").stat().st_size > 1000
    assert made == text(Results.read(path), "python -m bench.step")
    rows = {
        line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]]
        for line in made.splitlines()
        if "|" in line
    }
    assert rows["ours, no gate, W=4"][:5] == ["19 s", "2.00x", "2.63x", EMPTY, "1.00"]
    assert rows["ours, batched calls, W=4"][0] == "not run"
    assert "batched= is not" in made
    assert len({line.count("|") for line in table(Results.read(path)).splitlines()}) == 1


EMPTY = "–"


def test_growth(tmp_path):
    longer = copy.deepcopy(content())
    longer["settings"]["T"] = 16
    longer["contenders"][0]["compile_seconds"] = 25.0
    made = growth(Results(content()), Results(longer))
    assert "T 8 → 16" in made
    assert "2.50" in made


def test_a_whole_run(tmp_path, monkeypatch):
    monkeypatch.setattr(step, "make", lambda options: small())
    step.main([*TINY, "--contenders", "exact-steps-eager,ours", "--rounds", "1", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    r = Results.read(path)
    assert path.stem == "step-micro-8px-T4-B2-fp32-cpu"
    exact, ours = r.entries
    assert exact["error"] < 1e-5 < ours["error"] < 1
    assert not exact["note"]
    assert not ours["note"]
    assert ours["nodes_before"] > 0 < ours["nodes_after"]
    assert ours["compile_seconds"] > ours["pass_seconds"] > 0
    assert r.over_bound(ours) > 0
    assert (tmp_path / f"{path.stem}.md").exists()
    assert (tmp_path / f"{path.stem}.png").exists()


def test_peak_of_one_contender(capsys):
    step.main([*TINY, "--peak", "exact-steps-eager"])
    assert int(capsys.readouterr().out.removeprefix(step.PEAK)) > 0


@pytest.mark.parametrize("wrong", [["--contenders", "nobody"], ["--T", "1"], ["--W", "0"]])
def test_wrong_options(wrong, capsys):
    with pytest.raises(SystemExit):
        step.main([*TINY, *wrong])
    assert "error" in capsys.readouterr().err


def test_gpu_check_tells_right_from_wrong(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_check, "make", lambda options: small())
    argv = ["--device", "cpu", "--compiler", "eager", "--dtypes", "fp32", "--contenders", "exact-steps-eager,author"]
    with pytest.raises(SystemExit) as end:
        gpu_check.main([*argv, "--out", str(tmp_path)])
    assert not end.value.code
    assert capsys.readouterr().out.count("right") == 2
    assert [row["result"] for row in json.loads((tmp_path / "gpu-check.json").read_text())] == ["right", "right"]
    monkeypatch.setitem(gpu_check.TOLERANCE, "fp32", -1.0)
    with pytest.raises(SystemExit) as end:
        gpu_check.main([*argv[:-1], "exact-steps-eager"])
    assert end.value.code


def test_gpu_train_steps(tmp_path):
    options = options_of("--batch", "4")
    options.group, options.lr, options.steps, options.seconds = 2, 1e-3, 2, 60.0
    problem = make(options)
    maker = Maker(problem, Nets(problem, options, lambda gm: None), options)
    maker.nets._made["compiled"] = problem.net  # a capture would only take time
    wanted = gpu_train.colours(10, problem.device)
    contender, _ = gpu_train.first_step(options, maker, "exact-steps", wanted)
    before = [p.detach().clone() for p in problem.trained]
    found = gpu_train.train(options, maker, contender, wanted, until=float("inf"))
    assert len(found["rewards"]) == len(found["step_seconds"]) == 2
    assert all(r < 0 for r in found["rewards"])
    assert all(not torch.equal(a, b) for a, b in zip(before[:4], problem.trained, strict=False))
    runs = [{"family": name, "compile_seconds": 1.0, **found} for name in gpu_train.ARMS]
    assert f"{found['rewards'][-1]:.4f}" in gpu_train.summary(runs)
