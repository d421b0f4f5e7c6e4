"""What the batches of a Trainer say about their documents, against the documents one by one.

One run of a Trainer takes batches of every description, one after the other with a learning rate of
zero, so that each step has the gradients of the same documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import cuseq

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from document_batches import (  # noqa: E402, F401
    CONFIGS,
    DESCRIPTIONS,
    ENABLED_ONLY,
    Batch,
    Documents,
    clean,
    documents,
    enable,
    make_classifier,
    make_model,
    numbers_of,
    one_document,
    real_tokens,
    restarting,
    with_positions,
)
from tiers import full, full_but  # noqa: E402

WAYS = ["cuseq", "enabled", "trainer"]


def grid(*fast: tuple[str, str]) -> list[Any]:
    """Return pairs of a model and a way as parameters, of which the fast tier runs these."""
    pairs = [(n, how) for n in CONFIGS for how in WAYS if how != "cuseq" or n not in ENABLED_ONLY]
    assert set(fast) <= set(pairs)
    return [pair if pair in fast else full(*pair) for pair in pairs]


SECOND = [3, 6, 2]  # lengths of the second batch of a step, which has other numbers of labels
CACHE_NAMES = ["past_key_values", "cache"]  # what outputs of transformers call it; 5.24 renamed it


# ----------------------------------------------------------------------------------- documents


def labels_of(docs: Documents) -> Tensor:
    """Return the labels `[tokens]`: none for the first token of a document and for some others."""
    return torch.cat([_labels_of(doc) for doc in docs])


def _labels_of(doc: Tensor) -> Tensor:
    labels = doc[0].masked_fill(doc[0] % 5 == 0, -100)
    labels[0] = -100
    return labels


def with_labels(batch: Batch, docs: Documents) -> Batch:
    labels = torch.full_like(batch["input_ids"], -100)
    labels[real_tokens(batch)] = labels_of(docs)
    return batch | {"labels": labels}


FIRST_DOCS, SECOND_DOCS = documents(), documents(SECOND, seed=2)


def step_of(describe: Callable[[Documents], Batch]) -> list[Batch]:
    """Return the two batches of a step, whose losses Trainer adds up."""
    return [with_labels(describe(docs), docs) for docs in (FIRST_DOCS, SECOND_DOCS)]


# ----------------------------------------------------------------------------------- runs


class Step(NamedTuple):
    loss: float
    gradients: list[Tensor | None]


class Gradients(transformers.TrainerCallback):
    """Keeps the gradients of each step."""

    def __init__(self) -> None:
        self.steps: list[list[Tensor | None]] = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.steps.append(gradients_of(model))


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


STILL = dict(
    learning_rate=0.0,
    max_grad_norm=0.0,
    optim="sgd",
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    train_sampling_strategy="sequential",
)  # the weights stay, and the batches come in order


def make_trainer(
    model: nn.Module, batches: Sequence[Batch], folder: Any, how: str = "", **options: Any
) -> transformers.Trainer:
    """Return a Trainer of these batches, in order."""
    more = {name: options.pop(name) for name in ("compute_loss_func",) if name in options}
    device = options.pop("device", "cpu")
    settings = dict(
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        use_cpu=device == "cpu",
        dataloader_pin_memory=device != "cpu",
    )
    arguments = transformers.TrainingArguments(str(folder), **(STILL | settings | options))
    items = [{"input_ids": i} for i in range(len(batches))]  # a name that no Trainer drops
    trainer = transformers.Trainer(
        model,
        arguments,
        data_collator=lambda chosen: dict(batches[chosen[0]["input_ids"]]),
        train_dataset=items,
        eval_dataset=items,
        callbacks=[Gradients()],
        **more,
    )
    if how == "trainer":
        enable(trainer)
    return trainer


def train(trainer: transformers.Trainer) -> list[Step]:
    trainer.train()
    # Older releases of Trainer let accelerate divide each gradient by the batches of a step again.
    divided = trainer.accelerator.gradient_accumulation_steps
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    (kept,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, Gradients)]
    return [
        Step(loss, [None if one is None else one * divided for one in gradients])
        for loss, gradients in zip(losses, kept.steps, strict=True)
    ]


def documents_one_by_one(name: str) -> Step:
    """Return the loss and the gradients of a step, computed document by document."""
    model = make_model(name).train()
    docs = [*FIRST_DOCS, *SECOND_DOCS]
    count = int((labels_of(docs) != -100).sum())
    loss = torch.zeros((), dtype=torch.float64)
    for doc in docs:
        if doc.shape[1] > 1:
            logits = model(doc, use_cache=False).logits[0, :-1].float()
            labels = _labels_of(doc)[1:]
            loss = loss + nn.functional.cross_entropy(logits, labels, reduction="sum")
    loss = loss / count
    loss.backward()
    return Step(loss.item(), gradients_of(model))


def differences(found: Step, expected: Step) -> str:
    """Return what differs between two steps, if anything."""
    if found.loss != pytest.approx(expected.loss, rel=1e-5):
        return f"loss {found.loss}, not {expected.loss}"
    for i, (ours, theirs) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        if (ours is None or theirs is None) and ours is not theirs:
            return f"gradient {i} is missing or new"
        if ours is not None and not torch.allclose(ours.cpu(), theirs, rtol=1e-4, atol=1e-4):
            return f"gradient {i} is off by {(ours.cpu() - theirs).abs().max():.2g}"
    return ""


def check_steps(found: list[Step], names: Sequence[str], expected: list[Step] | Step) -> None:
    expected = [expected] * len(names) if isinstance(expected, Step) else expected
    assert len(found) == len(names)
    said = [
        f"{name}: {differences(one, other)}"
        for name, one, other in zip(names, found, expected, strict=True)
        if differences(one, other)
    ]
    assert not said, "\n".join(said)


def all_descriptions() -> list[Batch]:
    return [batch for describe in DESCRIPTIONS.values() for batch in step_of(describe)]


@pytest.mark.parametrize(
    "name, how",
    grid(*(("qwen3", how) for how in WAYS), *((n, "trainer") for n in ("gpt2", "qwen3_next"))),
)
def test_each_description_trains_the_documents_apart(name, how, tmp_path):
    expected = documents_one_by_one(name)
    trainer = make_trainer(make_model(name, how), all_descriptions(), tmp_path, how)
    check_steps(train(trainer), list(DESCRIPTIONS), expected)


def dense(docs: Documents) -> Batch:
    """Return a row with a mask `[1, 1, tokens, tokens]`, which stock models read too."""
    numbers = numbers_of(docs)
    mask = (numbers[:, None] == numbers).tril()[None, None]
    return with_positions(docs) | {"attention_mask": mask}


def dense_step() -> list[Batch]:
    return [dense(docs) | {"labels": labels_of(docs)[None]} for docs in (FIRST_DOCS, SECOND_DOCS)]


def mean_of_squares(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Compute a loss of a user's own."""
    real = labels[..., 1:] != -100
    losses = outputs.logits[..., :-1, :].logsumexp(-1)[real] ** 2
    return losses.sum() / num_items_in_batch


