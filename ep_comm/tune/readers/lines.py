"""Lines of a text file with their numbers, in bounded memory whatever the file holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..problems import TuneError
from .record import Reading

__all__ = ["MAX_LINE", "read_lines"]

MAX_LINE = 64 * 2**20


def read_lines(file: Path, reading: Reading) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (line number from 1, line, whether it ends with a newline); blank lines and overlong ones are skipped.

    Raises:
        TuneError: the file cannot be read.
    """
    try:
        with open(file, "rb") as lines:
            number = 0
            while line := lines.readline(MAX_LINE):
                number += 1
                reading.progress(len(line))
                complete = line.endswith(b"\n")
                if not complete and len(line) >= MAX_LINE:
                    reading.log.add("too-long", f"more than {MAX_LINE} bytes", file, number)
                    while not complete and (line := lines.readline(MAX_LINE)):
                        reading.progress(len(line))
                        complete = line.endswith(b"\n")
                    continue
                if not line.isspace():
                    yield number, line, complete
    except OSError as error:
        raise TuneError(f"cannot read {file}: {error.strerror or error}") from error
