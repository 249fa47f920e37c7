"""Which rank owns which expert, brought to the library's contiguous layout by renumbering the experts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from .readers.record import Layer

__all__ = ["Placement", "make_placement"]


@dataclass(frozen=True)
class Placement:
    """Owners of the experts.

    Attributes:
        name: ``"contiguous"``, ``"round-robin"``, or the file of a map.
        ep_size: ranks.
        owner_LE: int64 ``[L, E]``, rank that owns the expert, for each layer.
    """

    name: str
    ep_size: int
    owner_LE: np.ndarray

    @property
    def order_LE(self) -> np.ndarray:
        """int64 ``[L, E]``: the experts sorted by owner. Counts taken in this order are contiguous."""
        return np.argsort(self.owner_LE, axis=1, kind="stable")


def make_placement(name: str, num_experts: int, ep_size: int, layers: Sequence[Layer]) -> Placement:
    """Placement of ``num_experts`` experts of every layer.

    Args:
        name: ``"contiguous"``, ``"round-robin"``, or the path of a JSON file: a list with the owner of each
            expert, or an object from the layer's name to such a list.

    Raises:
        ConfigError: the ranks would not own equally many experts, or the map is not usable.
    """
    if num_experts % ep_size:
        raise ConfigError(
            f"ep_size must divide the number of experts, got ep_size={ep_size} and num_experts={num_experts}"
        )
    experts = np.arange(num_experts)
    if name == "contiguous":
        owner = np.tile(experts // (num_experts // ep_size), (len(layers), 1))
    elif name == "round-robin":
        owner = np.tile(experts % ep_size, (len(layers), 1))
    else:
        owner = _from_map(Path(name), num_experts, ep_size, layers)
    return Placement(name, ep_size, owner)


def _from_map(path: Path, num_experts: int, ep_size: int, layers: Sequence[Layer]) -> np.ndarray:
    if not path.is_file():
        raise ConfigError(f"placement must be contiguous, round-robin or a JSON file, got {str(path)!r}")
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the placement {path}: {error}") from None
    lists = data if isinstance(data, dict) else {str(layer): data for layer in layers}
    missing = [str(layer) for layer in layers if str(layer) not in lists]
    if missing:
        raise ConfigError(f"{path}: no placement for layer {missing[0]}")
    return np.stack([_owners(lists[str(layer)], num_experts, ep_size, path) for layer in layers])


def _owners(ranks: Any, num_experts: int, ep_size: int, path: Path) -> np.ndarray:
    if not isinstance(ranks, list) or len(ranks) != num_experts or any(type(rank) is not int for rank in ranks):
        raise ConfigError(f"{path}: a placement is a list of {num_experts} ranks, one an expert")
    if any(ranks.count(rank) != num_experts // ep_size for rank in range(ep_size)):
        raise ConfigError(f"{path}: each of the {ep_size} ranks must own {num_experts // ep_size} experts")
    return np.array(ranks, dtype=np.int64)
