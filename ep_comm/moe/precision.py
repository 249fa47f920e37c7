"""What ``torch.autocast`` means for the parts of an MoE layer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["autocast_dtype", "without_autocast"]

# Others (meta) raise when they are asked about it. Looked up once: torch.compile does not trace the question.
_HAVE_AUTOCAST = frozenset(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia") if torch.amp.is_autocast_available(kind)
)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype autocast asks for on ``device``; ``None`` where it is off."""
    kind = device.type
    if kind in _HAVE_AUTOCAST and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Keep autocast away from code that must run in the dtypes it names."""
    if device.type in _HAVE_AUTOCAST:
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
