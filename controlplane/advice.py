"""From a plan and what nodes hold to what is told: homes to callers, to nodes what to stage and to let go; pure functions.

Holdings lead the traffic: a home is told to stage what it should hold, and is named to callers when it does; what lost a home
goes when all the others have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from controlplane.placement import Plan

MAX_VERSIONS: Final = 256
"""Versions that one hint names, of either kind."""

Held = Mapping[str, Mapping[str, AbstractSet[str]]]
"""By node and adapter, the versions that the node holds of it."""


@dataclass(frozen=True, slots=True)
class Staging:
    """What a node is told.

    Attributes:
        stage: Versions to bring, what brings it most traffic first.
        release: Versions to let go first when it needs room.
    """

    stage: tuple[str, ...] = ()
    release: tuple[str, ...] = ()


def named_homes(plan: Plan, held: Held) -> dict[str, tuple[str, ...]]:
    """Returns where callers should send requests: homes that hold the adapter, else others that do, else homes.

    Args:
        plan: The plan.
        held: What the plan's nodes hold.
    """
    holders = dict[str, list[str]]()
    for node in plan.replicas:
        for key in held.get(node, {}):
            holders.setdefault(key, []).append(node)
    named = dict[str, tuple[str, ...]]()
    for key, homes in plan.homes().items():
        ready = tuple(node for node in homes if key in held.get(node, {}))
        named[key] = ready or tuple(holders.get(key, ())[: len(homes)]) or homes
    return named


def staging(plan: Plan, held: Held, versions: Mapping[str, Sequence[str]]) -> dict[str, Staging]:
    """Returns what each node should bring and let go: the warm-up of a node that starts as much as the moves of one that runs.

    Args:
        plan: The plan.
        held: What the plan's nodes hold.
        versions: Versions of each adapter that are asked for, the most asked first.
    """
    warm = plan.warm()
    homes = dict[str, list[str]]()
    for node, keys in warm.items():
        for key in keys:
            homes.setdefault(key, []).append(node)
    told = dict[str, Staging]()
    for node, keys in warm.items():
        mine = held.get(node, {})
        stage = [version for key in keys for version in versions.get(key, ()) if version not in mine.get(key, ())]
        wanted = set(keys)
        release = [
            version
            for key, of_key in mine.items()
            if key not in wanted and key in homes and all(key in held.get(home, {}) for home in homes[key])
            for version in sorted(of_key)
        ]
        told[node] = Staging(tuple(stage[:MAX_VERSIONS]), tuple(release[:MAX_VERSIONS]))
    return told
