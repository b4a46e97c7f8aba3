"""Flags that several commands share, and what they come to: Sampling, TemplateOptions, KVSpec, PromptCacheSpec.

A bad value is wrong usage (exit 2) and names its flag. A flag that would have no effect is refused, not dropped.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

from tokamac.engine.errors import OptionError
from tokamac.engine.files import expanded, is_dir
from tokamac.engine.hub.names import EMBEDDED, nearest
from tokamac.engine.options import (
    GROUP_SIZES,
    KV_BITS,
    MOST_NODES,
    NODE_BACKENDS,
    ON_FULL,
    PARALLEL,
    SPLITS,
    STAGES,
    THINKING,
    KVBits,
    KVSpec,
    Nodes,
    PromptCacheSpec,
    Sampling,
    Speculation,
    TemplateOptions,
)

from . import settings
from .output import note
from .profiles import Profile

T = TypeVar("T")

AUTO = "auto"
SPECULATION = (AUTO, "off")


class Flag(NamedTuple):
    """A flag that sets an option of the engine's. repeated: it may be given several times, and its values become one."""

    field: str
    kind: Callable[[str], Any]
    metavar: str
    help: str
    repeated: bool = False


def kv_bits(text: str) -> KVBits:
    """Return (bits of keys, bits of values) from ``8`` or ``8,4``."""
    try:
        bits = tuple(int(part) for part in text.split(","))
    except ValueError:
        bits = ()
    if not 1 <= len(bits) <= 2 or any(value not in KV_BITS for value in bits):
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


def gigabytes(text: str) -> float:
    """Return a size of memory above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < settings.MOST_MEMORY_GB:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in GB above 0")
    return value


def alternatives(text: str) -> int:
    """Return a number of alternatives."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; PROMPT stands before --logprobs") from None


_SAMPLING = {
    "--max-tokens": Flag(
        "max_tokens", int, "N", "tokens to generate at most (in bench 128, else as many as the context holds)"
    ),
    "--temp": Flag("temperature", float, "T", "temperature; 0 takes the likeliest (the model's own)"),
    "--top-p": Flag("top_p", float, "P", "keep the likeliest tokens that make up this share (the model's own)"),
    "--top-k": Flag("top_k", int, "K", "keep the K likeliest tokens; 0 is off (the model's own)"),
    "--min-p": Flag("min_p", float, "P", "drop tokens below this share of the likeliest one (the model's own)"),
    "--repetition-penalty": Flag(
        "repetition_penalty", float, "R", "above 1, recent tokens become less likely; 1 is off (the model's own)"
    ),
    "--seed": Flag("seed", int, "N", "same seed, same text on the same device (another each time)"),
    "--stop": Flag("stop", str, "TEXT", "end before this text; may be repeated", True),
    "--stop-token-id": Flag(
        "stop_token_ids", int, "ID", "end at this token, as at the model's own end; may be repeated", True
    ),
    "--min-tokens": Flag("min_tokens", int, "N", "do not end before N tokens (0)"),
    "--logit-bias": Flag(
        "logit_bias", token_bias, "ID=BIAS",
        "add BIAS, -100 to 100, to the logit of this token, before all else; may be repeated", True,
    ),
    "--presence-penalty": Flag(
        "presence_penalty", float, "P", "taken from the logits of tokens that the reply holds already, -2 to 2 (0)"
    ),
    "--frequency-penalty": Flag(
        "frequency_penalty", float, "P", "the same, once for each time they occur, -2 to 2 (0)"
    ),
    "--xtc-probability": Flag(
        "xtc_probability", float, "P",
        "how often the likeliest tokens are excluded, all but the least likely of those at or above the threshold (0)",
    ),
    "--xtc-threshold": Flag("xtc_threshold", float, "P", "the probability that counts as likely there (0.1)"),
    "--dry-multiplier": Flag(
        "dry_multiplier", float, "M", "penalty on tokens that continue a repeated sequence; 0 is off, 0.8 usual (0)"
    ),
    "--dry-base": Flag("dry_base", float, "B", "by what it grows with each repeated token (1.75)"),
    "--dry-allowed-length": Flag("dry_allowed_length", int, "N", "repeated tokens before the penalty begins (2)"),
    "--dry-sequence-breaker": Flag(
        "dry_sequence_breakers", str, "TEXT",
        'no sequence reaches across TEXT; may be repeated, and replaces the usual ones: newline : " *', True,
    ),
    "--sampler-order": Flag(
        "order", names, "STAGE,STAGE…", f"the stages in the order they apply, each once ({','.join(STAGES)})"
    ),
}  # fmt: skip
SAMPLING_FLAGS = {flag: each.field for flag, each in _SAMPLING.items()}
"""Flags, and the field of Sampling that each sets."""
IDLE_WITHOUT = {
    "--xtc-threshold": "--xtc-probability",
    "--dry-base": "--dry-multiplier",
    "--dry-allowed-length": "--dry-multiplier",
    "--dry-sequence-breaker": "--dry-multiplier",
}
"""Flags that only say how something is done, and the one that turns it on."""
TEMPLATE_FLAGS = {
    "--thinking": "thinking",
    "--thinking-budget": "thinking_budget",
    "--template-option": "template_option",
}


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``-m MODEL``."""
    named = "a folder, a Hugging Face id, or guide (the one picked last, at first guide)"
    parser.add_argument("-m", "--model", metavar="MODEL", help=named)


def add_memory_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--memory``."""
    limit = "what the model may take, in place of the system's limit, also beyond it (memory_gb of the settings)"
    parser.add_argument("--memory", type=gigabytes, metavar="GB", help=limit)


