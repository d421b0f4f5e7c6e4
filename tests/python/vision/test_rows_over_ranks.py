"""Test rows with images that several ranks share: they compute what one process computes."""

from __future__ import annotations

import functools
import pickle
from types import SimpleNamespace
from typing import NamedTuple

import distributed
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import cuseq
from cuseq.data import MultimodalPackingCollator
from cuseq.distributed import ContextParallel
from cuseq.vision.positions import COLUMNS

transformers = pytest.importorskip("transformers")

from test_rows_of_models import HAS_RIGHT_PLANES, IMAGE, VIDEO, make_model  # noqa: E402

Grid = tuple[int, int, int]


def document(*pieces: int | tuple[int, Grid], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a document as a processor makes it: numbers of text tokens, images and videos."""
    generator = torch.Generator().manual_seed(seed)
    ids, patches, grids = [], {IMAGE: [], VIDEO: []}, {IMAGE: [], VIDEO: []}
    for piece in pieces:
        if isinstance(piece, int):
            ids += torch.randint(1, 90, (piece,), generator=generator).tolist()
            continue
        token, grid = piece
        count = grid[0] * grid[1] * grid[2]
        ids += [token] * (count // 4)
        grids[token].append(grid)
        patches[token].append(torch.randn(count, 96, generator=generator, dtype=torch.float64))
    made = dict(input_ids=torch.tensor([ids]))
    for token, pixels, grid in (
        (IMAGE, "pixel_values", "image_grid_thw"),
        (VIDEO, "pixel_values_videos", "video_grid_thw"),
    ):
        if grids[token]:
            made |= {pixels: torch.cat(patches[token]), grid: torch.tensor(grids[token])}
    return made


SMALL, WIDE, TALL = (IMAGE, (1, 4, 4)), (IMAGE, (1, 4, 8)), (IMAGE, (1, 8, 12))
CLIP = (VIDEO, (2, 4, 4))

# By case: the policy, and the documents of a row.
ROWS: dict[str, tuple[str, list[dict[str, torch.Tensor]]]] = {
    "whole documents": (
        "auto", [document(3, SMALL, 5, seed=1), document(2, WIDE, 2, seed=2),
                 document(SMALL, 8, seed=3), document(4, WIDE, seed=4)],
    ),
    "an image that is cut": (
        "contiguous", [document(2, SMALL, 4, seed=1), document(1, TALL, 4, SMALL, 1, seed=2)],
    ),
    "videos beside images": (
        "contiguous", [document(2, CLIP, 1, SMALL, seed=1), document(1, SMALL, 1, CLIP, 9, seed=2)],
    ),
    # Rank 0 has tokens 0 to 7 and 24 to 31 of each document: both ends of the first image.
    "an image in two chunks of a rank": (
        "zigzag", [document(2, TALL, 6, seed=1), document(4, SMALL, 12, WIDE, 4, seed=2)],
    ),
    "one document of one image": ("auto", [document(1, (IMAGE, (1, 12, 12)), 6, seed=5)]),
}  # fmt: skip
TEXT = [document(13, seed=6), document(11, seed=7)]
# The image fills a rank, and the other one has text.
LONELY = [document(2, (IMAGE, (1, 8, 8)), 2, seed=8), document(20, seed=9)]
WITHOUT = {"one rank has the image": LONELY, "text": TEXT}


# ------------------------------------------------------------------------- parts, without ranks


def place(rank: int, size: int, policy: str = "auto") -> ContextParallel:
    """Return a rank's place in a group, as the worker of a DataLoader has it."""
    cp = ContextParallel.__new__(ContextParallel)
    cp.__setstate__(
        dict(rank=rank, size=size, ranks=tuple(range(size)), group_name="", policy=policy,
             heads=(4, 2), head_dim=16)
    )  # fmt: skip
    return cp


def config_of(kind: str = "qwen3_vl") -> SimpleNamespace:
    vision = SimpleNamespace(
        spatial_merge_size=2, temporal_merge_size=2, patch_size=4, temporal_patch_size=2
    )
    return SimpleNamespace(
        model_type=kind, image_token_id=IMAGE, video_token_id=VIDEO, vision_config=vision
    )


def numbered(documents: list[dict], per_token: int = 4) -> list[dict]:
    """Return documents whose patches have the number of their token, over all documents."""
    at, made = {"pixel_values": 0, "pixel_values_videos": 0}, []
    for one in documents:
        one = dict(one)
        for name in at:
            if name in one:
                count = len(one[name])
                one[name] = (at[name] + torch.arange(count))[:, None] // per_token
                at[name] += count
        made.append(one)
    return made


def random_row(seed: int, segments: int) -> list[dict]:
    """Return documents whose lengths are multiples of a number."""
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(most, (1,), generator=generator))

    made = []
    for number in range(2 + draw(4)):
        pieces: list = [1 + draw(5)]
        for _ in range(draw(4)):
            kind = (IMAGE, IMAGE, VIDEO)[draw(3)]
            frames = 1 + draw(2) if kind == VIDEO else 1
            grid = (frames, 2 + 2 * draw(4), 2 + 2 * draw(4))
            pieces += [(kind, grid), 1 + draw(3)]
        length = document(*pieces)["input_ids"].numel()
        made.append(document(*pieces, segments - length % segments, seed=seed + number))
    return made


