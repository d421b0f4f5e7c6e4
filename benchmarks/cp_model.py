"""A decoder of Qwen3's shapes for steps over several ranks; its attention is an argument."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, linear, rms_norm, silu

import cuseq

# layers, hidden, intermediate, query heads, key heads; head_dim is 128.
SHAPES = {
    "tiny": (2, 64, 128, 8, 4),
    "0.6b": (28, 1024, 3072, 16, 8),
    "4b": (36, 2560, 9728, 32, 8),
    "8b": (36, 4096, 12_288, 32, 8),
}
HEAD_DIM = 128
LOSS_PART = 4096
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self, hidden: int, intermediate: int, heads: int, key_heads: int):
        super().__init__()
        self.heads = (heads, key_heads, key_heads)
        self.norms = nn.Parameter(torch.ones(2, hidden))
        self.qk_norm = nn.Parameter(torch.ones(2, HEAD_DIM))
        self.qkv = nn.Linear(hidden, sum(self.heads) * HEAD_DIM, bias=False)
        self.o = nn.Linear(heads * HEAD_DIM, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        width = x.shape[-1]
        rows = self.qkv(rms_norm(x, (width,), self.norms[0]))
        q, k, v = rows.unflatten(-1, (-1, HEAD_DIM)).split(self.heads, 1)
        q, k = (_rotated(rms_norm(t, (HEAD_DIM,), w), cos, sin)
                for t, w in zip((q, k), self.qk_norm, strict=True))  # fmt: skip
        x = x + self.o(attend(q, k, v.contiguous()).flatten(1))
        gate, up = self.gate_up(rms_norm(x, (width,), self.norms[1])).chunk(2, -1)
        return x + self.down(silu(gate) * up)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


class Decoder(nn.Module):
    def __init__(self, shape: str, vocabulary: int):
        super().__init__()
        layers, hidden, *rest = SHAPES[shape]
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, *rest) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(hidden))

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor, attend: Attend) -> Tensor:
        """Return the sum of the token losses, computed in parts."""
        angles = torch.arange(0, HEAD_DIM, 2, device=ids.device) / HEAD_DIM
        angles = positions.unsqueeze(1) * 1e6**-angles
        x = self.embedding(ids)
        cos, sin = (table.unsqueeze(1).to(x.dtype) for table in (angles.cos(), angles.sin()))
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        x = rms_norm(x, (x.shape[-1],), self.norm)
        loss = x.new_zeros((), dtype=torch.float32)
        for rows, targets in zip(x.split(LOSS_PART), labels.split(LOSS_PART), strict=True):
            loss = loss + torch.utils.checkpoint.checkpoint(
                _part_of_loss, rows, self.embedding.weight, targets, use_reentrant=False
            )
        return loss


def _part_of_loss(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(linear(rows, weight).float(), targets, reduction="sum")


class Trainer:
    """A sharded decoder and its optimizer; `step` takes a rank's rows."""

    def __init__(self, shape: str, device: torch.device, *, compiled: bool):
        self.vocabulary = 512 if shape == "tiny" else 151_936
        self.compiled = compiled
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with device:
            self.model = Decoder(shape, self.vocabulary).to(dtype)
        for layer in self.model.layers if compiled else ():
            # The forward alone: FSDP2 gathers the weights in hooks around it.
            layer.forward = torch.compile(layer.forward)
        for layer in self.model.layers:  # gathered weights are kept whatever the model's size
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(), reshard_after_forward=False)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step(
        self, ids: Tensor, positions: Tensor, labels: Tensor, attend: Attend, kept: int
    ) -> Tensor:
        loss = self.model(ids, positions, labels, attend)
        (loss * (dist.get_world_size() / kept)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def layout_attention(packed: cuseq.PackedLayout, backend: str) -> Attend:
    """Return the attention of a layout over a backend of `varlen_attention`."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cuseq.varlen_attention(q, k, v, packed, backend=backend)

    return attend
