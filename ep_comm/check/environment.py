"""Facts about one rank's environment, and what is wrong when those of all ranks are put side by side."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch

from ..distributed import Env
from ..launch import usable_cores
from ..transport.hosts import host_name
from .findings import Finding, ranges

__all__ = ["compare_environments", "environment", "host_names", "local_world_sizes"]

_VARIABLES = re.compile(
    r"^(NCCL_|GLOO_|TORCH_NCCL_|UCX_|FI_|MASTER_(ADDR|PORT)$|OMP_NUM_THREADS$|CUDA_VISIBLE_DEVICES$|CUDA_DEVICE_MAX_)"
)
_MAY_DIFFER = {"NCCL_HOSTID", "CUDA_VISIBLE_DEVICES"}
_OFF_SWITCHES = {
    "NCCL_P2P_DISABLE": "direct transfers between the GPUs of a host",
    "NCCL_SHM_DISABLE": "shared memory between the ranks of a host",
    "NCCL_IB_DISABLE": "InfiniBand and RoCE between hosts",
}
_MUST_AGREE = ("ep_comm", "torch", "nccl")
_SHOULD_AGREE = ("python", "cuda", "driver", "cupy", "mpi", "machine")


def environment(env: Env) -> dict[str, Any]:
    """Facts about this rank: versions, host, GPUs and their links, and the variables that matter. Plain values."""
    return {
        "rank": env.rank,
        "local_rank": env.local_rank,
        "host": socket.gethostname(),
        "host_id": host_name(),
        "launcher": env.launcher,
        "backend": env.backend,
        "device": str(env.device),
        "versions": _versions(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "gpus": _gpus(),
        "links": _links(env.device),
        "variables": {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.match(name)},
    }


def host_names(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for the host of every rank. Ranks that NCCL_HOSTID tells apart are on hosts of their own."""
    ids_of: dict[str, set[str]] = defaultdict(set)
    for fact in facts:
        ids_of[fact["host"]].add(fact["host_id"])
    return [fact["host"] if len(ids_of[fact["host"]]) == 1 else f"{fact['host']}/{fact['host_id']}" for fact in facts]


def local_world_sizes(hosts: Sequence[str]) -> dict[str, int]:
    """Ranks on every host."""
    return {host: list(hosts).count(host) for host in dict.fromkeys(hosts)}


