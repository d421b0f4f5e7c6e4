"""Benchmark rows whose samples share prefixes: building them, attention, and a training step.

    python -m benchmarks tree [--parts PART ...] [--compiled] [--device cpu] [--out FOLDER]

- Building: a million tokens in groups of 16, by kind of input.
- Attention, forward and backward, of one row of a group: the tree; packed rows that copy the prompt
  into each sample; keys and values gathered for each node's path, as TRL's AsyncGRPO does; flex
  attention with unsloth's mask of labels. The last two need a GPU.
- Attention over a trace that branches at every turn: by calls, in one kernel, and the modelled
  times that choose between them.
- A training step of the shape of Qwen3-0.6B whose head runs on completions, tree against copies;
  with --compiled its layers are. "captured" is the same step in a CUDA graph, without the host's
  time, which short rows wait for otherwise.

On a CPU the sizes are small, and only say that everything runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import timer
import torch
from report import Report, Table, arguments, environment

import cuseq
from cuseq.attention.tree import times_of

Tensor = torch.Tensor
Heads = tuple[int, int, int]  # of queries, of keys, and their dimension
Row = dict[str, object]


@dataclass(frozen=True)
class Group:
    """A prompt and its completions, all of one length."""

    prompt: int
    completion: int
    size: int

    def __str__(self) -> str:
        return f"{self.prompt:,} / {self.completion:,} / {self.size}"

    def tree(self, device: torch.device) -> cuseq.PackedTree:
        """Return a tree of one such group with random ids."""
        ids = torch.randint(1000, (self.prompt + self.size * self.completion,))
        prompt, *completions = ids.split([self.prompt] + [self.completion] * self.size)
        return cuseq.PackedTree.from_groups(
            [prompt], [completions], max_seqs=MAX_SEQS, device=device
        )


GPU = [
    Group(2048, 512, 8),
    Group(2048, 512, 2),
    Group(512, 512, 8),
    Group(4096, 512, 8),
    Group(512, 4096, 8),
    Group(4096, 512, 16),
]
CPU = [Group(64, 16, 4)]
MOST_CAPTURED = 24_576  # tokens of a step in a CUDA graph, which has memory of its own
MAX_SEQS = 32  # a CUDA graph attends over as many, empty or not
PARTS = ["building", "attention", "traces", "steps"]
SIZES = "prompt / completion / group"
# Turns of a trace, and tokens of each of a turn's two answers.
GPU_TRACES = [(4, 64), (4, 512), (16, 32), (16, 128), (16, 512), (64, 32), (64, 128)]
CPU_TRACES = [(4, 8), (16, 2), (16, 16)]

SHAPE = dict(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
)
SMALL = dict(
    vocab_size=1024,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def fastest(call: Callable[[], object], repeats: int = 7) -> float:
    """Return the least time of a host function in ms."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def measure_building(groups: int) -> list[Row]:
    """Build trees of 512 tokens for each prompt and completion, 16 completions a group."""
    prompts = list(torch.randint(1000, (groups, 512)))
    completions = [list(torch.randint(1000, (16, 512))) for _ in range(groups)]
    kinds: dict[str, Callable[[Tensor], object]] = {
        "tensors": lambda ids: ids,
        "NumPy arrays": lambda ids: ids.numpy(),
        "lists": lambda ids: ids.tolist(),
    }
    found = []
    for name, convert in kinds.items():
        own = [convert(ids) for ids in prompts]
        theirs = [[convert(ids) for ids in one] for one in completions]
        ms = fastest(lambda a=own, b=theirs: cuseq.PackedTree.from_groups(a, b))
        found.append({"what": f"from_groups, {name}", "tokens": groups * 17 * 512, "ms": ms})
    sequences = [
        torch.cat([prompt, one])
        for prompt, group in zip(prompts, completions, strict=True)
        for one in group
    ]
    ms = fastest(lambda: cuseq.PackedTree.from_sequences(sequences), 3)
    found.append({"what": "from_sequences, tensors", "tokens": groups * 16 * 1024, "ms": ms})
    return found


# ------------------------------------------------------------------------------- attention


def leaves(tokens: int, heads: Heads, device: torch.device) -> list[Tensor]:
    query_heads, key_heads, dim = heads
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return [
        torch.randn(tokens, count, dim, device=device, dtype=dtype, requires_grad=True)
        for count in (query_heads, key_heads, key_heads)
    ]


