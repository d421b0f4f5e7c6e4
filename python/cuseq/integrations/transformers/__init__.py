"""Packed training in Hugging Face transformers: importing this registers
`attn_implementation="cuseq"`.

    import cuseq.integrations.transformers
    model = AutoModelForCausalLM.from_config(config, attn_implementation="cuseq")
    batch = collator(examples)                       # cuseq.PackingCollator
    model(**batch)                                   # input_ids, labels, position_ids, packed

What a call may say about its sequences, the strongest first:

- `packed=layout`: `cuseq.varlen_attention`, eager or in compiled code, there with one graph for all
  packs. Never waits for the device (a layout made from lengths on a GPU: for one event).
- `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k`: the same. Compiled code does not
  read the ints, since it would compile again with every pack, and takes bounds, which cost time.
- Packed `position_ids` alone: the same in eager code, after one event a forward, where the model
  hands them on as they are (Qwen2-VL makes three planes of them). Compiled code cannot read them
  and attends through sdpa with a dense mask drawn from them: exact, but slow, and so for batches
  that are not packed. Give it lengths. A model that makes a 2-D mask of ones itself (OPT) says by
  it that a row is one sequence: position ids alone do not speak against that.
- A 2-D mask, a 4-D mask or nothing: what sdpa does. Where there is no mask, eager code has to look
  at the position ids, which is the one event above.

Lengths win over a 2-D mask, which nothing looks at then, with a warning in eager code. Lengths
together with a 4-D mask or with a model that draws a pattern of its own (blocks of image tokens,
chunks) raise, since they cannot be combined, and so does what would change the result and has no
packed form: dropout in attention, soft caps, position biases. Models whose positions do not follow
`position_ids` are refused when they are made. Give `position_ids`
(`layout.position_ids[None]`) along with the lengths: attention does not need them, RoPE and learned
positions do.

transformers makes masks before the layers run, where the user's keywords do not get to, so the mask
function cannot know whether lengths will come. It returns a `DeferredMask`, which remembers how to
build the mask, and attention builds it, once a forward, only where no lengths came.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.import_utils import is_tracing

import cuseq
from cuseq.integrations._remember import remember
from cuseq.integrations.transformers._enable import Enabled, disable, enable, recurrent_layers
from cuseq.layout import check_layout

__all__ = ["DeferredMask", "Enabled", "cuseq_attention", "cuseq_mask", "disable", "enable"]

NAME = "cuseq"

# Keywords that models give their attention and that change its result.
_UNSUPPORTED = (
    "softcap",
    "position_bias",
    "head_mask",
    "indices",
    "block_indices",
    "output_attentions",
)
_TABLE = "_ATTENTION_CLASSES"  # how models name their own choice of attentions
_DETECTOR_PARAMETERS = [
    "config",
    "inputs_embeds",
    "attention_mask",
    "past_key_values",
    "position_ids",
    "layer_idx",
    "encoder_hidden_states",
]

_withheld = threading.local()


class DeferredMask:
    """The mask of one layer type in one forward, not built unless dense attention asks for it.

    Only masks that lengths may replace are deferred: causal ones, with a window or without, and
    bidirectional ones, over as many keys as queries. A plain class, so that it keeps its identity
    through checkpointing, compiled layers and FSDP2. It is no tensor: a model that edits its mask
    before it attends fails loudly.

    Attributes:
        causal: Whether queries see no later keys.
        window: Keys that a query sees, itself included, or None.
        chunked: Whether the size in `window` is a chunk's.
        position_ids: int [batch or 1, seqlen], or None where the model does not say them.
        recurrent: The model's layer types that lengths cannot reach, for a warning.
        arguments: What `transformers.masking_utils.sdpa_mask` needs to build the mask.
    """

    def __init__(
        self,
        window: int | None,
        chunked: bool,
        position_ids: torch.Tensor | None,
        recurrent: list[str],
        arguments: dict[str, Any],
    ) -> None:
        self.causal = arguments["allow_is_causal_skip"]
        self.window = window
        self.chunked = chunked
        self.position_ids = position_ids
        self.recurrent = recurrent
        self.arguments = arguments
        self._built: dict[torch.device, torch.Tensor | None] = {}

    def __getattr__(self, name: str):
        raise AttributeError(
            f"DeferredMask has no {name}: the mask of a layer is not made before its attention "
            f'runs. A model that edits its masks cannot use attn_implementation="{NAME}"'
        )

    def contiguous(self) -> DeferredMask:
        """Itself: `generate` of transformers 5.23 asks it of every mask that it made."""
        return self

    def positions(self, given: torch.Tensor | None) -> torch.Tensor | None:
        """The position ids that may describe packed rows.

        They come from where the mask was made or, with models that do not say them there, as
        `given` to the attention. None where transformers would not look at them either: beside a
        2-D mask, and without causality.
        """
        arguments = self.arguments
        if arguments["attention_mask"] is not None or not arguments["allow_is_causal_skip"]:
            return None
        if self.position_ids is not None:
            return self.position_ids
        return given if _may_be_packed(given, arguments["q_length"]) else None

    def build(self, position_ids: torch.Tensor | None = None) -> torch.Tensor | None:
        """The mask that sdpa would get.

        Args:
            position_ids: int [batch or 1, seqlen], looked at as transformers does: eager code
                synchronises, compiled code always gets a mask.

        Returns:
            bool [batch, 1, q_length, kv_length], True where a query sees a key; None where sdpa
            needs none.
        """
        arguments = self.arguments
        if position_ids is not None:
            rows = position_ids.expand(arguments["batch_size"], -1)
            sequences = masking_utils.find_packed_sequence_indices(rows)
            if sequences is not None:
                arguments = arguments | {
                    "mask_function": self._inside(sequences, rows),
                    "allow_is_causal_skip": False,
                }
        return masking_utils.sdpa_mask(**arguments)

    def _inside(self, sequences: torch.Tensor, position_ids: torch.Tensor) -> Callable:
        """The pattern, inside each sequence only; both tensors [batch, seqlen]."""
        pattern = self.arguments["mask_function"]
        # Chunks are counted from the start of the row or, newer, of the sequence.
        per_sequence = getattr(masking_utils, "packed_sequence_compatibility_function", None)
        if self.chunked and per_sequence is not None:
            return per_sequence(pattern, position_ids, sequences)
        return masking_utils.and_masks(
            pattern, masking_utils.packed_sequence_mask_function(sequences)
        )

    def build_once(self, device: torch.device) -> torch.Tensor | None:
        """`build()` without position ids, kept for the layers that follow, one for each device."""
        if device not in self._built:
            mask = self.build()
            self._built[device] = mask if mask is None else mask.to(device)
        return self._built[device]


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
    """The mask function of transformers' `AttentionMaskInterface`, called once a forward for each
    layer type; the arguments are those of `sdpa_mask`.

    Returns:
        A `DeferredMask`, or what `sdpa_mask` returns where lengths could not replace the pattern:
        decode steps, chunks, patterns that the model draws itself.
    """
    position_ids = getattr(_withheld, "position_ids", None)
    _withheld.position_ids = None
    square = q_length == kv_length and isinstance(q_offset, int) and q_offset == kv_offset
    if not square or not _may_be_packed(position_ids, q_length):
        position_ids = None
    window = local_size if local_size is not None and local_size <= kv_length else None
    # The size of a chunk comes in the place of a window.
    chunked = window is not None and window != getattr(config, "sliding_window", None)
    deferred = DeferredMask(
        window,
        chunked,
        position_ids,
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
    # transformers withdraws both permissions where the model's own pattern must stay, and the
    # window of a bidirectional mask looks both ways.
    replaceable = allow_is_causal_skip or (allow_is_bidirectional_skip and window is None)
    if square and replaceable and not chunked:
        return deferred
    return deferred.build(position_ids)


def cuseq_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: DeferredMask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    packed: cuseq.PackedLayout | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers' `AttentionInterface`. The module's docstring says
    which keyword does what, and what waits for the device.

    Args:
        module: The attention layer; its `is_causal` counts where neither the keyword nor the mask
            function says it.
        query: [batch, query heads, seqlen, head_dim]. The rows of the batch, one after the other,
            are the packed row.
        key: [batch, key heads, seqlen, head_dim].
        value: [batch, key heads, seqlen, value head_dim].
        attention_mask: What the mask function returned, or the user's own 4-D mask.
        dropout: Must be 0 for packed rows.
        scaling: Factor of the scores, 1 / sqrt(head_dim) if None.
        sliding_window: Keys that a query sees, itself included; counts where no mask of this
            module says it, as with sdpa. 0 and -1 mean None.
        position_ids: int [batch or 1, seqlen]; other shapes say nothing about packing.
        packed: Layout of batch * seqlen tokens.
        cu_seq_lens_q: int [n_seqs + 1], offsets of the sequences; `cu_seq_lens_k` must be equal.
        max_length_q: Longest sequence, in tokens, on the host; `max_length_k` must be equal.
        s_aux: Sinks [query heads], a score of each head without a value; packed rows only, and
            those need the layout.

    Returns:
        [batch, seqlen, query heads, value head_dim], contiguous, and None for the weights.

    Raises:
        ValueError: A decode step, a mask or a feature that packed attention does not have, or a
            layout of another number of tokens.
    """
    deferred = attention_mask if isinstance(attention_mask, DeferredMask) else None
    lengths_given = packed is not None or cu_seq_lens_q is not None or cu_seq_lens_k is not None
    if not lengths_given and deferred is not None:
        positions = deferred.positions(position_ids)
        if is_tracing(query):
            attention_mask = deferred.build(positions)
        else:
            packed = _layout_of(positions, query.shape[0])
            if packed is None:
                attention_mask = deferred.build_once(query.device)
    if not lengths_given and packed is None:
        return _dense_attention(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, s_aux, kwargs
        )

    _check_packable(query, key, attention_mask, dropout)
    _refuse(kwargs, _UNSUPPORTED, "packed attention")
    # A layer may call itself bidirectional under a causal mask (PaliGemma): the mask counts.
    causal, window = getattr(module, "is_causal", True), sliding_window
    if deferred is not None:
        causal, window = deferred.causal, deferred.window
    if is_causal is not None:
        causal = is_causal
    if window is not None and window < 1:
        window = None
    if window is not None and not causal:
        raise ValueError(
            "packed attention has no sliding window without causality, got "
            f"sliding_window={window} and is_causal=False"
        )

    compiling = torch.compiler.is_compiling()  # there, to read an int is to compile again with it
    if deferred is not None and not compiling and deferred.recurrent:
        _warn_once(
            f"{type(module).__name__} works beside layers of type {', '.join(deferred.recurrent)}: "
            "cuseq keeps the sequences of a packed row apart in attention only, whether those "
            "layers do is up to the model"
        )
    if deferred is not None and not compiling and deferred.arguments["attention_mask"] is not None:
        _warn_once(
            "attention_mask has no effect beside packed lengths, which say where sequences lie; "
            "leave it out, or leave the lengths out"
        )
    # [batch, heads, seqlen, dim] -> [batch * seqlen, heads, dim], a view of what models pass.
    rows = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
    if packed is not None:
        check_layout(packed)
        if not compiling:  # else the op compares the sizes when it runs
            _check_total(packed, rows[0])
            packed = packed.to(query.device)
        out = cuseq.varlen_attention(
            *rows, packed, causal=causal, window=window, scale=scaling, sinks=s_aux
        )
    elif s_aux is not None:
        raise ValueError("a model with sinks needs the layout, packed=, not its bare offsets")
    else:
        cu_seqlens = cu_seq_lens_q if cu_seq_lens_q is not None else cu_seq_lens_k
        bound = None
        if not compiling:
            _check_offsets(cu_seq_lens_q, cu_seq_lens_k)
            bound = _host_bound(max_length_q, max_length_k)
        out, _ = torch.ops.cuseq.varlen_attention(
            *rows, cu_seqlens.to(torch.int32), None, causal, window, scaling, bound
        )
    batch, _, seqlen, _ = query.shape
    return out.view(batch, seqlen, out.shape[-2], out.shape[-1]), None