OPTIONS: dict[str, dict[str, Any]] = {
    "mixed precision": dict(bf16=True),  # its wrappers; weights of float64 stay as they are
    "checkpoints": dict(gradient_checkpointing=True),
    "reentrant checkpoints": dict(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
    ),
    "a cache": dict(use_cache=True),
    "label smoothing": dict(label_smoothing_factor=0.1),
    "a loss of one's own": dict(compute_loss_func=mean_of_squares),
    "other columns": dict(remove_unused_columns=False, label_names=["labels"]),
    "four batches in a step": dict(gradient_accumulation_steps=4),
    "workers": dict(dataloader_num_workers=1),
}


@pytest.mark.parametrize("how", [full("cuseq"), full("enabled"), "trainer"])
@pytest.mark.parametrize(
    "option", full_but(OPTIONS, "mixed precision", "checkpoints", "a cache", "label smoothing")
)
def test_options_of_a_trainer_keep_documents_apart(option, how, tmp_path):
    options = OPTIONS[option]
    each = options.get("gradient_accumulation_steps", 2) // 2
    theirs = make_trainer(make_model("qwen3"), dense_step() * each, tmp_path, **options)
    (expected,) = train(theirs)
    batches = [batch for describe in DESCRIPTIONS.values() for batch in step_of(describe) * each]
    trainer = make_trainer(make_model("qwen3", how), batches, tmp_path, how, **options)
    check_steps(train(trainer), list(DESCRIPTIONS), expected)


