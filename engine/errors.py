"""The one exception tree of the engine, and how MLX's failures become part of it.

    TokamacError
    ├── OptionError          an option is out of range, or can't be honoured for this model
    │   └── GrammarError            a reply can't be held to the form that it is to have
    ├── ModelError           something about a model
    │   ├── ModelNotFoundError      no such folder or repository
    │   ├── ModelDamagedError       a file is missing, truncated or holds nonsense
    │   ├── ModelUnsupportedError   whole, but of a kind that can't be run
    │   └── TemplateError           its chat template fails
    ├── DownloadError        the hub can't be reached, refuses, or the disk is full
    ├── ContextError         the prompt does not fit the context
    ├── MemoryLimitError     a model or a prompt would need more memory than there is
    ├── DeviceError          MLX has no usable backend here, or the device failed
    ├── ConversionError      a model can't be converted
    └── EngineClosedError    the engine was closed

Every error says what failed (``str(error)``) and what to do next (``error.hint``); a traceback shows both.

MLX knows one exception for whatever fails while it computes, RuntimeError, so its text is what tells the cases apart (upstream
in mlx/backend/metal and mlx/backend/cuda: allocator.cpp, eval.cpp, error.h, utils.cpp). On a GPU a step fails at the next time
its results are asked for, and MLX then forgets the failure: the next step may succeed. C++'s own failed allocations arrive as
MemoryError. On a CPU, an array of MLX 0.32.4 that the system has no memory for ends the process; nothing here can help that.

What the caches hold after a failed step is not known: arrays are written in place, and one whose step failed may count as
computed. So nobody goes on from there. The caches are dropped, and what is tried again is computed anew from the last place that
the prompt cache has (engine/reply.py).
"""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ALLOW = "Allow your terminal to use that folder: System Settings > Privacy & Security > Files and Folders"
"""What opens Desktop, Documents, Downloads and other disks to a program on a Mac, once that was refused there."""


def private(error: OSError) -> bool:
    """Return whether the privacy settings of macOS refuse a file: they say EPERM, rights of files and folders EACCES."""
    return error.errno == errno.EPERM and sys.platform == "darwin"


def access_hint(error: OSError, otherwise: str) -> str:
    """Return what to do about a file that can't be used; ``otherwise`` where macOS does not keep it private."""
    return f"{ALLOW}." if private(error) else otherwise


def unreadable(path: object, error: OSError) -> "ModelDamagedError":
    """Return the error for a file of a model that can't be read."""
    return ModelDamagedError(
        f"{path} can't be read: {error.strerror or error}", access_hint(error, "Check the file and its permissions.")
    )


def panic_error(error: BaseException) -> "ModelDamagedError | None":
    """Return the engine's error for a panic of a library written in Rust (tokenizers, safetensors); None for all else.

    Such a panic is a BaseException (https://pyo3.rs, PanicException), so that ``except Exception`` would let it pass.
    """
    if type(error).__name__ != "PanicException" or isinstance(error, Exception):
        return None
    return ModelDamagedError(
        f"a file of the model can't be used: {' '.join(str(error).split())[:200]}",
        "It is most likely the tokenizer's: download the model again.",
    )


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise the panics of libraries written in Rust inside a with block as ModelDamagedError."""
    try:
        yield
    except BaseException as error:
        if (known := panic_error(error)) is None:
            raise
        raise known from error


LONGEST_WORD, LONGEST_TEXT = 256, 2000
"""Characters of a word, and of a message or a hint, that are told whole: paths of usual length, and all sentences of ours."""


def shortened(text: str) -> str:
    """Return text with the middle of very long words left out: names that others gave may have thousands of characters.

    What is very long as a whole loses its middle too.
    """
    if len(text) <= LONGEST_WORD:
        return text
    words = [_cut(word, LONGEST_WORD) for word in text.split(" ")]
    return _cut(" ".join(words), LONGEST_TEXT)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most * 2 // 3]}…{text[-most // 4 :]}"


def _printable(text: str) -> str:
    """Return text without what a terminal would obey, and of bearable length: it quotes names and reasons that others wrote."""
    return shortened("".join(char if char.isprintable() else " " for char in text))


class TokamacError(Exception):
    """Base of all errors: ``message`` says what failed, ``hint`` what to do next."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(_printable(message))
        self.message = _printable(message)
        self.hint = _printable(hint)
        if self.hint:
            self.add_note(self.hint)  # a traceback prints notes under the message

    def one_line(self) -> str:
        """Return the message and the hint as one line, for a terminal or a log."""
        if not self.hint:
            return " ".join(self.message.split())
        return " ".join(f"{self.message.removesuffix('.')}. {self.hint}".split())


