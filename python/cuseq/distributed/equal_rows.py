"""`equalize_tokens`, which lengthens rows to the longest row of all ranks."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from cuseq.distributed._groups import check_group, device_of
from cuseq.layout import PackedLayout, check_layout


def equalize_tokens(
    packed: PackedLayout | None, group: ProcessGroup | None = None
) -> PackedLayout | None:
    """Lengthen the row to the longest row of all ranks, as HybridEP and others need.

    This costs one all-reduce of one integer. Rows of a fixed `total_tokens` do not need it.

    Args:
        packed: this rank's layout. None is returned unchanged, without communication.
        group: the process group; default all ranks. With a CPU backend (gloo) no device is used.
            With a backend of only a device (NCCL, or another vendor's) the number goes through the
            current device and reading it synchronises. If the row gets longer and the layout's
            lengths came from a GPU, this also waits for their copy to the host.

    Returns:
        The layout with a longer tail, or the same layout if its row is already the longest.

    Raises:
        TypeError: `packed` is not a layout or None, or `group` is not a process group or None.

    Examples:
        >>> cuseq.distributed.equalize_tokens(packed)  # doctest: +SKIP
        PackedLayout(2 sequences, longest 3, 5 real of 8 tokens, cpu)
    """
    if packed is None:
        return None
    check_layout(packed)
    check_group(group)
    total = torch.tensor(packed.total_tokens, device=device_of(group, packed.device.type))
    torch.distributed.all_reduce(total, torch.distributed.ReduceOp.MAX, group)
    return packed.with_total_tokens(int(total.item()))
