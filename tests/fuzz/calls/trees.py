"""Right arguments of `PackedTree`, of reductions over sequences and of log-probabilities."""

from __future__ import annotations

from typing import Any

import torch

import cuseq
from tests.fuzz import judge
from tests.fuzz.calls.target import TARGETS, function
from tests.fuzz.values import Draw, a_layout, a_row, a_tree, tree_nodes

Tree = cuseq.PackedTree


def _ids(draw: Draw) -> Any:
    ids = [draw.randrange(3) for _ in range(draw.choice((0, 1, 4)))]
    return draw.choice((ids, torch.tensor(ids, dtype=torch.int64)))


def _capacities(draw: Draw) -> dict[str, Any]:
    return {
        "total_tokens": draw.choice((None, 64)),
        "max_seqs": draw.choice((None, 32)),
        "max_depth": draw.choice((None, 4)),
        "device": draw.choice((None, draw.device)),
    }


def _check(arguments: dict[str, Any], tree: Any) -> None:
    """Every sample must come back from the row."""
    sequences = arguments.get("sequences")
    if not isinstance(sequences, list):
        return
    found = [tree.input_ids[0][tree.rows_of(i)].tolist() for i in range(len(sequences))]
    expected = [torch.as_tensor(ids).tolist() for ids in sequences]
    assert found == expected, f"a tree of {expected} holds {found}"


@function("PackedTree.from_groups", Tree.from_groups)
def _(draw):
    groups = draw.choice((0, 1, 3))
    return {
        "prompts": [_ids(draw) for _ in range(groups)],
        "completions": [[_ids(draw) for _ in range(draw.choice((1, 3)))] for _ in range(groups)],
        **_capacities(draw),
    }


@function("PackedTree.from_sequences", Tree.from_sequences, check=_check)
def _(draw):
    sequences = [_ids(draw) for _ in range(draw.choice((0, 1, 5)))]
    capacities = _capacities(draw)
    if draw.chance(0.3):  # long enough that freed memory is used again
        sequences = [torch.as_tensor(ids).tolist() * 50 for ids in sequences]
        capacities = {}
    keys = [[draw.randrange(2) for _ in ids] for ids in sequences] if draw.chance(0.3) else None
    return {
        "sequences": sequences,
        "min_shared": draw.choice((1, 2)),
        "keys": keys,
        **capacities,
    }


@function("PackedTree.from_parents", Tree.from_parents)
def _(draw):
    lengths, parents = tree_nodes(draw)
    return {"lengths": lengths, "parents": parents, **_capacities(draw), "max_depth": None}


# Only the class methods make one: every argument is wrong.
@function("cuseq.PackedTree", Tree, also=("from_groups",), weight=1, wrong=True)
def _(draw):
    return {"tree": [2, 3], "input_ids": None, "layout": None}


def _gather(arguments: dict[str, Any]) -> Any:
    return arguments["self"].gather(arguments["values"])


@function("PackedTree.gather", Tree.gather, call=_gather)
def _(draw):
    tree = a_tree(draw)
    values = draw.floats(tree.layout.total_tokens, 2, dtype=torch.float32)
    return {"self": tree, "values": values}


def _reduction(draw: Draw) -> dict[str, Any]:
    row = a_row(draw)
    return {
        "values": draw.floats(row.total, draw.choice((1, 3)), dtype=torch.float32),
        "packed": a_layout(draw, row),
    }


for _name in ("segment_sum", "segment_mean", "segment_max", "segment_last"):
    function(f"cuseq.ops.{_name}", getattr(cuseq.ops, _name))(_reduction)

function("cuseq.token_logprobs", cuseq.token_logprobs, check=judge.token_logprobs)(
    TARGETS["torch.ops.cuseq.token_logprobs"].make
)


class _Model(torch.nn.Module):
    """A causal language model, as far as its head reaches."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float | None):
        super().__init__()
        self.body = torch.nn.Embedding(1, 1)
        self.lm_head = torch.nn.Linear(1, 1, device="meta")
        self.lm_head.weight = torch.nn.Parameter(weight)
        self.lm_head.bias = None if bias is None else torch.nn.Parameter(bias)
        self.final_logit_softcapping = softcap

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        logits = self.lm_head(self.body(input_ids)[0])
        cap = self.final_logit_softcapping
        return (logits if cap is None else cap * torch.tanh(logits / cap),)


@function("cuseq.model_logprobs", cuseq.model_logprobs, also=("weight",))
def _(draw):
    arguments = TARGETS["torch.ops.cuseq.token_logprobs"].make(draw)
    weight, bias, _ = (arguments.pop(name) for name in ("weight", "bias", "scale"))
    return {"model": _Model(weight, bias, arguments.pop("softcap")), **arguments}
