"""Test attention over trees against a mask of ancestors that is made sample by sample."""

from __future__ import annotations

import random
import re

import pytest
import torch

import cuseq
from cuseq.layout import StaticLayout

SHORT = "its window counts tokens of a path of the tree"
HARD = {
    "a group of 1": ([-1, 0], [3, 4]),
    "an empty completion": ([-1, 0, 0, 0], [3, 0, 2, 1]),
    "an empty prompt": ([-1, 0, 0], [0, 2, 3]),
    "a longer prompt": ([-1, 0, 0, 0], [40, 3, 2, 5]),
    "several prompts": ([-1, 0, 0, -1, -1, 4, 4], [4, 2, 3, 5, 2, 1, 1]),
    "leaves of one token": ([-1, *[0] * 9], [2, *[1] * 9]),
    "64 completions": ([-1, *[0] * 64], [5, *[2] * 64]),
    "a chain of depth 16": ([-1, *range(16)], [2, 1, 3] * 5 + [1, 2]),
    "branches at every depth": (
        [-1, 0, 1, 1, 0, 4, 5, 5, 4, -1, 9],
        [2, 3, 1, 2, 2, 1, 4, 1, 3, 2, 2],
    ),
    "empty inner nodes": ([-1, 0, 1, 1, 0], [3, 0, 2, 1, 2]),
    "one node": ([-1], [5]),
    "no tokens": ([-1, 0], [0, 0]),
}


def tree_of(name: str, tail: int = 0, **more) -> cuseq.PackedTree:
    parents, lengths = HARD[name]
    return cuseq.PackedTree.from_parents(lengths, parents, total_tokens=sum(lengths) + tail, **more)


def ancestors(tree: cuseq.PackedTree, window: int | None = None) -> torch.Tensor:
    """Return which keys a token sees: those before it on a sample's path, and itself."""
    tokens = tree.layout.total_tokens
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for i in range(tree.samples.num_sequences):
        rows = tree.rows_of(i).cpu()
        place = torch.arange(len(rows))
        away = place.unsqueeze(1) - place
        near = (away >= 0) & (away < (window or tokens + 1))
        seen[rows.unsqueeze(1), rows] |= near
    return seen


