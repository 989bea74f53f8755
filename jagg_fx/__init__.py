"""Cheaper gradients for GRPO post-training of diffusion and flow models, by rewriting the training graph."""

from .backend import backend
from .errors import (
    CaptureError,
    JaggError,
    JaggWarning,
    OptionError,
    RefusedError,
    StaleError,
    TimesError,
    VerifyError,
)
from .marking import velocity
from .report import Report, explain
from .transform import Step, transform

__all__ = [
    "CaptureError",
    "JaggError",
    "JaggWarning",
    "OptionError",
    "RefusedError",
    "Report",
    "StaleError",
    "Step",
    "TimesError",
    "VerifyError",
    "backend",
    "explain",
    "transform",
    "velocity",
]
