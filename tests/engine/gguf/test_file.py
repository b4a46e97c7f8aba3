"""Reading: what the `gguf` package writes and reads, parts of a model, and files that lie."""

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from tests.engine.gguf.written import add_key
from tokamac.engine import TokamacError
from tokamac.engine.gguf.file import read_gguf

VALUES = {"general.name": "tiny", "llama.block_count": 3, "odd": [1.5, -2.0], "tokens": ["a", "é", ""], "on": True}


def write(path: Path, tensors: int = 2, **more: int) -> None:
    writer = GGUFWriter(path, "llama")
    for key, value in {**VALUES, **more}.items():
        add_key(writer, key, value)
    for index in range(tensors):
        writer.add_tensor(f"{path.stem}.{index}.weight", np.arange(96, dtype=np.float32).reshape(3, 32) + index)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_it_reads_what_the_package_reads(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf")
    found, theirs = read_gguf(tmp_path / "tiny.gguf"), GGUFReader(tmp_path / "tiny.gguf")
    assert {name: found.metadata[name] for name in VALUES} == VALUES
    assert set(found.metadata) == {name for name in theirs.fields if not name.startswith("GGUF.")}
    for tensor in theirs.tensors:
        own = found.tensors[tensor.name]
        assert (own.begin, own.nbytes, own.kind) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
        np.testing.assert_array_equal(own.read(1, 2).view(np.float32), tensor.data[1:])


def test_parts_are_one_model_and_a_missing_one_is_named(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        write(part, **{"split.count": 3, "split.tensors.count": 6})
    assert len(read_gguf(parts[1]).tensors) == 6
    parts[2].unlink()
    with pytest.raises(TokamacError, match=r"m-00003-of-00003\.gguf"):
        read_gguf(parts[0])


HEAD = b"GGUF" + struct.pack("<I", 3)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a GGUF file"),
        (b"PK\3\4" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big endian"),
        (HEAD + struct.pack("<QQ", 1 << 60, 0), "entries"),
        (HEAD + struct.pack("<QQ", 0, 1 << 60), "entries"),
        (HEAD + struct.pack("<QQQ", 0, 1, 1 << 60) + bytes(64), "entries"),
        (HEAD + struct.pack("<QQQsIIQ", 0, 1, 1, b"a", 9, 8, 1 << 40) + bytes(64), "entries"),
        (HEAD + struct.pack("<QQQsIIQ", 0, 1, 1, b"a", 9, 9, 4) + bytes(64), "arrays of arrays"),
        (HEAD + struct.pack("<QQQsI", 0, 1, 1, b"a", 77) + bytes(64), "type 77"),
        (HEAD + struct.pack("<QQQsIQIQ", 1, 0, 1, b"a", 1, 1 << 60, 0, 0) + bytes(64), "shape"),
        (HEAD + struct.pack("<QQQsIQIQ", 1, 0, 1, b"a", 1, 32, 99, 0) + bytes(64), "format 99"),
        (HEAD + struct.pack("<QQQsIQIQ", 1, 0, 1, b"a", 1, 32, 0, 1 << 50) + bytes(64), "of"),
    ],
)  # fmt: skip
def test_a_file_that_lies_is_refused_in_one_line(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(TokamacError, match=said) as raised:
        read_gguf(tmp_path / "bad.gguf")
    assert "\n" not in raised.value.message


def test_damage_anywhere_is_an_error_or_no_harm(tmp_path: Path) -> None:
    write(tmp_path / "whole.gguf")
    whole, noise = (tmp_path / "whole.gguf").read_bytes(), np.random.default_rng(0)
    for _ in range(500):
        data = bytearray(whole[: noise.integers(1, len(whole) + 1)] if noise.random() < 0.3 else whole)
        for at in noise.integers(0, min(len(data), 700), noise.integers(1, 6)):
            data[at] = noise.integers(0, 256)
        (tmp_path / "damaged.gguf").write_bytes(data)
        try:
            for tensor in read_gguf(tmp_path / "damaged.gguf").tensors.values():
                tensor.read()
        except TokamacError:
            pass
