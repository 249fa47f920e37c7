"""What a dispatcher tells the other ranks before rows move, and what it makes of their answers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import devices
from .agreement import raise_reported
from .budget import StaticBudget
from .config import EPConfig
from .errors import EPError
from .handle import DispatchHandle
from .plan import CountMatrix, RoutingPlan, Sizing
from .status import DTYPES, Fault, FaultCode, Header, Operation
from .transport import Transport
from .transport.base import PlanRequest

__all__ = ["Exchange"]

_NO_LIMIT = 2**31 - 1
_MAX_HEADERS = 256  # the least recently used go: with ragged batches every step may bring another number of tokens


class Exchange:
    """The exchanges of one dispatcher: routing counts before a dispatch, status before an eager combine.

    Args:
        config: the dispatcher's configuration.
        transport: carries the messages.
        rank, ep_size: this rank's place in the group.
        ordinal, name: of the dispatcher, for the other ranks and for messages.
        budget: of static mode, None in eager mode.
        group: the process group, for messages.
    """

    def __init__(
        self,
        config: EPConfig,
        transport: Transport,
        rank: int,
        ep_size: int,
        *,
        ordinal: int,
        name: str,
        budget: StaticBudget | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.config, self.budget, self.group = config, budget, group
        self.transport = transport
        self.rank, self.ordinal, self.name = rank, ordinal, name
        self.layout = CountMatrix(config, ep_size, transport.hosts)
        self._ep_size = ep_size
        self._headers: OrderedDict[tuple[Any, ...], Header] = OrderedDict()
        self._captured: dict[tuple[Any, ...], Header] = {}

    def plan(
        self,
        tokens: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        fault: Fault | None,
        sequence: int,
        *,
        rows: int | None,
    ) -> tuple[RoutingPlan, Sizing]:
        """Exchange counts, derive the plan, decide the sizes of this dispatch's buffers.

        Args:
            fault: what is wrong on this rank; the tensors are then stand-ins without tokens.
            rows: of the receive buffer; None sizes the buffers by what arrives, up to the ceiling of the budget if
                there is one.

        Raises:
            EPError: what any rank reported, on all ranks; in static mode only where the host may look.
        """
        exact = rows is None
        limit = rows
        if exact:
            limit = _NO_LIMIT if self.budget is None else self.budget.rows.ceiling
        device, dtype_code = tokens.device, DTYPES.index(tokens.dtype)
        request = PlanRequest(
            layout=self.layout,
            status=self._header(device, Operation.DISPATCH, sequence, tokens.shape[0], dtype_code, limit),
            fault_words=None if fault is None else fault.words(),
            topk_idx_TK=topk_idx.contiguous(),
            topk_weights_TK=topk_weights.detach().contiguous(),
            alignment=self.config.alignment,
            pair_limit=None if exact or not self.transport.uses_pair_rows else self._pair_rows,
            operation=f"dispatch of {self.name}",
        )
        plan = self.transport.make_plan(request, self.rank)
        return plan, self._size(plan.matrix_PX, exact, limit, fault)

    def agree_to_combine(
        self,
        operation: Operation,
        device: torch.device,
        expert_output: Any,
        handle: Any,
        fault: Fault | None,
    ) -> None:
        """Let every rank know of every rank's bad argument, before rows move."""
        known = isinstance(handle, DispatchHandle)
        sequence, num_tokens = (handle.channel.sequence, handle.num_tokens) if known else (0, 0)
        dtype_code = DTYPES.index(expert_output.dtype) if fault is None else 0
        header = self._header(device, operation, sequence, num_tokens, dtype_code, _NO_LIMIT)
        message = self.layout.message(header, (fault or Fault(FaultCode.NONE)).words(), device=device)
        matrix_PX = self.transport.exchange_counts(message, f"combine of {self.name}")
        raise_reported(self, self._to_host(matrix_PX), fault, recorded=False)

    def prepare_capture(self) -> None:
        """Make what a capture may not make: status words for the budget in force, for all calls seen so far."""
        for device, operation, _, num_tokens, dtype_code, _ in [*self._captured, *self._headers]:
            self._header(device, operation, 0, num_tokens, dtype_code, self.budget.rows.rows).on(device)

    @property
    def _pair_rows(self) -> int:
        return self.budget.pairs.rows

    def _size(self, matrix_PX: Tensor, exact: bool, limit: int, fault: Fault | None) -> Sizing:
        """Buffer sizes of this dispatch; in eager mode and on a replay the dispatch's one host sync."""
        if not exact and not devices.host_reads_are_free(matrix_PX.device):
            return Sizing(rows=limit, pair_rows=self._pair_rows)
        if devices.is_capturing(matrix_PX.device):
            raise EPError(
                f"rank {self.rank}: {self.name} is in eager mode and cannot be captured in a CUDA graph: the size of "
                f"its buffers is read on the host; use mode='static'"
            )
        host_PX = self._to_host(matrix_PX)
        raise_reported(self, host_PX, fault, recorded=self.budget is not None)
        if not exact:
            return Sizing(rows=limit, pair_rows=self._pair_rows)
        return Sizing(
            rows=min(self.layout.rows_of(host_PX, self.rank, self.config.alignment), limit),
            pair_tokens=self.layout.pair_tokens(host_PX).tolist(),
            host_tokens=self.layout.host_tokens(host_PX).tolist(),
        )

    def _to_host(self, matrix_PX: Tensor) -> Tensor:
        """Exchanged messages on the host, after the transport's own errors were looked at; one copy for both."""
        status = self.transport.device_status()
        if status is None:
            return devices.to_host(matrix_PX)
        words = devices.to_host(torch.cat([status, matrix_PX.flatten()]))
        self.transport.raise_device_error(words[: status.numel()].tolist())
        return words[status.numel() :].view(matrix_PX.shape)

    def _header(self, device: torch.device, operation: Operation, sequence: int, *words: int) -> Header:
        word = operation.word(self.ordinal)
        if self.budget is None:
            return self.layout.header(word, sequence, *words)
        # Constant from call to call, so that a captured step copies nothing from the host.
        key = (device, operation, self._pair_rows, *words)
        header = self._captured.get(key) or self._headers.pop(key, None)
        if header is None:
            header = self.layout.header(word, self._pair_rows, *words)
        if key in self._captured or devices.is_capturing(device):
            self._captured[key] = header  # the graph will read its words on the device for as long as it lives
            return header
        self._headers[key] = header
        if len(self._headers) > _MAX_HEADERS:
            self._headers.popitem(last=False)
        return header
