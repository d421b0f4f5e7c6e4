"""A top-k router that ignores padding, in plain PyTorch.

    python examples/moe_router.py

A row padded for context parallelism or FP8 contains pad tokens. A router treats them like other
tokens, and they all choose the same experts. Given `packed.moe_padding_mask`, this router leaves
padding out of the load-balancing loss and out of the dispatch. The script prints the routing of one
batch of documents in three ways.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import cuseq

LENGTHS = [13, 4, 30, 1]
N_EXPERTS, TOP_K, DIM, VOCABULARY = 4, 1, 16, 64


@dataclass
class Routing:
    """The experts of each token.

    Attributes:
        dispatch: bool `[tokens, n_experts]`, True if the expert gets the token; False on padding.
        weights: `[tokens, n_experts]`, factors of the experts' outputs, zero where not dispatched.
        load: `[n_experts]`, tokens that each expert gets.
        aux_loss: scalar, 1 if the load is balanced.
    """

    dispatch: Tensor
    weights: Tensor
    load: Tensor
    aux_loss: Tensor


class Router(nn.Module):
    """Router that takes the softmax over the experts and chooses the `top_k` most probable."""

    def __init__(self, dim: int, n_experts: int, top_k: int):
        super().__init__()
        self.scores = nn.Linear(dim, n_experts, bias=False)
        self.top_k = top_k

    def forward(self, hidden: Tensor, moe_padding_mask: Tensor | None = None) -> Routing:
        """Route a row. Never synchronises.

        Args:
            hidden: `[tokens, dim]`.
            moe_padding_mask: bool `[tokens]`, True on padding; None if all tokens are real.
        """
        probabilities = self.scores(hidden).softmax(-1)
        chosen = probabilities.topk(self.top_k).indices
        dispatch = torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, chosen, True)
        if moe_padding_mask is not None:
            pads = moe_padding_mask.unsqueeze(1)
            dispatch = dispatch.masked_fill(pads, False)
            probabilities = probabilities.masked_fill(pads, 0)
        load = dispatch.sum(0)
        aux_loss = load_balancing_loss(probabilities, load, self.top_k)
        return Routing(dispatch, probabilities * dispatch, load, aux_loss)


def load_balancing_loss(probabilities: Tensor, load: Tensor, top_k: int) -> Tensor:
    """Return `n_experts * sum_i f_i * P_i` over real tokens (Fedus et al., arXiv:2101.03961).

    `f_i` is expert i's share of the dispatched tokens, `P_i` its mean probability. Padding is left
    out of both, and out of the number of tokens; otherwise the loss would fall with more padding.

    Args:
        probabilities: `[tokens, n_experts]`, zero on padding.
        load: `[n_experts]`, tokens dispatched to each expert.
        top_k: experts per token.
    """
    load = load.to(probabilities.dtype)
    real_tokens = (load.sum() / top_k).clamp(min=1)  # a row may have none
    share = load / (real_tokens * top_k)
    return load.numel() * (share * probabilities.sum(0) / real_tokens).sum()


def route_three_ways(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Routing]]:
    """Return embedding and router, and the routing of the same documents unpadded and padded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), Router(DIM, N_EXPERTS, TOP_K)).to(dtype)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)
    ids = torch.randint(1, VOCABULARY, mask.shape)

    def route(packed: cuseq.PackedLayout, moe_padding_mask: Tensor | None) -> Routing:
        embedding, router = model
        return router(embedding(cuseq.pack(packed, ids)), moe_padding_mask)

    unpadded = cuseq.PackedLayout.from_padding_mask(mask)
    padded = cuseq.PackedLayout.from_padding_mask(mask, segment_multiple=16)
    return model, {
        "unpadded": route(unpadded, None),
        "padded, with the mask": route(padded, padded.moe_padding_mask),
        "padded, without it": route(padded, None),
    }


def main() -> None:
    """Print the table."""
    print(f"{'':24}{'tokens':>8}{'aux loss':>10}  tokens of each expert")
    for name, routing in route_three_ways()[1].items():
        tokens = len(routing.dispatch)
        print(f"{name:24}{tokens:8}{routing.aux_loss.item():10.4f}  {routing.load.tolist()}")


if __name__ == "__main__":
    main()
