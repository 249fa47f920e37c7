"""The check itself: what it says of ranks that work, of a planted fault, of ranks that fail or hang."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from ep_comm import Dispatcher, init_distributed
from ep_comm.check import CheckOptions, run_check
from ep_comm.check.correctness import Case, open_transports, run_case, shorten_reason
from ep_comm.check.findings import KINDS
from ep_comm.check.stages import StageError, Stages, ranks_in
from ep_comm.cli.main import run
from ep_comm.time_model import Links, markdown_table
from tests.harness import Died, run_ranks

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {
    "schema", "ep_comm", "verdict", "complete", "seconds", "ranks", "launcher", "backend", "hosts", "environment",
    "transports", "auto", "correctness", "wrong", "replay", "pairs", "links", "shape", "speed", "findings",
}  # fmt: skip


class Corrupting:
    """Stands before a transport and flips one bit of one received row."""

    def __init__(self, inner: Any, verb: str) -> None:
        self._inner, self._verb = inner, verb

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name != self._verb:
            return found

        def corrupted(*args: Any, **kwargs: Any) -> Any:
            rows, scalars = found(*args, **kwargs)
            if rows.shape[0]:
                rows.view(torch.int16)[0, 3] ^= 1
            return rows, scalars

        return corrupted


def corrupt(verb: str) -> Any:
    def prepare(dispatcher: Dispatcher) -> None:
        if dispatcher.rank == 1 and dispatcher.config.hidden_size == 256:  # not in the training of the replay check
            dispatcher.wrap_transport(lambda transport: Corrupting(transport, verb))

    return prepare


def one_case(rank: int, world_size: int, verb: str) -> dict[str, str]:
    env = init_distributed()
    hosts = open_transports(env).hosts
    case = Case("collective", "static", "bf16", seed=2)
    return run_case(env, case, hosts, corrupt(verb) if verb else None).wrong


def test_a_flipped_bit_is_found() -> None:
    assert run_ranks(one_case, 2, "") == [{}, {}]
    first, second = run_ranks(one_case, 2, "scatter_rows")
    assert first == {} and set(second) == {"dispatch forward", "combine backward"}
    assert re.fullmatch(
        r"rows: 1 of \d+ rows differ, first number 0 \(expert 2, from rank \d, token \d+, slot \d\), column 3: \S+ "
        r"instead of \S+",
        second["dispatch forward"],
    )
    first, second = run_ranks(one_case, 2, "gather_sum")
    assert first == {} and set(second) == {"dispatch backward", "combine forward"}
    assert second["combine forward"].startswith("sums: 1 of ")


def whole_check(rank: int, world_size: int, verb: str, path: str) -> tuple[bool, str]:
    written = io.StringIO()
    console = Console(file=written, width=100, force_terminal=False)
    options = CheckOptions("quick", seconds=1.0, json=Path(path))
    result = run_check(options, init_distributed(), console, corrupt(verb) if verb else None)
    return result.failed, written.getvalue()


def test_a_planted_fault_is_named_and_everybody_fails(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    (failed, text), (other_failed, silent) = run_ranks(whole_check, 2, "scatter_rows", str(path))
    assert failed and other_failed and silent == ""
    flat = " ".join(text.split())
    host = json.loads(path.read_text())["hosts"][0]["name"]
    assert f"dispatch forward on the collective transport is wrong on rank 1 ({host}), in 8 of 8 cases" in flat
    assert "WRONG 2/2" in flat and "FAILED: 2 errors" in flat
    assert KINDS["wrong-result"].remedy in flat
    assert "dispatch backward on the" not in flat
    written = json.loads(path.read_text())
    assert set(written) == FIELDS and written["verdict"] == "failed" and written["complete"]
    assert {(each["kind"], tuple(each["ranks"])) for each in written["findings"] if each["severity"] == "error"} == {
        ("wrong-result", (1,))
    }
    assert all(each["rank"] == 1 for each in written["wrong"])


def run_stages(rank: int, world_size: int, path: str) -> Any:
    """A stage that fails on one rank, one in which the other rank is blocked meanwhile, one that never ends."""
    env = init_distributed()

    def fail_on_1() -> None:
        if rank == 1:
            raise ValueError("no such file")

    def fail_while_others_wait() -> None:
        fail_on_1()
        dist.barrier()

    def give_up(finding: Any) -> None:
        said.append(finding)
        Path(path).write_text(json.dumps([(each.kind, each.message, each.ranks) for each in said]))

    said: list[Any] = []
    with Stages(env, 30.0, give_up) as stages:
        assert stages.run("first", lambda: rank)[0] == ([0, 1] if rank == 0 else [1])
        for name, work in (("second", fail_on_1), ("third", fail_while_others_wait)):
            with pytest.raises(StageError) as error:
                stages.run(name, work)
            said += error.value.findings
        stages.timeout = 1.0
        stages.run("fourth", lambda: time.sleep(60 * rank))


def test_failing_and_stuck_ranks_are_named_and_nothing_hangs(tmp_path: Path) -> None:
    path = tmp_path / "findings.json"
    assert run_ranks(run_stages, 2, str(path), fresh=True, timeout=90.0) == [Died(1), Died(1)]
    second, third, fourth = json.loads(path.read_text())
    assert second == ["stage-failed", "second: rank 1 failed with ValueError: no such file", [1]]
    assert third == ["stage-failed", "third: rank 1 failed with ValueError: no such file", [1]]
    assert fourth[0] == "no-answer" and fourth[2] == [1]
    assert fourth[1].startswith("fourth: no progress on rank 1 for 1 s (every rank is alive, but not in the same code:")
    assert fourth[1].endswith("in fourth); last seen: rank 1 in fourth")


def test_silent_ranks_are_told_from_those_that_wait() -> None:
    assert ranks_in("no sign of life from rank 2 on b, ranks 4, 5 on node-17") == (2, 4, 5)
    assert ranks_in("every rank is alive; one is slow") == ()


def test_reasons_are_said_once() -> None:
    message = "rank 0: transport='symmetric' cannot serve this group: rank 0: a; rank 1: a; rank 2: b; c; use 'auto' or"
    assert shorten_reason(message) == "a (ranks 0-1); b (rank 2); c"


# ---- the program ----------------------------------------------------------------------------------------


def test_program_under_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ep_comm"]
    launcher = re.compile(r"RANK|WORLD_SIZE|LOCAL_|MASTER_|OMPI_|PMI|SLURM_|TORCHELASTIC_")
    env = {name: value for name, value in os.environ.items() if not launcher.match(name)}
    done = subprocess.run(
        [sys.executable, *torchrun, "check", "--quick", "--seconds", "1", "--device", "cpu", "--json", str(path)],
        env={**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ep-comm check: 2 ranks over gloo on cpu, started by torchrun" in done.stdout
    assert done.stdout.count("Correctness, bit for bit against a reference") == 1
    assert "OK: expert parallelism works on 2 ranks of 1 host" in done.stdout
    lines = [line for line in done.stdout.splitlines() if not line.startswith("written to")]
    assert max(map(len, lines)) <= 80

    result = json.loads(path.read_text())
    assert set(result) == FIELDS
    assert (result["verdict"], result["ranks"], result["backend"], result["auto"]) == ("ok", 2, "gloo", "collective")
    assert result["hosts"][0]["ranks"] == [0, 1]
    assert result["transports"]["collective"] == {"available": True, "reason": ""}
    assert "not a CUDA GPU (ranks 0-1)" in result["transports"]["symmetric"]["reason"]
    assert [(line["mode"], line["wire"], line["cases"]) for line in result["correctness"]] == [
        (mode, wire, 2) for mode in ("eager", "static") for wire in ("bf16", "mxfp8")
    ]
    assert all(not any(line["wrong"].values()) for line in result["correctness"])
    (replay,) = result["replay"]
    assert replay["steps"] == 5 and replay["replays"] >= 1 and replay["wrong"] == {}
    (pair,) = result["pairs"]
    assert (pair["a"], pair["b"], pair["intact"], pair["path"]) == (0, 1, True, "messages")
    assert pair["latency_us"] > 0 and pair["gb_per_s"] > 0
    assert [link["name"] for link in result["links"]] == ["inside a host"]
    assert [(each["transport"], each["wire"]) for each in result["speed"]] == [
        ("collective", "bf16"),
        ("collective", "mxfp8"),
    ]


def test_program_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("ep_comm.launch.launch_ranks", lambda ranks, argv: started.append((ranks, argv)) or 0)
    monkeypatch.setattr(sys, "argv", ["ep-comm", "check", "--ranks", "3"])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert run(["check", "--ranks", "3"]) == 0
    assert started == [(3, ["check", "--ranks", "3"])]


def test_expected_times_need_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--model", "--network-speed", "22"]) == 0
    assert capsys.readouterr().out.strip() == markdown_table(Links(network=22.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--quick", "--full"], "give --quick or --full, not both"),
        (["--timeout", "0"], "timeout must be above 0"),
        (["--device", "tpu"], "--device must be auto, cpu or cuda, got 'tpu'"),
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--model", "--network-speed", "-1"], "--network-speed must be above 0 and finite, in GB/s, got -1.0"),
    ],
)
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", *options]) == 2
    assert message in capsys.readouterr().err
