"""Test TRL's trainers that pad, whose batches run as packed rows or trees, beside TRL's own."""

from __future__ import annotations

import os
from typing import Any

import distributed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import cuseq

trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

from packaging.version import Version  # noqa: E402
from test_trainer_on_gpus import allow_fsdp_on_cpus  # noqa: E402
from tiers import full  # noqa: E402

from cuseq.integrations.trl import _padded  # noqa: E402
from cuseq.integrations.trl._micro_batches import even_pieces, grouped  # noqa: E402

if Version(trl.__version__) < _padded.LEAST:
    pytest.skip("cuseq refuses these trainers of an older TRL", allow_module_level=True)
if Version(trl.__version__).release[:2] == (1, 15) and not torch.cuda.is_available():
    pytest.skip("the head of TRL 1.15 runs on GPUs alone", allow_module_level=True)

WORDS = [f"w{n}" for n in range(60)]
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
)  # fmt: skip
STEPS = 20
# What a log says of time and of nothing else.
OF_TIME = ("runtime", "per_second", "step_time", "profiling", "flos")


def make_tokenizer():
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {w: i + 3 for i, w in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_model(auto: str = "AutoModelForCausalLM", seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(**SIZES | options, pad_token_id=0, eos_token_id=1)
    config.num_labels = 1
    model = getattr(transformers, auto).from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.dim() > 1 else 1)
    return model


def text(length: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[n] for n in torch.randint(60, (length,), generator=generator).tolist())


# Lengths of prompts and of two completions: short beside long, equal texts, one word, one long.
PAIRS = [(3, 4, 9), (12, 1, 2), (5, 7, 7), (8, 30, 3), (2, 2, 5), (6, 6, 1)]


def pairs() -> list[dict[str, str]]:
    rows = []
    for number, (prompt, chosen, rejected) in enumerate(PAIRS):
        first, second = text(chosen, 3 * number), text(rejected, 3 * number + 1)
        if number == 2:
            second = first
        rows.append(dict(prompt=text(prompt, 3 * number + 2), chosen=" " + first,
                         rejected=" " + second))  # fmt: skip
    return rows


def options_of(folder: Any, **more: Any) -> dict[str, Any]:
    return dict(
        output_dir=str(folder), max_steps=STEPS, learning_rate=1e-3, logging_steps=1, seed=1,
        report_to="none", disable_tqdm=True, save_strategy="no", bf16=False, use_cpu=True,
        gradient_checkpointing=False, lr_scheduler_type="constant",
    ) | more  # fmt: skip


def make_dpo(folder: Any, model: nn.Module, **more: Any):
    config = trl.DPOConfig(
        **options_of(folder, per_device_train_batch_size=2, max_length=64) | more
    )
    rows = datasets.Dataset.from_list(pairs())
    ref = None if hasattr(model, "peft_config") else make_model(seed=5)
    return trl.DPOTrainer(
        model, ref, args=config, train_dataset=rows, eval_dataset=rows.select(range(3)),
        processing_class=make_tokenizer(),
    )  # fmt: skip


def make_kto(folder: Any, model: nn.Module, **more: Any):
    rows = [
        dict(prompt=one["prompt"], completion=one[kind], label=kind == "chosen")
        for one in pairs()
        for kind in ("chosen", "rejected")
    ]
    config = trl.KTOConfig(
        **options_of(folder, per_device_train_batch_size=4, max_length=64) | more
    )
    return trl.KTOTrainer(
        model, make_model(seed=5), args=config, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=make_tokenizer(),
    )  # fmt: skip


def make_reward(folder: Any, model: nn.Module, **more: Any):
    rows = [dict(chosen=one["prompt"] + one["chosen"], rejected=one["prompt"] + one["rejected"])
            for one in pairs()]  # fmt: skip
    config = trl.RewardConfig(
        **options_of(folder, per_device_train_batch_size=2, max_length=64) | more
    )
    return trl.RewardTrainer(
        model, args=config, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=make_tokenizer(),
    )  # fmt: skip


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(one.split()) % 5) for one in completions]


