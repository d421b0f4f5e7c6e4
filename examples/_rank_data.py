"""The rows of one rank: a store of tokens that all ranks read, and a loader with a position."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from _documents import UserError
from _mesh import Ranks
from _model import ModelSource, find_model
from _modes import IGNORE_INDEX, Batch
from _prepare import Prepared
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset

import cuseq

TOKENS, LENGTHS = "tokens.npy", "lengths.npy"


class TokenStore(Dataset):
    """Sequences of tokens in two files, mapped into memory.

    Args:
        folder: what `write_store` wrote. It also holds the model's config and the tokenizer.

    Raises:
        UserError: a file is missing or damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.lengths = self._load(LENGTHS)
        self._tokens = self._load(TOKENS)
        self._ends = np.cumsum(self.lengths)
        if self._ends[-1] != len(self._tokens):
            raise UserError(
                f"{folder / TOKENS}: must hold {self._ends[-1]} tokens, as {LENGTHS} says, got "
                f"{len(self._tokens)}"
            )

    def _load(self, name: str) -> np.ndarray:
        try:
            return np.load(self.folder / name, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise UserError(f"{self.folder / name}: cannot be read ({error})") from error

    def source(self) -> ModelSource:
        """Return the model of the store's config, without a checkpoint's weights."""
        return find_model(str(self.folder / "config.json"))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        end = self._ends[index]
        tokens = self._tokens[end - self.lengths[index] : end]
        return {"input_ids": torch.from_numpy(tokens.astype(np.int64))}


def write_store(folder: Path, prepared: Prepared) -> None:
    """Write the sequences, the model's config and the tokenizer to an empty or new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    sequences = prepared.fitted.sequences
    np.save(folder / LENGTHS, np.array([len(sequence) for sequence in sequences]))
    np.save(folder / TOKENS, np.concatenate([np.array(s, dtype=np.int32) for s in sequences]))
    config = json.dumps(prepared.source.config.to_dict(), indent=2)
    (folder / "config.json").write_text(config, encoding="utf-8")
    prepared.tokenizer.save(str(folder / "tokenizer.json"))


class Collate:
    """Makes this rank's batch of the sequences of a row.

    A batch has `shift_labels` with and without context parallelism, and two host numbers: `tokens`,
    the tokens that are not padding, and `pairs`, the query-key pairs of their attention.

    Args:
        row_length: tokens of a whole row.
        cp: this rank's place among the ranks that share the row.
    """

    def __init__(self, row_length: int, cp: cuseq.distributed.ContextParallel | None):
        self._collate = cuseq.PackingCollator(total_tokens=row_length, cp=cp)

    def __call__(self, examples: list[Mapping[str, Any]]) -> Batch:
        batch = self._collate(examples)
        if "shift_labels" not in batch:
            batch["shift_labels"] = pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
        for name in (
            "num_label_tokens",
            "row_checksum",
        ):  # ints for which layers would compile anew
            batch.pop(name, None)
        real = ~batch["packed"].moe_padding_mask
        batch["tokens"] = int(real.sum())
        # A token sees all earlier tokens of its document, whichever rank holds them, and itself.
        batch["pairs"] = int(((batch["position_ids"][0] + 1) * real).sum())
        return batch


class RankRows:
    """This rank's rows, epoch after epoch, in lists of one optimizer step.

    Args:
        store: the sequences.
        ranks: this rank's place.
        row_length: tokens of a row.
        accumulation: rows in a step.
        seed: seed of the order.
        workers: processes that make batches.
        cp: as for `Collate`.

    Raises:
        UserError: the sequences do not fit rows of this length.
    """

    def __init__(
        self,
        store: TokenStore,
        ranks: Ranks,
        *,
        row_length: int,
        accumulation: int,
        seed: int,
        workers: int = 0,
        cp: cuseq.distributed.ContextParallel | None = None,
    ):
        self._accumulation = accumulation
        try:
            self._sampler = cuseq.data.PackedBatchSampler(
                store.lengths,
                row_length,
                rank=ranks.dp_rank,
                world_size=ranks.dp_size,
                balance="attention",
                accumulation=accumulation,
                seed=seed,
            )
        except ValueError as error:
            raise UserError(
                f"--row-length must fit the sequences in {store.folder}, got {row_length} "
                f"({error}); to resume, give the --row-length that the run began with"
            ) from error
        self._loader = DataLoader(
            store,
            batch_sampler=self._sampler,
            collate_fn=Collate(row_length, cp),
            num_workers=workers,
            worker_init_fn=outlive_signals,
            pin_memory=ranks.device.type == "cuda",
            generator=torch.Generator(),  # else each epoch draws from the training's numbers
        )
        self._used = 0  # batches of this epoch, which a worker may have run ahead of

    def __iter__(self) -> Iterator[list[Batch]]:
        """Yield the batches of each step; without an end."""
        while True:
            step: list[Batch] = []
            for batch in self._loader:
                step.append(batch)
                if len(step) == self._accumulation:
                    self._used += len(step)
                    yield step
                    step = []
            self._next_epoch()

    def _next_epoch(self) -> None:
        self._sampler.set_epoch(self._sampler.epoch + 1)
        self._used = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the steps that were yielded, the same on every rank."""
        return self._sampler.state_dict(steps=self._used)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after a position, that of another number of ranks too.

        Raises:
            UserError: the position is one of other sequences or other rows.
        """
        try:
            self._sampler.load_state_dict(state)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"the checkpoint's position in the data does not fit: {error}"
            ) from error
        self._used = self._sampler.state_dict()["step"]
        if self._used == len(self._sampler):
            self._next_epoch()


def outlive_signals(worker: int) -> None:
    """Let a process that makes batches go on when SIGTERM or SIGINT comes to all processes.

    torchrun, Slurm and terminals send them to these processes too, but their rank still needs
    batches until it stops. SIGTERM from the rank itself ends them as before.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        Thread(target=_end_by_signal_of, args=(os.getppid(),), daemon=True).start()


def _end_by_signal_of(rank: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)
