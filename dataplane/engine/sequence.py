"""One request inside the engine: its tokens, how far they are computed, and everything it holds."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dataplane.engine.messages import Logprobs, Submit
from dataplane.engine.plan import TokenMask
from dataplane.engine.prefix import PageKeys
from dataplane.lora.holdings import Lease

if TYPE_CHECKING:
    from dataplane.engine.accounts import Account

MAX_SCORED_ROWS = 64
"""Rows of one step whose logits say how likely the prompt's next token was."""


class Phase(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Lack(enum.Enum):
    """What keeps a waiting sequence from starting."""

    PAGES = "pages"
    RANK_ROWS = "rank_rows"
    ARENA = "arena"
    """Its image is in host memory and finds no room on the device."""
    BUDGET = "budget"
    """Its tenant's limit of rank rows or of bytes in the arena is spent."""
    IMAGE = "image"
    """Its image is on the way to the device."""
    TURN = "turn"


class Sequence:
    """The one owner of a request's KV pages, seat and adapter lease. The scheduler alone changes it.

    `tokens` holds prompt and committed output; positions below `num_scheduled` are computed or planned. Once all known tokens
    are, the sequence is one of the `Decoders`, which count its positions until it leaves them.

    Attributes:
        submit: What was asked.
        request_id: Its id.
        stops: Tokens that end it.
        order: Ordinal by which running sequences are ranked; lower is older. Kept over preemption.
        deadline: Reading of the engine's clock at which the request fails; None for no limit.
        num_prompt: Tokens of the prompt.
        active_from: Position from which on its adapter computes; those before are the base's.
        num_ahead: Positions, in full pages, that may be computed and kept before its adapter comes; 0 once that was tried.
        is_ahead: It runs without its adapter, to the end of these, and then waits again.
        last: Tokens of prompt and output together at most.
        tokens: Prompt and output.
        num_scheduled: Positions computed or planned, as long as it does not decode.
        pages: KV pages, in order of positions.
        chain: What extends `keys`; None when its pages are not shared.
        keys: Keys of its full pages, from the first on, as far as they are known.
        came: When it was queued, by the engine's clock; None once it was seated.
        account: Its tenant's, from the moment it is queued.
        is_parked: It waits for its adapter to be loaded.
        is_unfinished: It runs, and its known tokens are not all planned.
        num_charged: Positions, from the first on, that its tenant was charged for or got from the cache.
        num_cached: Tokens of its prompt that the prefix cache held when it first ran.
        rank_rows: Rank rows that its adapter takes in a step.
        num_named: Pages whose contents are committed and which have their names.
        seat: Row in per-sequence device state; -1 when it has none.
        lease: Held from admission to the end, unless it yields it to a tenant below its share; None for the base.
        preempting: Its pages go back as soon as nothing is in flight.
        yields: Its lease goes with them.
        plain: Whether its sampling is plain.
        mask: What its grammar allows; None without a grammar.
        paused: Its reader is slow: it is not scheduled.
        prompt_scores: Logprobs of the prompt's tokens from the second on, as far as they are committed.
        num_targets: Prompt tokens after the first that are scored or planned to be.
        is_scored: Prompt tokens are left to score.
        mask: What its grammar allows; None without a grammar.
        is_held: It is out of the steps until its mask is there.
        held_since: The output token for whose mask it waited when it gave way, and since when; that wait goes on.
        passes: Steps in which others were admitted before it although it stood ahead of them.
    """

    __slots__ = (
        "account",
        "active_from",
        "came",
        "chain",
        "deadline",
        "held_since",
        "is_ahead",
        "is_held",
        "is_parked",
        "is_scored",
        "is_unfinished",
        "keys",
        "last",
        "lease",
        "mask",
        "num_ahead",
        "num_cached",
        "num_charged",
        "num_named",
        "num_prompt",
        "num_scheduled",
        "num_targets",
        "order",
        "pages",
        "passes",
        "paused",
        "phase",
        "plain",
        "preempting",
        "prompt_scores",
        "rank_rows",
        "request_id",
        "seat",
        "stops",
        "submit",
        "tokens",
        "yields",
    )

    def __init__(
        self,
        submit: Submit,
        *,
        deadline: float | None,
        max_context: int,
        chain: PageKeys | None = None,
        keys: Iterable[bytes] = (),
        mask: TokenMask | None = None,
    ) -> None:
        self.submit = submit
        self.request_id = submit.request_id
        self.stops = submit.sampling.stop_token_ids
        self.order = -1
        self.deadline = deadline
        self.num_prompt = len(submit.prompt)
        self.active_from = submit.active_from
        self.num_ahead = 0 if chain is None else submit.active_from // chain.page_size * chain.page_size
        self.is_ahead = False
        self.last = min(len(submit.prompt) + submit.sampling.max_tokens, max_context)
        self.tokens = list(submit.prompt)
        self.num_scheduled = 0
        self.pages: list[int] = []
        self.chain = chain
        self.keys = list(keys)
        self.num_named = 0
        self.came: float | None = None
        self.account: Account
        self.is_parked = False
        self.is_unfinished = False
        self.num_charged = 0
        self.num_cached = 0
        self.rank_rows = 0
        self.seat = -1
        self.lease: Lease | None = None
        self.phase = Phase.WAITING
        self.preempting = False
        self.yields = False
        self.passes = 0
        self.plain = submit.sampling.is_plain
        self.mask = mask
        self.is_held = False
        self.held_since: tuple[int, float | None] = (0, None)
        self.paused = False
        self.prompt_scores: list[Logprobs] = []
        self.num_targets = 0
        self.is_scored = submit.sampling.prompt_logprobs is not None and len(submit.prompt) > 1

    @property
    def num_output(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - len(self.submit.prompt)

    @property
    def num_remaining(self) -> int:
        """Known tokens that are neither computed nor planned, as long as it does not decode.

        Without its adapter it has none beyond `num_ahead`.
        """
        return (self.num_ahead if self.is_ahead else len(self.tokens)) - self.num_scheduled

    @property
    def stands_aside(self) -> bool:
        """Whether it waits for its reader alone: neither for its turn nor for its adapter."""
        return self.paused and self.phase is Phase.WAITING

    @property
    def slot(self) -> int:
        """Slot of its adapter, -1 for the base."""
        return -1 if self.lease is None else self.lease.slot
