"""Where GGUF files are and which of several, found without reading them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelDamagedError, ModelNotFoundError
from ..files import exists, is_dir, is_file, open_regular, read_text

MAGIC = b"GGUF"
TABLE = "arrays.json"  # of a folder that stands for a GGUF file (checkpoint.py): what its arrays are made of
NAME = "name"  # of the file, without its ending; apart from the config, which tells whether two models are the same
PROJECTOR = "mmproj"  # is in the names of vision towers beside a model
NO_MODEL = (PROJECTOR, "imatrix")
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
VARIANT = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d|TQ\d|BF16|F16|F32|FP16|MXFP4|NVFP4)\w*)$", re.ASCII | re.IGNORECASE)
# Of a repository's files, first to last: near the original at some 5 bits, then what takes less, then what takes more.
SUITABLE = (
    "Q4_K_M", "MXFP4", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "Q4_K_L", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0",
    "Q3_K_L", "Q3_K_M", "IQ3_M", "Q3_K_S", "IQ3_XXS", "Q2_K", "IQ2_M", "Q6_K", "Q8_0",
)  # fmt: skip
ROOM = 0.75  # of the memory for a model's arrays that its file may take: some types take more bits there, and a chat its own


@dataclass(frozen=True, slots=True)
class GgufVariant:
    """One of a repository's GGUF models. files: relative paths of its parts, in order."""

    name: str
    files: tuple[str, ...]
    nbytes: int

    def is_called(self, name: str) -> bool:
        return name.casefold() in (self.name.casefold(), Path(self.files[0]).stem.casefold())


def variants(files: Mapping[str, int]) -> tuple[GgufVariant, ...]:
    """Return the models among files (relative paths, bytes), the smallest first."""
    parts: dict[str, list[str]] = {}
    for file in sorted(files):
        within = not file.startswith("/") and ".." not in Path(file).parts  # the hub's names become paths
        if within and file.endswith(".gguf") and not any(word in file.lower() for word in NO_MODEL):
            split = SPLIT.fullmatch(file)
            parts.setdefault(split[1] if split else file.removesuffix(".gguf"), []).append(file)
    found = []
    for stem, names in parts.items():
        named = VARIANT.search(stem)
        found.append(
            GgufVariant(named[1] if named else Path(stem).name, tuple(names), sum(files[each] for each in names))
        )
    return tuple(sorted(found, key=lambda each: (each.nbytes, each.name)))


def suitable(found: Sequence[GgufVariant], budget: int | None) -> GgufVariant:
    """Return the one for a machine with ``budget`` bytes for arrays (None: unknown)."""
    fitting = [each for each in found if budget is None or each.nbytes <= ROOM * budget] or found[:1]

    def order(variant: GgufVariant) -> tuple[int, int]:
        name = variant.name.upper().removeprefix("UD-")
        return (SUITABLE.index(name) if name in SUITABLE else len(SUITABLE), variant.nbytes)

    return min(fitting, key=order)


def projector_beside(files: Iterable[Path]) -> Path | None:
    """Return a vision tower beside a model's files, or what links to them."""
    folders = set[Path]()
    for file in files:
        links = file.parent.parent.glob("snapshots/**/*.gguf") if file.parent.name == "blobs" else ()
        folders |= {file.parent, *(link.parent for link in links if link.resolve() == file)}
    return next((each for folder in folders for each in sorted(folder.glob(f"*{PROJECTOR}*.gguf"))), None)


def name_of(folder: Path) -> str:
    """Return the name of the file that a folder stands for; else the folder's place."""
    return read_text(folder / NAME) if (folder / TABLE).is_file() else str(folder)


def told_as(folder: Path) -> Path:
    """Return the GGUF file that a folder stands for, else itself."""
    parts = sorted(folder.glob("*.gguf")) if (folder / TABLE).is_file() else []
    return parts[0].resolve() if parts else folder


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF does, whatever its name."""
    try:
        with open_regular(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that a path means: itself, or a folder's only one, beside no other weights.

    Raises ModelNotFoundError for several.
    """
    if is_file(path):
        return path if is_gguf(path) or path.suffix == ".gguf" else None
    if not is_dir(path) or exists(path / "config.json"):
        return None
    models = [file for file in sorted(path.glob("*.gguf")) if PROJECTOR not in file.name.lower()]
    first = [file for file in models if "-of-" not in file.name or "-00001-of-" in file.name]
    if len(first) > 1:
        names = ", ".join(file.name for file in first[:4])
        raise ModelNotFoundError(f"{path} holds {len(first)} GGUF models: {names}", "Name one of them.")
    return next(iter(first or models), None)


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return the files of a model, of which ``path`` is one. Raises ModelDamagedError for a missing one."""
    found = SPLIT.fullmatch(path.name)
    if found is None:
        return (path,)
    stem, _, count = found.groups()
    if not 0 < int(count) <= 9999:
        raise damaged(path, f"it is one of {int(count)} parts")
    parts = tuple(path.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1))
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelDamagedError(
            f"{missing[0]}{more} of the {int(count)} parts of this model is not beside {path}",
            "Download all of its parts into one folder.",
        )
    return parts


def damaged(file: Path, what: str) -> ModelDamagedError:
    return ModelDamagedError(f"{file} is damaged: {what}", "Download that file again.")
