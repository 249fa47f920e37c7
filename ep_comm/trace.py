"""Routing traces: which experts every token chose, one JSON record a line.

The record is the one Megatron-Core's router trace writes::

    {"step": 3, "stage": "pre_dispatch", "block": "decoder", "layer": 1, "rank": 0,
     "num_tokens": 2, "topk": 2, "top_indices": [[5, 0], [1, 5]]}

Each rank writes a file of its own, so that no rank waits for another.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from .errors import EPError

__all__ = [
    "RouterTraceRecord",
    "RouterTraceWriter",
    "TraceError",
    "read_router_trace",
    "trace_files",
    "trace_path",
]

_INTEGERS = ("step", "layer", "rank", "num_tokens", "topk")


class TraceError(EPError, ValueError):
    """A routing trace is missing, or one of its lines is not a valid record."""


@dataclass(frozen=True)
class RouterTraceRecord:
    """The routing of one dispatch.

    Attributes:
        step: training step, from 0.
        layer: MoE layer, from 0.
        rank: rank that held the tokens.
        num_tokens: tokens of this dispatch, 0 allowed.
        topk: expert slots a token.
        top_indices: ``[num_tokens][topk]`` global expert ids, -1 for an empty slot.
        stage, block: where in the model the record was taken.
    """

    step: int
    layer: int
    rank: int
    num_tokens: int
    topk: int
    top_indices: list[list[int]]
    stage: str = "pre_dispatch"
    block: str = "decoder"

    def to_json(self) -> str:
        """One line, without the newline, the fields in Megatron-Core's order."""
        names = ("step", "stage", "block", "layer", "rank", "num_tokens", "topk", "top_indices")
        return json.dumps({name: getattr(self, name) for name in names}, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> RouterTraceRecord:
        """Read and check one line.

        Raises:
            TraceError: not JSON, a field missing or of the wrong type, or sizes that do not fit.
        """
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise TraceError(f"not a JSON record ({error})") from None
        if not isinstance(fields, dict):
            raise TraceError(f"expected a JSON object, got {type(fields).__name__}")
        for name in (*_INTEGERS, "top_indices"):
            if name not in fields:
                raise TraceError(f"field {name!r} is missing")
        for name in _INTEGERS:
            value = fields[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise TraceError(f"{name} must be an integer from 0, got {value!r}")
        _check_indices(fields["top_indices"], fields["num_tokens"], fields["topk"])
        return cls(
            *(fields[name] for name in _INTEGERS),
            fields["top_indices"],
            str(fields.get("stage", "pre_dispatch")),
            str(fields.get("block", "decoder")),
        )


def _check_indices(indices: Any, num_tokens: int, topk: int) -> None:
    if not isinstance(indices, list) or len(indices) != num_tokens:
        got = f"{len(indices)} entries" if isinstance(indices, list) else type(indices).__name__
        raise TraceError(f"top_indices must be a list of num_tokens={num_tokens} entries, got {got}")
    for token, slots in enumerate(indices):
        if not isinstance(slots, list) or len(slots) != topk:
            raise TraceError(f"top_indices[{token}] must be a list of topk={topk} ids, got {slots!r}")
        for expert in slots:
            if isinstance(expert, bool) or not isinstance(expert, int) or expert < -1:
                raise TraceError(f"top_indices[{token}] holds {expert!r}; ids are integers from 0, or -1")


def trace_path(path: str | Path, rank: int) -> Path:
    """File of one rank: ``routing.jsonl`` becomes ``routing.rank0.jsonl``."""
    path = Path(path)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix or '.jsonl'}")


class RouterTraceWriter:
    """Writes the routing of committed steps.

    An attempt that overflows is discarded and run again, so records are held back until the step is
    known to be good::

        with RouterTraceWriter("routing.jsonl", rank) as trace:
            trace.attach(layer.dispatcher, 0)
            for step in range(steps):
                runner(batch)        # step_fn starts with trace.begin(step)
                trace.commit()

    Dispatches outside ``begin`` ... ``commit`` (a validation pass, say) are not recorded.

    Args:
        path: name shared by all ranks, see :func:`trace_path`.
        rank: this rank.
        append: continue an existing file (a resumed run) instead of starting it again.
    """

    def __init__(self, path: str | Path, rank: int, *, append: bool = False) -> None:
        self.path = trace_path(path, rank)
        self.rank = rank
        self._step: int | None = None
        self._pending: list[tuple[int, torch.Tensor]] = []
        try:
            self._file: IO[str] | None = open(self.path, "a" if append else "w", encoding="utf-8")
        except OSError as error:
            raise TraceError(f"cannot write the routing trace {self.path}: {error.strerror}") from error

    def attach(self, dispatcher: Any, layer: int) -> None:
        """Record every forward dispatch of ``dispatcher`` (an :class:`ep_comm.Dispatcher`) as ``layer``."""
        dispatcher.routing_hooks.append(lambda _, topk_idx_TK: self.record(layer, topk_idx_TK))

    def begin(self, step: int) -> None:
        """Start (or, on a replay, start again) collecting ``step``."""
        self._step = step
        self._pending.clear()

    def record(self, layer: int, topk_idx_TK: torch.Tensor) -> None:
        """Hold back one dispatch's routing. A copy stays on the device: no host sync happens here."""
        if self._step is not None:
            self._pending.append((layer, topk_idx_TK.detach().clone()))

    def commit(self) -> None:
        """Write what was collected since :meth:`begin`. Copies it to the host."""
        if self._step is None:
            return
        if self._file is None:
            raise TraceError(f"the routing trace {self.path} is closed")
        for layer, topk_idx_TK in self._pending:
            tokens, slots = topk_idx_TK.shape
            record = RouterTraceRecord(self._step, layer, self.rank, tokens, slots, topk_idx_TK.tolist())
            self._file.write(record.to_json() + "\n")
        self._file.flush()
        self._step = None
        self._pending.clear()

    def close(self) -> None:
        """Close the file. An uncommitted step is dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> RouterTraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def trace_files(path: str | Path) -> list[Path]:
    """The files meant by ``path``: itself, all ``*.jsonl`` of a folder, or the rank files of a shared name.

    Raises:
        TraceError: there is none.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if path.is_dir():
        found = list(path.glob("*.jsonl"))
    else:
        found = list(path.parent.glob(f"{glob.escape(path.stem)}.rank*{path.suffix or '.jsonl'}"))
    if not found:
        raise TraceError(f"no routing trace at {path}: expected a .jsonl file, its .rankN files, or a folder of them")
    return sorted(found, key=_rank_order)


def _rank_order(path: Path) -> tuple[str, int]:
    match = re.search(r"^(.*)\.rank(\d+)\.", path.name)
    return (match.group(1), int(match.group(2))) if match else (path.name, -1)


def read_router_trace(path: str | Path) -> Iterator[RouterTraceRecord]:
    """Read a trace, file after file, one record at a time.

    Args:
        path: a file, a folder, or the name that was given to :class:`RouterTraceWriter`.

    Raises:
        TraceError: no such trace, or a bad line; the message gives file and line number.
    """
    for file in trace_files(path):
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = RouterTraceRecord.from_json(line)
                except TraceError as error:
                    raise TraceError(f"{file}, line {number}: {error}") from None
                yield record
