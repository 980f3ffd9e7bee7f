"""Client library of Veneer, and what both of its planes share.

The clients, their records and the errors are here: `veneer.Client`, `veneer.SyncClient`, `veneer.NotFoundError`, … Each is
imported at its first use: importing this package, or a part of it, imports nothing else.
"""

TYPE_CHECKING = False  # as in `typing`, which would be an import
if TYPE_CHECKING:
    from veneer.answer import Answer as Answer
    from veneer.answer import Choice as Choice
    from veneer.answer import Event as Event
    from veneer.answer import Usage as Usage
    from veneer.channel import ClientTls as ClientTls
    from veneer.client import Client as Client
    from veneer.errors import (
        AbortedError as AbortedError,
    )
    from veneer.errors import (
        AlreadyExistsError as AlreadyExistsError,
    )
    from veneer.errors import (
        DataLossError as DataLossError,
    )
    from veneer.errors import (
        DeadlineExceededError as DeadlineExceededError,
    )
    from veneer.errors import (
        FailedPreconditionError as FailedPreconditionError,
    )
    from veneer.errors import (
        InternalError as InternalError,
    )
    from veneer.errors import (
        InvalidArgumentError as InvalidArgumentError,
    )
    from veneer.errors import (
        NotFoundError as NotFoundError,
    )
    from veneer.errors import (
        PermissionDeniedError as PermissionDeniedError,
    )
    from veneer.errors import (
        ResourceExhaustedError as ResourceExhaustedError,
    )
    from veneer.errors import (
        UnauthenticatedError as UnauthenticatedError,
    )
    from veneer.errors import (
        UnavailableError as UnavailableError,
    )
    from veneer.errors import (
        VeneerError as VeneerError,
    )
    from veneer.errors import (
        Violation as Violation,
    )
    from veneer.messages import RawText as RawText
    from veneer.operator_client import OperatorClient as OperatorClient
    from veneer.organization_client import OrganizationClient as OrganizationClient
    from veneer.origin import Origin as Origin
    from veneer.sync_client import (
        SyncClient as SyncClient,
    )
    from veneer.sync_client import (
        SyncOperatorClient as SyncOperatorClient,
    )
    from veneer.sync_client import (
        SyncOrganizationClient as SyncOrganizationClient,
    )

_NAMES = {
    "answer": ("Answer", "Choice", "Event", "Usage"),
    "channel": ("ClientTls",),
    "client": ("Client",),
    "errors": (
        "AbortedError",
        "AlreadyExistsError",
        "DataLossError",
        "DeadlineExceededError",
        "FailedPreconditionError",
        "InternalError",
        "InvalidArgumentError",
        "NotFoundError",
        "PermissionDeniedError",
        "ResourceExhaustedError",
        "UnauthenticatedError",
        "UnavailableError",
        "VeneerError",
        "Violation",
    ),
    "messages": ("RawText",),
    "operator_client": ("OperatorClient",),
    "organization_client": ("OrganizationClient",),
    "origin": ("Origin",),
    "sync_client": ("SyncClient", "SyncOperatorClient", "SyncOrganizationClient"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Imports a name of this package at its first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the names that are imported at their first use too."""
    return sorted({*globals(), *_HOMES})
