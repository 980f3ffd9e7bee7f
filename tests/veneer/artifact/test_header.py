from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.adapters import write_safetensors
from tests.veneer.artifact.conftest import ReadFaults, WriteRaw
from veneer.artifact.faults import Faults
from veneer.artifact.header import HeaderLimits, read_header
from veneer.artifact.source import Source

ENTRY = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


def test_tensors_are_found_by_offset_in_the_order_of_their_bytes(tmp_path: Path, read_faults: ReadFaults) -> None:
    write_safetensors(tmp_path / "f", {"b": ("F32", (1, 2), b"12345678"), "a": ("BF16", (1,), b"ab")}, metadata={"format": "pt"})
    tensors, faults = read_faults(tmp_path / "f")
    assert faults == []
    content = (tmp_path / "f").read_bytes()
    assert [(t.name, t.dtype, t.shape, content[t.offset : t.offset + t.size_bytes]) for t in tensors] == [
        ("b", "F32", (1, 2), b"12345678"),
        ("a", "BF16", (1,), b"ab"),
    ]


@pytest.mark.parametrize(
    ("header", "data", "fault"),
    [
        (f'{{"a":{ENTRY},"a":{ENTRY}}}', bytes(8), "has the key 'a' twice"),
        (f'{{"a":{ENTRY},"b":{ENTRY}}}', bytes(8), "inside the tensor before it"),
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', bytes(12), "leaves 4 bytes before it"),
        (f'{{"a":{ENTRY}}}', bytes(9), "1 bytes after the last tensor"),
        (f'{{"a":{ENTRY}}}', bytes(7), "is truncated"),
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', bytes(4), "do not span the 8 bytes"),
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}', bytes(8), "do not span"),
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}}', bytes(8), "must be two whole numbers"),
        ('{"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}', bytes(8), "must be a list of at most 8 whole numbers"),
        ('{"a":{"dtype":"F32","shape":[true,2],"data_offsets":[0,8]}}', bytes(8), "must be a list of at most 8 whole numbers"),
        ('{"a":{"dtype":"F32","shape":[0,2],"data_offsets":[0,0]}}', b"", "has a dimension of 0"),
        ('{"a":{"dtype":"F32","shape":[101],"data_offsets":[0,404]}}', bytes(404), "a dimension above 100"),
        ('{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,8]}}' % ("9" * 65), bytes(8), "a number of 65 digits"),
        ('{"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}', bytes(8), "element type 'F64' is not supported"),
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}}', bytes(8), "must have exactly"),
        ('{"a":5}', b"", "must have exactly"),
        ('{{"{}":{}}}'.format("n" * 17, ENTRY), bytes(8), "1 to 16 printable ASCII"),
        (f'{{"a\\u0000":{ENTRY}}}', bytes(8), "1 to 16 printable ASCII"),
        (f'{{"__metadata__":{{"a":1}},"a":{ENTRY}}}', bytes(8), "must map strings to strings"),
        ('{"a":{"b":{"c":{}}}}', b"", "nested deeper than 3"),
        ("[]", b"", "does not begin with `{`"),
        ('{"a":', b"", "is not JSON"),
        (b'{"\xff":1}', b"", "is not UTF-8"),
        (json.dumps({f"t{n}": 0 for n in range(9)}), b"", "9 tensors; at most 8"),
        (f'{{"a":{ENTRY}}}' + " " * 5000, bytes(8), "header of 5054 bytes; at most 4096"),
    ],
)
def test_a_broken_header_is_refused_by_name(
    header: str | bytes, data: bytes, fault: str, write_raw: WriteRaw, read_faults: ReadFaults
) -> None:
    _, faults = read_faults(write_raw(header, data))
    assert any(fault in text for text in faults), faults


def test_every_fault_of_a_header_is_listed(write_raw: WriteRaw, read_faults: ReadFaults) -> None:
    header = '{"a":{"dtype":"X","shape":[2],"data_offsets":[0,8]},"b":5,"c":{"dtype":"F32","shape":[0],"data_offsets":[8,8]}}'
    _, faults = read_faults(write_raw(header, bytes(8)))
    assert [text.split(":")[1].strip() for text in faults] == ["'a'", "'b'", "'c'"]


def test_a_length_beyond_the_file_is_truncation(write_raw: WriteRaw, read_faults: ReadFaults) -> None:
    assert read_faults(write_raw("{}", length=100))[1] == ["file: is truncated: the header needs 108 bytes, the file has 10"]


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (_zip(), "zip archive"),
        *((pickle.dumps({"a": [1, 2, 3]}, protocol=protocol), "Python pickle") for protocol in (2, 3, 4, 5)),
        (b"GGUF\x03\x00\x00\x00" + bytes(64), "GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"", "too few"),
        (b"short", "too few"),
    ],
)
def test_other_formats_are_refused_by_content(content: bytes, name: str, tmp_path: Path, read_faults: ReadFaults) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    tensors, faults = read_faults(tmp_path / "adapter_model.safetensors")
    assert tensors == []
    assert len(faults) == 1
    assert name in faults[0]


def test_a_header_whose_length_looks_like_a_pickle_is_still_read(write_raw: WriteRaw, read_faults: ReadFaults) -> None:
    header = (f'{{"a":{ENTRY}}}').ljust(0x0280)
    assert write_raw(header, bytes(8)).read_bytes()[:2] == b"\x80\x02"
    assert read_faults(write_raw(header, bytes(8)))[1] == []


_NUMBERS = st.one_of(st.integers(-1, 12), st.sampled_from([4, 8, 12]))
_ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16"]),
        "shape": st.lists(st.integers(0, 3), max_size=3),
        "data_offsets": st.tuples(_NUMBERS, _NUMBERS),
    }
)


@given(st.dictionaries(st.sampled_from("abc"), _ENTRIES, max_size=3), st.integers(0, 16))
def test_what_is_accepted_the_official_reader_reads_alike(header: dict[str, object], size: int) -> None:
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(range(size))
    faults = Faults(64)
    limits = HeaderLimits(
        max_header_bytes=4096, max_tensors=8, max_name_chars=16, max_dimension=100, dtypes=frozenset({"F32", "BF16"})
    )
    tensors = read_header(Source(io.BytesIO(content)), "file", limits=limits, faults=faults)
    if not faults:
        official = {
            name: (entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in safetensors.deserialize(content)
        }
        assert official == {t.name: (t.dtype, list(t.shape), content[t.offset : t.offset + t.size_bytes]) for t in tensors}
