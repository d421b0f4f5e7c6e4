"""`python -m cuseq` prints what runs here, and what is missing for more speed."""

from __future__ import annotations

import importlib.metadata
import platform
import re

import torch

import cuseq
from cuseq._base.load import wheels_of
from cuseq.attention.choice import PACKAGES, check_installed

# Packages that train on packed rows with cuseq, and packages of faster kernels.
FRAMEWORKS = ("transformers", "trl", "peft", "accelerate", "unsloth", "megatron-core", "deepspeed")
KERNELS = ("flash-attn-4", "flash-attn-3", "flash-linear-attention", "liger-kernel", "mamba-ssm")


def main() -> None:
    """Print versions, the GPU, backends of attention and packages, and what to do."""
    build = cuseq.build_info()
    kernels = f"CUDA kernels for sm {build['cuda_archs']}" if build["cuda"] else "CPU kernels alone"
    own = _version("cuseq") or cuseq.__version__  # of a wheel the first names its torch too
    _line("cuseq", f"{own}, built with torch {build['torch']}, {kernels}")
    _line("running", f"torch {torch.__version__}, Python {platform.python_version()}")
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    for gpu in gpus:
        memory = gpu.total_memory / 2**30
        _line("GPU", f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {memory:.0f} GiB")
    if not gpus:
        _line("GPU", "none that torch finds")
    reasons = missing_backends() if gpus and build["cuda"] else {}
    for name, reason in reasons.items():
        _line("attention", f'"{name}" {"is there" if not reason else f"cannot be used: {reason}"}')
    for title, names in (("frameworks", FRAMEWORKS), ("kernels", KERNELS)):
        found = {name: version for name in names if (version := _version(name))}
        _line(title, ", ".join(f"{name} {version}" for name, version in found.items()) or "none")
    for advice in advices(build, gpus, reasons) or ["nothing is missing"]:
        _line("next", advice)


def missing_backends() -> dict[str, str]:
    """Return why each backend of attention that not every installation has is missing, or ""."""
    reasons = {}
    for name in ("cudnn", *PACKAGES):
        try:
            check_installed(name)
            reasons[name] = ""
        except ValueError as error:
            reasons[name] = str(error).partition("cannot be used: ")[2] or str(error)
    return reasons


def advices(build: dict, gpus: list, reasons: dict[str, str]) -> list[str]:
    """Return what to do for more speed.

    Args:
        build: of `cuseq.build_info`.
        gpus: the properties of each GPU.
        reasons: of `missing_backends`.
    """
    found = []
    if gpus and not build["cuda"]:
        wheels = wheels_of(torch.__version__, cuda=True)
        found.append(
            "there is a GPU, and cuseq has no kernels for it: install the wheel of "
            f"{wheels}, or build it again with nvcc"
        )
    named = re.findall(r"\d+", build["cuda_archs"]) if build["cuda"] else []  # 90a is 90
    archs = [int(arch) for arch in named]
    for arch in sorted({10 * gpu.major + gpu.minor for gpu in gpus}):
        # Code for 8.0 runs on 8.6 and 8.9; newer GPUs compile the newest code's PTX.
        if not archs or any(arch // 10 == one // 10 and one <= arch for one in archs):
            continue
        if arch > max(archs):
            what = f"the driver compiles the kernels for sm_{arch} at their first use"
        else:
            what = f"the kernels cannot run on sm_{arch}"
        found.append(f"{what}: CUSEQ_CUDA_ARCHS={arch} before the build mends that")
    if reasons and all(reasons.values()):
        found.append(
            "PyTorch's flash kernels compute attention: torch 2.15 with cuDNN, or FlashAttention 4 "
            "(pip install 'cuseq[fa4]'), is faster on Hopper and Blackwell (docs/attention.md)"
        )
    if not _version("flash-linear-attention") and gpus:
        found.append("for hybrid models such as Qwen3.5: pip install 'cuseq[fla]'")
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _line(title: str, text: str) -> None:
    print(f"{title:<12}{text}")


if __name__ == "__main__":
    main()
