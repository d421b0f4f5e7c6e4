"""Attention inside the sequences of a packed row."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from cuseq import _C
from cuseq._arguments import (
    as_float,
    as_window,
    check_flag,
    check_tensor,
    check_untransformed,
    check_values,
)
from cuseq._backends import (
    Question,
    check_backend,
    fits_flex,
    ignored_rows,
    is_wide,
    load_backends,
    takes_flex,
    why_flex,
)
from cuseq._flex import attend_by_flex
from cuseq._tree_choice import one_kernel_pays, why_one_kernel
from cuseq._tree_masks import attend_densely, hides_nothing
from cuseq.distributed._groups import name_or_default
from cuseq.layout import (
    PackedLayout,
    Row,
    Spans,
    check_layout,
    checked_spans,
    remember_offsets_on_host,
)

_ops = torch.ops.cuseq


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedLayout,
    *,
    causal: bool = True,
    window: int | None = None,
    spans: Spans | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute exact softmax attention inside each sequence of a packed row.

    Several backends compute it. `backend="auto"` takes the one that was the fastest where something
    like the call was measured: FlashAttention 4 if it is installed, PyTorch's flash kernels, or
    flex attention. For inputs that flash attention refuses (fp32, head_dim above 256, GPUs below
    sm_80), another exact kernel runs, with one warning per process unless it is flex attention's.
    `cuseq.attention_backend` names the one that is chosen and says why. Grouped-query attention
    needs no repeated keys. No tensor of size tokens x tokens is ever made.

    Equivalent to, for each sequence `s` of the layout:
        `scaled_dot_product_attention(q[s], k[s], v[s], is_causal=causal, scale=scale)`
    With `softcap` the scores become `softcap * tanh(score / softcap)` before the softmax. The
    output and the gradients are zero on padding and tail.

    With the layout of a `PackedTree` a token sees its path, and a window counts tokens of the path.
    A window shorter than the longest path runs as flex attention, or densely if flex cannot run. In
    eager code a deep tree runs in the same way if that is faster by modelled time.

    Args:
        q: `[total_tokens, heads, head_dim]`; the last dimension must be contiguous.
        k: `[total_tokens, key_heads, head_dim]`; `heads` is a multiple of `key_heads`.
        v: `[total_tokens, key_heads, value_dim]`.
        packed: the row's layout, on the device of `q`.
        causal: whether a token sees only itself and earlier tokens.
        window: number of keys that a token sees, itself included (transformers' `sliding_window`);
            with `causal=False` in both directions. None means all keys.
        spans: (start, end) pairs in tokens of the row; in compiled code an int32 tensor
            `[n_spans, 2]`, as in `PackedLayout.dense_mask`. Tokens of a span see all of it.
        scale: factor of the scores, default `head_dim ** -0.5`.
        softcap: bound of the scores, above 0 (Gemma 2; Gemma Team 2024, arXiv:2408.00118). None
            means no bound.
        sinks: floating point `[heads]`, one score per head that is added to the softmax's
            denominator and has no value (GPT-OSS; Xiao et al. 2023, arXiv:2309.17453).
        backend: "auto"; "flash", PyTorch's flash kernels or what
            `torch.nn.attention.activate_flash_attention_impl` has put in their place; "fa4" and
            "fa3", FlashAttention 4 and 3, whose packages must be installed; "flex", flex attention,
            which compiles a kernel at the first call; "efficient", PyTorch's memory-efficient
            kernel; "segments", one sequence after the other.

    Returns:
        `[total_tokens, heads, value_dim]`, contiguous. Differentiable once.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or the layout do not fit; or the backend that
            was asked for is not installed or cannot take the call, and the message says what to do;
            or the plan of a rank's part does not serve the options, or its process group is
            unknown.
        RuntimeError: another rank failed, or did not call within the timeout of the group.

    For a layout from `cp_partition`, all ranks of its group must make the same call, forward and
    backward, each with its own tokens. They exchange the keys that the plan names, and each rank
    gets its tokens of what one process would compute for the whole row. `causal=False` and spans
    need policy "ulysses"; spans then count tokens of the whole row. Over NCCL the host does not
    wait for the exchange.

    Inside torch.compile one graph serves every pack with the same `total_tokens`, because the op
    reads the lengths when it runs. With a layout from host lengths nothing synchronises. With a
    layout from lengths on a GPU the first call waits for the event of one small copy. Under
    autocast the computation uses the region's dtype, as in scaled_dot_product_attention.

    Examples:
        >>> packed = cuseq.PackedLayout.from_lengths([2, 3])
        >>> q, k, v = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
        >>> cuseq.varlen_attention(q, k, v, packed).shape
        torch.Size([5, 4, 16])
    """
    options = _checked(q, k, v, packed, causal, window, spans, scale, softcap, sinks, backend)
    if packed.is_tree:
        options = options.of_tree(packed)
        if options.window is not None or one_kernel_pays(q, v, packed, options.backend):
            return _attend_along_paths(q, k, v, packed, sinks, options)
    if _runs_flex(q, v, packed, options):
        if not is_compiling():  # the checks of the op, which does not run
            _choice(q, k, v, packed, options._replace(backend="auto"))
        return attend_by_flex(q, k, v, packed, sinks=sinks, **options.of_flex())
    arguments = options.of_op(q, packed)
    if is_compiling():
        return _attend(q, k, v, sinks, arguments)
    try:
        return _attend(q, k, v, sinks, arguments)
    except (RuntimeError, TypeError):
        # The dispatcher's message would print the schema. Checking first would cost time.
        _check_rows(q, k, v)
        raise


