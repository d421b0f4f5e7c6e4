"""Test SFT through TRL's trainer, enabled and not: equal rows, losses and weights."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tiers import full_but
from torch import Tensor
from torch.testing import assert_close

import cuseq

pytest.importorskip("trl")
peft = pytest.importorskip("peft")

import datasets  # noqa: E402
import tokenizers  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from trainer_models import small_model  # noqa: E402
from transformers import masking_utils  # noqa: E402
from trl.trainer import sft_trainer  # noqa: E402

from cuseq.integrations import transformers as integration  # noqa: E402
from cuseq.integrations.trl import PackedCollator, PackedRows  # noqa: E402

PAD = 1
CAPACITY = 16
OFFSETS = {
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
}  # 1.14 has none


@pytest.fixture(autouse=True, scope="module")
def registered():
    """Register the attention; the models of this file request it by name."""
    integration.register()
    yield
    integration.unregister()


@pytest.fixture(scope="module")
def tokenizer():
    words = {"<eos>": 0, "<pad>": PAD} | {f"w{i}": i + 2 for i in range(62)}
    model = tokenizers.models.WordLevel(words, unk_token="<eos>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template=(
            "{% for m in messages %}{% if m.role == 'assistant' %}"
            "{% generation %}{{ m.content }} <eos> {% endgeneration %}"
            "{% else %}{{ m.content }} {% endif %}{% endfor %}"
        ),
    )


def words(generator: torch.Generator, longest: int) -> list[str]:
    count = int(torch.randint(1, longest + 1, (1,), generator=generator))
    return [f"w{i}" for i in torch.randint(0, 62, (count,), generator=generator).tolist()]


def texts(count: int, kind: str = "text", longest: int = 14, seed: int = 0) -> datasets.Dataset:
    generator = torch.Generator().manual_seed(seed)

    def one() -> dict:
        first, second = (" ".join(words(generator, longest)) for _ in range(2))
        if kind == "text":
            return {"text": first}
        if kind == "prompt-completion":
            return {"prompt": first + " ", "completion": second}
        turns = [("user", first), ("assistant", second)]
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    return datasets.Dataset.from_list([one() for _ in range(count)])


def make_model(attention: str = "sdpa", **options):
    return small_model(
        transformers.Qwen3Config, dtype=torch.float64, attention=attention, **options
    )


@pytest.fixture
def make_trainer(tokenizer, tmp_path):
    datasets.disable_progress_bars()

    def make(
        dataset=None, model=None, *, evaluated=None, peft_config=None, device="cpu", **options
    ):
        options = {
            "packing": True,
            "max_length": CAPACITY,
            "max_steps": 3,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "optim": "sgd",  # Adam would make a full step from a gradient that is a rounding error
            "lr_scheduler_type": "constant",
        } | options
        arguments = trl.SFTConfig(
            str(tmp_path),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=device == "cpu",
            bf16=False,
            dataloader_pin_memory=device != "cpu",
            **options,
        )
        # with several, Trainer would use nn.DataParallel
        arguments._n_gpu = min(arguments.n_gpu, 1)
        return trl.SFTTrainer(
            make_model() if model is None else model,
            arguments,
            train_dataset=texts(60) if dataset is None else dataset,
            eval_dataset=evaluated,
            processing_class=tokenizer,
            peft_config=peft_config,
        )

    yield make
    datasets.enable_progress_bars()


def weights(trainer) -> dict[str, Tensor]:
    return {name: value for name, value in trainer.model.named_parameters() if value.requires_grad}


def history(trainer, *names: str) -> list[list[float]]:
    return [[entry[name] for entry in trainer.state.log_history if name in entry] for name in names]


def assert_equal_runs(theirs, ours) -> None:
    """TRL computes token scores in float32 for any model precision."""
    measures = ("loss", "eval_loss", "grad_norm", "entropy", "mean_token_accuracy")
    expected, found = history(theirs, *measures), history(ours, *measures)
    assert len(expected[0]) == 3
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    untrained = make_model().state_dict()
    for (name, one), other in zip(weights(ours).items(), weights(theirs).values(), strict=True):
        assert_close(one, other, rtol=1e-6, atol=1e-9)
        assert name not in untrained or not torch.equal(one.cpu(), untrained[name])


LORA = dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj"])
RUNS = {
    "bfd": dict(),
    "bfd_split": dict(packing_strategy="bfd_split", longest=30),
    "wrapped": dict(packing_strategy="wrapped"),
    "wrapped, padding-free": dict(packing_strategy="wrapped", padding_free=True),
    "padding-free": dict(packing=False, padding_free=True, max_length=None),
    "grouped": dict(  # drawn from the global random numbers
        packing=False,
        padding_free=True,
        max_length=None,
        train_sampling_strategy="group_by_length",
    ),
    "pads": dict(pad_to_multiple_of=24),
    "prompt-completion": dict(kind="prompt-completion", packing_strategy="bfd_split"),
    "assistant": dict(kind="messages", assistant_only_loss=True, packing_strategy="bfd_split"),
    "accumulation": dict(gradient_accumulation_steps=3),
    "dft": dict(loss_type="dft"),
    "checkpoints": dict(gradient_checkpointing_kwargs={"use_reentrant": True}),
    "adapters": dict(peft_config=LORA),
    "workers": dict(dataloader_num_workers=1),
}


@pytest.mark.parametrize(
    "run", full_but(RUNS, "bfd", "bfd_split", "padding-free", "assistant", "adapters")
)
def test_losses_and_weights_are_those_of_trl(run, device, make_trainer):
    options = dict(RUNS[run])
    data = {name: options.pop(name) for name in ("kind", "longest") if name in options}
    lora = options.pop("peft_config", None)

    def make():
        adapters = None if lora is None else peft.LoraConfig(**lora)
        return make_trainer(
            texts(60, **data),
            evaluated=texts(13, seed=1, **data),
            eval_strategy="steps",
            eval_steps=2,
            per_device_eval_batch_size=3,
            peft_config=adapters,
            device=device.type,
            **options,
        )

    theirs = make()
    theirs.train()
    ours = make()  # which seeds again
    cuseq.enable(ours)
    ours.train()
    assert_equal_runs(theirs, ours)


def test_streams(device, make_trainer):
    theirs, ours = (
        make_trainer(texts(60).to_iterable_dataset(), device=device.type) for _ in range(2)
    )
    cuseq.enable(ours)
    theirs.train(), ours.train()
    assert_equal_runs(theirs, ours)


def test_predictions(device, make_trainer):
    theirs, ours = (make_trainer(evaluated=texts(13), device=device.type) for _ in range(2))
    cuseq.enable(ours)
    for expected, found in zip(
        theirs.get_eval_dataloader(), ours.get_eval_dataloader(), strict=True
    ):
        loss, logits, labels = theirs.prediction_step(theirs.model, expected, False)
        ours_loss, ours_logits, ours_labels = ours.prediction_step(ours.model, found, False)
        assert_close(ours_loss, loss)
        assert_close(ours_logits, logits, rtol=1e-6, atol=1e-6)
        assert torch.equal(ours_labels, labels)
    unpacked = texts(5, seed=2)  # prepared and packed when it is passed
    assert ours.evaluate(unpacked)["eval_loss"] == pytest.approx(
        theirs.evaluate(unpacked)["eval_loss"], rel=1e-6
    )


# ------------------------------------------------------------------------------------------ layouts


def test_nothing_is_derived_again(device, make_trainer, monkeypatch):
    """Every layer gets the collator's own layout; no tensor is searched for documents."""
    calls, layouts = [], []

    def count(owner, name):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for name in ("from_position_ids", "from_cu_seqlens", "from_padding_mask"):
        count(cuseq.PackedLayout, name)
    count(masking_utils, "find_packed_sequence_indices")
    count(masking_utils, "sdpa_mask")
    attend = cuseq.varlen_attention

    def spy(q, k, v, packed, **options):
        layouts.append(packed)
        return attend(q, k, v, packed, **options)

    monkeypatch.setattr(cuseq, "varlen_attention", spy)
    trainer = make_trainer(gradient_checkpointing=False, max_steps=2, device=device.type)
    made = []
    cuseq.enable(trainer)
    collate = trainer.data_collator.torch_call

    def remember(examples):
        batch = collate(examples)
        made.append(batch["packed"])
        return batch

    trainer.data_collator.torch_call = remember
    trainer.train()
    assert calls == []
    assert len(layouts) == 2 * 2  # layers, steps
    for layout in layouts:
        assert layout.device == device
        if device.type == "cpu":
            assert any(layout is one for one in made)
        else:  # pinned and moved; the host values are the same object
            assert any(layout.host_meta is one.host_meta for one in made)
    assert layouts[0] is layouts[1] and layouts[2] is layouts[3] and layouts[1] is not layouts[2]


