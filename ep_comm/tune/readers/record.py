"""What every reader yields: the routing of one dispatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..problems import ProblemLog

__all__ = ["ALL_RANKS", "Layer", "Reading", "Record", "check_ids"]

ALL_RANKS = -1
_MAX_ID = 2**15 - 2


class Layer(NamedTuple):
    """Identity of a MoE layer; sorts in the order of the model."""

    block: str
    number: int
    part: int = -1

    def __str__(self) -> str:
        if self.block == "decoder" and self.part < 0:
            return str(self.number)
        part = "" if self.part < 0 else f"{self.part}."
        return f"{self.block} {part}{self.number}"


class Record(NamedTuple):
    """The routing of one dispatch: its tokens' expert ids, or only how many went where.

    Attributes:
        step, layer, rank: where it belongs; rank :data:`ALL_RANKS` where the ranks are summed up.
        num_tokens: tokens of the dispatch.
        idx_TK: int16 expert ids, -1 for an empty slot; None where only counts are known.
        counts_E: int64 (token, slot) pairs of each expert, where ``idx_TK`` is None.
        file, line: where it was read.
        pair_tokens: beside counts: most tokens that went to one of ``pair_ep_size`` ranks; -1 where not known.
    """

    step: int
    layer: Layer
    rank: int
    num_tokens: int
    idx_TK: np.ndarray | None
    counts_E: np.ndarray | None
    file: Path
    line: int | None
    pair_tokens: int = -1
    pair_ep_size: int = 0


@dataclass
class Reading:
    """What the readers share while they read one trace.

    Attributes:
        log: problems found so far.
        num_experts: ids from here on are wrong; None takes whatever ids occur.
        columns: the trace's own names for our fields, see docs/tune.md.
        identical_rows: so many equal rows in a run, and at least half of the dispatch, are suspicious.
        progress: called with the bytes read since the last call.
        top_k: of the first record; later ones are compared with it.
        largest_id: largest expert id seen.
        pairs: (token, layer) records seen.
        has_steps: False where the tokens are one stream without step numbers.
    """

    log: ProblemLog
    num_experts: int | None = None
    columns: dict[str, str] = field(default_factory=dict)
    identical_rows: int = 64
    progress: Callable[[int], None] = lambda _: None
    top_k: int | None = None
    stage: str | None = None
    largest_id: int = -1
    pairs: int = 0
    has_steps: bool = True

    def column(self, name: str) -> str:
        """The trace's name for the field ``name``."""
        return self.columns.get(name, name)


def check_ids(ids_TK: np.ndarray, reading: Reading, file: Path, line: int) -> np.ndarray | None:
    """Check the ids of a dispatch (any integer dtype ``[T, K]``) and bring them to int16.

    Returns None where the record is to be left out: ids out of range, another top-k, or a long run of identical
    rows, unless the user keeps such records.
    """
    top_k = ids_TK.shape[1]
    if reading.top_k is None:
        reading.top_k = top_k
    if top_k != reading.top_k and not reading.log.add(
        "mixed-top-k", f"top-k {top_k}, the first record has {reading.top_k}", file, line
    ):
        return None
    if ids_TK.size == 0:
        return ids_TK.astype(np.int16)
    limit = _MAX_ID if reading.num_experts is None else reading.num_experts - 1
    lowest, highest = int(ids_TK.min()), int(ids_TK.max())
    if lowest < -1 or highest > limit:
        worst = highest if highest > limit else lowest
        allowed = f"[-1, {limit + 1})"
        if not reading.log.add("expert-id", f"expert id {worst}, allowed are {allowed}", file, line):
            return None
        ids_TK = np.where((ids_TK < -1) | (ids_TK > limit), -1, ids_TK)
        highest = int(ids_TK.max())
    # Real text has runs too (blanks, padding at its end); what fills half a dispatch is not text.
    run = _longest_run(ids_TK, max(reading.identical_rows, ids_TK.shape[0] // 2))
    if run and not reading.log.add("identical-rows", f"{run} equal rows in a run", file, line):
        return None
    reading.largest_id = max(reading.largest_id, highest)
    reading.pairs += ids_TK.shape[0]
    return ids_TK.astype(np.int16)


def _longest_run(ids_TK: np.ndarray, least: int) -> int:
    """Length of the longest run of equal rows if it has at least ``least`` rows, else 0."""
    if least < 2 or ids_TK.shape[0] < least:
        return 0
    # Any run of `least` rows covers two neighbours at a multiple of least // 2: nearly always one cheap look.
    stride = max(1, least // 2)
    probes = ids_TK[::stride]
    if not (probes[1:] == probes[:-1]).all(1).any():
        return 0
    changes = np.flatnonzero((ids_TK[1:] != ids_TK[:-1]).any(1)) + 1
    edges = np.concatenate([[0], changes, [ids_TK.shape[0]]])
    longest = int(np.diff(edges).max())
    return longest if longest >= least else 0
