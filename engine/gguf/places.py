"""Where GGUF files are, found without reading them."""

from pathlib import Path

from ..errors import ModelNotFoundError
from ..files import exists, is_dir, is_file, open_regular

MAGIC = b"GGUF"
TABLE = "arrays.json"  # of a folder that stands for a GGUF file (checkpoint.py): what its arrays are made of
PROJECTOR = "mmproj"  # is in the names of vision towers beside a model


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF does, whatever its name: Ollama's have none."""
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
