"""A window counts for its whole length, and not for much longer."""

from __future__ import annotations

from dataplane.windows import Window


class Clock:
    """Seconds that the test counts."""

    def __init__(self) -> None:
        self.now_s = 1000.25

    def __call__(self) -> float:
        return self.now_s


def test_what_came_counts_for_the_length_of_the_window_and_no_second_longer() -> None:
    clock = Clock()
    window = Window(60, clock=clock)
    window.add(3)
    clock.now_s += 0.5
    window.add(4)
    assert window.total == 7
    clock.now_s = 1060.9
    assert window.total == 7
    clock.now_s = 1061.0
    assert window.total == 0


def test_it_says_when_there_is_room_again() -> None:
    clock = Clock()
    window = Window(60, clock=clock)
    window.add(3)
    clock.now_s += 10
    window.add(4)
    assert window.wait_s(3) == 1061 - clock.now_s
    assert window.wait_s(4) == 1071 - clock.now_s
    assert window.wait_s(8) == 60