def dense(q, k, v, seen, scale=None, softcap=None, sinks=None):
    """Attend with a mask; rows that see nothing are zero."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen.to(q.device), -1e300)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], 2)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v) * seen.to(q.device).any(1)[:, None, None]


def inputs(tokens, heads=4, key_heads=2, dim=8, value_dim=8, device="cpu", dtype=torch.float64):
    torch.manual_seed(tokens)
    shapes = (tokens, heads, dim), (tokens, key_heads, dim), (tokens, key_heads, value_dim)
    return [torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]


def compare(tree, window=None, value_dim=8, device="cpu", **options):
    q, k, v = inputs(tree.layout.total_tokens, value_dim=value_dim, device=device)
    tree = tree.to(device)
    out = cuseq.varlen_attention(q, k, v, tree.layout, window=window, **options)
    options.pop("backend", None)
    expected = dense(q, k, v, ancestors(tree, window), **options)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    extra = [options["sinks"]] if options.get("sinks") is not None else []
    grads = torch.autograd.grad((out * weights).sum(), [q, k, v, *extra])
    wanted = torch.autograd.grad((expected * weights).sum(), [q, k, v, *extra])
    for grad, one in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, one)


@pytest.mark.kernels
@pytest.mark.parametrize("backend", ["auto", "segments"])
@pytest.mark.parametrize("name", HARD)
def test_hard_trees(name, backend, device):
    """Of these "auto" runs some in one kernel; "segments" runs a call for each depth."""
    compare(tree_of(name, tail=3), device=device, backend=backend)


def path_of(q, tree, **options) -> str:
    found = cuseq.attention_backend(q, q, q, tree.layout, **options)
    return "one kernel" if "one kernel is modelled" in found.reason else "calls"


@pytest.mark.parametrize("depth", [2, 16, 40])
def test_deep_thin_trees_run_in_one_kernel(depth):
    """A trace that branches at every turn: more calls than pay."""
    parents, lengths = [-1], [3]
    for turn in range(depth):  # the turn's answer that was dropped, and the one that was kept
        last = 0 if turn == 0 else 2 * turn
        parents += [last, last]
        lengths += [1, 2]
    tree = cuseq.PackedTree.from_parents(lengths, parents, total_tokens=sum(lengths) + 2)
    q, _, _ = inputs(tree.layout.total_tokens)
    assert path_of(q, tree) == "one kernel"
    assert cuseq.attention_backend(q, q, q, tree.layout).name == "dense"
    assert path_of(q, tree, backend="segments") == "calls"
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for backend in ("auto", "segments"):
        compare(tree, backend=backend)
        compare(tree, backend=backend, softcap=0.8, sinks=sinks, scale=0.3, value_dim=5)
    fast = cuseq.varlen_attention(q, q, q, tree.layout)
    torch.testing.assert_close(
        fast, cuseq.varlen_attention(q, q, q, tree.layout, backend="segments")
    )


def deep_tree(depth=16):
    """Return a chain of short nodes, which "auto" runs in one kernel, and a tail of 2 tokens."""
    return cuseq.PackedTree.from_parents(
        [2] * depth, [-1, *range(depth - 1)], total_tokens=2 * depth + 2
    )


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("poisoned", [0, 1, 2])
def test_the_tail_of_one_kernel_reaches_no_other_token(window, poisoned):
    layout = deep_tree().layout
    rows = inputs(layout.total_tokens)
    expected = cuseq.varlen_attention(*rows, layout, window=window)
    wanted = torch.autograd.grad(expected.sum(), rows)
    with torch.no_grad():
        rows[poisoned][-2:] = torch.nan
    found = cuseq.varlen_attention(*rows, layout, window=window)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), rows), wanted)


@pytest.mark.parametrize("window", [None, 3])
def test_one_kernel_casts_under_autocast_as_the_calls_do(window):
    layout = deep_tree().layout
    q, k, v = inputs(layout.total_tokens, dtype=torch.float32)
    narrow = [rows.bfloat16() for rows in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        found = cuseq.varlen_attention(q, k, v, layout, window=window)
        calls = cuseq.varlen_attention(q, k, v, layout, backend="segments")
        double = [rows.double() for rows in (q, k, v)]
        assert cuseq.varlen_attention(*double, layout, window=window).dtype == torch.float64
    assert found.dtype == calls.dtype == torch.bfloat16
    expected = cuseq.varlen_attention(*narrow, layout, window=window)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.autograd.grad(found.sum(), [q, k, v])


def test_groups_and_long_nodes_run_as_calls():
    group = cuseq.PackedTree.from_parents([2, *[1] * 9], [-1, *[0] * 9])
    chain = cuseq.PackedTree.from_parents([300] * 4, [-1, 0, 1, 2])
    for tree in (group, chain):
        q = torch.zeros(tree.layout.total_tokens, 4, 8)
        assert path_of(q, tree) == "calls"


@pytest.mark.parametrize(
    ("device_type", "depth", "mean_depth", "mean_keys", "tokens", "one_kernel"),
    [
        ("cpu", 16, 8, 5, 32, True),
        ("cpu", 2, 1, 500, 1000, False),
        ("cpu", 64, 32, 500, 1000, False),
        # Measured on an H200: one kernel was faster in each.
        ("cuda", 4, 3, 175, 576, True),
        ("cuda", 4, 3, 1395, 4608, True),
        ("cuda", 16, 9, 281, 1056, True),
        ("cuda", 16, 9, 4477, 16_896, True),
        ("cuda", 64, 33, 4193, 16_512, True),
        # Few depths over long nodes.
        ("cuda", 2, 2, 12_000, 32_768, False),
    ],
)
def test_the_model_weighs_calls_against_pairs(
    device_type, depth, mean_depth, mean_keys, tokens, one_kernel
):
    from cuseq.attention import tree as choice

    rates = choice.GPU if device_type == "cuda" else choice.CPU
    times = choice.modelled_times(depth, mean_depth, mean_keys, tokens, 16, 128, rates)
    assert (times.one_kernel < times.calls) is one_kernel
    deeper = choice.modelled_times(depth + 1, mean_depth, mean_keys, tokens, 16, 128, rates)
    assert deeper.calls > times.calls and deeper.one_kernel == times.one_kernel


def test_trees_know_how_many_keys_and_ancestors_a_token_has():
    from cuseq import _C

    for name, (parents, lengths) in HARD.items():
        tree = tree_of(name, tail=2)
        seen = ancestors(tree)
        tokens = int(seen.any(1).sum())
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        steps = sum(depth * length for depth, length in zip(depths, lengths, strict=True))
        meta = tree.layout.tree.meta
        for slot, total in (("MEAN_KEYS", int(seen.sum())), ("MEAN_DEPTH", steps)):
            found = int(meta[getattr(_C.TreeMeta, slot)])
            assert found == (-(-total // tokens) if tokens else 0), (name, slot)


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("window", [1, 2, 3, 5, 100])
def test_windows_count_along_the_path(name, window):
    compare(tree_of(name, tail=2), window=window)


def test_a_graph_keeps_windows_that_hide_nothing_in_its_first_tree():
    """It replays trees with longer paths, so only the row's length says that nothing is hidden."""
    short, deep = (
        cuseq.PackedTree.from_parents(lengths, parents, total_tokens=40, max_seqs=4, max_depth=1)
        for lengths, parents in (([3, 2, 2], [-1, 0, 0]), ([25, 10], [-1, 0]))
    )
    q, k, v = (rows.detach() for rows in inputs(40))
    static = StaticLayout.like(short.layout, q.device)
    assert cuseq.attention_backend(q, k, v, short.layout, window=8).reason != SHORT
    assert cuseq.attention_backend(q, k, v, static, window=8).reason == SHORT
    assert cuseq.attention_backend(q, k, v, static, window=40).reason != SHORT
    static.copy_(deep.layout)
    found = cuseq.varlen_attention(q, k, v, static, window=8)
    torch.testing.assert_close(found, cuseq.varlen_attention(q, k, v, deep.layout, window=8))