class AttentionBackend(NamedTuple):
    """The backend of a call of `varlen_attention`, and why it was chosen."""

    name: str
    reason: str


def attention_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedLayout,
    *,
    causal: bool = True,
    window: int | None = None,
    spans: Spans | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> AttentionBackend:
    """Return which backend `varlen_attention` runs for the same arguments in eager code, and why.

    Nothing is computed. Waits as `varlen_attention` does for a layout from lengths on a GPU.

    Returns:
        `AttentionBackend(name, reason)`. The reason says whether measurements chose, with their
        times, or a rule, on a GPU or for a call that nobody measured; and which rows of the user's
        own table of measurements are not used here.

    Raises:
        ValueError, TypeError: as `varlen_attention`.

    Examples:
        >>> packed = cuseq.PackedLayout.from_lengths([2, 3])
        >>> q, k, v = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
        >>> cuseq.attention_backend(q, k, v, packed).name
        'segments'
    """
    _check_rows(q, k, v)
    options = _checked(q, k, v, packed, causal, window, spans, scale, softcap, sinks, backend)
    if packed.is_tree:
        options = options.of_tree(packed)
        _check_along_paths(q, k, v, packed, options)
        if options.window is not None:
            name = _path_backend(q, v, packed, options)
            return AttentionBackend(name, "its window counts tokens of a path of the tree")
        if one_kernel_pays(q, v, packed, options.backend):
            name = _path_backend(q, v, packed, options)
            return AttentionBackend(name, why_one_kernel(q, v, packed))
    if _runs_flex(q, v, packed, options):
        name, reason = "flex", why_flex(q, v, packed, options.question())
    else:
        name, reason = _choice(q, k, v, packed, options)
    rows = ignored_rows() if q.is_cuda and backend == "auto" else ""
    return AttentionBackend(name, f"{reason}; {rows}" if rows else reason)


