"""Small models of every hybrid family, for the tests of hybrids."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from inspect import isfunction
from types import ModuleType

import torch
import transformers as t
from torch import Tensor, nn

VOCAB = 64
BASE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
HEAD = BASE | {"head_dim": 8}
KINDS = {"layer_types": ["linear_attention", "full_attention"]}
LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
)
EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)
MAMBA = dict(
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_d_state=8,
    mamba_n_groups=2,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_chunk_size=16,
)
MAMBA2 = dict(n_groups=2, conv_kernel=4, chunk_size=16)

CONFIGS = {
    "qwen3_next": lambda: t.Qwen3NextConfig(**HEAD | LINEAR | EXPERTS | KINDS),
    "qwen3_5": lambda: t.Qwen3_5TextConfig(**HEAD | LINEAR | KINDS),
    "qwen3_5_moe": lambda: t.Qwen3_5MoeTextConfig(**HEAD | LINEAR | EXPERTS | KINDS),
    "olmo_hybrid": lambda: t.OlmoHybridConfig(**BASE | LINEAR | KINDS),
    "lfm2": lambda: t.Lfm2Config(**BASE, layer_types=["conv", "full_attention"], conv_L_cache=3),
    "lfm2_moe": lambda: t.Lfm2MoeConfig(
        **BASE,
        layer_types=["conv", "full_attention"],
        conv_L_cache=3,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        num_dense_layers=1,
    ),
    "granite": lambda: t.GraniteMoeHybridConfig(
        **BASE | MAMBA,
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
        position_embedding_type="rope",
    ),
    "granite_nope": lambda: t.GraniteMoeHybridConfig(
        **BASE | MAMBA,
        layer_types=["mamba", "attention"],
        num_local_experts=0,
        shared_intermediate_size=16,
    ),
    "bamba": lambda: t.BambaConfig(**BASE | MAMBA, attn_layer_indices=[1]),
    "mamba2": lambda: t.Mamba2Config(
        **MAMBA2,
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        state_size=8,
        expand=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "falcon_h1": lambda: t.FalconH1Config(**BASE | MAMBA, mamba_d_ssm=64),
    "nemotron_h": lambda: t.NemotronHConfig(
        **HEAD | MAMBA2,
        layers_block_type=["mamba", "attention"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
    ),
    "zamba2": lambda: t.Zamba2Config(
        **BASE,
        layers_block_type=["mamba", "hybrid"],
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_ngroups=1,
        n_mamba_heads=8,
        mamba_headdim=8,
        chunk_size=16,
        num_mem_blocks=1,
        use_mem_rope=True,
        adapter_rank=4,
    ),
    "minimax": lambda: t.MiniMaxConfig(
        **HEAD | KINDS, num_local_experts=4, num_experts_per_tok=2, block_size=4
    ),
    "jamba": lambda: t.JambaConfig(
        **BASE,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=4,
    ),
    "kimi_linear": lambda: t.KimiLinearConfig(
        **BASE | KINDS | {"num_key_value_heads": 4},
        linear_num_heads=4,
        linear_head_dim=8,
        linear_conv_kernel_dim=4,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=1,
        topk_group=1,
        mlp_layer_types=["dense", "sparse"],
    ),
}
FAMILIES = (
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "lfm2", "lfm2_moe", "granitemoehybrid",
    "bamba", "mamba2", "falcon_h1", "nemotron_h", "zamba2", "minimax", "jamba", "kimi_linear",
)  # fmt: skip
# One family for each kind of mixer, for tests of what does not depend on the family.
ONE_OF_EACH_KIND = ("qwen3_5", "lfm2", "mamba2", "falcon_h1", "minimax", "jamba", "kimi_linear")


def make_model(
    name: str,
    device: torch.device | str = "cpu",
    implementation: str = "eager",
    **sizes: int,
) -> nn.Module:
    """Return a model with weights far from their initial values, so that every part matters.

    Other `sizes` than the family's in `CONFIGS` replace those in its config.
    """
    torch.manual_seed(0)
    config = CONFIGS[name]()
    for size, value in sizes.items():
        setattr(config, size, value)
    if name == "mamba2":  # it has no attention, and refuses sdpa
        implementation = "eager"
    model = t.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    return model.to(device)


def functions_of_packages() -> Iterator[tuple[ModuleType, str, Callable[..., object]]]:
    """Yield the functions that transformers takes from other packages, with its own in PyTorch."""
    for family in FAMILIES:
        code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        for name, function in list(vars(code).items()):
            own = getattr(function, "__wrapped__", None)
            if own is not None and own.__module__ == code.__name__ and isfunction(own):
                if function.__code__.co_filename.endswith("hub_kernels.py"):
                    yield code, name, own


def documents(lengths: list[int], device: torch.device | str = "cpu") -> list[Tensor]:
    """Return random documents `[1, n]`."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (1, n), generator=generator).to(device) for n in lengths]
