"""Test wrapping, hooking, moving and copying: the layout stays one object, nothing is built twice.

test_layout.py tests loaders and `.to` alone, test_trainer.py the Trainer.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import distributed
import pytest
import torch
import torch.distributed as dist
from distributed import attended
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import cuseq

pytestmark = pytest.mark.usefixtures("fresh_cache")

ROW = 16
LENGTHS = [[3, 9, 4], [16], [1, 0, 13], [7, 8]]
CPU = torch.device("cpu")


def make_batch(index: int, device: torch.device = CPU) -> dict:
    return {
        "hidden": distributed.make_rows(1, ROW, seed=index).to(device),
        "packed": cuseq.PackedLayout.from_lengths(LENGTHS[index], ROW, device=device),
    }


def collate(indices: list[int]) -> dict:
    (index,) = indices
    return make_batch(index)


def backward(model: nn.Module, batch: dict) -> None:
    model(**batch).square().sum().backward()


@functools.cache
def plain_gradients(*indices: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return gradients of an unwrapped model on the CPU, summed over batches."""
    model = distributed.make_model().to(dtype)
    for index in indices:
        batch = make_batch(index)
        backward(model, batch | {"hidden": batch["hidden"].to(dtype)})
    return distributed.gradients(model)


def check_gradients(actual: list[Tensor], *indices: int) -> None:
    torch.testing.assert_close([grad.to(CPU) for grad in actual], plain_gradients(*indices))


@contextmanager
def one_layout(
    made: tuple | list = (), steps: int = 1, devices: int = 1, keys: int | None = None
) -> Iterator[None]:
    """Check that each step's blocks get one layout object per device.

    Also checks that layouts are made only on the named devices, and that the cache builds once for
    each key.
    """
    on = []
    initialise = cuseq.PackedLayout.__init__

    def spy(self, held):
        on.append(held.row.lengths.device)
        initialise(self, held)

    attended.clear()
    before = cuseq.cache.stats()["misses"]
    cuseq.PackedLayout.__init__ = spy
    try:
        yield
    finally:
        cuseq.PackedLayout.__init__ = initialise
    assert sorted(map(str, on)) == sorted(map(str, made))
    calls, rest = divmod(len(attended), steps)
    assert calls > 0 and rest == 0
    for step in range(steps):
        of_step = attended[step * calls : (step + 1) * calls]
        assert len({id(layout) for layout in of_step}) == devices
    assert len({id(layout) for layout in attended}) == steps * devices
    keys = steps * devices if keys is None else keys
    assert cuseq.cache.stats()["misses"] - before == keys
    attended.clear()


# Wrappers: here in one process, on each device; below in two processes.


def wrap_ddp(model: nn.Module, device: torch.device) -> nn.Module:
    ids = None if device.type == "cpu" else [device]
    return DistributedDataParallel(model.to(device), device_ids=ids)


def wrap_fsdp(model: nn.Module, device: torch.device) -> nn.Module:
    """Shard every block as its own unit, which computes in a lower precision than its weights."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return model


WRAPPERS = {"ddp": (wrap_ddp, torch.float64), "fsdp2": (wrap_fsdp, torch.float32)}


def wrapped_gradients(wrapper: str, index: int, device: torch.device) -> list[Tensor]:
    model = WRAPPERS[wrapper][0](distributed.make_model().to(device), device)
    batch = make_batch(index, device)
    for accumulated in (1, 2):
        with one_layout(keys=2 - accumulated):
            backward(model, batch)
    grads = distributed.gradients(model)
    return [distributed.whole(grad).to(CPU) for grad in grads]


def check_mean(actual: list[Tensor], *indices: int, dtype=torch.float64, times: int = 1) -> None:
    """Compare with the mean over the batches of all processes, each used `times` times."""
    expected = [times * g / len(indices) for g in plain_gradients(*indices, dtype=dtype)]
    scale = max(grad.abs().max() for grad in expected)
    for grad, right in zip(actual, expected, strict=True):
        error = (grad - right).abs().max() / scale
        assert error < torch.finfo(dtype).eps ** 0.5


@pytest.fixture
def process_group(device) -> Iterator[None]:
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_in_one_process(wrapper, device, process_group):
    check_mean(wrapped_gradients(wrapper, 0, device), 0, dtype=WRAPPERS[wrapper][1], times=2)


def accelerated_gradients(rank: int) -> list[Tensor]:
    """Return gradients of the model in DDP, with a loader that accelerate splits over processes."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    loader = DataLoader(range(2), collate_fn=collate)
    model, loader = accelerator.prepare(distributed.make_model(), loader)
    assert isinstance(model, DistributedDataParallel)
    with one_layout([CPU]):
        for batch in loader:
            accelerator.backward(model(**batch).square().sum())
    return distributed.gradients(model)


