"""What a dispatch returns: the rows, and the handle that a combine needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torch import Tensor

from .directions import Channel
from .errors import EPError
from .mxfp8 import MXFP8Tensor

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

__all__ = ["DispatchHandle", "Dispatched"]


@dataclass(frozen=True)
class DispatchHandle:
    """What a combine needs to know about its dispatch. Opaque, except for the fields named here.

    Attributes:
        num_tokens: T of the dispatch on this rank.
        num_rows: R on this rank.
        weights: fp32 ``[R]``, the rows' routing weights, connected to the graph of the dispatch.
        rows_link: with ``recv_format="mxfp8"`` a ``[R, H]`` tensor without storage that stands for the rows in
            the autograd graph: a GEMM that consumes the MXFP8 rows takes it as a further input and returns
            the rows' gradient for it. None otherwise.
    """

    num_tokens: int
    num_rows: int
    weights: Tensor
    rows_link: Tensor | None
    dispatcher: Dispatcher = field(repr=False)
    channel: Channel | None = field(repr=False)
    """None where ``ticket`` stands for it."""
    ticket: Tensor | None = field(default=None, repr=False)
    """Of a dispatch made by an operator, see :mod:`ep_comm.operators`."""

    @classmethod
    def of(
        cls, dispatcher: Dispatcher, channel: Channel, weights: Tensor, *, rows_link: Tensor | None = None
    ) -> DispatchHandle:
        """The handle of a dispatch whose rows move through ``channel``."""
        return cls(
            num_tokens=channel.route.plan.num_tokens,
            num_rows=channel.route.sizing.rows,
            weights=weights,
            rows_link=rows_link,
            dispatcher=dispatcher,
            channel=channel,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> DispatchHandle:
        return self

    def __reduce__(self) -> NoReturn:
        raise EPError("a dispatch handle cannot be pickled: it is of use only to the dispatcher that made it")


class Dispatched(NamedTuple):
    """The rows that a dispatch delivered to this rank's experts.

    Rows are ordered by (local expert, source rank, source token, slot). Expert ``e`` has the rows from
    ``expert_offsets[e]`` on, ``tokens_per_expert[e]`` of them, then zero rows up to the alignment.
    """

    tokens: Tensor | MXFP8Tensor
    """``[R, H]`` in the dtype of the tokens, or an MXFP8Tensor with ``recv_format="mxfp8"``."""
    weights: Tensor
    """fp32 ``[R]``, zero for padding rows."""
    tokens_per_expert: Tensor
    """int64 ``[L]`` on the device."""
    expert_offsets: Tensor
    """int64 ``[L + 1]`` on the device; multiples of ``alignment``; the last is the end of the last segment."""
    handle: DispatchHandle
