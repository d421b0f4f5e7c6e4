"""Benchmark the real unsloth on packed rows, as installed and with cuseq.

    python -m benchmarks unsloth [--sections rope 0.6b 14b] [--rows 2048 8192]

unsloth comes from the folder of the peers (PEERS, default .peers), and a GPU is needed. Models are
random checkpoints, loaded by unsloth's FastLanguageModel with LoRA on all projections and its own
checkpointing. A step is: the packed row to the device, forward with the model's loss under
autocast, backward, fused AdamW; each step has a different pack (lognormal lengths, mean 350). The
variants of a process take turns, a few steps each, so that a busy host slows them alike.

Sections:
- `rope`: rotation of queries and keys, with and without their norm: unsloth's functions against
  cuseq's of the same names, in the format of the table in unsloth's pull request on sample packing;
- `0.6b`: Qwen3-0.6B's shape, LoRA on 16 bits, rows of 4,096 tokens: bound by launches;
- `14b`: Qwen3-14B's shape, LoRA on nf4, in the format of unsloth's pull request 4173, which made it
  keep metadata across layers.

Variants:
- `unsloth`: as installed. With a torch for CUDA 13 it cannot load PyPI's xformers, and calls SDPA
  for each run of equal lengths;
- `unsloth_emptied`: its caches are emptied before each layer, which undoes 4173;
- `xformers`, `xformers_emptied`: the same with xformers, if it can be loaded;
- `cuseq`, `cuseq_xformers`: `cuseq.enable(unsloth)` over either;
- `cuseq_blocks`: `cuseq.enable(unsloth, compile_blocks=True)`; in `14b` only if --variants names
  it.

Attention and the model are decided at import, so each combination has a process of its own; `rope`
shares one with the first of `0.6b`. Each result is saved at once, and the reports `unsloth_rope`,
`unsloth_0.6b` and `unsloth_14b` (.json, .md, .png) are written after each process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import Report, Table, arguments, draw_bars, environment
from unsloth_steps import VARIANTS
from workload import peers_folder

Row = dict[str, Any]

SECTIONS = ["rope", "0.6b", "14b"]
ATTENTIONS = ["installed", "xformers"]
# Compiling 40 layers would take longer than everything else.
NOT_BY_DEFAULT = {"14b": ["cuseq_blocks"]}
SMALL_ROW = 4096
# Timed steps of a variant in each round.
STEPS = {"0.6b": 4, "14b": 2}
WORKER_LIMIT_S = 420
CHECKPOINT_BYTES = 12e9
PHASES = ("forward", "backward", "batch")
# Percent of each time saved by keeping metadata, as reported in pull request 4173.
PUBLISHED = {"forward": 43.3, "backward": 5.8, "batch": 14.3}


@dataclass(frozen=True)
class Job:
    """The measurements of one process."""

    attention: str
    sections: list[str]


def jobs(sections: list[str], names: dict[str, list[str]]) -> list[Job]:
    """Return the processes in order, without those that have no variant to measure."""
    every = [Job("installed", ["rope", "0.6b"]), Job("xformers", ["0.6b"])]
    every += [Job(attention, ["14b"]) for attention in ATTENTIONS]
    found = []
    for job in every:
        asked = [
            section
            for section in job.sections
            if section in sections
            and (section == "rope" or of_attention(job.attention, names[section]))
        ]
        if asked:
            found.append(Job(job.attention, asked))
    return found


def of_attention(attention: str, names: list[str]) -> list[str]:
    """Return the variants that need this attention."""
    return [name for name in names if VARIANTS[name].attention == attention]


def chosen(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the chosen variants of each section with a model."""
    if args.variants:
        return dict.fromkeys(STEPS, [name for name in VARIANTS if name in args.variants])
    return {
        section: [name for name in VARIANTS if name not in NOT_BY_DEFAULT.get(section, [])]
        for section in STEPS
    }


