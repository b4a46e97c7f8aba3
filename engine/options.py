"""What a caller may ask for: frozen, checked when made. No MLX here: the screen and the command line use these too.

Numbers of any library become plain ones.
"""

import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from .errors import OptionError

OnFull = Literal["roll", "stop", "truncate-middle", "error"]
ON_FULL: tuple[OnFull, ...] = get_args(OnFull)
Thinking = Literal["on", "off", "low", "medium", "high"]
THINKING: tuple[Thinking, ...] = get_args(Thinking)
KV_BITS = (16, 8, 6, 5, 4, 3, 2)
GROUP_SIZES = (32, 64, 128)

Stage = Literal["penalties", "dry", "top_k", "temperature", "top_p", "min_p", "xtc"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""What changes the logits before a token is drawn, in the default order."""
MOST_LOGPROBS = 100
"""Alternatives reported with each token, at most."""
PARALLEL = 8
"""Replies at once by default: more share the time for reading the weights, and each takes memory for its keys and values."""

KEYWORD = re.compile(r"[A-Za-z]\w*", re.ASCII)
"""A name that a template may read. Names with a leading underscore are Jinja's and Python's own."""
WORD = re.compile(r"[A-Za-z_/][\w./-]*")
"""A text that needs no quotes as the value of a keyword."""
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
EMPTY_SCHEMA = '{"type": "object", "properties": {}}'
_SCHEMA_HINT = 'Use {"type": "object", "properties": {…}}.'
GIVEN = frozenset({"messages", "add_generation_prompt", "continue_final_message"})
"""Keywords that the conversation itself sets."""
_KEYWORDS_HINT = 'Use KEY=VALUE with a JSON value, such as enable_thinking=false or style="brief".'


def whole(value: Any, what: str) -> int:
    """Return an integer of any library as an int. Raises OptionError for anything else; a bool counts as none."""
    try:
        return index(value)
    except TypeError:
        raise OptionError(f"{what} {value!r:.60} is not an integer", "Use a whole number.") from None


def index(value: Any) -> int:
    """Return an integer of any library as an int; raise TypeError for anything else, bools included."""
    if isinstance(value, bool):
        raise TypeError("a bool is not a number here")
    return operator.index(value)


def real(value: Any, what: str) -> float:
    """Return a real number of any library as an int or a float. Raises OptionError for anything else; a bool counts as none."""
    if type(value) in {int, float}:
        return value  # type: ignore[no-any-return]
    if isinstance(value, bool) or not isinstance(value, Real):
        raise OptionError(f"{what} {value!r:.60} is not a number", "Use a number.")
    return float(value)


def _require(ok: bool, message: str, hint: str) -> None:
    if not ok:
        raise OptionError(message, hint)


def _set(options: object, name: str, value: object) -> None:
    """Set a field of frozen options while they are made."""
    object.__setattr__(options, name, value)


def _set_numbers(
    options: object, fields: Iterable[tuple[str, str, Callable[[Any, str], float], float, float, str]]
) -> None:
    """Make fields plain numbers and check their ranges; None passes. Raises OptionError."""
    for name, what, convert, least, most, hint in fields:
        if (value := getattr(options, name)) is not None:
            value = convert(value, what)
            _set(options, name, value)
            _require(least <= value <= most, f"{what} {value} is out of range", hint)


def _items(given: object) -> tuple[Any, ...]:
    """Return several things as a tuple, and one thing, a text among them, as a tuple of it."""
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


def _biases(given: object) -> tuple[tuple[int, float], ...]:
    """Return a logit bias as pairs of a token id and what is added to its logit, by id."""
    hint = "Use {token_id: bias}, with a bias from -100 to 100."
    pairs = []
    for each in _items(given.items() if isinstance(given, Mapping) else given):
        pair = _items(each)
        _require(len(pair) == 2, f"logit bias {each!r:.60} is not a token id with a bias", hint)
        token, bias = whole(pair[0], "token id"), float(real(pair[1], "logit bias"))
        _require(token >= 0, f"token id {token} of a logit bias is negative", hint)
        _require(-100 <= bias <= 100, f"logit bias {bias:g} of token {token} is out of range", hint)
        pairs.append((token, bias))
    _require(len({token for token, _ in pairs}) == len(pairs), "a token has two logit biases", hint)
    return tuple(sorted(pairs))


def _schema(given: object) -> str | None:
    """Return a JSON Schema as JSON text."""
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


SEEDS = 2**63
"""Seeds are numbers below this."""

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
    ("logprobs", "number of log-probabilities", whole, 0, MOST_LOGPROBS, f"Use 0 to {MOST_LOGPROBS}."),
)
"""Number fields of Sampling: name, what it is called, type, least and greatest value, and what to do about another."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    temperature: 0 takes the likeliest token (greedy); above 0, logits are divided by it.
    top_p, top_k, min_p: cut the unlikely tail; 1.0, 0 and 0.0 turn them off.
    repetition_penalty: 1.0 is off; above 1, tokens of the last 64 become less likely.
    None for these takes what the model's generation_config.json recommends, else 0.7, 1.0, 0, 0.0 and 1.0.
    seed: the same seed on the same device gives the same text; None draws a fresh one.
    max_tokens: generated tokens at most; None fills the context.
    stop: texts that end the reply; they are never shown.
    stop_token_ids: tokens that end the reply, beside the model's own; they are not shown either.
    min_tokens: this many are generated before anything ends the reply but the user and the context: until then the tokens that
    end it can't be drawn, and stop texts are text.
    logit_bias: what is added to the logits of single tokens before all else, {token_id: bias}, -100 to 100; kept as pairs.
    presence_penalty, frequency_penalty: taken from the logit of every token that was generated for this reply already, once, and
    once for each time it was (as in OpenAI's interface); 0.0 is off.
    xtc_probability, xtc_threshold: how often the likeliest tokens are excluded, all but the least likely of those at or above the
    threshold; 0.0 is off.
    dry_multiplier, dry_base, dry_allowed_length, dry_sequence_breakers: a token that would continue a repeated sequence of n
    tokens, n ≥ allowed length, loses multiplier × base^(n − allowed length); no sequence reaches across a breaker, nor across a
    mark of the chat template. 0.0 is off.
    order: the stages in the order they apply, each once. Those that are off do nothing. "penalties" are the first three above.
    logprobs: with each token its log-probability and those of this many likeliest ones (0: its own alone), by the model itself,
    before all of the above; None is none.
    json_schema: the JSON Schema that the answer follows, an object, as JSON text; a dict may be given, too. Tokens that would leave
    it can't be drawn. What is thought before the answer is free. Needs ``llguidance`` (the extra ``schema``). None: any text.
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
        """Whether XTC judges the probabilities before they are divided by the temperature."""
        return self.order.index("xtc") < self.order.index("temperature")

    def resolved(self, recommended: "Sampling") -> "Sampling":
        """Return this with what is None taken from ``recommended``, a model's own values, and then from the defaults."""
        defaults = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        changes: dict[str, Any] = {}
        for name, default in defaults.items():
            if getattr(self, name) is None:
                suggested = getattr(recommended, name)
                changes[name] = default if suggested is None else suggested
        return replace(self, **changes)


def sample_of(sampling: Sampling, number: int) -> Sampling:
    """Return how one of several replies to a prompt is drawn: with seed + ``number``, from 0 on after the largest one."""
    seed = sampling.seed
    return sampling if seed is None else replace(sampling, seed=(seed + number) % SEEDS)


KVBits = tuple[int, int]
"""Of keys and of values."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """How keys and values are stored.

    key_bits, value_bits: 16 keeps the model's own type; fewer packs groups of ``group_size`` along the head dimension.
    group_size: the default gives way to 32, with a note, where 64 does not divide the head dimension; 128 is refused there.
    window: at most this many tokens are kept, the ``keep`` first ones for ever (they count inside the window);
    None keeps all. ``keep="system"`` pins the whole system prompt, and 4 tokens where there is none.

    The token at position p sees position q ≤ p where q < keep or q > p − (window − keep). While a window rolls, the ``keep`` first
    are numbered along with it, so that none is further back than the window is long; the plan's notes name models without.

    on_full: what happens when the context is full; it holds ``window`` tokens, or as many as the model was made for.
        roll: the oldest tokens go out of sight, but for the ``keep`` first. stop: the reply ends there ("length"); a prompt that
        does not fit is refused. truncate-middle: as stop, but the middle of a prompt that does not fit is left out.
        error: as stop, and a reply that was cut off by it fails after its text. None: roll with a window, else stop.
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
        return self.on_full or ("stop" if self.window is None else "roll")

    @property
    def rolls(self) -> bool:
        """Whether the oldest tokens make room for new ones."""
        return self.when_full == "roll"

    def capacity(self, context_length: int | None) -> int | None:
        """Return how many tokens are held at once with a model made for ``context_length``; None is unbounded.

        A window that rolls may be longer than that; nothing else may.
        """
        if self.window is None or self.rolls or context_length is None:
            return context_length if self.window is None else self.window
        return min(self.window, context_length)

    @property
    def quantized(self) -> bool:
        """Whether keys or values are packed."""
        return min(self.key_bits, self.value_bits) < 16


@dataclass(frozen=True, slots=True)
class PromptCacheSpec:
    """Reuse of computed prefixes, by default also **on disk**, in the user's cache folder. Sizes in bytes; None takes a default.

    memory_bytes: the live conversation and all others that are kept; a tenth of the memory budget.
    disk: whether prefixes of 256 tokens and more are stored on disk, for the next start. folder: where, a Path or its text; the
    user's cache folder.
    disk_bytes, daily_write_bytes: all of them at most, for all models, and what may be written in a day.
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
    """What guesses tokens ahead of the model, which then verifies several in one pass; the text stays the same.

    lookup: the conversation, where it repeats itself. branches: other versions of it: replies made again, prompts that were
    edited. draft: a smaller model with the same tokenizer: a folder, a Hugging Face id, or "guide"; it is loaded beside. heads: the
    checkpoint's own heads for several tokens, where they are supported; without any, it changes nothing.
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
    """What is loaded, and how, as ``Engine.load`` was told; checked by it.

    model, adapter: a folder or a Hugging Face id. memory: bytes that arrays may take; None is the system's limit. parallel: replies
    at once at most. cpu_exact: a CPU's kernels never round rows.
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


Backend = Literal["ring", "jaccl"]
NODE_BACKENDS: tuple[Backend, ...] = get_args(Backend)
Split = Literal["tensor", "pipeline"]
SPLITS: tuple[Split, ...] = get_args(Split)
MOST_NODES = 64


@dataclass(frozen=True, slots=True)
class Nodes:
    """The processes that hold one model together, on this machine or on several.

    count: processes on this machine; hostfile: the machines, as ``mlx.distributed_config`` writes them, this one first: one of the
    two. backend: how they speak; None is what the hostfile says, else ring. split: "tensor" gives each a part of every layer,
    "pipeline" some of the layers.
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

    parameters: the JSON Schema of its arguments, an object, as JSON text; a dict may be given, too. Raises OptionError for a name
    that no model's format can hold, and for what is no schema of an object.
    """

    name: str
    description: str = ""
    parameters: str = EMPTY_SCHEMA

    if TYPE_CHECKING:  # what callers may write: parameters as a dict, too

        def __init__(
            self, name: str, description: str = "", parameters: str | Mapping[str, object] = EMPTY_SCHEMA
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
        """The definition as chat templates and OpenAI's API write it."""
        function = {"name": self.name, "description": self.description, "parameters": json.loads(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """Options of a model's chat template beside the messages, and how long the model may think.

    thinking: whether the model thinks before it answers, or how much; None leaves that to the template. How a template takes it is
    found from the template; a mode that it does not know is an OptionError.
    thinking_budget: tokens after which thinking is ended, by the model's own mark; the answer follows. None: no limit.
    keywords: anything else that the template reads, as ``KEY=VALUE`` texts with a JSON value, or as a dict.
    tools: functions that the model may call. must_call: names of those of which it has to call one at least, and writes nothing
    else but its thinking; () leaves it to the model. Needs ``llguidance`` (the extra ``schema``).
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
    """Return keywords as ``KEY=JSON`` texts. Raises OptionError."""
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


NOTHING_TOLD = TemplateOptions()
"""A chat template as it is, and no end to the thinking but the model's."""
