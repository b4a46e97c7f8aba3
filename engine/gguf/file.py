"""GGUF files: metadata and the places of tensors, checked against the file's size before anything is believed."""

# The `gguf` package's own reader makes an array for each word of a vocabulary (a small model's takes seconds), and
# trusts the counts that it finds; its constants say what types and sizes there are.

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUF_VERSION, GGMLQuantizationType, GGUFValueType

from ..errors import ModelDamagedError, ModelUnsupportedError, unreadable
from ..files import open_regular, sizes
from .places import MAGIC, damaged, parts_of

OLDEST_VERSION = 2  # version 1 counted in 32 bits
# Metadata and tensor table at most. The largest published (262k words with merges) take about 20 MB.
HEADER_BYTES = 64 << 20
MOST_ENTRIES = 1 << 22  # keys, tensors, or elements of an array
MOST_DIMENSIONS = 4
SCALARS = {
    GGUFValueType.UINT8: "<B", GGUFValueType.INT8: "<b", GGUFValueType.UINT16: "<H", GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I", GGUFValueType.INT32: "<i", GGUFValueType.UINT64: "<Q", GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT32: "<f", GGUFValueType.FLOAT64: "<d", GGUFValueType.BOOL: "<?",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A stored tensor. shape: NumPy's, not the file's order."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    file: Path
    begin: int

    @property
    def row_bytes(self) -> int:
        block, nbytes = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * nbytes

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def read(self, first: int = 0, count: int | None = None) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Return rows (count, row_bytes). Raises ModelDamagedError."""
        wanted = self.rows - first if count is None else count
        found = np.empty((wanted, self.row_bytes), np.uint8)
        memory, done = found.reshape(-1).data, 0
        try:
            with open_regular(self.file) as file:
                file.seek(self.begin + first * self.row_bytes)
                while done < len(memory):
                    if not (more := file.readinto(memory[done:])):
                        raise damaged(self.file, "its end is missing")
                    done += more
        except OSError as error:
            raise unreadable(self.file, error) from error
        return found


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model's files, the first one's metadata, and all tensors."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Its name in llama.cpp's table. Raises ModelDamagedError."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str) or not name:
            raise damaged(self.files[0], "it names no architecture")
        return name


def read_gguf(path: Path) -> GgufFile:
    """Read a file's metadata and tensor table, with all parts of a split model.

    Raises:
        ModelDamagedError: cut off, or counts and sizes that its bytes can't hold.
        ModelUnsupportedError: another version or byte order, unknown types.
    """
    files = parts_of(path)
    parts = [_read(file) for file in files]
    metadata, tensors = parts[0][0], dict[str, GgufTensor]()
    for file, (_, found) in zip(files, parts, strict=True):
        if twice := tensors.keys() & found.keys():
            raise damaged(file, f"{min(twice)} is in two of its parts")
        tensors |= found
    told = metadata.get("split.tensors.count", len(tensors))
    if metadata.get("split.count", len(files)) not in (0, len(files)) or told != len(tensors):
        raise damaged(path, f"it is a part of {metadata.get('split.count')} with {told} tensors, and they are not here")
    return GgufFile(files, metadata, tensors)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            _check_start(path, file.read(8))
            with mmap.mmap(file.fileno(), min(size, HEADER_BYTES), access=mmap.ACCESS_READ) as header:
                return _Header(path, header, size).read()
    except OSError as error:
        raise unreadable(path, error) from error
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise damaged(path, "its header can't be read") from error


def _check_start(path: Path, start: bytes) -> None:
    if start[:4] != MAGIC or len(start) < 8:
        raise ModelDamagedError(f"{path} is not a GGUF file, or its start is missing", "Download that file again.")
    (version,) = struct.unpack("<I", start[4:])
    if not version & 0xFFFF:
        raise ModelUnsupportedError(
            f"{path} is a GGUF file for machines of the other byte order (big endian)", "Use the usual one."
        )
    if not OLDEST_VERSION <= version <= GGUF_VERSION:
        raise ModelUnsupportedError(
            f"{path} is of GGUF version {version}; {OLDEST_VERSION} to {GGUF_VERSION} are known",
            "Use a newer file of the model." if version < OLDEST_VERSION else "Update Tokamac.",
        )


class _Header:
    """Reads a header; every count is checked against the bytes left."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size, self._at = path, data, size, len(MAGIC) + 4

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        tensors, keys = self._count(24, self._number("<Q")), self._count(12, self._number("<Q"))
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._text()
            if key in metadata:
                raise damaged(self._path, f"{key:.80} is told twice")
            metadata[key] = self._value(self._kind())
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > HEADER_BYTES:
            raise damaged(self._path, "its alignment is no power of two")
        places = [self._tensor() for _ in range(tensors)]
        begin = -(-self._at // alignment) * alignment
        found = {name: GgufTensor(name, kind, shape, self._path, begin + at) for name, kind, shape, at in places}
        self._check(found, len(places))
        return metadata, found

    def _check(self, tensors: Mapping[str, GgufTensor], count: int) -> None:
        if len(tensors) != count:
            raise damaged(self._path, "a tensor is there twice")
        end = max((tensor.begin + tensor.nbytes for tensor in tensors.values()), default=0)
        if end > self._size:
            needed, there = sizes(end, self._size)
            raise damaged(self._path, f"it has {there} of {needed}")
        if sum(tensor.nbytes for tensor in tensors.values()) > self._size:
            raise damaged(self._path, "its tensors share their bytes")

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _count(self, each: int, count: int) -> int:
        """Return ``count`` if so many entries of ``each`` bytes can follow."""
        left = len(self._data) - self._at
        if count > MOST_ENTRIES or count * each > left:
            raise damaged(
                self._path, f"its header tells of {count:,} entries, and {max(left, 0):,} bytes of it are left"
            )
        return count

    def _text(self) -> str:
        length = self._count(1, self._number("<Q"))
        self._at += length
        return self._data[self._at - length : self._at].decode()

    def _kind(self) -> GGUFValueType:
        number = self._number("<I")
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise damaged(self._path, f"it holds a value of type {number}, which GGUF does not have") from error

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind != GGUFValueType.ARRAY:
            return self._number(SCALARS[kind])
        kind = self._kind()
        if kind == GGUFValueType.ARRAY:
            raise ModelUnsupportedError(f"{self._path} holds arrays of arrays", "Use another file of the model.")
        each = 8 if kind == GGUFValueType.STRING else struct.calcsize(SCALARS[kind])
        count = self._count(each, self._number("<Q"))
        if kind == GGUFValueType.STRING:
            return self._texts(count)
        self._at += count * each
        values = np.frombuffer(self._data[self._at - count * each : self._at], SCALARS[kind])
        return values.tolist()

    def _texts(self, count: int) -> list[str]:
        # A vocabulary and its merges are a million of them, so their loop has no calls of its own.
        data, at, end, found = self._data, self._at, len(self._data), list[str]()
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            begin = at + 8
            at = begin + length(data, at)[0]
            if at > end:
                raise damaged(self._path, "a text of its header is longer than it")
            found.append(data[begin:at].decode())
        self._at = at
        return found

    def _tensor(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name, dimensions = self._text(), self._number("<I")
        if not 0 < dimensions <= MOST_DIMENSIONS:
            raise damaged(self._path, f"{name:.80} has {dimensions} dimensions")
        shape = tuple(reversed([self._number("<Q") for _ in range(dimensions)]))
        number, begin = self._number("<I"), self._number("<Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise ModelUnsupportedError(
                f"{self._path} holds {name:.80} in the format {number}, which is not known here", "Update Tokamac."
            ) from error
        block = GGML_QUANT_SIZES[kind][0]
        if min(shape) < 1 or math.prod(shape) > 16 * self._size or shape[-1] % block:
            raise damaged(self._path, f"{name:.80} has the shape {shape}")
        return name, kind, shape, begin
