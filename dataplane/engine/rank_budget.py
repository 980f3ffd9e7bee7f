"""Rank rows of each tenant's running adapters, against its own limit. Integers only."""

from __future__ import annotations

from dataclasses import dataclass, field

from dataplane.engine.messages import Submit
from kernels.rows import aligned_rank


@dataclass(slots=True)
class _Use:
    counts: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    total: int = 0


class RankBudget:
    """Counts what every tenant uses: each distinct adapter of its sequences that hold a lease once. Owned by `Leases`.

    Ranks are those that the catalogue names, so that nothing has to be loaded to know that it must wait. It has none of rank 0;
    an adapter of gains and shifts alone, which has no rank row, counts as the smallest, since its rows of a step are not free.
    """

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    def used(self, tenant: str) -> int:
        """Returns the rank rows that a tenant uses."""
        use = self._uses.get(tenant)
        return 0 if use is None else use.total

    def admits(self, submit: Submit, *, allowed: int) -> bool:
        """Whether a request's adapter may run now, where so many rows are allowed; 0 is no limit.

        One that runs already for the tenant takes nothing more.
        """
        use = self._uses.get(submit.tenant)
        if not allowed or (use is not None and submit.version in use.counts):
            return True
        return self.used(submit.tenant) + _rows_of(submit) <= allowed

    def fault(self, submit: Submit, *, allowed: int) -> str | None:
        """Returns why a request's adapter can never run where so many rows are allowed; None when it can."""
        rows = _rows_of(submit)
        if not allowed or rows <= allowed:
            return None
        return f"the adapter takes {rows} rank rows; its tenant may have {allowed} and uses {self.used(submit.tenant)}"

    def add(self, submit: Submit) -> None:
        """Notes that a sequence of a request took a lease."""
        assert submit.version is not None, "the base has no lease"
        use = self._uses.setdefault(submit.tenant, _Use())
        if submit.version not in use.counts:
            use.rows[submit.version] = _rows_of(submit)
            use.total += use.rows[submit.version]
        use.counts[submit.version] = use.counts.get(submit.version, 0) + 1

    def remove(self, submit: Submit) -> None:
        """Notes that it gave the lease back."""
        assert submit.version is not None, "the base has no lease"
        use = self._uses[submit.tenant]
        use.counts[submit.version] -= 1
        if not use.counts[submit.version]:
            del use.counts[submit.version]
            use.total -= use.rows.pop(submit.version)
            if not use.counts:
                del self._uses[submit.tenant]


def _rows_of(submit: Submit) -> int:
    return aligned_rank(max(1, submit.rank))
