"""A GGUF file as the model folder that it stands for: config and tokenizer as files of the cache, weights as they are."""

# Everything above weights reads a folder, so a GGUF gets one in the user's cache folder: what a Hugging Face folder says in
# JSON, links to the file's parts, and a table of where each array comes from. Nothing is written beside the file.
#
#     <cache>/gguf/<name>/config.json, tokenizer.json, …       as any model has them
#     <cache>/gguf/<name>/model-00001.gguf                     a link to a part
#     <cache>/gguf/<name>/arrays.json                          what each part holds, by the names of mlx-lm's class
#
# <name> is a hash of the parts' places, sizes and times, so a file that changed gets another folder.

import json
import math
import os
import shutil
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import platformdirs
import xxhash
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from ..errors import ModelDamagedError, ModelUnsupportedError, unreadable
from ..files import INDEX_BYTES, read_text, size
from .architectures import Place, config_of, places_of
from .blocks import FLOATS, PACKINGS, BlockPacking, Order, leaves_of, unpack_into
from .file import GgufFile, GgufTensor, read_gguf
from .places import NAME, TABLE, damaged, parts_of, projector_beside
from .vocabulary import write_tokenizer

if TYPE_CHECKING:
    import mlx.core as mx

FORMAT = 5  # of the folder
TYPES = {"U32": np.uint32, "U8": np.uint8, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
NEW, IN_MLX_FORM = ".new-", "model.safetensors"
OLD_S = 86_400  # after which what a process that was killed left is removed
KEPT_FOLDERS = 32  # of files that are still there; of others none


def folder_of(path: Path) -> Path:
    """Return the folder that stands for a GGUF file, made if need be.

    Raises:
        ModelDamagedError: cut, or not what it says.
        ModelUnsupportedError: an architecture, type or tokenizer that isn't known.
    """
    files = parts_of(path)
    try:
        stats = [(os.path.realpath(file), file.stat()) for file in files]
    except OSError as error:
        raise unreadable(path, error) from error
    told = [FORMAT, [(place, at.st_size, at.st_mtime_ns, at.st_ino) for place, at in stats]]
    name = xxhash.xxh3_128_hexdigest(json.dumps(told).encode())
    root = _root()
    if (root / name / TABLE).is_file():
        return root / name
    file = read_gguf(path)
    with tempfile.TemporaryDirectory(dir=root, prefix=NEW) as temporary:
        made = Path(temporary) / name
        made.mkdir()
        try:
            _write(file, made)
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise damaged(path, f"its hyper-parameters can't be right ({error})") from error
        write_tokenizer(file.metadata, made, str(path))
        _sweep(root)
        try:
            made.replace(root / name)
        except OSError as error:  # another process was first
            if not (root / name / TABLE).is_file():
                raise unreadable(root / name, error) from error
    return root / name


def header_of(part: Path) -> dict[str, Any]:
    """Return what a linked part holds in the form of a safetensors header. Raises ModelDamagedError."""
    return _entries(source for source in Arrays(part.parent).sources if source.tensor.file == part)


def _entries(sources: "Iterable[StoredPart]") -> dict[str, Any]:
    found, end = dict[str, Any](), 0
    for source in sources:
        for name, (dtype, shape) in source.arrays().items():
            begin, end = end, end + _nbytes(dtype, shape)
            found[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    return found


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A stored tensor, or some rows of it, and where they go. unpacked: as float16."""

    tensor: GgufTensor
    place: Place
    unpacked: bool = False

    @property
    def module(self) -> str:
        return self.place.module

    @property
    def file_bytes(self) -> int:
        return self.tensor.nbytes * math.prod(self.place.shape) // math.prod(self.tensor.shape)

    def arrays(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return safetensors' type and shape of each array of the module."""
        if self._plain:
            return {self._named(self.place.leaf): (FLOATS.get(self.tensor.kind, "F16"), self.place.shape)}
        there = replace(self.tensor, shape=self.place.shape)
        return {self._named(leaf): found for leaf, found in leaves_of(there).items()}

    def fill(self, arrays: "Mapping[str, NDArray[Any]]") -> None:
        """Read into arrays of ``self.arrays()``, bfloat16 as uint16. Raises ModelDamagedError."""
        leaves = {"" if self._plain else name.rpartition(".")[2]: array for name, array in arrays.items()}
        unpack_into(self.tensor, leaves, self.place.order, self.place.change)

    @property
    def _plain(self) -> bool:
        return self.unpacked or self.tensor.kind in FLOATS

    def read(self) -> dict[str, "mx.array"]:
        """Return the module's arrays, each in memory once."""
        import mlx.core as mx

        forms = self.arrays()  # NumPy, which fills them, has no bfloat16
        made = {name: _zeros("U16" if dtype == "BF16" else dtype, shape) for name, (dtype, shape) in forms.items()}
        mx.eval(list(made.values()))
        self.fill({name: np.asarray(array) for name, array in made.items()})
        made |= {name: made[name].view(mx.bfloat16) for name, (dtype, _) in forms.items() if dtype == "BF16"}
        return made

    @property
    def exact(self) -> bool:
        """Whether MLX's form keeps the stored codes."""
        return self.tensor.kind in FLOATS or PACKINGS[self.tensor.kind].codes is not None

    def _named(self, leaf: str) -> str:
        return f"{self.module}.{leaf}" if leaf else self.module


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * np.dtype(TYPES[dtype]).itemsize


def _zeros(dtype: str, shape: tuple[int, ...]) -> "mx.array":
    import mlx.core as mx

    types = {"U32": mx.uint32, "U16": mx.uint16, "U8": mx.uint8}
    types |= {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
    return mx.zeros(shape, types[dtype])


class Arrays:
    """A GGUF folder's arrays by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            told = json.loads(read_text(folder / TABLE, INDEX_BYTES))
            files = {name: folder / name for name in {each["file"] for each in told}}
            self.sources = tuple(_source(files[each["file"]], each) for each in told)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ModelDamagedError(
                f"{folder / TABLE} can't be read: {error}", f"Remove the folder {folder}: it is made again."
            ) from error
        self._last: dict[str, mx.array] = {}

    @cached_property
    def _by_name(self) -> Mapping[str, StoredPart]:
        return {name: source for source in self.sources for name in source.arrays()}

    def zeros(self) -> dict[str, "mx.array"]:
        """Return lazy zeros in the arrays' place."""
        return {
            name: _zeros(dtype, shape) for source in self.sources for name, (dtype, shape) in source.arrays().items()
        }

    def lazy(self, *, unpacked: bool = False) -> dict[str, "mx.array"]:
        """Return all arrays, lazy, of a file made for them. unpacked: what MLX's groups can't hold, in float16."""
        import mlx.core as mx

        found: Any = mx.load(str(Path(_in_mlx_form(self._folder, unpacked=unpacked).name) / IN_MLX_FORM))
        return dict(found)

    def read(self, name: str) -> "mx.array":
        """Return an array. Raises ModelDamagedError."""
        if name not in self._last:
            self._last = self._by_name[name].read()
        return self._last.pop(name)


def mlx_folder(folder: Path) -> Path:
    """Return a folder that mlx-lm can load, for as long as the process lives."""
    return Path(_in_mlx_form(folder, unpacked=False).name) if (folder / TABLE).is_file() else folder


@cache
def _in_mlx_form(folder: Path, *, unpacked: bool) -> "tempfile.TemporaryDirectory[str]":
    """Write a folder's arrays as safetensors beside its other files, once a process; removed at its end."""
    sources = [replace(each, unpacked=unpacked and not each.exact) for each in Arrays(folder).sources]
    header = json.dumps(_entries(sources)).encode()
    header += b" " * (-len(header) % 8)
    place = tempfile.TemporaryDirectory(dir=_root(), prefix=NEW)
    try:
        with (Path(place.name) / IN_MLX_FORM).open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for source in sources:
                arrays = [np.empty(shape, TYPES[dtype]) for dtype, shape in source.arrays().values()]
                source.fill(dict(zip(source.arrays(), arrays, strict=True)))
                for array in arrays:
                    file.write(array.reshape(-1).view(np.uint8).data)
    except OSError as error:
        place.cleanup()
        raise unreadable(Path(place.name), error) from error
    for other in {*folder.glob("*.json")} - {folder / TABLE}:
        (Path(place.name) / other.name).symlink_to(other)
    return place


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of a type's tensors. error: relative RMS; nbytes: in memory."""

    kind: str
    tensors: int
    weights: int
    file_bytes: int
    nbytes: int
    packing: str
    error: float

    def __str__(self) -> str:
        off = f", relative error {self.error:g}" if self.error else ", exact"
        stored = f"{self.bits(self.file_bytes):.3g} bits a weight on disk, {self.bits(self.nbytes):.3g} in memory"
        return f"{self.kind} ({size(self.file_bytes)}): {self.packing}{off}; {stored}"

    def bits(self, nbytes: int) -> float:
        return 8 * nbytes / self.weights


def kept_of(folder: Path) -> tuple[Kept, ...]:
    """Return what became of each type, the largest first."""
    sources = Arrays(folder).sources
    kinds = Counter({source.tensor.kind: 0 for source in sources})
    for source in sources:
        kinds[source.tensor.kind] += source.file_bytes
    return tuple(_kept(kind, [each for each in sources if each.tensor.kind == kind]) for kind, _ in kinds.most_common())


def projector_of(folder: Path) -> Path | None:
    """Return the vision projector that lies beside a GGUF folder's files."""
    return projector_beside(part.resolve() for part in folder.glob("*.gguf"))


def _kept(kind: GGMLQuantizationType, sources: list[StoredPart]) -> Kept:
    arrays = [found for source in sources for found in source.arrays().values()]
    packing = PACKINGS.get(kind)
    if packing is None:
        how = "as it is"
    else:
        form = f"{packing.bits} bits in groups of {packing.group_size}" if packing.mode == "affine" else packing.mode
        how = f"{form}, {'rounded again' if packing.codes is None else 'the same codes'}"
    return Kept(
        kind.name,
        len(sources),
        sum(math.prod(source.place.shape) for source in sources),
        sum(source.file_bytes for source in sources),
        sum(_nbytes(dtype, shape) for dtype, shape in arrays),
        how,
        0.0 if packing is None else packing.error,
    )


def packed_modules(folder: Path) -> dict[str, tuple[str, BlockPacking]]:
    """Return type and MLX's form of a GGUF folder's packed modules; none of other folders."""
    sources = Arrays(folder).sources if (folder / TABLE).is_file() else ()
    kinds = {source.module: source.tensor.kind for source in sources}
    return {module: (kind.name, PACKINGS[kind]) for module, kind in kinds.items() if kind in PACKINGS}


def _root() -> Path:
    given = os.environ.get("TOKAMAC_CACHE_DIR")
    root = (Path(given) if given else platformdirs.user_cache_path("tokamac")) / "gguf"
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ModelUnsupportedError(
            f"{root} can't be made, and a GGUF file's config and tokenizer are kept there: {error.strerror}",
            "Set TOKAMAC_CACHE_DIR to a folder that can be written.",
        ) from error
    return root


def _sweep(root: Path) -> None:
    folders = [table.parent for table in root.glob("*/" + TABLE)]
    gone = [folder for folder in folders if not all(part.exists() for part in folder.glob("*.gguf"))]
    gone += [place for place in root.glob(f"{NEW}*") if place.stat().st_mtime < time.time() - OLD_S]
    there = sorted(set(folders) - set(gone), key=lambda folder: folder.stat().st_mtime)
    for folder in [*gone, *there[: -KEPT_FOLDERS + 1]]:
        shutil.rmtree(folder, ignore_errors=True)


def _write(file: GgufFile, folder: Path) -> None:
    links = {part: f"model-{index:05}.gguf" for index, part in enumerate(file.files, 1)}
    for part, link in links.items():
        (folder / link).symlink_to(os.path.realpath(part))
    sources = list(_sources(file))
    (folder / NAME).write_text(file.files[0].stem, encoding="utf-8")
    config = config_of(file)
    if (packing := _quantization(sources)) is not None:
        config["quantization"] = packing
    table = [
        {
            "file": links[source.tensor.file],
            "kind": int(source.tensor.kind),
            "begin": source.tensor.begin,
            "stored": source.tensor.shape,
            "place": asdict(source.place),
        }
        for source in sources
    ]
    for name, value in {"config.json": config, TABLE: table}.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")


def _source(file: Path, told: Mapping[str, Any]) -> StoredPart:
    tensor = GgufTensor("", GGMLQuantizationType(told["kind"]), tuple(told["stored"]), file, told["begin"])
    place, order = told["place"], told["place"]["order"]
    runs = tuple((begin, end) for begin, end in order["runs"])
    at = Order(runs, order["turned"], tuple(order["columns"]))
    return StoredPart(tensor, Place(place["module"], place["leaf"], tuple(place["shape"]), at, place["change"]))


def _sources(file: GgufFile) -> Iterator[StoredPart]:
    for tensor in file.tensors.values():
        for place in places_of(file, tensor):
            if tensor.kind not in FLOATS and tensor.kind not in PACKINGS:
                raise ModelUnsupportedError(
                    f"{tensor.file} holds {tensor.name:.80} as {tensor.kind.name}, which is not known here",
                    "Use another file of the model.",
                )
            yield StoredPart(tensor, place)


def _quantization(sources: list[StoredPart]) -> dict[str, Any] | None:
    """Return config.json's `quantization`: the commonest form, and the modules that differ."""
    forms: dict[str, tuple[int, int, str]] = {}
    for source in sources:
        if (packing := PACKINGS.get(source.tensor.kind)) is not None:
            forms[source.module] = packing.group_size, packing.bits, packing.mode
    if not forms:
        return None
    ((usual, _),) = Counter(forms.values()).most_common(1)
    words = ("group_size", "bits", "mode")
    others = {name: dict(zip(words, form, strict=True)) for name, form in forms.items() if form != usual}
    return {**dict(zip(words, usual, strict=True)), **others}
