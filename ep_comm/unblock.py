"""Makes a collective that waits for a lost rank return with an error.

nccl can abort its communicators. gloo cannot: its ``abort`` does nothing, and a blocked call returns only when a
connection breaks or the timeout strikes. So every rank shuts down the gloo connections that it accepted; as each
connection is accepted by one of its ends, all of them break. Kernels that wait for a peer by themselves are told
by whoever launched them, see :func:`on_break`.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

import torch.distributed as dist

__all__ = ["Stoppable", "break_connections", "on_break"]

_ACTION_SECONDS = 2.0
_LISTEN, _ESTABLISHED = "0A", "01"


class Stoppable(Protocol):
    """Something that may wait for a peer."""

    def stop_waiting(self) -> None:
        """Let all waits end with an error, those that run and those to come. Called on another thread."""


_stoppables: WeakSet[Stoppable] = WeakSet()


def on_break(stoppable: Stoppable) -> None:
    """Stop it, too, when connections are broken. Does not keep it alive."""
    _stoppables.add(stoppable)


def break_connections() -> None:
    """Abort nccl, end the waits of everything given to :func:`on_break`, and shut down the TCP connections that this
    process accepted, except those of a TCPStore.

    Afterwards the process groups are good for nothing but being destroyed. On systems other than Linux only
    nccl is aborted.
    """
    groups = list(dist.distributed_c10d._world.pg_names)
    backends = {dist.distributed_c10d._world.pg_map[group][0] for group in groups if group in _group_map()}
    _in_time([stoppable.stop_waiting for stoppable in list(_stoppables)])
    if any("nccl" in backend for backend in backends):
        _in_time([group.abort for group in groups])
    if any("gloo" in backend for backend in backends) and sys.platform.startswith("linux"):
        _shut_down_accepted(_store_ports())


def _in_time(actions: list[Callable[[], None]]) -> None:
    """Do all of it at once, and give up on what takes long: the caller has more to do.

    NCCL's abort ends its kernels at once, but returns only when nothing holds them any more, a CUDA graph that
    somebody else made, say. And the CUDA driver may make a call wait for one on another thread.
    """
    threads = [threading.Thread(target=action, name="ep_comm unblock", daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _ACTION_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _group_map() -> dict[dist.ProcessGroup, object]:
    return dist.distributed_c10d._world.pg_map


def _store_ports() -> set[int]:
    ports = set()
    for _, store in _group_map().values():
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        if isinstance(store, dist.TCPStore):
            ports.add(store.port)
    return ports


def _shut_down_accepted(spared: set[int]) -> None:
    """Shut down every connection to a port on which this process listens."""
    descriptors = _socket_descriptors()
    own = [entry for entry in _tcp_table() if entry[2] in descriptors]
    listening = {port for port, state, _ in own if state == _LISTEN} - spared
    for port, state, inode in own:
        if state == _ESTABLISHED and port in listening:
            _shut_down(descriptors[inode])


def _socket_descriptors() -> dict[str, int]:
    """Descriptor of every socket of this process by its inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            found[target[len("socket:[") : -1]] = int(name)
    return found


def _tcp_table() -> list[tuple[int, str, str]]:
    """Local port, state and inode of every TCP socket of this network namespace."""
    table = []
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{name}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue  # no IPv6
        for line in lines:
            words = line.split()
            table.append((int(words[1].rpartition(":")[2], 16), words[3], words[9]))
    return table


def _shut_down(descriptor: int) -> None:
    try:
        # A duplicate, because the original belongs to gloo; shutting down acts on the connection itself.
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other end was faster
