"""What attention launches: the same for every step of a kind, so that a captured graph serves all of them."""

from __future__ import annotations

import torch

import kernels.gpu.attention
from tests.kernels.gpu.paging import Part, Sequences, attend_in_nan, heads_of

KERNELS = ("kv_append", "decode_attention", "prefill_attention")


class Tape:
    """Keeps what is launched while it records, to launch it again with the same grids and arguments, as a graph would."""

    def __init__(self, monkeypatch):
        self.launches, self.records = [], True
        for name in KERNELS:
            monkeypatch.setattr(kernels.gpu.attention, name, Recorded(self, getattr(kernels.gpu.attention, name)))

    def replay(self):
        for kernel, grid, arguments, options in self.launches:
            kernel[grid](*arguments, **options)


class Recorded:
    """A kernel whose launches are put on tape."""

    def __init__(self, tape, kernel):
        self.tape, self.kernel = tape, kernel

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            if self.tape.records:
                self.tape.launches.append((self.kernel, grid, arguments, options))
            self.kernel[grid](*arguments, **options)

        return launch


def test_a_captured_step_serves_other_steps(monkeypatch):
    replays_follow_the_metadata(monkeypatch)


def replays_follow_the_metadata(monkeypatch):
    """Launches of one step run again for others of as many rows or fewer: other lengths, pages and windows of live splits."""
    sequences = Sequences(heads_of(64, 2, num_kv_heads=1), [200] * 6, dtype=torch.float32)
    attention, tape = sequences.attention(), Tape(monkeypatch)
    first = [Part(0, 150), Part(1, 3), Part(2, 77), Part(3, 9)]
    steps = (first, [Part(3, 10), Part(0, 151)], [Part(4, 0), Part(5, 64), Part(2, 199)], [Part(1, 63), *first[2:], Part(0, 152)])
    qk, v = (torch.empty(5, *part.shape[1:]) for part in sequences.batch(first))
    out = None
    for parts in steps:
        for part in parts:
            sequences.write(part.sequence, 0, part.start, layer=1)
        for buffer, rows in zip((qk, v), sequences.batch(parts), strict=True):
            buffer.fill_(torch.nan)[: len(rows)] = rows
        attention.begin_step(sequences.step(parts))
        before = sequences.cache.clone()
        if out is None:
            out = attend_in_nan(attention, qk, v, layer=1, window=100)
            tape.records = False
        else:
            out.fill_(torch.nan)
            tape.replay()
        got = out[: len(parts)].clone()
        assert bool(out[len(parts) :].isnan().all())
        after, sequences.cache[:] = sequences.cache.clone(), before
        expected = sequences.run(sequences.attention(), parts, window=100)
        assert torch.equal(after.nan_to_num(1e9), sequences.cache.nan_to_num(1e9)), "something else was appended"
        assert torch.equal(got.view(expected.shape), expected)


def test_launches_do_not_depend_on_what_the_batch_holds(monkeypatch):
    """Two a layer where rows decode, three with chunks, and with grids and sizes that are the same for every step."""
    sequences = Sequences(heads_of(64, 2, num_kv_heads=1), [200] * 4, dtype=torch.float32)
    attention, tape = sequences.attention(), Tape(monkeypatch)
    seen = []
    for parts in (
        [Part(0, 150), Part(1, 3)],
        [Part(2, 0), Part(3, 64)],
        [Part(2, 1), Part(1, 0, 9)],
        [Part(0, 3), Part(1, 60, 9)],
    ):
        tape.launches.clear()
        sequences.run(attention, parts)
        seen.append(
            [(kernel, grid if index else None, options) for index, (kernel, grid, _, options) in enumerate(tape.launches)]
        )
    assert [len(launches) for launches in seen] == [2, 2, 3, 3]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert seen[2][:2] == seen[0]
