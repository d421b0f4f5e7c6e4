"""Test cuseq.check_packing on a batch of the user's own loader: what it says is what is checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_check_packing import DOCUMENTS, LENGTHS, Summing, assert_fine, assert_suspect
from torch import nn

import cuseq
from cuseq.debug.packing_check import check_packing

SAID = "note: the batch says that it has 5 documents, of 5, 1, 12, 2, 9 tokens"


def packed_batch(**options: Any) -> dict[str, Any]:
    return cuseq.PackingCollator(**options)([{"input_ids": ids} for ids in DOCUMENTS])


def to(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) for name, value in batch.items()}


@pytest.mark.parametrize("options", [{}, {"total_tokens": 48}])
def test_a_right_batch_passes(options, device):
    batch = to(packed_batch(**options), device)
    before = {name: value.clone() for name, value in batch.items() if name != "packed"}
    report = check_packing(Summing().to(device), batch)
    assert_fine(report)
    assert SAID in str(report)
    assert ("leak from padding" in report.checks) == bool(options)
    assert all(torch.equal(batch[name], value) for name, value in before.items())


def test_padding_between_documents_is_none_of_them(device):
    """The second document is one token, equal to the padding before it."""
    layout = cuseq.PackedLayout.from_lengths([2, 1, 3], segment_multiple=4)
    ids = torch.tensor([[5, 6, 0, 0, 0, 0, 0, 0, 7, 8, 9, 0]])
    labels = torch.tensor([[-100, 6, *[-100] * 7, 8, 9, -100]])
    batch = {"packed": layout, "position_ids": layout.position_ids.long()[None]}
    batch |= {"input_ids": ids, "labels": labels}
    report = check_packing(Summing().to(device), to(batch, device))
    assert_fine(report)
    assert "3 documents, of 2, 1, 3 tokens" in str(report)


def running_positions() -> dict[str, Any]:
    return packed_batch() | {"position_ids": torch.arange(sum(LENGTHS))[None]}


def crossing_labels() -> dict[str, Any]:
    batch = packed_batch()
    return batch | {"labels": batch["input_ids"].clone()}


@pytest.mark.parametrize(
    "make, suspect, words",
    [
        (crossing_labels, "labels", "first label of document 1"),
        (running_positions, "positions", "position_ids of document 1 start at 5"),
    ],
)
def test_what_a_batch_says_is_checked(make, suspect, words, device):
    assert_suspect(check_packing(Summing().to(device), to(make(), device)), suspect, words)


class Logits(Summing):
    """A model whose loss is the loop's own."""

    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs).logits