class _Options(NamedTuple):
    """The checked options of a call."""

    causal: bool
    window: int | None
    spans: Spans | None
    scale: float | None
    softcap: float | None
    backend: str

    def question(self) -> Question:
        return Question(self.causal, self.window, self.spans, self.softcap, self.backend)

    def of_tree(self, packed: PackedLayout) -> _Options:
        """Return the options for a tree, without a window that hides nothing.

        Raises:
            ValueError: an option is not for trees.
        """
        if not self.causal:
            raise ValueError("causal must be True for a tree, got False")
        if self.spans is not None:
            raise ValueError("spans must be None for a tree")
        if self.window is None or hides_nothing(packed, self.window):
            return self._replace(window=None)
        if self.backend not in ("auto", "flex"):
            raise ValueError(
                f'backend="{self.backend}" cannot take this call: its window counts tokens of the '
                'row, not of a path; backend="auto" chooses one that can'
            )
        return self

    def of_flex(self) -> dict[str, Any]:
        return {
            "causal": self.causal,
            "window": self.window,
            "spans": self.spans,
            "scale": self.scale,
            "softcap": self.softcap,
        }

    def of_op(self, q: Tensor, packed: PackedLayout) -> tuple[Any, ...]:
        """Return the arguments of the op after q, k and v."""
        causal, window, spans, scale, softcap, backend = self
        row, part, tree = packed.row, packed.part, packed.tree
        padded = None if row.segments is None else row.segments.cu_seqlens_static
        if part is not None:
            if spans is not None and not isinstance(spans, Tensor):
                raise TypeError(
                    "spans must be an int32 tensor [n_spans, 2] for a rank's part of a row, got "
                    f"{type(spans).__name__}"
                )
            group = name_or_default(part.group)
            return *self._arguments(row, spans, padded), part.rows, part.meta, group, None, None
        one_by_one = (
            spans is not None
            or softcap is not None
            or (window is not None and not causal)
            or q.dtype == torch.float64
            or backend == "segments"
        )
        if one_by_one and not is_compiling():
            remember_offsets_on_host(packed)
        spans = checked_spans(packed, spans) if spans is not None else None
        nodes = (None, None) if tree is None else (tree.rows, tree.meta)
        return *self._arguments(row, spans, padded), None, None, "", *nodes

    def _arguments(self, row: Row, spans: Tensor | None, padded: Tensor | None) -> tuple[Any, ...]:
        causal, window, _, scale, softcap, backend = self
        meta = row.host_meta
        offsets = row.cu_seqlens_static
        return offsets, meta, causal, window, scale, None, spans, padded, softcap, backend


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedLayout,
    causal: bool,
    window: int | None,
    spans: Spans | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    backend: str,
) -> _Options:
    check_values(q, "q")
    check_values(k, "k")
    check_values(v, "v")
    check_layout(packed)
    if causal is not True and causal is not False:
        check_flag(causal, "causal")
    if window is not None:
        window = as_window(window)
    if scale is not None and not is_compiling():
        scale = as_float(scale, "scale")
        if 0 < scale < 2**-126 and q.dtype != torch.float64:  # zero times -inf would be NaN
            raise ValueError(f"scale must be at least 2^-126 for {q.dtype}, got {scale}")
    if softcap is not None and not is_compiling():
        softcap = as_float(softcap, "softcap")
        if not 2**-100 <= softcap <= 2**100:  # beyond, fp32 has no share of it
            raise ValueError(f"softcap must be None or from 2^-100 to 2^100, got {softcap}")
    if type(backend) is not str or backend != "auto":
        check_backend(backend)
    if sinks is not None:
        if not is_compiling():
            _check_rows(q, k, v)
        _check_sinks(q, k, v, sinks)
    return _Options(causal, window, spans, scale, softcap, backend)


def _runs_flex(q: Tensor, v: Tensor, packed: PackedLayout, options: _Options) -> bool:
    """Return whether flex attention runs the call; load the other backends first."""
    if packed.part is not None:
        if options.backend == "flex":
            raise ValueError(
                'backend="flex" cannot take this call: packed is a rank\'s part of a row, whose '
                'attention runs in one op; backend="auto" chooses one that can'
            )
        if q.is_cuda:
            load_backends()
        return False
    if not q.is_cuda:
        return options.backend == "flex" and takes_flex(q, v, packed, options.question())
    load_backends()
    if not is_compiling():
        _, window, spans, _, softcap, backend = options
        plain = softcap is None and spans is None and (options.causal or window is None)
        plain = plain and not is_wide(q, v)
        if (plain and backend != "flex" and not packed.is_replayed) or isinstance(q, FakeTensor):
            return False
    return takes_flex(q, v, packed, options.question())


def _attend_along_paths(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedLayout, sinks: Tensor | None, options: _Options
) -> Tensor:
    """Compute attention over a tree in one kernel, with the tree's mask."""
    if not is_compiling():
        _check_along_paths(q, k, v, packed, options)
    if _path_backend(q, v, packed, options) == "flex":
        return attend_by_flex(q, k, v, packed, sinks=sinks, **options.of_flex())
    return attend_densely(q, k, v, packed, options.window, options.scale, options.softcap, sinks)


def _check_along_paths(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedLayout, options: _Options
) -> None:
    """Check what the op would check, which does not run."""
    _check_rows(q, k, v)
    _choice(q, k, v, packed, options._replace(backend="auto", window=None))


