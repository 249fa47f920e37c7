"""Router traces in Megatron-Core's format, and the counts that ``RoutingRecorder`` writes: one JSON object a line.

The ids are nearly all of such a file, so they are parsed as text (:mod:`.digits`); the few fields around them, and
every line that is unusual in any way, go through the JSON parser.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...trace import RouterTraceRecord, TraceError
from .digits import parse_matrix
from .lines import read_lines
from .record import Layer, Reading, Record, check_ids

__all__ = ["read_router_file"]

_KEY = b'"top_indices":'
# json.loads of a short line is faster than setting up the array work.
_SHORT = 2048
_INTEGERS = ("step", "layer", "rank", "num_tokens", "topk")
_LARGEST = 2**62


def read_router_file(file: Path, reading: Reading) -> Iterator[Record]:
    """Yield the records of one file; what is wrong with a line goes to the log."""
    for number, line, complete in read_lines(file, reading):
        try:
            fields, ids_TK = _fast(line, reading)
            if ids_TK is None:
                fields, ids_TK = _slow(line, reading)
        except (TraceError, RecursionError) as error:
            truncated = not complete and "not a JSON record" in str(error)
            reading.log.add("truncated" if truncated else "malformed", str(error) or "nested too deeply", file, number)
            continue
        record = _record(fields, ids_TK, reading, file, number)
        if record is not None:
            yield record


def _fast(line: bytes, reading: Reading) -> tuple[dict[str, Any], np.ndarray | None]:
    """The fields and ids of a line in the usual spelling; ids None where it is not."""
    nothing: tuple[dict[str, Any], None] = ({}, None)
    if len(line) < _SHORT:
        return nothing
    key = b'"%s":' % reading.column("top_indices").encode() if reading.columns else _KEY
    at = line.find(key)
    start, end = line.find(b"[", at), line.rfind(b"]") + 1
    if at < 0 or start < 0 or end <= start or line[at + len(key) : start].strip():
        return nothing
    try:
        fields = _renamed(json.loads(line[:start] + b"0" + line[end:]), reading)
        _check_integers(fields)
    except (ValueError, RecursionError):
        return nothing
    return fields, parse_matrix(line[start:end], fields["num_tokens"], fields["topk"])


def _slow(line: bytes, reading: Reading) -> tuple[dict[str, Any], np.ndarray | None]:
    """The same by the JSON parser, for every line. Raises TraceError with what is wrong."""
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise TraceError(f"not a JSON record ({error})") from None
    if not isinstance(fields, dict):
        raise TraceError(f"expected a JSON object, got {type(fields).__name__}")
    fields = _renamed(fields, reading)
    if "counts" in fields and "top_indices" not in fields:
        _check_counts(fields)
        return fields, None
    record = RouterTraceRecord.from_json(json.dumps(fields))
    _check_integers(fields)
    try:
        ids_TK = np.array(record.top_indices, dtype=np.int64).reshape(record.num_tokens, record.topk)
    except OverflowError:
        raise TraceError("top_indices holds an id above 2**63 - 1") from None
    return fields, ids_TK


def _renamed(fields: Any, reading: Reading) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise TraceError(f"expected a JSON object, got {type(fields).__name__}")
    for ours, theirs in reading.columns.items():
        if theirs in fields:
            fields[ours] = fields[theirs]
    return fields


def _check_integers(fields: dict[str, Any]) -> None:
    for name in _INTEGERS:
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
            raise TraceError(f"{name} must be an integer from 0 to 2**62 - 1, got {value!r}")
    if fields["topk"] < 1:
        raise TraceError(f"topk must be at least 1, got {fields['topk']}")


def _check_counts(fields: dict[str, Any]) -> None:
    _check_integers(fields)
    counts = fields["counts"]
    if not isinstance(counts, list) or not counts:
        raise TraceError("counts must be a list of integers from 0")
    for value in [*counts, fields.get("pair_tokens", 0)]:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40:
            raise TraceError(f"counts and pair_tokens must be integers from 0, got {value!r}")
    if sum(counts) > fields["num_tokens"] * fields["topk"]:
        raise TraceError(
            f"counts add up to {sum(counts)}, more than num_tokens x topk = {fields['num_tokens'] * fields['topk']}"
        )


def _record(
    fields: dict[str, Any], ids_TK: np.ndarray | None, reading: Reading, file: Path, line: int
) -> Record | None:
    stage = str(fields.get("stage", "pre_dispatch"))
    if reading.stage is None:
        reading.stage = stage
    if stage != reading.stage:
        reading.log.add("other-stage", f"stage {stage!r}, the first record has {reading.stage!r}", file, line)
        return None
    part = fields.get("mtp_idx")
    part = part if isinstance(part, int) and not isinstance(part, bool) and 0 <= part < _LARGEST else -1
    layer = Layer(str(fields.get("block", "decoder")), fields["layer"], part)
    counts_E = None
    if ids_TK is not None:
        ids_TK = check_ids(ids_TK, reading, file, line)
        if ids_TK is None:
            return None
    else:
        counts_E = np.array(fields["counts"], dtype=np.int64)
        if reading.num_experts is not None and counts_E.size > reading.num_experts:
            reading.log.add("malformed", f"counts of {counts_E.size} experts", file, line)
            return None
        reading.top_k = reading.top_k or fields["topk"]
        reading.largest_id = max(reading.largest_id, counts_E.size - 1)
        reading.pairs += fields["num_tokens"]
    return Record(
        fields["step"], layer, fields["rank"], fields["num_tokens"], ids_TK, counts_E, file, line,
        pair_tokens=fields.get("pair_tokens", -1) if counts_E is not None else -1,
        pair_ep_size=fields.get("ep_size", 0) if counts_E is not None else 0,
    )  # fmt: skip
