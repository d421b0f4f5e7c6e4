"""Test profile_step: traces written by hand, real steps on the CPU, and behaviour on a GPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.profiler import record_function

import cuseq
from cuseq import PackedLayout, PackingCollator
from cuseq.debug.profile.lines import LineLog, is_users, name_line
from cuseq.debug.profile.result import StepProfile
from cuseq.debug.profile.step import check_no_waits, profile_step, summarise
from cuseq.debug.profile.trace import WINDOW, Trace, record, waits_that_torch_names

HERE = Path(__file__)
MAIN, OTHER = 7, 8


def line_of(mark: str, prefix: str = "") -> str:
    """Return the profile's name for the line of this file that ends with `# mark`."""
    source = HERE.read_text(encoding="utf-8").splitlines()
    (number,) = (i for i, line in enumerate(source, 1) if line.endswith(f"# {mark}"))
    for above in reversed(source[:number]):
        found = re.match(r"\s*def (\w+)", above)
        if found and len(above) - len(above.lstrip()) < len(source[number - 1]):
            path = str(HERE).removeprefix(os.path.join(os.getcwd(), ""))
            return f"{prefix}{path}:{number} in {found[1]}"
    raise AssertionError(f"no function around {mark}")


@pytest.fixture
def no_gpu(monkeypatch):
    """Behave like a process without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


# ------------------------------------------------------------------------- traces by hand


def event(category, name, start, us, **args) -> dict:
    thread = args.pop("thread", MAIN)
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": us,
        "tid": thread,
        "args": args,
    }


def call(name, start, us, correlation=0, thread=MAIN, category="cuda_runtime") -> dict:
    return event(category, name, start, us, correlation=correlation, thread=thread)


def kernel(name, start, us, correlation, stream=7, device=0) -> dict:
    where = {"device": device, "stream": stream, "thread": stream}
    return event("kernel", name, start, us, correlation=correlation, **where)


def copy(kind, start, us, correlation, size) -> dict:
    where = {"device": 0, "stream": 7, "thread": 7, "bytes": size}
    return event("gpu_memcpy", kind, start, us, correlation=correlation, **where)


def op(name, start, us, thread=MAIN, **args) -> dict:
    return event("cpu_op", name, start, us, thread=thread, **args)


class Lines:
    """A LineLog with given contents: microseconds, and the line from then on."""

    def __init__(self, *entries: tuple[int, str]):
        self.entries = [(us * 1000, line) for us, line in entries]

    def at(self, when: float) -> tuple[int, str] | None:
        before = [entry for entry in self.entries if entry[0] <= when]
        return before[-1] if before else None


def profile_of(*events: dict, lines: Lines | None = None, until: int = 1000) -> StepProfile:
    window = event("user_annotation", WINDOW, 0, until)
    trace = Trace([*events, window])
    return summarise(trace, lines or Lines(), steps=1, wall_us=2000.0, gpu="a GPU")


def kinds(profile: StepProfile) -> dict[str, int]:
    counts = {kind: profile.sync_count(kind) for kind in ("stream", "event", "device", "copy")}
    return {kind: count for kind, count in counts.items() if count}


def test_each_wait_has_its_kind():
    profile = profile_of(
        call("cudaStreamSynchronize", 10, 5),
        call("cudaEventSynchronize_v3020", 20, 6),
        call("cudaEventSynchronize", 30, 7),
        call("cudaDeviceSynchronize", 40, 8),
        call("cudaMemcpy_ptds", 50, 9),
        call("cuStreamSynchronize", 60, 1, category="cuda_driver"),
        call("cudaStreamWaitEvent", 70, 1),
        call("cudaEventQuery", 72, 1),
        call("cudaLaunchKernel", 74, 1),
        call("cudaMemsetAsync", 76, 1),
    )
    assert kinds(profile) == {"stream": 2, "event": 2, "device": 1, "copy": 1}
    assert profile.sync_count() == 6
    assert {wait.kind: wait.us for wait in profile.syncs} == {
        "stream": 6,
        "event": 13,
        "device": 8,
        "copy": 9,
    }


def test_the_drivers_part_of_a_wait_is_no_second_one():
    profile = profile_of(
        call("cudaStreamSynchronize", 10, 50),
        call("cuStreamSynchronize", 12, 40, category="cuda_driver"),
        call("cuStreamSynchronize", 12, 40, category="cuda_driver", thread=OTHER),
    )
    assert kinds(profile) == {"stream": 2}, "another thread's is"


@pytest.mark.parametrize(
    ("kind", "waits"),
    [
        ("Memcpy DtoH (Device -> Pageable)", {"copy": 1}),
        ("Memcpy HtoD (Pageable -> Device)", {"copy": 1}),
        ("Memcpy DtoH (Device -> Pinned)", {}),
        ("Memcpy HtoD (Pinned -> Device)", {}),
        ("Memcpy DtoD (Device -> Device)", {}),
    ],
)
def test_copies_wait_if_memory_is_pageable(kind, waits):
    profile = profile_of(call("cudaMemcpyAsync", 10, 5, 1), copy(kind, 12, 2, 1, 640))
    assert kinds(profile) == waits
    assert (profile.d2h_copies, profile.h2d_copies) == ("DtoH" in kind, "HtoD" in kind)
    (row,) = profile.copies
    assert (row.kind, row.count, row.bytes, row.us) == (kind, 1, 640, 2)


def test_the_copy_of_an_op_and_the_wait_at_its_end_are_one():
    pageable = "Memcpy DtoH (Device -> Pageable)"
    one = [
        op("aten::copy_", 0, 100),
        call("cudaMemcpyAsync", 10, 5, 1),
        copy(pageable, 12, 2, 1, 4),
        call("cudaStreamSynchronize", 20, 30, 2),
    ]
    profile = profile_of(*one)
    assert kinds(profile) == {"copy": 1}
    assert profile.syncs[0].us == 35
    apart = profile_of(*one[1:], op("aten::copy_", 5, 12), op("aten::other", 18, 40))
    assert kinds(apart) == {"copy": 1, "stream": 1}
    assert kinds(profile_of(*one, call("cudaStreamSynchronize", 60, 1, 3))) == {
        "copy": 1,
        "stream": 1,
    }


def test_the_window_bounds_the_calls_and_not_the_work():
    profile = profile_of(
        call("cudaStreamSynchronize", 90, 5),
        call("cudaLaunchKernel", 95, 2, 1),
        call("cudaLaunchKernel", 101, 2, 2),
        call("cudaDeviceSynchronize", 105, 50),
        kernel("in", 400, 10, 1),
        kernel("out", 420, 10, 2),
        op("aten::add", 90, 5),
        op("aten::mul", 110, 5),
        until=100,
    )
    assert kinds(profile) == {"stream": 1}
    assert [work.name for work in profile.kernel_table] == ["in"]
    assert [work.name for work in profile.op_table] == ["aten::add"]
    assert profile.timeline.span_us == 410


def test_kernels_of_all_streams_are_counted_and_their_time_is_not_added():
    profile = profile_of(
        call("cudaLaunchKernel", 10, 1, 1),
        call("cuLaunchKernelEx", 11, 1, 1, category="cuda_driver"),  # the same launch
        call("cudaLaunchKernel", 12, 1, 2),
        call("cudaLaunchKernel", 14, 1, 3),
        call("cudaLaunchKernel", 16, 1, 4),
        call("cudaMemsetAsync", 18, 1, 5),
        kernel("a", 100, 50, 1),
        kernel("a", 120, 50, 2, stream=9),
        kernel("b", 130, 10, 3, stream=9),
        kernel("elsewhere", 100, 20, 4, device=1),
        kernel("elsewhere", 130, 20, 4, device=1),
        kernel("elsewhere", 160, 20, 4, device=1),
        event("gpu_memset", "Memset (Device)", 300, 5, correlation=5, device=0),
        event("gpu_user_annotation", WINDOW, 100, 300, device=0),
    )
    table = [(work.name, work.count, work.us) for work in profile.kernel_table]
    assert table == [("a", 2, 100), ("elsewhere", 3, 60), ("b", 1, 10)]
    assert profile.kernels == 6
    assert profile.gpu_busy_us == 75, "100 to 170 and 300 to 305, of the busiest GPU"
    assert profile.idle_share == pytest.approx(1 - 75 / 2000)
    assert profile.timeline.busy == ((100, 170), (300, 305))


def test_graphs_and_allocations():
    profile = profile_of(
        call("cudaGraphLaunch_v10000", 10, 1, 1),
        kernel("a", 100, 5, 1),
        kernel("a", 110, 5, 1),
        *(
            call(name, 20 + i, 0.5)
            for i, name in enumerate(
                ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cudaMallocHost")
            )
        ),
        call("cudaMallocAsync", 30, 1),
    )
    assert (profile.graph_launches, profile.kernels, profile.allocations) == (1, 2, 5)
    assert kinds(profile) == {}


def test_waits_have_the_line_of_their_moment():
    lines = Lines((5, "a.py:1 in f"), (15, "a.py:2 in f"), (25, "a.py:1 in f"))
    profile = profile_of(
        *(call("cudaStreamSynchronize", start, 2) for start in (10, 20, 30)), lines=lines
    )
    assert [(w.line, w.count) for w in profile.syncs] == [("a.py:1 in f", 2), ("a.py:2 in f", 1)]


def test_a_gate_names_the_waits_and_lets_other_steps_pass(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # other tests may use a GPU
    lines = Lines((5, "a.py:1 in f"), (25, "a.py:2 in g"))
    waits = profile_of(
        *(call("cudaStreamSynchronize", start, 2) for start in (10, 15)),
        call("cudaEventSynchronize", 30, 2),
        lines=lines,
    )
    with pytest.raises(
        RuntimeError, match=r"wait for the GPU, .*: 2 x stream in a.py:1 in f; 1 x event in a.py:2"
    ):
        check_no_waits(waits)
    check_no_waits(profile_of(call("cudaLaunchKernel", 10, 2), lines=lines))
    x = torch.ones(4)
    with pytest.raises(
        RuntimeError, match=r"1 x _local_scalar_dense in .*test_profile_step.py:\d+"
    ):
        profile_step(lambda: x.sum().item(), fail_on_wait=True)
    assert profile_step(lambda: x.sum(), fail_on_wait=True).read_count == 0
    assert profile_step(lambda: x.tolist(), fail_on_wait=True).read_count == 0  # not seen
    with pytest.raises(TypeError, match="fail_on_wait must be True or False, got 1"):
        profile_step(lambda: x.sum(), fail_on_wait=1)


def test_a_gate_does_not_trust_a_profiler_that_miscounts(monkeypatch):
    from cuseq.debug.profile import step

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(step, "check_gpu_profiler", lambda: "it counts nothing")
    monkeypatch.setattr(step, "_wall_us", lambda fn, steps: 1.0)
    monkeypatch.setattr(step, "record", lambda *args, **named: None)
    monkeypatch.setattr(step, "_notes", lambda *args: ())
    monkeypatch.setattr(step, "summarise", lambda *args, **named: profile_of())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    with pytest.raises(RuntimeError, match="cannot count the waits here: it counts nothing"):
        profile_step(lambda: None, fail_on_wait=True)
    profile_step(lambda: None)


@pytest.mark.parametrize("broken", [None, "it counts nothing"])
def test_a_gate_has_a_second_witness(broken, monkeypatch):
    from cuseq.debug.profile import step

    modes = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(step, "check_gpu_profiler", lambda: broken)
    monkeypatch.setattr(step, "_wall_us", lambda fn, steps: 1.0)
    monkeypatch.setattr(step, "record", lambda *args, **named: None)
    monkeypatch.setattr(step, "_notes", lambda *args: ())
    monkeypatch.setattr(step, "summarise", lambda *args, **named: profile_of())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    def waits():
        if modes == ["warn"]:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)  # as torch does
            warnings.warn("of the user", stacklevel=1)

    place = re.escape(line_of("as torch does").partition(" ")[0])
    with pytest.warns(UserWarning, match="of the user"):
        with pytest.raises(RuntimeError, match=f"must not wait for the GPU, got waits at {place}$"):
            profile_step(waits, fail_on_wait=True)
    assert modes == ["warn", 0]
    modes.clear()
    with pytest.raises(ValueError, match="of the step"):
        waits_that_torch_names(lambda: exec("raise ValueError('of the step')"))
    assert modes == ["warn", 0]


def test_torch_names_real_waits(cuda):
    x = torch.ones(4, device=cuda, requires_grad=True)

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * float(grad.sum().item())

    def step():
        if x.sum() > 0:  # on the host
            Waits.apply(x).sum().backward()

    place = line_of("on the host").partition(" ")[0]
    found = waits_that_torch_names(step)
    assert place in found and len(found) >= 2  # backward's too
    assert waits_that_torch_names(lambda: x.sum().backward()) == ()
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_neox", "qwen3_5_text"])
def test_a_gate_lets_an_enabled_model_pass_and_names_a_read(family, device):
    pytest.importorskip("transformers")
    from tests.families.models import family_names, small_model

    if family not in family_names():
        pytest.skip("this transformers does not have it")
    model = small_model(family).train().to(device)
    cuseq.enable(model)
    batch = PackingCollator(total_tokens=16)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    batch = {name: value.to(device) for name, value in batch.items()}

    def step():
        model(**batch, use_cache=False).loss.backward()

    def reads():
        loss = model(**batch, use_cache=False).loss
        if loss > 0:  # planted
            loss.backward()

    profile_step(step, fail_on_wait=True)
    with pytest.raises(RuntimeError, match=re.escape(line_of("planted").partition(" ")[0])):
        profile_step(reads, fail_on_wait=True)
    cuseq.disable(model)


def test_a_gate_over_a_real_step(cuda):
    x = torch.ones(4, device=cuda)
    with pytest.raises(RuntimeError, match=r"1 x stream in .*test_profile_step.py:\d+"):
        profile_step(lambda: x.sum().item(), fail_on_wait=True)
    assert profile_step(lambda: x.sum(), fail_on_wait=True).sync_count() == 0


def test_backward_threads_have_the_line_of_the_forward_op():
    node = {"Sequence number": 4, "Fwd thread id": 1}
    before = {"Sequence number": 4, "Fwd thread id": 0}
    forward = [
        op("aten::gt", 2, 2, **before),  # made no node, so the number did not change
        op("aten::index", 12, 4, **before),
        op("aten::sum", 22, 4, **(before | {"Sequence number": 5})),
    ]
    lines = Lines((0, "a.py:1 in f"), (10, "a.py:2 in f"), (20, "a.py:3 in f"))
    backward = [
        op("IndexBackward0", 40, 20, thread=OTHER, **node),
        op("aten::nonzero", 42, 10, thread=OTHER),
        call("cudaStreamSynchronize", 45, 2, thread=OTHER),
    ]
    profile = profile_of(*forward, *backward, lines=lines)
    assert [wait.line for wait in profile.syncs] == ["backward of a.py:2 in f"]
    assert [read.line for read in profile.host_reads] == ["backward of a.py:2 in f"]
    unknown = profile_of(*backward, lines=lines)
    (wait,) = unknown.syncs
    assert wait.line == "IndexBackward0 > aten::nonzero, on another thread"


def test_a_line_that_ran_inside_a_backward_node_is_the_line():
    node = {"Sequence number": 4, "Fwd thread id": 1}
    steps = [
        op("aten::mul", 12, 4, **(node | {"Fwd thread id": 0})),
        op("MyBackward", 40, 20, **node),
        call("cudaStreamSynchronize", 50, 2),
    ]
    lines = [(10, "a.py:1 in f"), (30, "a.py:2 in f")]
    assert profile_of(*steps, lines=Lines(*lines)).syncs[0].line == "backward of a.py:1 in f"
    within = Lines(*lines, (45, "a.py:9 in backward"))
    assert profile_of(*steps, lines=within).syncs[0].line == "a.py:9 in backward"


def test_waits_without_a_line_have_their_ops():
    profile = profile_of(
        op("aten::to", 0, 50),
        op("aten::copy_", 5, 30),
        call("cudaStreamSynchronize", 10, 2),
        call("cudaStreamSynchronize", 60, 2),
        call("cudaEventSynchronize", 60, 2, thread=OTHER),
    )
    assert {(wait.kind, wait.line) for wait in profile.syncs} == {
        ("stream", "aten::to > aten::copy_"),
        ("stream", "code outside PyTorch's ops"),
        ("event", "code outside PyTorch's ops, on another thread"),
    }


def test_a_read_inside_a_read_is_one():
    profile = profile_of(
        op("aten::masked_select", 0, 50),
        op("aten::nonzero", 5, 10),
        op("aten::item", 60, 10),
        op("aten::_local_scalar_dense", 61, 5),
        op("aten::nonzero", 80, 5, thread=OTHER),
    )
    counts = sorted((read.op, read.count) for read in profile.host_reads)
    assert counts == [("_local_scalar_dense", 1), ("masked_select", 1), ("nonzero", 1)]


def test_ops_are_told_from_what_is_recorded_like_them():
    names = ["aten::add", "cuseq::layout_metadata", "TorchDynamo Cache Lookup", "AddBackward0"]
    names += [
        "autograd::engine::evaluate_function: AddBackward0",
        "torch::autograd::AccumulateGrad",
    ]
    profile = profile_of(*(op(name, 10 * i, 5) for i, name in enumerate(names)))
    assert sorted(work.name for work in profile.op_table) == names[:2]


# ---------------------------------------------------------------------------- real steps


def reads_of(profile: StepProfile) -> dict[tuple[str, str], int]:
    return {(read.op, read.line): read.count for read in profile.host_reads}


def test_reads_of_values_by_op_and_line(device):
    x = torch.arange(5, dtype=torch.float32, device=device)

    def step():
        for _ in range(3):
            x.sum().item()  # item
        if x.any():  # bool
            float(x[0]), int(x[1])  # float
        y = x[x > 2]  # mask
        torch.nonzero(y)  # nonzero
        return y + 1

    assert reads_of(profile_step(step)) == {
        ("_local_scalar_dense", line_of("item")): 3,
        ("_local_scalar_dense", line_of("bool")): 1,
        ("_local_scalar_dense", line_of("float")): 2,
        ("nonzero", line_of("mask")): 1,
        ("nonzero", line_of("nonzero")): 1,
    }


class Reader(torch.nn.Module):
    def forward(self, x):
        return x * x.sum().item()  # module


def decorated(function):
    @wraps(function)
    def inner(*args):
        return function(*args)

    return inner


@decorated
def helper(x):
    return x.max().item()  # helper


def values(x):
    for i in range(2):
        yield x[i].item()  # generator


def test_the_line_is_the_innermost_one_of_the_user():
    x, module = torch.ones(3), Reader()
    weight = torch.nn.Parameter(torch.ones(2))

    def step():
        module(x)
        (helper(x), x.min().item())  # after
        list(values(x))
        weight.grad = torch.ones(2)
        torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)  # torch

    assert reads_of(profile_step(step)) == {
        ("_local_scalar_dense", line_of("module")): 1,
        ("_local_scalar_dense", line_of("helper")): 1,
        ("_local_scalar_dense", line_of("after")): 1,
        ("_local_scalar_dense", line_of("generator")): 2,
        ("_local_scalar_dense", line_of("torch")): 1,
    }


def test_files_that_are_the_users():
    packages = Path(torch.__file__).parent.parent
    for other in ("transformers/models/llama/modeling_llama.py", "torchvision/ops.py"):
        assert is_users(str(packages / other)), other
    for file in (str(HERE), "<string>", "<stdin>", "/tmp/ipykernel_1/2.py", "/torch/train.py"):
        assert is_users(file), file
    for file in (
        torch.nn.__file__,
        cuseq.layout.__file__,
        os.__file__,
        "<frozen importlib._bootstrap>",
        "<eval_with_key>.3",
        "/tmp/torchinductor_me/ab/cab.py",
    ):
        assert not is_users(file), file


def test_lines_are_named_from_where_their_package_lies(monkeypatch):
    def named(path, function="f"):
        return name_line(compile("0", path, "exec").replace(co_name=function), 3)

    monkeypatch.setattr(os, "getcwd", lambda: "/home/me")
    assert named("/home/me/train/loop.py") == "train/loop.py:3 in f"
    assert named("/home/you/loop.py") == "/home/you/loop.py:3 in f"
    assert named("/home/me/lib/site-packages/trl/x.py") == "trl/x.py:3 in f"
    resumed = named("/home/me/a.py", "torch_dynamo_resume_in_forward_at_17")
    assert resumed == "a.py:3 in forward"


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.sum().item()  # own backward


def test_reads_in_backward():
    x = torch.arange(4, dtype=torch.float32, requires_grad=True)

    def step():
        y = x[x > 1]  # indexed
        z = ReadsInBackward.apply(y)
        z.register_hook(lambda grad: grad * bool(grad.any()))
        z.sum().backward()

    reads = reads_of(profile_step(step))
    hook = [line for (_, line) in reads if line.endswith("in <lambda>")]
    assert len(hook) == 1
    assert reads == {
        ("nonzero", line_of("indexed")): 1,
        ("nonzero", line_of("indexed", "backward of ")): 1,
        ("_local_scalar_dense", line_of("own backward")): 1,
        ("_local_scalar_dense", hook[0]): 1,
    }


def test_checks_of_tensors_on_the_cpu_are_no_reads():
    """On a GPU cuseq does not check values, so nothing would wait."""
    table = cuseq.rope_table(16, 8)
    q = torch.randn(5, 2, 8, requires_grad=True)
    ids = torch.tensor([[0, 1, 0, 1, 2]])

    def step():
        packed = PackedLayout.from_lengths(torch.tensor([2, 3]))
        for positions in ({"packed": packed}, {"position_ids": ids[0]}):
            cuseq.apply_rope(q, None, *table, **positions)[0].sum().backward()

    assert profile_step(step).read_count == 0
    lengths = torch.tensor([2, 3])
    assert profile_step(lambda: cuseq.ops.max_seqlen_sync(lengths)).read_count == 1


def test_ops_of_the_users_own_threads_are_not_seen():
    def step():
        thread = threading.Thread(target=lambda: torch.ones(1).item())
        thread.start()
        thread.join()
        torch.ones(1).item()

    assert profile_step(step).read_count == 1


def test_compiled_code_stays_compiled():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()

    def compiled(x):
        y = torch.sin(x) + 1
        if y.sum() > 0:  # break
            y = y * 2
        return y.cos()

    run, x = torch.compile(compiled, backend="aot_eager"), torch.ones(4)
    for _ in range(2):
        run(x)
    graphs = dict(counters["stats"])
    assert graphs["unique_graphs"] == 2
    profile = profile_step(lambda: run(x), warmup=0)
    assert counters["stats"] == graphs
    line = line_of("break")
    if sys.version_info >= (3, 13):  # Dynamo's TO_BOOL has the first line of the function
        line = re.sub(r":\d+ ", f":{compiled.__code__.co_firstlineno} ", line)
    assert reads_of(profile) == {("_local_scalar_dense", line): 1}


def test_calls_of_the_step():
    calls = []
    profile = profile_step(lambda: calls.append(torch.ones(2) + 1), warmup=2, steps=3)
    assert len(calls) == 2 + 3 + 3
    assert profile.steps == 3
    assert {work.name: work.count for work in profile.op_table}["aten::add"] == 3
    assert "mean of 3" in str(profile)
    if not profile.gpu:  # with a GPU its table lists kernels
        assert re.search(r"^ +1 .* aten::add$", str(profile), re.MULTILINE), "tables are a step's"
    calls.clear()
    profile_step(lambda: calls.append(1), warmup=0)
    assert len(calls) == 2


def test_wall_time_is_that_of_the_step_alone():
    profile = profile_step(lambda: time.sleep(0.05), warmup=0, steps=2)
    assert 100e3 <= profile.wall_us < 300e3


def test_attention_backends_are_named(device):
    packed = cuseq.PackedLayout.from_lengths([3, 4], device=device)
    q = torch.randn(7, 2, 16, device=device, requires_grad=True)

    def step():
        for _ in range(3):
            cuseq.varlen_attention(q, q, q, packed, backend="segments").sum().backward()

    profile = cuseq.profile_step(step)
    assert [(each.name, each.count) for each in profile.attention] == [("segments", 6)]
    assert "Attention backends" in str(profile) and "segments" in str(profile)
    assert type(profile).from_json(profile.to_json()) == profile


def test_labels_of_the_step_are_left_alone():
    def step():
        with record_function("mine"):
            torch.ones(2).add_(1)
        torch.ones(2).mul_(1)

    assert profile_step(step).ops > 2
    mine = record(step, gpu=False).within("mine")
    assert [work.name for work in mine.ops].count("aten::add_") == 1
    assert "aten::mul_" not in [work.name for work in mine.ops]


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_errors_of_the_step_are_passed_on(fails_at, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    calls = []

    def step():
        calls.append(1)
        if len(calls) == fails_at:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        profile_step(step)
    assert sys.gettrace() is None
    assert not torch.autograd._profiler_enabled()
    assert profile_step(lambda: torch.ones(1).item()).read_count == 1
    assert list(tmp_path.iterdir()) == []


def test_another_trace_function_is_left_in_place():
    seen = []

    def theirs(frame, event, arg):
        seen.append(event)

    sys.settrace(theirs)
    try:
        profile = profile_step(lambda: torch.ones(1).item())
        assert sys.gettrace() is theirs
    finally:
        sys.settrace(None)
    assert reads_of(profile) == {
        ("_local_scalar_dense", "aten::item > aten::_local_scalar_dense"): 1
    }
    assert "lines are unknown" in str(profile)


def test_a_log_without_entries_knows_no_line():
    assert LineLog().at(0) is None


def test_no_second_profiler():
    with torch.autograd.profiler.profile():
        with pytest.raises(RuntimeError, match="inside another profiler"):
            profile_step(lambda: None)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fn": 3}, TypeError, "fn must be a function.*got 3"),
        ({"warmup": -1}, ValueError, "warmup must be at least 0, got -1"),
        ({"steps": 0}, ValueError, "steps must be at least 1, got 0"),
        ({"steps": 1.5}, TypeError, "steps must be an int, got 1.5"),
        ({"batch": 3}, TypeError, "batch must be a mapping.*got int"),
        ({"batch": [3]}, TypeError, r"batch\[0\] must be a mapping.*got int"),
        (
            {"batch": {"input_ids": torch.ones(1, 2)}},
            ValueError,
            r"batch must say.*\['input_ids'\]",
        ),
        ({"batch": {"attention_mask": torch.ones(1, 1, 2, 2)}}, ValueError, "2-D attention_mask"),
        ({"batch": [{"labels": torch.ones(1)}]}, ValueError, r"batch\[0\] must say.*labels"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    def untouched():
        raise AssertionError("arguments are checked first")

    with pytest.raises(error, match=message):
        profile_step(**({"fn": untouched} | arguments))


# --------------------------------------------------------------------------------- tokens


def test_tokens_of_batches(device):
    packed = PackingCollator(total_tokens=8)([{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}])
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]], device=device)
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    padded = {"input_ids": torch.ones(3, 3), "attention_mask": mask}
    flat = {"input_ids": torch.ones(1, 8), "cu_seq_lens_q": offsets}
    layout = PackedLayout.from_lengths([1, 2], 4, device=device)
    for batch, expected in (
        (packed, (8, 5)),
        (padded, (9, 4)),
        ({**padded, "attention_mask": mask.bool()}, (9, 4)),
        (flat, (8, 6)),
        (layout, (4, 3)),
        ([padded, padded, layout], (22, 11)),
        ({**padded, "packed": layout}, (4, 3)),  # the layout takes precedence
        ([], (0, 0)),
    ):
        tokens = profile_step(lambda: None, batch=batch).tokens
        assert (tokens.in_memory, tokens.real) == expected
        assert tokens.pads == expected[0] - expected[1]
    assert tokens.pad_share == 0.0
    assert profile_step(lambda: None).tokens is None


def test_tokens_of_repeated_prefixes(device):
    ids = torch.tensor([[0, 5, 6, 7], [5, 6, 8, 0], [5, 6, 7, 9], [3, 0, 0, 0]], device=device)
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    tokens = profile_step(lambda: None, batch=batch).tokens
    assert (tokens.real, tokens.repeated) == (11, 5)  # 5 6 twice, and one 7
    assert tokens.repeated_share == 5 / 11
    two = profile_step(lambda: None, batch=[batch, batch, {"attention_mask": ids}])
    assert two.tokens.repeated == 10
    assert "tokens of repeated prefixes" in str(two) and "share of real tokens" in str(two)
    assert profile_step(lambda: None, batch={"attention_mask": ids}).tokens.repeated is None


def test_tokens_of_prompts_and_completions(device):
    """As TRL's GRPO and RLOO hold them: prompts padded in front, completions behind."""
    batch = {
        "prompt_ids": torch.tensor([[0, 5, 6], [0, 5, 6], [7, 8, 9]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[4, 0], [3, 2], [0, 0]]),
        "completion_mask": torch.tensor([[1, 0], [1, 1], [0, 0]]),
    }
    batch = {name: value.to(device) for name, value in batch.items()}
    tokens = profile_step(lambda: None, batch=batch).tokens
    assert (tokens.in_memory, tokens.real, tokens.repeated) == (15, 10, 2)


