"""Test Trainer and SFTTrainer on rows that ranks share: they learn what one process learns."""

from __future__ import annotations

import gc
import weakref

import distributed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import cuseq
from cuseq.distributed import ContextParallel

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
tokenizers = pytest.importorskip("tokenizers")

from trainer_models import SAVING, documents, small_model  # noqa: E402
from trainer_models import SETTINGS as SHORT_RUN  # noqa: E402

from cuseq.integrations.transformers._private import CP_INPUTS, NUM_ITEMS  # noqa: E402

STEPS, CAPACITY = 12, 40
MEASURES = ("loss", "grad_norm", "eval_loss")


def make_model(**options):
    return small_model(transformers.Qwen3Config, dtype=torch.float64, **options)


SETTINGS = SHORT_RUN | dict(
    max_steps=STEPS, eval_steps=5, use_cpu=True, dataloader_pin_memory=False
)


def mixture():
    model = small_model(
        transformers.Qwen3MoeConfig,
        dtype=torch.float64,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
    )
    model.set_experts_implementation("eager")  # the others take no float64
    return model


def make_gpt2():
    """Return a model whose class has no name of a loss; it takes the causal one by default."""
    dropouts = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, **dropouts)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)


MODELS = {"gpt2": make_gpt2, "mixture": mixture}


def make_trainer(folder: str, kind: type = transformers.Trainer, model=None, **options):
    options = {"train_sampling_strategy": "sequential", "bf16": False} | SETTINGS | options
    functions = {
        name: options.pop(name)
        for name in ("compute_metrics", "compute_loss_func", "data_collator")
        if name in options
    }
    return kind(
        make_model() if model is None else model,
        transformers.TrainingArguments(folder, **options),
        **({"data_collator": cuseq.PackingCollator()} | functions),
        train_dataset=documents(60, seed=0),  # an epoch of 10 steps
        eval_dataset=documents(5, seed=1),  # the last batch is smaller than the others
    )


def make_sft(folder: str, count: int = 150, model=None, **options):
    words = {"<eos>": 0, "<pad>": 1} | {f"w{i}": i for i in range(2, 64)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(
            tokenizers.models.WordLevel(words, unk_token="<eos>")
        ),
        eos_token="<eos>",
        pad_token="<pad>",
    )
    options = {"bf16": False} | SETTINGS | {"per_device_train_batch_size": 1} | options
    return trl.SFTTrainer(
        make_model() if model is None else model,
        trl.SFTConfig(folder, **options),
        train_dataset=datasets.Dataset.from_list(documents(count, seed=0)),
        eval_dataset=datasets.Dataset.from_list(documents(5, seed=1)),
        processing_class=tokenizer,
    )


def learned(trainer) -> dict[str, Tensor]:
    parameters = trainer.model.named_parameters()
    return {name: value.detach().clone() for name, value in parameters}


def result(trainer, *more: str) -> dict:
    """Train, and return the measures of each log and the weights."""
    trainer.train()
    history = trainer.state.log_history
    logs = {name: [log[name] for log in history if name in log] for name in (*MEASURES, *more)}
    assert len(logs["loss"]) == STEPS and len(logs["eval_loss"]) == 3
    return {"logs": logs, "learned": learned(trainer)}


