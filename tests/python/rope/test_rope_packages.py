"""Test RoPE against the installed packages whose rotary calls it replaces.

The packages run on the CPU. Each result has to be as close to float64 as the package's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

import cuseq
from cuseq import PackedLayout

pytest.importorskip("transformers")

from transformers import (
    CohereConfig,
    Gemma3TextConfig,
    GlmConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.cohere import modeling_cohere
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.glm import modeling_glm
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_vl import modeling_qwen3_vl
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

Pair = tuple[Tensor, Tensor]

DTYPES = [torch.float32, torch.bfloat16]
BATCH, SEQLEN, HEADS, KEY_HEADS = 2, 13, 3, 2
LENGTHS = [4, 0, 11, 1, 7]  # flat over the batch; three tokens are left for the tail
LAYOUT = PackedLayout.from_lengths(LENGTHS, BATCH * SEQLEN)


@dataclass(frozen=True)
class Model:
    """A transformers model: its rotary code, and the options that cuseq needs for it."""

    code: ModuleType
    rotary: str
    config: PreTrainedConfig
    head_dim: int
    rotary_dim: int
    interleaved: bool = False
    mrope_section: list[int] | None = None
    mrope_interleaved: bool = False
    halves: bool = False  # the table repeats halves although pairs are interleaved

    def table(self, x: Tensor, positions: Tensor) -> Pair:
        """Return cos and sin `[batch, seqlen, rotary_dim]` in x's dtype, by the model's module."""
        return getattr(self.code, self.rotary)(self.config)(x, positions)

    def frequencies(self) -> dict:
        """Return the options that give cuseq's table this model's frequencies, bit for bit."""
        return dict(inv_freq=getattr(self.code, self.rotary)(self.config).inv_freq)

    @property
    def mrope(self) -> dict:
        section = self.mrope_section
        return dict(mrope_section=section, mrope_interleaved=self.mrope_interleaved)

    def exact(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Compute the rotation in float64, with the model's own pairing."""
        cos, sin = (t.double()[:, None] for t in (cos, sin))
        if self.halves:
            cos, sin = (t[..., : self.rotary_dim // 2].repeat_interleave(2, -1) for t in (cos, sin))
        turned, rest = x.double().split([self.rotary_dim, self.head_dim - self.rotary_dim], -1)
        return torch.cat([turned * cos + self.code.rotate_half(turned) * sin, rest], -1)


def mrope(section: list[int]) -> dict:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": section}


SHAPE = dict(hidden_size=64, num_attention_heads=4)
MODELS = {
    "llama": Model(modeling_llama, "LlamaRotaryEmbedding", LlamaConfig(**SHAPE), 16, 16),
    "qwen3": Model(
        modeling_qwen3, "Qwen3RotaryEmbedding", Qwen3Config(**SHAPE, head_dim=64), 64, 64
    ),
    "gpt_neox": Model(
        modeling_gpt_neox,
        "GPTNeoXRotaryEmbedding",
        GPTNeoXConfig(hidden_size=128, num_attention_heads=4),  # a quarter of the head
        32,
        8,
    ),
    "glm": Model(
        modeling_glm,
        "GlmRotaryEmbedding",
        GlmConfig(**SHAPE, head_dim=32),  # half of the head
        32,
        16,
        interleaved=True,
        halves=True,
    ),
    "cohere": Model(
        modeling_cohere, "CohereRotaryEmbedding", CohereConfig(**SHAPE), 16, 16, interleaved=True
    ),
    "qwen2_vl": Model(
        modeling_qwen2_vl,
        "Qwen2VLRotaryEmbedding",
        Qwen2VLTextConfig(**SHAPE, rope_parameters=mrope([2, 1, 5])),
        16,
        16,
        mrope_section=[2, 1, 5],
    ),
    "qwen3_vl": Model(
        modeling_qwen3_vl,
        "Qwen3VLTextRotaryEmbedding",
        Qwen3VLTextConfig(**SHAPE, head_dim=16, rope_parameters=mrope([4, 2, 2])),
        16,
        16,
        mrope_section=[4, 2, 2],
        mrope_interleaved=True,
    ),
}
# Before transformers 5.17, Qwen2-VL's function took the planes of positions apart itself.
MODELS = {
    name: model for name, model in MODELS.items() if hasattr(model.code, "apply_rotary_pos_emb")
}
MULTIMODAL = [name for name, model in MODELS.items() if model.mrope_section]
TEXT = [name for name in MODELS if name not in MULTIMODAL]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def heads_first(head_dim: int, dtype: torch.dtype) -> Pair:
    """Return q and k `[batch, heads, seqlen, head_dim]`, strided as models make them."""
    return tuple(
        random(BATCH, SEQLEN, heads, head_dim, seed=heads, dtype=dtype).transpose(1, 2)
        for heads in (HEADS, KEY_HEADS)
    )


def some_positions(planes: int | None) -> Tensor:
    """Return positions `[batch, seqlen]`, or different planes `[planes, batch, seqlen]`."""
    tokens = torch.arange(BATCH * SEQLEN).view(BATCH, SEQLEN)
    if planes is None:
        return tokens * 7 % 41
    return torch.stack(
        [tokens * factor % modulus for factor, modulus in ((1, 19), (5, 23), (3, 37))]
    )


def check(actual: Tensor, own: Tensor, exact: Tensor) -> None:
    """Check that the error against float64 is at most that of the package's `own` result.

    This holds for the mean and the maximum. The maximum may be half a unit in the last place, since
    one rounding there is unavoidable. In fp32, where the order of the operations decides, it may be
    two units or twice the package's.
    """
    assert actual.shape == own.shape and actual.dtype == own.dtype
    slack = 2.0 if own.dtype == torch.float32 else 1.0
    unit = torch.finfo(own.dtype).eps * exact.abs().max()
    far, own_far = ((t.detach().cpu().double() - exact).abs() for t in (actual, own))
    # If the package's own result were far from float64, any result would pass.
    assert own_far.max() <= 8 * unit
    assert far.mean() <= slack * own_far.mean()
    units = 2.0 if own.dtype == torch.float32 else 0.51
    assert far.max() <= max(slack * own_far.max(), units * unit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_with_the_models_own_table(device, name, dtype):
    """One row per token, as transformers passes the table to its layers."""
    model = MODELS[name]
    q, k = heads_first(model.head_dim, dtype)
    cos, sin = model.table(q, some_positions(3 if model.mrope_section else None))
    own = model.code.apply_rotary_pos_emb(q, k, cos, sin)
    exact = [model.exact(x, cos, sin) for x in (q, k)]
    width = model.rotary_dim // 2 if model.halves else model.rotary_dim
    needs_dim = 2 * width <= model.head_dim and not model.halves
    rotated = cuseq.apply_rope(
        *(t.to(device) for t in (q, k, cos[..., :width], sin[..., :width])),
        table="token",
        qkv_format="bhsd",
        interleaved=model.interleaved,
        rotary_dim=model.rotary_dim if needs_dim else None,
    )
    for values in zip(rotated, own, exact, strict=True):
        check(*values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("positions", ["position_ids", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_with_a_shared_table(device, name, positions, dtype):
    """One row per position, half as wide, looked up by the op itself."""
    model = MODELS[name]
    if positions == "packed" and model.mrope_section:
        pytest.skip("a qkv_format has one plane of positions")
    q, k = heads_first(model.head_dim, dtype)
    ids = some_positions(3 if model.mrope_section else None)
    if positions == "packed":
        ids = LAYOUT.position_ids.view(BATCH, SEQLEN)
        source = dict(packed=LAYOUT.to(device))
    else:
        source = dict(position_ids=ids.to(device))
        if model.mrope_section:
            source |= model.mrope
    own = model.code.apply_rotary_pos_emb(q, k, *model.table(q, ids))
    exact = [model.exact(x, *model.table(q.float(), ids)) for x in (q, k)]
    frequencies = model.frequencies()
    cos, sin = cuseq.rope_table(41, model.rotary_dim, **frequencies, device=device)
    rotated = cuseq.apply_rope(
        q.to(device),
        k.to(device),
        cos,
        sin,
        qkv_format="bhsd",
        interleaved=model.interleaved,
        **source,
    )
    for values in zip(rotated, own, exact, strict=True):
        check(*values)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_planes_of_rows(device, name):
    """A table with one row per token and plane, from which the op picks by section."""
    model = MODELS[name]
    q, k = heads_first(model.head_dim, torch.float32)
    ids = some_positions(3)
    table = model.table(q, ids)
    cos, sin = cuseq.rope_table(41, model.rotary_dim, **model.frequencies())
    rows = [t[ids].to(device) for t in (cos, sin)]
    rotated = cuseq.apply_rope(
        q.to(device), k.to(device), *rows, table="token", qkv_format="bhsd", **model.mrope
    )
    own = model.code.apply_rotary_pos_emb(q, k, *table)
    for actual, expected, x in zip(rotated, own, (q, k), strict=True):
        check(actual, expected, model.exact(x, *table))


@pytest.mark.parametrize(
    "name,options",
    [
        ("glm", dict(interleaved=True, rotary_dim=16)),
        ("llama", dict(interleaved=True)),
        ("cohere", dict(interleaved=False)),
        ("gpt_neox", dict()),
    ],
)
def test_a_table_of_another_reading_is_refused(name, options):
    """The CPU checks which columns repeat which, which cannot be seen on a GPU."""
    model = MODELS[name]
    q, k = heads_first(model.head_dim, torch.float32)
    cos, sin = model.table(q, some_positions(None))
    with pytest.raises(ValueError, match="cos|rotary_dim"):
        cuseq.apply_rope(q, k, cos, sin, table="token", qkv_format="bhsd", **options)


# Each kind of scaling in transformers, with parameters that change every result.
SCALINGS = {
    "linear": dict(factor=2.0),
    "dynamic": dict(factor=2.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=32),
    "longrope": dict(
        factor=4.0,
        original_max_position_embeddings=32,
        short_factor=[1.5 + 0.1 * pair for pair in range(8)],
        long_factor=[2.0 + 0.3 * pair for pair in range(8)],
    ),
    "llama3": dict(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "proportional": dict(partial_rotary_factor=0.5),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("length", [20, 50])  # within the trained context of 32, and beyond it
@pytest.mark.parametrize("kind", sorted(ROPE_INIT_FUNCTIONS))
def test_scaled_frequencies(device, kind, length):
    """inv_freq and the attention factor of transformers give transformers' own rotation."""
    assert kind in SCALINGS, f"transformers has a new kind of scaling, {kind}: give it parameters"
    config = LlamaConfig(
        **SHAPE,
        max_position_embeddings=32,
        rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, **SCALINGS[kind]},
    )
    model = Model(modeling_llama, "LlamaRotaryEmbedding", config, 16, 16)
    q, k = (random(1, heads, length, 16, seed=heads) for heads in (HEADS, KEY_HEADS))
    table = model.table(q, torch.arange(length)[None])
    own = model.code.apply_rotary_pos_emb(q, k, *table)
    exact = [model.exact(x, *table) for x in (q, k)]

    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    assert (factor != 1) == (kind in ("yarn", "longrope"))
    scaled = dict(inv_freq=inv_freq.to(device), attention_factor=factor)
    cos, sin = cuseq.rope_table(length, 16, **scaled, device=device)
    rotated = cuseq.apply_rope(q.to(device), k.to(device), cos, sin, qkv_format="bhsd")
    for values in zip(rotated, own, exact, strict=True):
        check(*values)

    plain = cuseq.rope_table(length, 16, device=device)
    if kind != "dynamic" or length > 32:  # "dynamic" changes nothing in the trained context
        assert (plain[0] - cos).abs().max() > 0.01, "the scaling changes nothing here"


NORMS = {
    "qwen3": (modeling_qwen3.Qwen3RMSNorm, MODELS["qwen3"], 0.0),
    "gemma3": (
        modeling_gemma3.Gemma3RMSNorm,
        Model(
            modeling_gemma3,
            "Gemma3RotaryEmbedding",
            Gemma3TextConfig(**SHAPE, head_dim=32),
            32,
            32,
        ),
        1.0,
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_normalisation_and_rotation(device, name, dtype):
    """q_norm and k_norm of a model, then its rotation, with gradients for all four."""
    norm, model, offset = NORMS[name]
    eps = 0.01  # large enough to show
    heads_of = heads_first(model.head_dim, dtype)
    norms = [norm(model.head_dim, eps=eps).to(dtype) for _ in heads_of]
    for seed, module in enumerate(norms):
        module.weight.data += 0.3 * random(model.head_dim, seed=seed, dtype=dtype)
    leaves = [*heads_of, *(module.weight.detach() for module in norms)]
    rotary = getattr(model.code, model.rotary)(model.config)
    kind = () if name == "qwen3" else ("full_attention",)
    cos, sin = rotary(heads_of[0], some_positions(None), *kind)
    grads = [random(*x.shape, seed=7, dtype=dtype) for x in heads_of]

    def differentiated(outputs, inputs, grads):
        return [*(t.detach() for t in outputs), *torch.autograd.grad(outputs, inputs, grads)]

    inputs = [x.clone().requires_grad_() for x in heads_of]
    normed = [module(x) for module, x in zip(norms, inputs, strict=True)]
    own = differentiated(
        model.code.apply_rotary_pos_emb(*normed, cos, sin),
        [*inputs, *(module.weight for module in norms)],
        grads,
    )

    inputs = [x.double().requires_grad_() for x in leaves]
    normed = [
        x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + offset)
        for x, weight in zip(inputs[:2], inputs[2:], strict=True)
    ]
    exact = differentiated(
        [model.exact(x, cos, sin) for x in normed], inputs, [grad.double() for grad in grads]
    )

    inputs = [x.to(device).requires_grad_() for x in leaves]
    rotated = cuseq.apply_qk_norm_rope(
        *inputs,
        cos.to(device),
        sin.to(device),
        eps=eps,
        weight_offset=offset,
        table="token",
        qkv_format="bhsd",
    )
    actual = differentiated(rotated, inputs, [grad.to(device) for grad in grads])
    for values in zip(actual, own, exact, strict=True):
        check(*values)


@pytest.fixture(scope="module")
def megatron() -> ModuleType:
    """Return Megatron's rotary functions; `frequencies` is the module that makes their angles."""
    folder = "megatron.core.models.common.embeddings"
    reason = "megatron-core is not installed: pip install --no-deps megatron-core==0.16.1"
    functions = pytest.importorskip(f"{folder}.rope_utils", reason=reason)
    modules = pytest.importorskip(f"{folder}.rotary_pos_embedding", reason=reason)
    return SimpleNamespace(apply=functions.apply_rotary_pos_emb, module=modules.RotaryEmbedding)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary_dim", [32, 16])
@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "interleaved"])
@pytest.mark.parametrize("cp_size,cp_rank", [(1, 0), (2, 0), (2, 1)])
def test_megatron_thd(device, megatron, cp_size, cp_rank, interleaved, rotary_dim, dtype):
    """A packed row, and one rank's zig-zag share of it, by the global offsets."""
    lengths, longest, factor = [8, 0, 4, 16], 20, 1.25
    packed = PackedLayout.from_lengths(lengths)
    tokens = packed.total_tokens // cp_size
    # Megatron guesses from sizes: a table as long as the row would mean one entry per token.
    assert longest != packed.total_tokens
    q, k = (random(tokens, heads, 32, seed=heads, dtype=dtype) for heads in (HEADS, KEY_HEADS))
    rotary = megatron.module(32, rotary_dim / 32, use_cpu_initialization=True)
    angles = rotary.get_freqs_non_repeated(longest)
    # As its get_emb does, which needs a GPU.
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    angles = angles[:, None, None]

    def rotate(x: Tensor, angles: Tensor) -> Tensor:
        return megatron.apply(
            x,
            angles,
            SimpleNamespace(
                apply_rope_fusion=False,
                rotary_interleaved=interleaved,
                multi_latent_attention=False,
            ),
            cu_seqlens=packed.cu_seqlens,
            mscale=factor,
            cp_group=SimpleNamespace(size=lambda: cp_size, rank=lambda: cp_rank),
        )

    scaled = dict(inv_freq=rotary.inv_freq, attention_factor=factor)
    cos, sin = cuseq.rope_table(longest, rotary_dim, **scaled, device=device)
    rotated = cuseq.apply_rope(
        q.to(device),
        k.to(device),
        cos,
        sin,
        packed=packed.to(device),
        interleaved=interleaved,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )
    for actual, x in zip(rotated, (q, k), strict=True):
        check(actual, rotate(x, angles), rotate(x.double(), angles.double()))
