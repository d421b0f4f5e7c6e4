"""unsloth: packed training with cuseq behind unsloth's own functions.

    import unsloth
    import cuseq.integrations.unsloth
    cuseq.integrations.unsloth.enable()

    model, tokenizer = unsloth.FastLanguageModel.from_pretrained(...)
    SFTTrainer(model, args=SFTConfig(packing=True, ...), ...).train()

`enable` replaces the functions by which unsloth describes, masks and rotates packed rows, and the
one through which the attention of its own model classes goes (Llama, Mistral, Qwen, Granite, ...;
what it runs through transformers' classes, vision and most mixtures of experts, attends as before).
The functions below have unsloth's names, arguments and results (2026.10.9) and work without unsloth
too. What is known of a pack is kept for the tensor that says it, by its identity and its version,
so that any number of packs are known at once and an edit in place is noticed; unsloth PR 4173 keeps
one answer a device and returns it after an edit.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import cuseq
from cuseq._transfer import to_host
from cuseq.integrations._remember import remember
from cuseq.layout import PackedLayout, check_layout

_PACKING = "unsloth.utils.packing"
_DISPATCH = "unsloth.utils.attention_dispatch"
_BLOCKS = "unsloth.models._block_compile"
_LENGTHS = "packed_seq_lengths"


class PackedInfo(tuple):
    """unsloth's description of a pack, (lengths, cu_seqlens, max_seqlen), and where it is from.

    Attributes:
        layout: a weak reference to the layout, whose tensors are those of the tuple.
    """

    layout: weakref.ref[PackedLayout]

    def __new__(cls, packed: PackedLayout) -> PackedInfo:
        self = super().__new__(cls, (packed.lengths, packed.cu_seqlens, packed.max_seqlen))
        self.layout = weakref.ref(packed)
        # unsloth hands the lengths on by themselves; weak, since the layout holds them.
        remember(packed.lengths, "layout", lambda: self.layout)
        return self

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return tuple, (tuple(self),)


# ------------------------------------------------------------------------------ unsloth's functions


def get_packed_info_from_kwargs(
    kwargs: Mapping[str, Any],
    device: torch.device | str,
    position_ids: Tensor | None = None,
) -> PackedInfo | None:
    """What a forward's keywords say about its pack.

    Args:
        kwargs: `packed`, a `PackedLayout`, which counts; else `packed_seq_lengths`, integers
            `[n_seqs]`. A layout of another number of sequences than there are lengths is of another
            row (unsloth's token budget splits rows), and the lengths count.
        device: where the answer shall lie.
        position_ids: read where there is neither: `[1, tokens]`, restarting with each sequence.

    Returns:
        `(lengths, cu_seqlens, max_seqlen)`: int32 `[n_seqs]`, int32 `[n_seqs + 1]`, an int. None
        where nothing says that the row is packed, or positions show one sequence only.

    Lengths on the host and layouts made from such never wait. Lengths on a GPU cost one wait for
    one small copy, positions two, once for each tensor.
    """
    packed, lengths = kwargs.get("packed"), kwargs.get(_LENGTHS)
    if torch.compiler.is_compiling():
        # Compiled code must not read numbers of the host: they would become its constants.
        if packed is None:
            return _original("get_packed_info_from_kwargs")(kwargs, device, position_ids)
        return packed, None, None
    if packed is not None:
        check_layout(packed)
        if lengths is None or packed.num_sequences == lengths.numel():
            infos = _infos.setdefault(packed, {})
            if device not in infos:
                infos[device] = PackedInfo(packed.to(device))
            return infos[device]
    if lengths is not None:
        return remember(lengths, device, lambda: PackedInfo(_of_lengths(lengths).to(device)))
    if position_ids is None or position_ids.dim() != 2 or len(position_ids) != 1:
        return None
    packed = remember(position_ids, "row", lambda: _of_positions(position_ids))
    if packed.num_sequences == 1:
        return None
    return remember(position_ids, device, lambda: PackedInfo(packed.to(device)))


def build_sdpa_packed_attention_mask(
    seq_info: Sequence[Any],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    sliding_window: int | None = None,
    total_tokens: int | None = None,
    is_causal: bool = True,
) -> Tensor:
    """The mask of a pack, to be added to the scores, for `scaled_dot_product_attention`.

    Args:
        seq_info: of `get_packed_info_from_kwargs`, or any tuple that starts with lengths.
        dtype: of the mask, floating point.
        device: where it shall lie.
        sliding_window: keys that a token sees, itself included; None, 0 and below for all. With
            `is_causal=False` it counts backwards only, as in unsloth.
        total_tokens: length of the row; what the sequences leave is one more segment.
        is_causal: whether a token sees only itself and what comes before it.

    Returns:
        `[1, 1, total_tokens, total_tokens]`, 0 where visible, else -inf. It is kept as long as the
        lengths live (`PackedLayout.dense_mask`), but for a window without causality, which is drawn
        in every call. Waits as `get_packed_info_from_kwargs`.
    """
    packed, window = _row_of(seq_info, total_tokens).to(device), _window(sliding_window)
    if is_causal or window is None:
        return packed.dense_mask(dtype, causal=is_causal, window=window)
    tokens = torch.arange(packed.total_tokens, device=packed.device)
    too_old = tokens.unsqueeze(1) - tokens >= window
    return packed.dense_mask(dtype, causal=False).masked_fill(too_old, float("-inf"))


def build_xformers_block_causal_mask(
    seq_info: Sequence[Any] | None,
    *,
    sliding_window: int | None = None,
    base_mask: Any | None = None,
    total_tokens: int | None = None,
    is_causal: bool = True,
) -> Any | None:
    """The bias of a pack for xformers' attention, on the lengths' device.

    Args:
        seq_info: as for the dense mask; None for no pack.
        sliding_window: xformers' local attention over as many keys.
        base_mask: what is returned, with the window if it can have one, without a pack.
        total_tokens, is_causal: as for the dense mask.

    Returns:
        A `BlockDiagonalCausalMask`, or `BlockDiagonalMask` without causality; None where xformers
        is not installed or there is no sequence. Waits as `get_packed_info_from_kwargs`.
    """
    window = _window(sliding_window)
    if seq_info is None:
        return _with_window(base_mask, window)
    if seq_info[0].numel() == 0:
        return None
    try:
        from xformers.ops.fmha import attn_bias
    except ImportError:
        return None
    packed = _row_of(seq_info, total_tokens).to(seq_info[0].device)
    if is_causal:
        return packed.xformers_bias(window=window)
    causal = packed.xformers_bias()
    bias = attn_bias.BlockDiagonalMask(causal.q_seqinfo, causal.k_seqinfo)
    return _with_window(bias, window)


def mask_packed_sequence_boundaries(
    shift_labels: Tensor, seq_lengths: Sequence[int] | Tensor | None, *, ignore_index: int = -100
) -> bool:
    """Lets the loss ignore each sequence's last token, which would predict the next one's first.

    Args:
        shift_labels: `[...]`, contiguous, already shifted; written in place.
        seq_lengths: tokens of each sequence; ends beyond the labels are left out.
        ignore_index: what is written.

    Returns:
        Whether a sequence ends within the labels.

    Raises:
        RuntimeError: the labels are not contiguous, so they cannot be written as one row.
    """
    if _no_lengths(seq_lengths):
        return False
    packed = _of_lengths(seq_lengths)
    ends = torch.ops.cuseq.cu_seqlens(packed.lengths_on_host())[1:]
    first, last = int((ends == 0).sum()), int((ends <= shift_labels.numel()).sum())
    if last == 0:
        return False
    ends = packed.to(shift_labels.device).cu_seqlens[1:][first:last]
    shift_labels.view(-1).index_fill_(0, ends.long() - 1, ignore_index)
    return True


def mask_packed_boundary_labels(
    labels: Tensor | None,
    seq_lengths: Sequence[int] | Tensor | None,
    *,
    ignore_index: int = -100,
) -> Tensor | None:
    """The same for labels that the loss itself shifts: each next sequence's first token goes.

    Args:
        labels: any shape; not written to.
        seq_lengths: tokens of each sequence. For an end beyond the labels the first label goes,
            which no loss that shifts looks at.
        ignore_index: what stands in the result.

    Returns:
        New labels, or `labels` themselves where there is nothing to do. Waits for nothing where
        the lengths lie beside the labels or on the host.
    """
    if not isinstance(labels, Tensor) or labels.numel() == 0 or _no_lengths(seq_lengths):
        return labels
    if isinstance(seq_lengths, Tensor) and seq_lengths.device == labels.device:
        offsets = torch.ops.cuseq.cu_seqlens(_integers(seq_lengths))
    else:
        offsets = _of_lengths(seq_lengths).to(labels.device).cu_seqlens
    starts = offsets[1:].long()
    starts *= starts < labels.numel()
    masked = labels.clone(memory_format=torch.contiguous_format)
    masked.view(-1).index_fill_(0, starts, ignore_index)
    return masked


def _cached_host_lengths(
    seq_lengths: Tensor, cu_seqlens: Tensor | None = None
) -> tuple[int, ...] | None:
    """What the host knows of lengths already; for paths of unsloth's own, which would read them.

    With offsets, only where they were made of the same layout.
    """
    packed = _layout_behind(seq_lengths)
    if packed is None or (cu_seqlens is not None and packed.cu_seqlens is not cu_seqlens):
        return None
    return tuple(packed.lengths_on_host().tolist())


def fast_rope_embedding(
    Q: Tensor,
    K: Tensor,
    cos: Tensor,
    sin: Tensor,
    rope_embedding_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotates query and key, both in one kernel (`cuseq.apply_rope`).

    Args:
        Q, K: `[batch, heads, seqlen, head_dim]`, any strides; never written to.
        cos, sin: tables `[positions, head_dim]`, with any leading dimensions of size 1.
        rope_embedding_indices: positions `[batch, seqlen]` or `[1, seqlen]`; None counts from 0.

    Returns:
        Both turned, with their dimensions in memory as they were.
    """
    tables = _table(cos), _table(sin)
    positions = _positions(rope_embedding_indices, Q.shape[0], Q.shape[2], Q.device)
    options: dict[str, Any] = {"position_ids": positions, "qkv_format": "bhsd"}
    if Q.dtype == K.dtype:
        return cuseq.apply_rope(Q, K, *tables, **options)
    # DoRA on some projections leaves them in float32.
    return tuple(cuseq.apply_rope(heads, None, *tables, **options)[0] for heads in (Q, K))


def fast_qk_norm_rope(
    q_norm: nn.Module,
    k_norm: nn.Module,
    Q: Tensor,
    K: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """RMS norm of each head and rotation, of query and key in one kernel, frozen weights or not.

    Args:
        q_norm, k_norm: have `weight` `[head_dim]` and `variance_epsilon` or `eps`.
        Q, K: `[batch, seqlen, heads, head_dim]`, any strides; never written to.
        cos, sin, position_ids: as for `fast_rope_embedding`.

    Returns:
        Both, `[batch, heads, seqlen, head_dim]`.
    """
    positions = _positions(position_ids, *Q.shape[:2], Q.device)
    options: dict[str, Any] = {"position_ids": positions, "qkv_format": "bshd"}
    tables = _table(cos), _table(sin)
    weights, eps = (q_norm.weight, k_norm.weight), (_eps(q_norm), _eps(k_norm))
    if eps[0] == eps[1] and weights[0].dtype == weights[1].dtype and Q.dtype == K.dtype:
        Q, K = cuseq.apply_qk_norm_rope(Q, K, *weights, *tables, eps=eps[0], **options)
    else:  # one kernel has one of each
        Q, _ = cuseq.apply_qk_norm_rope(Q, None, weights[0], None, *tables, eps=eps[0], **options)
        K, _ = cuseq.apply_qk_norm_rope(K, None, weights[1], None, *tables, eps=eps[1], **options)
    return Q.transpose(1, 2), K.transpose(1, 2)


# ------------------------------------------------------------------------------------- on and off


class _Replaced(NamedTuple):
    name: str
    original: Any
    ours: Any


class _Enabled(NamedTuple):
    """What `disable` puts back."""

    functions: list[_Replaced]
    collators: list[weakref.ref]
    blocks: list[type]


_state: _Enabled | None = None

_FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    _PACKING: (
        get_packed_info_from_kwargs,
        build_sdpa_packed_attention_mask,
        build_xformers_block_causal_mask,
        mask_packed_sequence_boundaries,
        mask_packed_boundary_labels,
        _cached_host_lengths,
    ),
    "unsloth.kernels.rope_embedding": (fast_rope_embedding,),
    "unsloth.kernels.qk_norm_rope": (fast_qk_norm_rope,),
}
# Signatures of what is wrapped, and has no function of the same name here.
_WRAPPED = {
    (_DISPATCH, "_run_attention"): "(*, config, context, Q, K, V)",
    (_PACKING, "enable_sample_packing"): "(model, trainer, *, sequence_lengths_key='seq_lengths')",
    (_PACKING, "enable_padding_free_metadata"): "(model, trainer)",
    (_BLOCKS, "_wrap"): "(cls, compile_options, kinds=1)",
}
# What attention is told. A field that is not known could ask for what cuseq does not do.
_FIELDS = {
    "AttentionConfig": (
        "backend n_kv_heads n_groups flash_dense_kwargs flash_varlen_kwargs sdpa_kwargs "
        "xformers_kwargs"
    ),
    "AttentionContext": (
        "bsz q_len kv_seq_len n_heads head_dim requires_grad seq_info attention_mask causal_mask "
        "sliding_window prefix_seg_info is_causal training"
    ),
}


def enable(trainer: Any | None = None, *, compile_blocks: bool = False) -> None:
    """Lets unsloth train packed rows with cuseq, models loaded before and after.

    It replaces the functions above wherever a module of unsloth holds them, the function through
    which its attention goes (packed rows that would take `scaled_dot_product_attention`, in runs of
    equal lengths or under a dense mask, or xformers, take `cuseq.varlen_attention`; flash-attn's
    rows stay its own), and the collators of its packing trainers, whose batches
    get a `PackedLayout` as `packed`, so that lengths are never read back from the GPU.

    Args:
        trainer: a packing or padding-free trainer that exists already; those made later need not be
            named.
        compile_blocks: lets the compiled decoder blocks of unsloth's own classes take packed rows,
            which they run uncompiled; cuseq reads lengths when the block runs, so one graph serves
            every pack.

    Names that modules of your own have imported from unsloth by value stay unsloth's.

    Raises:
        ImportError: unsloth was not imported yet.
        ValueError: enabled already; or a function of this unsloth is missing or has another
            signature, or its attention is told more: the name is said, and nothing is replaced.

    Never waits for a GPU.

    Example:
        >>> import unsloth
        >>> cuseq.integrations.unsloth.enable()
    """
    global _state
    if _state is not None:
        raise ValueError("enable must not be called twice: call disable first")
    functions = [
        _Replaced(name, original, _ours(name, original))
        for name, original in _checked(compile_blocks)
    ]
    if trainer is not None:
        _check_packing_trainer(trainer)

    _state = _Enabled(functions, [], [])
    for function in functions:
        _rebind(function.original, function.ours)
    if trainer is not None:
        _hand_on_layout(trainer)
    if compile_blocks:
        for cls in _compiled_blocks():
            _let_packed_rows_in(cls)


def disable() -> None:
    """Puts back everything that `enable` replaced, in every module.

    Raises:
        ValueError: not enabled.
    """
    global _state
    if _state is None:
        raise ValueError("disable must come after enable")
    state, _state = _state, None
    for function in state.functions:
        _rebind(function.ours, function.original)
    # What somebody has wrapped meanwhile stays, and steps aside.
    for reference in state.collators:
        collator = reference()
        if hasattr(getattr(collator, "torch_call", None), _OURS):
            collator.torch_call = collator.torch_call.__wrapped__
    for cls in state.blocks:
        if hasattr(cls.forward, _OURS):
            cls.forward = cls.forward.__wrapped__


def _checked(compile_blocks: bool) -> list[tuple[str, Callable[..., Any]]]:
    """Names and functions of unsloth that are replaced, all of a known signature."""
    if "unsloth" not in sys.modules:
        raise ImportError("enable must come after the import of unsloth, which is not imported yet")
    asked = {
        (module, ours.__name__): _signature(ours)
        for module, functions in _FUNCTIONS.items()
        for ours in functions
    } | {key: text for key, text in _WRAPPED.items() if compile_blocks or key[0] != _BLOCKS}
    found = []
    for (module, name), expected in asked.items():
        original = getattr(sys.modules.get(module), name, None)
        if not callable(original):
            raise _unknown(f"{module}.{name}", "is missing")
        if _signature(original) != expected:
            raise _unknown(f"{module}.{name}", f"takes {_signature(original)}, not {expected}")
        found.append((name, original))
    for name, fields in _FIELDS.items():
        has = getattr(getattr(sys.modules[_DISPATCH], name, None), "__dataclass_fields__", {})
        for field in sorted(set(has) ^ set(fields.split())):
            what = "has a field" if field in has else "has no field"
            raise _unknown(f"{_DISPATCH}.{name}", f"{what} {field}")
    return found


def _signature(function: Callable[..., Any]) -> str:
    """Names, kinds and defaults."""
    signature = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(plain))


