"""The training that a budget is wanted for."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError

__all__ = ["DTYPE_BYTES", "Target"]

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Target:
    """Sizes of the training that the budgets are for.

    Attributes:
        ep_size: ranks of an expert-parallel group.
        tokens_per_rank: tokens a rank passes to one dispatch; None takes the trace's.
        hidden_size: elements of a token row.
        alignment: rows to which an expert's segment is padded.
        dtype: of the rows: ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        placement: ``"contiguous"``, ``"round-robin"`` or the path of a JSON map.
        steps: optimizer steps of a run.
        num_experts, top_k: where the trace does not say.

    Raises:
        ConfigError: a field is out of range; the message names the option.
    """

    ep_size: int
    tokens_per_rank: int | None = None
    hidden_size: int = 4096
    alignment: int = 16
    dtype: str = "bf16"
    placement: str = "contiguous"
    steps: int = 10_000
    num_experts: int | None = None
    top_k: int | None = None

    def __post_init__(self) -> None:
        limits = {"ep_size": 2**15, "tokens_per_rank": 2**28, "hidden_size": 2**20, "alignment": 2**16,
                  "steps": 2**31, "num_experts": 2**15 - 2, "top_k": 2**15}  # fmt: skip
        for name, limit in limits.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= limit:
                flag = {"hidden_size": "hidden", "num_experts": "experts"}.get(name, name).replace("_", "-")
                raise ConfigError(f"--{flag} must be from 1 to {limit}, got {value}")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")

    def row_bytes(self) -> int:
        """Memory of one budgeted row: the row, and its gradient in the backward pass."""
        return 2 * self.hidden_size * DTYPE_BYTES[self.dtype]
