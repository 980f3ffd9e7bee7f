"""What to do after an error: a line that fits the error, or none where the error's own message says it."""

from __future__ import annotations

import grpc

from veneer.errors import (
    ALIAS_MOVED,
    CONTENT_EXISTS,
    KEY_KIND,
    TENANT_LIMIT,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    VeneerError,
)

_BY_KIND = {
    CONTENT_EXISTS: (
        "Equal files are one version of a tenant, whatever the adapter is called. Use that version: `veneer versions ADAPTER`,"
        " `veneer alias ADAPTER VERSION`; under the same name `--exist-ok` ends well."
    ),
    ALIAS_MOVED: "Another call moved it first. Look again (`veneer adapters`) and repeat.",
    TENANT_LIMIT: (
        "The adapter alone takes more than its tenant may. An operator can raise that: `veneer tenant limit`;"
        " or publish a version of lower rank."
    ),
    KEY_KIND: (
        "Another kind of key is needed: --key or VENEER_API_KEY for tenants, --org-key or VENEER_ORG_KEY for organisations,"
        " --operator-key or VENEER_OPERATOR_KEY for operators."
    ),
}
_BY_STATUS = {
    "UNAUTHENTICATED": (
        "Check the key: --key or VENEER_API_KEY for tenants, --org-key or VENEER_ORG_KEY for organisations,"
        " --operator-key or VENEER_OPERATOR_KEY for operators."
    ),
    "PERMISSION_DENIED": "The key lacks a role. `veneer key list` shows its roles; an owner or operator can create another key.",
    "UNIMPLEMENTED": (
        "Another listener, or another release, answers there: check --control, --data, --control-operators, --data-operators."
    ),
    "ABORTED": "Another call got in between. Repeat it.",
    "DEADLINE_EXCEEDED": "It took longer than it may. `veneer status` shows the load; repeat, or give it more time.",
    "DATA_LOSS": "The stored files are damaged. Publish the adapter again, under a new version.",
    "INTERNAL": "That is a fault of the service. Its log names the request; repeat, and tell its operator if it stays.",
}
_AWAY = (
    "Is it running? `veneer status` tells, `veneer up` starts it here, --control and --data name others;"
    " --ca turns on TLS, which both sides must have."
)
_OF_FILES = {
    "publish": "Mend that and publish again; `veneer check FOLDER --base MODEL_FOLDER` finds faults of files without a server.",
    "check": "Mend the adapter, and check it again.",
}
"""After an adapter was refused, by the command that met it."""
_USAGE = "Mend that and repeat; `--help` after the command says what it takes."
_MORE_OF_TENANT = "An operator can raise it: `veneer tenant quota` (`veneer tenant list` shows the quotas)."
_MORE_OF_ORGANIZATION = "An operator can raise it: `veneer org quota` (`veneer org show` shows the ceilings)."

_LISTS = {
    "tenant": "`veneer tenant list` shows the tenants.",
    "org": "`veneer org list` shows the organisations, `veneer tenant list` the tenants.",
    "node": "`veneer node list` shows the data planes, `veneer node residency` what one holds.",
    "key": "`veneer key list` shows the keys.",
    "base": "`veneer base list` shows the bases.",
    "trust": "`veneer trust list` shows the keys and authorities that are trusted.",
    "grant": "`veneer grant list` shows what was granted, `veneer adapters` what there is to grant.",
    "canary": "`veneer adapters` shows the aliases, `veneer versions ADAPTER` the versions.",
    "publish": "`veneer adapters` shows the adapters; an operator registers a base with `veneer base add`.",
}
"""Where a command's objects are listed, by its first word."""
_ADAPTERS = "`veneer adapters` lists what your tenant has, `veneer grant list` what others share with it."
_STATES = "`veneer adapters` and `veneer versions ADAPTER` show how things stand."
_OF_STATES = {"alias", "split", "rollback", "promote", "retire", "delete", "canary"}
_OF_TENANTS = {"audit", "usage"}


def hint_for(error: VeneerError, command: str = "") -> str:
    """What to do after an error; empty where its message says that, as messages of this program do.

    Args:
        error: The error.
        command: First word of the command that met it.
    """
    if error.retry_after_s is not None:
        return f"Try again in {error.retry_after_s:g} s."
    if error.kind in _BY_KIND:
        return _BY_KIND[error.kind]
    if isinstance(error, InvalidArgumentError):
        return _OF_FILES.get(command, _USAGE)
    is_local = not isinstance(error.__cause__, grpc.aio.AioRpcError)
    if is_local and error.status != "UNIMPLEMENTED":
        return ""
    if isinstance(error, UnavailableError):
        return _AWAY if not error.kind else ""  # a plane that answers is there
    if isinstance(error, ResourceExhaustedError):
        return _of_quota(error)
    if error.status in ("NOT_FOUND", "ALREADY_EXISTS"):
        return _of_list(error.status, command)
    if error.status == "FAILED_PRECONDITION":
        return _STATES if command in _OF_STATES else ""
    return _BY_STATUS.get(error.status, "")


def _of_quota(error: ResourceExhaustedError) -> str:
    fields = [one.field for one in error.violations]
    if any(field.startswith(("organization.quotas.", "quotas.max_tenants")) for field in fields):
        return _MORE_OF_ORGANIZATION
    return _MORE_OF_TENANT if any(field.startswith("quotas.") for field in fields) else ""


def _of_list(status: str, command: str) -> str:
    if command in _OF_TENANTS:
        return _LISTS["tenant"]
    if status == "NOT_FOUND" or command in _LISTS:
        return _LISTS.get(command, _ADAPTERS)
    return ""