def test_windows_at_the_length_of_the_longest_path():
    """One token less than the longest path hides a key; the path itself hides none."""
    tree = tree_of("branches at every depth", tail=2)
    longest = tree.longest_path
    q, k, v = inputs(tree.layout.total_tokens)
    whole = cuseq.varlen_attention(q, k, v, tree.layout, backend="segments")
    for window in (longest, longest + 1):
        assert cuseq.attention_backend(q, k, v, tree.layout, window=window).reason != SHORT
        compare(tree, window=window)
        found = cuseq.varlen_attention(q, k, v, tree.layout, window=window, backend="segments")
        assert torch.equal(found, whole)
    assert cuseq.attention_backend(q, k, v, tree.layout, window=longest - 1).reason == SHORT
    compare(tree, window=longest - 1)


def test_windows_of_random_forests():
    """Windows cut inside nodes, at their borders and over several ancestors."""
    draw = random.Random(7)
    for _ in range(25):
        path, parents, lengths = [], [], []
        for node in range(draw.randint(2, 12)):
            path = path[: draw.randint(0, len(path))]
            parents.append(path[-1] if path else -1)
            lengths.append(draw.choice((0, 1, 1, 2, 3, 7)))
            path.append(node)
        tree = cuseq.PackedTree.from_parents(lengths, parents, total_tokens=sum(lengths) + 1)
        sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
        compare(tree, window=draw.randint(1, 9), sinks=draw.choice((None, sinks)))


def test_windows_are_those_of_samples_one_by_one():
    tree = cuseq.PackedTree.from_groups([[1] * 6], [[[3] * 4, [4] * 2, []]])
    q, k, v = inputs(tree.layout.total_tokens)
    rows = torch.cat([tree.rows_of(i) for i in range(3)])
    found = tree.gather(cuseq.varlen_attention(q, k, v, tree.layout, window=4))
    alone = cuseq.varlen_attention(q[rows], k[rows], v[rows], tree.samples, window=4)
    torch.testing.assert_close(found, alone)
    weights = torch.randn_like(found)
    grads = torch.autograd.grad((found * weights).sum(), [q, k, v])
    wanted = torch.autograd.grad((alone * weights).sum(), [q, k, v])
    for grad, one in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, one)


def test_options():
    name = "branches at every depth"
    compare(tree_of(name), scale=0.2, value_dim=5)
    compare(tree_of(name), softcap=0.8)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    compare(tree_of(name, tail=2), sinks=sinks)
    compare(tree_of(name), sinks=sinks, softcap=0.8, window=3)