def compare_environments(facts: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What differs between the ranks, or is known to go wrong.

    Args:
        facts: :func:`environment` of every rank, by rank.
    """
    hosts = host_names(facts)
    findings = [
        *_differences(facts, hosts),
        *_variable_findings(facts, hosts),
        *_thread_findings(facts, hosts),
        *_gpu_findings(facts, hosts),
    ]
    sizes = local_world_sizes(hosts)
    if len(sizes) > 1 and len(set(sizes.values())) > 1:
        counts = ", ".join(f"{count} on {host}" for host, count in sizes.items())
        findings.append(Finding("uneven-hosts", f"the hosts have different numbers of ranks: {counts}"))
    return findings


# ---- comparing ------------------------------------------------------------------------------------------


def _differences(facts: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[Finding]:
    findings = []
    for name in (*_MUST_AGREE, *_SHOULD_AGREE):
        groups = _group([fact["versions"].get(name) for fact in facts])
        if len(groups) > 1:
            kind = "version-differs" if name in _MUST_AGREE else "setup-differs"
            findings.append(Finding(kind, f"{name} differs: {_listing(groups, hosts)}", _odd_ones(groups)))
    for name, of in (("GPU", _card), ("number of cores", lambda fact: str(fact["cores"]))):
        groups = _group([of(fact) for fact in facts])
        if len(groups) > 1:
            findings.append(Finding("setup-differs", f"{name} differs: {_listing(groups, hosts)}", _odd_ones(groups)))
    return findings


def _variable_findings(facts: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[Finding]:
    findings = []
    names = sorted({name for fact in facts for name in fact["variables"]})
    for name in names:
        groups = _group([fact["variables"].get(name) for fact in facts])
        if len(groups) > 1 and name not in _MAY_DIFFER:
            findings.append(
                Finding("variable-differs", f"{name} differs: {_listing(groups, hosts)}", _odd_ones(groups))
            )
        turned_off = _OFF_SWITCHES.get(name)
        if turned_off and facts[0]["backend"] == "nccl":
            ranks = tuple(r for r, fact in enumerate(facts) if fact["variables"].get(name, "0") not in ("", "0"))
            if ranks:
                findings.append(
                    Finding("slow-variable", f"{name} turns off {turned_off} {_where(ranks, hosts)}", ranks)
                )
    return findings


def _thread_findings(facts: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[Finding]:
    """Only where the CPU does the work."""
    findings = []
    for host in dict.fromkeys(hosts):
        here = [fact for fact, name in zip(facts, hosts, strict=True) if name == host]
        threads, cores = sum(fact["threads"] for fact in here), min(fact["cores"] for fact in here)
        if here[0]["device"] == "cpu" and len(here) > 1 and threads > max(cores, len(here)):
            message = f"{len(here)} ranks on {host} compute with {threads} threads together on {cores} cores"
            findings.append(Finding("too-many-threads", message, tuple(fact["rank"] for fact in here)))
    return findings


def _gpu_findings(facts: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[Finding]:
    findings = []
    idle = tuple(fact["rank"] for fact in facts if fact["gpus"] and fact["device"] == "cpu")
    if idle:
        where = _where(idle, hosts)
        message = f"GPUs are visible, but the ranks compute on the CPU over {facts[idle[0]]['backend']} {where}"
        findings.append(Finding("cpu-instead-of-gpu", message, idle))
    own = [_own_gpu(fact) for fact in facts]
    used = {(host, gpu["uuid"]) for host, gpu in zip(hosts, own, strict=True) if gpu is not None}
    for fact in facts:
        host, uuids = hosts[fact["rank"]], {gpu["index"]: gpu["uuid"] for gpu in fact["gpus"]}
        # What no rank uses does not matter.
        blocked = [
            link["gpu"] for link in fact["links"] if not link["peer_access"] and (host, uuids[link["gpu"]]) in used
        ]
        if blocked:
            message = (
                f"{fact['device']} of rank {fact['rank']} on {hosts[fact['rank']]} cannot address the memory of GPU "
                f"{ranges(blocked)} of its host"
            )
            findings.append(Finding("no-peer-access", message, (fact["rank"],)))
    return findings


def _group(values: Sequence[Any]) -> dict[Any, tuple[int, ...]]:
    """Ranks by value, the commonest value first."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        groups[value].append(rank)
    return {value: tuple(ranks) for value, ranks in sorted(groups.items(), key=lambda item: -len(item[1]))}


def _odd_ones(groups: Mapping[Any, tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(rank for ranks in list(groups.values())[1:] for rank in ranks))


def _listing(groups: Mapping[Any, tuple[int, ...]], hosts: Sequence[str]) -> str:
    return "; ".join(
        f"{'not there' if value is None else value} {_where(ranks, hosts)}" for value, ranks in groups.items()
    )


def _where(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    if len(ranks) == len(hosts):
        return "on all ranks"
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"on rank {ranges(ranks)} ({shown})"


def _own_gpu(fact: Mapping[str, Any]) -> Mapping[str, Any] | None:
    index = int(fact["device"].split(":")[1]) if ":" in fact["device"] else None
    return next((gpu for gpu in fact["gpus"] if gpu["index"] == index), None)


def _card(fact: Mapping[str, Any]) -> str | None:
    gpu = _own_gpu(fact)
    return None if gpu is None else f"{gpu['name']} {gpu['memory_gb']} GB"


# ---- collecting -----------------------------------------------------------------------------------------


def _versions() -> dict[str, str | None]:
    from .. import __version__

    nccl = None
    if torch.distributed.is_nccl_available() and torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "ep_comm": __version__,
        "torch": torch.__version__,
        "nccl": nccl,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "driver": _driver_version(),
        "cupy": _cupy_version(),
        "mpi": _mpi_version(),
        "machine": platform.machine(),
    }


def _driver_version() -> str | None:
    try:
        with open("/proc/driver/nvidia/version", encoding="ascii", errors="replace") as file:
            match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", file.readline())
    except OSError:
        match = None
    return match.group(1) if match else _quietly(lambda pynvml: str(pynvml.nvmlSystemGetDriverVersion()))


def _cupy_version() -> str | None:
    """From the installed packages: importing CuPy takes seconds."""
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _mpi_version() -> str | None:
    """The MPI library where it has been loaded already: loading it here would start it."""
    if "mpi4py.MPI" in sys.modules:
        return sys.modules["mpi4py.MPI"].Get_library_version().split("\x00")[0].splitlines()[0].split(",")[0].strip()
    if find_spec("mpi4py") is None:
        return None
    return f"mpi4py {metadata.version('mpi4py')}" + ("" if shutil.which("mpirun") else ", no mpirun on PATH")


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": properties.name,
                "memory_gb": round(properties.total_memory / 1e9),
                "capability": f"{properties.major}.{properties.minor}",
                "uuid": str(getattr(properties, "uuid", "")),
            }
        )
    return found


def _links(device: torch.device) -> list[dict[str, Any]]:
    """From this rank's GPU to the others it sees: peer access, and NVLink where NVML can tell."""
    if device.type != "cuda":
        return []
    nvlinks = _quietly(lambda pynvml: _active_nvlinks(pynvml, device))
    return [
        {
            "gpu": other,
            "peer_access": torch.cuda.can_device_access_peer(device.index, other),
            "nvlinks": nvlinks,
        }
        for other in range(torch.cuda.device_count())
        if other != device.index
    ]


def _active_nvlinks(pynvml: Any, device: torch.device) -> int:
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED
        except pynvml.NVMLError:
            break
    return active


def _quietly(ask: Callable[[Any], Any]) -> Any:
    """What NVML says, or None where it is not installed or refuses."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return ask(pynvml)
    except Exception:  # a missing driver, an old library, a container without rights: all mean "unknown"
        return None
