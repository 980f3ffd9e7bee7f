"""Settings of one engine, as they travel to its process."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from veneer.errors import InvalidArgumentError, Violation

_CHOICES = {
    "dtype": ("float32", "bfloat16", "float16"),
    "adapter_dtype": ("model", "fp8"),
    "device": ("cpu", "cuda"),
    "cpu_form": ("auto", "native", "torch", "triton"),
    "stepping": ("auto", "serial", "overlapped"),
    "eviction": ("usage", "lru"),
}
_AT_LEAST_ONE = (
    "max_sequences",
    "max_step_tokens",
    "page_size",
    "kv_bytes",
    "arena_unit_bytes",
    "max_slots",
    "max_rank",
    "max_waiting",
    "grammar_bytes",
)
_AT_LEAST_ZERO = (
    "num_threads",
    "arena_bytes",
    "max_context",
    "max_waiting_per_tenant",
    "max_step_ms",
    "quantum_tokens",
    "decode_price",
    "rank_row_price",
    "load_mib_price",
    "grammar_ms_price",
    "max_adapter_loss",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits and sizes of one engine.

    Attributes:
        model_dir: Hugging Face folder of the base model.
        device: `cpu` or `cuda` (docs/gpu.md).
        dtype: Weights, activations and KV cache: float32, bfloat16 or float16.
        adapter_dtype: `model` holds adapters in that dtype too, `fp8` in half its bytes and with a loss; on a device only.
        max_adapter_loss: Most that a pair of an adapter may lose in fp8, of its norm; an adapter beyond it is refused.
        cpu_form: `native` (kernels/cpu.cpp, built where a compiler is), `torch`, or `auto`: native where it can be had. `triton`
            is for tests: the form of a device, in Triton's interpreter.
        batch_invariant: Bits of logits and tokens depend on the request alone, not on what runs beside it (docs/invariance.md).
        stepping: `overlapped` (a step is planned while the one before runs), `serial`, or `auto`: what is faster on the device.
        num_threads: Threads of the math library; 0 leaves its own choice.
        max_sequences: Sequences that run at the same time.
        max_step_tokens: Rows of one step; at least `max_sequences`.
        page_size: Tokens in a KV page.
        kv_bytes: Memory for KV pages.
        arena_bytes: Memory for adapters on the device; 0 serves the base only.
        arena_unit_bytes: Unit in which the arena is handed out.
        max_slots: Adapters on the device at most.
        max_rank: Largest rank of an adapter.
        max_step_rank_rows: Rank rows of all adapters that run at the same time, each rounded up to a multiple of 16.
        max_context: Tokens of prompt and output together; 0 takes the model's own limit.
        max_waiting: Requests that wait at most.
        max_waiting_per_tenant: Requests of one tenant that wait at most; 0 for no limit of its own.
        max_step_ms: Milliseconds that a step should take at most in which sequences decode: it holds fewer rows of prompts then;
            0 for no such limit.
        quantum_tokens: Tokens that an adapter on the device serves, while requests wait for it, before it makes room for others.
        eviction: Which adapter makes room: the one used least lately for what it takes (`usage`), or the one used longest ago
            (`lru`).
        decode_price: What a generated token costs a tenant, in prompt tokens (`python -m benchmarks.prices` measures it).
        rank_row_price: What a rank row of an adapter costs in a step.
        load_mib_price: What a MiB of an adapter costs that is copied to the device.
        grammar_ms_price: What a millisecond of a core costs that a grammar takes, compiled or matched.
        grammar_bytes: Memory for compiled grammars, shared fairly by tenants.
        grammar_timeout_s: How long a request may be out of the steps since its grammar's mask is not there; then it ends.
        base_digest: Digest of the base model, part of every cache key.
        eos_ids: Ids that end a sequence, for grammars; None: those of generation_config.json, else of config.json.
    """

    model_dir: str
    device: str = "cpu"
    dtype: str = "bfloat16"
    adapter_dtype: str = "model"
    max_adapter_loss: float = 0.1
    cpu_form: str = "auto"
    batch_invariant: bool = False
    stepping: str = "auto"
    num_threads: int = 0
    max_sequences: int = 64
    max_step_tokens: int = 512
    page_size: int = 16
    kv_bytes: int = 1 << 30
    arena_bytes: int = 256 << 20
    arena_unit_bytes: int = 64 << 10
    max_slots: int = 64
    max_rank: int = 64
    max_step_rank_rows: int = 1024
    max_context: int = 0
    max_waiting: int = 10_000
    max_waiting_per_tenant: int = 2_500
    max_step_ms: int = 0
    quantum_tokens: int = 256
    eviction: str = "usage"
    decode_price: float = 1.4
    rank_row_price: float = 0.07
    load_mib_price: float = 1.9
    grammar_ms_price: float = 0.5
    grammar_bytes: int = 256 << 20
    grammar_timeout_s: float = 10.0
    base_digest: str = ""
    eos_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Checks every field.

        Raises:
            InvalidArgumentError: Lists every value that is out of range.
        """
        faults = [
            Violation(name, f"must be one of {', '.join(allowed)}, is {getattr(self, name)!r}")
            for name, allowed in _CHOICES.items()
            if getattr(self, name) not in allowed
        ]
        for names, least in ((_AT_LEAST_ONE, 1), (_AT_LEAST_ZERO, 0)):
            faults += [
                Violation(name, f"must be at least {least}, is {getattr(self, name)}")
                for name in names
                if getattr(self, name) < least
            ]
        if not 0 < self.grammar_timeout_s < float("inf"):
            faults.append(Violation("grammar_timeout_s", f"must be above 0 and finite, is {self.grammar_timeout_s}"))
        if self.max_step_tokens < self.max_sequences:
            faults.append(
                Violation("max_step_tokens", f"must be at least max_sequences = {self.max_sequences}, is {self.max_step_tokens}")
            )
        if self.adapter_dtype == "fp8" and not self.has_device_form:
            faults.append(Violation("adapter_dtype", "fp8 is computed on a device only; the CPU's forms read the model's dtype"))
        if self.max_step_rank_rows % 16 or self.max_step_rank_rows < self.max_rank:
            faults.append(
                Violation(
                    "max_step_rank_rows",
                    f"must be a multiple of 16 and at least max_rank = {self.max_rank}, is {self.max_step_rank_rows}",
                )
            )
        if faults:
            raise InvalidArgumentError.of(faults)

    @property
    def arena_dtype(self) -> str:
        """Dtype of adapters: of their images, and of the arena."""
        return self.dtype if self.adapter_dtype == "model" else self.adapter_dtype

    @property
    def has_device_form(self) -> bool:
        """Whether the form of a device computes, on one or in the interpreter."""
        return self.device != "cpu" or self.cpu_form == "triton"

    @property
    def overlaps_steps(self) -> bool:
        """Whether a step is planned while the one before it runs."""
        return self.stepping == "overlapped" or (self.stepping == "auto" and self.has_device_form)

    def to_json(self) -> str:
        """Returns one line of JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> EngineConfig:
        """Reads what `to_json` wrote."""
        fields = json.loads(text)
        if fields.get("eos_ids") is not None:
            fields["eos_ids"] = tuple(fields["eos_ids"])
        return cls(**fields)
