"""A training loop of one's own on several GPUs: FSDP2, rows over ranks, checkpoints that reshard.

    torchrun --nproc-per-node 8 examples/fsdp2.py --data my_texts --model config.json --out run
    torchrun --nproc-per-node 8 examples/fsdp2.py ... --cp 2            # two ranks share each row
    torchrun --nproc-per-node 4 examples/fsdp2.py ... --resume          # on fewer ranks too

Weights, gradients and AdamW are sharded. A resumed run is bit-equal on as many ranks; on others it
uses each document that the epoch has left once. Checkpoints are safetensors and JSON: no code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _ranks
import _runs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _inputs import Inputs, load, make_model
from _ranks import KIND
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup
from transformers.hf_argparser import HfArg

import cuseq

FLAT = states.StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass
class Options(Inputs):
    """What this example takes."""

    cp: int = HfArg(default=1, help="ranks that share a row")
    accumulation: int = HfArg(default=1, help="rows of each rank in a step")
    steps: int = HfArg(default=30, help="optimizer steps")
    save_every: int = HfArg(default=10, help="steps from checkpoint to checkpoint")
    learning_rate: float = HfArg(default=3e-4, help="the highest of AdamW")
    compile_layers: bool = HfArg(default=False, help="one graph for all rows")
    graph: bool = HfArg(default=False, help="a step is one CUDA graph")
    seed: int = HfArg(default=0, help="of weights and rows")
    out: Path = HfArg(default=Path("run_fsdp2"), help="folder of the run")
    resume: bool = HfArg(default=False, help="go on from the newest checkpoint")


def main() -> None:
    train(*_ranks.begin(__doc__, Options))
    dist.destroy_process_group()  # train() has let go of the step, whose graph this waits for


def train(options: Options) -> list[float]:
    """Train, and return the loss of each step."""
    _ranks.check_positive(options, "accumulation", "steps", "save_every")
    mesh = _ranks.make_mesh(options.cp, options.row_length)
    saved = _runs.newest_checkpoint(options.out, "step-*/state.json", options.resume, "--out")
    loaded = documents, tokenizer = load(options)
    torch.manual_seed(options.seed)
    model = make_model(options, len(tokenizer), KIND).train()
    _runs.check_same_run(options.out, saved, loaded, model, row_length=options.row_length,
                         seed=options.seed, accumulation=options.accumulation)  # fmt: skip
    _ranks.say(str(cuseq.enable(model)))  # before it is compiled and sharded
    shard(model, options.compile_layers)
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, fused=KIND == "cuda")
    dp, cp = mesh["dp"], None
    if options.cp > 1:
        cp = cuseq.distributed.ContextParallel(mesh["cp"], config=model.config)
    rows = Rows(documents, options, dp.get_local_rank(), dp.size(), cp)
    first, losses = restore(saved, model, optimizer, rows) if saved else 0, []
    progress = tqdm(range(first, options.steps), unit="step", disable=dist.get_rank() != 0)
    schedule = get_cosine_schedule_with_warmup(optimizer, options.steps // 10, options.steps)
    for _ in range(first):
        schedule.step()
    make_step = None
    for step, batches in zip(progress, map(cuseq.distributed.ContextParallel.step_inputs, rows)):
        make_step = make_step or step_of(model, optimizer, options, batches[0])
        loss = make_step(batches) / dist.get_world_size()
        schedule.step()
        dist.all_reduce(loss)
        losses.append(loss)
        if step % 10 == 0:  # reading it waits for the GPU
            progress.set_postfix(loss=f"{loss.item():.4f}")
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            save(options.out / f"step-{step + 1:08d}", model, optimizer, rows, step + 1)
    return [loss.item() for loss in losses]


def shard(model: PreTrainedModel, compile_layers: bool) -> None:
    """Shard each layer and the rest over all ranks; compute in bf16 on GPUs."""
    # Rotations that a model makes in fp32 stay so: only weights are cast.
    bf16 = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = MixedPrecisionPolicy(**(bf16 if KIND == "cuda" else {}), cast_forward_inputs=False)
    if compile_layers:
        model.loss_function = torch.compile(model.loss_function, dynamic=False)
    for layer in model.get_decoder().layers:
        if compile_layers:
            layer.compile(fullgraph=True, dynamic=False)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


class Rows:
    """This rank's rows, epoch after epoch, in lists of one step."""

    def __init__(self, documents: Any, options: Options, rank: int, ranks: int, cp: Any):
        self._accumulation, self.used = options.accumulation, 0
        room = max(1, options.row_length // (2 * options.cp) - 1) if options.graph else None
        self.sampler = cuseq.data.PackedBatchSampler(
            documents["length"], options.row_length, rank=rank, world_size=ranks,
            balance="attention", accumulation=options.accumulation, seed=options.seed,
        )  # fmt: skip
        self._loader = DataLoader(
            documents.select_columns("input_ids"), batch_sampler=self.sampler,
            collate_fn=cuseq.PackingCollator(total_tokens=options.row_length, max_seqs=room, cp=cp),
            num_workers=2 if KIND == "cuda" else 0, pin_memory=KIND == "cuda",
        )  # fmt: skip

    def __iter__(self) -> Iterator[list[dict]]:
        step: list[dict] = []
        while True:
            for batch in self._loader:
                step.append(batch)
                if len(step) == self._accumulation:
                    self.used += len(step)
                    yield step
                    step = []
            self.sampler.set_epoch(self.sampler.epoch + 1)
            self.used = 0


def step_of(model: Any, optimizer: Any, options: Options, example: dict) -> Any:
    """Return a function that makes a step of batches, and returns this rank's loss, times ranks."""

    def loss_of(batch: dict) -> torch.Tensor:
        loss = model(**batch, use_cache=False).loss  # token losses, over the labels of all ranks
        return loss * dist.get_world_size()  # FSDP2 averages over the ranks

    def plain(batches: list[dict]) -> torch.Tensor:
        total = torch.zeros((), device=KIND)
        for batch in batches:
            loss = loss_of(_ranks.on_device(batch))
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    if not options.graph:
        return plain
    step = cuseq.GraphedStep(loss_of, optimizer, example, max_grad_norm=1.0, model=model,
                             accumulation=options.accumulation)  # fmt: skip
    _ranks.say(f"Graph: {step.reason}")  # it warms up, or what it cannot do without
    return lambda batches: step(batches if len(batches) > 1 else batches[0])


def state_of(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> tuple[dict, dict, dict]:
    """Return the state dicts of model and optimizer, and their tensors by name, tied ones once."""
    weights, moments = states.get_state_dict(model, optimizer, options=FLAT)
    every, own = model.named_parameters(remove_duplicate=False), dict(model.named_parameters())
    tied = {name for name, _ in every} - own.keys()
    tensors = {f"model.{k}": v for k, v in weights.items() if k not in tied}
    tensors |= {f"optimizer.{k}": v for k, v in moments.items() if torch.is_tensor(v)}
    return weights, moments, tensors


def save(path: Path, model: Any, optimizer: Any, rows: Rows, steps: int) -> None:
    """Write a checkpoint. It counts once its state.json is there, which comes last."""
    writer = dcp.HuggingFaceStorageWriter(str(path), save_distributed=True)
    dcp.save(state_of(model, optimizer)[2], storage_writer=writer)
    dist.barrier()
    if dist.get_rank() == 0:
        state = {"steps": steps, "rows": rows.sampler.state_dict(steps=rows.used)}
        (path / "state.json").write_text(json.dumps(state))


def restore(path: str, model: Any, optimizer: Any, rows: Rows) -> int:
    """Read a checkpoint, and return the number of steps that it is after."""
    facts = json.loads(Path(path, "state.json").read_text())
    rows.sampler.load_state_dict(facts["rows"])
    rows.used = rows.sampler.state_dict()["step"]
    weights, moments, tensors = state_of(model, optimizer)
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(path))  # in place
    given = dict(model_state_dict=weights, optim_state_dict=moments, options=FLAT)
    states.set_state_dict(model, optimizer, **given)
    return facts["steps"]


if __name__ == "__main__":
    main()
