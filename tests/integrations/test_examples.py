"""The example of docs/integrations.md and those of scripts/examples run as they stand; errors about packages."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.integrations.test_megatron import needs_megatron
from tests.integrations.test_transformers import pytestmark as needs_transformers

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "integrations.md").read_text(encoding="utf-8")


def run_script(rank: int, world_size: int, path: str, arguments: list[str]) -> str:
    """What a script prints on one rank."""
    sys.argv = [path, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name="__main__")
    return out.getvalue()


@pytest.mark.parametrize("ranks", [1, 2])
def test_own_router_and_experts(ranks: int, tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    example = tmp_path / "example.py"
    example.write_text(code)
    for rank, printed in enumerate(run_ranks(run_script, ranks, str(example), [])):
        found = re.fullmatch(r"rank (\d): loss ([\d.]+) -> ([\d.]+), (\d+) steps replayed\n", printed)
        assert found, printed
        assert int(found[1]) == rank
        assert float(found[3]) < float(found[2])


@needs_transformers
def test_transformers_example() -> None:
    script = str(REPO / "scripts" / "examples" / "transformers_train.py")
    printed = run_ranks(run_script, 2, script, ["--steps", "10", "--static"], fresh=True)[0]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert re.search(r"layers.1.mlp.experts: \d+ rows at the start", printed)


@needs_megatron
def test_megatron_example() -> None:
    script = str(REPO / "scripts" / "examples" / "megatron_train.py")
    printed = run_ranks(run_script, 2, script, ["--steps", "10", "--static"], fresh=True)[0]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert re.search(r"decoder.layers.1.mlp: \d+ rows at the start", printed)


def test_nothing_of_a_framework_is_imported() -> None:
    code = "import sys, ep_comm.integrations.routing; print([m for m in sys.modules if m.startswith('transformers')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_missing_and_too_old_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from ep_comm import EPError
    from ep_comm.integrations.optional import MissingPackageError, require

    arguments: dict[str, Any] = {"version": "5.23", "module": "no_such_module", "hint": "pip install it"}
    with pytest.raises(EPError, match="needs no-such-package >= 5.23, which is not installed: pip install it"):
        require("no-such-package", **arguments)
    monkeypatch.setattr(metadata, "version", lambda name: "5.9.1")
    with pytest.raises(ImportError, match="needs torch >= 5.23, got 5.9.1: pip install it"):
        require("torch", **arguments)
    monkeypatch.setattr(metadata, "version", lambda name: "5.23.0rc1")
    with pytest.raises(MissingPackageError, match="torch 5.23.0rc1 is installed, but importing no_such_module fails"):
        require("torch", **arguments)
