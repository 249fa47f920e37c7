"""ep_comm: expert-parallel communication for Mixture-of-Experts models on PyTorch.

``dispatch`` sends every token to the ranks that own its experts, ``combine`` brings the results back; static
mode does both without a host sync, and :class:`StepRunner` replays a step whose routing did not fit, so that
no token is ever lost.
"""

from __future__ import annotations

from .config import EPConfig
from .dispatcher import Dispatcher
from .distributed import Env, init_distributed, shutdown
from .errors import (
    ArgumentError,
    BudgetExceededError,
    ClosedError,
    ConfigError,
    EPError,
    HandleError,
    PeerLostError,
    RoutingError,
)
from .failure import failing_fast
from .handle import Dispatched, DispatchHandle
from .moe import MoELayer, update_expert_biases
from .mxfp8 import MXFP8Tensor, dequantize_mxfp8, quantize_mxfp8, swizzle_scales
from .recorder import RoutingRecorder
from .runner import LayerBudget, StepRunner

__all__ = [
    "ArgumentError",
    "BudgetExceededError",
    "ClosedError",
    "ConfigError",
    "DispatchHandle",
    "Dispatched",
    "Dispatcher",
    "EPConfig",
    "EPError",
    "Env",
    "HandleError",
    "LayerBudget",
    "MXFP8Tensor",
    "MoELayer",
    "PeerLostError",
    "RoutingError",
    "RoutingRecorder",
    "StepRunner",
    "dequantize_mxfp8",
    "failing_fast",
    "init_distributed",
    "quantize_mxfp8",
    "shutdown",
    "swizzle_scales",
    "update_expert_biases",
]

__version__ = "0.1.0"
