"""The static budget of one dispatcher: its limits, and how they grow (headroom, buckets, ceiling)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .config import EPConfig, round_up
from .errors import BudgetExceededError, ConfigError
from .ledger import Demand
from .status import rank_name

__all__ = ["Limit", "StaticBudget", "bucket_rows", "check_saved_budget"]

_STEPS_PER_OCTAVE = 8
# A receive buffer is charged as FP32 rows: the rows themselves and about as much again for their gradient.
_BYTES_PER_ELEMENT = 4
# What a saved budget holds, and the least that each number can be.
_SAVED = {
    "budget_rows": 1, "pair_rows": 1, "start_rows": 1, "start_pair_rows": 1, "peak_rows": 0, "peak_pair_rows": 0,
    "overflows": 0,
}  # fmt: skip


def bucket_rows(rows: int, alignment: int) -> int:
    """Round ``rows`` up to one of eight steps per power of two, and to ``alignment``.

    Buckets make shapes repeat, so that buffers and captured graphs are reused; a step is at most an eighth
    of the rows, which bounds the memory they cost.
    """
    if rows <= _STEPS_PER_OCTAVE:
        return round_up(max(rows, 1), alignment)
    step = (1 << (rows.bit_length() - 1)) // _STEPS_PER_OCTAVE
    return round_up(round_up(rows, step), alignment)


def check_saved_budget(state: Any, owner: str) -> None:
    """Whether ``state`` is a saved budget, of whatever configuration.

    Raises:
        ConfigError: says what is wrong with it; ``owner`` is named.
    """
    if not isinstance(state, dict):
        raise ConfigError(
            f"{owner}: a saved budget must be a dictionary, as state_dict() returns it, got {type(state).__name__}"
        )
    missing = _SAVED.keys() - state.keys()
    if missing:
        raise ConfigError(f"{owner}: the saved budget lacks {', '.join(sorted(missing))}")
    for key, least in _SAVED.items():
        value = state[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{owner}: saved {key} must be an integer from {least} on, got {value!r}")


@dataclass
class Limit:
    """One growing limit, in rows.

    Attributes:
        rows: the limit in force.
        ceiling: growth never goes beyond it.
        alignment: limits are multiples of it.
        start: the limit at construction.
        peak: the most rows that a committed step required.
    """

    rows: int
    ceiling: int
    alignment: int
    start: int = 0
    peak: int = 0

    def __post_init__(self) -> None:
        self.ceiling = max(self.ceiling, self.rows)
        self.start = self.start or self.rows

    def target(self, required: int, headroom: float) -> int:
        """The limit to grow to so that ``required`` rows fit with ``headroom`` (0.1 = 10 %) to spare.

        Never below the limit in force and never above the ceiling, so ``required`` itself may not fit.
        """
        if required <= self.rows:
            return self.rows
        wanted = bucket_rows(int(required * (1.0 + headroom)), self.alignment)
        return max(self.rows, min(wanted, self.ceiling))


class StaticBudget:
    """Row budget and pair budget of one static dispatcher.

    Args:
        config: the dispatcher's configuration.
        ep_size: ranks of its group.

    Attributes:
        rows: limit of the receive buffer's rows.
        pairs: limit of the token rows between two ranks (collective transport).
        overflows: steps in which a limit was too small.
    """

    def __init__(self, config: EPConfig, ep_size: int) -> None:
        ceiling = min(config.worst_case_rows(ep_size), (2**31 - 1) // config.alignment * config.alignment)
        if config.max_budget_rows is not None:
            # Requirements are multiples of the alignment, so rounding the ceiling down loses nothing.
            ceiling = min(ceiling, config.max_budget_rows // config.alignment * config.alignment)
        self._row_bytes = config.hidden_size * _BYTES_PER_ELEMENT
        start = config.initial_budget_rows()
        if config.budget_rows is None:  # not asked for: more than the worst case is memory that no routing can use
            start = min(start, ceiling)
        self.rows = Limit(start, ceiling, config.alignment)
        self.pairs = Limit(config.initial_pair_rows(ep_size), config.max_tokens_per_rank, 1)
        self.overflows = 0

    def grow_to(self, demand: Demand, headroom: float) -> None:
        """Raise both limits to what a step needed, with headroom."""
        self.rows.rows = self.rows.target(max(demand.required_rows), headroom)
        self.pairs.rows = self.pairs.target(demand.pair_tokens, headroom)

    def growth_bytes(self, demand: Demand, headroom: float) -> int:
        """Memory that :meth:`grow_to` would add to this layer's receive buffer, in bytes."""
        return (self.rows.target(max(demand.required_rows), headroom) - self.rows.rows) * self._row_bytes

    def note(self, demand: Demand) -> None:
        """Remember the peaks of a committed step."""
        self.rows.peak = max(self.rows.peak, *demand.required_rows)
        self.pairs.peak = max(self.pairs.peak, demand.pair_tokens)

    def exceeded(
        self, layer: str, rank: int, required: int, *, group: dist.ProcessGroup | None, memory: int | None = None
    ) -> BudgetExceededError:
        """The error for a demand above the ceiling, or for ``memory`` bytes that are not free."""
        if memory is None:
            why = f"allowed are {self.rows.ceiling} (max_budget_rows, or the worst case of any routing)"
        else:
            why = f"but growing the budgets takes {memory / 2**20:.0f} MiB, more than is free on some rank"
        return BudgetExceededError(
            f"{layer}: {rank_name(rank, group)} needs {required} rows, {why}; raise max_budget_rows or free memory, "
            f"send fewer tokens, or balance the routing",
            layer=layer,
            rank=rank,
            required_rows=required,
            allowed_rows=self.rows.ceiling if memory is None else self.rows.rows,
        )

    def state_dict(self) -> dict[str, Any]:
        """Limits and their history; plain integers."""
        return {
            "budget_rows": self.rows.rows,
            "pair_rows": self.pairs.rows,
            "start_rows": self.rows.start,
            "start_pair_rows": self.pairs.start,
            "peak_rows": self.rows.peak,
            "peak_pair_rows": self.pairs.peak,
            "overflows": self.overflows,
        }

    def check_state_dict(self, state: Any, owner: str) -> None:
        """Look at what :meth:`load_state_dict` would take over; changes nothing.

        Raises:
            ConfigError: see there.
        """
        check_saved_budget(state, owner)
        for key, limit in (("budget_rows", self.rows), ("pair_rows", self.pairs)):
            value = state[key]
            if value > limit.ceiling or value % limit.alignment:
                raise ConfigError(
                    f"{owner}: saved {key}={value!r} must be from 1 to the ceiling {limit.ceiling} and a multiple of "
                    f"{limit.alignment}"
                )

    def load_state_dict(self, state: dict[str, Any], owner: str) -> None:
        """Take over :meth:`state_dict`. Where it is refused, nothing has changed.

        Raises:
            ConfigError: ``state`` is nothing that :meth:`state_dict` returned, or a saved limit is above the ceiling
                in force; ``owner`` is named.
        """
        self.check_state_dict(state, owner)
        self.rows.rows, self.pairs.rows = state["budget_rows"], state["pair_rows"]
        self.rows.start, self.pairs.start = state["start_rows"], state["start_pair_rows"]
        self.rows.peak, self.pairs.peak = state["peak_rows"], state["peak_pair_rows"]
        self.overflows = state["overflows"]
