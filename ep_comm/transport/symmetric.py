"""The symmetric transport: ranks of one NVLink domain write into each other's memory.

Every rank of a group has a window, mapped by all of them (``torch.distributed._symmetric_memory``, default
backend), and the kernels of :mod:`ep_comm.cuda` meet in it: one plans, one scatters, one gathers. The window is
sized by tokens, never by budgets, so growing a budget does not touch it, and the dispatchers of a group share it.
Every kernel first waits until all ranks have entered the same operation, which is what makes it safe to use the
window again. Epochs are counted in device memory, so a replayed CUDA graph counts on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import EPConfig
from ..cuda import ops
from ..cuda.kernels import cuda_kernels
from ..cuda.window import STATE_WORDS, WindowLayout
from ..errors import ClosedError, PeerLostError
from ..mxfp8 import MXFP8Tensor, wire_payload_bytes
from ..plan import RoutingPlan, Sizing
from ..status import FAULT_VALUES
from ..unblock import on_break
from .base import PlanRequest, Route, RowFormat, Transport
from .collective import CollectiveTransport
from .windows import require_everywhere, shared_window

__all__ = ["SymmetricTransport"]

_NO_BAD_ID = 2**31 - 1
_OPERATIONS = {1: "dispatch (exchange of routing counts)", 2: "moving rows to experts", 3: "summing rows", 4: "barrier"}
_STOPPED = 5
_STATE_ERROR = 3  # as in common.cuh: what failed, peer, epoch


class SharedWindow:
    """The window of one group on this rank, and its mapping on all of them.

    Made collectively. Kept alive by the transports that use it.

    Raises:
        EPError: on every rank, if one has no memory for it.
    """

    def __init__(
        self, key: str, layout: WindowLayout, group: dist.ProcessGroup, device: torch.device, timeout_seconds: float
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.key, self.layout, self.rank = key, layout, dist.get_rank(group)
        self.timeout_seconds = timeout_seconds
        memory, problem = None, None
        try:
            memory = symmetric_memory.empty(layout.total_bytes, dtype=torch.uint8, device=device)
        except Exception as error:
            # Not raised here: the others would wait for this rank where windows are mapped.
            problem = (
                f"the symmetric transport's window of {layout.total_bytes / 2**20:,.0f} MiB (it grows with "
                f"max_tokens_per_rank={layout.max_tokens}) cannot be allocated: {error}"
            )
        require_everywhere(problem, group)
        self._mapping = symmetric_memory.rendezvous(memory, group.group_name)
        memory.zero_()
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        """Of the latest operation."""
        self.window = ops.Window(
            peers=torch.tensor(list(self._mapping.buffer_ptrs), dtype=torch.int64, device=device),
            local=memory,
            state=torch.zeros(STATE_WORDS, dtype=torch.int32, device=device),
            first_bad=torch.full((1,), _NO_BAD_ID, dtype=torch.int32, device=device),
            rank=self.rank,
            layout=layout,
            timeout_ns=int(timeout_seconds * 1e9),
        )
        # The copy engine reaches a GPU whose SMs are all taken by waiting kernels.
        self._stop_word = torch.tensor([_STOPPED], dtype=torch.int32).pin_memory()
        self._stop_stream = torch.cuda.Stream(device)
        on_break(self)
        # A peer may write into the window as soon as it runs its first kernel: not before all are zeroed.
        torch.cuda.synchronize(device)
        dist.barrier(group)

    def enter(self) -> ops.Window:
        """The window, for an operation on the current stream: after all earlier ones, whatever stream they are on.

        A graph cannot wait for work outside of it; where it is launched its stream has to.
        """
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and stream != self._stream:
            with torch.cuda.stream(self._stream):
                earlier_captured = torch.cuda.is_current_stream_capturing()
            if earlier_captured == torch.cuda.is_current_stream_capturing():
                stream.wait_stream(self._stream)
        self._stream = stream
        return self.window

    def stop_waiting(self) -> None:
        """Let the kernels of this rank stop waiting for peers: one of them has failed."""
        with torch.cuda.stream(self._stop_stream):
            self.window.state[_STATE_ERROR : _STATE_ERROR + 1].copy_(self._stop_word, non_blocking=True)


def _window_for(config: EPConfig, group: dist.ProcessGroup, device: torch.device) -> SharedWindow:
    """A window of the group that is large enough for ``config``. Collective."""
    needed = WindowLayout(
        ep_size=dist.get_world_size(group),
        num_experts=config.num_experts,
        top_k=config.top_k,
        max_tokens=config.max_tokens_per_rank,
        # Rows of any dtype, as they are: the widest that can travel.
        row_bytes=config.hidden_size * 4,
    )

    def make(key: str, layout: WindowLayout) -> SharedWindow:
        return SharedWindow(key, layout, group, device, config.timeout_seconds)

    return shared_window(group, needed, make)


@dataclass(frozen=True, kw_only=True)
class WindowPlan(RoutingPlan):
    """A plan made by the kernels, whose tables lie in the window."""

    tables: ops.PlanTables


@dataclass
class SymmetricRoute(Route):
    """The tables of one dispatch; ``received`` holds this rank's rows after the first scatter.

    It keeps the window, so that a backward pass may follow after its dispatcher was closed.
    """

    plan: WindowPlan
    sizing: Sizing
    shared: SharedWindow
    received: Tensor | None = None


class SymmetricTransport(Transport):
    """Kernels over peers' memory.

    Args:
        config: the dispatcher's configuration.
        group, rank, ep_size: this rank's place.
        device: its GPU.
    """

    name = "symmetric"

    def __init__(
        self, config: EPConfig, group: dist.ProcessGroup, rank: int, ep_size: int, device: torch.device
    ) -> None:
        self._config = config
        self._collective = CollectiveTransport(group, rank, ep_size)
        self._kernels = cuda_kernels(device)
        self._shared: SharedWindow | None = _window_for(config, group, device)
        self._timeout_seconds = self._shared.timeout_seconds
        self._rank = rank

    def exchange_counts(self, message: Tensor, operation: str) -> Tensor:
        return self._collective.exchange_counts(message, operation)

    def make_plan(self, request: PlanRequest, rank: int) -> WindowPlan:
        if self._shared is None:
            raise self._closed()
        fault = request.fault
        if fault is None:
            fault = torch.zeros(1 + FAULT_VALUES, dtype=torch.int32, device=request.header.device)
        tables = ops.plan(
            self._kernels,
            self._shared.enter(),
            torch.cat([request.header, fault]),
            request.topk_idx_TK,
            request.topk_weights_TK,
            num_experts=self._config.num_experts,
            max_tokens=self._config.max_tokens_per_rank,
            alignment=request.alignment,
            num_sms=self._config.num_sms,
        )
        _, pairs_PP, _ = request.layout.split(tables.matrix_PX)
        return WindowPlan(
            rank=rank,
            ep_size=request.layout.ep_size,
            num_tokens=request.topk_idx_TK.shape[0],
            top_k=request.topk_idx_TK.shape[1],
            matrix_PX=tables.matrix_PX,
            slot_rank_TK=tables.slot_ranks_TK,
            slot_rows_TK=tables.slot_rows_TK,
            pair_tokens_PP=pairs_PP,
            tokens_per_expert_L=tables.tokens_per_expert_L,
            expert_offsets_L1=tables.expert_offsets_L1,
            required_rows_P=tables.required_rows_P,
            overflow=tables.verdict[0],
            tables=tables,
        )

    def open_route(self, plan: WindowPlan, sizing: Sizing) -> SymmetricRoute:
        if self._shared is None:
            raise self._closed()
        return SymmetricRoute(plan, sizing, self._shared)

    def scatter_rows(
        self,
        route: SymmetricRoute,
        rows_TH: Tensor,
        scalars_TK: Tensor | None,
        row_format: RowFormat,
        operation: str,
    ) -> tuple[Tensor | MXFP8Tensor, Tensor | None]:
        # The scalars of a route's first scatter were delivered by the plan, beside the rows' numbers.
        rows, weights_R, route.received = ops.scatter_rows(
            self._kernels,
            route.shared.enter(),
            rows_TH,
            route.plan.tables,
            route.sizing.rows,
            recv_rows_PTK=route.received,
            max_tokens=self._config.max_tokens_per_rank,
            alignment=self._config.alignment,
            mxfp8=row_format.mxfp8,
            keep_mxfp8=row_format.keep_mxfp8,
            rounding=row_format.rounding,
            zero_tail=self._config.zero_tail,
            num_sms=self._config.num_sms,
        )
        return rows, weights_R

    def gather_sum(
        self,
        route: SymmetricRoute,
        rows_RH: Tensor,
        weights_R: Tensor | None,
        scalars_R: Tensor | None,
        operation: str,
    ) -> tuple[Tensor, Tensor | None]:
        return ops.gather_sum(
            self._kernels,
            route.shared.enter(),
            rows_RH,
            route.plan.tables,
            route.received,
            row_weights_R=weights_R,
            row_scalars_R=scalars_R,
            max_tokens=self._config.max_tokens_per_rank,
            num_sms=self._config.num_sms,
        )

    def wire_row_bytes(
        self, hidden_size: int, top_k: int, row_format: RowFormat, *, scalars: bool, tables: bool
    ) -> int:
        payload = wire_payload_bytes(hidden_size, row_format.dtype.itemsize, row_format.mxfp8)
        return payload + 4 * top_k * (int(scalars) + int(tables))

    def device_status(self) -> Tensor | None:
        return None if self._shared is None else self._shared.window.state[_STATE_ERROR : _STATE_ERROR + 3]

    def raise_device_error(self, words: list[int]) -> None:
        operation, peer, _ = words
        if operation == _STOPPED:
            raise PeerLostError(f"rank {self._rank}: stopped waiting for its peers, because another rank failed")
        if operation:
            raise PeerLostError(
                f"rank {self._rank}: {_OPERATIONS.get(operation, 'a kernel')} failed: rank {peer} did not arrive "
                f"within timeout_seconds={self._timeout_seconds} (of the first dispatcher that used this window); it "
                f"died, or runs other operations than this rank"
            )

    def _closed(self) -> ClosedError:
        return ClosedError(f"rank {self._rank}: cannot dispatch or combine: the dispatcher has been closed")

    def close(self) -> None:
        # The window goes with the last transport or route that uses it.
        self._shared = None
