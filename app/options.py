"""Flags that several commands share, and what they come to: Sampling, KVSpec, PromptCacheSpec.

A bad value is wrong usage (exit 2) and names its flag. A flag that would have no effect is refused, not dropped.
"""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from tokamac.app.output import note
from tokamac.app.settings import MOST_MEMORY_GB
from tokamac.engine.errors import OptionError
from tokamac.engine.options import GROUP_SIZES, KV_BITS, ON_FULL, STAGES, KVSpec, PromptCacheSpec, Sampling

# flag → field of Sampling
SAMPLING_FLAGS = {
    "--max-tokens": "max_tokens",
    "--temp": "temperature",
    "--top-p": "top_p",
    "--top-k": "top_k",
    "--min-p": "min_p",
    "--repetition-penalty": "repetition_penalty",
    "--seed": "seed",
    "--stop": "stop",
    "--stop-token-id": "stop_token_ids",
    "--min-tokens": "min_tokens",
    "--logit-bias": "logit_bias",
    "--presence-penalty": "presence_penalty",
    "--frequency-penalty": "frequency_penalty",
    "--sampler-order": "order",
    "--xtc-probability": "xtc_probability",
    "--xtc-threshold": "xtc_threshold",
    "--dry-multiplier": "dry_multiplier",
    "--dry-base": "dry_base",
    "--dry-allowed-length": "dry_allowed_length",
    "--dry-sequence-breaker": "dry_sequence_breakers",
}
LISTED = ("stop", "stop_token_ids", "logit_bias", "dry_sequence_breakers")
"""Fields whose flag may be repeated."""
IDLE_WITHOUT = {
    "--xtc-threshold": "--xtc-probability",
    "--dry-base": "--dry-multiplier",
    "--dry-allowed-length": "--dry-multiplier",
    "--dry-sequence-breaker": "--dry-multiplier",
}
"""Flags that only say how something is done, and the one that turns it on."""


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``-m MODEL``."""
    parser.add_argument(
        "-m",
        "--model",
        metavar="MODEL",
        help="a folder, a Hugging Face id, or guide (the one picked last, at first guide)",
    )


def add_memory_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--memory``."""
    parser.add_argument(
        "--memory",
        type=gigabytes,
        metavar="GB",
        help="what the model may take, in place of the system's limit, also beyond it (memory_gb of the settings)",
    )


def gigabytes(text: str) -> float:
    """Return a size of memory above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < MOST_MEMORY_GB:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in GB above 0")
    return value


def memory_limit(options: argparse.Namespace) -> int | None:
    """Return the bytes that MLX's arrays may take: by the flag, else by the settings; None is the system's limit."""
    return limit_of_settings() if options.memory is None else round(options.memory * 1e9)


def limit_of_settings() -> int | None:
    """Return the bytes that MLX's arrays may take by the settings; None is the system's limit."""
    from tokamac.app import settings

    return settings.load(settings.default_path()).settings.memory_bytes


def add_unchecked_flag(
    parser: argparse.ArgumentParser,
    does: str = "load a model although something in its config would be computed otherwise; every reply says what",
) -> None:
    """Add ``--unchecked``."""
    parser.add_argument(
        "--unchecked",
        action="store_true",
        help=does,
    )


NO_ADAPTER = "none"
"""Takes the adapter away that the settings have for a model."""


def add_adapter_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--adapter``."""
    parser.add_argument(
        "--adapter",
        metavar="DIR|ID",
        help="a LoRA or DoRA adapter, of mlx-lm or PEFT: a folder or a Hugging Face id (what the settings have for the model); "
        f"{NO_ADAPTER} is without",
    )


def adapter_of(options: argparse.Namespace, model: str) -> str | None:
    """Return what is to be added to ``model``: by the flag, else by the settings; None is nothing."""
    if options.adapter is not None:
        return given_adapter(options.adapter) or None
    from tokamac.app import settings

    return settings.load(settings.default_path()).settings.adapters.get(model)