def share(trainer, cp_size: int):
    mesh = init_device_mesh("cpu", (dist.get_world_size() // cp_size, cp_size))
    groups = [mesh.get_group(dim) for dim in range(2)]
    cp = ContextParallel(groups[1], heads=(2, 1), head_dim=16)
    enabled = cuseq.enable(trainer, cp=cp)
    assert f"context_parallel:{type(trainer).__name__}" in enabled.replaced
    assert cuseq.enable(trainer, cp=cp) is enabled
    return trainer


# Epochs of three steps, of which the last has fewer rows.
TAIL = dict(count=30, per_device_train_batch_size=4, per_device_eval_batch_size=2)
METRICS = ("entropy", "mean_token_accuracy", "eval_entropy", "eval_mean_token_accuracy")


def work(rank: int, folder: str, cp_size: int, kinds: list[str]) -> dict:
    """Return what each kind of trainer learns on rows that `cp_size` ranks share."""
    datasets.disable_progress_bars()
    replicas = dist.get_world_size() // cp_size
    accumulation = 2 // replicas
    found: dict = {}
    for kind in kinds:
        options = dict(gradient_accumulation_steps=accumulation)
        if kind == "config":  # accelerate's own context parallelism, which it refuses without GPUs
            accelerate.ParallelismConfig._validate_accelerator = lambda *_: None
            options["parallelism_config"] = accelerate.ParallelismConfig(
                cp_size=cp_size, dp_shard_size=replicas
            )
        if kind in ("sft", "tail"):
            more = TAIL if kind == "tail" else options
            trainer = make_sft(folder, packing=False, max_length=CAPACITY, **more)
            found[kind] = result(share(trainer, cp_size), *METRICS)
        elif kind == "resumed":
            found[kind] = resumed(folder, cp_size)
        elif kind == "other rows":
            found[kind] = refused_rows(folder, cp_size)
        elif kind in MODELS:
            model = MODELS[kind]()
            found[kind] = result(share(make_trainer(folder, model=model, **options), cp_size))
        else:
            trainer = share(make_trainer(folder, **options), cp_size)
            found[kind] = result(trainer)
            layers = [layer.self_attn for layer in trainer.model.model.layers]
            assert not any(layer._forward_pre_hooks for layer in layers)  # that drop masks
            assert trainer.get_total_train_batch_size(trainer.args) == 6
    return found


def resumed(folder: str, cp_size: int) -> tuple:
    """Return the weights of a run, and of one that goes on from its checkpoint."""
    folder = f"{folder}/saved"
    options = SAVING | dict(gradient_accumulation_steps=2)
    whole = share(make_trainer(folder, **options), cp_size)
    whole.train()
    again = make_trainer(f"{folder}/again", **options)
    torch.nn.init.normal_(again.model.lm_head.weight)
    # transformers would load moments to "cpu:0", which torch.load does not know.
    vars(again.args)["_setup_devices"] = torch.device("cpu")
    share(again, cp_size).train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    return learned(whole), learned(again)


class OtherRows(transformers.Trainer):
    """A Trainer whose own loader gives each rank other rows."""

    def get_train_dataloader(self):
        rank, size = self.args.process_index, self.args.world_size
        rows = [self.train_dataset[i : i + 3] for i in range(3 * rank, 90, 3 * size)]
        return torch.utils.data.DataLoader(rows, batch_size=None, collate_fn=self.data_collator)


def refused_rows(folder: str, cp_size: int) -> str:
    trainer = share(make_trainer(folder, OtherRows), cp_size)
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> dict:
    """Return what one process learns of the same documents without sharing rows."""
    folder = str(tmp_path_factory.mktemp("one"))
    trainer = make_trainer(folder, gradient_accumulation_steps=2)
    cuseq.enable(trainer)
    found = {"own": result(trainer)}
    for kind, make in MODELS.items():
        trainer = make_trainer(folder, model=make(), gradient_accumulation_steps=2)
        cuseq.enable(trainer)
        found[kind] = result(trainer)
    for kind, options in (("sft", dict(gradient_accumulation_steps=2)), ("tail", TAIL)):
        trainer = make_sft(folder, padding_free=True, max_length=None, **options)
        cuseq.enable(trainer, bin_pack=True, capacity=CAPACITY)
        found[kind] = result(trainer, *METRICS)
    assert 8 < trainer.train_dataset.plan.num_rows < 12
    return found


def check_same(found: dict, expected: dict, tolerance: float, without=()) -> None:
    for name, values in expected["logs"].items():
        if name in without:
            continue
        assert found["logs"][name] == pytest.approx(values, rel=tolerance), name
    for name, value in expected["learned"].items():
        torch.testing.assert_close(
            found["learned"][name], value, rtol=tolerance, atol=1e-7, msg=lambda m, n=name: n + m
        )


def check_ranks(ranks: list[dict], one_process: dict) -> None:
    for found in ranks:
        check_same(found["own"], one_process["own"], 1e-6)
        check_same(found["config"], one_process["own"], 1e-6)
        # TRL computes scores in float32, and its metrics are means over micro-batches.
        without = () if "tail" in found else METRICS
        check_same(found["sft"], one_process["sft"], 1e-5, without)
        if "tail" in found:
            check_same(found["tail"], one_process["tail"], 1e-5)
            whole, again = found["resumed"]
            assert all(torch.equal(again[name], value) for name, value in whole.items())
            assert "must read the same ones" in found["other rows"]
            check_same(found["gpt2"], one_process["gpt2"], 1e-6)
            # transformers computes balance losses in float32.
            check_same(found["mixture"], one_process["mixture"], 1e-5)


KINDS = ["own", "config", "sft"]


def test_two_ranks_that_share_rows_learn_what_one_learns(one_process, tmp_path):
    kinds = [*KINDS, "tail", "resumed", "other rows", *MODELS]
    check_ranks(distributed.run(work, str(tmp_path), 2, kinds, limit=240), one_process)


@pytest.mark.full
def test_pairs_of_ranks_learn_what_one_learns(one_process, tmp_path):
    ranks = distributed.run(work, str(tmp_path), 2, KINDS, processes=4, limit=240)
    check_ranks(ranks, one_process)


# What is refused.


@pytest.fixture
def cp(tmp_path):
    """Return the place of this process in a group of its own."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield ContextParallel(dist.group.WORLD)
    dist.destroy_process_group()


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(documents(4, seed=0))


def stretched():
    return make_model(rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4})


def convolutions():
    config = transformers.Lfm2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
    )
    return transformers.AutoModelForCausalLM.from_config(config)


REFUSED = {
    "tokens": (dict(average_tokens_across_devices=False), "average_tokens_across_devices"),
    "loss": (dict(compute_loss_func=lambda *_, **__: None), "compute_loss_func"),
    "smoothing": (dict(label_smoothing_factor=0.1), "label_smoothing_factor"),
    "metrics": (dict(compute_metrics=lambda _: {}), "compute_metrics"),
    "collator": (dict(data_collator=lambda rows: rows), "must be a cuseq.PackingCollator with cp"),
    "sampler": (dict(train_sampling_strategy="batch_rebalance"), "batch_rebalance"),
    "dispatch": (dict(accelerator_config={"dispatch_batches": True}), "dispatch_batches=False"),
    "noise": (dict(neftune_noise_alpha=5.0), "neftune_noise_alpha must be None with cp.*got 5.0"),
    "rotation": (stretched, "rotation follows the longest position.*got rope_type='dynamic'"),
    "state": (convolutions, "layers of type conv, whose state"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_wrong_is_refused(case, cp, tmp_path):
    options, message = REFUSED[case]
    if callable(options):
        options = dict(model=options())
    trainer = make_trainer(str(tmp_path), **options)
    before = dict(vars(trainer)), dict(vars(trainer.accelerator))
    with pytest.raises(ValueError, match=message):
        cuseq.enable(trainer, cp=cp)
    assert (vars(trainer), vars(trainer.accelerator)) == before


def test_methods_that_cp_would_replace_are_refused(cp, tmp_path):
    class OwnPrediction(transformers.Trainer):
        def prediction_step(self, *args, **kwargs):
            return super().prediction_step(*args, **kwargs)

    with pytest.raises(ValueError, match="the prediction_step of .*got that of OwnPrediction"):
        cuseq.enable(make_trainer(str(tmp_path), OwnPrediction), cp=cp)


def test_one_process_may_be_its_own_group(cp, tmp_path):
    trainer, twin = (make_trainer(str(tmp_path)) for _ in range(2))
    cuseq.enable(trainer, cp=cp)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(twin.evaluate()["eval_loss"], rel=1e-9)


def test_streams_must_be_read_by_each_rank(cp, tmp_path):
    trainer = make_trainer(str(tmp_path))
    trainer.train_dataset = Stream()
    with pytest.raises(ValueError, match="dispatch_batches=False with cp.*got None"):
        cuseq.enable(trainer, cp=cp)


@pytest.mark.parametrize("ranks", [(0, 2), (1, 2), (0, 1)])
def test_ranks_must_be_neighbours_of_the_trainer(ranks, cp, tmp_path):
    cp.ranks, cp.size = ranks, len(ranks)
    with pytest.raises(ValueError, match=r"neighbours among the trainer's 1 processes"):
        cuseq.enable(make_trainer(str(tmp_path)), cp=cp)


def test_other_values_of_cp_are_refused(cp, tmp_path):
    trainer = make_trainer(str(tmp_path))
    with pytest.raises(TypeError, match="cp must be a ContextParallel or None, got 2"):
        cuseq.enable(trainer, cp=2)
    enabled = cuseq.enable(trainer, cp=cp)
    assert cuseq.enable(trainer, cp=ContextParallel(dist.group.WORLD)) is enabled
    for other in (None, ContextParallel(dist.group.WORLD, policy="contiguous")):
        with pytest.raises(ValueError, match="cp must stay"):
            cuseq.enable(trainer, cp=other)


def test_a_collator_that_deals_rows_needs_cp_in_enable(cp, tmp_path):
    trainer = make_trainer(str(tmp_path), data_collator=cuseq.PackingCollator(cp=cp))
    with pytest.raises(ValueError, match="cp must be given to cuseq.enable if .* got None"):
        cuseq.enable(trainer)
    assert trainer.model.config._attn_implementation == "sdpa"
    cuseq.enable(trainer, cp=cp)


@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer", "DPOTrainer"])
def test_trainers_with_other_losses_are_refused_by_name(name, cp):
    cls = getattr(trl, name)
    with pytest.raises(ValueError, match=f"cp must be None for a {name}"):
        cuseq.enable(cls.__new__(cls), cp=cp)


def test_disable_restores_the_trainer(cp, tmp_path):
    trainer = make_trainer(str(tmp_path))
    collator = trainer.data_collator
    gather = trainer.gather_function
    cuseq.enable(trainer, cp=cp)
    assert trainer.data_collator.cp is cp and collator.cp is None
    with pytest.raises(ValueError, match="must evaluate losses alone"):
        trainer.predict(trainer.eval_dataset)
    cuseq.disable(trainer)
    assert trainer.data_collator is collator
    assert trainer.gather_function is gather
    replaced = {"prediction_step", "get_cp_size", CP_INPUTS, NUM_ITEMS}
    assert not replaced & {*vars(trainer), *vars(trainer.accelerator)}
    assert trainer.predict(trainer.eval_dataset).metrics["test_loss"] > 0


@pytest.mark.parametrize("kind", ["own", "sft"])
def test_an_enabled_trainer_is_freed(kind, cp, tmp_path):
    datasets.disable_progress_bars()
    trainer = (
        make_trainer(str(tmp_path))
        if kind == "own"
        else make_sft(str(tmp_path), packing=False, max_length=CAPACITY)
    )
    cuseq.enable(trainer, cp=cp)
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None


def test_the_sft_rows_need_documents(cp, tmp_path):
    datasets.disable_progress_bars()
    trainer = make_sft(str(tmp_path), packing=False, max_length=CAPACITY)
    rows, collator = trainer.train_dataset, trainer.data_collator
    enabled = cuseq.enable(trainer, cp=cp)
    assert "collator:DataCollatorForLanguageModeling" in enabled.replaced
    assert trainer.train_dataset.plan.num_rows < len(rows)
    batch = trainer.data_collator([trainer.train_dataset[0]])
    assert batch["packed"].part.group == cp.group_name
    cuseq.disable(trainer)
    assert (trainer.train_dataset, trainer.data_collator) == (rows, collator)
    with pytest.raises(ValueError, match="packing=True or padding_free=True"):
        cuseq.enable(trainer)


def test_rows_that_were_cut_anywhere_are_refused(cp, tmp_path):
    datasets.disable_progress_bars()
    packed = dict(packing=True, packing_strategy="wrapped", max_length=CAPACITY)
    trainer = make_sft(str(tmp_path), **packed)
    with pytest.raises(ValueError, match='packing_strategy must not be "wrapped" with .* or cp'):
        cuseq.enable(trainer, cp=cp)


def test_the_balance_loss_of_trl_is_refused(cp, tmp_path):
    datasets.disable_progress_bars()
    trainer = make_sft(str(tmp_path), model=mixture(), packing=False, max_length=CAPACITY)
    with pytest.raises(ValueError, match="SFTTrainer with a balance loss.*got .*=0.1: set it to"):
        cuseq.enable(trainer, cp=cp)


def test_a_collator_deals_to_one_group(cp):
    collate = cuseq.PackingCollator(total_tokens=8).with_cp(cp)
    assert collate.with_cp(cp).cp is cp
    other = ContextParallel(dist.group.WORLD)
    other.ranks = (2, 3)
    with pytest.raises(ValueError, match=r"cp must have the ranks \[0\] of the collator's"):
        collate.with_cp(other)
    with pytest.raises(TypeError, match="cp must be a ContextParallel or None, got 2"):
        collate.with_cp(2)
