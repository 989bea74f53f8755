"""Running a case through the library, the reference and ordinary autograd, and comparing."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import jagg_fx

from .losses import Case
from .reference import Reference, eager, reference, relative_error

EAGER = {"compiler": "eager"}  # the same rewritten graph, run without code generation


@dataclass
class Result:
    grads: dict[str, Tensor | None]
    loss: Tensor
    aux: Any = None


def run(case: Case, style: str = "params", entry: str = "grad_and_value", **options: Any) -> Result:
    """Gradient by parameter name, loss and aux of a case, through one entry of the library."""
    loss_fn = case.loss(style)
    options = {**EAGER, **case.options, **options}
    # a copy, so that .grad and the leaves of one run never reach another
    subject = case.trainable() if style == "params" else copy.deepcopy(case.net)
    named = subject if style == "params" else dict(subject.named_parameters())
    if entry == "backend":
        call = torch.compile(loss_fn, backend=jagg_fx.backend(**options), fullgraph=True)
        return _by_backward(call, subject, named, case)
    step = jagg_fx.transform(loss_fn, has_aux=case.has_aux, **options)
    if entry == "backward":
        return _by_backward(step, subject, named, case)
    if entry == "grad_and_value":
        grads, value = step.grad_and_value(subject, *case.args)
    elif entry == "func":
        assert style == "params", "torch.func differentiates a pytree of tensors"
        grads, value = torch.func.grad_and_value(step, has_aux=case.has_aux)(subject, *case.args)
    else:
        raise ValueError(entry)
    loss, aux = value if case.has_aux else (value, None)
    return Result(dict(grads), loss.detach(), aux)


def _by_backward(call: Any, subject: Any, named: Mapping[str, Tensor], case: Case) -> Result:
    try:
        out = call(subject, *case.args)
    except torch._dynamo.exc.BackendCompilerFailed as e:
        if isinstance(e.inner_exception, jagg_fx.JaggError):  # torch.compile wraps what a backend raises
            raise e.inner_exception from e
        raise
    loss, aux = out if case.has_aux else (out, None)
    loss.backward()
    return Result({k: p.grad for k, p in named.items()}, loss.detach(), aux)


def wanted(case: Case, **options: Any) -> Reference:
    """The reference for a case; takes the reference's own options."""
    return reference(case.core, case.function, case.trainable(), case.args, has_aux=case.has_aux, **options)


def exact(case: Case) -> Result:
    grads, loss, aux = eager(case.core, case.function, case.trainable(), case.args, has_aux=case.has_aux)
    return Result(grads, loss, aux)


def check(got: Result, want: Result | Reference, tol: float, loss_tol: float | None = None) -> None:
    """Same loss, same gradient, and a gradient exactly where there should be one."""
    for name, w in want.grads.items():
        g = got.grads.get(name)
        if w is None:
            # torch.func has no None: a parameter that is not read gets zeros there
            assert g is None or not bool(g.any()), f"{name} should get no gradient"
        else:
            assert g is not None, f"{name} lost its gradient"
            assert g.shape == w.shape
            assert g.dtype == w.dtype
    for name in got.grads.keys() - want.grads.keys():
        assert got.grads[name] is None, f"{name} does not train"
    error = relative_error(got.grads, want.grads)
    assert error <= tol, f"relative gradient error {error:.3g} > {tol:.3g}"
    allowed = (tol if loss_tol is None else loss_tol) * max(1.0, abs(float(want.loss)))
    assert abs(float(got.loss) - float(want.loss)) <= allowed, (float(got.loss), float(want.loss))
