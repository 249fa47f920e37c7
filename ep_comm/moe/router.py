"""The router: which experts a token goes to, with what weight, and what keeps their loads even.

    x_TH ─▶ FP32 logits ─▶ softmax or sigmoid ─▶ scores_TE ─┬─▶ gather ─▶ normalise, scale ─▶ topk_weights_TK
                                                            ▼     ▲
                                        expert_bias_E ────▶ + ─▶ top-k ─────────────────────▶ topk_idx_TK

The bias decides *which* experts are chosen and never touches the weights, so it carries no gradient.
Nothing here reads the device from the host, and all state sits in buffers that are changed in place: a
router can be captured in a CUDA graph, and a step that changed it can be rolled back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from ..errors import ArgumentError, ConfigError
from .init import resolve_seed, seeded_generator, uniform_fan_in_
from .precision import without_autocast

__all__ = ["TopKRouter", "count_tokens_per_expert", "in_backward", "update_expert_biases"]

# Keeps 0 / 0 away where every chosen score has underflowed; far below any score that has not.
TINY = 1e-20


def in_backward() -> bool:
    """Whether this code runs inside a backward pass: a forward here is activation recomputation."""
    return torch._C._current_graph_task_id() != -1


def count_tokens_per_expert(topk_idx_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """``[E]`` int64: how many slots of ``topk_idx_TK`` name each expert; slots of -1 name none."""
    # torch.bincount would read the largest id back to the host. Empty slots go to an extra last bin.
    bins = torch.where(topk_idx_TK < 0, num_experts, topk_idx_TK).flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=bins.device)
    return counts.scatter_add_(0, bins, torch.ones_like(bins))[:num_experts]


def _remember(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Put ``value`` into ``buffer``, unless this is activation recomputation."""
    if torch.compiler.is_compiling():
        from ..operators import unless_recomputed

        buffer.copy_(unless_recomputed(value, buffer))
    elif not in_backward():
        buffer.copy_(value)


