"""The ``ep-comm`` program. One file a command; :mod:`ep_comm.cli.main` joins them."""

from __future__ import annotations
