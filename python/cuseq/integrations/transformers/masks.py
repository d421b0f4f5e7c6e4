"""The mask function of `attn_implementation="cuseq"`: masks that are built only if needed.

transformers makes masks before the layers run, and does not pass the user's keywords to the mask
function. The mask function therefore cannot know whether a call has lengths. It returns a
`DeferredMask`, which holds the arguments for the mask. If there are no lengths, attention builds
the mask, once per forward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import masking_utils

from cuseq import _C
from cuseq._base.arguments import as_size, round_up
from cuseq._base.models import recurrent_layers
from cuseq._base.modes import outside_inference_mode
from cuseq.attention.call import Call
from cuseq.attention.flex import is_taken_by_compiled_code
from cuseq.cache import new_key, remember
from cuseq.integrations.transformers._layers import rows_of_layer, softcap_of
from cuseq.integrations.transformers.documents import counted, document_numbers, model_inside
from cuseq.integrations.transformers.names import BACKEND, DOCUMENTS, NAME
from cuseq.layout import PackedLayout, StaticLayout, checked_spans, special_kind


@dataclass(frozen=True)
class Told:
    """The description of documents in a call, for the mask function.

    Attributes:
        packed: the layout; None if each row is one document, or in compiled code.
        positions: int [batch or 1, seqlen], for compiled code; or None.
        mask: the user's 2-D mask with its values, for compiled code; or None.
        has_cache: whether transformers reads no positions, because there is a cache.
    """

    packed: PackedLayout | None = None
    positions: Tensor | None = None
    mask: Tensor | None = None
    has_cache: bool = False


_handed = threading.local()


def hand_over(told: Told) -> None:
    """Store what a call says for the next call of the mask function on this thread."""
    _handed.told = told


class DeferredMask:
    """The mask of one layer type in one forward, built only if dense attention needs it.

    Only masks that lengths can replace are deferred: causal masks, with or without a window, and
    bidirectional masks, each with as many keys as queries; and in packed rows causal masks with
    blocks of tokens that see each other. This is a plain class, so that an object
    keeps its identity through checkpointing, compiled layers and FSDP2. It does not behave as a
    tensor, so a model that edits its mask before attention raises an error.

    Attributes:
        causal: Whether queries see no later keys.
        window: Number of keys that a query sees, itself included, or None.
        chunk: Size of the chunks that each sequence is cut into, or None.
        spans: int32 [n_spans, 2], tokens of the packed row that see each other, or None.
        told: What the call says about its documents.
        recurrent: The model's recurrent layer types, which ignore lengths; for a warning.
        arguments: The arguments of `transformers.masking_utils.sdpa_mask` for this mask.
    """

    def __init__(
        self,
        window: int | None,
        chunk: int | None,
        told: Told,
        recurrent: list[str],
        arguments: dict[str, Any],
    ) -> None:
        self.causal = arguments["allow_is_causal_skip"]
        self.spans: Tensor | None = None
        self.window = window
        self.chunk = chunk
        self.told = told
        self.recurrent = recurrent
        self.arguments = arguments
        self._key: torch.Tensor | None = None  # cache key of this mask; made in eager code only

    def __getattr__(self, name: str):
        raise AttributeError(
            f"DeferredMask has no {name}: the mask of a layer is not made before its attention "
            f'runs. A model that edits its masks cannot use attn_implementation="{NAME}"; one that '
            "was enabled when it was saved must be enabled again: cuseq.enable(model)"
        )

    def contiguous(self) -> DeferredMask:
        """Return self: `generate` of transformers 5.23 calls this on every mask it makes."""
        return self

    def __getitem__(self, index: Any) -> DeferredMask | torch.Tensor:
        """Return the mask of some queries: transformers 5.23 cuts the masks of Gemma 4 to them.

        All of them are this mask itself. A part of them is a built mask, bool.
        """
        if all(one in (slice(None), slice(0, None)) for one in index):
            return self
        mask = self.build(always=True)
        assert mask is not None
        return mask[index]

    def build(
        self, position_ids: torch.Tensor | None = None, *, always: bool = False
    ) -> torch.Tensor | None:
        """Return the mask that sdpa would get, with the documents of the call kept apart.

        Args:
            position_ids: those that a model gives to attention and not to its mask function.
            always: Whether to build it even if sdpa needs no mask.

        Returns:
            bool [batch, 1, q_length, kv_length], True where a query sees a key; None if sdpa needs
            no mask.
        """
        arguments = self.arguments
        if always:
            skips = "allow_is_causal_skip", "allow_is_bidirectional_skip"
            arguments = arguments | dict.fromkeys(skips, False)
        numbers = self._numbers(position_ids)
        if numbers is not None:
            arguments = arguments | {
                "mask_function": self._inside(numbers),
                "allow_is_causal_skip": False,
                "allow_is_bidirectional_skip": False,
            }
        return masking_utils.sdpa_mask(**arguments)

    def _numbers(self, position_ids: Tensor | None) -> Tensor | None:
        """Return the number of each token's document [batch, seqlen]; None for one in each row."""
        told, arguments = self.told, self.arguments
        batch, seqlen = arguments["batch_size"], arguments["q_length"]
        if told.packed is not None:
            return told.packed.to(arguments["device"]).seq_ids.view(batch, seqlen)
        positions = told.positions if told.positions is not None else position_ids
        if not _may_be_packed(positions, seqlen):
            positions = None
        if positions is not None:
            positions = positions.expand(batch, -1)
        mask = told.mask
        if mask is not None:
            mask = mask.to(arguments["device"])
        if positions is None and (mask is None or mask.dtype == torch.bool):
            return None
        if mask is None and not told.has_cache:
            return masking_utils.find_packed_sequence_indices(positions)
        return document_numbers(positions, mask)

    def _inside(self, numbers: torch.Tensor) -> Callable:
        """Restrict the pattern to each document; `numbers` are [batch, seqlen]."""
        pattern = self.arguments["mask_function"]
        # Chunks start at the row's start or, in newer transformers, at each sequence's start.
        per_sequence = getattr(masking_utils, "packed_sequence_compatibility_function", None)
        if self.chunk is not None and per_sequence is not None:
            return per_sequence(pattern, counted(numbers), numbers)
        return masking_utils.and_masks(
            pattern, masking_utils.packed_sequence_mask_function(numbers)
        )

    def build_once(self, device: torch.device) -> torch.Tensor | None:
        """Return `build()`; later layers on this device get the same mask."""
        if self._key is None:
            self._key = new_key()
        with outside_inference_mode():
            return remember(self._key, "deferred_mask", lambda: self._on(device), device=device)

    def _on(self, device: torch.device) -> torch.Tensor | None:
        mask = self.build()
        return mask if mask is None else mask.to(device)


