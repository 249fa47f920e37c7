"""``ep-comm train`` as a user runs it: its own ranks, its files, its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_comm.cli.main import run
from ep_comm.trace import read_router_trace
from tests.train.tiny import TINY_FLAGS, run_program


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A verified static run of four steps that started with room for one row."""
    folder = tmp_path_factory.mktemp("run")
    done = run_program(
        "train", "--ranks", 2, *TINY_FLAGS, "--steps", 4, "--budget", 1, "--alignment", 1, "--verify",
        "--max-bytes", 100_000, "--plot", folder / "loss.png", "--json", folder / "run.json",
        "--trace", folder / "routing.jsonl", "--save", folder / "run", "--save-every", 2,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder, done.stdout


def test_output_tells_the_run_in_80_columns(finished: tuple[Path, str]) -> None:
    _, output = finished
    for part in (
        "step 4/4", "replays", "no token was lost", "Budget of each MoE layer", "required peak", "worst case",
        "dispatch forward", "without MXFP8", "Time of a step",
        "weights: bit for bit equal to eager mode (21 tensors,",
    ):  # fmt: skip
        assert part in output
    assert max(len(line) for line in output.splitlines()) <= 80


def test_json_holds_the_facts(finished: tuple[Path, str]) -> None:
    facts = json.loads((finished[0] / "run.json").read_text())
    assert (facts["ranks"], facts["steps"], facts["mode"], facts["transport"]) == (
        2,
        4,
        "static",
        "collective",
    )
    assert facts["replays"] >= 1 and facts["replayed_steps"][0] == 0 and len(facts["losses"]) == 4
    assert facts["verified"]["values"] == facts["parameters"]
    for layer in facts["layers"]:
        assert layer["start_rows"] == 1 and layer["overflows"] >= 1
        assert layer["start_rows"] < layer["required_peak_rows"] <= layer["budget_rows"] <= layer["worst_case_rows"]


def test_plot_is_a_picture(finished: tuple[Path, str]) -> None:
    content = (finished[0] / "loss.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 20_000


def test_trace_has_one_file_a_rank(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    assert sorted(path.name for path in folder.glob("*.jsonl")) == [
        "routing.rank0.jsonl",
        "routing.rank1.jsonl",
    ]
    assert len(list(read_router_trace(folder / "routing.jsonl"))) == 2 * 4 * 2


def test_resuming_in_a_new_process_gives_the_same_bits(finished: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = finished
    done = run_program(
        "train", "--ranks", 2, *TINY_FLAGS, "--steps", 4, "--alignment", 1, "--max-bytes", 100_000,
        "--resume", folder / "run" / "step_000002", "--save", tmp_path, "--json", "-",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "resumed at step 2" in done.stderr and json.loads(done.stdout)["resumed_at"] == 2
    for rank in range(2):
        whole, resumed = (
            torch.load(path / "step_000004" / f"rank_{rank}.pt", weights_only=True)
            for path in (folder / "run", tmp_path)
        )
        assert _flat(whole).keys() == _flat(resumed).keys()
        for (name, expected), value in zip(_flat(whole).items(), _flat(resumed).values(), strict=True):
            same = torch.equal(expected, value) if isinstance(expected, torch.Tensor) else expected == value
            assert same, name


def _flat(state: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        items = state.items()
    elif isinstance(state, (list, tuple)):
        items = enumerate(state)
    else:
        return {prefix: state}
    return {key: leaf for name, value in items for key, leaf in _flat(value, f"{prefix}/{name}").items()}


def test_failing_rank_is_heard_once_and_ends_the_others() -> None:
    done = run_program("train", "--ranks", 2, *TINY_FLAGS, "--steps", 3, "--budget", 1, "--max-budget", 16)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("ep-comm: error") and "layers.0.ffn" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--foo", "No such option: --foo"),
        ("--steps many", "--steps"),
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--ranks 0", "--ranks must be at least 1, got 0"),
        ("--ranks 3", "--experts must be a multiple of the 3 ranks, got 8"),
        ("--mode fast", "mode must be one of 'eager', 'static', got 'fast'"),
        ("--dispatch-dtype fp4", "--dispatch-dtype must be one of 'bf16', 'mxfp8', got 'fp4'"),
        ("--budget 4 --capacity-factor 2", "not both"),
        ("--hidden-size 36", "--hidden-size must be a multiple of 2 * --heads = 8, got 36"),
        ("--hidden-size 40", "--hidden-size must be a multiple of 32 where MXFP8 is used, got --hidden-size=40"),
        ("--lr nan", "--lr must be finite and above 0, got nan"),
        ("--top-k 9", "--top-k must not be above --experts 8, got 9"),
        ("--save-every 5", "--save-every 5 needs --save"),
        ("--resume /nowhere/at/all", "--resume /nowhere/at/all: no such folder"),
        ("--plot /nowhere/at/all.png", "the folder /nowhere/at does not exist"),
        ("--ranks 1 --data /nowhere/text", "data /nowhere/text does not exist"),
    ],
)
def test_bad_option_is_one_line_and_status_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ep_comm.distributed.init_distributed", _no_group)
    assert run(["train", *arguments.split()]) == 2
    output = capsys.readouterr()
    assert message in output.err and len(output.err.strip().splitlines()) == 1 and output.out == ""


def _no_group(**_: object) -> Any:
    """Stands for a process group of one rank: the test process must not keep a real one."""
    from types import SimpleNamespace

    return SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))


def test_a_reader_that_stops_ends_the_program_quietly() -> None:
    command = [sys.executable, "-m", "ep_comm", "train", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        program.stdout.close()
        assert program.stderr.read() == b"" and program.wait() == 141


def test_help_fits_80_columns() -> None:
    done = run_program("train", "--help")
    assert done.returncode == 0 and "--dispatch-dtype" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
