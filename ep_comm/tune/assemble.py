"""A trace and a target ──▶ the target's :class:`Sample`: pieces put together into batches, batches into demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from ..errors import ConfigError
from .pieces import Piece, PieceMaker, token_counts
from .placement import make_placement
from .problems import ProblemLog, TuneError
from .readers.files import TraceFiles
from .readers.record import ALL_RANKS, Layer, Reading, Record
from .sample import Sample, busiest_rank_rows
from .target import Target

__all__ = ["Survey", "assemble", "survey"]

_PEEK_STEPS = 2
_PEEK_RECORDS = 20_000
_CHUNK = 256


@dataclass(frozen=True)
class Survey:
    """What the first steps of a trace say about all of it.

    Attributes:
        layers, ranks: that occur; ranks is ``{ALL_RANKS}`` for counts summed over ranks.
        tokens: most tokens of a dispatch.
        largest_id: largest expert id.
        top_k: experts a token.
        has_steps: whether the records have step numbers.
        has_tokens: whether ids are known, and not only counts.
    """

    layers: list[Layer]
    ranks: set[int]
    tokens: int
    largest_id: int
    top_k: int
    has_steps: bool
    has_tokens: bool


def survey(files: TraceFiles, reading: Callable[[ProblemLog], Reading]) -> Survey:
    """Look at the first steps of every file.

    Raises:
        TuneError: there is no valid record.
    """
    layers: set[Layer] = set()
    ranks: set[int] = set()
    state = reading(ProblemLog())
    tokens, has_tokens = 0, True
    for path, form in files.files:
        steps: set[int] = set()
        for number, record in enumerate(TraceFiles([(path, form)]).records(state)):
            steps.add(record.step)
            if len(steps) > _PEEK_STEPS or number >= _PEEK_RECORDS:
                break
            layers.add(record.layer)
            ranks.add(record.rank)
            tokens = max(tokens, record.num_tokens)
            has_tokens = has_tokens and record.idx_TK is not None
    if not layers:
        raise no_record(files, state.log)
    if ALL_RANKS in ranks and len(ranks) > 1:
        raise ConfigError("counts summed over ranks cannot be mixed with records of single ranks")
    return Survey(sorted(layers), ranks, tokens, state.largest_id, state.top_k or 0, state.has_steps, has_tokens)


def no_record(files: TraceFiles, log: ProblemLog) -> TuneError:
    """The error for a trace without a single valid record; ``log`` says what was found instead."""
    named = ", ".join(str(path) for path, _ in files.files[:3]) + (", ..." if len(files.files) > 3 else "")
    if not log.problems:
        return TuneError(f"no valid record in {named}: nothing is in there")
    return TuneError(f"no valid record in {named}: {log.summary()}; the first: {log.problems[0].examples[0]}")


def assemble(
    files: TraceFiles, seen: Survey, target: Target, reading: Callable[[ProblemLog], Reading], log: ProblemLog
) -> Sample:
    """Read the trace and bring it to the target's shape.

    Raises:
        ConfigError: trace and target do not fit.
        TuneError: no complete step is left.
    """
    num_experts = target.num_experts or _experts(seen, seen.largest_id, target)
    while True:
        log.clear()
        state = reading(log)
        maker = _maker(seen, target, num_experts, log)
        for record in files.records(state):
            if state.largest_id >= num_experts:
                break
            maker.add(record)
        if state.largest_id < num_experts:
            break
        # A rare expert turned up late, and counts and owners depend on how many there are: read again.
        num_experts = _experts(seen, state.largest_id, target)
    pieces = maker.finish()
    return _Joiner(seen, target, maker, state, log).sample(pieces)


def _experts(seen: Survey, largest_id: int, target: Target) -> int:
    """Experts of a layer where the user does not say. Ids that never occurred may be missing at the end; counts
    have one entry for each."""
    seen_experts = largest_id + 1
    return -(-seen_experts // target.ep_size) * target.ep_size if seen.has_tokens else seen_experts


def _maker(seen: Survey, target: Target, num_experts: int, log: ProblemLog) -> PieceMaker:
    placement = make_placement(target.placement, num_experts, target.ep_size, seen.layers)
    cut = None
    if not _as_traced(seen, target):
        cut = target.tokens_per_rank or seen.tokens
        if target.tokens_per_rank is None and not seen.has_steps:
            raise ConfigError("--tokens-per-rank is needed: the trace has no steps that would say how large a batch is")
    return PieceMaker(placement, seen.layers, num_experts, cut, log, seen.ranks)


def _as_traced(seen: Survey, target: Target) -> bool:
    """Whether the traced dispatches are the target's, as they are."""
    if seen.ranks == {ALL_RANKS}:
        return True
    same_size = target.tokens_per_rank in (None, seen.tokens)
    return seen.has_steps and same_size and len(seen.ranks) % target.ep_size == 0


