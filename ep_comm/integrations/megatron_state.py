"""What a training step of a Megatron-Core model changes outside of the model."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

__all__ = ["MegatronStepState"]


class MegatronStepState:
    """For ``extra_state`` of :class:`ep_comm.StepRunner`: random states and sums that Megatron keeps in the process.

    These are the generators of tensor-parallel and expert-parallel regions (dropout inside them), and the auxiliary
    losses that routers add up for the log. A replayed step would draw other numbers and count losses twice.
    """

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Copies of all of them. No host sync."""
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        states = get_cuda_rng_tracker().get_states()
        return {
            "generators": {name: _state_of(state).clone() for name, state in states.items()},
            "losses": {name: values.detach().clone() for name, values in _router_losses().items()},
        }

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Go back to ``state``; losses that were not there then become zero."""
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        tracker = get_cuda_rng_tracker()
        states = tracker.get_states()
        for name, saved in state["generators"].items():
            if isinstance(states.get(name), torch.Generator):
                states[name].set_state(saved)
            else:
                states[name] = saved
        if states:
            tracker.set_states(states)
        for name, values in _router_losses().items():
            if name in state["losses"]:
                values.copy_(state["losses"][name])
            else:
                values.zero_()


def _state_of(state: Any) -> Tensor:
    """Megatron keeps byte tensors, or generators where these are to work inside CUDA graphs."""
    return state.get_state() if isinstance(state, torch.Generator) else state


def _router_losses() -> dict[str, Tensor]:
    """The sums behind the log of auxiliary losses; they moved to a file of their own after release 0.16."""
    try:
        logging = importlib.import_module("megatron.core.transformer.moe.moe_logging")
    except ImportError:
        utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        return {name: entry["values"] for name, entry in utils.get_moe_layer_wise_logging_tracker().items()}
    return {name: entry.values for name, entry in logging.get_moe_metrics_tracker().metrics.items()}
