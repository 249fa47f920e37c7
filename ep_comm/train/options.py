"""What ``ep-comm train`` can be told, checked before any rank starts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..config import EPConfig
from ..errors import ConfigError
from ..tune.budgets import BudgetFile, load_budgets
from .model import ModelConfig

__all__ = ["GPU_DEFAULTS", "TrainOptions", "parse_budget"]

GPU_DEFAULTS: dict[str, Any] = {
    "batch_size": 8, "learning_rate": 1e-3, "dtype": "bf16", "hidden_size": 1024, "layers": 6, "heads": 8,
    "ffn_size": 512, "sequence_length": 512, "num_experts": 64, "top_k": 8,
}  # fmt: skip
"""What `ep-comm train` takes on GPUs for options that were not given: a model that keeps one busy."""

# A resumed run that differs in one of these would not be the run that was saved.
_IDENTITY = (
    "seed", "batch_size", "num_experts", "top_k", "score", "bias_rate", "aux_loss", "shared_ffn", "dtype",
    "hidden_size", "layers", "heads", "ffn_size", "sequence_length", "dropout", "tied_embedding",
    "dense_first", "fp32_logits", "dispatch_dtype", "grad_dtype", "weight_decay", "clip", "alignment",
)  # fmt: skip


@dataclass(frozen=True)
class TrainOptions:
    """Options of a training run.

    Attributes:
        data: text file or folder; ``None`` trains on the sources of Python's standard library.
        max_bytes: at most so much of it is read.
        steps: optimizer steps of the whole run, those before a resume included.
        batch_size: sequences a rank and step.
        seed: weights, dropout and data order follow from it.
        learning_rate, warmup, weight_decay, clip: AdamW's peak rate, steps of linear warm-up before the
            cosine decay to a tenth, decay, and the largest gradient norm over all ranks.
        num_experts, top_k: of every MoE layer.
        score, bias_rate, aux_loss, shared_ffn: router score, step of the loss-free load balancing,
            coefficient of the auxiliary loss, and inner width of a shared expert (0 = none).
        mode, dispatch_dtype, grad_dtype, budget, capacity_factor, max_budget, alignment, transport:
            see :class:`ep_comm.EPConfig`; ``grad_dtype`` is its ``combine_backward_dtype``.
            ``budget`` may also be what ``ep-comm tune`` recommends, a budget of its own for every layer.
        headroom: share added to what was required when a budget grows.
        capture, check: CUDA graphs, and when verdicts are read; see :class:`ep_comm.StepRunner`.
        dtype: ``"fp32"`` or ``"bf16"``, of parameters and activations.
        device: ``"auto"`` or a torch device.
        validation_batches: batches of held-out text at the end of the run.
        plot, trace, json: files to write, or ``None``.
        save, save_every, resume: checkpoint folder, steps between checkpoints (0 = only at the end), and the
            folder to continue from.
        verify: train the same run again in eager mode and compare the weights.
    """

    data: Path | None = None
    max_bytes: int = 16_000_000
    steps: int = 120
    batch_size: int = 8
    seed: int = 0
    learning_rate: float = 3e-3
    warmup: int = 10
    weight_decay: float = 0.01
    clip: float = 1.0
    num_experts: int = 8
    top_k: int = 2
    score: str = "sigmoid"
    bias_rate: float = 0.005
    aux_loss: float = 0.0
    shared_ffn: int = 0
    mode: str = "static"
    dispatch_dtype: str = "mxfp8"
    grad_dtype: str = "mxfp8"
    budget: int | BudgetFile | None = None
    capacity_factor: float | None = None
    max_budget: int | None = None
    alignment: int = 16
    transport: str = "auto"
    headroom: float = 0.1
    capture: str = "auto"
    check: str = "every_step"
    dtype: str = "fp32"
    device: str = "auto"
    hidden_size: int = 128
    layers: int = 3
    heads: int = 4
    ffn_size: int = 192
    sequence_length: int = 128
    dropout: float = 0.05
    tied_embedding: bool = False
    dense_first: bool = False
    fp32_logits: bool = False
    validation_batches: int = 4
    plot: Path | None = None
    trace: Path | None = None
    json: Path | None = None
    save: Path | None = None
    save_every: int = 0
    resume: Path | None = None
    verify: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 1), ("batch_size", 1), ("warmup", 0), ("save_every", 0), ("validation_batches", 0),
            ("max_bytes", 1), ("seed", 0), ("shared_ffn", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{_flag(name)} must be at least {least}, got {value}")
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{_flag(name)} must be finite and above 0, got {value}")
        for name in ("weight_decay", "headroom", "bias_rate", "aux_loss"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{_flag(name)} must be finite and at least 0, got {value}")
        self._check_choices()
        if self.top_k > self.num_experts:
            raise ConfigError(f"--top-k must not be above --experts {self.num_experts}, got {self.top_k}")
        if self.save_every and self.save is None:
            raise ConfigError(f"--save-every {self.save_every} needs --save with a folder")
        for name in ("plot", "json", "trace"):
            path = getattr(self, name)
            if path is not None and not path.expanduser().resolve().parent.is_dir():
                raise ConfigError(f"{_flag(name)} {path}: the folder {path.parent} does not exist")
        if self.plot is not None and self.check == "deferred":
            raise ConfigError("--plot draws what every step needed and reads it step by step: use --check every_step")
        if self.resume is not None and not self.resume.is_dir():
            raise ConfigError(f"--resume {self.resume}: no such folder")
        if isinstance(self.budget, BudgetFile) and self.capacity_factor is not None:
            raise ConfigError(
                f"give --budget or --capacity-factor, not both: got --capacity-factor {self.capacity_factor}"
            )
        self.model_config()
        for layer in range(self.layers - self.dense_first):
            self.layer_config(layer)

    def _check_choices(self) -> None:
        for name, allowed in (
            ("score", ("sigmoid", "softmax")),
            ("dtype", ("fp32", "bf16")),
            ("capture", ("auto", "always", "never")),
            ("check", ("every_step", "deferred")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{_flag(name)} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    def check_world_size(self, world_size: int) -> None:
        """Raises ConfigError where the experts cannot be spread evenly over the ranks."""
        if self.num_experts % world_size:
            raise ConfigError(
                f"--experts must be a multiple of the {world_size} ranks, got {self.num_experts}: "
                "every rank owns equally many experts"
            )
        if isinstance(self.budget, BudgetFile):
            self.layer_config(0, world_size)

    def model_config(self) -> ModelConfig:
        """The model's shape."""
        names = [field.name for field in fields(ModelConfig)]
        try:
            return ModelConfig(**{name: getattr(self, name) for name in names})
        except ConfigError as error:
            raise _in_flags(error, {name: _flag(name) for name in names}) from None

    def ep_config(self, mode: str | None = None) -> EPConfig:
        """The dispatchers' configuration, in ``mode`` or the mode of the options."""
        factor = self.capacity_factor
        if factor is None and self.budget is None:
            # The mean load. Routing is never perfectly even, so a run starts with overflows and shows
            # what becomes of them; the budgets then settle where they are needed.
            factor = 1.0
        try:
            return EPConfig(
                num_experts=self.num_experts,
                top_k=self.top_k,
                hidden_size=self.hidden_size,
                max_tokens_per_rank=self.batch_size * self.sequence_length,
                mode=mode or self.mode,
                capacity_factor=factor,
                budget_rows=self.budget if isinstance(self.budget, int) else None,
                max_budget_rows=self.max_budget,
                alignment=self.alignment,
                dispatch_forward_dtype=self.dispatch_dtype,
                combine_backward_dtype=self.grad_dtype,
                transport=self.transport,
            )
        except ConfigError as error:
            raise _in_flags(error, _CONFIG_FLAGS) from None

    def layer_config(self, layer: int, ep_size: int | None = None, mode: str | None = None) -> EPConfig:
        """The configuration of one MoE layer, from 0; its budget is its own where a budget.json gives one.

        Raises:
            ConfigError: the budget.json is for other sizes.
        """
        config = self.ep_config(mode)
        if not isinstance(self.budget, BudgetFile):
            return config
        try:
            return self.budget.apply(config, layer, ep_size)
        except ConfigError as error:
            raise ConfigError(f"--budget: {error}") from None

    def identity(self) -> dict[str, Any]:
        """What must be equal for a saved run to be continued; plain values only."""
        return {name: getattr(self, name) for name in _IDENTITY}

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine from the peak to a tenth of it at the last step."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / (self.warmup + 1)
        span = max(1, self.steps - 1 - self.warmup)
        done = min(1.0, (step - self.warmup) / span)
        return self.learning_rate * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * done)))


