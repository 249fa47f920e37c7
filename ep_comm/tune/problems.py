"""What is wrong with a trace: every problem is counted, located, and left out or kept as the user says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError, EPError

__all__ = ["KINDS", "Problem", "ProblemLog", "TuneError"]

_EXAMPLES = 3


class TuneError(EPError, ValueError):
    """A trace cannot be used: missing, unreadable, or without a single complete step."""


@dataclass(frozen=True)
class _Kind:
    text: str
    if_kept: str | None


KINDS: dict[str, _Kind] = {
    "malformed": _Kind("not a valid record", None),
    "truncated": _Kind("last line ends in the middle of a record", None),
    "too-long": _Kind("line longer than 64 MiB", None),
    "expert-id": _Kind("expert id outside [-1, num_experts)", "the slot counts as empty"),
    "mixed-top-k": _Kind("another top-k than the trace's first record", "the record is used as it is"),
    "other-stage": _Kind("another stage than the trace's first record", None),
    "stray": _Kind("a layer or rank that the first steps of the trace do not have", None),
    "duplicate": _Kind(
        "step, layer and rank occurred before", "each is a further dispatch of the step (micro-batches)"
    ),
    "identical-rows": _Kind("a long run of identical rows (warm-up or padding tokens)", "the tokens are used"),
    "missing-layer": _Kind("step without some of the layers", "the missing layers need nothing in that step"),
    "missing-rank": _Kind("step without some of the ranks", "the missing ranks send nothing in that step"),
}
"""Every kind of problem: what it means, and what is done with the data if the user keeps it."""


@dataclass
class Problem:
    """One kind of problem in one trace.

    Attributes:
        kind: a key of :data:`KINDS`.
        count: how often it occurred.
        kept: whether the data was used all the same.
        examples: the first places, ``file, line N: detail``.
    """

    kind: str
    kept: bool
    count: int = 0
    examples: list[str] = field(default_factory=list)


class ProblemLog:
    """Counts problems while a trace is read.

    Args:
        keep: kinds whose data is used all the same.

    Raises:
        ConfigError: a kind that does not exist, or whose data cannot be kept.
    """

    def __init__(self, keep: Iterable[str] = ()) -> None:
        self.keep = frozenset(keep)
        keepable = [name for name, kind in KINDS.items() if kind.if_kept]
        for name in sorted(self.keep):
            if name not in keepable:
                raise ConfigError(f"keep must be one of {', '.join(keepable)}, got {name!r}")
        self._problems: dict[str, Problem] = {}

    def add(self, kind: str, detail: str, file: Path | str | None = None, line: int | None = None) -> bool:
        """Count one problem; returns whether its data is to be used all the same."""
        problem = self._problems.setdefault(kind, Problem(kind, kind in self.keep))
        problem.count += 1
        if len(problem.examples) < _EXAMPLES:
            where = "" if file is None else f"{file}, line {line}: " if line is not None else f"{file}: "
            problem.examples.append(where + detail)
        return problem.kept

    def clear(self) -> None:
        """Forget everything, before a trace is read once more."""
        self._problems.clear()

    @property
    def problems(self) -> list[Problem]:
        """In the order of :data:`KINDS`."""
        return [self._problems[kind] for kind in KINDS if kind in self._problems]

    def summary(self) -> str:
        """All kinds with their counts on one line; empty where there is none."""
        return ", ".join(
            f"{problem.count} {problem.kind} ({'kept' if problem.kept else 'left out'})" for problem in self.problems
        )
