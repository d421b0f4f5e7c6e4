"""Benchmark the short causal convolution of packed rows, forward and backward.

    python -m benchmarks conv [--device cpu] [--tokens N ...] [--channels N ...]

The convolution of Qwen3.5 and Mamba 2: width 4 with SiLU and bias, bfloat16, documents of 1,024
tokens in the mean. "copy" is the time of a copy of as many bytes as must be read and written:
forward x and y, backward x, the gradient of y and that of x. Backward times are those of
`torch.autograd.grad`, weight and bias included. Beside it:

- flash-linear-attention's Triton kernel (fla-core), with its chunk indices given, so that it does
  not wait for the lengths;
- causal-conv1d, if it is installed, with `seq_idx`;
- PyTorch's conv1d and silu over the whole row, which mixes documents.

fla comes from the folder in PEERS (peers.txt says how to fill it) if it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable

import timer
import torch
from report import Report, Table, arguments, environment
from workload import import_peer, lognormal_lengths

import cuseq

Tensor = torch.Tensor
Call = Callable[[], Tensor]

WIDTH = 4
MEAN = 1024
FORWARD_PASSES, BACKWARD_PASSES = 2, 3  # over tensors of x's size
GPU_TOKENS, GPU_CHANNELS = [512, 2048, 8192, 32_768, 65_536], [2048, 8192]
CPU_TOKENS, CPU_CHANNELS = [512], [256]


def convolutions(inputs: list[Tensor], packed: cuseq.PackedLayout, order: str) -> dict[str, Call]:
    """Return a call of each convolution. Only those that take the order are listed."""
    x, weight, bias = inputs
    calls: dict[str, Call] = {
        "cuseq": lambda: cuseq.causal_conv1d(x, weight, bias, packed, activation="silu")
    }
    batch = x.t().unsqueeze(0)
    on_gpu = x.is_cuda
    if on_gpu and order == "channels" and import_peer("einops") and import_peer("fla"):
        from fla.modules.causal_conv1d import causal_conv1d

        offsets, chunks = packed.cu_seqlens_recurrent, packed.chunk_indices(64)
        row = x.unsqueeze(0)
        calls["fla"] = lambda: causal_conv1d(
            row, weight, bias, activation="silu", cu_seqlens=offsets, chunk_indices=chunks
        )[0]
    if on_gpu and import_peer("causal_conv1d"):
        from causal_conv1d import causal_conv1d_fn

        calls["causal-conv1d"] = lambda: causal_conv1d_fn(
            batch, weight, bias, packed.seq_idx, activation="silu"
        )
    filters = weight.unsqueeze(1)

    def plain() -> Tensor:
        row = torch.nn.functional.conv1d(
            batch, filters, bias, padding=WIDTH - 1, groups=weight.shape[0]
        )
        return torch.nn.functional.silu(row[..., : batch.shape[-1]])

    calls["conv1d + silu (leaks)"] = plain
    return calls


def copy_us(elements: int, dtype: torch.dtype, device: torch.device) -> float:
    source = torch.randn(elements, device=device, dtype=torch.float32).to(dtype)
    target = torch.empty_like(source)
    return timer.device_time(lambda: target.copy_(source), device=device).median


def measure(tokens: int, channels: int, order: str, device: torch.device) -> list[dict]:
    """Return a row for each convolution of this size."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lengths = lognormal_lengths(tokens, MEAN, seed=0)
    packed = cuseq.PackedLayout.from_lengths(lengths, tokens, device=device)
    shape = (tokens, channels) if order == "channels" else (channels, tokens)
    x = torch.randn(shape, device=device, dtype=dtype)
    x = x if order == "channels" else x.t()
    weight = torch.randn(channels, WIDTH, device=device, dtype=dtype)
    inputs = [t.requires_grad_() for t in (x, weight, torch.randn_like(weight[:, 0]))]
    copies = [
        copy_us(tokens * channels * passes // 2, dtype, device)
        for passes in (FORWARD_PASSES, BACKWARD_PASSES)
    ]
    found = []
    for name, call in convolutions(inputs, packed, order).items():

        def forward(call: Call = call) -> Tensor:
            with torch.no_grad():
                return call()

        out = call()
        grad = torch.randn_like(out)

        def backward(out: Tensor = out, grad: Tensor = grad) -> object:
            return torch.autograd.grad(out, inputs, grad, retain_graph=True)

        def both(call: Call = call, grad: Tensor = grad) -> object:
            return torch.autograd.grad(call(), inputs, grad)

        times = [timer.device_time(fn, device=device).median for fn in (forward, backward)]
        found.append(
            {
                "tokens": tokens,
                "channels": channels,
                "what": name,
                "forward_us": times[0],
                "backward_us": times[1],
                "forward_of_copy": copies[0] / times[0],
                "backward_of_copy": copies[1] / times[1],
                "forward_host_us": timer.host_time(forward, device=device).median,
                "both_host_us": timer.host_time(both, device=device).median,
            }
        )
    return found


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", help="tokens of the rows")
    parser.add_argument("--channels", type=int, nargs="+", help="channels of the rows")
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    tokens = args.tokens or (GPU_TOKENS if on_gpu else CPU_TOKENS)
    channels = args.channels or (GPU_CHANNELS if on_gpu else CPU_CHANNELS)
    report = Report("conv", environment(args.device))
    columns = {
        "tokens": "tokens",
        "channels": "channels",
        "what": "",
        "forward_us": "forward, us",
        "backward_us": "backward, us",
        "forward_of_copy": "forward, of a copy",
        "backward_of_copy": "backward, of a copy",
        "forward_host_us": "forward, host us",
        "both_host_us": "both, host us",
    }
    for order, title in (
        ("channels", "Contiguous channels, [tokens, channels]"),
        ("tokens", "Contiguous tokens, [channels, tokens] transposed"),
    ):
        rows: list[dict] = []
        report.tables.append(Table(title, columns, rows))
        for n_channels in channels:
            for n_tokens in tokens:
                rows += measure(n_tokens, n_channels, order, device)
                report.write(args.out)


if __name__ == "__main__":
    main()
