"""Flags shared by commands, and their options: Sampling, TemplateOptions, KVSpec, PromptCacheSpec."""

# Bad values and flags without effect are usage errors (exit 2) that name the flag.

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

from tokamac.engine.errors import ModelNotFoundError, OptionError
from tokamac.engine.files import expanded, is_dir
from tokamac.engine.hub.names import EMBEDDED, nearest
from tokamac.engine.options import (
    FULL_PACE,
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
from .settings import Profile
from .text.terminal import note

T = TypeVar("T")

AUTO = "auto"
NO_ADAPTER = NO_DRAFT = "none"  # takes the adapter, or the draft model, away that the settings have for a model
SPECULATION = (AUTO, "off")


class Flag(NamedTuple):
    """A flag for an engine option. repeated: several occurrences are combined."""

    field: str
    kind: Callable[[str], Any]
    metavar: str
    help: str
    repeated: bool = False


def kv_bits(text: str) -> KVBits:
    """Parse (key bits, value bits) from ``8`` or ``8,4``."""
    try:
        bits = tuple(int(part) for part in text.split(","))
    except ValueError:
        bits = ()
    if not 1 <= len(bits) <= 2 or any(value not in KV_BITS for value in bits):
        allowed = ", ".join(map(str, KV_BITS))
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {allowed}, nor two of them as K,V (for example 8,4)")
    return bits[0], bits[-1]


def kv_keep(text: str) -> int | Literal["system"]:
    if text == "system":
        return "system"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens nor 'system'")
    return int(text)


def token_bias(text: str) -> tuple[int, float]:
    """Parse (token id, bias) from ``15=-100``."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a token id with a bias (for example 15=-100)") from None


def on_or_off(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is neither on nor off")
    return text == "on"


def names(text: str) -> tuple[str, ...]:
    """Parse ``a,b``."""
    return tuple(part.strip() for part in text.split(","))


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def gigabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < settings.MOST_MEMORY_GB:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in GB above 0")
    return value


def alternatives(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; PROMPT stands before --logprobs") from None


_SAMPLING = {
    "--max-tokens": Flag(
        "max_tokens", int, "N", "stop after N tokens (default: until only the next turn has room; in bench 128)"
    ),
    "--temp": Flag("temperature", float, "T", "temperature; 0 always takes the likeliest token (default: the model's own)"),
    "--top-p": Flag("top_p", float, "P", "sample from the likeliest tokens that add up to P (default: the model's own)"),
    "--top-k": Flag("top_k", int, "K", "sample from the K likeliest tokens; 0 is off (default: the model's own)"),
    "--min-p": Flag(
        "min_p", float, "P", "drop tokens below P times the likeliest one (default: the model's own, else 0.05)"
    ),
    "--repetition-penalty": Flag(
        "repetition_penalty", float, "R", "penalty on recent tokens; 1 is off (default: the model's own, else 1.1)"
    ),
    "--loop-check": Flag(
        "loop_check", on_or_off, "on|off", "stop a reply that repeats itself (default: on; in bench off)"
    ),
    "--seed": Flag("seed", int, "N", "the same seed gives the same text on the same device (default: random)"),
    "--stop": Flag("stop", str, "TEXT", "stop before this text; repeatable", True),
    "--stop-token-id": Flag(
        "stop_token_ids", int, "ID", "stop at this token, as at the model's own end token; repeatable", True
    ),
    "--min-tokens": Flag("min_tokens", int, "N", "write at least N tokens (default: 0)"),
    "--logit-bias": Flag(
        "logit_bias", token_bias, "ID=BIAS",
        "add BIAS (-100 to 100) to this token's logit before all else; repeatable", True,
    ),
    "--presence-penalty": Flag(
        "presence_penalty", float, "P", "penalty on tokens that are in the reply already, -2 to 2 (default: 0)"
    ),
    "--frequency-penalty": Flag(
        "frequency_penalty", float, "P", "the same, for each time they occur, -2 to 2 (default: 0)"
    ),
    "--xtc-probability": Flag(
        "xtc_probability", float, "P",
        "chance of excluding all tokens above the threshold but the least likely one (default: 0)",
    ),
    "--xtc-threshold": Flag("xtc_threshold", float, "P", "threshold of --xtc-probability (default: 0.1)"),
    "--dry-multiplier": Flag(
        "dry_multiplier", float, "M", "penalty on tokens that continue a repetition, usually 0.8; 0 is off (default: 0)"
    ),
    "--dry-base": Flag("dry_base", float, "B", "growth of that penalty with each repeated token (default: 1.75)"),
    "--dry-allowed-length": Flag("dry_allowed_length", int, "N", "repeated tokens without a penalty (default: 2)"),
    "--dry-sequence-breaker": Flag(
        "dry_sequence_breakers", str, "TEXT",
        'end repetitions at TEXT; repeatable, replaces the defaults: newline : " *', True,
    ),
    "--sampler-order": Flag(
        "order", names, "STAGE,STAGE…", f"order of the sampling stages (default: {','.join(STAGES)})"
    ),
}  # fmt: skip
# Flags, and the field of Sampling that each sets.
SAMPLING_FLAGS = {flag: each.field for flag, each in _SAMPLING.items()}
# Flags that only say how something is done, and the one that turns it on.
IDLE_WITHOUT = {
    "--xtc-threshold": "--xtc-probability",
    "--dry-base": "--dry-multiplier",
    "--dry-allowed-length": "--dry-multiplier",
    "--dry-sequence-breaker": "--dry-multiplier",
}
TEMPLATE_FLAGS = {
    "--thinking": "thinking",
    "--thinking-budget": "thinking_budget",
    "--template-option": "template_option",
}


MODEL = "a folder, a Hugging Face ID, a short name such as qwen3:8b, or guide"


def model_name(written: str) -> str:
    """Argument type: resolve a model name, announcing short names' meaning on stderr."""
    from .models.local import is_short, resolve  # the help of a command needs none of it

    if not is_short(written):
        return written
    try:
        model = resolve(written)
    except ModelNotFoundError as error:
        raise argparse.ArgumentTypeError(error.one_line().rstrip(".")) from None
    if model != written:
        note(f"note: {written} is {model}")
    return model


def draft_name(written: str) -> str:
    """Argument type: resolve a draft model."""
    return written if written.strip() in ("", NO_DRAFT) else model_name(written)


def add_speculation_flags(
    parser: argparse.ArgumentParser, default: str = "speculation in the settings, at first auto"
) -> None:
    """Add ``--speculation`` and ``--draft``. default: of the first, in words."""
    what = f"speculative decoding: the same text, in fewer passes (default: {default})"
    parser.add_argument("--speculation", choices=SPECULATION, help=what)
    add_flags(parser, "--draft")


def add_nodes_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("one model on several machines (tokamac help nodes)")
    add_flags(group.add_mutually_exclusive_group(), "--nodes", "--hostfile")
    add_flags(group, "--backend", "--split")


def nodes_count(text: str) -> int:
    if not text.isdecimal() or len(text) > 2 or not 2 <= int(text) <= MOST_NODES:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a number of nodes, 2 to {MOST_NODES}")
    return int(text)


def nodes_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Nodes | None:
    """Return the nodes; None is this process alone. Exits with a usage error at a flag without effect."""
    if options.nodes is None and options.hostfile is None:
        for flag, given in (("--backend", options.backend), ("--split", options.split)):
            if given is not None:
                parser.error(f"{flag} has no effect without --nodes or --hostfile")
        return None
    hostfile = None if options.hostfile is None else str(expanded(options.hostfile).absolute())
    if options.adapter is not None and given_adapter(options.adapter):
        parser.error("--adapter: a model on several nodes takes no adapter")
    try:
        return Nodes(options.nodes, hostfile, options.backend, options.split or "tensor")
    except OptionError as error:
        parser.error(error.one_line().rstrip("."))


def check_speculation_flags(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with a usage error for a draft model with speculation off."""
    if options.speculation == "off" and given_draft(options.draft or ""):
        parser.error("--draft has no effect with --speculation off")


def speculation_of(options: argparse.Namespace, model: str, default: bool | None = None) -> Speculation | None:
    """Return speculation for ``model`` by flags, else ``default`` or settings; None is off."""
    known = known_settings()
    draft = given_draft(options.draft) if options.draft is not None else known.drafts.get(model)
    on = known.speculation if default is None else default
    if options.speculation is not None or (options.draft is not None and draft):
        on = options.speculation != "off"
    return Speculation(draft=draft or None) if on else None


def given_draft(written: str) -> str:
    """Resolve a draft model, folders to absolute paths; "" is none."""
    return named if (named := written.strip()) in EMBEDDED else given_adapter(written)


def replies_at_once(text: str) -> int:
    most = settings.MOST_PARALLEL
    if not text.isdecimal() or len(text) > len(str(most)) or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a number of parallel replies, 1 to {most}")
    return int(text)


def pace(text: str) -> int:
    if not text.isdecimal() or len(text) > 3 or not 1 <= int(text) <= FULL_PACE:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a share of the time, 1 to 100 per cent")
    return int(text)


def widths(text: str) -> tuple[int, ...]:
    """Parse unique widths (parallel replies)."""
    return tuple(dict.fromkeys(replies_at_once(part.strip()) for part in text.split(",")))


def shares(text: str) -> tuple[float, ...]:
    """Parse unique acceptance rates, 0 to 1 or in %."""
    return tuple(dict.fromkeys(_share(part.strip()) for part in text.split(",")))


def _share(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an acceptance rate from 0 to 1, such as 0.7 or 70%")
    return value


def parallel_of(options: argparse.Namespace) -> int:
    if options.parallel is not None:
        return int(options.parallel)
    return known_settings().parallel


def memory_limit(options: argparse.Namespace) -> int | None:
    """Return MLX's byte limit by flag or settings; None: the system's limit."""
    return limit_of_settings() if options.memory is None else round(options.memory * 1e9)


def limit_of_settings() -> int | None:
    """Return MLX's byte limit by settings; None: the system's limit."""
    return known_settings().memory_bytes


def is_cpu_exact(options: argparse.Namespace | None = None) -> bool:
    return getattr(options, "cpu_exact", False) or known_settings().cpu_exact


def pace_of(options: argparse.Namespace) -> tuple[int, int | None]:
    """Return the pace, and the one on battery, by flag or settings."""
    given = getattr(options, "pace", FULL_PACE)  # a command without the flag rests never
    known = known_settings()
    return (known.pace, known.pace_on_battery) if given is None else (given, None)


def adapter_of(options: argparse.Namespace, model: str) -> str | None:
    """Return the model's adapter by flag or settings; None is none."""
    if options.adapter is not None:
        return given_adapter(options.adapter) or None
    return known_settings().adapters.get(model)


def given_adapter(written: str) -> str:
    """Resolve an adapter, folders to absolute paths; "" is none."""
    name = written.strip()
    if not name or name.lower() == NO_ADAPTER:
        return ""
    folder = expanded(name)
    return str(folder.absolute()) if is_dir(folder) else name


def add_profile_flag(parser: argparse.ArgumentParser, without: str) -> None:
    """Add ``--profile``. without: its default, in words."""
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help=f"saved model, settings and system prompt (/profile save); other flags override it (default: {without})",
    )


def given_profile(parser: argparse.ArgumentParser, name: str, known: Mapping[str, Profile]) -> Profile:
    """Return the named profile; exits with status 2 if unknown."""
    if name not in known:
        near = nearest(name, known)
        meant = f"did you mean {near}?" if near else f"there are: {', '.join(known)}" if known else NO_PROFILES
        parser.error(f"--profile: there is no profile {name!r:.60}; {meant}")
    return known[name]


NO_PROFILES = "/profile save NAME in the chat makes one"


def over(parser: argparse.ArgumentParser, profile: Profile, base: T) -> T:
    """Apply a profile to ``base``; exits with status 2 if invalid."""
    try:
        return profile.over(base)
    except OptionError as error:
        parser.error(f"--profile: {error.one_line().rstrip('.')}")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("generation")
    for flag, each in _SAMPLING.items():
        action = "append" if each.repeated else "store"
        group.add_argument(flag, action=action, type=each.kind, dest=each.field, metavar=each.metavar, help=each.help)


def add_template_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("thinking and chat template")
    add_flags(group, "--thinking", "--thinking-budget", "--template-option")


def add_reply_flags(parser: argparse.ArgumentParser, *, cache: bool = True) -> None:
    """Add all flags of a command that generates replies. cache: include the prompt cache's."""
    add_flags(parser, "--adapter", "--unchecked", "--cpu-exact")
    add_sampling_flags(parser)
    add_template_flags(parser)
    add_kv_flags(parser, cache=cache)
    add_flags(parser, "--memory")


def add_kv_flags(parser: argparse.ArgumentParser, *, cache: bool = True, full: bool = True) -> None:
    """Add KV flags; ``cache`` and ``full`` exclude those a command lacks."""
    group = parser.add_argument_group("KV cache")
    add_flags(group, "--kv-bits", "--kv-window", "--kv-group-size", "--kv-keep", *(["--on-full"] if full else []))
    if cache:
        add_flags(group, "--no-prompt-cache")


def sampling(parser: argparse.ArgumentParser, options: argparse.Namespace, base: Sampling | None = None) -> Sampling:
    """Apply the flags to ``base``; exits with status 2 at a bad one."""
    result = base or Sampling()
    for flag, each in _SAMPLING.items():
        if (value := getattr(options, each.field)) is not None:
            result = _changed(parser, flag, result, {each.field: tuple(value) if each.repeated else value})
    for flag, switch in IDLE_WITHOUT.items():
        if getattr(options, SAMPLING_FLAGS[flag]) is not None and not getattr(result, SAMPLING_FLAGS[switch]):
            parser.error(f"{flag} has no effect without {switch} above 0")
    return result


def with_logprobs(parser: argparse.ArgumentParser, options: argparse.Namespace, base: Sampling) -> Sampling:
    """Apply ``--logprobs``; exits with status 2 if bad or without effect."""
    if options.logprobs is None:
        return base
    if not options.json and options.each is None:
        parser.error("--logprobs has no effect without --json")
    changed: Sampling = _changed(parser, "--logprobs", base, {"logprobs": options.logprobs})
    return changed


def with_schema(
    parser: argparse.ArgumentParser, options: argparse.Namespace, base: Sampling, read: Callable[[str], str]
) -> Sampling:
    """Apply ``--schema``; exits with status 2 if invalid."""
    if options.schema is None:
        return base
    changed: Sampling = _changed(parser, "--schema", base, {"json_schema": read(options.schema)})
    return changed


def template_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace, base: TemplateOptions | None = None
) -> TemplateOptions:
    """Apply the flags to ``base``; exits with status 2 if bad or without effect."""
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


