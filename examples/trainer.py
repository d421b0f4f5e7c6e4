"""Train with transformers' Trainer on full packed rows: one process, DDP, FSDP2, rows over ranks.

    python examples/trainer.py --data my_texts --model Qwen/Qwen3-0.6B --output_dir run
    torchrun --nproc-per-node 8 examples/trainer.py ...                    # DDP
    torchrun --nproc-per-node 8 examples/trainer.py ... --fsdp --fsdp_config '{"version": 2}'
    torchrun --nproc-per-node 8 examples/trainer.py ... --cp 2             # two ranks share a row
    torchrun --nproc-per-node 8 --max-restarts 3 examples/trainer.py ... --save_steps 100

Options beside these are Trainer's own: --max_steps, --gradient_accumulation_steps, --report_to, ...
SIGTERM and Ctrl-C end the run on all ranks after one step, with a checkpoint; --resume goes on from
the newest one, as do the ranks that torchrun starts again after one of them died.
"""

from __future__ import annotations

from dataclasses import dataclass

import _ranks
import _runs
import torch
from _inputs import Inputs, load, make_model
from _ranks import KIND, Defaults
from transformers import Trainer, TrainingArguments
from transformers.hf_argparser import HfArg

import cuseq
from cuseq.integrations.transformers import PackingCallback


@dataclass
class Options(Inputs):
    """What this example takes beside Trainer's options."""

    cp: int = HfArg(default=1, help="ranks that share a row (default: 1)")
    compile_layers: bool = HfArg(default=False, help="one graph for all rows")
    graph: bool = HfArg(default=False, help="a step is one CUDA graph")
    resume: bool = HfArg(default=False, help="go on from the newest checkpoint")


@dataclass
class Arguments(Defaults, TrainingArguments):
    """Trainer's options, with other defaults."""

    output_dir: str | None = HfArg(default="run", help="folder of the run")
    learning_rate: float = HfArg(default=3e-4, help="of AdamW")
    lr_scheduler_type: str = HfArg(default="cosine", help="of the learning rate")
    per_device_train_batch_size: int = HfArg(default=1, help="not used: a row is one")
    save_steps: float = HfArg(default=500, help="steps from save to save")


def main() -> None:
    options, args = _ranks.begin(__doc__, Options, Arguments)
    checkpoint = _runs.newest_checkpoint(
        args.output_dir, "checkpoint-*/trainer_state.json", options.resume
    )
    with args.main_process_first(desc="reading the documents"):
        loaded = documents, tokenizer = load(options)
    torch.manual_seed(args.seed)
    # A graph has room for so many documents in a row.
    room = max(1, options.row_length // (2 * max(1, options.cp)) - 1)
    max_seqs = room if options.graph else None
    model = make_model(options, len(tokenizer))
    _runs.check_same_run(args.output_dir, checkpoint, loaded, model,
                         row_length=options.row_length, seed=args.seed)  # fmt: skip
    trainer = Trainer(
        model,
        args,
        train_dataset=documents,
        data_collator=cuseq.PackingCollator(total_tokens=options.row_length, max_seqs=max_seqs),
        processing_class=tokenizer,
    )
    PackingCallback().attach(trainer)  # fill and real tokens per second, in each log
    cp = None
    if options.cp != 1:
        mesh = _ranks.make_mesh(options.cp, options.row_length)
        cp = cuseq.distributed.ContextParallel(mesh["cp"], config=model.config)
    _ranks.say(str(cuseq.enable(trainer, capacity=options.row_length, cp=cp, graph=options.graph)))
    if options.compile_layers:
        for layer in model.get_decoder().layers:
            layer.compile(fullgraph=True, dynamic=False)
    if KIND == "cpu":  # else Trainer resumes on "cpu:0", which torch.load does not know
        vars(args)["_setup_devices"] = torch.device("cpu")
    _runs.train(trainer, checkpoint, "--resume")


if __name__ == "__main__":
    main()