def work(rank: int) -> dict[str, list[Tensor]]:
    return {wrapper: wrapped_gradients(wrapper, rank, CPU) for wrapper in WRAPPERS}


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return distributed.run(work)


@pytest.mark.full
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_in_two_processes(wrapper, ranks):
    for gradients in ranks:
        check_mean(gradients[wrapper], 0, 1, dtype=WRAPPERS[wrapper][1], times=2)


@pytest.mark.full
def test_accelerate_in_two_processes():
    for gradients in distributed.run(accelerated_gradients):
        check_mean(gradients, 0, 1)


# Movers.


@pytest.fixture(params=["cpu", "cuda", "two GPUs"])
def places(request) -> list[torch.device]:
    """Return the devices of the blocks."""
    if request.param == "cpu":
        return [CPU] * 3
    first = request.getfixturevalue("cuda")
    if request.param == "cuda":
        return [first] * 3
    return [first, request.getfixturevalue("second_gpu"), first]


class MovesByHand(nn.Module):
    def __init__(self, model: nn.Module, places: list[torch.device]):
        super().__init__()
        self.blocks = model.blocks
        self.places = places

    def forward(self, hidden: Tensor, packed: cuseq.PackedLayout) -> Tensor:
        for block, place in zip(self.blocks, self.places, strict=True):
            hidden = block.to(place)(hidden.to(place), packed.to(place))
        return hidden


def dispatch(model: nn.Module, places: list[torch.device]) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    names = ["cpu" if place.type == "cpu" else place.index for place in places]
    device_map = {f"blocks.{i}": name for i, name in enumerate(names)}
    return accelerate.dispatch_model(model, device_map, force_hooks=True)


@pytest.mark.parametrize("spread", [MovesByHand, dispatch])
def test_moved_in_front_of_every_block(spread, places):
    model = spread(distributed.make_model(), places)
    assert all(hasattr(block, "_hf_hook") == (spread is dispatch) for block in model.blocks)
    batch = make_batch(0)
    devices = set(places)
    with one_layout(made=devices - {CPU}, devices=len(devices)):
        backward(model, batch)
    with one_layout(devices=len(devices), keys=0):  # the same layout again
        backward(model, batch)
    check_gradients(distributed.gradients(model), 0, 0)


def test_the_host_by_its_index():
    packed = make_batch(0)["packed"]
    assert packed.to("cpu:0") is packed  # accelerate's name for the CPU with several processes


@pytest.mark.parametrize("target", ["meta", "cuda"])
def test_moved_once_by_two_threads(target, request, monkeypatch):
    if target == "cuda":
        request.getfixturevalue("cuda")
    packed = make_batch(0)["packed"]
    move = cuseq.PackedLayout._on
    theirs = []
    thread = threading.Thread(target=lambda: theirs.append(packed.to(target)), daemon=True)

    def interrupted(self, device):
        """Another thread asks for the same object while this one makes it."""
        if thread.ident is None:
            thread.start()
            thread.join(timeout=1)  # times out if it has to wait for this one
        return move(self, device)

    monkeypatch.setattr(cuseq.PackedLayout, "_on", interrupted)
    mine = packed.to(target)
    thread.join(timeout=60)
    assert packed.to(target) is mine
    assert len(theirs) == 1 and theirs[0] is mine


@pytest.fixture
def accelerator(device):
    accelerate = pytest.importorskip("accelerate")

    def forget() -> None:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()

    forget()  # it is one for the whole process
    yield accelerate.Accelerator(cpu=device.type == "cpu")
    forget()