def test_random_forests():
    draw = random.Random(3)
    for _ in range(25):
        path, parents, lengths = [], [], []
        for node in range(draw.randint(1, 14)):
            path = path[: draw.randint(0, len(path))]
            parents.append(path[-1] if path else -1)
            lengths.append(draw.choice((0, 1, 1, 2, 3, 9)))
            path.append(node)
        tail = draw.randint(0, 2)
        tree = cuseq.PackedTree.from_parents(lengths, parents, total_tokens=sum(lengths) + tail)
        for backend in ("auto", "segments"):
            compare(tree, backend=backend)


def test_samples_one_by_one():
    """The outputs are those of each sample alone, and gradients the sums over samples."""
    tree = cuseq.PackedTree.from_groups(
        [[1] * 6, [2] * 3], [[[3] * 4, [4] * 2], [[5] * 5, [], [6]]]
    )
    q, k, v = inputs(tree.layout.total_tokens)
    out = tree.gather(cuseq.varlen_attention(q, k, v, tree.layout))
    rows = torch.cat([tree.rows_of(i) for i in range(5)])
    alone = cuseq.varlen_attention(q[rows], k[rows], v[rows], tree.samples)
    torch.testing.assert_close(out, alone)
    weights = torch.randn_like(out)
    grads = torch.autograd.grad((out * weights).sum(), [q, k, v])
    wanted = torch.autograd.grad((alone * weights).sum(), [q, k, v])
    for grad, one in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["64 completions", "a chain of depth 16"])
def test_narrow_dtypes_are_as_exact_as_one_call(name, dtype, device):
    """The error is compared with that of dense attention in the same dtype."""
    tree = tree_of(name).to(device)
    exact = inputs(tree.layout.total_tokens, dim=16, value_dim=16, device=device)
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in exact)
    seen = ancestors(tree)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    weights = torch.randn(q.shape, device=device, dtype=torch.float64)
    wanted = dense(*wide, seen)
    wanted_grads = torch.autograd.grad((wanted * weights).sum(), wide)
    out = cuseq.varlen_attention(q, k, v, tree.layout)
    grads = torch.autograd.grad(out, [q, k, v], weights.to(dtype))
    eps = torch.finfo(dtype).eps
    for found, one in zip([out, *grads], [wanted, *wanted_grads], strict=True):
        error = (found.double() - one).abs().max() / one.abs().max()
        assert error < 4 * eps + 1e-6, float(error / eps)


@pytest.mark.parametrize("value_dim", [64, 40])
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("name", HARD)
def test_trees_over_flash_attention_4(fa4, name, long, value_dim):
    """Its tiles are larger than most of these nodes; NaN in the tail reaches no token."""
    parents, lengths = HARD[name]
    lengths = [67 * n for n in lengths] if long else lengths
    real = sum(lengths)
    tree = cuseq.PackedTree.from_parents(lengths, parents, total_tokens=real + 3, device="cuda")
    exact = inputs(real + 3, dim=64, value_dim=value_dim, device="cuda")
    with torch.no_grad():
        for rows in exact:
            rows[real:] = torch.nan
    q, k, v = (rows.detach().bfloat16().requires_grad_() for rows in exact)
    out = cuseq.varlen_attention(q, k, v, tree.layout, backend="fa4")
    weights = torch.randn(real + 3, 4, value_dim, device="cuda", dtype=torch.float64)
    weights[real:] = torch.nan
    found = [out, *torch.autograd.grad(out, [q, k, v], weights.bfloat16())]
    wide = [rows.detach()[:real].double().requires_grad_() for rows in (q, k, v)]
    wanted = dense(*wide, ancestors(tree)[:real, :real])
    wanted = [wanted, *torch.autograd.grad(wanted, wide, weights[:real])]
    for rows, one in zip(found, wanted, strict=True):
        assert not rows[real:].any()
        if real > 0:
            error = (rows[:real].double() - one).abs().max() / one.abs().max()
            assert error < 0.02, float(error)