def kv_spec(
    parser: argparse.ArgumentParser, options: argparse.Namespace, base: KVSpec | None = None, *, compacts: bool = False
) -> KVSpec:
    """Apply the flags to ``base``; exits with status 2 if bad or without effect."""
    result = base or KVSpec()
    given: Mapping[str, Any] = vars(options)
    if (bits := given.get("kv_bits")) is not None:
        result = _changed(parser, "--kv-bits", result, {"key_bits": bits[0], "value_bits": bits[1]})
    if (group_size := given.get("kv_group_size")) is not None:
        result = _changed(parser, "--kv-group-size", result, {"group_size": group_size})
        if not result.quantized:
            parser.error("--kv-group-size has no effect without --kv-bits below 16")
    if (on_full := given.get("on_full")) is not None:
        if on_full == "compact" and not compacts:
            parser.error("--on-full compact works in the chat alone: take stop, roll or truncate-middle")
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
    """Return the prompt cache spec; None is off."""
    return None if options.no_prompt_cache else PromptCacheSpec()


def any_given(options: argparse.Namespace, names: tuple[str, ...]) -> bool:
    return any(getattr(options, name, None) is not None for name in names)


def known_settings() -> settings.Settings:
    """Return the settings; reports on stderr if a damaged file was moved aside."""
    read = settings.load(settings.default_path())
    if read.moved:
        warn(read.warnings)
    return read.settings


