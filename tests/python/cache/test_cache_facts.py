"""Test facts made by Python code in the identity cache: cuseq.cache.remember, info, invalidate."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cuseq
from cuseq.cache import keeps, new_key, remember

pytestmark = pytest.mark.usefixtures("fresh_cache")


class Fact:
    """A fact that counts how often it was made."""

    def __init__(self, name: str = "test_fact", **options):
        self.name, self.options, self.made = name, options, 0

    def make(self):
        self.made += 1
        return object()

    def of(self, key, *parameters):
        return remember(key, self.name, self.make, *parameters, **self.options)


def entries(kind: str = "test_fact") -> int:
    return cuseq.cache.info().get(kind, {"entries": 0})["entries"]


def test_a_fact_is_made_once_for_a_key_a_name_and_parameters(device):
    fact, other = Fact(), Fact("test_other_fact")
    key, twin = (torch.arange(4, device=device) for _ in range(2))
    value = fact.of(key, 1, torch.float32)
    assert fact.of(key, 1, torch.float32) is value
    different = [
        fact.of(key, 2, torch.float32),
        fact.of(key, 1, torch.bfloat16),
        fact.of(key, 1),
        fact.of(key),
        fact.of(twin, 1, torch.float32),
        other.of(key, 1, torch.float32),
    ]
    assert len({id(one) for one in [value, *different]}) == 7
    assert (fact.made, other.made) == (6, 1)
    assert entries() == 6 and entries("test_other_fact") == 1


def test_none_is_a_value():
    made = []
    key = torch.arange(3)
    for _ in range(2):
        assert remember(key, "test_fact", lambda: made.append(1)) is None
    assert made == [1]


EDITS = {
    "fill_": lambda key: key.fill_(1),
    "through a view": lambda key: key[1:].zero_(),
    "data of another storage": lambda key: setattr(key, "data", key.clone()),
    "data of fewer elements": lambda key: setattr(key, "data", key.data[:2]),
    "data of another shape": lambda key: setattr(key, "data", key.data.view(2, 2)),
    "data of other strides": lambda key: setattr(key, "data", key.data.as_strided((4,), (0,))),
    "data of another offset": lambda key: setattr(key, "data", key.data.as_strided((4,), (1,), 2)),
    "data of another dtype": lambda key: setattr(key, "data", key.data.view(torch.float32)),
    "resize_": lambda key: key.resize_(3),
    "transpose_": lambda key: key.unsqueeze_(0),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_changed_key_is_a_miss(edit, device):
    fact = Fact()
    key = torch.zeros(8, dtype=torch.int32, device=device)[:4]
    value = fact.of(key)
    edit(key)
    assert fact.of(key) is not value
    assert fact.of(key) is fact.of(key)
    assert entries() == 1, "the old one went"


# Writes that change neither the version counter nor the pointer.
UNSEEN = {
    "numpy": lambda key: key.numpy().fill(5),
    "data": lambda key: key.data.fill_(5),
    "dlpack": lambda key: np.from_dlpack(key).__setitem__(0, 5)
    if np.from_dlpack(key).flags.writeable
    else torch.from_dlpack(key).fill_(5),
    "a view's data": lambda key: key.view(2, 2).data.fill_(5),
}


@pytest.mark.parametrize("write", UNSEEN.values(), ids=UNSEEN)
@pytest.mark.parametrize(
    "forget", [cuseq.cache.invalidate, lambda key: cuseq.cache.clear()], ids=["invalidate", "clear"]
)
def test_invalidate_and_clear_reach_a_fact(forget, write):
    key = torch.zeros(4, dtype=torch.int64)
    values = remember(key, "test_fact", key.tolist)
    write(key)
    assert remember(key, "test_fact", key.tolist) is values
    forget(key)
    assert remember(key, "test_fact", key.tolist) == key.tolist() != values


def test_invalidate_reaches_what_was_made_of_a_view_and_values_in_the_memory(device):
    """A write to memory affects all views of it."""
    buffer = torch.ones(8, dtype=torch.int32, device=device)
    lengths, other = buffer[:4], torch.ones(4, dtype=torch.int32, device=device)
    offsets, others = (cuseq.ops.cached_cu_seqlens(key) for key in (lengths, other))
    fact, of_value = Fact(), Fact("test_other_fact")
    value = fact.of(lengths)
    of_value.of(offsets)
    cuseq.cache.invalidate(buffer)
    assert fact.of(lengths) is not value
    assert cuseq.ops.cached_cu_seqlens(lengths) is not offsets
    offsets = cuseq.ops.cached_cu_seqlens(lengths)
    cuseq.cache.invalidate(offsets.view(1, -1))
    assert cuseq.ops.cached_cu_seqlens(lengths) is not offsets
    assert cuseq.ops.cached_cu_seqlens(other) is others, "it has another memory"


@pytest.mark.parametrize("what", [None, 3, [1, 2]], ids=str)
def test_arguments_that_are_no_tensors_are_refused_by_name(what):
    kind = type(what).__name__
    for name, call in {
        "tensor": cuseq.cache.invalidate,
        "key": lambda key: remember(key, "test_fact", object),
        "lengths": cuseq.ops.cached_cu_seqlens,
    }.items():
        with pytest.raises(TypeError, match=f"^{name} must be a tensor, got {kind}$"):
            call(what)
    for call in (cuseq.ops.cached_position_ids, cuseq.ops.cached_seq_ids):
        with pytest.raises(TypeError, match=f"^lengths must be a tensor, got {kind}$"):
            call(what, 4)


@pytest.mark.parametrize("total_tokens", [None, 4.0, "4"], ids=str)
def test_total_tokens_that_are_no_int_are_refused_by_name(total_tokens):
    for call in (cuseq.ops.cached_position_ids, cuseq.ops.cached_seq_ids):
        with pytest.raises(TypeError, match="^total_tokens must be an int, got "):
            call(torch.tensor([4]), total_tokens)
        with pytest.raises(ValueError, match="^total_tokens must fit in int64, got "):
            call(torch.tensor([4]), 2**63)


def test_parameters_have_to_be_hashable():
    with pytest.raises(TypeError, match="unhashable"):
        remember(torch.arange(2), "test_fact", object, [1])


def test_the_tensors_of_a_value_are_counted_and_watched(device):
    key = torch.arange(4, device=device)
    made = []

    def make():
        made.append(torch.zeros(100, dtype=torch.float32, device=device))
        return {"tensor": made[-1], "half": made[-1][50:]}

    def find():
        return remember(
            key, "test_fact", make, tensors=lambda value: [value["tensor"], value["half"]]
        )

    value = find()
    assert cuseq.cache.info()["test_fact"] == {"entries": 1, "bytes": 400}, "shared memory is one"
    assert cuseq.cache.stats()["bytes"] == 400
    assert find() is value
    value["half"][3] = 1
    assert find() is not value and len(made) == 2
    tensor = remember(key, "test_tensor", lambda: torch.zeros(10, device=device))
    pair = remember(key, "test_pair", lambda: (torch.zeros(10, device=device), "name"))
    kinds = cuseq.cache.info()
    assert [kinds[kind]["bytes"] for kind in ("test_tensor", "test_pair")] == [40, 40]
    tensor.add_(1)
    pair[0].add_(1)
    assert remember(key, "test_tensor", lambda: None) is None
    assert remember(key, "test_pair", lambda: None) is None


def test_facts_go_with_their_key():
    class Value:
        pass

    key = torch.arange(4)
    gone = [weakref.ref(remember(key, "test_fact", Value, number)) for number in range(3)]
    assert entries() == 3
    assert all(ref() is not None for ref in gone)
    del key
    assert all(ref() is None for ref in gone), "at once, without a call of cuseq"
    assert entries() == 0


def test_a_value_must_not_hold_its_key():
    key = torch.arange(4)
    with pytest.raises(RuntimeError, match="must not contain its key"):
        remember(key, "test_fact", lambda: (key, 1))
    assert entries() == 0


def test_scopes_end_facts_except_those_that_outlive_them():
    key = torch.arange(4)
    fact, table = Fact(), Fact("test_table", outlives_scopes=True)
    before = fact.of(key, "before")
    with cuseq.cache.forward_scope():
        inside, kept = fact.of(key, "inside"), table.of(key)
        assert fact.of(key, "inside") is inside
    assert fact.of(key, "before") is before and table.of(key) is kept
    assert fact.of(key, "inside") is not inside


def test_the_value_of_another_device_is_another_value(cuda):
    fact, elsewhere = Fact(), Fact(device="cuda")
    key = torch.arange(4)
    assert fact.of(key) is not elsewhere.of(key)
    assert entries() == 2
    assert Fact(device=cuda).of(key) is elsewhere.of(key)
    assert Fact(device=torch.device("cuda")).of(key) is elsewhere.of(key)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), torch.device("cpu", 0)])
def test_every_name_of_a_device_is_one_parameter(device):
    key = torch.arange(4)
    assert Fact(device=device).of(key) is Fact().of(key)
    with pytest.raises(RuntimeError, match="nowhere"):
        Fact(device="nowhere").of(key)


def test_an_object_without_a_tensor_has_a_key_of_its_own():
    fact = Fact()
    key, other = new_key(), new_key()
    assert fact.of(key) is fact.of(key) is not fact.of(other)
    with FakeTensorMode(), torch.inference_mode(), torch.device("meta"):
        made_inside = new_key()
    assert type(made_inside) is torch.Tensor and not made_inside.is_inference()
    assert made_inside.device.type == "cpu" and keeps(made_inside)
    assert fact.of(made_inside) is fact.of(made_inside)


def check_that_nothing_is_kept(key, *, inside=lambda call: call()):
    fact = Fact()

    def twice():
        assert not keeps(key)
        assert fact.of(key) is not fact.of(key)
        return torch.zeros(())

    inside(twice)
    assert fact.made >= 2 and entries() == 0


def test_nothing_is_kept_where_nothing_may_be():
    key = torch.arange(4)

    def under_fake_tensors(call):
        with FakeTensorMode():
            call()

    def in_inference_mode(call):
        with torch.inference_mode():
            call()

    for inside in (
        under_fake_tensors,
        in_inference_mode,
        lambda call: make_fx(lambda x: x + call())(torch.ones(2)),
        lambda call: torch.func.vmap(lambda x: x + call())(torch.ones(2)),
    ):
        check_that_nothing_is_kept(key, inside=inside)
    with torch.inference_mode():
        inference = torch.arange(4)
    check_that_nothing_is_kept(inference)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(key)
    check_that_nothing_is_kept(fake)
    check_that_nothing_is_kept(torch.empty(3, device="meta"))
    assert Fact(device="meta").of(key) is not None and not keeps(key, "meta") and entries() == 0


def test_a_hit_is_fine_in_inference_mode():
    fact, key = Fact(), torch.arange(4)
    value = fact.of(key)
    with torch.inference_mode():
        assert fact.of(key) is value


def test_values_that_are_no_plain_data_are_not_kept():
    key = torch.arange(4)
    with torch.inference_mode():
        inference = torch.zeros(3)
    assert remember(key, "test_fact", lambda: inference) is inference
    assert remember(key, "test_fact", lambda: torch.empty(3, device="meta")).is_meta
    assert entries() == 0


def test_compiled_code_makes_a_fact_itself():
    key = torch.arange(4)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x):
        return remember(key, "test_fact", lambda: x + 1)

    for number in range(3):
        x = torch.full((2,), float(number))
        assert torch.equal(compiled(x), x + 1)
    assert entries() == 0


def test_an_error_of_make_is_raised_and_nothing_kept():
    key = torch.arange(4)
    with pytest.raises(ZeroDivisionError):
        remember(key, "test_fact", lambda: 1 // 0)
    assert entries() == 0
    assert remember(key, "test_fact", lambda: 5) == 5


def test_an_edit_while_a_fact_is_made_is_seen():
    key = torch.arange(4)

    def make():
        value = key.tolist()
        key.add_(1)
        return value

    remember(key, "test_fact", make)
    assert remember(key, "test_fact", key.tolist) == [1, 2, 3, 4]


def test_a_fact_may_be_made_of_facts():
    key = torch.arange(4)
    inner = Fact("test_inner")
    outer = remember(key, "test_fact", lambda: [inner.of(key)])
    assert remember(key, "test_fact", list) is outer and inner.of(key) is outer[0]


def test_facts_from_threads():
    keys = [torch.full((2,), number) for number in range(4)]

    def ask(seed: int) -> bool:
        for step in range(300):
            number = (seed + step) % 4
            value = remember(keys[number], "test_fact", lambda n=number: [n], step % 3)
            assert value == [number]
            if step % 50 == seed:
                cuseq.cache.clear()
        return True

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(ask, range(6)))
    gc.collect()


LIMITS = """
import torch, cuseq
from cuseq.cache import remember
key = torch.arange(4)
for number in range(20):
    remember(key, "test_fact", lambda: torch.zeros(25), number)
