"""Measure steps of TRL's trainers that pad, as TRL runs them and enabled.

    python -m benchmarks trl [--trainers grpo dpo reward] [--steps N]

A 0.6B shape in bf16. A step is forward, loss, backward and optimizer over all micro-batches, with
the pass of a reference model, and without generation: GRPO gets completions of random tokens.
Prompts have 1,024 tokens, completions lognormal lengths of mean 512 and sigma 1, at most 4,096, in
4 groups of 8; DPO and Reward have 8 pairs of such completions. `trl` is the trainer with sdpa,
`trl best` with Liger's kernels and FlashAttention 4, as far as they are installed, `enabled` has
`cuseq.enable(trainer)`, and `budget` has the step of GRPO in pieces of a number of tokens
(`micro_batch_tokens`), of which "worst" is the largest by the mean.

Tokens are those that the first layer of the policy computes in a step. On a CPU the sizes are
small, and only say that everything runs.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from typing import Any

import timer
import torch
from report import Report, Table, arguments, environment

import cuseq

WORDS = 1000  # tokens 3 to 1,002 of the vocabulary
SHAPE = dict(
    vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
)  # fmt: skip
SMALL = dict(vocab_size=2048, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
             num_attention_heads=2, num_key_value_heads=1, head_dim=32)  # fmt: skip
GROUP, GROUPS = 8, 4
SDPA = dict(attention="sdpa", liger=False)


def best() -> dict[str, Any]:
    """Return the settings of TRL's own that are fastest here."""
    from transformers.utils import is_flash_attn_4_available, is_liger_kernel_available

    attention = "flash_attention_4" if is_flash_attn_4_available() else "sdpa"
    return dict(attention=attention, liger=is_liger_kernel_available())


