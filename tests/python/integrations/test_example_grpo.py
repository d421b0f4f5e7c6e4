"""Test examples/grpo.py: it learns, packed as padded; questions of a user's own, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from example_modules import imported, logged, run

transformers = pytest.importorskip("transformers")
pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")


def rewards_of(folder: Path, *options: object) -> list[float]:
    """Train, and return the mean reward of each step."""
    run("grpo", "--output_dir", folder, "--save_strategy", "steps", *options)
    return [float(reward) for reward in logged(folder, "reward")]


@pytest.mark.slow
def test_packed_and_padded_have_the_same_rewards(own_signals, tmp_path):
    steps = ("--max_steps", 12, "--save_steps", 12, "--disable_tqdm", "true")
    packed = rewards_of(tmp_path / "packed", *steps)
    padded = rewards_of(tmp_path / "padded", *steps, "--no_packed")
    assert len(packed) == len(padded) == 12
    assert packed[:10] == padded[:10]  # rounding can turn a sampled token into another


@pytest.mark.full
def test_rewards_rise(own_signals, tmp_path):
    rewards = rewards_of(
        tmp_path, "--max_steps", 200, "--save_steps", 200, "--disable_tqdm", "true"
    )
    assert sum(rewards[-10:]) > 2 * sum(rewards[:10])


@pytest.mark.slow
def test_questions_and_a_model_of_ones_own(own_signals, tmp_path, capsys):
    with imported("grpo") as example:
        questions, tokenizer, model = example.a_task_of_digits(seed=0)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    questions.select(range(40)).to_json(tmp_path / "questions.jsonl")
    rewards = rewards_of(
        tmp_path / "run", "--model", tmp_path / "model", "--questions",
        tmp_path / "questions.jsonl", "--max_steps", 2, "--save_steps", 2, "--num_generations", 4,
        "--per_device_train_batch_size", 8, "--max_completion_length", 6,
        "--micro_batch_tokens", 128, "--disable_tqdm", "true",
    )  # fmt: skip
    assert len(rewards) == 2
    assert "Written" in capsys.readouterr().out


def test_rewards_read_texts_and_messages():
    with imported("grpo") as example:
        texts = example.has_answer(["it is 42", "41"], answer=["42", "42"], prompts=None)
        messages = [[{"role": "assistant", "content": "so 42"}]]
        assert texts == [1.0, 0.0] and example.has_answer(messages, answer=["42"]) == [1.0]


def test_what_is_missing_is_named(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"prompt": "1 + 1", "solution": "2"}) + "\n")
    with pytest.raises(SystemExit, match="--model and --questions must be given together"):
        run("grpo", "--questions", file, "--output_dir", tmp_path / "run")
    options = ("--questions", file, "--model", tmp_path, "--output_dir", tmp_path / "other")
    with pytest.raises(SystemExit, match="columns prompt and answer, has prompt, solution"):
        run("grpo", *options)
