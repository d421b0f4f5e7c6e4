"""FlashAttention 4 as its package is called, over stand-ins of it that compute on the CPU.

Each stand-in has the functions of a release, passes arguments to kernels in that release's order,
and keeps its compiled kernels as that release does.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from test_attention import relative
from torch import Tensor

from cuseq.attention import fa4 as _fa4

# What each kernel is passed: a value by its name, None, the number 1.0, or a tuple of None.
ORDERS = {
    "4.0.0b8": {
        "forward": "q k v out lse scale offsets_q offsets_k - - - left right - - -",
        "prepare": "out dout delta lse scaled_lse sum_q offsets_q - -",
        "main": "q k v dout scaled_lse delta sum_q sum_k sum_v scale offsets_q offsets_k"
        " - - - left right - - - - -",
        "finish": "sum grad scale offsets -",
    },
    "4.0.0b36": {
        "forward": "q k v out lse scale offsets_q offsets_k - - - left right - - () index -",
        "prepare": "out dout delta lse scaled_lse sum_q offsets_q - - - - 1.0 index -",
        "main": "q k v dout scaled_lse delta sum_q sum_k sum_v scale offsets_q offsets_k"
        " - - left right - - - () - index",
        "finish": "sum grad scale offsets - - index",
    },
}
FIXED = {"-": None, "1.0": 1.0, "()": (None, None)}
NOTHING = inspect.Parameter.empty
MANY = 6  # sequences from which a later release makes an index of them; 256 there


class Package(SimpleNamespace):
    """flash_attn.cute.interface of a release; `order` replaces what its kernels are passed."""

    def __init__(self, release: str, **order: str):
        super().__init__()
        self.order = {name: o.split() for name, o in (ORDERS[release] | order).items()}
        self.has_index = release != "4.0.0b8"
        self.calls: list[str] = []
        self.before_main = lambda: None
        self.spare = lambda *shape: None
        if self.has_index:
            self.BIN_BATCH_SEARCH_THRESH = MANY
        for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
            setattr(self, name, self._function(name))
        for name in ("prepare", "finish", "make_index"):
            setattr(self, name, self._function(name))

    def _function(self, name: str):
        method = getattr(self, f"_{name.lstrip('_')}")

        def function(*args, **kwargs):
            return method(*args, **kwargs)

        function.__signature__ = inspect.signature(method)
        function.compile_cache = {}
        return function

    def _tile_size_bwd_sm90(self, head_dim, head_dim_v, causal, local, sparse_block_size_q=None):
        return SimpleNamespace(m_block_size=64 if causal or local else 80, n_block_size=128)

    def _launch(self, function, kernel: str, facts: tuple, **values) -> None:
        """Launch a compiled kernel, which knows these facts, as the package does."""
        order = self.order[kernel]
        if facts not in function.compile_cache:
            function.compile_cache[facts] = lambda *args: globals()[kernel](
                facts, **{n: a for n, a in zip(order, args, strict=True) if n not in FIXED}
            )
        values = FIXED | {"index": None} | values
        function.compile_cache[facts](*[values[name] for name in order])

    def _flash_attn_fwd(
        self, q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        softmax_scale=None, causal=False, window_size_left=None, window_size_right=None,
        return_lse=False, out=None, lse=None,
    ):  # fmt: skip
        self.calls.append("forward")
        facts, left, right, index = self._facts(
            q, k, cu_seqlens_q, causal, window_size_left, window_size_right
        )
        self._launch(
            self._flash_attn_fwd, "forward", facts, q=q.detach(), k=k.detach(), v=v.detach(),
            out=out.detach(), lse=lse, scale=softmax_scale, offsets_q=cu_seqlens_q,
            offsets_k=cu_seqlens_k, left=left, right=right, index=index, tokens=q.shape[0],
        )  # fmt: skip
        return out, lse, None, None

    def _flash_attn_bwd(
        self, q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0,
        window_size_left=None, window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None,
        deterministic=False, dq=None, dk=None, dv=None,
    ):  # fmt: skip
        self.calls.append("backward")
        facts, left, right, index = self._facts(
            q, k, cu_seqlens_q, causal, window_size_left, window_size_right
        )
        tiles = self._tile_size_bwd_sm90(*q.shape[2:], v.shape[2], facts.causal, facts.local)
        width = -(-q.shape[2] // 32) * 32
        rows = padded(q.shape[0], cu_seqlens_q, tiles.m_block_size)
        delta, scaled_lse = torch.empty(q.shape[1], rows), torch.empty(q.shape[1], rows)
        sum_q = torch.empty(q.shape[1], rows * width)
        sum_k, sum_v = dk, dv
        grouped = q.shape[1] > k.shape[1]
        if grouped:
            rows = padded(k.shape[0], cu_seqlens_k, tiles.n_block_size)
            sum_k, sum_v = (torch.zeros(k.shape[1], rows * width) for _ in range(2))
        facts = facts._replace(blocks=(tiles.m_block_size, tiles.n_block_size), grouped=grouped)
        more = {"index": index, "tokens": q.shape[0], "offsets_q": cu_seqlens_q}
        more["spare"] = self.spare(*delta.shape)
        self.prepare(facts, out, dout, delta, lse, scaled_lse, sum_q, **more)
        self.before_main()
        self._launch(
            self._flash_attn_bwd, "main", facts, q=q.detach(), k=k.detach(), v=v.detach(),
            dout=dout, scaled_lse=scaled_lse, delta=delta, sum_q=sum_q, sum_k=sum_k, sum_v=sum_v,
            scale=softmax_scale, offsets_k=cu_seqlens_k, left=left, right=right, **more,
        )  # fmt: skip
        self.finish(facts, 0, sum_q, dq, softmax_scale, cu_seqlens_q, index)
        if grouped:
            self.finish(facts, 1, sum_k, dk, softmax_scale, cu_seqlens_k, index)
            self.finish(facts, 1, sum_v, dv, 1.0, cu_seqlens_k, index)
        return dq, dk, dv

    def _prepare(self, facts, out, dout, delta, lse, scaled_lse, sum_q, **more) -> None:
        self._launch(
            self.prepare, "prepare", facts, out=out, dout=dout, delta=delta, lse=lse,
            scaled_lse=scaled_lse, sum_q=sum_q, **more,
        )  # fmt: skip

    def _finish(self, facts, side, total, grad, scale, offsets, index) -> None:
        facts = facts._replace(blocks=facts.blocks[side : side + 1])
        self._launch(
            self.finish, "finish", facts, sum=total, grad=grad, scale=scale, offsets=offsets,
            index=index,
        )  # fmt: skip

    def _make_index(self, offsets) -> Tensor:
        index = torch.empty(offsets.shape[0], dtype=torch.int32)
        cache = self.make_index.compile_cache
        cache.setdefault((), lambda offsets, index: index.copy_(offsets))
        cache[()](offsets, index)
        return index

    def _facts(self, q, k, offsets, causal, left, right):
        """Return what kernels are compiled for, the windows, and an index of many sequences."""
        if causal:
            right = 0
        if left is None and right == 0:
            right = None
        local = left is not None or right is not None
        many = self.has_index and offsets.shape[0] - 1 > MANY
        facts = Facts(
            q.dtype, q.shape[1:], k.shape[1], causal and not local, local,
            (q.shape[0] <= 64, k.shape[0] <= 128), many, 0 in k.stride(),
        )  # fmt: skip
        return facts, left, right, self.make_index(offsets) if many else None


class Facts(tuple):
    """What a kernel is compiled for."""

    names = (
        "dtype", "shape", "key_heads", "causal", "local", "tile", "many", "broadcast", "blocks",
        "grouped",
    )  # fmt: skip

    def __new__(cls, *values):
        return super().__new__(cls, values)

    def __getattr__(self, name):
        return self[self.names.index(name)]

    def _replace(self, **values):
        own = dict(zip(self.names, self, strict=False)) | values
        return Facts(*own.values())


def padded(tokens: int, offsets: Tensor, block: int) -> int:
    return (tokens + offsets.shape[0] * block - 1) // block * block


def places(offsets: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of all sequences, and where each lies in a workspace of tiles."""
    ends = offsets.tolist()
    spans = list(zip(ends[:-1], ends[1:], strict=True))
    own = [torch.arange(a, b) for a, b in spans]
    starts = [(a + i * block) // block * block for i, (a, _) in enumerate(spans)]
    return torch.cat(own), torch.cat(
        [start + torch.arange(b - a) for start, (a, b) in zip(starts, spans, strict=True)]
    )


def scores_of(facts, q, k, scale, offsets_q, offsets_k, left, right) -> Tensor:
    """Return scores, -inf where a key is hidden; the kernels are compiled for what they check."""
    assert (q.dtype, q.shape[1:], k.shape[1]) == facts[:3]
    assert facts.tile == (q.shape[0] <= 64, k.shape[0] <= 128), "a kernel for other rows"
    assert facts.broadcast == (0 in k.stride())
    assert facts.many <= (offsets_q.shape[0] - 1 > MANY)
    assert facts.local == (left is not None or right is not None)
    seen = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    for (a, b), (c, d) in zip(
        *(list(zip(o[:-1].tolist(), o[1:].tolist(), strict=True)) for o in (offsets_q, offsets_k)),
        strict=True,
    ):
        behind = (torch.arange(a, b) - b).unsqueeze(1) - (torch.arange(c, d) - d)
        own = torch.ones_like(behind, dtype=torch.bool)
        if facts.causal or right is not None:
            own &= behind >= -(0 if facts.causal else right)
        if left is not None:
            own &= behind <= left
        seen[a:b, c:d] = own
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return torch.einsum("qhd,khd->hqk", q, keys).float().mul(scale).masked_fill(~seen, -math.inf)


def forward(facts, q, k, v, out, lse, scale, offsets_q, offsets_k, left, right, **_) -> None:
    scores = scores_of(facts, q, k, scale, offsets_q, offsets_k, left, right)
    values = v.repeat_interleave(q.shape[1] // k.shape[1], 1).float()
    out.copy_(torch.einsum("hqk,khd->qhd", scores.softmax(2).nan_to_num(), values))
    lse.copy_(scores.logsumexp(2))


def prepare(facts, out, dout, delta, lse, scaled_lse, sum_q, offsets_q, **_) -> None:
    tokens, rows = places(offsets_q, facts.blocks[0])
    delta[:, rows] = (out * dout).sum(2).t()[:, tokens].float()
    scaled_lse[:, rows] = lse[:, tokens]
    sum_q.zero_()


def main(
    facts, q, k, v, dout, scaled_lse, delta, sum_q, sum_k, sum_v, scale, offsets_q, offsets_k,
    left, right, **_,
) -> None:  # fmt: skip
    scores = scores_of(facts, q, k, scale, offsets_q, offsets_k, left, right)
    group, dim = q.shape[1] // k.shape[1], q.shape[2]
    tokens, rows = places(offsets_q, facts.blocks[0])
    shift = torch.zeros(q.shape[1], q.shape[0])
    shift[:, tokens] = scaled_lse[:, rows]
    own = torch.zeros_like(shift)
    own[:, tokens] = delta[:, rows]
    weights = (scores - shift.unsqueeze(2)).exp().nan_to_num()
    keys, values = (t.repeat_interleave(group, 1).float() for t in (k, v))
    upon = weights * (torch.einsum("qhd,khd->hqk", dout.float(), values) - own.unsqueeze(2))
    wide = sum_q.view(q.shape[1], -1, sum_q.shape[1] // delta.shape[1])
    wide[:, rows, :dim] += torch.einsum("hqk,khd->hqd", upon, keys)[:, tokens]
    of_keys = torch.einsum("hqk,qhd->khd", upon, q.float()).unflatten(1, (-1, group)).sum(2)
    of_values = torch.einsum("hqk,qhd->khd", weights, dout.float())
    of_values = of_values.unflatten(1, (-1, group)).sum(2)
    if not facts.grouped:
        sum_k.copy_(of_keys * scale)
        sum_v.copy_(of_values)
        return
    tokens, rows = places(offsets_k, facts.blocks[1])
    for total, part in ((sum_k, of_keys), (sum_v, of_values)):
        total.view(k.shape[1], -1, wide.shape[2])[:, rows, :dim] += part[tokens].transpose(0, 1)


def finish(facts, sum, grad, scale, offsets, **_) -> None:
    tokens, rows = places(offsets, facts.blocks[0])
    wide = sum.view(grad.shape[1], padded(grad.shape[0], offsets, facts.blocks[0]), -1)
    grad[tokens] = (wide[:, rows, : grad.shape[2]].transpose(0, 1) * scale).to(grad.dtype)


class Call:
    """The tensors of one call, drawn by its lengths, and what it computes."""

    def __init__(
        self, lengths, keys=None, heads=(4, 2), dim=16, dtype=torch.float32, scale=0.3, causal=True,
        window=None, alike=False,
    ):  # fmt: skip
        drawn = torch.Generator().manual_seed(len(lengths) + sum(lengths))
        shapes = [(sum(lengths), heads[0]), *[(sum(keys or lengths), heads[1])] * 2]
        self.q, self.k, self.v = (
            torch.randn(*shape, dim, generator=drawn).to(dtype) for shape in shapes
        )
        if alike:
            self.k = self.v = self.q
        self.grad = torch.randn(self.q.shape, generator=drawn).to(dtype)
        offsets = [
            torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            for n in (lengths, keys or lengths)
        ]
        if keys is None:
            offsets[1] = offsets[0]
        bounds = (None, None) if window is None else (window - 1, 0 if causal else window - 1)
        self.rest = *offsets, max(lengths), max(keys or lengths), scale, causal, *bounds

    def run(self) -> list[Tensor]:
        out = torch.full_like(self.q, math.nan)
        lse = torch.full((self.q.shape[1], self.q.shape[0]), math.nan)
        _fa4.forward(self.q, self.k, self.v, out, lse, *self.rest)
        grads = [torch.full_like(t, math.nan) for t in (self.q, self.k, self.v)]
        _fa4.backward(self.grad, self.q, self.k, self.v, out, lse, *grads, *self.rest)
        return [out, lse, *grads]


def check(call: Call, package: Package, own_functions: int) -> None:
    """Compare a call with the package's functions, of which so many may run."""
    package.calls.clear()
    found = call.run()
    assert len(package.calls) == own_functions
    with _fa4.through_the_package():
        expected = call.run()
    assert all(map(torch.equal, found, expected)) and not any(t.isnan().any() for t in found)


@pytest.fixture
def use(monkeypatch):
    """Return a function that registers a package in the place of FlashAttention 4."""
    for name in ("_package", "_launches_directly", "_most_sequences", "_library"):
        monkeypatch.setattr(_fa4, name, getattr(_fa4, name))
    monkeypatch.setattr(_fa4, "recorded", {})
    monkeypatch.setattr(_fa4, "_tries", _fa4.Counter())
    monkeypatch.setattr(_fa4.metadata, "version", lambda _: "stand-in")
    registered: list[dict] = []
    monkeypatch.setattr(_fa4, "register_kernels", lambda *_, **options: registered.append(options))
    # What the package leaves uninitialised is NaN.
    torch.use_deterministic_algorithms(True)

    def put(package, capability=(9, 0)) -> tuple[str, list[dict]]:
        for name in ("flash_attn", "flash_attn.cute"):
            monkeypatch.setitem(sys.modules, name, SimpleNamespace())
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", package)
        return _fa4.register(capability), registered

    yield put
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=ORDERS)
def package(request, use) -> Package:
    stand_in = Package(request.param)
    assert use(stand_in) == ("", [{"takes_two_rows": True}])
    return stand_in


MASKS = [{}, {"causal": False}, {"window": 40}, {"causal": False, "window": 30}]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("keys", [None, ([90, 0, 81], [140, 0, 60, 1, 0])], ids=["row", "rows"])
def test_a_call_of_a_kind_is_recorded_and_others_are_launched_directly(package, mask, heads, keys):
    first, second = keys or (None, None)
    options = {"heads": heads} | mask
    check(Call([100, 0, 60], first, **options), package, own_functions=2)
    assert len(_fa4.recorded) == 2
    check(Call([33, 129, 0, 70, 64], second, **options), package, own_functions=0)
    check(Call([300], None if keys is None else [140], **options), package, own_functions=0)
    assert all(not isinstance(f, _fa4._WatchedCache) for f in caches(package))


def caches(package) -> list[object]:
    return [f.compile_cache for f in vars(package).values() if hasattr(f, "compile_cache")]


def test_the_stand_in_computes_attention(package):
    call = Call([100, 0, 60], dim=16)
    call.run()
    out, _, *grads = call.run()
    leaves = [t.double().requires_grad_() for t in (call.q, call.k, call.v)]
    expected, begin = [], 0
    for length in (100, 0, 60):
        own = [t[begin : begin + length].transpose(0, 1)[None] for t in leaves]
        begin += length
        expected.append(
            torch.nn.functional.scaled_dot_product_attention(
                *own, is_causal=True, scale=0.3, enable_gqa=True
            )[0].transpose(0, 1)
        )
    wanted = torch.cat(expected)
    wanted_grads = torch.autograd.grad(wanted, leaves, call.grad.double())
    for found, one in zip((out, *grads), (wanted, *wanted_grads), strict=True):
        assert relative(found, one, one) < 1e-5


KINDS = [
    {}, {"heads": (4, 4)}, {"heads": (2, 2)}, {"dim": 32}, {"dim": 48}, {"dtype": torch.bfloat16},
    {"causal": False}, {"window": 40}, {"window": 20}, {"causal": False, "window": 30},
    {"scale": 1.0}, {"scale": 0.5}, {"keys": [90, 70]},
]  # fmt: skip


def test_a_record_serves_no_call_of_another_kind(package):
    """Whatever was recorded before, each call gets the kernels and constants of its own."""
    for options in KINDS:
        check(Call([90, 70], **options), package, own_functions=2)
    for options in KINDS:
        check(Call([100, 60], **options), package, own_functions=0)


def test_rows_of_one_tile_and_many_sequences_run_through_the_package(package):
    for lengths in ([200, 60], [64], [20, 30], [128]):
        Call(lengths).run()
    check(Call([20, 30]), package, own_functions=2)
    check(Call([64, 64]), package, own_functions=2)
    check(Call([65, 64]), package, own_functions=0)
    check(Call([200], [128]), package, own_functions=2)
    check(Call([30] * MANY), package, own_functions=0)
    check(Call([30] * (MANY + 1)), package, own_functions=2 if package.has_index else 0)


# What a release might do that cannot be repeated.
def _integer(package):
    package.order["main"].append("tokens")


def _keyword(package):
    launch = package._launch

    def with_keyword(function, kernel, facts, **values):
        launch(function, kernel, facts, **values)
        function.compile_cache["more"] = lambda *, option: None
        function.compile_cache["more"](option=None)

    package._launch = with_keyword


def _operation(package):
    package.before_main = lambda: torch.ones(3).mul_(2)


def _unseen_first_kernel(package):
    unseen(package, "prepare")


def _unseen_last_kernel(package):
    unseen(package, "finish")


def _workspace_of_an_unseen_kernel(package):
    package.spare = torch.empty
    package.order["main"].append("spare")


def unseen(package, name: str) -> None:
    """Launch a kernel from no cache of the package; what it does shows nowhere."""
    launch = getattr(package, f"_{name}")

    def function(*args, **named):
        thread = threading.Thread(target=launch, args=args, kwargs=named)
        thread.start()
        thread.join()

    function.compile_cache = {}
    setattr(package, name, function)


def _larger_workspace(package):
    tile_size = package._tile_size_bwd_sm90
    package._tile_size_bwd_sm90 = (
        lambda *args, **named: SimpleNamespace(m_block_size=96, n_block_size=96)
        if args
        else tile_size(**named)
    )


@pytest.mark.parametrize(
    "change",
    [
        _integer,
        _keyword,
        _operation,
        _unseen_first_kernel,
        _unseen_last_kernel,
        _workspace_of_an_unseen_kernel,
        _larger_workspace,
    ],
    ids=lambda change: change.__name__.lstrip("_"),
)
def test_what_is_not_understood_runs_through_the_package(package, change):
    change(package)
    forward_alone = change is not _keyword
    for tokens in range(200, 200 + _fa4._TRIES + 3):
        call = Call([tokens - 150, 150])
        package.calls.clear()
        found = call.run()
        assert "backward" in package.calls
        with _fa4.through_the_package():
            assert all(map(torch.equal, found, call.run()))
    assert len(_fa4.recorded) == forward_alone
    assert max(_fa4._tries.values()) == _fa4._TRIES
    assert not any(isinstance(cache, _fa4._WatchedCache) for cache in caches(package))


def test_without_sizes_of_tiles_the_backward_runs_through_the_package(package, monkeypatch):
    tile_size = package._tile_size_bwd_sm90

    def renamed(*args, **named):
        if named:
            raise TypeError("got an unexpected keyword argument")
        return tile_size(*args)

    package._tile_size_bwd_sm90 = renamed
    for _ in range(2):
        check(Call([100, 60]), package, own_functions=2 if not _fa4.recorded else 1)


@pytest.mark.parametrize("confusing", [{"window": 161}, {"alike": True, "heads": (2, 2)}], ids=str)
def test_a_call_that_could_be_read_in_two_ways_is_not_recorded(package, confusing):
    """A window as long as the row, and one tensor in three places; the next call tells."""
    for _ in range(2):
        Call([100, 60], **confusing).run()
        assert not _fa4.recorded
    clear = confusing | {"alike": False}
    check(Call([110, 70], **clear), package, own_functions=2)
    check(Call([90, 81], **clear), package, own_functions=0)
    check(Call([100, 60], **confusing), package, own_functions=0)


@pytest.mark.parametrize("window", [17, 5], ids=["head_dim", "heads"])
def test_a_window_may_be_as_long_as_a_head_is_wide(package, window):
    """A kind fixes the sizes of heads, so a window that equals one is told by every call."""
    check(Call([100, 60], window=window), package, own_functions=2)
    check(Call([90, 81], window=window), package, own_functions=0)


def test_a_workspace_that_fits_two_rules_is_not_recorded(package):
    """With these numbers of tokens the rows of queries and of keys are padded to 640."""
    assert padded(449, torch.empty(3), 64) == padded(300, torch.empty(3), 128)
    for own_functions in (2, *[1] * _fa4._TRIES):  # the layers of a model
        check(Call([249, 200], [150, 150]), package, own_functions)
    check(Call([200, 100], [150, 50]), package, own_functions=1)
    check(Call([249, 200], [150, 150]), package, own_functions=0)


def test_strides_of_zero_run_through_the_package(package):
    """The package compiles other kernels for them."""
    for stride, own_functions in ((0, 2), (16, 2), (16, 0), (0, 2)):
        call = Call([100, 60], heads=(2, 1))
        call.k = call.k.as_strided(call.k.shape, (16, stride, 1))
        check(call, package, own_functions)


def test_kernels_that_another_thread_launches_meanwhile_are_not_recorded(package):
    other = Call([50, 90], heads=(2, 2))

    def meanwhile():
        package.before_main = lambda: None
        with _fa4.through_the_package():  # this thread does not wait for the recording
            thread = threading.Thread(target=other.run)
            thread.start()
            thread.join()

    package.before_main = meanwhile
    first = Call([100, 60])
    found = first.run()
    with _fa4.through_the_package():
        assert all(map(torch.equal, found, first.run()))
    check(Call([120, 30]), package, own_functions=0)


def test_a_failure_leaves_the_package_as_it_was(package):
    def fail():
        raise RuntimeError("no such tile")

    package.before_main = fail
    with pytest.raises(RuntimeError, match="no such tile"):
        Call([100, 60]).run()
    assert not any(isinstance(cache, _fa4._WatchedCache) for cache in caches(package))
    package.before_main = lambda: None
    check(Call([100, 60]), package, own_functions=1)  # the forward had been recorded
    check(Call([90, 71]), package, own_functions=0)


def test_scales_that_never_come_back_do_not_fill_memory(package, monkeypatch):
    monkeypatch.setattr(_fa4, "_MOST_TRIED", 12)
    for step in range(10):
        Call([100, 60], scale=0.1 + step / 100).run()
    assert len(_fa4.recorded) == 6 and len(_fa4._tries) == 12
    check(Call([100, 60], scale=0.9), package, own_functions=2)


def test_on_sm100_the_package_runs_its_own_functions(use):
    stand_in = Package("4.0.0b36")
    assert use(stand_in, (10, 0)) == ("", [{"takes_two_rows": False}])
    for _ in range(3):
        check(Call([100, 60]), stand_in, own_functions=2)
    assert not _fa4.recorded


@pytest.mark.parametrize("function", ["_flash_attn_fwd", "_flash_attn_bwd"])
@pytest.mark.parametrize("release", ORDERS)
def test_a_release_that_cannot_be_called_says_why(use, release, function):
    passed = (*_fa4._TENSORS[function], *_fa4._MASK)
    for name in passed:
        stand_in = Package(release)
        change_signature(getattr(stand_in, function), without=name)
        why, registered = use(stand_in)
        assert f"{function} has no parameter {name!r}, which cuseq passes" in why
        assert why.startswith("flash-attn-4 stand-in cannot be called") and "cuseq[fa4]" in why
        change_signature(getattr(stand_in, function), more=(name, NOTHING, "POSITIONAL_ONLY"))
        assert f"no parameter {name!r}" in use(stand_in)[0]
    stand_in = Package(release)
    change_signature(getattr(stand_in, function), more=("sink", NOTHING, "KEYWORD_ONLY"))
    assert f"{function} requires 'sink', which cuseq does not know" in use(stand_in)[0]
    setattr(stand_in, function, None)
    assert f"it has no function {function}" in use(stand_in)[0]
    assert not registered
    change = Package(release)
    for more in (("sink", None, "KEYWORD_ONLY"), ("options", NOTHING, "VAR_KEYWORD")):
        change_signature(getattr(change, function), more=more)
    assert use(change)[0] == "" and len(registered) == 1


def change_signature(function, without=None, more=None) -> None:
    found = [p for p in function.__signature__.parameters.values() if p.name != without]
    if more is not None:
        name, default, kind = more
        added = inspect.Parameter(name, getattr(inspect.Parameter, kind), default=default)
        found = [added, *found] if kind == "POSITIONAL_ONLY" else [*found, added]
    function.__signature__ = inspect.Signature(found)