@pytest.mark.parametrize(
    "batch, error, message",
    [
        ({"cu_seq_lens_q": torch.empty(0)}, ValueError, "cu_seq_lens_q must be"),
        ({"cu_seq_lens_q": torch.ones(1, device="meta")}, ValueError, "cu_seq_lens_q must have"),
        ({"attention_mask": torch.ones(1, 2).to_sparse()}, TypeError, "attention_mask must be"),
    ],
)
def test_batches_that_hold_no_lengths(batch, error, message):
    with pytest.raises(error, match=message):
        profile_step(lambda: None, batch={"input_ids": torch.ones(1, 2), **batch})


def test_the_function_and_its_module_have_their_own_names():
    """`import cuseq.profile_step as m` used to give the function instead of the module."""
    import cuseq.debug.profile as module

    assert isinstance(module, ModuleType)
    assert cuseq.profile_step is module.profile_step
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("cuseq.profile_step")


def test_tokens_of_a_batch_that_the_step_takes_apart():
    batch = PackingCollator(total_tokens=8)([{"input_ids": [5, 6]}])
    profile = profile_step(lambda: batch.pop("packed", None), batch=batch)
    assert (profile.tokens.pads, profile.tokens.pad_share) == (6, 0.75)


# -------------------------------------------------------------------------------- reports


