"""Immutable, validated options. No MLX: screen and command line use these too."""

import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from .errors import OptionError

OnFull = Literal["roll", "stop", "truncate-middle", "error", "compact"]
ON_FULL: tuple[OnFull, ...] = get_args(OnFull)
Thinking = Literal["on", "off", "low", "medium", "high"]
THINKING: tuple[Thinking, ...] = get_args(Thinking)
WiredMode = Literal["auto", "on", "off"]
WIRED_MODES: tuple[WiredMode, ...] = get_args(WiredMode)
KV_BITS = (16, 8, 6, 5, 4, 3, 2)
GROUP_SIZES = (32, 64, 128)

Stage = Literal["penalties", "dry", "top_k", "temperature", "top_p", "min_p", "xtc"]
STAGES: tuple[Stage, ...] = get_args(Stage)  # what changes the logits before a token is drawn, in the default order
MOST_LOGPROBS = 100  # alternatives reported with each token, at most
# Replies at once by default: more share the time for reading the weights, and each takes memory for its keys and
# values.
PARALLEL = 8

# A name that a template may read. Names with a leading underscore are Jinja's and Python's own.
KEYWORD = re.compile(r"[A-Za-z]\w*", re.ASCII)
WORD = re.compile(r"[A-Za-z_/][\w./-]*")  # a text that needs no quotes as the value of a keyword
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
EMPTY_SCHEMA = '{"type": "object", "properties": {}}'
_SCHEMA_HINT = 'Use {"type": "object", "properties": {…}}.'
# Keywords that the conversation itself sets.
GIVEN = frozenset({"messages", "add_generation_prompt", "continue_final_message"})
_KEYWORDS_HINT = 'Use KEY=VALUE with a JSON value, such as enable_thinking=false or style="brief".'


def whole(value: Any, what: str) -> int:
    """Convert any library's integer. Raises OptionError, for bools too."""
    try:
        return index(value)
    except TypeError:
        raise OptionError(f"{what} {value!r:.60} is not an integer", "Use a whole number.") from None


def index(value: Any) -> int:
    """Convert any library's integer. Raises TypeError, for bools too."""
    if isinstance(value, bool):
        raise TypeError("a bool is not a number here")
    return operator.index(value)


def real(value: Any, what: str) -> float:
    """Convert any library's real number. Raises OptionError, for bools too."""
    if type(value) in {int, float}:
        return value  # type: ignore[no-any-return]
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(f"{what} {value!r:.60} is not a number", "Use a number.")
    return float(value)


def type_name(value: object) -> str:
    return type(value).__name__


def _require(ok: bool, message: str, hint: str) -> None:
    if not ok:
        raise OptionError(message, hint)


_set = object.__setattr__  # sets a field of frozen options while they are made


def _set_numbers(
    options: object, fields: Iterable[tuple[str, str, Callable[[Any, str], float], float, float, str]]
) -> None:
    """Normalise numeric fields and check ranges; None passes. Raises OptionError."""
    for name, what, convert, least, most, hint in fields:
        if (value := getattr(options, name)) is not None:
            if type(value) is not int and (type(value) is not float or convert is not real):
                value = convert(value, what)
                _set(options, name, value)
            if not least <= value <= most:
                raise OptionError(f"{what} {value} is out of range", hint)


def _items(given: object) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes) else (given,)


def _texts(given: object, name: str, what: str, example: str, why_not_empty: str) -> tuple[str, ...]:
    hint = f"Use texts: {name}=({example!r},)."
    texts = _items(given)
    for text in texts:
        _require(isinstance(text, str), f"{what} {text!r:.60} is not a text", hint)
    _require(all(texts), f"an empty {what} {why_not_empty}", "Leave it out.")
    return texts


def _token_ids(given: object) -> tuple[int, ...]:
    ids = tuple(whole(each, "stop token id") for each in _items(given))
    hint = "Use ids of the model's tokenizer: stop_token_ids=(2,)."
    _require(all(each >= 0 for each in ids), "a stop token id is negative", hint)
    return ids


class _Biases(tuple[tuple[int, float], ...]):
    """Checked biases: they are copied, with their options, some ten times on the way of a request."""

    __slots__ = ()


