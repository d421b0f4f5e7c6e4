# Written by CMake: what this build was made with.
TORCH_VERSION = "2.11.0+cu130"
TORCH_CUDA = "13.0"
WITH_CUDA = "ON" == "ON"
