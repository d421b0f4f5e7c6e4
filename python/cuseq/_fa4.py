"""The kernels of FlashAttention 4, for the backend "fa4" of attention.

The package flash-attn-4 compiles its kernels when they are first needed and launches them from
Python. Its own functions look up each compiled kernel by some thirty facts and check their
arguments, which takes longer than short rows take on the GPU. So on sm_90, with the version whose
kernels are known here, they run once for each kind of call; afterwards the kernels that they
compiled are launched directly.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from cuseq._packages import register_kernels

_KNOWN_VERSION = "4.0.0b8"
_CAPABILITIES = (9, 10)

_package: Any = None
_launches_directly = False
_library: torch.library.Library | None = None
_lock = threading.Lock()
_forward_kernels: dict[tuple[Any, ...], Callable[..., Any]] = {}
_backward_kernels: dict[tuple[Any, ...], _Backward] = {}


def register(capability: tuple[int, int]) -> str:
    """Register the kernels for CUDA. Return an empty string, or why they cannot be used."""
    global _package, _launches_directly, _library
    if capability[0] not in _CAPABILITIES:
        sm = "".join(map(str, capability))
        return f"FlashAttention 4 runs on GPUs of sm_90 and sm_100, got sm_{sm}"
    try:
        version = metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return "FlashAttention 4 is not installed: pip install 'cuseq[fa4]'"
    try:
        _package = importlib.import_module("flash_attn.cute.interface")
    except Exception as error:  # its dependencies fail in many ways
        return (
            f"flash-attn-4 {version} cannot be imported ({type(error).__name__}: {error}): "
            "pip install 'cuseq[fa4]' installs versions that fit each other"
        )
    _launches_directly = known = version == _KNOWN_VERSION and capability[0] == 9
    _library = register_kernels(
        "fa4", f"flash-attn-4 {version}", forward, backward, takes_two_rows=known
    )
    return ""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
) -> None:
    """Compute attention into `out` and `logsumexp`, for the op `cuseq::fa4_forward`.

    Rows are fp16 or bf16 `[tokens, heads, head_dim]` with zeros in a tail; `logsumexp` is fp32
    `[heads, tokens]`, offsets are int32 `[n_seqs + 1]`. Longest lengths and windows count tokens. A
    window does not count the query; None means all keys. Never synchronises.
    """
    key = (q.dtype, q.shape[1:], k.shape[1], v.shape[2], causal, window_left is None)
    kernel = _forward_kernels.get(key)
    if kernel is not None:
        kernel(
            q, k, v, out, logsumexp, scale, cu_seqlens_q, cu_seqlens_k, None, None, None,
            window_left, window_right, None, None, None,
        )  # fmt: skip
        return

    def run() -> None:
        _package._flash_attn_fwd(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            softmax_scale=scale,
            causal=causal,
            window_size_left=window_left,
            window_size_right=window_right,
            return_lse=True,
            out=out,
            lse=logsumexp,
        )

    used = _recorded(run, "_flash_attn_fwd")
    if len(used) == 1:
        (_forward_kernels[key],) = used


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    causal: bool,
    window_left: int | None,
    window_right: int | None,
) -> None:
    """Compute gradients into `grad_q`, `grad_k` and `grad_v`, for the op `cuseq::fa4_backward`.

    Shapes and dtypes are those of the forward; gradients have them too. Never synchronises.
    """
    key = (q.dtype, q.shape[1:], k.shape[1], v.shape[2], causal, window_left is None)
    kernels = _backward_kernels.get(key)
    if kernels is not None:
        kernels.launch(
            grad_out, q, k, v, out, logsumexp, grad_q, grad_k, grad_v, cu_seqlens_q, cu_seqlens_k,
            scale, window_left, window_right,
        )  # fmt: skip
        return

    def run() -> None:
        _package._flash_attn_bwd(
            q,
            k,
            v,
            out,
            grad_out,
            logsumexp,
            softmax_scale=scale,
            causal=causal,
            window_size_left=window_left,
            window_size_right=window_right,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            dq=grad_q,
            dk=grad_k,
            dv=grad_v,
        )

    used = _recorded(run, "_bwd_preprocess", "_flash_attn_bwd", "_bwd_postprocess_convert")
    grouped = q.shape[1] > k.shape[1]
    if len(used) == (5 if grouped else 3):
        local = window_left is not None
        tiles = _package._tile_size_bwd_sm90(q.shape[2], v.shape[2], causal and not local, local)
        _backward_kernels[key] = _Backward(used, tiles.m_block_size, tiles.n_block_size, grouped)


class _Backward:
    """The kernels of one kind of backward, in the order in which the package launches them."""

    def __init__(
        self, kernels: list[Callable[..., Any]], m_block: int, n_block: int, grouped: bool
    ):
        self._prepare, self._main, self._finish_q, *self._finish_kv = kernels
        self._m_block, self._n_block, self._grouped = m_block, n_block, grouped

    def launch(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        grad_q: Tensor,
        grad_k: Tensor,
        grad_v: Tensor,
        offsets_q: Tensor,
        offsets_k: Tensor,
        scale: float,
        window_left: int | None,
        window_right: int | None,
    ) -> None:
        heads, dim, value_dim = q.shape[1], _rounded(q.shape[2], 32), _rounded(v.shape[2], 32)
        wide: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
        # Each sequence begins at a multiple of the tile in these.
        rows = self._rows(q, offsets_q, self._m_block)
        sums = torch.empty(2, heads, rows, **wide)
        delta, scaled_lse = sums.unbind()
        sum_q = torch.empty(heads, rows * dim, **wide)
        self._prepare(out, grad_out, delta, logsumexp, scaled_lse, sum_q, offsets_q, None, None)
        sum_k, sum_v = grad_k, grad_v
        if self._grouped:  # several query heads add to the same keys
            rows = self._rows(k, offsets_k, self._n_block)
            sum_k = torch.zeros(k.shape[1], rows * dim, **wide)
            sum_v = torch.zeros(k.shape[1], rows * value_dim, **wide)
        self._main(
            q, k, v, grad_out, scaled_lse, delta, sum_q, sum_k, sum_v, scale, offsets_q, offsets_k,
            None, None, None, window_left, window_right, None, None, None, None, None,
        )  # fmt: skip
        self._finish_q(sum_q, grad_q, scale, offsets_q, None)
        if self._grouped:
            finish_k, finish_v = self._finish_kv
            finish_k(sum_k, grad_k, scale, offsets_k, None)
            finish_v(sum_v, grad_v, 1.0, offsets_k, None)

    @staticmethod
    def _rows(tensor: Tensor, offsets: Tensor, block: int) -> int:
        return (tensor.shape[0] + offsets.shape[0] * block - 1) // block * block


@contextmanager
def through_the_package() -> Iterator[None]:
    """Let the package's own functions run meanwhile, for comparisons."""
    global _launches_directly
    kept = _launches_directly, dict(_forward_kernels), dict(_backward_kernels)
    _launches_directly = False
    _forward_kernels.clear()
    _backward_kernels.clear()
    try:
        yield
    finally:
        _launches_directly = kept[0]
        _forward_kernels.update(kept[1])
        _backward_kernels.update(kept[2])


