"""The text that calibrated methods look at, cut into token sequences, and another part of it that verifying reads.

    text │ 40 stretches, cut at ends of lines: every fifth is held back │ the others, joined ─▶ sequences, evenly spread

Nothing is random: the same text and tokenizer give the same tokens.
"""

from itertools import accumulate, pairwise
from pathlib import Path

from tokamac.engine.errors import OptionError, access_hint
from tokamac.engine.files import TooLargeError, read_bytes
from tokamac.engine.text.tokenizer import Tokenizer, opening

LENGTH = 512
"""Tokens of a sequence, unless said otherwise."""

LEAST_CHARACTERS = 1_000
MOST_BYTES = 16 << 20
"""A larger file is taken for a mistake: of 16 MiB, calibration reads less than a hundredth."""

STRETCHES, EVERY = 40, 5

LONG_TOKEN = 64
"""Characters."""


def text(file: Path | None) -> str:
    """Return the text of ``file`` (UTF-8), or, for None, the one that ships.

    Raises OptionError where the file can't be read, is no text, is too short to say anything, or too long.
    """
    if file is None:
        from tokamac.assets import asset_path

        return asset_path("calibration.txt").read_text(encoding="utf-8")
    content = _read(file)
    try:
        found = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(f"{file} is not UTF-8 text", "Only text can be read: convert it first.") from error
    if "\0" in found:
        raise OptionError(f"{file} is not text", "Only text can be read: convert it first.")
    if len(found.strip()) < LEAST_CHARACTERS:
        raise OptionError(
            f"{file} holds {len(found.strip()):,} characters of text",
            f"Give at least {LEAST_CHARACTERS:,}, or better some pages, of the kind that the model will read.",
        )
    return found


def sequences(tokenizer: Tokenizer, text: str, count: int, length: int = LENGTH) -> list[list[int]]:
    """Return ``count`` sequences of ``length`` tokens, evenly spread over what is not held back, none overlapping.

    Each begins as the model expects a text to begin. A shorter text gives fewer sequences; one that does not fill a single sequence
    is a sequence, whole. All are equally long.
    """
    begins = opening(tokenizer)
    ids = tokenizer.encode("".join(_stretches(text, held_back=False)))
    piece = max(1, length - len(begins))
    fitting = min(count, len(ids) // piece)
    return [begins + part for part in _spread(ids, [piece] * fitting)] if fitting else [begins + ids]


def verification_ids(tokenizer: Tokenizer, text: str, length: int = LENGTH) -> list[int]:
    """Return one sequence of at most ``length`` tokens, a piece of each of the stretches that ``sequences`` never reads."""
    begins, pieces = opening(tokenizer), STRETCHES // EVERY
    ids = tokenizer.encode("".join(_stretches(text, held_back=True)))
    most = min(max(1, length - len(begins)), len(ids))
    sizes = [most // pieces + (number < most % pieces) for number in range(pieces)]
    return begins + [token for part in _spread(ids, sizes) for token in part]


def first_ids(tokenizer: Tokenizer, text: str, length: int) -> list[int]:
    """Return one sequence of at most ``length`` tokens from the beginning of ``text``."""
    begins = opening(tokenizer)
    # A long text need not be encoded whole: few tokens are longer than this.
    ids = tokenizer.encode(text[: LONG_TOKEN * length])
    return begins + ids[: max(1, length - len(begins))]


def _read(file: Path) -> bytes:
    try:
        return read_bytes(file, MOST_BYTES)
    except TooLargeError as error:
        raise OptionError(
            f"{file} is larger than {MOST_BYTES >> 20} MiB", "Give a part of it: some hundred pages are plenty."
        ) from error
    except OSError as error:
        raise OptionError(
            f"{file} can't be read: {error.strerror or error}", access_hint(error, "Check the path of the text.")
        ) from error


def _stretches(text: str, *, held_back: bool) -> list[str]:
    """Return the stretches that are held back, or the others, in order."""
    size = len(text)
    cuts = [0]
    for number in range(1, STRETCHES):
        start, end = number * size // STRETCHES, (number + 1) * size // STRETCHES
        line = text.find("\n", start, end)
        cuts.append(start if line < 0 else line + 1)
    whole = [text[start:end] for start, end in pairwise([*cuts, size])]
    return [stretch for number, stretch in enumerate(whole, start=1) if (number % EVERY == 0) is held_back]


def _spread(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Return pieces of these sizes, none overlapping, with equal gaps between them. ``ids`` holds as many."""
    spare, count = len(ids) - sum(sizes), len(sizes)
    starts = [done + spare * number // count for number, done in enumerate(accumulate(sizes[:-1], initial=0))]
    return [ids[start : start + size] for start, size in zip(starts, sizes, strict=True)]