def given_adapter(written: str) -> str:
    """Return the adapter that somebody wrote, a folder in full, so that it is found from anywhere; "" is none."""
    name = written.strip()
    if not name or name.lower() == NO_ADAPTER:
        return ""
    from pathlib import Path

    folder = Path(name).expanduser()
    return str(folder.absolute()) if folder.is_dir() else name


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how tokens are chosen."""
    group = parser.add_argument_group("generation")
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="tokens to generate at most (in bench 128, else as many as the context holds)",
    )
    group.add_argument(
        "--temp",
        type=float,
        metavar="T",
        dest="temperature",
        help="temperature; 0 takes the likeliest (the model's own)",
    )
    group.add_argument(
        "--top-p", type=float, metavar="P", help="keep the likeliest tokens that make up this share (the model's own)"
    )
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens; 0 is off (the model's own)")
    group.add_argument(
        "--min-p", type=float, metavar="P", help="drop tokens below this share of the likeliest one (the model's own)"
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="R",
        help="above 1, recent tokens become less likely; 1 is off (the model's own)",
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="same seed, same text on the same device (another each time)"
    )
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    group.add_argument(
        "--stop-token-id",
        action="append",
        type=int,
        dest="stop_token_ids",
        metavar="ID",
        help="end at this token, as at the model's own end; may be repeated",
    )
    group.add_argument("--min-tokens", type=int, metavar="N", help="do not end before N tokens (0)")
    _add_bias_flags(group)
    _add_repetition_flags(group)
    group.add_argument(
        "--sampler-order",
        type=names,
        dest="order",
        metavar="STAGE,STAGE…",
        help=f"the stages in the order they apply, each once ({','.join(STAGES)})",
    )


def _add_bias_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--logit-bias",
        action="append",
        type=token_bias,
        metavar="ID=BIAS",
        help="add BIAS, -100 to 100, to the logit of this token, before all else; may be repeated",
    )
    group.add_argument(
        "--presence-penalty",
        type=float,
        metavar="P",
        help="taken from the logits of tokens that the reply holds already, -2 to 2 (0)",
    )
    group.add_argument(
        "--frequency-penalty", type=float, metavar="P", help="the same, once for each time they occur, -2 to 2 (0)"
    )


def _add_repetition_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--xtc-probability",
        type=float,
        metavar="P",
        help="how often the likeliest tokens are excluded, all but the least likely of those at or above the threshold (0)",
    )
    group.add_argument(
        "--xtc-threshold", type=float, metavar="P", help="the probability that counts as likely there (0.1)"
    )
    group.add_argument(
        "--dry-multiplier",
        type=float,
        metavar="M",
        help="penalty on tokens that continue a repeated sequence; 0 is off, 0.8 usual (0)",
    )
    group.add_argument("--dry-base", type=float, metavar="B", help="by what it grows with each repeated token (1.75)")
    group.add_argument(
        "--dry-allowed-length", type=int, metavar="N", help="repeated tokens before the penalty begins (2)"
    )
    group.add_argument(
        "--dry-sequence-breaker",
        action="append",
        dest="dry_sequence_breakers",
        metavar="TEXT",
        help='no sequence reaches across TEXT; may be repeated, and replaces the usual ones: newline : " *',
    )


def add_kv_flags(parser: argparse.ArgumentParser, *, cache: bool = True, full: bool = True) -> None:
    """Add the flags that say how keys and values are kept; ``cache`` and ``full`` leave out those a command has not."""
    group = parser.add_argument_group("keys and values")
    bits = "|".join(map(str, KV_BITS))
    group.add_argument("--kv-bits", type=kv_bits, metavar="BITS", help=f"{bits}, or K,V such as 8,4; 16 is unpacked")
    group.add_argument(
        "--kv-window",
        type=int,
        metavar="N",
        help="hold N tokens at most: the first ones (--kv-keep) and the newest (rotating)",
    )
    group.add_argument("--kv-group-size", type=int, choices=GROUP_SIZES, help="values that share a scale (64)")
    group.add_argument("--kv-keep", type=kv_keep, metavar="N|system", help="first tokens a window never drops (4)")
    if full:
        group.add_argument(
            "--on-full",
            choices=ON_FULL,
            help="when the context is full: the oldest roll out, the reply stops (unless there is a window, the default), "
            "a prompt's middle is left out, or the cut reply is an error",
        )
    if cache:
        group.add_argument("--no-prompt-cache", action="store_true", help="compute every prompt afresh")


def kv_bits(text: str) -> tuple[int, int]:
    """Return (bits of keys, bits of values) from ``8`` or ``8,4``."""
    parts = text.split(",")
    try:
        bits = tuple(int(part) for part in parts)
    except ValueError:
        bits = ()
    if not bits or len(bits) > 2 or any(value not in KV_BITS for value in bits):
        allowed = ", ".join(map(str, KV_BITS))
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {allowed}, nor two of them as K,V (for example 8,4)")
    return bits[0], bits[-1]


def kv_keep(text: str) -> int | Literal["system"]:
    """Return a number of tokens, or "system"."""
    if text == "system":
        return "system"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens nor 'system'")
    return int(text)


def token_bias(text: str) -> tuple[int, float]:
    """Return (token id, bias) from ``15=-100``."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a token id with a bias (for example 15=-100)") from None


