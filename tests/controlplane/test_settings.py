"""Settings of the process."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from controlplane.settings import APP_ROLE, AUTH_ROLE, RELAY_ROLE, Settings
from veneer import client
from veneer.artifact import Limits


def test_each_role_has_its_own_user_and_password_in_the_address() -> None:
    settings = Settings(
        database_url="postgresql://someone:secret@db:6543/veneer?sslmode=require", app_password="a@b", auth_password="c"
    )
    app, auth, relay = (settings.role_url(role) for role in (APP_ROLE, AUTH_ROLE, RELAY_ROLE))

    assert app.render_as_string(hide_password=False) == "postgresql+psycopg://veneer_app:a%40b@db:6543/veneer?sslmode=require"
    assert (auth.username, auth.password) == ("veneer_auth", "c")
    assert (relay.username, relay.password) == ("veneer_relay", None)


def test_the_owner_connects_with_the_address_that_it_was_given() -> None:
    assert Settings(owner_url="postgresql://root:x@db/veneer").owner().drivername == "postgresql+psycopg"
    with pytest.raises(ValueError, match="VENEER_CONTROLPLANE_OWNER_URL"):
        Settings().owner()


def test_no_secret_shows_when_settings_are_printed() -> None:
    settings = Settings(
        app_password="hidden-1", owner_url="postgresql://u:hidden-2@db/x", redis_url="redis://:hidden-3@r", pepper="hidden-4" * 8
    )
    assert "hidden" not in repr(settings)


@pytest.mark.parametrize(
    "fields",
    [
        {"tls_key": Path("key.pem")},
        {"audit_retention_days": 29},
        {"drain_delay_s": -1},
        {"tls_certificate": Path("chain.pem")},
        {"pepper": "p" * 40, "pepper_file": Path("pepper")},
        {"max_weights_bytes": 5 << 30},
        {"max_publishes_per_organization": 0},
        {"upload_wait_s": 0},
        {"min_upload_bytes_per_s": -1},
        {"upload_rate_grace_s": 601},
        {"unknown": 1},
    ],
)
def test_settings_that_do_not_fit_together_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Settings(**fields)


def test_the_check_on_a_publishers_machine_allows_what_the_service_allows_by_default() -> None:
    names = ("max_config_bytes", "max_weights_bytes", "max_rank", "max_tensors")
    assert Limits(**{name: Settings.model_fields[name].default for name in names}) == Limits()


def test_an_upload_waits_by_default_for_longer_than_a_slow_one_may_last() -> None:
    assert Settings.model_fields["upload_wait_s"].default > Settings.model_fields["upload_rate_grace_s"].default


def test_an_upload_of_our_client_at_the_least_rate_has_its_next_part_there_in_time() -> None:
    part_s = client._PART_BYTES / Settings.model_fields["min_upload_bytes_per_s"].default
    assert part_s < min(Settings.model_fields[name].default for name in ("upload_rate_grace_s", "part_timeout_s"))