def gathered_attention(group: Group, device: torch.device) -> Callable[..., Tensor]:
    """Return attention of each node over its path's keys and values, which are gathered."""
    from torch.nn.attention.varlen import varlen_attn

    tree = group.tree(torch.device("cpu"))
    rows = torch.cat([torch.arange(group.prompt), *(tree.rows_of(i) for i in range(group.size))])
    rows = rows.to(device)
    queries = [group.prompt] + [group.completion] * group.size
    keys = [group.prompt] + [group.prompt + group.completion] * group.size
    cu_q, cu_k = (
        torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
        for lengths in (queries, keys)
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.index_select(0, rows), v.index_select(0, rows)
        group_size = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group_size, 1) for x in (k, v))
        window = (-1, 0)  # causal, from the bottom right
        return varlen_attn(q, k, v, cu_q, cu_k, max(queries), max(keys), window_size=window)

    return attend


def labelled_attention(group: Group, device: torch.device) -> Callable[..., Tensor]:
    """Return flex attention with a mask of labels: a completion sees its prompt and itself."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    labels = torch.repeat_interleave(
        torch.arange(group.size + 1),
        torch.tensor([group.prompt] + [group.completion] * group.size),
    ).to(device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & ((labels[key] == 0) | (labels[key] == labels[query]))

    tokens = len(labels)
    mask = create_block_mask(sees, None, None, tokens, tokens, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = compiled(q, k, v, block_mask=mask, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)

    return attend


def measure_attention(group: Group, heads: Heads, device: torch.device) -> Row:
    """Return milliseconds of a forward and backward, by method."""
    tree = group.tree(device)

    def time_of(tokens: int, attend: Callable[..., Tensor]) -> float:
        tensors = leaves(tokens, heads, device)
        grad = torch.ones_like(tensors[0])

        def both() -> object:
            return torch.autograd.grad(attend(*tensors), tensors, grad)

        return timer.device_time(both, device=device, repeats=20).median / 1e3

    def over(packed: cuseq.PackedLayout) -> Callable[..., Tensor]:
        return lambda q, k, v: cuseq.varlen_attention(q, k, v, packed)

    tokens, copies = tree.layout.total_tokens, tree.samples.total_tokens
    row: Row = {"group": str(group), "saved": copies / tokens}
    row["tree"] = time_of(tokens, over(tree.layout))
    row["copies"] = time_of(copies, over(tree.samples))
    backends = [
        cuseq.attention_backend(*leaves(packed.total_tokens, heads, device), packed).name
        for packed in (tree.layout, tree.samples)
    ]
    row["backends"] = " / ".join(backends)
    if device.type == "cuda":
        row["gathered"] = time_of(tokens, gathered_attention(group, device))
        row["labels"] = time_of(tokens, labelled_attention(group, device))
    return row


def measure_trace(turns: int, tokens: int, heads: Heads, device: torch.device) -> Row:
    """Return milliseconds of both ways over a trace, and the modelled ones."""
    parents = [-1]
    for turn in range(turns):
        parents += [2 * turn] * 2  # the answer that was dropped, and the one that was kept
    tree = cuseq.PackedTree.from_parents([tokens] * len(parents), parents, device=device)
    on_gpu = device.type == "cuda"
    row: Row = {"trace": f"{turns} / {tokens}"}
    tensors = leaves(tree.layout.total_tokens, heads, device)
    grad = torch.ones_like(tensors[0])
    ways = {"calls": "flash" if on_gpu else "segments", "auto": "auto"}
    if on_gpu:
        ways["flex"] = "flex"
    for name, backend in ways.items():

        def both(backend: str = backend) -> object:
            out = cuseq.varlen_attention(*tensors, tree.layout, backend=backend)
            return torch.autograd.grad(out, tensors, grad)

        row[name] = timer.device_time(both, device=device, repeats=20).median / 1e3
    row["chosen"] = cuseq.attention_backend(*tensors, tree.layout).name
    times = times_of(tensors[0], tensors[2], tree.layout)
    row["modelled"] = f"{times.calls / 1e3:.2f} / {times.one_kernel / 1e3:.2f}"
    return row


# ------------------------------------------------------------------------------- a step


def captured_ms(run: Callable[[], None]) -> float | None:
    """Return milliseconds of a step in a CUDA graph, or None if it cannot be captured."""
    try:
        return timer.graph_time(run, calls=1, repeats=5).median / 1e3
    except RuntimeError as failure:
        print(f"not captured: {str(failure).splitlines()[0]}", flush=True)
        return None
    finally:
        torch.cuda.empty_cache()  # the graph's memory


def measure_step(model: torch.nn.Module, group: Group, device: torch.device) -> Row:
    """Return milliseconds and gigabytes of a step's forward and backward, tree and copies."""
    tree = group.tree(device)
    rows, labels, _ = tree.targets
    starts = tree.samples.cu_seqlens[:-1].long() + group.prompt - 1
    places = starts.unsqueeze(1) + torch.arange(group.completion, device=device)

    def step(
        ids: Tensor, positions: Tensor, packed: cuseq.PackedLayout, kept: Tensor
    ) -> Callable[[], None]:
        def run() -> None:
            hidden = model.model(
                input_ids=ids, position_ids=positions, packed=packed
            ).last_hidden_state[0]
            cuseq.token_logprobs(hidden[kept], model.lm_head.weight, labels).mean().backward()
            model.zero_grad(set_to_none=True)

        return run

    lengths = tree.samples.lengths_on_host()
    samples = cuseq.PackedLayout.from_lengths(lengths, max_seqs=MAX_SEQS).to(device)
    copied = tree.gather(tree.input_ids[0].float()).long().unsqueeze(0)
    positions = samples.position_ids.unsqueeze(0)
    row: Row = {"group": str(group)}
    for name, run in (
        ("tree", step(tree.input_ids, tree.position_ids, tree.layout, rows)),
        ("copies", step(copied, positions, samples, places.flatten())),
    ):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        row[name] = timer.device_time(run, device=device, repeats=5).median / 1e3
        if device.type == "cuda":
            row[f"{name}_gb"] = torch.cuda.max_memory_allocated(device) / 2**30
            if samples.total_tokens <= MOST_CAPTURED:
                row[f"{name}_captured"] = captured_ms(run)
    row["times"] = row["copies"] / row["tree"]
    tree_ms, copies_ms = row.get("tree_captured"), row.get("copies_captured")
    if tree_ms and copies_ms:
        row["times_captured"] = copies_ms / tree_ms
    return row


