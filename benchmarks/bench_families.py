"""Compare what `cuseq.enable` gains for models of several families, all of one shape.

    python -m benchmarks families [--tokens N] [--families NAME ...]

A step is forward, loss and backward of 8 layers of hidden size 1,024 with 16 query and 8 key-value
heads of 64 (GPT-NeoX: 16 of each), bf16, over packed rows of lognormal lengths (mean 350): with
transformers' sdpa and its own mask ("stock"), and enabled ("cuseq"). "times" is stock over cuseq,
"of the first's" is it divided by that of the first family. "longest document" is that of the timed
rows: an indexer chooses keys only for documents that have more than it may choose. "replaced" is
what `enable` did to the rotation, and "device" are the times without the host, which limits
families whose norms and activations are many small kernels.

glm_moe_dsa, qwen4_exp and qwen3_5, only if named, have layers of a published shape, with an indexer
or a state. Stock takes seconds a step there: see --steps.

On a CPU the sizes are small, and only say that everything runs.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import timer
import torch
from report import Report, Table, arguments, environment
from workload import documents, lognormal_lengths

import cuseq

# Family: transformers' configuration, and what differs from SHAPE.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "granite": ("GraniteConfig", {}),
    "cohere": ("CohereConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None}),
    "phi": ("PhiConfig", {}),
    "stablelm": ("StableLmConfig", {}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 64, "attention_dropout": 0.0}),
    "gemma2": ("Gemma2Config", {"head_dim": 64, "query_pre_attn_scalar": 64}),
}
# For `bits` alone: experts, latent attention, windows, and layers with a state.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_text": ("Gemma3TextConfig", {"head_dim": 64, "query_pre_attn_scalar": 64}),
    "olmo3": ("Olmo3Config", {"sliding_window": 512}),
    "glm4": ("Glm4Config", {"head_dim": 64, "pad_token_id": 0}),
    "smollm3": ("SmolLM3Config", {"pad_token_id": 0}),
    "qwen3_moe": ("Qwen3MoeConfig", {
        "head_dim": 64, "moe_intermediate_size": 768, "num_experts": 16, "num_experts_per_tok": 4,
    }),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "sliding_window": None}),
    "deepseek_v3": ("DeepseekV3Config", {
        "num_key_value_heads": 16, "n_routed_experts": 16, "n_group": 4, "topk_group": 2,
        "num_experts_per_tok": 4, "moe_intermediate_size": 768, "first_k_dense_replace": 1,
        "q_lora_rank": 512, "kv_lora_rank": 256,
    }),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 4}),
}  # fmt: skip
# Only if named: layers of a published shape that choose keys by an indexer, or have a state.
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "glm_moe_dsa": ("GlmMoeDsaConfig", {
        "hidden_size": 6144, "intermediate_size": 12_288, "num_attention_heads": 64,
        "num_key_value_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "index_head_dim": 128,
        "index_n_heads": 32, "index_topk": 2048, "mlp_layer_types": ["dense"] * 2,
        "num_hidden_layers": 2, "pad_token_id": 0,
    }),
    "qwen4_exp": ("Qwen4ExpTextConfig", {
        "hidden_size": 2048, "num_key_value_heads": 2, "head_dim": 128,
        "layer_types": ["linear_attention", "indexed_attention"], "indexer_budget": 2048,
        "indexer_compress_ratio": 16, "indexer_head_dim": 128, "indexer_n_heads": 16,
        "indexer_kv_heads": 1, "moe_intermediate_size": 512, "num_experts": 8,
        "num_experts_per_tok": 2, "ple_layer_ids": [], "pad_token_id": 0,
    }),
    "qwen3_5": ("Qwen3_5TextConfig", {
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "intermediate_size": 3584, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    }),
}  # fmt: skip
SHAPE = dict(
    vocab_size=32_768, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8,
    num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=32_768,
)  # fmt: skip
SMALL = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1)  # fmt: skip
MEAN = 350
STEPS, WARMUP = 12, 3  # timed steps, and those before them


def make_model(family: str, device: torch.device) -> torch.nn.Module:
    """Return a model of the family with random weights."""
    import transformers

    name, differs = (FAMILIES | OTHERS | SPARSE)[family]
    small = {} if device.type == "cuda" else SMALL
    if family in SPARSE:  # whose heads belong together
        small = {one: size for one, size in small.items() if "heads" not in one}
    shape = SHAPE | differs | small
    if "layer_types" in shape:
        shape["num_hidden_layers"] = len(shape["layer_types"])
    config = getattr(transformers, name)(**shape)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    return model.train()


def measure(
    model: torch.nn.Module, rows: list[dict[str, Any]], steps: int, device: torch.device
) -> dict[str, float]:
    """Return milliseconds of a step, as the wall and as the device has it, and GiB.

    The last `steps` rows count; the device's time is that of the last one.
    """

    def step(row: dict[str, Any]) -> None:
        moved = {name: value.to(device, non_blocking=True) for name, value in row.items()}
        model(**moved, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    walls = []
    for row in rows:
        timer.synchronize(device)
        begun = time.perf_counter()
        step(row)
        timer.synchronize(device)
        walls.append((time.perf_counter() - begun) * 1e3)
    found = {"step": statistics.median(walls[-steps:])}
    if device.type == "cuda":
        found["gib"] = torch.cuda.max_memory_allocated() / 2**30
        found["device"] = timer.device_time(
            lambda: step(rows[-1]), device=device, repeats=min(8, len(rows)), warmup=1
        ).median / 1e3  # fmt: skip
    return found


def family_row(family: str, tokens: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Return the figures of a family."""
    collate = cuseq.PackingCollator(total_tokens=tokens)
    rows, lengths = [], []
    for seed in range(WARMUP + steps):
        docs = documents(lognormal_lengths(tokens, MEAN, seed), SHAPE["vocab_size"], seed)
        lengths.append(max(map(len, docs)))
        row = collate([{"input_ids": doc} for doc in docs])
        rows.append({name: x.pin_memory() if device.type == "cuda" else x
                     for name, x in row.items()})  # fmt: skip
    model = make_model(family, device)
    told = [{name: x for name, x in row.items() if name != "packed"} for row in rows]
    stock = measure(model, told if steps >= STEPS else told[-steps - 1 :], steps, device)
    enabled = cuseq.enable(model)
    ours = measure(model, rows, steps, device)
    fused = [name for name in enabled.replaced if name.startswith(("rope", "qk_norm"))]
    longest = max(lengths[-steps:])
    found: dict[str, Any] = {"family": family, "longest": longest, "fused": ", ".join(fused) or "-"}
    for kind, values in (("stock", stock), ("cuseq", ours)):
        found |= {f"{kind}_{name}": value for name, value in values.items()}
    found["times"] = stock["step"] / ours["step"]
    if "device" in stock:
        found["times_device"] = stock["device"] / ours["device"]
    cuseq.disable(model)
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, help="of a row; default 8,192, on a CPU 256")
    parser.add_argument("--families", nargs="+", choices=FAMILIES | SPARSE, metavar="NAME",
                        default=list(FAMILIES))  # fmt: skip
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help=f"timed steps, default {STEPS}; if fewer, stock runs these and one before them",
    )
    args = parser.parse_args()
    device = torch.device(args.device)
    tokens = args.tokens or (8192 if device.type == "cuda" else 256)
    report = Report("families", environment(args.device))
    report.notes.append(
        f"Rows of {tokens:,} tokens; 'times' is stock over cuseq, 'of the first' is it divided by "
        f"{args.families[0]}'s; 'device' is without the host's time."
    )
    columns = {
        "family": "family", "longest": "longest document",
        "stock_step": "stock, ms", "cuseq_step": "cuseq, ms", "times": "times",
        "of_first": "of the first's", "stock_device": "stock, device", "cuseq_device":
        "cuseq, device", "times_device": "times, device", "of_first_device": "of the first's",
        "stock_gib": "stock, GiB", "cuseq_gib": "cuseq, GiB", "fused": "replaced",
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    report.tables.append(Table("A step by family", columns, rows))
    for family in args.families:
        row = family_row(family, tokens, args.steps, device)
        for suffix in ("", "_device"):
            if f"times{suffix}" in row:
                first = rows[0] if rows else row
                row[f"of_first{suffix}"] = row[f"times{suffix}"] / first[f"times{suffix}"]
        rows.append(row)
        report.write(args.out)


if __name__ == "__main__":
    main()
