"""Which load begins next, and that none takes another's place."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataplane.load_line import LoadLine, Ticket, Urgency

WAITED, EXPECTED, HINTED = Urgency


def begun(line: LoadLine) -> list[str]:
    return [ticket.version for ticket in line.take()]


def join(line: LoadLine, version: str, urgency: Urgency = WAITED, *, tenant: str = "") -> Ticket:
    ticket = Ticket(version, tenant, urgency)
    line.join(ticket)
    return ticket


def test_loads_that_are_waited_for_do_not_wait_for_loads_ahead() -> None:
    line = LoadLine(4)
    for version in "abc":
        join(line, version, HINTED)
    assert begun(line) == ["a"]
    for version in "defgh":
        join(line, version)
    assert begun(line) == ["d", "e", "f", "g"]


def test_of_loads_ahead_those_that_traffic_expects_go_first() -> None:
    line = LoadLine(1)
    running = join(line, "a", HINTED)
    line.take()
    for version, urgency in (("b", HINTED), ("c", EXPECTED), ("d", EXPECTED)):
        join(line, version, urgency)
    order = []
    for _ in range(3):
        line.leave(running)
        (running,) = line.take()
        order.append(running.version)
    assert order == ["c", "d", "b"]


def test_loads_ahead_go_by_turns_of_their_tenants_whoever_came_first_and_however_sure_they_are() -> None:
    line = LoadLine(1)
    for number in range(4):
        join(line, f"flood-{number}", EXPECTED, tenant="flood")
    order = begun(line)
    running = line._running
    for version, urgency, tenant in (("one", HINTED, "small"), ("sure", EXPECTED, "other"), ("two", HINTED, "small")):
        join(line, version, urgency, tenant=tenant)
    for _ in range(6):
        line.leave(next(iter(running)))
        order += begun(line)
    assert order == ["flood-0", "sure", "one", "flood-1", "two", "flood-2", "flood-3"]


def test_who_comes_again_and_again_alone_has_no_turn_before_those_who_wait() -> None:
    line = LoadLine(1)
    join(line, "again-0", HINTED, tenant="again")
    order = begun(line)
    for number in range(3):
        join(line, f"waits-{number}", HINTED, tenant="waits")
    for number in range(1, 4):
        join(line, f"again-{number}", HINTED, tenant="again")
        line.leave(next(iter(line._running)))
        order += begun(line)
    assert order == ["again-0", "waits-0", "again-1", "waits-1"]


def test_a_tenant_that_asks_for_much_leaves_the_next_place_to_another() -> None:
    line = LoadLine(2)
    flood = [join(line, f"flood-{number}", tenant="flood") for number in range(9)]
    assert begun(line) == ["flood-0", "flood-1"]
    join(line, "one", tenant="small")
    line.leave(flood[0])
    assert begun(line) == ["one"]


def test_a_load_that_becomes_urgent_goes_on_and_gives_its_place_ahead_to_another() -> None:
    line = LoadLine(1)
    ahead = join(line, "a", HINTED)
    line.take()
    join(line, "b", HINTED)
    assert begun(line) == []
    ahead.urgency = WAITED
    assert begun(line) == ["b"]
    join(line, "c")
    assert begun(line) == []


def test_what_stalls_gives_its_place_up_but_only_so_much_may() -> None:
    line = LoadLine(1)
    stalled = []
    for number in range(4):
        stalled.append(join(line, f"hang-{number}"))
        assert begun(line) == [f"hang-{number}"]
        assert line.stall(stalled[-1])
    last = join(line, "hang-4")
    line.take()
    assert not line.stall(last)
    join(line, "good")
    assert begun(line) == []
    line.leave(last)
    assert begun(line) == ["good"]


def test_what_goes_on_after_a_stall_holds_a_place_again() -> None:
    line = LoadLine(1)
    slow = join(line, "slow")
    line.take()
    line.stall(slow)
    line.progress(slow)
    join(line, "next")
    assert begun(line) == []


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order, places are bounded and nobody waits beside a free one."""

    def __init__(self) -> None:
        super().__init__()
        self.line = LoadLine(3)
        self.tickets: list[Ticket] = []

    @rule(urgency=st.sampled_from(Urgency), tenant=st.sampled_from("xyz"))
    def join(self, urgency: Urgency, tenant: str) -> None:
        self.tickets.append(join(self.line, f"v{len(self.tickets)}", urgency, tenant=tenant))
        self.line.take()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), what=st.sampled_from(["leave", "retry", "stall", "progress", "urge", "calm"]))
    def happens(self, data: st.DataObject, what: str) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        match what:
            case "leave":
                self.line.leave(ticket)
                self.tickets.remove(ticket)
            case "retry":
                if ticket.running:
                    self.line.leave(ticket)
                    self.line.join(ticket)
            case "stall":
                self.line.stall(ticket)
            case "progress":
                self.line.progress(ticket)
            case "urge":
                ticket.urgency = WAITED
            case "calm":
                ticket.urgency = EXPECTED
        self.line.take()

    @invariant()
    def nobody_waits_beside_a_free_place(self) -> None:
        holding = [ticket for ticket in self.tickets if ticket.running and not ticket.stalled]
        for is_ahead, places in ((False, 3), (True, 1)):
            waiting = [one for one in self.tickets if not one.running and (one.urgency > WAITED) is is_ahead]
            assert not waiting or sum((one.urgency > WAITED) is is_ahead for one in holding) >= places

    @invariant()
    def few_enough_stall(self) -> None:
        assert sum(ticket.stalled for ticket in self.tickets) <= 12


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