class LayoutMask(DeferredMask):
    """The lengths of a packed call in the place of its mask.

    It is for models that hand on only a mask to their layers. transformers takes it for a mask that
    is made already, and gives it to the layers as it is.

    Attributes:
        lengths: The keywords of `cuseq_attention` that describe the sequences.
        given: The user's own mask, or None.
    """

    def __init__(self, lengths: dict[str, Any], given: Any) -> None:
        self.lengths = lengths
        self.given = given


class RowMask(DeferredMask):
    """The layout of a packed row in the place of its mask, for a layer that has an indexer.

    Such a layer gives its mask to the indexer first, or adds what the indexer chose to it. Every
    part of it is the mask itself.

    Attributes:
        layout: the layout of the row.
        chosen: what the layer added, or None.
    """

    dtype = torch.bool

    def __init__(self, packed: PackedLayout, mask: Any) -> None:
        if isinstance(mask, DeferredMask):
            self.causal, self.window, self.chunk = mask.causal, mask.window, mask.chunk
            self.spans, self.told, self.recurrent = mask.spans, mask.told, mask.recurrent
        elif isinstance(mask, Tensor) and mask.dim() != 2:
            raise ValueError(
                f"packed lengths cannot be combined with a {mask.dim()}-D attention_mask, got "
                f"shape {list(mask.shape)}; pass one of the two"
            )
        else:
            self.causal, self.window, self.chunk, self.spans = True, None, None, None
            self.told, self.recurrent = Told(), []
        self.layout = packed
        self.chosen: Tensor | None = None

    def __getitem__(self, index: Any) -> RowMask:
        return self

    def is_floating_point(self) -> bool:
        return False

    def __and__(self, chosen: Tensor) -> RowMask:
        self.chosen = chosen
        return self