def test_compiled_layers_have_one_graph_for_all_packs():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    model = make_model("cuseq")
    layer = model.model.layers[0]
    layer.compile(fullgraph=True, dynamic=False, backend=backend)
    _, collate = collators(pad_to_multiple_of=CAPACITY)
    for lengths in ([7], [2, 9], [1, 1, 1, 4], [CAPACITY], [1] * 12):
        batch = collate([{"input_ids": list(range(n))} for n in lengths])
        model(**batch, use_cache=False).loss.backward()
    assert len(graphs) == 1


# ------------------------------------------------------------------------------------------ rows

ROWS = [
    {"input_ids": [5, 6, 7], "labels": [5, -100, 7], "seq_lengths": [2, 1]},
    {"input_ids": [8, 9, 10, 11], "labels": [8, 9, 10, 11], "seq_lengths": [4]},
]


def collators(**options):
    options = dict(pad_token_id=PAD, padding_free=True) | options
    return sft_trainer.DataCollatorForLanguageModeling(**options), PackedCollator(**options)


def test_rows_literal_case():
    _, collate = collators(pad_to_multiple_of=5)
    batch = collate(ROWS)
    packed = batch.pop("packed")
    assert packed.lengths.tolist() == [2, 1, 4]
    assert (packed.total_tokens, packed.num_real_tokens) == (10, 7)
    assert {k: v.tolist() if isinstance(v, Tensor) else v for k, v in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 9, 10, 11, PAD, PAD, PAD]],
        "labels": [[-100, -100, -100, -100, 9, 10, 11, -100, -100, -100]],
        "position_ids": [[0, 1, 0, 0, 1, 2, 3, 0, 1, 2]],
        "cu_seq_lens_q": [0, 2, 3, 7, 10],
        "cu_seq_lens_k": [0, 2, 3, 7, 10],
        "max_length_q": 4,
        "max_length_k": 4,
        "seq_idx": [[0, 0, 1, 2, 2, 2, 2, 3, 3, 3]],
    }


