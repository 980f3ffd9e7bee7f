"""A library in the place of our kernels for prompts: a stand-in of the same signature, since none runs on a CPU."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

import kernels.gpu.library_attention
from kernels.attention_reference import attend
from kernels.gpu.attention_trial import choose_library
from kernels.gpu.device import probe
from kernels.gpu.library_attention import Library, NoLibraryError, find_library
from tests.kernels.gpu.paging import Part, Sequences, heads_of

CPU = torch.device("cpu")
SCALE = 0.2


class StandIn:
    """What PyTorch's function does, in float64, for the arguments that it takes; it keeps what it was called with."""

    def __init__(self, *, off_by: float = 0.0):
        self.calls, self.off_by = [], off_by

    def __call__(self, *args, **kwargs):
        call = inspect.signature(varlen_attn).bind(*args, **kwargs)
        call.apply_defaults()
        self.calls.append(call.arguments)
        given = call.arguments
        q, k, v, starts = (given[name] for name in ("query", "key", "value", "cu_seq_q"))
        assert starts.dtype is torch.int32
        assert torch.equal(starts, given["cu_seq_k"])
        assert given["max_q"] == given["max_k"] == int(starts.diff().max())
        assert q.shape[1] == k.shape[1] or given["enable_gqa"]
        left, right = given["window_size"]
        assert right == 0
        out = torch.empty_like(q)
        for start, end in zip(starts.tolist(), starts[1:].tolist(), strict=False):
            for row in range(start, end):
                first = start if left < 0 else max(start, row - left)
                keys, values = k[first : row + 1], v[first : row + 1]
                out[row] = attend(q[row], keys, values, scale=given["scale"], softcap=None).out.to(out.dtype)
        return out + self.off_by


def library_of(heads, varlen):
    options = {"scale": heads.scale} | ({"enable_gqa": True} if heads.num_heads > heads.num_kv_heads else {})
    return Library("stand-in", varlen, options)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("group", [1, 3])
def test_prompts_are_attended_to_by_the_library_and_the_rest_by_our_kernels(window, group):
    sequences = Sequences(heads_of(64, group), [80] * 6, dtype=torch.float32)
    attention, varlen = sequences.attention(), StandIn()
    attention.use(library_of(sequences.heads, varlen))
    sequences.check(
        attention, [Part(0, 33), Part(1, 0, 5), Part(2, 0, 19), Part(3, 16, 9), Part(4, 0, 17), Part(5, 40, 3)], window=window
    )
    assert [call["cu_seq_q"].tolist() for call in varlen.calls] == [[0, 5, 24], [0, 17]]
    sequences.check(attention, [Part(0, 34), Part(3, 25, 9)], window=window)
    assert len(varlen.calls) == 2, "nothing in that step is without a context"


def test_a_library_has_no_place_in_the_batch_invariant_form():
    sequences = Sequences(heads_of(64, 1), [20], dtype=torch.float16)
    with pytest.raises(AssertionError, match="other bits"):
        sequences.attention(batch_invariant=True).use(library_of(sequences.heads, StandIn()))


def found(**changes):
    return find_library(**{"dtype": torch.bfloat16, "scale": SCALE, "group": 1, "softcap": None} | changes)


def test_pytorchs_own_is_found_with_the_arguments_that_this_build_has():
    assert found().varlen is varlen_attn
    assert found().options == {"scale": SCALE}
    assert found(group=4).options == {"scale": SCALE, "enable_gqa": True}


@pytest.mark.parametrize(
    ("changes", "message"), [({"softcap": 30.0}, "softcap"), ({"dtype": torch.float32}, "float32")], ids=["softcap", "float32"]
)
def test_what_no_library_computes_is_left_to_our_kernels(changes, message):
    with pytest.raises(NoLibraryError, match=message):
        found(**changes)


def test_a_build_whose_function_takes_other_arguments_is_not_called(monkeypatch):
    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False): ...

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)
    with pytest.raises(NoLibraryError, match="no argument scale, window_size"):
        found()


def test_a_build_without_the_function_is_not_called(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    with pytest.raises(NoLibraryError, match=r"has no torch\.nn\.attention\.varlen"):
        found()


@pytest.fixture
def flash_3(monkeypatch):
    """FlashAttention 3 seems to be installed; returns what torch was asked to activate."""
    activated, find_spec = [], importlib.util.find_spec
    spec = importlib.util.spec_from_loader("flash_attn_interface", loader=None)
    monkeypatch.setattr(
        kernels.gpu.library_attention.importlib.util,
        "find_spec",
        lambda name, *rest: spec if name == "flash_attn_interface" else find_spec(name, *rest),
    )
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", activated.append)
    return activated


def test_flash_attention_3_is_taken_where_it_is_installed_without_splits(flash_3):
    library = found(group=2)
    assert library.name == "FlashAttention 3"
    assert library.options == {"scale": SCALE, "enable_gqa": True, "num_splits": 1}
    assert flash_3 == ["FA3"]


def test_what_torch_does_not_activate_is_not_taken(flash_3, monkeypatch, caplog):
    def refuse(_):
        raise RuntimeError("does not expose FA3 kernels")

    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", refuse)
    assert found().name == "FlashAttention 2 of torch"
    assert "torch does not take it" in caplog.text


def chosen(varlen, *, times=(2.0, 1.0), find=None):
    heads, clock = heads_of(64, 2), iter(times)
    find = find or (lambda **_: library_of(heads, varlen))

    def timed(run):
        run()
        return next(clock)

    return choose_library(heads, gpu=probe("cpu"), dtype=torch.float16, device=CPU, clock=timed, num_rows=40, find=find)


@pytest.fixture(autouse=True)
def _choices_are_logged(caplog):
    caplog.set_level(logging.INFO)


def test_a_faster_library_is_chosen(caplog):
    varlen = StandIn()
    assert chosen(varlen).varlen is varlen
    assert [call["cu_seq_q"].tolist() for call in varlen.calls] == [[0, 30, 40]] * 2
    assert "a library attends" in caplog.text


def test_a_slower_library_is_not(caplog):
    assert chosen(StandIn(), times=(1.0, 2.0)) is None
    assert "our kernels attend" in caplog.text


def test_a_library_that_gives_something_else_is_not(caplog):
    assert chosen(StandIn(off_by=0.1)) is None
    assert "gives something else" in caplog.records[-1].reason


def test_a_library_that_gives_no_numbers_is_not(caplog):
    assert chosen(StandIn(off_by=float("nan"))) is None
    assert "gives something else" in caplog.records[-1].reason


def test_pytorchs_own_cannot_be_called_here_so_our_kernels_stay(caplog):
    assert chosen(None, find=find_library) is None
    assert "cannot be called" in caplog.records[-1].reason