def make_online(kind: str, folder: Any, model: nn.Module, **more: Any):
    rows = datasets.Dataset.from_list([{"prompt": one["prompt"]} for one in pairs()])
    config = getattr(trl, f"{kind}Config")(
        **options_of(
            folder, per_device_train_batch_size=4, num_generations=4, max_completion_length=12,
            beta=0.1, temperature=1.0, gradient_accumulation_steps=2,
        ) | more
    )  # fmt: skip
    model.save_pretrained(f"{folder}/policy")  # of which TRL makes the reference by its name
    if dist.is_initialized():  # rank 0 saves
        dist.barrier()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        f"{folder}/policy", dtype=torch.float64
    )
    return getattr(trl, f"{kind}Trainer")(
        model, reward_funcs=lengths, args=config, train_dataset=rows,
        processing_class=make_tokenizer(),
    )  # fmt: skip


KINDS = {
    "DPO": make_dpo,
    "KTO": make_kto,
    "Reward": make_reward,
    "GRPO": lambda *args, **more: make_online("GRPO", *args, **more),
    "RLOO": lambda *args, **more: make_online("RLOO", *args, **more),
}


def model_of(kind: str) -> nn.Module:
    auto = "AutoModelForSequenceClassification" if kind == "Reward" else "AutoModelForCausalLM"
    return make_model(auto)


def trained(kind: str, folder: Any, is_enabled: bool, model: nn.Module | None = None, **more: Any):
    """Return what a trainer logs, and its trainer."""
    options = {name: more.pop(name) for name in ("tree", "micro_batch_tokens") if name in more}
    trainer = KINDS[kind](folder, model_of(kind) if model is None else model, **more)
    if is_enabled:
        cuseq.enable(trainer, **options)
    trainer.train()
    return trainer.state.log_history, trainer


def check_logs(found: list[dict], expected: list[dict], rel: float = 2e-3) -> None:
    """Compare all that is logged; TRL's heads compute in fp32, which training multiplies."""
    assert len(found) == len(expected) > 1
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if any(part in name for part in OF_TIME):
                continue
            close = 1e-5 if number == 0 else rel
            if value is None:
                assert ours[name] is None, f"{number}: {name}"
                continue
            assert ours[name] == pytest.approx(value, rel=close, abs=close), f"{number}: {name}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_that_is_logged_is_that_of_trl(kind, tmp_path):
    expected, _ = trained(kind, tmp_path / "theirs", False)
    found, trainer = trained(kind, tmp_path / "ours", True)
    assert len(expected) == STEPS + 1
    check_logs(found, expected)
    assert expected[STEPS - 1]["loss"] != expected[0]["loss"]