@pytest.mark.parametrize("keys", [{"input_ids", "labels", "seq_lengths"}, {"input_ids"}])
def test_without_pads_rows_are_those_of_trl(keys):
    theirs, ours = collators()
    examples = [{key: row[key] for key in keys} for row in ROWS]
    expected, found = theirs(examples), ours(examples)
    assert found.keys() == expected.keys() | OFFSETS | {"packed"}
    for key, value in expected.items():
        if isinstance(value, Tensor):
            assert_close(found[key], value, rtol=0, atol=0)
        else:
            assert (found[key], type(found[key])) == (value, type(value))


def test_pads_are_one_tail_and_labels_those_of_trl():
    theirs, ours = collators(pad_to_multiple_of=16)
    expected, found = theirs(ROWS), ours(ROWS)
    assert (expected["position_ids"] == 0).sum() == 3 + 9  # a document for each pad token
    assert found["packed"].num_sequences == 3
    assert len(found["cu_seq_lens_q"]) == 3 + 1 + 1
    for key in ("input_ids", "labels"):
        assert torch.equal(found[key], expected[key])


def test_empty_documents_leave_no_trace():
    theirs, ours = collators()
    empty = {"input_ids": [], "labels": []}
    zeros = [ROWS[0] | {"seq_lengths": [0, 2, 0, 1, 0]}, empty | {"seq_lengths": []}, ROWS[1]]
    expected = ours(ROWS)
    for examples in (zeros, [ROWS[0], empty, ROWS[1]]):
        found = ours(examples)
        for key in ("input_ids", "labels", "position_ids", "cu_seq_lens_q", "seq_idx"):
            assert torch.equal(found[key], expected[key])
        assert found["packed"].lengths.tolist() == [2, 1, 4]
    with pytest.raises(IndexError):
        theirs([empty | {"seq_lengths": [0]}])
    with pytest.raises(ValueError, match="examples must hold at least one token, got 2 empty ones"):
        ours([empty, empty])


def test_wrong_examples_are_named():
    _, collate = collators()
    with pytest.raises(ValueError, match=r"seq_lengths.*examples\[1\] sum to 3 and it has 4"):
        collate([ROWS[0], ROWS[1] | {"seq_lengths": [2, 1]}])
    with pytest.raises(ValueError, match=r"labels.*examples\[0\] has 3 tokens and 1 labels"):
        collate([ROWS[0] | {"labels": [5]}])


# ---------------------------------------------------------------------------------------- bin_pack


