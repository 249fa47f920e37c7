"""Initial weights that do not depend on how the experts are spread over ranks.

Every weight is drawn from a generator of its own, seeded by the layer's seed and the weight's *global*
name ("expert 17", "router", "shared"). Expert 17 therefore starts with the same values on whichever rank
it lives, and a model with ``ep_size = 2`` is the model with ``ep_size = 1``.
"""

from __future__ import annotations

import hashlib
import math

import torch

__all__ = ["resolve_seed", "seeded_generator", "uniform_fan_in_"]


def resolve_seed(seed: int | None) -> int:
    """``seed`` itself, or a fresh one from torch's default CPU generator.

    Ranks that called ``torch.manual_seed`` with one value and build the same modules in the same order
    therefore agree without communication, and consecutive layers still differ.
    """
    return int(torch.randint(2**31, ()).item()) if seed is None else int(seed)


def seeded_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """A generator for the weight called ``name``: equal seed and name on equal devices give equal draws."""
    # A hash, because the CPU generator only uses the low 32 bits of its seed: sums such as
    # seed * 1000 + expert would repeat.
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest[:4], "little"))
    return generator


@torch.no_grad()
def uniform_fan_in_(weight: torch.Tensor, fan_in: int, generator: torch.Generator) -> None:
    """Fill ``weight`` with uniform draws from ``+-1 / sqrt(fan_in)``, the range ``torch.nn.Linear`` uses.

    The draws are FP32 whatever ``weight.dtype`` is, so a BF16 model starts with the rounded FP32 model.
    """
    bound = 1.0 / math.sqrt(fan_in)
    draws = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    weight.copy_(draws.uniform_(-bound, bound, generator=generator))
