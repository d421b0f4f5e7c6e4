"""What the examples share: their options, who shares a row, that ranks were started alike."""

from __future__ import annotations

import dataclasses
import os
from argparse import Action, ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import HfArgumentParser
from transformers.hf_argparser import HfArg

import cuseq

KIND = "cuda" if torch.cuda.is_available() else "cpu"
# Without it Trainer trains a model on each CPU process alone.
CPU_RANKS = "gloo" if "WORLD_SIZE" in os.environ and KIND == "cpu" else None
OWN_TO_A_RANK = {"local_rank", "deepspeed_plugin", "distributed_state", "_n_gpu", "hub_token"}


@dataclasses.dataclass
class Defaults:
    """Defaults of the examples for options of transformers' Trainer and of TRL's."""

    max_steps: int = HfArg(default=30, help="optimizer steps; -1 for whole epochs")
    bf16: bool = HfArg(default=KIND == "cuda", help="compute in bf16 (default: on a GPU)")
    use_cpu: bool = HfArg(default=KIND == "cpu", help="(default: without a GPU)")
    ddp_backend: str | None = HfArg(
        default=CPU_RANKS, help="of the ranks (default: NCCL, gloo without a GPU)"
    )
    logging_steps: float = HfArg(default=1, help="steps from log to log")
    report_to: str | None = HfArg(default="none", help="trackers")


class _Help(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    def _get_help_string(self, action: Action) -> str | None:
        told = action.default is None or "(default: " in (action.help or "")
        return action.help if told else super()._get_help_string(action)


def parsed(about: str | None, *kinds: Any) -> tuple[Any, ...]:
    """Return the options of the command line, as one dataclass of each kind."""
    parser = HfArgumentParser(kinds, description=about, formatter_class=_Help)
    *found, unknown = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return tuple(found)


def begin(about: str | None, *kinds: Any) -> tuple[Any, ...]:
    """Join the ranks, and return the options of the command line, which all of them must share."""
    join_ranks()
    found = parsed(about, *kinds)
    given = {f.name: getattr(one, f.name) for one in found for f in dataclasses.fields(one)}
    check_same_on_ranks(**{k: v for k, v in given.items() if k not in OWN_TO_A_RANK})
    return found


def check_positive(options: Any, *names: str) -> None:
    """Exit if an option is below 1."""
    for name in names:
        if getattr(options, name) < 1:
            raise SystemExit(f"--{name} must be at least 1, got {getattr(options, name)}")


def join_ranks() -> None:
    """Join the ranks that torchrun started, if it did; Trainer takes the group that is there.

    torchrun's own store outlives a restart, with the addresses of dead ranks, so each attempt has a
    part of it for itself. Machines count attempts differently, so several need stores of their own.

    Raises:
        SystemExit: torchrun is to restart several machines and keeps its store.
    """
    if "WORLD_SIZE" not in os.environ:
        return
    keeps_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if keeps_store and machines > 1 and int(os.environ["TORCHELASTIC_MAX_RESTARTS"]) > 0:
        raise SystemExit(
            "torchrun --max-restarts on several machines must have "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"
        )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if keeps_store else "0"
    if KIND == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, ranks = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"attempt-{attempt}", store)
    backend = "cpu:gloo,cuda:nccl" if KIND == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)


def on_device(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch with its tensors, and its layout, on this process's device."""
    return {name: value.to(KIND, non_blocking=True) if hasattr(value, "to") else value
            for name, value in batch.items()}  # fmt: skip


def say(text: str) -> None:
    """Print on the first rank alone."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(text, flush=True)


def check_same_on_ranks(**facts: Any) -> None:
    """Exit on all ranks, with the name, if a value differs between ranks."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        raise SystemExit("the ranks did not meet, so each would train a model of its own")
    try:
        cuseq.distributed.check_same_on_ranks(facts)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def make_mesh(cp: int, row_length: int) -> DeviceMesh:
    """Return all ranks as dp x cp; `cp` neighbours share a row."""
    if not dist.is_initialized():
        raise SystemExit("the ranks must be started by torchrun, as --help shows")
    ranks = dist.get_world_size()
    if cp < 1 or ranks % cp or row_length % cp:
        raise SystemExit(
            f"--cp must divide the {ranks} ranks and --row_length, {row_length}, got {cp}"
        )
    # The ranks that share rows exchange keys in a group of their own, beside that of gradients.
    own = {"cp": "nccl" if KIND == "cuda" else "gloo"}
    return init_device_mesh(
        KIND, (ranks // cp, cp), mesh_dim_names=("dp", "cp"), backend_override=own
    )
