"""What a transport is: two verbs, the exchange of counts, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan import CountMatrix, LocalRouting, RoutingPlan, Sizing, make_plan
from ..status import Header
from .hosts import Hosts

__all__ = ["PlanRequest", "RowFormat", "Route", "Transport"]


@dataclass(frozen=True)
class RowFormat:
    """How a token row looks on the wire.

    Attributes:
        dtype: dtype of the rows on both sides.
        mxfp8: whether the row travels as MXFP8 blocks; then ``rounding`` is the scale rule.
        keep_mxfp8: hand out the received rows as :class:`ep_comm.MXFP8Tensor` instead of ``dtype``.
    """

    dtype: torch.dtype
    mxfp8: bool = False
    rounding: str = "rceil"
    keep_mxfp8: bool = False


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made from.

    Attributes:
        layout: of the messages that ranks exchange.
        status: the status words before the fault.
        fault_words: what the host found wrong on this rank, code and four integers; None where nothing is.
        topk_idx_TK: int32 or int64, contiguous.
        topk_weights_TK: float32, contiguous. Transports that deliver weights with the plan need them.
        alignment: of the segments.
        pair_limit: most tokens that may go from one rank to another, or None.
        operation: what the user is doing, for error messages.
    """

    layout: CountMatrix
    status: Header
    fault_words: list[int] | None
    topk_idx_TK: Tensor
    topk_weights_TK: Tensor
    alignment: int
    pair_limit: int | None
    operation: str

    @property
    def header(self) -> Tensor:
        """The status words before the fault, int32 ``[5]`` on the device."""
        return self.status.on(self.topk_idx_TK.device)

    @property
    def fault(self) -> Tensor | None:
        """``fault_words`` as int32 ``[5]`` on the device."""
        if self.fault_words is None:
            return None
        return torch.tensor(self.fault_words, dtype=torch.int32).to(self.topk_idx_TK.device)


class Route:
    """A transport's tables for one dispatch. Made by :meth:`Transport.open_route`, kept in the handle.

    The sending half comes from the plan. The receiving half (which row each received token has) travels with
    the first ``scatter_rows`` at the latest and is fixed from then on, so that a handle stays valid however many
    other dispatches come in between.
    """

    plan: RoutingPlan
    sizing: Sizing


class Transport(ABC):
    """Moves rows between the ranks of one group. Knows nothing of modes, autograd, budgets or replay.

    All ranks of the group call the same methods in the same order.
    """

    name: str
    uses_pair_rows = False
    """Whether static mode moves a fixed number of token rows between every two ranks."""
    hosts: Hosts | None = None
    """Where the ranks run, for transports that need to know; then ranks also exchange their tokens for each host."""

    @abstractmethod
    def exchange_counts(self, message: Tensor, operation: str) -> Tensor:
        """All-gather of one int32 vector ``[X]`` per rank; returns ``[P, X]``, on the device of the message."""

    def make_plan(self, request: PlanRequest, rank: int) -> RoutingPlan:
        """Count, exchange the counts, derive the plan. No host sync. A transport may fuse these."""
        layout = request.layout
        routing = LocalRouting.build(request.topk_idx_TK, layout.num_experts, layout.ep_size)
        fault = routing.fault if request.fault_words is None else request.fault_words
        matrix_PX = self.exchange_counts(layout.message(request.status, fault, routing), request.operation)
        return make_plan(
            routing, matrix_PX, layout, rank=rank, alignment=request.alignment, pair_limit=request.pair_limit
        )

    @abstractmethod
    def open_route(self, plan: RoutingPlan, sizing: Sizing) -> Route:
        """Derive the sending half of the tables. Moves no data."""

    @abstractmethod
    def scatter_rows(
        self, route: Route, rows_TH: Tensor, scalars_TK: Tensor | None, row_format: RowFormat, operation: str
    ) -> tuple[Tensor, Tensor | None]:
        """Copy every token row to all rows that the plan gives it on the experts' ranks.

        Args:
            rows_TH: this rank's rows ``[T, H]``, contiguous.
            scalars_TK: fp32 ``[T, K]``, one scalar a slot that travels along; needed on a route's first
                scatter, which also carries the receiving half of the tables.
            operation: what the user is doing, for error messages.

        Returns:
            rows ``[R, H]`` (zero in padding and tail) in ``row_format``, and the scalars ``[R]`` or None.
        """

    @abstractmethod
    def gather_sum(
        self,
        route: Route,
        rows_RH: Tensor,
        weights_R: Tensor | None,
        scalars_R: Tensor | None,
        operation: str,
    ) -> tuple[Tensor, Tensor | None]:
        """Sum the rows of every token, first on the rank that has them, then over ranks ascending.

        Args:
            rows_RH: ``[R, H]``, contiguous.
            weights_R: fp32 ``[R]``, factors of the rows, or None.
            scalars_R: fp32 ``[R]``, brought back unsummed to the slot they belong to, or None.

        Returns:
            sums ``[T, H]`` in the dtype of the rows, and the scalars ``[T, K]`` or None.
        """

    @abstractmethod
    def wire_row_bytes(
        self, hidden_size: int, top_k: int, row_format: RowFormat, *, scalars: bool, tables: bool
    ) -> int:
        """Bytes that one token row takes between two ranks, with its scalars and receiving tables if asked."""

    def device_status(self) -> Tensor | None:
        """int32 words on the device that hold errors of kernels, or None; the first is 0 where there is no error.

        They are read together with a step's verdict.
        """
        return None

    def raise_device_error(self, words: list[int]) -> None:  # noqa: B027
        """Raise PeerLostError if the words of :meth:`device_status`, copied to the host, hold an error."""

    def close(self) -> None:  # noqa: B027
        """Give back what the transport owns. The process group is the caller's."""
