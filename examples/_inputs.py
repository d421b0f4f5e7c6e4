"""The documents and the model of the examples: yours, or Python's own sources and a small Qwen3."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from _ranks import check_positive, say
from _texts import naming_full_disk, read_texts
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.hf_argparser import HfArg
from transformers.utils import logging

END = "<|endoftext|>"
WEIGHTS = ("*.safetensors", "*.bin")
UNUSABLE = (OSError, ValueError, StrictDataclassError)  # of a model
# Longer texts are cut there before they are tokenised, which takes 90 bytes a character of all that
# are tokenised at once.
MOST_CHARACTERS, AT_ONCE = 1 << 20, 4 << 20
SMALL = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32)  # fmt: skip
LARGE = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
             num_key_value_heads=8, head_dim=128)  # fmt: skip

Tokens = transformers.PreTrainedTokenizerBase

logging.disable_progress_bar()


@dataclass
class Inputs:
    """What every example takes."""

    data: str | None = HfArg(
        default=None,
        help='a text file, JSONL or Parquet with a column "text", or a folder of them (default: '
        "the source files of Python's standard library)",
    )
    model: str | None = HfArg(
        default=None,
        help="a name on the Hub, a checkpoint's folder, or a config file, which starts from random "
        "weights (default: a Qwen3 of 1 million weights, on a GPU of 0.6 billion)",
    )
    row_length: int = HfArg(
        default=8192 if torch.cuda.is_available() else 4096, help="tokens of a packed row"
    )
    longest: int | None = HfArg(
        default=None,
        help="tokens of the longest sequence (default: --row_length, a quarter of it for the "
        "standard library)",
    )
    longer: str | None = HfArg(
        default=None,
        help="what becomes of longer ones (default: split, for the standard library drop)",
        metadata={"choices": ["split", "drop"]},
    )

    def __post_init__(self) -> None:
        check_positive(self, "row_length")
        own = self.data is None
        if self.longest is None:
            self.longest = self.row_length // (4 if own else 1)
        self.longer = self.longer or ("drop" if own else "split")
        if not 2 <= self.longest <= self.row_length:
            raise SystemExit(
                f"--longest must be from 2 to --row_length ({self.row_length}), got {self.longest}"
            )


@naming_full_disk()
def load(inputs: Inputs) -> tuple[datasets.Dataset, Tokens]:
    """Return sequences (`input_ids`, `length`) and the tokenizer; print what became of them."""
    texts = read_texts(inputs.data)
    tokenizer = tokenizer_of(inputs.model, texts)
    end, most, splits = tokenizer.eos_token_id, inputs.longest, inputs.longer == "split"

    def cut(batch: dict[str, list[str]]) -> dict[str, list]:
        return {"text": [t[at : at + MOST_CHARACTERS] for t in batch["text"]
                         if splits or len(t) <= MOST_CHARACTERS
                         for at in range(0, len(t), MOST_CHARACTERS)]}  # fmt: skip

    def tokenise(batch: dict[str, list[str]]) -> dict[str, list]:
        found = []
        for ids in tokenizer(batch["text"], add_special_tokens=False)["input_ids"]:
            ids = ids if end is None else [*ids, end]
            if len(ids) <= most or splits:
                found += [ids[at : at + most] for at in range(0, len(ids), most)]
        found = [ids for ids in found if len(ids) > 1]  # a single token has nothing to predict
        return {"input_ids": found, "length": [len(ids) for ids in found]}

    parts = texts.map(cut, batched=True, batch_size=10)
    together = AT_ONCE // max((len(text) for text in parts["text"]), default=AT_ONCE)
    sequences = parts.map(tokenise, batched=True, batch_size=min(together, 1000),
                          remove_columns="text")  # fmt: skip
    if len(sequences) == 0:
        raise SystemExit(
            f"--data {inputs.data}: no text of 2 to {most} tokens in {len(texts)} texts"
        )
    say(
        f"Documents: {len(texts):,} from {inputs.data or 'the standard library'}; with longer ones "
        f"{'cut' if splits else 'dropped'}, {len(sequences):,} sequences of at "
        f"most {most:,} tokens, {sum(sequences['length']):,} in all."
    )
    return sequences, tokenizer


def tokenizer_of(
    model: str | None, texts: datasets.Dataset | None = None, option: str = "--data"
) -> Tokens:
    """Return a model's tokenizer, or a byte-level BPE trained on the first texts if it has none.

    Raises:
        SystemExit: it cannot be loaded, or it has none and what `option` names has no texts.
    """
    vocab_size = 4096
    try:
        # transformers makes an empty tokenizer for a folder that has none.
        if has_files(model, "tokenizer*", "vocab*", "*.model"):
            found = transformers.AutoTokenizer.from_pretrained(model)
            found.pad_token = found.pad_token or found.eos_token
            return found
        if texts is None:
            raise SystemExit(f"{option} needs a --model with a tokenizer, got {model}")
        if has_files(model, *WEIGHTS):
            raise ValueError("it has weights and no tokenizer, whose ids they would know")
        if model is not None:
            config = transformers.AutoConfig.from_pretrained(model).get_text_config()
            vocab_size = min(vocab_size, config.vocab_size)
    except UNUSABLE as error:
        raise unusable(model, error) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END],
                                  initial_alphabet=alphabet, show_progress=False)  # fmt: skip
    first = (texts[i]["text"][:MOST_CHARACTERS] for i in range(min(1000, len(texts))))
    tokenizer.train_from_iterator(first, trainer)
    special = dict(eos_token=END, pad_token=END)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def make_model(
    inputs: Inputs, vocab_size: int, device: str = "cpu", **options: Any
) -> transformers.PreTrainedModel:
    """Return the model, in fp32 unless `options` of `from_pretrained` say else; seed first."""
    options = {"dtype": torch.float32} | options
    try:
        if inputs.model is None:
            shape = dict(LARGE if torch.cuda.is_available() else SMALL, vocab_size=vocab_size)
            shape["max_position_embeddings"] = inputs.row_length
            config = transformers.Qwen3Config(tie_word_embeddings=True, **shape)
        else:
            config = transformers.AutoConfig.from_pretrained(inputs.model)
        if has_files(inputs.model, *WEIGHTS):
            model = transformers.AutoModelForCausalLM.from_pretrained(inputs.model, **options)
        else:
            with torch.device(device):  # drawing large weights on the host takes long
                model = transformers.AutoModelForCausalLM.from_config(config, **options)
    except UNUSABLE as error:
        raise unusable(inputs.model, error) from error
    if (has := model.get_input_embeddings().num_embeddings) < vocab_size:
        raise SystemExit(
            f"--model {inputs.model}: its vocabulary must hold the {vocab_size} tokens of the "
            f"tokenizer, got {has}"
        )
    model.config.use_cache = False
    return model.to(device)


def has_files(model: str | None, *patterns: str) -> bool:
    """Return whether a model's folder has such files; a name on the Hub has all of them."""
    folder = Path(model or __file__)
    return not folder.exists() or any(file for name in patterns for file in folder.glob(name))


def unusable(model: str | None, error: Exception) -> SystemExit:
    return SystemExit(f"--model {model}: cannot be loaded ({str(error).strip().splitlines()[0]})")
