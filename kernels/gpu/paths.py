"""In which order a site's base product and its adapters run, chosen by times that were taken at start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

_LEAST_GAIN = 0.02  # what a path must save: times of one start differ by about as much


class Path(StrEnum):
    """An order of launches; extra launches are those beside the base product."""

    AFTER = "after"
    """Base, shrink, expand in place: two extra."""
    BESIDE = "beside"
    """Shrink on a stream of its own beside the base, then expand in place: two extra, one of them exposed."""
    FIRST = "first"
    """Shrink, expand that writes, then a base product that adds: two extra."""
    EXTENSION = "extension"
    """Shrink, then our own base product with the list as an extension of K: one extra."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one site by one path.

    Attributes:
        site: Name of the site.
        max_rows: Row bucket, as in `kernels.gpu.tiles`.
        path: The path.
        us: Microseconds of base product and adapters.
    """

    site: str
    max_rows: int
    path: Path
    us: float


class Paths:
    """The path of each (site, row bucket): the fastest one, and AFTER unless another one saves 2 % of it.

    Args:
        timings: What was measured; a (site, bucket) without a time of AFTER stays with AFTER. Of several times of one path the
            least counts.
    """

    def __init__(self, timings: Iterable[Timing] = ()) -> None:
        self.timings = tuple(timings)
        best: dict[tuple[str, int], dict[Path, float]] = {}
        for one in self.timings:
            times = best.setdefault((one.site, one.max_rows), {})
            times[one.path] = min(one.us, times.get(one.path, one.us))
        self._chosen = {key: _fastest(times) for key, times in best.items()}

    def path(self, site: str, max_rows: int) -> Path:
        """Returns the path of a site in a row bucket."""
        return self._chosen.get((site, max_rows), Path.AFTER)

    def __str__(self) -> str:
        """What was chosen, for the log of a start."""
        return ", ".join(f"{site}/{max_rows}: {path}" for (site, max_rows), path in sorted(self._chosen.items()))


def _fastest(times: dict[Path, float]) -> Path:
    if Path.AFTER not in times:
        return Path.AFTER
    path = min(times, key=lambda path: times[path])
    return path if times[path] <= (1 - _LEAST_GAIN) * times[Path.AFTER] else Path.AFTER


def measure(
    sites: Iterable[str], buckets: Iterable[int], *, time_us: Callable[[str, int, Path], float], rounds: int = 3
) -> Paths:
    """Takes the time of every path at every (site, bucket), paths in turn so that a slow moment hits all, and chooses.

    Args:
        sites: Names of the sites.
        buckets: Row buckets that the engine uses.
        time_us: Runs one site by one path at so many rows and returns its microseconds.
        rounds: Times of each; the least counts.
    """
    places = [(site, bucket) for site in sites for bucket in buckets]
    return Paths(
        Timing(site, bucket, path, time_us(site, bucket, path)) for site, bucket in places for _ in range(rounds) for path in Path
    )
