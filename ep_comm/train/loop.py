"""The training run: model, optimizer, runner and text brought together."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..distributed import Env
from ..errors import BudgetExceededError, ConfigError, EPError
from ..moe.layer import MoELayer
from ..moe.router import update_expert_biases
from ..runner import StepRunner
from ..trace import RouterTraceWriter
from .checkpoint import load_checkpoint, save_checkpoint
from .data import ByteCorpus
from .gradients import GradientReducer
from .model import ByteMoEModel
from .options import TrainOptions
from .timing import PhaseClock, TimedTransport

__all__ = ["DIRECTIONS", "History", "Trainer", "TrainingError"]

DIRECTIONS = ("dispatch_forward", "dispatch_backward", "combine_forward", "combine_backward")
_LOSSES_TOGETHER = 16
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Batch = tuple[torch.Tensor, torch.Tensor]


class TrainingError(EPError):
    """Training cannot go on: the loss is no longer finite."""


@dataclass
class History:
    """What happened in every step since step 0, those before a resume included. Plain values only.

    Attributes:
        losses: mean loss over all ranks, nats a byte.
        replayed: steps whose first attempt was discarded.
        budgets, required: for every step the rows of each MoE layer's budget when the step began, and the
            rows the committed attempt needed on the rank that needed most; empty in eager mode.
    """

    losses: list[float] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)
    budgets: list[list[int]] = field(default_factory=list)
    required: list[list[int]] = field(default_factory=list)


class Trainer:
    """One training run on one rank. Collective: all ranks make the same calls.

    Args:
        options: what to do.
        env: where this rank stands.
        corpus: the text.
        mode: ``"static"`` or ``"eager"`` instead of ``options.mode``.

    Attributes:
        model, optimizer, runner: as they are after the steps so far.
        step: steps done.
        history: of all steps so far.
        clock: host time of each phase since this process started the run.
        seconds: time spent in steps by this process.
        step_seconds: of every step by this process, sorted by what it was: ``"graph"`` (one launch of a CUDA
            graph), ``"plain"``, ``"replayed"`` (both attempts), ``"capturing"``. With deferred verdicts the mean
            of steps whose losses are read together.
    """

    def __init__(self, options: TrainOptions, env: Env, corpus: ByteCorpus, *, mode: str | None = None) -> None:
        options.check_world_size(env.world_size)
        self.options, self.env, self.corpus = options, env, corpus
        self.mode = mode or options.mode
        self.step = self.first_step = 0
        self.history = History()
        self.clock = PhaseClock()
        self.seconds = 0.0
        self.step_seconds: dict[str, list[float]] = {}
        self._trace: RouterTraceWriter | None = None
        self.model = self._make_model()
        self.layers: list[MoELayer] = self.model.moe_layers()
        self._reducer = GradientReducer(self.model, env.group, options.clip)
        on_gpu = env.device.type == "cuda"
        # A captured optimizer step reads the rate from the device.
        self._lr = torch.tensor(options.learning_rate, device=env.device) if on_gpu else options.learning_rate
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self._lr,
            betas=(0.9, 0.95),
            weight_decay=options.weight_decay,
            fused=True,
            capturable=on_gpu,
        )
        capture = options.capture
        if self.mode == "eager" or options.trace is not None or not on_gpu:
            # Eager mode and the trace read the device in the middle of a step.
            if capture == "always" and mode is None:
                raise ConfigError("--capture always needs a GPU, static mode and no --trace")
            capture = "never"
        self._losses_together = _LOSSES_TOGETHER if options.check == "deferred" and capture != "never" else 1
        self.runner = StepRunner(
            self._train_step,
            model=self.model,
            optimizer=self.optimizer,
            group=env.group,
            capture=capture,
            check=options.check,
            headroom=options.headroom,
        )
        self._watch_time()
        # Dropout differs between ranks, as their tokens do; everything else was seeded by itself.
        torch.manual_seed(options.seed * 1_000 + env.rank)

    # -- training -------------------------------------------------------------------------------------

    def train(self, until: int, on_step: Callable[[Trainer], None] | None = None) -> None:
        """Run steps until ``until`` of them are done; ``on_step`` is called after each.

        Raises:
            TrainingError: the loss became infinite or NaN.
            EPError: what the dispatchers and the runner raise.
        """
        self.model.train()
        while self.step < until:
            # With deferred verdicts losses are read together now and then: reading one waits for the GPU.
            self._train_steps(min(until - self.step, self._losses_together))
            if on_step is not None:
                on_step(self)

    def _train_steps(self, count: int) -> None:
        start, runner = time.perf_counter(), self.runner
        replays, captures, launches = runner.replays, runner.captures, runner.graph_replays
        first, losses, budgets = self.step, [], []
        for _ in range(count):
            with self.clock.measure("data"):
                batch = self._batch(self.step)
            self._set_learning_rate()
            budgets.append([layer.dispatcher.budget_rows for layer in self.layers])
            before_runner = time.perf_counter()
            losses.append(runner(batch))
            if count == 1:
                losses[0] = float(losses[0])
            self.clock.finish_step(time.perf_counter() - before_runner)
            self.step += 1
        runner.flush()
        for step, loss in enumerate(map(float, losses), first):
            if not math.isfinite(loss):
                raise TrainingError(f"the loss became {loss} in step {step}: lower --lr, or raise --warmup")
            if self._trace is not None:
                self._trace.commit()
            self._remember(loss, budgets[step - first])
        self.history.replayed += runner.replayed_steps[len(runner.replayed_steps) - (runner.replays - replays) :]
        seconds = time.perf_counter() - start
        self.seconds += seconds
        if runner.replays > replays:
            kind = "replayed"
        elif runner.captures > captures:
            kind = "capturing"
        else:
            kind = "graph" if runner.graph_replays - launches == count else "plain"
        self.step_seconds.setdefault(kind, []).extend([seconds / count] * count)

    def attach_trace(self, path: Path) -> None:
        """Write the routing of every committed step from here on."""
        self._trace = RouterTraceWriter(path, self.env.rank, append=self.step > 0)
        for number, layer in enumerate(self.layers):
            self._trace.attach(layer.dispatcher, number)

    def validate(self) -> float | None:
        """Mean loss on held-out text in nats a byte; None without validation batches, or if no budget fits.

        Nothing replays a step here, so an overflow is handled by hand: grow and run the batch again.
        """
        options, env = self.options, self.env
        if options.validation_batches == 0:
            return None
        self.model.eval()
        total = torch.zeros((), device=env.device)
        batches = self.corpus.validation_batches(
            env.rank, env.world_size, options.batch_size, options.validation_batches
        )
        try:
            with torch.no_grad():
                for ids_BC, targets_BC in batches:
                    total += self._fitting_loss(ids_BC.to(env.device), targets_BC.to(env.device))
        except BudgetExceededError:
            return None
        finally:
            self.model.train()
        dist.all_reduce(total, group=env.group)
        return float(total) / (env.world_size * options.validation_batches)

    def close(self) -> None:
        """Give back what the run owns."""
        if self._trace is not None:
            self._trace.close()
        for layer in self.layers:
            layer.close()

    # -- checkpoints ----------------------------------------------------------------------------------

    def save(self, folder: Path) -> Path:
        """Write a checkpoint of the steps done so far."""
        rng = {"torch": torch.get_rng_state()}
        if self.env.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.env.device)
        state = {
            "identity": self.options.identity(),
            "fingerprint": self.corpus.fingerprint,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "runner": self.runner.state_dict(),
            "rng": rng,
            "history": vars(self.history),
        }
        return save_checkpoint(folder, self.step, state, self.env.rank, self.env.group)

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint, see :func:`load_checkpoint` for what it must match."""
        env = self.env
        state = load_checkpoint(folder, env.rank, env.world_size, self.options.identity(), self.corpus.fingerprint)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr  # loading put the saved rate into its place
        if self.mode == "static":
            self.runner.load_state_dict(state["runner"])
        torch.set_rng_state(state["rng"]["torch"])
        if "cuda" in state["rng"]:
            torch.cuda.set_rng_state(state["rng"]["cuda"], env.device)
        self.history = History(**state["history"])
        self.step = self.first_step = state["step"]

    # -- inside ---------------------------------------------------------------------------------------

    def _make_model(self) -> ByteMoEModel:
        options, env = self.options, self.env
        dtype = _DTYPES[options.dtype]
        position = itertools.count()

        def make_moe(number: int) -> MoELayer:
            config = options.layer_config(next(position), env.world_size, self.mode)
            return MoELayer(
                options.hidden_size,
                options.ffn_size,
                options.num_experts,
                options.top_k,
                config,
                env.group,
                score=options.score,
                bias_update_rate=options.bias_rate,
                aux_loss_coeff=options.aux_loss,
                shared_ffn_size=options.shared_ffn or None,
                dtype=dtype,
                device="cpu",
                name=f"MoE layer {number}",
                seed=options.seed * 1_000 + number,
            )

        model = ByteMoEModel(options.model_config(), make_moe, options.seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".router." not in name:  # routers stay FP32
                    parameter.data = parameter.data.to(dtype)
        # Weights are drawn on the CPU, so that every device starts with the same ones.
        return model.to(env.device)

    def _train_step(self, batch: Batch) -> torch.Tensor:
        """One attempt at a step: everything from the forward pass to clipped gradients."""
        self.clock.begin_attempt()
        if self._trace is not None:
            self._trace.begin(self.step)
        with self.clock.measure("model"):
            loss = self.model.loss(*batch)
            loss.backward()
        with self.clock.measure("gradients"):
            update_expert_biases(self.model, self.env.group)
            mean_loss, _ = self._reducer.reduce(loss)
        return mean_loss

    def _batch(self, step: int) -> Batch:
        env = self.env
        ids_BC, targets_BC = self.corpus.batch(step, env.rank, env.world_size, self.options.batch_size)
        return ids_BC.to(env.device), targets_BC.to(env.device)

    def _set_learning_rate(self) -> None:
        # Outside the step: a replay must see the same rate.
        rate = self.options.learning_rate_at(self.step)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _remember(self, loss: float, budgets: list[int]) -> None:
        history = self.history
        history.losses.append(loss)
        if self.mode == "static":
            history.budgets.append(budgets)
            if self.env.device.type == "cpu" or self.options.plot is not None:
                history.required.append([max(layer.dispatcher.required_rows_per_rank) for layer in self.layers])

    def _fitting_loss(self, ids_BC: torch.Tensor, targets_BC: torch.Tensor) -> torch.Tensor:
        # What a deeper layer needs is only known once the layers before it lose nothing: one at a time.
        for _ in range(len(self.layers) + 1):
            loss = self.model.loss(ids_BC, targets_BC)
            dispatchers = [layer.dispatcher for layer in self.layers]
            overflowed = next((each for each in dispatchers if each.overflowed), None)
            if overflowed is None:
                break
            overflowed.grow(max(overflowed.required_rows_per_rank))
        return loss

    def _watch_time(self) -> None:
        if self.env.device.type != "cpu":
            return
        for layer in self.layers:
            layer.dispatcher.wrap_transport(lambda transport: TimedTransport(transport, self.clock))
        started: list[float] = []
        self.optimizer.register_step_pre_hook(lambda *_: started.append(time.perf_counter()))
        self.optimizer.register_step_post_hook(
            lambda *_: self.clock.add("optimizer", time.perf_counter() - started.pop())
        )

    def wire_facts(self) -> list[dict[str, Any]]:
        """Bytes between ranks in each direction so far, over ranks and layers, discarded attempts included.

        ``plain`` is what the same tokens take without MXFP8. Collective. Empty slots that static mode pads
        its equal splits with on the network transports are not counted: they depend on the budget, not on
        the format.
        """
        sent = torch.tensor([layer.dispatcher.tokens_sent for layer in self.layers], device=self.env.device)
        dist.all_reduce(sent, group=self.env.group)
        tokens, dtype = int(sent.sum()), _DTYPES[self.options.dtype]
        facts = []
        if self.env.world_size == 1 or not self.layers:
            return facts
        dispatcher = self.layers[0].dispatcher
        for direction in DIRECTIONS:
            row = dispatcher.wire_row_bytes(direction, dtype)
            formats = {
                "dispatch_forward": self.options.dispatch_dtype,
                "combine_backward": self.options.grad_dtype,
            }
            mxfp8 = formats.get(direction) == "mxfp8"
            plain = row
            if mxfp8:
                width = self.options.hidden_size
                plain += _padded(width * dtype.itemsize) - _padded(width + width // 32)
            facts.append(
                {
                    "direction": direction,
                    "format": "mxfp8" if mxfp8 else self.options.dtype,
                    "tokens": tokens,
                    "row_bytes": row,
                    "row_bytes_plain": plain,
                    "bytes": tokens * row,
                    "bytes_plain": tokens * plain,
                }
            )
        return facts


def _padded(payload_bytes: int) -> int:
    """The parts of a wire row start at multiples of 16 bytes."""
    return -(-payload_bytes // 16) * 16