@pytest.mark.full
@pytest.mark.parametrize("description", DESCRIPTIONS)
def test_a_compiled_trainer_keeps_documents_apart(description, tmp_path):
    torch._dynamo.reset()
    options = dict(torch_compile=True, torch_compile_backend="eager")
    batches = step_of(DESCRIPTIONS[description])
    trainer = make_trainer(make_model("qwen3"), batches, tmp_path, "trainer", **options)
    check_steps(train(trainer), [description], documents_one_by_one("qwen3"))
    torch._dynamo.reset()


@pytest.mark.parametrize("name, how", grid(("opt", "trainer"), ("qwen2_vl", "cuseq")))
def test_each_description_is_evaluated_apart(name, how, tmp_path):
    stock = make_model(name)
    with torch.no_grad():
        logits = torch.cat([stock(doc, use_cache=False).logits[0] for doc in FIRST_DOCS])
    labels = labels_of(FIRST_DOCS)
    loss = nn.functional.cross_entropy(logits[:-1].float(), labels[1:])
    batches = [step_of(describe)[0] for describe in DESCRIPTIONS.values()]
    trainer = make_trainer(make_model(name, how), batches, tmp_path, how)
    failed = []
    for number, description in enumerate(DESCRIPTIONS):
        found = trainer.predict([{"input_ids": number}], ignore_keys=CACHE_NAMES)
        real = real_tokens(batches[number])
        predicted = torch.from_numpy(found.predictions)[real]
        if not torch.allclose(predicted, logits, rtol=1e-5, atol=1e-5):
            failed.append(f"{description}: logits")
        if not torch.equal(torch.from_numpy(found.label_ids)[real], labels):
            failed.append(f"{description}: labels")
        if found.metrics["test_loss"] != pytest.approx(loss.item(), rel=1e-5):
            failed.append(f"{description}: {found.metrics['test_loss']}")
    assert not failed, "\n".join(failed)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)


# ------------------------------------------------------------------------ batches without documents


@pytest.mark.parametrize("name, how", grid(("qwen3", "cuseq"), ("gpt2", "trainer")))
def test_batches_without_documents_are_those_of_the_model(name, how, tmp_path):
    batches = {
        description: batch | {"labels": batch["input_ids"].masked_fill(~real_tokens(batch), -100)}
        for description, batch in one_document().items()
        # Gemma 3 makes its masks before it has a cache, so that stock divides these documents.
        if name != "gemma3" or "with a cache" not in description
    }
    theirs, ours = (
        make_trainer(
            make_model(name, one), list(batches.values()), tmp_path, one,
            gradient_accumulation_steps=1,
        )
        for one in ("sdpa", how)
    )  # fmt: skip
    check_steps(train(ours), list(batches), train(theirs))
    for number in range(len(batches)):
        expected, found = (
            one.predict([{"input_ids": number}], ignore_keys=CACHE_NAMES) for one in (theirs, ours)
        )
        real = real_tokens(batches[list(batches)[number]])
        assert found.predictions[real] == pytest.approx(expected.predictions[real], abs=1e-5)
        assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-5)


# ------------------------------------------------------------------------------- others' collators


def examples() -> list[dict[str, list[int]]]:
    """Return the documents of a step as a dataset has them; the first batch has four."""
    return [
        {"input_ids": doc[0].tolist(), "labels": _labels_of(doc).tolist()}
        for doc in (*FIRST_DOCS, *SECOND_DOCS)
    ]


def joined(chosen: list[dict[str, list[int]]]) -> tuple[Documents, Batch]:
    docs = [torch.tensor([one["input_ids"]]) for one in chosen]
    return docs, {"labels": torch.tensor([sum((one["labels"] for one in chosen), [])])}


def axolotl(chosen: list[dict[str, list[int]]]) -> Batch:
    """Number the documents in the mask, beside positions that begin again, and pad the row."""
    docs, labels = joined(chosen)
    row = with_positions(docs) | {"attention_mask": numbers_of(docs)[None] + 1} | labels
    fills = {"labels": -100}
    return {n: nn.functional.pad(v, (0, 4), value=fills.get(n, 0)) for n, v in row.items()}