def run_job(
    job: Job,
    args: argparse.Namespace,
    names: dict[str, list[str]],
    scratch: Path,
    results: Path,
) -> str | None:
    """Run one process; return what went wrong, or None if nothing did."""
    peers = peers_folder()
    described = {
        "attention": job.attention,
        "sections": job.sections,
        "peers": str(peers),
        "scratch": str(scratch),
        "results": str(results),
        "layers": args.layers,
        "rows": {"0.6b": [SMALL_ROW], "14b": args.rows},
        "variants": {
            section: of_attention(job.attention, chosen) for section, chosen in names.items()
        },
        "rounds": args.rounds,
        "warmup": args.warmup,
        "steps": {section: timed_steps(section, args) for section in STEPS},
    }
    file = scratch / "job.json"
    file.write_text(json.dumps(described), encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(peers), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(Path(__file__).with_name("unsloth_worker.py")), str(file)]
    what = f"{' and '.join(job.sections)}, {job.attention}"
    print(f"=== {what}", flush=True)
    begun = time.perf_counter()
    try:
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, timeout=WORKER_LIMIT_S
        )
        failed = f"the process ended with {done.returncode}" if done.returncode else None
    except subprocess.TimeoutExpired:
        failed = f"not done after {WORKER_LIMIT_S} s"
    except KeyboardInterrupt:
        failed = "stopped"
    print(f"=== {what}: {failed or 'done'} ({time.perf_counter() - begun:.0f} s)", flush=True)
    return f"{what}: {failed}" if failed else None


def timed_steps(section: str, args: argparse.Namespace) -> int:
    """Return the timed steps of a variant in each round."""
    return STEPS[section] if args.steps is None else args.steps