@pytest.fixture
def on_gpu() -> StepProfile:
    return profile_of(
        call("cudaStreamSynchronize", 10, 5),
        call("cudaEventSynchronize", 20, 5),
        call("cudaLaunchKernel", 30, 1, 1),
        kernel("gemm" * 40, 100, 500, 1),
        call("cudaMemcpyAsync", 40, 1, 2),
        copy("Memcpy DtoH (Device -> Pinned)", 700, 2, 2, 1234567),
        lines=Lines((0, "a.py:1 in f"), (15, "a.py:2 in f")),
    )


def test_the_table(on_gpu):
    rows = [line.split() for line in str(on_gpu).splitlines()]
    for row in (
        "wall time, ms 2.000",
        "GPU busy, ms 0.502",
        "GPU idle 74.9%",
        "waits for the GPU 2",
        "for a stream 1",
        "time in them, ms 0.010",
        "bytes 1,234,567",
        "1 5.0 stream a.py:1 in f",
        "1 5.0 event a.py:2 in f",
    ):
        assert row.split() in rows, row
    assert max(map(len, str(on_gpu).splitlines())) <= 100
    assert "pad" not in str(on_gpu)


def test_long_tables_say_how_much_is_left_out():
    waits = [call("cudaStreamSynchronize", 10 * i, 5) for i in range(13)]
    lines = Lines(*((10 * i, f"a.py:{i} in f") for i in range(13)))
    assert "and 3 more" in str(profile_of(*waits, lines=lines))


