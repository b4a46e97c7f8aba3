"""Compares two models on a text: next-token distributions and layer outputs."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.engine.errors import ModelError, OptionError
from tokamac.engine.lab.scoring import check_windows, windows
from tokamac.engine.model.config import context_length, read_config
from tokamac.engine.model.weights import text_config
from tokamac.engine.text.tokenizer import Tokenizer, load_tokenizer, opening

from .report import CHANGED_LENGTH, CHANGED_LIMIT, TOKENS, Quality, TokenComparison, compare
from .source import layer_paths, locate, open_source
from .streaming import Streamed, calibration_text, first_ids, streamable_folder, streamable_source, verification_ids

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np

# Tokens of a text that are compared, at most. The log-probabilities of 150,000 words then take 150 MB a model.
CHECKED_TOKENS = 256

SHOWN_TOKENS = 24  # of the text before a word that changed; the next one shown is as far away at least

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ComparedModels:
    names: tuple[str, str]
    folders: tuple[Path, Path]
    tokenizers: tuple[Tokenizer, Tokenizer]
    context: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models' comparison on a text.

    layers: ‖y − ŷ‖ ÷ ‖y‖ of every layer's output, with errors of earlier layers; None if not finite. changed: sentences
    after which the models' likeliest words differ.
    """

    quality: Quality
    layers: tuple[float | None, ...]
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ComparisonTokens:
    ids: tuple[int, ...]
    unable: str | None = None
    tokenizer: Tokenizer | None = None


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
    """Compare two models of one tokenizer on a text: KL divergence, top-1 agreement, perplexities.

    Runs on this thread, with one layer in memory at a time.

    Args:
        model: The judged model: a folder or a Hugging Face id (downloaded first).
        reference: The model to compare with, such as the conversion's source.
        text: A text, the Path of a file, or None for held-back text that ships.
        tokens: The most tokens, from the beginning.
        window: Tokens read together; None is all, within the shorter context.
        stride: Tokens between window starts; None is half a window. Each token counts once.
        progress: Called after every layer with layers done and all.

    Raises:
        OptionError: For windows and texts that can't be compared on.
        ModelError: For a model that can't be read.
        DownloadError: For one that can't be downloaded.
    """
    models = compared([str(reference), str(model)], [locate(model) for model in (reference, model)])
    if tokens < 2:
        raise OptionError("a token is only compared with the one before it", "Give 2 tokens or more.")
    if window is not None and models.context is not None and window > models.context:
        raise OptionError(f"a window of {window:,} tokens is more than the context of {models.context:,}", "Use fewer.")
    most = tokens if window is not None else min(tokens, models.context or tokens)
    written = text if isinstance(text, str) else calibration_text(text)
    ids = ids_of(models, written, most, from_start=text is not None)
    return in_windows(models, ids, window or len(ids), stride if window is not None else None, progress)


def compared(names: Sequence[str], folders: Sequence[Path]) -> ComparedModels:
    """Return both models. Raises ModelError for a folder without a model or a tokenizer."""
    (first, second), (one, other) = names, folders
    configs = [read_config(folder) for folder in folders]
    left, right = map(load_tokenizer, folders, configs, names)
    known = [length for config in configs if (length := context_length(config)) is not None]
    return ComparedModels((first, second), (one, other), (left, right), min(known, default=None))


def ids_of(models: ComparedModels, text: str, tokens: int, *, from_start: bool) -> list[int]:
    """Return at most ``tokens`` ids of a text. Raises OptionError for different tokenizers."""
    take = first_ids if from_start else verification_ids
    one, other = models.tokenizers
    first, second = (take(tokenizer, text, tokens) for tokenizer in models.tokenizers)
    if first != second or one.vocabulary_size != other.vocabulary_size:
        raise OptionError(
            f"{models.names[0]} and {models.names[1]} have different tokenizers, so their tokens don't correspond",
            "Compare a model with its conversions, or with another of its family.",
        )
    return first


def in_windows(
    models: ComparedModels, ids: list[int], window: int, stride: int | None, progress: Progress | None = None
) -> Quality:
    before = opening(models.tokenizers[0])
    before = before if ids[: len(before)] == before else []
    body, length = ids[len(before) :], window - len(before)
    step = check_windows(window, stride, len(before)) if len(body) > length else length
    spans = list(windows(len(body), length, step))
    sides = [streamable_folder(folder) for folder in models.folders]
    layers = [Streamed(side).layers for side in sides]
    found, done, total = TokenComparison(), 0, sum(layers) * len(spans)

    def layer_done(layer: int, _: int) -> None:
        if progress is not None:
            progress(done + layer, total)

    for begin, end, counted in spans:
        part, rows = before + body[begin:end], []
        for side, count in zip(sides, layers, strict=True):
            rows.append(Streamed(side, progress=layer_done).run(part))
            done += count
        found.add(rows[0], rows[1], part, 0 if begin == 0 else len(before) + counted - begin)
    return found.quality()


def sample(
    folder: Path, config: dict[str, Any], name: str, text: str, *, tokens: int = CHECKED_TOKENS
) -> ComparisonTokens:
    try:
        tokenizer = load_tokenizer(folder, config, name)
        ids = tuple(verification_ids(tokenizer, text, tokens))
    except ModelError as error:
        return ComparisonTokens((), error.message)
    known = text_config(config).get("vocab_size")
    if isinstance(known, int) and any(token >= known for token in ids):
        return ComparisonTokens((), f"the tokenizer of {name} has tokens that the model does not know")
    if len(ids) < 2:
        return ComparisonTokens((), "the text has fewer than two tokens")
    return ComparisonTokens(ids, tokenizer=tokenizer)


