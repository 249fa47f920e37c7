"""``ep-comm train``: a byte-level MoE language model on real text, its experts spread over ranks."""

from __future__ import annotations

from .loop import Trainer
from .options import TrainOptions
from .run import train

__all__ = ["TrainOptions", "Trainer", "train"]
