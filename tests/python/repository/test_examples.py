"""Test the examples in one process: what they train, what they print, and mistakes of users."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from example_modules import EXAMPLES, imported, run

import cuseq

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
pytest.importorskip("accelerate")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

PNG = b"\x89PNG\r\n\x1a\n"
SIZES = dict(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=512,
)  # fmt: skip
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's defaults are tested")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Keep the tables of `datasets` in a folder of this module."""
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Return a folder of JSONL, Parquet, and files that are empty, not in UTF-8 or long."""
    folder = tmp_path_factory.mktemp("texts")
    lines = [json.dumps({"text": f"{i} green bottles. " * (i % 7 + 1)}) for i in range(150)]
    (folder / "bottles.jsonl").write_text("\n".join(lines))
    rows = datasets.Dataset.from_dict({"text": ["ten red bottles", " "], "id": [1, 2]})
    rows.to_parquet(str(folder / "red.parquet"))
    (folder / "empty.txt").touch()
    (folder / "long.md").write_text("".join(f"{i} bottles of beer. " for i in range(300)))
    (folder / "latin1.txt").write_bytes("fünf Flaschen".encode("latin-1"))
    (folder / "picture.png").write_bytes(PNG)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    transformers.Qwen3Config(**SIZES).save_pretrained(folder)
    return folder


@pytest.fixture
def inputs(texts, model) -> list[object]:
    return ["--data", texts, "--model", model / "config.json", "--row_length", 256]


@ON_CPU
def test_compare(inputs, tmp_path, capsys):
    run("compare", *inputs, "--steps", 4, "--warmup", 1, "--out", tmp_path / "made")
    said = capsys.readouterr().out
    assert "Skipped, without text or not in UTF-8: 3." in said
    assert "Documents: 152 from" in said and "with longer ones cut" in said
    results = json.loads((tmp_path / "made" / "compare.json").read_text())
    runs = {one["way"]: one for one in results["runs"]}
    assert list(runs) == ["padded", "packed", "cuseq"]
    assert results["options"]["row_length"] == 256
    losses = runs["packed"]["losses"]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert runs["cuseq"]["losses"] == pytest.approx(losses, rel=1e-5)
    assert runs["padded"]["losses"] == pytest.approx(losses, rel=1e-4)
    assert runs["padded"]["padding"] > 0 == runs["cuseq"]["padding"]
    for one in runs.values():
        assert f"{one['tokens_per_second']:,.0f}" in said
    assert (tmp_path / "made" / "compare.png").read_bytes().startswith(PNG)


@ON_CPU
def test_the_same_rows_whatever_is_compared(inputs, tmp_path):
    losses = []
    for ways in (["packed"], ["cuseq", "packed"]):
        run("compare", *inputs, "--steps", 2, "--warmup", 0, "--out", tmp_path, "--ways", *ways)
        runs = json.loads((tmp_path / "compare.json").read_text())["runs"]
        assert [one["way"] for one in runs] == ways
        losses += [one["losses"] for one in runs]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


@ON_CPU
def test_an_interrupt_reports_what_was_measured(inputs, tmp_path, capsys, monkeypatch):
    with imported("compare") as example:
        batches = example.batches_of
        made = []

        def interrupted(*given):
            made.append(given)
            if len(made) == 3:
                raise KeyboardInterrupt
            return batches(*given)

        monkeypatch.setattr(example, "batches_of", interrupted)
        options = [*inputs, "--warmup", 1, "--ways", "packed", "cuseq", "--out", tmp_path]
        monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, options)])
        example.main()
    assert "Stopped early." in capsys.readouterr().out
    (one,) = json.loads((tmp_path / "compare.json").read_text())["runs"]
    assert len(one["losses"]) == 2 and one["tokens_per_second"] > 0


def written(folder: Path, name: str, content: str | bytes) -> Path:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "nowhere"], "--data nowhere: no such file or folder"),
        (["--model", "nowhere/at all"], "--model nowhere/at all: cannot be loaded ("),
        (["--longest", "9999", "--row_length", "512"], "--longest must be from 2 to --row_length"),
        (["--steps", "2", "--warmup", "2"], "--warmup must be below --steps (2), got 2"),
        (["--batch_size", "0"], "--batch_size must be at least 1, got 0"),
        (["--out", "/dev/null/out"], "--out /dev/null/out: cannot be made (Not a directory)"),
    ],
)
def test_a_bad_option_is_named(options, message, texts, tmp_path):
    with pytest.raises(SystemExit) as raised:
        run("compare", "--data", texts, "--out", tmp_path, *options)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("option", ["--steps", "--answer"])
def test_a_count_below_one_is_named(option):
    with pytest.raises(SystemExit, match=f"^{option} must be at least 1, got 0$"):
        run("trees", option, 0)


@pytest.mark.parametrize(("name", "option"), [("trees", "--pairs"), ("trl_sft", "--conversations")])
def test_texts_without_a_tokenizer_are_told_of_it(name, option, model, tmp_path):
    file = written(
        tmp_path, "a.jsonl", '{"prompt": "a", "chosen": "b", "rejected": "c", "completion": "d"}\n'
    )
    out = ["--output_dir", tmp_path / "run"] if name == "trl_sft" else []
    for given, said in [
        ([], f"{option} needs a --model with a tokenizer, got None"),
        (["--model", model], f"{option} needs a --model with a tokenizer, got {model}"),
        (["--model", "nowhere/at all"], "--model nowhere/at all: cannot be loaded ("),
    ]:
        with pytest.raises(SystemExit) as raised:
            run(name, option, file, *given, *out)
        assert str(raised.value).startswith(said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"prompt": "a", "chosen": "b"}\n', "row 0 must have texts prompt, chosen and rejected"),
        ('{"prompt": "a", "chosen": null, "rejected": "c"}\n', "row 0 must have texts prompt"),
        ('{"prompt": "a", "chosen": "", "rejected": "c"}\n', "row 0 must have texts prompt"),
        ("", "has no rows"),
        (None, "has no rows"),
    ],
)
def test_bad_pairs_are_named(content, said, texts, model, tmp_path):
    with imported("_inputs") as inputs:
        tokenizer = inputs.tokenizer_of(None, inputs.read_texts(str(texts)))
    tokenizer.save_pretrained(tmp_path / "model")
    transformers.Qwen3Config(**SIZES | {"vocab_size": 4096}).save_pretrained(tmp_path / "model")
    file = tmp_path / ("a.parquet" if content is None else "a.jsonl")
    if content is None:
        datasets.Dataset.from_dict({"prompt": [], "chosen": [], "rejected": []}).to_parquet(file)
    else:
        file.write_text(content)
    with pytest.raises(SystemExit, match=f"^--pairs {file}: {said}"):
        run("trees", "--pairs", file, "--model", tmp_path / "model")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"body": "a"}\n', "--conversations .*a.jsonl: must have the column messages, or prompt"),
        ('{"messages": []}\n', "--model .*: its tokenizer needs a chat template"),
    ],
)
def test_bad_conversations_are_named(content, said, texts, tmp_path):
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    with imported("_inputs") as inputs:
        tokenizer = inputs.tokenizer_of(None, inputs.read_texts(str(texts)))
    tokenizer.save_pretrained(tmp_path / "model")
    file = written(tmp_path, "a.jsonl", content)
    with pytest.raises(SystemExit, match=f"^{said}"):
        run("trl_sft", "--conversations", file, "--model", tmp_path / "model", "--output_dir",
            tmp_path / "run")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("trl_sft", ["--lora", -1], "--lora must be at least 0, got -1"),
        ("trl_sft", ["--resume_from_checkpoint", "no"], "--resume_from_checkpoint no: no whole"),
        ("compare", ["--row_length", 0], "--row_length must be at least 1, got 0"),
    ],
)
def test_values_that_cannot_be_are_named(name, options, said, inputs, tmp_path, monkeypatch):
    if name == "trl_sft":
        pytest.importorskip("trl")
        pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"^{said}"):
        run(name, *inputs, *options)


@pytest.mark.parametrize("name", ["compare", "trainer", "fsdp2", "trees", "grpo", "images"])
def test_a_mistyped_option_is_named(name, capsys):
    if name == "grpo":
        pytest.importorskip("trl")
    with pytest.raises(SystemExit) as raised:
        run(name, "--rsume", "--stepz", 3)
    assert raised.value.code == 2
    assert "unrecognized arguments: --rsume --stepz 3" in capsys.readouterr().err


def test_a_config_with_a_wrong_value_is_named(inputs, tmp_path):
    config = json.loads((Path(inputs[3])).read_text()) | {"hidden_size": "x"}
    file = written(tmp_path, "config.json", json.dumps(config))
    with pytest.raises(SystemExit, match=f"^--model {file}: cannot be loaded"):
        run("compare", "--data", inputs[1], "--model", file, "--out", tmp_path)


@pytest.mark.parametrize(
    ("name", "resumes"),
    [("compare", False), ("trainer", False), ("trl_sft", False), ("trl_sft", True)],
)
def test_a_folder_that_another_run_writes_to_is_named(name, resumes, inputs, tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").touch()
    more = ["--resume_from_checkpoint", tmp_path / "checkpoint-1"] if resumes else []
    script = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX);"
        "print(flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path / ".lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    other.stdout.readline()
    option = "--out" if name == "compare" else "--output_dir"
    try:
        with pytest.raises(SystemExit, match=f"^{option} .*: another run writes there now"):
            run(name, *inputs, option, tmp_path, *more)
    finally:
        other.communicate()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_disk_is_named(wrapped, inputs, monkeypatch, tmp_path):
    def full(*given, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_of_rows(*given, **options):
        try:
            full()
        except OSError as error:
            raise datasets.exceptions.DatasetGenerationError("of a data set") from error

    if wrapped:
        monkeypatch.setattr(datasets, "load_dataset", full_of_rows)
    else:
        monkeypatch.setattr(datasets.Dataset, "map", full)
    with pytest.raises(SystemExit, match="no space left for tokens: HF_DATASETS_CACHE names"):
        run("compare", *inputs, "--out", tmp_path)


@pytest.mark.parametrize("options", [("--longer", "cut"), ("--ways", "packed", "fast")])
def test_choices_are_named(options, texts, capsys):
    with pytest.raises(SystemExit):
        run("compare", "--data", texts, *options)
    assert f"{options[0]}: invalid choice: '{options[-1]}' (choose from " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "fine"}\n{"text": "cut', "cannot be read (JSON parse error"),
        ("a.jsonl", '{"text": "a lone \\ud800"}\n', "cannot be read (JSON parse error"),
        ("a.jsonl", '{"body": "x"}\n', 'must have a column "text" of strings, has'),
        ("a.jsonl", '{"text": 3}\n', 'must have a column "text" of strings, has'),
        ("a.parquet", b"PAR1 and no more", "cannot be read ("),
    ],
)
def test_a_bad_file_is_named(name, content, message, tmp_path):
    file = written(tmp_path, name, content)
    with pytest.raises(SystemExit) as raised:
        run("compare", "--data", tmp_path, "--out", tmp_path / "out")
    assert str(raised.value).startswith(f"{file}: {message}")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("picture.png", PNG, "no file there ends in"),
        ("a.jsonl", "", "no text in 1 files"),
        ("a.parquet", None, "no text in 1 files"),
        ("a.txt", " \n", "no text in 1 files"),
        ("a.txt", "more than two tokens", "no text of 2 to"),
    ],
)
def test_data_without_text_is_named(name, content, message, model, tmp_path):
    if content is None:  # a table without rows
        datasets.Dataset.from_dict({"text": []}).to_parquet(tmp_path / name)
    else:
        written(tmp_path, name, content)
    with pytest.raises(SystemExit, match=message):
        run("compare", "--data", tmp_path, "--model", model / "config.json", "--longer", "drop",
            "--longest", 2, "--out", tmp_path / "out")  # fmt: skip


def test_a_model_that_is_too_small_for_its_tokenizer_is_named(texts, model, tmp_path):
    with imported("_inputs") as example:
        rows = example.read_texts(str(texts))
        tokenizer = example.tokenizer_of(None, rows)
        assert len(tokenizer) > 300
        config = transformers.Qwen3Config(**SIZES)
        config.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        given = example.Inputs(data=str(texts), model=str(tmp_path))
        with pytest.raises(SystemExit, match=f"must hold the {len(tokenizer)} tokens .* got 300"):
            example.make_model(given, len(example.tokenizer_of(str(tmp_path), rows)))


def test_a_folder_with_weights_is_trained_from_them(texts, tmp_path):
    """Whatever their file is called; in fp32, whatever they were saved in."""
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3Config(**SIZES), dtype=torch.bfloat16
    )
    torch.save(made.state_dict(), tmp_path / "pytorch_model.bin")
    made.config.save_pretrained(tmp_path)
    with imported("_inputs") as example:
        given = example.Inputs(data=str(texts), model=str(tmp_path))
        found = example.make_model(given, 300)
        with pytest.raises(SystemExit, match="it has weights and no tokenizer"):
            example.load(given)
    weight = made.get_input_embeddings().weight.float()
    torch.testing.assert_close(found.get_input_embeddings().weight, weight, rtol=0, atol=0)
    assert found.dtype == torch.float32


def test_a_text_that_is_too_long_to_tokenise_is_dropped_whole(model, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("bottles " * 40)
    (tmp_path / "b.txt").write_text("ten green bottles")
    with imported("_inputs") as example:
        monkeypatch.setattr(example, "MOST_CHARACTERS", 100)
        given = dict(data=str(tmp_path), model=str(model / "config.json"), longest=32)
        dropped, _ = example.load(example.Inputs(**given, longer="drop"))
        cut, _ = example.load(example.Inputs(**given, longer="split"))
    assert len(dropped) == 1 and len(cut) > 4


def test_few_long_texts_are_tokenised_together(model, tmp_path, monkeypatch):
    (tmp_path / "long.txt").write_text("a few words. " * 500)
    calls = []
    with imported("_inputs") as example:
        monkeypatch.setattr(example, "MOST_CHARACTERS", 100)
        monkeypatch.setattr(example, "AT_ONCE", 400)
        found = example.tokenizer_of(None, example.read_texts(str(tmp_path)))

        def noted(texts, **options):
            calls.append(sum(map(len, texts)))
            return found(texts, **options)

        noted.eos_token_id = found.eos_token_id
        monkeypatch.setattr(example, "tokenizer_of", lambda *given: noted)
        example.load(example.Inputs(data=str(tmp_path), row_length=64))
    assert max(calls) <= 400 and sum(calls) == 6500


@pytest.mark.parametrize("name", ["trainer", "trl_sft", "compare"])
def test_a_folder_that_cannot_be_made_is_named(name, inputs, tmp_path):
    (tmp_path / "file").write_text("")
    option = "--out" if name == "compare" else "--output_dir"
    with pytest.raises(SystemExit, match=f"{option} .*file/run: cannot be made"):
        run(name, *inputs, option, tmp_path / "file" / "run")


def test_long_documents_are_cut_or_dropped(texts, model):
    with imported("_inputs") as example:
        given = dict(data=str(texts), model=str(model / "config.json"), row_length=64)
        cut, tokenizer = example.load(example.Inputs(**given))
        dropped, _ = example.load(example.Inputs(**given, longer="drop"))
        whole = [tokenizer(text)["input_ids"] for text in example.read_texts(str(texts))["text"]]
    end = tokenizer.eos_token_id
    assert sum(cut["length"]) == sum(len(ids) + 1 for ids in whole)
    assert max(cut["length"]) == 64
    assert dropped["input_ids"][:] == [[*ids, end] for ids in whole if len(ids) < 64]


def test_trees_share_their_prompts(inputs, capsys):
    run("trees", *inputs, "--steps", 3, "--batch_size", 2, "--prompt", 12, "--answer", 4)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(lines) == 3 and "loss 0.6931" in lines[0]
    assert all("40 tokens instead of 64" in line for line in lines)


def test_trees_have_the_losses_of_pairs(inputs, model):
    with imported("trees") as example:
        config = transformers.Qwen3Config(**SIZES)
        torch.manual_seed(0)
        policy = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        pairs = [([5, 6, 7], [[8, 9], [4]]), ([3], [[2, 1], [7, 7, 7]])]
        expected = []
        for prompt, answers in pairs:
            for answer in answers:
                logits = policy(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
                at = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
                expected.append(sum(logits[i, token] for i, token in zip(at, answer, strict=True)))
        cuseq.enable(policy)
        found = example.logprobs(policy, cuseq.PackedTree.from_groups(*zip(*pairs, strict=True)))
    torch.testing.assert_close(found.flatten(), torch.stack(expected), rtol=1e-5, atol=1e-5)


@ON_CPU
def test_trainer_writes_a_model_that_loads(inputs, tmp_path, capsys):
    run("trainer", *inputs, "--max_steps", 3, "--output_dir", tmp_path / "run", "--save_steps", 2)
    said = capsys.readouterr().out
    assert "rows, full ones of one cost on every rank: Trainer" in said
    assert "real_tokens_per_second" in said
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert loaded.config.vocab_size == 300
    with pytest.raises(SystemExit, match="has checkpoints of another run: --resume goes on"):
        run("trainer", *inputs, "--max_steps", 3, "--output_dir", tmp_path / "run")
    resumed = ["--max_steps", 4, "--output_dir", tmp_path / "run", "--resume"]
    with pytest.raises(SystemExit, match="must have the rows of before, .*128"):
        run("trainer", *inputs[:-1], 128, *resumed)
    with pytest.raises(SystemExit, match="must have the rows of before, .*texts_and_tokenizer"):
        run("trainer", *inputs, "--longest", 200, *resumed)
    larger = transformers.Qwen3Config(**SIZES | {"num_hidden_layers": 3})
    larger.save_pretrained(tmp_path / "larger")
    with pytest.raises(SystemExit, match="must have the rows of before, .*weights"):
        run(
            "trainer",
            *inputs[:2],
            "--model",
            tmp_path / "larger/config.json",
            *inputs[4:],
            *resumed,
        )
    run("trainer", *inputs, *resumed)
    run("trainer", *inputs, *resumed)
    assert "has made 4 of 4 steps already" in capsys.readouterr().out
    state = json.loads((tmp_path / "run/checkpoint-4/trainer_state.json").read_text())
    assert state["global_step"] == 4
    with pytest.raises(SystemExit, match="--resume: .* has no checkpoint"):
        run("trainer", *inputs, "--output_dir", tmp_path / "other", "--resume")


@pytest.mark.slow
@ON_CPU
@pytest.mark.parametrize("kind", ["documents", "conversations"])
def test_sft(kind, texts, inputs, tmp_path, capsys):
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    options = [*inputs, "--lora", 4]
    if kind == "conversations":
        with imported("_inputs") as example:
            tokenizer = example.tokenizer_of(None, example.read_texts(str(texts)))
        tokenizer.chat_template = (
            "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
        )
        transformers.Qwen3Config(**SIZES | {"vocab_size": 4096}).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        chats = [
            {"messages": [{"role": "user", "content": f"{i} bottles?"},
                          {"role": "assistant", "content": "green. " * (i % 5 + 1)}]}
            for i in range(200)
        ]  # fmt: skip
        lines = "\n".join(map(json.dumps, chats))
        file = written(tmp_path, "chats.jsonl", lines)
        options = ["--model", tmp_path, "--conversations", file, "--row_length", 256]
    run("trl_sft", *options, "--max_steps", 2, "--output_dir", tmp_path / "run")
    said = capsys.readouterr().out
    assert "data collator" in said and "Written: the model and its tokenizer" in said
    for number in (1, 2):
        (tmp_path / "run" / f"checkpoint-{number}").mkdir(exist_ok=True)
        (tmp_path / "run" / f"checkpoint-{number}" / "trainer_state.json").touch()
    with pytest.raises(SystemExit, match="of another run: --resume_from_checkpoint PATH goes on"):
        run("trl_sft", *options, "--output_dir", tmp_path / "run")
    assert (tmp_path / "run" / "model" / "adapter_config.json").exists() == (kind == "documents")


@pytest.mark.slow
@ON_CPU
def test_a_signal_ends_sft_with_a_checkpoint(inputs, tmp_path, capsys, monkeypatch):
    trl = pytest.importorskip("trl")
    pytest.importorskip("peft")
    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    step = trl.SFTTrainer.training_step

    def signalled(self, *given, **options):
        if self.state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *given, **options)

    monkeypatch.setattr(trl.SFTTrainer, "training_step", signalled)
    try:
        run("trl_sft", *inputs, "--max_steps", 9, "--output_dir", tmp_path)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "after step 2; --resume_from_checkpoint goes on" in capsys.readouterr().out
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").is_file()


@pytest.mark.parametrize("name", ["compare", "trainer", "trl_sft", "fsdp2", "trees"])
def test_help_names_every_option(name, capsys):
    if name == "trl_sft":
        pytest.importorskip("trl")
        pytest.importorskip("peft")
    with pytest.raises(SystemExit) as raised:
        run(name, "--help")
    assert raised.value.code == 0
    said = capsys.readouterr().out
    named = {"trainer": ["--cp", "--resume", "--save_steps", "--fsdp_config", "--max_steps"],
             "trl_sft": ["--conversations", "--lora", "--assistant_only_loss"],
             "fsdp2": ["--cp", "--resume", "--save_every", "--accumulation"]}  # fmt: skip
    for option in ["--data", "--model", "--row_length", *named.get(name, [])]:
        assert option in said
    commands = (EXAMPLES / f"{name}.py").read_text().split('"""')[1]
    assert commands in said  # its lines as they are
    assert not re.search(r"\(default: [^)]*\)\s+\(default: ", said)


