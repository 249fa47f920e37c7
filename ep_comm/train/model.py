"""A small decoder-only byte model with a Mixture of Experts in its layers.

Letters: ``B`` sequences, ``C`` their length, ``H`` model width, ``N`` heads, ``D`` width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import ConfigError

__all__ = ["ByteMoEModel", "ModelConfig", "VOCABULARY"]

VOCABULARY = 256


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a :class:`ByteMoEModel`.

    Attributes:
        hidden_size: width of a token, a multiple of ``2 * heads``.
        layers: decoder layers.
        heads: attention heads.
        ffn_size: inner width of one expert.
        sequence_length: bytes of a sequence.
        dropout: probability with which an element of a residual branch is dropped.
        tied_embedding: the output projection shares the embedding's weights.
        dense_first: the first layer has one dense feed-forward instead of experts.
        fp32_logits: the output projection is computed in FP32 whatever the model's dtype.
    """

    hidden_size: int = 128
    layers: int = 3
    heads: int = 4
    ffn_size: int = 192
    sequence_length: int = 128
    dropout: float = 0.05
    tied_embedding: bool = False
    dense_first: bool = False
    fp32_logits: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "layers", "heads", "ffn_size", "sequence_length"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer from 1, got {value!r}")
        if self.hidden_size % (2 * self.heads):
            raise ConfigError(f"hidden_size must be a multiple of 2 * heads = {2 * self.heads}, got {self.hidden_size}")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout must be from 0 to below 1, got {self.dropout!r}")
        if self.dense_first and self.layers < 2:
            raise ConfigError(f"dense_first needs layers from 2 on, got layers={self.layers}")


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``, computed in FP32 (Zhang and Sennrich, 2019)."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x_BCH: torch.Tensor) -> torch.Tensor:
        x = x_BCH.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x.to(x_BCH.dtype) * self.weight


class Attention(nn.Module):
    """Causal self-attention with rotary positions (Su et al., 2021)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        width = config.hidden_size // config.heads
        inverse = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles_CD = torch.outer(torch.arange(config.sequence_length, dtype=torch.float32), inverse)
        self.register_buffer("cos", angles_CD.cos(), persistent=False)
        self.register_buffer("sin", angles_CD.sin(), persistent=False)

    def forward(self, x_BCH: torch.Tensor) -> torch.Tensor:
        B, C, H = x_BCH.shape
        q, k, v = self.qkv(x_BCH).view(B, C, 3, self.heads, H // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, C, H))

    def _rotate(self, x_BNCD: torch.Tensor) -> torch.Tensor:
        C = x_BNCD.shape[2]
        first, second = x_BNCD.float().chunk(2, dim=-1)
        cos, sin = self.cos[:C], self.sin[:C]
        turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
        return turned.to(x_BNCD.dtype)


class DenseFFN(nn.Module):
    """SwiGLU feed-forward for the layer without experts (Shazeer, 2020)."""

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, 2 * ffn_size, bias=False)
        self.down = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class DecoderLayer(nn.Module):
    """``x + drop(attention(norm(x)))``, then ``x + drop(ffn(norm(x)))``."""

    def __init__(self, config: ModelConfig, ffn: nn.Module) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.hidden_size)
        self.ffn = ffn
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BCH: torch.Tensor) -> torch.Tensor:
        x_BCH = x_BCH + self.dropout(self.attention(self.attention_norm(x_BCH)))
        return x_BCH + self.dropout(self.ffn(self.ffn_norm(x_BCH)))


class ByteMoEModel(nn.Module):
    """Predicts the next byte.

    Args:
        config: shapes.
        make_moe: called with the number of each MoE layer, counted from 0; returns a module that maps
            ``[B, C, H]`` to ``[B, C, H]`` (:class:`ep_comm.MoELayer`).
        seed: of the weights outside the MoE layers; equal on all ranks.
    """

    def __init__(self, config: ModelConfig, make_moe: Callable[[int], nn.Module], seed: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.hidden_size)
        dense = 1 if config.dense_first else 0
        # A top-2 MoE does the work of two experts a token, and so does the dense layer in its place.
        ffns = [
            DenseFFN(config.hidden_size, 2 * config.ffn_size) if index < dense else make_moe(index - dense)
            for index in range(config.layers)
        ]
        self.layers = nn.ModuleList(DecoderLayer(config, ffn) for ffn in ffns)
        self.norm = RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, VOCABULARY, bias=False)
        self._initialise(seed)
        if config.tied_embedding:
            self.head.weight = self.embedding.weight

    def forward(self, ids_BC: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, C, 256]`` of the byte after each position; FP32 with ``fp32_logits``."""
        x_BCH = self.embedding(ids_BC)
        for layer in self.layers:
            x_BCH = layer(x_BCH)
        x_BCH = self.norm(x_BCH)
        if self.config.fp32_logits:
            return F.linear(x_BCH.float(), self.head.weight.float())
        return self.head(x_BCH)

    def loss(self, ids_BC: torch.Tensor, targets_BC: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the targets in nats a byte, FP32 scalar."""
        logits = self(ids_BC).float()
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets_BC.reshape(-1))

    def moe_layers(self) -> list[nn.Module]:
        """The MoE modules, first layer first."""
        return [layer.ffn for layer in self.layers if not isinstance(layer.ffn, DenseFFN)]

    def _initialise(self, seed: int) -> None:
        """Normal weights of standard deviation 0.02, smaller where a branch joins the residual stream.

        Drawn from a generator of its own on the CPU: all ranks start equal, whatever their device.
        """
        generator = torch.Generator().manual_seed(seed)
        inner = 0.02 / (2 * self.config.layers) ** 0.5
        for name, module in self.named_modules():
            inside_moe = any(name.startswith(f"layers.{i}.ffn.") for i in self._moe_indices())
            if inside_moe or not isinstance(module, (nn.Linear, nn.Embedding)):
                continue
            std = inner if name.endswith((".out", ".down")) else 0.02
            with torch.no_grad():
                module.weight.copy_(torch.empty(module.weight.shape).normal_(0.0, std, generator=generator))

    def _moe_indices(self) -> list[int]:
        return [index for index, layer in enumerate(self.layers) if not isinstance(layer.ffn, DenseFFN)]
