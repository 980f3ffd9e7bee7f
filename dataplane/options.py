"""What the settings of the process mean for its parts."""

from __future__ import annotations

from pathlib import Path

from dataplane.engine.config import EngineConfig
from dataplane.resolution import TenantLimits
from dataplane.settings import Settings
from veneer.artifact import BaseDescription
from veneer.errors import InvalidArgumentError, Violation
from veneer.server import ServerOptions, Tls


def engine_config(settings: Settings, base: BaseDescription) -> EngineConfig:
    """Returns the settings of the engine."""
    return EngineConfig(
        model_dir=str(Path(settings.model_dir).resolve()),
        device=settings.device,
        dtype=settings.dtype,
        adapter_dtype=settings.adapter_dtype,
        max_adapter_loss=settings.max_adapter_loss,
        cpu_form=settings.cpu_form,
        stepping=settings.stepping,
        batch_invariant=settings.batch_invariant,
        num_threads=settings.num_threads,
        max_sequences=settings.max_sequences,
        max_step_tokens=settings.max_step_tokens,
        page_size=settings.page_size,
        kv_bytes=settings.kv_budget,
        arena_bytes=settings.arena_budget,
        arena_unit_bytes=settings.arena_unit_bytes,
        max_slots=settings.max_slots,
        max_rank=settings.max_rank,
        max_step_rank_rows=settings.max_step_rank_rows,
        max_context=settings.max_context,
        max_waiting=settings.max_waiting,
        max_waiting_per_tenant=settings.max_waiting_per_tenant,
        max_step_ms=settings.max_step_ms,
        quantum_tokens=settings.quantum_tokens,
        eviction=settings.eviction,
        decode_price=settings.decode_price,
        rank_row_price=settings.rank_row_price,
        load_mib_price=settings.load_mib_price,
        grammar_ms_price=settings.grammar_ms_price,
        grammar_bytes=settings.grammar_bytes,
        grammar_timeout_s=settings.grammar_timeout_s,
        base_digest=base.digest,
        eos_ids=base.eos_ids,
    )


def tenant_limits(settings: Settings) -> TenantLimits:
    """Returns what a tenant may use at most of whom the catalogue says nothing else."""
    return TenantLimits(
        max_rank_rows=settings.max_rank_rows_per_tenant,
        max_arena_bytes=settings.max_arena_bytes_per_tenant,
        max_host_bytes=settings.max_host_bytes_per_tenant,
    )


def server_options(settings: Settings) -> ServerOptions:
    """Returns how the server listens and drains."""
    tls = None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        tls = Tls(certificate=settings.tls_certificate, key=settings.tls_key)
    return ServerOptions(
        callers=settings.listen_callers,
        operators=settings.listen_operators,
        metrics=settings.listen_metrics,
        tls=tls,
        allow_plaintext=settings.allow_plaintext,
        reflection=settings.reflection,
        ready_file=settings.ready_file,
        drain_delay_s=settings.drain_delay_s,
        drain_grace_s=settings.drain_grace_s,
    )


def control_plane_ca(settings: Settings) -> bytes | None:
    """Returns the certificates that the control plane's is checked against; None for plaintext.

    Raises:
        InvalidArgumentError: They cannot be read, or plaintext would leave the machine and is not allowed.
    """
    if settings.control_plane_ca is not None:
        try:
            return settings.control_plane_ca.read_bytes()
        except OSError as error:
            raise InvalidArgumentError.of([Violation("control_plane_ca", f"cannot be read: {error.strerror}")]) from error
    host = settings.control_plane.rpartition(":")[0].strip("[]")
    if host not in ("localhost", "::1") and not host.startswith("127.") and not settings.allow_plaintext:
        fault = f"{settings.control_plane} is not on loopback: give control_plane_ca, or allow plaintext by the setting for it"
        raise InvalidArgumentError.of([Violation("control_plane", fault)])
    return None
