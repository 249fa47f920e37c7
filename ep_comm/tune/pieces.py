"""Records of one rank and step, layer by layer ──▶ pieces: the counts of what one rank contributes to one batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError
from .placement import Placement
from .problems import ProblemLog
from .readers.record import Layer, Record

__all__ = ["Piece", "PieceMaker", "pair_peak", "token_counts"]

# A step that is still incomplete when so many later ones of its rank have begun will not be completed.
_OPEN_STEPS = 8
_RANKS_A_WORD = 64


class Piece(NamedTuple):
    """What one rank sends in one dispatch of every layer.

    Attributes:
        step, dispatch, rank: training step, number of the dispatch within the step, and source rank.
        num_tokens: tokens.
        counts_LE: (token, slot) pairs of each expert; the smallest unsigned dtype that holds them.
        pairs_L: int32, most tokens for one destination rank; -1 where not known.
    """

    step: int
    dispatch: int
    rank: int
    num_tokens: int
    counts_LE: np.ndarray
    pairs_L: np.ndarray


class _Tokens(NamedTuple):
    step: int
    num_tokens: int
    ids_LTK: list[np.ndarray]


class PieceMaker:
    """Collects the records of a trace into pieces.

    Args:
        placement: owners of the experts.
        layers: every piece has all of them.
        num_experts: experts of a layer.
        cut_tokens: None leaves every dispatch as it was traced; else the tokens of each rank are taken as one
            stream, in their order, and cut into pieces of so many tokens: documents stay together.
        log: gets duplicates and incomplete steps.
        ranks: source ranks of the trace.
    """

    def __init__(
        self,
        placement: Placement,
        layers: list[Layer],
        num_experts: int,
        cut_tokens: int | None,
        log: ProblemLog,
        ranks: set[int],
    ) -> None:
        self.placement, self.layers, self.num_experts = placement, layers, num_experts
        self.cut_tokens, self.log, self.ranks = cut_tokens, log, ranks
        self.pieces: list[Piece] = []
        self._index = {layer: at for at, layer in enumerate(layers)}
        self._open: dict[int, dict[int, list[dict[int, Record]]]] = {rank: {} for rank in ranks}
        self._closed: dict[int, dict[int, int]] = {rank: {} for rank in ranks}
        self._pending: dict[int, list[_Tokens]] = {rank: [] for rank in ranks}

    def add(self, record: Record) -> None:
        """Take in one record."""
        at = self._index.get(record.layer)
        if at is None or record.rank not in self.ranks:
            what = f"layer {record.layer}, rank {record.rank}"
            self.log.add("stray", what, record.file, record.line)
            return
        groups = self._open[record.rank].setdefault(record.step, [])
        dispatch = next((number for number, group in enumerate(groups) if at not in group), len(groups))
        seen_before = dispatch > 0 or record.step in self._closed[record.rank]
        if seen_before:
            what = f"step {record.step}, layer {record.layer}, rank {record.rank}"
            if not self.log.add("duplicate", what, record.file, record.line):
                if not groups:
                    del self._open[record.rank][record.step]
                return
        if dispatch == len(groups):
            groups.append({})
        groups[dispatch][at] = self._compact(record)
        if len(groups[dispatch]) == len(self.layers):
            self._close(record.rank, record.step, groups.pop(dispatch))
            if not groups:
                del self._open[record.rank][record.step]
        elif len(self._open[record.rank]) > _OPEN_STEPS:
            self._give_up(record.rank, min(self._open[record.rank]))

    def finish(self) -> list[Piece]:
        """All pieces, once every record was taken in."""
        for rank, steps in self._open.items():
            for step in sorted(steps):
                self._give_up(rank, step)
        self._open = {rank: {} for rank in self.ranks}
        return self.pieces

    @property
    def unused_tokens(self) -> int:
        """Tokens of the ends of the ranks' streams that did not fill a piece."""
        return sum(tokens.num_tokens for pending in self._pending.values() for tokens in pending)

    def _compact(self, record: Record) -> Record:
        """Where nothing will be cut, counts replace the tokens at once: a step need not be held in memory."""
        if record.idx_TK is None or self.cut_tokens is not None:
            return record
        at = self._index[record.layer]
        counts_E = token_counts(record.idx_TK, self.num_experts)
        pairs = pair_peak(record.idx_TK, self.placement.owner_LE[at], self.placement.ep_size)
        return record._replace(idx_TK=None, counts_E=counts_E, pair_tokens=pairs, pair_ep_size=self.placement.ep_size)

    def _give_up(self, rank: int, step: int) -> None:
        for group in self._open[rank].pop(step):
            missing = [str(layer) for at, layer in enumerate(self.layers) if at not in group]
            first = next(iter(group.values()))
            what = f"step {step}, rank {rank}: no layer {', '.join(missing[:5])}"
            if self.log.add("missing-layer", what, first.file, first.line):
                self._close(rank, step, group)
            else:
                self._closed[rank][step] = self._closed[rank].get(step, 0) + 1

    def _close(self, rank: int, step: int, group: dict[int, Record]) -> None:
        dispatch = self._closed[rank].get(step, 0)
        self._closed[rank][step] = dispatch + 1
        if self.cut_tokens is None or any(record.idx_TK is None for record in group.values()):
            self._emit(rank, step, dispatch, group)
            return
        sizes = {record.num_tokens for record in group.values()}
        if len(sizes) > 1 or len(group) < len(self.layers):
            # Streams of the layers would no longer be cut at the same tokens.
            first = next(iter(group.values()))
            self.log.add("malformed", f"step {step}, rank {rank}: layers with different tokens", first.file, first.line)
            return
        ids_LTK = [group[at].idx_TK for at in range(len(self.layers))]
        self._pending[rank].append(_Tokens(step, sizes.pop(), ids_LTK))
        for number, (last_step, piece) in enumerate(self._cut(rank)):
            counts_LE = np.stack([token_counts(ids_TK, self.num_experts) for ids_TK in piece])
            owners, ep_size = self.placement.owner_LE, self.placement.ep_size
            pairs_L = [pair_peak(ids_TK, owner_E, ep_size) for ids_TK, owner_E in zip(piece, owners, strict=True)]
            self._append(last_step, number, rank, self.cut_tokens, counts_LE, pairs_L)

    def _cut(self, rank: int) -> Iterator[tuple[int, list[np.ndarray]]]:
        """Full pieces of the rank's stream: the step of their last token, and ids of each layer."""
        pending = self._pending[rank]
        total = sum(tokens.num_tokens for tokens in pending)
        if total < self.cut_tokens:
            return
        joined = [np.concatenate(parts) for parts in zip(*(tokens.ids_LTK for tokens in pending), strict=True)]
        step = pending[-1].step
        whole = total // self.cut_tokens * self.cut_tokens
        for start in range(0, whole, self.cut_tokens):
            yield step, [ids_TK[start : start + self.cut_tokens] for ids_TK in joined]
        rest = [_Tokens(step, total - whole, [ids_TK[whole:].copy() for ids_TK in joined])]
        self._pending[rank] = rest if total > whole else []

    def _emit(self, rank: int, step: int, dispatch: int, group: dict[int, Record]) -> None:
        counts_LE = np.zeros((len(self.layers), self.num_experts), dtype=np.int64)
        pairs_L = np.full(len(self.layers), 0)
        for at, record in group.items():
            counts_LE[at, : record.counts_E.size] = record.counts_E
            known = record.pair_tokens >= 0 and record.pair_ep_size == self.placement.ep_size
            pairs_L[at] = record.pair_tokens if known else -1
        num_tokens = max(record.num_tokens for record in group.values())
        if self.cut_tokens is not None and num_tokens != self.cut_tokens:
            raise ConfigError(
                f"step {step}, rank {rank} has {num_tokens} tokens, the target {self.cut_tokens} a rank: counts cannot "
                "be cut or joined; give a trace with the tokens, or leave --tokens-per-rank out"
            )
        self._append(step, dispatch, rank, num_tokens, counts_LE, pairs_L)

    def _append(
        self, step: int, dispatch: int, rank: int, num_tokens: int, counts_LE: np.ndarray, pairs_L: object
    ) -> None:
        small = np.uint16 if counts_LE.max(initial=0) < 2**16 else np.uint64
        self.pieces.append(
            Piece(step, dispatch, rank, num_tokens, counts_LE.astype(small), np.asarray(pairs_L, dtype=np.int32))
        )


