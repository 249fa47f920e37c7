"""Gradients over ranks: replicated weights averaged, a rank's own experts scaled, all clipped together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["GradientReducer", "is_expert"]


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether the parameter belongs to an expert, of which only this rank holds the weights."""
    return bool(getattr(parameter, "ep_expert", False))


class GradientReducer:
    """Makes every rank's gradients those of the mean loss over all ranks, in one all-reduce.

    A rank's loss is the mean over its own tokens. A replicated weight's gradient is therefore averaged over
    ranks. An expert has already received the gradients of every rank's tokens, summed, through the
    dispatcher; it only needs the factor ``1 / world_size``.

    Args:
        model: its parameters; those of experts are marked with ``ep_expert``.
        group: all ranks.
        max_norm: gradients are scaled down to this norm, taken over the whole model on all ranks.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, max_norm: float) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._replicated = [parameter for parameter in parameters if not is_expert(parameter)]
        self._experts = [parameter for parameter in parameters if is_expert(parameter)]
        self._group = group
        self._world_size = dist.get_world_size(group)
        self._max_norm = max_norm

    @torch.no_grad()
    def reduce(self, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Finish the gradients after ``backward``. No host sync.

        Args:
            loss: this rank's loss, a scalar.

        Returns:
            The loss averaged over ranks, and the gradient norm before clipping; FP32 scalars.
        """
        expert_grads = [_grad(parameter) for parameter in self._experts]
        grads = [_grad(parameter) for parameter in self._replicated]
        own_square = torch.zeros((), device=loss.device)
        if expert_grads:
            torch._foreach_mul_(expert_grads, 1.0 / self._world_size)
            own_square = sum(grad.float().square().sum() for grad in expert_grads)
        # Loss and experts' norm travel in the same all-reduce as the gradients.
        flat = torch.cat(
            [*(grad.reshape(-1).float() for grad in grads), loss.detach().float().view(1), own_square.view(1)]
        )
        dist.all_reduce(flat, group=self._group)
        mean = flat[:-1].div_(self._world_size)
        norm = (mean[:-1].square().sum() + flat[-1]).sqrt()
        factor = (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
        mean_loss = mean[-1].clone()
        mean.mul_(factor)
        offset = 0
        for grad in grads:
            grad.copy_(mean[offset : offset + grad.numel()].view_as(grad))
            offset += grad.numel()
        for grad in expert_grads:
            grad.mul_(factor)
        return mean_loss, norm


def _grad(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
