"""Run a benchmark by its name: `python -m benchmarks NAME [options]`.

Without a name, print what there is and what each benchmark needs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

# Name: what it measures, what it needs beside cuseq.
BENCHMARKS = {
    "attention": ("varlen_attention beside sdpa, flex and flash", "a GPU for figures that count"),
    "attention_backends": (
        'each backend of varlen_attention; writes the table of backend="auto"',
        "a GPU; flash-attn-4 for fa4",
    ),
    "cache": (
        "hits and misses of the identity cache, on threads too",
        "a compiled cuseq_cache_threads",
    ),
    "conv": ("causal_conv1d beside fla and PyTorch", "PEERS for fla"),
    "cp_attention": (
        "attention and training steps over parts of rows, beside an all-gather and a ring",
        "two GPUs for figures that count",
    ),
    "cp_plan": ("plans of context parallelism: host time and quality", "nothing; it needs no GPU"),
    "bits": ("a document's bits in other rows, by family and backend", "transformers"),
    "families": ("what `enable` gains for models of several families", "transformers"),
    "graphed_ranks": (
        "captured steps on several GPUs, beside one, DDP, and flex attention in FSDP2",
        "two GPUs for figures that count",
    ),
    "images": (
        "vision towers, and steps over rows with images, beside padding and stock transformers",
        "transformers; a GPU for figures that count",
    ),
    "masks": ("dense and block masks beside torch and unsloth", "PEERS for unsloth"),
    "metadata": ("offsets, positions and layouts, with waits of the host", "nothing"),
    "packing": ("bin_pack, sampler and stream", "nothing; it needs no GPU"),
    "rope": ("apply_rope and apply_qk_norm_rope", "PEERS for Liger and unsloth"),
    "thd": ("pack, unpack and context-parallel partition", "nothing"),
    "train_ranks": (
        "the loop of examples/fsdp2.py on several GPUs, beside one GPU and flex attention",
        "tokenizers, datasets and tqdm; two GPUs for figures that count",
    ),
    "training_step": ("a training step of a transformers model", "transformers; PEERS for Liger"),
    "training_turns": (
        "training steps of stock, flex attention and cuseq, in turns in one process",
        "a GPU; flash-attn-4 for fa4",
    ),
    "tree": ("rows whose samples share a prompt, beside copies of it", "transformers for the step"),
    "trl": (
        "steps of TRL's GRPO, DPO and Reward trainers, without generation",
        "trl; a GPU for figures that count",
    ),
    "unsloth": ("a training step inside unsloth", "a GPU and PEERS with unsloth"),
}


def main() -> None:
    names = [name for name in sys.argv[1:2] if not name.startswith("-")]
    if not names:
        width = max(map(len, BENCHMARKS))
        print("python -m benchmarks NAME [--device cuda|cpu] [--out FOLDER] ...\n")
        for name, (measures, needs) in BENCHMARKS.items():
            print(f"{name:{width}}  {measures}; needs: {needs}")
        print(
            "\nPEERS is a folder with the peers' packages; benchmarks/peers.txt says how to fill it"
        )
        return
    (name,) = names
    if name not in BENCHMARKS:
        sys.exit(f"NAME must be one of {', '.join(BENCHMARKS)}, got {name!r}")
    # A process of its own: workers of the training step import its module as __main__.
    script = FOLDER / f"bench_{name}.py"
    os.execv(sys.executable, [sys.executable, str(script), *sys.argv[2:]])


if __name__ == "__main__":
    main()
