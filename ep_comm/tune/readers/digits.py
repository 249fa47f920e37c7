"""Nested lists of small integers, ``[[5,0],[1,5]]``, from text to an array without a Python object per number."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

__all__ = ["parse_matrix", "parse_numbers"]

_DIGITS = b"0123456789"
_EMPTY = b"9999"


@lru_cache(maxsize=16)
def _skeleton(rows: int, columns: int) -> bytes:
    row = b"[" + b"," * (columns - 1) + b"]"
    return b"[" + b",".join([row] * rows) + b"]"


def parse_matrix(text: bytes, rows: int, columns: int) -> np.ndarray | None:
    """Parse a JSON list of ``rows`` lists of ``columns`` integers from -1 to 9998.

    Returns:
        int64 ``[rows, columns]``, or None where the text is anything but that in its usual spelling. The caller
        then parses it with a full JSON parser, which also knows what is wrong.
    """
    # Every number takes a digit and a separator: what claims more numbers than can be there is not our case.
    if rows < 1 or columns < 1 or 2 * rows * columns > len(text):
        return None
    if b" " in text:
        text = text.replace(b", ", b",")
    has_empty = b"-" in text
    if has_empty:
        if _EMPTY in text:
            return None
        text = text.replace(b"-1", _EMPTY)
    # With the digits taken out only brackets and commas may be left, in the only order there is.
    if text.translate(None, _DIGITS) != _skeleton(rows, columns):
        return None
    values = parse_numbers(text, rows * columns, max_digits=4)
    if values is None:
        return None
    if has_empty:
        values[values == int(_EMPTY)] = -1
    return values.reshape(rows, columns)


def parse_numbers(text: bytes, expected: int, max_digits: int) -> np.ndarray | None:
    """All runs of digits in ``text`` as int64 ``[expected]``.

    ``text`` starts with ``[[`` or with ``max_digits`` characters that are no digits, and ends with one that is none.

    Returns:
        None where there are more or fewer numbers, longer ones, or some with a leading zero.
    """
    digit = np.frombuffer(text, dtype=np.uint8) - np.uint8(ord("0"))
    is_digit = digit < 10
    ends = np.flatnonzero(is_digit[:-1] & ~is_digit[1:])
    if ends.size != expected:
        return None
    values = digit[ends].astype(np.int64)
    more: np.ndarray | None = None
    scale = 1
    for place in range(1, max_digits + 1):
        # Indices below zero wrap to the closing brackets behind the last number.
        before = digit[ends - place]
        is_more = before < 10
        more = is_more if more is None else more & is_more
        if not more.any():
            return values
        if place == max_digits:
            return None
        scale *= 10
        values += (before * more).astype(np.int64) * scale
        zeros = more & (values < scale)
        if zeros.any() and (digit[ends[zeros] - place - 1] >= 10).any():
            return None
    return values