def read_rows(results: Path) -> list[Row]:
    """Read the rows that the processes wrote; a variant's later lines extend its first."""
    merged: dict[Any, Row] = {}
    if not results.exists():
        return []
    for number, line in enumerate(results.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        key = (row["section"], row["tokens"], row["variant"]) if "variant" in row else number
        merged[key] = merged.get(key, {}) | row
    return list(merged.values())


def saved_by_keeping(rows: dict[str, Row], tokens: int) -> list[Row]:
    """Return the time with emptied caches and the percent saved, by attention and phase."""
    table = []
    for emptied, installed, ours in (
        ("unsloth_emptied", "unsloth", "cuseq"),
        ("xformers_emptied", "xformers", "cuseq_xformers"),
    ):
        before = rows.get(emptied, {})
        for phase in PHASES:
            if phase not in before:
                continue
            line: Row = {"tokens": tokens, "attention": installed, "phase": phase}
            line |= {"emptied": before[phase], "published": PUBLISHED[phase]}
            for column, name in (("installed", installed), ("cuseq", ours)):
                after = rows.get(name, {}).get(phase)
                if after is not None:
                    line[column] = after
                    line[f"{column} saved"] = 100 * (1 - after / before[phase])
            table.append(line)
    return table


def add_comparisons(rows: dict[str, Row]) -> None:
    """Add speed relative to both unsloth variants, and the loss relative to `unsloth`'s."""
    for name in ("unsloth", "xformers"):
        reference = rows.get(name, {})
        for row in rows.values():
            if "step" in row and "step" in reference:
                row[f"times {name}"] = reference["step"] / row["step"]
    expected = rows.get("unsloth", {}).get("loss")
    for row in rows.values():
        if expected is not None and "loss" in row:
            row["loss_error"] = abs(row["loss"] - expected) / abs(expected)


def notes(rows: list[Row], problems: list[str]) -> list[str]:
    """Return versions, what was loaded, and what went wrong."""
    found = []
    for row in rows:
        if row["section"] == "process":
            versions = ", ".join(f"{name} {at}" for name, at in row["versions"].items())
            found.append(f"Packed rows of `{row['attention']}` go to {row['backend']}; {versions}.")
        if row["section"] == "loading":
            found.append(
                f"{row['model']}: {row['layers']} layers, written in {row['write_s']} s, loaded "
                f"in {row['load_s']} s."
            )
        if "profiler" in row:
            found.append(row["profiler"])
    return sorted(set(found)) + [f"Not whole: {problem}." for problem in problems]


def report_steps(
    section: str, rows: list[Row], problems: list[str], args: argparse.Namespace
) -> None:
    """Write the report of one model."""
    report = Report(f"unsloth_{section}", environment(args.device))
    steps = timed_steps(section, args)
    mine = [row for row in rows if row["section"] == section]
    about = [row for row in rows if row.get("model") == section or row["section"] == "process"]
    report.notes += notes(about + mine, problems)
    report.notes.append(
        f"Medians over {args.rounds * steps} steps, each of another pack, the same for all "
        f"variants: {args.rounds} rounds through the variants of a process, {args.warmup} untimed "
        f"and {steps} timed steps in each. Batch, waits, copies, kernels: of moving the row, "
        "forward and backward."
    )
    saved: list[Row] = []
    for tokens in sorted({row["tokens"] for row in mine}):
        by_name = {row["variant"]: row for row in mine if row["tokens"] == tokens}
        add_comparisons(by_name)
        saved += saved_by_keeping(by_name, tokens)
    report.tables.append(step_table(mine))
    if saved:
        report.tables.append(saved_table(saved))
    headings = {
        "tokens": "tokens",
        "variant": "variant",
        "loss": "loss",
        "loss_error": "loss, relative",
        "gradient_error": "LoRA gradients, relative L2",
    }
    report.tables.append(Table("First step against unsloth as installed", headings, mine))
    if sites := wait_sites(mine):
        headings = {"tokens": "tokens", "variant": "variant", "phase": "phase"}
        headings |= {"site": "wait", "count": "count"}
        report.tables.append(Table("Where a step waits", headings, sites))
    report.write(args.out)
    for tokens in sorted({row["tokens"] for row in mine}):
        shown = (*PHASES, "step")
        draw_bars(
            args.out
            / (f"{report.name}_{tokens}.png" if section == "14b" else f"{report.name}.png"),
            f"unsloth, Qwen3-{section.upper()} shape, row of {tokens:,} tokens",
            "ms",
            list(shown),
            {
                row["variant"]: [row.get(phase) for phase in shown]
                for row in mine
                if row["tokens"] == tokens
            },
        )


def step_table(rows: list[Row]) -> Table:
    """Return the table of times, speed, memory and waits of every variant."""
    headings = {"tokens": "tokens", "variant": "variant", "step": "step ms"}
    headings |= {"step_low": "least", "step_high": "most"}
    headings |= {phase: f"{phase} ms" for phase in PHASES}
    headings |= {
        "optimizer": "optimizer ms",
        "tokens_per_s": "tokens/s",
        "times unsloth": "times unsloth",
        "times xformers": "times xformers",
        "peak_gib": "peak GiB",
        "stream_waits": "stream waits",
        "event_waits": "event waits",
        "dtoh_copies": "copies to host",
        "kernels": "kernels",
        "device_ms": "device ms",
        "first_s": "first step s",
    }
    if any("failed" in row for row in rows):
        headings["failed"] = "failed"
    return Table("Training step", headings, rows)


def saved_table(saved: list[Row]) -> Table:
    """Return the table of pull request 4173: before, after, percent saved."""
    headings = {
        "tokens": "tokens",
        "attention": "attention",
        "phase": "phase",
        "emptied": "caches emptied in each layer, ms",
        "installed": "as installed, ms",
        "installed saved": "saved %",
        "cuseq": "with cuseq, ms",
        "cuseq saved": "saved % with cuseq",
        "published": "published %",
    }
    return Table("Saved by keeping metadata over the layers", headings, saved)


def wait_sites(rows: list[Row]) -> list[Row]:
    """Return the profiler's waits by phase and place."""
    return [
        {key: row[key] for key in ("tokens", "variant")}
        | {"phase": phase, "site": site, "count": count}
        for row in rows
        for phase, activity in row.get("activity", {}).items()
        for site, count in activity["sites"].items()
    ]


def report_rope(rows: list[Row], problems: list[str], args: argparse.Namespace) -> None:
    """Write the report of the rotation."""
    report = Report("unsloth_rope", environment(args.device))
    mine = [row for row in rows if row["section"] == "rope"]
    about = [row for row in rows if row["section"] == "process"]
    report.notes += notes(about, problems)
    report.notes.append(
        "Shapes are (query heads, key heads) x dim, tokens; bf16, device time. Two launches: "
        "unsloth's kernel for queries and for keys, without position ids; the others rotate both "
        "at once by the ids of a pack."
    )
    for phase in ("forward", "backward"):
        headings = {
            "shape": "shape",
            f"two launches {phase}": "two launches, ms",
            f"unsloth {phase}": "unsloth fused, ms",
            f"fused {phase} speed-up": "speed-up",
            f"cuseq {phase}": "cuseq, ms",
            f"cuseq {phase} over two": "speed-up over two launches",
            f"cuseq {phase} speed-up": "speed-up over unsloth",
            "cuseq apart": "apart, relative L2",
        }
        report.tables.append(Table(f"fast_rope_embedding, {phase}", headings, mine))
        headings = {
            "shape": "shape",
            f"unsloth norm {phase}": "unsloth, ms",
            f"cuseq norm {phase}": "cuseq, ms",
            f"cuseq norm {phase} speed-up": "speed-up over unsloth",
            "cuseq norm apart": "apart, relative L2",
        }
        report.tables.append(Table(f"fast_qk_norm_rope, {phase}", headings, mine))
    report.write(args.out)
    shown = [row for row in mine if row["heads"] == [40, 8]]
    draw_bars(
        args.out / "unsloth_rope.png",
        "Rotation of (40, 8) heads of 128, forward",
        "ms",
        [f"{row['tokens']:,}" for row in shown],
        {
            name: [row[f"{name} forward"] for row in shown]
            for name in ("two launches", "unsloth", "cuseq", "unsloth norm", "cuseq norm")
        },
    )


def write_reports(
    sections: list[str], rows: list[Row], problems: list[str], args: argparse.Namespace
) -> None:
    """Write the reports that the last process added to."""
    for section in sections:
        if not any(row["section"] == section for row in rows):
            continue
        if section == "rope":
            report_rope(rows, problems, args)
        else:
            report_steps(section, rows, problems, args)


def scratch_root() -> str | None:
    """Return a folder in memory with room for the large checkpoint; None for the default."""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 2 * CHECKPOINT_BYTES:
        return str(memory)
    return None


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 8192], help="of 14b")
    parser.add_argument("--layers", type=int, default=40, help="of 14b")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3, help="through the variants of a process")
    parser.add_argument("--warmup", type=int, default=1, help="untimed steps of each in a round")
    parser.add_argument("--steps", type=int, help="timed steps of each in a round")
    parser.add_argument(
        "--scratch", type=Path, help="keep checkpoints and gradients here for another run"
    )
    args = parser.parse_args()
    if args.device != "cuda":
        sys.exit("unsloth's kernels need a GPU")
    if peers_folder() is None:
        sys.exit("unsloth is looked for in PEERS (default .peers), which is not a folder")
    # an interrupted run still reports its results so far
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = chosen(args)
    problems: list[str] = []
    with tempfile.TemporaryDirectory(dir=scratch_root()) as temporary:
        scratch = args.scratch or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        args.out.mkdir(parents=True, exist_ok=True)
        results = args.out / "unsloth_rows.jsonl"
        results.unlink(missing_ok=True)
        for job in jobs(args.sections, names):
            if problem := run_job(job, args, names, scratch, results):
                problems.append(problem)
            write_reports(job.sections, read_rows(results), problems, args)
            if problem and problem.endswith("stopped"):
                break
    failed = [row for row in read_rows(results) if "failed" in row]
    if failed or problems:
        sys.exit(f"{len(failed)} variants and {len(problems)} processes failed, see the tables")


if __name__ == "__main__":
    main()