def _unknown(symbol: str, what: str) -> ValueError:
    version = getattr(sys.modules["unsloth"], "__version__", "of unknown version")
    return ValueError(f"cuseq does not know this unsloth ({version}): {symbol} {what}")


def _ours(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    if name == "_run_attention":
        return functools.partial(_run_attention, original)
    if name.startswith("enable_"):
        return _then_hand_on_layout(original)
    if name == "_wrap":
        return _then_let_packed_rows_in(original)
    return globals()[name]


def _original(name: str) -> Callable[..., Any]:
    """unsloth's function, for compiled code that cuseq has no part in."""
    if _state is not None:
        for function in _state.functions:
            if function.name == name:
                return function.original
    raise RuntimeError(f"{name} cannot be compiled without packed, a cuseq.PackedLayout")


def _modules() -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if name.lower().startswith("unsloth") and isinstance(module, ModuleType):
            yield module


def _rebind(old: Any, new: Any) -> None:
    """Wherever a module of unsloth holds it: names are imported by value."""
    for module in _modules():
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)


# -------------------------------------------------------------------------------------- attention


# The backends whose packed rows become cuseq's, and what unsloth hands to them.
_OPTIONS = {"sdpa": "sdpa_kwargs", "xformers": "xformers_kwargs"}


def _run_attention(
    original: Callable[..., Tensor], *, config: Any, context: Any, Q: Tensor, K: Tensor, V: Tensor
) -> Tensor:
    """unsloth's dispatch: `[1, heads, tokens, head_dim]` to `[1, tokens, heads, head_dim]`."""
    if context.seq_info is None or not _is_ours(config, context, Q, K, V):
        if context.seq_info is not None and isinstance(context.seq_info[0], PackedLayout):
            # unsloth then runs the block uncompiled, where its own attention is told more.
            raise ValueError("compiled blocks must attend without dropout, masks and soft caps")
        return original(config=config, context=context, Q=Q, K=K, V=V)
    if torch.compiler.is_compiling():
        packed = context.seq_info[0]
    else:
        packed = _row_of(context.seq_info, Q.shape[2]).to(Q.device)
    rows = [states.transpose(1, 2).flatten(0, 1) for states in (Q, K, V)]
    out = cuseq.varlen_attention(
        *rows,
        packed,
        causal=context.is_causal,
        window=_window(context.sliding_window),
        scale=_options(config).get("scale"),
    )
    return out.unsqueeze(0)


