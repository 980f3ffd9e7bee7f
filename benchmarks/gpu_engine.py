"""The part `engine` of `benchmarks.gpu_check`: the scheduler's steps beside bare replays, and what memory they take."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.gpu_check import Figure
from benchmarks.roofline import LLAMA_7B, Shapes, floor_ratio
from dataplane.engine.config import EngineConfig
from dataplane.engine.engine import Engine
from dataplane.engine.graphs import DecodeGraphs
from dataplane.engine.messages import Sampling, Stage, Submit
from dataplane.engine.plan import Decodes, Picks, Plan
from dataplane.engine.runner import Runner, model_features
from dataplane.lora.image import Image, ImagePair, build_image
from dataplane.lora.image_file import write_image
from dataplane.model.architecture import Architecture
from dataplane.model.config import parse_config
from dataplane.model.decoder import Decoder
from dataplane.model.layers import Rotary
from dataplane.model.pieces import Pieces
from dataplane.model.stack import DecoderLayer, PieceStack
from kernels.rows import BASE, build_rank_rows

_MIB = 1 << 20
HEAD_DIM = 128
"""Of a 7B model."""

_GREEDY = Sampling(max_tokens=1, temperature=0.0)


class Marks:
    """Moments in the order of a device's work; on the CPU moments of the clock."""

    def __init__(self, device: str) -> None:
        self._on_cuda = device == "cuda"

    def mark(self) -> torch.cuda.Event | float:
        """Returns a moment: the one when the device gets here."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
        """Returns the milliseconds from one to the other, once the device is through with both."""
        if isinstance(start, float) or isinstance(end, float):
            return 1e3 * (end - start)  # type: ignore[operator]
        end.synchronize()
        return float(start.elapsed_time(end))


class Memory:
    """Memory of a device that no tensor accounts for: what captured steps take, and libraries.

    Args:
        free: Returns the bytes that the device has left.
        reserved: Returns those that torch took for tensors.
    """

    def __init__(self, free: Callable[[], int], reserved: Callable[[], int]) -> None:
        self._free, self._reserved = free, reserved
        self._start = self._taken()
        self._graphs: list[int] = []

    @classmethod
    def of(cls, device: str) -> Memory:
        """Returns the memory of a device; the CPU has none that would count."""
        if device != "cuda":
            return cls(lambda: 0, lambda: 0)
        torch.cuda.init()
        return cls(lambda: torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved)

    def _taken(self) -> int:
        return -self._free() - self._reserved()

    def counted(self, add: Callable[..., None]) -> Callable[..., None]:
        """Returns `DecodeGraphs.add` with a look at the memory before and after."""

        def add_counted(*args: Any, **kwargs: Any) -> None:
            before = self._taken()
            add(*args, **kwargs)
            self._graphs.append(self._taken() - before)

        return add_counted

    def figures(self) -> Iterator[Figure]:
        """Yields what the memory plan assumes of both: the first capture, which makes workspaces, counts as any other."""
        graph_bytes = statistics.median(self._graphs)
        library_bytes = self._taken() - self._start - graph_bytes * len(self._graphs)
        yield Figure("graph_mib", graph_bytes / _MIB, "MiB")
        yield Figure("libraries_mib", library_bytes / _MIB, "MiB")


def fields_of(shapes: Shapes, *, head_dim: int = HEAD_DIM, max_context: int = 4096) -> dict[str, object]:
    """Returns the config of a Llama of these shapes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shapes.hidden,
        "intermediate_size": shapes.mlp,
        "num_attention_heads": shapes.hidden // head_dim,
        "num_key_value_heads": shapes.kv // head_dim,
        "num_hidden_layers": shapes.num_layers,
        "vocab_size": shapes.vocab,
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def random_decoder(
    _folder: Path, form: Architecture, *, max_context: int, dtype: torch.dtype, device: torch.device, pieces: Pieces
) -> Decoder:
    """Returns random weights as `load_decoder` returns a folder's, without 13 GB of files."""

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02)

    def site(name: str) -> torch.Tensor:
        parts = [part for part in form.projections if part.site == name]
        return random(sum(part.out_features for part in parts), parts[0].in_features)

    ones = torch.ones(form.hidden, dtype=dtype, device=device)
    layers = tuple(
        DecoderLayer(
            attention_norm=ones,
            qkv=pieces.pack(site("qkv")),
            qk_norm=None,
            o=pieces.pack(site("o")),
            post_attention_norm=None,
            mlp_norm=ones,
            gate_up=pieces.pack(site("gate_up")),
            down=pieces.pack(site("down")),
            post_mlp_norm=None,
        )
        for _ in range(form.num_layers)
    )
    ropes = {layer.rope for layer in form.layers if layer.rope is not None}
    rotaries = {rope: Rotary(rope, max_context=max_context, dtype=dtype, device=device) for rope in ropes}
    return Decoder(
        form=form,
        embedding=random(form.vocab_size, form.hidden),
        embedding_scale=1.0,
        stack=PieceStack(form, layers, rotaries, pieces),
        norm=ones,
        head=pieces.pack(random(form.vocab_size, form.hidden)),
        pieces=pieces,
    )