# -------------------------------------------------------------------------------------- launchers


def stand_in(folder: Path, name: str, script: str) -> None:
    """Put a program of this name into a folder."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_the_slurm_script_starts_and_resumes(tmp_path):
    stand_in(
        tmp_path, "scontrol", '[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"'
    )
    options = "--cpus-per-task 32 --kill-on-bad-exit"
    stand_in(tmp_path, "srun", f'[ "$1 $2 $3" = "{options}" ] && exec "${{@:4}}"')
    (tmp_path / "srun").write_text((tmp_path / "srun").read_text().replace("/bin/sh", "/bin/bash"))
    own_store = '[ "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" = 1 ]'
    stand_in(tmp_path, "torchrun", f'{own_store} && printf "%s\\n" "$@"')
    job = {"NNODES": "2", "GPUS_ON_NODE": "8", "JOB_ID": "17", "JOB_NODELIST": "node[3-4]"}
    job["CPUS_PER_TASK"] = "32"
    environment = {f"SLURM_{name}": value for name, value in job.items()}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    out = tmp_path / "a run"

    def submit() -> list[str]:
        script = ["bash", str(EXAMPLES / "slurm.sh"), str(out), "--data", "my texts"]
        return subprocess.run(
            script, env=environment, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    launch = "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id 17"
    launch = [*launch.split(), "--rdzv-endpoint", "node3:29500", "examples/trainer.py"]
    assert submit() == [*launch, "--output_dir", str(out), "--data", "my texts"]
    (out / "checkpoint-10").mkdir(parents=True)
    assert "--resume" not in submit()  # nothing whole yet
    (out / "checkpoint-10" / "trainer_state.json").touch()
    arguments = submit()
    assert arguments == [*launch, "--output_dir", str(out), "--resume", "--data", "my texts"]


@pytest.mark.parametrize(
    ("variables", "started"),
    [
        ([], "examples/compare.py"),
        (["NPROC=2"], "-m torch.distributed.run --standalone --nproc-per-node 2 "
                      "examples/trainer.py"),
    ],
)  # fmt: skip
def test_make_train_starts_an_example(variables, started):
    command = ["make", "--dry-run", "train", "VENV=env", "ARGS=--steps 3", *variables]
    # `make test` hands its own options and variables to every make below it.
    environment = {n: v for n, v in os.environ.items() if n not in ("MAKEFLAGS", "MAKELEVEL")}
    process = subprocess.run(
        command, cwd=EXAMPLES.parent, env=environment, capture_output=True, text=True, check=True
    )
    last = process.stdout.splitlines()[-1].split()
    assert last == ["env/bin/python", *started.split(), "--steps", "3"]


@pytest.mark.slow
def test_the_readmes_sft_trains(texts, tmp_path, monkeypatch, capsys):
    trl = pytest.importorskip("trl")
    page = (EXAMPLES.parent / "README.md").read_text()
    (code,) = re.findall(r"```python3\n(.*?)```", page, re.DOTALL)
    with imported("_inputs") as inputs:
        tokenizer = inputs.tokenizer_of(None, inputs.read_texts(str(texts)))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES | {"vocab_size": len(tokenizer)})
    ).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    chats = [
        {"messages": [{"role": "user", "content": f"{i} bottles?"},
                      {"role": "assistant", "content": "green. " * (i % 5 + 1)}]}
        for i in range(300)
    ]  # fmt: skip
    loaded = {"trl-lib/Capybara": datasets.Dataset.from_list(chats)}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: loaded.pop(name))
    on_cpu = {} if torch.cuda.is_available() else dict(use_cpu=True, bf16=False)
    monkeypatch.setattr(trl, "SFTConfig", partial(trl.SFTConfig, report_to="none", **on_cpu))
    monkeypatch.chdir(tmp_path)
    assert code.count("Qwen/Qwen3-0.6B") == 1
    code = code.replace("Qwen/Qwen3-0.6B", str(tmp_path / "model"))
    made = {}
    exec(compile(code, "README.md", "exec"), made)
    assert "data collator" in capsys.readouterr().out and loaded == {}
    assert made["trainer"].state.global_step > 0
    assert any("train_loss" in log for log in made["trainer"].state.log_history)


def test_the_quickstarts_script_goes_from_a_name_to_text(texts, tmp_path, monkeypatch, capsys):
    page = (EXAMPLES.parent / "docs" / "quickstart.md").read_text()
    (code,) = re.findall(r"```python3\n(.*?)```", page, re.DOTALL)
    name, data = "Qwen/Qwen3-0.6B", "roneneldan/TinyStories"
    with imported("_inputs") as inputs:
        tokenizer = inputs.tokenizer_of(None, inputs.read_texts(str(texts)))
    transformers.set_seed(0)
    transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES | {"vocab_size": len(tokenizer)})
    ).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert code.count(name) == code.count(data) == 1
    loaded = datasets.load_dataset

    def local(path: str, split: str) -> datasets.Dataset:
        assert path == data
        return loaded("json", data_files=str(texts / "bottles.jsonl"), split=split)

    monkeypatch.setattr(datasets, "load_dataset", local)
    monkeypatch.chdir(tmp_path)
    exec(compile(code.replace(name, str(tmp_path / "model")), "quickstart.md", "exec"), {})
    said = capsys.readouterr().out
    assert "eval_loss" in said and "train_loss" in said and "Once upon a time" in said
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
