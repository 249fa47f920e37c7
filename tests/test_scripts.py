"""scripts/: what they say and do when the machine does not have what they need."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
TOOLS = ("basename", "bash", "cat", "cksum", "dirname", "rm", "mkdir", "tail")


needs_complete_interpreter = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("rich", "typer", "hypothesis", "pytest_timeout")),
    reason="this interpreter lacks a module that test.sh asks for",
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a space in its name that holds what the scripts look at, and a one-line test."""
    root = tmp_path / "my checkout"
    shutil.copytree(REPO / "scripts", root / "scripts")
    for name in ("pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(REPO / name, root)
    (root / "tests").mkdir()
    (root / "tests" / "test_one.py").write_text("def test_one():\n    pass\n")
    return root


def _run(script: Path, *args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "PYTEST_ADDOPTS")}
    return subprocess.run(
        [str(script), *args], cwd=cwd, env={**kept, **env}, capture_output=True, text=True, timeout=120
    )


def _path_with(folder: Path, **programs: str) -> str:
    """A PATH that holds the shell tools and the given programs only."""
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(str(shutil.which(tool)))
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return str(folder)


@needs_complete_interpreter
def test_a_complete_interpreter_is_used_as_it_is(checkout: Path, tmp_path: Path) -> None:
    done = _run(checkout / "scripts/test.sh", "-q", cwd=tmp_path, PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout.splitlines()[-1]
    assert not (checkout / ".venv").exists()


@needs_complete_interpreter
def test_exit_status_is_that_of_pytest(checkout: Path, tmp_path: Path) -> None:
    (checkout / "tests" / "test_one.py").write_text("def test_one():\n    raise ValueError\n")
    done = _run(checkout / "scripts/test.sh", "-q", cwd=tmp_path, PYTHON=sys.executable)
    assert done.returncode == 1
    assert "1 failed" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_no_usable_python(checkout: Path, tmp_path: Path, script: str) -> None:
    path = _path_with(tmp_path / "bin", python3="exit 1")  # as a Python older than 3.10 answers
    done = _run(checkout / "scripts" / script, cwd=tmp_path, PATH=path)
    assert done.returncode == 1
    assert "no Python of version 3.10 or newer" in done.stderr
    assert str(tmp_path / "bin" / "python3") in done.stderr
    assert "PYTHON=/path/to/python3" in done.stderr


def test_python_that_does_not_exist(checkout: Path, tmp_path: Path) -> None:
    done = _run(checkout / "scripts/test.sh", cwd=tmp_path, PYTHON="/no/such/python")
    assert done.returncode == 1
    assert "PYTHON=/no/such/python is not a program" in done.stderr


def test_no_venv_module(checkout: Path, tmp_path: Path) -> None:
    # Lacks torch, and lacks venv as Debian's bare python3 does.
    fake = 'case "$*" in -) echo torch ;; "- dev") echo torch ;; *ensurepip*) exit 1 ;; esac'
    path = _path_with(tmp_path / "bin", python3=fake)
    done = _run(checkout / "scripts/test.sh", cwd=tmp_path, PATH=path)
    assert done.returncode == 1
    assert "cannot make virtual environments" in done.stderr and "python3-venv" in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_foreign_venv_folder_is_left_alone(checkout: Path, tmp_path: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "mine").write_text("keep")
    path = _path_with(tmp_path / "bin", python3='[ "$*" != "- dev" ] || echo torch')
    done = _run(checkout / "scripts/test.sh", cwd=tmp_path, PATH=path)
    assert done.returncode == 1
    assert "was not made by this script" in done.stderr
    assert (checkout / ".venv" / "mine").read_text() == "keep"


def test_a_failed_installation_says_what_to_do_and_is_resumed(checkout: Path, tmp_path: Path) -> None:
    """A stand-in for Python makes a .venv whose pip fails the first time and works the second."""
    venv_python = (
        '#!/bin/bash\\ncase "$*" in *"pip --version") ;; '
        f'*"pip install"*) echo "$@" >>"{tmp_path}/calls"; '
        f'[ -e "{tmp_path}/online" ] || {{ echo no route; exit 1; }} ;; '
        "*pytest*) echo ran pytest ;; esac\\n"
    )
    fake = (
        'case "$*" in "- dev") echo torch ;; "-m venv "*) mkdir "$3/bin"; '
        f'printf \'{venv_python}\' >"$3/bin/python"; chmod +x "$3/bin/python" ;; esac'
    )
    path = _path_with(tmp_path / "bin", python3=fake)
    (tmp_path / "bin" / "chmod").symlink_to(str(shutil.which("chmod")))
    script = checkout / "scripts/test.sh"

    first = _run(script, cwd=tmp_path, PATH=path)
    assert first.returncode == 1
    assert "no route" in first.stderr and "there is no network or the disk is full" in first.stderr

    (tmp_path / "online").touch()
    second = _run(script, cwd=tmp_path, PATH=path)
    assert second.returncode == 0, second.stderr
    assert second.stdout.splitlines()[-1] == "ran pytest"
    assert "making .venv" not in second.stdout
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 4  # torch that failed, torch, the project, torchtitan
    assert f"-e {checkout}[dev]" in calls[2]

    third = _run(script, cwd=tmp_path, PATH=path)
    assert third.returncode == 0 and "installing" not in third.stdout
    assert len((tmp_path / "calls").read_text().splitlines()) == 4

    (checkout / "constraints.txt").write_text("torch==2.99.0\n")
    assert "installing torch" in _run(script, cwd=tmp_path, PATH=path).stdout
