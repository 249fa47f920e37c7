"""Entering a dispatch into its dispatcher's record on the device, in one kernel."""

from __future__ import annotations

from torch import Tensor

from .kernels import CudaKernels

__all__ = ["note_dispatch"]


def note_dispatch(
    kernels: CudaKernels,
    matrix_PX: Tensor,
    required_P: Tensor,
    overflow: Tensor,
    words: Tensor | None,
    sent: Tensor,
    rank: int,
) -> None:
    """The updates of :func:`ep_comm.ledger.note_dispatch`.

    Args:
        matrix_PX: int32, contiguous, the messages of all ranks.
        required_P: int64, rows that every rank needs.
        overflow: one element, bool or int32.
        words: int64, of a record; None where only ``sent`` is wanted.
        sent: int64, one element.
    """
    num_ranks, width = matrix_PX.shape
    kernels.launch(
        "record.cu", "note_dispatch", {}, 1, 256,
        (matrix_PX, width, required_P, overflow, overflow.element_size(), words, sent, rank, num_ranks),
    )  # fmt: skip
