"""The wheel holds the whole package and the CUDA sources, and finds them from any directory."""

from __future__ import annotations

import configparser
import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
MIN_SETUPTOOLS = 77  # the first that knows a licence as a plain SPDX expression


def _setuptools_major() -> int:
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0


pytestmark = pytest.mark.skipif(
    _setuptools_major() < MIN_SETUPTOOLS,
    reason=f"building a wheel without a network needs setuptools >= {MIN_SETUPTOOLS} installed",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that building leaves nothing in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPO / name, source)
    for name in ("ep_comm", "kernels"):
        shutil.copytree(REPO / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(out)], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, as an installer lays it into site-packages."""
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def _files(folder: Path, *patterns: str) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for pattern in patterns
        for path in folder.rglob(pattern)
        if "_kernels" not in path.relative_to(folder).parts
    }


def test_every_module_is_in_the_wheel(source: Path, unpacked: Path) -> None:
    expected = _files(source / "ep_comm", "*.py", "py.typed")
    assert "py.typed" in expected and "cli/main.py" in expected
    assert _files(unpacked / "ep_comm", "*.py", "py.typed") == expected


def test_every_kernel_source_is_in_the_wheel(source: Path, unpacked: Path) -> None:
    expected = _files(source / "kernels", "*.cu", "*.cuh")
    assert expected
    assert _files(unpacked / "ep_comm" / "_kernels", "*.cu", "*.cuh") == expected


def test_the_wheel_installs_nothing_else(unpacked: Path) -> None:
    assert sorted(path.name for path in unpacked.iterdir()) == ["ep_comm", "ep_comm-0.1.0.dist-info"]


def test_metadata_and_console_script(unpacked: Path) -> None:
    info = unpacked / "ep_comm-0.1.0.dist-info"
    metadata = Parser().parsestr((info / "METADATA").read_text(encoding="utf-8"))
    assert metadata["Name"] == "ep-comm"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"cuda12", "cuda13", "mpi", "tune", "plot", "dev"} <= set(metadata.get_all("Provides-Extra"))
    assert "torch>=2.11" in metadata.get_all("Requires-Dist")
    scripts = configparser.ConfigParser()
    scripts.read_string((info / "entry_points.txt").read_text(encoding="utf-8"))
    assert dict(scripts["console_scripts"]) == {"ep-comm": "ep_comm.cli.main:main"}


def test_installed_package_finds_its_kernels_from_another_directory(
    source: Path, unpacked: Path, tmp_path: Path
) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import importlib.resources, ep_comm\n"
        "assert ep_comm.__file__.startswith(sys.argv[1]), ep_comm.__file__\n"
        "for file in importlib.resources.files('ep_comm._kernels').iterdir():\n"
        "    print(file.name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(unpacked)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) >= set(_files(source / "kernels", "*.cu", "*.cuh"))
