"""What ``torch.autocast`` means for the parts of an MoE layer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["autocast_dtype", "without_autocast"]


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype autocast asks for on ``device``; ``None`` where it is off."""
    kind = device.type
    # Devices without autocast (meta) raise when they are asked about it.
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Keep autocast away from code that must run in the dtypes it names."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
