"""Counts without tokens: arrays ``[step, layer, expert]`` or ``[step, layer, rank, expert]``, and whole corpora.

``.npz``: the array ``counts`` (or the only one). JSON: the nested list itself, or an object with ``counts``, and
optionally ``top_k``. Corpora (no steps): ``{"counts": {corpus: [layer][expert]}}``, or several such models under
``"models"``, of which the user names one.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...errors import ConfigError
from ..problems import TuneError
from .record import ALL_RANKS, Layer, Reading, Record

__all__ = ["Corpora", "read_counts_json", "read_counts_npz"]

_MAX_JSON = 256 * 2**20


@dataclass(frozen=True)
class Corpora:
    """Counts over whole corpora, without steps.

    Attributes:
        names: of the corpora.
        layers: of the model.
        counts_CLE: float64 ``[corpus, layer, expert]``.
        top_k: experts a token, or None where the file does not say.
    """

    names: list[str]
    layers: list[Layer]
    counts_CLE: np.ndarray
    top_k: int | None


def read_counts_npz(file: Path, reading: Reading) -> Iterator[Record]:
    """Yield the records of an ``.npz`` file, reading one step at a time.

    Raises:
        TuneError: unreadable, no such array, or not three- or four-dimensional integers.
    """
    name = reading.column("counts")
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            entry = f"{name}.npy" if f"{name}.npy" in names else names[0] if len(names) == 1 else None
            if entry is None:
                raise TuneError(
                    f"{file}: no array {name!r}, there are {', '.join(names)}; name it with --column counts=NAME"
                )
            with archive.open(entry) as stream:
                yield from _npy_steps(stream, reading, file)
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, TuneError):
            raise
        raise TuneError(f"cannot read {file}: {error}") from error


def _npy_steps(stream: IO[bytes], reading: Reading, file: Path) -> Iterator[Record]:
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except ValueError as error:
        raise TuneError(f"{file}: not an array ({error})") from None
    if len(shape) not in (3, 4) or dtype.kind not in "iu" or fortran or 0 in shape:
        raise TuneError(
            f"{file}: counts must be integers [step, layer, expert] or [step, layer, rank, expert] in C order, "
            f"got {dtype} {list(shape)}"
        )
    size = int(np.prod(shape[1:], dtype=object)) * dtype.itemsize
    if size > _MAX_JSON:
        raise TuneError(f"{file}: one step has {size} bytes, more than {_MAX_JSON}")
    for step in range(shape[0]):
        data = stream.read(size)
        reading.progress(len(data))
        if len(data) < size:
            reading.log.add("truncated", f"{step} of {shape[0]} steps are there", file)
            return
        yield from _step_records(step, np.frombuffer(data, dtype).reshape(shape[1:]), reading, file)


def read_counts_json(file: Path, reading: Reading) -> Iterator[Record] | Corpora:
    """Counts of steps as records, or the :class:`Corpora` of a file without steps.

    Raises:
        TuneError: unreadable, larger than 256 MiB, or of another shape.
    """
    try:
        size = file.stat().st_size
        if size > _MAX_JSON:
            raise TuneError(f"{file}: counts as JSON may have at most {_MAX_JSON} bytes, got {size}; save them as .npz")
        data = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, TuneError):
            raise
        raise TuneError(f"cannot read {file}: {error}") from None
    reading.progress(size)
    data = _chosen_model(data, reading, file)
    counts = data.get(reading.column("counts")) if isinstance(data, dict) else data
    if isinstance(counts, dict):
        return _corpora(counts, data, file)
    array = _integers(counts, file)
    if array.ndim not in (3, 4):
        raise TuneError(
            f"{file}: expected counts [step, layer, expert] or [step, layer, rank, expert], got {list(array.shape)}"
        )
    if isinstance(data, dict):
        reading.top_k = reading.top_k or _top_k(data, file)
    return (record for step in range(array.shape[0]) for record in _step_records(step, array[step], reading, file))


def _chosen_model(data: Any, reading: Reading, file: Path) -> Any:
    models = data.get("models") if isinstance(data, dict) else None
    if not isinstance(models, dict):
        return data
    wanted = reading.columns.get("model")
    if wanted is None and len(models) == 1:
        return next(iter(models.values()))
    if wanted not in models:
        raise ConfigError(f"{file} holds the models {', '.join(map(str, models))}: name one with --column model=NAME")
    return models[wanted]


def _integers(values: Any, file: Path) -> np.ndarray:
    try:
        array = np.array(values)
    except (ValueError, OverflowError) as error:
        raise TuneError(f"{file}: counts must be an array of integers ({error})") from None
    if array.size == 0 or array.dtype.kind not in "iu":
        raise TuneError(f"{file}: counts must be an array of integers, got {array.dtype} {list(array.shape)}")
    return array


def _top_k(data: dict[str, Any], file: Path) -> int | None:
    value = data.get("top_k", data.get("topk"))
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**15):
        raise TuneError(f"{file}: top_k must be an integer from 1, got {value!r}")
    return value


def _corpora(counts: dict[str, Any], data: dict[str, Any], file: Path) -> Corpora:
    arrays = {str(name): _integers(values, file) for name, values in counts.items()}
    shapes = {array.shape for array in arrays.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise TuneError(f"{file}: every corpus needs counts [layer][expert] of one shape, got {sorted(shapes)}")
    array = np.stack(list(arrays.values())).astype(np.float64)
    if (array < 0).any() or (array.sum(-1) == 0).any():
        raise TuneError(f"{file}: counts must not be negative, and no layer of a corpus may be empty")
    numbers = data.get("layers")
    if not isinstance(numbers, list) or len(numbers) != array.shape[1] or not all(type(n) is int for n in numbers):
        numbers = list(range(array.shape[1]))
    return Corpora(list(arrays), [Layer("decoder", n) for n in numbers], array, _top_k(data, file))


def _step_records(step: int, counts: np.ndarray, reading: Reading, file: Path) -> Iterator[Record]:
    """Records of one step's counts ``[layer, (rank,) expert]``."""
    if counts.shape[-1] > 2**15 - 1 or int(counts.min()) < 0 or int(counts.max()) >= 2**40:
        reading.log.add("malformed", f"step {step}: counts must be from 0 to 2**40 - 1", file)
        return
    if reading.num_experts is not None and counts.shape[-1] > reading.num_experts:
        reading.log.add("malformed", f"step {step}: counts of {counts.shape[-1]} experts", file)
        return
    reading.largest_id = max(reading.largest_id, counts.shape[-1] - 1)
    counts = counts.astype(np.int64)
    for layer in range(counts.shape[0]):
        ranks = [(ALL_RANKS, counts[layer])] if counts.ndim == 2 else list(enumerate(counts[layer]))
        for rank, counts_E in ranks:
            tokens = -(-int(counts_E.sum()) // (reading.top_k or 1))
            reading.pairs += tokens
            yield Record(step, Layer("decoder", layer), rank, tokens, None, counts_E, file, None)
