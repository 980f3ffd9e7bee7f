"""All that the answers about one adapter, or one key, depend on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.histories.records import Arms, Moved, Outcome, Refused, Shown

READY, RETIRED = "READY", "RETIRED"
RUNNING, PROMOTED, ROLLED_BACK, STOPPED = "RUNNING", "PROMOTED", "ROLLED_BACK", "STOPPED"
STABLE = "stable"
NOT_FOUND = Refused("NOT_FOUND")
PRECONDITION = Refused("FAILED_PRECONDITION")


@dataclass(frozen=True, slots=True)
class Version:
    """A version that is not deleted."""

    digest: str
    number: int
    state: str = READY


@dataclass(frozen=True, slots=True)
class Canary:
    """A canary whose versions both exist.

    Attributes:
        stable: Version that had all traffic before.
        weights: Percent of the traffic that the version gets, by step.
        first: Generation of the alias in the first step.
        state: How it ended, or RUNNING: which one stays whose alias somebody else moved, and then it means nothing.
        is_condemned: It is to be rolled back.
    """

    alias: str
    version: str
    stable: str
    weights: tuple[int, ...]
    first: int
    step: int = 0
    state: str = RUNNING
    is_condemned: bool = False

    def shown(self, state: str = "") -> Shown:
        """It, as the API shows it."""
        generation = self.first + self.step
        return Shown(self.alias, self.version, self.stable, self.weights, self.step, generation, state or self.state)


@dataclass(frozen=True, slots=True)
class AdapterState:
    """All that one adapter's answers depend on.

    Attributes:
        num_versions: Versions that it ever had; 0: there is no such adapter yet.
        versions: By number.
        generations: Present generation of each alias, by name.
        moves: What each alias served in each generation that is remembered, oldest first: all that share no deleted version.
        frozen: Aliases that may not move.
        canaries: In the order of their starts.
        is_deleted: There is no such adapter now, though there was.
        grants: Tenants that may use it.
        answers: Request ids that were answered, with what they asked for and the answer.
    """

    num_versions: int = 0
    versions: tuple[Version, ...] = ()
    generations: tuple[tuple[str, int], ...] = ()
    moves: tuple[Moved, ...] = ()
    frozen: frozenset[str] = frozenset()
    canaries: tuple[Canary, ...] = ()
    is_deleted: bool = False
    grants: frozenset[str] = frozenset()
    answers: frozenset[tuple[str, object, Outcome]] = frozenset()

    def find(self, digest: str) -> Version | None:
        """The version with a digest."""
        return next((one for one in self.versions if one.digest == digest), None)

    def alias(self, name: str) -> Moved | None:
        """What an alias serves; None when it is absent or points at nothing."""
        generation = dict(self.generations).get(name)
        return next((one for one in self.moves if one.alias == name and one.generation == generation and one.arms), None)

    def aliases(self) -> tuple[Moved, ...]:
        """What all aliases serve, by name."""
        present = (self.alias(name) for name, _ in self.generations)
        return tuple(replace(one, frozen=one.alias in self.frozen) for one in present if one is not None)


@dataclass(frozen=True, slots=True)
class KeyState:
    """A key that was created before the history began."""

    is_valid: bool = True


State = AdapterState | KeyState


def move(state: AdapterState, name: str, arms: Arms) -> tuple[Moved, AdapterState]:
    """Gives an alias its next generation; without arms it points at nothing then."""
    generations = dict(state.generations)
    generations[name] = generations.get(name, 0) + 1
    moved = Moved(name, generations[name], arms)
    moves = (*state.moves, moved) if arms else state.moves
    return moved, replace(state, generations=tuple(sorted(generations.items())), moves=moves)