@pytest.mark.parametrize("policy", ["auto", "contiguous", "zigzag", "ulysses"])
@pytest.mark.parametrize("size", [2, 4])
def test_each_token_takes_its_own_feature(policy, size):
    """A tower that returns the number of each token stands for one that computes."""
    cut = 0
    for seed in range(12):
        documents = numbered(random_row(100 * seed, 2 * size))
        config = config_of()
        plain = MultimodalPackingCollator(config, total_multiple=size)(documents)
        whole_row = plain["packed"]
        for rank in range(size):
            cp = place(rank, size, policy)
            batch = MultimodalPackingCollator(config, cp=cp)(documents)
            tokens = cp.plan(whole_row).tokens_of(rank)
            assert torch.equal(batch["input_ids"], plain["input_ids"][:, tokens])
            assert torch.equal(batch["position_ids"], plain["position_ids"][..., tokens])
            shifted = torch.nn.functional.pad(plain["labels"][:, 1:], (0, 1), value=-100)
            assert torch.equal(batch["shift_labels"], shifted[:, tokens])
            for token, (pixels, grids, layout) in zip((IMAGE, VIDEO), COLUMNS, strict=True):
                numbers = torch.zeros_like(plain["input_ids"])
                is_image = plain["input_ids"] == token
                numbers[is_image] = torch.arange(int(is_image.sum()))
                expected = numbers[:, tokens][batch["input_ids"] == token]
                assert (pixels in batch) == (grids in batch) == (layout in batch)
                if pixels not in batch:
                    assert expected.numel() == 0
                    continue
                features = batch[pixels][::4, 0]
                of_images = torch.arange(len(batch[grids])).repeat_interleave(batch[layout].tokens)
                if (rows := batch[layout].feature_rows) is not None:
                    cut += 1
                    features, of_images = features[rows], of_images[rows]
                assert torch.equal(features, expected)
                used = list(dict.fromkeys(of_images.tolist()))
                assert used == list(range(len(batch[grids])))  # no others, by first use
                assert torch.equal(batch[layout].grid_thw, batch[grids])
    assert cut > 0


def test_frames_that_are_merged_are_one_token():
    grid = (VIDEO, (4, 4, 4))
    whole = document(2, grid, 6)
    ids = whole["input_ids"][0]
    merged = dict(whole, input_ids=torch.cat([ids[:10], ids[18:]]))  # 8 tokens of 16
    merged = numbered([merged], per_token=8)[0]
    found = []
    for rank in range(2):
        cp = place(rank, 2, "contiguous")
        batch = MultimodalPackingCollator(config_of("ernie4_5_vl_moe"), cp=cp)([merged])
        assert len(batch["pixel_values_videos"]) == 64
        found += batch["pixel_values_videos"][::8, 0][batch["video_layout"].feature_rows].tolist()
    assert found == list(range(8))


def test_whole_documents_take_their_images_along():
    documents = ROWS["whole documents"][1]
    images = []
    for rank in range(2):
        batch = MultimodalPackingCollator(config_of(), cp=place(rank, 2))(documents)
        assert batch["image_layout"].feature_rows is None
        images += batch["image_grid_thw"].tolist()
        assert len(batch["pixel_values"]) < 96  # of both ranks
    assert sorted(images) == [[1, 4, 4]] * 2 + [[1, 4, 8]] * 2


@pytest.mark.parametrize("case", WITHOUT)
def test_a_rank_without_images_gets_a_blank_one(case):
    counts = []
    for rank in range(2):
        cp = place(rank, 2)
        plain = MultimodalPackingCollator(config_of(), cp=cp)(WITHOUT[case])
        batch = MultimodalPackingCollator(config_of(), cp=cp, blank_image=True)(WITHOUT[case])
        assert torch.equal(plain["input_ids"], batch["input_ids"])
        if "pixel_values" in plain:
            assert torch.equal(plain["pixel_values"], batch["pixel_values"])
            continue
        counts.append(rank)
        assert not any(name.startswith(("pixel", "image", "video")) for name in plain)
        assert batch["pixel_values"].shape == (4, 96) and not batch["pixel_values"].any()
        assert batch["image_layout"].feature_rows.tolist() == []
        assert "0 taken" in repr(batch["image_layout"])
    assert len(counts) == (1 if case != "text" else 2)


