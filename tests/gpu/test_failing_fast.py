"""A rank that raises ends the others in seconds on GPUs too: in NCCL, in kernels that wait for a peer, in graphs."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ep_comm import EPConfig, StepRunner

from .launch import RANKS, needs_gpus, run_gpu_ranks
from .test_captured_training import EXPERTS, HIDDEN, TOKENS, Model, make_batch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]

BAD_TOKENS = 7
SOON = 12.0  # seconds; NCCL's timeout in these tests is 60, that of the kernels 300


def one_rank_raises(rank: int, world_size: int, transport: str, mode: str) -> tuple[str, str, float, int]:
    config = EPConfig(EXPERTS, 2, HIDDEN, TOKENS, mode=mode, transport=transport)
    model = Model(config).bfloat16().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)

    def step(x: Tensor) -> None:
        if len(x) == BAD_TOKENS:
            raise ValueError("sample 42 is bad")
        model(x).float().square().mean().backward()

    run = StepRunner(step, model=model, optimizer=optimizer, capture="never" if mode == "eager" else "auto")
    for number in range(5):
        run(make_batch(rank, number))
    bad = make_batch(rank, 5)[:BAD_TOKENS] if rank == 1 else make_batch(rank, 5)
    start = time.monotonic()
    try:
        run(bad)
        torch.cuda.synchronize()
        caught = ("", "no error")
    except Exception as error:
        caught = (type(error).__name__, str(error))
    seconds = time.monotonic() - start
    store = dist.distributed_c10d._get_default_store()
    store.add("tests/done", 1)  # nobody leaves before all have their error
    while store.add("tests/done", 0) < world_size and time.monotonic() < start + 30:
        time.sleep(0.1)
    return *caught, seconds, run.graph_replays


@pytest.mark.parametrize("mode", ["eager", "static"])
@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@needs_gpus(RANKS)
def test_a_rank_that_raises_ends_the_others(transport: str, mode: str) -> None:
    answers = run_gpu_ranks(one_rank_raises, RANKS, transport, mode)
    kind, message, _, _ = answers.pop(1)
    assert (kind, message) == ("ValueError", "sample 42 is bad")
    for kind, message, seconds, launches in answers:
        assert kind == "PeerLostError" and "rank 1" in message and "ValueError: sample 42 is bad" in message, answers
        assert "step 5" in message and seconds < SOON, answers
        assert (launches > 0) == (mode == "static"), answers