def documents(rows) -> list[tuple[list[int], list[int]]]:
    """Return ids and labels of every document, sorted."""
    found = []
    for row in rows:
        start = 0
        for length in row["seq_lengths"]:
            part = slice(start, start + length)
            found.append((row["input_ids"][part], row["labels"][part]))
            start += length
        assert start == len(row["input_ids"]) == len(row["labels"]) <= CAPACITY
    return sorted(found)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_bin_pack_packs_the_same_documents_into_fewer_rows(strategy, make_trainer):
    data = texts(2500, "prompt-completion", longest=20)
    trainer = make_trainer(data, packing_strategy=strategy, evaluated=texts(20, "text"))
    theirs, evaluated = trainer.train_dataset, trainer.eval_dataset
    cuseq.enable(trainer, bin_pack=True)
    ours = trainer.train_dataset
    assert len(ours) < len(theirs)  # TRL packs a thousand at a time
    assert documents(ours[i] for i in range(len(ours))) == documents(theirs)
    assert trainer.eval_dataset is evaluated
    with pytest.raises(IndexError, match=rf"\[0, {len(ours)}\), got {len(ours)}"):
        ours[len(ours)]
    assert pickle.loads(pickle.dumps(ours))[3] == ours[3]


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_bin_pack_where_trl_packs_nothing(strategy, make_trainer):
    """The documents are cut and packed as TRL would, in no more rows."""
    data = texts(500, longest=25)
    theirs = make_trainer(data, packing_strategy=strategy).train_dataset
    options = dict(packing=False, padding_free=True, max_length=None)
    trainer = make_trainer(data, packing_strategy=strategy, **options)
    with pytest.raises(ValueError, match="capacity must be given"):
        cuseq.enable(trainer, bin_pack=True)
    cuseq.enable(trainer, bin_pack="ffd", capacity=CAPACITY)
    ours = trainer.train_dataset
    assert len(ours) <= len(theirs) < 500
    assert documents(ours[i] for i in range(len(ours))) == documents(theirs)
    trainer.train()
    assert len(history(trainer, "loss")[0]) == 3


def test_rows_of_a_prepared_dataset():
    rows = [
        {"input_ids": [1, 2, 3], "seq_lengths": [1, 2]},
        {"input_ids": [], "seq_lengths": []},
        {"input_ids": [4, 5, 6, 7], "seq_lengths": [0, 4]},
        {"input_ids": [], "seq_lengths": []},
    ]
    packed = PackedRows(datasets.Dataset.from_list(rows), 3, "bfd", "split")
    assert [packed[i] for i in range(len(packed))] == [
        {"input_ids": [4, 5, 6], "seq_lengths": [3, 0]},
        {"input_ids": [2, 3, 1], "seq_lengths": [2, 1]},
        {"input_ids": [7], "seq_lengths": [1]},
    ]


def test_evaluation_takes_packed_rows(make_trainer):
    trainer = make_trainer(per_device_eval_batch_size=100)  # one batch
    rows = trainer.train_dataset
    losses, tokens = 0.0, 0
    with torch.no_grad():
        for ids, labels in documents(rows):
            count = sum(label != -100 for label in labels[1:])
            if count:
                row = torch.tensor([ids, labels])[:, None]
                losses += count * float(trainer.model(input_ids=row[0], labels=row[1]).loss)
                tokens += count
    expected = pytest.approx(losses / tokens, rel=1e-5)
    for bin_pack in (True, False):
        cuseq.enable(trainer, bin_pack=bin_pack)
        assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == expected
        by_name = trainer.evaluate({"a": trainer.train_dataset, "b": rows})
        assert (by_name["eval_a_loss"], by_name["eval_b_loss"]) == (expected, expected)
        cuseq.disable(trainer)
    assert "_prepare_dataset" not in vars(trainer)


def test_a_balance_loss_leaves_out_the_pads(make_trainer):
    sizes = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    losses = []
    for multiple in (None, 128):
        model = small_model(transformers.Qwen3MoeConfig, dtype=torch.float32, **sizes)
        options = dict(pad_to_multiple_of=multiple, router_aux_loss_coef=0.5)
        trainer = make_trainer(model=model, **options)
        cuseq.enable(trainer)
        trainer.train()
        losses.append(history(trainer, "loss", "aux_loss", "grad_norm"))
    assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=0)


