"""The text of a PDF, taken out in a process of its own: a file that is slow, or made to do harm, costs no more than the deadline.

PDF's bytes ─ stdin ─▶ python -m tokamac.app.pdf_text ─ stdout ─▶ {"text": …} or {"error": …}
"""

import io
import json
import subprocess
import sys

from tokamac.engine.errors import TokamacError

DEADLINE_S = 60.0
LARGEST_CHARACTERS = 4_000_000


class PDFError(TokamacError):
    """A PDF has no text that could be taken out."""


def pdf_text(data: bytes) -> str:
    """Return the text of a PDF, a blank line between pages. Raises PDFError."""
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise PDFError(f"its text was not out after {DEADLINE_S:g} s", "Attach a part of it.") from None
    try:
        told = json.loads(done.stdout)
    except ValueError:
        raise PDFError(f"reading it ended with status {done.returncode}", "It may be damaged.") from None
    if "error" in told:
        raise PDFError(told["error"], "It may be damaged, or locked.")
    text: str = told["text"]
    if not text.strip():
        raise PDFError("it holds no text, only pictures", "A program that recognises text (OCR) can add it.")
    return text


def _extract(data: bytes) -> str:
    from pypdf import PdfReader

    pages: list[str] = []
    left = LARGEST_CHARACTERS
    for page in PdfReader(io.BytesIO(data)).pages:
        pages.append(page.extract_text())
        left -= len(pages[-1])
        if left < 0:
            break  # the caller refuses it for its length
    return "\n\n".join(pages)


def main() -> None:
    """Read a PDF from stdin, and write its text to stdout as JSON."""
    try:
        told = {"text": _extract(sys.stdin.buffer.read())}
    except Exception as error:  # whatever a foreign file makes of a foreign library is one sentence
        told = {"error": " ".join(f"{error}".split())[:200] or type(error).__name__}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