def test_accelerator(accelerator, device):
    model = distributed.make_model()
    optimizer = torch.optim.SGD(model.parameters())
    loader = DataLoader(range(len(LENGTHS)), collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    made = [CPU] * len(LENGTHS) + [device] * (len(LENGTHS) if device != CPU else 0)
    with one_layout(made, steps=len(LENGTHS)):
        for batch in loader:
            accelerator.backward(model(**batch).square().sum())
    check_gradients(distributed.gradients(model), *range(len(LENGTHS)))


def test_send_to_device(device):
    send_to_device = pytest.importorskip("accelerate.utils").send_to_device
    batch = make_batch(0)
    packed = batch["packed"]
    model = distributed.make_model().to(device)
    with one_layout([] if device == CPU else [device]):
        sent = send_to_device(batch | {"nested": (packed, [packed])}, device)
        (again, (inner,)) = sent.pop("nested")
        assert sent["packed"] is again is inner
        backward(model, sent)
    check_gradients(distributed.gradients(model), 0)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_loader_workers(start, device):
    pin = device != CPU
    loader = DataLoader(
        range(len(LENGTHS)),
        collate_fn=collate,
        num_workers=1,
        multiprocessing_context=start,
        pin_memory=pin,
    )
    model = distributed.make_model().to(device)
    made = [CPU] * (1 + pin) * len(LENGTHS) + [device] * pin * len(LENGTHS)
    with one_layout(made, steps=len(LENGTHS)):
        for batch in loader:
            assert batch["packed"].cu_seqlens_static.is_pinned() == pin
            backward(model, {name: value.to(device) for name, value in batch.items()})
    check_gradients(distributed.gradients(model), *range(len(LENGTHS)))


@pytest.mark.slow
def test_trainer_accumulates(monkeypatch, request, tmp_path):
    trainer = pytest.importorskip("test_trainer")
    transformers = pytest.importorskip("cuseq.integrations.transformers")
    transformers.register()
    request.addfinalizer(transformers.unregister)
    options = {"gradient_accumulation_steps": 2, "dataloader_num_workers": 1}
    dense = trainer.train(
        trainer.make_model("sdpa"),
        trainer.Rows(),
        tmp_path / "dense",
        trainer.collate_dense,
        **options,
    )
    attend = cuseq.varlen_attention

    def spy(q, k, v, packed, **rest):
        attended.append(packed)
        return attend(q, k, v, packed, **rest)

    monkeypatch.setattr(cuseq, "varlen_attention", spy)
    rows = 2 * len(trainer.LENGTHS)
    with one_layout([CPU] * rows, steps=rows, keys=0):
        packed = trainer.train(
            trainer.make_model("cuseq"), trainer.Rows(), tmp_path / "packed", **options
        )
    assert packed == pytest.approx(dense, abs=2e-4)  # Trainer logs four digits


# Activations that leave and return as other tensors.


def offload_by_hand(device: torch.device):
    return saved_tensors_hooks(
        lambda tensor: (tensor.device, tensor.cpu().clone()),
        lambda saved: saved[1].to(saved[0], copy=True),
    )


OFFLOADS = {
    "save_on_cpu": lambda device: save_on_cpu(pin_memory=device.type == "cuda"),
    "hooks": offload_by_hand,
}


@pytest.mark.parametrize("on_device", [False, True], ids=["host lengths", "device lengths"])
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["kept", "reentrant", "not"])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_offloaded_activations(offload, reentrant, on_device, device):
    model = distributed.make_model().to(device)
    batch = make_batch(0, device)
    hidden, packed = batch["hidden"].requires_grad_(), batch["packed"]
    if on_device:
        lengths = torch.tensor(LENGTHS[0], device=device)
        packed = cuseq.PackedLayout.from_lengths(lengths, ROW)
    # fp64 attention runs sequence by sequence, which on a GPU needs offsets on the host; those that
    # return for its backward are new keys. Checkpointing without reentry saves none.
    returned = len(model.blocks) if device.type == "cuda" and reentrant is not False else 0
    with one_layout(keys=1 + returned), OFFLOADS[offload](device):
        for block in model.blocks:
            if reentrant is None:
                hidden = block(hidden, packed)
            else:
                hidden = checkpoint(block, hidden, packed, use_reentrant=reentrant)
        hidden.square().sum().backward()
        assert len(attended) == (1 if reentrant is None else 2) * len(model.blocks)
    check_gradients(distributed.gradients(model), 0)


# Copies.


def save_and_load(packed: cuseq.PackedLayout) -> cuseq.PackedLayout:
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda packed: pickle.loads(pickle.dumps(packed)),
    "torch.save": save_and_load,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_say_the_same(how, device):
    batch = make_batch(2, device)
    twin = COPIES[how]([batch["packed"]] * 2)
    assert twin[0] is twin[1]
    copied = COPIES[how](batch["packed"])
    model = distributed.make_model().to(device)
    with one_layout():
        backward(model, batch | {"packed": copied})
    check_gradients(distributed.gradients(model), 2)
