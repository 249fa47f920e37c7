"""Text for training: bytes of real files, cut into sequences whose order needs no state.

The sequences of a step are a pure function of ``(seed, step, rank, world_size)``. A resumed run, a
replayed step and an eager comparison run therefore read the same text without a data position to save.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from ..errors import ConfigError

__all__ = ["ByteCorpus", "load_corpus", "read_bytes"]

_VALIDATION_SHARE = 0.05
_SNIFF = 8192


class ByteCorpus:
    """A text as bytes, the last 5 % kept for validation.

    Args:
        data: uint8 tensor ``[bytes]``.
        sequence_length: bytes a sequence predicts; each sequence reads one byte more.
        seed: decides the order of the sequences.

    Attributes:
        num_sequences: training sequences an epoch; they do not overlap in what they predict.
        fingerprint: hash of the text and the sequence length, to recognise it on resuming.
    """

    def __init__(self, data: torch.Tensor, sequence_length: int, seed: int) -> None:
        self.sequence_length = sequence_length
        self.seed = seed
        held_out = max(int(len(data) * _VALIDATION_SHARE), sequence_length + 1)
        self._train, self._validation = data[:-held_out], data[-held_out:]
        self.num_bytes = len(data)
        self.num_sequences = (len(self._train) - 1) // sequence_length
        self.num_validation_sequences = (len(self._validation) - 1) // sequence_length
        self._order: tuple[int, torch.Tensor] | None = None
        digest = hashlib.sha256(f"{sequence_length} ".encode())
        digest.update(data.numpy().data)
        self.fingerprint = digest.hexdigest()[:16]

    def batch(self, step: int, rank: int, world_size: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of one step on one rank.

        Every sequence is read once an epoch, by one rank; then the order is drawn again.

        Args:
            step: training step, from 0.
            rank, world_size: which share of the step's ``world_size * size`` sequences to take.
            size: sequences a rank, ``B``.

        Returns:
            Two int64 tensors ``[B, C]``; the targets are the inputs shifted by one byte.
        """
        first = (step * world_size + rank) * size
        picks = [self._pick(index) for index in range(first, first + size)]
        return _cut(self._train, picks, self.sequence_length)

    def validation_batches(
        self, rank: int, world_size: int, size: int, batches: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """``batches`` batches as :meth:`batch` makes them, spread evenly over the held-out text."""
        wanted = batches * world_size * size
        for batch in range(batches):
            first = (batch * world_size + rank) * size
            picks = [
                (index * self.num_validation_sequences // wanted) % self.num_validation_sequences
                for index in range(first, first + size)
            ]
            yield _cut(self._validation, picks, self.sequence_length)

    def _pick(self, index: int) -> int:
        epoch, position = divmod(index, self.num_sequences)
        if self._order is None or self._order[0] != epoch:
            # A hash, because the generator only uses the low 32 bits of its seed.
            digest = hashlib.sha256(f"order {self.seed} {epoch}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
            self._order = (epoch, torch.randperm(self.num_sequences, generator=generator))
        return int(self._order[1][position])


def _cut(data: torch.Tensor, picks: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.stack([data[pick * length : pick * length + length + 1] for pick in picks]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def load_corpus(source: str | Path | None, sequence_length: int, seed: int, max_bytes: int) -> ByteCorpus:
    """Read the text to train on.

    Args:
        source: a file, a folder (read recursively), or ``None`` for the sources of Python's standard library.
        sequence_length: bytes a sequence.
        seed: order of the sequences.
        max_bytes: at most so many bytes are read.

    Raises:
        ConfigError: nothing there, nothing readable, or too little text for 20 sequences.
    """
    data = read_bytes(source, max_bytes)
    needed = 20 * (sequence_length + 1)
    if len(data) < needed:
        where = "Python's standard library" if source is None else str(source)
        raise ConfigError(
            f"data {where} holds {len(data)} bytes of text; at least {needed} are needed for 20 sequences of "
            f"{sequence_length} bytes (sequence length plus one)"
        )
    return ByteCorpus(torch.frombuffer(bytearray(data), dtype=torch.uint8), sequence_length, seed)


def read_bytes(source: str | Path | None, max_bytes: int) -> bytes:
    """Concatenate the text files of ``source`` in the order of their paths, up to ``max_bytes``.

    Hidden files and folders, and files with a zero byte near their beginning, are left out of a folder.
    """
    if max_bytes < 1:
        raise ConfigError(f"max_bytes must be at least 1, got {max_bytes}")
    if source is None:
        files = _standard_library()
    else:
        root = Path(source).expanduser()
        if root.is_file():
            files = [root]
        elif root.is_dir():
            files = _text_files(root)
        else:
            raise ConfigError(f"data {source} does not exist: name a text file or a folder of text files")
    pieces: list[bytes] = []
    left = max_bytes
    for file in files:
        try:
            with open(file, "rb") as stream:
                piece = stream.read(left)
        except OSError as error:
            if source is not None and len(files) == 1:
                raise ConfigError(f"data {file} cannot be read: {error.strerror}") from error
            continue
        pieces.append(piece)
        left -= len(piece)
        if left <= 0:
            break
    return b"".join(pieces)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise ConfigError(f"Python's standard library has no sources at {root}: name a text file or folder with --data")
    # Interleaving by a hash spreads every package over the text, so that the held-out end resembles the rest.
    return sorted(files, key=lambda file: hashlib.sha256(file.relative_to(root).as_posix().encode()).digest())


def _text_files(root: Path) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    found.sort(key=lambda file: file.relative_to(root).as_posix())
    return [file for file in found if _is_text(file)]


def _is_text(file: Path) -> bool:
    try:
        if not file.is_file():
            return False
        with open(file, "rb") as stream:
            return b"\0" not in stream.read(_SNIFF)
    except OSError:
        return False