def add_parallel_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--parallel``."""
    parser.add_argument(
        "--parallel",
        type=replies_at_once,
        metavar="N",
        help=f"replies that are made at once, at most (parallel of the settings, at first {PARALLEL})",
    )


def add_speculation_flags(
    parser: argparse.ArgumentParser, default: str = "speculation of the settings, at first auto"
) -> None:
    """Add ``--speculation`` and ``--draft``. default: what holds without the first, in words."""
    what = f"guess tokens from text that is there, and verify several at once: the reply is the same ({default})"
    parser.add_argument("--speculation", choices=SPECULATION, help=what)
    parser.add_argument(
        "--draft",
        metavar="MODEL",
        help="a smaller model with the same tokenizer that guesses, too, where it gains time (what the settings have for the "
        f"model); {NO_DRAFT} is without",
    )


def add_nodes_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which processes hold the model together."""
    group = parser.add_argument_group("one model on several machines (tokamac help nodes)")
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--nodes", type=nodes_count, metavar="N", help="N processes of this machine hold the model together"
    )
    which.add_argument(
        "--hostfile",
        metavar="FILE",
        help="the machines that hold it, as mlx.distributed_config writes them, this one first",
    )
    group.add_argument("--backend", choices=NODE_BACKENDS, help="how they speak (what the hostfile says, else ring)")
    group.add_argument(
        "--split", choices=SPLITS, help="give each a part of every layer (tensor, the default), or some of the layers"
    )


def nodes_count(text: str) -> int:
    """Return a number of processes that hold a model together."""
    if not text.isdecimal() or len(text) > 2 or not 2 <= int(text) <= MOST_NODES:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a number of nodes, 2 to {MOST_NODES}")
    return int(text)


def nodes_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Nodes | None:
    """Return which processes hold the model together; None is this one alone. Ends with a usage error at an idle flag."""
    if options.nodes is None and options.hostfile is None:
        for flag, given in (("--backend", options.backend), ("--split", options.split)):
            if given is not None:
                parser.error(f"{flag} has no effect without --nodes or --hostfile")
        return None
    hostfile = None if options.hostfile is None else str(expanded(options.hostfile).absolute())
    if options.adapter is not None and given_adapter(options.adapter):
        parser.error("--adapter: an adapter can't be added to a model that several nodes hold")
    try:
        return Nodes(options.nodes, hostfile, options.backend, options.split or "tensor")
    except OptionError as error:
        parser.error(error.one_line().rstrip("."))


