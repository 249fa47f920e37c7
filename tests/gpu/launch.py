"""Ranks with a GPU each: starts one process a GPU, joins them over NCCL, brings back what each returned."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ep_comm.capture import release_graphs

__all__ = ["RANKS", "needs_gpus", "run_gpu_ranks"]

# How many GPUs the tests of several ranks take: EP_COMM_TEST_GPUS=4 runs them on four.
RANKS = int(os.environ.get("EP_COMM_TEST_GPUS", "2"))

_GRACE_SECONDS = 5.0


def needs_gpus(count: int) -> Any:
    """A mark that skips a test where torch sees fewer GPUs."""
    import pytest

    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < count, reason=f"needs {count} CUDA GPUs, torch sees {found}")


def run_gpu_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, env: dict[str, str] | None = None, timeout: float = 150.0
) -> list[Any]:
    """``fn(rank, world_size, *args)`` on ``world_size`` GPUs.

    ``env`` values may hold ``{rank}``, and ``{half}``, which is 0 for the first half of the ranks and 1 for the others.
    """
    context = mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(
                target=_work, args=(fn, rank, world_size, f"{folder}/store", env or {}, results, args), daemon=True
            )
            for rank in range(world_size)
        ]
        for worker in workers:
            worker.start()
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        try:
            while len(answers) < world_size and time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty):
                    rank, answer = results.get(timeout=0.2)
                    answers[rank] = answer
                    if not answer[0]:  # the others wait for this rank now: they get a moment to notice
                        deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                if any(w.exitcode not in (None, 0) for w in workers):
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            for rank, worker in enumerate(workers):
                if rank not in answers and worker.is_alive():
                    os.kill(worker.pid, signal.SIGUSR1)
                    time.sleep(0.5)
                    answers[rank] = (False, "did not finish; it was in\n" + Path(f"{folder}/stack{rank}").read_text())
                elif rank not in answers:
                    answers[rank] = (False, f"ended with exit code {worker.exitcode}")
            if all(good for good, _ in answers.values()):
                for worker in workers:
                    worker.join(timeout=90)
                    assert worker.exitcode == 0, f"a rank ended with exit code {worker.exitcode}"
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
    failed = [f"rank {rank}:\n{text}" for rank, (good, text) in sorted(answers.items()) if not good]
    assert not failed, "\n".join(failed)
    return [answers[rank][1] for rank in range(world_size)]


def _work(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    env: dict[str, str],
    results: Any,
    args: tuple[Any, ...],
) -> None:
    stack = open(f"{os.path.dirname(store)}/stack{rank}", "w")
    faulthandler.register(signal.SIGUSR1, file=stack)
    os.environ.update({name: value.format(rank=rank, half=2 * rank // world_size) for name, value in env.items()})
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
        device_id=device,
    )
    try:
        answer = (True, fn(rank, world_size, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    results.put((rank, answer))
    results.close()
    results.join_thread()
    if answer[0]:
        release_graphs()
        dist.destroy_process_group()
    else:
        # A peer may wait in a collective for ever: leave without meeting it.
        os._exit(0)
