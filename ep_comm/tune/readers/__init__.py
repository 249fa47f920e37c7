"""Routing traces of several formats, read as one stream of :class:`Record`."""

from __future__ import annotations

from .record import Layer, Reading, Record

__all__ = ["Layer", "Reading", "Record"]