def random_image(form: Architecture, *, rank: int, dtype: str) -> Image:
    """Returns an adapter of one rank on all modules."""
    tile = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32) * np.float32(0.02)

    def random(*shape: int) -> np.ndarray:
        return np.resize(tile, shape)

    features = model_features(form)
    pairs = (
        ImagePair(layer, index, 1.0, random(rank, k), random(n, rank))
        for layer in range(form.num_layers)
        for index, (k, n) in enumerate(features)
    )
    return build_image(pairs, version="0", base_digest="", dtype=dtype, num_layers=form.num_layers, num_slices=len(features))


class Serving:
    """An engine with adapters on the device and sequences that all decode, driven turn by turn in the calling thread."""

    def __init__(self, folder: Path, *, config: EngineConfig, num_adapters: int, rank: int, num_steps: int) -> None:
        form = parse_config(json.loads((folder / "config.json").read_text()))
        self.engine = Engine(config, lambda _events: None)
        self.runner: Runner = self.engine._runner
        image = random_image(form, rank=rank, dtype=config.arena_dtype)
        versions = [str(number) for number in range(num_adapters)]
        for version in versions:
            write_image(folder / version, replace(image, version=version))
            self.engine.send(Stage(version, str(folder / version)))
        self.turn_until(lambda: all(self.engine._adapters.is_in_host(version) for version in versions))
        count = config.max_sequences
        sampling = Sampling(max_tokens=num_steps, temperature=0.0)
        for number in range(count):
            prompt = tuple((number + i) % form.vocab_size for i in range(8))
            version = versions[number % num_adapters]
            self.engine.send(Submit(request_id=str(number), tenant="t", prompt=prompt, sampling=sampling, version=version))
        self.turn_until(lambda: self.num_decoding() == count)

    def turn_until(self, holds: Callable[[], bool]) -> None:
        """Turns until something holds."""
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, "the engine does not get there"
            self.engine._turn()

    def num_decoding(self) -> int:
        """Returns the sequences that decode."""
        return int(self.engine._scheduler._seating.decoders._is_ready.sum())

    def stop(self) -> None:
        """Ends what runs beside."""
        self.engine._grammars.stop()
        self.engine._adapters.stop()


def engine(
    *,
    shapes: Shapes = LLAMA_7B,
    head_dim: int = HEAD_DIM,
    num_rows: int = 64,
    num_adapters: int = 22,
    rank: int = 16,
    num_steps: int = 200,
    repeats: int = 30,
    contexts: tuple[int, ...] = (0, 256, 1024),
    **settings: object,
) -> Iterator[Figure]:
    """Decode steps of the real scheduler beside bare replays of the same graph, and where the difference is."""
    settings = {
        "device": "cuda", "dtype": "bfloat16", "max_sequences": num_rows, "max_step_tokens": max(512, num_rows),
        "kv_bytes": 40 << 30, "arena_bytes": 4 << 30, "max_slots": num_adapters, "max_rank": rank,
        "max_step_rank_rows": num_adapters * -(-rank // 16) * 16,
    } | settings  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(fields_of(shapes, head_dim=head_dim)))
        config = EngineConfig(model_dir=name, **settings)  # type: ignore[arg-type]
        memory = Memory.of(config.device)
        with (
            mock.patch("dataplane.engine.runner.load_decoder", random_decoder),
            mock.patch("dataplane.engine.engine._IDLE_S", 0.01),
            mock.patch.object(DecodeGraphs, "add", memory.counted(DecodeGraphs.add)),
        ):
            serving = Serving(folder, config=config, num_adapters=num_adapters, rank=rank, num_steps=2 * num_steps + 50)
            try:
                marks = Marks(config.device)
                yield from memory.figures()
                yield from _steps(serving, marks, num_slots=num_adapters, num_steps=num_steps, repeats=repeats)
                yield from _ratios(
                    serving.runner,
                    marks,
                    shapes=shapes,
                    mix=(num_adapters, rank),
                    num_rows=num_rows,
                    contexts=contexts,
                    repeats=repeats,
                )
            finally:
                serving.stop()


