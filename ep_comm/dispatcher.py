"""The dispatcher: what users call, and where mode, budget and wire formats meet."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, NoReturn
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import agree_on_dispatcher
from .arguments import check_combine, check_dispatch
from .budget import StaticBudget, check_saved_budget
from .config import EPConfig, round_up
from .devices import group_device, to_host
from .directions import Channel, Combine, Dispatch
from .errors import ClosedError, ConfigError, EPError
from .exchange import Exchange
from .handle import Dispatched, DispatchHandle
from .ledger import Demand, DispatchRecord, StepLedger, current_ledger, note_dispatch
from .mxfp8 import MXFP8Tensor
from .plan import RoutingPlan, Sizing
from .status import Fault, FaultCode, Operation, error_from_words, name_values
from .transport import Transport, open_transport
from .transport.base import RowFormat

__all__ = ["DispatchHandle", "Dispatched", "Dispatcher"]

log = logging.getLogger("ep_comm")

_numbers = itertools.count()
_dispatchers: WeakValueDictionary[int, Dispatcher] = WeakValueDictionary()

Direction = Literal["dispatch_forward", "dispatch_backward", "combine_forward", "combine_backward"]


class Dispatcher:
    """Sends tokens to the ranks of their experts and brings the results back.

    Collective: every rank of ``group`` constructs it with an equal configuration and makes the same calls in
    the same order. Several dispatchers, of any shapes and groups, may live in one process, and any number
    of handles may be open.

    Args:
        config: sizes, mode, formats. Compared between the ranks.
        group: process group of the expert-parallel ranks; None takes the default group, or a single
            process if ``torch.distributed`` is not initialised.
        name: used in messages; :class:`ep_comm.StepRunner` uses the module's path in the model instead.

    Raises:
        ConfigError: on all ranks, if the configurations differ or do not suit the group.
    """

    def __init__(self, config: EPConfig, group: dist.ProcessGroup | None = None, *, name: str | None = None) -> None:
        if not isinstance(config, EPConfig):
            raise ConfigError(f"config must be an ep_comm.EPConfig, got {type(config).__name__}")
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        self.config = config
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.ep_size = dist.get_world_size(group) if group is not None else 1
        if self.rank < 0:
            raise ConfigError("group: this process is not a member of the process group it was given")
        self.number = next(_numbers)
        """Tells the dispatchers of this process apart, see :func:`dispatcher_of_number`."""
        self.ordinal = agree_on_dispatcher(config, self.number, group, self.rank)
        """Tells the dispatchers of a group apart; the same on all its ranks."""
        self.name = name or f"dispatcher {self.ordinal}"
        if config.num_experts % self.ep_size:
            raise ConfigError(
                f"rank {self.rank}: num_experts must be a multiple of the group's size {self.ep_size}, got "
                f"num_experts={config.num_experts}"
            )
        self.num_local_experts = config.num_experts // self.ep_size
        self._transport = open_transport(config, group, self.rank, self.ep_size, group_device(group))
        log.info("%s: %s transport over %d ranks", self.name, self._transport.name, self.ep_size)
        self.budget = StaticBudget(config, self.ep_size) if config.mode == "static" else None
        """The static budget and its history; None in eager mode."""
        self._exchange = Exchange(
            config,
            self._transport,
            self.rank,
            self.ep_size,
            ordinal=self.ordinal,
            name=self.name,
            budget=self.budget,
            group=group,
        )
        self.routing_hooks: list[Callable[[Dispatcher, Tensor], None]] = []
        """Called with this dispatcher and ``topk_idx`` on every dispatch that is not a recomputation."""
        self._sequence = 0
        self._closed = False
        self._latest: RoutingPlan | None = None
        self._set_device(group_device(group))
        _dispatchers[self.number] = self

    # -- the two calls -------------------------------------------------------------------------------

    def dispatch(self, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Dispatched:
        """Send every token to the ranks that own its experts.

        Args:
            tokens: ``[T, H]`` bf16, fp16 or fp32, any strides; ``T`` from 0 to ``max_tokens_per_rank``, and it
                may differ between ranks and calls.
            topk_idx: ``[T, K]`` int32 or int64 expert ids; -1 for a slot without expert. An expert may occur
                twice in a token's slots.
            topk_weights: ``[T, K]`` float32.

        Returns:
            The rows for this rank's experts; see :class:`Dispatched`. Gradients flow to ``tokens`` and
            ``topk_weights``.

        Raises:
            ArgumentError, RoutingError, ClosedError: on all ranks, whichever rank's argument is bad. In static
                mode ids out of range are recorded instead, and raised by :meth:`check` or by the step runner.
            PeerLostError: a rank died or did not arrive.
        """
        if torch.compiler.is_compiling():
            from . import operators  # only here: it needs what torch.compile imports, which takes seconds

            return operators.dispatch(self, tokens, topk_idx, topk_weights)
        fault = check_dispatch(self, tokens, topk_idx, topk_weights)
        return self._dispatch(tokens, topk_idx, topk_weights, fault)

    def refuse(self, reason: str | Fault | Exception) -> NoReturn:
        """Instead of a dispatch that the other ranks make: tell them that this rank cannot, and raise.

        For code around the dispatcher that finds its own input wrong, on one rank perhaps. The others raise, too.

        Args:
            reason: what is wrong. The others read a fault as this rank does, of an exception its name, of a string
                nothing.

        Raises:
            ArgumentError: with ``reason``, if it is a string or a fault.
            Exception: ``reason``, if it is an exception.
        """
        if isinstance(reason, Exception):
            # Whatever goes wrong while telling is a consequence at most: the caller has to see the cause.
            with suppress(Exception):
                self._dispatch(None, None, None, Fault(FaultCode.FAILED, name_values(type(reason).__name__)))
            raise reason
        fault = reason if isinstance(reason, Fault) else Fault(FaultCode.REFUSED, detail=reason)
        self._dispatch(None, None, None, fault)
        raise AssertionError("a fault always raises")

    def _dispatch(self, tokens: Any, topk_idx: Any, topk_weights: Any, fault: Fault | None) -> Dispatched:
        if fault is not None:
            tokens, topk_idx, topk_weights = self.no_tokens()
        channel = self.open_channel(tokens, topk_idx, topk_weights, fault, rows=self.planned_rows)
        anchor = self.anchor if torch.is_grad_enabled() else self.anchor.detach()
        rows, scales, link, weights = Dispatch.apply(tokens, topk_weights, anchor, channel)
        self.finish_dispatch(topk_idx, fault)
        received = rows if scales is None else MXFP8Tensor(rows, scales)
        plan = channel.route.plan
        handle = DispatchHandle.of(self, channel, weights, rows_link=link)
        return Dispatched(received, weights, plan.tokens_per_expert_L, plan.expert_offsets_L1, handle)

    def combine(self, expert_output: Tensor, handle: DispatchHandle, apply_weights: bool = False) -> Tensor:
        """Bring the experts' outputs back to the tokens' owners and sum them per token.

        Args:
            expert_output: ``[R, H]`` bf16, fp16 or fp32, one output for each dispatched row. Padding and tail
                rows are not read.
            handle: of the dispatch.
            apply_weights: multiply every row by its routing weight; otherwise the caller already did.

        Returns:
            ``[T, H]`` in the dtype of ``expert_output``; zero for a token without experts. Sums are FP32 in the
            order of docs/architecture.md. Gradients flow to ``expert_output`` and, with ``apply_weights``, to the
            routing weights.

        Raises:
            ArgumentError, HandleError, ClosedError: on all ranks in eager mode (see ``EPConfig.handshake``).
            PeerLostError: a rank died or did not arrive.
        """
        if torch.compiler.is_compiling() or getattr(handle, "ticket", None) is not None:
            from . import operators

            return operators.combine(self, expert_output, handle, bool(apply_weights))
        self.admit_combine(expert_output, handle, apply_weights)
        return Combine.apply(expert_output, handle.weights, handle.channel, bool(apply_weights))

    # -- the steps of the two calls, for operators that are made of them ------------------------------

    @property
    def planned_rows(self) -> int | None:
        """Rows that the receive buffer of a dispatch would have now; None where they follow from what arrives."""
        ledger = current_ledger()
        if self.budget is None or (ledger is not None and ledger.exact and not self.drops):
            return None
        return self.budget.rows.rows

    def open_channel(
        self, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor, fault: Fault | None, *, rows: int | None
    ) -> Channel:
        """Exchange the routing counts of a dispatch and decide how its rows move.

        Args:
            fault: what is wrong on this rank; the tensors are then those of :meth:`no_tokens`.
            rows: of the receive buffer; None sizes it by what arrives.
        """
        if fault is None and self.ep_size == 1:
            self._set_device(tokens.device)
        ledger = current_ledger()
        if ledger is not None:
            ledger.enter(self)
        sequence = self._sequence
        plan, sizing = self._exchange.plan(tokens, topk_idx, topk_weights, fault, sequence, rows=rows)
        self._note(plan)
        # Counted only now: where the exchange ended in an error, it ended so on all ranks.
        self._sequence += 1
        return self._channel(plan, sizing, tokens.dtype, sequence)

    def finish_dispatch(self, topk_idx: Tensor, fault: Fault | None) -> None:
        """After the rows have moved: call the hooks, or raise what was wrong on this rank."""
        if fault is not None:
            raise error_from_words(fault.words(), self.rank, self.config, fault.detail, group=self.group)
        if torch._C._current_graph_task_id() == -1:
            for hook in self.routing_hooks:
                hook(self, topk_idx)

    def admit_combine(self, expert_output: Tensor, handle: DispatchHandle, apply_weights: bool) -> None:
        """Check the arguments of a combine; in eager mode together with the other ranks."""
        fault = check_combine(self, expert_output, handle)
        if self.config.mode == "eager" and self.config.handshake:
            operation = Operation.WEIGHTED_COMBINE if apply_weights else Operation.COMBINE
            self._exchange.agree_to_combine(operation, self.device, expert_output, handle, fault)
        if fault is not None:
            raise error_from_words(fault.words(), self.rank, self.config, fault.detail, group=self.group)

    def no_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Stand-ins for arguments that cannot be used, to take part in an exchange with."""
        config, device = self.config, self.device
        return (
            torch.empty(0, config.hidden_size, dtype=torch.bfloat16, device=device),
            torch.empty(0, config.top_k, dtype=torch.int64, device=device),
            torch.empty(0, config.top_k, dtype=torch.float32, device=device),
        )

    # -- facts ---------------------------------------------------------------------------------------

    @property
    def transport(self) -> str:
        """``"collective"``, ``"symmetric"``, ``"hierarchical"``, or ``"local"`` where the group has one rank."""
        return self._transport.name

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def drops(self) -> bool:
        """Whether rows that do not fit are lost by choice (``overflow="drop"``) instead of replayed."""
        return self.config.overflow == "drop"

    @property
    def budget_rows(self) -> int | None:
        """Rows of the static receive buffer; None in eager mode."""
        return None if self.budget is None else self.budget.rows.rows

    @property
    def pair_rows(self) -> int | None:
        """Token rows budgeted between two ranks on the collective and hierarchical transports; None in eager mode."""
        return None if self.budget is None else self.budget.pairs.rows

    @property
    def overflowed(self) -> bool:
        """Whether the latest dispatch did not fit on some rank; equal on all ranks. Reads the device."""
        return self._latest is not None and self.config.mode == "static" and bool(self._latest.overflow)

    @property
    def required_rows(self) -> int:
        """Rows the latest dispatch needs on this rank, padding included. Reads the device."""
        return self.required_rows_per_rank[self.rank]

    @property
    def required_rows_per_rank(self) -> list[int]:
        """Rows the latest dispatch needs on every rank of the group. Reads the device."""
        return to_host(self._latest.required_rows_P).tolist() if self._latest is not None else [0] * self.ep_size

    @property
    def pair_tokens(self) -> list[list[int]]:
        """Tokens the latest dispatch moved from every rank (outer index) to every rank. Reads the device."""
        return (
            to_host(self._latest.pair_tokens_PP).tolist()
            if self._latest is not None
            else [[0] * self.ep_size] * self.ep_size
        )

    @property
    def tokens_sent(self) -> int:
        """Tokens that this rank has sent to other ranks in all its dispatches. Reads the device."""
        return int(self._sent)

    def wire_row_bytes(self, direction: Direction, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of one token row between two ranks.

        Args:
            direction: ``"dispatch_forward"``, ``"dispatch_backward"``, ``"combine_forward"`` or
                ``"combine_backward"``.
            dtype: dtype of the tokens.
        """
        config = self.config
        mxfp8 = {
            "dispatch_forward": config.dispatch_forward_dtype == "mxfp8",
            "dispatch_backward": False,
            "combine_forward": False,
            "combine_backward": config.combine_backward_dtype == "mxfp8",
        }
        if direction not in mxfp8:
            raise ConfigError(f"direction must be one of {', '.join(mxfp8)}, got {direction!r}")
        return self._transport.wire_row_bytes(
            config.hidden_size,
            config.top_k,
            RowFormat(dtype, mxfp8=mxfp8[direction]),
            scalars=direction.startswith("dispatch"),
            tables=direction == "dispatch_forward",
        )

    # -- budgets -------------------------------------------------------------------------------------

    def grow(self, rows: int) -> None:
        """Raise the static budget so that ``rows`` rows, and the latest dispatch's pairs, fit.

        A local allocation: no communication, no rebuilt group. Call it on all ranks; each may pass its own
        ``required_rows``.

        Raises:
            BudgetExceededError: more rows than ``max_budget_rows`` are asked for, or were required on any rank.
            ConfigError: ``rows`` is no whole number.
            EPError: in eager mode, which has no budget.
        """
        if self.budget is None:
            raise EPError(f"rank {self.rank}: grow() needs mode='static'; eager mode has no budget")
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
            raise ConfigError(f"rank {self.rank}: rows must be an integer of 0 or more, got {rows!r}")
        limit, pairs = self.budget.rows, self.budget.pairs
        required_P = self.required_rows_per_rank if self.overflowed else [0]
        most = max(required_P)
        if max(most, rows) > limit.ceiling:
            where = required_P.index(most) if most > limit.ceiling else self.rank
            raise self.budget.exceeded(self.name, where, max(most, rows), group=self.group)
        limit.rows = max(limit.rows, round_up(rows, self.config.alignment))
        if self._latest is not None:
            pairs.rows = pairs.target(max(map(max, self.pair_tokens)), headroom=0.0)

    def check(self) -> None:
        """Raise what static mode recorded since the last check (ids out of range). Reads the device.

        Raises:
            RoutingError: on all ranks.
        """
        ledger = StepLedger(exact=False)
        ledger.dispatchers.append(self)
        ((_, demand),) = ledger.parse(to_host(ledger.device_words()).tolist()).demands
        if demand.fault_rank >= 0:
            self.record.reset()
            raise self.recorded_error(demand)

    def recorded_error(self, demand: Demand, layer: str | None = None) -> EPError:
        """The error that a demand's fault words stand for."""
        detail = f"in {layer or self.name}"
        return error_from_words(demand.fault_words, demand.fault_rank, self.config, detail, group=self.group)

    def device_status(self) -> Tensor | None:
        """The transport's error words on the device, see :meth:`ep_comm.transport.base.Transport.device_status`."""
        return self._transport.device_status()

    def raise_device_error(self, words: list[int]) -> None:
        """Raise PeerLostError if the words of :meth:`device_status` hold an error."""
        if words:
            self._transport.raise_device_error(words)

    # -- state and life ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Budgets and their history; plain integers. Empty in eager mode."""
        return {} if self.budget is None else self.budget.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over budgets from :meth:`state_dict`. What was saved in the other mode changes nothing.

        Raises:
            ConfigError: ``state`` is nothing that :meth:`state_dict` returned, or a saved budget is above the ceiling
                of this configuration. Then nothing has changed.
        """
        self.check_state_dict(state)
        if state and self.budget is not None:
            self.budget.load_state_dict(state, f"rank {self.rank}: {self.name}")

    def check_state_dict(self, state: Any, layer: str | None = None) -> None:
        """Raise the ConfigError that :meth:`load_state_dict` would raise; changes nothing."""
        owner = f"rank {self.rank}: {layer or self.name}"
        if state == {}:
            return
        if self.budget is None:
            check_saved_budget(state, owner)
        else:
            self.budget.check_state_dict(state, owner)

    def close(self) -> None:
        """Give back what the dispatcher owns. The process group stays the caller's. May be called twice.

        Dispatches and combines then raise ClosedError; the backward passes of earlier ones still run.
        """
        if not self._closed:
            self._closed = True
            self._transport.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Dispatcher:
        """Another dispatcher of the same configuration, group and budget. Collective, as constructing one is."""
        copied = memo[id(self)] = Dispatcher(self.config, self.group, name=self.name)
        copied.load_state_dict(self.state_dict())
        return copied

    def __reduce__(self) -> NoReturn:
        raise EPError(
            f"{self.name} cannot be pickled, because it belongs to a process group: save state_dict() of the model and "
            f"of the StepRunner instead of the objects"
        )

    def __enter__(self) -> Dispatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare_capture(self) -> None:
        """Before a step is captured in a CUDA graph on the present budget."""
        self._exchange.prepare_capture()

    def wrap_transport(self, wrapper: Callable[[Transport], Transport]) -> None:
        """Put ``wrapper(transport)`` into the transport's place, to measure it for example."""
        self._transport = self._exchange.transport = wrapper(self._transport)

    # -- inside --------------------------------------------------------------------------------------

    def _note(self, plan: RoutingPlan) -> None:
        """Remember what this dispatch needed; no host sync."""
        record = None if self.budget is None else self.record
        note_dispatch(plan, record, self._sent)
        self._latest = plan

    def _channel(self, plan: RoutingPlan, sizing: Sizing, dtype: torch.dtype, sequence: int) -> Channel:
        config = self.config
        return Channel(
            transport=self._transport,
            route=self._transport.open_route(plan, sizing),
            label=f"{self.name}, dispatch {sequence}",
            sequence=sequence,
            dispatch_format=RowFormat(
                dtype,
                mxfp8=config.dispatch_forward_dtype == "mxfp8",
                rounding=config.scale_rounding,
                keep_mxfp8=config.recv_format == "mxfp8",
            ),
            mxfp8_gradients=config.combine_backward_dtype == "mxfp8",
            rounding=config.scale_rounding,
        )

    def _set_device(self, device: torch.device) -> None:
        """Make the device-side state. A single rank follows its tokens, as it has no group to ask."""
        if getattr(self, "device", None) == device:
            return
        self.device = device
        # Updated in place by every dispatch: not tensors of the inference mode that happens to be on now.
        with torch.inference_mode(False):
            self.record = DispatchRecord(self.ep_size, device)
            self._sent = torch.zeros((), dtype=torch.int64, device=device)
            self.anchor = torch.zeros((), device=device, requires_grad=True)


def dispatcher_of_number(number: int) -> Dispatcher:
    """The dispatcher of this process with that ``number``, by which operators name it: they take no objects.

    Raises:
        ClosedError: it is gone.
    """
    dispatcher = _dispatchers.get(number)
    if dispatcher is None:
        raise ClosedError(f"dispatcher {number} of this process does not exist any more")
    return dispatcher
