"""Test the collator that deals rows to ranks, and the count of labels over ranks."""

from __future__ import annotations

import pickle

import distributed
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from cuseq import PackedLayout, PackingCollator
from cuseq.distributed import ContextParallel, cp_plan, equalize_tokens

LENGTHS = [13, 4, 30, 1, 9]
TOTAL = 64


@pytest.fixture
def one_rank(tmp_path):
    """Make a process group of this process alone, for the groups that objects are made of."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_of(cp: ContextParallel, rank: int, size: int) -> ContextParallel:
    """Return what rank `rank` of `size` would have."""
    cp = pickle.loads(pickle.dumps(cp))
    cp.rank, cp.size, cp.ranks = rank, size, tuple(range(size))
    return cp


def examples() -> list[dict]:
    made, begin = [], 1
    for length in LENGTHS:
        ids = list(range(begin, begin + length))
        labels = [-100 if number % 3 == 0 else number for number in ids]
        made.append({"input_ids": ids, "labels": labels, "weights": [float(i) for i in ids]})
        begin += length
    return made


@pytest.mark.parametrize("policy", ["auto", "contiguous"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_batch_is_the_part_of_the_whole_batch(one_rank, size, policy):
    whole = PackingCollator(total_tokens=TOTAL)(examples())
    plan = cp_plan(whole["packed"], size, policy=policy)
    shifted = [
        *zip(whole["labels"][0, 1:].tolist(), whole["packed"].seq_ids.tolist(), strict=False),
        (-100, 0),
    ]
    shifted = torch.tensor([label for label, _ in shifted])
    kept = 0
    for rank in range(size):
        cp = rank_of(ContextParallel(one_rank, policy=policy), rank, size)
        batch = PackingCollator(total_tokens=TOTAL, cp=cp)(examples())
        tokens = plan.tokens_of(rank)
        for key in ("input_ids", "labels", "weights", "position_ids"):
            assert torch.equal(batch[key], whole[key][:, tokens]), key
        assert torch.equal(batch["shift_labels"], shifted[tokens][None])
        assert batch["num_label_tokens"] == int((shifted != -100).sum())
        assert type(batch["num_label_tokens"]) is int
        kept += int((batch["shift_labels"] != -100).sum())
        assert batch["packed"].total_tokens == TOTAL // size
        assert batch["packed"].part.group == cp.group_name
    assert kept == int((shifted != -100).sum())
    assert set(batch) == {*whole, "shift_labels", "num_label_tokens", "row_checksum"}
    assert set(cp.model_inputs(batch)) == {*whole, "shift_labels"}


def test_labels_are_those_of_the_next_token_of_the_same_document(one_rank):
    cp = rank_of(ContextParallel(one_rank, policy="contiguous"), 0, 2)
    batch = PackingCollator(cp=cp)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 10, 11]}])
    assert batch["input_ids"].tolist() == [[8, 5, 6, 7]]
    assert batch["labels"].tolist() == [[-100, -100, 6, 7]]
    assert batch["shift_labels"].tolist() == [[9, 6, 7, -100]]
    assert batch["position_ids"].tolist() == [[0, 0, 1, 2]]
    assert batch["num_label_tokens"] == 5


def test_rows_are_rounded_up_for_the_ranks(one_rank):
    cp = rank_of(ContextParallel(one_rank), 1, 3)
    batch = PackingCollator(cp=cp, total_multiple=4)([{"input_ids": list(range(13))}])
    assert batch["input_ids"].shape == (1, 8)
    with pytest.raises(ValueError, match=r"total_tokens must be a multiple of cp.size = 3.*got 64"):
        PackingCollator(total_tokens=TOTAL, cp=cp)
    with pytest.raises(TypeError, match="cp must be a ContextParallel or None, got 2"):
        PackingCollator(total_tokens=TOTAL, cp=2)
    with pytest.raises(ValueError, match="shift_labels must be left out"):
        PackingCollator(cp=cp)([{"input_ids": [1], "shift_labels": [1]}])


def test_a_policy_that_cannot_deal_the_row_is_named(one_rank):
    cp = rank_of(ContextParallel(one_rank, policy="zigzag"), 0, 2)
    with pytest.raises(ValueError, match=r"multiples of 4.*lengths\[0\] = 3"):
        PackingCollator(total_tokens=16, cp=cp)([{"input_ids": [1, 2, 3]}])
    ulysses = rank_of(ContextParallel(one_rank, policy="ulysses", heads=(3, 1)), 0, 2)
    with pytest.raises(ValueError, match="got 2 ranks and 3 heads"):
        PackingCollator(total_tokens=16, cp=ulysses)([{"input_ids": [1, 2, 3]}])


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_deal_rows_without_a_process_group(one_rank, start):
    cp = rank_of(ContextParallel(one_rank), 1, 2)
    collate = PackingCollator(total_tokens=TOTAL, cp=cp)
    rows = [examples(), examples()[:3]]
    loader = DataLoader(
        rows, batch_size=None, collate_fn=collate, num_workers=1, multiprocessing_context=start
    )
    for found, row in zip(loader, rows, strict=True):
        expected = collate(row)
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(found[key], value), key
        assert found["num_label_tokens"] == expected["num_label_tokens"]
        local, same = found["packed"].part, expected["packed"].part
        assert torch.equal(local.rows, same.rows)
        assert torch.equal(local.meta, same.meta)
        assert local.group == same.group


def test_a_place_is_made_of_a_mesh_or_a_group(one_rank):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(mesh["cp"], heads=(8, 2), head_dim=64)
    assert (cp.rank, cp.size, cp.heads, cp.head_dim) == (0, 1, (8, 2), 64)
    assert cp.group_name == mesh["cp"].get_group().group_name
    sent = pickle.loads(pickle.dumps(cp))
    assert vars(sent) == vars(cp)
    with pytest.raises(ValueError, match="pickled must hold rank, .*, head_dim, got .*merge"):
        sent.__setstate__({**vars(cp), "merge": None})  # of an earlier cuseq
    assert repr(cp) == "ContextParallel(rank 0 of 1, auto)"
    packed = PackedLayout.from_lengths([5, 3])
    assert cp.plan(packed).hash == cp_plan(packed, 1, heads=(8, 2), head_dim=64).hash
    with pytest.raises(ValueError, match=r'one dimension, such as mesh\["cp"\], got 2'):
        ContextParallel(mesh)
    with pytest.raises(TypeError, match="must be a DeviceMesh or a ProcessGroup, got 2"):
        ContextParallel(2)
    with pytest.raises(ValueError, match="policy must be \"auto\", .*got 'ring'"):
        ContextParallel(one_rank, policy="ring")
    with pytest.raises(ValueError, match="head_dim must be at least 1, got 0"):
        ContextParallel(one_rank, head_dim=0)


def test_a_config_tells_the_heads(one_rank):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=48, num_attention_heads=6, vocab_size=8)
    for config, expected in (
        (transformers.LlamaConfig(**sizes, num_key_value_heads=3), ((6, 3), 8)),
        (transformers.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=32), ((6, 2), 32)),
        (transformers.GPTNeoXConfig(**sizes), ((6, 6), 8)),
        (transformers.Gemma3Config(text_config=dict(num_attention_heads=4)), ((4, 4), 256)),
    ):
        cp = ContextParallel(one_rank, config=config)
        assert (cp.heads, cp.head_dim) == expected
        assert vars(pickle.loads(pickle.dumps(cp))) == vars(cp)
    with pytest.raises(
        ValueError, match=r"config must be given without heads and head_dim, got \("
    ):
        ContextParallel(one_rank, config=config, heads=(4, 4))
    with pytest.raises(ValueError, match="config must have num_attention_heads, got Mamba2Config"):
        ContextParallel(one_rank, config=mamba(transformers))


def mamba(transformers):
    config = transformers.Mamba2Config()
    vars(config).pop("num_attention_heads", None)
    return config


def test_the_losses_of_a_step_add_up_to_the_mean(one_rank):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=64)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    rows = examples()
    cp = ContextParallel(one_rank)
    for collate in (
        PackingCollator(total_tokens=TOTAL),
        PackingCollator(total_tokens=TOTAL, cp=cp),
    ):
        batches = [collate(rows[:2]), collate(rows[2:])]
        for batch in batches:
            batch["input_ids"] %= 64
            batch["labels"] = batch["labels"].where(batch["labels"] < 0, batch["labels"] % 64)
            if "shift_labels" in batch:
                kept = batch["shift_labels"]
                batch["shift_labels"] = kept.where(kept < 0, kept % 64)
        ready = ContextParallel.step_inputs(batches)
        assert all(one.keys() >= {"shift_labels", "num_items_in_batch"} for one in ready)
        assert not any("row_checksum" in one or "num_label_tokens" in one for one in ready)
        total, count = 0.0, 0
        for batch, one in zip(batches, ready, strict=True):
            one = {k: v for k, v in one.items() if k not in ("packed", "weights")}
            given = model(**one).loss
            logits = model(batch["input_ids"], position_ids=batch["position_ids"]).logits[0]
            labels = one["shift_labels"][0]
            each = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            total, count = total + each, count + int((labels != -100).sum())
            assert int(one["num_items_in_batch"]) == sum(
                int((made["shift_labels"] != -100).sum()) for made in ready
            )
            torch.testing.assert_close(given * int(one["num_items_in_batch"]), each)
        assert count == int(ready[0]["num_items_in_batch"])


def test_a_part_without_shifted_labels_is_refused(one_rank):
    cp = rank_of(ContextParallel(one_rank), 0, 2)
    batch = PackingCollator(total_tokens=TOTAL, cp=cp)(examples())
    del batch["shift_labels"]
    with pytest.raises(ValueError, match="shift_labels where ranks share rows"):
        ContextParallel.step_inputs([batch])
    with pytest.raises(TypeError, match="batches must be an iterable of batches, got 3"):
        ContextParallel.step_inputs(3)
    with pytest.raises(ValueError, match=r"batches must have shift_labels, .* batches\[0\]"):
        ContextParallel.step_inputs([{"input_ids": batch["input_ids"]}])


def test_batches_without_labels_are_named(one_rank):
    for batch, shown in (({"labels": None, "a": 1}, r"\['a', 'labels'\]"), (3, "3")):
        with pytest.raises(ValueError, match=f"shift_labels.*got {shown} as batches.1."):
            ContextParallel.num_items([{"shift_labels": torch.ones(1, 2)}, batch])
    with pytest.raises(TypeError, match="group must be a ProcessGroup or None, got 3"):
        ContextParallel.num_items([], 3)
    for batches in (None, 3):
        with pytest.raises(TypeError, match=f"batches must be an iterable.*got {batches}"):
            ContextParallel.num_items(batches)


def test_a_group_that_is_gone_is_named(one_rank):
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    packed = PackedLayout.from_lengths([5, 3])
    dist.destroy_process_group()
    for group, shown in ((None, "None, the default group"), (one_rank, "<.*ProcessGroup")):
        for call in (
            lambda group=group: ContextParallel.num_items([], group),
            lambda group=group: equalize_tokens(packed, group),
        ):
            with pytest.raises(ValueError, match=f"group must be made by .*got {shown}"):
                call()
    for place in (mesh, one_rank):
        with pytest.raises(
            ValueError, match="mesh_or_group must be of a process group that exists"
        ):
            ContextParallel(place)


def counted(rank: int, cp_size: int) -> tuple[int, int, bool]:
    """Return the labels of two steps over dp x cp ranks, and whether a rank outside is refused."""
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // cp_size, cp_size), mesh_dim_names=("dp", "cp")
    )
    cp = ContextParallel(mesh["cp"])
    collate = PackingCollator(total_tokens=TOTAL, cp=cp)
    replica = mesh["dp"].get_local_rank()
    # Unequal masks and accumulation: replica 1 has a row more, and rows without any label.
    rows = [examples()[: 2 + replica], [{"input_ids": [1, 2], "labels": [-100, -100]}]]
    batches = [collate(row) for row in rows * (1 + replica)]
    kept = ContextParallel.num_items(batches)
    assert kept.shape == () and kept.dtype == torch.int64
    own = sum(batch["num_label_tokens"] for batch in batches)
    own = torch.tensor(own)
    dist.all_reduce(own, group=mesh["dp"].get_group())  # the other way: over dp alone
    none = cp.num_items([] if rank > 0 else batches[:1], dist.group.WORLD)
    first = int((batches[0]["shift_labels"] != -100).sum()) if rank == 0 else 0
    alone = dist.new_group([0])
    refused = False
    if rank > 0:
        try:
            ContextParallel(alone)
        except (TypeError, ValueError):
            refused = True
    return int(kept), int(own), refused or rank == 0, int(none), first


@pytest.mark.slow
@pytest.mark.parametrize("processes,cp_size", [(2, 2), (4, 2), (4, 4)])
def test_labels_are_counted_over_all_ranks(processes, cp_size):
    results = distributed.run(counted, cp_size, processes=processes)
    collate = PackingCollator(total_tokens=TOTAL)
    expected = 0
    for replica in range(processes // cp_size):
        labels = collate(examples()[: 2 + replica])["labels"]
        expected += int((labels != -100).sum()) * (1 + replica)
    for kept, over_dp, refused, none, _ in results:
        assert kept == over_dp == expected
        assert refused
        assert none == results[0][4]
