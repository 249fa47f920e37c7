"""Which window the transports of a group share. Making one is collective, so all ranks have to decide alike.

A window lives as long as a transport uses it. When that ends is up to each process: a dispatcher that was dropped in
a reference cycle goes when Python collects garbage, on one rank earlier than on another. So no rank decides from its
own windows: all tell which one they have, and a window is used again only where every rank has it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

import torch.distributed as dist

from ..cuda.window import WindowLayout
from ..errors import EPError

__all__ = ["SharedMemory", "require_everywhere", "shared_window"]


class SharedMemory(Protocol):
    """A window: what it is called on all ranks, the rank it was made by here, and its layout."""

    key: str
    rank: int
    layout: WindowLayout


Window = TypeVar("Window", bound=SharedMemory)


@dataclass(frozen=True)
class _Offer:
    """What one rank has.

    Attributes:
        key, layout: of its window; None where it has none that was made by this rank of the group.
        new_key: what a new window is called if rank 0 offers this.
    """

    key: str | None
    layout: WindowLayout | None
    new_key: str


_latest: WeakValueDictionary[str, SharedMemory] = WeakValueDictionary()
"""The latest window of a group, by the group's name. Another group may have got the name since."""


def shared_window(
    group: dist.ProcessGroup, needed: WindowLayout, make: Callable[[str, WindowLayout], Window]
) -> Window:
    """The group's window if every rank has it and it covers ``needed``, else a new one that does. Collective.

    Args:
        make: a new window of this name and layout. Collective.
    """
    rank, name = dist.get_rank(group), group.group_name
    # Held in a variable: what was offered must not be collected before all have decided.
    window = _latest.get(name)
    offers = [_Offer(None, None, "")] * dist.get_world_size(group)
    mine = window if window is not None and window.rank == rank else None
    own = _Offer(mine and mine.key, mine and mine.layout, uuid.uuid4().hex)
    dist.all_gather_object(offers, own, group=group)
    if mine is not None and all(offer.key == mine.key for offer in offers):
        if mine.layout.covers(needed):
            return mine
        needed = mine.layout.extended(needed)
    window = _latest[name] = make(offers[0].new_key, needed)
    return window


def require_everywhere(problem: str | None, group: dist.ProcessGroup) -> None:
    """Raise on every rank what went wrong on any. Collective.

    Raises:
        EPError: names the first rank with a problem, and the problem.
    """
    problems: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    for rank, found in enumerate(problems):
        if found is not None:
            raise EPError(f"rank {rank}: {found}")
