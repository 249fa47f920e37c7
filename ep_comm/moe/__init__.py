"""A Mixture-of-Experts layer on top of the dispatcher: router, experts, and the layer that joins them."""

from __future__ import annotations

from .experts import GroupedExperts, SharedExpert, ignore_experts_in_ddp
from .layer import MoELayer
from .router import TopKRouter, update_expert_biases

__all__ = [
    "GroupedExperts",
    "MoELayer",
    "SharedExpert",
    "TopKRouter",
    "ignore_experts_in_ddp",
    "update_expert_biases",
]
