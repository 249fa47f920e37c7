"""What the check has to say: findings, each of a kind that has a severity and a remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["KINDS", "Finding", "Kind", "failed", "ranges"]

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Kind:
    """A kind of finding: errors fail the check, warnings and notes do not."""

    severity: Severity
    remedy: str


KINDS: dict[str, Kind] = {
    "version-differs": Kind(
        "error",
        "Install the same release on every host, in the same environment. Ranks of different releases may exchange "
        "messages that the other side reads wrongly.",
    ),
    "setup-differs": Kind(
        "warning", "Make the hosts equal. The slowest rank sets the pace of all of them, and bits may differ."
    ),
    "variable-differs": Kind(
        "warning",
        "Give every rank the same value: mpirun -x NAME=VALUE, srun --export=ALL,NAME=VALUE, or set it in the job "
        "script.",
    ),
    "slow-variable": Kind("warning", "Unset the variable unless you know why it is there: it turns off a fast path."),
    "cpu-instead-of-gpu": Kind(
        "warning",
        "Start one rank a GPU (--ranks, --nproc-per-node, -N), let each rank see its GPU (CUDA_VISIBLE_DEVICES, "
        "srun --gpus-per-task), and install a torch build with NCCL.",
    ),
    "too-many-threads": Kind("warning", "Set OMP_NUM_THREADS so that threads a rank times ranks fit the host's cores."),
    "uneven-hosts": Kind(
        "warning", "Start the same number of ranks on every host: only then is the two-level path used between hosts."
    ),
    "no-peer-access": Kind(
        "warning",
        "Look at nvidia-smi topo -m. Containers need all GPUs of the host and --ipc=host; virtual machines need "
        "NVLink passed through; on NVSwitch machines the fabric manager must run.",
    ),
    "symmetric-unavailable": Kind(
        "warning",
        "The reason stands beside it; docs/check.md lists what each asks for. The collective path still works.",
    ),
    "wrong-result": Kind(
        "error",
        "Repeat with --transport collective, then with NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1, to see which path "
        "alters data. If one rank or one pair is named, look for ECC and link errors there: nvidia-smi -q -d ECC.",
    ),
    "wrong-data": Kind(
        "error",
        "Plain point-to-point messages arrive altered: this is below ep_comm. Check link and memory of the two ranks "
        "(nvidia-smi nvlink -e, nvidia-smi -q -d ECC, ethtool -S).",
    ),
    "replay-failed": Kind(
        "error",
        "Repeat with --capture never. If it then works, the CUDA graph is the cause: driver and NCCL releases matter.",
    ),
    "stage-failed": Kind(
        "error",
        "Read the rank's own output. For NCCL set NCCL_DEBUG=INFO; a wrong network interface (NCCL_SOCKET_IFNAME, "
        "GLOO_SOCKET_IFNAME) and a closed port are the usual causes.",
    ),
    "no-answer": Kind(
        "error",
        "See whether the named rank's process and host are alive. Wrong interface: set GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME. Firewall: open all ports between the hosts. Slow rather than stuck: raise --timeout.",
    ),
    "slow-pair": Kind(
        "warning",
        "Compare the two ranks' links with a fast pair's: nvidia-smi topo -m, nvidia-smi nvlink -s, ethtool, ibstat. "
        "NCCL_DEBUG=INFO says which path NCCL chose.",
    ),
    "slow-rank": Kind(
        "warning",
        "All its links are slow, so look at the rank itself: another job on the GPU or core, clocks (nvidia-smi -q -d "
        "CLOCK,PERFORMANCE), PCIe width, NUMA binding, a slow network port.",
    ),
    "not-the-fastest": Kind(
        "note",
        "Give transport=... in EPConfig if the difference matters at your sizes; ep-comm bench compares in depth.",
    ),
    "cut-short": Kind("note", "Give more time with --seconds."),
}
"""Every kind of finding. docs/check.md explains each of them."""


@dataclass(frozen=True)
class Finding:
    """One thing the check found.

    Attributes:
        kind: a key of :data:`KINDS`.
        message: what was seen, with ranks and hosts.
        ranks: the ranks it is about, ascending; empty if it is about no rank in particular.
        severity, remedy: of the kind, unless given.
    """

    kind: str
    message: str
    ranks: tuple[int, ...] = ()
    severity: Severity | Literal[""] = ""
    remedy: str = ""

    def __post_init__(self) -> None:
        kind = KINDS[self.kind]
        object.__setattr__(self, "severity", self.severity or kind.severity)
        object.__setattr__(self, "remedy", self.remedy or kind.remedy)


def failed(findings: Iterable[Finding]) -> bool:
    """Whether any finding is an error."""
    return any(finding.severity == "error" for finding in findings)


def ranges(ranks: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2, 5"``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
