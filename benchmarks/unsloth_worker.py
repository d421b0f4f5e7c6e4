"""One process of bench_unsloth.py: unsloth with one kind of attention, results as lines of JSON.

    python benchmarks/unsloth_worker.py JOB.json

The job's fields are those of `Job` in bench_unsloth.py. The folder of the peers must be on the path
(PYTHONPATH), and a GPU is needed.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

from unsloth_model import SHAPES, import_unsloth, load_model, write_checkpoint

PACKAGES = [
    "unsloth", "unsloth_zoo", "transformers", "trl", "peft", "accelerate", "bitsandbytes",
    "xformers", "triton", "torch",
]  # fmt: skip


def emit(file: Path, row: dict[str, Any]) -> None:
    """Save and print a row, so that a killed process leaves what it measured."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")
    if line := describe(row):
        print(line, flush=True)


def describe(row: dict[str, Any]) -> str:
    """Return one line for the terminal."""
    where = " ".join(f"{row[key]}" for key in ("section", "tokens", "variant") if key in row)
    if "failed" in row:
        return f"{where}: FAILED, {row['failed']}"
    if "waits" in row:
        waits, events = row["stream_waits"], row["event_waits"]
        return f"{where}: {waits} stream waits, {events} event waits, {row['kernels']} kernels"
    if "step" in row:
        return (
            f"{where}: {row['step']:.1f} ms a step (forward {row['forward']:.1f}, backward "
            f"{row['backward']:.1f}), {row['tokens_per_s']:,.0f} tokens/s, {row['peak_gib']:.1f} "
            f"GiB, first step {row['first_s']:.1f} s, loss {row['loss']:.5f}, gradients "
            f"{row.get('gradient_error', 0):.1e} apart"
        )
    if "shape" in row:
        return (
            f"rope {row['shape']}: forward x{row['cuseq forward speed-up']:.2f}, backward "
            f"x{row['cuseq backward speed-up']:.2f}; with norm x"
            f"{row['cuseq norm forward speed-up']:.2f}, x{row['cuseq norm backward speed-up']:.2f}"
        )
    return ", ".join(f"{key} {value}" for key, value in row.items() if key != "section")


def about_process(attention: str, seconds: float) -> dict[str, Any]:
    """Return what was imported, and whether unsloth uses the requested attention."""
    from unsloth.utils import attention_dispatch

    backend = attention_dispatch.select_attention_backend(True)
    wanted = "xformers" if attention == "xformers" else "sdpa"
    if backend != wanted:
        raise RuntimeError(f"packed rows must go to {wanted}, but unsloth takes {backend}")
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    return {
        "section": "process",
        "attention": attention,
        "backend": backend,
        "import_s": round(seconds, 1),
        "versions": versions,
    }


def measure_model(job: dict[str, Any], section: str, rows: Path) -> None:
    """Measure the training steps of one model, each variant over each row length."""
    import torch
    import unsloth_steps

    scratch = Path(job["scratch"])
    device = torch.device("cuda")
    four_bit = section == "14b"
    shape = dict(SHAPES[section])
    if four_bit:
        shape["num_hidden_layers"] = job["layers"]
    folder = scratch / f"qwen3-{section}-{shape['num_hidden_layers']}-layers"
    begun = time.perf_counter()
    write_checkpoint(folder, shape, four_bit, device)
    written = time.perf_counter()
    torch.cuda.empty_cache()
    model = load_model(folder, four_bit, max(job["rows"][section]))
    done = time.perf_counter()
    emit(
        rows,
        {
            "section": "loading",
            "model": section,
            "layers": shape["num_hidden_layers"],
            "write_s": round(written - begun, 1),
            "load_s": round(done - written, 1),
        },
    )
    variants = [unsloth_steps.VARIANTS[name] for name in job["variants"][section]]
    for tokens in job["rows"][section]:
        plan = unsloth_steps.Plan(
            section,
            tokens,
            variants,
            job["rounds"],
            job["warmup"],
            job["steps"][section],
            scratch,
        )
        unsloth_steps.measure(model, plan, lambda row: emit(rows, row))


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rows = Path(job["results"])
    begun = time.perf_counter()
    import_unsloth(Path(job["peers"]), xformers=job["attention"] == "xformers")
    emit(rows, about_process(job["attention"], time.perf_counter() - begun))
    for section in job["sections"]:
        if section == "rope":
            import unsloth_rope

            unsloth_rope.measure(lambda row: emit(rows, row))
        else:
            measure_model(job, section, rows)


if __name__ == "__main__":
    main()