def _is_ours(config: Any, context: Any, Q: Tensor, K: Tensor, V: Tensor) -> bool:
    """Whether it is one packed row, which sdpa or xformers would attend to as cuseq does."""
    if (
        config.backend not in _OPTIONS
        or context.attention_mask is not None
        or context.prefix_seg_info is not None
        or not (context.is_causal or _window(context.sliding_window) is None)
        or Q.shape[0] != 1
        or Q.shape[2] != K.shape[2]
        or not Q.dtype == K.dtype == V.dtype
        or (config.flash_varlen_kwargs or {}).get("softcap")
    ):
        return False
    if any(name != "scale" and not _is_off(value) for name, value in _options(config).items()):
        return False
    if torch.compiler.is_compiling():
        return isinstance(context.seq_info[0], PackedLayout)
    # The backward of flash attention adds in any order.
    return not torch.are_deterministic_algorithms_enabled()


def _options(config: Any) -> dict[str, Any]:
    return getattr(config, _OPTIONS[config.backend]) or {}


def _is_off(option: Any) -> bool:
    return option is None or (isinstance(option, int | float) and not option)


# ------------------------------------------------------------------------------------- collators


def _check_packing_trainer(trainer: Any) -> None:
    collator = getattr(trainer, "data_collator", None)
    marks = ("_unsloth_packing_wrapped", "_unsloth_padding_free_lengths_wrapped")
    if not any(getattr(collator, mark, False) for mark in marks):
        raise ValueError(
            "trainer must be one that unsloth lets pack or run padding-free, got one with the data "
            f"collator {type(collator).__name__}"
        )


