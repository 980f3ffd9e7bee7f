"""Runs plans: the one place where decisions in integers become tensors."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataplane.engine.batch import FilledStep, StepBuffers
from dataplane.engine.config import EngineConfig
from dataplane.engine.forms import choose_forms, model_sites
from dataplane.engine.graphs import Captures, DecodeGraphs, row_buckets
from dataplane.engine.memory import MemoryPlan
from dataplane.engine.messages import Logprobs
from dataplane.engine.plan import Chosen, Plan, PlannedRows, Result
from dataplane.engine.sampler import Sampler, failed
from dataplane.engine.samples import SAMPLE_ROWS, Samples, SlotSamples, sample_columns, sample_input
from dataplane.engine.stopwatch import Stopwatch
from dataplane.engine.upload import upload
from dataplane.lora.arena import Arena
from dataplane.model.architecture import Architecture
from dataplane.model.attention import PagedKv
from dataplane.model.loader import DTYPES, load_decoder
from kernels.edges import Edges
from kernels.rows import BASE, build_rank_rows
from veneer.errors import VeneerError

_WARM_ROWS = (16, 64, 128, 129)
"""A number of rows in each bucket for which a device's kernels have a configuration."""


def model_features(form: Architecture) -> tuple[tuple[int, int], ...]:
    """Returns (in, out) of each slice."""
    return tuple((part.in_features, part.out_features) for part in form.projections)