def _plain_biases(pairs: tuple[Any, ...]) -> _Biases | None:
    """Return ids with numbers, checked all at once, for there may be very many; None where one is odd."""
    if set(map(type, pairs)) != {tuple} or set(map(len, pairs)) != {2}:
        return None
    ids, biases = zip(*pairs, strict=True)
    if set(map(type, ids)) != {int} or not set(map(type, biases)) <= {int, float} or len(set(ids)) < len(ids):
        return None
    in_range = min(ids) >= 0 and min(biases) >= -100 and max(biases) <= 100 and math.isfinite(sum(biases))
    return _Biases(sorted(zip(ids, map(float, biases), strict=True))) if in_range else None


def _biases(given: object) -> _Biases:
    if isinstance(given, _Biases):
        return given
    items = _items(given.items() if isinstance(given, Mapping) else given)
    if (plain := _plain_biases(items)) is not None:
        return plain
    hint = "Use {token_id: bias}, with a bias from -100 to 100."
    pairs = []
    for each in items:
        pair = _items(each)
        _require(len(pair) == 2, f"logit bias {each!r:.60} is not a token id with a bias", hint)
        token, bias = whole(pair[0], "token id"), float(real(pair[1], "logit bias"))
        _require(token >= 0, f"token id {token} of a logit bias is negative", hint)
        _require(-100 <= bias <= 100, f"logit bias {bias:g} of token {token} is out of range", hint)
        pairs.append((token, bias))
    _require(len({token for token, _ in pairs}) == len(pairs), "a token has two logit biases", hint)
    return _Biases(sorted(pairs))


def _schema(given: object) -> str | None:
    if given is None:
        return None
    try:
        schema = json.loads(given) if isinstance(given, str) else given
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        schema, text = None, ""
    _require(isinstance(schema, Mapping), "the JSON schema is not a JSON object", _SCHEMA_HINT)
    return text


def _order(given: object) -> tuple[Stage, ...]:
    hint = f"Name each of these once: {', '.join(STAGES)}."
    names = _items(given)
    for name in names:
        _require(name in STAGES, f"there is no sampling stage {name!r:.60}", hint)
    missing = [stage for stage in STAGES if stage not in names]
    _require(not missing, f"the order of sampling leaves out {', '.join(missing)}", hint)
    _require(len(names) == len(STAGES), "the order of sampling names a stage twice", hint)
    return names


SEEDS = 2**63  # seeds are numbers below this

# Number fields of Sampling: name, what it is called, type, least and greatest value, and what to do about another.
_SAMPLING_NUMBERS = (
    ("temperature", "temperature", real, 0, 10, "Use 0 to 10."),
    ("top_p", "top-p", real, math.nextafter(0, 1), 1, "Use above 0 and up to 1."),
    ("top_k", "top-k", whole, 0, math.inf, "Use 0 (off) or more."),
    ("min_p", "min-p", real, 0, math.nextafter(1, 0), "Use 0 (off) to below 1."),
    ("repetition_penalty", "repetition penalty", real, 0.5, 3, "Use 0.5 to 3; 1 is off."),
    ("seed", "seed", whole, 0, SEEDS - 1, "Use a non-negative integer."),
    ("max_tokens", "max tokens", whole, 1, math.inf, "Use 1 or more."),
    ("min_tokens", "min tokens", whole, 0, math.inf, "Use 0 (off) or more."),
    ("presence_penalty", "presence penalty", real, -2, 2, "Use -2 to 2; 0 is off."),
    ("frequency_penalty", "frequency penalty", real, -2, 2, "Use -2 to 2; 0 is off."),
    ("xtc_probability", "XTC probability", real, 0, 1, "Use 0 (off) to 1."),
    ("xtc_threshold", "XTC threshold", real, 0, 0.5, "Use 0 to 0.5: above a half there are never two such tokens."),
    ("dry_multiplier", "DRY multiplier", real, 0, 100, "Use 0 (off) to 100; 0.8 is usual."),
    ("dry_base", "DRY base", real, 1, 10, "Use 1 to 10; 1.75 is usual."),
    ("dry_allowed_length", "DRY allowed length", whole, 1, 1000, "Use 1 to 1000; 2 is usual."),
    ("loop_grace", "loop grace", whole, 0, math.inf, "Use 0 or more tokens."),
    ("logprobs", "number of log-probabilities", whole, 0, MOST_LOGPROBS, f"Use 0 to {MOST_LOGPROBS}."),
)