def _rounded(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


class _Recorder:
    """Stands in for one of the package's caches of compiled kernels and notes which are used."""

    def __init__(self, cache: Any, used: list[Callable[..., Any]]):
        self._cache, self._used = cache, used

    def __contains__(self, key: Any) -> bool:
        return key in self._cache

    def __setitem__(self, key: Any, kernel: Callable[..., Any]) -> None:
        self._cache[key] = kernel

    def __getitem__(self, key: Any) -> Callable[..., Any]:
        kernel = self._cache[key]
        self._used.append(kernel)
        return kernel


def _recorded(run: Callable[[], None], *functions: str) -> list[Callable[..., Any]]:
    """Call `run`; return the kernels that it launched from the caches of these functions.

    The list is empty if kernels must not be launched directly.
    """
    if not _launches_directly:
        run()
        return []
    used: list[Callable[..., Any]] = []
    with _lock, _recording([getattr(_package, name) for name in functions], used):
        run()
    return used


@contextmanager
def _recording(functions: list[Any], used: list[Callable[..., Any]]) -> Iterator[None]:
    caches = [function.compile_cache for function in functions]
    for function, cache in zip(functions, caches, strict=True):
        function.compile_cache = _Recorder(cache, used)
    try:
        yield
    finally:
        for function, cache in zip(functions, caches, strict=True):
            function.compile_cache = cache