def edge_features(form: Architecture) -> tuple[tuple[int, int], ...]:
    """Returns (in, out) of what adapters may target outside of the layers: the embedding and the head."""
    return ((form.vocab_size, form.hidden), (form.hidden, form.vocab_size))


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that is queued on the device, or done.

    Attributes:
        plan: Its plan.
        tokens: int64 [S] in host memory, -1 where logits were not finite; valid once `ready` came.
        more: By row, what there is beside or instead of the token.
        scores: Of rows that are scored.
        ready: Comes when the tokens are there; None where they are already.
    """

    plan: Plan
    tokens: Tensor
    more: Mapping[int, Chosen]
    scores: Sequence[tuple[Logprobs, ...] | VeneerError | None]
    ready: torch.cuda.Event | None


class Runner:
    """Owns model, KV tensor, step buffers, low-rank buffers and per-seat state on the device. Called by the step loop only.

    A device computes what is queued in order, so a step may be launched before the one in front of it is finished; no more than
    two may be unfinished.

    Attributes:
        arena: Adapters on the device.
        kv: The KV tensor.
        form: Name of the form that computes, for the printed plan.
        slower: Why it is slower than the processor could run; empty where it is not.
        watch: Seconds of the host by part: `fill`, `forward`, `sample`, and `wait` where a device computes.
        orders: Samples to take at the end of the next step, which serves their versions; from the step loop.
        samples: Those that were taken; for the step loop.
    """

    def __init__(self, config: EngineConfig, model: Architecture, memory: MemoryPlan) -> None:
        device, dtype = torch.device(config.device), DTYPES[config.dtype]
        model = model.within(memory.max_context)
        self.arena = Arena(
            config.arena_bytes,
            unit_bytes=config.arena_unit_bytes,
            max_slots=config.max_slots,
            num_layers=model.num_layers,
            features=model_features(model),
            dtype=config.arena_dtype,
            device=device,
            edge_features=() if config.arena_dtype == "fp8" else edge_features(model),
        )
        self._edges = None
        if config.arena_dtype != "fp8":
            self._edges = Edges(self.arena.tensor, self.arena.edges, hidden=model.hidden, vocab_size=model.vocab_size)
        self.kv = PagedKv(
            model, num_pages=memory.num_pages + memory.num_spare, page_size=config.page_size, dtype=dtype, device=device
        )
        forms = choose_forms(
            config, model, kv=self.kv, arena=self.arena, sites=model_sites(model), max_context=memory.max_context
        )
        self.form, self.slower = forms.name, forms.slower
        self._attention, self._low_rank = forms.attention, forms.low_rank
        with torch.inference_mode():
            loaded = load_decoder(
                Path(config.model_dir), model, max_context=memory.max_context, dtype=dtype, device=device, pieces=forms.pieces
            )
            self._model = forms.fit(loaded)
        self._buffers = StepBuffers(
            max_step_tokens=config.max_step_tokens,
            max_sequences=config.max_sequences,
            max_pages=-(-memory.max_context // config.page_size),
            device=device,
        )
        self._sampler = Sampler(
            max_sequences=config.max_sequences,
            vocab_size=model.vocab_size,
            device=device,
            pieces=forms.pieces,
            row_by_row=config.batch_invariant,
        )
        self._last_token = torch.zeros(config.max_sequences, dtype=torch.int64, device=device)
        self._no_tokens = torch.empty(0, dtype=torch.int64)
        on_cuda = device.type == "cuda"
        self._hosts = [torch.empty(config.max_sequences, dtype=torch.int64, pin_memory=on_cuda) for _ in range(2)]
        self._device, self._dtype = device, dtype
        self._sites = model_sites(model)
        self.orders: queue.SimpleQueue[SlotSamples] = queue.SimpleQueue()
        self.samples: queue.SimpleQueue[Samples] = queue.SimpleQueue()
        self.watch = Stopwatch()
        self._graphs = None
        if forms.captures is not None:
            self._warm(forms.captures, max_rows=config.max_step_tokens, max_sequences=config.max_sequences)
            self._graphs = self._captured(forms.captures, max_sequences=config.max_sequences, dtype=dtype)

    def run(self, plan: Plan) -> list[Result]:
        """Runs one step and returns what came of the rows that sample or are scored, in order."""
        return self.finish(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Launched:
        """Queues one step. Where a device computes, the host waits for it only if rows have rules, reports or scores."""
        self.watch.start()
        new_pages = [page for _, _, page in plan.decodes.new_pages]
        new_pages += [page for rows in plan.rows for page in rows.new_pages[rows.num_shared_pages :]]
        if new_pages:
            self.kv.clear(upload(new_pages, torch.int64, self._device))
        num_rows = self._captured_rows(plan)
        step = self._buffers.fill(plan, self.kv) if num_rows is None else self._fill_decodes(plan, num_rows)
        step.batch.ids[: len(step.decode_seats)] = self._last_token[step.decode_seats]
        for planned in plan.rows:
            self._sampler.start(planned)
        rank_rows = build_rank_rows(step.row_slot, self.arena.descriptors.largest_rank)
        if self._graphs is None or num_rows is None:
            self._low_rank.begin_step(rank_rows)
            if self._edges is not None:
                self._edges.begin_step(step.row_slot)
            self.watch.lap("fill")
            logits = self._model.forward(step.batch, self._attention, self._low_rank, self._edges)
        else:
            variant = self._graphs.begin_step(rank_rows)
            self._attention.begin_step(step.batch)
            self.watch.lap("fill")
            logits = self._graphs.replay(num_rows, variant)
        self.watch.lap("forward")
        num_sampled = len(step.picks)
        tokens = self._no_tokens
        more: Mapping[int, Chosen] = {}
        scores: Sequence[tuple[Logprobs, ...] | VeneerError | None] = ()
        if num_sampled:
            samples = self._sampler.sample(logits[:num_sampled], step.picks)
            if held := [i for i, one in samples.more.items() if one.is_held]:  # the row is computed again, with the same token
                sampled = step.batch.ids if step.batch.sample_rows is None else step.batch.ids[step.batch.sample_rows]
                at = upload(held, torch.int64, self._device)
                samples.tokens[at] = sampled[at]
            self._last_token[step.pick_seats] = samples.tokens
            tokens, more = torch.where(samples.finite, samples.tokens, -1), samples.more
        if step.scored:
            scores = self._sampler.score(logits[num_sampled:], step.scored)
        self.watch.lap("sample")
        while not self.orders.empty():
            self.samples.put(self._take_samples(self.orders.get()))
        host, ready = self._on_host(tokens)
        return Launched(plan, host, more, scores, ready)

    def finish(self, launched: Launched) -> list[Result]:
        """Waits for a step and returns what came of the rows that sample or are scored, in order."""
        if launched.ready is not None:
            self.watch.start()
            launched.ready.synchronize()
            self.watch.lap("wait")
        results: list[Result] = [None if token < 0 else token for token in launched.tokens.tolist()]
        for i, more in launched.more.items():
            if results[i] is not None:
                results[i] = more
        return _with_scores(launched.plan, results, launched.scores) if launched.scores else results

    def _captured_rows(self, plan: Plan) -> int | None:
        """Returns the rows of the graph that computes a step; None where its kernels are launched."""
        if self._graphs is None or (self._edges is not None and self._edges.is_needed(plan.decodes.slots)):
            return None
        return self._graphs.bucket(plan)

    def _take_samples(self, asked: SlotSamples) -> Samples:
        """Runs the form's low-rank product of one adapter on the samples' input; the next step begins anew with its own rows."""
        slots = np.full(SAMPLE_ROWS, asked.slot, np.int32)
        self._low_rank.begin_step(build_rank_rows(slots, self.arena.descriptors.largest_rank))
        values = []
        for layer, index in asked.order.places:
            site = next(site for site in self._sites if index in site.slices)
            x = torch.from_numpy(sample_input(site.in_features)).to(self._dtype)
            y = torch.zeros(SAMPLE_ROWS, site.columns[-1][1], dtype=self._dtype)
            self._low_rank.add_(y, x, layer=layer, site=site.name)
            first, last = site.columns[site.slices.index(index)]
            columns = torch.from_numpy(sample_columns(last - first))
            values.append(tuple(y[:, first:last].index_select(1, columns).float().flatten().tolist()))
        return Samples(asked.order.token, tuple(values))

    def _fill_decodes(self, plan: Plan, num_rows: int) -> FilledStep:
        return self._buffers.fill_decodes(plan, self.kv, num_rows=num_rows, spare_page=len(self.kv.data) - 1)

    @torch.inference_mode()
    def _warm(self, captures: Captures[Any], *, max_rows: int, max_sequences: int) -> None:
        """Runs chunks of nobody in every row bucket once, so that no request waits for a kernel to be compiled."""
        size, spare = self.kv.page_size, len(self.kv.data) - 1
        for num_chunks in sorted({-(-num_rows // size) for num_rows in _WARM_ROWS}):
            if num_chunks > max_sequences or num_chunks * size > max_rows:
                break
            chunks = tuple(
                PlannedRows(seat, BASE, 0, size, (0,) * size, (spare,), 0, None, 0, None) for seat in range(num_chunks)
            )
            step = self._buffers.fill(Plan(chunks, num_chunks * size, frozenset()), self.kv)
            for variant in captures.variants:
                captures.low_rank.begin_step(build_rank_rows(step.row_slot, self.arena.descriptors.largest_rank), variant=variant)
                self._model.forward(step.batch, self._attention, self._low_rank)

    @torch.inference_mode()
    def _captured(self, captures: Captures[Any], *, max_sequences: int, dtype: torch.dtype) -> DecodeGraphs[Any]:
        """Captures every step that there may be whose rows all decode, the largest first, since they share memory."""
        buckets = row_buckets(max_sequences)
        logits = torch.zeros(buckets[-1], self._model.form.vocab_size, dtype=dtype, device=self._device)
        graphs = DecodeGraphs(captures, buckets=buckets, logits=logits)
        nobody = Plan((), 0, frozenset())
        for num_rows in reversed(buckets):
            step = self._fill_decodes(nobody, num_rows)
            self._attention.begin_step(step.batch)
            for variant in captures.variants:
                captures.low_rank.begin_step(build_rank_rows(step.row_slot, self.arena.descriptors.largest_rank), variant=variant)
                graphs.add(num_rows, variant, partial(self._model.compute, step.batch, self._attention, self._low_rank))
        return graphs

    def _on_host(self, tokens: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Starts the one copy of a step from the device; steps take the two host buffers in turn."""
        if tokens.device.type != "cuda":
            return tokens, None
        host = self._hosts[0][: len(tokens)]
        self._hosts.reverse()
        host.copy_(tokens, non_blocking=True)
        ready = torch.cuda.Event(blocking=True)
        ready.record()
        return host, ready


def _with_scores(plan: Plan, results: list[Result], scores: Sequence[tuple[Logprobs, ...] | VeneerError | None]) -> list[Result]:
    """Puts what came of sampled rows and what came of scored rows together, in the plan's order."""
    num_decodes = len(plan.decodes)
    tokens, of_prompts = iter(results[num_decodes:]), iter(scores)
    whole = results[:num_decodes]
    for planned in plan.rows:
        samples = planned.sampling is not None
        result = next(tokens) if samples else None
        if not planned.targets:
            if samples:
                whole.append(result)
            continue
        score = next(of_prompts)
        if score is None or (samples and result is None):
            whole.append(None)
        elif isinstance(score, VeneerError):
            whole.append(failed(score))
        elif isinstance(result, Chosen):
            whole.append(replace(result, prompt=score))
        else:
            whole.append(Chosen(result, prompt=score))
    return whole