def check_speculation_flags(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with a usage error where a draft model is to guess while nothing is."""
    if options.speculation == "off" and given_draft(options.draft or ""):
        parser.error("--draft has no effect with --speculation off")


def speculation_of(options: argparse.Namespace, model: str, default: bool | None = None) -> Speculation | None:
    """Return what guesses tokens for ``model``: by the flags, else by ``default`` or the settings; None is nothing."""
    known = known_settings()
    draft = given_draft(options.draft) if options.draft is not None else known.drafts.get(model)
    on = known.speculation if default is None else default
    if options.speculation is not None or (options.draft is not None and draft):
        on = options.speculation != "off"
    return Speculation(draft=draft or None) if on else None


def given_draft(written: str) -> str:
    """Return the draft model that somebody wrote, a folder in full; "" is none."""
    return named if (named := written.strip()) in EMBEDDED else given_adapter(written)


def replies_at_once(text: str) -> int:
    """Return a number of replies."""
    most = settings.MOST_PARALLEL
    if not text.isdecimal() or len(text) > len(str(most)) or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a number of replies at once, 1 to {most}")
    return int(text)


def widths(text: str) -> tuple[int, ...]:
    """Return numbers of replies at once, each once."""
    return tuple(dict.fromkeys(replies_at_once(part.strip()) for part in text.split(",")))


def shares(text: str) -> tuple[float, ...]:
    """Return shares of guesses that come true, from 0 to 1 or in %, each once."""
    return tuple(dict.fromkeys(_share(part.strip()) for part in text.split(",")))


def _share(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1, such as 0.7 or 70%")
    return value


def parallel_of(options: argparse.Namespace) -> int:
    """Return how many replies are made at once at most: by the flag, else by the settings."""
    if options.parallel is not None:
        return int(options.parallel)
    return known_settings().parallel


def memory_limit(options: argparse.Namespace) -> int | None:
    """Return the bytes that MLX's arrays may take: by the flag, else by the settings; None is the system's limit."""
    return limit_of_settings() if options.memory is None else round(options.memory * 1e9)


def limit_of_settings() -> int | None:
    """Return the bytes that MLX's arrays may take by the settings; None is the system's limit."""
    return known_settings().memory_bytes


def add_cpu_exact_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--cpu-exact``."""
    does = "on a CPU, never round what packed weights are multiplied with to 8 bits (cpu_exact of the settings, at first off)"
    parser.add_argument("--cpu-exact", action="store_true", help=does)


def is_cpu_exact(options: argparse.Namespace | None = None) -> bool:
    """Return whether a CPU may round nothing, by the flag or the settings."""
    return getattr(options, "cpu_exact", False) or known_settings().cpu_exact


def add_unchecked_flag(
    parser: argparse.ArgumentParser,
    does: str = "load a model although something in its config would be computed otherwise; every reply says what",
) -> None:
    """Add ``--unchecked``."""
    parser.add_argument("--unchecked", action="store_true", help=does)


NO_ADAPTER = NO_DRAFT = "none"
"""Takes the adapter, or the draft model, away that the settings have for a model."""


def add_adapter_flag(parser: argparse.ArgumentParser, *, of_settings: bool = True) -> None:
    """Add ``--adapter``. of_settings: without it, what the settings have for the model is taken."""
    default = f"(what the settings have for the model); {NO_ADAPTER} is without" if of_settings else "(none)"
    parser.add_argument(
        "--adapter",
        metavar="DIR|ID",
        help=f"a LoRA or DoRA adapter, of mlx-lm or PEFT: a folder or a Hugging Face id {default}",
    )


def adapter_of(options: argparse.Namespace, model: str) -> str | None:
    """Return what is to be added to ``model``: by the flag, else by the settings; None is nothing."""
    if options.adapter is not None:
        return given_adapter(options.adapter) or None
    return known_settings().adapters.get(model)


def given_adapter(written: str) -> str:
    """Return the adapter that somebody wrote, a folder in full, so that it is found from anywhere; "" is none."""
    name = written.strip()
    if not name or name.lower() == NO_ADAPTER:
        return ""
    folder = expanded(name)
    return str(folder.absolute()) if is_dir(folder) else name


def add_profile_flag(parser: argparse.ArgumentParser, without: str) -> None:
    """Add ``--profile``; without: what it is where the flag is left out."""
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help=f"a model, settings and a system prompt, as /profile save keeps them; flags beside it win ({without})",
    )


def given_profile(parser: argparse.ArgumentParser, name: str, known: Mapping[str, Profile]) -> Profile:
    """Return the profile of this name; end with exit status 2 where there is none."""
    if name not in known:
        near = nearest(name, known)
        meant = f"did you mean {near}?" if near else f"there are: {', '.join(known)}" if known else NO_PROFILES
        parser.error(f"--profile: there is no profile {name!r:.60}; {meant}")
    return known[name]


NO_PROFILES = "/profile save NAME in the chat makes one"


