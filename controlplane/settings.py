"""Settings of the control-plane process, from the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from veneer.settings import SettingError, check_address, check_level, check_listeners, check_redis_url, check_tls, host_of

PREFIX = "VENEER_CONTROLPLANE_"
APP_ROLE = "veneer_app"
AUTH_ROLE = "veneer_auth"
RELAY_ROLE = "veneer_relay"

_GIB = 1 << 30
_NO_DATABASE = "is not a database address such as postgresql://host:5432/veneer"
_MIN_AUDIT_DAYS = 30  # the database itself lets nothing younger go


class Settings(BaseSettings):
    """All settings; each is read from `VENEER_CONTROLPLANE_` and its name in capitals. A bad value stops the start.

    Attributes:
        database_url: Where the database is, e.g. `postgresql://db.internal:5432/veneer`. User and password in it are replaced by
            those of the service's three roles.
        app_password: Password of `veneer_app`; absent where the server asks for none (a local socket).
        auth_password: Password of `veneer_auth`.
        relay_password: Password of `veneer_relay`.
        owner_url: Address with the user that owns the tables; only `migrate` and `bootstrap` use it.
        owner_password: Password of that user, where the address holds none.
        pool_size: Connections kept open for each role; reads that are asked often have as many of their own.
        pool_overflow: Further connections of the application role under load.
        pool_timeout_s: Wait for a free connection, then UNAVAILABLE.
        connect_timeout_s: Wait for a connection to be made; libpq knows no less than 2.
        statement_timeout_s: Longest statement.
        redis_url: Server for hints; absent: there are none, and data planes learn of changes by polling alone.
        store_url: Object store for adapter files: `file:///folder`, `s3://bucket/prefix` or another address that obstore knows.
        spool_folder: Where uploads wait for their check; absent: the system's temporary folder.
        pepper: Secret of the service, at least 32 characters; all derived secrets and stored credentials depend on it.
        pepper_file: File to read it from; `bootstrap` makes the file when it is absent.
        listen_callers: Address for tenants and nodes; port 0 takes any.
        listen_operators: Address for operators.
        listen_metrics: Address of the Prometheus page; empty: none.
        tls_certificate: PEM chain; with `tls_key` turns on TLS on both listeners.
        tls_key: PEM private key.
        allow_plaintext: Allows to listen beyond loopback without TLS.
        reflection: Serves gRPC reflection.
        ready_file: Written when the service listens: a JSON object with the addresses.
        drain_delay_s: How long to go on admitting after NOT_SERVING, so that routers and clients notice and go elsewhere.
        drain_grace_s: How long running calls may go on after a stop signal.
        max_config_bytes: Largest `adapter_config.json`.
        max_weights_bytes: Largest `adapter_model.safetensors`.
        max_rank: Largest rank of a pair.
        max_tensors: Most tensors in a file.
        max_publishes: Uploads received at the same time.
        max_publishes_per_tenant: Of these, how many may be one tenant's; its further ones wait. A quarter of `max_publishes` goes
            to organisations, and tenants without one, that have none under way.
        max_publishes_per_organization: How many may be those of an organisation's tenants together; a quarter of them goes to
            tenants that have none under way.
        upload_wait_s: Longest wait of an upload for its place, then RESOURCE_EXHAUSTED. Longer than `upload_rate_grace_s`, it is
            enough for places of slow uploads to come free.
        min_upload_bytes_per_s: Least rate of an upload; a slower one ends DEADLINE_EXCEEDED and gives its place back. 0: any.
        upload_rate_grace_s: For how long an upload may be slower than that, after it began and whenever it was faster before. A
            message counts when all of it is there.
        max_checks: Publish checks run at the same time.
        check_timeout_s: Longest publish check.
        part_timeout_s: Longest wait for the next part of an upload.
        max_probes: Publishes with a probe at the same time, from the upload until the probe's end; further ones are refused.
        max_probes_per_tenant: Of these, how many may be one tenant's.
        probe_take_s: How long a publish with a probe waits for a data plane that takes it on.
        probe_timeout_s: How long it waits for the answer in all.
        upload_timeout_s: Longest upload.
        grant_lifetime_s: Life of a blob grant.
        quota_lease_s: How long a node's share of a tenant's quotas lasts unless it is renewed; nodes renew each third of it.
        enrollment_lifetime_s: Life of an enrolment token.
        node_key_overlap_s: How long a node's old key works after a rotation.
        quarantine_reports: Nodes that must report a version before it is quarantined.
        relay_interval_s: Pause between looks into the outbox.
        placement_interval_s: Pause between revisions of the plan where adapters should be warm; it needs `redis_url`.
        canary_interval_s: Pause between looks at canaries that run.
        change_retention_s: How long changes and stored answers are kept; at least a day.
        audit_retention_days: How long entries of the audit log are kept; 0: for ever, else at least 30 days.
        collect_interval_s: Pause between looks for files that no version owns.
        upload_grace_s: After so long the files of an upload that was not published are removed; no publish may take longer from
            its first file in the store to its end than half of it.
        delete_grace_s: How long the files of a deleted version are kept; longer while a node may read them.
        usage_journal_grace_s: How long it is remembered what was taken of a journal of use that its node has no more, or whose
            node was revoked; at least an hour, since a report may be on the way.
        log_level: Least level that is logged.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    database_url: str = "postgresql://127.0.0.1:5432/veneer"
    app_password: SecretStr | None = None
    auth_password: SecretStr | None = None
    relay_password: SecretStr | None = None
    owner_url: SecretStr | None = None
    owner_password: SecretStr | None = None
    pool_size: Annotated[int, Field(ge=1, le=200)] = 10
    pool_overflow: Annotated[int, Field(ge=0, le=200)] = 10
    pool_timeout_s: Annotated[float, Field(gt=0, le=30)] = 2.0
    connect_timeout_s: Annotated[int, Field(ge=2, le=30)] = 2
    statement_timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    redis_url: SecretStr | None = None
    store_url: str = "file:///var/lib/veneer/store"
    spool_folder: Path | None = None
    pepper: SecretStr | None = None
    pepper_file: Path | None = None
    listen_callers: str = "127.0.0.1:7600"
    listen_operators: str = "127.0.0.1:7601"
    listen_metrics: str = "127.0.0.1:7609"
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    allow_plaintext: bool = False
    reflection: bool = False
    ready_file: Path | None = None
    drain_delay_s: Annotated[float, Field(ge=0, le=600)] = 5.0
    drain_grace_s: Annotated[float, Field(ge=0, le=3600)] = 10.0
    max_config_bytes: Annotated[int, Field(ge=1024, le=1 << 20)] = 1 << 20
    max_weights_bytes: Annotated[int, Field(ge=1024, le=4 * _GIB)] = 4 * _GIB
    max_rank: Annotated[int, Field(ge=1, le=1024)] = 256
    max_tensors: Annotated[int, Field(ge=1, le=65536)] = 4096
    max_publishes: Annotated[int, Field(ge=1, le=256)] = 8
    max_publishes_per_tenant: Annotated[int, Field(ge=1, le=256)] = 4
    max_publishes_per_organization: Annotated[int, Field(ge=1, le=256)] = 6
    upload_wait_s: Annotated[float, Field(gt=0, le=600)] = 15.0
    min_upload_bytes_per_s: Annotated[int, Field(ge=0, le=1 << 30)] = 16384
    upload_rate_grace_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    max_checks: Annotated[int, Field(ge=1, le=64)] = 2
    check_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 120.0
    part_timeout_s: Annotated[float, Field(gt=0, le=600)] = 30.0
    max_probes: Annotated[int, Field(ge=1, le=4096)] = 64
    max_probes_per_tenant: Annotated[int, Field(ge=1, le=4096)] = 8
    probe_take_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    probe_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 90.0
    upload_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 1800.0
    grant_lifetime_s: Annotated[float, Field(ge=1, le=86400)] = 900.0
    quota_lease_s: Annotated[float, Field(ge=0.3, le=60)] = 6.0
    enrollment_lifetime_s: Annotated[float, Field(ge=1, le=86400)] = 3600.0
    node_key_overlap_s: Annotated[float, Field(ge=0, le=3600)] = 60.0
    quarantine_reports: Annotated[int, Field(ge=1, le=100)] = 1
    relay_interval_s: Annotated[float, Field(gt=0, le=60)] = 0.2
    placement_interval_s: Annotated[float, Field(gt=0, le=30)] = 5.0
    canary_interval_s: Annotated[float, Field(gt=0, le=3600)] = 2.0
    change_retention_s: Annotated[float, Field(ge=86400)] = 2 * 86400.0
    audit_retention_days: Annotated[int, Field(ge=0, le=36500)] = 0
    collect_interval_s: Annotated[float, Field(gt=0, le=86400)] = 60.0
    upload_grace_s: Annotated[float, Field(gt=0, le=7 * 86400)] = 7200.0
    delete_grace_s: Annotated[float, Field(ge=0, le=365 * 86400)] = 3600.0
    usage_journal_grace_s: Annotated[float, Field(ge=3600, le=365 * 86400)] = 86400.0
    log_level: str = "INFO"

    _callers = field_validator("listen_callers", "listen_operators")(check_address)
    _level = field_validator("log_level")(check_level)

    @field_validator("database_url")
    @classmethod
    def _known_address(cls, value: str) -> str:
        return _database(value)

    @field_validator("owner_url")
    @classmethod
    def _known_owner(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            _database(value.get_secret_value())
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
        if value:  # none: no page
            host_of(value)
        return value

    @field_validator("audit_retention_days")
    @classmethod
    def _long_enough(cls, value: int) -> int:
        if 0 < value < _MIN_AUDIT_DAYS:
            raise ValueError(f"is 0, for ever, or at least {_MIN_AUDIT_DAYS}")
        return value

    @model_validator(mode="after")
    def _whole(self) -> Settings:
        check_tls(self.tls_certificate, self.tls_key, prefix=PREFIX)
        if self.pepper is not None and self.pepper_file is not None:
            raise ValueError(f"set {PREFIX}PEPPER or {PREFIX}PEPPER_FILE, not both")
        check_listeners(
            {"listen_callers": self.listen_callers, "listen_operators": self.listen_operators},
            prefix=PREFIX,
            has_tls=self.tls_certificate is not None,
            allow_plaintext=self.allow_plaintext,
        )
        return self

    def role_url(self, role: str) -> URL:
        """Address under which the service connects as one of its three roles."""
        passwords = {APP_ROLE: self.app_password, AUTH_ROLE: self.auth_password, RELAY_ROLE: self.relay_password}
        password = passwords[role]
        url = make_url(self.database_url)
        return URL.create(
            "postgresql+psycopg",
            username=role,
            password=None if password is None else password.get_secret_value(),
            host=url.host,
            port=url.port,
            database=url.database,
            query=url.query,
        )

    def owner(self) -> URL:
        """Address of the owner of the tables.

        Raises:
            SettingError: `owner_url` is not set.
        """
        if self.owner_url is None:
            raise SettingError.of_variable(f"{PREFIX}OWNER_URL", "is not set")
        url = make_url(self.owner_url.get_secret_value()).set(drivername="postgresql+psycopg")
        return url if self.owner_password is None else url.set(password=self.owner_password.get_secret_value())


def _database(address: str) -> str:
    """The address of a database; what it says is not repeated, since it may hold a password."""
    try:
        scheme = make_url(address).drivername
    except (ArgumentError, ValueError) as error:
        raise ValueError(_NO_DATABASE) from error
    if scheme.partition("+")[0] not in ("postgresql", "postgres"):
        raise ValueError(_NO_DATABASE)
    return address
