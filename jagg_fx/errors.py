"""Every error and warning that jagg_fx raises on purpose.

Each text has three parts: what was found, why it cannot be done, and what to change.
"""

from __future__ import annotations

import sys
import warnings


class JaggError(RuntimeError):
    """Base class of all errors raised by jagg_fx."""


class OptionError(JaggError, ValueError):
    """An option has a value that it cannot take. Raised where the option is given, not at the first step."""


class CaptureError(JaggError):
    """The velocity calls of a loss could not be found, or the loss could not be captured as one graph."""


class RefusedError(JaggError):
    """The calls were found, but rewriting them would give a wrong gradient."""


class TimesError(JaggError):
    """The times of a group do not allow an interpolation: equal endpoints, or a step outside of them."""


class StaleError(JaggError):
    """Velocities that were handed in (`velocities=`) are not those of the current parameters."""


class VerifyError(JaggError):
    """A pass left a graph that breaks a rule of the rewrite: a bug in jagg_fx, caught before anything ran."""


class JaggWarning(UserWarning):
    """The transform works, but cannot help here, or does something that a user should know."""


_NOT_THE_USER = {"jagg_fx", "torch", "contextlib", "functools"}  # packages whose frames lie between


def warn(text: str) -> None:
    """Warn at the user's line: that of the innermost frame that is neither ours nor torch's, however deep we are.

    `skip_file_prefixes` of warnings.warn would do it from Python 3.12 on.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _between(frame.f_globals.get("__name__")):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, JaggWarning, stacklevel=level)


def _between(module: str | None) -> bool:
    """Whether a frame of this module is no user's; code that torch.fx generated has no module's name."""
    return module is None or module.split(".")[0] in _NOT_THE_USER