def test_the_collator_deals_to_one_group():
    collate = MultimodalPackingCollator(config_of(), total_tokens=64, image_capacity=500)
    cp = place(1, 2)
    dealing = collate.with_cp(cp)
    assert (collate.cp, dealing.cp, dealing.image_capacity) == (None, cp, 500)
    documents = ROWS["an image that is cut"][1]
    again = pickle.loads(pickle.dumps(dealing))
    for one in (dealing, again, MultimodalPackingCollator(config_of(), total_tokens=64, cp=cp)):
        batch = one(documents)
        assert batch["input_ids"].shape == (1, 32) and batch["position_ids"].shape == (4, 1, 32)
        assert batch["packed"].part is not None
    assert collate(documents)["input_ids"].shape == (1, 64)
    other = place(1, 2)
    other.ranks = (2, 3)
    with pytest.raises(ValueError, match=r"cp must have the ranks \[0, 1\] of the collator's"):
        dealing.with_cp(other)
    with pytest.raises(TypeError, match="cp must be a ContextParallel or None, got 2"):
        collate.with_cp(2)
    with pytest.raises(ValueError, match="total_tokens must be a multiple of cp.size = 2"):
        MultimodalPackingCollator(config_of(), total_tokens=63, cp=cp)
    with pytest.raises(ValueError, match="shift_labels must be left out"):
        dealing([{"input_ids": [1, 2], "shift_labels": [2, -100]}])


# ------------------------------------------------------------------------- models on two ranks


def enabled_model(family: str, device: str):
    model = make_model(family).to(device)
    cuseq.enable(model, qk_norm=False)  # transformers' norm rounds to fp32
    return model


def result(model, batch: dict) -> dict:
    """Return the loss of a batch, or of a rank's part of one, and its gradients."""
    model.zero_grad()
    device = next(model.parameters()).device
    batch = {name: one.to(device) if hasattr(one, "to") else one for name, one in batch.items()}
    told = ("labels", "shift_labels", "num_label_tokens", "row_checksum")
    logits = model(**{name: one for name, one in batch.items() if name not in told}).logits
    shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    labels = batch.get("shift_labels", shifted).flatten()
    count = batch.get("num_label_tokens", (labels != -100).sum())
    # The loss of transformers computes in fp32.
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum") / count
    loss.backward()
    grads = {
        name: distributed.whole(torch.zeros_like(weight) if weight.grad is None else weight.grad)
        for name, weight in model.named_parameters()
    }
    return {"loss": loss.detach().cpu()} | {
        name: grad.cpu().clone() for name, grad in grads.items()
    }


def on_ranks(rank: int, families: list[str], device: str) -> dict:
    torch.set_num_threads(1)
    found: dict = {}
    for family in families:
        model = enabled_model(family, device)
        for case, (policy, documents) in ROWS.items():
            cp = ContextParallel(dist.group.WORLD, policy=policy, heads=(4, 2), head_dim=16)
            batch = MultimodalPackingCollator(model.config, cp=cp)(documents)
            batch = pickle.loads(pickle.dumps(batch))  # as from a DataLoader's worker
            found[family, case] = result(model, batch)
        cp = ContextParallel(dist.group.WORLD)
        for case, documents in WITHOUT.items():
            for blank in (False, True):
                collate = MultimodalPackingCollator(model.config, cp=cp, blank_image=blank)
                found[family, case, blank] = result(model, collate(documents))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    found["ddp"] = result(wrapped, collate(LONELY))
    model = enabled_model(families[-1], device)
    for layer in (*model.model.visual.blocks, *model.model.language_model.layers):
        fully_shard(layer)
    fully_shard(model)
    found["fsdp"] = result(model, collate(LONELY))
    for case, (policy, documents) in ROWS.items():
        cp = ContextParallel(dist.group.WORLD, policy=policy, heads=(4, 2), head_dim=16)
        found["fsdp", case] = result(
            model, MultimodalPackingCollator(model.config, cp=cp)(documents)
        )
    return found


# Before transformers 5.9 the loss of Qwen3-VL takes no number of labels.
FAMILIES = ["qwen2_5_vl", "qwen3_vl"] if HAS_RIGHT_PLANES else ["qwen2_vl", "qwen3_vl"]


class Ranks(NamedTuple):
    """What each of two ranks found, and where they and the process beside them compute."""

    found: list[dict]
    device: str

    def whole(self, family: str, documents: list[dict]) -> dict:
        """Return the loss and the gradients of a row in one process."""
        model = enabled_model(family, self.device)
        return result(model, MultimodalPackingCollator(model.config)(documents))