def _dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    s_aux: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa, and a word about what it drops in silence; with sinks its eager code."""
    # Models with an index make a mask of it only for implementations that they name.
    _refuse(kwargs, ("indices", "block_indices"), f'attn_implementation="{NAME}"')
    if s_aux is not None:
        return _dense_attention_with_sinks(
            module, query, key, value, attention_mask, dropout, scaling, kwargs
        )
    if kwargs.get("softcap") is not None and not is_tracing(query):
        _warn_once("softcap has no effect here: transformers' sdpa, which attends, ignores it")
    return sdpa_attention_forward(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **kwargs,
    )


def _dense_attention_with_sinks(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """The model's own eager attention, which finds its sinks itself and wants an additive mask."""
    if attention_mask is None and query.shape[2] > 1:
        shape = query.shape[2], key.shape[2]
        attention_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()[None, None]
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        hidden = torch.finfo(query.dtype).min
        attention_mask = torch.where(attention_mask, 0.0, hidden).to(query.dtype)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    out, _ = eager(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return out, None


def _may_be_packed(position_ids: torch.Tensor | None, seqlen: int) -> bool:
    """Whether these may be packed text positions: not multimodal planes, not one decoded token."""
    return (
        position_ids is not None
        and position_ids.dim() <= 2
        and position_ids.shape[-1] == seqlen
        and seqlen > 1
    )


def _layout_of(position_ids: torch.Tensor | None, batch: int) -> cuseq.PackedLayout | None:
    """The layout that position ids describe, None if each row is one sequence.

    Waits for one event, once for a tensor until it is edited in place, since all layers share the
    answer; positions made in inference mode have no version to share by, and wait in each layer.
    """
    if position_ids is None:
        return None
    return remember(position_ids, batch, lambda: _several_sequences(position_ids, batch))


def _several_sequences(position_ids: torch.Tensor, batch: int) -> cuseq.PackedLayout | None:
    layout = cuseq.PackedLayout.from_position_ids(position_ids.expand(batch, -1))
    return None if layout.num_sequences == batch else layout


def _check_packable(
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: DeferredMask | torch.Tensor | None,
    dropout: float,
) -> None:
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            "packed lengths describe whole rows, not a decode step: they need as many keys as "
            f"queries, got {query.shape[2]} queries and {key.shape[2]} keys (a filled KV cache?)"
        )
    # A 2-D mask says less than the lengths do. Nothing else can be combined with them.
    is_2d = isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2
    if not (attention_mask is None or isinstance(attention_mask, DeferredMask) or is_2d):
        shape = list(getattr(attention_mask, "shape", ()))
        raise ValueError(
            "packed lengths cannot be combined with a 4-D attention_mask, got "
            f"{type(attention_mask).__name__} of shape {shape}; give one of the two. If you gave "
            "no mask, the model draws a pattern of its own (image blocks, chunks, another kind "
            "of causality) that packed attention does not know"
        )
    if dropout:
        raise ValueError(
            f"packed attention has no dropout, got dropout={dropout}; set the config's "
            "attention_dropout to 0"
        )


