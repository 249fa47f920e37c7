"""A rank dies or does not come: its peers end with an error that names the operation, in time."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import ep_comm
from tests.harness import Caught, Died, expect_error, run_ranks

GROUP_TIMEOUT = 10.0


def step_with_a_fault(
    rank: int, world_size: int, mode: str, moment: str, victim: int, pause: float | None
) -> tuple[Caught, float]:
    """One good step, then one in which the victim dies (or sleeps for ``pause`` seconds) at a moment."""
    static: dict[str, Any] = {"budget_rows": 64, "pair_rows": 8} if mode == "static" else {}
    config = ep_comm.EPConfig(8, 2, 32, 8, mode=mode, alignment=1, **static)
    dispatcher = ep_comm.Dispatcher(config, name="layer 3")
    started = 0.0

    def reach(here: str) -> None:
        nonlocal started
        if here == moment:
            started = time.monotonic()
            if rank == victim and pause is None:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == victim:
                time.sleep(pause)

    def step(faulty: bool) -> None:
        x = torch.ones(4, 32, requires_grad=True)
        topk_idx = torch.tensor([[0, 7], [2, 5], [1, 6], [3, 4]])
        if faulty:
            reach("dispatch")
        d = dispatcher.dispatch(x, topk_idx, torch.ones(4, 2))
        if faulty:
            reach("combine")
        out = dispatcher.combine(d.tokens, d.handle, apply_weights=True)
        if faulty:
            reach("backward")
        out.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2))

    step(faulty=False)
    caught = expect_error(step, True)
    return caught, time.monotonic() - started


@pytest.mark.parametrize(
    "mode, moment, ranks",
    [
        ("eager", "dispatch", 2),
        ("eager", "combine", 4),
        ("eager", "backward", 2),
        ("static", "combine", 2),
    ],
)
def test_a_killed_rank_ends_its_peers(mode: str, moment: str, ranks: int) -> None:
    victim = 1
    results = run_ranks(
        step_with_a_fault,
        ranks,
        mode,
        moment,
        victim,
        None,
        fresh=True,
        group_timeout=GROUP_TIMEOUT,
        timeout=60,
    )
    assert results[victim] == Died(-signal.SIGKILL)
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        caught, seconds = result
        assert caught.type == "PeerLostError", caught
        # The backward pass begins with the gradient of the combine.
        operation = "combine" if moment == "backward" else moment
        for part in (f"rank {rank}", operation, "layer 3"):
            assert part in caught.message, caught
        assert seconds < GROUP_TIMEOUT + 10


def test_a_rank_that_does_not_come_in_time_is_reported() -> None:
    results = run_ranks(step_with_a_fault, 2, "eager", "combine", 1, 9.0, fresh=True, group_timeout=3.0, timeout=60)
    caught, seconds = results[0]
    assert caught.type == "PeerLostError" and "combine" in caught.message, caught
    assert seconds < 8
    assert results[1][0].type == "PeerLostError", results[1]
