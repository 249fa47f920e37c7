"""What a dispatcher is told once, at construction: sizes, mode, wire formats, budgets."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args, get_type_hints

from .errors import ConfigError

__all__ = ["EPConfig", "round_up", "worst_case_rows"]

MXFP8_BLOCK = 32
_MAX_ALIGNMENT = 1 << 16
_MAX_ROWS = 1 << 31  # rows travel as int32


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def worst_case_rows(rows: int, num_local_experts: int, alignment: int) -> int:
    """The most buffer rows that ``rows`` (token, expert) pairs can need on one rank, padding included.

    Every non-empty expert segment is padded to ``alignment``. The padding is largest when as many
    experts as possible hold at least one row: with ``m = min(num_local_experts, rows)`` of them,
    ``sum ceil(c_e / a) * a`` over all splits of ``rows`` peaks at ``a * (m + floor((rows - m) / a))``.
    """
    if rows <= 0:
        return 0
    nonempty = min(num_local_experts, rows)
    return alignment * (nonempty + (rows - nonempty) // alignment)


@dataclass(frozen=True)
class EPConfig:
    """Configuration of one :class:`ep_comm.Dispatcher`. Must be equal on all ranks of its group.

    Attributes:
        num_experts: experts in the whole group, a multiple of the group's size. Rank ``r`` owns the
            ``num_experts / ep_size`` experts from ``r * num_experts / ep_size`` on.
        top_k: expert slots of a token.
        hidden_size: elements of a token row. A multiple of 32 where MXFP8 is used.
        max_tokens_per_rank: the most tokens a rank ever passes to one ``dispatch`` call.
        mode: ``"eager"`` sizes the receive buffer exactly, with one host sync a dispatch;
            ``"static"`` uses a fixed budget of rows and no host sync.
        capacity_factor: initial static budget, ``ceil(max_tokens_per_rank * top_k * factor)`` rounded
            up to ``alignment``; 1.0 is the mean load. Default 1.25 if ``budget_rows`` is not given.
        budget_rows: initial static budget in rows, instead of ``capacity_factor``; rounded up to
            ``alignment``.
        max_budget_rows: ceiling for budget growth in rows; ``None`` allows the worst case.
        pair_rows: initial budget of token rows between one pair of ranks (static mode on the
            collective and hierarchical transports); ``None`` derives it from the budget, see :meth:`initial_pair_rows`.
        alignment: every expert's segment starts at a multiple of it and is zero-padded to it.
        dispatch_forward_dtype: ``"bf16"`` sends tokens in their own 16- or 32-bit dtype, ``"mxfp8"``
            as 8-bit blocks.
        combine_backward_dtype: the same for the gradient of the combine.
        recv_format: ``"bf16"`` hands out rows in the tokens' dtype; ``"mxfp8"`` hands out an
            :class:`ep_comm.MXFP8Tensor` (needs ``dispatch_forward_dtype="mxfp8"``).
        scale_rounding: ``"rceil"`` or ``"floor"``, see :func:`ep_comm.quantize_mxfp8`.
        transport: ``"auto"``, ``"collective"``, ``"symmetric"`` or ``"hierarchical"``, see docs/hierarchical.md.
        num_sms: streaming multiprocessors a communication kernel may use; ``None`` means all.
        overflow: static mode without a runner: ``"replay"`` leaves the verdict to the caller
            (``dispatcher.overflowed``) or to :class:`ep_comm.StepRunner`; ``"drop"`` is the explicit
            choice to keep steps that lost rows.
        zero_tail: static mode: rows after the last segment are zeroed. ``False`` leaves them
            undefined and saves the writes; experts must then not read them.
        handshake: eager mode: ``combine`` first agrees with the other ranks that everybody's
            arguments are good, at the price of one small all-gather and a host sync. ``False`` trusts
            the caller: a bad argument on one rank then leaves the others waiting for the timeout.
        timeout_seconds: how long a kernel of the symmetric transport waits for a peer before it records an
            error; dispatchers that share a window have that of the first of them. The collective transport has the
            process group's timeout instead.

    Raises:
        ConfigError: (also a ``ValueError``) a field is out of range; the message names it.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    max_tokens_per_rank: int
    mode: Literal["eager", "static"] = "eager"
    capacity_factor: float | None = None
    budget_rows: int | None = None
    max_budget_rows: int | None = None
    pair_rows: int | None = None
    alignment: int = 16
    dispatch_forward_dtype: Literal["bf16", "mxfp8"] = "bf16"
    combine_backward_dtype: Literal["bf16", "mxfp8"] = "bf16"
    recv_format: Literal["bf16", "mxfp8"] = "bf16"
    scale_rounding: Literal["rceil", "floor"] = "rceil"
    transport: Literal["auto", "collective", "symmetric", "hierarchical"] = "auto"
    num_sms: int | None = None
    overflow: Literal["replay", "drop"] = "replay"
    zero_tail: bool = True
    handshake: bool = True
    timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        self._check_choices()
        for name in ("num_experts", "top_k", "hidden_size", "max_tokens_per_rank", "alignment"):
            self._check_positive_int(name)
        if self.alignment > _MAX_ALIGNMENT:
            raise ConfigError(f"alignment must be an integer from 1 to {_MAX_ALIGNMENT}, got {self.alignment}")
        for name in ("budget_rows", "max_budget_rows", "pair_rows", "num_sms"):
            if getattr(self, name) is not None:
                self._check_positive_int(name)
        self._check_positive_number("timeout_seconds")
        if self.capacity_factor is not None:
            self._check_positive_number("capacity_factor")
            if self.budget_rows is not None:
                raise ConfigError(
                    f"give capacity_factor or budget_rows, not both: got capacity_factor={self.capacity_factor!r} "
                    f"and budget_rows={self.budget_rows!r}"
                )
        if self.uses_mxfp8 and self.hidden_size % MXFP8_BLOCK:
            raise ConfigError(
                f"hidden_size must be a multiple of {MXFP8_BLOCK} where MXFP8 is used, "
                f"got hidden_size={self.hidden_size}"
            )
        if self.initial_budget_rows() >= _MAX_ROWS:
            raise ConfigError(
                f"budget_rows or capacity_factor ask for {self.initial_budget_rows():.3g} rows; at most 2**31 - 1 are "
                f"possible"
            )
        if self.recv_format == "mxfp8" and self.dispatch_forward_dtype != "mxfp8":
            raise ConfigError(
                "recv_format='mxfp8' needs dispatch_forward_dtype='mxfp8', got "
                f"dispatch_forward_dtype={self.dispatch_forward_dtype!r}"
            )
        if self.max_budget_rows is not None and self.max_budget_rows < self.initial_budget_rows():
            raise ConfigError(
                f"max_budget_rows must not be below the initial budget of "
                f"{self.initial_budget_rows()} rows, got {self.max_budget_rows}"
            )

    @property
    def uses_mxfp8(self) -> bool:
        """Whether any direction travels as MXFP8."""
        return "mxfp8" in (self.dispatch_forward_dtype, self.combine_backward_dtype)

    def initial_budget_rows(self) -> int:
        """The static budget a dispatcher starts with, in rows, a multiple of ``alignment``."""
        if self.budget_rows is not None:
            return round_up(self.budget_rows, self.alignment)
        factor = 1.25 if self.capacity_factor is None else self.capacity_factor
        # The product of a float factor may land a hair above an integer (1.1 * 10 = 11.000000000000002):
        # rounding it to nine digits first keeps such a hair from costing a whole extra row.
        rows = math.ceil(round(self.max_tokens_per_rank * self.top_k * factor, 9))
        return round_up(max(rows, 1), self.alignment)

    def initial_pair_rows(self, ep_size: int) -> int:
        """Token rows budgeted between one pair of ranks at the start (static mode, see ``pair_rows``).

        With uniform routing a token needs a given rank with probability ``1 - (1 - 1/ep_size)^top_k``;
        the expected count is scaled by the same factor as the row budget and capped by
        ``max_tokens_per_rank``, which is the worst case.
        """
        if self.pair_rows is not None:
            return min(self.pair_rows, self.max_tokens_per_rank)
        factor = self.initial_budget_rows() / (self.max_tokens_per_rank * self.top_k)
        share = 1.0 - (1.0 - 1.0 / ep_size) ** self.top_k
        rows = math.ceil(round(self.max_tokens_per_rank * share * factor, 9))
        return max(1, min(rows, self.max_tokens_per_rank))

    def worst_case_rows(self, ep_size: int) -> int:
        """The most rows any routing can need on one rank: every slot of every rank's tokens lands there."""
        return worst_case_rows(
            ep_size * self.max_tokens_per_rank * self.top_k, self.num_experts // ep_size, self.alignment
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, for comparing configurations between ranks and for checkpoints."""
        return asdict(self)

    def _check_choices(self) -> None:
        for name, hint in _CHOICES.items():
            value = getattr(self, name)
            if value not in hint:
                raise ConfigError(f"{name} must be one of {', '.join(map(repr, hint))}, got {value!r}")
        for name in ("zero_tail", "handshake"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def _check_positive_number(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{name} must be a number above 0, got {value!r}")
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be finite and above 0, got {value!r}")

    def _check_positive_int(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ConfigError(f"{name} must be an integer from 1 to 2**31 - 1, got {value!r}")


_CHOICES = {
    name: get_args(hint)
    for name, hint in get_type_hints(EPConfig).items()
    if getattr(hint, "__origin__", None) is Literal
}
