"""Test the main function of examples/train.py: its results, and its handling of user mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tokenizers")
pytest.importorskip("tqdm")
pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[3] / "examples"
ROW_LENGTH = 256
TINY = [
    *("--device", "cpu"),
    *("--row-length", str(ROW_LENGTH)),
    *("--vocab-size", "300"),
    *("--batch-size", "4"),
]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def train():
    """Import the example as a module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import train
    finally:
        sys.path.remove(str(EXAMPLES))
    return train


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    """Return a folder of JSONL, text of several lengths, an empty, a long and a binary file."""
    folder = tmp_path_factory.mktemp("documents")
    lines = [json.dumps({"text": f"{i} green bottles. " * (i % 5 + 1)}) for i in range(40)]
    (folder / "bottles.jsonl").write_text("\n".join(lines) + "\n\n")
    (folder / "short.txt").write_text("One bottle.")
    (folder / "empty.txt").write_text(" \n")
    (folder / "long.md").write_text("".join(f"{i} bottles of beer. " for i in range(1000)))
    (folder / "latin1.txt").write_bytes("fünf Flaschen".encode("latin-1"))
    (folder / "picture.png").write_bytes(PNG_SIGNATURE)
    return folder


def command(*options: object) -> list[str]:
    return [sys.executable, str(EXAMPLES / "train.py"), *TINY, *map(str, options)]


