"""One token row on the wire: where payload, scalars and destination rows stand in its bytes.

    | payload: H elements, or H element bytes + scale bytes | scalars: K fp32 | rows: K int32 | places: K int16 |

Every part starts at a multiple of 16 bytes and the row's length is one too, so that rows of one buffer can be
viewed as any dtype and copied 16 bytes at a time. One buffer, one transfer.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from .. import devices
from ..config import round_up
from ..mxfp8 import MXFP8Tensor, dequantize_packed, pack_mxfp8, unpack_mxfp8, wire_payload_bytes
from .base import RowFormat

__all__ = ["WireBuffers", "WireLayout", "wire_layout"]

_UNIT = 16


class WireBuffers(threading.local):
    """Where wire rows are put together and arrive.

    On a CPU a large fresh buffer costs more than filling it, because the kernel has to map its pages one by one.
    Nothing outlives the call that uses a buffer there, so each place keeps one and makes it larger when
    needed. A thread has its own, as dispatchers of several threads may share this object, and a backward pass may
    run on a thread of autograd's. On other devices PyTorch's allocator does this, and knows about streams.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, place: str, num_rows: int, row_bytes: int, device: torch.device) -> Tensor:
        """An uninitialised buffer, uint8 ``[num_rows, row_bytes]``, valid until this thread takes ``place`` again."""
        if not devices.host_reads_are_free(device):
            return torch.empty(num_rows, row_bytes, dtype=torch.uint8, device=device)
        size = num_rows * row_bytes
        kept = self._kept.get(place)
        if kept is None or kept.numel() < size:
            # Written again by later calls, which may not be in the inference mode that is on now.
            with torch.inference_mode(False):
                kept = self._kept[place] = torch.empty(size, dtype=torch.uint8, device=device)
        return kept[:size].view(num_rows, row_bytes)


@dataclass(frozen=True)
class WireLayout:
    """Byte offsets of the parts of one wire row.

    Attributes:
        hidden_size: H.
        top_k: K.
        row_format: how the payload is encoded.
        scalars: whether K fp32 scalars travel along.
        rows: whether K destination rows travel along.
        places: whether, of those rows, the rank travels along too: its place on its host.
    """

    hidden_size: int
    top_k: int
    row_format: RowFormat
    scalars: bool = False
    rows: bool = False
    places: bool = False

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of the payload, without the padding behind it."""
        return wire_payload_bytes(self.hidden_size, self.row_format.dtype.itemsize, self.row_format.mxfp8)

    @cached_property
    def scalars_at(self) -> int:
        """Offset of the scalars."""
        return round_up(self.payload_bytes, _UNIT)

    @cached_property
    def rows_at(self) -> int:
        """Offset of the destination rows."""
        return self.scalars_at + (round_up(4 * self.top_k, _UNIT) if self.scalars else 0)

    @cached_property
    def places_at(self) -> int:
        """Offset of the destinations' places."""
        return self.rows_at + (round_up(4 * self.top_k, _UNIT) if self.rows else 0)

    @cached_property
    def row_bytes(self) -> int:
        """W, bytes of a whole row."""
        return self.places_at + (round_up(2 * self.top_k, _UNIT) if self.places else 0)

    def pack(self, rows_TH: Tensor, out_TW: Tensor) -> None:
        """Write the payload of every row, quantised where the format says so."""
        if self.row_format.mxfp8:
            pack_mxfp8(rows_TH, self.row_format.rounding, out_TW)
        else:
            self.payload(out_TW).copy_(rows_TH)

    def payload(self, buffer_NW: Tensor) -> Tensor:
        """The unquantised payload as ``[N, H]``, a view."""
        return buffer_NW[:, : self.payload_bytes].view(self.row_format.dtype)

    def unpack(self, buffer_NW: Tensor) -> Tensor | MXFP8Tensor:
        """The payload as rows that can be handed out: a view, or dequantised rows."""
        if not self.row_format.mxfp8:
            return self.payload(buffer_NW)
        if self.row_format.keep_mxfp8:
            return unpack_mxfp8(buffer_NW, self.hidden_size)
        return dequantize_packed(buffer_NW, self.hidden_size, self.row_format.dtype)

    def scalar_view(self, buffer_NW: Tensor) -> Tensor:
        """The scalars, fp32 ``[N, K]``, a view."""
        return buffer_NW[:, self.scalars_at : self.scalars_at + 4 * self.top_k].view(torch.float32)

    def row_view(self, buffer_NW: Tensor) -> Tensor:
        """The destination rows, int32 ``[N, K]``, a view."""
        return buffer_NW[:, self.rows_at : self.rows_at + 4 * self.top_k].view(torch.int32)

    def place_view(self, buffer_NW: Tensor) -> Tensor:
        """The destinations' places on their host, int16 ``[N, K]``, a view."""
        return buffer_NW[:, self.places_at : self.places_at + 2 * self.top_k].view(torch.int16)


wire_layout = lru_cache(maxsize=256)(WireLayout)
"""The layout with these attributes; its offsets are worked out once, not in every call."""
