"""Runs plans: the one place where decisions in integers become tensors."""

from __future__ import annotations

from pathlib import Path

import torch

from dataplane.engine.batch import StepBuffers
from dataplane.engine.config import EngineConfig
from dataplane.engine.memory import MemoryPlan
from dataplane.engine.plan import Plan
from dataplane.engine.sampler import Sampler
from dataplane.lora.arena import Arena
from dataplane.model.attention import PagedKv, TorchAttention
from dataplane.model.config import LlamaConfig
from dataplane.model.loader import DTYPES, load_llama
from kernels.cpu import CpuLowRank
from kernels.rows import build_rank_rows
from kernels.sites import Site


def model_sites(config: LlamaConfig) -> tuple[Site, ...]:
    """Returns the fused projections; slices in the order q, k, v, o, gate, up, down."""
    hidden, inner = config.hidden, config.intermediate
    return (
        Site.fused("qkv", first_slice=0, in_features=hidden, out_features=(config.q_size, config.kv_size, config.kv_size)),
        Site.fused("o", first_slice=3, in_features=config.q_size, out_features=(hidden,)),
        Site.fused("gate_up", first_slice=4, in_features=hidden, out_features=(inner, inner)),
        Site.fused("down", first_slice=6, in_features=inner, out_features=(hidden,)),
    )


def model_features(config: LlamaConfig) -> tuple[tuple[int, int], ...]:
    """Returns (in, out) of each slice."""
    return tuple((site.in_features, last - first) for site in model_sites(config) for first, last in site.columns)


class Runner:
    """Owns model, KV tensor, step buffers, low-rank buffers and per-seat state on the device. Called by the step loop only.

    Attributes:
        arena: Adapters on the device.
        kv: The KV tensor.
    """

    def __init__(self, config: EngineConfig, model: LlamaConfig, memory: MemoryPlan) -> None:
        device, dtype = torch.device(config.device), DTYPES[config.dtype]
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
        with torch.inference_mode():
            self._model = load_llama(Path(config.model_dir), model, max_context=memory.max_context, dtype=dtype, device=device)
        self._attention = TorchAttention(model, self.kv)
        self._low_rank = CpuLowRank(
            self.arena.tensor,
            self.arena.descriptors,
            sites=model_sites(model),
            num_layers=model.num_layers,
            max_rows=config.max_step_tokens,
            max_list=config.max_step_rank_rows if config.arena_bytes else 0,
        )
        self._buffers = StepBuffers(
            max_step_tokens=config.max_step_tokens,
            max_sequences=config.max_sequences,
            max_pages=-(-memory.max_context // config.page_size),
            device=device,
        )
        self._sampler = Sampler(max_sequences=config.max_sequences, vocab_size=model.vocab_size, device=device)
        self._last_token = torch.zeros(config.max_sequences, dtype=torch.int64, device=device)
        self._device = device

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[int | None]:
        """Runs one step and returns the tokens of the rows that sample, in order; None where logits were not finite."""
        new_pages = [page for rows in plan.rows for page in rows.new_pages[rows.num_shared_pages :]]
        if new_pages:
            self.kv.clear(torch.tensor(new_pages, device=self._device))
        step = self._buffers.fill(plan, self.kv)
        if step.late:
            rows, seats = torch.tensor(step.late, device=self._device).unbind(1)
            step.batch.ids[rows] = self._last_token[seats]
        for planned in plan.rows:
            self._sampler.start(planned)
        self._low_rank.begin_step(build_rank_rows(step.row_slot, self.arena.descriptors.largest_rank))
        logits = self._model.forward(step.batch, self._attention, self._low_rank)
        if not step.sampled:
            return []
        tokens, finite = self._sampler.sample(logits, step.sampled)
        self._last_token[torch.tensor([planned.seat for planned in step.sampled], device=self._device)] = tokens
        return [token if good else None for token, good in zip(tokens.tolist(), finite.tolist(), strict=True)]