def llama_factory(chosen: list[dict[str, list[int]]]) -> Batch:
    """Make a mask `[1, 1, tokens, tokens]` of floats, beside positions that begin again."""
    docs, labels = joined(chosen)
    allowed = dense(docs)["attention_mask"]
    mask = torch.zeros(allowed.shape, dtype=torch.float64)
    return dense(docs) | {"attention_mask": mask.masked_fill(~allowed, -torch.inf)} | labels


def verl(chosen: list[dict[str, list[int]]]) -> Batch:
    """Lay a mask of ones beside positions that begin again."""
    docs, labels = joined(chosen)
    return restarting("none", docs) | labels


def shifted(chosen: list[dict[str, list[int]]]) -> Batch:
    """Shift the labels already; those in their own place are of no use."""
    docs, labels = joined(chosen)
    moved = nn.functional.pad(labels["labels"][:, 1:], (0, 1), value=-100)
    return with_positions(docs) | labels | {"shift_labels": moved}


def trl(chosen: list[dict[str, list[int]]]) -> Batch:
    pytest.importorskip("trl")
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=8)(
        chosen
    )


def flattening(**options: Any) -> Callable[[list[dict[str, list[int]]]], Batch]:
    def collate(chosen: list[dict[str, list[int]]]) -> Batch:
        known = inspect.signature(transformers.DataCollatorWithFlattening.__init__).parameters
        if not set(options) <= set(known):
            pytest.skip(
                f"transformers {transformers.__version__} lacks {set(options) - set(known)}"
            )
        return transformers.DataCollatorWithFlattening(**options)(chosen)

    return collate


COLLATORS: dict[str, Callable[[list[dict[str, list[int]]]], Batch]] = {
    "flattening": flattening(),
    "flattening with numbers": flattening(return_seq_idx=True),
    "flattening with offsets": flattening(return_flash_attn_kwargs=True),
    "flattening with both": flattening(return_seq_idx=True, return_flash_attn_kwargs=True),
    "flattening with numbers alone": flattening(return_position_ids=False, return_seq_idx=True),
    "flattening with offsets alone": flattening(
        return_position_ids=False, return_flash_attn_kwargs=True
    ),
    "flattening from position 2": flattening(position_ids_start=2),
    "axolotl": axolotl,
    "LLaMA-Factory": llama_factory,
    "verl": verl,
    "shifted labels": shifted,
    "TRL": trl,
    "cuseq": cuseq.PackingCollator(),
    "cuseq with a tail": cuseq.PackingCollator(total_multiple=16),
}


@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize("name, how", grid(("qwen3", "cuseq"), ("qwen3", "trainer")))
def test_collators_of_others_keep_documents_apart(name, collator, how, tmp_path):
    if name in ("gpt2", "opt") and collator == "flattening from position 2":
        pytest.skip("the model embeds other positions than those of the documents")
    if name in ("qwen3_next", "mistral", "gemma3") and collator == "LLaMA-Factory":
        pytest.skip(
            "a 4-D mask is used as it is: no window in it, and no layer with a state reads it"
        )
    expected = documents_one_by_one(name)
    trainer = make_trainer(make_model(name, how), [], tmp_path, per_device_train_batch_size=4)
    trainer.train_dataset, trainer.data_collator = examples(), COLLATORS[collator]
    if how == "trainer":
        enable(trainer)
    check_steps(train(trainer), [collator], expected)


def test_labels_across_documents_are_the_collators_own(tmp_path):
    """As in transformers, the last token of a document predicts a label that is not masked."""
    described, expected = (
        [row(docs) | {"labels": torch.cat(docs, dim=1)} for docs in (FIRST_DOCS, SECOND_DOCS)]
        for row in (with_positions, dense)
    )
    steps = [
        train(make_trainer(make_model("qwen3", how), batches, tmp_path))
        for how, batches in (("enabled", described), ("sdpa", expected))
    ]
    check_steps(steps[0], ["labels"], steps[1])


# ------------------------------------------------------------------------------- heads that pool

LABELS = torch.tensor([2, 0, 1, 1]), torch.tensor([1, 2, 0])


