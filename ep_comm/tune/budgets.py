"""``budget.json``: what ``ep-comm tune`` writes and training loads.

Schema (version 1)::

    {"kind": "ep_comm budgets", "version": 1,
     "ep_size": 8, "num_experts": 64, "top_k": 8, "alignment": 16, "max_tokens_per_rank": 8192,
     "placement": "contiguous",
     "replays_per_1000": {"value": 0.8, "low": 0.2, "high": 2.1},
     "layers": [{"name": "0", "budget_rows": 70000, "pair_rows": 5200,
                 "overflows_per_1000": {"value": 0.1, "low": 0.0, "high": 0.4}}, ...]}

``pair_rows`` is null where the collective transport was not tuned. Layers are in the order of the model. The
probabilities are per step, at these budgets, with 95 % intervals.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..config import EPConfig
from ..errors import ConfigError

__all__ = ["BudgetFile", "LayerChoice", "Rate", "load_budgets"]

_KIND = "ep_comm budgets"
_VERSION = 1
_SIZES = ("ep_size", "num_experts", "top_k", "alignment", "max_tokens_per_rank")


@dataclass(frozen=True)
class Rate:
    """Events in a thousand steps, with a 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class LayerChoice:
    """Budget of one layer.

    Attributes:
        name: the layer's name in the trace.
        budget_rows: rows of the receive buffer.
        pair_rows: token rows between two ranks (collective transport), or None.
        overflows_per_1000: how often the layer is predicted not to fit.
    """

    name: str
    budget_rows: int
    pair_rows: int | None
    overflows_per_1000: Rate


@dataclass(frozen=True)
class BudgetFile:
    """Content of a ``budget.json``; see the module's documentation for the fields."""

    ep_size: int
    num_experts: int
    top_k: int
    alignment: int
    max_tokens_per_rank: int
    placement: str
    replays_per_1000: Rate
    layers: list[LayerChoice]

    def save(self, path: Path) -> None:
        """Write the file.

        Raises:
            ConfigError: it cannot be written.
        """
        data = {"kind": _KIND, "version": _VERSION, **asdict(self)}
        try:
            path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error

    def apply(self, config: EPConfig, layer: int, ep_size: int | None = None) -> EPConfig:
        """``config`` with the budgets of one layer.

        Args:
            config: of the layer's dispatcher.
            layer: its position among the MoE layers, from 0.
            ep_size: ranks of its group, checked where given.

        Raises:
            ConfigError: the budgets are for other sizes, or there is no such layer.
        """
        for name in _SIZES[1:]:
            if getattr(config, name) != getattr(self, name):
                raise ConfigError(
                    f"the budgets are for {name}={getattr(self, name)}, the configuration has "
                    f"{name}={getattr(config, name)}: tune again for it"
                )
        if ep_size is not None and ep_size != self.ep_size:
            raise ConfigError(
                f"the budgets are for ep_size={self.ep_size}, there are {ep_size} ranks: tune again for it"
            )
        if not 0 <= layer < len(self.layers):
            raise ConfigError(f"the budgets are for {len(self.layers)} MoE layers, there is none for layer {layer}")
        choice = self.layers[layer]
        return replace(
            config, budget_rows=choice.budget_rows, capacity_factor=None, pair_rows=choice.pair_rows or config.pair_rows
        )

    def runner_state(self, names: Sequence[str]) -> dict[str, Any]:
        """State for :meth:`ep_comm.StepRunner.load_state_dict` of a run that starts with these budgets.

        Args:
            names: path of each MoE layer in the model, in order, as in ``StepRunner.budgets()``.

        Raises:
            ConfigError: another number of layers, or budgets without ``pair_rows``.
        """
        if len(names) != len(self.layers):
            raise ConfigError(f"the budgets are for {len(self.layers)} MoE layers, names has {len(names)}")
        layers = {}
        for name, choice in zip(names, self.layers, strict=True):
            pairs = choice.pair_rows or self.max_tokens_per_rank
            layers[name] = {
                "budget_rows": choice.budget_rows, "pair_rows": pairs, "start_rows": choice.budget_rows,
                "start_pair_rows": pairs, "peak_rows": 0, "peak_pair_rows": 0, "overflows": 0,
            }  # fmt: skip
        return {"steps": 0, "replays": 0, "layers": layers}


def load_budgets(path: str | Path) -> BudgetFile:
    """Read a ``budget.json``.

    Raises:
        ConfigError: unreadable, or not what the module's documentation describes; the field is named.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the budgets {path}: {error}") from None
    if not isinstance(data, dict) or data.get("kind") != _KIND:
        raise ConfigError(f"{path} is not a budget.json of ep-comm tune")
    if data.get("version") != _VERSION:
        raise ConfigError(f"{path}: version must be {_VERSION}, got {data.get('version')!r}")
    sizes = {name: _integer(data, name, path) for name in _SIZES}
    layers = data.get("layers")
    if not isinstance(layers, list) or not layers:
        raise ConfigError(f"{path}: layers must be a list of at least one layer")
    return BudgetFile(
        **sizes,
        placement=str(data.get("placement", "contiguous")),
        replays_per_1000=_rate(data, "replays_per_1000", path),
        layers=[_layer(entry, path) for entry in layers],
    )


def _layer(entry: Any, path: Path) -> LayerChoice:
    if not isinstance(entry, dict):
        raise ConfigError(f"{path}: a layer must be an object, got {type(entry).__name__}")
    pairs = None if entry.get("pair_rows") is None else _integer(entry, "pair_rows", path)
    return LayerChoice(
        str(entry.get("name")), _integer(entry, "budget_rows", path), pairs, _rate(entry, "overflows_per_1000", path)
    )


def _integer(data: dict[str, Any], name: str, path: Path) -> int:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ConfigError(f"{path}: {name} must be an integer from 1 to 2**31 - 1, got {value!r}")
    return value


def _rate(data: dict[str, Any], name: str, path: Path) -> Rate:
    value = data.get(name)
    fields = [value.get(key) for key in ("value", "low", "high")] if isinstance(value, dict) else [None]
    if any(isinstance(each, bool) or not isinstance(each, (int, float)) or not each >= 0 for each in fields):
        raise ConfigError(f"{path}: {name} must hold value, low and high, numbers from 0; got {value!r}")
    return Rate(*map(float, fields))
