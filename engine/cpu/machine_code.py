"""Machine code of the kernels: compiled once by numba, kept where bytecode is, loaded by LLVM alone."""

import ctypes
import fcntl
import hashlib
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import binding

from ..device import usable_cores
from ..files import atomic_write, read_bytes
from ..perf.hardware import store_file

# To import numba and have it load what it keeps took half of what a short question costs. An object file needs no
# Python and calls nothing but libc. It lies where whoever may write could change this package's bytecode as well, or in
# the user's cache; what others own or may write, or what is damaged, is compiled again.

MOST_BYTES = 4 << 20  # the largest has a tenth of a MiB

Function = Callable[..., None]


@cache
def function_of(name: str, count: int) -> Function:
    """Return a kernel of ``count`` whole numbers to be called from Python, without the GIL."""
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)
    return kind(address_of(name))


def address_of(name: str, *numbers: int) -> int:
    """Return a kernel's address, valid for the process; kernels/compiling.py has their names."""
    with _loading:
        if (name, *numbers) not in _loaded:
            _loaded[name, *numbers] = _load(_code(name, numbers))
        return _loaded[name, *numbers][0]


def prepare_step(*, from_end: bool = False) -> None:
    """Have a step's functions compiled. from_end: reversed, to share work with another process."""
    parts = "several", "write", "attend", "step"
    for part in reversed(parts) if from_end else parts:
        address_of(part)


def prepare_step_beside() -> None:
    """Do so from the end in a detached process, if it must be compiled and a core is free: numba compiles on one."""
    if usable_cores() > 1 and _kept(_file("step", ())) is None and _folder() is not None:
        silent, code = subprocess.DEVNULL, f"from {__name__} import prepare_step\nprepare_step(from_end=True)"
        with suppress(OSError):
            other = subprocess.Popen([sys.executable, "-P", "-c", code], stdin=silent, stdout=silent, stderr=silent)
            threading.Thread(target=other.wait, name="tokamac-compile-beside", daemon=True).start()


_loaded: dict[tuple[str | int, ...], tuple[int, Any]] = {}
_loading = threading.RLock()


def _code(name: str, numbers: tuple[int, ...]) -> bytes:
    file = _file(name, numbers)
    if (found := _kept(file)) is not None:
        return found
    with _alone(file):
        if (found := _kept(file)) is not None:  # another process compiled it meanwhile
            return found
        from .kernels.compiling import compile_kernel

        code = compile_kernel(name, numbers)
        with suppress(OSError):
            if (folder := _folder()) is not None:
                with atomic_write(folder / file) as whole:
                    whole.write(_digest(file, code) + code)
        return code


def _load(code: bytes) -> tuple[int, Any]:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.object_file.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine.get_function_address("kernel"), engine


def _kept(file: str) -> bytes | None:
    for folder in _folders():
        with suppress(OSError):
            at = (folder / file).lstat()
            if stat.S_ISREG(at.st_mode) and at.st_uid in (0, os.geteuid()) and not at.st_mode & 0o022:
                data = read_bytes(folder / file, MOST_BYTES)
                digest, code = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
                if code and digest == _digest(file, code):
                    return code
    return None


DIGEST_BYTES = 32


def _digest(file: str, code: bytes) -> bytes:
    return hashlib.blake2b(file.encode() + code, digest_size=DIGEST_BYTES).digest()


def _file(name: str, numbers: tuple[int, ...]) -> str:
    return f"{'_'.join(map(str, (name, *numbers)))}-{code_version()}.o"


@cache
def code_version() -> str:
    """Return a digest of what else decides what is compiled: the sources, LLVM and this CPU."""
    features = binding.get_host_cpu_features().flatten()
    here = f"{llvmlite.__version__} {binding.get_host_cpu_name()} {features} ".encode()
    return hashlib.blake2b(here + digest_of(Path(__file__).parent), digest_size=12).hexdigest()


def digest_of(folder: Path) -> bytes:
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        found.update(file.read_bytes())
    return found.digest()


def _folders() -> tuple[Path, Path]:
    return Path(cache_from_source(__file__)).parent, store_file("kernels")


def _folder() -> Path | None:
    for folder in _folders():
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    return None


@contextmanager
def _alone(file: str) -> Iterator[None]:
    """Let one process at a time compile a kernel: the others wait for what it keeps."""
    with ExitStack() as stack:
        with suppress(OSError):
            if (folder := _folder()) is not None:
                lock = stack.enter_context((folder / f"{file}.lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
