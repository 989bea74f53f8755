"""Whether the gradients are right on a device: every contender against eager autograd, in fp32 and bf16.

    python -m bench.gpu_check                              a GPU
    python -m bench.gpu_check --device cpu --compiler eager --size tiny --image 8

Exact contenders must give the exact gradient, up to rounding. An estimate must be the estimate: that of ordinary eager
code (`bench/eager.py`) on the same network. Exits with 1 if one is not.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jagg_fx.models import DIT_SIZES
from torch import Tensor

import jagg_fx
from bench.demo_progress import bar
from bench.demo_report import markdown, save
from bench.step_contenders import Contender, Maker, Nets, chosen
from bench.step_measure import timed
from bench.step_problem import DTYPES, Problem, make

FAMILIES = "exact-unrolled,exact-steps,author,ours,open,shut,known,batched,group,recompute"

TOLERANCE = {"fp32": 1e-3, "bf16": 0.1}
"""|difference| / |gradient|. A GPU sums in another order than eager code on it; bf16 keeps two or three digits."""


def gradient(problem: Problem, contender: Contender) -> list[Tensor]:
    timed(problem, contender)
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in problem.trained]
    problem.clear()
    return found


def check(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each contender, dtype and kind of training."""
    rows = []
    cases = [(dtype, lora) for dtype in options.dtypes.split(",") for lora in (0, *([4] if options.lora else []))]
    names = chosen(options.contenders, [options.W], checkpoint=False)
    with bar("check gradients", len(cases) * len(names)) as progress:
        for dtype, lora in cases:
            torch._dynamo.reset()
            options.dtype, options.lora = dtype, lora
            problem = make(options)
            maker = Maker(problem, Nets(problem, options, lambda gm: None), options)
            exact = problem.reference()
            estimate = gradient(problem, maker.make("author-eager", options.W))
            for family, W in names:
                row = {"dtype": dtype, "lora": lora, "family": family, "error": None, "bound": TOLERANCE[dtype]}
                rows.append(row)
                try:
                    contender = maker.make(family, W)
                    timed(problem, contender)
                    row["error"], _ = problem.error(exact if contender.exact else estimate)
                    row["of_exact"], _ = problem.error(exact)
                    row["result"] = "right" if row["error"] <= row["bound"] else "WRONG"
                except Exception as failed:  # the others are checked all the same
                    missing = isinstance(failed, jagg_fx.OptionError)
                    text = (str(failed).splitlines() or [""])[0]
                    row["result"] = f"{'not there' if missing else 'FAILED'}: {type(failed).__name__}: {text:.90}"
                problem.clear()
                progress.update()
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [["", "dtype", "LoRA", "difference", "allowed", "error against exact", ""]]
    for r in rows:
        numbers = [f"{r[k]:.1e}" if r.get(k) is not None else "" for k in ("error", "bound", "of_exact")]
        lines.append([r["family"], r["dtype"], str(r["lora"]), *numbers, r["result"].replace("|", "/")])
    return markdown(lines)


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--device", default="cuda")
    p.add_argument("--size", choices=list(DIT_SIZES), default="tiny")
    p.add_argument("--image", type=int, default=32)
    p.add_argument("--patch", type=int, default=4)
    p.add_argument("--T", type=int, default=4)
    p.add_argument("--W", type=int, default=4)
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--dtypes", default=",".join(DTYPES))
    p.add_argument("--lora", action="store_true", help="with adapters on a frozen base too")
    p.add_argument("--contenders", default=FAMILIES)
    p.add_argument("--compiler", choices=["inductor", "eager"], default="inductor")
    p.add_argument("--mode", default="default")
    p.add_argument("--out", type=Path, help="folder for gpu-check.json and .md")
    options = p.parse_args(argv)
    options.checkpoint = False
    warnings.filterwarnings("ignore", category=jagg_fx.JaggWarning)
    name = torch.cuda.get_device_name() if torch.device(options.device).type == "cuda" else "CPU"
    rows = check(options)
    text = f"{name}, torch {torch.__version__}\n\n{table(rows)}\n"
    print(text)
    if options.out:
        save(options.out, "gpu-check", rows, text)
    sys.exit(any(r["result"].startswith(("WRONG", "FAILED")) for r in rows))


if __name__ == "__main__":
    main()
