"""Run the examples of the docs that need several ranks: fences marked `py`, over gloo on two."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import distributed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import cuseq

ROOT = Path(__file__).parents[3]
PAGES = {"docs/context_parallel.md": 2, "docs/cuda_graphs.md": 1, "docs/trainer.md": 1}
VOCABULARY = 32
DOCUMENTS = [{"input_ids": [1 + (7 * i + j) % 31 for j in range(n)]} for i, n in enumerate((40, 9))]


def examples(page: str) -> list[str]:
    """Return the page's examples for ranks, on CPUs."""
    text = (ROOT / page).read_text().replace('init_device_mesh("cuda"', 'init_device_mesh("cpu"')
    return re.findall(r"```py\n(.*?)```", text, re.DOTALL)


def run(page: str, number: int, names: dict[str, Any]) -> dict[str, Any]:
    """Run an example with the names that its text supposes; return all names afterwards."""
    names = {"cuseq": cuseq, "dp_size": 1, "cp_size": dist.get_world_size()} | names
    exec(compile(examples(page)[number], f"{page}, example {number} for ranks", "exec"), names)
    return names


def test_pages_have_examples_for_ranks():
    pages = {str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md")} | {"README.md"}
    assert {page: n for page in pages if (n := len(examples(page)))} == PAGES


def attention(rank: int) -> tuple[Tensor, Tensor]:
    """Return the example's output and that of the whole row."""
    torch.manual_seed(0)
    packed = cuseq.PackedLayout.from_lengths([30, 10, 24])
    plan = cuseq.distributed.cp_plan(packed, 2)
    q, k, v = (torch.randn(64, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    whole = cuseq.varlen_attention(q, k, v, packed)[plan.tokens_of(rank)]
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    given = dict(packed=packed, plan=plan, rank=rank, q=q, k=k, v=v, mesh=mesh)
    return run("docs/context_parallel.md", 0, given)["out"], whole


@pytest.mark.slow
def test_the_example_of_attention():
    for out, whole in distributed.run(attention):
        torch.testing.assert_close(out, whole)


class Model(nn.Module):
    """One layer of attention, rotated by nothing, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16, dtype=torch.float64)
        self.qkv = nn.Linear(16, 48, dtype=torch.float64)
        self.head = nn.Linear(16, VOCABULARY, dtype=torch.float64)

    def forward(self, ids: Tensor, positions: Tensor, packed: cuseq.PackedLayout) -> Tensor:
        hidden = self.embed(ids[0]) + positions[0, :, None].cos()
        q, k, v = self.qkv(hidden).view(-1, 3, 2, 8).unbind(1)
        return self.head(hidden + cuseq.varlen_attention(q, k, v, packed).flatten(1))[None]


def training_loop(rank: int) -> list[Tensor]:
    """Return the gradients of the example's loop, averaged over the ranks as DDP averages."""
    torch.manual_seed(0)
    model = Model()

    class Steps:  # the example makes its collator before it reads the batches
        def __iter__(self):
            collate = names["collate"]
            yield [collate(DOCUMENTS), collate(DOCUMENTS[1:])]

    names: dict[str, Any] = {"cuseq": cuseq, "dp_size": 1, "cp_size": 2}
    names |= dict(steps=Steps(), model=model, world_size=2)
    exec(examples("docs/context_parallel.md")[1], names)
    gradients = distributed.gradients(model)
    for gradient in gradients:
        dist.all_reduce(gradient)
    return [gradient / 2 for gradient in gradients]


@pytest.mark.slow
def test_the_example_of_a_training_loop():
    torch.manual_seed(0)
    model, collate = Model(), cuseq.PackingCollator(total_tokens=64)
    batches = [collate(DOCUMENTS), collate(DOCUMENTS[1:])]
    kept = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    for batch in batches:
        logits = model(batch["input_ids"], batch["position_ids"], batch["packed"])[0, :-1]
        (cross_entropy(logits, batch["labels"][0, 1:], reduction="sum") / kept).backward()
    for gradients in distributed.run(training_loop):
        torch.testing.assert_close(gradients, distributed.gradients(model))


def trainer(rank: int, folder: str, cp_size: int = 2) -> list[float]:
    """Return the losses of the example's trainer."""
    from transformers import AutoModelForCausalLM, Qwen3Config, TrainingArguments

    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16, use_cache=False)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **heads))
    options = dict(use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True)
    arguments = TrainingArguments(
        folder, max_steps=3, logging_steps=1, per_device_train_batch_size=2, **options
    )
    given = dict(model=model, arguments=arguments, documents=DOCUMENTS * 3, cp_size=cp_size)
    history = run("docs/trainer.md", 0, given)["trainer"].state.log_history
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.slow
def test_the_example_of_a_trainer(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    (alone,) = distributed.run(trainer, str(tmp_path / "one"), 1, processes=1)
    assert len(alone) == 3
    for losses in distributed.run(trainer, str(tmp_path / "two")):
        assert losses == pytest.approx(alone, rel=1e-4)


def graphed_step(rank: int) -> tuple[Tensor, list[Tensor]]:
    """Return the last loss of the example's steps, and the weights after them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    numbers = torch.Generator().manual_seed(rank)
    batches = [{"x": torch.randn(8, 4, generator=numbers).double()} for _ in range(3)]
    given = {
        "torch": torch, "fully_shard": fully_shard, "model": model, "layers": list(model),
        "loss_fn": lambda batch: model(batch["x"]).square().mean(), "batches": batches,
    }  # fmt: skip
    step = run("docs/cuda_graphs.md", 0, given)
    return step["loss"], [distributed.whole(p).detach() for p in model.parameters()]


@pytest.mark.slow
def test_the_example_of_a_graphed_step():
    (loss, weights), (other_loss, others) = distributed.run(graphed_step)
    assert loss != other_loss and all(map(torch.equal, weights, others))
    torch.manual_seed(0)
    before = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    for weight, first in zip(weights, before.parameters(), strict=True):
        assert (weight - first).abs().max() > 2e-4  # three steps of 1e-4
