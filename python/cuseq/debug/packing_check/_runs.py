"""Run a model over documents: packed in a row, and each document alone."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cuseq._base.labels import IGNORE_INDEX
from cuseq._base.models import unwatched
from cuseq.debug.packing_check._batch import OwnBatch
from cuseq.debug.packing_check._documents import Document
from cuseq.debug.packing_check._dtypes import DtypesAtWork
from cuseq.layout import PackedLayout


class TokensNotFound(Exception):
    """Raised if a batch does not hold the documents' tokens in their order."""


@dataclass(frozen=True)
class Row:
    """Where the documents' tokens lie in the model's input.

    Attributes:
        batch: the model's keywords; None if the user's `forward` makes them.
        slots: int64 `[tokens]`, index of each document token in the flat row.
        ids: int64 `[tokens]`, the token ids.
        document: int64 `[tokens]`, index of each token's document.
    """

    batch: dict[str, Any] | None
    slots: Tensor
    ids: Tensor
    document: Tensor

    def belongs_to(self, documents: Collection[int]) -> Tensor:
        """Return bool `[tokens]`: which tokens belong to these documents."""
        return torch.isin(self.document, torch.tensor(list(documents)).to(self.document))

    def pads(self) -> Tensor:
        """Return int64: the slots of the row that belong to no document."""
        if self.batch is None:
            return self.slots[:0]
        free = torch.ones(
            self.batch["input_ids"].numel(), dtype=torch.bool, device=self.slots.device
        )
        free[self.slots] = False
        return free.nonzero().flatten()


