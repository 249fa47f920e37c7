"""The pages name everything that the check can say."""

from __future__ import annotations

import re
from pathlib import Path

from ep_comm.check.findings import KINDS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "check.md").read_text(encoding="utf-8")


def test_every_finding_is_explained() -> None:
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (error|warning|note) \|", PAGE, re.MULTILINE))
    assert rows == {name: kind.severity for name, kind in KINDS.items()}


def test_remedies_are_there() -> None:
    for name, kind in KINDS.items():
        assert kind.remedy.endswith("."), name
