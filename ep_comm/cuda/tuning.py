"""How the kernels of the symmetric transport are launched, and the measured choices (docs/kernels.md).

Sender and receiver have to cut rows alike, so a choice depends only on what all ranks have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .window import MIN_SHARED_BYTES

__all__ = ["GatherTuning", "RingShape", "ScatterTuning", "default_gather_tuning", "default_scatter_tuning"]

_FEW_SMS = 48  # below it a warp of gather_bulk.cu has many segments to sum, and larger ones cost less
_SEGMENTS_FROM_SMS = 64  # with fewer, cutting rows costs the dispatch more than it fills gaps
_RING_FROM_BYTES = 256 * 14336  # of all tokens of a rank; with fewer, a warp a segment starts sooner than a team a row
_SHARED_BYTES = MIN_SHARED_BYTES - 4 * 1024  # dynamic shared memory of a block, with room for the static part


@dataclass(frozen=True)
class ScatterTuning:
    """How ``scatter_rows`` runs. ``unit`` and ``segments`` must be equal on all ranks.

    Attributes:
        warps, blocks_per_sm, unroll: shape of the launch, and loads in flight of a lane.
        unit: a row is cut at multiples of so many elements.
        segments: into which a row is cut at 8,192 tokens a rank, at most 16; fewer tokens give more.
        lag: rounds between sending a segment and waiting for the peer's of the same number.
    """

    warps: int = 16
    blocks_per_sm: int = 2
    unroll: int = 4
    unit: int = 1024
    segments: int = 7
    lag: int = 0


@dataclass(frozen=True)
class RingShape:
    """The teams of a block of gather_ring.cu.

    Attributes:
        teams, producers, consumers: teams of a block, warps of a team; one more warp of each raises flags.
        vecs: vectors of 16 bytes that a lane of a consumer holds.
        slots: chunks of a row that a team keeps in shared memory.
    """

    teams: int
    producers: int
    consumers: int
    vecs: int
    slots: int

    VECS = 4
    CONSUMERS = 7  # two teams of 7, with 4 vectors a lane, are what a multiprocessor has registers for
    WARPS = 20  # of a block: leaves 96 registers a thread
    SLOTS = 32  # more would not be filled
    VEC_BYTES = 512  # of a warp
    TEAM_BYTES = 4 * 1024  # static shared memory of a team, and more

    @classmethod
    def of(cls, row_bytes: int) -> RingShape:
        """For rows of so many bytes, a multiple of 16: as few chunks as possible, then as many teams and slots."""
        vectors = max(1, -(-row_bytes // cls.VEC_BYTES))
        chunks = -(-vectors // (cls.VECS * cls.CONSUMERS))
        of_a_chunk = -(-vectors // chunks)
        consumers = -(-of_a_chunk // cls.VECS)
        producers = 2
        teams = cls.WARPS // (producers + 1 + consumers)
        vecs = -(-of_a_chunk // consumers)
        room = (MIN_SHARED_BYTES - teams * cls.TEAM_BYTES) // teams
        return cls(teams, producers, consumers, vecs, min(room // (consumers * vecs * cls.VEC_BYTES), cls.SLOTS))

    @property
    def threads(self) -> int:
        return 32 * self.teams * (self.producers + 1 + self.consumers)

    @property
    def shared_bytes(self) -> int:
        """Dynamic."""
        return self.teams * self.slots * self.consumers * self.vecs * self.VEC_BYTES

    @property
    def defines(self) -> dict[str, int]:
        return {
            "TEAMS": self.teams,
            "PRODUCERS": self.producers,
            "CONSUMERS": self.consumers,
            "VECS": self.vecs,
            "SLOTS": self.slots,
        }


@dataclass(frozen=True)
class GatherTuning:
    """How ``gather_sum`` runs; see :class:`ScatterTuning`.

    Attributes:
        kernel: ``ring`` (gather_ring.cu), ``bulk`` (gather_bulk.cu) or ``registers`` (gather.cu). Rows that are not
            aligned to 16 bytes take the last, with the same segments.
        ring: its shape; None: the one that fits the rows.
        chunk_bytes: of a row, fetched at once (``bulk``).
        warps: of a block; with ``bulk`` as many of them as shared memory has room for.
        batch: rows a lane loads at a time (``registers``).
        segments: as in :class:`ScatterTuning`; 0 leaves rows whole.
        lag: with ``ring``, a negative one stands for this part of all rounds, but 11 at most: -8 is an eighth.
    """

    kernel: Literal["ring", "bulk", "registers"] = "ring"
    ring: RingShape | None = None
    chunk_bytes: int = 1024
    warps: int = 20
    batch: int = 4
    unit: int = 1024
    segments: int = 0
    lag: int = -8

    def bulk_warps(self, top_k: int) -> int:
        """Warps of a block of gather_bulk.cu."""
        return min(self.warps, _SHARED_BYTES // (2 * top_k * self.chunk_bytes))


def default_scatter_tuning(num_sms: int | None) -> ScatterTuning:
    """One block a multiprocessor under a limit: the GPU would give each of more blocks one of its own."""
    if num_sms is None:
        return ScatterTuning()
    return ScatterTuning(warps=32, blocks_per_sm=1, segments=1 if num_sms < _SEGMENTS_FROM_SMS else 4, lag=1)


def default_gather_tuning(num_sms: int | None, max_tokens: int, row_bytes: int) -> GatherTuning:
    """Whole rows and a ring where there are enough tokens to fill the teams.

    The lag of the ring is an eighth of the rounds, but 11 at most. It is how far a peer may be behind before a take
    waits for it; but the first ``lag`` rounds only give and the last only take, so it has to stay a small part of all.

    Args:
        num_sms, max_tokens: of the configuration.
        row_bytes: of a payload row.
    """
    if row_bytes % 16 == 0 and max_tokens * row_bytes >= _RING_FROM_BYTES:
        return GatherTuning()
    few = num_sms is not None and num_sms < _FEW_SMS
    return GatherTuning(kernel="bulk", segments=1 if few else 2, lag=2)
