"""The engine's exception tree, rooted at TokamacError, and the translation of MLX's failures into it."""

# MLX raises RuntimeError for every failed computation, so the message tells the cases apart (upstream
# mlx/backend/metal and mlx/backend/cuda: allocator.cpp, eval.cpp, error.h, utils.cpp). On a GPU a step fails
# when its results are next read, and MLX then forgets the failure. Failed C++ allocations arrive as
# MemoryError. On a CPU, MLX 0.32.4 ends the process where the system has no memory for an array. Caches are
# undefined after a failed step (arrays are written in place), so they are dropped, and a retry recomputes
# from the prompt cache (engine/reply.py).

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# What opens Desktop, Documents, Downloads and other disks to a program on a Mac, once that was refused there.
ALLOW = "Allow your terminal to use that folder: System Settings > Privacy & Security > Files and Folders"


def private(error: OSError) -> bool:
    # macOS's privacy settings refuse a file with EPERM; file and folder permissions give EACCES.
    return error.errno == errno.EPERM and sys.platform == "darwin"


def access_hint(error: OSError, otherwise: str) -> str:
    return f"{ALLOW}." if private(error) else otherwise


def unreadable(path: object, error: OSError) -> "ModelDamagedError":
    return ModelDamagedError(
        f"{path} can't be read: {error.strerror or error}", access_hint(error, "Check the file and its permissions.")
    )


def panic_error(error: BaseException) -> "ModelDamagedError | None":
    """Return the engine's error for a panic of a Rust library (tokenizers, safetensors), else None."""
    # Such a panic is a BaseException (https://pyo3.rs, PanicException): ``except Exception`` lets it pass.
    if type(error).__name__ != "PanicException" or isinstance(error, Exception):
        return None
    return ModelDamagedError(
        f"a file of the model can't be used: {' '.join(str(error).split())[:200]}",
        "It is most likely the tokenizer's: download the model again.",
    )


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise panics of Rust libraries inside a with block as ModelDamagedError."""
    try:
        yield
    except BaseException as error:
        if (known := panic_error(error)) is None:
            raise
        raise known from error


# Characters of a word, and of a message or a hint, that are told whole: paths of usual length, and all sentences of
# ours.
LONGEST_WORD, LONGEST_TEXT = 256, 2000


def shortened(text: str) -> str:
    if len(text) <= LONGEST_WORD:
        return text
    words = [_cut(word, LONGEST_WORD) for word in text.split(" ")]
    return _cut(" ".join(words), LONGEST_TEXT)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most * 2 // 3]}…{text[-most // 4 :]}"


def _printable(text: str) -> str:
    """Remove terminal control sequences and bound the length: messages quote foreign text."""
    return shortened("".join(char if char.isprintable() else " " for char in text))


class TokamacError(Exception):
    """Base of all errors: ``message`` says what failed, ``hint`` how to fix it."""

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
    """A reply can't be constrained to the requested form: a JSON schema or a tool call."""


class PictureError(OptionError):
    """A picture can't be read, or the model can't see it."""


class ModelError(TokamacError):
    """Something is wrong with a model."""


class ModelNotFoundError(ModelError):
    """No folder or repository has this name."""


class ModelDamagedError(ModelError):
    """A model file is missing, truncated or holds invalid values."""


class ModelUnsupportedError(ModelError):
    """The model is intact but of an unsupported kind."""


class TemplateError(ModelError):
    """The model's chat template is missing, fails, or never ends."""


class DownloadError(TokamacError):
    """A download failed; the bytes received are kept, and the next attempt resumes there."""


class ContextError(TokamacError):
    """The prompt does not fit the context."""


class MemoryLimitError(TokamacError):
    """A model or a prompt needs more memory than is available, as predicted or as MLX found."""


class DeviceError(TokamacError):
    """MLX has no usable backend here, or the device failed during computation."""


class DeviceLostError(DeviceError):
    """The device takes no more work of this process: only a new one helps."""


class ConversionError(TokamacError):
    """A model can't be converted."""


class EngineClosedError(TokamacError):
    """The engine is closed."""


FAILURES = (RuntimeError, MemoryError)  # what MLX raises for trouble with memory or the device

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
_LOST = ("prior/excessive gpu errors",)  # [METAL] … Ignored (for causing prior/excessive GPU errors)
_TIMES = ("impactinginteractivity", "impacting interactivity", "timeout", "timed out")
_LINKS = ("[ring]", "[jaccl]")
_SHORTER = "Shorten the prompt, pack keys and values (--kv-bits 8), take a smaller model, or close other programs."


def engine_error(error: BaseException) -> TokamacError | None:
    """Return the engine's error for a known MLX failure or Rust panic, else None."""
    if isinstance(error, TokamacError) or not isinstance(error, FAILURES):
        return panic_error(error)
    said = " ".join(str(error).split())[:200]
    known = said.lower()
    if isinstance(error, MemoryError) or any(text in known for text in _MEMORY):
        return MemoryLimitError(f"there was not enough memory to go on ({said or 'allocation failed'})", _SHORTER)
    if any(text in known for text in _LINKS):
        hint = "Check the other machines and the links to them, then start again."
        return DeviceError(f"the connection to another node was lost ({said})", hint)
    if any(text in known for text in _LOST):
        hint = "Start Tokamac again; the chat does so by itself."
        return DeviceLostError(f"macOS takes no more GPU work of this process, after earlier failures ({said})", hint)
    if any(text in known for text in _TIMES):
        hint = (
            "Close other programs that use the GPU, or try --pace 50 or a shorter context. A display that is off, and "
            "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1 in the environment, helped others on macOS: the screen may stutter."
        )
        return DeviceError(f"the system stopped the GPU's work, because it took too long ({said})", hint)
    if "command buffer" in known or "[metal" in known or "cuda" in known:
        return DeviceError(
            f"the GPU failed ({said})", "Try again. If it comes back, restart the computer or update MLX."
        )
    return None


def computing_error(error: BaseException) -> TokamacError | None:
    """Like ``engine_error``, but an unknown failure counts as a DeviceError."""
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
