from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.lora.eviction import Recency
from dataplane.lora.host_cache import HostCache, HostCacheFullError, Payer, TenantHostLimitError
from dataplane.lora.image_file import open_image
from veneer.errors import InvalidArgumentError


def put(cache, version, size):
    evicted = cache.reserve(version, size_bytes=size)
    cache.path(version).write_bytes(b"x" * size)
    return evicted + cache.add(version, size_bytes=size)


@pytest.fixture
def cache(tmp_path):
    return HostCache(tmp_path / "images", dtype="float32", max_bytes=100)


def use(cache, version):
    cache.hold(version)
    cache.let_go(version)


def test_the_file_used_least_makes_room(cache):
    put(cache, "a", 40)
    put(cache, "b", 40)
    use(cache, "a")
    use(cache, "a")
    use(cache, "b")
    assert cache.find("a") == cache.path("a")
    assert put(cache, "c", 40) == ("b",)
    assert cache.versions() == ("c", "a")
    assert cache.find("b") is None
    assert not cache.path("b").exists()
    assert cache.num_bytes == 80
    assert (cache.counters.hits, cache.counters.misses, cache.counters.evictions) == (1, 1, 1)


def test_of_files_used_alike_the_largest_makes_room(cache):
    for version, size in (("a", 20), ("b", 50), ("c", 20)):
        put(cache, version, size)
        use(cache, version)
    assert put(cache, "d", 30) == ("b",)


def test_by_recency_the_file_used_longest_ago_makes_room(tmp_path):
    cache = HostCache(tmp_path / "images", dtype="float32", max_bytes=100, policy=Recency())
    for version, size in (("a", 20), ("b", 60)):
        put(cache, version, size)
    use(cache, "b")
    use(cache, "a")
    assert put(cache, "c", 50) == ("b",)


def test_a_held_file_never_makes_room(cache):
    put(cache, "a", 60)
    cache.hold("a")
    cache.hold("a")
    cache.let_go("a")
    with pytest.raises(HostCacheFullError):
        cache.reserve("b", size_bytes=50)
    assert cache.path("a").exists()
    cache.let_go("a")
    assert put(cache, "b", 50) == ("a",)


def test_reservations_count_until_they_end(cache):
    cache.reserve("a", size_bytes=70)
    with pytest.raises(HostCacheFullError):
        cache.reserve("b", size_bytes=40)
    cache.reserve("a", size_bytes=60)
    cache.reserve("b", size_bytes=40)
    cache.cancel("a")
    assert cache.num_bytes == 40


def test_an_image_larger_than_the_budget_is_refused_and_nothing_is_deleted(cache):
    put(cache, "a", 40)
    with pytest.raises(HostCacheFullError):
        cache.reserve("b", size_bytes=101)
    assert cache.versions() == ("a",)
    assert cache.path("a").exists()


def test_a_file_larger_than_reserved_makes_others_go(cache):
    put(cache, "a", 50)
    cache.reserve("b", size_bytes=10)
    cache.path("b").write_bytes(b"x" * 90)
    assert cache.add("b", size_bytes=90) == ("a",)
    assert cache.versions() == ("b",)


def test_files_of_an_earlier_process_are_known_oldest_first_and_unfinished_ones_deleted(tmp_path):
    for age, name in enumerate(["b.float32.image", "a.float32.image", ".c.float32.image.123.tmp"]):
        (tmp_path / name).write_bytes(b"x" * 30)
        os.utime(tmp_path / name, (1000 + age, 1000 + age))
    cache = HostCache(tmp_path, dtype="float32", max_bytes=100)
    assert cache.versions() == ("b", "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.float32.image", "b.float32.image"]
    assert HostCache(tmp_path, dtype="float32", max_bytes=40).versions() == ("a",)
    assert [path.name for path in tmp_path.iterdir()] == ["a.float32.image"]


def test_images_of_another_dtype_are_never_found_and_go_at_the_start(tmp_path):
    put(HostCache(tmp_path, dtype="bfloat16", max_bytes=100), "a", 10)
    (tmp_path / "b.image").write_bytes(b"x")
    cache = HostCache(tmp_path, dtype="fp8", max_bytes=100)
    assert cache.find("a") is None
    assert list(tmp_path.iterdir()) == []
    put(cache, "a", 5)
    assert HostCache(tmp_path, dtype="fp8", max_bytes=100).versions() == ("a",)


def test_a_removed_file_is_gone_even_when_held(cache):
    put(cache, "a", 10)
    cache.hold("a")
    assert cache.remove("a")
    assert not cache.remove("a")
    assert not cache.path("a").exists()
    assert cache.num_bytes == 0


