"""Cheaper gradients for GRPO post-training of diffusion and flow models, by rewriting the training graph."""

from .backend import backend
from .errors import (
    CaptureError,
    JaggError,
    JaggWarning,
    OptionError,
    RefusedError,
    TimesError,
    VerifyError,
)
from .transform import Step, transform
from .marking import velocity

__all__ = [
    "CaptureError",
    "JaggError",
    "JaggWarning",
    "OptionError",
    "RefusedError",
    "Step",
    "TimesError",
    "VerifyError",
    "backend",
    "transform",
    "velocity",
]
