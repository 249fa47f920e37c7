"""RoutingRecorder: counts of what every dispatch routed where, written for ``ep-comm tune``.

The counts are taken on the device, by operations of fixed shape and address, so recording costs no host sync and
works inside a captured CUDA graph: what is captured is the counting, and it runs again with every replay of the
graph. Memory is bounded: a ring of steps on the device, which is copied to the host and appended to the file when
it is full.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from .dispatcher import Dispatcher
from .errors import ConfigError, EPError
from .trace import trace_path

__all__ = ["RoutingRecorder"]


class _Ring:
    """Counts of one dispatcher: ``[steps, dispatches, E + P + 1]``: pairs an expert, tokens a rank, tokens + 1.

    A last word of 0 means that there was no such dispatch.
    """

    def __init__(self, dispatcher: Dispatcher, layer: int, steps: int, dispatches: int) -> None:
        self.dispatcher, self.layer = dispatcher, layer
        self.num_experts, self.ep_size = dispatcher.config.num_experts, dispatcher.ep_size
        width = self.num_experts + self.ep_size + 1
        self.counts = torch.zeros(steps, dispatches, width, dtype=torch.int64, device=dispatcher.device)

    def add(self, topk_idx_TK: Tensor, slot: Tensor, dispatch: int) -> None:
        """Count one dispatch into the ring's current step. No host sync, no shape that depends on the data."""
        num_tokens, experts, ranks = topk_idx_TK.shape[0], self.num_experts, self.ep_size
        raw_TK = topk_idx_TK.long()
        good_TK = (raw_TK >= 0) & (raw_TK < experts)
        idx_TK = torch.where(good_TK, raw_TK, experts)
        row = torch.zeros(experts + 1, dtype=torch.int64, device=raw_TK.device)
        row.scatter_add_(0, idx_TK.flatten(), torch.ones_like(idx_TK).flatten())
        rank_TK = torch.where(good_TK, raw_TK // (experts // ranks), ranks)
        needs_TP = torch.zeros(num_tokens, ranks + 1, dtype=torch.bool, device=raw_TK.device).scatter_(1, rank_TK, True)
        tokens = torch.full((1,), num_tokens + 1, dtype=torch.int64, device=raw_TK.device)
        row = torch.cat([row[:experts], needs_TP[:, :ranks].sum(0), tokens])
        self.counts[:, dispatch].index_copy_(0, slot, row.unsqueeze(0))


class RoutingRecorder:
    """Records how many tokens each expert and rank got in every step, one file a rank.

    ::

        with RoutingRecorder("routing.jsonl", rank) as recorder:
            recorder.attach(layer.dispatcher, 0)
            for batch in data:
                runner(batch)        # step_fn calls recorder.begin() first
                recorder.commit()

    ``begin`` starts the step's counts afresh, so what a discarded attempt counted is gone. It belongs into
    ``step_fn`` (and with it into the captured graph); ``commit`` stays outside. Dispatches outside ``begin`` ...
    ``commit`` are not recorded, and neither are recomputations in the backward pass.

    Args:
        path: name shared by all ranks: ``routing.jsonl`` becomes ``routing.rank0.jsonl``.
        rank: this rank.
        steps: steps that are kept on the device between two copies to the host.
        dispatches: most dispatches of one layer in a step (micro-batches).
        append: continue an existing file.

    Raises:
        ConfigError: an argument is out of range.
        EPError: the file cannot be written.
    """

    def __init__(
        self, path: str | Path, rank: int, *, steps: int = 64, dispatches: int = 1, append: bool = False
    ) -> None:
        for name, value in (("steps", steps), ("dispatches", dispatches)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**16:
                raise ConfigError(f"{name} must be an integer from 1 to 65536, got {value!r}")
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
            raise ConfigError(f"rank must be an integer from 0, got {rank!r}")
        self.path = trace_path(path, rank)
        self.rank = rank
        self._steps, self._dispatches = steps, dispatches
        self._rings: list[_Ring] = []
        self._made: list[int] = []
        self._slots: dict[torch.device, Tensor] = {}
        self._open = False
        self._first_step = self._next_step = 0
        self._filled: list[int] = []
        try:
            self._file: IO[str] | None = open(self.path, "a" if append else "w", encoding="utf-8")
        except OSError as error:
            raise EPError(f"rank {rank}: cannot write the recording {self.path}: {error.strerror}") from error

    def attach(self, dispatcher: Dispatcher, layer: int) -> None:
        """Record the dispatches of ``dispatcher`` as MoE layer ``layer``. Before the first step.

        Raises:
            ConfigError: steps were recorded already, or the layer's number is taken.
        """
        if self._next_step or self._open:
            raise ConfigError(f"rank {self.rank}: attach layer {layer} before the first step")
        if any(ring.layer == layer for ring in self._rings):
            raise ConfigError(f"rank {self.rank}: layer {layer} is attached already")
        at = len(self._rings)
        self._rings.append(_Ring(dispatcher, layer, self._steps, self._dispatches))
        self._made.append(0)
        device = dispatcher.device
        if device not in self._slots:
            self._slots[device] = torch.zeros(1, dtype=torch.int64, device=device)
        dispatcher.routing_hooks.append(lambda _, topk_idx_TK: self._record(at, topk_idx_TK))

    def begin(self) -> None:
        """Start the step's counts (afresh, if the step is run again). No host sync; may be captured.

        Where a graph is replayed, Python does not run; the captured counting overwrites the same places.
        """
        self._open = True
        self._made = [0] * len(self._rings)
        for ring in self._rings:
            ring.counts.index_fill_(0, self._slots[ring.counts.device], 0)

    def commit(self, step: int | None = None) -> None:
        """The step is good: keep its counts. Copies to the host only when the ring is full.

        Args:
            step: the step's number; default: one more than the last.
        """
        self._next_step = self._next_step if step is None else step
        self._filled.append(self._next_step)
        self._next_step += 1
        self._open = False
        if len(self._filled) == self._steps:
            self.flush()
        for slot in self._slots.values():
            slot.fill_(len(self._filled))

    def flush(self) -> None:
        """Append the committed steps on the device to the file. Copies to the host.

        Raises:
            EPError: the recorder is closed, or the file cannot be written.
        """
        if self._file is None:
            raise EPError(f"rank {self.rank}: the recording {self.path} is closed")
        kept = len(self._filled)
        counts = [ring.counts[:kept].tolist() for ring in self._rings]
        try:
            for slot, step in enumerate(self._filled):
                for ring, of_ring in zip(self._rings, counts, strict=True):
                    self._write(ring, step, of_ring[slot])
            self._file.flush()
        except OSError as error:
            raise EPError(f"rank {self.rank}: cannot write the recording {self.path}: {error.strerror}") from error
        self._filled.clear()

    def close(self) -> None:
        """Write what is left and close the file. May be called twice; a step that was not committed is dropped."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None

    def __enter__(self) -> RoutingRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(self, at: int, topk_idx_TK: Tensor) -> None:
        if not self._open:
            return
        ring, dispatch = self._rings[at], self._made[at]
        if dispatch == self._dispatches:
            raise ConfigError(
                f"rank {self.rank}: layer {ring.layer} dispatches more than dispatches={self._dispatches} times a step"
            )
        self._made[at] += 1
        if topk_idx_TK.device != ring.counts.device:
            # A group of one rank learns its device from its first tokens.
            ring.counts = ring.counts.to(topk_idx_TK.device)
            self._slots.setdefault(topk_idx_TK.device, torch.full((1,), len(self._filled), device=topk_idx_TK.device))
        ring.add(topk_idx_TK.detach(), self._slots[ring.counts.device], dispatch)

    def _write(self, ring: _Ring, step: int, dispatches: list[list[int]]) -> None:
        for row in dispatches:
            counts, to_ranks, tokens = row[: ring.num_experts], row[ring.num_experts : -1], row[-1] - 1
            if tokens < 0:
                continue
            record = {
                "step": step, "stage": "pre_dispatch", "block": "decoder", "layer": ring.layer, "rank": self.rank,
                "num_tokens": tokens, "topk": ring.dispatcher.config.top_k, "ep_size": ring.ep_size,
                "pair_tokens": max(to_ranks), "counts": counts,
            }  # fmt: skip
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
