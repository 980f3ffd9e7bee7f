"""How one number is divided among those that want parts of it. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping


def share_of(who: str, wants: Mapping[str, int], *, limit: int, reserved: int) -> int:
    """Returns what one of several gets of a number.

    What all want together is met where it fits, with a part of what is free on top for each and one part left for a newcomer;
    else it is met in proportion, and what remains of the division goes to the largest remainders.

    Args:
        who: Whose share is asked for.
        wants: What each wants, `who` among them.
        limit: The number to divide.
        reserved: What the others may have used of it already, whatever they are to get.
    """
    total = sum(wants.values())
    fits = total <= limit
    share = wants[who] + (limit - total) // (len(wants) + 1) if fits else _proportion(wants, limit, total)[who]
    return max(min(share, limit - reserved), 0)


def _proportion(wants: Mapping[str, int], limit: int, total: int) -> dict[str, int]:
    shares = {name: limit * want // total for name, want in wants.items()}
    left = limit - sum(shares.values())
    for name in sorted(wants, key=lambda name: (-(limit * wants[name] % total), name))[:left]:
        shares[name] += 1
    return shares
