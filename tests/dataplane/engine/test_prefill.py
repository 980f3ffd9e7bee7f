"""Which prompts go on and which requests start."""

from __future__ import annotations

from tests.dataplane.engine.driving import ArenaAdapters, FakeAdapters, Loop, add, assert_idle, make, submit


def test_requests_behind_a_missing_adapter_go_on_and_it_is_reported() -> None:
    adapters = FakeAdapters({"v1r3"})
    scheduler = make(adapters=adapters)
    loop = Loop(scheduler)
    scheduler.add(submit("cold", version="v9r3"), 0.0)
    scheduler.add(submit("base"), 0.0)
    scheduler.add(submit("warm", version="v1r3"), 0.0)
    loop.turn()
    assert loop.plans[0].missed == {"v9r3"}
    assert scheduler.num_running == 2
    loop.run()
    assert set(loop.finished) == {"base", "warm"}
    adapters.resident.add("v9r3")
    loop.run()
    assert loop.finished["cold"] == "length"


def test_a_request_that_lacks_a_slot_is_passed_only_so_often() -> None:
    adapters = FakeAdapters({"v1r3"})
    adapters.starved.add("v9r3")
    scheduler = make(adapters=adapters, max_sequences=2, max_passes=3)
    loop = Loop(scheduler)
    scheduler.add(submit("cold", version="v9r3"), 0.0)
    for i in range(20):
        scheduler.add(submit(f"warm{i}", version="v1r3"), 0.0)
    scheduler.add(submit("base", tenant="u"), 0.0)
    for _ in range(40):
        loop.turn()
    assert adapters.leases == {}, "the slots drained, so that a load can have one"
    assert 0 < sum(name.startswith("warm") for name in loop.finished) < 12
    assert set(adapters.reserved) == {"v9r3"}, "the next room is kept for it"
    assert "base" in loop.finished, "rows without adapter take no slot"
    adapters.starved.clear()
    adapters.resident.add("v9r3")
    loop.run()
    assert len(loop.finished) == 22


def test_a_long_prompt_that_lacks_pages_is_passed_only_so_often() -> None:
    scheduler = make(num_pages=8, max_passes=2, max_sequences=3)
    loop = Loop(scheduler)
    scheduler.add(submit("a", 4, max_tokens=8), 0.0)
    loop.turn()
    scheduler.add(submit("long", 27, max_tokens=1), 0.0)
    for i in range(30):
        scheduler.add(submit(f"s{i}", 2, max_tokens=2), 0.0)
    loop.run()
    assert list(loop.finished).index("long") < 15


def test_a_prompt_that_has_begun_goes_on_behind_one_that_lacks_pages() -> None:
    scheduler = make(num_pages=8, max_passes=1, max_step_tokens=4)
    loop = Loop(scheduler)
    scheduler.add(submit("first", 2, max_tokens=2), 0.0)
    loop.turn()
    scheduler.add(submit("large", 27, max_tokens=1, tenant="u"), 0.0)
    scheduler.add(submit("begun", 20, max_tokens=1, tenant="v"), 0.0)
    loop.run()
    assert list(loop.finished) == ["first", "begun", "large"]


def test_a_flooding_tenant_leaves_the_others_their_share() -> None:
    scheduler = make(max_sequences=2, num_pages=64)
    loop = Loop(scheduler)
    for i in range(30):
        scheduler.add(submit(f"flood{i}", 8, max_tokens=8, tenant="x"), 0.0)
    for i in range(5):
        scheduler.add(submit(f"small{i}", 8, max_tokens=8, tenant="y"), 0.0)
    loop.run()
    done = list(loop.finished)
    assert max(done.index(f"small{i}") for i in range(5)) < 14


