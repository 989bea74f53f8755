"""Velocities, and the mathematics of flows and GRPO around them. Knows nothing of graphs or estimators."""

from .affine import AffineVelocity
from .dit import DIT_SIZES, DiT, DiTBlock, DiTSize, count_parameters
from .embedding import grid_embedding, sinusoidal_embedding
from .flow import (
    flow_matching_loss,
    flow_matching_path_loss,
    interpolate,
    predict_data,
    predict_noise,
    velocity_target,
)
from .grpo import (
    clipped_ratio_loss,
    group_advantages,
    grpo_loss,
    kl_of_means,
    kl_of_velocities,
    make_functional_grpo_loss,
    make_grpo_loss,
)
from .lora import LoRALinear, add_lora
from .mlp import MLPVelocity
from .samplers import (
    CPS,
    ODE,
    SAMPLERS,
    DanceSDE,
    FlowSDE,
    Sampler,
    Step,
    Trajectory,
    gaussian_log_prob,
    rollout,
    shift_times,
    shifted_times,
    squared_log_prob,
    uniform_times,
)

__all__ = [
    "CPS",
    "DIT_SIZES",
    "ODE",
    "SAMPLERS",
    "AffineVelocity",
    "DanceSDE",
    "DiT",
    "DiTBlock",
    "DiTSize",
    "FlowSDE",
    "LoRALinear",
    "MLPVelocity",
    "Sampler",
    "Step",
    "Trajectory",
    "add_lora",
    "clipped_ratio_loss",
    "count_parameters",
    "flow_matching_loss",
    "flow_matching_path_loss",
    "gaussian_log_prob",
    "grid_embedding",
    "group_advantages",
    "grpo_loss",
    "interpolate",
    "kl_of_means",
    "kl_of_velocities",
    "make_functional_grpo_loss",
    "make_grpo_loss",
    "predict_data",
    "predict_noise",
    "rollout",
    "shift_times",
    "shifted_times",
    "sinusoidal_embedding",
    "squared_log_prob",
    "uniform_times",
    "velocity_target",
]