def _refuse(kwargs: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    for name in names:
        given = kwargs.get(name)
        if given is not None and given is not False:
            raise ValueError(f"{name} is not supported by {where}, and dropping it would be wrong")


def _check_total(packed: cuseq.PackedLayout, row: torch.Tensor) -> None:
    if packed.total_tokens != row.shape[0]:
        raise ValueError(
            f"packed must describe all batch * seqlen = {row.shape[0]} tokens of the input, got a "
            f"layout of total_tokens={packed.total_tokens}"
        )


def _check_offsets(cu_q: torch.Tensor | None, cu_k: torch.Tensor | None) -> None:
    """What can be seen of the offsets without waiting for the device."""
    if cu_q is not None and cu_k is not None and cu_q.shape != cu_k.shape:
        raise ValueError(
            "cu_seq_lens_q and cu_seq_lens_k must be equal in self-attention, got shapes "
            f"{list(cu_q.shape)} and {list(cu_k.shape)}"
        )
    cu_seqlens = cu_q if cu_q is not None else cu_k
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            "cu_seq_lens_q must have shape [n_seqs + 1] with at least one sequence, got "
            f"{list(cu_seqlens.shape)} (some data loaders slice every tensor of a batch; "
            "`packed` is safe from that)"
        )


def _host_bound(max_q: int | None, max_k: int | None) -> int | None:
    """The longest sequence where the host knows it; None lets the op take the row's length."""
    lengths = [int(length) for length in (max_q, max_k) if _is_on_host(length)]
    if len(set(lengths)) > 1:
        raise ValueError(
            "max_length_q and max_length_k must be equal in self-attention, got "
            f"{lengths[0]} and {lengths[1]}"
        )
    return lengths[0] if lengths else None


