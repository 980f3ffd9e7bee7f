"""Which planes a command talks to, and with which key: options first, then the environment, then what `veneer up` left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from veneer.channel import ClientTls
from veneer.client import Client
from veneer.errors import UnauthenticatedError
from veneer.local.state import StackState, read_state
from veneer.operator_client import OperatorClient
from veneer.organization_client import OrganizationClient
from veneer.replicas import read_addresses

_CONTROL = "127.0.0.1:7600"
_DATA = "127.0.0.1:7700"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to and as whom; empty fields were not given.

    Attributes:
        state_folder: Folder of the local stack.
        control: Control plane, callers.
        control_operators: Control plane, operators.
        data: Data plane, callers.
        data_operators: Data plane, operators.
        key: Key of a tenant.
        operator_key: Key of an operator.
        org_key: Key of an organisation.
        ca: PEM authorities; given, TLS is used.
    """

    state_folder: Path
    control: str = ""
    control_operators: str = ""
    data: str = ""
    data_operators: str = ""
    key: str = ""
    operator_key: str = ""
    org_key: str = ""
    ca: Path | None = None

    @property
    def state(self) -> StackState | None:
        """The local stack, unless the user named other planes: a local key must not travel to them."""
        if self.control or self.data or self.control_operators or self.data_operators:
            return None
        return read_state(self.state_folder)

    def client(self) -> Client:
        """A client with the tenant's key.

        Raises:
            UnauthenticatedError: There is no key.
        """
        state = self.state
        key = self.key or (state.tenant_key if state else "")
        if not key:
            raise UnauthenticatedError("there is no tenant key: give --key or set VENEER_API_KEY (`veneer key create` makes one)")
        return Client(control=self.control_address, data=",".join(self.data_addresses), key=key, tls=self._tls)

    def operator(self, *, data: str = "") -> OperatorClient:
        """A client with the operator's key, of the data plane at an address or, without one, of the data planes that were named.

        Raises:
            UnauthenticatedError: There is no key.
        """
        state = self.state
        key = self.operator_key or (state.operator_key if state else "")
        if not key:
            raise UnauthenticatedError("there is no operator key: give --operator-key or set VENEER_OPERATOR_KEY")
        control = self.control_operators or (state.control_operators if state else "127.0.0.1:7601")
        return OperatorClient(control=control, data=data or ",".join(self.operator_addresses), key=key, tls=self._tls)

    def steward(self) -> OperatorClient | OrganizationClient:
        """A client with the organisation's key, where one was given, else with the operator's.

        Raises:
            UnauthenticatedError: There is neither.
        """
        return self.organization() if self.org_key else self.operator()

    def organization(self) -> OrganizationClient:
        """A client with the organisation's key.

        Raises:
            UnauthenticatedError: There is no key.
        """
        if not self.org_key:
            hint = "give --org-key or set VENEER_ORG_KEY (`veneer org key create` makes one)"
            raise UnauthenticatedError(f"there is no organisation's key: {hint}")
        return OrganizationClient(control=self.control_address, key=self.org_key, tls=self._tls)

    def keeper(self, tenant: str) -> Client | OperatorClient | OrganizationClient:
        """Who speaks for a tenant: an organisation or operator where the tenant is named, else the tenant itself.

        Raises:
            UnauthenticatedError: There is no such key.
        """
        return self.steward() if tenant else self.client()

    @property
    def control_address(self) -> str:
        """Where the control plane's listener for callers is."""
        state = self.state
        return self.control or (state.control if state else _CONTROL)

    @property
    def data_addresses(self) -> list[str]:
        """Where the data planes' listeners for callers are."""
        state = self.state
        return read_addresses(self.data or (state.data if state else _DATA))

    @property
    def knows_operators(self) -> bool:
        """Whether an operator may be asked for: there is a key, and no data planes were named without operators' listeners."""
        state = self.state
        return bool(state or (self.operator_key and (self.data_operators or not self.data)))

    @property
    def operator_addresses(self) -> list[str]:
        """Where the operators' listeners of the data planes are."""
        state = self.state
        return read_addresses(self.data_operators or (state.data_operators if state else "127.0.0.1:7701"))

    @property
    def _tls(self) -> ClientTls | None:
        return None if self.ca is None else ClientTls(ca=self.ca)
