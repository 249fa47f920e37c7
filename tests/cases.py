"""The routing cases of fixtures/cases.json, and what every test makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["CASES", "by_name"]

FILE = Path(__file__).parent / "fixtures" / "cases.json"
CASES: list[dict[str, Any]] = json.loads(FILE.read_text())["cases"]


def by_name(name: str) -> dict[str, Any]:
    """The case with this name."""
    return next(case for case in CASES if case["name"] == name)