# By case: the trainer, and options of its config.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "precomputed reference": ("DPO", dict(precompute_ref_log_probs=True)),
    "checkpoints": ("DPO", dict(gradient_checkpointing=True)),
    "checkpoints of trees": ("GRPO", dict(gradient_checkpointing=True)),
    "accumulation": ("DPO", dict(gradient_accumulation_steps=3)),
    "length penalty": ("DPO", dict(ld_alpha=0.5)),
    "several losses": ("DPO", dict(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5])),
    "trees of pairs": ("DPO", dict(tree=True)),
    "trees of rewards": ("Reward", dict(tree=True)),
    "rows of groups": ("GRPO", dict(tree=False)),
    "centred rewards": ("Reward", dict(center_rewards_coefficient=0.1)),
    "no desirable weight": ("KTO", dict(desirable_weight=0.5, loss_type="apo_zero_unpaired")),
    "GSPO": ("GRPO", dict(importance_sampling_level="sequence", num_iterations=2)),
    "mean of sequences": ("GRPO", dict(loss_type="grpo", scale_rewards="batch")),
    "Dr. GRPO": ("GRPO", dict(loss_type="dr_grpo", num_iterations=2, epsilon_high=0.3)),
    "entropy": ("GRPO", dict(top_entropy_quantile=0.5)),
    "nothing to learn": ("GRPO", dict(mask_truncated_completions=True, max_completion_length=3)),
    "one token": ("GRPO", dict(max_completion_length=1)),
    "without a reference": ("RLOO", dict(beta=0.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case if case in ("GSPO", "trees of pairs") else full(case) for case in CASES]
)
def test_options_give_what_trl_logs(case, tmp_path):
    kind, options = CASES[case]
    more = dict(options, max_steps=5)
    ours = dict(more)
    more.pop("tree", None)
    expected, _ = trained(kind, tmp_path / "theirs", False, **more)
    found, _ = trained(kind, tmp_path / "ours", True, **ours)
    check_logs(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("tree", [False, True])
def test_the_balance_of_experts_is_what_trl_logs(tree, tmp_path):
    """In trees too a prompt counts once for each sample."""
    logs = []
    for is_enabled in (False, True):
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(
            **SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
            output_router_logits=True, router_aux_loss_coef=0.5, pad_token_id=0, eos_token_id=1,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float64, experts_implementation="eager"
        )
        folder = tmp_path / str(is_enabled)
        more = dict(tree=tree) if is_enabled else {}
        logs.append(trained("DPO", folder, is_enabled, model, max_steps=3, **more)[0])
    assert any("aux_loss" in name for name in logs[0][0])
    check_logs(logs[1], logs[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_adapters_give_what_trl_logs(kind, tmp_path):
    peft = pytest.importorskip("peft")
    logs = []
    for is_enabled in (False, True):
        folder = tmp_path / str(is_enabled)
        model = model_of(kind)
        model.save_pretrained(folder / "base")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "base", dtype=torch.float64
        )
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
        )
        torch.manual_seed(3)
        model = peft.get_peft_model(model, config)
        if kind == "DPO":
            more = dict(max_steps=4)
            trainer = make_dpo(folder, model, **more)
        else:
            trainer = trl.GRPOTrainer(
                model, reward_funcs=lengths,
                args=trl.GRPOConfig(**options_of(
                    folder, per_device_train_batch_size=4, num_generations=4, beta=0.1,
                    max_completion_length=8, max_steps=4,
                )),
                train_dataset=datasets.Dataset.from_list(
                    [{"prompt": one["prompt"]} for one in pairs()]
                ),
                processing_class=make_tokenizer(),
            )  # fmt: skip
        if is_enabled:
            cuseq.enable(trainer)
        trainer.train()
        logs.append(trainer.state.log_history)
    check_logs(logs[1], logs[0])


@pytest.mark.slow
def test_evaluation_gives_what_trl_gives(tmp_path):
    found = []
    for is_enabled in (False, True):
        trainer = make_dpo(tmp_path, model_of("DPO"))
        if is_enabled:
            cuseq.enable(trainer)
        found.append(trainer.evaluate())
    check_logs([found[1]] * 2, [found[0]] * 2, rel=1e-5)


# By case: the trainer, options of its config and of `enable`.
IN_PIECES: dict[str, tuple[str, dict[str, Any]]] = {
    "sum of tokens": ("GRPO", dict()),
    "accumulation": ("GRPO", dict(gradient_accumulation_steps=2)),
    "mean of samples": ("GRPO", dict(loss_type="grpo", num_iterations=2)),
    "mean of tokens": ("GRPO", dict(loss_type="bnpo", num_iterations=2)),
    "constant": ("GRPO", dict(loss_type="dr_grpo", num_iterations=2, epsilon=0.01)),
    "CISPO": ("GRPO", dict(loss_type="cispo", num_iterations=2, epsilon_high=0.01)),
    "SAPO": ("GRPO", dict(loss_type="sapo")),
    "VESPO": ("GRPO", dict(loss_type="vespo")),
    "GSPO": ("GRPO", dict(
        loss_type="grpo", importance_sampling_level="sequence", num_iterations=2, epsilon=1e-3,
    )),
    "rows": ("GRPO", dict(tree=False)),
    "nothing to learn": ("GRPO", dict(mask_truncated_completions=True, max_completion_length=3)),
    "RLOO": ("RLOO", dict(num_iterations=2, epsilon=1e-3)),
    "RLOO, accumulation": ("RLOO", dict(gradient_accumulation_steps=2)),
}  # fmt: skip
BUDGET = 60


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case if case in ("accumulation", "RLOO") else full(case) for case in IN_PIECES]
)
def test_batches_in_pieces_log_what_trl_logs(case, tmp_path):
    kind, options = IN_PIECES[case]
    ours = dict(max_steps=5, per_device_train_batch_size=12, gradient_accumulation_steps=1)
    ours |= options
    theirs = {name: value for name, value in ours.items() if name != "tree"}
    expected, _ = trained(kind, tmp_path / "theirs", False, **theirs)
    found, trainer = trained(kind, tmp_path / "ours", True, micro_batch_tokens=BUDGET, **ours)
    check_logs(found, expected)
    cuseq.disable(trainer)
    assert "compute_loss" not in vars(trainer)


