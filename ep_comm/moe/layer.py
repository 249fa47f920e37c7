"""The MoE layer: router, dispatch, experts, combine.

x ─┬─▶ router ──▶ topk_idx_TK, topk_weights_TK
   │                   │
   ├───────────────▶ dispatch ──▶ rows_RH ──▶ experts ──▶ combine ──▶ + ──▶ y
   │                                                                  ▲
   └─▶ shared expert (optional) ──────────────────────────────────────┘
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
import torch.nn as nn

from ..arguments import check_layer_input
from ..config import EPConfig
from ..dispatcher import Dispatcher
from ..errors import ConfigError
from ..status import Fault
from .experts import GroupedExperts, SharedExpert, check_row_bytes
from .init import resolve_seed
from .precision import autocast_dtype
from .router import TopKRouter, in_backward

__all__ = ["MoELayer"]


class MoELayer(nn.Module):
    """Mixture of SwiGLU experts spread over the ranks of ``group``; takes the place of a dense feed-forward.

    Collective: every rank of ``group`` constructs it with equal arguments, and calls it in the same order,
    each with its own tokens.

    Args:
        hidden_size, ffn_size: H, and I of every routed expert; multiples of 8 in 16-bit dtypes, 4 in float32.
        num_experts, top_k: E and K. These and ``hidden_size`` must be those of ``config``.
        config: of the dispatcher. ``recv_format="mxfp8"`` is refused: these experts take plain rows.
        group: process group of the expert-parallel ranks; ``None`` takes the default group, or a single
            process if ``torch.distributed`` is not initialised.
        score, normalize, scale, bias_update_rate, aux_loss_coeff: see :class:`TopKRouter`.
        shared_ffn_size: inner size of an expert that every token passes; ``None`` for none.
        dtype: of the experts' weights, and of ``x`` except under autocast; ``None`` takes torch's default.
            The router's weight is float32 in any case.
        device: of the parameters.
        name: of the dispatcher in messages.
        seed: of all initial weights; ``None`` draws one from torch's default generator. Give every rank the
            same (or seed torch equally). Experts start with the same weights whatever the size of ``group``.

    Attributes:
        router: :class:`TopKRouter`.
        experts: :class:`GroupedExperts`; its parameters carry ``ep_expert = True``. They belong to this rank:
            average their gradients over data-parallel replicas of the same experts, never over ``group``.
            Those of ``router`` and ``shared`` are replicated.
        shared: :class:`SharedExpert` or None.
        dispatcher: :class:`ep_comm.Dispatcher`, owned by the layer.

    Raises:
        ConfigError: an argument is out of range, or contradicts ``config``.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        top_k: int,
        config: EPConfig,
        group: dist.ProcessGroup | None = None,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        bias_update_rate: float = 0.0,
        aux_loss_coeff: float = 0.0,
        shared_ffn_size: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        name: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        _check_config(config, hidden_size=hidden_size, num_experts=num_experts, top_k=top_k)
        dtype = dtype or torch.get_default_dtype()
        # Before the dispatcher exists, so that a refused layer leaves nothing open.
        check_row_bytes(dtype, hidden_size=hidden_size, ffn_size=ffn_size)
        seed = resolve_seed(seed)
        self.hidden_size = hidden_size
        self.router = TopKRouter(
            hidden_size,
            num_experts,
            top_k,
            score=score,
            normalize=normalize,
            scale=scale,
            bias_update_rate=bias_update_rate,
            aux_loss_coeff=aux_loss_coeff,
            seed=seed,
            device=device,
        )
        self.shared: SharedExpert | None = None
        if shared_ffn_size is not None:
            self.shared = SharedExpert(hidden_size, shared_ffn_size, seed=seed, dtype=dtype, device=device)
        self.dispatcher = Dispatcher(config, group, name=name)
        num_local_experts = self.dispatcher.num_local_experts
        self.experts = GroupedExperts(
            num_local_experts,
            hidden_size,
            ffn_size,
            first_expert=self.dispatcher.rank * num_local_experts,
            seed=seed,
            dtype=dtype,
            device=device,
        )

    def forward(self, x: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Pass tokens through their experts.

        Args:
            x: ``[..., H]`` in the experts' dtype (any floating dtype under autocast). The leading dimensions
                are tokens; they may differ between ranks and calls, and be 0.
            token_mask: bool in the shape of the leading dimensions; ``False`` for tokens that no routed
                expert shall see, such as padding. The shared expert sees every token.

        Returns:
            ``[..., H]`` in the experts' dtype (or autocast's), without the residual connection.

        Raises:
            ArgumentError: on all ranks, if type, shape, dtype or device of an argument are wrong on one.
            EPError: another rank's router raised; or what :meth:`ep_comm.Dispatcher.dispatch` and ``combine`` raise.
        """
        fault = None
        try:
            fault = self._fault(x, token_mask)
            if fault is None:
                x_TH = x.reshape(-1, self.hidden_size)
                token_mask_T = None if token_mask is None else token_mask.reshape(-1)
                topk_idx_TK, topk_weights_TK = self.router(x_TH, token_mask_T)
                # Under autocast the rows travel in the dtype in which the experts will compute.
                tokens_TH = x_TH.to(autocast_dtype(x.device) or x.dtype)
        except Exception as error:
            # Activation recomputation ends itself by an exception; its forward pass was fine.
            if in_backward():
                raise
            # The other ranks are about to dispatch and would wait.
            self.dispatcher.refuse(error)
        if fault is not None:
            self.dispatcher.refuse(fault)
        rows = self.dispatcher.dispatch(tokens_TH, topk_idx_TK, topk_weights_TK)
        output_RH = self.experts(rows.tokens, rows.expert_offsets)
        y_TH = self.dispatcher.combine(output_RH, rows.handle, apply_weights=True)
        if self.shared is not None:
            y_TH = y_TH + self.shared(tokens_TH)
        return y_TH.view(x.shape)

    def close(self) -> None:
        """Give back what the dispatcher owns. May be called twice; the layer is then of no further use."""
        self.dispatcher.close()

    def _fault(self, x: torch.Tensor, token_mask: torch.Tensor | None) -> Fault | None:
        """Before anything is sent: what router, dispatch and experts would find wrong with the input afterwards."""
        autocast = isinstance(x, torch.Tensor) and autocast_dtype(x.device) is not None
        dtype = self.experts.gate_up_proj.dtype
        return check_layer_input(self.dispatcher, x, token_mask, dtype=dtype, autocast=autocast)


def _check_config(config: EPConfig, **arguments: int) -> None:
    if not isinstance(config, EPConfig):
        raise ConfigError(f"config must be an ep_comm.EPConfig, got {type(config).__name__}")
    for name, value in arguments.items():
        if getattr(config, name) != value:
            raise ConfigError(
                f"{name} must be the same in the layer and in config, got {name}={value!r} and "
                f"config.{name}={getattr(config, name)!r}"
            )
    if config.recv_format != "bf16":
        raise ConfigError(
            f"config.recv_format must be 'bf16' for MoELayer, whose experts take plain rows, got {config.recv_format!r}"
        )
