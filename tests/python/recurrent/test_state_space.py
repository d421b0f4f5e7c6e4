"""Test state-space and linear attention layers on packed rows: nothing crosses a boundary.

The layers are slow loops in float64 that get the documents from a layout. References of the
packages whose kernels take the same facts agree with them.
"""

from __future__ import annotations

import importlib.util
import inspect
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import conv1d, normalize, pad, silu
from torch.testing import assert_close

from cuseq import PackedLayout

CHANNELS, WIDTH = 4, 4
HEADS, KEY_DIM, VALUE_DIM = 2, 3, 2


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class ShortConv(nn.Module):
    """A depthwise causal convolution whose taps stay within the token's own sequence.

    Tokens of negative `seq_idx`, `[1, tokens]`, are padding; their outputs are zero.
    """

    def __init__(self, activation: str | None = None):
        super().__init__()
        self.weight = nn.Parameter(random(CHANNELS, WIDTH, seed=1))
        self.bias = nn.Parameter(random(CHANNELS, seed=2))
        self.activation = activation

    def _activated(self, out: Tensor) -> Tensor:
        return out if self.activation is None else silu(out)

    def forward(self, x: Tensor, seq_idx: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        sequences = seq_idx[0].tolist()
        rows = [x[:0]]
        for token, own in enumerate(sequences):
            row = self.bias
            for back in range(min(WIDTH, token + 1)):
                if sequences[token - back] == own:
                    row = row + self.weight[:, WIDTH - 1 - back] * x[token - back]
            row = self._activated(row) if own >= 0 else torch.zeros_like(row)
            rows.append(row.unsqueeze(0))
        return torch.cat(rows)

    def alone(self, x: Tensor) -> Tensor:
        """Apply torch's convolution to one document."""
        taps = self.weight.unsqueeze(1)
        return self._activated(conv1d(pad(x.T, (WIDTH - 1, 0)), taps, self.bias, groups=CHANNELS).T)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Return the output at each token, `[tokens, heads, d_v]`; zeros after the last offset.

    The state S of each head, `[d_k, d_v]`, is zero at the start of a sequence. Each token then sets
    S = alpha (I - beta k k^T) S + beta k v^T, and the output is q^T S: Yang et al., "Gated Delta
    Networks", arXiv 2412.06464, with keys as the rows of S.

    q and k are `[tokens, heads, d_k]`, v `[tokens, heads, d_v]`, alpha and beta `[tokens, heads]`.
    """
    rows = [v[:0]]
    for begin, end in pairwise(cu_seqlens.tolist()):
        state = v.new_zeros(*k.shape[1:], v.shape[2])
        for token in range(begin, end):
            key = k[token].unsqueeze(2)
            state = alpha[token, :, None, None] * state
            known = key.mT @ state
            state = state + beta[token, :, None, None] * (key @ (v[token].unsqueeze(1) - known))
            rows.append((q[token].unsqueeze(1) @ state).mT.squeeze(2).unsqueeze(0))
    behind = v.shape[0] - sum(row.shape[0] for row in rows)
    return torch.cat([*rows, v.new_zeros(behind, *v.shape[1:])])


class GatedDeltaNet(nn.Module):
    def __init__(self):
        super().__init__()
        width = HEADS * (2 * KEY_DIM + VALUE_DIM + 2)
        self.inner = nn.Parameter(random(CHANNELS, width, seed=3))
        self.bias = nn.Parameter(random(width, seed=4))
        self.outer = nn.Parameter(random(HEADS * VALUE_DIM, CHANNELS, seed=5))

    def forward(self, x: Tensor, seq_idx: Tensor | None, cu_seqlens: Tensor) -> Tensor:
        heads = (x @ self.inner + self.bias).view(-1, HEADS, 2 * KEY_DIM + VALUE_DIM + 2)
        q, k, v, gates = heads.split([KEY_DIM, KEY_DIM, VALUE_DIM, 2], dim=2)
        alpha, beta = gates.sigmoid().unbind(2)
        out = gated_delta_rule(q, normalize(k, dim=2), v, alpha, beta, cu_seqlens)
        return out.flatten(1) @ self.outer

    def alone(self, x: Tensor) -> Tensor:
        return self(x, None, torch.tensor([0, len(x)]))


class Hybrid(nn.Module):
    """Both layers in sequence, each with a residual, as in hybrid models."""

    def __init__(self):
        super().__init__()
        self.conv, self.net = ShortConv("silu"), GatedDeltaNet()

    def forward(self, x: Tensor, seq_idx: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = x + self.conv(x, seq_idx)
        return x + self.net(x, None, cu_seqlens)

    def alone(self, x: Tensor) -> Tensor:
        x = x + self.conv.alone(x)
        return x + self.net.alone(x)


LAYERS = {
    "conv": ShortConv,
    "conv, silu": lambda: ShortConv("silu"),
    "delta net": GatedDeltaNet,
    "hybrid": Hybrid,
}
every_layer = pytest.mark.parametrize("layer", LAYERS)

PACKS = {
    "full": dict(lengths=[5, 2, 9]),
    "tail": dict(lengths=[5, 2, 9], total_multiple=10),
    "segments": dict(lengths=[3, 8, 12], segment_multiple=8),
    "segments, tail": dict(lengths=[3, 8, 1], segment_multiple=8, total_multiple=40),
    "one-token": dict(lengths=[1, 1, 1, 6, 1], total_multiple=4),
    "empty": dict(lengths=[0, 3, 0, 0, 5, 0], total_multiple=4, max_seqs=16),
    "segments, empty": dict(lengths=[0, 1, 0, 9, 0], segment_multiple=8),
    "one": dict(lengths=[7]),
    "nothing": dict(lengths=[0, 0], total_tokens=5),
}
every_pack = pytest.mark.parametrize("pack", PACKS)


def places(lengths: list[int], segment_multiple: int = 1, **_: int) -> list[slice]:
    """Return the places in the row of the documents that have tokens."""
    begin, found = 0, []
    for length in lengths:
        if length > 0:
            found.append(slice(begin, begin + length))
        begin += -(-length // segment_multiple) * segment_multiple
    return found


def facts(packed: PackedLayout) -> tuple[Tensor, Tensor]:
    """Return the layers' inputs: `seq_idx`, and the offsets of documents, or else of segments."""
    padded = packed.pads_between_sequences
    return packed.seq_idx, packed.cu_seqlens_padded if padded else packed.cu_seqlens


def check_against_documents(layer: str, pack: dict, device) -> None:
    """Check outputs and gradients of the packed row against its documents one by one."""
    module = LAYERS[layer]().to(device)
    packed = PackedLayout.from_lengths(**pack, device=device)
    x = random(packed.total_tokens, CHANNELS).to(device).requires_grad_()
    leaves = [x, *module.parameters()]
    out = module(x, *facts(packed))
    assert out.shape == x.shape
    own = places(**pack)
    together = torch.cat([x[:0], *(out[place] for place in own)])
    alone = torch.cat([x[:0], *(module.alone(x[place]) for place in own)])
    assert_close(together, alone)
    weight = random(*together.shape, seed=6).to(device)
    assert_close(
        torch.autograd.grad(together, leaves, weight, materialize_grads=True),
        torch.autograd.grad(alone, leaves, weight, materialize_grads=True),
    )


@every_layer
@every_pack
def test_a_packed_row_is_its_documents(layer, pack, device):
    check_against_documents(layer, PACKS[pack], device)


@settings(max_examples=40)
@every_layer
@given(
    lengths=st.lists(st.one_of(st.integers(0, 10), st.sampled_from([0, 1, 8])), max_size=5),
    segment_multiple=st.sampled_from([1, 1, 2, 8]),
    total_multiple=st.sampled_from([1, 5, 16]),
)
def test_any_packed_row_is_its_documents(layer, lengths, segment_multiple, total_multiple):
    pack = dict(
        lengths=lengths,
        segment_multiple=segment_multiple,
        total_multiple=total_multiple,
        max_seqs=64,
    )
    check_against_documents(layer, pack, "cpu")


@every_layer
@pytest.mark.parametrize("pack", ["full", "segments, tail", "empty"])
def test_a_token_reaches_its_own_document_alone(layer, pack, device):
    """Compared bit for bit, in values and in gradients."""
    module = LAYERS[layer]().to(device)
    packed = PackedLayout.from_lengths(**PACKS[pack], device=device)
    x = random(packed.total_tokens, CHANNELS).to(device).requires_grad_()
    out = module(x, *facts(packed))
    own = places(**PACKS[pack])
    for number, place in enumerate(own):
        # A state continues over the padding of its own segment, whose outputs are not used.
        end = own[number + 1].start if number + 1 < len(own) else packed.total_tokens
        changed = x.detach().clone()
        changed[place.start] += 1
        differs = (module(changed, *facts(packed)) != out).any(1)
        assert differs[place.start]
        assert not differs[: place.start].any() and not differs[end:].any()

        (grad,) = torch.autograd.grad(out[place].sum(), x, retain_graph=True)
        reached = (grad != 0).any(1)
        assert reached[place].all() and reached.sum() == place.stop - place.start


@every_layer
@pytest.mark.parametrize("pack", ["tail", "segments", "segments, tail"])
def test_what_lies_on_pads_reaches_nobody(layer, pack, device):
    module = LAYERS[layer]().to(device)
    packed = PackedLayout.from_lengths(**PACKS[pack], device=device)
    x = random(packed.total_tokens, CHANNELS).to(device)
    poisoned = torch.full_like(x, float("nan"))
    for place in places(**PACKS[pack]):
        poisoned[place] = x[place]
    assert poisoned.isnan().any()
    expected, actual = (module(row, *facts(packed)) for row in (x, poisoned))
    for place in places(**PACKS[pack]):
        assert torch.equal(actual[place], expected[place])
    if isinstance(module, ShortConv):
        assert actual.isfinite().all(), "zeros come out of pads"


@every_layer
def test_without_the_layout_it_leaks(layer, device):
    """A control: the leak that the tests above would find."""
    module = LAYERS[layer]().to(device)
    x = random(14, CHANNELS).to(device)
    one = torch.zeros(1, 14, dtype=torch.int32), torch.tensor([0, 14])
    changed = x.clone()
    changed[4] += 1  # the last token of the first document
    assert (module(x, *one)[5] != module(changed, *one)[5]).any()
    packed = PackedLayout.from_lengths([5, 9], device=device)
    assert torch.equal(module(x, *facts(packed))[5:], module(changed, *facts(packed))[5:])


# ------------------------------------------------------------------------- the packages' references


def folder_of(package: str, requirement: str, scratch: Path) -> Path:
    """Return the folder of a package's files, installed or fetched, not built or imported."""
    installed = importlib.util.find_spec(package)
    if installed is not None:
        return Path(next(iter(installed.submodule_search_locations)))
    options = ["-q", "--no-deps", "--no-build-isolation", "--retries=0", "--timeout=10"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, f"--dest={scratch}", requirement],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        pytest.skip(f"{requirement} is neither installed nor to be had: {lines[-1]}")
    (archive,) = scratch.iterdir()
    shutil.unpack_archive(archive, scratch, "zip" if archive.suffix == ".whl" else None)
    return next(scratch.glob(f"**/{package}/__init__.py")).parent


def load(path: Path, stand_ins: dict[str, object]) -> ModuleType:
    """Load a file as a module, with stand-ins for imports that its references do not need."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, stand_ins):
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def causal_conv1d(tmp_path_factory) -> Path:
    scratch = tmp_path_factory.mktemp("causal_conv1d")
    return folder_of("causal_conv1d", "causal-conv1d==1.7.0", scratch)


@pytest.fixture(scope="module")
def fla(tmp_path_factory) -> Path:
    return folder_of("fla", "fla-core==0.6.0", tmp_path_factory.mktemp("fla"))


@pytest.fixture(scope="module")
def causal_conv1d_ref(causal_conv1d):
    names = ("fwd", "bwd", "update")
    kernels = SimpleNamespace(**{f"causal_conv1d_{name}_function": None for name in names})
    stand_ins = {"causal_conv1d.cpp_functions": kernels}
    interface = load(causal_conv1d / "causal_conv1d_interface.py", stand_ins)
    if "seq_idx" not in inspect.signature(interface.causal_conv1d_ref).parameters:
        pytest.skip("the reference of this causal-conv1d takes no seq_idx: 1.7.0 does")
    return interface.causal_conv1d_ref


@pytest.mark.parametrize("activation", [None, "silu"])
@every_pack
def test_causal_conv1d_reads_seq_idx_so(causal_conv1d_ref, pack, activation, device):
    packed = PackedLayout.from_lengths(**PACKS[pack], device=device)
    seq_idx = packed.seq_idx
    # Its kernel requires this.
    assert seq_idx.dtype == torch.int32 and seq_idx.is_contiguous()
    conv = ShortConv(activation).to(device)
    x = random(packed.total_tokens, CHANNELS).to(device).requires_grad_()
    own = conv(x, seq_idx)
    theirs = causal_conv1d_ref(
        x.T.unsqueeze(0), conv.weight, conv.bias, activation=activation, seq_idx=seq_idx
    )[0].T
    assert_close(own, theirs)
    weight, leaves = random(*x.shape, seed=6).to(device), [x, *conv.parameters()]
    assert_close(
        torch.autograd.grad(own, leaves, weight, materialize_grads=True),
        torch.autograd.grad(theirs, leaves, weight, materialize_grads=True),
    )


def test_causal_conv1d_reads_cu_seqlens_so(causal_conv1d, device):
    """The states from which decoding continues: each document's last inputs, by its offsets."""
    pytest.importorskip("triton", reason="causal_conv1d_varlen.py imports triton")
    varlen = load(causal_conv1d / "causal_conv1d_varlen.py", {})
    lengths = [5, 2, 1, 9]
    packed = PackedLayout.from_lengths(lengths, 20, device=device)
    x = random(20, CHANNELS).to(device)
    states = varlen.causal_conv1d_varlen_states_ref(x, packed.cu_seqlens, WIDTH - 1)
    for state, place in zip(states, places(lengths), strict=True):
        assert torch.equal(state, pad(x[place], (0, 0, WIDTH - 1, 0))[1 - WIDTH :].T)


@pytest.fixture(params=["fla", "transformers"])
def recurrent_gated_delta_rule(request):
    """Return a package's recurrence over one sequence, in fp32."""
    if request.param == "transformers":
        name = "transformers.models.qwen3_next.modeling_qwen3_next"
        models = pytest.importorskip(name, reason="transformers is not installed")
        # Not fla's kernel, which the decorator calls if fla is installed.
        return inspect.unwrap(models.torch_recurrent_gated_delta_rule)
    path = request.getfixturevalue("fla") / "ops" / "gated_delta_rule" / "naive.py"
    stand_ins = {"einops": SimpleNamespace(rearrange=None)}
    return load(path, stand_ins).naive_recurrent_gated_delta_rule


@pytest.mark.parametrize("pack", ["full", "segments, tail", "empty"])
def test_gated_delta_rule_of_the_packages(recurrent_gated_delta_rule, pack, device):
    packed = PackedLayout.from_lengths(**PACKS[pack], device=device)
    tokens = packed.total_tokens
    q, k = (random(tokens, HEADS, KEY_DIM, seed=seed).to(device) for seed in (1, 2))
    k = normalize(k, dim=2)
    v = random(tokens, HEADS, VALUE_DIM, seed=3).to(device)
    gate = -random(tokens, HEADS, seed=4).abs().to(device)
    beta = random(tokens, HEADS, seed=5).sigmoid().to(device)
    q_scaled = q * KEY_DIM**-0.5  # as the packages scale internally
    out = gated_delta_rule(q_scaled, k, v, gate.exp(), beta, facts(packed)[1])
    for place in places(**PACKS[pack]):
        q1, k1, v1, g1, b1 = (t[place].float().unsqueeze(0) for t in (q, k, v, gate, beta))
        theirs, _ = recurrent_gated_delta_rule(
            q1, k1, v1, g=g1, beta=b1, initial_state=None, output_final_state=False
        )
        assert_close(out[place].float(), theirs[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@every_pack
def test_fla_reads_cu_seqlens_so(fla, pack, dtype, device):
    """fla prepares its kernels' indices in the dtype of the offsets: cuseq's or int64."""
    pytest.importorskip("triton", reason="fla.ops.utils.index imports triton")
    utils = SimpleNamespace(tensor_cache=lambda function: function, autotune_cache_kwargs={})
    index = load(fla / "ops" / "utils" / "index.py", {"fla.utils": utils})
    packed = PackedLayout.from_lengths(**PACKS[pack], device=device)
    _, offsets = facts(packed)
    assert offsets.dtype == torch.int32
    offsets, chunk = offsets.to(dtype), 4
    expected = []
    for sequence, (begin, end) in enumerate(pairwise(offsets.tolist())):
        expected += [[sequence, number] for number in range(-(-(end - begin) // chunk))]
    chunks = index.prepare_chunk_indices(offsets, chunk)
    assert chunks.dtype == dtype and chunks.tolist() == expected
    positions = index.prepare_position_ids(offsets)
    assert positions.tolist() == packed.position_ids[: offsets[-1]].tolist()
