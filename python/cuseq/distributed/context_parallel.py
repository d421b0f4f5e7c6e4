"""`ContextParallel`: a rank's place in a group that shares packed rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cuseq._base.arguments import as_int, check_tensor, one_of, shown
from cuseq._base.labels import IGNORE_INDEX, shifted
from cuseq.distributed._groups import check_group, device_without_wait
from cuseq.distributed.plan import (
    HEAD_DIM,
    HEADS,
    POLICIES,
    ContextParallelPlan,
    checked_heads,
    cp_plan,
)
from cuseq.layout import PackedLayout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# The keys of a rank's batch that describe the whole row.
_OF_THE_ROW = ("num_label_tokens", "row_checksum")


class ContextParallel:
    """This rank's place among the ranks that share packed rows, and how rows are dealt to them.

    Give it to `PackingCollator(cp=...)`. It holds numbers and the group's name, no group, so that
    it goes to the workers of a DataLoader, which need no process group.

    Args:
        mesh_or_group: a DeviceMesh of one dimension, such as `mesh["cp"]`, or a process group. Best
            another group than the one that FSDP2 shards over, since the collectives of a group run
            one after the other. A dimension that spans all ranks is the default group, unless
            `init_device_mesh` gets a `backend_override` for it.
        policy: as for `cp_plan`.
        heads: numbers of query and key heads of the model, as for `cp_plan`.
        head_dim: elements of a head, as for `cp_plan`.
        config: the config of a transformers model, which has both; instead of them.

    Raises:
        ValueError: `config` comes with `heads` or `head_dim`, or lacks the number of heads; the
            mesh has several dimensions, its group is destroyed, this process is not in
            the group, or an argument is outside its range.
        TypeError: an argument has the wrong type.

    Examples:
        >>> mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "cp"))  # doctest: +SKIP
        >>> cp = cuseq.distributed.ContextParallel(mesh["cp"])  # doctest: +SKIP
        >>> collate = cuseq.PackingCollator(total_tokens=65_536, cp=cp)  # doctest: +SKIP
    """

    def __init__(
        self,
        mesh_or_group: DeviceMesh | ProcessGroup,
        *,
        policy: str = "auto",
        heads: Sequence[int] | None = None,
        head_dim: int | None = None,
        config: Any = None,
    ):
        if config is not None:
            if heads is not None or head_dim is not None:
                raise ValueError(
                    f"config must be given without heads and head_dim, got {heads} and {head_dim}"
                )
            heads, head_dim = _heads_of(config)
        group = _group_of(mesh_or_group)
        self.rank: int = torch.distributed.get_rank(group)
        self.size: int = torch.distributed.get_world_size(group)
        if self.rank < 0:
            raise ValueError("mesh_or_group must contain this process, got a group without it")
        self.ranks: tuple[int, ...] = tuple(torch.distributed.get_process_group_ranks(group))
        self.group_name: str = group.group_name
        self.policy = one_of(policy, "policy", POLICIES)
        self.heads = HEADS if heads is None else checked_heads(heads)
        self.head_dim = HEAD_DIM if head_dim is None else as_int(head_dim, "head_dim", least=1)

    def __setstate__(self, pickled: Any) -> None:
        """Check what a pickle says: a DataLoader's worker has no group to compare it with."""
        names = ("rank", "size", "ranks", "group_name", "policy", "heads", "head_dim")
        if not isinstance(pickled, dict) or set(pickled) != set(names):
            raise ValueError(f"pickled must hold {', '.join(names)}, got {shown(pickled)}")
        self.size = as_int(pickled["size"], "size", least=1)
        self.rank = as_int(pickled["rank"], "rank", least=0)
        self.ranks = tuple(as_int(rank, "ranks", least=0) for rank in pickled["ranks"])
        if self.rank >= self.size or len(set(self.ranks)) != self.size:
            raise ValueError(
                f"ranks must be {self.size} ranks, and rank one of their numbers, got "
                f"{self.ranks} and {self.rank}"
            )
        if not isinstance(pickled["group_name"], str):
            raise TypeError(f"group_name must be a string, got {shown(pickled['group_name'])}")
        self.group_name = pickled["group_name"]
        self.policy = one_of(pickled["policy"], "policy", POLICIES)
        self.heads = checked_heads(pickled["heads"])
        self.head_dim = as_int(pickled["head_dim"], "head_dim", least=1)

    def plan(self, packed: PackedLayout) -> ContextParallelPlan:
        """Return the plan of a row, which is the same on all ranks."""
        return cp_plan(
            packed,
            self.size,
            policy=self.policy,
            heads=self.heads,
            head_dim=self.head_dim,
        )

    @staticmethod
    def num_items(
        batches: Iterable[Mapping[str, Any]], group: ProcessGroup | None = None
    ) -> Tensor:
        """Count the labels of a step on all ranks that the loss does not leave out.

        Divide each rank's sum of token losses by this number. DDP and FSDP average gradients over
        the ranks: with them also multiply the loss by the number of ranks.

        Args:
            batches: this rank's batches of one optimizer step, with the `shift_labels` that
                `PackingCollator(cp=...)` makes. Ranks may have different numbers of batches, even
                none.
            group: the group of all ranks that hold different tokens: data parallel times context
                parallel. Default: all ranks.

        Returns:
            int64 `[]` on the device of the group's backend: with NCCL, alone or beside gloo, the
            GPU. One all-reduce of one number. The host waits for it only if gloo is all there is;
            labels on a GPU are then copied to the host first.

        Raises:
            ValueError: a batch has no `shift_labels`, or the group was not made or is destroyed.
            TypeError: an argument has the wrong type.

        Examples:
            >>> labels = torch.tensor([[5, -100, 7, -100]])
            >>> count = cuseq.distributed.ContextParallel.num_items
            >>> count([{"shift_labels": labels}])  # doctest: +SKIP
            tensor(2)
        """
        check_group(group)
        if not isinstance(batches, Iterable):
            raise TypeError(f"batches must be an iterable of batches, got {shown(batches)}")
        counts = []
        for number, batch in enumerate(batches):
            if not isinstance(batch, Mapping) or "shift_labels" not in batch:
                raise ValueError(
                    f"batches must have shift_labels, as PackingCollator(cp=...) makes them, got "
                    f"{sorted(batch) if isinstance(batch, Mapping) else shown(batch)} as "
                    f"batches[{number}]"
                )
            labels = batch["shift_labels"]
            check_tensor(labels, f"shift_labels of batches[{number}]")
            counts.append((labels != IGNORE_INDEX).sum())
        # The type never follows the labels: a rank without batches would choose another one and
        # hang. They only choose among GPUs, for a process that uses another than the current one.
        kind = device_without_wait(group)
        on_kind = (count.device for count in counts if count.device.type == kind)
        device = next(on_kind, kind)
        kept = torch.zeros((), dtype=torch.int64, device=device)
        for count in counts:
            kept += count.to(device, non_blocking=kind != "cpu")
        torch.distributed.all_reduce(kept, group=group)
        return kept

    @classmethod
    def step_inputs(
        cls, batches: Iterable[Mapping[str, Any]], group: ProcessGroup | None = None
    ) -> list[dict[str, Any]]:
        """Return the batches of an optimizer step as a model of transformers takes them.

        They have `num_items_in_batch`, the labels of the step on all ranks, so that the losses of
        all batches of all ranks add up to the mean over these labels. DDP and FSDP average over the
        ranks: with them multiply each loss by the number of ranks. They lack the numbers of their
        whole rows (`model_inputs`), and have `shift_labels`, made of `labels` where a collator
        without `cp` made the batch.

        Args:
            batches, group: as for `num_items`, or of a collator without `cp`.

        Raises:
            ValueError: a batch has neither `shift_labels` nor `labels`, or as `num_items`.
            TypeError: an argument has the wrong type.

        It waits as `num_items` does.

        Examples:
            >>> step = cuseq.distributed.ContextParallel.step_inputs
            >>> for batch in step(batches):  # doctest: +SKIP
            ...     (model(**batch).loss * world_size).backward()
        """
        made = [_with_shifted(one) for one in batches] if isinstance(batches, Iterable) else batches
        kept = {"num_items_in_batch": cls.num_items(made, group)}
        return [cls.model_inputs(batch) | kept for batch in made]

    @staticmethod
    def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch of `PackingCollator(cp=...)` without the numbers of its whole row.

        Those are ints, new in each row: a model does not take them, and compiled code and a
        `GraphedStep` would hold them as constants.

        Examples:
            >>> batch = {"input_ids": torch.tensor([[5, 7]]), "num_label_tokens": 9}
            >>> cuseq.distributed.ContextParallel.model_inputs(batch)
            {'input_ids': tensor([[5, 7]])}
        """
        return {name: value for name, value in batch.items() if name not in _OF_THE_ROW}

    def __eq__(self, other: object) -> bool:
        """Return whether both stand for the same rank of the same group and deal rows alike."""
        return isinstance(other, ContextParallel) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.group_name, self.rank))

    def __repr__(self) -> str:
        return f"ContextParallel(rank {self.rank} of {self.size}, {self.policy})"


def _with_shifted(batch: Any) -> Any:
    """Return a batch with `shift_labels`, if it has labels; `num_items` refuses others."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or "shift_labels" in batch:
        return batch
    if getattr(batch.get("packed"), "part", None) is not None:  # another rank has the next label
        raise ValueError(
            "batches must have shift_labels where ranks share rows, as PackingCollator(cp=...) "
            "makes them"
        )
    return {**batch, "shift_labels": shifted(labels)}


