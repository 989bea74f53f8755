"""Does a test go red when the fix for its situation is taken out of the library?

    python -m tests.mutants            # every situation, C01 to C25 (about 15 minutes)
    python -m tests.mutants C07 C18    # only these

Each mutant is one edit in a copy of the sources, after which a test of its situation must fail there and pass in
a copy without the edit. Exit status 1 if one survives, or if its text is no longer in the library.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    tests: str  # of tests/cases, as for pytest -k: the case, and what of its tests must fail
    what: str  # what the edit breaks
    file: str
    old: str
    new: str


M = Mutant
GROUPS, BASE = "jagg_fx/estimators/groups.py", "jagg_fx/estimators/base.py"
GATES, PLAN = "jagg_fx/gates.py", "jagg_fx/plan.py"
TRANSFORM, MERGE, BRANCH, FIND = "jagg_fx/transform.py", "passes/merge.py", "passes/branch.py", "passes/find.py"
OUTLINE, SEGMENTS = "passes/outline.py", "passes/segments.py"

MUTANTS = [
    M("c01_ragged", "a ragged tail is dropped", PLAN,
      "for i in range(0, len(lane), W)]", "for i in range(0, len(lane) - W + 1, W)]"),
    M("c01_ragged", "a group of two is merged like a longer one", GROUPS,
      "return tuple(range(n)) if n <= 2 else (0, n - 1)", "return (0, n - 1)"),
    M("c02_a_bad", "a cotangent that is not finite leaves the gate open", BRANCH,
      "[x.isfinite().all() for x in g]", "[x.isfinite().all() | True for x in g]"),
    M("c02_a_nan", "a NaN cosine opens the gate", GATES,
      "return (stacked >= tau).all()", "return ~(stacked < tau).any()"),
    M("c02_without", "0 * inf enters the other endpoint", MERGE,
      "if isinstance(weight, float) and weight == 0.0:", "if weight is None:"),
    M("c03_times", "a gate does not look at the times", "passes/gate.py",
      "return good if order is None else good & order", "return good"),
    M("c03_equal and None", "without a gate the weights are not checked", "jagg_fx/_ops.py",
      "_demand(good, TimesError, what)", "pass"),
    M("c04_ratio", "the weights of a step do not add up to 1: a part of -A is lost", GROUPS,
      "[0.0, *inner, 1.0]]", "[0.0, *(0.5 * x for x in inner), 1.0]]"),
    M("c05_units", "integer times are divided in fp32", BASE, "else torch.float64) for t", "else torch.float32) for t"),
    M("c05_units", "times must rise", BASE, "span = wide[-1] - wide[0]", "span = (wide[-1] - wide[0]).abs()"),
    M("c06_other", "one weight for all rows", GATES,
      "return x.reshape(shape + (1,) * (like.ndim - len(shape)))", "return x.mean().reshape(())"),
    M("c07_guidance", "two calls at one time are consecutive steps", PLAN, "seen[network, call.time] += 1", "pass"),
    M("c07_guidance", "a time that is read twice is two times", FIND,
      "site, number[time], where", "site, index, where"),
    M("c08_reference_calls", "a call without gradient is a timestep", SEGMENTS,
      "return [s for s in found if any(carries_gradient(n) for n in s.outputs())]", "return found"),
    M("c09_the_whole", "only the first part of a summed cotangent is merged", MERGE,
      "own = [s.own_cotangents()[slot] for s in sites]",
      "own = [a.args[0] if a.target is torch.ops.aten.add.Tensor else a\n"
      "                   for a in (s.own_cotangents()[slot] for s in sites)]"),
    M("c10_reads", "the error of torch goes out as it is", TRANSFORM,
      "elif isinstance(error, _torch.capture_errors()):", "elif False:"),
    M("c10_reads", "the error has no cure", TRANSFORM,
      "compute it outside of the loss and pass \"\n        f\"it in. What", "so it is.\"\n        f\"What"),
    M("c11_slots", "a body does not know which of its inputs stands where", OUTLINE,
      'return _Text(f"${inputs.index(n)}")', 'return _Text("$")'),
    M("c12", "views of one buffer are one operand of a branch", BRANCH,
      "        if node not in self.nodes:\n            self.nodes.append(node)\n        return self.nodes.index(node)",
      "        at = [n.meta['val'].untyped_storage()._cdata for n in self.nodes]\n"
      "        mine = node.meta['val'].untyped_storage()._cdata\n"
      "        if mine not in at:\n            self.nodes.append(node)\n            at.append(mine)\n"
      "        return at.index(mine)"),
    M("c13_what", "a frozen parameter is asked for its gradient", TRANSFORM,
      "for n, p in first.named_parameters() if p.requires_grad}", "for n, p in first.named_parameters()}"),
    M("c13_with_a_shut", "every call of a gated group hands its gradient on", BRANCH,
      "            gradients.pop(index, None)", "            pass"),
    M("c14_mutated", "changes in place are not looked for", "passes/refuse.py",
      "_random(node) or _changes(node, foreign)", "_random(node)"),
    M("c15_random", "random numbers are not looked for", "passes/refuse.py", "reason = _random(node) or", "reason ="),
    M("c16_the_cache", "tau is no part of the cache's key", PLAN,
      "dataclasses.replace(self, estimator=None)", "dataclasses.replace(self, estimator=None, tau=0.0)"),
    M("c16_the_cache", "W is no part of the cache's key", PLAN,
      "dataclasses.replace(self, estimator=None)", "dataclasses.replace(self, estimator=None, W=4)"),
    M("c16_the_cache", "the estimator is no part of the cache's key", PLAN, "+ repr(self.estimator)", '+ ""'),
    M("c17_advantages", "whether a captured graph still fits is not checked", TRANSFORM,
      "with installed(self._marking()), self._limit():",
      "with installed(self._marking()), torch.compiler.set_stance(skip_guard_eval_unsafe=True):"),
    M("c17_a_new", "no more captures than torch allows by itself", TRANSFORM,
      "self._limit = _torch.many_captures", "raise"),
    M("c18", "what is saved for a backward is freed by it", "jagg_fx/_torch.py",
      "with _in_place_of(vars(module), name, lambda *args, **kwargs: []):", "with contextlib.nullcontext():"),
    M("c19", "a marked velocity is contiguous", "jagg_fx/_ops.py",
      'return torch.empty_like(v)\n\n\n@_define("jagg_fx::cot',
      'return torch.empty_like(v, memory_format=torch.contiguous_format)\n\n\n@_define("jagg_fx::cot'),
    M("c20_cotangents", "cotangents are summed in their own precision", MERGE,
      "torch.float64 if own.dtype == torch.float64 else torch.float32\n    total", "own.dtype\n    total"),
    M("c21_zero", "a cosine of zero velocities is 0/0", GATES, "(norms + 1e-8)", "norms"),
    M("c22_checkpoint_around", "a call inside of an operator is not found", SEGMENTS,
      'for arg in node.all_input_nodes if node.op == "call_function" else ():', "for arg in ():"),
    M("c23", "what a network returns is taken for a tensor", "jagg_fx/marking.py",
      "torch.ops.jagg_fx.end.default(t)", "torch.ops.jagg_fx.end.default(out)"),
    M("c24_a_true", "a chain is not looked for", FIND, "    _refuse_chains(joint)\n", ""),
    M("c25_old", "all but the first argument is data", TRANSFORM,
      "return (first, *args[1:])", "return (first, *pytree.tree_map(functorch.detached, args[1:]))"),
]  # fmt: skip


def copy_to(folder: Path, edit: Mutant | None = None) -> bool:
    """The sources, with one edit. Returns False if its text is not found (exactly once)."""
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("jagg_fx", "passes", "models", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in ("passes", "models"):  # installed, they are jagg_fx.passes and jagg_fx.models
        (folder / "jagg_fx" / name).symlink_to(folder / name)
    if edit is None:
        return True
    path = folder / edit.file
    text = path.read_text()
    path.write_text(text.replace(edit.old, edit.new))
    return text.count(edit.old) == 1


RUN = """
import sys, jagg_fx, jagg_fx.passes, pytest
here = sys.argv.pop(1)
assert jagg_fx.__file__.startswith(here) and jagg_fx.passes.__file__.startswith(here), jagg_fx.__file__
sys.exit(pytest.main(sys.argv[1:]))
"""


def run(folder: Path, *selection: str) -> tuple[int, str]:
    """Run tests in a copy. Returns pytest's exit status, and the first failing test or the end of the output."""
    env = {**os.environ, "PYTHONPATH": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    options = ["-x", "--tb=no", "--show-capture=no", "-rf", "-p", "no:cacheprovider", "-W", "ignore"]
    command = [sys.executable, "-c", RUN, str(folder), *selection, *options]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    failed = re.search(r"^FAILED (\S+(?: [^-]\S*)*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return done.returncode, failed[1] if failed else (done.stdout + done.stderr)[-300:]


def result(mutant: Mutant) -> str:
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        if not copy_to(Path(a), mutant):
            return "NOT APPLICABLE: its text is not (or not only once) in the file"
        status, test = run(Path(a), "tests/cases", "-k", mutant.tests)
        if status != 1:
            return f"SURVIVED ({status}) {test if status else ''}"
        copy_to(Path(b))
        status, _ = run(Path(b), test)
        name = test.rsplit("::", 1)[-1]
        return f"killed by {name}" if status == 0 else f"BROKEN: {name} fails without the edit too"


def main(cases: list[str]) -> int:
    bad = 0
    for mutant in MUTANTS:
        case = mutant.tests[:3].upper()
        if not cases or case in cases:
            found = result(mutant)
            bad += not found.startswith("killed")
            print(f"{case}  {mutant.what}: {found}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main([c.upper() for c in sys.argv[1:]]))