def test_a_tenant_whose_many_requests_are_passed_over_hides_nobody_else() -> None:
    adapters = FakeAdapters()
    adapters.starved.update(f"v{i}r3" for i in range(9))
    scheduler = make(adapters=adapters, max_scan=3)
    for i in range(9):
        scheduler.add(submit(f"cold{i}", version=f"v{i}r3", tenant="x"), 0.0)
    scheduler.add(submit("base", tenant="y"), 0.0)
    scheduler.schedule()
    assert [sequence.request_id for sequence in scheduler._seating.running] == ["base"]


def test_pages_for_a_whole_prompt_are_reserved_before_its_first_chunk() -> None:
    scheduler = make(num_pages=16, max_step_tokens=8, max_context=64)
    loop = Loop(scheduler)
    scheduler.add(submit("long", 40, max_tokens=4), 0.0)
    loop.turn()
    assert loop.plans[0].num_tokens == 8
    assert scheduler.num_pages_used == 10, "of four tokens each"
    scheduler.add(submit("next", 30, max_tokens=1), 0.0)
    for _ in range(3):
        loop.turn()
    assert scheduler.num_running == 1, "its prompt would not fit beside, so it has not begun"
    loop.run()
    assert list(loop.finished) == ["long", "next"]


def test_of_two_adapters_that_exclude_each_other_each_has_its_turn() -> None:
    adapters = ArenaAdapters(3, versions={"v2r3": 2, "v3r3": 3})
    scheduler = make(num_pages=16, adapters=adapters, max_passes=1)
    loop = Loop(scheduler)
    for number in range(12):
        add(scheduler, submit(f"{number}", 5, version="v2r3" if number % 2 else "v3r3"))
    for number in range(6):
        add(scheduler, submit(f"base{number}", 9))
    for _ in range(300):
        loop.turn()
    assert len(loop.finished) == 18
    assert_idle(scheduler)


def test_what_a_passed_request_waited_for_is_not_taken_from_it_before_it_starts() -> None:
    adapters = ArenaAdapters(3, versions={"x2r3": 2, "x3r3": 3, "z1r3": 1, "z2r3": 2})
    scheduler = make(num_pages=8, adapters=adapters, max_passes=1)
    loop = Loop(scheduler)
    for number in range(3):
        add(scheduler, submit(f"base{number}", 1, tenant="x", max_tokens=1))
    for version, max_tokens in {"x2r3": 1, "x3r3": 1, "z1r3": 2, "z2r3": 1}.items():
        add(scheduler, submit(version, 1, tenant=version[0], version=version, max_tokens=max_tokens))
    for _ in range(12):
        loop.turn()
    assert len(loop.finished) == 7
    assert_idle(scheduler)


def test_a_paused_request_keeps_nobody_from_having_room_reserved() -> None:
    adapters = FakeAdapters()
    adapters.starved = {"v1r8", "v2r8"}
    scheduler = make(adapters=adapters, max_passes=0)
    for version in ("v1r8", "v2r8"):
        scheduler.add(submit(version, version=version), 0.0)
    scheduler.schedule()
    assert set(adapters.reserved) == {"v1r8"}
    first = scheduler._prefill._reserved
    assert first is not None
    first.paused = True
    scheduler.schedule()
    assert set(adapters.reserved) == {"v1r8", "v2r8"}


def test_room_is_kept_for_one_passed_request_until_it_starts() -> None:
    adapters = FakeAdapters()
    adapters.starved = {"v1r8", "v2r8"}
    scheduler = make(adapters=adapters, max_passes=0)
    for version in ("v1r8", "v2r8"):
        scheduler.add(submit(version, version=version), 0.0)
    scheduler.schedule()
    adapters.starved.remove("v1r8")
    for _ in range(2):
        scheduler.schedule()
    assert scheduler._tenants.num_loading == 1
    assert set(adapters.reserved) == {"v1r8"}, "it is on the way, and nobody takes its room"
    adapters.resident.add("v1r8")
    for _ in range(3):
        scheduler.schedule()
    assert set(adapters.reserved) == {"v1r8", "v2r8"}