def test_without_a_gpu_nothing_is_said_to_wait(no_gpu):
    profile = profile_step(lambda: torch.ones(1).item())
    assert (profile.gpu, profile.device, profile.sync_count()) == (False, "CPU", None)
    assert (profile.gpu_busy_us, profile.idle_share) == (None, None)
    assert not re.search("waits for the GPU|kernels|copies", str(profile))
    assert "No GPU was in use" in str(profile)
    assert len(profile.timeline.marks) == 1
    (busy,) = [(a, b) for a, b in profile.timeline.busy if a <= profile.timeline.marks[0][1] <= b]
    assert busy[1] <= profile.timeline.span_us


def test_kinds_are_checked(on_gpu):
    with pytest.raises(ValueError, match="kind must be one of.*'streams'"):
        on_gpu.sync_count("streams")


def test_before_and_after(on_gpu):
    after = profile_of(
        *(call("cudaEventSynchronize", 20 + 10 * i, 5) for i in range(3)),
        lines=Lines((0, "a.py:2 in f")),
    )
    table = on_gpu.compare(after, names=("stock", "cuseq"))
    rows = [line.split() for line in table.splitlines()]
    for row in (
        "a step stock cuseq ratio",
        "wall time, ms 2.000 2.000 1.00",
        "waits for the GPU 2 3 1.50",
        "kernels 1 0 0.00",
        "allocations 0 0",
        "stock cuseq kind line",
        "1 - stream a.py:1 in f",
        "1 3 event a.py:2 in f",
    ):
        assert any(line[-len(row.split()) :] == row.split() for line in rows), row


