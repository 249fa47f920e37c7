"""One call that starts torch.distributed under torchrun, mpirun, srun, or alone."""

from __future__ import annotations

import atexit
import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .capture import release_graphs
from .errors import ConfigError, PeerLostError
from .extras import install_hint
from .failure import stop_watching, watch
from .gloo import leave_to_parent, let_gloo_finish
from .launch import end_with_launcher
from .launchers import LaunchInfo, detect_launcher

__all__ = ["Env", "first_failure", "init_distributed", "shutdown"]

_CONNECT_SECONDS = 5.0
_EXIT_SECONDS = 5.0


@dataclass(frozen=True)
class Env:
    """Where this process stands in its job.

    Attributes:
        rank, world_size: position in the whole job.
        local_rank, local_world_size: position among the ranks of this host.
        device: where this rank's tensors belong: its own GPU, or the CPU.
        backend: ``"nccl"`` or ``"gloo"`` (or what the caller asked for).
        group: the process group of all ranks.
        launcher: who started the process: ``"torchrun"``, ``"env"``, ``"openmpi"``, ``"mpich"``,
            ``"slurm"``, ``"single"``, or ``"existing"`` if torch.distributed was initialised already.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    group: dist.ProcessGroup
    launcher: str


class _Owned:
    """The process group that :func:`init_distributed` made in this process, if any."""

    env: Env | None = None
    pid: int | None = None  # of the process that made it: it is not a forked child's to destroy
    store: dist.Store | None = None  # keeps a server hosted by rank 0 alive
    hosts_store: bool = False


def init_distributed(
    backend: str | None = None,
    timeout: timedelta | float = timedelta(minutes=10),
    device: torch.device | str | None = None,
    *,
    launcher: str | None = None,
) -> Env:
    """Initialise torch.distributed for whichever launcher started this process.

    torchrun, Open MPI, MPICH (PMI), Slurm, plain RANK/WORLD_SIZE variables and a single process are told
    apart by their environment variables, in this order; plain variables that contradict MPI's or Slurm's are an
    error. Under MPI without ``MASTER_ADDR`` and ``MASTER_PORT`` the ranks find each other through mpi4py. All ranks
    agree on the backend: nccl if every rank has a GPU of its own, else gloo. Calling it again returns the same
    :class:`Env`. The process group is destroyed at interpreter exit, or by :func:`shutdown`.

    Args:
        backend: ``"nccl"``, ``"gloo"`` or any other torch.distributed backend; ``None`` chooses.
        timeout: how long a rank waits for the others, as a timedelta or in seconds.
        device: this rank's device; ``None`` takes GPU ``local_rank`` (or the only visible one), or the CPU.
        launcher: one of :data:`ep_comm.launchers.LAUNCHERS` instead of looking for one.

    Raises:
        ConfigError: contradictory or incomplete environment, an impossible backend or device, mpi4py missing.
        PeerLostError: rank 0 cannot be reached.
    """
    timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if timeout <= timedelta(0):
        raise ConfigError(f"timeout must be above 0, got {timeout}")
    try:
        device = None if device is None else torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device must be 'cpu', 'cuda' or a numbered GPU such as 'cuda:1', got {device!r}") from None
    if dist.is_initialized():
        return _existing_env(backend, device)
    info = detect_launcher(os.environ, launcher)
    store, hosts_store = _make_store(info, timeout)
    local_rank, local_world_size, device, backend = _agree(info, store, backend, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("ep_comm/default", store),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
    except (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError) as error:
        raise PeerLostError(
            f"rank {info.rank} of {info.world_size} ({info.launcher}) could not set up the {backend} process "
            f"group: {error}"
        ) from error
    env = Env(
        info.rank,
        info.world_size,
        local_rank,
        local_world_size,
        device,
        backend,
        dist.group.WORLD,
        info.launcher,
    )
    if _Owned.env is None:
        atexit.register(shutdown)
    _Owned.env, _Owned.store, _Owned.hosts_store, _Owned.pid = env, store, hosts_store, os.getpid()
    watch()
    leave_to_parent()
    if env.world_size > 1 and env.launcher in ("torchrun", "openmpi", "mpich"):
        end_with_launcher()
    return env


def shutdown(*, failed: bool | None = None) -> None:
    """Destroy the process group that :func:`init_distributed` made. Harmless if there is none, or in a forked child:
    the group is its parent's.

    Args:
        failed: this rank gives up after an error, so the others must not be waited for. Under MPI the whole
            job is then aborted, because ``MPI_Finalize`` would wait for ranks that wait for this one.
            ``None`` looks whether an uncaught exception is ending the interpreter.
    """
    if _Owned.env is not None and _Owned.pid != os.getpid():
        return
    env, store, hosts_store = _Owned.env, _Owned.store, _Owned.hosts_store
    _Owned.env, _Owned.store, _Owned.hosts_store = None, None, False
    atexit.unregister(shutdown)
    if env is None:
        return
    failed = getattr(sys, "last_value", None) is not None if failed is None else failed
    stop_watching(failed=failed)
    if failed and env.launcher in ("openmpi", "mpich") and "mpi4py.MPI" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(1)
    if not dist.is_initialized():
        return
    if not failed:
        release_graphs()  # NCCL waits for ever for graphs that hold its kernels
    if failed and env.backend == "nccl":
        dist.distributed_c10d._abort_process_group()  # a normal destroy would wait for the peers
    else:
        dist.destroy_process_group()
    if store is not None and env.world_size > 1 and not failed:
        _leave_together(env, store, hosts_store)
    if "gloo" in env.backend:
        let_gloo_finish()


def first_failure() -> bool:
    """Whether this rank is the first of the job to call this: then it should say what went wrong.

    One rank's error ends the others, often with an error of their own that is only a consequence.
    """
    env, store = _Owned.env, _Owned.store
    if env is None or store is None or env.world_size == 1:
        return True
    try:
        return store.add("ep_comm/failures", 1) == 1
    except RuntimeError:
        return True  # the store went with the rank that served it


def _leave_together(env: Env, store: dist.Store, hosts_store: bool) -> None:
    """The rank that serves the store goes last, or the others would report a lost connection."""
    try:
        store.set(f"ep_comm/left/{env.rank}", "1")
        if hosts_store:
            keys = [f"ep_comm/left/{rank}" for rank in range(env.world_size)]
            store.wait(keys, timedelta(seconds=_EXIT_SECONDS))
    except RuntimeError:
        pass  # a peer that never says goodbye must not keep this process


def _existing_env(backend: str | None, device: torch.device | None) -> Env:
    if _Owned.env is not None and _Owned.env.group is dist.group.WORLD:
        env = _Owned.env
    else:
        current = dist.get_backend()
        on_gpu = "nccl" in current and torch.cuda.is_available()
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        env = Env(
            dist.get_rank(),
            dist.get_world_size(),
            local_rank,
            int(os.environ.get("LOCAL_WORLD_SIZE", str(local_rank + 1))),
            device or (torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")),
            current,
            dist.group.WORLD,
            "existing",
        )
    if backend is not None and backend != env.backend:
        raise ConfigError(
            f"backend={backend!r} was asked for, but torch.distributed is already initialised with "
            f"{env.backend!r} on rank {env.rank}"
        )
    if device is not None and _indexed(device, env.local_rank) != env.device:
        raise ConfigError(f"device={str(device)!r} was asked for, but rank {env.rank} already uses {env.device}")
    return env


# ---- rendezvous ---------------------------------------------------------------------------------------


def _make_store(info: LaunchInfo, timeout: timedelta) -> tuple[dist.Store, bool]:
    """The key-value store all ranks share, and whether this process serves it."""
    if info.world_size == 1:
        return dist.HashStore(), False
    if info.launcher in ("openmpi", "mpich") and (info.master_addr is None or info.master_port is None):
        return _store_through_mpi(info, timeout)
    if info.master_addr is None or info.master_port is None:
        raise ConfigError(
            f"{info.launcher} does not tell rank {info.rank} where rank 0 is: set MASTER_ADDR and MASTER_PORT"
        )
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = info.rank == 0 and not agent_serves
    try:
        store = dist.TCPStore(
            info.master_addr, info.master_port, info.world_size, serves, timeout, wait_for_workers=False
        )
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {info.rank} of {info.world_size} ({info.launcher}) could not "
            f"{'serve' if serves else 'reach'} the rendezvous at {info.master_addr}:{info.master_port} "
            f"within {timeout.total_seconds():g} s: {error}"
        ) from error
    if agent_serves:
        # The agent's store outlives a restarted set of workers: keep each set's keys apart.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"ep_comm/attempt_{attempt}", store), False
    return store, serves


def _store_through_mpi(info: LaunchInfo, timeout: timedelta) -> tuple[dist.Store, bool]:
    """Rank 0 opens a store on a free port and tells the others where over MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"started by {info.launcher} (rank {info.rank} of {info.world_size}) without MASTER_ADDR and "
            f"MASTER_PORT, and mpi4py cannot be imported ({error}). Install it with "
            f"{install_hint('mpi')}, or pass -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<free port>"
        ) from error
    comm = MPI.COMM_WORLD
    if (comm.Get_rank(), comm.Get_size()) != (info.rank, info.world_size):
        raise ConfigError(
            f"{info.launcher} says rank {info.rank} of {info.world_size}, but mpi4py says rank "
            f"{comm.Get_rank()} of {comm.Get_size()}: mpi4py belongs to another MPI than this mpirun"
        )
    if info.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, info.world_size, True, timeout, wait_for_workers=False)
        comm.bcast((_own_addresses(), store.port), root=0)
        return store, True
    addresses, port = comm.bcast(None, root=0)
    same_host = info.local_world_size == info.world_size
    for address in ["127.0.0.1"] if same_host else addresses:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
        except OSError:
            continue
        return dist.TCPStore(address, port, info.world_size, False, timeout, wait_for_workers=False), False
    raise PeerLostError(
        f"rank {info.rank} of {info.world_size} cannot reach rank 0 at any of {', '.join(addresses)} on port "
        f"{port}: open the port, or set MASTER_ADDR and MASTER_PORT to an address the hosts share"
    )


