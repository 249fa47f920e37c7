"""Compare two training runs bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..errors import EPError
from .gradients import is_expert
from .loop import Trainer

__all__ = ["Comparison", "VerificationError", "compare_runs"]


class VerificationError(EPError):
    """Two runs that must be equal are not."""


@dataclass(frozen=True)
class Comparison:
    """How much was compared, over all ranks; replicated weights are counted once.

    Attributes:
        tensors, values: weights of the whole model.
        state_tensors, state_values: optimizer state and router biases.
    """

    tensors: int
    values: int
    state_tensors: int
    state_values: int


def compare_runs(run: Trainer, other: Trainer) -> Comparison:
    """Compare weights, buffers and optimizer state of two runs, on every rank. Collective.

    Raises:
        VerificationError: on all ranks; the message names the first tensor that differs, and by how much.
    """
    difference, counts = "", [0, 0, 0, 0]
    for (name, own, weight, shared), (_, theirs, _, _) in zip(_tensors(run), _tensors(other), strict=True):
        if not _same_bits(own, theirs) and not difference:
            difference = _describe(name, own, theirs, run.env.rank)
        if not shared or run.env.rank == 0:
            offset = 0 if weight else 2
            counts[offset] += 1
            counts[offset + 1] += own.numel()
    gathered: list[tuple[str, list[int]] | None] = [None] * run.env.world_size
    dist.all_gather_object(gathered, (difference, counts), group=run.env.group)
    first = next((text for text, _ in gathered if text), None)
    if first is not None:
        raise VerificationError(f"{run.mode} and {other.mode} mode differ after {run.step} steps: {first}")
    return Comparison(*(sum(column) for column in zip(*(counts for _, counts in gathered), strict=True)))


def _tensors(run: Trainer) -> Iterator[tuple[str, torch.Tensor, bool, bool]]:
    """Name, tensor, whether it is a weight, and whether all ranks hold the same one."""
    for name, parameter in run.model.named_parameters():
        yield name, parameter.detach(), True, not is_expert(parameter)
    weights = {name for name, _ in run.model.named_parameters(remove_duplicate=False)}
    for name, buffer in run.model.state_dict().items():
        if name not in weights:
            yield name, buffer, False, True
    for name, parameter in run.model.named_parameters():
        for key, value in sorted(run.optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                yield f"optimizer {key} of {name}", value, False, not is_expert(parameter)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Comparing bytes: NaN equals itself, and -0 is not +0.
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _describe(name: str, own: torch.Tensor, theirs: torch.Tensor, rank: int) -> str:
    if own.shape != theirs.shape or own.dtype != theirs.dtype:
        return f"{name} on rank {rank}: {own.dtype} {list(own.shape)} and {theirs.dtype} {list(theirs.shape)}"
    gap = (own.double() - theirs.double()).abs()
    count = int((gap != 0).sum())
    return f"{name} on rank {rank}: {count} of {own.numel()} values, by up to {float(gap.max()):.3g}"
