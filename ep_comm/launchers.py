"""Who started this process, as which rank: read from the environment, nothing is contacted.

Kept apart from :mod:`ep_comm.distributed` because it is a pure function of a mapping and can
therefore be tested with plain dictionaries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import ConfigError

__all__ = ["LAUNCHERS", "LaunchInfo", "detect_launcher", "expand_first_host"]

LAUNCHERS = ("torchrun", "env", "openmpi", "mpich", "slurm", "single")
"""What :func:`detect_launcher` returns; ``"env"`` is RANK and WORLD_SIZE without torchrun."""


@dataclass(frozen=True)
class LaunchInfo:
    """What a launcher told this process.

    Attributes:
        launcher: one of :data:`LAUNCHERS`.
        rank, world_size: position in the whole job.
        local_rank, local_world_size: position on this host; ``None`` if the launcher does not say.
        master_addr, master_port: rendezvous of rank 0; ``None`` if the launcher does not say.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None


def detect_launcher(environ: Mapping[str, str], launcher: str | None = None) -> LaunchInfo:
    """Find the launcher that started this process.

    Looked for in this order: torchrun, plain RANK/WORLD_SIZE, Open MPI, MPICH and other PMI launchers,
    Slurm's srun, a single process. torchrun started by mpirun or srun (one torchrun a host) is ordinary,
    so an inner launcher simply wins over an outer one.

    Args:
        environ: environment variables, usually ``os.environ``.
        launcher: name one of :data:`LAUNCHERS` to skip the search.

    Raises:
        ConfigError: the variables contradict each other, are incomplete, or ``launcher`` is unknown or
            was not the one that started this process.
    """
    if launcher is not None and launcher not in LAUNCHERS:
        raise ConfigError(f"launcher must be one of {', '.join(LAUNCHERS)}, got {launcher!r}")
    if launcher == "single":
        return LaunchInfo("single", 0, 1, 0, 1)
    if launcher is not None:
        info = _READERS[launcher](environ)
        if info is None:
            raise ConfigError(
                f"launcher={launcher!r} was asked for, but its variables are not in the environment; "
                f"seen: {_seen(environ)}"
            )
        return _checked(info, environ)
    for name in ("torchrun", "openmpi", "mpich", "slurm"):
        info = _READERS[name](environ)
        if info is None:
            continue
        if name != "torchrun":
            info = _prefer_plain_variables(info, environ)
        return _checked(info, environ)
    info = _read_env(environ)
    return _checked(info, environ) if info is not None else LaunchInfo("single", 0, 1, 0, 1)


def expand_first_host(nodelist: str) -> str:
    """First host name of a Slurm node list: ``"n[003-007,9],m1"`` gives ``"n003"``.

    Raises:
        ConfigError: the text is not a node list.
    """
    match = re.match(r"^([A-Za-z0-9._-]+)(?:\[([0-9]+)[^\]]*\]([A-Za-z0-9._-]*))?", nodelist.strip())
    if match is None:
        raise ConfigError(f"cannot read the first host from the Slurm node list {nodelist!r}")
    return match.group(1) + (match.group(2) or "") + (match.group(3) or "")


def _prefer_plain_variables(info: LaunchInfo, environ: Mapping[str, str]) -> LaunchInfo:
    """RANK/WORLD_SIZE next to MPI's or Slurm's own: fine if they agree, an error if they do not."""
    for name, value in (("RANK", info.rank), ("WORLD_SIZE", info.world_size)):
        if name in environ and _integer(environ, name) != value:
            raise ConfigError(
                f"{name}={environ[name]} contradicts {info.launcher}, which says rank {info.rank} of "
                f"{info.world_size}. Unset {name}, or name the launcher in init_distributed(launcher=...). "
                f"Seen: {_seen(environ)}"
            )
    return info


def _read_torchrun(environ: Mapping[str, str]) -> LaunchInfo | None:
    return _plain("torchrun", environ) if "TORCHELASTIC_RUN_ID" in environ else None


def _read_env(environ: Mapping[str, str]) -> LaunchInfo | None:
    return _plain("env", environ) if "RANK" in environ or "WORLD_SIZE" in environ else None


def _plain(launcher: str, environ: Mapping[str, str]) -> LaunchInfo:
    needed = ["RANK", "WORLD_SIZE"]
    if environ.get("WORLD_SIZE", "1") != "1":
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in needed if name not in environ]
    if missing:
        raise ConfigError(
            f"the environment is incomplete: {', '.join(missing)} not set. Seen: {_seen(environ)}. "
            "Start with torchrun, mpirun or srun, or unset RANK and WORLD_SIZE for a single process"
        )
    return LaunchInfo(
        launcher,
        _integer(environ, "RANK"),
        _integer(environ, "WORLD_SIZE"),
        _optional(environ, "LOCAL_RANK"),
        _optional(environ, "LOCAL_WORLD_SIZE"),
        environ.get("MASTER_ADDR"),
        _optional(environ, "MASTER_PORT"),
    )


