"""What ``ep-comm bench`` can be told: shapes, formats, modes, directions, and presets of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ..config import MXFP8_BLOCK, EPConfig
from ..errors import ConfigError

__all__ = [
    "DIRECTIONS",
    "DTYPES",
    "MODES",
    "PRESETS",
    "ROUTINGS",
    "TRANSPORTS",
    "BenchOptions",
    "Shape",
    "parse_numbers",
    "preset",
]

DIRECTIONS = ("dispatch", "combine", "dispatch_backward", "combine_backward")
DTYPES = ("bf16", "mxfp8", "mxfp8-kept")
"""Formats of the rows that are copied: ``mxfp8`` delivers bf16 rows, ``mxfp8-kept`` delivers MXFP8 rows."""
MODES = ("eager", "static", "graph")
ROUTINGS = ("uniform", "skewed")
TRANSPORTS: tuple[str, ...] = get_args(get_type_hints(EPConfig)["transport"])


@dataclass(frozen=True)
class Shape:
    """One set of sizes.

    Attributes:
        tokens: of a rank.
        hidden: elements of a row.
        experts: of the whole group.
        top_k: experts of a token.
        routing: one of :data:`ROUTINGS`.
    """

    tokens: int
    hidden: int
    experts: int
    top_k: int
    routing: str

    def __str__(self) -> str:
        return f"T {self.tokens}, H {self.hidden}, E {self.experts}, K {self.top_k}, {self.routing}"


@dataclass(frozen=True)
class BenchOptions:
    """Options of a benchmark. Every combination of the tuples is measured.

    Attributes:
        tokens, hidden, experts, routing, top_k: shapes, see :class:`Shape`.
        skew: exponent of the Zipf law of skewed routing.
        dtype: some of :data:`DTYPES`; the two directions that sum rows always travel in bf16.
        mode: some of :data:`MODES`.
        directions: some of :data:`DIRECTIONS`.
        num_sms: multiprocessors that ep_comm's kernels may use; None stands for all.
        transport: of ep_comm: ``"all"`` or one of ``EPConfig.transport``.
        contenders: names, or empty for all that can run.
        capacity_factor: static budget as a multiple of the mean load where that is more than is needed; None takes
            what the routing needs.
        iterations, warmup: timed and untimed calls of each operation.
        seed: of routing and rows.
        timeout: seconds after which an operation that does not end is given up.
        device: ``"auto"`` or a torch device.
        json, plot: files to write; a json of ``-`` is standard output.
    """

    tokens: tuple[int, ...]
    hidden: tuple[int, ...]
    experts: tuple[int, ...]
    top_k: int
    routing: tuple[str, ...] = ROUTINGS
    skew: float = 1.0
    dtype: tuple[str, ...] = ("bf16", "mxfp8")
    mode: tuple[str, ...] = ("eager", "static")
    directions: tuple[str, ...] = DIRECTIONS
    num_sms: tuple[int | None, ...] = (None,)
    transport: str = "all"
    contenders: tuple[str, ...] = ()
    capacity_factor: float | None = None
    iterations: int = 20
    warmup: int = 3
    seed: int = 0
    timeout: float = 120.0
    device: str = "auto"
    json: Path | None = None
    plot: Path | None = field(default=None)

    def __post_init__(self) -> None:
        for name, allowed in (
            ("routing", ROUTINGS), ("dtype", DTYPES), ("mode", MODES), ("directions", DIRECTIONS),
        ):  # fmt: skip
            for value in getattr(self, name):
                if value not in allowed:
                    raise ConfigError(f"--{name} must be of {', '.join(allowed)}, got {value!r}")
        if self.transport not in ("all", *TRANSPORTS):
            raise ConfigError(f"--transport must be one of all, {', '.join(TRANSPORTS)}, got {self.transport!r}")
        for name in ("tokens", "hidden", "experts", "num_sms"):
            for value in getattr(self, name):
                if value is not None and value < 1:
                    raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        for name, least in (("top_k", 1), ("iterations", 1), ("warmup", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        for name in ("skew", "timeout", "capacity_factor"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"--{name.replace('_', '-')} must be finite and above 0, got {value}")
        if self.top_k > min(self.experts):
            raise ConfigError(f"--top-k must not be above --experts {min(self.experts)}, got {self.top_k}")
        if any(name != "bf16" for name in self.dtype):
            odd = [hidden for hidden in self.hidden if hidden % MXFP8_BLOCK]
            if odd:
                raise ConfigError(f"--hidden must be a multiple of {MXFP8_BLOCK} where MXFP8 is used, got {odd[0]}")
        for name in ("json", "plot"):
            path = getattr(self, name)
            if path is not None and not path.expanduser().resolve().parent.is_dir():
                raise ConfigError(f"--{name} {path}: the folder {path.parent} does not exist")

    def check_world_size(self, world_size: int) -> None:
        """Raises ConfigError where the experts cannot be spread evenly over the ranks."""
        for experts in self.experts:
            if experts % world_size:
                raise ConfigError(f"--experts must be a multiple of the {world_size} ranks, got {experts}")

    def shapes(self) -> Iterator[Shape]:
        """All shapes, the routing varying fastest."""
        for hidden, experts, tokens, routing in itertools.product(self.hidden, self.experts, self.tokens, self.routing):
            yield Shape(tokens, hidden, experts, self.top_k, routing)


_GPU: dict[str, Any] = {
    "tokens": (4096, 8192), "hidden": (7168,), "experts": (256,), "top_k": 8, "mode": ("graph",), "iterations": 20,
}  # fmt: skip
_CPU: dict[str, Any] = {
    "tokens": (64, 256), "hidden": (512,), "experts": (16,), "top_k": 4, "mode": ("eager", "static"), "iterations": 5,
    "warmup": 1,
}  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    "quick": {**_GPU, "tokens": (128, 4096), "routing": ("uniform",), "directions": ("dispatch", "combine"),
              "iterations": 10},
    "anchors": {**_GPU, "tokens": (128, 4096, 8192), "routing": ("uniform",), "mode": ("static", "graph"),
                "num_sms": (None, 24)},
    "full": {**_GPU, "tokens": (128, 1024, 4096, 8192), "hidden": (7168, 2048), "experts": (256, 128),
             "mode": MODES},
}  # fmt: skip
"""What ``--preset`` sets; options that are given win."""

_CPU_QUICK: dict[str, Any] = {**_CPU, "tokens": (64,), "routing": ("uniform",), "directions": ("dispatch", "combine")}


def preset(name: str | None, on_gpus: bool) -> dict[str, Any]:
    """Options of a preset, or the default ones: a minute on GPUs, tiny on CPUs.

    Raises:
        ConfigError: there is no such preset.
    """
    if name is None:
        return dict(_GPU if on_gpus else _CPU)
    if name not in PRESETS:
        raise ConfigError(f"--preset must be one of {', '.join(PRESETS)}, got {name!r}")
    if on_gpus:
        return dict(PRESETS[name])
    if name == "quick":
        return dict(_CPU_QUICK)
    # The same sizes, for those who have the time; a CPU has no graphs and no multiprocessors.
    modes = tuple(dict.fromkeys("static" if mode == "graph" else mode for mode in PRESETS[name]["mode"]))
    return {**PRESETS[name], "mode": modes, "num_sms": (None,)}


def parse_numbers(flag: str, text: str) -> tuple[int | None, ...]:
    """``"128,4096"`` as numbers; ``all`` as None.

    Raises:
        ConfigError: something else.
    """
    numbers: list[int | None] = []
    for part in text.split(","):
        word = part.strip()
        if word == "all" and flag == "--num-sms":
            numbers.append(None)
        elif word.isdecimal():
            numbers.append(int(word))
        else:
            raise ConfigError(f"{flag} must be whole numbers separated by commas, got {text!r}")
    return tuple(numbers)
