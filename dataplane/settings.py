"""Settings of the data-plane process, from the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from veneer.settings import (
    SettingError,
    check_address,
    check_file,
    check_level,
    check_listeners,
    check_redis_url,
    check_tls,
    host_of,
)

PREFIX = "VENEER_DATAPLANE_"
_GIB = 1 << 30
_MIB = 1 << 20


class Settings(BaseSettings):
    """All settings; each is read from `VENEER_DATAPLANE_` and its name in capitals. A bad value stops the start.

    Attributes:
        model_dir: Hugging Face folder of the base model.
        device: `cpu`, or `cuda`: the card that `CUDA_VISIBLE_DEVICES` names first (docs/gpu.md).
        dtype: Weights, activations and KV cache.
        adapter_dtype: `model` holds adapters in that dtype too; `fp8` in half the bytes, on a device only, with a loss that is
            told for each (docs/gpu.md).
        max_adapter_loss: Most that a projection of an adapter may lose in fp8, as a part of its norm; an adapter that loses more
            is refused. Trained ones lose about 0.04.
        stepping: `overlapped` (a step is planned while the one before runs), `serial`, or `auto`: what is faster on the device.
        cpu_form: `native` (built ahead, or on first use where a C++ compiler is), `torch`, or `auto`: native where it can be had.
        batch_invariant: Equal requests give equal bits whatever runs beside them, at some cost (docs/invariance.md).
        num_threads: Threads of the math library; 0 leaves its own choice.
        max_sequences: Sequences that run at the same time.
        max_step_tokens: Rows of one step.
        page_size: Tokens in a KV page.
        kv_bytes: Memory for KV pages; 0 takes a twelfth of the machine's memory, at most 8 GiB.
        arena_bytes: Memory for adapters on the device; 0 takes a quarter of what KV pages get.
        arena_unit_bytes: Unit in which that is handed out.
        max_slots: Adapters on the device at most.
        max_rank: Largest rank of an adapter.
        max_step_rank_rows: Rank rows of all adapters that run at the same time.
        max_context: Tokens of prompt and output together; 0 takes the model's own limit.
        max_waiting: Requests that wait in the engine at most.
        max_waiting_per_tenant: Requests of one tenant that wait at most; 0 for no limit of its own.
        max_rank_rows_per_tenant: Rank rows of the distinct adapters of one tenant's running requests, each rounded up to 16,
            unless the catalogue says otherwise of the tenant; 0 for no limit.
        max_arena_bytes_per_tenant: Memory on the device for the adapters that one tenant uses, in the same way.
        max_pinned_bytes: Memory on the device that versions may take which operators keep there; 0 takes half of it.
        max_pinned_bytes_per_tenant: What those of one owner may take; 0 takes an eighth.
        max_host_bytes_per_tenant: Memory for the images of the adapters that one tenant uses, in the same way.
        max_step_ms: Milliseconds that a step should take at most in which sequences decode: it holds fewer rows of prompts then,
            and tokens come more evenly; 0 for no such limit.
        quantum_tokens: Tokens that an adapter on the device serves, while requests wait for it, before it makes room for others.
        eviction: Which adapter makes room, on the device and in host memory: the one used least lately for what it takes
            (`usage`), or the one used longest ago (`lru`).
        decode_price: What a generated token costs a tenant, in prompt tokens; `python -m benchmarks.prices` measures the prices.
        rank_row_price: What a rank row of an adapter costs in a step.
        load_mib_price: What a MiB of an adapter costs that is copied to the device.
        grammar_ms_price: What a millisecond of a core costs that a structured output's grammar takes beside the steps.
        grammar_bytes: Memory for compiled grammars of structured outputs; beyond it, the tenant that holds most compiles anew.
        grammar_timeout_s: How long a stream may wait for the next mask of its grammar; then it ends RESOURCE_EXHAUSTED.
        control_plane: Address of the control plane's listener for callers.
        control_plane_ca: PEM authorities for its certificate; absent: plaintext, on loopback only unless `allow_plaintext`.
        node_key_file: Where the node's key is kept.
        usage_folder: Where the journals of use are kept until the control plane has them; absent: `usage` beside the node's key.
        node_key_rotate_s: Time between rotations of the node's key.
        enrollment_token: One-time token of an operator, for the first start.
        redis_url: Server for hints; absent: the change feed alone tells of changes.
        hints_per_s: Hints acted on in the long run.
        cache_folder: Adapter images, mapped into host memory, and files on their way there; a memory file system suits well.
        host_cache_bytes: Budget for images; 0 takes a twelfth of the machine's memory, at most 64 GiB.
        max_fetches: Versions that requests wait for fetched from the store at the same time; a quarter as many more ahead.
        load_memory_bytes: Memory for files of versions on their way from the store, up to 16 MiB each; as much again for the
            images that are made of them. A version that alone takes more has all of it.
        load_disk_bytes: Disk, in the cache folder, for the files on their way that are larger, in the same way.
        prefetch_bytes_per_s: Bytes a second of all fetches above which those wait that no request waits for; 0: no limit.
        max_load_failures: Loads of a version that fail in a row before requests for it are answered without one, for a while.
        load_timeout_s: How long the load of a version is tried again, and how long the store may bring nothing of it.
        resolve_age_s: How long an answer of the control plane is used without asking again.
        t_stale_s: How long it is used while the control plane is unreachable.
        resolve_entries: Answers kept.
        poll_interval_s: Time between reads of the change feed.
        max_streams: Streams at once.
        max_streams_per_tenant: Streams of one tenant at once.
        stream_buffer_bytes: What may wait for one reader.
        slow_reader_s: How long that may stay full.
        fallback_after_s: How long a version may take to load before something else answers, where that may.
        render_processes: Processes that render the base's chat template: conversations at once, of one tenant one fewer.
        max_render_s: Processor time that the chat template may take for one conversation; beyond it the process is ended.
        listen_callers: Address for tenants; port 0 takes any.
        advertise: Address by which tenants reach this node, for those who choose among nodes; absent: `listen_callers`.
        listen_operators: Address for operators.
        listen_metrics: Address of the Prometheus page.
        tls_certificate: PEM chain; with `tls_key` turns on TLS on both listeners.
        tls_key: PEM private key.
        allow_plaintext: Allows to listen, and to call the control plane, beyond loopback without TLS.
        reflection: Serves gRPC reflection.
        ready_file: Written when the service listens: a JSON object with the addresses.
        drain_delay_s: How long to go on admitting after NOT_SERVING, so that routers and clients notice and go elsewhere.
        drain_grace_s: How long running streams may go on after a stop signal.
        log_level: Least level that is logged.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", protected_namespaces=())

    model_dir: Path
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    adapter_dtype: Literal["model", "fp8"] = "model"
    max_adapter_loss: Annotated[float, Field(ge=0, le=1)] = 0.1
    cpu_form: Literal["auto", "native", "torch"] = "auto"
    stepping: Literal["auto", "serial", "overlapped"] = "auto"
    batch_invariant: bool = False
    num_threads: Annotated[int, Field(ge=0, le=1024)] = 0
    max_sequences: Annotated[int, Field(ge=1, le=4096)] = 64
    max_step_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    page_size: Annotated[int, Field(ge=1, le=1024)] = 16
    kv_bytes: Annotated[int, Field(ge=0)] = 0
    arena_bytes: Annotated[int, Field(ge=0)] = 0
    arena_unit_bytes: Annotated[int, Field(ge=4096)] = 64 * 1024
    max_slots: Annotated[int, Field(ge=1, le=65536)] = 64
    max_rank: Annotated[int, Field(ge=1, le=1024)] = 256
    max_step_rank_rows: Annotated[int, Field(ge=16, le=1 << 20)] = 1024
    max_context: Annotated[int, Field(ge=0)] = 0
    max_waiting: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    max_waiting_per_tenant: Annotated[int, Field(ge=0, le=1_000_000)] = 2_500
    max_rank_rows_per_tenant: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    max_arena_bytes_per_tenant: Annotated[int, Field(ge=0)] = 0
    max_pinned_bytes: Annotated[int, Field(ge=0)] = 0
    max_pinned_bytes_per_tenant: Annotated[int, Field(ge=0)] = 0
    max_host_bytes_per_tenant: Annotated[int, Field(ge=0)] = 0
    max_step_ms: Annotated[int, Field(ge=0, le=60_000)] = 0
    quantum_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = 256
    eviction: Literal["usage", "lru"] = "usage"
    decode_price: Annotated[float, Field(ge=0, le=1000)] = 1.4
    rank_row_price: Annotated[float, Field(ge=0, le=1000)] = 0.07
    load_mib_price: Annotated[float, Field(ge=0, le=1000)] = 1.9
    grammar_ms_price: Annotated[float, Field(ge=0, le=1000)] = 0.5
    grammar_bytes: Annotated[int, Field(ge=16 * _MIB)] = 256 * _MIB
    grammar_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    control_plane: str = "127.0.0.1:7600"
    control_plane_ca: Path | None = None
    node_key_file: Path = Path("/var/lib/veneer/node.key")
    usage_folder: Path | None = None
    node_key_rotate_s: Annotated[float, Field(ge=60)] = 86_400.0
    enrollment_token: SecretStr | None = None
    redis_url: SecretStr | None = None
    hints_per_s: Annotated[float, Field(gt=0, le=10_000)] = 20.0
    cache_folder: Path = Path("/var/lib/veneer/cache")
    host_cache_bytes: Annotated[int, Field(ge=0)] = 0
    max_fetches: Annotated[int, Field(ge=1, le=256)] = 8
    load_memory_bytes: Annotated[int, Field(ge=_MIB)] = 256 * _MIB
    load_disk_bytes: Annotated[int, Field(ge=_MIB)] = 8 * _GIB
    prefetch_bytes_per_s: Annotated[int, Field(ge=0)] = 128 * _MIB
    max_load_failures: Annotated[int, Field(ge=1, le=1000)] = 3
    load_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    resolve_age_s: Annotated[float, Field(ge=0, le=5)] = 2.0
    t_stale_s: Annotated[float, Field(ge=0, le=86_400)] = 60.0
    resolve_entries: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000
    poll_interval_s: Annotated[float, Field(ge=0.05, le=60)] = 2.0
    max_streams: Annotated[int, Field(ge=1, le=16_384)] = 10_000
    max_streams_per_tenant: Annotated[int, Field(ge=1, le=16_384)] = 2_000
    stream_buffer_bytes: Annotated[int, Field(ge=1024)] = 256 * 1024
    slow_reader_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    fallback_after_s: Annotated[float, Field(gt=0, le=3600)] = 5.0
    render_processes: Annotated[int, Field(ge=2, le=64)] = 2
    max_render_s: Annotated[float, Field(ge=0.01, le=60)] = 1.0
    listen_callers: str = "127.0.0.1:7700"
    advertise: str = ""
    listen_operators: str = "127.0.0.1:7701"
    listen_metrics: str = "127.0.0.1:7709"
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    allow_plaintext: bool = False
    reflection: bool = False
    ready_file: Path | None = None
    drain_delay_s: Annotated[float, Field(ge=0, le=600)] = 5.0
    drain_grace_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    log_level: str = "INFO"

    _callers = field_validator("listen_callers", "listen_operators")(check_address)
    _level = field_validator("log_level")(check_level)

    @field_validator("model_dir", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        if value == "":
            raise ValueError("is not set")
        return value

    @field_validator("redis_url")
    @classmethod
    def _known_redis(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            check_redis_url(value.get_secret_value())
        return value

    @field_validator("listen_metrics")
    @classmethod
    def _known_metrics(cls, value: str) -> str:
        host_of(value)
        return value

    @field_validator("control_plane_ca")
    @classmethod
    def _readable(cls, value: Path | None) -> Path | None:
        if value is not None:
            check_file(value)
        return value

    @model_validator(mode="after")
    def _whole(self) -> Settings:
        check_tls(self.tls_certificate, self.tls_key, prefix=PREFIX)
        check_listeners(
            {"listen_callers": self.listen_callers, "listen_operators": self.listen_operators},
            prefix=PREFIX,
            has_tls=self.tls_certificate is not None,
            allow_plaintext=self.allow_plaintext,
        )
        if self.t_stale_s < self.resolve_age_s:
            raise ValueError(f"{PREFIX}T_STALE_S must not be below {PREFIX}RESOLVE_AGE_S")
        return self

    def check_start(self) -> None:
        """Checks what must be on this machine for a start.

        Raises:
            SettingError: The model folder is none, or there is neither a key of the node nor a token that gives one.
        """
        if not self.model_dir.is_dir():
            raise SettingError.of_variable(f"{PREFIX}MODEL_DIR", f"{self.model_dir} is not a folder")
        token = self.enrollment_token
        if not self.node_key_file.exists() and (token is None or not token.get_secret_value()):
            fault = f"is not set, and there is no node key yet in {self.node_key_file}"
            hint = "an operator's enrolment token is needed for the first start (`veneer node token`)"
            raise SettingError.of_variable(f"{PREFIX}ENROLLMENT_TOKEN", f"{fault}; {hint}")

    @property
    def usage_journals(self) -> Path:
        """Folder of the journals of use."""
        return self.usage_folder or self.node_key_file.parent / "usage"

    @property
    def kv_budget(self) -> int:
        """Memory for KV pages, in bytes."""
        return self.kv_bytes or min(_memory_bytes() // 12, 8 * _GIB)

    @property
    def arena_budget(self) -> int:
        """Memory for adapters on the device, in bytes."""
        return self.arena_bytes or max(self.kv_budget // 4, 64 * _MIB)

    @property
    def pin_budget(self) -> int:
        """Memory on the device for versions that are pinned, in bytes."""
        return self.max_pinned_bytes or self.arena_budget // 2

    @property
    def pin_budget_per_tenant(self) -> int:
        """What those of one owner may take of it."""
        return self.max_pinned_bytes_per_tenant or self.arena_budget // 8

    @property
    def host_cache_budget(self) -> int:
        """Memory for images, in bytes."""
        return self.host_cache_bytes or min(_memory_bytes() // 12, 64 * _GIB)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