def _own_addresses() -> list[str]:
    """Names and addresses under which other hosts may reach this one, best first."""
    found: list[str] = []
    if os.environ.get("MASTER_ADDR"):
        found.append(os.environ["MASTER_ADDR"])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing; it only makes the kernel choose an interface.
            probe.connect(("192.0.2.1", 9))
            found.append(probe.getsockname()[0])
    except OSError:
        pass
    found.append(socket.gethostname())
    try:
        found += [entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    except OSError:
        pass
    return list(dict.fromkeys(found))


# ---- who sits where, and on which device ----------------------------------------------------------------


def _agree(
    info: LaunchInfo, store: dist.Store, backend: str | None, device: torch.device | None
) -> tuple[int, int, torch.device, str]:
    """Local rank, local world size, device and backend, the backend being the same on all ranks.

    A launcher may show every rank all GPUs or only its own, and several ranks may share one GPU, which
    nccl refuses. Only comparing the cards' ids over all ranks tells these apart.
    """
    hosts = _exchange(info, store, "host", socket.gethostname())
    peers = [rank for rank, host in enumerate(hosts) if host == hosts[info.rank]]
    local_rank = peers.index(info.rank) if info.local_rank is None else info.local_rank
    local_world_size = len(peers) if info.local_world_size is None else info.local_world_size
    card = _card_id(local_rank, device)
    cards = _exchange(info, store, "card", f"{hosts[info.rank]} {card}" if card else "")
    own_gpu_each = all(cards) and len(set(cards)) == len(cards)
    if backend is None:
        backend = "nccl" if own_gpu_each and dist.is_nccl_available() else "gloo"
    if backend == "nccl" and not own_gpu_each:
        without = [str(rank) for rank, name in enumerate(cards) if not name or cards.count(name) > 1]
        raise ConfigError(
            f"backend='nccl' needs a GPU of its own for every rank; not so on rank {', '.join(without)} of "
            f"{info.world_size}. Use backend='gloo', or fewer ranks a host"
        )
    if device is None:
        # With gloo and a shared or missing GPU the tensors of the collective transport live on the CPU.
        device = _default_gpu(local_rank) if backend == "nccl" else torch.device("cpu")
    return local_rank, local_world_size, _indexed(device, local_rank), backend


def _exchange(info: LaunchInfo, store: dist.Store, what: str, value: str) -> list[str]:
    if info.world_size == 1:
        return [value]
    store.set(f"ep_comm/{what}/{info.rank}", value or "-")
    try:
        got = [store.get(f"ep_comm/{what}/{rank}").decode() for rank in range(info.world_size)]
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {info.rank} of {info.world_size} ({info.launcher}): not all ranks arrived at the rendezvous: {error}"
        ) from error
    return ["" if text == "-" else text for text in got]


def _default_gpu(local_rank: int) -> torch.device:
    # One visible GPU means that the launcher gave each rank its own.
    return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else local_rank)


def _card_id(local_rank: int, device: torch.device | None) -> str:
    """A name for the GPU this rank would use, unique on its host; empty if there is none."""
    if device is not None and device.type != "cuda":
        return ""
    if not torch.cuda.is_available():
        if device is not None:
            raise ConfigError(f"device={str(device)!r} was asked for, but no CUDA GPU is usable here")
        return ""
    chosen = _default_gpu(local_rank) if device is None else _indexed(device, local_rank)
    if chosen.index >= torch.cuda.device_count():
        if device is not None:
            raise ConfigError(
                f"device={str(device)!r} was asked for, but only {torch.cuda.device_count()} GPUs are visible"
            )
        return ""
    return str(torch.cuda.get_device_properties(chosen).uuid)


def _indexed(device: torch.device, local_rank: int) -> torch.device:
    """``cuda`` without a number means this rank's own GPU."""
    if device.type == "cuda" and device.index is None:
        return _default_gpu(local_rank)
    return device