def cuseq_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: transformers.PreTrainedConfig | None = None,
    **kwargs,
) -> DeferredMask | torch.Tensor | None:
    """Make the mask of one layer type, with the signature of `AttentionMaskInterface`.

    transformers calls this once per forward for each layer type. The arguments are those of
    `sdpa_mask`.

    Returns:
        A `DeferredMask`; or the result of `sdpa_mask` if lengths could not replace the pattern: in
        decode steps, and for patterns that the model builds itself.

    Raises:
        TypeError: `local_size`, the window of the config, is not an int.
    """
    told, _handed.told = getattr(_handed, "told", Told()), Told()
    local_size = as_size(local_size, "sliding_window")
    square = q_length == kv_length and isinstance(q_offset, int) and q_offset == kv_offset
    if not square or q_length == 1:
        told = Told()
    window = local_size if local_size is not None and local_size <= kv_length else None
    # transformers passes the size of a chunk in the place of a window.
    chunked = window is not None and window != getattr(config, "sliding_window", None)
    deferred = DeferredMask(
        None if chunked else window,
        window if chunked else None,
        told,
        recurrent_layers(config),
        dict(
            kwargs,
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        ),
    )
    # transformers clears both flags if the model's own pattern must stay. A bidirectional mask with
    # a window cannot be replaced, because its window extends in both directions.
    replaceable = allow_is_causal_skip or (allow_is_bidirectional_skip and window is None)
    if square and replaceable:
        if told.packed is not None and deferred.chunk is None:
            _hold_block_mask(deferred, told.packed)
        return deferred
    if square and _is_for_indexers(config, mask_function, local_size):
        deferred.causal = True
        return deferred
    packed = told.packed
    if packed is not None and special_kind(packed) is not None:
        deferred.told = Told()  # attention refuses the mask beside such a layout
    elif packed is not None and (blocks := _blocks_of(mask_function)) is not None:
        spans = _spans_of(blocks.ids, packed.to(blocks.ids.device))
        if spans is not None and spans.longest <= blocks.longest:
            deferred.causal, deferred.window = True, blocks.window
            deferred.spans = spans.on_device
            return deferred
    mask = deferred.build()
    if deferred.told.packed is not None and isinstance(mask, Tensor):
        setattr(mask, DOCUMENTS, True)
    return mask


def _is_for_indexers(config: Any, pattern: Callable, window: int | None) -> bool:
    """Return whether a model wants a causal mask made at once because it has indexers."""
    is_causal = pattern is masking_utils.causal_mask_function and window is None
    budgets = (getattr(config, name, None) for name in ("index_topk", "indexer_budget"))
    return is_causal and any(budget is not None for budget in budgets)


# ------------------------------------------------------------- layers that are compiled one by one


# For each layer, by what the choice depends on: whether its compiled code runs on flex attention.
_on_flex: weakref.WeakKeyDictionary[nn.Module, dict[Any, bool]] = weakref.WeakKeyDictionary()


def _hold_block_mask(mask: DeferredMask, packed: PackedLayout) -> None:
    """Make the mask of flex attention once, where each layer that is compiled would make its own.

    If a layer runs on another backend after all, nobody reads it; if it is missing, layers make
    theirs.
    """
    model = model_inside()
    layer = None if model is None or packed.part is not None else _compiled_attention(model)
    if layer is None:
        return
    device = packed.device.type
    half = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    kind = (packed.total_tokens, packed.is_tree, mask.causal, mask.window, half)
    if isinstance(packed, StaticLayout):  # a replay's choice follows from more
        kind += (packed.cu_seqlens_static.shape[0], packed.expected_sequences, packed.is_replayed)
    known = _on_flex.setdefault(layer, {})
    if (kind := (*kind, getattr(layer, BACKEND))) not in known:
        known[kind] = _runs_on_flex(layer, mask, packed)
    if known[kind]:
        packed.block_mask(causal=mask.causal, window=mask.window, hold=True)


def _compiled_attention(model: nn.Module) -> nn.Module | None:
    """Return an attention layer of a model whose layers are compiled one by one, or None."""
    layers = getattr(model, "layers", None)
    for layer in layers if isinstance(layers, nn.ModuleList) else ():
        # torch.compile puts another module around a layer, and Module.compile does not.
        if layer._compiled_call_impl is None and not hasattr(layer, "_orig_mod"):
            return None
        for module in layer.modules():
            if hasattr(module, BACKEND):
                return module
    return None


