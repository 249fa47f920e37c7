"""Which files are meant, of what format they are, and one stream of records out of all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError
from ...trace import TraceError, trace_files
from ..problems import ProblemLog, TuneError
from .counts import Corpora, read_counts_json, read_counts_npz
from .lines import read_lines
from .record import Reading, Record
from .router import read_router_file
from .table import read_csv_file, read_token_jsonl_file

__all__ = ["TraceFiles", "find_files"]

_SUFFIXES = (".jsonl", ".csv", ".npz", ".json")


@dataclass(frozen=True)
class TraceFiles:
    """The files of a trace with their formats.

    Attributes:
        files: path and format: ``"router"``, ``"tokens-csv"``, ``"tokens-jsonl"``, ``"counts-npz"`` or
            ``"counts-json"``.
    """

    files: list[tuple[Path, str]]

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(path.stat().st_size for path, _ in self.files)

    def corpora(self, reading: Reading) -> Corpora | None:
        """The corpus-level counts, where the trace is one file of them."""
        if len(self.files) == 1 and self.files[0][1] == "counts-json":
            found = read_counts_json(self.files[0][0], reading)
            return found if isinstance(found, Corpora) else None
        return None

    def records(self, reading: Reading) -> Iterator[Record]:
        """All records, file after file.

        Raises:
            TuneError: a file cannot be read.
        """
        readers = {
            "router": read_router_file,
            "tokens-csv": read_csv_file,
            "tokens-jsonl": read_token_jsonl_file,
            "counts-npz": read_counts_npz,
            "counts-json": read_counts_json,
        }
        for path, form in self.files:
            records = readers[form](path, reading)
            if isinstance(records, Corpora):
                raise ConfigError(f"{path} holds counts of whole corpora: it cannot be mixed with other files")
            yield from records


def find_files(paths: Sequence[Path], columns: dict[str, str] | None = None) -> TraceFiles:
    """Find the files meant by ``paths``: files, folders, or the name that rank files share.

    Raises:
        TuneError: one of them does not exist, or is of no known format.
    """
    if not paths:
        raise ConfigError("name at least one trace")
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(
                each for each in path.iterdir() if each.suffix in (".jsonl", ".csv", ".npz") and each.is_file()
            )
            if not inside:
                raise TuneError(f"no trace in the folder {path}: expected .jsonl, .csv or .npz files")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            try:
                found += trace_files(path)
            except TraceError as error:
                raise TuneError(str(error)) from None
    unique = list(dict.fromkeys(found))
    return TraceFiles([(path, _format(path, columns or {})) for path in unique])


def _format(path: Path, columns: dict[str, str]) -> str:
    by_suffix = {".csv": "tokens-csv", ".npz": "counts-npz", ".json": "counts-json"}
    if path.suffix in by_suffix:
        return by_suffix[path.suffix]
    if path.suffix != ".jsonl":
        raise TuneError(f"{path}: a trace must end in {', '.join(_SUFFIXES)}")
    reading = Reading(ProblemLog(), columns=columns)
    for number, line, _ in read_lines(path, reading):
        if number > 100:
            break
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(fields, dict) and reading.column("experts") in fields:
            return "tokens-jsonl"
        if isinstance(fields, dict):
            break
    return "router"
