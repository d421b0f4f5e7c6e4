# Types of _build_config.py, which CMakeLists.txt writes: a tree that is not built can be checked.
TORCH_VERSION: str
TORCH_CUDA: str
CUSEQ_CUDA: str
SOURCES_DIGEST: str
