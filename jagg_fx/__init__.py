"""Cheaper gradients for GRPO post-training of diffusion and flow models, by rewriting the training graph."""

from .backend import backend
from .velocity import velocity

__all__ = ["backend", "velocity"]
