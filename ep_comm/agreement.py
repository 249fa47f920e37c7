"""What all ranks must agree on: the configuration once, the status words at every exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from .config import EPConfig
from .errors import ArgumentError, ConfigError, HandleError, PeerLostError
from .status import DTYPES, HEADER_WORDS, Fault, FaultCode, Operation, Word, error_from_words

if TYPE_CHECKING:
    from .dispatcher import Dispatcher

__all__ = ["compare_configs", "raise_reported"]


def compare_configs(config: EPConfig, group: dist.ProcessGroup | None, rank: int) -> None:
    """Raise on every rank if the configurations of the group's ranks are not all equal.

    Raises:
        ConfigError: names the fields that differ and their value on each rank.
        PeerLostError: a rank did not construct its dispatcher.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    configs: list[dict | None] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(configs, config.to_dict(), group=group)
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {rank}: comparing configurations failed; a rank died or did not construct its dispatcher "
            f"within the process group's timeout: {error}"
        ) from error
    different = [
        f"{name}: " + ", ".join(f"rank {r} has {values[name]!r}" for r, values in enumerate(configs))
        for name in config.to_dict()
        if any(values[name] != configs[0][name] for values in configs)
    ]
    if different:
        raise ConfigError(
            f"rank {rank}: the config must be equal on all ranks of the group; different are " + "; ".join(different)
        )


def raise_reported(
    dispatcher: Dispatcher, matrix_PX: Tensor, operation: Operation, own: Fault | None, *, recorded: bool
) -> None:
    """Raise, on every rank alike, what any rank reported in its status words.

    Args:
        matrix_PX: exchanged messages, on the host.
        operation: what this rank is doing.
        own: this rank's fault, which knows details that did not travel.
        recorded: ids out of range are left to the step's check.
    """
    words_PX = matrix_PX[:, :HEADER_WORDS].tolist()
    rank = dispatcher.rank
    mine = words_PX[rank]
    for other, words in enumerate(words_PX):
        if words[Word.OPERATION] != operation:
            raise HandleError(
                f"rank {rank}: ranks are out of step: rank {other} is in "
                f"{Operation(words[Word.OPERATION]).name.lower()} while rank {rank} is in {operation.name.lower()} of "
                f"{dispatcher.name}; all ranks must make the same calls in the same order"
            )
    for other, words in enumerate(words_PX):
        code = words[Word.FAULT]
        if code and not (recorded and code == FaultCode.EXPERT_ID):
            detail = own.detail if own is not None and other == rank else ""
            raise error_from_words(words[Word.FAULT :], other, dispatcher.config, detail)
    for other, words in enumerate(words_PX):
        if words[Word.DTYPE] != mine[Word.DTYPE]:
            what = "tokens" if operation is Operation.DISPATCH else "expert_output"
            raise ArgumentError(
                f"rank {rank}: {what} must have one dtype on all ranks: rank {rank} has "
                f"{DTYPES[mine[Word.DTYPE]]}, rank {other} has {DTYPES[words[Word.DTYPE]]}"
            )
        if operation is Operation.COMBINE and words[Word.SEQUENCE] != mine[Word.SEQUENCE]:
            raise HandleError(
                f"rank {rank}: handle is of dispatch {mine[Word.SEQUENCE]} of {dispatcher.name}, rank {other} "
                f"combines dispatch {words[Word.SEQUENCE]}; all ranks must combine the same dispatch"
            )
