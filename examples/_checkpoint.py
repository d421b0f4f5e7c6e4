"""Checkpoints that are whole or absent: saved in the background, verified before they are read.

A checkpoint is a folder `step-00000010` of torch.distributed.checkpoint. Its manifest.json holds
the sizes and checksums of the files and is written last, when all ranks have written theirs. A
folder without a manifest is not a checkpoint. All ranks have to see the same folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _documents import UserError
from _mesh import Ranks
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.staging import BlockingAsyncStager

MANIFEST = "manifest.json"
FACTS = {"step", "world_size", "files"}  # of every manifest
CHUNK = 1 << 24  # bytes read at a time
NAME = re.compile(r"step-(\d{8,})")


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, the oldest first, without what a user keeps beside them."""
    found = [manifest.parent for manifest in folder.glob(f"step-*/{MANIFEST}")]
    return sorted((path for path in found if _step_of(path) is not None), key=_step_of)


def _step_of(path: Path) -> int | None:
    """Return the step of a checkpoint's folder by its name; None if it is not such a name."""
    match = NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: where they lie; folders of saves that were cut short are removed from it.
        ranks: this rank's place.
        keep: number of checkpoints that are kept, the newest.
    """

    def __init__(self, folder: Path, ranks: Ranks, keep: int):
        self._folder = folder
        self._ranks = ranks
        self._keep = keep
        self._thread: Thread | None = None
        self._error: str | None = None
        # It keeps the pinned memory of a rank's part of the state, which the first save allocates
        # (DefaultStager would free it). `save` waits until an earlier one has been written from it.
        on_gpu = ranks.device.type == "cuda"
        self._stager = BlockingAsyncStager(cache_staged_state_dict=True) if on_gpu else None
        ranks.on_first(self._remove_unfinished)

    def _remove_unfinished(self) -> None:
        for path in self._folder.glob("step-*"):
            if _step_of(path) is not None and path.is_dir() and not (path / MANIFEST).exists():
                shutil.rmtree(path)

    def found(self) -> list[Path]:
        """Return the checkpoints, the oldest first."""
        return checkpoints_in(self._folder)

    # ------------------------------------------------------------------------------- saving

    def save(self, state: dict[str, Any], step: int, facts: Mapping[str, Any]) -> None:
        """Copy the state to the host and start to write it; wait for an earlier save first.

        Args:
            state: for `torch.distributed.checkpoint`; may change once this has returned.
            step: optimizer steps that were made.
            facts: plain values for the manifest.
        """
        self._join()
        path = self._folder / f"step-{step:08d}"
        saved = dcp.async_save(
            state,
            checkpoint_id=path,
            process_group=self._ranks.saving_group,
            async_stager=self._stager,
        )
        facts = {"step": step, "world_size": self._ranks.world_size, **facts}
        self._thread = Thread(target=self._finish, args=(saved, path, facts), name=path.name)
        self._thread.start()

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way; asks nothing of the file system, which may be busy."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> str | None:
        """Wait for the save that is under way.

        Returns:
            Why the last save failed, if it did and this was not asked before; the same on all
            ranks.
        """
        self._join()
        error, self._error = self._error, None
        return error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _finish(self, saved: Future, path: Path, facts: dict[str, Any]) -> None:
        """Make a checkpoint of what was written, or remove it. Runs in the thread of the save."""
        try:
            saved.result()
            mine: dict[str, Any] | str = _checksums(self._files_of_this_rank(path))
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            mine = _reason(error)
        group = self._ranks.saving_group
        outcomes: list[Any] = [None] * self._ranks.world_size
        dist.all_gather_object(outcomes, mine, group=group)
        errors = [outcome for outcome in outcomes if isinstance(outcome, str)]
        verdict = [errors[0] if errors else None]
        if self._ranks.is_first:
            if not errors:
                files = {name: sums for outcome in outcomes for name, sums in outcome.items()}
                verdict = [self._commit(path, {**facts, "files": files})]
            if verdict[0] is not None:
                shutil.rmtree(path, ignore_errors=True)
        dist.broadcast_object_list(verdict, src=0, group=group)
        if verdict[0] is not None:
            self._error = f"{path.name} was not saved: {verdict[0]}"

    def _files_of_this_rank(self, path: Path) -> list[Path]:
        mine = sorted(path.glob(f"__{self._ranks.rank}_*"))
        return [*mine, path / ".metadata"] if self._ranks.is_first else mine

    def _commit(self, path: Path, manifest: dict[str, Any]) -> str | None:
        """Write the manifest and remove old checkpoints; return why there is none, if so."""
        try:
            unfinished = path / f"{MANIFEST}.unfinished"
            with unfinished.open("w", encoding="utf-8") as file:
                json.dump(manifest, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(path / MANIFEST)
        except OSError as error:
            return str(error)
        for old in self.found()[: -self._keep]:
            try:
                (old / MANIFEST).unlink()  # first, so that half a checkpoint is none
            except OSError as error:  # the user protects it, say; the new one is whole
                warnings.warn(f"{old} cannot be removed and is kept: {error}", stacklevel=1)
                continue
            shutil.rmtree(old, ignore_errors=True)
        return None

    # ------------------------------------------------------------------------------- loading

    def newest(self) -> dict[str, Any]:
        """Return the manifest of the newest checkpoint, after reading all of its files.

        Each rank reads its share.

        Raises:
            UserError: there is none, or a file of it is missing or damaged; on all ranks.
        """
        path, manifest = self._ranks.on_first(self._read_newest)
        names = sorted(manifest["files"])[self._ranks.rank :: self._ranks.world_size]
        damages: list[Any] = [None] * self._ranks.world_size
        mine = [
            damage for name in names if (damage := _damage(path / name, manifest["files"][name]))
        ]
        dist.all_gather_object(damages, mine, group=self._ranks.host_group)
        found = [damage for rank in damages for damage in rank]
        if found:
            raise UserError(f"{found[0]}; move {path} away to resume from an earlier checkpoint")
        return {**manifest, "path": path}

    def _read_newest(self) -> tuple[Path, dict[str, Any]]:
        if not self.found():
            raise UserError(f"--resume {self._folder.parent}: no checkpoint in {self._folder}")
        path = self.found()[-1]
        remedy = f"move {path} away to resume from an earlier checkpoint"
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path / MANIFEST}: cannot be read ({error}); {remedy}") from error
        missing = FACTS - set(manifest if isinstance(manifest, dict) else ())
        if missing:
            raise UserError(f"{path / MANIFEST}: lacks {', '.join(sorted(missing))}; {remedy}")
        return path, manifest

    def load(self, state: dict[str, Any], manifest: Mapping[str, Any]) -> None:
        """Read the checkpoint of a manifest from `newest` into the tensors of `state`.

        Raises:
            UserError: the checkpoint cannot be read, or is that of another model; on all ranks.
        """
        path = manifest["path"]
        try:
            dcp.load(state, checkpoint_id=path, process_group=self._ranks.saving_group)
        except (CheckpointException, RuntimeError, ValueError) as error:
            raise UserError(
                f"{path}: cannot be loaded ({_reason(error)}); the config.json of "
                f"{self._folder.parent / 'data'} must be that of the saved run"
            ) from error


def _checksums(files: list[Path]) -> dict[str, tuple[int, int]]:
    """Return size and CRC-32 of each file, by name."""
    return {file.name: (file.stat().st_size, _crc(file)) for file in files}


def _crc(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _damage(file: Path, written: tuple[int, int]) -> str | None:
    """Return how a file differs from what was written, if it does."""
    size, crc = written
    try:
        if file.stat().st_size != size:
            return f"{file}: {file.stat().st_size:,} bytes, {size:,} were written"
        if _crc(file) != crc:
            return f"{file}: its checksum is not that of what was written"
    except OSError as error:
        return f"{file}: {error.strerror}"
    return None


def _reason(error: BaseException) -> str:
    """Return the error in one line, with the rank that had it."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {cause}"
    return str(error) or type(error).__name__