def over(parser: argparse.ArgumentParser, profile: Profile, base: T) -> T:
    """Return ``base`` with what the profile says of it; end with exit status 2 where that is not valid."""
    try:
        return profile.over(base)
    except OptionError as error:
        parser.error(f"--profile: {error.one_line().rstrip('.')}")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how tokens are chosen."""
    group = parser.add_argument_group("generation")
    for flag, each in _SAMPLING.items():
        action = "append" if each.repeated else "store"
        group.add_argument(flag, action=action, type=each.kind, dest=each.field, metavar=each.metavar, help=each.help)


def add_template_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what the chat template is told."""
    group = parser.add_argument_group("thinking and chat template")
    group.add_argument(
        "--thinking",
        choices=THINKING,
        help="whether the model thinks before it answers, or how much (as its chat template has it)",
    )
    group.add_argument(
        "--thinking-budget", type=int, metavar="N", help="end thinking after N tokens; the answer follows (no end)"
    )
    group.add_argument(
        "--template-option",
        action="append",
        metavar="KEY=VALUE",
        help="anything else that the chat template reads, a JSON value; may be repeated",
    )


def add_reply_flags(parser: argparse.ArgumentParser, *, cache: bool = True) -> None:
    """Add every flag of a command that loads a model and makes replies; cache: whether they may be read from the prompt cache."""
    add_adapter_flag(parser)
    add_unchecked_flag(parser)
    add_cpu_exact_flag(parser)
    add_sampling_flags(parser)
    add_template_flags(parser)
    add_kv_flags(parser, cache=cache)
    add_memory_flag(parser)


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
    group.add_argument(
        "--kv-keep", type=kv_keep, metavar="N|system", help="first tokens a window never drops (4; a chat: system)"
    )
    if full:
        group.add_argument(
            "--on-full",
            choices=ON_FULL,
            help="when the context is full: the oldest tokens are dropped, the reply stops (the default without a window), "
            "a prompt's middle is left out, or the cut reply is an error",
        )
    if cache:
        group.add_argument("--no-prompt-cache", action="store_true", help="compute every prompt afresh")


def sampling(parser: argparse.ArgumentParser, options: argparse.Namespace, base: Sampling | None = None) -> Sampling:
    """Return ``base`` with the flags that were given; end with exit status 2 at a bad one."""
    result = base or Sampling()
    for flag, each in _SAMPLING.items():
        if (value := getattr(options, each.field)) is not None:
            result = _changed(parser, flag, result, {each.field: tuple(value) if each.repeated else value})
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


def with_logprobs(parser: argparse.ArgumentParser, options: argparse.Namespace, base: Sampling) -> Sampling:
    """Return ``base`` with ``--logprobs``, if it was given; end with exit status 2 at a bad or idle one."""
    if options.logprobs is None:
        return base
    if not options.json and options.each is None:
        parser.error("--logprobs has no effect without --json")
    changed: Sampling = _changed(parser, "--logprobs", base, {"logprobs": options.logprobs})
    return changed


def add_schema_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--schema``."""
    parser.add_argument(
        "--schema", metavar="FILE", help="a JSON Schema that the answer follows; needs pip install 'tokamac[schema]'"
    )


def with_schema(
    parser: argparse.ArgumentParser, options: argparse.Namespace, base: Sampling, read: Callable[[str], str]
) -> Sampling:
    """Return ``base`` with what ``--schema`` names, if it was given; end with exit status 2 at what is none."""
    if options.schema is None:
        return base
    changed: Sampling = _changed(parser, "--schema", base, {"json_schema": read(options.schema)})
    return changed


def template_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace, base: TemplateOptions | None = None
) -> TemplateOptions:
    """Return ``base`` with the flags that were given; end with exit status 2 at a bad or idle one."""
    result = base or TemplateOptions()
    if options.thinking == "off" and options.thinking_budget is not None:
        parser.error("--thinking-budget has no effect with --thinking off")
    for flag in ("--thinking", "--thinking-budget"):
        if (value := getattr(options, TEMPLATE_FLAGS[flag])) is not None:
            result = _changed(parser, flag, result, {TEMPLATE_FLAGS[flag]: value})
    if options.template_option is not None:
        given = _changed(parser, "--template-option", TemplateOptions(), {"keywords": options.template_option})
        result = TemplateOptions(result.thinking, result.thinking_budget, {**result.values, **given.values})
    return result


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


def known_settings() -> settings.Settings:
    """Return the settings; say on stderr where this moved a damaged file aside."""
    read = settings.load(settings.default_path())
    if read.moved:
        warn(read.warnings)
    return read.settings


def default_model() -> str:
    """Return the model that the user picked last, else the embedded one; say on stderr what of the settings can't be used."""
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
