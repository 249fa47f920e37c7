"""How long a dispatch and a combine should take: formulas from bytes and speeds, no measurement.

Routing is assumed uniform: a token's ``K`` experts are distinct and any ``K`` of the ``E`` are equally likely. Then a
token needs a given rank with ``L`` experts with probability ``1 - C(E-L, K) / C(E, K)``, and a given host in the same
way with the experts of all its ranks. docs/time_model.md derives each term and compares with what was measured; its
tables are the output of ``ep-comm check --model``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Literal

from .config import MXFP8_BLOCK
from .errors import ConfigError

__all__ = ["Links", "Prediction", "Workload", "markdown_table", "predict", "reach"]

ModelTransport = Literal["symmetric", "collective", "hierarchical"]
TRANSPORTS: tuple[ModelTransport, ...] = ("symmetric", "collective", "hierarchical")
WIRES = ("bf16", "mxfp8")
SYMMETRIC_MAX_RANKS = 64
_BF16_BYTES = 2


@dataclass(frozen=True)
class Links:
    """Speeds of one rank (GPU) in GB/s = 1e9 bytes a second, each direction counted alone, and fixed times in us.

    Attributes:
        local: to the other ranks of its host (NVLink). 384 is what a peer copy between two H200 reached.
        network: to other hosts. 45 is what is usually left of a 400 Gb/s adapter a GPU.
        memory: of the GPU. 3900 is what a plain copy reached on an H200.
        unhidden: share of the lesser of link time and memory time that the symmetric kernels do not hide.
        dispatch_us, combine_us: a symmetric dispatch (plan included) and combine with hardly any tokens.
        collective_us: one collective call with hardly any bytes.
        table_us: plan and tables of a dispatch on the collective paths.
    """

    local: float = 384.0
    network: float = 45.0
    memory: float = 3900.0
    unhidden: float = 0.3
    dispatch_us: float = 22.0
    combine_us: float = 13.0
    collective_us: float = 25.0
    table_us: float = 100.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be a number above 0, got {value!r}")


@dataclass(frozen=True)
class Workload:
    """One MoE layer's call on every rank.

    Attributes:
        ep_size: ranks of the group.
        ranks_per_host: ranks of one host (or NVLink domain), all hosts equal; ``ep_size`` or fewer.
        tokens: tokens of a rank, T.
        hidden_size: H.
        num_experts: E, a multiple of ``ep_size``.
        top_k: K.
    """

    ep_size: int
    ranks_per_host: int = 8
    tokens: int = 4096
    hidden_size: int = 7168
    num_experts: int = 256
    top_k: int = 8

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of 1 or more, got {value!r}")
        if self.ep_size % self.ranks_per_host:
            raise ConfigError(
                f"ep_size must be a multiple of ranks_per_host, got {self.ep_size} and {self.ranks_per_host}"
            )
        if self.num_experts % self.ep_size:
            raise ConfigError(f"num_experts must be a multiple of ep_size, got {self.num_experts} and {self.ep_size}")
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k must not be above num_experts, got {self.top_k} and {self.num_experts}")

    @property
    def hosts(self) -> int:
        """Hosts of the group."""
        return self.ep_size // self.ranks_per_host


@dataclass(frozen=True)
class Prediction:
    """One direction on one transport, a rank.

    Attributes:
        microseconds: the whole operation.
        local_bytes, network_bytes: sent to ranks of the same host, and of other hosts.
        memory_bytes: read from and written to the rank's own memory.
        bound_by: the largest term: ``"local"``, ``"network"``, ``"memory"`` or ``"fixed"``.
    """

    microseconds: float
    local_bytes: float
    network_bytes: float
    memory_bytes: float
    bound_by: str


def reach(num_experts: int, experts_there: int, top_k: int) -> float:
    """Probability that a token needs at least one of ``experts_there`` experts: ``1 - C(E-X, K) / C(E, K)``."""
    return 1.0 - comb(num_experts - experts_there, top_k) / comb(num_experts, top_k)


def predict(
    work: Workload,
    links: Links,
    transport: ModelTransport,
    direction: Literal["dispatch", "combine"] = "dispatch",
    wire: Literal["bf16", "mxfp8", "mxfp8_kept"] = "bf16",
) -> Prediction:
    """The expected time of one operation under uniform routing.

    Args:
        work: sizes.
        links: speeds.
        transport: ``"symmetric"`` (one NVLink domain), ``"collective"`` (flat), or ``"hierarchical"``.
        direction: ``"dispatch"`` (dispatch forward; the backward of the combine costs the same but for the plan) or
            ``"combine"`` (combine forward and dispatch backward), which always travels in BF16.
        wire: ``"mxfp8"`` delivers rows in BF16, ``"mxfp8_kept"`` as they travelled.

    Raises:
        ConfigError: the transport cannot serve such a group, or an argument is unknown.
    """
    problem = unsuitable(work, transport)
    if problem:
        raise ConfigError(f"transport={transport!r}: {problem}")
    if direction not in ("dispatch", "combine"):
        raise ConfigError(f"direction must be 'dispatch' or 'combine', got {direction!r}")
    if wire not in (*WIRES, "mxfp8_kept"):
        raise ConfigError(f"wire must be 'bf16', 'mxfp8' or 'mxfp8_kept', got {wire!r}")
    traffic = _Traffic(work, "bf16" if direction == "combine" else wire)
    if transport == "symmetric":
        return _symmetric(traffic, links, direction)
    return _by_collectives(traffic, links, direction, hierarchical=transport == "hierarchical")


def unsuitable(work: Workload, transport: ModelTransport) -> str | None:
    """Why the transport cannot serve such a group, or None."""
    if transport not in TRANSPORTS:
        return f"must be one of {', '.join(TRANSPORTS)}"
    if transport == "symmetric" and work.hosts > 1:
        return "the ranks are on several hosts"
    if transport == "symmetric" and work.ep_size > SYMMETRIC_MAX_RANKS:
        return f"at most {SYMMETRIC_MAX_RANKS} ranks"
    if transport == "hierarchical" and (work.hosts == 1 or work.ranks_per_host == 1):
        return "needs several hosts with several ranks each"
    return None


class _Traffic:
    """Expected token rows of one rank, and what a row weighs in which place."""

    def __init__(self, work: Workload, wire: str) -> None:
        local_experts = work.num_experts // work.ep_size
        to_rank = work.tokens * reach(work.num_experts, local_experts, work.top_k)
        to_host = work.tokens * reach(work.num_experts, local_experts * work.ranks_per_host, work.top_k)
        self.tokens = work.tokens
        self.expert_rows = work.tokens * work.top_k
        self.to_rank = to_rank
        self.received = to_rank * work.ep_size
        self.flat_local = to_rank * (work.ranks_per_host - 1)
        self.flat_network = to_rank * (work.ep_size - work.ranks_per_host)
        self.rail_network = to_host * (work.hosts - 1)
        self.rail_rows = to_host * work.hosts
        self.forwarded = to_rank * work.hosts * (work.ranks_per_host - 1)
        self.row = work.hidden_size * _BF16_BYTES
        self.wire_row = self.row if wire == "bf16" else work.hidden_size + work.hidden_size // MXFP8_BLOCK
        self.delivered_row = self.wire_row if wire == "mxfp8_kept" else self.row
        self.decodes = wire == "mxfp8"


def _symmetric(traffic: _Traffic, links: Links, direction: str) -> Prediction:
    """One kernel sends, receives and expands (or sums) at the same time: the slowest resource decides, nearly."""
    sent = traffic.flat_local * traffic.wire_row
    # Tokens once, what arrives written by the peers and read again, expert rows once.
    memory = traffic.tokens * traffic.row + 2 * sent + traffic.expert_rows * traffic.delivered_row
    fixed = links.dispatch_us if direction == "dispatch" else links.combine_us
    terms = {"local": _us(sent, links.local), "memory": _us(memory, links.memory), "fixed": fixed}
    lesser, greater = sorted((terms["local"], terms["memory"]))
    return Prediction(fixed + greater + links.unhidden * lesser, sent, 0.0, memory, _largest(terms))


def _by_collectives(traffic: _Traffic, links: Links, direction: str, *, hierarchical: bool) -> Prediction:
    """Gather, exchange (twice if hierarchical), expand, one kernel after the other; the combine goes back that way."""
    wire_row, received = traffic.wire_row, traffic.received
    # Between the ranks of a host the hierarchical combine keeps its sums in FP32.
    inner_row = traffic.row * 2 if hierarchical and direction == "combine" else wire_row
    memory = traffic.tokens * (traffic.row + wire_row)
    # Each hop's rows are read into the send buffer and written there, arrive, and are read by what follows.
    if hierarchical:
        memory += 4 * traffic.rail_rows * wire_row + 4 * received * inner_row
        local, network = traffic.forwarded * inner_row, traffic.rail_network * wire_row
        wire = _us(network, links.network) + _us(local, links.local)
    else:
        memory += 4 * received * wire_row
        local, network = traffic.flat_local * wire_row, traffic.flat_network * wire_row
        wire = max(_us(network, links.network), _us(local, links.local))
    if direction == "combine":
        memory += traffic.expert_rows * traffic.row
    else:
        memory += 2 * traffic.expert_rows * traffic.delivered_row
        if traffic.decodes:
            memory += received * (wire_row + traffic.row)
    # The exchange of counts comes before a dispatch only.
    calls = (2 if hierarchical else 1) + (direction == "dispatch")
    terms = {
        "local": _us(local, links.local),
        "network": _us(network, links.network),
        "memory": _us(memory, links.memory),
        "fixed": calls * links.collective_us + (direction == "dispatch") * links.table_us,
    }
    return Prediction(terms["fixed"] + wire + terms["memory"], local, network, memory, _largest(terms))


def _us(count: float, gb_per_s: float) -> float:
    return count / (gb_per_s * 1e3)


def _largest(terms: dict[str, float]) -> str:
    return max(terms, key=lambda name: terms[name])


def markdown_table(links: Links, sizes: tuple[int, ...] = (8, 64, 256), **work: int) -> str:
    """Expected times for several EP sizes, as the Markdown table of docs/time_model.md.

    Args:
        links: speeds.
        sizes: EP sizes. Above ``ranks_per_host`` the ranks are on several hosts; the symmetric transport is shown where
            all of them are in one NVLink domain.
        work: further fields of :class:`Workload`.
    """
    per_host = work.pop("ranks_per_host", 8)
    lines = [
        "| EP | hosts x ranks | transport | wire | dispatch us | combine us | network MB | local MB | bound by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for size in sizes:
        for transport, ranks_per_host in _settings(size, per_host):
            load = Workload(size, ranks_per_host, **work)
            if unsuitable(load, transport):
                continue
            for wire in WIRES:
                there = predict(load, links, transport, "dispatch", wire)
                back = predict(load, links, transport, "combine", wire)
                lines.append(
                    f"| {size} | {load.hosts} x {ranks_per_host} | {transport} | {wire} | {there.microseconds:,.0f} | "
                    f"{back.microseconds:,.0f} | {there.network_bytes / 1e6:,.1f} | {there.local_bytes / 1e6:,.1f} | "
                    f"{there.bound_by} |"
                )
    return "\n".join(lines)


def _settings(size: int, per_host: int) -> list[tuple[ModelTransport, int]]:
    """The ways in which a group of ``size`` ranks is likely to be laid out."""
    inside = min(size, per_host)
    return [("symmetric", size), ("collective", inside), ("hierarchical", inside)]
