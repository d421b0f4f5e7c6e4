"""Is a document's result the same bits in any row of one length, and what does that cost?

    python -m benchmarks bits [--tokens N] [--families NAME ...] [--backends NAME ...]

Models of many families in bf16 (8 layers of hidden size 1,024; see `families`), enabled with one
backend of attention each. "bits" is the largest difference of a document's logits between rows in
which it lies elsewhere, in other orders and among other lengths: `check_packing(bitwise=True)`.
"first to differ" is the module that its suspect names. "step" is forward, loss and backward over
rows of lognormal lengths (mean 350).

On a CPU the sizes are small, and only say that everything runs.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from bench_families import FAMILIES, MEAN, OTHERS, SHAPE, STEPS, WARMUP, make_model, measure
from report import Report, Table, arguments, environment
from workload import documents, lognormal_lengths

import cuseq

LENGTHS = (700, 1, 1300, 64, 511, 129, 1024, 367)  # 4,096 tokens


def bits_of(model: torch.nn.Module, tokens: int) -> dict[str, Any]:
    """Return the largest difference between rows, and which module is the first to differ."""
    scale = max(1, sum(LENGTHS) // tokens)
    lengths = [max(1, length // scale) for length in LENGTHS]
    docs = documents(lengths, SHAPE["vocab_size"], 0)
    report = cuseq.check_packing(model, docs, bitwise=True, rtol=1.0)
    suspect = report.suspect
    return {
        "bits": report.checks["bits"].value if "bits" in report.checks else None,
        "first": "" if suspect is None else suspect.finding.rpartition("first in ")[2],
    }


def main() -> None:
    families = [*FAMILIES, *OTHERS]
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, help="of a row; default 4,096, on a CPU 256")
    parser.add_argument("--families", nargs="+", choices=families, metavar="NAME",
                        default=families)  # fmt: skip
    parser.add_argument("--backends", nargs="+", default=["auto"], metavar="NAME")
    args = parser.parse_args()
    device = torch.device(args.device)
    tokens = args.tokens or (4096 if device.type == "cuda" else 256)
    report = Report("bits", environment(args.device))
    columns = {"family": "family", "backend": "backend", "bits": "bits", "first": "first to differ",
               "step": "step, ms"}  # fmt: skip
    rows: list[dict[str, Any]] = []
    report.tables.append(Table("Documents in other rows of one length", columns, rows))
    collate = cuseq.PackingCollator(total_tokens=tokens)
    batches = [
        collate([
            {"input_ids": doc}
            for doc in documents(lognormal_lengths(tokens, MEAN, seed), SHAPE["vocab_size"], seed)
        ])
        for seed in range(WARMUP + STEPS)
    ]  # fmt: skip
    for family in args.families:
        for backend in args.backends:
            model = make_model(family, device)
            found: dict[str, Any] = {"family": family, "backend": backend}
            try:
                cuseq.enable(model, backend=backend)
                found |= bits_of(model, tokens)
                found["step"] = measure(model, batches, device)["step"]
            except (ValueError, RuntimeError, NotImplementedError) as error:
                found["first"] = str(error).strip().partition("\n")[0][:120]
            finally:
                cuseq.disable(model)
            rows.append(found)
            report.write(args.out)
            del model
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
