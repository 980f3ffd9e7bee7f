from __future__ import annotations

from kernels.gpu.paths import Path, Paths, Timing, measure


def times(site: str, bucket: int, **us: float) -> list[Timing]:
    return [Timing(site, bucket, Path[name.upper()], value) for name, value in us.items()]


def test_where_nothing_was_measured_the_path_is_the_plain_one():
    assert Paths().path("qkv", 64) is Path.AFTER
    assert Paths(times("o", 16, after=9, extension=1)).path("qkv", 64) is Path.AFTER


def test_each_site_and_bucket_takes_its_fastest_path():
    paths = Paths(
        [
            *times("qkv", 64, after=30, beside=28, first=29, extension=26),
            *times("o", 64, after=12, beside=10, first=13, extension=14),
            *times("o", 128, after=20, beside=30, first=19, extension=25),
        ]
    )
    assert [paths.path("qkv", 64), paths.path("o", 64), paths.path("o", 128)] == [Path.EXTENSION, Path.BESIDE, Path.FIRST]
    assert str(paths) == "o/64: beside, o/128: first, qkv/64: extension"


def test_a_path_that_saves_less_than_2_percent_is_not_taken():
    assert Paths(times("qkv", 64, after=100, extension=98.1)).path("qkv", 64) is Path.AFTER
    assert Paths(times("qkv", 64, after=100, extension=97.9)).path("qkv", 64) is Path.EXTENSION


def test_without_a_time_of_the_plain_path_nothing_is_chosen():
    assert Paths(times("qkv", 64, extension=1)).path("qkv", 64) is Path.AFTER


def test_the_least_of_several_times_counts():
    slow_moment = times("qkv", 64, after=30, extension=90) + times("qkv", 64, after=31, extension=20)
    assert Paths(slow_moment).path("qkv", 64) is Path.EXTENSION


def test_a_measurement_takes_paths_in_turn_and_chooses():
    asked = []

    def time_us(site: str, bucket: int, path: Path) -> float:
        asked.append((site, bucket, path))
        return {Path.AFTER: 10.0, Path.BESIDE: 9.0, Path.FIRST: 11.0, Path.EXTENSION: 8.0 if bucket == 16 else 12.0}[path]

    paths = measure(["qkv", "o"], [16, 64], time_us=time_us, rounds=2)
    assert asked[:8] == [("qkv", 16, path) for path in [*Path, *Path]]
    assert len(asked) == 32
    assert [paths.path("o", bucket) for bucket in (16, 64, 128)] == [Path.EXTENSION, Path.BESIDE, Path.AFTER]