def _runs_on_flex(layer: nn.Module, mask: DeferredMask, packed: PackedLayout) -> bool:
    dtype = next(layer.parameters()).dtype
    try:
        q, k, v = rows_of_layer(layer, packed.total_tokens, dtype, packed.device)
    except Exception:  # a layer of a kind that nobody has seen
        return False
    backend, softcap = getattr(layer, BACKEND), softcap_of(layer)
    call = Call(q, k, v, packed, mask.causal, mask.window, None, None, softcap, None, backend)
    return is_taken_by_compiled_code(call)


# ------------------------------------------------------------------------------- blocks of tokens


class _Blocks(NamedTuple):
    """A causal pattern whose tokens see all of their own block, of an image say.

    Attributes:
        ids: int [batch, seqlen], the number of each token's block; below 0 for none.
        window: Number of keys that a query sees, itself included, or None.
        longest: Number of tokens up to which a block sees all of itself.
    """

    ids: Tensor
    window: int | None
    longest: float


def _blocks_of(pattern: Callable) -> _Blocks | None:
    """Return the blocks of a pattern of transformers; None if it is not causal with blocks.

    Its functions are closures, so it is told by their code.
    """
    blocks, cutting = _without_window(pattern, place=1)  # a window that cuts blocks too
    either = _inside(blocks, _OR)
    if either is None or len(either["mask_functions"]) != 2:
        return None
    causal, last = either["mask_functions"]
    overlay = _inside(last, _BLOCKS)
    window = cutting
    if cutting is None:
        causal, window = _without_window(causal, place=0)
    if overlay is None or causal is not masking_utils.causal_mask_function:
        return None
    longest = float("inf") if cutting is None else cutting
    return _Blocks(overlay["block_sequence_ids"], window, longest)


def _without_window(pattern: Callable, place: int) -> tuple[Callable, int | None]:
    """Return a pattern without the window that is one of its two conditions, and the window."""
    both = _inside(pattern, _AND)
    if both is not None and len(both["mask_functions"]) == 2:
        overlay = _inside(both["mask_functions"][place], _WINDOW)
        if overlay is not None:
            return both["mask_functions"][1 - place], overlay["sliding_window"]
    return pattern, None


def _code_of(name: str, *arguments: Any) -> CodeType | None:
    """Return the code of the function that a function of transformers returns."""
    make = getattr(masking_utils, name, None)
    return None if make is None else make(*arguments).__code__


_AND = _code_of("and_masks")
_OR = _code_of("or_masks")
_WINDOW = _code_of("sliding_window_overlay", 1)
_BLOCKS = _code_of("blockwise_overlay", None)  # transformers before 5.6 has none


def _inside(function: Callable, code: CodeType | None) -> dict[str, Any] | None:
    """Return the values that a closure with this code holds, by their names."""
    if code is None or getattr(function, "__code__", None) is not code:
        return None
    cells = function.__closure__ or ()
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))


_ROOM = 64


class _Spans(NamedTuple):
    on_device: Tensor | None  # int32 [n_spans, 2]
    longest: int


def _spans_of(blocks: Tensor, packed: PackedLayout) -> _Spans | None:
    """Return the blocks inside each document as spans; None if a block has others between its own.

    Blocks on a GPU are waited for, once in a forward.
    """
    with outside_inference_mode():
        on_host = remember(
            blocks, "blocks_on_host", lambda: blocks.to("cpu", torch.int64, copy=True)
        )
        pairs = _C.block_spans(
            on_host.contiguous(),
            packed.lengths_on_host().long(),
            packed.segments.lengths_on_host().long(),
        )
    if pairs is None:
        return None
    if not pairs:
        return _Spans(None, 0)
    # Compiled layers make a graph for each number of spans, so rows have few different ones.
    filled = round_up(len(pairs), _ROOM) - len(pairs)
    longest = max(end - start for start, end in pairs)
    return _Spans(checked_spans(packed, [*pairs, *pairs[-1:] * filled]), longest)


def _may_be_packed(position_ids: torch.Tensor | None, seqlen: int) -> bool:
    """Return whether these may be packed text positions, not M-RoPE planes or a decoded token."""
    return (
        position_ids is not None
        and position_ids.dim() <= 2
        and position_ids.shape[-1] == seqlen
        and seqlen > 1
    )