DEFAULTS = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
NAMED_BY_NOBODY = {"min_p": 0.05, "repetition_penalty": 1.1}  # else small models often repeat themselves for ever


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: 0 is greedy. None, here and in the next four: the model's generation_config.json, else 0.7,
            1.0, 0, 0.0, 1.0; without any recommendation min_p 0.05 and repetition_penalty 1.1 unless greedy.
        top_p, top_k, min_p: Cut the unlikely tail; 1.0, 0 and 0.0 are off.
        repetition_penalty: Over the last 64 tokens; 1.0 is off.
        seed: Same seed and device, same text; None is random.
        max_tokens: None leaves an eighth of the context, 512 to 4,096 tokens, at most half, for the next turn.
        stop: Texts that end the reply, not shown.
        stop_token_ids: Likewise, beside the model's own.
        min_tokens: Until then end tokens can't be drawn, and stop texts are plain text.
        logit_bias: {token_id: bias}, -100 to 100, applied first.
        presence_penalty, frequency_penalty: Subtracted once, or per occurrence, for generated tokens (as OpenAI's).
        xtc_probability, xtc_threshold: Chance to exclude all but the least likely token at or above the threshold.
        dry_multiplier, dry_base, dry_allowed_length, dry_sequence_breakers: Continuing a repeat of n ≥ allowed
            tokens costs multiplier × base^(n − allowed length); repeats don't cross breakers or template marks.
        order: Stages in order, each once; "penalties" are the first three above.
        logprobs: Number of top log-probabilities per token, before sampling; 0: its own; None: none.
        json_schema: Schema of the answer (thinking is free), JSON text or dict; needs the extra ``schema``.
        loop_check: End a reply that repeats itself, with reason "loop".
        loop_grace: Tokens until then; ``ReplyStream.keep_going`` continues it.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    order: tuple[Stage, ...] = STAGES
    logprobs: int | None = None
    json_schema: str | None = None
    loop_check: bool = True
    loop_grace: int = 0

    if (
        TYPE_CHECKING
    ):  # what callers may write: texts, ids and stages in any list, or one alone; a bias or a schema as a mapping

        def __init__(  # noqa: PLR0917
            self,
            temperature: float | None = None,
            top_p: float | None = None,
            top_k: int | None = None,
            min_p: float | None = None,
            repetition_penalty: float | None = None,
            seed: int | None = None,
            max_tokens: int | None = None,
            stop: str | Iterable[str] = (),
            stop_token_ids: int | Iterable[int] = (),
            min_tokens: int = 0,
            logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = (),
            presence_penalty: float = 0.0,
            frequency_penalty: float = 0.0,
            xtc_probability: float = 0.0,
            xtc_threshold: float = 0.1,
            dry_multiplier: float = 0.0,
            dry_base: float = 1.75,
            dry_allowed_length: int = 2,
            dry_sequence_breakers: str | Iterable[str] = ("\n", ":", '"', "*"),
            order: Iterable[str] = ("penalties", "dry", "top_k", "temperature", "top_p", "min_p", "xtc"),
            logprobs: int | None = None,
            json_schema: str | Mapping[str, object] | None = None,
            loop_check: bool = True,
            loop_grace: int = 0,
        ) -> None: ...

    def __post_init__(self) -> None:
        _set(self, "stop", _texts(self.stop, "stop", "stop text", "END", "would end every reply at once"))
        _set(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        _set(self, "logit_bias", _biases(self.logit_bias))
        breakers = self.dry_sequence_breakers, "dry_sequence_breakers", "sequence breaker", "\n"
        _set(self, "dry_sequence_breakers", _texts(*breakers, "would break every sequence"))
        _set(self, "order", _order(self.order))
        _set_numbers(self, _SAMPLING_NUMBERS)
        _set(self, "json_schema", _schema(self.json_schema))
        _require(isinstance(self.loop_check, bool), "loop check is neither True nor False", "Use one of them.")
        _require(
            not self.min_tokens or self.json_schema is None,
            f"min tokens {self.min_tokens} may keep an answer from ending where its JSON schema ends it",
            "Leave one out.",
        )
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min tokens {self.min_tokens} is above max tokens {self.max_tokens}",
            "Lower the one, or raise the other.",
        )
        _require(
            not self.xtc_probability or self.temperature != 0 or self.xtc_before_temperature,
            "XTC excludes nothing at temperature 0, where one token has all of the probability",
            "Use a temperature above 0, or an order with xtc before temperature.",
        )

    @property
    def xtc_before_temperature(self) -> bool:
        """Whether XTC runs before temperature."""
        return self.order.index("xtc") < self.order.index("temperature")

    @property
    def names_any(self) -> bool:
        """Whether it names a value of those that a model may recommend."""
        return any(getattr(self, name) is not None for name in DEFAULTS)

    def resolved(self, recommended: "Sampling") -> "Sampling":
        """Fill None from ``recommended``, then from the defaults."""
        nobody = self.temperature != 0 and not recommended.names_any
        defaults = DEFAULTS | (NAMED_BY_NOBODY if nobody else {})
        changes: dict[str, Any] = {}
        for name, default in defaults.items():
            if getattr(self, name) is None:
                suggested = getattr(recommended, name)
                changes[name] = default if suggested is None else suggested
        return replace(self, **changes) if changes else self


def sample_of(sampling: Sampling, number: int) -> Sampling:
    """Return the sampling of reply ``number`` of several: seed + ``number``, wrapping to 0."""
    seed = sampling.seed
    return sampling if seed is None else replace(sampling, seed=(seed + number) % SEEDS)


KVBits = tuple[int, int]  # of keys and of values


@dataclass(frozen=True, slots=True)
class KVSpec:
    """KV cache storage.

    Args:
        key_bits, value_bits: 16 is the model's type; fewer packs groups of ``group_size`` along the head dimension.
        group_size: Falls back to 32, with a note, where 64 doesn't divide the head dimension; 128 is refused.
        window: Tokens kept at most, with the first ``keep``; None keeps all.
        keep: Pinned tokens, renumbered as the window rolls; "system": the system prompt, else 4. Position p sees
            q ≤ p where q < keep or q > p − (window − keep).
        on_full: At ``window`` or the model's context: "roll" drops the oldest; "stop" ends the reply ("length")
            and refuses long prompts; "truncate-middle" cuts those; "error" fails after the text; "compact" is
            "stop", for a caller that summarises. None: "roll" with a window, else "stop".
    """

    key_bits: int = 16
    value_bits: int = 16
    group_size: int = 64
    window: int | None = None
    keep: int | Literal["system"] = 4
    on_full: OnFull | None = None

    def __post_init__(self) -> None:
        for name, what in (
            ("key_bits", "key bits"), ("value_bits", "value bits"), ("group_size", "KV group size"), ("window", "KV window"),
        ):  # fmt: skip
            if (value := getattr(self, name)) is not None or name != "window":
                _set(self, name, whole(value, what))
        for what, bits in (("keys", self.key_bits), ("values", self.value_bits)):
            _require(bits in KV_BITS, f"{bits} bits for {what} is not supported", f"Use one of {KV_BITS}.")
        _require(
            self.group_size in GROUP_SIZES, f"KV group size {self.group_size} is not supported", f"Use {GROUP_SIZES}."
        )
        _require(
            self.on_full is None or self.on_full in ON_FULL,
            f"on-full {self.on_full!r} is not known",
            f"Use one of {', '.join(ON_FULL)}.",
        )
        if isinstance(self.keep, str):
            _require(self.keep == "system", f"keep {self.keep!r:.60} is not a number of tokens", "Or use 'system'.")
        else:
            _set(self, "keep", whole(self.keep, "keep"))
            _require(self.keep >= 0, f"keep {self.keep} is negative", "Use 0 or more, or 'system'.")
        if self.window is not None:
            _require(self.window >= 2, f"a KV window of {self.window} tokens is too small", "Use 2 or more.")
            _require(
                self.keep == "system" or self.keep < self.window,
                f"keep {self.keep} leaves no room in a window of {self.window}",
                "Make the window larger than keep.",
            )

    @property
    def when_full(self) -> OnFull:
        """What happens when the context is full, with the default resolved."""
        if self.on_full == "compact":
            return "stop"  # what a chat does then is its own
        return self.on_full or ("stop" if self.window is None else "roll")

    @property
    def rolls(self) -> bool:
        """Whether the oldest tokens make room for new ones."""
        return self.when_full == "roll"

    def capacity(self, context_length: int | None) -> int | None:
        """Return the tokens held at most, None unbounded. Only a rolling window may exceed ``context_length``."""
        if self.window is None or self.rolls or context_length is None:
            return context_length if self.window is None else self.window
        return min(self.window, context_length)

    @property
    def quantized(self) -> bool:
        """Whether keys or values are packed."""
        return min(self.key_bits, self.value_bits) < 16


@dataclass(frozen=True, slots=True)
class PromptCacheSpec:
    """Reuse of computed prefixes, in memory and **on disk**. Sizes in bytes; None is the default.

    Args:
        memory_bytes: Kept conversations, the live one included; default a tenth of the budget.
        disk: Store prefixes of 256 or more tokens in ``folder`` (default: the user's cache folder).
        disk_bytes, daily_write_bytes: Over all models.
    """

    memory_bytes: int | None = None
    disk: bool = True
    folder: Path | None = None
    disk_bytes: int | None = None
    daily_write_bytes: int | None = None

    if TYPE_CHECKING:  # what callers may write: a folder as text, too

        def __init__(
            self,
            memory_bytes: int | None = None,
            disk: bool = True,
            folder: str | os.PathLike[str] | None = None,
            disk_bytes: int | None = None,
            daily_write_bytes: int | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        sizes = ("memory_bytes", "disk_bytes", "daily_write_bytes")
        _set_numbers(self, ((name, name, whole, 0, math.inf, "Use 0 or more.") for name in sizes))
        given: object = self.folder
        if isinstance(given, str | os.PathLike):
            _set(self, "folder", Path(given))
        elif given is not None:
            raise OptionError(f"folder {given!r:.60} is not a path", "Use a Path, or leave it out.")


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding: drafts verified in one pass; the text stays the same.

    Args:
        lookup: From repetitions in the conversation.
        branches: From its other versions: regenerated replies, edited prompts.
        draft: A smaller model with the same tokenizer: a folder, an id, or "guide".
        heads: The checkpoint's own multi-token heads, if any.
    """

    lookup: bool = True
    branches: bool = True
    draft: str | Path | None = None
    heads: bool = True

    def __post_init__(self) -> None:
        for name in ("lookup", "branches", "heads"):
            _require(isinstance(getattr(self, name), bool), f"{name} is neither True nor False", "Use one of them.")
        _require(
            isinstance(self.draft, Path)
            or self.draft is None
            or (isinstance(self.draft, str) and self.draft.strip() != ""),
            f"{self.draft!r:.60} names no draft model",
            'Give a folder, a Hugging Face id, or "guide"; None is none.',
        )


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Validated arguments of ``Engine.load``.

    memory: bytes for arrays; None is the system's limit. parallel: batch limit. cpu_exact: never round rows. wired: see
    perf/memory.py.
    """

    model: str | Path
    kv: KVSpec = KVSpec()
    prompt_cache: PromptCacheSpec | None = None
    dtype: str | None = None
    memory: int | None = None
    unchecked: bool = False
    adapter: str | Path | None = None
    parallel: int = 1
    speculation: Speculation | None = None
    cpu_exact: bool = False
    wired: WiredMode = "auto"


FULL_PACE = 100  # per cent of the time that the device may work


def given_pace(percent: int) -> int:
    """Raises OptionError."""
    given_count(percent, "pace", least=1)
    _require(percent <= FULL_PACE, f"pace is {percent}, and the whole time is 100 per cent", "Use 1 to 100.")
    return percent


def given_wired(mode: object) -> WiredMode:
    """Raises OptionError."""
    for known in WIRED_MODES:
        if mode == known:
            return known
    raise OptionError(f"wired is {mode!r:.40}, which is no way to wire memory.", f"Use one of {WIRED_MODES}.")


Backend = Literal["ring", "jaccl"]
NODE_BACKENDS: tuple[Backend, ...] = get_args(Backend)
Split = Literal["tensor", "pipeline"]
SPLITS: tuple[Split, ...] = get_args(Split)
MOST_NODES = 64


@dataclass(frozen=True, slots=True)
class Nodes:
    """The processes that jointly hold one model.

    Args:
        count: Processes on this machine; or
        hostfile: Machines, in ``mlx.distributed_config``'s format, this one first.
        backend: None: the hostfile's, else ring.
        split: "tensor" splits every layer, "pipeline" the list of layers.
    """

    count: int | None = None
    hostfile: str | None = None
    backend: Backend | None = None
    split: Split = "tensor"

    def __post_init__(self) -> None:
        both = (self.count is None) == (self.hostfile is None)
        _require(not both, "nodes need a count or a hostfile, and not both", "Give one of them.")
        if self.count is not None:
            object.__setattr__(self, "count", whole(self.count, "a number of nodes"))
            in_range = 2 <= (self.count or 0) <= MOST_NODES
            _require(in_range, f"a model can't be divided among {self.count} nodes", f"Use 2 to {MOST_NODES}.")
        _require(
            self.backend in (None, *NODE_BACKENDS),
            f"{self.backend!r:.40} is no backend",
            f"Use {' or '.join(NODE_BACKENDS)}.",
        )
        _require(self.split in SPLITS, f"{self.split!r:.40} is no way to split a model", f"Use {' or '.join(SPLITS)}.")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that a model may call.

    Args:
        parameters: JSON Schema of its arguments, JSON text or dict.
        strict: Hold the arguments to the schema whenever it is called; needs the extra ``schema``.

    Raises:
        OptionError: An impossible name, or not an object schema.
    """

    name: str
    description: str = ""
    parameters: str = EMPTY_SCHEMA
    strict: bool = False

    if TYPE_CHECKING:  # what callers may write: parameters as a dict, too

        def __init__(
            self,
            name: str,
            description: str = "",
            parameters: str | Mapping[str, object] = EMPTY_SCHEMA,
            strict: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        named = isinstance(self.name, str) and TOOL_NAME.fullmatch(self.name) is not None
        _require(named, f"{self.name!r:.80} is not a name that a tool can have", "Use letters, digits, _ . and -.")
        _require(isinstance(self.description, str), f"the description of {self.name} is not a text", "Give a str.")
        given: Any = self.parameters
        try:
            schema = json.loads(given) if isinstance(given, str) else given
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            schema, text = None, ""
        is_object = isinstance(schema, Mapping) and schema.get("type", "object") == "object"
        _require(is_object, f"the parameters of {self.name} are not a JSON Schema of an object", _SCHEMA_HINT)
        _set(self, "parameters", text)

    @property
    def as_dict(self) -> dict[str, Any]:
        """The definition in OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": json.loads(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """Chat template options and thinking limits.

    Args:
        thinking: Whether or how much to think, as the template supports (else OptionError); None: its default.
        thinking_budget: Tokens until thinking is closed with the model's mark.
        keywords: Template variables as ``KEY=JSON`` texts or a dict.
        tools: Callable functions.
        must_call: Names of which one must be called, without other text; needs the extra ``schema``.
    """

    thinking: Thinking | None = None
    thinking_budget: int | None = None
    keywords: tuple[str, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    must_call: tuple[str, ...] = ()

    if TYPE_CHECKING:  # what callers may write: keywords as a dict, too

        def __init__(
            self,
            thinking: Thinking | None = None,
            thinking_budget: int | None = None,
            keywords: Mapping[str, object] | Iterable[str] = (),
            tools: Iterable[ToolSpec] = (),
            must_call: str | Iterable[str] = (),
        ) -> None: ...

    def __post_init__(self) -> None:
        _require(
            self.thinking is None or self.thinking in THINKING,
            f"thinking {self.thinking!r:.60} is not known",
            f"Use one of {', '.join(THINKING)}.",
        )
        if self.thinking_budget is not None:
            budget = whole(self.thinking_budget, "thinking budget")
            _set(self, "thinking_budget", budget)
            _require(budget >= 0, f"a thinking budget of {budget} tokens is negative", "Use 0 or more.")
        _set(self, "keywords", _keywords(self.keywords))
        _set(self, "tools", tuple(self.tools))
        names = [each.name for each in self.tools]
        twice = next((name for name in names if names.count(name) > 1), None)
        _require(twice is None, f"there are two tools called {twice}", "Give each a name of its own.")
        _set(self, "must_call", _items(self.must_call))
        for name in self.must_call:
            _require(isinstance(name, str), f"the tool to call {name!r:.60} is not a name", "Give names of tools.")

    @property
    def values(self) -> dict[str, Any]:
        """The keywords with their values."""
        return {name: json.loads(value) for name, _, value in (text.partition("=") for text in self.keywords)}

    @property
    def changes_prompt(self) -> bool:
        """Whether prompts may be rendered differently than without these options."""
        return self.thinking is not None or bool(self.keywords) or bool(self.tools)


def _keywords(given: object) -> tuple[str, ...]:
    """Return ``KEY=JSON`` texts. Raises OptionError."""
    if isinstance(given, Mapping):
        named = [(name, _as_json(name, value)) for name, value in given.items()]
    else:
        named = [_keyword(item) for item in _items(given)]
    for name, _ in named:
        ok = isinstance(name, str) and KEYWORD.fullmatch(name) is not None
        _require(ok, f"{name!r:.60} is not a name that a template option can have", _KEYWORDS_HINT)
        _require(name not in GIVEN, f"the conversation itself sets {name}", "Leave it out.")
        twice = sum(each == name for each, _ in named) > 1
        _require(not twice, f"the template option {name} is given twice", "Give it once.")
    return tuple(f"{name}={value}" for name, value in named)


def _keyword(text: object) -> tuple[str, str]:
    name, mark, value = text.partition("=") if isinstance(text, str) else ("", "", "")
    _require(bool(mark), f"template option {text!r:.60} has no value", _KEYWORDS_HINT)
    try:
        return name.strip(), _as_json(name, json.loads(value))
    except ValueError:
        word = value.strip()
    _require(
        word not in ("True", "False", "None"),
        f"{word} is Python, not JSON",
        "Write true, false or null; in quotes it is text.",
    )
    _require(WORD.fullmatch(word) is not None, f"{value!r:.60} is not a JSON value", _KEYWORDS_HINT)
    return name.strip(), json.dumps(word)


def _as_json(name: object, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise OptionError(
            f"the template option {name!r:.40} is {value!r:.40}, which JSON can't hold",
            "Use numbers, texts, lists, dicts.",
        ) from None


NOTHING_TOLD = TemplateOptions()  # a chat template as it is, and no end to the thinking but the model's


def given_count(value: object, what: str, *, least: int) -> int:
    """Return an int ≥ ``least``. Raises OptionError."""
    try:
        count = index(value)
    except TypeError:
        raise OptionError(f"{what} is {value!r:.60}, which is not a whole number", "Give an int.") from None
    if count < least:
        raise OptionError(f"{what} is {count}, which is too small", f"Use {least} or more.")
    return count


def given_bits(value: object) -> KVBits:
    if not isinstance(value, Sequence) or len(value) != 2:
        raise OptionError(f"KV bits of {value!r:.60} are not two numbers", "Give those of keys and of values: (8, 4).")
    spec = KVSpec(key_bits=value[0], value_bits=value[1])
    return spec.key_bits, spec.value_bits


def given_limit(value: object) -> int:
    """Return a memory limit in bytes. Raises OptionError."""
    try:
        nbytes = index(value)
    except TypeError:
        raise OptionError(
            f"a memory limit of {value!r:.60} is not a whole number of bytes", "Give an int: 14_000_000_000."
        ) from None
    if nbytes < 1:
        raise OptionError(f"a memory limit of {nbytes} bytes is too small", "Give the bytes that arrays may take.")
    return nbytes


def given_sampling(sampling: object) -> Sampling:
    """Return the Sampling or its default. Raises OptionError."""
    if sampling is None:
        return Sampling()
    if not isinstance(sampling, Sampling):
        raise OptionError(f"sampling is a {type_name(sampling)}", "Use Sampling(temperature=0), for example.")
    return sampling


def given_template(template: object, tools: object = ()) -> TemplateOptions:
    """Return template options with ``tools``. Raises OptionError."""
    if template is None:
        template = NOTHING_TOLD
    if not isinstance(template, TemplateOptions):
        raise OptionError(f"template is a {type_name(template)}", 'Use TemplateOptions(thinking="off"), for example.')
    given = given_tools(tools)
    return replace(template, tools=given) if given else template


def given_tools(tools: object) -> tuple[ToolSpec, ...]:
    """Return ToolSpecs, also from OpenAI's dicts. Raises OptionError."""
    if isinstance(tools, str | bytes | dict | ToolSpec) or not isinstance(tools, Iterable):
        raise OptionError(f"tools is a {type_name(tools)}", "Give a list of ToolSpec(name, description, parameters).")
    return tuple(each if isinstance(each, ToolSpec) else _tool_of(each) for each in tools)


def _tool_of(given: object) -> ToolSpec:
    function = given.get("function", given) if isinstance(given, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise OptionError(f"{given!r:.80} defines no tool", "Use ToolSpec(name, description, parameters).")
    return ToolSpec(function["name"], function.get("description") or "", function.get("parameters") or EMPTY_SCHEMA)