def test_packed_rows_have_the_methods_of_a_dataset(make_trainer):
    trainer = make_trainer()
    cuseq.enable(trainer, bin_pack=True)
    rows = trainer.train_dataset
    listed = [rows[i] for i in range(len(rows))]
    assert rows.column_names == rows.map(lambda row: row).column_names == list(listed[0])
    assert rows.select(range(2)).to_list() == listed[:2]
    assert rows.filter(lambda row: len(row["seq_lengths"]) > 1).num_rows <= len(listed)
    assert list(rows.to_iterable_dataset()) == listed
    with pytest.raises(AttributeError, match="PackedRows has no attribute selects"):
        rows.selects  # noqa: B018
    assert pickle.loads(pickle.dumps(rows))[0] == listed[0]


def test_a_repacked_run_trains_as_trl_does_with_these_rows(make_trainer):
    ours = make_trainer()
    cuseq.enable(ours, bin_pack=True)
    rows = ours.train_dataset
    same = datasets.Dataset.from_list([rows[i] for i in range(len(rows))])
    skip = {"skip_prepare_dataset": True}
    theirs = make_trainer(same, dataset_kwargs=skip)
    theirs.train(), ours.train()
    assert_equal_runs(theirs, ours)


# ---------------------------------------------------------------------------- enable and disable


def state_of(trainer) -> tuple:
    layer = trainer.model.get_submodule("model.layers.0.self_attn")
    config = trainer.model.config
    return (
        trainer.data_collator,
        trainer.train_dataset,
        config._attn_implementation,
        "forward" in vars(layer),
    )


def test_disable_puts_everything_back(make_trainer):
    trainer = make_trainer(evaluated=texts(7), dataloader_num_workers=1)
    trainer.args.dataloader_persistent_workers = True
    before, loss = state_of(trainer), trainer.evaluate()["eval_loss"]

    def evaluating_collator():
        return trainer._eval_dataloaders["eval"].collate_fn

    cuseq.enable(trainer, bin_pack=True)
    assert all(one is not other for one, other in zip(state_of(trainer), before, strict=True))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert type(evaluating_collator()) is PackedCollator
    with pytest.raises(ValueError, match="bin_pack must stay 'bfd' until cuseq.disable, got F"):
        cuseq.enable(trainer)
    cuseq.disable(trainer)
    assert all(one is other for one, other in zip(state_of(trainer), before, strict=True))
    assert trainer.evaluate()["eval_loss"] == loss
    assert evaluating_collator() is before[0]
    cuseq.disable(trainer)  # a trainer that is not enabled does not change
    assert all(one is other for one, other in zip(state_of(trainer), before, strict=True))
    cuseq.enable(trainer)
    assert trainer.train_dataset is before[1]


def test_what_enable_returns(make_trainer):
    trainer = make_trainer()
    enabled = cuseq.enable(trainer, bin_pack=True, qk_norm=False)
    assert enabled.kind == "trainer"
    assert enabled.replaced == (
        "attention:Qwen3Attention",
        "rope:transformers.models.qwen3.modeling_qwen3",
        "collator:DataCollatorForLanguageModeling",
    )
    assert enabled.left_alone == enabled.warnings == ()
    assert cuseq.enable(trainer, bin_pack="bfd", qk_norm=False) is enabled
    cuseq.disable(trainer)


def test_options_that_come_later(make_trainer):
    trainer = make_trainer()
    message = (
        "a SFTTrainer takes backend and bin_pack and capacity and collator and cp and graph and "
        "micro_batch_tokens and qk_norm and rope and tree, got token_budget"
    )
    with pytest.raises(TypeError, match=message):
        cuseq.enable(trainer, token_budget=None)


def test_a_model_that_was_enabled_before(make_trainer):
    """It stays enabled, with its own options, when the trainer is disabled."""
    trainer = make_trainer()
    cuseq.enable(trainer.model, rope=False)
    with pytest.raises(ValueError, match="rope must stay False until cuseq.disable"):
        cuseq.enable(trainer)
    assert type(trainer.data_collator) is not PackedCollator
    cuseq.enable(trainer, rope=False)
    cuseq.disable(trainer)
    assert trainer.model.config._attn_implementation == "cuseq"
    cuseq.disable(trainer.model)
    assert trainer.model.config._attn_implementation == "sdpa"


def test_a_renamed_method_of_trainer_is_named(make_trainer, monkeypatch):
    trainer = make_trainer()
    name = "_set_signature_columns_if_needed"  # TRL overrides this method
    for owner in (trl.SFTTrainer, transformers.Trainer):
        monkeypatch.delattr(owner, name)
    message = rf"this transformers \({transformers.__version__}\).*_if_needed is missing"
    with pytest.raises(ValueError, match=message):
        cuseq.enable(trainer)