def test_steps_of_unequal_number_are_compared_by_the_step(on_gpu):
    twice = replace(on_gpu, steps=2)
    rows = [line.split() for line in twice.compare(on_gpu).splitlines()]
    assert "0.5 1 stream a.py:1 in f".split() in rows
    assert "waits for the GPU 1 2 2.00".split() in rows

    def step():
        torch.ones(1).item()

    table = profile_step(step).compare(profile_step(step, steps=4))
    assert re.search(r"host reads of values +1 +1 +1.00", table)


def test_json_keeps_everything(on_gpu):
    real = profile_step(lambda: torch.ones(3).nonzero(), batch=PackedLayout.from_lengths([1], 2))
    for profile in (on_gpu, real):
        assert StepProfile.from_json(profile.to_json()) == profile
    kept = json.loads(on_gpu.to_json())["summary"]
    assert (kept["syncs"], kept["syncs_event"], kept["d2h_bytes"]) == (2, 1, 1234567)


def test_saved_files(on_gpu, no_gpu, tmp_path):
    pytest.importorskip("matplotlib")
    real = profile_step(lambda: torch.ones(3).nonzero())
    empty = profile_of()
    for name, profile in {"gpu": on_gpu, "cpu": real, "empty": empty}.items():
        profile.save(tmp_path / "new", name)
        assert StepProfile.from_json((tmp_path / "new" / f"{name}.json").read_text()) == profile
        assert (tmp_path / "new" / f"{name}.txt").read_text() == f"{profile}\n"
        assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_needs_matplotlib(on_gpu, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="needs matplotlib.*picture=False"):
        on_gpu.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    on_gpu.save(tmp_path, picture=False)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["profile.json", "profile.txt"]


