"""Embeddings: a vector for each text, pooled from the model's states as its files say. On the engine's thread."""

# sentence-transformers' files (https://sbert.net): modules.json names what follows the model, N_Pooling how the states of all
# tokens become one, N_Dense layers after it, config_sentence_transformers.json texts to put before a query. Conversions often
# lack them: then the last token's state is taken where the tokenizer ends a text with a mark, as Qwen3-Embedding's does, else
# the mean.
#
# Short texts are computed together, padded to the longest, where the model's class is known to compute rows alike without
# caches; others in chunks, through the engine's own. Gemma's embedding model attends in both directions: a text is one pass.

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from .errors import (
    ContextError,
    MemoryLimitError,
    ModelDamagedError,
    ModelUnsupportedError,
    OptionError,
    computing,
)
from .events import PrefillProgress
from .files import is_file, read_text, sizes
from .kv.plan import CachePlan, plan_caches
from .kv.snapshot import LOCAL
from .model.config import MODULES, embeds
from .model.head import backbone_of
from .model.safetensors import read_header
from .options import KVSpec
from .perf.peak_memory import predict_peak
from .runner import Runner
from .schedule.schedule import Pace, ReplyEvents
from .text.tokenizer import BREAK, Tokenizer

PROMPTS = "config_sentence_transformers.json"
BOTH_WAYS = "use_bidirectional_attention"
Pooling = Literal["first", "last", "mean"]
# Not gemma2 or gemma4, whose classes lose their window or their shared keys without caches.
TOGETHER = ("qwen3", "qwen2", "llama", "mistral", "gemma3_text")
CHARACTERS = 64  # of a text, a token of the context: more are left out before it is tokenized
POOLINGS: Mapping[str, Pooling] = {
    "cls": "first",
    "cls_token": "first",
    "lasttoken": "last",
    "mean": "mean",
    "mean_tokens": "mean",
}
ACTIVATIONS: Mapping[str, Callable[[mx.array], mx.array]] = {
    "Identity": lambda x: x, "Tanh": mx.tanh, "Sigmoid": mx.sigmoid, "ReLU": lambda x: mx.maximum(x, 0),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors of texts, in their order.

    Attributes:
        vectors: (texts, dimensions) float32, each of length 1.
        tokens: Of each text, with its marks and prompt.
    """

    vectors: "np.ndarray[Any, np.dtype[np.float32]]"
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dense:
    weight: mx.array  # (out, in)
    bias: mx.array | None
    activation: Callable[[mx.array], mx.array]

    def __call__(self, x: mx.array) -> mx.array:
        out = x @ self.weight.T
        return self.activation(out if self.bias is None else out + self.bias)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How states become a vector. prompts: by name. default: the name of the one that is used where none is."""

    pooling: Pooling
    dense: tuple[Dense, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None


def read_recipe(folder: Path, tokenizer: Tokenizer) -> Recipe:
    """Read a model's embedding files. Raises ModelError."""
    if not embeds(folder):
        return Recipe("last" if ends_of(tokenizer)[1] else "mean")
    pooling: Pooling | None = None
    dense = []
    for module in _json(folder / MODULES, list):
        kind, path = (str(module.get(name)) for name in ("type", "path")) if isinstance(module, dict) else ("", "")
        if "/" in path or path.startswith("."):
            raise ModelDamagedError(
                f"{folder / MODULES} names {path!r:.60}, which is no folder of it", "Download it again."
            )
        match kind.rpartition(".")[2]:
            case "Transformer" | "Normalize":
                pass  # each vector has length 1 in any case
            case "Pooling" if pooling is None:
                pooling = _pooling(folder / path / "config.json")
            case "Dense" if pooling is not None:
                dense.append(_dense(folder / path))
            case _:
                raise ModelUnsupportedError(
                    f"{folder / MODULES} asks for {kind!r:.60}, which is unknown", "Use another model."
                )
    if pooling is None:
        raise ModelDamagedError(f"{folder / MODULES} names no pooling", "Download the model again.")
    told = _json(folder / PROMPTS, dict) if is_file(folder / PROMPTS) else {}
    given, default = told.get("prompts"), told.get("default_prompt_name")
    prompts = {name: text for name, text in (given if isinstance(given, dict) else {}).items() if isinstance(text, str)}
    return Recipe(pooling, tuple(dense), prompts, default if isinstance(default, str) else None)


def _json(path: Path, kind: type) -> Any:
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelDamagedError(f"{path} can't be read: {error}"[:200], "Download the model again.") from error
    if not isinstance(found, kind):
        raise ModelDamagedError(f"{path} holds something else", "Download the model again.")
    return found


def _pooling(path: Path) -> Pooling:
    config = _json(path, dict)
    named = config.get("pooling_mode")
    modes = [
        name.removeprefix("pooling_mode_")
        for name, on in config.items()
        if name.startswith("pooling_mode_") and on is True
    ]
    wanted = [named] if isinstance(named, str) else modes
    if len(wanted) != 1 or wanted[0] not in POOLINGS:
        raise ModelUnsupportedError(
            f"its pooling is {' and '.join(wanted)[:60] or 'none'}", f"Known are {', '.join(POOLINGS)}."
        )
    return POOLINGS[wanted[0]]


def _dense(folder: Path) -> Dense:
    config = _json(folder / "config.json", dict)
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise ModelUnsupportedError(
            f"{folder} has the activation {activation:.40}", f"Known are {', '.join(ACTIVATIONS)}."
        )
    try:
        read_header(folder / "model.safetensors")
        weights: Any = mx.load(str(folder / "model.safetensors"))
        weight, bias = weights["linear.weight"].astype(mx.float32), weights.get("linear.bias")
    except (OSError, KeyError, RuntimeError) as error:
        raise ModelDamagedError(f"{folder} lacks its weights: {error}"[:200], "Download the model again.") from error
    if weight.shape != (config.get("out_features"), config.get("in_features")):
        raise ModelDamagedError(f"the weights of {folder} have the shape {weight.shape}", "Download the model again.")
    return Dense(weight, None if bias is None else bias.astype(mx.float32), ACTIVATIONS[activation])


def ends_of(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the marks that the tokenizer puts before and after a text."""
    plain, marked = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=True)
    at = next((at for at in range(len(marked)) if marked[at : at + len(plain)] == plain), 0)
    return marked[:at], marked[at + len(plain) :]


class BothWays:
    """Stands for a layer's cache in a pass in which tokens attend to later ones, too. lengths: (B,), without padding."""

    offset = 0

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = mx.array(list(lengths))[:, None]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:  # noqa: ARG002, N803
        places = mx.arange(N)
        mask = (places < self._lengths)[:, None, None]  # (B, 1, 1, N)
        apart = mx.abs(places[:, None] - places)
        if window_size is not None:
            mask = mask & (apart <= window_size // 2)
        return mask | (apart == 0)  # a row of padding without anything to attend to would be NaN

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


class Embedder:
    """Computes vectors of token ids. Raises OptionError for a class whose states can't be read, ModelError for its files."""

    def __init__(self, runner: Runner) -> None:
        runtime, name = runner.runtime, runner.spec.name
        self._runtime, self._tokenizer = runtime, runtime.tokenizer
        if runtime.operations is not LOCAL:
            raise OptionError("several nodes hold this model, so it makes no embeddings", "Load it on one.")
        self._backbone = backbone_of(runtime.model)
        if self._backbone is None:
            raise OptionError(f"the states of {name} can't be read, so it makes no embeddings", "Use another model.")
        self.recipe = read_recipe(runner.spec.path, self._tokenizer)
        self._together = runtime.config.get("model_type") in TOGETHER
        self._both_ways = runtime.config.get(BOTH_WAYS) is True
        self._plan: CachePlan = plan_caches(runtime.model, runtime.config, KVSpec())
        self._marks = ends_of(self._tokenizer)
        self.longest = min(
            (each for each in (runtime.context_length, runtime.positions) if each is not None), default=None
        )

    @property
    def chunk(self) -> int:
        return self._runtime.chunking.tokens_at(0)

    def ids(self, text: str, prompt: str | None, *, truncate: bool) -> list[int]:
        """Return a text's ids. Raises OptionError for an unknown prompt or no token, ContextError."""
        recipe = self.recipe
        name = recipe.default if prompt is None else prompt
        if name is not None and name not in recipe.prompts:
            known = ", ".join(recipe.prompts) or "none"
            raise OptionError(f"this model has no prompt {name!r:.60}", f"It has {known:.200}.")
        whole = ("" if name is None else recipe.prompts[name]) + text.replace(BREAK, " ")
        if self.longest is None:
            return self._encoded(whole)
        most = CHARACTERS * self.longest  # or a text of megabytes would hold up all replies
        ids = self._encoded(whole[:most])
        if len(whole) <= most and len(ids) <= self.longest:
            return ids
        if not truncate:
            has = f"{len(ids):,} tokens" if len(whole) <= most else f"{len(whole):,} characters"
            raise ContextError(
                f"a text to embed has {has}, but the model's context is {self.longest:,} tokens", "Cut it into parts."
            )
        after = self._marks[1]
        return ids[: self.longest - len(after)] + after

    def _encoded(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=True)
        if not ids:
            raise OptionError("a text to embed is empty", "Give a text with something in it.")
        return ids

    def check_fits(self, tokens: int, held: int) -> None:
        """Raise MemoryLimitError where a text of so many tokens does not fit beside ``held`` bytes of computed prompts."""
        runtime, budget = self._runtime, self._runtime.memory_budget
        chunk = tokens if self._both_ways else min(self.chunk, tokens)
        peak = predict_peak(runtime.shape, held=0, new=tokens, chunk=chunk, prompt_cache=held).total
        if budget is not None and peak > budget:
            needed, most = sizes(peak, budget)
            raise MemoryLimitError(
                f"to embed {tokens:,} tokens takes {needed}, and {most} may be used", "Cut the text into parts."
            )

    def batches(self, inputs: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield positions of texts to compute together, short ones first; padded they are no more than a chunk."""
        batch: list[int] = []
        for at in sorted(range(len(inputs)), key=lambda at: len(inputs[at])):
            if batch and (not self._together or (len(batch) + 1) * len(inputs[at]) > self.chunk):
                yield batch
                batch = []
            batch.append(at)
        if batch:
            yield batch

    def vectors(self, inputs: Sequence[list[int]]) -> Generator[None, None, mx.array]:
        """Return (texts, D) float32, yielding between chunks of a text."""
        lengths = [len(ids) for ids in inputs]
        if len(inputs) == 1 and not self._both_ways:
            pooled = yield from self._chunked(inputs[0])
        else:
            longest = max(lengths)
            padded = mx.array([[*ids, *[ids[-1]] * (longest - len(ids))] for ids in inputs])
            caches = [BothWays(lengths)] * len(self._backbone.layers) if self._both_ways else None
            pooled = self._pooled(self._backbone(padded, cache=caches).astype(mx.float32), lengths)
        for layer in self.recipe.dense:
            pooled = layer(pooled)
        mx.eval(pooled)
        mx.clear_cache()
        return pooled

    def _chunked(self, ids: list[int]) -> Generator[None, None, mx.array]:
        caches, pooling, size = self._plan.make(None), self.recipe.pooling, self.chunk
        found: mx.array | None = None
        for begin in range(0, len(ids), size):
            if begin:
                yield
            states = self._backbone(mx.array([ids[begin : begin + size]]), cache=caches).astype(mx.float32)  # (1, T, D)
            if pooling == "mean":
                part = states.sum(axis=1) / len(ids)
                found = part if found is None else found + part
            elif pooling == "last" or found is None:
                found = states[:, -1 if pooling == "last" else 0]
            mx.eval(found, [cache.state for cache in caches])
        assert found is not None
        return found

    def _pooled(self, states: mx.array, lengths: Sequence[int]) -> mx.array:
        """(B, T, D) → (B, D)."""
        if self.recipe.pooling == "first":
            return states[:, 0]
        counts = mx.array(list(lengths))
        if self.recipe.pooling == "last":
            return states[mx.arange(len(lengths)), counts - 1]
        inside = mx.arange(states.shape[1])[None, :, None] < counts[:, None, None]
        return mx.where(inside, states, 0).sum(axis=1) / counts[:, None]


def embed(
    runner: Runner,
    texts: Sequence[str],
    prompt: str | None,
    dimensions: int | None,
    pace: Pace,  # noqa: ARG001  # a pass is a chunk at most
    *,
    truncate: bool,
    cancelled: Callable[[], bool],
    then: Callable[[Embeddings], None],
) -> ReplyEvents:
    """Compute the vectors of texts; yields progress. Raises TokamacError."""
    if runner.embedder is None:
        runner.embedder = Embedder(runner)
    embedder = runner.embedder
    inputs = []
    for text in texts:
        inputs.append(embedder.ids(text, prompt, truncate=truncate))
        yield None
    embedder.check_fits(max(map(len, inputs)), runner.store.nbytes)
    rows: dict[int, mx.array] = {}
    done, total = 0, sum(map(len, inputs))
    with computing():
        for batch in embedder.batches(inputs):
            if cancelled():
                return
            found = yield from embedder.vectors([inputs[at] for at in batch])
            rows |= dict(zip(batch, np.array(found), strict=True))
            done += sum(len(inputs[at]) for at in batch)
            yield PrefillProgress(done, total, 0)
    vectors = np.stack([rows[at] for at in range(len(inputs))])
    if dimensions is not None and dimensions > vectors.shape[1]:
        raise OptionError(f"its vectors have {vectors.shape[1]:,} dimensions, not {dimensions:,}", "Ask for fewer.")
    vectors = vectors[:, :dimensions]
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    then(Embeddings(vectors / np.maximum(lengths, np.float32(1e-12)), tuple(map(len, inputs))))
