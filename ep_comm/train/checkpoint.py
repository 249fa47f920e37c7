"""Checkpoints: one file a rank, written so that a crash never leaves half of one behind.

run/latest                      name of the newest complete checkpoint
run/step_000060/rank_0.pt       everything rank 0 needs to go on as if nothing had happened
run/step_000060/rank_1.pt
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigError, EPError

__all__ = ["CheckpointError", "find_checkpoint", "load_checkpoint", "save_checkpoint"]

_KEEP = 2
_FORMAT = 1


class CheckpointError(EPError):
    """A checkpoint cannot be written or read."""


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], rank: int, group: dist.ProcessGroup) -> Path:
    """Write the checkpoint of ``step``, keep the newest two. Collective: every rank writes its own ``state``.

    The folder must be shared between the hosts.

    Raises:
        CheckpointError: on all ranks, if any rank could not write.
    """
    final = folder / f"step_{step:06d}"
    draft = folder / f".{final.name}.writing"
    error = ""
    try:
        draft.mkdir(parents=True, exist_ok=True)
        _write(draft / f"rank_{rank}.pt", {"format": _FORMAT, "step": step, **state})
    except (OSError, RuntimeError) as caught:
        error = f"rank {rank} cannot write {draft}: {caught}"
    _raise_together(error, group)
    if rank == 0:
        try:
            if final.exists():
                shutil.rmtree(final)
            os.replace(draft, final)
            _point_to(folder, final.name)
            _remove_old(folder, final.name)
        except OSError as caught:
            error = f"rank 0 cannot finish {final}: {caught}"
    _raise_together(error, group)
    return final


def find_checkpoint(folder: Path) -> Path:
    """The checkpoint meant by ``--resume``: a ``step_...`` folder itself, or the latest one of a run.

    Raises:
        CheckpointError: there is none.
    """
    if (folder / "rank_0.pt").is_file():
        return folder
    pointer = folder / "latest"
    if pointer.is_file():
        found = folder / pointer.read_text(encoding="utf-8").strip()
        if (found / "rank_0.pt").is_file():
            return found
        raise CheckpointError(f"{pointer} names {found.name}, which is not a complete checkpoint")
    raise CheckpointError(f"no checkpoint in {folder}: expected a file 'latest' or 'rank_0.pt' there")


def load_checkpoint(
    folder: Path, rank: int, world_size: int, identity: dict[str, Any], fingerprint: str
) -> dict[str, Any]:
    """Read this rank's part and check that it belongs to this run.

    Args:
        folder: the run's folder or one of its checkpoints.
        identity: the options that must be equal, from :meth:`TrainOptions.identity`.
        fingerprint: of the text, from :class:`ByteCorpus`.

    Raises:
        ConfigError: another world size, other options or another text than the saved run's.
        CheckpointError: missing or damaged.
    """
    found = find_checkpoint(folder)
    saved_ranks = len(list(found.glob("rank_*.pt")))
    if saved_ranks != world_size:
        raise ConfigError(f"--resume {folder}: saved with {saved_ranks} ranks, but this run has {world_size}")
    file = found / f"rank_{rank}.pt"
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file fails in many ways: zip, pickle, or missing keys
        raise CheckpointError(f"{file} cannot be read ({type(error).__name__}: {error})") from error
    if state.get("format") != _FORMAT:
        raise CheckpointError(f"{file} has format {state.get('format')!r}; this version reads format {_FORMAT}")
    _compare(folder, state["identity"], identity)
    if state["fingerprint"] != fingerprint:
        raise ConfigError(
            f"--resume {folder}: the text differs from the saved run's (fingerprint {state['fingerprint']} "
            f"there, {fingerprint} here). Give the same --data, --max-bytes and --sequence-length"
        )
    return state


def _compare(folder: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    names = sorted(saved.keys() | wanted.keys())
    differing = [
        f"{name} {saved.get(name)!r} there, {wanted.get(name)!r} here"
        for name in names
        if saved.get(name) != wanted.get(name)
    ]
    if differing:
        raise ConfigError(f"--resume {folder}: the saved run differs: {'; '.join(differing)}")


def _write(file: Path, state: dict[str, Any]) -> None:
    temporary = file.with_suffix(".tmp")
    with open(temporary, "wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, file)


def _point_to(folder: Path, name: str) -> None:
    temporary = folder / "latest.tmp"
    temporary.write_text(name + "\n", encoding="utf-8")
    os.replace(temporary, folder / "latest")


def _remove_old(folder: Path, newest: str) -> None:
    # By time, not by name: a run resumed from an older checkpoint writes smaller step numbers again.
    complete = [path for path in folder.glob("step_*") if path.is_dir() and path.name != newest]
    complete.sort(key=lambda path: path.stat().st_mtime)
    for path in complete[: max(0, len(complete) - (_KEEP - 1))]:
        shutil.rmtree(path, ignore_errors=True)


def _raise_together(error: str, group: dist.ProcessGroup) -> None:
    errors: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, error, group=group)
    first = next((text for text in errors if text), None)
    if first is not None:
        raise CheckpointError(f"checkpoint: {first}")
