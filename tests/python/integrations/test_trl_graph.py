"""Test enable(SFTTrainer, graph=True): TRL's numbers and metrics, by the plain path."""

from __future__ import annotations

import distributed
import pytest
import torch
from torch.testing import assert_close

import cuseq

pytest.importorskip("trl")
peft = pytest.importorskip("peft")

import datasets  # noqa: E402
import tokenizers  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from trainer_models import small_model  # noqa: E402
from trl.trainer import utils  # noqa: E402

from cuseq.integrations.transformers._graphed import graph_of  # noqa: E402
from cuseq.integrations.trl import PackedCollator  # noqa: E402

SCORES_ALL = hasattr(utils, "_use_triton")  # a head that can, of TRL 1.16 and newer
needs_a_head = pytest.mark.skipif(not SCORES_ALL, reason="the head of this TRL reads a number")
pytestmark = pytest.mark.filterwarnings("ignore:the trainer's steps run without a CUDA graph")
METRICS = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "learning_rate")


def make_model(config=transformers.Qwen3Config, **options):
    return small_model(config, dtype=torch.float32, **options)


def make_trainer(
    folder, *, graph, enable=None, device="cpu", model=None, peft_config=None, count=80, **options
):
    words = {"<eos>": 0, "<pad>": 1} | {f"w{i}": i for i in range(2, 64)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(
            tokenizers.models.WordLevel(words, unk_token="<eos>")
        ),
        eos_token="<eos>",
        pad_token="<pad>",
    )
    numbers = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 14, (count,), generator=numbers).tolist()
    rows = [torch.randint(2, 64, (n,), generator=numbers).tolist() for n in lengths]
    documents = datasets.Dataset.from_list([{"input_ids": row} for row in rows])
    settings = dict(
        packing=True,
        max_length=16,
        max_steps=20,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=1,
        learning_rate=1e-2,
        logging_steps=4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        use_cpu=device == "cpu",
        dataloader_pin_memory=False,
    )
    arguments = trl.SFTConfig(str(folder), **(settings | options))
    arguments._n_gpu = min(arguments.n_gpu, 1)
    trainer = trl.SFTTrainer(
        model or make_model(),
        arguments,
        train_dataset=documents,
        eval_dataset=documents.select(range(9)),
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    cuseq.enable(trainer, graph=graph, **(enable or {}))
    return trainer


def test_shared_rows_are_refused(tmp_path):
    trainer = make_trainer(tmp_path, graph=False)
    cuseq.disable(trainer)
    with pytest.raises(
        ValueError, match="cp must be None with graph=True for an SFTTrainer, got 3"
    ):
        cuseq.enable(trainer, graph=True, cp=3)
    assert trainer.model.config._attn_implementation == "sdpa"


def compare(trainer, twin, rounding: float):
    kinds = [[log for log in one.state.log_history if "loss" in log] for one in (trainer, twin)]
    for mine, theirs in zip(*kinds, strict=True):
        assert mine.keys() == theirs.keys()
        for name in (*METRICS, *(["aux_loss"] if "aux_loss" in mine else [])):
            assert_close(mine[name], theirs[name], rtol=rounding, atol=rounding, msg=name)
    evaluated = [
        [log for log in one.state.log_history if "eval_loss" in log] for one in (trainer, twin)
    ]
    for mine, theirs in zip(*evaluated, strict=True):
        assert_close(mine["eval_loss"], theirs["eval_loss"], rtol=rounding, atol=rounding)
    for mine, theirs in zip(trainer.model.parameters(), twin.model.parameters(), strict=True):
        assert_close(mine, theirs, rtol=rounding, atol=rounding)


OPTIONS = [
    {},
    {"pad_to_multiple_of": 8, "gradient_accumulation_steps": 4},
    {"gradient_accumulation_steps": 3, "count": 30},
    {"gradient_accumulation_steps": 2, "loss_type": "dft"},
    {"packing_strategy": "wrapped", "eval_strategy": "steps", "eval_steps": 6},
    {"enable": {"bin_pack": True, "capacity": 24}},
    {"peft_config": peft.LoraConfig(target_modules=["q_proj", "v_proj"])},
]


@needs_a_head
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_the_numbers_are_those_without_a_graph(options, tmp_path):
    trainers = [make_trainer(tmp_path, graph=graph, **options) for graph in (True, False)]
    for trainer in trainers:
        trainer.train()
    compare(*trainers, rounding=1e-3)  # rows have another length: other sums
    assert type(trainers[0].data_collator) is PackedCollator


@needs_a_head
def test_disable_restores_the_trainer(tmp_path):
    trainer = make_trainer(tmp_path, graph=True)
    cuseq.disable(trainer)
    assert graph_of(trainer) is None
    assert not {"training_step", "log", "get_train_dataloader"} & vars(trainer).keys()


def stretched():
    rotation = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    return make_model(rope_parameters=rotation, max_position_embeddings=14)


def mixture():
    return make_model(
        transformers.Qwen3MoeConfig, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    )


@needs_a_head
@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_a_mixture_has_the_same_numbers(coefficient, tmp_path):
    options = dict(router_aux_loss_coef=coefficient, gradient_accumulation_steps=2)
    trainers = [
        make_trainer(tmp_path, graph=graph, model=mixture(), **options) for graph in (True, False)
    ]
    for trainer in trainers:
        trainer.train()
    compare(*trainers, rounding=1e-3)


@needs_a_head
def test_what_would_be_wrong_in_silence_is_refused(tmp_path):
    refusals = [
        ({"label_smoothing_factor": 0.1}, "TRL's own loss .* got label_smoothing_factor"),
        ({"packing": False, "padding_free": True, "max_length": None}, "max_length must be given"),
        ({"model": stretched()}, "does not follow the longest position .* got rope_type='dynamic'"),
    ]
    for options, message in refusals:
        with pytest.raises(ValueError, match=message):
            make_trainer(tmp_path, graph=True, **options)


def test_a_head_that_selects_tokens_is_refused(tmp_path, monkeypatch):
    monkeypatch.delattr(utils, "_use_triton", raising=False)
    with pytest.raises(ValueError, match="trl must be 1.16 or newer for graph=True.* got 1"):
        make_trainer(tmp_path, graph=True)


class Look(transformers.TrainerCallback):
    """Notes whether a trainer's last step was captured, and what was in the way."""

    def __init__(self, trainer):
        self.trainer, self.last = trainer, None
        trainer.add_callback(self)

    def on_step_end(self, args, state, control, **kwargs):
        step = graph_of(self.trainer).step
        self.last = (step.captured, step.reason)


@needs_a_head
def test_an_sft_trainer_on_a_gpu_replays_its_steps(cuda, one_gpu, tmp_path):
    del cuda, one_gpu
    twin = make_trainer(tmp_path, graph=False, device="cuda", gradient_accumulation_steps=2)
    trainer = make_trainer(tmp_path, graph=True, device="cuda", gradient_accumulation_steps=2)
    look = Look(trainer)
    trainer.train()
    twin.train()
    assert look.last == (True, None)
    compare(trainer, twin, rounding=1e-2)


@needs_a_head
def test_tokens_are_counted_for_each_log(tmp_path):
    options = dict(logging_steps=4, eval_strategy="steps", eval_steps=3, max_steps=7)
    found = []
    for graph in (True, False):
        trainer = make_trainer(tmp_path, graph=graph, **options)
        trainer.train()
        trainer.train()
        logs = [
            {k: v for k, v in log.items() if "num_tokens" in k} for log in trainer.state.log_history
        ]
        found.append((logs, trainer._total_train_tokens))
    assert found[0] == found[1]
    assert any("eval_num_tokens" in log for log in found[0][0])


def train_on_ranks(rank: int, folder: str, options: dict, device: str = "cpu") -> list[dict]:
    found = []
    for graph in (True, False):
        # Otherwise accelerate leaves a rank out of TRL's metrics at the end of an epoch.
        backend = "nccl" if device == "cuda" else "gloo"
        options = options | dict(ddp_backend=backend, dataloader_drop_last=True)
        trainer = make_trainer(f"{folder}/{rank}", graph=graph, device=device, **options)
        look = Look(trainer) if graph else None
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        weights = [p.detach().cpu() for p in trainer.model.parameters()]
        evaluated = [log.get("eval_num_tokens") for log in trainer.state.log_history]
        if rank == 0:
            trainer.log({"mine": 1.0})  # of a callback on the first rank alone
        found.append({"logs": logs, "weights": weights, "evaluated": evaluated,
                      "captured": look and look.last})  # fmt: skip
    return found


def compare_on_ranks(ranks: list[list[dict]], rounding: float) -> None:
    for mine, theirs in ranks:
        for log, expected in zip(mine["logs"], theirs["logs"], strict=True):
            assert log.keys() == expected.keys()
            for name in METRICS:
                assert_close(log[name], expected[name], rtol=rounding, atol=rounding, msg=name)
        assert_close(mine["weights"], theirs["weights"], rtol=rounding, atol=rounding)
        assert mine["evaluated"] == theirs["evaluated"]


ON_RANKS = [
    {"eval_strategy": "steps", "eval_steps": 3},
    {"gradient_accumulation_steps": 3, "count": 60},
]


@needs_a_head
@pytest.mark.parametrize("options", ON_RANKS)
def test_ranks_have_the_numbers_of_ddp(options, tmp_path):
    ranks = distributed.run(train_on_ranks, str(tmp_path), options, limit=240)
    compare_on_ranks(ranks, rounding=1e-3)


@needs_a_head
@pytest.mark.parametrize("options", [*ON_RANKS, {"enable": {"bin_pack": True}}])
def test_two_gpus_have_the_numbers_of_ddp(options, second_gpu, tmp_path):
    del second_gpu
    ranks = distributed.run(
        train_on_ranks, str(tmp_path), options, "cuda", limit=240, backend="nccl"
    )
    compare_on_ranks(ranks, rounding=1e-2)
    assert [mine["captured"] for mine, _ in ranks] == [(True, None)] * 2