def _is_on_host(length: int | torch.Tensor | None) -> bool:
    if isinstance(length, torch.Tensor):
        return length.device.type == "cpu"
    return length is not None


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def _refuse_where_sdpa_is_refused() -> None:
    """Models with attention of their own would ignore this implementation, and lengths with it.

    They say so for sdpa, but transformers asks no such question for what it does not ship; Falcon
    supports sdpa and looks its attention up in a table of its own.
    """
    choose = transformers.PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(choose)
    def checked(self, requested_attention, *args, **kwargs):
        if requested_attention == NAME:
            # GPT-OSS supports no sdpa because of its sinks, which packed attention has; Gemma 2 of
            # transformers 5.23 because of its soft caps, which may be off.
            has_no_caps = getattr(self.config, "attn_logit_softcapping", 0) is None
            known = self._supports_sdpa or self.config.model_type == "gpt_oss" or has_no_caps
            own = [
                name for name in dir(sys.modules[type(self).__module__]) if name.endswith(_TABLE)
            ]
            if not known or own:
                why = f"it chooses from {own[0]}" if own else "it does not support sdpa either"
                raise ValueError(
                    f'{type(self).__name__} cannot use attn_implementation="{NAME}": {why}, so its '
                    "attention is not one that can be replaced"
                )
            counted = _counts_positions_itself(self)
            if counted is not None:
                raise ValueError(
                    f'{type(self).__name__} cannot use attn_implementation="{NAME}": {counted}, so '
                    "the positions of a packed row would be wrong"
                )
        return choose(self, requested_attention, *args, **kwargs)

    transformers.PreTrainedModel.get_correct_attn_implementation = checked