def _steps(serving: Serving, marks: Marks, *, num_slots: int, num_steps: int, repeats: int) -> Iterator[Figure]:
    runner, num_rows = serving.runner, serving.num_decoding()
    begins: list[torch.cuda.Event | float] = []
    ends: list[torch.cuda.Event | float] = []
    launch, sent = runner.launch, runner._buffers._sent

    def sent_marked(*arguments: object) -> object:
        begins.append(marks.mark())  # all that the host does before the device can begin
        return sent(*arguments)  # type: ignore[arg-type]

    def launch_marked(plan: object) -> object:
        launched = launch(plan)  # type: ignore[arg-type]
        ends.append(marks.mark())
        return launched

    runner._buffers._sent, runner.launch = sent_marked, launch_marked  # type: ignore[assignment,method-assign]
    waited = runner.watch.seconds.get("wait", 0.0)
    start = time.perf_counter()
    for _ in range(num_steps):
        serving.engine._turn()
    taken = time.perf_counter() - start
    waited = runner.watch.seconds.get("wait", 0.0) - waited
    del runner._buffers._sent, runner.launch
    assert serving.num_decoding() == num_rows, "sequences ended while they were measured"
    assert runner._graphs is not None, "the form replays decode steps"
    step_ms = taken / num_steps * 1e3
    gaps = [marks.ms(end, begin) for end, begin in zip(ends, begins[1:], strict=False)]
    context = int(serving.engine._scheduler._seating.decoders._position.max()) - num_steps // 2
    replay_ms = _replay_ms(runner, marks, num_rows=num_rows, num_slots=num_slots, context=context, repeats=repeats)
    yield Figure("decode_tokens_per_s", num_rows / step_ms * 1e3, "1/s")
    yield Figure("step_ms", step_ms, "ms")
    yield Figure("bare_replay_ms", replay_ms, "ms")
    yield Figure("engine_vs_graph", replay_ms / step_ms, "ratio")
    yield Figure("host_work_us", (taken - waited) / num_steps * 1e6, "us")
    yield Figure("device_idle_us", statistics.median(gaps) * 1e3, "us")


def _ratios(
    runner: Runner, marks: Marks, *, shapes: Shapes, mix: tuple[int, int], num_rows: int, contexts: tuple[int, ...], repeats: int
) -> Iterator[Figure]:
    num_adapters, rank = mix
    is_fp8 = runner.arena.tensor.dtype is torch.uint8
    for context in contexts:
        base, mixed = (
            _replay_ms(runner, marks, num_rows=num_rows, num_slots=num_slots, context=context, repeats=repeats)
            for num_slots in (0, num_adapters)
        )
        floor = floor_ratio(shapes, num_adapters=num_adapters, rank=rank, num_rows=num_rows, context=context)
        yield Figure(f"base_step_context_{context}_ms", base, "ms")
        name = f"{num_adapters}_adapters_rank_{rank}{'_fp8' if is_fp8 else ''}_context_{context}"
        yield Figure(name, mixed / base, "ratio", 1 + (floor - 1) / 2 if is_fp8 else floor)


def _replay_ms(runner: Runner, marks: Marks, *, num_rows: int, num_slots: int, context: int, repeats: int) -> float:
    """Returns the median time of a bare replay: so many tokens in front of each row, adapters in turn, none for no slots."""
    graphs = runner._graphs
    assert graphs is not None, "the form replays decode steps"
    seats, num_pages = np.arange(num_rows), context // runner.kv.page_size + 1
    pages = tuple((seat, place, 1 + seat * num_pages + place) for seat in range(num_rows) for place in range(num_pages))
    picks = Picks(seats, [_GREEDY] * num_rows, seats, {})
    slots = np.arange(num_rows, dtype=np.int32) % num_slots if num_slots else np.full(num_rows, BASE, dtype=np.int32)
    decodes = Decodes(picks, slots, np.full(num_rows, context), pages)
    with torch.inference_mode():
        step = runner._fill_decodes(Plan((), num_rows, frozenset(), decodes), num_rows)
        runner._attention.begin_step(step.batch)
        variant = graphs.begin_step(build_rank_rows(step.row_slot, runner.arena.descriptors.largest_rank))
        taken = []
        for _ in range(repeats):
            start = marks.mark()
            graphs.replay(num_rows, variant)
            taken.append(marks.ms(start, marks.mark()))
    return statistics.median(taken)
