"""What a rank does on its host: ``python -m tests.hosts.ranks JOB FOLDER``; its result is FOLDER/JOB.<rank>.json."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ep_comm
from tests.train.tiny import make_trainer

GROUP_TIMEOUT = 5.0


def bits(rank: int, world_size: int) -> list[str]:
    """Digests of what every direction, mode and wire format gives on this rank, and of a short training run."""
    found = []
    for mode in ("eager", "static"):
        for wire in ("bf16", "mxfp8"):
            found += map(_digest, _one_step(rank, mode, wire))
    run = make_trainer("static", num_experts=8, budget=1, transport="collective")
    run.train(2)
    assert run.runner.replays >= 1
    found += [_digest(value) for _, value in sorted(run.model.state_dict().items())]
    run.close()
    return [*found, repr(run.history.losses)]


def _one_step(rank: int, mode: str, wire: str) -> Iterator[torch.Tensor]:
    gen = torch.Generator().manual_seed(rank)
    num_tokens = 13 + 3 * rank
    static: dict[str, Any] = {"budget_rows": 512, "pair_rows": 32} if mode == "static" else {}
    formats: dict[str, Any] = {"dispatch_forward_dtype": wire, "combine_backward_dtype": wire}
    config = ep_comm.EPConfig(8, 2, 64, 32, mode=mode, transport="collective", **static, **formats)
    with ep_comm.Dispatcher(config) as dispatcher:
        x_TH = torch.randn(num_tokens, 64, generator=gen).requires_grad_()
        topk_idx_TK = torch.randint(-1, 8, (num_tokens, 2), generator=gen)
        weights_TK = torch.rand(num_tokens, 2, generator=gen).requires_grad_()
        d = dispatcher.dispatch(x_TH, topk_idx_TK, weights_TK)
        out_TH = dispatcher.combine(d.tokens * 1.5, d.handle, apply_weights=True)
        out_TH.backward(torch.randn(out_TH.shape, generator=gen))
    yield from (d.tokens, d.weights, out_TH, x_TH.grad, weights_TK.grad)


def _digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def steps_until_a_fault(rank: int, world_size: int) -> dict[str, Any]:
    """Steps until a rank is lost; FOLDER/started appears after the third, the time of the fault is in FOLDER/fault."""
    folder = Path(sys.argv[2])
    dispatcher = ep_comm.Dispatcher(ep_comm.EPConfig(2 * world_size, 2, 32, 8, alignment=1), name="layer 3")
    model = torch.nn.Linear(32, 32)

    def step(_: None) -> None:
        topk_idx_TK = torch.tensor([[token, world_size + token] for token in range(world_size)])
        d = dispatcher.dispatch(model(torch.ones(world_size, 32)), topk_idx_TK, torch.ones(world_size, 2))
        dispatcher.combine(d.tokens, d.handle, apply_weights=True).sum().backward()

    runner = ep_comm.StepRunner(step, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        try:
            runner(None)
        except ep_comm.EPError as error:
            seconds = time.time() - float((folder / "fault").read_text())
            _write({"type": type(error).__name__, "message": str(error), "seconds": seconds})
            raise
        if runner.steps == 1:
            # Ranks need longer to start than a lost one may go unnoticed.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=GROUP_TIMEOUT), dist.group.WORLD)
        if runner.steps == 3 and rank == 0:
            (folder / "started").touch()
        time.sleep(0.05)
    raise AssertionError("no rank was lost")


def _write(result: Any) -> None:
    env = ep_comm.init_distributed()
    place = {"host": socket.gethostname(), "launcher": env.launcher, "local": [env.local_rank, env.local_world_size]}
    file = Path(sys.argv[2]) / f"{sys.argv[1]}.{env.rank}.json"
    file.with_suffix(".tmp").write_text(json.dumps({**place, "result": result}))
    os.replace(file.with_suffix(".tmp"), file)


def main() -> None:
    """Run the job that the command line names."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = {"bits": bits, "fault": steps_until_a_fault}[sys.argv[1]]
    env = ep_comm.init_distributed(timeout=100.0)
    _write(job(env.rank, env.world_size))


if __name__ == "__main__":
    main()