def measure_steps(groups: list[Group], device: torch.device, compiled: bool) -> Iterator[Row]:
    try:
        import transformers
    except ImportError:
        return
    on_gpu = device.type == "cuda"
    config = transformers.Qwen3Config(**(SHAPE if on_gpu else SMALL), use_cache=False)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    cuseq.enable(model)
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    for group in groups:
        yield measure_step(model, group, device)


def building_table(on_gpu: bool) -> tuple[Table, Iterable[Row]]:
    columns = {"what": "", "tokens": "tokens", "ms": "ms"}
    return Table("Building on the host", columns, []), measure_building(115 if on_gpu else 4)


def attention_table(
    groups: list[Group], heads: Heads, device: torch.device
) -> tuple[Table, Iterable[Row]]:
    columns = {"group": SIZES, "saved": "tokens saved, times", "tree": "tree, ms"}
    columns |= {"copies": "copies, ms"}
    if device.type == "cuda":
        columns |= {"gathered": "K and V gathered, ms", "labels": "flex with labels, ms"}
    columns |= {"backends": "backend of tree / copies"}
    rows = (measure_attention(group, heads, device) for group in groups)
    return Table("Attention, forward and backward", columns, []), rows


def traces_table(heads: Heads, device: torch.device) -> tuple[Table, Iterable[Row]]:
    on_gpu = device.type == "cuda"
    columns = {"trace": "turns / tokens", "calls": "calls, ms"}
    columns |= {"flex": "flex, ms"} if on_gpu else {}
    columns |= {"auto": "chosen, ms", "chosen": "which", "modelled": "modelled calls / one kernel"}
    traces = GPU_TRACES if on_gpu else CPU_TRACES
    rows = (measure_trace(*trace, heads, device) for trace in traces)
    return Table("Attention over traces, forward and backward", columns, []), rows


def steps_table(
    groups: list[Group], device: torch.device, compiled: bool
) -> tuple[Table, Iterable[Row]]:
    columns = {"group": SIZES, "tree": "tree, ms", "copies": "copies, ms", "times": "times as fast"}
    if device.type == "cuda":
        columns |= {
            "tree_captured": "tree captured, ms",
            "copies_captured": "copies captured, ms",
            "times_captured": "times as fast",
            "tree_gb": "tree, GiB",
            "copies_gb": "copies, GiB",
        }
    title = f"A step, head on completions, layers {'' if compiled else 'not '}compiled"
    return Table(title, columns, []), measure_steps(groups, device, compiled)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--compiled", action="store_true", help="compile the layers of the step")
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    groups = GPU if on_gpu else CPU
    heads = (16, 8, 128) if on_gpu else (4, 2, 16)
    tables = {
        "building": lambda: building_table(on_gpu),
        "attention": lambda: attention_table(groups, heads, device),
        "traces": lambda: traces_table(heads, device),
        "steps": lambda: steps_table(groups, device, args.compiled),
    }
    name = ["tree", *(args.parts if args.parts != PARTS else ())]
    report = Report("_".join(name + ["compiled"] * args.compiled), environment(args.device))
    for part in PARTS:
        if part in args.parts:
            table, rows = tables[part]()
            report.tables.append(table)
            for row in rows:
                table.rows.append(row)
                report.write(args.out)


if __name__ == "__main__":
    main()
