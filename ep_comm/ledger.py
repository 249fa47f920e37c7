"""Which static dispatches a step has made, and the step's verdict.

A :class:`StepLedger` is open while :class:`ep_comm.StepRunner` runs a step. Every static dispatcher that
dispatches meanwhile enters itself and keeps, on the device, the peaks of what its dispatches needed. Reading
the ledger costs one copy to the host for all of them together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .plan import RoutingPlan
from .status import HEADER_WORDS, Word

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

__all__ = ["DispatchRecord", "Demand", "StepLedger", "current_ledger"]

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


class DispatchRecord:
    """Device-side peaks over dispatches: one int64 vector, updated in place and read in one copy.

    Words: overflow flag, pair peak, tokens sent, fault rank, fault words (5), required rows of each rank.
    """

    def __init__(self, ep_size: int, device: torch.device) -> None:
        self.ep_size = ep_size
        self.words = torch.zeros(4 + _FAULT_WORDS + ep_size, dtype=torch.int64, device=device)
        self.reset()

    def reset(self) -> None:
        """Forget everything; a device operation, so that it can stand at the start of a captured step."""
        self.words.zero_()
        self.words[3].fill_(-1)

    def add(self, plan: RoutingPlan, header_PX: Tensor) -> None:
        """Enter one dispatch. No host sync."""
        words, required = self.words, self.words[4 + _FAULT_WORDS :]
        words[0].copy_(torch.maximum(words[0], (plan.overflow != 0).long()))
        words[1].copy_(torch.maximum(words[1], plan.pair_tokens_PP.max()))
        sent_P = plan.pair_tokens_PP[plan.rank]
        words[2].add_(sent_P.sum() - sent_P[plan.rank])
        required.copy_(torch.maximum(required, plan.required_rows_P))
        faults_P = header_PX[:, Word.FAULT] != 0
        # index_select: indexing with a tensor of no dimensions would read it on the host.
        first = faults_P.to(torch.uint8).argmax().view(1)
        fault = torch.cat([first, header_PX.index_select(0, first)[0, Word.FAULT :].long()])
        fresh = faults_P.any() & (words[3] < 0)
        words[3 : 4 + _FAULT_WORDS].copy_(torch.where(fresh, fault, words[3 : 4 + _FAULT_WORDS]))

    def parse(self, words: list[int]) -> Demand:
        """Interpret the words after they have been copied to the host."""
        return Demand(
            overflowed=bool(words[0]),
            pair_tokens=words[1],
            tokens_sent=words[2],
            fault_rank=words[3],
            fault_words=words[4 : 4 + _FAULT_WORDS],
            required_rows=words[4 + _FAULT_WORDS :],
        )


class StepLedger:
    """The dispatchers of one attempt at a step.

    Attributes:
        exact: dispatches size their buffers exactly instead of by budget (a replay).
        dispatchers: in the order of their first dispatch.
    """

    def __init__(self, *, exact: bool) -> None:
        self.exact = exact
        self.dispatchers: list[Dispatcher] = []

    def enter(self, dispatcher: Dispatcher) -> None:
        """Note that ``dispatcher`` takes part; its record starts afresh with the first dispatch of the step."""
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
            raise RuntimeError("a StepRunner is running already: step_fn must not call another StepRunner")
        _current = self
        try:
            yield self
        finally:
            _current = None

    def read(self) -> list[Demand]:
        """Copy the records of all dispatchers to the host: one small read, the only sync of a step."""
        if not self.dispatchers:
            return []
        parts = []
        for dispatcher in self.dispatchers:
            parts.append(dispatcher.record.words)
            status = dispatcher.device_status()
            parts.append(dispatcher.record.words[:0] if status is None else status.long())
        flat = iter(torch.cat(parts).tolist())
        words = [[next(flat) for _ in range(part.numel())] for part in parts]
        for dispatcher, status in zip(self.dispatchers, words[1::2]):
            dispatcher.raise_device_error(status)
        return [d.record.parse(record) for d, record in zip(self.dispatchers, words[::2])]


_current: StepLedger | None = None


def current_ledger() -> StepLedger | None:
    """The ledger of the step that is running, or None outside a :class:`ep_comm.StepRunner`."""
    return _current