@pytest.mark.parametrize("tree", [None, False])
def test_a_piece_computes_no_more_than_its_budget(tree, tmp_path):
    trainer = make_online(
        "GRPO", tmp_path, model_of("GRPO"), max_steps=1, per_device_train_batch_size=12,
        gradient_accumulation_steps=1, beta=0.0,
    )  # fmt: skip
    cuseq.enable(trainer, tree=tree, micro_batch_tokens=BUDGET)
    seen = count_tokens(trainer.model)
    of_loss: list[int] = []
    loss_of = trainer._compute_loss

    def counted(model, inputs):
        before = len(seen)
        loss = loss_of(model, inputs)
        of_loss.extend(seen[before:])
        return loss

    trainer._compute_loss = counted
    trainer.train()
    assert len(of_loss) > 1 and max(of_loss) <= BUDGET


def costs_of(pieces, prompts, completions, tree) -> list[int]:
    shared = [{prompts[i] for i in one} if tree else [prompts[i] for i in one] for one in pieces]
    own = [sum(completions[i] for i in one) for one in pieces]
    return [sum(map(len, some)) + more for some, more in zip(shared, own, strict=True)]


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("groups, size, count", [(8, 8, 4), (3, 4, 6), (5, 6, 5), (1, 8, 8)])
def test_pieces_have_each_sample_once_and_even_tokens(groups, size, count, tree):
    generator = torch.Generator().manual_seed(groups)
    prompts = [(number,) * (5 + 30 * number) for number in range(groups) for _ in range(size)]
    drawn = torch.empty(len(prompts)).log_normal_(4, 1, generator=generator).long() + 1
    completions = drawn.tolist()
    shuffled = torch.randperm(len(prompts), generator=generator).tolist()
    prompts = [prompts[i] for i in shuffled]
    found = even_pieces(grouped(prompts, completions, tree), completions, count)
    assert len(found) == count and all(found)
    assert sorted(sample for one in found for sample in one) == list(range(len(prompts)))
    costs = costs_of(found, prompts, completions, tree)
    largest = max(len(prompt) + own for prompt, own in zip(prompts, completions, strict=True))
    assert max(costs) <= max(sum(costs) / count + largest, largest)
    (total,) = costs_of([range(len(prompts))], prompts, completions, tree)
    if tree:  # each piece but the last cuts at most one group
        assert sum(costs) <= total + count * max(map(len, prompts))
    else:
        assert sum(costs) == total