def padded(docs: Documents) -> Batch:
    ids = nn.utils.rnn.pad_sequence([doc[0] for doc in docs], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def scored(describe: Callable[[Documents], Batch]) -> list[Batch]:
    """Return the two batches of a step, with one label for each document."""
    docs = FIRST_DOCS, SECOND_DOCS
    return [describe(one) | {"labels": labels} for one, labels in zip(docs, LABELS, strict=True)]


SCORED = [
    ("qwen3", "none"),
    ("qwen3", "mixed precision"),
    *(full("qwen3", one) for one in ("checkpoints", "label smoothing", "four batches in a step")),
    *(full(name, "none") for name in ("gpt2", "gptj", "opt")),
]


@pytest.mark.parametrize("name, option", SCORED)
@pytest.mark.parametrize("how", [full("enabled"), "trainer"])
def test_a_trainer_scores_each_document(how, name, option, tmp_path):
    options = OPTIONS.get(option, {})
    each = options.get("gradient_accumulation_steps", 2) // 2
    theirs = make_trainer(make_classifier(name), scored(padded) * each, tmp_path, **options)
    (expected,) = train(theirs)
    model = make_classifier(name)
    if how == "enabled":
        enable(model)
    batches = [batch for one in DESCRIPTIONS.values() for batch in scored(one) * each]
    ours = make_trainer(model, batches, tmp_path, how, **options)
    assert ours.model_accepts_loss_kwargs == theirs.model_accepts_loss_kwargs
    check_steps(train(ours), list(DESCRIPTIONS), expected)
    predicted = theirs.predict([{"input_ids": 0}])
    for number in (0, list(DESCRIPTIONS).index("rows of several documents")):
        found = ours.predict([{"input_ids": 2 * each * number}])
        assert found.predictions == pytest.approx(predicted.predictions, abs=1e-5)
        assert (found.label_ids == predicted.label_ids).all()
        assert found.metrics["test_loss"] == pytest.approx(predicted.metrics["test_loss"], rel=1e-5)


def test_a_head_that_is_wrapped_already_says_so(tmp_path):
    """After mixed precision has wrapped the model, its forward cannot be replaced."""
    trainer = make_trainer(make_classifier("qwen3"), scored(padded), tmp_path, bf16=True)
    train(trainer)
    trainer.data_collator = lambda chosen: scored(DESCRIPTIONS["packed"])[0]
    cuseq.enable(trainer)
    with pytest.raises(ValueError, match="gives one result for .* before mixed precision wraps"):
        trainer.train()


# --------------------------------------------------------------------- what a Trainer does itself


@pytest.mark.parametrize("kind", ["all", "non_padding"])
def test_the_tokens_of_each_description_are_counted(kind, tmp_path):
    options = dict(include_num_input_tokens_seen=kind)
    trainer = make_trainer(make_model("qwen3"), all_descriptions(), tmp_path, "trainer", **options)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    seen = torch.tensor([0, *(log["num_input_tokens_seen"] for log in logs)]).diff()
    batches = zip(*[iter(all_descriptions())] * 2, strict=True)
    expected = [
        sum(int(real_tokens(one).sum()) if kind == "non_padding" else one["labels"].numel()
            for one in step)
        for step in batches
    ]  # fmt: skip
    assert dict(zip(DESCRIPTIONS, seen.tolist(), strict=True)) == dict(
        zip(DESCRIPTIONS, expected, strict=True)
    )


class Table(list):
    """Rows with the names of their columns, as `datasets.Dataset` has them."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0])


@pytest.mark.parametrize("kind", [list, Table])
def test_columns_that_a_trainer_drops_are_said(kind, tmp_path):
    def rows(docs: Documents) -> list[int]:
        return {name: value[0] for name, value in step_of_one(docs).items()}

    def step_of_one(docs: Documents) -> Batch:
        return with_labels(DESCRIPTIONS["document_ids"](docs), docs)

    def trainer(**options: Any) -> transformers.Trainer:
        made = make_trainer(make_model("qwen3"), [], tmp_path, **options)
        made.train_dataset = kind([rows(docs) for docs in (FIRST_DOCS, SECOND_DOCS)])
        made.data_collator = transformers.default_data_collator
        return made

    with pytest.warns(UserWarning, match="LEAKS if document_ids of .* remove_unused_columns=False"):
        enabled = cuseq.enable(trainer())
    assert enabled.warnings[0].startswith("LEAKS if document_ids of the dataset")
    kept = trainer(remove_unused_columns=False)
    assert enable(kept).warnings == ()
    check_steps(train(kept), ["document_ids"], documents_one_by_one("qwen3"))
    packs = trainer()
    packs.data_collator = cuseq.PackingCollator()
    assert enable(packs).warnings == ()


# ----------------------------------------------------------------------------------------- TRL

PACKED_BY_TRL = {
    "padding-free": dict(padding_free=True, max_length=None),
    "packed": dict(packing=True, max_length=32),
    "padded": dict(),
}


@pytest.fixture
def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(64)}
    model = tokenizers.models.WordLevel(words, unk_token="w1")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), eos_token="w2", pad_token="w0"
    )


def make_sft(model: nn.Module, tokenizer: Any, folder: Any, **options: Any) -> Any:
    """Return an SFTTrainer of a step's documents, in one step."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    settings = dict(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
    )
    collator = options.pop("data_collator", None)
    dataset = datasets.Dataset.from_list(examples())
    return trl.SFTTrainer(
        model,
        trl.SFTConfig(str(folder), **(STILL | settings | options)),
        data_collator=collator,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[Gradients()],
    )


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("rows", PACKED_BY_TRL)
def test_trl_trains_the_documents_apart(rows, how, tokenizer, tmp_path):
    options = dict(PACKED_BY_TRL[rows])
    if rows == "packed":  # all documents are one row
        options |= dict(per_device_train_batch_size=1, gradient_accumulation_steps=1)
    trainer = make_sft(make_model("qwen3", how), tokenizer, tmp_path, **options)
    if how == "trainer" and rows == "padded":
        with pytest.raises(ValueError, match="got padded batches"):
            cuseq.enable(trainer)
        return
    if how == "trainer":
        enable(trainer)
    check_steps(train(trainer), [rows], documents_one_by_one("qwen3"))