def _heads_of(config: Any) -> tuple[tuple[int, int], int]:
    """Return the numbers of query and key heads, and head_dim, of a transformers model's config."""
    of_text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if (heads := getattr(of_text, "num_attention_heads", None)) is None:
        raise ValueError(
            f"config must have num_attention_heads, got {type(of_text).__name__}: give heads and "
            "head_dim"
        )
    key_heads = getattr(of_text, "num_key_value_heads", None) or heads
    head_dim = getattr(of_text, "head_dim", None) or of_text.hidden_size // heads
    return (heads, key_heads), head_dim


def _group_of(mesh_or_group: Any) -> ProcessGroup:
    is_group = isinstance(mesh_or_group, ProcessGroup)
    if not is_group:
        _check_mesh(mesh_or_group)
    try:
        group = mesh_or_group if is_group else mesh_or_group.get_group()
        torch.distributed.get_rank(group)
    except (KeyError, RuntimeError, ValueError) as error:
        raise ValueError(
            "mesh_or_group must be of a process group that exists, which destroy_process_group "
            f"ends, got {shown(mesh_or_group)}: {error}"
        ) from error
    return group


def _check_mesh(mesh: Any) -> None:
    if not torch.distributed.is_available() or not hasattr(mesh, "get_group"):
        raise TypeError(f"mesh_or_group must be a DeviceMesh or a ProcessGroup, got {shown(mesh)}")
    if mesh.ndim != 1:
        raise ValueError(
            'mesh_or_group must have one dimension, such as mesh["cp"], got '
            f"{mesh.ndim}: {shown(mesh)}"
        )
