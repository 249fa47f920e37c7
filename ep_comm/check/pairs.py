"""Latency and bandwidth between every two ranks, and which pairs or ranks are slower than the rest."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import Env
from .findings import Finding, ranges

__all__ = ["LinkClass", "PairSpeed", "classify", "judge_pairs", "measure_pairs", "pattern", "schedule"]

_MIN_BYTES, _MAX_BYTES = 64 << 10, 256 << 20
_ROUND_TRIPS = 6
_REPEATS = 4
_SLOW = 0.5  # of the median of the class


@dataclass(frozen=True)
class PairSpeed:
    """Two ranks, ``a < b``.

    Attributes:
        latency_us: half of a round trip of 8 bytes; on the path "peer memory" the time of copying them.
        gb_per_s: in each direction, both at once, 1e9 bytes a second; the best of a few transfers.
        message_bytes: size of these transfers.
        intact: whether what arrived is what was sent.
        path: "messages" of the process group's backend, or "peer memory".
    """

    a: int
    b: int
    latency_us: float
    gb_per_s: float
    message_bytes: int
    intact: bool = True
    path: str = "messages"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class LinkClass:
    """All pairs inside hosts, or all between hosts, on one path: medians, and the slowest of them."""

    path: str
    name: str
    pairs: int
    latency_us: float
    gb_per_s: float
    slowest_gb_per_s: float
    slowest: tuple[int, int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def schedule(ranks: int) -> list[list[tuple[int, int]]]:
    """Rounds in which every rank is in at most one pair; every pair comes once (the circle method)."""
    players: list[int] = list(range(ranks)) + ([-1] if ranks % 2 else [])
    rounds = []
    for _ in range(len(players) - 1):
        facing = zip(players[: len(players) // 2], reversed(players[len(players) // 2 :]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in facing if -1 not in pair])
        players[1:] = [players[-1], *players[1:-1]]
    return rounds


def measure_pairs(
    env: Env, seconds: float, progress: Callable[[str], None], *, peer_memory: bool = False
) -> tuple[list[PairSpeed], int]:
    """Measure all pairs, over the process group's backend and where asked out of each other's memory. Collective.

    Args:
        seconds: after which no further round is begun.
        progress: called before each round.
        peer_memory: the GPUs of all ranks can read each other's memory.

    Returns:
        The pairs of which this rank is the lower one, and those whose data reached it altered; and the number of
        rounds that were left out.
    """
    rounds = schedule(env.world_size)
    link = _Messages(env)
    window = None
    if peer_memory:
        from .peer_memory import PeerMemory

        window = PeerMemory(env)
    started = time.perf_counter()
    share = seconds / max(1, len(rounds))
    found: list[PairSpeed] = []
    for number, pairs in enumerate(rounds):
        over = torch.tensor(float(time.perf_counter() - started > seconds), device=env.device)
        dist.all_reduce(over, op=dist.ReduceOp.MAX, group=env.group)
        if bool(over):
            return found, len(rounds) - number
        for a, b in pairs:
            if env.rank not in (a, b):
                continue
            progress(f"pair {a}-{b}")
            peer = b if env.rank == a else a
            speeds = [link.measure(peer, min(max(share / 10, 0.002), 0.03))]
            if window is not None:
                speeds.append(window.measure(peer, partial(link.meet, peer)))
            # The other rank reports what only it can know: that its half did not arrive as it was sent.
            found += [speed for speed in speeds if env.rank == a or not speed.intact]
    dist.barrier(env.group)
    return found, 0


class _Messages:
    """Point-to-point transfers of this rank over the process group."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._ranks = dist.get_process_group_ranks(env.group)
        self._small = torch.zeros(1, dtype=torch.int64, device=env.device)

    def measure(self, peer: int, target_seconds: float) -> PairSpeed:
        """Both ranks of the pair call it with each other. ``target_seconds``: how long one transfer may take."""
        env = self._env
        first = env.rank < peer
        for _ in range(2):  # connects
            self._round_trip(peer, first)
        latency_us = min(self._round_trips(peer, first) for _ in range(_REPEATS)) / 2 * 1e6
        size = _MIN_BYTES
        # On a fast link a small message says little: grow until the time is that of the bytes.
        while size < _MAX_BYTES:
            spent = min(self._transfer(peer, size)[0] for _ in range(2))
            growth = self._agree(peer, first, int(min(8.0, target_seconds / max(spent, 1e-6))))
            if growth < 2:
                break
            size = min(size * growth, _MAX_BYTES)
        transfers = [self._transfer(peer, size) for _ in range(_REPEATS)]
        best = min(seconds for seconds, _ in transfers)
        return PairSpeed(
            min(env.rank, peer),
            max(env.rank, peer),
            latency_us,
            size / best / 1e9,
            size,
            all(intact for _, intact in transfers),
        )

    def meet(self, peer: int) -> None:
        """Wait for the other rank of the pair."""
        self._round_trip(peer, self._env.rank < peer)

    def _round_trips(self, peer: int, first: bool) -> float:
        """Mean seconds of a few round trips."""
        started = self._clock()
        for _ in range(_ROUND_TRIPS):
            self._round_trip(peer, first)
        return (self._clock() - started) / _ROUND_TRIPS

    def _round_trip(self, peer: int, first: bool) -> None:
        for sends in (first, not first):
            self._wait([(dist.isend if sends else dist.irecv, self._small)], peer)

    def _agree(self, peer: int, first: bool, own: int) -> int:
        """The lower rank's number."""
        number = torch.tensor([own], dtype=torch.int64, device=self._env.device)
        self._wait([(dist.isend if first else dist.irecv, number)], peer)
        return int(number)

    def _transfer(self, peer: int, size: int) -> tuple[float, bool]:
        """Seconds of one exchange of ``size`` bytes each way, and whether they arrived as they were sent."""
        device = self._env.device
        out = pattern(self._env.rank, size, device)
        received = torch.zeros_like(out)
        wanted = pattern(peer, size, device)
        started = self._clock()
        self._wait([(dist.isend, out), (dist.irecv, received)], peer)
        seconds = self._clock() - started
        return seconds, torch.equal(received, wanted)

    def _wait(self, operations: Sequence[tuple[Any, Tensor]], peer: int) -> None:
        to, group = self._ranks[peer], self._env.group
        for request in dist.batch_isend_irecv([dist.P2POp(what, tensor, to, group) for what, tensor in operations]):
            request.wait()

    def _clock(self) -> float:
        if self._env.device.type == "cuda":
            torch.cuda.synchronize(self._env.device)
        return time.perf_counter()