def _then_hand_on_layout(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def enable_packing(model: Any, trainer: Any, **options: Any) -> None:
        original(model, trainer, **options)
        if _state is not None:
            _hand_on_layout(trainer)

    return enable_packing


# Marks what is wrapped here.
_OURS = "_cuseq_wrapped"


def _hand_on_layout(trainer: Any) -> None:
    """A collator's batches get `packed`, from lengths that are on the host.

    Not for a model that takes no keyword of that name; there the lengths alone say it.
    """
    collator = getattr(trainer, "data_collator", None)
    torch_call = getattr(collator, "torch_call", None)
    if torch_call is None or hasattr(torch_call, _OURS) or not _takes_layout(trainer.model):
        return

    @functools.wraps(torch_call)
    def torch_call_with_layout(examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = torch_call(examples)
        lengths, ids = batch.get(_LENGTHS), batch.get("input_ids")
        if _state is not None and lengths is not None and ids is not None and len(ids) == 1:
            batch["packed"] = PackedLayout.from_lengths(lengths, ids.shape[1])
        return batch

    setattr(torch_call_with_layout, _OURS, True)
    collator.torch_call = torch_call_with_layout
    _state.collators.append(weakref.ref(collator))


def _takes_layout(model: nn.Module) -> bool:
    inner = getattr(model, "get_base_model", lambda: model)()  # peft's own takes everything
    parameters = inspect.signature(inner.forward).parameters
    return "packed" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


# --------------------------------------------------------------------------------- compiled blocks


def _then_let_packed_rows_in(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def wrap(cls: type, *arguments: Any, **options: Any) -> None:
        original(cls, *arguments, **options)
        if _state is not None:
            _let_packed_rows_in(cls)

    return wrap


def _compiled_blocks() -> Iterator[type]:
    """Classes of decoder layers that unsloth has made compile themselves."""
    seen, waiting = set(), [nn.Module]
    while waiting:
        cls = waiting.pop()
        if cls in seen:
            continue
        seen.add(cls)
        waiting += cls.__subclasses__()
        if hasattr(vars(cls).get("forward"), "_unsloth_block_original"):
            yield cls


def _let_packed_rows_in(cls: type) -> None:
    """unsloth's blocks step aside for lengths, but not for a layout, which no graph depends on.

    The layout covers the row whole, its tail as one more sequence, as unsloth attends. Blocks of
    transformers' classes take packed rows already, and look for their lengths.
    """
    forward = cls.forward
    inner = getattr(forward, "_unsloth_block_original", None)
    if hasattr(forward, _OURS) or not getattr(inner, "__module__", "").startswith("unsloth.models"):
        return

    @functools.wraps(forward)
    def forward_with_layout(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any):
        if kwargs.get("packed") is not None and self.training and _may_compile():
            info = get_packed_info_from_kwargs(kwargs, hidden_states.device)
            row = _row_of(info, hidden_states.shape[1]).to(hidden_states.device)
            kwargs = kwargs | {"packed": row, _LENGTHS: None}
        return forward(self, hidden_states, *args, **kwargs)

    setattr(forward_with_layout, _OURS, True)
    cls.forward = forward_with_layout
    _state.blocks.append(cls)


def _may_compile() -> bool:
    """Whether compiled attention would be cuseq's."""
    if _state is None or torch.compiler.is_compiling():
        return False
    backend = sys.modules[_DISPATCH].select_attention_backend(True)
    return backend in _OPTIONS and not torch.are_deterministic_algorithms_enabled()


# ---------------------------------------------------------------------------------------- layouts


def _layout_behind(lengths: Tensor) -> PackedLayout | None:
    """The layout whose lengths these are, where unsloth hands on those of a `PackedInfo`."""
    known = remember(lengths, "layout", lambda: None)
    return None if known is None else known()


def _of_lengths(lengths: Sequence[int] | Tensor) -> PackedLayout:
    if not isinstance(lengths, Tensor):
        return PackedLayout.from_lengths(list(lengths))
    packed = _layout_behind(lengths)
    if packed is not None:
        return packed
    return remember(lengths, "lengths", lambda: PackedLayout.from_lengths(_integers(lengths)))


def _integers(lengths: Tensor) -> Tensor:
    row = lengths.reshape(-1)
    return row.int() if row.dtype in (torch.int8, torch.int16, torch.uint8) else row


def _of_positions(position_ids: Tensor) -> PackedLayout:
    """Sequences start where positions are 0.

    One sequence where the row does not start so: then positions mean something else.
    """
    if to_host(position_ids[0, :1]).tolist() != [0]:
        return PackedLayout.from_lengths([position_ids.numel()])
    # In a plane sequences start where numbers drop, or stay 0.
    return PackedLayout.from_position_ids((position_ids != 0).int().unsqueeze(0), plane=0)


# By layouts, and by the devices that were asked for.
_infos: weakref.WeakKeyDictionary[PackedLayout, dict[Any, PackedInfo]] = weakref.WeakKeyDictionary()
# Layouts of whole rows, by the layouts of their sequences and the tokens of the row.
_rows: weakref.WeakKeyDictionary[PackedLayout, dict[int, PackedLayout]] = (
    weakref.WeakKeyDictionary()
)


def _row_of(seq_info: Sequence[Any], total_tokens: int | None) -> PackedLayout:
    """The layout of a row without a tail: what is left is one more sequence, as in unsloth."""
    packed = seq_info.layout() if isinstance(seq_info, PackedInfo) else None
    if packed is None:
        packed = _of_lengths(seq_info[0])
    if packed.pads_between_sequences:
        raise ValueError("packed must have no padding between its sequences for unsloth")
    real = packed.num_real_tokens
    total = real if total_tokens is None else max(real, total_tokens)
    if total == packed.total_tokens == real:
        return packed
    rows = _rows.setdefault(packed, {})
    if total not in rows:
        lengths = packed.lengths_on_host()
        if total > real:
            lengths = torch.nn.functional.pad(lengths, (0, 1), value=total - real)
        rows[total] = PackedLayout.from_lengths(lengths, total)
    return rows[total]


def _no_lengths(seq_lengths: Sequence[int] | Tensor | None) -> bool:
    if isinstance(seq_lengths, Tensor):
        return seq_lengths.numel() == 0
    return seq_lengths is None or len(seq_lengths) == 0


def _window(sliding_window: int | None) -> int | None:
    return sliding_window if sliding_window is not None and sliding_window > 0 else None


def _with_window(bias: Any, window: int | None) -> Any:
    if window is None or not hasattr(bias, "make_local_attention"):
        return bias
    return bias.make_local_attention(window_size=window)


def _positions(
    position_ids: Tensor | None, batch: int, seqlen: int, device: torch.device
) -> Tensor | None:
    if position_ids is None:
        return None
    rows = 1 if position_ids.numel() == seqlen else batch
    return position_ids.reshape(rows, seqlen).to(device)


def _table(angles: Tensor) -> Tensor:
    return angles.reshape(-1, angles.shape[-1])


def _eps(norm: nn.Module) -> float:
    for name in ("variance_epsilon", "eps"):  # transformers' name, and torch's
        if hasattr(norm, name):
            return getattr(norm, name)
    raise TypeError(f"a norm must have variance_epsilon or eps, got {type(norm).__name__}")
