"""What all ranks must agree on: the configuration once, the status words at every exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from .config import EPConfig
from .errors import ArgumentError, ConfigError, HandleError, PeerLostError
from .status import DTYPES, HEADER_WORDS, Fault, FaultCode, Operation, Word, error_from_words

if TYPE_CHECKING:
    from .exchange import Exchange

__all__ = ["agree_on_dispatcher", "raise_reported"]


def agree_on_dispatcher(config: EPConfig, number: int, group: dist.ProcessGroup | None, rank: int) -> int:
    """Raise on every rank if the configurations differ; otherwise give the dispatcher its ordinal.

    Args:
        number: larger than that of every dispatcher this process made before.

    Returns:
        The largest ``number`` of all ranks: the same on all of them, and larger than that of every other
        dispatcher of the group.

    Raises:
        ConfigError: names the fields that differ and their value on each rank.
        PeerLostError: a rank did not construct its dispatcher.
    """
    if group is None or dist.get_world_size(group) == 1:
        return number
    facts: list[tuple[dict[str, Any], int]] = [({}, 0)] * dist.get_world_size(group)
    try:
        dist.all_gather_object(facts, (config.to_dict(), number), group=group)
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {rank}: comparing configurations failed; a rank died or did not construct its dispatcher "
            f"within the process group's timeout: {error}"
        ) from error
    configs = [values for values, _ in facts]
    different = [
        f"{name}: " + ", ".join(f"rank {r} has {values[name]!r}" for r, values in enumerate(configs))
        for name in config.to_dict()
        if any(values[name] != configs[0][name] for values in configs)
    ]
    if different:
        raise ConfigError(
            f"rank {rank}: the config must be equal on all ranks of the group; different are " + "; ".join(different)
        )
    return max(other for _, other in facts)


def raise_reported(exchange: Exchange, matrix_PX: Tensor, own: Fault | None, *, recorded: bool) -> None:
    """Raise, on every rank alike, what any rank reported in its status words.

    Args:
        matrix_PX: exchanged messages, on the host.
        own: this rank's fault, which knows details that did not travel.
        recorded: ids out of range are left to the step's check.
    """
    words_PX = matrix_PX[:, :HEADER_WORDS].tolist()
    rank = exchange.rank
    mine = words_PX[rank]
    for other, words in enumerate(words_PX):
        if words[Word.OPERATION] != mine[Word.OPERATION]:
            raise HandleError(
                f"rank {rank}: ranks are out of step: rank {other} is in {Operation.describe(words[Word.OPERATION])}, "
                f"rank {rank} in {Operation.describe(mine[Word.OPERATION])}; all ranks must make the same calls in the "
                f"same order"
            )
    for other, words in enumerate(words_PX):
        code = words[Word.FAULT]
        if code and not (recorded and code == FaultCode.EXPERT_ID):
            detail = own.detail if own is not None and other == rank else ""
            raise error_from_words(words[Word.FAULT :], other, exchange.config, detail, group=exchange.group)
    dispatching = mine[Word.OPERATION] & 3 == Operation.DISPATCH
    for other, words in enumerate(words_PX):
        if words[Word.DTYPE] != mine[Word.DTYPE]:
            raise ArgumentError(
                f"rank {rank}: {'tokens' if dispatching else 'expert_output'} must have one dtype on all ranks: rank "
                f"{rank} has {DTYPES[mine[Word.DTYPE]]}, rank {other} has {DTYPES[words[Word.DTYPE]]}"
            )
        if words[Word.AGREED] == mine[Word.AGREED]:
            continue
        if exchange.budget is not None:
            raise ConfigError(
                f"rank {rank}: pair_rows must be equal on all ranks of {exchange.name}: rank {rank} has "
                f"{mine[Word.AGREED]}, rank {other} has {words[Word.AGREED]}; call grow() and load_state_dict() on all "
                f"ranks alike"
            )
        if not dispatching:
            raise HandleError(
                f"rank {rank}: handle is of dispatch {mine[Word.AGREED]} of {exchange.name}, rank {other} "
                f"combines dispatch {words[Word.AGREED]}; all ranks must combine the same dispatch"
            )