stats = cuseq.cache.stats()
print(stats["entries"], stats["bytes"], stats["evictions"])
made = []
remember(key, "test_fact", lambda: made.append(1), 19)
remember(key, "test_fact", lambda: made.append(1), 0)
big = remember(key, "test_fact", lambda: torch.zeros(10_000), "big")
again = remember(key, "test_fact", lambda: torch.zeros(10_000), "big")
print(len(made), big is again)
"""


@pytest.mark.parametrize(
    "limit,expected",
    [
        ({"CUSEQ_CACHE_MAX_ENTRIES": "3"}, ["3 300 17", "1 True"]),
        ({"CUSEQ_CACHE_MAX_BYTES": "1000"}, ["10 1000 10", "1 False"]),
    ],
    ids=["entries", "bytes"],
)
def test_the_limits_bound_facts_too(limit, expected, run_python):
    result = run_python(LIMITS, **limit)
    assert result.stdout.splitlines() == expected, result.stderr


SWITCHED_OFF = """
import torch, cuseq
from cuseq.cache import keeps, remember
key = torch.arange(4)
values = [remember(key, "test_fact", object) for _ in range(3)]
tables = [cuseq.rope_table(10, 8)[0].data_ptr() for _ in range(2)]
print(len(set(map(id, values))), keeps(key), cuseq.cache.stats()["entries"])
"""


def test_the_switch_turns_facts_off(run_python):
    assert run_python(SWITCHED_OFF, CUSEQ_CACHE="0").stdout.strip() == "3 False 0"
    assert run_python(SWITCHED_OFF, CUSEQ_CACHE="1").stdout.strip() == "1 True 2"


def test_info_lists_every_kind_and_agrees_with_stats(device):
    cuseq.cache.clear()  # RoPE tables of other tests are kept
    lengths = torch.tensor([3, 5], device=device)
    packed = cuseq.PackedLayout.from_lengths([3, 5], device=device)
    cuseq.ops.cached_position_ids(lengths, 9)
    packed.dense_mask()
    packed.block_mask()
    cuseq.rope_table(10, 8, device=device)
    kinds = cuseq.cache.info()
    stats = cuseq.cache.stats()
    assert {"cu_seqlens", "host_copy", "position_ids", "seq_ids", "segment_rows"} <= set(kinds)
    assert {"mask_ranges", "dense_mask", "block_mask", "pending_host_copy"} <= set(kinds)
    assert all(kinds[kind]["entries"] == 1 for kind in ("position_ids", "dense_mask", "rope_table"))
    kinds.pop("pending_host_copy")
    for count in ("entries", "bytes"):
        assert sum(kind[count] for kind in kinds.values()) == stats[count]
    cuseq.cache.clear()
    left = cuseq.cache.info()
    left.pop("pending_host_copy")  # other tests started copies and did not wait
    assert all(kind["entries"] == 0 for kind in left.values())


@pytest.mark.parametrize("parameter", [torch.nn.Parameter, torch.nn.Buffer, torch.Tensor.clone])
def test_tables_of_frequencies_obey_invalidate_and_go_with_them(parameter, device):
    inv_freq = parameter(torch.rand(8, device=device)).requires_grad_(False)
    cos, _ = cuseq.rope_table(10, 16, inv_freq=inv_freq)
    inv_freq.data.mul_(0.5)
    assert torch.equal(cuseq.rope_table(10, 16, inv_freq=inv_freq)[0], cos), "not seen"
    cuseq.cache.invalidate(inv_freq)
    assert not torch.equal(cuseq.rope_table(10, 16, inv_freq=inv_freq)[0], cos)
    assert entries("rope_table") == 1
    del inv_freq
    assert entries("rope_table") == 0


def test_a_table_outlives_scopes(device):
    with cuseq.cache.forward_scope():
        cos, _ = cuseq.rope_table(10, 16, device=device)
    assert cuseq.rope_table(10, 16, device=device)[0].data_ptr() == cos.data_ptr()


def test_a_fact_made_on_another_stream_is_waited_for(cuda):
    """CPU tensors in the value have no stream to record."""
    source, key = torch.ones(1000, device=cuda), new_key()
    torch.cuda.synchronize()

    def make():
        torch.cuda._sleep(200_000_000)
        return source * 2, torch.zeros(3)

    def find():
        return remember(key, "test_fact", make, device="cuda")

    with torch.cuda.stream(torch.cuda.Stream()):
        made = find()
    found = find()
    assert found is made
    assert found[0].clone().eq(2).all()


def test_nothing_is_kept_in_a_capture(cuda):
    fact, key = Fact(device=cuda), new_key()
    value = fact.of(key)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert not keeps(key, cuda) and keeps(key)
        assert fact.of(key) is not value
    assert fact.of(key) is value and entries() == 1