def verify(reference: Streamed, other: Streamed, ids: Sequence[int], tokenizer: Tokenizer | None = None) -> Comparison:
    """Run ``ids`` through both models, layer by layer, and compare. Raises OptionError, ModelError."""
    # Holds both log-probabilities and the reference's layer outputs (float32, host): for 256 tokens about one
    # layer's 16-bit weights.
    outputs: list[np.ndarray] = []
    expected = reference.run(ids, watch=lambda _, output: outputs.append(_on_host(output)))
    errors: list[float | None] = []

    def measure(number: int, output: "mx.array") -> None:
        # A model that runs its layers several times over gives more outputs than it has layers.
        if number < len(outputs) and outputs[number].size == output.size:
            errors.append(_relative_error(outputs[number], _on_host(output)))

    found = other.run(ids, watch=measure)
    matching = reference.layers == other.layers == len(outputs) == len(errors)
    changed = () if tokenizer is None else changed_words(expected, found, ids, tokenizer)
    return Comparison(compare(expected, found, ids), tuple(errors) if matching else (), changed)


def changed_words(
    reference: "mx.array", other: "mx.array", ids: Sequence[int], tokenizer: Tokenizer
) -> tuple[str, ...]:
    """Return sentences after which (n, vocabulary) log-probabilities have another likeliest word, the surest first.

    Words that begin after a space come before pieces of words.
    """
    import mlx.core as mx
    import numpy as np

    def chances(rows: "mx.array", words: "mx.array") -> "np.ndarray":
        return _on_host(mx.exp(mx.take_along_axis(rows, words[:, None], axis=-1)[:, 0]))

    likeliest, after = mx.argmax(reference, axis=-1), mx.argmax(other, axis=-1)
    p, q = chances(reference, likeliest), chances(other, after)
    first, second = np.array(likeliest), np.array(after)
    sure = np.where(first == second, 0, p - chances(reference, after))
    whole, pieces = list[tuple[int, str]](), list[tuple[int, str]]()
    for at in (int(each) for each in np.argsort(-sure, kind="stable") if sure[each] > 0):
        read = list(ids[max(0, at + 1 - SHOWN_TOKENS) : at + 1])
        text = tokenizer.decode(read)
        was, now = (tokenizer.decode([*read, int(each[at])])[len(text) :] for each in (first, second))
        shown = text.lstrip("\ufffd").rpartition("\n")[2].strip()
        said = f"… {shown} → {was.strip()} ({p[at]:.0%}), now {now.strip()} ({q[at]:.0%})"
        if shown and was.strip() and now.strip() and "\ufffd" not in said and len(said) <= CHANGED_LENGTH:
            (whole if was[0] == now[0] == " " else pieces).append((at, said))
    found: dict[int, str] = {}
    for at, said in (*whole, *pieces):
        if len(found) < CHANGED_LIMIT and all(abs(at - each) >= SHOWN_TOKENS for each in found):
            found[at] = said
    return tuple(found.values())


SLOW_LAYER_S = 1.0  # a layer that takes longer is timed alone: what comes once, before the first, is then little of it


class _TimedError(Exception):
    """Ends a timed run."""


def comparison_s(folder: Path, *, unchecked: bool = False) -> float | None:
    """Return the estimated seconds of ``verify``, by running one or two layers; None if unknown."""
    source = open_source(folder, unchecked=unchecked)
    ends_s: list[float] = []

    def layer_done(_: int, total: int) -> None:
        ends_s.append(time.perf_counter())
        if len(ends_s) == min(2, total) or ends_s[0] - began_s > SLOW_LAYER_S:
            raise _TimedError

    model, layers = Streamed(streamable_source(source), progress=layer_done), frozenset(layer_paths(source.module))
    words = text_config(source.config).get("vocab_size")
    began_s = time.perf_counter()
    try:
        model.run(list(range(min(CHECKED_TOKENS, words if isinstance(words, int) else 2))))
    except _TimedError:
        layer_s = ends_s[-1] - (ends_s[-2] if len(ends_s) > 1 else began_s)
    except (ModelError, OptionError, ValueError):
        return None
    else:
        return None
    sizes = {name: math.prod(array.shape) for name, array in source.weights.items()}
    in_layers = sum(size for name, size in sizes.items() if any(name.startswith(f"{path}.") for path in layers))
    head = max(
        (size for name, size in sizes.items() if not any(name.startswith(f"{path}.") for path in layers)), default=0
    )
    return 2 * layer_s * (len(layers) + head * len(layers) / in_layers) if in_layers else None


def _on_host(output: "mx.array") -> "np.ndarray":
    import mlx.core as mx
    import numpy as np

    return np.array(output.astype(mx.float32))


def _relative_error(y: "np.ndarray", other: "np.ndarray") -> float | None:
    import numpy as np

    with np.errstate(all="ignore"):
        error = np.linalg.norm((y - other).ravel()) / np.linalg.norm(y.ravel())
    return float(error) if np.isfinite(error) else None