def _counts_positions_itself(model: transformers.PreTrainedModel) -> str | None:
    """Why a model's positions are not those that a packed batch says, None if they may be."""
    is_told = "position_ids" in inspect.signature(type(model).forward).parameters
    is_decoder = model.can_generate()  # an encoder's rows of sound or pixels count as they like
    for one in vars(sys.modules[type(model).__module__]).values():
        if hasattr(one, "create_position_ids_from_input_ids"):
            return "it counts positions from behind its padding token's id"
        if isinstance(one, type) and one.__name__.endswith("PositionalEmbedding"):
            counts = "past_key_values_length" in inspect.signature(one.forward).parameters
            if counts and is_decoder and not is_told:
                return "it counts positions along the row, whatever position_ids say"
    return None


def _withhold_position_ids() -> None:
    """Keeps transformers' search for packed position ids from running for this implementation.

    The search stalls the device once a forward, and it would draw a dense mask that lengths make
    needless. What it would have looked at goes to the mask function instead, which transformers
    calls next on the same thread.
    """
    detector = getattr(masking_utils, "_preprocess_mask_arguments", None)
    if detector is None or list(inspect.signature(detector).parameters) != _DETECTOR_PARAMETERS:
        warnings.warn(
            f"transformers {transformers.__version__} prepares masks in a way that cuseq does not "
            "know: its own search for packed position_ids stays on, with one synchronisation a "
            "forward, and lengths beside packed position_ids raise unless use_cache is on",
            stacklevel=2,
        )
        return

    @functools.wraps(detector)
    def without_position_ids(
        config,
        inputs_embeds,
        attention_mask,
        past_key_values,
        position_ids,
        layer_idx,
        encoder_hidden_states=None,
    ):
        if isinstance(attention_mask, DeferredMask):
            # `generate` has made it already: it goes through as a mask of four dimensions does.
            mask = torch.empty(1, 1, 1, 1)
            found = detector(config, inputs_embeds, mask, past_key_values, None, layer_idx)
            return found[0], attention_mask, *found[2:]
        if config._attn_implementation == NAME:
            _withheld.position_ids = position_ids if attention_mask is None else None
            position_ids = None
        return detector(
            config,
            inputs_embeds,
            attention_mask,
            past_key_values,
            position_ids,
            layer_idx,
            encoder_hidden_states,
        )

    masking_utils._preprocess_mask_arguments = without_position_ids


AttentionInterface.register(NAME, cuseq_attention)
AttentionMaskInterface.register(NAME, cuseq_mask)
_refuse_where_sdpa_is_refused()
_withhold_position_ids()
