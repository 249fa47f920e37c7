"""What differs between ranks is found and named."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ep_comm.check.environment import compare_environments, host_names
from ep_comm.check.findings import Finding, ranges

GPU = {"index": 0, "name": "NVIDIA H200", "memory_gb": 150, "capability": "9.0", "uuid": "a"}


def fact(rank: int, host: str = "a", **changes: Any) -> dict[str, Any]:
    facts = {
        "rank": rank,
        "local_rank": rank,
        "host": host,
        "host_id": host,
        "backend": "gloo",
        "device": "cpu",
        "versions": {"ep_comm": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "nccl": None, "driver": None},
        "cores": 8,
        "threads": 1,
        "gpus": [],
        "links": [],
        "variables": {"OMP_NUM_THREADS": "1"},
    }
    return copy.deepcopy({**facts, **changes})


def with_version(rank: int, host: str, name: str, value: str) -> dict[str, Any]:
    changed = fact(rank, host)
    changed["versions"][name] = value
    return changed


def found(*facts: dict[str, Any]) -> list[Finding]:
    return compare_environments(facts)


def test_equal_ranks_have_no_findings() -> None:
    assert found(fact(0), fact(1), fact(2, "b"), fact(3, "b")) == []


@pytest.mark.parametrize(
    ("name", "kind", "severity"),
    [
        ("torch", "version-differs", "error"),
        ("ep_comm", "version-differs", "error"),
        ("driver", "setup-differs", "warning"),
    ],
)
def test_a_version_that_differs(name: str, kind: str, severity: str) -> None:
    (finding,) = found(fact(0), fact(1), fact(2, "b"), with_version(3, "b", name, "9.9"))
    assert (finding.kind, finding.severity, finding.ranks) == (kind, severity, (3,))
    assert f"{name} differs: " in finding.message and "9.9 on rank 3 (b)" in finding.message


def test_the_commonest_value_is_the_normal_one() -> None:
    (finding,) = found(with_version(0, "a", "python", "3.10.1"), fact(1), fact(2))
    assert finding.ranks == (0,)
    assert finding.message == "python differs: 3.11.7 on rank 1-2 (a); 3.10.1 on rank 0 (a)"


def test_variables() -> None:
    odd = fact(1, variables={"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Ring", "NCCL_HOSTID": "x"})
    (finding,) = found(fact(0), odd)
    assert finding.kind == "variable-differs"
    assert finding.message == "NCCL_ALGO differs: not there on rank 0 (a); Ring on rank 1 (a)"


def test_a_fast_path_turned_off() -> None:
    facts = [
        fact(r, backend="nccl", device=f"cuda:{r}", variables={"NCCL_P2P_DISABLE": value}, gpus=[{**GPU, "index": r}])
        for r, value in enumerate("11")
    ]
    (finding,) = found(*facts)
    assert finding.kind == "slow-variable" and "direct transfers between the GPUs of a host" in finding.message


def test_hosts() -> None:
    (finding,) = found(fact(0), fact(1), fact(2, "b"))
    assert finding.kind == "uneven-hosts" and "2 on a, 1 on b" in finding.message
    assert host_names([fact(0), fact(1, host_id="x")]) == ["a/a", "a/x"]


def test_threads() -> None:
    (finding,) = found(fact(0, cores=2, threads=2), fact(1, cores=2, threads=2))
    assert (
        finding.kind == "too-many-threads"
        and "2 ranks on a compute with 4 threads together on 2 cores" in finding.message
    )
    # More ranks than cores, but one thread each: nothing that could be set better.
    assert found(*(fact(r, cores=2) for r in range(4))) == []


def test_gpus() -> None:
    (finding,) = found(fact(0, gpus=[GPU]), fact(1, gpus=[GPU]))
    assert finding.kind == "cpu-instead-of-gpu" and finding.ranks == (0, 1)
    gpus = [GPU | {"index": index, "uuid": f"u{index}"} for index in range(3)]
    links = [{"gpu": other, "peer_access": False, "nvlinks": 0} for other in (1, 2)]
    ranks = [fact(r, gpus=gpus, device=f"cuda:{r}", backend="nccl", links=[] if r else links) for r in range(2)]
    (finding,) = found(*ranks)
    assert finding.kind == "no-peer-access" and "cuda:0 of rank 0 on a" in finding.message
    assert "of GPU 1 of its host" in finding.message  # and not of number 2, which no rank uses
    assert found(ranks[0]) == []


def test_ranges() -> None:
    assert ranges([5, 0, 1, 2]) == "0-2, 5" and ranges([3]) == "3" and ranges([]) == ""