@pytest.mark.parametrize("how", [full("cuseq"), "enabled"])
@pytest.mark.parametrize("collator", full_but(COLLATORS, "axolotl", "flattening with both"))
def test_trl_takes_the_collators_of_others(collator, how, tokenizer, tmp_path):
    model = make_model("qwen3", how)
    options = dict(data_collator=COLLATORS[collator], remove_unused_columns=False)
    trainer = make_sft(model, tokenizer, tmp_path, **options)
    if collator.endswith("alone"):  # an SFTTrainer counts tokens by positions
        with pytest.raises(ValueError, match="Expected 'attention_mask' or 'position_ids'"):
            trainer.train()
        return
    check_steps(train(trainer), [collator], documents_one_by_one("qwen3"))


@pytest.mark.parametrize("kind", ["DPO", "Reward"])
def test_pairs_of_trl_are_those_of_the_model(kind, tokenizer, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rows = [
        {"prompt": f"w{i} w5", "chosen": " w7 w8" * (i - 2), "rejected": " w9"} for i in (3, 4, 5)
    ]

    def run(how: str) -> list[Step]:
        model = make_model("qwen3") if kind == "DPO" else make_classifier_of_pairs()
        if how:
            enable(model)
        settings = dict(
            per_device_train_batch_size=3, max_steps=1, learning_rate=0.0, max_grad_norm=0.0,
            optim="sgd", logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
            use_cpu=True, bf16=False, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = getattr(trl, f"{kind}Trainer")(
            model,
            **({"ref_model": make_model("qwen3")} if kind == "DPO" else {}),
            args=getattr(trl, f"{kind}Config")(str(tmp_path), **settings),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Gradients()],
        )
        return train(trainer)

    (expected,), found = run(""), run("enabled")
    assert any(one is not None and one.abs().max() > 0 for one in expected.gradients)
    check_steps(found, [kind], expected)


def make_classifier_of_pairs() -> nn.Module:
    model = make_classifier("qwen3")
    model.score = nn.Linear(32, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.score.weight, 0.1)
    model.config.num_labels = model.num_labels = 1
    return model
