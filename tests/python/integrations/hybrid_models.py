"""Small models of every hybrid family, for the tests of hybrids."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from inspect import isfunction
from types import ModuleType

import torch
import transformers as t
from packaging.version import Version
from torch import Tensor, nn

from tests.families.models import VOCAB, small_config


def _config(family: str, **options: object) -> Callable[[], t.PreTrainedConfig]:
    """Return a function that makes a family's small config with other options."""

    def make() -> t.PreTrainedConfig:
        config = small_config(family)
        for name, value in options.items():
            setattr(config, name, value)
        return config

    return make


# In older releases the layers of some families, before 5.16 of all, hand no keywords to recurrent
# layers, and `enable` warns that these leak. `python -m tests.families` shows which.
ARE_SEPARATED = Version(t.__version__) >= Version("5.17")
# In older releases layers with an indexer make a mask of tokens x tokens themselves.
INDEXERS_ARE_KNOWN = ARE_SEPARATED
CONFIGS = {
    "qwen3_next": _config("qwen3_next"),
    "qwen3_5": _config("qwen3_5_text"),
    "qwen3_5_moe": _config("qwen3_5_moe_text"),
    "olmo_hybrid": _config("olmo_hybrid"),
    "lfm2": _config("lfm2"),
    "lfm2_moe": _config("lfm2_moe"),
    "granite": _config("granitemoehybrid", position_embedding_type="rope"),
    "granite_nope": _config("granitemoehybrid", num_local_experts=0),
    "bamba": _config("bamba"),
    "mamba2": _config("mamba2"),
    "falcon_h1": _config("falcon_h1"),
    "nemotron_h": _config("nemotron_h"),
    "zamba": _config("zamba"),
    "zamba2": _config("zamba2"),
    "minimax": _config("minimax"),
    "jamba": _config("jamba"),
    "kimi_linear": _config("kimi_linear"),
}
FAMILIES = (
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "lfm2", "lfm2_moe", "granitemoehybrid",
    "bamba", "mamba2", "falcon_h1", "nemotron_h", "zamba", "zamba2", "minimax", "jamba",
    "kimi_linear",
)  # fmt: skip
# One family for each kind of mixer, for tests of what does not depend on the family.
ONE_OF_EACH_KIND = ("qwen3_5", "lfm2", "mamba2", "falcon_h1", "minimax", "jamba", "kimi_linear")


def make_model(
    name: str,
    device: torch.device | str = "cpu",
    implementation: str = "eager",
    **sizes: int,
) -> nn.Module:
    """Return a model with weights far from their initial values, so that every part matters.

    Other `sizes` than the family's in `CONFIGS` replace those in its config.
    """
    torch.manual_seed(0)
    config = CONFIGS[name]()
    for size, value in sizes.items():
        setattr(config, size, value)
    if name == "mamba2":  # it has no attention, and refuses sdpa
        implementation = "eager"
    model = t.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    return model.to(device)


def functions_of_packages() -> Iterator[tuple[ModuleType, str, Callable[..., object]]]:
    """Yield the functions that transformers takes from other packages, with its own in PyTorch."""
    for family in FAMILIES:
        if importlib.util.find_spec(f"transformers.models.{family}") is None:
            continue  # a family of a newer release
        code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        for name, function in list(vars(code).items()):
            own = getattr(function, "__wrapped__", None)
            if own is not None and own.__module__ == code.__name__ and isfunction(own):
                if function.__code__.co_filename.endswith("hub_kernels.py"):
                    yield code, name, own


def documents(lengths: list[int], device: torch.device | str = "cpu") -> list[Tensor]:
    """Return random documents `[1, n]`."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (1, n), generator=generator).to(device) for n in lengths]