def test_long_runs_cut_into_pieces_within_a_few_percent():
    generator = torch.Generator().manual_seed(0)
    prompts = [(number,) * 1024 for number in range(32) for _ in range(16)]
    drawn = torch.randn(len(prompts), generator=generator).add(5.74).exp().clamp(1, 4096).long()
    completions = drawn.tolist()
    found = even_pieces(grouped(prompts, completions, True), completions, 9)
    costs = costs_of(found, prompts, completions, True)
    assert max(costs) <= 1.02 * sum(costs) / len(costs)


def count_tokens(model: nn.Module) -> list[int]:
    """Return a list to which each forward of a model's first layer adds its tokens."""
    seen: list[int] = []
    layer = model.base_model.layers[0]

    def count(module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        seen.append(hidden.shape[0] * hidden.shape[1])

    layer.register_forward_pre_hook(count, with_kwargs=True)
    return seen


@pytest.mark.parametrize("kind", ["DPO", "KTO", "Reward"])
def test_padding_is_never_computed(kind, tmp_path):
    trainer = KINDS[kind](tmp_path, model_of(kind), max_steps=1)
    cuseq.enable(trainer)
    seen = count_tokens(trainer.model)
    of_reference = [] if kind == "Reward" else count_tokens(trainer.ref_model)
    masks = []
    prepare = trainer._prepare_inputs

    def prepared(inputs):
        inputs = prepare(inputs)
        masks.append({name: one for name, one in inputs.items() if name.endswith("mask")})
        return inputs

    trainer._prepare_inputs = prepared
    trainer.train()
    (mask,) = masks
    real = [int(one.sum()) for name, one in mask.items() if name.endswith("attention_mask")]
    assert mask["attention_mask"].numel() > mask["attention_mask"].sum()  # there is padding
    assert seen and set(seen) <= set(real) and set(of_reference) <= set(real)


def make_hybrid(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(
        transformers.Lfm2Config(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, layer_types=["conv", "full_attention"],
            pad_token_id=0, eos_token_id=1,
        ),
        dtype=torch.float64,
    )  # fmt: skip


@pytest.mark.slow
def test_hybrids_compute_rows_too(tmp_path):
    """Their bodies have a forward of ours already, which must stay."""
    expected, _ = trained("DPO", tmp_path / "theirs", False, make_hybrid(), max_steps=4)
    trainer = make_dpo(tmp_path / "ours", make_hybrid(), max_steps=4)
    enabled = cuseq.enable(trainer)
    assert "rows:Lfm2Model" in enabled.replaced
    body = trainer.model.base_model
    seen = count_tokens(trainer.model)
    masks = []
    body.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    trainer.train()
    check_logs(trainer.state.log_history, expected)
    real = [int(mask.sum()) for mask in masks if mask is not None]
    assert real and seen == real and sum(real) < sum(m.numel() for m in masks if m is not None)
    cuseq.disable(trainer)
    assert "forward" not in vars(body)


@pytest.mark.slow
def test_a_column_of_margins_reaches_the_loss(tmp_path):
    """Trainer hands it on to the model too, which has no use for it."""
    logs = []
    for is_enabled in (False, True):
        trainer = make_reward(tmp_path, model_of("Reward"), max_steps=3)
        trainer.train_dataset = trainer.train_dataset.add_column(
            "margin", [0.5 * number for number in range(len(trainer.train_dataset))]
        )
        if is_enabled:
            cuseq.enable(trainer)
        trainer.train()
        logs.append(trainer.state.log_history)
    check_logs(logs[1], logs[0])


def test_prompts_of_a_group_are_computed_once(tmp_path):
    trainer = KINDS["GRPO"](tmp_path, model_of("GRPO"), max_steps=1, gradient_accumulation_steps=1)
    assert "trees:Qwen3Model" in cuseq.enable(trainer).replaced
    seen = count_tokens(trainer.ref_model)
    batches = []
    score = trainer._get_per_token_logps_and_entropies

    def scored(model, input_ids, attention_mask, *args, **kwargs):
        batches.append((input_ids, attention_mask))
        return score(model, input_ids, attention_mask, *args, **kwargs)

    trainer._get_per_token_logps_and_entropies = scored
    trainer.train()
    ids, mask = batches[0]
    prefixes = {
        tuple(row[:end])
        for row in (one[keep.bool()].tolist() for one, keep in zip(ids, mask, strict=True))
        for end in range(1, len(row) + 1)
    }
    assert seen == [len(prefixes)] and len(prefixes) < int(mask.sum())


def run_both(
    rank: int, folder: str, kind: str, shards: bool, budget: int | None
) -> list[list[dict]]:
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # TRL's barriers take a GPU for each process
    more: dict[str, Any] = dict(max_steps=4)
    if budget:
        more |= dict(per_device_train_batch_size=8, gradient_accumulation_steps=1)
    if shards:
        allow_fsdp_on_cpus()
        layers = {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}
        more |= dict(fsdp=True, fsdp_config=layers)
    found = []
    for is_enabled in (False, True):
        ours = dict(micro_batch_tokens=budget) if is_enabled and budget else {}
        logs, trainer = trained(kind, f"{folder}/{is_enabled}", is_enabled, **more, **ours)
        assert isinstance(trainer.model, FSDPModule) == shards
        found.append(logs)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind, shards, budget", [
    full("DPO", False, None), full("GRPO", False, None), ("DPO", True, None),
    ("GRPO", False, BUDGET), full("RLOO", True, BUDGET),
])  # fmt: skip
def test_two_processes_log_what_trl_logs(kind, shards, budget, tmp_path):
    """With a budget, of which one rank may need fewer pieces than the other."""
    folder = str(tmp_path)
    for expected, found in distributed.run(run_both, folder, kind, shards, budget, limit=240):
        check_logs(found, expected)


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    saving = dict(max_steps=4, save_strategy="steps", save_steps=2)
    whole, first = trained("DPO", tmp_path, True, **saving)
    trainer = make_dpo(tmp_path / "again", model_of("DPO"), **saving)
    nn.init.normal_(trainer.model.lm_head.weight)
    cuseq.enable(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name in ("loss", "grad_norm", "rewards/margins"):  # TRL counts tokens anew
        values = [[log[name] for log in logs if name in log][-2:]
                  for logs in (trainer.state.log_history, whole)]  # fmt: skip
        assert values[0] == pytest.approx(values[1], rel=1e-5)
    for one, other in zip(trainer.model.parameters(), first.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


# ------------------------------------------------------------------------- enabling and refusing


def test_disable_restores_the_models(tmp_path):
    trainer = make_dpo(tmp_path, model_of("DPO"))
    models = [trainer.model, trainer.ref_model]
    enabled = cuseq.enable(trainer)
    assert "rows:Qwen3Model" in enabled.replaced
    assert cuseq.enable(trainer) is enabled
    assert all("forward" in vars(one.base_model) for one in models)
    with pytest.raises(ValueError, match="tree must stay None until cuseq.disable"):
        cuseq.enable(trainer, tree=True)
    cuseq.disable(trainer)
    for one in models:
        assert "forward" not in vars(one.base_model)
        assert one.config._attn_implementation == "sdpa"
    cuseq.disable(trainer)


def test_generation_is_left_alone(tmp_path):
    trainer = KINDS["GRPO"](tmp_path, model_of("GRPO"))
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    told = dict(input_ids=ids, attention_mask=(ids > 0).long(), max_new_tokens=5, do_sample=False)
    expected = trainer.model.generate(**told)
    cuseq.enable(trainer)
    assert torch.equal(trainer.model.generate(**told), expected)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(graph=True), "graph must be False for a DPOTrainer"),
        (dict(bin_pack=True), "bin_pack must be False for a DPOTrainer"),
        (dict(collator=cuseq.PackingCollator()), "collator must be None for a DPOTrainer"),
        (dict(tree=1), "tree must be True or False, got 1"),
        (dict(micro_batch_tokens=9), "micro_batch_tokens must be None for a DPOTrainer"),
    ],
)
def test_options_that_do_not_apply_are_refused(options, message, tmp_path):
    trainer = make_dpo(tmp_path, model_of("DPO"))
    with pytest.raises((TypeError, ValueError), match=message):
        cuseq.enable(trainer, **options)
    assert trainer.model.config._attn_implementation == "sdpa"


