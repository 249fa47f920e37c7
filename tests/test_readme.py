"""The README's examples run as they stand, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
README = (REPO / "README.md").read_text(encoding="utf-8")
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
LAUNCHER_VARIABLES = re.compile(r"RANK|WORLD_SIZE|LOCAL_|MASTER_|OMPI_|PMI|SLURM_|TORCHELASTIC_")


@pytest.mark.parametrize("ranks", [1, 2])
def test_examples_run(ranks: int, tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLES.match(name)}
    done = subprocess.run(
        [sys.executable, *(torchrun if ranks > 1 else []), str(example)],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"3 steps, \d replayed; \[LayerBudget\(", done.stdout), done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not broken


def test_every_page_is_in_the_index() -> None:
    index = (REPO / "docs" / "index.md").read_text(encoding="utf-8")
    missing = [page.name for page in PAGES if page.name != "index.md" and f"{page.name})" not in index]
    assert not missing