def parse_budget(text: str | None) -> int | BudgetFile | None:
    """What ``--budget`` means: rows, or the path of a budget.json.

    Raises:
        ConfigError: neither.
    """
    if text is None:
        return None
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if not Path(text).is_file():
        raise ConfigError(f"--budget must be a number of rows or a budget.json of ep-comm tune, got {text!r}")
    return load_budgets(text)


_FLAGS = {
    "learning_rate": "--lr", "num_experts": "--experts",
}  # fmt: skip


_CONFIG_FLAGS = {
    "num_experts": "--experts",
    "top_k": "--top-k",
    "hidden_size": "--hidden-size",
    "mode": "--mode",
    "capacity_factor": "--capacity-factor",
    "budget_rows": "--budget",
    "max_budget_rows": "--max-budget",
    "alignment": "--alignment",
    "dispatch_forward_dtype": "--dispatch-dtype",
    "combine_backward_dtype": "--grad-dtype",
    "transport": "--transport",
}


def _in_flags(error: ConfigError, flags: dict[str, str]) -> ConfigError:
    """The error in the words of the command line."""
    names = "|".join(sorted(flags, key=len, reverse=True))
    return ConfigError(re.sub(rf"\b({names})\b", lambda match: flags[match[1]], str(error)))


def _flag(name: str) -> str:
    return _FLAGS.get(name, "--" + name.replace("_", "-"))