def make_tokenizer() -> Any:
    import tokenizers
    import transformers

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i + 3 for i in range(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_model(folder: str, device: torch.device, scores: bool, attention: str) -> Any:
    """Return a model of random weights, which the folder holds too: TRL loads its reference."""
    import transformers

    on_gpu = device.type == "cuda"
    config = transformers.Qwen3Config(
        **(SHAPE if on_gpu else SHAPE | SMALL), pad_token_id=0, eos_token_id=1
    )
    config.num_labels = 1
    auto = transformers.AutoModelForSequenceClassification if scores else (
        transformers.AutoModelForCausalLM
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with torch.device(device):
        model = auto.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    return auto.from_pretrained(folder, dtype=dtype, attn_implementation=attention)


class Lengths:
    """Draws lengths of prompts and completions."""

    def __init__(self, on_gpu: bool):
        self.prompt, mean, self.most = (1024, 512, 4096) if on_gpu else (32, 16, 64)
        self._mu = torch.tensor(float(mean)).log() - 0.5  # the mean of exp(N(mu, 1))
        self._generator = torch.Generator().manual_seed(0)

    def completions(self, count: int) -> list[int]:
        drawn = torch.randn(count, generator=self._generator).add(self._mu).exp()
        return drawn.round().clamp(1, self.most).long().tolist()

    def text(self, length: int) -> str:
        words = torch.randint(WORDS, (length,), generator=self._generator).tolist()
        return " ".join(f"w{word}" for word in words)


def settings(folder: str, on_gpu: bool, steps: int, **more: Any) -> dict[str, Any]:
    return dict(
        output_dir=folder, max_steps=steps, learning_rate=1e-6, report_to="none", seed=0,
        disable_tqdm=True, save_strategy="no", logging_strategy="no", bf16=on_gpu,
        use_cpu=not on_gpu, gradient_checkpointing=on_gpu, optim="adamw_torch_fused",
    ) | more  # fmt: skip


def make_grpo(
    folder: str, device: torch.device, steps: int, attention: str, liger: bool, at_once: int = 1
) -> Any:
    """Return a trainer that takes so many groups at once."""
    import datasets
    import trl

    on_gpu, lengths = device.type == "cuda", Lengths(device.type == "cuda")
    trainer = trl.GRPOTrainer(
        make_model(folder, device, False, attention),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(**settings(
            folder, on_gpu, steps, per_device_train_batch_size=GROUP * at_once,
            num_generations=GROUP, gradient_accumulation_steps=GROUPS // at_once, beta=0.04,
            max_completion_length=lengths.most, use_liger_kernel=liger,
            model_init_kwargs=dict(attn_implementation=attention),
        )),
        train_dataset=datasets.Dataset.from_list([{"prompt": "w1"}] * 64),
        processing_class=make_tokenizer(),
    )  # fmt: skip

    def generated(inputs: list[Any]) -> dict[str, Any]:
        """Return what TRL makes of completions, with the pass of the reference."""
        count = len(inputs)
        drawn = torch.tensor(lengths.completions(count))
        prompts = torch.randint(3, 3 + WORDS, (count // GROUP, lengths.prompt))
        prompts = prompts.repeat_interleave(GROUP, 0)
        completions = torch.randint(3, 3 + WORDS, (count, int(drawn.max())))
        mask = (torch.arange(int(drawn.max())) < drawn[:, None]).long()
        found = dict(
            prompt_ids=prompts, prompt_mask=torch.ones_like(prompts),
            completion_ids=completions * mask, completion_mask=mask,
            advantages=torch.randn(count), num_items_in_batch=mask.sum(),
        )  # fmt: skip
        found = {name: one.to(device) for name, one in found.items()}
        ids = torch.cat([found["prompt_ids"], found["completion_ids"]], 1)
        both = torch.cat([found["prompt_mask"], found["completion_mask"]], 1)
        with torch.no_grad():
            reference, *_ = trainer._get_per_token_logps_and_entropies(
                trainer.ref_model, ids, both, mask.shape[1], batch_size=GROUP
            )
        return found | {"ref_per_token_logps": reference}

    trainer._generate_and_score_completions = generated
    return trainer


def make_pairs(
    kind: str, folder: str, device: torch.device, steps: int, attention: str, liger: bool
) -> Any:
    import datasets
    import trl

    on_gpu, lengths = device.type == "cuda", Lengths(device.type == "cuda")
    rows = []
    for _ in range(64 if on_gpu else 16):
        prompt = lengths.text(lengths.prompt)
        chosen, rejected = (" " + lengths.text(n) for n in lengths.completions(2))
        if kind == "reward":
            rows.append(dict(chosen=prompt + chosen, rejected=prompt + rejected))
        else:
            rows.append(dict(prompt=prompt, chosen=chosen, rejected=rejected))
    config = trl.DPOConfig if kind == "dpo" else trl.RewardConfig
    options: dict[str, Any] = dict(
        args=config(**settings(
            folder, on_gpu, steps, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            max_length=lengths.prompt + lengths.most + 1, use_liger_kernel=liger,
        )),
        train_dataset=datasets.Dataset.from_list(rows), processing_class=make_tokenizer(),
    )  # fmt: skip
    model = make_model(folder, device, kind == "reward", attention)
    if kind == "reward":
        return trl.RewardTrainer(model, **options)
    return trl.DPOTrainer(model, make_model(folder, device, False, attention), **options)


def measured(trainer: Any, device: torch.device) -> dict[str, Any]:
    """Train; return milliseconds, GiB and computed tokens of a step but for the first two."""
    import transformers

    walls: list[float] = []
    tokens: list[list[int]] = []  # of each step, in each of its forwards

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            timer.synchronize(device)
            tokens.append([])
            self.begun = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            timer.synchronize(device)
            walls.append((time.perf_counter() - self.begun) * 1e3)

    def count(layer: torch.nn.Module, given: Any, named: Any) -> None:
        hidden = given[0] if given else named["hidden_states"]
        if tokens and torch.is_grad_enabled():
            tokens[-1].append(hidden.shape[0] * hidden.shape[1])

    trainer.model.base_model.layers[0].register_forward_pre_hook(count, with_kwargs=True)
    trainer.add_callback(Clock())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    found = dict(
        ms=statistics.median(walls[2:]),
        tokens=statistics.median(map(sum, tokens[2:])),
        worst=statistics.median(max(some) / statistics.mean(some) for some in tokens[2:]),
    )
    if device.type == "cuda":
        found["gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def main() -> None:
    parser = arguments(__doc__)
    kinds = ("grpo", "dpo", "reward")
    parser.add_argument("--trainers", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--steps", type=int, default=6, help="steps of each run, from 3")
    args = parser.parse_args()
    device = torch.device(args.device)
    report = Report("trl", environment(args.device))
    rows: list[dict[str, Any]] = []
    columns = {"trainer": "trainer", "how": "how", "ms": "step, ms", "times": "times",
               "tokens": "tokens", "worst": "worst", "gib": "GiB"}  # fmt: skip
    report.tables.append(Table("Steps of TRL's trainers", columns, rows))
    on_gpu = device.type == "cuda"
    budget = dict(micro_batch_tokens=16_384 if on_gpu else 512)
    # Liger's kernels replace those of transformers for the rest of the process, so they come last.
    ways: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
        "trl": (SDPA, None), "enabled": (SDPA, {}), "budget": (SDPA | dict(at_once=GROUPS), budget),
        "trl best": (best(), None),
    }  # fmt: skip
    first: dict[str, float] = {}
    for how, (config, options) in ways.items():
        for kind in args.trainers:
            if how == "budget" and kind != "grpo":
                continue
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
            found: dict[str, Any] = {"trainer": kind, "how": how}
            found |= run_way(kind, device, args.steps, config, options)
            if found.get("ms"):
                found["times"] = first.setdefault(kind, found["ms"]) / found["ms"]
            rows.append(found)
            report.write(args.out)


def run_way(
    kind: str, device: torch.device, steps: int, config: dict[str, Any],
    options: dict[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    """Return what `measured` returns of a trainer, with cuseq's options if it is enabled."""
    with tempfile.TemporaryDirectory() as folder:
        if kind == "grpo":
            trainer = make_grpo(folder, device, steps, **config)
        else:
            trainer = make_pairs(kind, folder, device, steps, **config)
        if options is not None:
            cuseq.enable(trainer, **options)
        try:
            return measured(trainer, device)
        except torch.OutOfMemoryError:
            return {}
        finally:
            if options is not None:
                cuseq.disable(trainer)


if __name__ == "__main__":
    main()