def token_counts(ids_TK: np.ndarray, num_experts: int) -> np.ndarray:
    """int64 ``[E]``: (token, slot) pairs of each expert; slots of -1 count for none."""
    return np.bincount(ids_TK.ravel() + np.int16(1), minlength=num_experts + 1)[1 : num_experts + 1]


def pair_peak(ids_TK: np.ndarray, owner_E: np.ndarray, ep_size: int) -> int:
    """Most tokens of this rank that go to one rank. A token goes to a rank once, however many experts it has there."""
    peak = 0
    for first in range(0, ep_size, _RANKS_A_WORD):
        # One bit a destination; the last entry is for empty slots, whose id -1 indexes it.
        bits = np.zeros(owner_E.size + 1, dtype=np.uint64)
        here = (owner_E >= first) & (owner_E < first + _RANKS_A_WORD)
        bits[:-1][here] = np.uint64(1) << (owner_E[here] - first).astype(np.uint64)
        mask_T = bits[ids_TK[:, 0]] if ids_TK.size else np.zeros(0, dtype=np.uint64)
        for slot in range(1, ids_TK.shape[1] if ids_TK.size else 0):
            mask_T |= bits[ids_TK[:, slot]]
        for rank in range(min(_RANKS_A_WORD, ep_size - first)):
            peak = max(peak, int(np.count_nonzero(mask_T & np.uint64(1 << rank))))
    return peak
