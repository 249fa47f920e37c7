"""How a rank's symmetric window is laid out. The kernels take these numbers as plain integers."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..config import round_up
from ..status import HEADER_WORDS

__all__ = ["MAX_RANKS", "MAX_SEGMENTS", "MAX_TOP_K", "MIN_SHARED_BYTES", "STATE_WORDS", "WindowLayout"]

MAX_RANKS = 64  # as in common.cuh
MAX_SEGMENTS = 16
MAX_TOP_K = 32  # a lane of a warp holds a slot
MIN_SHARED_BYTES = 220 * 1024  # of a block, for the largest kernel
STATE_WORDS = 8
_CONTROL_BYTES = 512
_ALIGNMENT = 256


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
    def counts_offset(self) -> int:
        """int32 [2, ep_size, HEADER_WORDS + ep_size + num_experts]: messages of even and odd epochs."""
        return _CONTROL_BYTES

    @property
    def rows_offset(self) -> int:
        """int32 [ep_size, max_tokens, top_k]: the rows on which each rank's slots land here, or -1."""
        counts = 2 * self.ep_size * (HEADER_WORDS + self.ep_size + self.num_experts) * 4
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
