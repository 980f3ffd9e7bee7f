"""Runs plans: the one place where decisions in integers become tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dataplane.engine.batch import StepBuffers
from dataplane.engine.config import EngineConfig
from dataplane.engine.forms import choose_forms
from dataplane.engine.memory import MemoryPlan
from dataplane.engine.messages import Logprobs
from dataplane.engine.plan import Chosen, Picks, Plan, Result
from dataplane.engine.sampler import Sampler, failed
from dataplane.engine.stopwatch import Stopwatch
from dataplane.lora.arena import Arena
from dataplane.model.architecture import Architecture
from dataplane.model.attention import PagedKv
from dataplane.model.loader import DTYPES, load_decoder
from kernels.rows import build_rank_rows
from kernels.sites import Site
from veneer.errors import VeneerError


def model_sites(form: Architecture) -> tuple[Site, ...]:
    """Returns the fused products; their slices are the projections, in order."""
    sites = []
    for name in dict.fromkeys(part.site for part in form.projections):
        slices = [index for index, part in enumerate(form.projections) if part.site == name]
        parts = [form.projections[index] for index in slices]
        out_features = tuple(part.out_features for part in parts)
        sites.append(Site.fused(name, first_slice=slices[0], in_features=parts[0].in_features, out_features=out_features))
    return tuple(sites)


def model_features(form: Architecture) -> tuple[tuple[int, int], ...]:
    """Returns (in, out) of each slice."""
    return tuple((part.in_features, part.out_features) for part in form.projections)


class Runner:
    """Owns model, KV tensor, step buffers, low-rank buffers and per-seat state on the device. Called by the step loop only.

    Attributes:
        arena: Adapters on the device.
        kv: The KV tensor.
        form: Name of the form that computes, for the printed plan.
        watch: Seconds of `run` by part: `fill`, `forward`, `sample`.
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
            dtype=config.dtype,
            device=device,
        )
        self.kv = PagedKv(model, num_pages=memory.num_pages + 1, page_size=config.page_size, dtype=dtype, device=device)
        forms = choose_forms(config, model, kv=self.kv, arena=self.arena, sites=model_sites(model))
        self.form, self._attention, self._low_rank = forms.name, forms.attention, forms.low_rank
        with torch.inference_mode():
            self._model = load_decoder(
                Path(config.model_dir), model, max_context=memory.max_context, dtype=dtype, device=device, pieces=forms.pieces
            )
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
        self._device = device
        self.watch = Stopwatch()

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[Result]:
        """Runs one step and returns what came of the rows that sample or are scored, in order."""
        self.watch.start()
        new_pages = [page for _, _, page in plan.decodes.new_pages]
        new_pages += [page for rows in plan.rows for page in rows.new_pages[rows.num_shared_pages :]]
        if new_pages:
            self.kv.clear(torch.tensor(new_pages, device=self._device))
        step = self._buffers.fill(plan, self.kv)
        step.batch.ids[: len(step.decode_seats)] = self._last_token[step.decode_seats]
        for planned in plan.rows:
            self._sampler.start(planned)
        self._low_rank.begin_step(build_rank_rows(step.row_slot, self.arena.descriptors.largest_rank))
        self.watch.lap("fill")
        logits = self._model.forward(step.batch, self._attention, self._low_rank)
        self.watch.lap("forward")
        num_sampled = len(step.picks)
        results = self._sample(logits[:num_sampled], step.picks) if num_sampled else []
        if step.scored:
            results = _with_scores(plan, results, self._sampler.score(logits[num_sampled:], step.scored))
        self.watch.lap("sample")
        return results

    def _sample(self, logits: Tensor, picks: Picks) -> list[Result]:
        samples = self._sampler.sample(logits, picks)
        self._last_token[torch.from_numpy(picks.seats).to(self._device)] = samples.tokens
        results: list[Result] = samples.tokens.tolist()
        for i in (~samples.finite).nonzero().squeeze(1).tolist():
            results[i] = None
        for i, more in samples.more.items():
            if results[i] is not None:
                results[i] = more
        return results


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
