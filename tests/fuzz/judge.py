"""Which outcomes are allowed: a right answer, or an error that names an argument."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

import cuseq
from cuseq.layout.records import static_tensors

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import reference

from tests.fuzz.values import readable

MOST_TOKENS = 200  # of a row that the slow reference computes

# Messages of PyTorch's dispatcher, pybind11 and C++: an argument reached them without a check.
RAW = re.compile(
    r"incompatible function arguments|Invoked with:|Declaration: |Expected a value of type"
    r"|INTERNAL ASSERT|Could not run '|Could not find an operator|cannot be cast|Unable to cast"
    r"|has no attribute|object is not|unsupported operand|not subscriptable|not iterable"
    r"|Expected one of|vector::|basic_string|map::at|index out of range|The size of tensor a"
    r"|expected scalar type|shape mismatch|must match the size|invalid for input of size"
)
# Limits of the machine and rules of PyTorch itself, which no argument breaks.
ELSEWHERE = re.compile(
    r"can't allocate memory|out of memory|bad_alloc|bad allocation"
    r"|Storage size calculation overflowed"
    r"|numel: integer multiplication overflow|invalid array size"
    r"|leaf [Vv]ariable|Inference tensors? cannot be|Inplace update to inference tensor"
    r"|Default process group has not been|Invariant encountered"
    r"|fallback doesn't currently support mutable TensorLists"
    r"|Cannot set version_counter for inference|was built without CUDA|No module named"
    r"|Cannot access accelerator device|CUDA driver version"
    r"|Torch not compiled with CUDA|Found no NVIDIA driver"
)


def is_elsewhere(error: BaseException) -> bool:
    """Return whether an error comes from limits and rules that no argument breaks."""
    text = f"{type(error).__name__}: {error}"
    return bool(ELSEWHERE.search(text)) or isinstance(error, MemoryError | ImportError)


def complaint(error: BaseException, names: frozenset[str], changed: bool = False) -> str | None:
    """Return what is wrong with an error, or None if it is fit for a user.

    Args:
        names: what the error may name, one of them.
        changed: whether arguments changed after they were checked, so that it need not.
    """
    text = f"{type(error).__name__}: {error}"
    if is_elsewhere(error):
        return None
    if RAW.search(text):
        return f"raw error: {text}"
    if not isinstance(error, ValueError | TypeError | NotImplementedError):
        return f"error of another type: {text}"
    found = any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", str(error)) for name in names)
    if not found and not changed:
        return f"error without an argument's name: {text}"
    return None


# --------------------------------------------------------------------------- the same answers


def facts(value: Any) -> Any:
    """Return tensors, layouts and numbers of a result as plain values."""
    if isinstance(value, cuseq.PackedLayout):
        rows = () if value.part is not None or value.is_tree else value.batch_rows()
        tensors = value.position_ids, value.seq_ids, value.moe_padding_mask, value.lengths, *rows
        assert all(type(t) is Tensor for t in (*tensors, *static_tensors(value._records)))
        return repr(value), [facts(t) for t in tensors]
    if isinstance(value, cuseq.PackedTree):
        targets = [] if value.input_ids is None else list(value.targets)
        return facts([value.input_ids, value.layout, value.samples, targets])
    if isinstance(value, Tensor):
        return value.detach().as_subclass(Tensor).clone()
    if isinstance(value, list | tuple):
        return [facts(one) for one in value]
    if isinstance(value, dict):
        return {name: facts(one) for name, one in value.items()}
    return repr(value) if isinstance(value, int | float | str | bool | None) else type(value)


def same(found: Any, expected: Any, least: torch.dtype | None = None) -> bool:
    """Return whether `facts` of two results are equal.

    Args:
        least: the coarsest dtype that either was computed in, so that floating-point numbers may
            differ by a few of its roundings, and in dtype if it is bf16. None: by nothing.
    """
    flat, shape = tree_flatten(found)
    other, other_shape = tree_flatten(expected)
    return shape == other_shape and all(
        _same_tensor(one, two, least)
        if isinstance(one, Tensor) and isinstance(two, Tensor)
        else not isinstance(one, Tensor) and not isinstance(two, Tensor) and one == two
        for one, two in zip(flat, other, strict=True)
    )


def _same_tensor(one: Tensor, two: Tensor, least: torch.dtype | None) -> bool:
    may_differ = least == torch.bfloat16 and one.is_floating_point() and two.is_floating_point()
    if one.shape != two.shape or (one.dtype != two.dtype and not may_differ):
        return False
    if one.is_meta or two.is_meta:
        return one.is_meta and two.is_meta
    if least is None or not one.is_floating_point() or one.numel() == 0:
        return torch.equal(one.nan_to_num(7), two.nan_to_num(7))
    rounding = max(torch.finfo(dtype).eps for dtype in (one.dtype, two.dtype, least))
    one, two = one.double().nan_to_num(7), two.double().nan_to_num(7)
    return bool((one - two).abs().max() <= 64 * rounding * max(1.0, two.abs().max().item()))


# --------------------------------------------------------------------------- right answers


def _ints(value: Any) -> list[int] | None:
    """Return the numbers of a vector of integers; None for any other value."""
    if not readable(value) or value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
        return None
    return value.tolist()


def _plain(*values: Any) -> bool:
    """Return whether all tensors have finite numbers that can be read."""
    for value in values:
        if isinstance(value, Tensor):
            if not readable(value) or value.is_complex():
                return False
            if value.is_floating_point() and not bool(value.isfinite().all()):
                return False
    return True


def _equal(result: Any, expected: Any, what: str) -> None:
    found = result.tolist() if isinstance(result, Tensor) else result
    assert found == expected, f"{what}: got {found}, expected {expected}"


def _unchecked(source: Tensor, lengths: list[int], total: int = 2**31 - 1) -> bool:
    """Return whether lengths are wrong and on a GPU, where checking their values would wait.

    Kernels stay inside their tensors then; the numbers that they return mean nothing.
    """
    return source.is_cuda and (any(length < 0 for length in lengths) or sum(lengths) > total)


def per_lengths(name: str) -> Callable[[dict[str, Any], Any], None]:
    def check(arguments: dict[str, Any], result: Any) -> None:
        lengths = _ints(arguments["lengths"])
        if lengths is not None and not _unchecked(arguments["lengths"], lengths):
            expected = getattr(reference, name.removesuffix("_sync"))(lengths)
            _equal(result, expected, name)

    return check


def per_token(name: str) -> Callable[[dict[str, Any], Any], None]:
    def check(arguments: dict[str, Any], result: Any) -> None:
        lengths, total = _ints(arguments["lengths"]), int(arguments["total_tokens"])
        if lengths is None or total > MOST_TOKENS:
            return
        if _unchecked(arguments["lengths"], lengths, total):
            return
        assert sum(lengths) <= total, f"{name} took lengths that sum to more than total_tokens"
        _equal(result, getattr(reference, name)(lengths, total), name)

    return check


def layout_metadata(arguments: dict[str, Any], result: Any) -> None:
    source = _ints(arguments["source"])
    if source is None or arguments["num_seqs"] is not None or arguments["max_seqs"] > MOST_TOKENS:
        return
    if arguments["from_cu_seqlens"]:
        source = [end - begin for begin, end in zip(source, source[1:], strict=False)]
    lengths, offsets, meta = result
    if meta[4] != 0:  # the status says what is wrong with them
        return
    _equal(lengths, source, "lengths")
    expected = reference.cu_seqlens_static(source, arguments["max_seqs"])
    _equal(offsets, expected, "cu_seqlens")
    facts = [len(source), reference.max_seqlen(source), arguments["total_tokens"], sum(source)]
    _equal(meta[:4], facts, "host_meta")


def token_metadata(arguments: dict[str, Any], result: Any) -> None:
    offsets, total = _ints(arguments["cu_seqlens"]), arguments["total_tokens"]
    if offsets is None or total > MOST_TOKENS or arguments["cu_seqlens_padded"] is not None:
        return
    lengths = [end - begin for begin, end in zip(offsets, offsets[1:], strict=False)]
    if _unchecked(arguments["cu_seqlens"], [*offsets[:1], *lengths], total):
        return
    if arguments["cu_seqlens"].is_cuda and offsets[:1] != [0]:
        return
    positions, sequences, is_pad = result
    _equal(positions, reference.position_ids(lengths, total), "position_ids")
    _equal(sequences, reference.seq_ids(lengths, total), "seq_ids")
    _equal(is_pad, [token >= offsets[-1] for token in range(total)], "is_pad")


def lengths_from_padding_mask(arguments: dict[str, Any], result: Any) -> None:
    mask, kind = arguments["mask"], arguments.get("kind", "nonzero")
    if not isinstance(mask, Tensor) or not _plain(mask) or kind == "additive":
        return
    rows = ((mask == 0) if kind == "zero" else (mask != 0)).tolist()
    _equal(result, reference.lengths_from_padding_mask(rows), "lengths")


def cu_seqlens_from_position_ids(arguments: dict[str, Any], result: Any) -> None:
    ids, plane = arguments["position_ids"], arguments["plane"]
    if not isinstance(ids, Tensor) or not _plain(ids):
        return
    rows = ids[int(plane)] if ids.dim() == 3 else ids.view(1, -1) if ids.dim() == 1 else ids
    capacity = rows.numel() if arguments["max_seqs"] is None else int(arguments["max_seqs"])
    if capacity > MOST_TOKENS:
        return
    expected, count = reference.cu_seqlens_from_position_ids(
        rows.tolist(), capacity, is_plane=ids.dim() == 3
    )
    _equal(result[0], expected, "cu_seqlens")
    _equal(result[1], [count], "num_seqs")


def gather_rows(arguments: dict[str, Any], result: Sequence[Tensor]) -> None:
    index, inverse, rows = _ints(arguments["index"]), _ints(arguments["inverse"]), arguments["rows"]
    leading, tensors = arguments["leading"], arguments["tensors"]
    if index is None or inverse is None or not _plain(*tensors):
        return
    for tensor, fill, out in zip(tensors, arguments["fill"], result, strict=True):
        expected = reference.gather_rows(tensor.detach(), index, rows, leading, fill)
        assert torch.equal(out.detach(), expected), f"gather_rows: got {out}, expected {expected}"


def _mask_case(arguments: dict[str, Any]) -> Tensor | None:
    source = arguments["source"] if "source" in arguments else arguments["lengths"]
    values, total = _ints(source), arguments["total_tokens"]
    if values is None or total > MOST_TOKENS or arguments.get("cu_seqlens_padded") is not None:
        return None
    if arguments.get("row_length") is not None or not _plain(arguments.get("spans")):
        return None
    first = [0]
    if arguments.get("from_cu_seqlens"):
        first = values[:1]
        values = [end - begin for begin, end in zip(values, values[1:], strict=False)]
    if source.is_cuda and (first != [0] or arguments.get("spans") is not None):
        return None  # neither offsets nor spans are checked there
    if _unchecked(source, values, total):
        return None
    spans = arguments.get("spans")
    return reference.mask(
        values,
        total,
        causal=bool(arguments["causal"]),
        window=arguments["window"],
        spans=[] if spans is None else spans.tolist(),
    )


def mask_ranges(arguments: dict[str, Any], result: Tensor) -> None:
    expected = _mask_case(arguments)
    if expected is not None:
        keys = torch.arange(len(expected))
        first, end = result.cpu().unsqueeze(2)
        assert torch.equal((keys >= first) & (keys < end), expected), f"mask_ranges: got {result}"


def dense_mask(arguments: dict[str, Any], result: Tensor) -> None:
    expected = _mask_case(arguments)
    if expected is not None:
        seen = result if result.dtype == torch.bool else result == 0
        assert torch.equal(seen[0, 0].cpu(), expected), f"dense_mask: got {result}"


def layout(arguments: dict[str, Any], packed: Any) -> None:
    """Check that a layout's values, tensors and row agree with the lengths it was made from.

    Wrong lengths on a GPU raise at the first host value, so that one is read first.
    """
    if packed.device.type == "meta":
        return
    longest = packed.max_seqlen
    lengths, total = packed.lengths.tolist(), packed.total_tokens
    given = arguments.get("lengths")
    if isinstance(given, list):
        _equal(lengths, [int(length) for length in given], "lengths")
    _equal(packed.cu_seqlens, reference.cu_seqlens(lengths), "cu_seqlens")
    _equal(longest, reference.max_seqlen(lengths), "max_seqlen")
    _equal(packed.num_real_tokens, sum(lengths), "num_real_tokens")
    assert sum(lengths) <= total, "a layout of more tokens than its row"
    if total <= MOST_TOKENS and not packed.pads_between_sequences:
        _equal(packed.position_ids, reference.position_ids(lengths, total), "position_ids")


def attention(arguments: dict[str, Any], out: Tensor) -> None:
    q, k, v, packed = (arguments[name] for name in ("q", "k", "v", "packed"))
    wild = arguments["spans"] is not None or arguments["sinks"] is not None
    if out.is_meta or wild or not _plain(q, k, v) or packed.pads_between_sequences:
        return
    lengths, scale = packed.lengths.tolist(), arguments["scale"]
    if scale is not None and not abs(float(scale)) < 1e3:
        return
    if packed.is_tree:
        return _tree_attention(arguments, out)
    q, k, v = (t.detach().cpu().double() for t in (q, k, v))
    if max(t.abs().max().item() if t.numel() else 0 for t in (q, k, v)) > 1e3:
        return
    window, causal = arguments["window"], bool(arguments["causal"])
    softcap = arguments["softcap"]
    expected = reference.attention(
        q,
        k,
        v,
        lengths,
        causal=causal,
        window=window,
        scale=None if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
    )
    _close(out, expected, "varlen_attention")


def _tree_attention(arguments: dict[str, Any], out: Tensor) -> None:
    """Compare with dense attention over each token's ancestors."""
    q, k, v, packed = (arguments[name] for name in ("q", "k", "v", "packed"))
    rows, softcap, scale = packed.tree.rows, arguments["softcap"], arguments["scale"]
    nodes = packed.seq_ids.tolist()
    positions = packed.position_ids.tolist()
    ends = [rows[node].item() if node < packed.num_sequences else 0 for node in nodes]
    window = arguments["window"] or packed.total_tokens + 1
    q, k, v = (t.detach().cpu().double() for t in (q, k, v))
    if max(t.abs().max().item() if t.numel() else 0 for t in (q, k, v)) > 1e3:
        return
    group = q.shape[1] // k.shape[1]
    expected = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for i in range(q.shape[0]):
        seen = [j for j in range(i + 1) if i < ends[j] and positions[i] - positions[j] < window]
        for head in range(q.shape[1] if seen else 0):
            scores = k[seen, head // group] @ q[i, head]
            scores = scores * (q.shape[2] ** -0.5 if scale is None else float(scale))
            if softcap is not None:
                scores = float(softcap) * torch.tanh(scores / float(softcap))
            expected[i, head] = scores.softmax(0) @ v[seen, head // group]
    _close(out, expected, "varlen_attention of a tree")


def _close(out: Tensor, expected: Tensor, what: str) -> None:
    coarse = {torch.float64: 1e-9, torch.float32: 1e-3}.get(out.dtype, 0.1)
    difference = (out.detach().cpu().double() - expected).abs()
    most = difference.max().item() if difference.numel() else 0.0
    limit = coarse * max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
    assert most <= limit, f"{what} is off by {most}, more than {limit}"


def token_logprobs(arguments: dict[str, Any], result: Any) -> None:
    names = ("hidden", "weight", "targets", "bias")
    hidden, weight, targets, bias = (arguments[name] for name in names)
    options = [arguments[name] for name in ("scale", "softcap", "temperature")]
    if not _plain(hidden, weight, targets, bias) or targets.dim() != 1 or targets.is_cuda:
        return
    if any(value is not None and not 1e-3 < abs(float(value)) < 1e3 for value in options):
        return
    wanted = targets.tolist()
    vocabulary = range(weight.shape[0])
    wrong = [target for target in wanted if target != -100 and target not in vocabulary]
    assert not wrong, f"token_logprobs took targets {wrong} of {len(vocabulary)} tokens"
    scale, softcap, temperature = options
    logits = scale * (hidden.detach().double() @ weight.detach().double().t())
    if bias is not None:
        logits = logits + scale * bias.detach().double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = (logits / temperature).log_softmax(-1)
    expected = [0.0 if t == -100 else float(logprobs[i, t]) for i, t in enumerate(wanted)]
    found = result if isinstance(result, Tensor) else result[0]
    coarse = torch.tensor(expected, dtype=torch.float64)
    if hidden.dtype in (torch.float32, torch.float64):
        _close(found, coarse, "token_logprobs")


def rope(arguments: dict[str, Any], result: Any) -> None:
    q, cos, sin, packed = (arguments[name] for name in ("q", "cos", "sin", "packed"))
    plain = (arguments["table"], arguments["qkv_format"]) == ("position", "thd")
    others = ("position_ids", "mrope_section", "rotary_dim")
    if not plain or any(arguments[name] is not None for name in others) or packed is None:
        return
    whole = packed.part is None and arguments["cp_size"] == 1
    if not whole or arguments["inplace"] or result[0].is_meta or not _plain(q, cos, sin):
        return
    if packed.total_tokens > MOST_TOKENS or 2 * cos.shape[1] > q.shape[2]:
        return  # full tables, or of a part of each head
    positions = packed.position_ids.tolist()
    expected = reference.rope(
        q.detach().cpu(),
        cos.cpu(),
        sin.cpu(),
        positions,
        interleaved=bool(arguments["interleaved"]),
    )
    _close(result[0], expected, "apply_rope")