@functools.cache
def run_ranks(device: str) -> Ranks:
    backend = "nccl" if device == "cuda" else "gloo"
    return Ranks(distributed.run(on_ranks, FAMILIES, device, limit=240, backend=backend), device)


@pytest.fixture(params=["cpu", "cuda"])
def ranks(request) -> Ranks:
    if request.param == "cuda":
        request.getfixturevalue("second_gpu")
    return run_ranks(request.param)


def check_sum(parts: list[dict], expected: dict) -> None:
    for name, value in expected.items():
        found = sum(one[name] for one in parts)
        torch.testing.assert_close(
            found, value, atol=1e-6, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", ROWS)
def test_two_ranks_compute_what_one_process_computes(case, family, ranks):
    expected = ranks.whole(family, ROWS[case][1])
    assert expected["model.visual.patch_embed.proj.weight"].abs().max() > 1e-3
    check_sum([one[family, case] for one in ranks.found], expected)


@pytest.mark.slow
@pytest.mark.parametrize("blank", [False, True])
@pytest.mark.parametrize("case", WITHOUT)
def test_ranks_without_images_compute_it_too(case, blank, ranks):
    for family in FAMILIES:
        expected = ranks.whole(family, WITHOUT[case])
        check_sum([one[family, case, blank] for one in ranks.found], expected)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_all_gradients_are_found_with_a_blank_image(how, ranks):
    expected = ranks.whole(FAMILIES[-1], LONELY)
    for one in ranks.found:  # both take means
        found = {name.removeprefix("module."): 2 * value for name, value in one[how].items()}
        for name in set(expected) - {"loss"}:
            torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", ROWS)
def test_sharded_models_share_rows(case, ranks):
    expected = ranks.whole(FAMILIES[-1], ROWS[case][1])
    for one in ranks.found:  # the same means on both
        for name in set(expected) - {"loss"}:
            grad = 2 * one["fsdp", case][name]
            torch.testing.assert_close(grad, expected[name], atol=1e-6, rtol=1e-6)


# ------------------------------------------------------------------------- trainers on two ranks


def trained(folder: str, cp: ContextParallel | None, is_given: bool) -> dict:
    """Return the losses that a Trainer logs and the weights that it learns.

    Args:
        folder: for its outputs.
        cp: the ranks that share its rows.
        is_given: whether `enable` gets the collator, and not the Trainer.
    """
    model = make_model(FAMILIES[0])
    collate = MultimodalPackingCollator(model.config, blank_image=True)
    images = [one for _, row in ROWS.values() for one in row]
    documents = [*TEXT, document(4, seed=10), *images]  # the first row has no images
    arguments = transformers.TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=3, remove_unused_columns=False,
        report_to="none", logging_steps=1, disable_tqdm=True, save_strategy="no", use_cpu=True,
        learning_rate=1e-3, lr_scheduler_type="constant", max_grad_norm=1.0, bf16=False,
        train_sampling_strategy="sequential", dataloader_pin_memory=False, eval_strategy="steps",
        eval_steps=2, per_device_eval_batch_size=3,
    )  # fmt: skip
    own, given = ({}, {"collator": collate}) if is_given else ({"data_collator": collate}, {})
    trainer = transformers.Trainer(
        model, arguments, train_dataset=documents, eval_dataset=documents[:6], **own
    )
    enabled = cuseq.enable(trainer, cp=cp, qk_norm=False, **given)
    if cp is not None:
        assert "context_parallel:Trainer" in enabled.replaced
        assert trainer.data_collator.cp is cp and collate.cp is None
    trainer.train()
    logs = trainer.state.log_history
    names = ("loss", "grad_norm", "eval_loss")
    return {
        "losses": [entry[name] for entry in logs for name in names if name in entry],
        "learned": {name: one.detach().clone() for name, one in model.named_parameters()},
    }


def train_on_ranks(rank: int, folder: str) -> list[dict]:
    torch.set_num_threads(1)
    cp = ContextParallel(dist.group.WORLD)
    return [trained(f"{folder}/{is_given}", cp, is_given) for is_given in (False, True)]


@pytest.mark.slow
def test_a_trainer_learns_what_one_process_learns(tmp_path):
    expected = trained(str(tmp_path / "one"), None, False)
    assert len(expected["losses"]) == 10
    first = make_model(FAMILIES[0]).state_dict()
    assert all((first[name] != one).any() for name, one in expected["learned"].items())
    for ways in distributed.run(train_on_ranks, str(tmp_path), limit=240):
        for found in ways:
            assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
            for name, value in expected["learned"].items():
                torch.testing.assert_close(found["learned"][name], value, atol=1e-6, rtol=1e-5)
