"""Transports: how rows get from rank to rank. See :mod:`ep_comm.transport.base` for the interface."""

from __future__ import annotations

import torch.distributed as dist

from ..config import EPConfig
from ..errors import ConfigError
from .base import Transport
from .collective import CollectiveTransport

__all__ = ["Transport", "open_transport"]


def open_transport(
    config: EPConfig, group: dist.ProcessGroup | None, rank: int, ep_size: int
) -> Transport:
    """The transport that ``config.transport`` asks for. Collective: all ranks get the same kind.

    Raises:
        ConfigError: the transport cannot serve this group.
    """
    if config.transport == "symmetric" and ep_size > 1:
        raise ConfigError(
            f"rank {rank}: transport='symmetric' is not available for this group; allowed here are 'auto' and "
            f"'collective'"
        )
    return CollectiveTransport(group, rank, ep_size)
