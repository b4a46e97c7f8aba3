"""What a caller may ask for: frozen, checked when made. No MLX here: the screen and the command line use these too."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tokamac.engine.errors import OptionError
from tokamac.engine.values import real, whole

OnFull = Literal["roll", "stop", "truncate-middle", "error"]
ON_FULL: tuple[OnFull, ...] = ("roll", "stop", "truncate-middle", "error")
KV_BITS = (16, 8, 6, 5, 4, 3, 2)
GROUP_SIZES = (32, 64, 128)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _require(ok: bool, message: str, hint: str) -> None:
    if not ok:
        raise OptionError(message, hint)


def _set(options: object, name: str, value: object) -> None:
    """Give a field of frozen options its plain value, while they are made."""
    object.__setattr__(options, name, value)


def _stops(given: object) -> tuple[str, ...]:
    """Return stop texts as a tuple. One text is one stop, not as many as it has letters. Raises OptionError."""
    if isinstance(given, str):
        given = (given,)
    _require(isinstance(given, Iterable), f"stop {given!r:.60} is no text", 'Use texts: stop=("END",).')
    texts = tuple(given) if isinstance(given, Iterable) else ()
    for text in texts:
        _require(isinstance(text, str), f"stop text {text!r:.60} is no text", 'Use texts: stop=("END",).')
    _require(all(texts), "an empty stop text would end every reply at once", "Leave it out.")
    return texts


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
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    if TYPE_CHECKING:  # what callers may write: stop texts in any list, or one alone

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
        ) -> None: ...

    def __post_init__(self) -> None:
        self._make_plain()
        temperature, top_p, top_k, min_p = self.temperature, self.top_p, self.top_k, self.min_p
        _require(
            temperature is None or 0 <= temperature <= 10, f"temperature {temperature} is out of range", "Use 0 to 10."
        )
        _require(top_p is None or 0 < top_p <= 1, f"top-p {top_p} is out of range", "Use above 0 and up to 1.")
        _require(top_k is None or top_k >= 0, f"top-k {top_k} is negative", "Use 0 (off) or more.")
        _require(min_p is None or 0 <= min_p < 1, f"min-p {min_p} is out of range", "Use 0 (off) to below 1.")
        _require(
            self.repetition_penalty is None or 0.5 <= self.repetition_penalty <= 3,
            f"repetition penalty {self.repetition_penalty} is out of range",
            "Use 0.5 to 3; 1 is off.",
        )
        _require(
            self.max_tokens is None or self.max_tokens >= 1,
            f"max tokens {self.max_tokens} is below 1",
            "Use 1 or more.",
        )
        _require(
            self.seed is None or 0 <= self.seed < 2**63,
            f"seed {self.seed} is out of range",
            "Use a non-negative integer.",
        )

    def _make_plain(self) -> None:
        """Turn numbers of other libraries into Python's. Raises OptionError for what is none."""
        _set(self, "stop", _stops(self.stop))
        reals = ("temperature", "top_p", "min_p", "repetition_penalty")
        for name, what in zip(reals, ("temperature", "top-p", "min-p", "repetition penalty"), strict=True):
            if (value := getattr(self, name)) is not None:
                _set(self, name, real(value, what))
        for name, what in (("top_k", "top-k"), ("seed", "seed"), ("max_tokens", "max tokens")):
            if (value := getattr(self, name)) is not None:
                _set(self, name, whole(value, what))

    def resolved(self, recommended: "Sampling") -> "Sampling":
        """Return this with what is None taken from ``recommended``, a model's own values, and then from the defaults."""
        return replace(
            self,
            temperature=_first(self.temperature, recommended.temperature, 0.7),
            top_p=_first(self.top_p, recommended.top_p, 1.0),
            top_k=int(_first(self.top_k, recommended.top_k, 0)),
            min_p=_first(self.min_p, recommended.min_p, 0.0),
            repetition_penalty=_first(self.repetition_penalty, recommended.repetition_penalty, 1.0),
        )


@dataclass(frozen=True, slots=True)
class KVSpec:
    """How keys and values are kept.

    key_bits, value_bits: 16 keeps the model's own type; fewer packs groups of ``group_size`` along the head dimension.
    group_size: the default gives way to 32, with a note, where 64 does not divide the head dimension; 128 is refused there.
    window: at most this many tokens are kept, the ``keep`` first ones for ever (they count inside the window);
    None keeps all. ``keep="system"`` pins the whole system prompt.

    The token at position p sees position q ≤ p where q < keep or q > p − (window − keep).

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
        self._make_plain()
        for name, bits in (("keys", self.key_bits), ("values", self.value_bits)):
            _require(bits in KV_BITS, f"{bits} bits for {name} is not supported", f"Use one of {KV_BITS}.")
        _require(
            self.group_size in GROUP_SIZES, f"KV group size {self.group_size} is not supported", f"Use {GROUP_SIZES}."
        )
        _require(
            self.on_full is None or self.on_full in ON_FULL,
            f"on-full {self.on_full!r} is not known",
            f"Use one of {', '.join(ON_FULL)}.",
        )
        if self.keep != "system":
            _require(self.keep >= 0, f"keep {self.keep} is negative", "Use 0 or more, or 'system'.")
        if self.window is not None:
            _require(self.window >= 2, f"a KV window of {self.window} tokens is too small", "Use 2 or more.")
            _require(
                self.keep == "system" or self.keep < self.window,
                f"keep {self.keep} leaves no room in a window of {self.window}",
                "Make the window larger than keep.",
            )

    def _make_plain(self) -> None:
        """Turn integers of other libraries into Python's. Raises OptionError for what is none."""
        for name, what in (("key_bits", "key bits"), ("value_bits", "value bits"), ("group_size", "KV group size")):
            _set(self, name, whole(getattr(self, name), what))
        if self.window is not None:
            _set(self, "window", whole(self.window, "KV window"))
        if isinstance(self.keep, str):
            _require(self.keep == "system", f"keep {self.keep!r:.60} is no number of tokens", "Or use 'system'.")
        else:
            _set(self, "keep", whole(self.keep, "keep"))

    @property
    def when_full(self) -> OnFull:
        """What happens when the context is full, the default worked out."""
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
    disk: whether prefixes of 256 tokens and more are kept on disk, for the next start. folder: where, a Path or its text; the
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
        for name in ("memory_bytes", "disk_bytes", "daily_write_bytes"):
            if (value := getattr(self, name)) is not None:
                _set(self, name, whole(value, name))
                _require(value >= 0, f"{name} {value} is negative", "Use 0 or more.")
        given: object = self.folder
        if isinstance(given, str | os.PathLike):
            _set(self, "folder", Path(given))
        elif given is not None:
            raise OptionError(f"folder {given!r:.60} is no path", "Use a Path, or leave it out.")
