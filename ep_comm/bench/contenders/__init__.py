"""The contenders of ``ep-comm bench``, one a file."""

from __future__ import annotations

from ..options import TRANSPORTS, BenchOptions
from .base import Contender, Place, Plan, Session
from .deepep import DeepEP
from .megatron import Megatron
from .own import OwnTransport
from .torch_alltoall import TorchAllToAll
from .torchao import TorchAO

__all__ = ["Contender", "Place", "Plan", "Session", "make_contenders"]


def make_contenders(options: BenchOptions) -> list[Contender]:
    """All contenders that the options ask for, whether they can run here or not."""
    every = tuple(each for each in TRANSPORTS if each != "auto")
    chosen = every if options.transport == "all" else (options.transport,)
    return [*(OwnTransport(each) for each in chosen), TorchAllToAll(), TorchAO(), Megatron(), DeepEP()]