def shifted(labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


def test_labels_of_the_next_tokens_are_read():
    batch = packed_batch()
    assert_fine(check_packing(Logits(), batch | {"labels": shifted(batch["labels"])}), {"loss"})
    crossing = batch | {"labels": shifted(batch["input_ids"])}
    assert_suspect(check_packing(Logits(), crossing), "labels", "labels are wrong")


def test_a_model_that_leaks_is_found(device):
    report = check_packing(Summing("cumulative").to(device), to(packed_batch(), device))
    assert_suspect(report, "mixing", "leaks into")


class Rowwise(nn.Module):
    """Adds a running sum along each row; the mask counts if the model reads it."""

    def __init__(self, reads_mask: bool):
        super().__init__()
        torch.manual_seed(0)
        self.reads_mask = reads_mask
        self.tokens = nn.Embedding(61, 8, dtype=torch.float64)
        self.head = nn.Linear(8, 61, dtype=torch.float64)

    def forward(self, input_ids, attention_mask=None, labels=None):
        x = self.tokens(input_ids)
        if self.reads_mask and attention_mask is not None:
            x = x * attention_mask.unsqueeze(-1)
        return {"logits": self.head(x.cumsum(1))}


def padded_batch(side: str) -> dict[str, torch.Tensor]:
    ids, mask = torch.zeros(5, 12, dtype=torch.int64), torch.zeros(5, 12, dtype=torch.int64)
    for row, doc in enumerate(DOCUMENTS):
        where = slice(0, len(doc)) if side == "right" else slice(12 - len(doc), 12)
        ids[row, where], mask[row, where] = torch.tensor(doc), 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_of_a_padded_batch_are_documents(side, device):
    pytest.importorskip("transformers")
    batch = to(padded_batch(side), device)
    report = check_packing(Rowwise(True).to(device), batch)
    assert_fine(report, {"loss"})
    assert SAID in str(report)
    report = check_packing(Rowwise(False).to(device), batch)
    if side == "left":
        assert_suspect(report, "padding")


def test_nothing_predicts_the_first_label_of_a_row():
    pytest.importorskip("transformers")
    ids = torch.tensor([DOCUMENTS[2][:6], DOCUMENTS[4][:6]])
    assert_fine(check_packing(Rowwise(False), {"input_ids": ids, "labels": ids}), {"loss"})


# ------------------------------------------------------------------------------ transformers


def make_llama(enabled: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double()
    if enabled:
        cuseq.enable(model)
    return model


def described(how: str) -> dict[str, Any]:
    """Return the row with one description of its documents."""
    batch = packed_batch()
    layout = batch.pop("packed")
    numbers = layout.seq_ids.long()[None]
    more = {
        "positions": {},
        "positions beside a mask": {"attention_mask": torch.ones_like(numbers)},
        "numbered mask": {"attention_mask": numbers + 1},
        "numbers": {"seq_idx": numbers.int()},
        "offsets": {"cu_seq_lens_q": layout.cu_seqlens, "cu_seq_lens_k": layout.cu_seqlens},
        "other offsets": {"cu_seqlens": layout.cu_seqlens},
        "lengths": {"packed_seq_lengths": layout.lengths},
    }
    return batch | more[how]


@pytest.mark.parametrize(
    "how",
    ["positions", "positions beside a mask", "numbered mask", "numbers", "offsets", "other offsets",
     "lengths"],
)  # fmt: skip
def test_each_description_is_read(how):
    model = make_llama(enabled=True)
    report = check_packing(model, described(how))
    assert_fine(report)
    assert SAID in str(report)
    cuseq.disable(model)


def test_a_stock_model_that_does_not_read_it_is_wrong():
    """transformers' sdpa sees the mask of ones and looks at no positions."""
    report = check_packing(make_llama(enabled=False), described("positions beside a mask"))
    assert_suspect(report, "attention", "leaks into")
    assert SAID in str(report)
    assert_fine(check_packing(make_llama(enabled=False), described("positions")))


# ------------------------------------------------------------------------------ arguments


def test_bad_batches():
    model = Summing()
    good = packed_batch()
    with pytest.raises(ValueError, match="collator and forward must be None if examples are one"):
        check_packing(model, good, collator=cuseq.PackingCollator())
    with pytest.raises(TypeError, match="tensor input_ids .*whose input_ids is list"):
        check_packing(model, good | {"input_ids": good["input_ids"].tolist()})
    with pytest.raises(TypeError, match=r"tensor input_ids .*whose input_ids is shape \(29,\)"):
        check_packing(model, good | {"input_ids": good["input_ids"][0]})
    with pytest.raises(ValueError, match="must hold text alone .* got pixel_values"):
        check_packing(model, good | {"pixel_values": torch.zeros(4, 3)})
    with pytest.raises(ValueError, match="packed must describe the 28 tokens of input_ids, got"):
        check_packing(model, good | {"input_ids": good["input_ids"][:, 1:]})
    one = cuseq.PackingCollator()([{"input_ids": DOCUMENTS[0]}])
    with pytest.raises(
        ValueError, match="it has 1 document, of 5 tokens: .* does not say where its documents end"
    ):
        check_packing(model, one)
    jumps = torch.cat([torch.arange(n) * 2 for n in LENGTHS])[None]
    with pytest.raises(
        ValueError, match=r"go up by one .* got \[0, 2, 4, 6, 8\] ... in document 0"
    ):
        check_packing(model, good | {"position_ids": jumps})
