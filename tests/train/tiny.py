"""A model and a text small enough for tests, and the program run as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ep_comm.distributed import init_distributed
from ep_comm.train.data import ByteCorpus
from ep_comm.train.loop import Trainer
from ep_comm.train.options import TrainOptions

ROOT = Path(__file__).resolve().parents[2]

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "layers": 2,
    "heads": 2,
    "ffn_size": 32,
    "sequence_length": 16,
    "batch_size": 2,
    "num_experts": 4,
    "validation_batches": 1,
    "warmup": 2,
}

TINY_FLAGS = (
    "--hidden-size 32 --layers 2 --heads 2 --ffn-size 32 --sequence-length 16 --batch-size 2 --experts 4 "
    "--validation-batches 1 --warmup 2"
).split()


def tiny_corpus(seed: int = 0, length: int = 16) -> ByteCorpus:
    """Four thousand bytes with some structure to learn."""
    text = b"".join(b"line %d of the text\n" % number for number in range(200))
    return ByteCorpus(torch.frombuffer(bytearray(text), dtype=torch.uint8), length, seed)


def make_trainer(mode: str | None = None, **options: Any) -> Trainer:
    """A trainer on the ranks of the default process group."""
    chosen = TrainOptions(**{**TINY, "steps": 6, **options})
    return Trainer(chosen, init_distributed(), tiny_corpus(), mode=mode)


def run_program(*arguments: object, timeout: float = 120.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m ep_comm ARGUMENTS`` with its output captured."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80", **environment}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in environment:
            env.pop(name, None)
    return subprocess.run(
        [sys.executable, "-m", "ep_comm", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=env,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )
