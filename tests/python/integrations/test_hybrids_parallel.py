"""Test hybrid models under DDP and FSDP2: gradients of packed rows stay those of one process."""

from __future__ import annotations

import distributed
import pytest
import torch
from torch import Tensor, nn

import cuseq

pytest.importorskip("transformers")

from hybrid_models import documents, make_model  # noqa: E402

pytestmark = pytest.mark.full

LENGTHS = [[5, 1, 9, 3], [7, 2, 2, 7]]  # of each process
FAMILIES = ["qwen3_5", "jamba"]  # by functions of the modeling module, and by a layer's own forward


def loss_of(model: nn.Module, lengths: list[int]) -> Tensor:
    examples = [{"input_ids": doc[0].tolist()} for doc in documents(lengths)]
    batch = cuseq.PackingCollator()(examples)
    del batch["labels"]
    device = next(model.parameters()).device
    batch = {key: value.to(device) for key, value in batch.items()}
    return model(**batch, use_cache=False).logits.square().mean()


def expected(name: str) -> dict[str, Tensor]:
    """Return the mean of the gradients of both rows, document by document."""
    model = make_model(name)
    for lengths in LENGTHS:
        logits = [model(doc, use_cache=False).logits[0] for doc in documents(lengths)]
        (torch.cat(logits).square().mean() / len(LENGTHS)).backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def compare(model: nn.Module, name: str) -> None:
    wanted = expected(name)
    compared = set()
    for key, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is None:
            continue
        grad = distributed.whole(grad).cpu()
        key = key.removeprefix("module.")
        scale = max(wanted[key].abs().max().item(), 1e-3)
        torch.testing.assert_close(grad, wanted[key], rtol=1e-3, atol=5e-4 * scale, msg=key)
        compared.add(key)
    assert compared == wanted.keys()


def ddp(rank: int, name: str) -> None:
    model = make_model(name)
    cuseq.enable(model)
    # Experts that no token of a row chose have no gradient.
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    loss_of(wrapped, LENGTHS[rank]).backward()
    compare(wrapped, name)


def fsdp(rank: int, name: str, checkpointed: bool, device: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model(name).to(device)
    cuseq.enable(model)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    mesh = init_device_mesh(device, (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss_of(model, LENGTHS[rank]).backward()
    compare(model, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_ddp(name):
    distributed.run(ddp, name, limit=300)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_fsdp2(name, checkpointed):
    distributed.run(fsdp, name, checkpointed, "cpu", limit=300)


@pytest.mark.parametrize("name", FAMILIES)
def test_fsdp2_over_nccl(name, second_gpu):
    distributed.run(fsdp, name, True, "cuda", backend="nccl", limit=300)