def test_losses_that_are_no_sum_of_pieces_are_refused(tmp_path):
    def own_loss(self, model, inputs):
        return trl.GRPOTrainer._compute_loss(self, model, inputs)

    for number, (options, message) in enumerate([
        (dict(top_entropy_quantile=0.5), "top_entropy_quantile=1.0"),
        (dict(entropy_coef=0.1), "no entropy bonus"),
        (dict(loss_type="unknown"), "a loss_type of bnpo, .*, got 'unknown'"),
        (dict(own=True), "TRL's own _compute_loss"),
    ]):  # fmt: skip
        config = {name: value for name, value in options.items() if name not in ("own",)}
        loss_type = config.pop("loss_type", None)
        trainer = KINDS["GRPO"](tmp_path / str(number), model_of("GRPO"), **config)
        if loss_type:
            trainer.loss_type = loss_type
        if "own" in options:
            trainer.__class__ = type("Own", (trl.GRPOTrainer,), dict(_compute_loss=own_loss))
        with pytest.raises(ValueError, match=f"trainer must have {message}.*micro_batch_tokens"):
            cuseq.enable(trainer, micro_batch_tokens=100)
    trainer = KINDS["GRPO"](tmp_path / "budget", model_of("GRPO"))
    with pytest.raises(ValueError, match="micro_batch_tokens must be .*1.*, got 0"):
        cuseq.enable(trainer, micro_batch_tokens=0)