# ---------------------------------------------------------------------------------- a GPU


def test_the_profiler_is_found_to_count(cuda):
    profile = profile_step(lambda: torch.ones(1, device=cuda))
    assert profile.notes == ()
    assert (profile.gpu, profile.device) == (True, torch.cuda.get_device_name())


def test_real_waits_by_kind(cuda):
    x = torch.arange(6, device=cuda)
    host, pinned = torch.zeros(6, dtype=x.dtype), torch.zeros(6, dtype=x.dtype).pin_memory()
    made = torch.cuda.Event()

    def wait_for_event():
        made.record()
        made.synchronize()

    either = [{"stream": 1}, {"copy": 1}]
    for name, step, expected in (
        ("item", lambda: x[0].item(), either),
        ("tolist", lambda: x.tolist(), either),
        ("nonzero", lambda: x.nonzero(), either),
        ("cpu", lambda: x.cpu(), [{"copy": 1}]),
        ("to pageable", lambda: host.copy_(x, non_blocking=True), [{"copy": 1}]),
        ("tensor", lambda: torch.tensor([1, 2], device=cuda), either),
        ("device", lambda: torch.cuda.synchronize(), [{"device": 1}]),
        ("stream", lambda: torch.cuda.current_stream().synchronize(), [{"stream": 1}]),
        ("event", wait_for_event, [{"event": 1}]),
        ("pinned to the GPU", lambda: pinned.to(cuda, non_blocking=True), [{}]),
        ("to pinned", lambda: pinned.copy_(x, non_blocking=True), [{}]),
        ("kernels", lambda: (x + 1) * 2, [{}]),
    ):
        assert kinds(profile_step(step)) in expected, name