class _Joiner:
    """Puts pieces together: which of them make a batch, and which batches make a step."""

    def __init__(self, seen: Survey, target: Target, maker: PieceMaker, state: Reading, log: ProblemLog) -> None:
        self.seen, self.target, self.maker, self.state, self.log = seen, target, maker, state, log
        self.top_k = target.top_k or state.top_k or 0
        self.notes: list[str] = []

    def sample(self, pieces: list[Piece]) -> Sample:
        target, maker = self.target, self.maker
        summed = self.seen.ranks == {ALL_RANKS}
        if summed:
            batches, source = self._summed(pieces), "steps"
        elif maker.cut_tokens is None:
            batches, source = self._traced(pieces), "steps"
        else:
            batches, source = self._assembled(pieces), "assembled"
        if not self.top_k:
            raise ConfigError("--top-k is needed: the counts do not say how many experts a token has")
        if target.num_experts is None and self.state.largest_id + 1 < maker.num_experts:
            self.notes.append(
                f"the largest expert id is {self.state.largest_id}: taken as {maker.num_experts} experts, the next "
                "multiple of ep_size; say --experts if that is wrong"
            )
        steps, rows, pairs = [], [], []
        load_LE = np.zeros((len(self.seen.layers), maker.num_experts), dtype=np.int64)
        tokens, measured = 0, True
        for chunk in _chunks(batches):
            counts_XLE = np.stack([sum(piece.counts_LE.astype(np.int64) for piece in batch) for batch in chunk])
            load_LE += counts_XLE.sum(0)
            steps += [batch[-1].step for batch in chunk]
            rows.append(busiest_rank_rows(counts_XLE, maker.placement, target.alignment))
            size = max(piece.num_tokens for batch in chunk for piece in batch)
            tokens = max(tokens, -(-size // target.ep_size) if summed else size)
            known = np.stack([np.stack([piece.pairs_L for piece in batch]).max(0) for batch in chunk])
            if (known < 0).any():
                measured = False
                known = np.where(known < 0, self._pair_bound(chunk, summed), known)
            pairs.append(known)
        if not steps:
            raise TuneError(
                f"no complete step is left of the trace: {self.log.summary() or 'it is too short for the target'}"
            )
        if tokens == 0:
            raise TuneError("no step of the trace has any token")
        merged = _merge_steps(np.array(steps), np.concatenate(rows), np.concatenate(pairs), source == "assembled")
        if not measured:
            self.notes.append(
                "pair_rows: counts do not say which tokens went where; the value is an upper bound if no slot is empty"
            )
        load_LP = np.stack(
            [np.bincount(o, c, target.ep_size) for o, c in zip(maker.placement.owner_LE, load_LE, strict=True)]
        )
        return Sample(
            [str(layer) for layer in self.seen.layers],
            *merged,
            measured,
            target.ep_size,
            maker.num_experts,
            self.top_k,
            target.alignment,
            tokens,
            load_LE,
            load_LP.astype(np.int64),
            source,
            self.notes,
        )

    def _summed(self, pieces: list[Piece]) -> Iterator[list[Piece]]:
        """Counts summed over ranks: a step is a batch; larger targets take several steps."""
        pieces = sorted(pieces, key=lambda piece: (piece.step, piece.dispatch))
        each = 1
        if self.target.tokens_per_rank is not None and pieces:
            mean = float(np.mean([piece.counts_LE[0].sum() for piece in pieces]))
            wanted = self.target.tokens_per_rank * self.target.ep_size * (self.top_k or 1)
            each = round(wanted / max(mean, 1.0))
            if each < 1 or abs(wanted / max(mean, 1.0) - each) > 0.02 * each:
                raise ConfigError(
                    f"--tokens-per-rank {self.target.tokens_per_rank} on {self.target.ep_size} ranks is {wanted} "
                    f"(token, slot) pairs, a step of the trace has {mean:.0f}: counts cannot be cut, only whole "
                    "steps be joined"
                )
        if each > 1:
            self.notes.append(f"batches were assembled: {each} steps of the trace make one of the target's")
        for start in range(0, len(pieces) - each + 1, each):
            yield pieces[start : start + each]

    def _traced(self, pieces: list[Piece]) -> Iterator[list[Piece]]:
        """As traced: the ranks of one EP group, in one dispatch of one step."""
        ep_size = self.target.ep_size
        place = {rank: number for number, rank in enumerate(sorted(self.seen.ranks))}
        groups = len(place) // ep_size
        if groups > 1:
            self.notes.append(
                f"the trace's {len(place)} ranks are {groups} groups of {ep_size}; a step replays if any of them "
                "overflows"
            )
        pieces = sorted(pieces, key=lambda piece: (piece.step, piece.dispatch, piece.rank))
        for (step, _), members in groupby(pieces, key=lambda piece: (piece.step, piece.dispatch)):
            batches: dict[int, list[Piece]] = {}
            for piece in members:
                batches.setdefault(place[piece.rank] // ep_size, []).append(piece)
            there = sum(len(batch) for batch in batches.values())
            if there < len(place) and not self.log.add("missing-rank", f"step {step}: {there} of {len(place)} ranks"):
                continue
            yield from batches.values()

    def _assembled(self, pieces: list[Piece]) -> Iterator[list[Piece]]:
        """Pieces of different ranks and the same time, as many as the target has ranks."""
        ep_size, cut = self.target.ep_size, self.maker.cut_tokens
        pieces = sorted(pieces, key=lambda piece: (piece.step, piece.dispatch, piece.rank))
        spare = len(pieces) % ep_size * cut + self.maker.unused_tokens
        self.notes.append(
            f"batches were assembled: {ep_size} ranks x {cut} tokens, each rank's tokens consecutive in the trace "
            f"({len(self.seen.ranks)} ranks, up to {self.seen.tokens} tokens a dispatch), so documents stay together; "
            f"{spare} tokens at the end were left over"
        )
        for start in range(0, len(pieces) - ep_size + 1, ep_size):
            yield pieces[start : start + ep_size]

    def _pair_bound(self, chunk: list[list[Piece]], summed: bool) -> np.ndarray:
        """Upper bound of the tokens between two ranks where only counts are known: ``[X, L]``.

        A rank gets no more tokens than it gets rows, and no more than there are. Where the sources are summed up,
        all of a destination's rows may come from one of them.
        """
        bounds = []
        for batch in chunk:
            of_piece = []
            for piece in batch:
                owners = self.maker.placement.owner_LE
                to_rank = [
                    np.bincount(o, c, self.target.ep_size).max() for o, c in zip(owners, piece.counts_LE, strict=True)
                ]
                most = -(-piece.num_tokens // self.target.ep_size) if summed else piece.num_tokens
                of_piece.append(np.minimum(np.array(to_rank), most))
            bounds.append(np.stack(of_piece).max(0))
        return np.stack(bounds).astype(np.int64)


def _chunks(batches: Iterator[list[Piece]]) -> Iterator[list[list[Piece]]]:
    chunk: list[list[Piece]] = []
    for batch in batches:
        chunk.append(batch)
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _merge_steps(
    steps: np.ndarray, rows_XL: np.ndarray, pairs_XL: np.ndarray, one_batch_a_step: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Several groups or micro-batches of one step: the step needs the most any of them needs."""
    if one_batch_a_step:
        return steps, rows_XL, pairs_XL.astype(np.int64)
    starts = np.flatnonzero(np.concatenate([[True], steps[1:] != steps[:-1]]))
    return steps[starts], np.maximum.reduceat(rows_XL, starts), np.maximum.reduceat(pairs_XL.astype(np.int64), starts)


def record_counts(record: Record, num_experts: int) -> np.ndarray:
    """int64 ``[E]``: (token, slot) pairs of each expert in one record."""
    if record.idx_TK is not None:
        return token_counts(record.idx_TK, num_experts)
    return np.pad(record.counts_E, (0, max(0, num_experts - record.counts_E.size)))[:num_experts]