@pytest.mark.parametrize("version", ["", "../a", "/etc/passwd", "a/b", "A", "a.b", "a" * 200, "a\0"])
def test_a_version_that_is_no_digest_never_becomes_a_path(cache, version):
    with pytest.raises(InvalidArgumentError):
        cache.path(version)
    with pytest.raises(InvalidArgumentError):
        cache.reserve(version, size_bytes=1)


def test_what_is_no_image_does_not_stop_the_start_nor_stand_in_an_images_way(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.float32.image").mkdir()
    (folder / "a.float32.image" / "x").write_bytes(b"x")
    (folder / "b.float32.image").symlink_to(folder / "nowhere")
    (folder / "c.tmp").mkdir()
    (folder / "UPPER.float32.image").write_bytes(b"x")
    (folder / "notes.txt").write_bytes(b"x")
    (folder / "d.float32.image").write_bytes(b"")
    cache = HostCache(folder, dtype="float32", max_bytes=100)
    assert cache.versions() == ("d",)
    for version in "ab":
        put(cache, version, 40)
        assert cache.find(version).read_bytes() == b"x" * 40


def test_on_a_full_disk_the_files_worth_least_give_way_but_none_in_use(cache):
    for version in "abcd":
        put(cache, version, 20)
    cache.hold("a")
    assert cache.give_way() == ("b",)
    assert not cache.path("b").exists()
    assert cache.versions() == ("c", "d", "a")
    for version in "cd":
        cache.hold(version)
    assert cache.give_way() == ()


@pytest.mark.parametrize(("moment", "whole"), [("before", []), ("after", ["v"])])
def test_a_writer_that_is_killed_leaves_a_whole_image_or_none(tmp_path, moment, whole):
    code = f"""
import os, pathlib, signal, sys
import numpy as np
from dataplane.lora.image import ImagePair, build_image
from dataplane.lora.image_file import write_image

rename = pathlib.Path.rename
def killed(self, target):
    if {moment == "after"}:
        rename(self, target)
    os.kill(os.getpid(), signal.SIGKILL)

pathlib.Path.rename = killed
pair = ImagePair(0, 0, 1.0, np.ones((2, 8), np.float32), np.ones((8, 2), np.float32))
image = build_image([pair], version="v", base_digest="b", dtype="float32", num_layers=1, num_slices=1)
write_image(pathlib.Path(sys.argv[1]), image)
"""
    path = HostCache(tmp_path / "images", dtype="float32", max_bytes=1 << 20).path("v")
    ended = subprocess.run([sys.executable, "-c", code, str(path)], cwd=Path(__file__).parents[3], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(list(path.parent.iterdir())) == 1
    cache = HostCache(path.parent, dtype="float32", max_bytes=1 << 20)
    assert list(cache.versions()) == whole == [open_image(cache.path(version)).version for version in cache.versions()]
    assert len(list(path.parent.iterdir())) == len(whole)


X = Payer("x", 60)


def test_files_of_a_tenant_at_its_limit_make_room_for_one_another_and_for_nobody_elses(cache):
    cache.hold("y1", Payer("y"))
    put(cache, "y1", 30)
    cache.let_go("y1")
    for version in ("a", "b", "c"):
        cache.hold(version, X)
        evicted = put(cache, version, 25)
        cache.let_go(version)
        assert evicted == (() if version != "c" else ("a",))
    assert cache.num_bytes == 80
    assert "y1" in cache.versions()


def test_a_file_beyond_its_tenants_limit_waits_while_the_others_are_in_use_and_is_refused_where_it_never_fits(cache):
    cache.hold("a", X)
    put(cache, "a", 40)
    cache.hold("b", X)
    with pytest.raises(HostCacheFullError, match="takes 30 bytes of host memory; its tenant may have 60 and uses 40"):
        cache.reserve("b", size_bytes=30)
    with pytest.raises(TenantHostLimitError, match="takes 61 bytes of host memory; its tenant may have 60 and uses 40"):
        cache.reserve("b", size_bytes=61)
    cache.let_go("a")
    assert put(cache, "b", 30) == ("a",)
    assert put(cache, "nobodys", 65) == ()


def test_a_file_that_comes_after_its_request_left_is_still_its_tenants(cache):
    cache.hold("a", X)
    cache.reserve("a", size_bytes=40)
    cache.let_go("a")
    cache.path("a").write_bytes(b"")
    cache.add("a", size_bytes=40)
    assert cache._booked == {"x": 40}


def test_a_tenant_whose_limit_was_lowered_below_what_it_has_pays_for_what_comes(cache):
    cache.hold("a", X)
    put(cache, "a", 50)
    cache.let_go("a")
    cache.hold("b", Payer("x", 40))
    assert put(cache, "b", 30) == ("a",)
    assert cache._booked == {"x": 30}


def test_a_version_that_another_tenant_may_have_is_charged_to_it(cache):
    cache.hold("a", X)
    cache.hold("a", Payer("y"))
    put(cache, "a", 70)
    assert cache._booked == {"y": 70}


def test_what_comes_ahead_of_requests_takes_free_room_and_makes_room_first_until_it_is_held(cache):
    put(cache, "a", 40)
    with pytest.raises(HostCacheFullError, match="nobody waits"):
        cache.reserve("b", size_bytes=61, ahead=True)
    for version in ("b", "c"):
        assert cache.reserve(version, size_bytes=30, ahead=True) == ()
        cache.path(version).write_bytes(b"x" * 30)
        assert cache.add(version, size_bytes=30) == ()
    cache.hold("b", X)
    cache.let_go("b")
    assert cache._booked == {"x": 30}
    assert cache._choose(1)[0] == ["c"]
    assert put(cache, "d", 50) == ("c", "a"), "the worth of those that were asked for counts after that"
    assert not cache._ahead


def bring_ahead(cache, version, size):
    """Brings a file whose request left before it came, but may come again; returns what made room."""
    gone = cache.reserve(version, size_bytes=size, ahead=True)
    cache.path(version).write_bytes(b"x" * size)
    cache.add(version, size_bytes=size)
    return gone


def test_what_a_tenants_requests_did_not_wait_for_counts_against_its_limit_all_the_same(cache):
    put(cache, "other", 20)
    for version, gone in (("a", ()), ("b", ()), ("c", ("a",)), ("d", ("b",))):
        cache.hold(version, X)
        cache.let_go(version, is_coming=True)
        assert bring_ahead(cache, version, 30) == gone
        assert cache._booked == {"x": min(60, 30 * (1 + "abcd".index(version)))}
    assert "other" in cache
    assert not cache._coming


def test_what_did_not_come_is_nobodys_after_that(cache):
    cache.hold("a", X)
    cache.let_go("a", is_coming=True)
    assert "a" in cache._payers
    cache.cancel("a")
    assert not cache._payers
    assert not cache._coming


def test_what_its_holder_may_not_have_within_its_limit_goes_first(cache):
    put(cache, "known", 20)
    bring_ahead(cache, "ahead", 20)
    cache.hold("a", X)
    put(cache, "a", 50)
    for version in ("known", "ahead"):
        cache.hold(version, X)
    assert cache._booked == {"x": 50}
    assert cache._choose(1) == ([], 1), "all are held"
    for version in ("a", "known", "ahead"):
        cache.let_go(version)
    assert set(cache._choose(40)[0]) == {"known", "ahead"}
    cache.hold("known", Payer("y", 100))
    cache.let_go("known")
    assert cache._choose(1)[0] == ["ahead"], "who may have it pays for it"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["hold", "let_go", "leave", "reserve", "ahead", "add", "cancel", "remove"]),
            st.sampled_from("abcdef"),
            st.integers(1, 40),
            st.sampled_from([None, Payer("x", 60), Payer("y", 35), Payer("z")]),
        ),
        max_size=60,
    )
)
def test_no_tenant_exceeds_its_limit_and_every_byte_is_charged_once(tmp_path_factory, moves):
    cache = HostCache(tmp_path_factory.mktemp("cache"), dtype="float32", max_bytes=100)
    held, reserved = Counter(), {}
    for verb, version, size, payer in moves:
        if verb == "hold":
            cache.hold(version, payer)
            held[version] += 1
        elif verb == "let_go" and held[version]:
            cache.let_go(version)
            held[version] -= 1
        elif verb == "leave" and held[version]:
            cache.let_go(version, is_coming=True)
            held[version] -= 1
        elif verb in ("reserve", "ahead") and version not in reserved:
            owners = dict(cache._payers)
            try:
                evicted = cache.reserve(version, size_bytes=size, ahead=verb == "ahead")
            except (HostCacheFullError, TenantHostLimitError):
                continue
            assert not any(held[gone] for gone in evicted)
            assert verb == "reserve" or all(owners[gone].tenant == owners[version].tenant for gone in evicted)
            reserved[version] = size
        elif verb == "add" and version in reserved:
            cache.path(version).write_bytes(b"")
            cache.add(version, size_bytes=reserved.pop(version))
        elif verb == "cancel":
            cache.cancel(version)
            reserved.pop(version, None)
        elif verb == "remove" and version not in reserved:
            cache.remove(version)
        assert cache.num_bytes <= 100
        assert cache._booked["x"] <= 60
        assert cache._booked["y"] <= 35
        booked = Counter()
        for known, owner in cache._payers.items():
            booked[owner.tenant] += cache._files.get(known, 0) + cache._reserved.get(known, 0)
        assert +booked == cache._booked
        assert set(cache._payers) <= {*cache._files, *cache._reserved, *cache._in_use, *cache._coming}
        assert set(cache._ahead) <= {*cache._files, *cache._reserved}
        assert not set(cache._ahead) & set(cache._in_use) & set(cache._payers)
