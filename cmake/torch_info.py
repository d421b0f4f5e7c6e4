"""Print what CMake needs to know about the installed torch, as JSON; an empty value means none."""

import json
import os
import shutil
from pathlib import Path

import torch


def gpu_archs() -> str:
    """Return the compute capabilities of this machine's GPUs as a CMake list, such as "80;90"."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return ""
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return ";".join(sorted({f"{major}{minor}" for major, minor in capabilities}, key=int))


def cuda_runtime(site_packages: Path) -> str:
    """Return the path of the CUDA runtime library that came with torch as a Python package."""
    major = (torch.version.cuda or "none").split(".")[0]
    found = sorted(site_packages.glob(f"nvidia/*/lib/libcudart.so.{major}*"))
    return str(found[0]) if found else ""


def compiler(toolkit: str) -> str:
    """Return the path of nvcc; `toolkit` is the folder of the one that is a Python package."""
    chosen = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", "")]
    usual = ["/usr/local/cuda", toolkit]
    chosen, usual = ([f"{one}/bin" for one in some if one] for some in (chosen, usual))
    folders = [*chosen, os.environ.get("PATH", os.defpath), *usual]
    return shutil.which("nvcc", path=os.pathsep.join(folders)) or ""


def compiler_packages() -> str:
    """Return the Python packages that hold nvcc, with spaces between; none before CUDA 13."""
    numbers = (torch.version.cuda or "0").split(".")
    if int(numbers[0]) < 13:
        return ""
    names = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl")
    return " ".join(f"{name}=={'.'.join(numbers[:2])}.*" for name in names)


root = Path(torch.__file__).parent
cudart = cuda_runtime(root.parent)
toolkit = str(Path(cudart).parent.parent) if cudart else ""
print(
    json.dumps(
        {
            "root": str(root),
            "version": torch.__version__,
            "cuda": torch.version.cuda or "",
            "cxx11_abi": int(torch.compiled_with_cxx11_abi()),
            "cudart": cudart,
            "nvcc": compiler(toolkit),
            "nvcc_packages": compiler_packages(),
            "gpu_archs": gpu_archs(),
        }
    )
)