def test_a_model_of_cuseq_stays_as_it_is(make_trainer):
    trainer = make_trainer(model=make_model("cuseq"))
    before = state_of(trainer)
    assert "on its own" in cuseq.enable(trainer).left_alone[0]
    assert state_of(trainer)[2:4] == before[2:4] == ("cuseq", False)
    cuseq.disable(trainer)
    assert state_of(trainer) == before


def refusals():
    def collator(trainer):
        trainer.data_collator = cuseq.PackingCollator()

    def subclass(trainer):
        trainer.data_collator = PackedCollator(pad_token_id=PAD, padding_free=True)

    def columns(trainer):
        trainer._signature_columns = ["input_ids", "labels"]

    def array(trainer):
        trainer.data_collator.return_tensors = "np"

    def split(trainer):
        trainer.accelerator.state.parallelism_config = type(
            "Config", (), {"cp_enabled": False, "sp_enabled": True}
        )()

    def stream(trainer):
        trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()

    def transform(trainer):
        trainer.train_dataset = trainer.train_dataset.with_transform(lambda batch: batch)

    def gpus(trainer):
        trainer.args._n_gpu = 2

    nothing = lambda trainer: None  # noqa: E731
    padded = dict(packing=False)
    wrapped = dict(packing_strategy="wrapped")
    pack = dict(bin_pack=True)
    return {
        "padded": (padded, nothing, {}, ValueError, "packing=True or padding_free=True"),
        "collator": ({}, collator, {}, TypeError, "got PackingCollator"),
        "subclass": ({}, subclass, {}, TypeError, "got PackedCollator"),
        "columns": ({}, columns, {}, ValueError, "seq_lengths.*remove_unused_columns"),
        "arrays": ({}, array, {}, ValueError, "return_tensors must be \"pt\", got 'np'"),
        "split": ({}, split, {}, ValueError, "cp_size and sp_size must be 1"),
        "gpus": ({}, gpus, {}, ValueError, "a process for each GPU, got 2 GPUs in one"),
        "wrapped": (wrapped, nothing, pack, ValueError, 'not be "wrapped" with bin_pack'),
        "stream": ({}, stream, pack, TypeError, "got IterableDataset; cuseq.data.PackedStream"),
        "transform": ({}, transform, pack, TypeError, "without a transform.*got Dataset"),
        "strategy": ({}, nothing, dict(bin_pack="best"), ValueError, "got 'best'"),
        "capacity": ({}, nothing, dict(capacity=8), ValueError, "capacity.*without bin_pack.*8"),
    }


@pytest.mark.parametrize("case", refusals())
def test_what_is_refused_stays_as_it_was(case, make_trainer, monkeypatch):
    options, change, arguments, error, message = refusals()[case]
    trainer = make_trainer(**options)
    monkeypatch.setattr(trainer.accelerator.state, "parallelism_config", None, raising=False)
    change(trainer)
    before = state_of(trainer)
    with pytest.raises(error, match=message):
        cuseq.enable(trainer, **arguments)
    assert all(one is other for one, other in zip(state_of(trainer), before, strict=True))


def test_models_are_refused(make_trainer):
    dropping = make_trainer(model=make_model(attention_dropout=0.1))
    before = state_of(dropping)
    with pytest.raises(ValueError, match="attention_dropout=0.1"):
        cuseq.enable(dropping)
    assert state_of(dropping) == before
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    prompted = make_trainer(peft_config=config)
    with pytest.raises(ValueError, match="virtual tokens.*PromptTuningConfig"):
        cuseq.enable(prompted)


def test_an_unknown_release_of_trl_is_refused(make_trainer, monkeypatch):
    trainer = make_trainer()
    fields = dict(sft_trainer.DataCollatorForLanguageModeling.__dataclass_fields__)
    fields["mask"] = copy.copy(fields["pad_token_id"])
    fields["mask"].name = "mask"
    monkeypatch.setattr(sft_trainer.DataCollatorForLanguageModeling, "__dataclass_fields__", fields)
    message = rf"cuseq does not know this trl \({trl.__version__}\): .* has a field mask"
    with pytest.raises(ValueError, match=message):
        cuseq.enable(trainer)


def test_other_trainers_are_refused():
    kind = trl.trainer.base_trainer._BaseTrainer
    with pytest.raises(TypeError, match="must be an SFTTrainer or a GRPOTrainer.*, got _BaseTr"):
        cuseq.enable(object.__new__(kind))