@pytest.fixture(scope="module")
def finished(documents, tmp_path_factory) -> tuple[str, Path]:
    """Return standard output and output folder of one whole run."""
    out = tmp_path_factory.mktemp("out") / "made"
    process = subprocess.run(
        command("--data", documents, "--out", out, "--steps", 4, "--warmup", 1),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout, out


@pytest.fixture(scope="module")
def modes(finished) -> dict[str, dict]:
    """Return measurements of the whole run, by mode."""
    _, out = finished
    results = json.loads((out / "results.json").read_text())
    return {measurement["mode"]: measurement for measurement in results["modes"]}


def test_run_draws_a_picture(finished):
    _, out = finished
    assert (out / "results.png").read_bytes().startswith(PNG_SIGNATURE)


def test_run_says_what_it_did_with_every_document(finished):
    output, _ = finished
    assert "1 document without text skipped" in output
    assert "1 file not in UTF-8 skipped" in output
    assert f"1 document longer than {ROW_LENGTH} tokens split into" in output


def test_modes_train_on_the_same_tokens(modes):
    assert list(modes) == ["padded", "packed", "cuseq"]
    for name in ("padded", "cuseq"):
        assert modes[name]["real_tokens"] == modes["packed"]["real_tokens"]
        assert modes[name]["targets"] == modes["packed"]["targets"]
    assert modes["padded"]["padding_share"] > 0
    assert modes["packed"]["padding_share"] == modes["cuseq"]["padding_share"] == 0


def test_modes_have_the_same_losses(modes):
    assert len(modes["packed"]["losses"]) == 4
    assert modes["cuseq"]["losses"] == pytest.approx(modes["packed"]["losses"], rel=1e-5)
    assert modes["padded"]["losses"] == pytest.approx(modes["packed"]["losses"], rel=1e-4)
    assert modes["cuseq"]["losses"][-1] < modes["cuseq"]["losses"][0]


def test_modes_are_timed(modes, finished):
    output, _ = finished
    for measurement in modes.values():
        parts = measurement["forward_seconds"] + measurement["backward_seconds"]
        assert 0 < parts <= measurement["step_seconds"] * 1.5  # medians need not add up
        assert measurement["tokens_per_second"] > 0
        assert f"{measurement['tokens_per_second']:,.0f}" in output


@pytest.mark.full
def test_ctrl_c_reports_what_was_measured(documents, tmp_path):
    process = subprocess.Popen(
        command("--data", documents, "--out", tmp_path, "--steps", 2000, "--modes", "packed,cuseq"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in a shell's background would inherit an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        wait_for_step(process, 5)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "packed, sdpa" in output
    (measurement,) = json.loads((tmp_path / "results.json").read_text())["modes"]
    assert measurement["interrupted"]
    assert 5 <= len(measurement["losses"]) < 2000
    assert (tmp_path / "results.png").exists()


def wait_for_step(process: subprocess.Popen, step: int) -> None:
    """Read the progress bar until it shows that step or a later one."""
    progress = ""
    while True:
        read = os.read(process.stderr.fileno(), 4096).decode(errors="replace")
        assert read, f"ended early: {progress}"
        progress += read
        done = [int(part.split("/")[0]) for part in progress.split("| ")[1:] if "/" in part]
        if done and done[-1] >= step:
            return


def test_missing_folder(train, tmp_path, capsys):
    assert train.main([*TINY, "--data", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == (
        f"train.py: --data {tmp_path / 'nowhere'}: no such file or folder\n"
    )


def test_folder_without_text(train, tmp_path, capsys):
    (tmp_path / "picture.png").write_bytes(PNG_SIGNATURE)
    assert train.main([*TINY, "--data", str(tmp_path)]) == 2
    assert f"no text in {tmp_path}" in capsys.readouterr().err


def test_folder_of_empty_documents(train, tmp_path, capsys):
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    assert train.main([*TINY, "--data", str(tmp_path)]) == 2
    assert "2 empty documents" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ('{"text": "cut', "not valid JSON"),
        ('{"body": "x"}', 'a string "text"'),
        ('{"text": 3}', 'a string "text"'),
        ('["text"]', 'a string "text"'),
    ],
)
def test_bad_jsonl_line(train, tmp_path, capsys, line, rule):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "fine"}\n\n' + line + "\n")
    assert train.main([*TINY, "--data", str(file)]) == 2
    message = capsys.readouterr().err
    assert f"{file}, line 3: " in message
    assert rule in message


@pytest.fixture
def parquet(tmp_path) -> Path:
    """Return a Parquet file of three documents, the last one without text."""
    pytest.importorskip("datasets")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "documents.parquet"
    table = pyarrow.table({"text": ["one bottle", "two", " "], "id": [1, 2, 3]})
    parquet.write_table(table, file)
    return file


def test_parquet_rows_are_documents(train, parquet):
    documents = sys.modules["_documents"].read_documents(parquet, 10**6, seed=0)
    assert documents.texts == ["one bottle", "two"]
    assert documents.places == [f"{parquet}, row 1", f"{parquet}, row 2"]
    assert documents.empty == 1


@pytest.mark.parametrize("damage", ["cut", "of numbers", "empty"])
def test_a_bad_parquet_file_is_named(train, parquet, capsys, damage):
    if damage == "of numbers":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), parquet)
    else:
        parquet.write_bytes(parquet.read_bytes()[: 100 if damage == "cut" else 0])
    assert train.main([*TINY, "--data", str(parquet)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"train.py: {parquet}") and message.count("\n") == 1


def test_a_name_that_the_hub_cannot_have(train, documents, capsys):
    name = "cuseq-tests/no such model"  # refused before any request
    assert train.main([*TINY, "--data", str(documents), "--model", name]) == 2
    assert capsys.readouterr().err.startswith(f"train.py: --model {name}: transformers finds no")


def test_long_document_stops_the_run_on_request(train, documents, capsys):
    assert train.main([*TINY, "--data", str(documents), "--long", "error"]) == 2
    assert str(documents / "long.md") in capsys.readouterr().err


def test_only_long_documents_dropped(train, documents, capsys):
    data = str(documents / "long.md")
    assert train.main([*TINY, "--data", data, "--long", "drop"]) == 2
    assert "no document is left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--steps", "2", "--warmup", "2"], "--warmup"),
        (["--max-length", "9999"], "--max-length"),
        (["--batch-size", "0"], "--batch-size"),
        (["--model", "nowhere"], "--model"),
        (["--device", "meta"], "--device"),
    ],
)
def test_bad_option(train, capsys, options, name):
    assert train.main([*TINY, *options]) == 2
    assert name in capsys.readouterr().err


def test_first_fit_keeps_every_sequence_once(train):
    sequences = [[i] * length for i, length in enumerate([5, 9, 1, 4, 10, 3, 2])]
    rows = train.pack(sequences, 10)
    assert all(sum(map(len, row)) <= 10 for row in rows)
    assert sorted(sequence for row in rows for sequence in row) == sequences


@pytest.mark.full
def test_config_folder_with_its_own_shape(documents, tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=ROW_LENGTH,
    ).save_pretrained(tmp_path)
    process = subprocess.run(
        command("--data", documents, "--out", tmp_path, "--model", tmp_path, "--steps", 3),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    assert "Model: llama, 1 layer," in process.stdout
