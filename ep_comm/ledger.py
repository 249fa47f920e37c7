"""Which static dispatches a step has made, and the step's verdict.

A :class:`StepLedger` is open while :class:`ep_comm.StepRunner` runs a step. Every static dispatcher that
dispatches meanwhile enters itself and keeps, on the device, the peaks of what its dispatches needed. Reading
the ledger costs one copy to the host for all of them together.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .cuda.kernels import cuda_kernels
from .devices import group_device
from .errors import EPError
from .plan import RoutingPlan
from .status import HEADER_WORDS, Word

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

__all__ = ["AgreeingGroup", "Demand", "DispatchRecord", "StepLedger", "Verdict", "current_ledger", "note_dispatch"]

_FAULT_WORDS = HEADER_WORDS - Word.FAULT


@dataclass(frozen=True)
class Demand:
    """What a dispatcher's dispatches needed since its record was reset, on the host.

    Attributes:
        overflowed: some dispatch did not fit; equal on all ranks of the dispatcher's group.
        required_rows: most rows needed, for every rank of the group.
        pair_tokens: most tokens between any two ranks.
        tokens_sent: tokens that this rank sent to other ranks.
        fault_rank: rank whose routing was invalid, or -1.
        fault_words: the fault's status words.
    """

    overflowed: bool
    required_rows: list[int]
    pair_tokens: int
    tokens_sent: int
    fault_rank: int
    fault_words: list[int]


@dataclass(frozen=True)
class Verdict:
    """What the ranks agree on after an attempt, and what this rank's dispatchers needed.

    Attributes:
        overflow: somewhere a budget was too small, and the rows are not dropped by choice.
        failed: somewhere routing was invalid, or a kernel gave up waiting for a peer.
        demands: of this rank's dispatchers.
    """

    overflow: bool
    failed: bool
    demands: list[tuple[Dispatcher, Demand]]


# Words of a record before the fault words and the required rows of each rank.
_OVERFLOW, _PAIR_PEAK, _TOKENS_SENT, _FAULT_RANK = range(4)


class DispatchRecord:
    """Device-side peaks over dispatches: one int64 vector, updated in place and read in one copy.

    Words: overflow flag, pair peak, tokens sent, fault rank, fault words (5), required rows of each rank.
    """

    def __init__(self, ep_size: int, device: torch.device) -> None:
        self.words = torch.zeros(4 + _FAULT_WORDS + ep_size, dtype=torch.int64, device=device)
        self.reset()

    def reset(self) -> None:
        """Forget everything; a device operation, so that it can stand at the start of a captured step."""
        self.words.zero_()
        self.words[_FAULT_RANK].fill_(-1)

    def parse(self, words: list[int]) -> Demand:
        """Interpret the words after they have been copied to the host."""
        return Demand(
            overflowed=bool(words[_OVERFLOW]),
            pair_tokens=words[_PAIR_PEAK],
            tokens_sent=words[_TOKENS_SENT],
            fault_rank=words[_FAULT_RANK],
            fault_words=words[4 : 4 + _FAULT_WORDS],
            required_rows=words[4 + _FAULT_WORDS :],
        )


def note_dispatch(plan: RoutingPlan, record: DispatchRecord | None, sent: Tensor) -> None:
    """Enter one dispatch. No host sync.

    Args:
        record: where its demand goes; None in eager mode.
        sent: int64 without dimensions, tokens that this rank has sent to others so far; updated.
    """
    kernels = cuda_kernels(sent.device)
    words = None if record is None else record.words
    if kernels is not None:
        from .cuda.records import note_dispatch as note_on_device

        return note_on_device(kernels, plan.matrix_PX, plan.required_rows_P, plan.overflow, words, sent, plan.rank)
    sent_P = plan.pair_tokens_PP[plan.rank]
    tokens = sent_P.sum() - sent_P[plan.rank]
    sent += tokens
    if words is None:
        return
    words[_OVERFLOW].copy_(torch.maximum(words[_OVERFLOW], (plan.overflow != 0).long()))
    words[_PAIR_PEAK].copy_(torch.maximum(words[_PAIR_PEAK], plan.pair_tokens_PP.max()))
    words[_TOKENS_SENT].add_(tokens)
    required = words[4 + _FAULT_WORDS :]
    required.copy_(torch.maximum(required, plan.required_rows_P))
    header_PX = plan.matrix_PX[:, :HEADER_WORDS]
    faults_P = header_PX[:, Word.FAULT] != 0
    # index_select: indexing with a tensor of no dimensions would read it on the host.
    first = faults_P.to(torch.uint8).argmax().view(1)
    fault = torch.cat([first, header_PX.index_select(0, first)[0, Word.FAULT :].long()])
    kept = words[_FAULT_RANK : 4 + _FAULT_WORDS]
    kept.copy_(torch.where(faults_P.any() & (kept[0] < 0), fault, kept))


class StepLedger:
    """The dispatchers of one attempt at a step.

    Attributes:
        exact: dispatches size their buffers exactly instead of by budget (a replay).
        dispatchers: the static ones, in the order of their first dispatch.
        eager: whether a dispatcher in eager mode took part, which cannot be captured.
    """

    def __init__(self, *, exact: bool) -> None:
        self.exact = exact
        self.eager = False
        self.dispatchers: list[Dispatcher] = []

    def enter(self, dispatcher: Dispatcher) -> None:
        """Note that ``dispatcher`` takes part; its record starts afresh with the first dispatch of the step."""
        if dispatcher.budget is None:
            self.eager = True
            return
        if not any(known is dispatcher for known in self.dispatchers):
            self.dispatchers.append(dispatcher)
            dispatcher.record.reset()

    @contextmanager
    def open(self) -> Iterator[StepLedger]:
        """Make this the ledger that dispatches enter themselves into.

        One per process, not per thread: on GPUs recomputed dispatches run in autograd's own threads.
        """
        global _current
        if _current is not None:
            raise EPError("a StepRunner is running already: step_fn must not call another StepRunner")
        _current = self
        try:
            with _uncompiled() if self.exact else nullcontext():
                yield self
        finally:
            _current = None

    def device_words(self, group: dist.ProcessGroup | None = None) -> Tensor:
        """Verdict and records of all dispatchers as one int64 vector on their device; no host sync.

        The first two words say whether anything overflowed and whether anything failed, anywhere in ``group``
        if one is given. Ranks of a dispatcher's own group agree without it. A rank without a dispatcher of its own,
        a pipeline stage say, joins the verdict of the others, on the device of ``group``.
        """
        if not self.dispatchers:
            return _agreed(torch.zeros(2, dtype=torch.int64, device=group_device(group)), group)
        records = [dispatcher.record.words for dispatcher in self.dispatchers]
        counting = [words[_OVERFLOW] * (not d.drops) for words, d in zip(records, self.dispatchers, strict=True)]
        overflow = torch.stack(counting).amax()
        failed = torch.stack([words[_FAULT_RANK] for words in records]).amax() >= 0
        statuses = [status.long() for d in self.dispatchers if (status := d.device_status()) is not None]
        for status in statuses:
            failed = failed | (status[0] != 0)
        flags = _agreed(torch.stack([overflow, failed.to(overflow.dtype)]), group)
        return torch.cat([flags, *records, *statuses])

    def parse(self, words: list[int]) -> Verdict:
        """Interpret :meth:`device_words` on the host.

        Raises:
            PeerLostError: a kernel gave up waiting for a peer.
        """
        flat = iter(words)
        overflow, failed = bool(next(flat)), bool(next(flat))
        demands = [
            (dispatcher, dispatcher.record.parse([next(flat) for _ in range(dispatcher.record.words.numel())]))
            for dispatcher in self.dispatchers
        ]
        for dispatcher in self.dispatchers:
            status = dispatcher.device_status()
            if status is not None:
                dispatcher.raise_device_error([next(flat) for _ in range(status.numel())])
        return Verdict(overflow, failed, demands)


def _agreed(flags: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return flags


class AgreeingGroup:
    """Over which group the verdicts of a step have to be reduced, if over any.

    The ranks settle it together with the first ledger: one of them may have a dispatcher of a smaller group, or none.

    Args:
        group: all ranks that train together, or None.
    """

    _numbers = itertools.count(1)

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._reduces: bool | None = None
        self._own_number = next(self._numbers)
        self.number = 0
        """Of this one among those of the group, the same on all ranks; 0 until it is settled."""

    @property
    def settled(self) -> dist.ProcessGroup | None:
        """The group; None where the ranks agree without it, or have not settled it yet."""
        return self._group if self._reduces else None

    def group_of(self, ledger: StepLedger) -> dist.ProcessGroup | None:
        """The group for the verdict of ``ledger``. Collective the first time.

        Raises:
            EPError: a dispatcher of a smaller group appeared later, of which the other ranks cannot know.
        """
        if self._group is None:
            return None
        world = dist.get_world_size(self._group)
        needed = not ledger.dispatchers or any(dispatcher.ep_size != world for dispatcher in ledger.dispatchers)
        if self._reduces is None:
            facts = torch.tensor([int(needed), self._own_number], device=group_device(self._group))
            dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=self._group)
            reduces, self.number = facts.tolist()
            self._reduces = bool(reduces)
        if needed and not self._reduces:
            raise EPError(
                f"rank {dist.get_rank(self._group)}: step_fn used a dispatcher of a smaller group, or none, for the "
                f"first time after other steps: use it in the first step of the StepRunner as well"
            )
        return self.settled


def _uncompiled() -> AbstractContextManager[Any]:
    """Where compiled functions run as they were written: sizes that follow the data do not fit their traces."""
    # Without a compiled function nothing has imported it, and importing it takes seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


_current: StepLedger | None = None


def current_ledger() -> StepLedger | None:
    """The ledger of the step that is running, or None outside a :class:`ep_comm.StepRunner`."""
    return _current
