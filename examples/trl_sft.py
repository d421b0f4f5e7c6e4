"""Fine-tune with TRL's SFTTrainer on packed rows, whole or with LoRA.

    python examples/trl_sft.py --model Qwen/Qwen3-0.6B --conversations trl-lib/Capybara
    python examples/trl_sft.py --model Qwen/Qwen3-0.6B --conversations chats.jsonl --lora 16
    python examples/trl_sft.py                                # Python's own sources, a small Qwen3

--conversations is a data set of the Hub, or a JSONL or Parquet file, with the columns that TRL
reads: `messages`, or `prompt` and `completion`. Without it the documents of --data are trained on.
Other options are SFTConfig's: --assistant_only_loss, --learning_rate, --save_steps, ...
SIGTERM and Ctrl-C end the run after a step, with a checkpoint for --resume_from_checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import _ranks
import _runs
import torch
from _inputs import Inputs, load, make_model, tokenizer_of
from _ranks import Defaults
from _texts import read_rows
from peft import LoraConfig
from transformers.hf_argparser import HfArg
from trl import SFTConfig, SFTTrainer

import cuseq
from cuseq.integrations.transformers import PackingCallback

KINDS = (("messages",), ("prompt", "completion"), ("text",))  # columns that TRL reads


@dataclass
class Options(Inputs):
    """What this example takes beside SFTConfig's options."""

    conversations: str | None = HfArg(
        default=None, help="a data set of the Hub, or a JSONL or Parquet file"
    )
    graph: bool = HfArg(default=False, help="a step is one CUDA graph")
    lora: int = HfArg(default=0, help="rank of LoRA (default: 0, all weights train)")


@dataclass
class Arguments(Defaults, SFTConfig):
    """SFTConfig's options, with other defaults."""

    output_dir: str | None = HfArg(default="run_sft", help="folder of the run")
    max_length: int | None = HfArg(default=None, help="of a row (default: --row_length)")
    packing: bool = HfArg(default=True, help="rows of several documents")
    per_device_train_batch_size: int = HfArg(default=1, help="rows of a batch")


def main() -> None:
    options, args = _ranks.begin(__doc__, Options, Arguments)
    if options.lora < 0:
        raise SystemExit(f"--lora must be at least 0, got {options.lora}")
    checkpoint = _runs.given_checkpoint(args)
    with args.main_process_first(desc="reading the documents"):
        if options.conversations is None:
            documents, tokenizer = load(options)
            documents = documents.select_columns("input_ids")
        else:
            documents = read_rows(options.conversations, "--conversations", *KINDS)
            tokenizer = tokenizer_of(options.model, option="--conversations")
            if "messages" in documents.column_names and tokenizer.chat_template is None:
                raise SystemExit(f"--model {options.model}: its tokenizer needs a chat template")
    if args.max_length is None:
        args.max_length = options.row_length
    torch.manual_seed(args.seed)
    adapter = LoraConfig(r=options.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    model = make_model(options, len(tokenizer))
    _runs.check_same_run(args.output_dir, checkpoint, (documents, tokenizer), model,
                         row_length=args.max_length, seed=args.seed)  # fmt: skip
    trainer = SFTTrainer(
        model,
        args,
        train_dataset=documents,
        processing_class=tokenizer,
        peft_config=adapter if options.lora else None,
    )
    PackingCallback().attach(trainer)  # fill and real tokens per second, in each log
    # bin_pack packs all of the data set together.
    _ranks.say(str(cuseq.enable(trainer, bin_pack=True, graph=options.graph)))
    _runs.train(trainer, checkpoint, "--resume_from_checkpoint")


if __name__ == "__main__":
    main()
