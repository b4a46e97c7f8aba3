"""How far one model is from another on a text of any length: what ``tokamac quality`` prints, as values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokamac.engine.config import read_config
from tokamac.engine.context_length import context_length
from tokamac.engine.errors import OptionError
from tokamac.engine.perplexity import check_windows, windows
from tokamac.engine.tokens import Tokenizer, load_tokenizer, opening
from tokamac.quant.calibration import first_ids, verification_ids
from tokamac.quant.calibration import text as read_text
from tokamac.quant.divergence import TOKENS, Gathered, Quality
from tokamac.quant.source import locate
from tokamac.quant.streamed import Streamed, streamable_folder

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Compared:
    """Models to compare: what messages call them, their folders and tokenizers, and the shortest of their contexts."""

    names: tuple[str, str]
    folders: tuple[Path, Path]
    tokenizers: tuple[Tokenizer, Tokenizer]
    context: int | None


def compared(names: Sequence[str], folders: Sequence[Path]) -> Compared:
    """Return two models to compare. Raises ModelError for a folder that is no model, or has no tokenizer."""
    (first, second), (one, other) = names, folders
    configs = [read_config(folder) for folder in folders]
    pair = zip(folders, configs, names, strict=True)
    tokenizers = [load_tokenizer(folder, config, name) for folder, config, name in pair]
    known = [length for config in configs if (length := context_length(config)) is not None]
    return Compared((first, second), (one, other), (tokenizers[0], tokenizers[1]), min(known, default=None))


def ids_of(models: Compared, text: str, tokens: int, *, from_start: bool) -> list[int]:
    """Return at most so many tokens of a text: its first, or of ours those that no calibration reads.

    Raises OptionError where the models have different tokenizers.
    """
    take = first_ids if from_start else verification_ids
    first, second = (take(tokenizer, text, tokens) for tokenizer in models.tokenizers)
    one, other = models.tokenizers
    if first != second or one.vocabulary_size != other.vocabulary_size:
        raise OptionError(
            f"{models.names[0]} and {models.names[1]} have different tokenizers, so they speak of different tokens",
            "Compare a model with its conversions, or with another of its family.",
        )
    return first


def quality(
    model: str | Path,
    reference: str | Path,
    text: str | Path | None = None,
    *,
    tokens: int = TOKENS,
    window: int | None = None,
    stride: int | None = None,
    progress: Progress | None = None,
) -> Quality:
    """Compare what two models of one tokenizer say of a text: KL divergence, equal likeliest tokens, perplexity of both.

    Args:
        model: the one that is judged, such as a conversion: a folder or a Hugging Face id (downloaded first).
        reference: what it is held against, such as the conversion's source.
        text: a text, the Path of a file, or None for one of our own, of which what no calibration reads is taken.
        tokens: of the text, from its beginning, at most.
        window: tokens that the models read at once; None is all of them, and no more than the shorter context.
        stride: tokens from one window's beginning to the next one's; None is half a window. Each token counts once.
        progress: told after every layer of either model, in every window: layers done, and all.

    One layer is in memory at a time, and MLX is used on this thread.
    Raises OptionError, ModelError or DownloadError.
    """
    folders = [locate(model) for model in (reference, model)]
    models = compared([str(reference), str(model)], folders)
    if tokens < 2:
        raise OptionError("a token is only compared with the one before it", "Give 2 tokens or more.")
    if window is not None and models.context is not None and window > models.context:
        raise OptionError(f"a window of {window:,} tokens is more than the context of {models.context:,}", "Use fewer.")
    most = tokens if window is not None else min(tokens, models.context or tokens)
    written = text if isinstance(text, str) else read_text(text)
    ids = ids_of(models, written, most, from_start=text is not None)
    return in_windows(models, ids, window or len(ids), stride if window is not None else None, progress)


def in_windows(
    models: Compared, ids: list[int], window: int, stride: int | None, progress: Progress | None = None
) -> Quality:
    """Compare two models on ``ids``, which begin with what their tokenizer puts before every text, window by window."""
    before = opening(models.tokenizers[0])
    before = before if ids[: len(before)] == before else []
    body = ids[len(before) :]
    room = window - len(before)
    spans = list(windows(len(body), room, check_windows(window, stride, len(before)) if len(body) > room else room))
    sides = [streamable_folder(folder) for folder in models.folders]
    layers = sum(Streamed(side).layers for side in sides)
    found, done = Gathered(), 0
    for begin, end, counted in spans:
        part, rows = before + body[begin:end], []
        for side in sides:
            rows.append(Streamed(side, progress=_told(progress, done, layers * len(spans))).run(part))
            done += Streamed(side).layers
        found.add(rows[0], rows[1], part, 0 if begin == 0 else len(before) + counted - begin)
    return found.quality()


def _told(progress: Progress | None, done: int, total: int) -> Progress | None:
    return None if progress is None else lambda layers, _: progress(done + layers, total)