@dataclass
class Outcome:
    """The result of a run, in the order of the documents' tokens.

    Attributes:
        logits: `[tokens, vocabulary]`.
        loss: the model's own loss, a scalar, if it returned one.
        slots: index of each document token in the flat embeddings.
        embeddings: the looked-up embeddings as the modules returned them, one per call.
        lookups: for each of `embeddings`, the index of the module that returned it.
    """

    logits: Tensor
    loss: Tensor | None
    slots: Tensor
    embeddings: list[Tensor]
    lookups: list[int]

    def of_tokens(self, gradients: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Sum the gradients of `embeddings` (None means zero) to `[tokens, dim]` by module."""
        sums: dict[int, Tensor] = {}
        for number, embedding, gradient in zip(
            self.lookups, self.embeddings, gradients, strict=True
        ):
            rows = torch.zeros_like(embedding) if gradient is None else gradient
            rows = rows.reshape(-1, rows.shape[-1])[self.slots]
            sums[number] = sums[number] + rows if number in sums else rows
        return sums


class Runs:
    """Runs the model as the user does.

    Args:
        model: the model.
        collator: makes the packed batch from examples; not used if `forward` is given.
        forward: `forward(model, examples)`; None for `model(**collator(examples))`.
        own: the user's own batch, which takes the place of the collator.
    """

    def __init__(
        self,
        model: nn.Module,
        collator: Callable[[list[dict[str, Any]]], Mapping[str, Any]],
        forward: Callable[[nn.Module, list[dict[str, Any]]], Any] | None,
        own: OwnBatch | None = None,
    ):
        self.model = model
        self.collator = collator
        self.forward = forward
        self.own = own
        self.embedding_modules: list[nn.Module] = []
        self.names = _names_of(model)
        tensors = [*model.parameters(), *model.buffers()]
        self.device = tensors[0].device if tensors else torch.device("cpu")

    def row(self, documents: Sequence[Document]) -> Row:
        """Collate the documents.

        Raises:
            TokensNotFound: the batch does not hold these tokens in this order.
        """
        ids = torch.cat([document.ids for document in documents])
        number = torch.cat(
            [torch.full_like(document.ids, i) for i, document in enumerate(documents)]
        )
        if self.forward is not None:
            batch, slots = None, torch.arange(len(ids))
        else:
            examples = [document.example() for document in documents]
            if self.own is not None:
                batch, slots = self.own.collate(examples), torch.cat(self.own.slots)
            else:
                batch = _as_batch(self.collator(examples))
                slots = _find_slots(batch, documents)
            batch = {key: _moved(value, self.device) for key, value in batch.items()}
        return Row(batch, *(tensor.to(self.device) for tensor in (slots, ids, number)))

    def packed(self, documents: Sequence[Document], row: Row | None = None) -> Outcome:
        """Run all documents at once, from a given row or a new one."""
        row = self.row(documents) if row is None else row
        with unwatched(), self._captured(row.slots, row.ids) as (embeddings, lookups):
            if self.forward is not None:
                output = self.forward(self.model, [document.example() for document in documents])
            else:
                output = self.model(**(row.batch or {}))
        return Outcome(*_logits_and_loss(output, row.slots), row.slots, embeddings, lookups)

    def alone(self, document: Document, keys: Collection[str]) -> Outcome:
        """Run one document without packing.

        The run is not compiled: code compiled for the packed row's shape would be compiled again
        for each length, or fail. A document with images goes to the model itself, whatever the
        packed run does, so that the model finds its positions.

        Args:
            document: the document.
            keys: keys that the packed run gave the model besides its tokens.
        """
        ids = document.ids.to(self.device)
        slots = torch.arange(len(ids), device=self.device)
        with _eager(), self._captured(slots, ids) as (embeddings, lookups):
            images = document.inputs(self.names)
            if self.forward is not None and not images:
                output = self.forward(self.model, [document.example()])
            else:
                labels = document.labels.clone()
                labels[0] = IGNORE_INDEX
                others = document.per_token(self.names if images else keys)
                others = {name: value[None] for name, value in others.items()} | images
                others = {name: value.to(self.device) for name, value in others.items()}
                labels = labels.to(self.device)
                output = self.model(input_ids=ids[None], labels=labels[None], **others)
        return Outcome(*_logits_and_loss(output, slots), slots, embeddings, lookups)

    def find_embeddings(self, documents: Sequence[Document]) -> Outcome:
        """Run packed and find out which modules look up the tokens."""
        row = self.row(documents)
        found = []

        def look(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            if _looks_up(args, kwargs, output, row.slots, row.ids) and module not in found:
                found.append(module)

        leaves = [module for module in self.model.modules() if not any(module.children())]
        with _hooked(leaves, look):
            outcome = self.packed(documents, row)
        self.embedding_modules = found
        return outcome

    def dtypes_at_work(self, documents: Sequence[Document], row: Row) -> set[torch.dtype]:
        """Return the floating dtypes that a packed run computes in.

        This needs a run of its own: it must be eager to be watched, and may then round differently.
        """
        with _eager(), DtypesAtWork(len(row.slots)) as at_work:
            self.packed(documents, row)
        return at_work.found

    @contextmanager
    def _captured(self, slots: Tensor, ids: Tensor) -> Iterator[tuple[list[Tensor], list[int]]]:
        """Collect what the embedding modules return for these tokens, and the modules' indices."""
        embeddings: list[Tensor] = []
        lookups: list[int] = []

        def keep(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Tensor | None:
            if not _looks_up(args, kwargs, output, slots, ids):
                return None
            if torch.is_grad_enabled() and not output.requires_grad:
                # Frozen weights: require a gradient, and clone, because a leaf that requires one
                # must not be edited in place.
                output = output.detach().requires_grad_().clone()
            embeddings.append(output)
            lookups.append(self.embedding_modules.index(module))
            return output

        with _hooked(self.embedding_modules, keep):
            yield embeddings, lookups

    def first_to_differ(
        self,
        one: tuple[Sequence[Document], Collection[int]],
        other: tuple[Sequence[Document], Collection[int]],
    ) -> tuple[str, nn.Module] | None:
        """Return the first module whose outputs differ for the same inputs in two packed runs.

        If a zero weight hides that, returns the first module with a child whose inputs differ.

        Args:
            one, other: the documents of a row, and which of them are compared, by number: the same
                tokens in both rows.
        """
        before, after = self._trace(*one), self._trace(*other)
        for call, (inputs, outputs) in before.items():
            if call in after and _same(inputs, after[call][0]):
                if not _same(outputs, after[call][1]):
                    return call[0], self.model.get_submodule(call[0])
        for call, (inputs, _) in before.items():
            if call in after and not _same(inputs, after[call][0]):
                parent = call[0].rpartition(".")[0]
                return parent, self.model.get_submodule(parent)
        return None

    def _trace(
        self, documents: Sequence[Document], compared: Collection[int]
    ) -> dict[tuple[str, int], tuple]:
        """Record inputs and outputs of each module call in a packed run, innermost first.

        Args:
            documents: the documents of the row.
            compared: those whose tokens are recorded, by number.
        """
        row = self.row(documents)
        total = self._width(documents, row)
        kept = row.slots[row.belongs_to(compared)]
        names = {module: name for name, module in self.model.named_modules()}
        calls: dict[tuple[str, int], tuple] = {}
        counts: Counter[str] = Counter()

        def keep(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            name = names[module]
            calls[name, counts[name]] = (
                _rows_of((args, kwargs), total, kept),
                _rows_of(_attributes(output), total, kept),
            )
            counts[name] += 1

        # compiled code does not call the hooks of its submodules
        with _eager(), _hooked(names, keep):
            self.packed(documents, row)
        return calls

    def _width(self, documents: Sequence[Document], row: Row) -> int:
        """Return the number of tokens of the packed row, including padding."""
        if row.batch is not None:
            return row.batch["input_ids"].numel()
        embeddings = self.packed(documents, row).embeddings
        return embeddings[0].shape[:-1].numel() if embeddings else len(row.slots)


def _names_of(model: nn.Module) -> frozenset[str]:
    """Return what a model, or the one inside a wrapper of peft or torch.compile, takes by name."""
    for module in model.modules():
        names = frozenset(inspect.signature(module.forward).parameters)
        if "input_ids" in names:
            return names
    return frozenset()


def _eager() -> AbstractContextManager[None]:
    """Run the body without compiled code."""
    return torch.compiler.set_stance("force_eager")


def _as_batch(returned: Any) -> dict[str, Any]:
    """Return what a collator returned as a dict; raise TypeError if it cannot be a batch."""
    is_mapping = isinstance(returned, Mapping)
    ids = returned.get("input_ids") if is_mapping else returned
    if not is_mapping or not isinstance(ids, Tensor):
        raise TypeError(
            f"collator must return a dict with a tensor input_ids, got {type(ids).__name__}"
        )
    return dict(returned)


def _find_slots(batch: Mapping[str, Any], documents: Sequence[Document]) -> Tensor:
    """Return int64 `[tokens]`: where the documents lie in the flat `input_ids` of a batch."""
    row = batch["input_ids"].flatten().cpu()
    ids = torch.cat([document.ids for document in documents])
    for slots in _candidates(batch, documents, len(row)):
        if len(slots) == len(ids) and torch.equal(row[slots], ids):
            return slots
    return _search(row.tolist(), documents)


def _candidates(
    batch: Mapping[str, Any], documents: Sequence[Document], total: int
) -> Iterator[Tensor]:
    """Yield what the batch says about where documents lie, most reliable first."""
    packed, mask = batch.get("packed"), batch.get("attention_mask")
    lengths = [document.length for document in documents]
    if isinstance(packed, PackedLayout) and packed.lengths.tolist() == lengths:
        starts = packed.cu_seqlens_padded[:-1].tolist()
        yield torch.cat(
            [torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
        ).clamp(max=total - 1)
    if isinstance(mask, Tensor) and mask.shape == batch["input_ids"].shape:
        yield mask.flatten().cpu().nonzero().flatten()
    if sum(lengths) <= total:
        yield torch.arange(sum(lengths))


def _search(row: list[int], documents: Sequence[Document]) -> Tensor:
    """Find each document's first occurrence after the previous document."""
    slots, start = [], 0
    for i, document in enumerate(documents):
        ids = document.ids.tolist()
        last = len(row) - len(ids)
        found = next((s for s in range(start, last + 1) if row[s : s + len(ids)] == ids), None)
        if found is None:
            raise TokensNotFound(
                f"the batch's {len(row)} input_ids must hold all documents whole and in order, but "
                f"document {i} ({len(ids)} tokens) is missing or out of place"
            )
        start = found + len(ids)
        slots.append(torch.arange(found, start))
    return torch.cat(slots)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if hasattr(value, "to") else value


def _logits_and_loss(output: Any, slots: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the logits of the slots, and the loss if there is one.

    The output is a tensor, an object or dict with `logits` and perhaps `loss`, or a tuple of these.
    """
    if hasattr(output, "logits"):
        logits, loss = output.logits, getattr(output, "loss", None)
    elif isinstance(output, Mapping):
        logits, loss = output.get("logits"), output.get("loss")
    else:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        loss = next((tensor for tensor in tensors if tensor.numel() == 1), None)
        logits = next((t for t in tensors if t.dim() >= 2 and t is not loss), None)
    if not isinstance(logits, Tensor) or logits.dim() < 2:
        raise TypeError(
            "the model or forward must return logits [tokens, vocabulary], or an object with "
            f"logits, got {type(output).__name__}"
        )
    flat = logits.reshape(-1, logits.shape[-1])
    if len(flat) <= int(slots.max()):
        raise ValueError(
            f"logits must have a row for each of the {len(slots)} tokens, got shape "
            f"{tuple(logits.shape)}"
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return flat[slots], None
    return flat[slots], loss.reshape(())


def _looks_up(args: tuple, kwargs: dict, output: Any, slots: Tensor, ids: Tensor) -> bool:
    """Return whether a module got the row's tokens and returned a vector for each of them."""
    given = next((leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)), None)
    if given is None or given.is_floating_point() or given.numel() <= int(slots.max()):
        return False
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return False
    if output.shape[:-1] != given.shape:
        return False
    return torch.equal(given.flatten()[slots].to(ids), ids)


def _attributes(output: Any) -> Any:
    """Return a model's output as a dict, since pytree may not know its class."""
    return vars(output) if hasattr(output, "logits") else output


def _rows_of(tree: Any, total: int, kept: Tensor) -> list[Tensor]:
    """Copy the kept tokens' rows of all tensors that have one row per token."""
    rows = []
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, Tensor):
            continue
        for dims in (1, 2):
            if leaf.dim() >= dims and leaf.shape[:dims].numel() == total:
                rows.append(leaf.detach().reshape(total, -1)[kept])
                break
    return rows


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@contextmanager
def _hooked(modules: Iterable[nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