def _choice(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedLayout, options: _Options
) -> tuple[str, str]:
    """Return the backend that the op would run and why, after the op's checks."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_untransformed(tensor, name, "pass the batch as one packed row")
    return _C.attention_choice(q, k, v, *options.of_op(q, packed))


def _path_backend(q: Tensor, v: Tensor, packed: PackedLayout, options: _Options) -> str:
    asked = options.backend == "flex" and takes_flex(q, v, packed, options.question())
    return "flex" if asked or fits_flex(q, v) else "dense"


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arguments: tuple[Any, ...]
) -> Tensor:
    if sinks is not None:
        return _attention_with_sinks(q, k, v, sinks, arguments)
    return _ops.varlen_attention(q, k, v, *arguments)[0]


def _check_rows(q: Tensor, k: Tensor, v: Tensor) -> None:
    for value, name in ((q, "q"), (k, "k"), (v, "v")):
        check_tensor(value, name)


def _check_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> None:
    check_tensor(sinks, "sinks")
    fits = sinks.shape == q.shape[1:2] and sinks.is_floating_point() and sinks.device == q.device
    if not fits and q.dim() == 3:  # the op itself refuses a q of other dimensions
        raise ValueError(
            f"sinks must be floating point [heads = {q.shape[1]}] on {q.device}, got "
            f"{sinks.dtype} {list(sinks.shape)} on {sinks.device}"
        )
    for tensor, name in ((q, "q"), (k, "k"), (v, "v"), (sinks, "sinks")):
        check_untransformed(tensor, name, "with sinks, pass the batch as one packed row")


def _attention_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, arguments: tuple[Any, ...]
) -> Tensor:
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (t if t.dtype == torch.float64 else t.to(dtype) for t in (q, k, v))
    if is_compiling():
        # Dynamo of torch 2.11 merges arguments that are the same tensor and loses a gradient.
        q, k, v = (rows.view_as(rows) for rows in (q, k, v))
    function = _WithSinks if is_compiling() else _WithSinksInEager
    return function.apply(q, k, v, sinks, *arguments)


class _WithSinks(torch.autograd.Function):
    """Attention with sinks, computed from attention without them.

    A sink is a key without a value. It adds a term to the softmax's denominator, so the output is
    multiplied by the share that the real keys keep. The backward of attention, called with that
    output and that log-sum-exp, already gives the right gradients of q, k and v: the sink affects
    them only through `out . grad_out`.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *arguments: Any
    ) -> Tensor:
        out, logsumexp, far_rows = _ops.varlen_attention(q, k, v, *arguments)
        scores = sinks.detach().to(logsumexp.dtype).unsqueeze(1)
        total = torch.logaddexp(logsumexp, scores)  # [heads, tokens]
        out = out * (logsumexp - total).exp().t().unsqueeze(2).to(out.dtype)
        ctx.save_for_backward(sinks, q, k, v, out, total, far_rows)
        ctx.arguments = arguments
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: under checkpointing a second read fails
        create_graph = torch.is_grad_enabled() and not is_compiling()
        with torch.no_grad():
            grads = _WithSinks.gradients(grad_out, saved, ctx.arguments)
        if create_graph:
            grads = _Once.apply(grad_out, *saved[:4], *grads)
        return *grads, *[None] * len(ctx.arguments)

    @staticmethod
    def gradients(
        grad_out: Tensor, saved: tuple[Any, ...], arguments: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        sinks, _, _, _, out, total, _ = saved
        grads = _ops.varlen_attention_backward(grad_out, *saved[1:], *arguments)
        share = (sinks.to(total.dtype).unsqueeze(1) - total).exp()
        # On padding and tail `out` is zero, and `grad_out` may hold any value, even NaN.
        taken = torch.where(out != 0, grad_out.to(total.dtype) * out, 0).sum(-1)  # [tokens, heads]
        grad_sinks = -torch.einsum("ht,th->h", share, taken.to(total.dtype))
        return *grads, grad_sinks.to(sinks.dtype)


class _Once(torch.autograd.Function):
    """Pass gradients through, and raise if they are differentiated again.

    PyTorch's `once_differentiable` raises only if the incoming gradient has a graph.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Take `grad_out, sinks, q, k, v` and then the gradients."""
        return tuple(grad.clone() for grad in tensors[5:])  # autograd forbids edits of views

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise NotImplementedError(
            "cuseq::varlen_attention cannot be differentiated twice: its kernels have no second "
            "derivative; use eager attention where you need create_graph=True"
        )


class _WithSinksInEager(_WithSinks):
    """The same with a `jvp`, which says that there is none; the compiler refuses such functions."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        raise NotImplementedError(
            "cuseq::varlen_attention has no forward-mode derivative: use reverse mode, or eager "
            "PyTorch where you need jvp"
        )
