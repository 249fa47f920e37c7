"""Starting torch.distributed: who launched this process, and the process group that follows."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ep_comm.errors import ConfigError
from ep_comm.extras import install_hint
from ep_comm.launch import launch_ranks
from ep_comm.launchers import LaunchInfo, detect_launcher, expand_first_host

ROOT = Path(__file__).resolve().parents[1]
LAUNCH_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "TORCHELASTIC",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "SLURM_",
)

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host", "MASTER_PORT": "29500",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_JOB_ID": "11", "SLURM_STEP_ID": "0",
}  # fmt: skip
PLAIN = {"RANK": "3", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, LaunchInfo("single", 0, 1, 0, 1)),
        (TORCHRUN, LaunchInfo("torchrun", 3, 4, 1, 2, "host", 29500)),
        (OPENMPI, LaunchInfo("openmpi", 3, 4, 1, 2)),
        ({**OPENMPI, "MASTER_ADDR": "h", "MASTER_PORT": "1"}, LaunchInfo("openmpi", 3, 4, 1, 2, "h", 1)),
        (MPICH, LaunchInfo("mpich", 3, 4, 1, 2)),
        (SLURM, LaunchInfo("slurm", 3, 4, 1, 2, "node07", 20341)),
        ({**PLAIN, "MASTER_ADDR": "h", "MASTER_PORT": "1"}, LaunchInfo("env", 3, 4, None, None, "h", 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, LaunchInfo("env", 0, 1)),
        # torchrun under mpirun or srun, one a host: the inner launcher wins.
        (
            {**OPENMPI, **TORCHRUN, "OMPI_COMM_WORLD_RANK": "1"},
            LaunchInfo("torchrun", 3, 4, 1, 2, "host", 29500),
        ),
        ({**SLURM, **OPENMPI, "SLURM_PROCID": "0"}, LaunchInfo("openmpi", 3, 4, 1, 2)),
        # srun --mpi=pmi2 sets PMI_RANK itself, and Slurm knows the hosts.
        ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, LaunchInfo("slurm", 3, 4, 1, 2, "node07", 20341)),
        # A script's own RANK that says the same as mpirun is no contradiction.
        ({**OPENMPI, **PLAIN}, LaunchInfo("openmpi", 3, 4, 1, 2)),
        # The body of a batch script is one process, whatever the allocation's size.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, LaunchInfo("single", 0, 1, 0, 1)),
    ],
)
def test_launcher_is_recognised(environ: dict[str, str], expected: LaunchInfo) -> None:
    assert detect_launcher(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "1"}, "WORLD_SIZE, not set|WORLD_SIZE not set"),
        (PLAIN, "MASTER_ADDR, MASTER_PORT not set.*RANK=3 WORLD_SIZE=4"),
        ({**TORCHRUN, "RANK": "4"}, "rank 4 and world size 4.*RANK=4"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 and local world size 2"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE must be an integer, got 'four'"),
        ({**OPENMPI, "RANK": "0"}, "RANK=0 contradicts openmpi, which says rank 3 of 4"),
        ({**MPICH, "WORLD_SIZE": "8"}, "WORLD_SIZE=8 contradicts mpich"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE not set"),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "9"}, "local world size 9 above world size 4"),
    ],
)
def test_contradictions_are_shown(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect_launcher(environ)


def test_launcher_can_be_named() -> None:
    assert detect_launcher({**TORCHRUN, **OPENMPI}, "openmpi").launcher == "openmpi"
    assert detect_launcher({**OPENMPI, "RANK": "0"}, "single").world_size == 1
    with pytest.raises(ConfigError, match="launcher='slurm' was asked for.*none of the launchers' variables"):
        detect_launcher({}, "slurm")
    with pytest.raises(ConfigError, match="must be one of torchrun, env, .*got 'lsf'"):
        detect_launcher({}, "lsf")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("n[003-007,9],m1", "n003"),
        ("gpu-1,gpu-2", "gpu-1"),
        ("r[1,5]n-x", "r1n-x"),
        ("a.b.c", "a.b.c"),
    ],
)
def test_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert expand_first_host(nodes) == first


def test_launch_needs_a_rank() -> None:
    with pytest.raises(ConfigError, match="ranks must be at least 1, got 0"):
        launch_ranks(0, [])


# ---- real processes -------------------------------------------------------------------------------------

PROGRAM = """
import os, sys, torch, torch.distributed as dist, ep_comm
env = ep_comm.init_distributed(timeout=60)
total = torch.tensor([env.rank + 1])
dist.all_reduce(total, group=env.group)
assert ep_comm.init_distributed() is env
try:
    ep_comm.init_distributed(backend="nccl")
except ep_comm.ConfigError as error:
    assert "already initialised with 'gloo'" in str(error), error
else:
    raise AssertionError("another backend was accepted")
if "mpi4py.MPI" not in sys.modules:  # its own exit handler waits for the parent's MPI
    if (child := os.fork()) == 0:
        sys.exit(0)  # leaves the process group to its parent
    assert os.waitpid(child, 0)[1] == 0
dist.barrier()
sys.stdout.write(
    f"{env.rank} of {env.world_size} local {env.local_rank} of {env.local_world_size} {env.launcher} "
    f"{env.backend} {env.device} sum {int(total)}\\n"
)
"""


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCH_VARIABLES)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **extra}


def start(program: str, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_single_process_and_clean_exit() -> None:
    process = start(PROGRAM)
    output, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (0, "")
    assert output == "0 of 1 local 0 of 1 single gloo cpu sum 1\n"


def test_ranks_find_each_other_and_derive_their_place_on_the_host() -> None:
    port = free_port()
    processes = [
        start(PROGRAM, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank in range(2)
    ]
    for rank, process in enumerate(processes):
        output, errors = process.communicate(timeout=100)
        assert (process.returncode, errors) == (0, "")
        assert output == f"{rank} of 2 local {rank} of 2 env gloo cpu sum 3\n"


def test_unreachable_rank_0_is_an_error_in_time() -> None:
    program = "import ep_comm; ep_comm.init_distributed(timeout=3)"
    process = start(program, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "PeerLostError: rank 1 of 2 (env) could not reach the rendezvous at 127.0.0.1:" in errors


def test_nccl_without_gpus_is_refused() -> None:
    program = "import ep_comm; ep_comm.init_distributed(backend='nccl')"
    process = start(program)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "ConfigError: backend='nccl' needs a GPU of its own for every rank; not so on rank 0 of 1" in errors


def test_mpi_without_mpi4py_names_the_extra() -> None:
    hide = "import sys; sys.modules['mpi4py'] = None\n"
    process = start(hide + "import ep_comm; ep_comm.init_distributed(timeout=5)", **OPENMPI)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1 and install_hint("mpi") in errors


@pytest.mark.skipif(
    shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])) is None
    or find_spec("mpi4py") is None,
    reason=f"needs mpirun and mpi4py: {install_hint('mpi')}",
)
def test_mpirun_ranks_meet_through_mpi() -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [
            shutil.which("mpirun", path=path),
            "--allow-run-as-root",
            "--oversubscribe",
            "-n",
            "2",
            sys.executable,
            "-c",
            PROGRAM,
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} of 2 local {rank} of 2 openmpi gloo cpu sum 3" for rank in range(2)
    ]