class OptionError(TokamacError, ValueError):
    """An option is out of range, contradicts another, or can't be honoured for this model."""


class GrammarError(OptionError):
    """A reply can't be held to the form that it is to have: a JSON schema, a call of a tool."""


class ModelError(TokamacError):
    """Something is wrong with a model."""


class ModelNotFoundError(ModelError):
    """No folder and no repository has this name."""


class ModelDamagedError(ModelError):
    """A model's file is missing, truncated or holds values that can't be right."""


class ModelUnsupportedError(ModelError):
    """The model is whole, but of a kind that can't be run here."""


class TemplateError(ModelError):
    """The model's chat template is missing, fails, or never ends."""


class DownloadError(TokamacError):
    """A download failed; what has arrived is kept and the next attempt goes on from there."""


class ContextError(TokamacError):
    """The prompt does not fit the context."""


class MemoryLimitError(TokamacError):
    """A model or a prompt needs more memory than there is: said before anything is computed, or once MLX found none."""


class DeviceError(TokamacError):
    """MLX has no usable backend here, or the device failed while it computed."""


class ConversionError(TokamacError):
    """A model can't be converted."""


class EngineClosedError(TokamacError):
    """The engine was closed while, or before, it was used."""


FAILURES = (RuntimeError, MemoryError)
"""What MLX raises for trouble with memory or the device."""

_MEMORY = (
    "insufficient memory",  # [METAL] Command buffer execution failed: Insufficient Memory
    "maximum allowed buffer size",  # [metal::malloc] Attempting to allocate … bytes which is greater than …
    "resource limit",  # [metal::malloc] Resource limit (499000) exceeded
    "unable to allocate",
    "[malloc",
    "out of memory",  # CUDA, cuDNN and cuBLAS
    "memoryallocation",  # cudaErrorMemoryAllocation
    "cublas_status_alloc_failed",
    "bad_alloc",
    "resource temporarily unavailable",  # a thread's stack, where address space is bounded
    "can't start new thread",
    "cannot allocate memory",
    "failed to map segment",
)
_TIMES = ("impactinginteractivity", "impacting interactivity", "timeout", "timed out")
_LINKS = ("[ring]", "[jaccl]")
_SHORTER = "Shorten the prompt, pack keys and values (--kv-bits 8), take a smaller model, or close other programs."


def engine_error(error: BaseException) -> TokamacError | None:
    """Return the engine's error for what MLX raised, or for a panic in Rust; None for what is no failure that is known."""
    if isinstance(error, TokamacError) or not isinstance(error, FAILURES):
        return panic_error(error)
    said = " ".join(str(error).split())[:200]
    known = said.lower()
    if isinstance(error, MemoryError) or any(text in known for text in _MEMORY):
        return MemoryLimitError(f"there was not enough memory to go on ({said or 'allocation failed'})", _SHORTER)
    if any(text in known for text in _LINKS):
        hint = "Check the other machines and the links to them, then start again."
        return DeviceError(f"the connection to another node was lost ({said})", hint)
    if any(text in known for text in _TIMES):
        hint = "Close other programs that use the GPU, or load the model with a shorter context; then try again."
        return DeviceError(f"the system stopped the GPU's work, because it took too long ({said})", hint)
    if "command buffer" in known or "[metal" in known or "cuda" in known:
        return DeviceError(
            f"the GPU failed ({said})", "Try again. If it comes back, restart the computer or update MLX."
        )
    return None


def computing_error(error: BaseException) -> TokamacError | None:
    """Return the engine's error for what was raised while it computed: a failure that is not known is the device's, too."""
    known = engine_error(error)
    if known is not None or isinstance(error, TokamacError) or not isinstance(error, FAILURES):
        return known
    said = " ".join(str(error).split())[:200]
    return DeviceError(f"computing failed ({said})", "Try again. If it comes back, update MLX and report it.")


@contextmanager
def computing() -> Iterator[None]:
    """Raise MLX's failures inside a with block as MemoryLimitError or DeviceError."""
    try:
        yield
    except FAILURES as error:
        if (known := computing_error(error)) is None:
            raise
        raise known from error
