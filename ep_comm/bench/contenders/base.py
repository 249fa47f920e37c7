"""What a contender is: something that dispatches and combines, opened for one shape, format and mode at a time."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..options import BenchOptions, Shape
from ..routing import RoutingSet, busiest_link_rows
from ..work import Item

__all__ = ["Contender", "Place", "Plan", "Session", "import_problem", "pair_bytes", "token_bytes"]


@dataclass(frozen=True)
class Place:
    """Where a contender runs.

    Attributes:
        rank, ep_size: in the job.
        device: this rank's.
        group: the contender's own process group of all ranks, so that it can be aborted alone; None for one rank.
        options: of the benchmark.
    """

    rank: int
    ep_size: int
    device: torch.device
    group: dist.ProcessGroup | None
    options: BenchOptions


@dataclass(frozen=True)
class Plan:
    """How a session is opened.

    Attributes:
        shape: sizes.
        dtype: of :data:`ep_comm.bench.options.DTYPES`.
        mode: of :data:`ep_comm.bench.options.MODES`; ``"graph"`` is static, and captured by the caller.
        num_sms: multiprocessors to use; None for all.
    """

    shape: Shape
    dtype: str
    mode: str
    num_sms: int | None


class Session(ABC):
    """A contender opened for one plan."""

    alignment = 1
    """Of the experts' segments in the delivered rows."""
    least_segment = 0
    """Rows of the segment of an expert without tokens."""

    @abstractmethod
    def operation(self, direction: str, item: Item) -> Callable[[], tuple[Any, Tensor | None]]:
        """The call to time. What it needs (rows to combine, say) is made here, outside the timed region.

        Args:
            direction: of :data:`ep_comm.bench.options.DIRECTIONS`.
            item: the inputs.

        Returns:
            A function without arguments. For ``dispatch`` and ``combine_backward`` it returns the rows of this rank's
            experts, by (local expert, source rank, token, slot), and their weights or None; for ``combine`` and
            ``dispatch_backward`` the sums of this rank's tokens, and the weights' gradients or None.
        """

    @abstractmethod
    def wire_bytes(self, direction: str, routing: RoutingSet) -> int:
        """Bytes that the busiest rank sends or receives, whichever is more, rows that stay on a rank not counted."""

    def prepare(self, items: Sequence[Item]) -> None:  # noqa: B027
        """Get ready for all of ``items``: grow buffers, say."""

    def prepare_capture(self) -> None:  # noqa: B027
        """Before an operation is captured in a CUDA graph; it has run uncaptured."""

    def raise_errors(self) -> None:  # noqa: B027
        """Raise what the device recorded while operations ran, if anything."""

    def close(self) -> None:  # noqa: B027
        """Give everything back."""


class Contender(ABC):
    """Something to measure.

    Attributes:
        name: in the table.
        origin: what it is, one line.
        directions, dtypes, modes: that it can do; a contender that can do none of the modes asked for runs in its
            first one.
        exact: its sums are those of docs/architecture.md bit for bit.
        sms: it honours ``num_sms``; known once it has started.
    """

    name: str
    origin: str
    directions: tuple[str, ...]
    dtypes: tuple[str, ...] = ("bf16",)
    modes: tuple[str, ...] = ("eager",)
    exact = False
    sms = False

    @abstractmethod
    def problem(self, place: Place) -> str | None:
        """Why it cannot run here, or None. Talks to nobody."""

    def start(self, place: Place) -> None:
        """Set up, once, before the first session. Collective; raises where it cannot."""
        self.place = place

    @abstractmethod
    def open(self, plan: Plan) -> Session:
        """A session. Collective."""

    def stop(self) -> None:  # noqa: B027
        """Give back what :meth:`start` made."""

    def multiprocessors(self, plan: Plan) -> str:
        """Multiprocessors that its kernels may use, for the table; a dash where ``num_sms`` means nothing."""
        return "-"


def token_bytes(routing: RoutingSet, row_bytes: int) -> int:
    """Wire bytes of a contender that sends a token once to each rank."""
    return busiest_link_rows(routing.crossing_tokens_PP()) * row_bytes


def pair_bytes(routing: RoutingSet, row_bytes: int) -> int:
    """Wire bytes of a contender that sends a row for each (token, expert) pair."""
    return busiest_link_rows(routing.crossing_pairs_PP()) * row_bytes


def import_problem(module: str, place: Place) -> str | None:
    """Why a GPU package cannot be used here, or None."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return f"not importable: No module named {module.partition('.')[0]!r}"
    if place.device.type != "cuda":
        return "needs GPUs"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except Exception as error:  # whatever a package raises when its own needs are not met
        first = str(error).strip().splitlines()
        return f"not importable: {first[0] if first else type(error).__name__}"
    return "one rank sends nothing to others" if place.ep_size == 1 else None