class TopKRouter(nn.Module):
    """Softmax or sigmoid top-k router, in FP32 whatever the model's dtype.

    Two ways to keep the experts' loads even, both off by default and free to be combined:

    * ``bias_update_rate``: loss-free balancing (Wang et al. 2024, arXiv 2408.15664, as used by
      DeepSeek-V3). :meth:`update_bias` once a step moves the selection bias of every expert by
      ``bias_update_rate * sign(mean load - load)``.
    * ``aux_loss_coeff``: the load-balancing loss of Switch Transformers (Fedus et al. 2021, arXiv
      2101.03961, equations 4 to 6), extended to K slots. Over the ``n`` unmasked tokens of this call::

          f_e = (slots that chose e) / (n K)
          P_e = mean over tokens t of scores[t, e] / sum over e' of scores[t, e']
          loss = aux_loss_coeff * E * sum_e f_e P_e

      It is ``aux_loss_coeff`` where loads are even. Its gradient joins the backward pass by itself, once
      for every forward call; do not add it to the training loss. Where the training loss is divided by a
      number of micro-batches or multiplied by a loss scale, do the same to ``aux_loss_scale``.

    Args:
        hidden_size, num_experts, top_k: sizes H, E and K; ``top_k <= num_experts``.
        score: ``"softmax"`` over all experts, or ``"sigmoid"`` of each logit.
        normalize: divide a token's K weights by their sum.
        scale: factor on the weights, after normalising.
        bias_update_rate: step of the loss-free balancing; 0 leaves ``expert_bias`` alone.
        aux_loss_coeff: factor of the auxiliary loss; 0 leaves it out.
        seed: of the initial weight; ``None`` draws one from torch's default generator. Give every rank the
            same: the router is replicated.
        dtype, device: of ``weight``. The arithmetic is FP32 anyway.

    Attributes:
        weight: ``[E, H]`` parameter.
        expert_bias: ``[E]`` float32 buffer, saved in checkpoints. Can be set to a trained model's bias
            with ``bias_update_rate=0``. Stays float32 under ``.to(dtype)``.
        tokens_per_expert: ``[E]`` int64 buffer: slots per expert of this rank's training-mode forward
            calls since the latest :meth:`update_bias`, masked tokens and recomputation not counted.
        aux_loss: float32 scalar buffer: the loss of the latest training-mode forward call, for logging.
        aux_loss_scale: float32 scalar buffer, 1 at first: factor on the gradient of the auxiliary loss. Set
            it with ``router.aux_loss_scale.fill_(value)`` or ``.copy_(tensor)`` between steps.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        bias_update_rate: float = 0.0,
        aux_loss_coeff: float = 0.0,
        seed: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("hidden_size", hidden_size), ("num_experts", num_experts), ("top_k", top_k)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer above 0, got {value!r}")
        if top_k > num_experts:
            raise ConfigError(f"top_k must not exceed num_experts={num_experts}, got top_k={top_k}")
        if score not in ("softmax", "sigmoid"):
            raise ConfigError(f"score must be 'softmax' or 'sigmoid', got {score!r}")
        for name, rate in (("bias_update_rate", bias_update_rate), ("aux_loss_coeff", aux_loss_coeff)):
            if not rate >= 0:
                raise ConfigError(f"{name} must not be below 0, got {rate!r}")
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.score = score
        self.normalize = normalize
        self.scale = scale
        self.bias_update_rate = bias_update_rate
        self.aux_loss_coeff = aux_loss_coeff
        self.seed = resolve_seed(seed)
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype, device=device))
        self.register_buffer("expert_bias", torch.zeros(num_experts, dtype=torch.float32, device=device))
        self.register_buffer(
            "tokens_per_expert",
            torch.zeros(num_experts, dtype=torch.int64, device=device),
            persistent=False,
        )
        self.register_buffer("aux_loss", torch.zeros((), dtype=torch.float32, device=device), persistent=False)
        self.register_buffer("aux_loss_scale", torch.ones((), dtype=torch.float32, device=device), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the weight from ``seed`` and put the buffers back to their start. Does nothing on ``meta``."""
        if self.weight.is_meta:
            return
        uniform_fan_in_(self.weight, self.hidden_size, seeded_generator(self.seed, "router", self.weight.device))
        self.expert_bias.zero_()
        self.tokens_per_expert.zero_()
        self.aux_loss.zero_()
        self.aux_loss_scale.fill_(1.0)

    def forward(
        self, x_TH: torch.Tensor, token_mask_T: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of every token.

        Args:
            x_TH: ``[T, H]`` tokens, any floating dtype; ``T = 0`` is fine.
            token_mask_T: ``[T]`` bool, ``False`` for tokens that go nowhere (padding).

        Returns:
            ``topk_idx_TK`` int64, best first, and ``topk_weights_TK`` float32. Masked tokens have -1 and 0
            in all slots. Where several selection scores are equal, ``torch.topk`` decides.

        Raises:
            ArgumentError: a shape or dtype is wrong.
        """
        self._check(x_TH, token_mask_T)
        # Autocast would run the matrix product in 16 bits.
        with without_autocast(x_TH.device):
            logits_TE = F.linear(x_TH.float(), self.weight.float())
            scores_TE = torch.softmax(logits_TE, dim=-1) if self.score == "softmax" else logits_TE.sigmoid()
            topk_idx_TK = torch.topk(scores_TE.detach() + self.expert_bias, self.top_k, dim=-1).indices
            topk_weights_TK = scores_TE.gather(1, topk_idx_TK)
            if self.normalize:
                topk_weights_TK = topk_weights_TK / (topk_weights_TK.sum(dim=-1, keepdim=True) + TINY)
            if self.scale != 1.0:
                topk_weights_TK = topk_weights_TK * self.scale
            if token_mask_T is not None:
                masked_T1 = ~token_mask_T[:, None]
                topk_idx_TK = topk_idx_TK.masked_fill(masked_T1, -1)
                topk_weights_TK = topk_weights_TK.masked_fill(masked_T1, 0.0)
            if self.training:
                topk_weights_TK = self._balance(scores_TE, topk_idx_TK, topk_weights_TK, token_mask_T)
        return topk_idx_TK, topk_weights_TK

    def update_bias(self, group: dist.ProcessGroup | None = None) -> None:
        """Move ``expert_bias`` towards even loads and start counting anew.

        Call it once a step, after the backward pass of the step's last micro-batch: recomputation inside
        the backward pass must find the bias that its forward pass used. Loads are summed over ``group``,
        which should hold every rank that trains this router (expert-parallel and data-parallel); ``None``
        is the default group, or this process alone where ``torch.distributed`` is not initialised. For
        many layers :func:`update_expert_biases` needs a single all-reduce.
        """
        _update_biases([self], group)

    @torch.no_grad()
    def _shift_bias(self, load_E: torch.Tensor) -> None:
        # load < mean  <=>  load * E < sum: exact in integers.
        direction_E = torch.sign(load_E.sum() - load_E * self.num_experts)
        self.expert_bias.add_(direction_E.float() * self.bias_update_rate)
        self.tokens_per_expert.zero_()

    def _balance(
        self,
        scores_TE: torch.Tensor,
        topk_idx_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        token_mask_T: torch.Tensor | None,
    ) -> torch.Tensor:
        """Count loads and tie the auxiliary loss to the weights, which are returned unchanged in value."""
        load_E = count_tokens_per_expert(topk_idx_TK, self.num_experts)
        _remember(self.tokens_per_expert, self.tokens_per_expert + load_E)
        if self.aux_loss_coeff == 0:
            return topk_weights_TK
        loss = self.aux_loss_coeff * switch_balance_loss(scores_TE, load_E, self.top_k, token_mask_T)
        _remember(self.aux_loss, loss.detach())
        return _AddLossGradient.apply(topk_weights_TK, loss * self.aux_loss_scale)

    def _check(self, x_TH: torch.Tensor, token_mask_T: torch.Tensor | None) -> None:
        if x_TH.dim() != 2 or x_TH.shape[1] != self.hidden_size or not x_TH.is_floating_point():
            raise ArgumentError(
                f"x must be a floating-point tensor of shape [T, hidden_size={self.hidden_size}], "
                f"got {x_TH.dtype} of shape {list(x_TH.shape)}"
            )
        if token_mask_T is None:
            return
        if token_mask_T.shape != x_TH.shape[:1] or token_mask_T.dtype != torch.bool:
            raise ArgumentError(
                f"token_mask must be a bool tensor of shape [T={x_TH.shape[0]}], "
                f"got {token_mask_T.dtype} of shape {list(token_mask_T.shape)}"
            )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> TopKRouter:
        # model.to(torch.bfloat16) must not round the bias: steps of 0.001 are lost beside a bias of 1.
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            if after.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(after.device)
        return self

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"score={self.score!r}, normalize={self.normalize}, scale={self.scale}, "
            f"bias_update_rate={self.bias_update_rate}, aux_loss_coeff={self.aux_loss_coeff}"
        )


def switch_balance_loss(
    scores_TE: torch.Tensor, load_E: torch.Tensor, top_k: int, token_mask_T: torch.Tensor | None
) -> torch.Tensor:
    """``E * sum_e f_e P_e`` as in :class:`TopKRouter`, a float32 scalar; 0 without tokens."""
    num_tokens, num_experts = scores_TE.shape
    probs_TE = scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + TINY)
    if token_mask_T is None:
        count: torch.Tensor | int = max(num_tokens, 1)
    else:
        probs_TE = probs_TE.masked_fill(~token_mask_T[:, None], 0.0)
        count = token_mask_T.sum().clamp(min=1)
    mean_prob_E = probs_TE.sum(dim=0) / count
    fraction_E = load_E.float() / (count * top_k)
    return num_experts * torch.sum(fraction_E * mean_prob_E)


class _AddLossGradient(torch.autograd.Function):
    """Hands ``values`` through; in the backward pass ``loss`` receives the gradient 1."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, values: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, torch.ones((), dtype=torch.float32, device=grad.device)


def update_expert_biases(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """:meth:`TopKRouter.update_bias` for every router in ``model`` that balances by bias, in one all-reduce.

    All ranks of ``group`` must hold the same routers, in the same order and on one device each.
    """
    routers = [m for m in model.modules() if isinstance(m, TopKRouter) and m.bias_update_rate > 0]
    if routers:
        _update_biases(routers, group)


def _update_biases(routers: list[TopKRouter], group: dist.ProcessGroup | None) -> None:
    loads = torch.cat([router.tokens_per_expert for router in routers])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(loads, group=group)
    sizes = [router.num_experts for router in routers]
    for router, load_E in zip(routers, loads.split(sizes), strict=True):
        router._shift_bias(load_E)