def _read_openmpi(environ: Mapping[str, str]) -> LaunchInfo | None:
    if "OMPI_COMM_WORLD_RANK" not in environ and "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    return LaunchInfo(
        "openmpi",
        _integer(environ, "OMPI_COMM_WORLD_RANK"),
        _integer(environ, "OMPI_COMM_WORLD_SIZE"),
        _optional(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        _optional(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        environ.get("MASTER_ADDR"),
        _optional(environ, "MASTER_PORT"),
    )


def _read_mpich(environ: Mapping[str, str]) -> LaunchInfo | None:
    if "PMI_RANK" not in environ or "PMI_SIZE" not in environ:
        return None
    slurm = _read_slurm(environ)
    if slurm is not None and slurm.rank == _integer(environ, "PMI_RANK"):
        return None  # srun --mpi=pmi2 sets PMI_RANK itself; Slurm then knows the hosts as well
    return LaunchInfo(
        "mpich",
        _integer(environ, "PMI_RANK"),
        _integer(environ, "PMI_SIZE"),
        _optional(environ, "MPI_LOCALRANKID"),
        _optional(environ, "MPI_LOCALNRANKS"),
        environ.get("MASTER_ADDR"),
        _optional(environ, "MASTER_PORT"),
    )


def _read_slurm(environ: Mapping[str, str]) -> LaunchInfo | None:
    # A batch script's body sees SLURM_PROCID and SLURM_NTASKS too, but is one process: only srun sets
    # SLURM_STEP_NUM_TASKS, so only that says that this process is one of several.
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    world_size = _integer(environ, "SLURM_STEP_NUM_TASKS")
    address, port = environ.get("MASTER_ADDR"), _optional(environ, "MASTER_PORT")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if address is None and nodes:
        address = expand_first_host(nodes)
    if port is None:
        # Every rank must derive the same port without talking: job and step ids are what they share.
        job, step = _optional(environ, "SLURM_JOB_ID") or 0, _optional(environ, "SLURM_STEP_ID") or 0
        port = 20000 + (job * 31 + step) % 12000
    return LaunchInfo(
        "slurm",
        _integer(environ, "SLURM_PROCID"),
        world_size,
        _optional(environ, "SLURM_LOCALID"),
        _slurm_local_size(environ),
        address,
        port,
    )


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    """Tasks on this node from ``SLURM_STEP_TASKS_PER_NODE``, written like ``"4(x2),3"``."""
    text, node = environ.get("SLURM_STEP_TASKS_PER_NODE"), _optional(environ, "SLURM_NODEID")
    if text is None or node is None:
        return None
    sizes: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return None
        sizes += [int(match.group(1))] * int(match.group(2) or 1)
    return sizes[node] if node < len(sizes) else None


def _checked(info: LaunchInfo, environ: Mapping[str, str]) -> LaunchInfo:
    pairs = [("rank", info.rank, "world size", info.world_size)]
    if info.local_rank is not None and info.local_world_size is not None:
        pairs.append(("local rank", info.local_rank, "local world size", info.local_world_size))
    for rank_name, rank, size_name, size in pairs:
        if size < 1 or not 0 <= rank < size:
            raise ConfigError(
                f"{info.launcher} says {rank_name} {rank} and {size_name} {size}: the {rank_name} must be "
                f"from 0 to {size_name} - 1. Seen: {_seen(environ)}"
            )
    if info.local_world_size is not None and info.local_world_size > info.world_size:
        raise ConfigError(
            f"{info.launcher} says local world size {info.local_world_size} above world size "
            f"{info.world_size}. Seen: {_seen(environ)}"
        )
    return info


def _integer(environ: Mapping[str, str], name: str) -> int:
    if name not in environ:
        raise ConfigError(f"the environment is incomplete: {name} not set. Seen: {_seen(environ)}")
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"environment variable {name} must be an integer, got {environ[name]!r}") from None


def _optional(environ: Mapping[str, str], name: str) -> int | None:
    return _integer(environ, name) if name in environ else None


_READERS = {
    "torchrun": _read_torchrun,
    "env": _read_env,
    "openmpi": _read_openmpi,
    "mpich": _read_mpich,
    "slurm": _read_slurm,
}

_SHOWN = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_RUN_ID"
    r"|OMPI_COMM_WORLD_(RANK|SIZE|LOCAL_RANK|LOCAL_SIZE)|PMI_(RANK|SIZE)|MPI_LOCAL(RANKID|NRANKS)"
    r"|SLURM_(PROCID|LOCALID|STEP_NUM_TASKS|STEP_TASKS_PER_NODE|STEP_NODELIST))$"
)


def _seen(environ: Mapping[str, str]) -> str:
    shown = [f"{name}={environ[name]}" for name in sorted(environ) if _SHOWN.match(name)]
    return " ".join(shown) or "none of the launchers' variables"