def test_real_waits_have_their_line(cuda):
    x = torch.arange(6, device=cuda)
    made = torch.cuda.Event()

    def step():
        x.sum().item()  # GPU item
        x.tolist()  # GPU tolist
        x[x > 2]  # GPU mask
        torch.cuda.synchronize()  # GPU device
        made.record()
        made.synchronize()  # GPU event
        x.cpu()  # GPU copy

    marks = ("item", "tolist", "mask", "device", "event", "copy")
    lines = {line_of(f"GPU {mark}"): 1 for mark in marks}
    assert {wait.line: wait.count for wait in profile_step(step).syncs} == lines


def test_waits_of_a_builtin_have_the_line_of_who_profiles(cuda):
    profile = profile_step(torch.ones(1, device=cuda).item)  # builtin
    assert [wait.line for wait in profile.syncs] == [line_of("builtin")]


def test_real_waits_of_autograds_thread(cuda):
    x = torch.arange(4, dtype=torch.float32, device=cuda, requires_grad=True)

    def step():
        y = x[x > 1]  # GPU indexed
        y.sum().backward()

    lines = {wait.line: wait.count for wait in profile_step(step).syncs}
    assert lines[line_of("GPU indexed")] == 1
    assert lines[line_of("GPU indexed", "backward of ")] >= 1


