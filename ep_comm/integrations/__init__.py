"""ep_comm under models of other frameworks: one module a framework, imported by nothing but its user.

    ep_comm.integrations.transformers    Hugging Face Transformers
    ep_comm.integrations.torchtitan      torchtitan
    ep_comm.integrations.routing         record and replay the routing of a step, whatever the framework

Importing ``ep_comm`` or this package imports no framework. Importing one of its modules does, and where the
framework is missing or too old that raises one :class:`MissingPackageError` which names the version needed.
"""

from __future__ import annotations

from .optional import MissingPackageError

__all__ = ["MissingPackageError"]