def default_model() -> str:
    """Return the last chosen model, else the embedded one; reports settings problems on stderr."""
    read = settings.load(settings.default_path())
    warn(read.warnings)
    return read.settings.model


def warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        note(f"warning: {warning}")


def _changed(parser: argparse.ArgumentParser, flag: str, base: Any, given: Mapping[str, Any]) -> Any:
    try:
        return replace(base, **given)
    except OptionError as error:
        parser.error(f"{flag}: {error.one_line().rstrip('.')}")


ADAPTER = "LoRA or DoRA adapter of mlx-lm or PEFT: a folder or a Hugging Face ID"
# Flags that several commands have, as argparse takes them.
FLAGS: dict[str, dict[str, Any]] = {
    "-m --model": {"type": model_name, "metavar": "MODEL", "help": f"{MODEL} (default: the model used last)"},
    "-f --file": {
        "action": "append", "default": [], "metavar": "FILE", "help": "text file or PDF to put before PROMPT; repeatable",
    },
    "--system": {"metavar": "TEXT", "help": "system prompt"},
    "--memory": {
        "type": gigabytes, "metavar": "GB",
        "help": "memory limit for the model, even above the system's (default: memory_gb in the settings)",
    },
    "--parallel": {
        "type": replies_at_once, "metavar": "N",
        "help": f"write up to N replies in parallel (default: parallel in the settings, at first {PARALLEL})",
    },
    "--pace": {
        "type": pace, "metavar": "N",
        "help": "per cent of the time the model may work; it rests between steps (default: pace in the settings, at first 100)",
    },
    "--draft": {
        "type": draft_name, "metavar": "MODEL",
        "help": f"draft model for speculative decoding, with the same tokenizer; {NO_DRAFT} for no draft model (default: the "
        "settings' for this model)",
    },
    "--nodes": {"type": nodes_count, "metavar": "N", "help": "split the model over N processes on this machine"},
    "--hostfile": {
        "metavar": "FILE", "help": "split it over the machines in a file of mlx.distributed_config, this one first",
    },
    "--backend": {"choices": NODE_BACKENDS, "help": "how they communicate (default: as in the hostfile, else ring)"},
    "--split": {
        "choices": SPLITS, "help": "a part of every layer each (tensor), or whole layers (pipeline) (default: tensor)",
    },
    "--cpu-exact": {
        "action": "store_true",
        "help": "CPU only: keep activations in full precision (default: cpu_exact in the settings)",
    },
    "--unchecked": {
        "action": "store_true",
        "help": "load a model even if part of its config is computed differently here; every reply says what",
    },
    "--adapter": {
        "metavar": "DIR|ID",
        "help": f"{ADAPTER}; {NO_ADAPTER} for no adapter (default: the settings' for this model)",
    },
    "--thinking": {
        "choices": THINKING,
        "help": "whether the model thinks before it answers, or how much (default: its chat template's)",
    },
    "--thinking-budget": {
        "type": int, "metavar": "N", "help": "end thinking after N tokens and answer (default: no limit)",
    },
    "--template-option": {
        "action": "append", "metavar": "KEY=VALUE",
        "help": "set another variable of the chat template, as JSON; repeatable",
    },
    "--kv-bits": {
        "type": kv_bits, "metavar": "BITS",
        "help": f"bits of keys and values: {'|'.join(map(str, KV_BITS))}, or K,V such as 8,4; 16 is not quantized",
    },
    "--kv-window": {
        "type": int, "metavar": "N", "help": "keep at most N tokens: the first (--kv-keep) and the newest",
    },
    "--kv-group-size": {"type": int, "choices": GROUP_SIZES, "help": "values that share a scale (default: 64)"},
    "--kv-keep": {
        "type": kv_keep, "metavar": "N|system",
        "help": "first tokens that are never dropped (default: 4; in a chat: system)",
    },
    "--on-full": {
        "choices": ON_FULL,
        "help": "when the context is full: drop the oldest tokens, stop (default without a window), leave out the middle of the "
        "prompt, fail, or, in the chat, go on from a summary",
    },
    "--no-prompt-cache": {"action": "store_true", "help": "compute every prompt from scratch"},
    "--logprobs": {
        "nargs": "?", "const": 0, "type": alternatives, "metavar": "N",
        "help": "with --json: add the log-probability of each token, and of the N likeliest alternatives (default: 0)",
    },
    "--prompt": {
        "metavar": "NAME", "dest": "prompt_file",
        "help": "a prompt of yours: the file prompts/NAME.md beside the settings (tokamac help prompts)",
    },
    "--schema": {
        "metavar": "FILE", "help": "make the answer follow a JSON Schema (needs pip install 'tokamac[schema]')",
    },
}  # fmt: skip


def add_flags(parser: argparse._ActionsContainer, *flags: str) -> None:
    for flag in flags:
        parser.add_argument(*flag.split(), **FLAGS[flag])
