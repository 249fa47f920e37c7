"""Looking at made-up speeds: slow pairs and slow ranks are named; and the schedule that measures them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from ep_comm.check.pairs import PairSpeed, classify, judge_pairs, schedule

HOSTS = ["a", "a", "a", "a", "b", "b", "b", "b"]


def speeds(slow: dict[tuple[int, int], float] | None = None, hosts: list[str] = HOSTS) -> list[PairSpeed]:
    """300 GB/s inside a host, 40 between hosts, but for ``slow``."""
    found = []
    for a, b in combinations(range(len(hosts)), 2):
        normal = 300.0 if hosts[a] == hosts[b] else 40.0
        found.append(PairSpeed(a, b, 5.0 + a, (slow or {}).get((a, b), normal), 1 << 20))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 9])
def test_every_pair_once_and_no_rank_twice_a_round(ranks: int) -> None:
    rounds = schedule(ranks)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(ranks), 2))
    for pairs in rounds:
        busy = [rank for pair in pairs for rank in pair]
        assert len(busy) == len(set(busy))
    assert len(rounds) <= ranks


def test_classes() -> None:
    inside, between = classify(speeds({(4, 6): 100.0}), HOSTS)
    assert (inside.name, inside.pairs, inside.gb_per_s) == ("inside a host", 12, 300.0)
    assert (inside.slowest_gb_per_s, inside.slowest) == (100.0, (4, 6))
    assert (between.name, between.pairs, between.gb_per_s) == ("between hosts", 16, 40.0)
    assert [each.name for each in classify(speeds(hosts=["a", "b"]), ["a", "b"])] == ["between hosts"]


def test_paths_are_judged_apart() -> None:
    pairs = speeds({(0, 1): 100.0}) + [replace(pair, path="peer memory", gb_per_s=20.0) for pair in speeds()]
    assert [(each.path, each.name) for each in classify(pairs, HOSTS)] == [
        (path, name) for path in ("messages", "peer memory") for name in ("inside a host", "between hosts")
    ]
    (finding,) = judge_pairs(pairs, HOSTS)
    assert finding.ranks == (0, 1)
    window = [replace(pair, path="peer memory") for pair in speeds({(0, 1): 100.0})]
    assert "the median inside a host through peer memory is 300" in judge_pairs(window, HOSTS)[0].message


def test_equal_links_have_no_findings() -> None:
    assert judge_pairs(speeds(), HOSTS) == []
    # A link between hosts is slower than one inside a host, and that is no fault.
    assert judge_pairs(speeds({(0, 1): 151.0, (0, 4): 21.0}), HOSTS) == []


def test_slow_pairs_are_named() -> None:
    inside, between = judge_pairs(speeds({(1, 2): 149.0, (3, 7): 19.0}), HOSTS)
    assert (inside.kind, inside.ranks) == ("slow-pair", (1, 2))
    assert inside.message == "rank 1 (a) and rank 2 (a) reach 149 GB/s, the median inside a host is 300 GB/s"
    assert (between.kind, between.ranks) == ("slow-pair", (3, 7))


def test_a_slow_rank_is_named_instead_of_its_pairs() -> None:
    (finding,) = judge_pairs(speeds({(min(5, r), max(5, r)): 4.0 for r in range(4)}), HOSTS)
    assert (finding.kind, finding.ranks) == ("slow-rank", (5,))
    assert finding.message == (
        "rank 5 on b is slow with most of its peers between hosts: 4 GB/s, the median is 40 GB/s"
    )


def test_two_pairs_are_too_few_to_judge() -> None:
    pairs = [PairSpeed(0, 1, 5.0, 300.0, 1), PairSpeed(2, 3, 5.0, 1.0, 1)]
    assert judge_pairs(pairs, ["a", "a", "b", "b"]) == []


def test_altered_data_fail() -> None:
    (finding,) = judge_pairs([PairSpeed(0, 1, 5.0, 300.0, 1, intact=False)], ["a", "b"])
    assert (finding.kind, finding.severity, finding.ranks) == ("wrong-data", "error", (0, 1))