def test_real_work_is_counted(cuda):
    x = torch.ones(1000, device=cuda)
    host = torch.ones(1000).pin_memory()

    def step():
        x.add_(1)
        x.mul_(2)
        x.copy_(host, non_blocking=True)
        host.copy_(x, non_blocking=True)

    profile = profile_step(step, steps=3)
    assert (profile.kernels, profile.h2d_copies, profile.d2h_copies) == (6, 3, 3)
    assert {copy.bytes for copy in profile.copies} == {12000}
    assert (profile.sync_count(), profile.graph_launches) == (0, 0)


def test_kernels_of_a_real_graph(cuda):
    x = torch.zeros(8, device=cuda)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            x.add_(1)
    profile = profile_step(graph.replay)
    assert (profile.graph_launches, profile.kernels, profile.sync_count()) == (1, 3, 0)


def test_real_idle_share(cuda):
    torch.ones(1, device=cuda)
    tens_of_ms = 100_000_000  # cycles
    busy = profile_step(lambda: torch.cuda._sleep(tens_of_ms))
    assert busy.idle_share < 0.3
    idle = profile_step(lambda: (torch.cuda._sleep(tens_of_ms), time.sleep(0.5)))
    assert 0.6 < idle.idle_share < 1
    assert idle.gpu_busy_us == pytest.approx(busy.gpu_busy_us, rel=0.3)