def names(text: str) -> tuple[str, ...]:
    """Return names from ``a,b``."""
    return tuple(part.strip() for part in text.split(","))


def positive(text: str) -> int:
    """Return a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def sampling(parser: argparse.ArgumentParser, options: argparse.Namespace, base: Sampling | None = None) -> Sampling:
    """Return ``base`` with the flags that were given; end with exit status 2 at a bad one."""
    result = base or Sampling()
    for flag, name in SAMPLING_FLAGS.items():
        value = getattr(options, name)
        if value is not None:
            given = {name: tuple(value) if name in LISTED else value}
            result = _changed(parser, flag, result, given)
    for flag, switch in IDLE_WITHOUT.items():
        if getattr(options, SAMPLING_FLAGS[flag]) is not None and not getattr(result, SAMPLING_FLAGS[switch]):
            parser.error(f"{flag} has no effect without {switch} above 0")
    return result


def add_logprobs_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--logprobs``."""
    parser.add_argument(
        "--logprobs",
        nargs="?",
        const=0,
        type=alternatives,
        metavar="N",
        help="with --json: each text event has its tokens, with their log-probabilities by the model itself and those of the "
        "N likeliest in their place (0)",
    )


def alternatives(text: str) -> int:
    """Return a number of alternatives."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; PROMPT stands before --logprobs") from None


def with_logprobs(parser: argparse.ArgumentParser, options: argparse.Namespace, base: Sampling) -> Sampling:
    """Return ``base`` with ``--logprobs``, if it was given; end with exit status 2 at a bad or idle one."""
    if options.logprobs is None:
        return base
    if not options.json:
        parser.error("--logprobs has no effect without --json")
    changed: Sampling = _changed(parser, "--logprobs", base, {"logprobs": options.logprobs})
    return changed


def kv_spec(parser: argparse.ArgumentParser, options: argparse.Namespace, base: KVSpec | None = None) -> KVSpec:
    """Return ``base`` with the flags that were given; end with exit status 2 at a bad or idle one."""
    result = base or KVSpec()
    given: Mapping[str, Any] = vars(options)
    if (bits := given.get("kv_bits")) is not None:
        result = _changed(parser, "--kv-bits", result, {"key_bits": bits[0], "value_bits": bits[1]})
    if (group_size := given.get("kv_group_size")) is not None:
        result = _changed(parser, "--kv-group-size", result, {"group_size": group_size})
        if not result.quantized:
            parser.error("--kv-group-size has no effect without --kv-bits below 16")
    if (on_full := given.get("on_full")) is not None:
        result = _changed(parser, "--on-full", result, {"on_full": on_full})
    window, keep = given.get("kv_window"), given.get("kv_keep")
    if keep is not None and window is None and result.window is None and result.when_full != "roll":
        parser.error("--kv-keep has no effect without --kv-window or --on-full roll")
    if window is not None or keep is not None:
        flag = "--kv-window" if keep is None else "--kv-keep" if window is None else "--kv-window, --kv-keep"
        change = {"window": window, "keep": keep}
        result = _changed(parser, flag, result, {name: value for name, value in change.items() if value is not None})
    return result


def prompt_cache(options: argparse.Namespace) -> PromptCacheSpec | None:
    """Return how computed prompts are reused; None is not at all."""
    return None if options.no_prompt_cache else PromptCacheSpec()


def any_given(options: argparse.Namespace, names: tuple[str, ...]) -> bool:
    """Whether any of these flags was given."""
    return any(getattr(options, name, None) is not None for name in names)


def default_model() -> str:
    """Return the model that the user picked last, else the embedded one; say on stderr what of the settings can't be used."""
    from tokamac.app import settings

    read = settings.load(settings.default_path())
    warn(read.warnings)
    return read.settings.model


def warn(warnings: Iterable[str]) -> None:
    """Say each on a line of stderr."""
    for warning in warnings:
        note(f"warning: {warning}")


def _changed(parser: argparse.ArgumentParser, flag: str, base: Any, given: Mapping[str, Any]) -> Any:
    try:
        return replace(base, **given)
    except OptionError as error:
        parser.error(f"{flag}: {error.one_line().rstrip('.')}")
