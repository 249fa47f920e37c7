"""The status words that travel with the routing counts, and the sentences they turn into.

A mistake that only one rank made must stop every rank, with the same message everywhere. So a rank
never raises on its own before an exchange: it puts a code and up to four integers into its status
words, takes part with zero tokens, and every rank formats the message from the words it received.

Words of a message, all int32:

    0  operation    what the sender is doing with which dispatcher, so that ranks out of step notice
    1  agreed       eager mode: number of the dispatch on this dispatcher (combine: of the dispatch it belongs to);
                    static mode: ``pair_rows``; equal on all ranks
    2  num_tokens   tokens of the sender in this call
    3  dtype        code of the payload's dtype
    4  budget_rows  receive budget of the sender
    5  fault        0, or what is wrong on the sender
    6  ..9          up to four integers that describe the fault
"""

from __future__ import annotations

import string
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist

from .config import EPConfig
from .devices import is_capturing
from .errors import ArgumentError, ClosedError, EPError, HandleError, RoutingError

__all__ = [
    "ANY_FLOAT",
    "DTYPES",
    "FAULT_VALUES",
    "HEADER_WORDS",
    "Fault",
    "FaultCode",
    "Header",
    "Operation",
    "Word",
    "device_values",
    "dtype_value",
    "error_from_words",
    "name_values",
    "rank_name",
    "shape_values",
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes a token row or an expert output may have; the index is the code in the status words."""

_ALLOWED = "torch.bfloat16, torch.float16 or torch.float32"
FAULT_VALUES = 4
_FOUR_INTS = f">{FAULT_VALUES}i"
_LETTERS = string.ascii_letters + string.digits + "_"
_MAX_LETTERS = 32 * FAULT_VALUES // 6
ANY_FLOAT = -1  # in place of the dtype that is allowed

# Every dtype and kind of device by a number, so that all ranks can name what one of them got.
_NAMED_DTYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})
_DEVICE_TYPES = ("cpu", "cuda", "meta", "xpu", "mps", "hpu", "xla", "mtia", "privateuseone")


def dtype_value(dtype: torch.dtype) -> int:
    """The number that stands for a dtype in a fault's values."""
    return _NAMED_DTYPES.index(str(dtype))


def device_values(device: torch.device) -> tuple[int, int]:
    """The numbers that stand for a device in a fault's values: kind and index."""
    kind = _DEVICE_TYPES.index(device.type) if device.type in _DEVICE_TYPES else -1
    return kind, -1 if device.index is None else device.index


def shape_values(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Number of dimensions and the last sizes, as a fault of a ``[..., H]`` argument carries them."""
    return (len(shape), *shape[1 - FAULT_VALUES :])


def name_values(name: str) -> tuple[int, ...]:
    """The first 21 characters of an identifier, as a fault's values carry them: six bits each."""
    number = 0
    for letter in reversed(name[:_MAX_LETTERS]):
        number = number << 6 | _LETTERS.index(letter if letter in _LETTERS else "_") + 1
    return struct.unpack(_FOUR_INTS, number.to_bytes(4 * FAULT_VALUES, "big"))


def _name(values: list[int]) -> str:
    number, name = int.from_bytes(struct.pack(_FOUR_INTS, *values), "big"), ""
    while number:
        name += _LETTERS[(number & 63) - 1]
        number >>= 6
    return name


def _dtype_name(value: int) -> str:
    # Another version of PyTorch may know other dtypes.
    return _NAMED_DTYPES[value] if 0 <= value < len(_NAMED_DTYPES) else "another dtype"


def _device_name(kind: int, index: int) -> str:
    name = _DEVICE_TYPES[kind] if 0 <= kind < len(_DEVICE_TYPES) else "another kind of device"
    return name if index < 0 else f"{name}:{index}"


class Word(IntEnum):
    """Positions of the status words in a message."""

    OPERATION = 0
    AGREED = 1
    NUM_TOKENS = 2
    DTYPE = 3
    BUDGET_ROWS = 4
    FAULT = 5
    VALUES = 6


HEADER_WORDS = Word.VALUES + FAULT_VALUES


class Header:
    """The status words in front of the fault.

    Kernels take them from the host as arguments; for others they are copied to the device, once for each header.

    Args:
        words: operation, agreed, tokens, dtype and budget, as above.
    """

    def __init__(self, *words: int) -> None:
        self.words = words
        self._on: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """int32 ``[5]`` on the device."""
        if device not in self._on and is_capturing(device):
            # Filled in by the graph, as a capture copies nothing from the host; the memory is the graph's own.
            return torch.stack([torch.full((), word, dtype=torch.int32, device=device) for word in self.words])
        if device not in self._on:
            self._on[device] = torch.tensor(self.words, dtype=torch.int32).to(device, non_blocking=True)
        return self._on[device]


class Operation(IntEnum):
    """What a rank is doing when it sends a message."""

    DISPATCH = 1
    COMBINE = 2
    WEIGHTED_COMBINE = 3

    def word(self, ordinal: int) -> int:
        """The operation on the dispatcher with this ordinal, as it travels."""
        return self | ordinal << 2

    @classmethod
    def describe(cls, word: int) -> str:
        """What a rank that sent ``word`` is doing, in words."""
        names = {
            cls.DISPATCH: "dispatch",
            cls.COMBINE: "combine(apply_weights=False)",
            cls.WEIGHTED_COMBINE: "combine(apply_weights=True)",
        }
        return f"{names[cls(word & 3)]} of dispatcher {word >> 2}"


class FaultCode(IntEnum):
    """Everything that can be wrong with one rank's call."""

    NONE = 0
    CLOSED = 1
    TOKENS_TYPE = 2
    TOKENS_SHAPE = 3
    TOKENS_DTYPE = 4
    TOKENS_DEVICE = 5
    TOO_MANY_TOKENS = 6
    IDX_TYPE = 7
    IDX_SHAPE = 8
    IDX_DTYPE = 9
    IDX_DEVICE = 10
    WEIGHTS_TYPE = 11
    WEIGHTS_SHAPE = 12
    WEIGHTS_DTYPE = 13
    WEIGHTS_DEVICE = 14
    EXPERT_ID = 15
    OUTPUT_TYPE = 16
    OUTPUT_SHAPE = 17
    OUTPUT_DTYPE = 18
    OUTPUT_DEVICE = 19
    HANDLE_TYPE = 20
    HANDLE_FOREIGN = 21
    REFUSED = 22
    FAILED = 23
    X_TYPE = 24
    X_SHAPE = 25
    X_DTYPE = 26
    X_DEVICE = 27
    MASK_TYPE = 28
    MASK_SHAPE = 29
    MASK_DTYPE = 30
    MASK_DEVICE = 31


@dataclass(frozen=True)
class Fault:
    """One mistake: its code, the integers every rank gets to see, and what only this rank can say."""

    code: FaultCode
    values: tuple[int, ...] = ()
    detail: str = ""

    def words(self) -> list[int]:
        """The fault as it travels: code and four integers, each clamped to int32."""
        values = [*self.values, 0, 0, 0, 0][:FAULT_VALUES]
        return [int(self.code), *(max(-(2**31), min(v, 2**31 - 1)) for v in values)]


def rank_name(rank: int, group: dist.ProcessGroup | None) -> str:
    """``rank 0``, and where ``group`` is not the world also which rank of the whole job that is."""
    # A group that is destroyed already has no ranks to ask for.
    with suppress(ValueError, RuntimeError, KeyError):
        if group is not None and dist.get_process_group_ranks(group) != list(range(dist.get_world_size())):
            return f"rank {rank} (global rank {dist.get_global_rank(group, rank)})"
    return f"rank {rank}"


def error_from_words(
    words: list[int], rank: int, config: EPConfig, detail: str = "", *, group: dist.ProcessGroup | None
) -> EPError:
    """The error that the status words of ``rank`` stand for.

    Args:
        words: fault code and its four integers.
        rank: rank in the dispatcher's group that reported it.
        config: the dispatcher's configuration, for the allowed values.
        detail: what is only known on the rank itself, for example the name of a wrong dtype.
        group: the dispatcher's.
    """
    code, values = FaultCode(words[0]), words[1 : 1 + FAULT_VALUES]
    text = f"{rank_name(rank, group)}: {_sentence(code, values, config)}"
    if detail:
        text += f" ({detail})"
    if code is FaultCode.EXPERT_ID:
        return RoutingError(text)
    if code is FaultCode.CLOSED:
        return ClosedError(text)
    if code in (FaultCode.HANDLE_TYPE, FaultCode.HANDLE_FOREIGN):
        return HandleError(text)
    if code is FaultCode.FAILED:
        return EPError(text)
    return ArgumentError(text)


def _sentence(code: FaultCode, v: list[int], config: EPConfig) -> str:
    hidden, top_k = config.hidden_size, config.top_k
    if code is FaultCode.CLOSED:
        return "cannot dispatch or combine: the dispatcher has been closed"
    if code is FaultCode.EXPERT_ID:
        expert_id = (v[3] << 32) | (v[2] & 0xFFFFFFFF)
        return (
            f"topk_idx holds expert id {expert_id} at token {v[0]}, slot {v[1]}; allowed are 0 to "
            f"{config.num_experts - 1} (num_experts={config.num_experts}), or -1 for no expert"
        )
    if code is FaultCode.TOO_MANY_TOKENS:
        return (
            f"tokens has {v[0]} rows, more than max_tokens_per_rank={config.max_tokens_per_rank}; "
            f"raise max_tokens_per_rank or split the batch"
        )
    if code is FaultCode.FAILED:
        return f"{_name(v)} was raised there in front of a dispatch; the output of that rank says more"
    if code >= FaultCode.X_TYPE:
        return _layer_sentence(code, v, config)
    shape = "[" + ", ".join(str(n) for n in v[1 : 1 + min(v[0], 3)]) + (", ...]" if v[0] > 3 else "]")
    shapes = {
        FaultCode.TOKENS_SHAPE: f"tokens must have shape [T, hidden_size={hidden}], got {shape}",
        FaultCode.IDX_SHAPE: f"topk_idx must have shape [T, top_k={top_k}] with the T of tokens, got {shape}",
        FaultCode.WEIGHTS_SHAPE: (f"topk_weights must have shape [T, top_k={top_k}] with the T of tokens, got {shape}"),
        FaultCode.OUTPUT_SHAPE: (
            f"expert_output must have the shape of the dispatched rows, [{v[3]}, {hidden}], got {shape}"
        ),
    }
    if code in (FaultCode.TOKENS_DTYPE, FaultCode.IDX_DTYPE, FaultCode.WEIGHTS_DTYPE, FaultCode.OUTPUT_DTYPE):
        allowed = {
            FaultCode.IDX_DTYPE: "torch.int32 or torch.int64",
            FaultCode.WEIGHTS_DTYPE: "torch.float32",
        }.get(code, _ALLOWED)
        return f"{_argument(code)} must be {allowed}, got {_dtype_name(v[0])}"
    if code in (FaultCode.TOKENS_DEVICE, FaultCode.IDX_DEVICE, FaultCode.WEIGHTS_DEVICE, FaultCode.OUTPUT_DEVICE):
        where = f"{_device_name(*v[2:4])}, the dispatcher's device"
        return f"{_argument(code)} must be on {where}, got {_device_name(*v[:2])}"
    plain = {
        FaultCode.TOKENS_TYPE: "tokens must be a dense torch.Tensor",
        FaultCode.IDX_TYPE: "topk_idx must be a dense torch.Tensor",
        FaultCode.WEIGHTS_TYPE: "topk_weights must be a dense torch.Tensor",
        FaultCode.OUTPUT_TYPE: "expert_output must be a dense torch.Tensor",
        FaultCode.REFUSED: "the caller of dispatch has refused its input",
        FaultCode.HANDLE_TYPE: "handle must be the handle of a Dispatched that dispatch() returned",
        FaultCode.HANDLE_FOREIGN: "handle belongs to another dispatcher; combine with the one that dispatched",
    }
    return shapes.get(code) or plain[code]


def _layer_sentence(code: FaultCode, v: list[int], config: EPConfig) -> str:
    """What is wrong with the input of an MoE layer."""
    name = _argument(code)
    if code in (FaultCode.X_TYPE, FaultCode.MASK_TYPE):
        return f"{name} must be a dense torch.Tensor"
    if code is FaultCode.X_SHAPE:
        sizes = [str(n) for n in v[1 : 1 + v[0]]]
        shape = ", ".join(["...", *sizes] if v[0] > len(sizes) else sizes)
        return f"x must have the shape [..., hidden_size={config.hidden_size}], got [{shape}]"
    if code is FaultCode.MASK_SHAPE:
        wanted = "token_mask must have the shape of x without its last dimension"
        if v[0] < 0:
            return f"{wanted}: {v[1]} dimensions, got {v[2]}"
        return f"{wanted}: {v[1]} in dimension {v[0]}, got {v[2]}"
    if code is FaultCode.X_DTYPE:
        if v[1] == ANY_FLOAT:
            return f"x must have a floating dtype, got {_dtype_name(v[0])}"
        return (
            f"x must have the dtype of the experts, {_dtype_name(v[1])}, got {_dtype_name(v[0])}; convert one of them "
            f"or use torch.autocast"
        )
    if code is FaultCode.MASK_DTYPE:
        return f"token_mask must be torch.bool, got {_dtype_name(v[0])}"
    owner = "the dispatcher's device" if code is FaultCode.X_DEVICE else "the device of x"
    return f"{name} must be on {_device_name(*v[2:4])}, {owner}, got {_device_name(*v[:2])}"


def _argument(code: FaultCode) -> str:
    """Name of the argument that a code is about."""
    names = {
        "TOKENS": "tokens", "IDX": "topk_idx", "WEIGHTS": "topk_weights", "OUTPUT": "expert_output",
        "X": "x", "MASK": "token_mask",
    }  # fmt: skip
    return names[code.name.split("_")[0]]
