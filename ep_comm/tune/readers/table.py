"""Token tables, CSV or JSON lines: one token a row, the experts of each layer in its columns.

Wide CSV: columns ``layer0``, ``layer1``, ... hold a token's ids, separated by blanks, ``;``, ``|`` or ``/``.
Long CSV: columns ``layer`` and ``experts``, one (token, layer) a row.
JSON lines: ``"experts"`` is a list with one list of ids a layer, or an object from layer number to ids.
All may have ``step`` and ``rank``; other columns are ignored.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..problems import TuneError
from .digits import parse_numbers
from .lines import read_lines
from .record import Layer, Reading, Record, check_ids

__all__ = ["read_csv_file", "read_token_jsonl_file"]

_CHUNK_LINES = 4096
_MAX_ROWS = 2**22
_SEPARATORS = re.compile(r"[\s,;|/\[\]]+")

Row = tuple[int, int, dict[int, list[int]]]  # step (-1: none), rank, ids of each layer


class _RowError(ValueError):
    """A row that cannot be used."""


@dataclass(frozen=True)
class _Header:
    """Where a CSV's columns are: the layers' columns, or for a long table the columns of layer and ids."""

    width: int
    step: int | None
    rank: int | None
    layers: dict[int, int]
    long: tuple[int, int] | None

    @classmethod
    def read(cls, names: list[str], reading: Reading, file: Path) -> _Header:
        names = [name.strip() for name in names]
        find = {name: names.index(reading.column(name)) for name in ("step", "rank", "experts", "layer")
                if reading.column(name) in names}  # fmt: skip
        prefix = re.compile(re.escape(reading.column("layer")) + r"[_ .-]?(\d{1,6})$")
        layers = {int(match.group(1)): at for at, name in enumerate(names) if (match := prefix.match(name))}
        long = (find["layer"], find["experts"]) if "layer" in find and "experts" in find else None
        if not layers and long is None:
            raise TuneError(
                f"{file}: expected columns layer0, layer1, ... or layer and experts, got {', '.join(names)[:200]}; "
                "name your own with --column, as in --column layer=moe_"
            )
        return cls(len(names), find.get("step"), find.get("rank"), {} if long else layers, long)


class _Batches:
    """Collects rows until their step is over and makes records of them."""

    def __init__(self, file: Path, reading: Reading) -> None:
        self._file, self._reading = file, reading
        self._open: dict[tuple[int, int], list[np.ndarray]] = {}
        self._rows = 0
        self._step = 0
        self._first_line = 0

    def add(self, step: int, rank: int, layer: int, ids_TK: np.ndarray, line: int) -> Iterator[Record]:
        """Add tokens of one layer; yields the records of the step before where a new one begins."""
        if step >= 0 and step != self._step:
            yield from self.flush()
            self._step = step
        if not self._open:
            self._first_line = line
        self._open.setdefault((rank, layer), []).append(ids_TK)
        self._rows += ids_TK.shape[0]
        if self._rows > _MAX_ROWS:
            raise TuneError(
                f"{self._file}, line {line}: step {self._step} has more than {_MAX_ROWS} (token, layer) rows"
            )

    def next_chunk(self) -> Iterator[Record]:
        """Close a chunk of a table without steps."""
        yield from self.flush()
        self._step += 1

    def flush(self) -> Iterator[Record]:
        """Yield what is open."""
        for (rank, layer), parts in sorted(self._open.items()):
            ids_TK = check_ids(np.concatenate(parts), self._reading, self._file, self._first_line)
            if ids_TK is not None:
                yield Record(
                    self._step,
                    Layer("decoder", layer),
                    rank,
                    ids_TK.shape[0],
                    ids_TK,
                    None,
                    self._file,
                    self._first_line,
                )
        self._open.clear()
        self._rows = 0


def read_csv_file(file: Path, reading: Reading) -> Iterator[Record]:
    """Yield the records of a CSV file.

    Raises:
        TuneError: unreadable, no usable header, or one step with more rows than fit into memory.
    """
    lines = read_lines(file, reading)
    first = next(lines, None)
    if first is None:
        return
    try:
        header = _Header.read(_cells(first[1]), reading, file)
    except _RowError as error:
        raise TuneError(f"{file}, line 1: {error}") from None
    reading.has_steps = reading.has_steps and header.step is not None
    batches = _Batches(file, reading)
    for chunk in _chunks(lines):
        blocks = _fast_rows(header, chunk)
        if blocks is None:
            blocks = _slow_rows(header, chunk, reading, file)
        for step, rank, layer, ids_TK, line in blocks:
            yield from batches.add(step, rank, layer, ids_TK, line)
        if header.step is None:
            yield from batches.next_chunk()
    yield from batches.flush()


def _chunks(lines: Iterable[tuple[int, bytes, bool]]) -> Iterator[list[tuple[int, bytes, bool]]]:
    chunk = []
    for line in lines:
        chunk.append(line)
        if len(chunk) == _CHUNK_LINES:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


Block = tuple[int, int, int, np.ndarray, int]


def _fast_rows(header: _Header, chunk: list[tuple[int, bytes, bool]]) -> list[Block] | None:
    """Blocks of equal step and rank, or None unless all lines have one spelling: integers and the same separators."""
    first = chunk[0][1]
    if header.long is not None or not first.endswith(b"\n"):
        return None
    skeleton = first.translate(None, b"0123456789")
    cells = first.split(b",")
    if len(cells) != header.width:
        return None
    per_cell = [len(re.findall(rb"\d+", cell)) for cell in cells]
    text = b"".join(line for _, line, _ in chunk)
    if text.translate(None, b"0123456789") != skeleton * len(chunk) or re.search(rb"[^\d ;|/\r\n,]", skeleton):
        return None
    values = parse_numbers(b"\n" * 10 + text, sum(per_cell) * len(chunk), max_digits=9)
    if values is None:
        return None
    table = values.reshape(len(chunk), -1)
    start = np.concatenate([[0], np.cumsum(per_cell)])
    top_k = {per_cell[at] for at in header.layers.values()}
    if len(top_k) != 1 or any(at is not None and per_cell[at] != 1 for at in (header.step, header.rank)):
        return None
    step = table[:, start[header.step]] if header.step is not None else np.full(len(chunk), -1)
    rank = table[:, start[header.rank]] if header.rank is not None else np.zeros(len(chunk), dtype=np.int64)
    edges = np.flatnonzero((step[1:] != step[:-1]) | (rank[1:] != rank[:-1])) + 1
    blocks = []
    for low, high in zip([0, *edges.tolist()], [*edges.tolist(), len(chunk)], strict=True):
        for layer, at in header.layers.items():
            ids_TK = table[low:high, start[at] : start[at + 1]]
            blocks.append((int(step[low]), int(rank[low]), layer, ids_TK, chunk[low][0]))
    return blocks


def _slow_rows(header: _Header, chunk: list[tuple[int, bytes, bool]], reading: Reading, file: Path) -> Iterator[Block]:
    for number, line, complete in chunk:
        try:
            step, rank, layers = _csv_row(header, _cells(line))
        except (ValueError, OverflowError) as error:
            kind = "malformed" if complete else "truncated"
            reading.log.add(kind, str(error), file, number)
            continue
        for layer, ids in layers.items():
            yield step, rank, layer, np.array([ids], dtype=np.int64), number


def _cells(line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode("utf-8", "replace").rstrip("\r\n")]), [])
    except csv.Error as error:
        raise _RowError(f"not CSV ({error})") from None


def _csv_row(header: _Header, cells: list[str]) -> Row:
    if len(cells) != header.width:
        raise _RowError(f"{len(cells)} cells, the header has {header.width}")
    step = -1 if header.step is None else _integer(cells[header.step], "step")
    rank = 0 if header.rank is None else _integer(cells[header.rank], "rank")
    if header.long is not None:
        layer, ids = header.long
        return step, rank, {_integer(cells[layer], "layer"): _ids(cells[ids])}
    layers = {layer: _ids(cells[at]) for layer, at in header.layers.items()}
    return step, rank, _same_length(layers)


def _same_length(layers: dict[int, list[int]]) -> dict[int, list[int]]:
    if len({len(ids) for ids in layers.values()}) > 1:
        raise _RowError("the layers have different numbers of experts")
    return layers


def _integer(text: str, name: str) -> int:
    if not re.fullmatch(r"\d{1,15}", text.strip()):
        raise _RowError(f"{name} must be an integer from 0, got {text[:40]!r}")
    return int(text)


def _ids(cell: str) -> list[int]:
    ids = [part for part in _SEPARATORS.split(cell) if part]
    if not ids or any(not re.fullmatch(r"-?\d{1,9}", part) for part in ids):
        raise _RowError(f"expected expert ids, got {cell[:40]!r}")
    return [int(part) for part in ids]


def read_token_jsonl_file(file: Path, reading: Reading) -> Iterator[Record]:
    """Yield the records of a JSON-lines file with one token a line.

    Raises:
        TuneError: unreadable, or one step with more rows than fit into memory.
    """
    batches = _Batches(file, reading)
    in_chunk = 0
    for number, line, complete in read_lines(file, reading):
        try:
            step, rank, layers = _json_row(line, reading)
        except (ValueError, RecursionError) as error:
            reading.log.add("malformed" if complete else "truncated", str(error) or "nested too deeply", file, number)
            continue
        if step < 0:
            reading.has_steps = False
        for layer, ids in layers.items():
            yield from batches.add(step, rank, layer, np.array([ids], dtype=np.int64), number)
        in_chunk += 1
        if step < 0 and in_chunk == _CHUNK_LINES:
            yield from batches.next_chunk()
            in_chunk = 0
    yield from batches.flush()


def _json_row(line: bytes, reading: Reading) -> Row:
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise _RowError(f"expected a JSON object, got {type(fields).__name__}")
    numbers = {}
    for name, default in (("step", -1), ("rank", 0)):
        value = fields.get(reading.column(name), default)
        if isinstance(value, bool) or not isinstance(value, int) or not default <= value < 10**15:
            raise _RowError(f"{name} must be an integer from 0, got {value!r}")
        numbers[name] = value
    experts = fields.get(reading.column("experts"))
    if isinstance(experts, list):
        experts = {str(number): ids for number, ids in enumerate(experts)}
    if not isinstance(experts, dict) or not experts:
        raise _RowError("experts must be a list of one list of ids a layer, or an object of them")
    layers = {_integer(str(layer), "layer"): _json_ids(ids) for layer, ids in experts.items()}
    return numbers["step"], numbers["rank"], _same_length(layers)


def _json_ids(ids: object) -> list[int]:
    if not isinstance(ids, list) or not ids:
        raise _RowError(f"expected a list of expert ids, got {str(ids)[:40]}")
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int) or not -(2**31) < value < 2**31:
            raise _RowError(f"expected expert ids, got {str(value)[:40]}")
    return ids
