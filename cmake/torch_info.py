"""Prints, for CMake, what it has to know of the installed torch: a list in CMake's own form."""

import torch


def gpu_archs() -> str:
    """Compute capabilities of the GPUs of this machine, such as "80,90", or "none"."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "none"
    archs = {
        "{}{}".format(*torch.cuda.get_device_capability(index))
        for index in range(torch.cuda.device_count())
    }
    return ",".join(sorted(archs, key=int))


print(
    torch.utils.cmake_prefix_path,
    torch.__version__,
    torch.version.cuda or "none",
    gpu_archs(),
    sep=";",
)
