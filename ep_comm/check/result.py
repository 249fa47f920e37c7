"""What a check has found so far, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .correctness import DIRECTIONS, CaseResult
from .environment import host_names
from .findings import Finding, failed, ranges
from .pairs import LinkClass, PairSpeed
from .speed import Shape, TransportSpeed

__all__ = ["SCHEMA", "CheckResult"]

SCHEMA = 1
"""Of :meth:`CheckResult.to_dict`; grows when a field changes its meaning."""


@dataclass
class CheckResult:
    """Filled on rank 0, stage by stage; a check that breaks off leaves the rest empty."""

    ranks: int = 1
    facts: list[dict[str, Any]] = field(default_factory=list)
    transports: dict[str, str] = field(default_factory=dict)
    """Why a transport cannot be used here; empty text where it can."""
    auto: str = ""
    cases: list[CaseResult] = field(default_factory=list)
    """Of all ranks."""
    replays: list[dict[str, Any]] = field(default_factory=list)
    """Of all transports; ``wrong`` maps ranks to what differs."""
    pairs: list[PairSpeed] = field(default_factory=list)
    classes: list[LinkClass] = field(default_factory=list)
    shape: Shape | None = None
    captured: bool = False
    """Whether the timed operations were CUDA graphs."""
    speeds: list[TransportSpeed] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    complete: bool = False
    """Whether every stage was reached."""
    broken: bool = False
    """Whether the process group may be of no use any more."""

    @property
    def failed(self) -> bool:
        """Whether anything is wrong that an exit status should tell."""
        return failed(self.findings) or not self.complete

    @property
    def hosts(self) -> list[str]:
        """The name of every rank's host."""
        return host_names(self.facts)

    def grid(self) -> list[dict[str, Any]]:
        """Correctness by transport, wire format and mode: for each direction how many of the cases are right."""
        lines: dict[tuple[str, str, str], dict[str, Any]] = {}
        for result in self.cases:
            case = result.case
            wire = case.wire if case.wire == "mxfp8" or case.dtype == "bfloat16" else case.dtype
            line = lines.setdefault(
                (case.transport, wire, case.mode), {"cases": set(), "wrong": {name: set() for name in DIRECTIONS}}
            )
            line["cases"].add(case)
            for direction in result.wrong:
                line["wrong"][direction].add(case)
        return [
            {
                "transport": transport,
                "wire": wire,
                "mode": mode,
                "cases": len(line["cases"]),
                "wrong": {name: len(wrong) for name, wrong in line["wrong"].items()},
            }
            for (transport, wire, mode), line in lines.items()
        ]

    def judge_cases(self) -> list[Finding]:
        """One finding for each transport and direction that is wrong anywhere, with the first example."""
        wrong: dict[tuple[str, str], list[CaseResult]] = {}
        for result in self.cases:
            for direction in result.wrong:
                wrong.setdefault((result.case.transport, direction), []).append(result)
        findings = []
        for (transport, direction), results in wrong.items():
            first, ranks = results[0], sorted({result.rank for result in results})
            case = first.case
            bad = {result.case for result in results}
            all_cases = {result.case for result in self.cases if result.case.transport == transport}
            message = (
                f"{direction} on the {transport} transport is wrong on rank {ranges(ranks)} "
                f"({_names([self.hosts[rank] for rank in ranks])}), in {len(bad)} of {len(all_cases)} cases. First: "
                f"rank {first.rank}, {case.mode} mode, {case.wire if case.wire == 'mxfp8' else case.dtype}: "
                f"{first.wrong[direction]}"
            )
            findings.append(Finding("wrong-result", message, tuple(ranks)))
        return findings

    def to_dict(self, version: str) -> dict[str, Any]:
        """Everything, for programs; docs/check.md describes the fields."""
        first = self.facts[0] if self.facts else {}
        hosts = self.hosts
        return {
            "schema": SCHEMA,
            "ep_comm": version,
            "verdict": "failed" if self.failed else "ok",
            "complete": self.complete,
            "seconds": round(self.seconds, 3),
            "ranks": self.ranks,
            "launcher": first.get("launcher"),
            "backend": first.get("backend"),
            "hosts": [
                {"name": name, "ranks": [rank for rank, host in enumerate(hosts) if host == name]}
                for name in dict.fromkeys(hosts)
            ],
            "environment": self.facts,
            "transports": {
                name: {"available": not problem, "reason": problem} for name, problem in self.transports.items()
            },
            "auto": self.auto,
            "correctness": self.grid(),
            "wrong": [result.to_dict() for result in self.cases if result.wrong],
            "replay": self.replays,
            "pairs": [pair.to_dict() for pair in self.pairs],
            "links": [link.to_dict() for link in self.classes],
            "shape": {**asdict(self.shape), "cuda_graphs": self.captured} if self.shape else None,
            "speed": [speed.to_dict() for speed in self.speeds],
            "findings": [asdict(finding) for finding in self.findings],
        }


def _names(hosts: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(hosts))
    return ", ".join(distinct[:4]) + (", ..." if len(distinct) > 4 else "")