def test_gradients_are_deterministic(device):
    tree = tree_of("64 completions").to(device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q, k, v = inputs(tree.layout.total_tokens, device=device, dtype=dtype)
    runs = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(3):
            out = cuseq.varlen_attention(q, k, v, tree.layout)
            runs.append(torch.autograd.grad(out.square().sum(), [q, k, v]))
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("window", [None, 3])
def test_masks(name, window, device):
    tree = tree_of(name, tail=3).to(device)
    layout, tokens = tree.layout, tree.layout.total_tokens
    seen = ancestors(tree, window)
    tail = torch.arange(tokens - 3, tokens)
    seen[tail, tail] = True
    mask = layout.dense_mask(window=window)
    assert mask.shape == (1, 1, tokens, tokens) and mask is layout.dense_mask(window=window)
    assert torch.equal(mask[0, 0].cpu(), seen)
    additive = layout.dense_mask(torch.float32, window=window)
    assert torch.equal(additive[0, 0].cpu() == 0, seen)
    assert additive.stride(2) % 16 == 0
    block = layout.block_mask(window=window, block_size=(4, 8))
    index = torch.arange(tokens, device=device)
    modded = block.mask_mod(None, None, index.unsqueeze(1), index)
    assert torch.equal(modded.cpu(), seen)
    covered = torch.zeros(-(-tokens // 4), -(-tokens // 8), dtype=torch.int64)
    for counts, indices, kind in (
        (block.kv_num_blocks, block.kv_indices, 1),
        (block.full_kv_num_blocks, block.full_kv_indices, 2),
    ):
        if counts is None:
            continue
        for row in range(covered.shape[0]):
            for column in indices[0, 0, row, : counts[0, 0, row]].tolist():
                covered[row, column] += kind
    padded = torch.zeros(covered.shape[0] * 4, covered.shape[1] * 8, dtype=torch.bool)
    padded[:tokens, :tokens] = seen
    tiles = padded.view(covered.shape[0], 4, covered.shape[1], 8).sum((1, 3))
    if window is None:
        assert torch.equal(covered > 0, tiles > 0)
        assert torch.equal(covered == 2, tiles == 32)
    else:
        assert not ((tiles > 0) & (covered == 0)).any() and not (covered == 2).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": False}, "causal must be True"),
        ({"spans": [(0, 2)]}, "spans must be None"),
    ],
)
def test_options_that_trees_do_not_have(options, message):
    tree = tree_of("several prompts")
    q, k, v = inputs(tree.layout.total_tokens)
    with pytest.raises(ValueError, match=message):
        cuseq.varlen_attention(q, k, v, tree.layout, **options)
    with pytest.raises(ValueError, match="a tree's mask must be causal"):
        tree.layout.dense_mask(**options)


def test_the_op_refuses_what_is_no_tree():
    tree = tree_of("several prompts")
    q, k, v = (t.detach() for t in inputs(tree.layout.total_tokens))
    layout = tree.layout

    def call(rows=layout.tree.rows, meta=layout.tree.meta, window=None):
        arguments = (layout.cu_seqlens_static, layout.host_meta, True, window)
        return torch.ops.cuseq.varlen_attention(q, k, v, *arguments, tree_rows=rows, tree_meta=meta)

    call()
    with pytest.raises(ValueError, match="longest path of the tree, 7 tokens"):
        call(window=3)
    with pytest.raises(ValueError, match="must be given together"):
        call(meta=None)
    with pytest.raises(ValueError, match="tree_meta must be of the layout of tree_rows"):
        call(rows=layout.tree.rows[:-1])
    with pytest.raises(ValueError, match="tree_rows must hold offsets that ascend"):
        call(rows=torch.zeros_like(layout.tree.rows))
    for slot in range(7, 13):
        meta = layout.tree.meta.clone()
        meta[slot] = 1 << 20
        with pytest.raises(ValueError, match="tree_"):
            call(meta=meta)


def test_one_graph_serves_all_trees(device):
    """Nothing is compiled again for other trees of the same capacities."""
    graphs = []

    def counted(module, example):
        graphs.append(module)
        return module

    def attend(q, k, v, packed, window):
        return cuseq.varlen_attention(q, k, v, packed, window=window).sin()

    compiled = torch.compile(attend, fullgraph=True, backend=counted)
    names = ["several prompts", "branches at every depth", "one node", "64 completions"]
    for window in (None, 4) if device.type == "cpu" else (None,):
        graphs.clear()
        for name in names:
            parents, lengths = HARD[name]
            tree = cuseq.PackedTree.from_parents(lengths, parents, total_tokens=140, max_depth=4)
            tree = tree.to(device)
            q, k, v = inputs(140, device=device)
            out = compiled(q, k, v, tree.layout, window)
            expected = dense(q, k, v, ancestors(tree, window)).sin()
            torch.testing.assert_close(out, expected)
            grads = torch.autograd.grad(out.sum(), [q, k, v])
            wanted = torch.autograd.grad(expected.sum(), [q, k, v])
            for grad, one in zip(grads, wanted, strict=True):
                torch.testing.assert_close(grad, one)
        assert len(graphs) == 1


def test_the_flop_counter_counts_paths():
    from torch.utils.flop_counter import FlopCounterMode

    tree = tree_of("several prompts", tail=2)
    q, k, v = inputs(tree.layout.total_tokens)
    with FlopCounterMode(display=False) as counter:
        cuseq.varlen_attention(q, k, v, tree.layout).sum().backward()
    own = sum(n * n for n in (4, 2, 3, 5, 2, 1, 1))
    forward = 2 * 4 * (own + 4 * 5 + 2 * 2) * (8 + 8)
    assert counter.get_total_flops() == forward + forward * 5 // 2


def test_the_backend_of_a_tree_is_named():
    tree = tree_of("several prompts")
    q, k, v = inputs(tree.layout.total_tokens)
    assert cuseq.attention_backend(q, k, v, tree.layout).name == "segments"
    assert cuseq.attention_backend(q, k, v, tree.layout, window=2).name == "dense"
    with pytest.raises(ValueError, match="its window counts tokens of the row"):
        cuseq.varlen_attention(q, k, v, tree.layout, window=2, backend="segments")
    with pytest.raises(ValueError, match='backend="flex" cannot take this call'):
        cuseq.varlen_attention(q, k, v, tree.layout, window=2, backend="flex")
    with pytest.raises(ValueError, match="window must be None or at least 1"):
        cuseq.varlen_attention(q, k, v, tree.layout, window=0)
    with pytest.raises(ValueError, match="k must have as many tokens as q"):
        cuseq.varlen_attention(q, k[1:], v, tree.layout, window=2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [2, 8])
def test_short_windows_run_as_flex_attention(window, cuda):
    tree = tree_of("branches at every depth", tail=5).to(cuda)
    tokens = tree.layout.total_tokens
    shapes = dict(dim=64, value_dim=64, device=cuda, dtype=torch.bfloat16)
    q, k, v = inputs(tokens, **shapes)
    assert cuseq.attention_backend(q, k, v, tree.layout, window=window).name == "flex"
    out = cuseq.varlen_attention(q, k, v, tree.layout, window=window)
    expected = dense(q.double(), k.double(), v.double(), ancestors(tree, window))
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.kernels
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_graph_takes_other_groups():
    def groups(lengths):
        parents = [-1, *[0] * (len(lengths) - 1)]
        return cuseq.PackedTree.from_parents(
            lengths, parents, total_tokens=64, max_seqs=16, max_depth=1, device="cuda"
        )

    tree = groups([20, 8, 8])
    q, k, v = (
        t.detach() for t in inputs(64, dim=64, value_dim=64, device="cuda", dtype=torch.float16)
    )
    static = tree.layout
    cuseq.varlen_attention(q, k, v, static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuseq.varlen_attention(q, k, v, static)
    for lengths in ([20, 8, 8], [5, 30, 1, 7, 9], [64]):
        other = groups(lengths)
        static.copy_(other.layout)
        graph.replay()
        expected = dense(q.double(), k.double(), v.double(), ancestors(other))
        torch.testing.assert_close(out.double(), expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("call", [cuseq.varlen_attention, cuseq.attention_backend])
@pytest.mark.parametrize("shape", [(), (3,), (0,)])
def test_rows_of_other_dimensions_are_named_for_every_way_through_a_tree(call, shape):
    ids = list(range(16))
    tree = cuseq.PackedTree.from_sequences([ids[:end] for end in range(1, 17)])
    k = torch.zeros(16, 2, 8)
    message = re.escape(f"q must have shape [tokens, heads, head_dim], got {list(shape)}")
    for window in (None, 2):
        with pytest.raises(ValueError, match=message):
            call(torch.zeros(shape), k, k, tree.layout, window=window)