def test_a_model_that_is_compiled_as_a_whole_is_named(tmp_path):
    trainer = make_dpo(tmp_path, model_of("DPO"))
    trainer.args.torch_compile = True
    (said,) = (one for one in cuseq.enable(trainer).left_alone if "torch_compile" in one)
    assert said.startswith("padded batches: ")


def test_trainers_of_unsloth_are_refused(tmp_path):
    trainer = make_dpo(tmp_path, model_of("DPO"))
    trainer.__class__ = type("UnslothDPOTrainer", (trl.DPOTrainer,), {})
    with pytest.raises(ValueError, match="TRL's own, got unsloth's UnslothDPOTrainer"):
        cuseq.enable(trainer)


def test_an_older_trl_is_refused(tmp_path, monkeypatch):
    trainer = make_dpo(tmp_path, model_of("DPO"))
    monkeypatch.setattr(trl, "__version__", "1.13.2")
    with pytest.raises(ValueError, match="trl must be 1.14 or newer for a DPOTrainer, got 1.13.2"):
        cuseq.enable(trainer)


def test_models_that_cannot_are_refused(tmp_path):
    trainer = make_reward(tmp_path, model_of("Reward"))
    trainer.model = make_hybrid()
    with pytest.raises(ValueError, match="tree must be False or None .* carry a state .*conv"):
        cuseq.enable(trainer, tree=True)
    own = make_dpo(tmp_path, model_of("DPO"))
    own.model.base_model.forward = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match="Qwen3Model in the trainer's model must have the forward"):
        cuseq.enable(own)
    body = make_reward(tmp_path, model_of("Reward"))
    body.model = body.model.base_model
    with pytest.raises(ValueError, match="must have a head and a body"):
        cuseq.enable(body)
    with pytest.raises(ValueError, match="tree must not be given for a Trainer"):
        cuseq.enable(transformers.Trainer(model_of("DPO")), tree=True)