def pattern(rank: int, size: int, device: torch.device) -> Tensor:
    """``size`` bytes that say from whom they are."""
    return torch.arange(size // 8, dtype=torch.int64, device=device) * 2654435761 + rank


# ---- looking at the numbers -----------------------------------------------------------------------------


def classify(pairs: Sequence[PairSpeed], hosts: Sequence[str]) -> list[LinkClass]:
    """Medians inside hosts and between hosts; ``hosts`` names the host of every rank."""
    return [
        LinkClass(
            path=path,
            name=name,
            pairs=len(members),
            latency_us=statistics.median(pair.latency_us for pair in members),
            gb_per_s=statistics.median(pair.gb_per_s for pair in members),
            slowest_gb_per_s=min(pair.gb_per_s for pair in members),
            slowest=min((pair.gb_per_s, (pair.a, pair.b)) for pair in members)[1],
        )
        for (path, name), members in _by_class(pairs, hosts).items()
    ]


def judge_pairs(pairs: Sequence[PairSpeed], hosts: Sequence[str]) -> list[Finding]:
    """Pairs below half the median bandwidth of their class; ranks most of whose pairs are; altered data.

    A rank that is slow with most of its peers is named once, instead of all its pairs.
    """
    findings = []
    for pair in pairs:
        if not pair.intact:
            message = f"between rank {pair.a} ({hosts[pair.a]}) and rank {pair.b} ({hosts[pair.b]}) data arrive altered"
            findings.append(Finding("wrong-data", message, (pair.a, pair.b)))
    for (path, where), members in _by_class(pairs, hosts).items():
        name = where if path == "messages" else f"{where} through {path}"
        if len(members) < 3:
            continue  # a median of two says nothing about either
        median = statistics.median(pair.gb_per_s for pair in members)
        slow = [pair for pair in members if pair.gb_per_s < _SLOW * median]
        culprits = _slow_ranks(members, slow)
        for rank in culprits:
            speed = statistics.median(pair.gb_per_s for pair in slow if rank in (pair.a, pair.b))
            message = (
                f"rank {rank} on {hosts[rank]} is slow with most of its peers {name}: {speed:.3g} GB/s, the median is "
                f"{median:.3g} GB/s"
            )
            findings.append(Finding("slow-rank", message, (rank,)))
        rest = [pair for pair in slow if not {pair.a, pair.b} & set(culprits)]
        for pair in sorted(rest, key=lambda each: each.gb_per_s)[:8]:
            message = (
                f"rank {pair.a} ({hosts[pair.a]}) and rank {pair.b} ({hosts[pair.b]}) reach {pair.gb_per_s:.3g} GB/s, "
                f"the median {name} is {median:.3g} GB/s"
            )
            findings.append(Finding("slow-pair", message, (pair.a, pair.b)))
        if len(rest) > 8:
            others = ranges({rank for pair in rest for rank in (pair.a, pair.b)})
            findings.append(Finding("slow-pair", f"{len(rest)} slow pairs {name} in all, among ranks {others}"))
    return findings


def _by_class(pairs: Sequence[PairSpeed], hosts: Sequence[str]) -> dict[tuple[str, str], list[PairSpeed]]:
    """Pairs by (path, where)."""
    classes: dict[tuple[str, str], list[PairSpeed]] = {}
    for path in dict.fromkeys(pair.path for pair in pairs):
        for name, inside in (("inside a host", True), ("between hosts", False)):
            members = [p for p in pairs if p.path == path and (hosts[p.a] == hosts[p.b]) == inside]
            if members:
                classes[path, name] = members
    return classes


def _slow_ranks(members: Sequence[PairSpeed], slow: Sequence[PairSpeed]) -> list[int]:
    """Ranks of which more than half of at least three pairs are slow."""
    total: dict[int, int] = defaultdict(int)
    bad: dict[int, int] = defaultdict(int)
    for pairs, counts in ((members, total), (slow, bad)):
        for pair in pairs:
            counts[pair.a] += 1
            counts[pair.b] += 1
    return sorted(rank for rank, count in bad.items() if total[rank] >= 3 and count > total[rank] / 2)
