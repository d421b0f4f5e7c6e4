"""Print what CMake needs to know about the installed torch, as JSON; an empty value means none."""

import json
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


root = Path(torch.__file__).parent
cudart = cuda_runtime(root.parent)
print(
    json.dumps(
        {
            "root": str(root),
            "version": torch.__version__,
            "cuda": torch.version.cuda or "",
            "cxx11_abi": int(torch.compiled_with_cxx11_abi()),
            "cudart": cudart,
            # The folder of nvcc, if it was installed as a Python package too.
            "toolkit": str(Path(cudart).parent.parent) if cudart else "",
            "gpu_archs": gpu_archs(),
        }
    )
)
