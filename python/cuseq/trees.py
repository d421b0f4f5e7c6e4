"""`PackedTree`: packed rows whose samples share prefixes, each token once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from cuseq import _C
from cuseq._base.arguments import as_device, as_int, check_tensor, check_untransformed, shown
from cuseq._base.modes import outside_inference_mode
from cuseq._base.transfer import with_index
from cuseq.layout import PackedLayout, Recipe, build, check_layout

_ops = torch.ops.cuseq

_UNINDEXED = (torch.uint16, torch.uint32, torch.uint64)
_MAX_DEPTH = 16  # by default: the most calls of attention beside the first

# Token ids: a list, a NumPy array or a tensor on the CPU, of ints.
Tokens = Sequence[int] | Tensor


class PackedTree:
    """A packed row whose samples share prefixes: each shared token is computed once.

    GRPO and RLOO repeat a prompt in each of its samples, DPO in two, agents' traces repeat their
    history. A tree holds such a prefix once, as a node, and what follows as its children; a sample
    is a path from a root. With `packed=tree.layout` a token attends to its path, has its depth on
    the path as position, and everything else per token (norms, MLPs, the head) runs on unique
    tokens alone. Gradients of shared tokens are exact: the sums over all samples.

    The tree is built on the host and is immutable; it pickles, and `to` and `pin_memory` work as
    those of `PackedLayout`. Dropout differs between a tree and its samples one by one, and a
    mixture of experts balances unique tokens.

    Examples:
        >>> tree = cuseq.PackedTree.from_groups([[5, 6, 7]], [[[8, 9], [4]]])
        >>> tree
        PackedTree(2 samples of 9 tokens, 6 unique of 6 tokens, depth 1, cpu)
        >>> tree.input_ids, tree.position_ids
        (tensor([[5, 6, 7, 8, 9, 4]]), tensor([[0, 1, 2, 3, 4, 3]], dtype=torch.int32))
        >>> rows, labels, by_sample = tree.targets
        >>> rows, labels
        (tensor([2, 3, 2]), tensor([8, 9, 4]))
    """

    def __init__(self, tree: _C.Tree, input_ids: Tensor | None, layout: PackedLayout):
        if not isinstance(tree, _C.Tree):
            raise TypeError(
                "PackedTree is made by from_groups, from_sequences or from_parents, got "
                f"{shown(tree)}"
            )
        check_layout(layout, "layout")
        if getattr(layout.tree, "nodes", None) is not tree:
            raise ValueError(f"layout must be that of the tree, got {layout}")
        if input_ids is not None:
            _check_ids(input_ids, layout.total_tokens)
        self._tree = tree
        self._ids = input_ids  # int64 [total_tokens] on the host
        self._layout = layout
        # Made at their first use, on the layout's device.
        self._input_ids: Tensor | None = None
        self._samples: PackedLayout | None = None
        self._targets: tuple[Tensor, Tensor, PackedLayout] | None = None
        self._uses: tuple[Tensor, Tensor, Tensor] | None = None
        self._moved: dict[torch.device, PackedTree] = {}

    @classmethod
    def from_groups(
        cls,
        prompts: Iterable[Tokens],
        completions: Iterable[Iterable[Tokens]],
        *,
        total_tokens: int | None = None,
        max_seqs: int | None = None,
        max_depth: int | None = None,
        device: torch.device | str | None = None,
    ) -> PackedTree:
        """Make a tree of groups: each prompt once, then its completions.

        Samples are numbered group by group. Nothing is compared: equal prompts and equal
        completions stay apart.

        Args:
            prompts: token ids of each group's prompt.
            completions: for each group the token ids of its completions, at least one; any of them
                may be empty.
            total_tokens: tokens of the row in memory. Default: the tokens of all nodes.
            max_seqs: capacity for nodes (prompts and completions). Default: `total_tokens`, or the
                number of nodes if it is larger. It and `max_depth` decide the sizes of the layout's
                buffers, and with `total_tokens` whether compiled code and graphs are used again.
            max_depth: capacity for ancestors of a token's node. Default: 1.
            device: device of the layout and of the tensors. Default: the CPU.

        Raises:
            ValueError: a group has no completion, numbers of groups differ, or the tree does not
                fit into `total_tokens`, `max_seqs` or `max_depth`.
            TypeError: token ids are not ints.

        Never waits for a GPU.
        """
        total = _size(total_tokens, "total_tokens")
        with outside_inference_mode():
            made = _C.tree_of_groups(prompts, completions, total)
        return cls._made(*made, max_seqs, 1 if max_depth is None else max_depth, device)

    @classmethod
    def from_sequences(
        cls,
        sequences: Iterable[Tokens],
        *,
        min_shared: int = 1,
        keys: Iterable[Tokens] | None = None,
        total_tokens: int | None = None,
        max_seqs: int | None = None,
        max_depth: int | None = None,
        device: torch.device | str | None = None,
    ) -> PackedTree:
        """Make a tree of sequences that shares their common prefixes, found by a trie.

        A sequence may be a prefix of another, or equal to it.

        Args:
            sequences: token ids of each sample, from its first token.
            min_shared: fewest tokens of a run that is shared; shorter ones are repeated in each
                branch. Every depth of sharing costs a call of attention, so short runs do not pay.
            keys: for each sequence one int for each token. Tokens are only shared if their keys are
                equal too: give image tokens the hash of their image.
            max_depth: as in `from_groups`. Default: 16, or the tree's depth if it is larger.
            total_tokens, max_seqs, device: as in `from_groups`.

        Raises:
            ValueError, TypeError: as `from_groups`; or `keys` do not match `sequences`.

        Examples:
            >>> tree = cuseq.PackedTree.from_sequences([[1, 2, 3, 4], [1, 2, 5], [1, 2]])
            >>> tree.input_ids, tree.rows_of(1)
            (tensor([[1, 2, 3, 4, 5]]), tensor([0, 1, 4]))
        """
        min_shared = as_int(min_shared, "min_shared", least=1)
        total = _size(total_tokens, "total_tokens")
        with outside_inference_mode():
            tree, ids = _C.tree_of_sequences(sequences, keys, min_shared, total)
        return cls._made(tree, ids, max_seqs, max_depth, device)

    @classmethod
    def from_parents(
        cls,
        lengths: Sequence[int] | Tensor,
        parents: Sequence[int] | Tensor,
        *,
        total_tokens: int | None = None,
        max_seqs: int | None = None,
        max_depth: int | None = None,
        device: torch.device | str | None = None,
    ) -> PackedTree:
        """Make a tree of nodes in the order of the row; the leaves are its samples.

        The tree has no token ids: `input_ids` is None and `targets` raises.

        Args:
            lengths: tokens of each node.
            parents: the parent of each node, -1 for a root. A node comes after its parent and
                before the next node that is not below its parent.
            total_tokens, max_seqs, max_depth, device: as in `from_sequences`.

        Raises:
            ValueError: `parents` are in another order; or as `from_groups`.
            TypeError: `lengths` or `parents` are not ints.
        """
        tree = _C.tree_of_nodes(
            build.as_numbers(lengths, "lengths"), build.as_numbers(parents, "parents")
        )
        total = _size(total_tokens, "total_tokens")
        total = tree.num_tokens if total is None else total
        return cls._made(tree, None, max_seqs, max_depth, device, total)

    @classmethod
    def _made(
        cls,
        tree: _C.Tree,
        ids: Tensor | None,
        max_seqs: int | None,
        max_depth: int | None,
        device: torch.device | str | None,
        total_tokens: int | None = None,
    ) -> PackedTree:
        total = ids.shape[0] if ids is not None else cast("int", total_tokens)
        max_seqs = _size(max_seqs, "max_seqs")
        max_depth = _size(max_depth, "max_depth")
        if max_depth is None:
            max_depth = max(_MAX_DEPTH, tree.depth)
        made = cls(tree, ids, PackedLayout(build.of_tree(tree, total, max_seqs, max_depth)))
        return made if device is None else made.to(device)

    # ----------------------------------------------------------------------------- facts

    @property
    def layout(self) -> PackedLayout:
        """Layout of the row, for `packed=`. Its sequences are the nodes of the tree."""
        return self._layout

    @property
    def device(self) -> torch.device:
        """Device of the layout and of the tensors."""
        return self._layout.device

    @property
    def input_ids(self) -> Tensor | None:
        """int64 `[1, total_tokens]`, zero on the tail; None for a tree from parents. Must not be
        edited.
        """
        if self._input_ids is None and self._ids is not None:
            self._input_ids = self._here(self._ids).unsqueeze(0)
        return self._input_ids

    @property
    def position_ids(self) -> Tensor:
        """int32 `[1, total_tokens]`, number of tokens before each token on its path. Must not be
        edited.
        """
        return self._layout.position_ids.unsqueeze(0)

    @property
    def samples(self) -> PackedLayout:
        """Layout of the samples, one after the other, as `gather` returns them."""
        if self._samples is None:
            with outside_inference_mode():
                lengths = self._tree.sample_lengths()
                self._samples = PackedLayout.from_lengths(lengths).to(self.device)
        return self._samples

    @property
    def depth(self) -> int:
        """Most ancestors of a node: 0 if nothing is shared, 1 for groups."""
        return self._tree.depth

    @property
    def longest_path(self) -> int:
        """Tokens of the longest sample."""
        return self._tree.longest_path

    def rows_of(self, i: int) -> Tensor:
        """Return the rows of a sample's tokens in the tree's row, int64 `[n_i]` on its device.

        Raises:
            ValueError: there is no sample `i`.
        """
        return self._here(self._tree.rows_of(as_int(i, "i")))

    @property
    def targets(self) -> tuple[Tensor, Tensor, PackedLayout]:
        """What the samples' tokens are predicted from: rows int64 `[N]`, labels int64 `[N]`, and
        their layout by sample.

        The logits of row `rows[j]` predict `labels[j]`. Targets are the tokens of the completions
        for groups, else all tokens but the first of each sample. A prompt's last row occurs once
        for each completion.

        Raises:
            ValueError: the tree has no token ids.
        """
        if self._ids is None:
            raise ValueError("targets need token ids, which a tree from parents does not have")
        if self._targets is None:
            with outside_inference_mode():
                rows, labels, lengths = self._tree.targets(self._ids)
                by_sample = PackedLayout.from_lengths(lengths).to(self.device)
                self._targets = self._here(rows), self._here(labels), by_sample
        return self._targets

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all samples, one after the other; shared rows are repeated.

        The gradient of a shared row is the sum of its uses, in fp32 (fp64 for fp64) and always in
        the same order.

        Args:
            values: `[total_tokens, ...]` on the tree's device.

        Returns:
            `[samples.total_tokens, ...]`.

        Raises:
            ValueError: `values` has another number of rows, or lies on another device.
            TypeError: `values` is not a dense tensor, or of an unsigned dtype wider than a byte.

        Examples:
            >>> tree = cuseq.PackedTree.from_groups([[5, 6]], [[[7], [8]]])
            >>> tree.gather(torch.tensor([0.5, 0.6, 0.7, 0.8]))
            tensor([0.5000, 0.6000, 0.7000, 0.5000, 0.6000, 0.8000])
        """
        check_tensor(values, "values")
        if values.dtype in _UNINDEXED:
            raise TypeError(f"values must have a dtype that torch indexes, got {values.dtype}")
        if values.dim() == 0 or values.shape[0] != self._layout.total_tokens:
            raise ValueError(
                f"values must have the tree's total_tokens = {self._layout.total_tokens} rows, got "
                f"shape {list(values.shape)}"
            )
        if values.device != self.device:
            raise ValueError(
                f"values must lie on the tree's device, {self.device}, got {values.device}: move "
                "the tree with tree.to(device)"
            )
        check_untransformed(values, "values", "gather outside, or values[tree.rows_of(i)]")
        if self._uses is None:
            with outside_inference_mode():
                rows, places, offsets = self._tree.uses(self._layout.total_tokens)
                self._uses = self._here(rows), self._here(places), self._here(offsets)
        function = _Gather if is_compiling() else _GatherInEager
        return function.apply(values, *self._uses)

    # ----------------------------------------------------------------------------- copies

    def _here(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the tree's device, without waiting."""
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def to(self, device: torch.device | str | int | None) -> PackedTree:
        """Return this tree on `device`: itself if it is there, else a memoised copy."""
        target = self.device if device is None else with_index(as_device(device, "device"))
        if target == self.device:
            return self
        if target not in self._moved:
            self._moved[target] = PackedTree(self._tree, self._ids, self._layout.to(target))
        return self._moved[target]

    def pin_memory(self, device: Any = None) -> PackedTree:
        """Return this tree in pinned memory, for DataLoader; on a GPU, return itself."""
        if self.device.type != "cpu":
            return self
        ids = None if self._ids is None else self._ids.pin_memory()
        return PackedTree(self._tree, ids, self._layout.pin_memory())

    def __reduce__(self) -> Recipe:
        ids = None if self._ids is None else build.as_bytes(self._ids)
        return _restored, (self._tree, ids, self._layout)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedTree:
        return self  # immutable, as its layout is

    def __repr__(self) -> str:
        tree, total = self._tree, self._layout.total_tokens
        return (
            f"PackedTree({tree.num_samples} samples of {int(tree.sample_lengths().sum())} tokens, "
            f"{tree.num_tokens} unique of {total} tokens, depth {tree.depth}, {self.device})"
        )


class _Gather(torch.autograd.Function):
    """Repeat shared rows; the backward adds their gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor, places: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(places, offsets)
        return values.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        places, offsets = ctx.saved_tensors
        width = grad.shape[1:].numel()  # not -1, which is ambiguous without elements
        flat = grad.index_select(0, places).reshape(places.shape[0], width)
        summed, _ = _ops.segment_reduce(flat, offsets, "sum")
        return summed.to(grad.dtype).view(summed.shape[0], *grad.shape[1:]), None, None, None


class _GatherInEager(_Gather):
    """The same with a `jvp`, which says that there is none; the compiler refuses such functions."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        raise NotImplementedError(
            "PackedTree.gather has no forward-mode derivative: use reverse mode, or "
            "values[tree.rows_of(i)] where you need jvp"
        )


def _restored(tree: _C.Tree, ids: bytes | None, layout: PackedLayout) -> PackedTree:
    return PackedTree(
        tree, None if ids is None else build.from_bytes(ids, torch.int64, "input_ids"), layout
    )


torch.serialization.add_safe_globals([_restored])  # it checks what it is given


def _check_ids(ids: Tensor, total_tokens: int) -> None:
    check_tensor(ids, "input_ids")
    is_fit = ids.dtype == torch.int64 and ids.device.type == "cpu" and ids.is_contiguous()
    if not is_fit or ids.shape != (total_tokens,):
        raise ValueError(
            f"input_ids must be int64 [total_tokens = {total_tokens}] on the CPU, got {shown(ids)}"
        )


def _size(value: int | None, name: str) -> int | None:
    return None if value is None else as_int(value, name, least=0)
