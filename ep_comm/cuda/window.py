"""How a rank's symmetric window is laid out, and what its kernels take. They get these numbers as plain integers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..config import round_up
from ..status import HEADER_WORDS

__all__ = [
    "MAX_RANKS",
    "MAX_SEGMENTS",
    "MAX_TOP_K",
    "MIN_SHARED_BYTES",
    "STATE_WORDS",
    "PlanLaunch",
    "WindowLayout",
    "plan_problem",
]

MAX_RANKS = 64  # as in common.cuh
MAX_SEGMENTS = 16
MAX_TOP_K = 32  # a lane of a warp holds a slot
MIN_SHARED_BYTES = 220 * 1024  # of a block, for the largest kernel
STATE_WORDS = 8
_CONTROL_BYTES = 512
_ALIGNMENT = 256
_PLAN_ITEMS_PER_WARP = (128, 256, 512)
_PLAN_BLOCKS_PER_SM = 2  # with 512 items a warp a thread has 128 registers
_BLOCK_BYTES = 3 * 1024  # shared memory of a block that is not dynamic: its static part, and what CUDA keeps


@dataclass(frozen=True)
class WindowLayout:
    """Byte offsets in a window of ``ep_size`` ranks, large enough for every layer that shares it.

    Attributes:
        ep_size: ranks, at most 64.
        num_experts, top_k, max_tokens: the largest of the layers.
        row_bytes: bytes of the widest row that travels (payload rows, or MXFP8 wire rows).
    """

    ep_size: int
    num_experts: int
    top_k: int
    max_tokens: int
    row_bytes: int

    def covers(self, needed: WindowLayout) -> bool:
        """Whether a window of this layout can serve what ``needed`` is for."""
        return self.ep_size == needed.ep_size and all(
            getattr(self, field.name) >= getattr(needed, field.name) for field in fields(self)
        )

    def extended(self, other: WindowLayout) -> WindowLayout:
        """The smallest layout that covers both."""
        return WindowLayout(
            **{field.name: max(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        )

    @property
    def pitch(self) -> int:
        """Bytes from one row of the payload area to the next."""
        return round_up(self.row_bytes, 16)

    @property
    def _slots(self) -> int:
        return self.ep_size * self.max_tokens * self.top_k

    @property
    def message_pitch(self) -> int:
        """int32 words from one rank's message to the next, for every layer that shares the window."""
        return HEADER_WORDS + self.ep_size + self.num_experts

    @property
    def counts_offset(self) -> int:
        """int32 [2, ep_size, message_pitch]: messages of even and odd epochs."""
        return _CONTROL_BYTES

    @property
    def rows_offset(self) -> int:
        """int32 [ep_size, max_tokens, top_k]: the rows on which each rank's slots land here, or -1."""
        counts = 2 * self.ep_size * self.message_pitch * 4
        return round_up(self.counts_offset + counts, _ALIGNMENT)

    @property
    def weights_offset(self) -> int:
        """float32 [ep_size, max_tokens, top_k]: the weights of those slots."""
        return round_up(self.rows_offset + self._slots * 4, _ALIGNMENT)

    @property
    def scalars_offset(self) -> int:
        """float32 [ep_size, max_tokens, top_k]: scalars that came back to this rank's own slots."""
        return round_up(self.weights_offset + self._slots * 4, _ALIGNMENT)

    @property
    def flags_offset(self) -> int:
        """int32 [ep_size, max_tokens, 16]: the epoch in which each segment of a row last arrived."""
        return round_up(self.scalars_offset + self._slots * 4, _ALIGNMENT)

    @property
    def area_offset(self) -> int:
        """[ep_size, max_tokens, pitch] bytes: rows on their way."""
        flags = self.ep_size * self.max_tokens * MAX_SEGMENTS * 4
        return round_up(self.flags_offset + flags, _ALIGNMENT)

    @property
    def total_bytes(self) -> int:
        """Size of the window; it must be zero before its first use."""
        return self.area_offset + self.ep_size * self.max_tokens * self.pitch


@dataclass(frozen=True)
class PlanLaunch:
    """How the plan kernel is launched for the tokens of one rank.

    Attributes:
        items_per_warp: (token, slot) pairs.
        blocks: of ``WARPS`` warps.
        shared_bytes: dynamic shared memory of a block.
    """

    WARPS = 8

    items_per_warp: int
    blocks: int
    shared_bytes: int

    @classmethod
    def of(cls, num_sms: int, *, num_tokens: int, top_k: int, num_experts: int, ep_size: int) -> PlanLaunch:
        """As little work a warp as leaves one block for each multiprocessor, else the most it takes."""
        for per_warp in _PLAN_ITEMS_PER_WARP:
            tokens = cls.WARPS * per_warp // top_k
            blocks = max(1, -(-num_tokens // tokens))
            if blocks <= num_sms:
                break
        return cls(per_warp, blocks, ((cls.WARPS + 2) * num_experts + ep_size + 2 * tokens) * 4)

    def resident_blocks(self, num_sms: int) -> int:
        """How many such blocks run at once."""
        # A multiprocessor of the GPUs that are served has a little more than one block may take.
        return num_sms * min(_PLAN_BLOCKS_PER_SM, MIN_SHARED_BYTES // (self.shared_bytes + _BLOCK_BYTES))


def plan_problem(num_sms: int, *, num_tokens: int, top_k: int, num_experts: int, ep_size: int) -> str | None:
    """Why the plan kernel cannot take up to ``num_tokens`` tokens of a rank, or None.

    Its blocks wait for each other, so all have to run at once. Fewer tokens never need more blocks than fit.
    """
    launch = PlanLaunch.of(num_sms, num_tokens=num_tokens, top_k=top_k, num_experts=num_experts, ep_size=ep_size)
    resident = launch.resident_blocks(num_sms)
    if resident == 0:
        return f"num_experts={num_experts}: their counts do not fit the shared memory of the plan kernel"
    if launch.blocks > resident:
        most = PlanLaunch.WARPS * launch.items_per_warp // top_k * resident
        return (
            f"max_tokens_per_rank={num_tokens}, at most {most} with top_k={top_k} and num_experts={num_experts} on a "
            f"GPU of {num_sms} multiprocessors"
        )
    return None
