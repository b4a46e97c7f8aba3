"""Reads a file that the user named, with the user's own rights: plain files within a bound, text or PDF.

Only what the user writes is followed; nothing that a model or another file says ever gets here.
"""

import codecs
from pathlib import Path

from tokamac.app.pdf_text import PDFError, pdf_text
from tokamac.app.sanitise import sanitise_line
from tokamac.app.store.values import Attachment
from tokamac.app.tui.attachments import attachment, kind_of
from tokamac.engine.errors import TokamacError, access_hint
from tokamac.engine.regular_files import NotRegularError, TooLargeError, read_bytes

LARGEST_TEXT_BYTES = 4_000_000
"""About a million tokens: no context holds more."""
LARGEST_PDF_BYTES = 64_000_000
"""Most of a PDF is pictures and fonts."""
_KINDS = "Text, code, Markdown, CSV and PDF can be attached."


class AttachError(TokamacError):
    """A file can't be attached."""


def read_file(typed: str, folder: Path) -> Attachment:
    """Return the file at the path ``typed``, which begins at ``folder`` where it is relative. May take seconds for a PDF.

    Raises AttachError for what is missing, unreadable, no plain file, too large, or neither text nor a PDF with text.
    """
    name = sanitise_line(typed)
    is_pdf = kind_of(typed) == "pdf"
    try:
        path = folder / Path(typed).expanduser()
        data = _read(path, name, LARGEST_PDF_BYTES if is_pdf else LARGEST_TEXT_BYTES)
        text = pdf_text(data) if is_pdf else _decoded(data, name)
    except FileNotFoundError:
        raise AttachError(f"There is no file {name}", "Check its path.") from None
    except IsADirectoryError:
        raise AttachError(f"{name} is a folder", "Attach the files in it one by one.") from None
    except (OSError, RuntimeError, ValueError) as error:  # no such home, a name with a NUL
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        hint = "Check its permissions."
        hint = access_hint(error, hint) if isinstance(error, OSError) else hint
        raise AttachError(f"{name} can't be read: {reason}", hint) from error
    except PDFError as error:
        raise AttachError(f"{name} can't be attached: {error.message}", error.hint) from error
    if len(text) > LARGEST_TEXT_BYTES:
        raise AttachError(f"{name} holds {len(text):,} characters", "No context holds that: attach a part of it.")
    return attachment(typed, text)


def _read(path: Path, name: str, most: int) -> bytes:
    try:
        return read_bytes(path, most)
    except NotRegularError as error:
        raise AttachError(f"{name} is no plain file", _KINDS) from error
    except TooLargeError as error:
        size = path.stat().st_size / 1e6
        raise AttachError(f"{name} has {size:,.1f} MB, more than {most // 10**6}", "Attach a part of it.") from error


def _decoded(data: bytes, name: str) -> str:
    encoding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    binary = b"\0" in data and encoding != "utf-16"
    try:
        text = "" if binary else data.decode(encoding)
    except UnicodeDecodeError:
        raise AttachError(f"{name} is no UTF-8 text", "Save it as UTF-8, if it is text at all.") from None
    if binary or "\0" in text:
        raise AttachError(f"{name} is a binary file", _KINDS)
    return text
