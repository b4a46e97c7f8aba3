"""Programs that use the server: what to paste into their settings, and how ``launch`` starts agents on it."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokamac.engine.files import atomic_write

KEY = "none"  # what a client that insists on a key is given where none is needed
CLIENT_HEADER = "x-tokamac-client"  # by which the server knows an agent that ``launch`` started
LONGEST_REPLY = 8192  # tokens, and never more than a quarter of the context
LONGEST_WAIT_MS = (
    3_600_000  # for a token: agents leave after five minutes, and their first prompt may take longer to read
)
LEAST_WINDOW = 100_000  # tokens: Claude Code takes no smaller context, but compacts at any share of it


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server as its clients see it. context: tokens; None if unknown. client: for CLIENT_HEADER, or ""."""

    url: str
    model: str
    key: str = KEY
    context: int | None = None
    client: str = ""

    @property
    def openai(self) -> str:
        return f"{self.url}/v1"

    @property
    def headers(self) -> dict[str, str]:
        return {CLIENT_HEADER: self.client} if self.client else {}

    @property
    def reply(self) -> int:
        """Tokens that a reply may have."""
        return LONGEST_REPLY if self.context is None else min(LONGEST_REPLY, self.context // 4)

    @property
    def compact_at(self) -> int | None:
        """Tokens of a conversation from which on it is to be made shorter: a reply, and a tenth, stay free."""
        return None if self.context is None else self.context - self.reply - self.context // 10


def client_config(host: str, port: int, model: str, key: str = KEY) -> str:
    """Return client configuration text. model: name for clients; key: the token or a placeholder."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    url = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
    return "\n\n".join(f"# {title}\n{text}" for title, text in _sections(Endpoint(url, model, key)))


def _sections(at: Endpoint) -> list[tuple[str, str]]:
    model, key, openai = at.model, at.key, at.openai
    asked = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    proven = "" if key == KEY else f" -H 'Authorization: Bearer {key}'"
    continue_dev = f"models:\n  - name: {model}\n    provider: openai\n    model: {model}\n    apiBase: {openai}\n    apiKey: {key}"
    served = {"api_url": openai, "available_models": [{"name": model, "max_tokens": 32768}]}
    zed = json.dumps({"language_models": {"openai_compatible": {"Tokamac": served}}}, indent=2)
    codex = "\n".join(f"{name} = {json.dumps(value)}" for name, value in _leaves(codex_settings(at)))
    ollama = (
        f"export OLLAMA_HOST={at.url}{'' if key == KEY else f' OLLAMA_API_KEY={key}'}\n# and the model's name: {model}"
    )
    llm = f"- model_id: tokamac\n  model_name: {model}\n  api_base: {openai}"
    in_zed = "Zed: settings.json"
    if key != KEY:  # those three keep keys outside of their settings
        codex += f"\n# and in the shell: export TOKAMAC_API_KEY={key}"
        llm += f"\n  api_key_name: tokamac\n# and once: llm keys set tokamac --value {key}"
        in_zed += f", and in the shell: export TOKAMAC_API_KEY={key}"
    return [
        ("try it", f"curl {openai}/chat/completions{proven} -d '{asked}'"),
        ("programs that use OpenAI's client", f"export OPENAI_BASE_URL={openai} OPENAI_API_KEY={key}"),
        (
            "Claude Code, and programs that use Anthropic's client",
            "export " + " ".join(f"{name}={value}" for name, value in claude_environment(at).items()),
        ),
        ("Ollama's clients: Raycast, Enchanted, Obsidian, Open WebUI", ollama),
        ("Codex: ~/.codex/config.toml", codex),
        ("Continue: ~/.continue/config.yaml", continue_dev),
        (in_zed, zed),
        ("opencode: opencode.json", json.dumps(opencode_config(at), indent=2)),
        ("aider", f"aider --model openai/{model} --openai-api-base {openai} --openai-api-key {key}"),
        ("llm: extra-openai-models.yaml", llm),
    ]


def claude_environment(at: Endpoint) -> dict[str, str]:
    """https://docs.anthropic.com/en/docs/claude-code/settings#environment-variables."""
    every = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    made = {
        "ANTHROPIC_BASE_URL": at.url,
        "ANTHROPIC_AUTH_TOKEN": at.key,
        **dict.fromkeys((*every, "CLAUDE_CODE_SUBAGENT_MODEL"), at.model),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes with every request, before all that could be reused
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **dict.fromkeys(("API_TIMEOUT_MS", "CLAUDE_STREAM_IDLE_TIMEOUT_MS"), str(LONGEST_WAIT_MS)),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(at.reply),
    }
    if at.context is not None and at.compact_at is not None:
        window = max(at.context, LEAST_WINDOW)
        made["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(window)
        made["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"] = str(max(1, 100 * at.compact_at // window))
    if at.client:
        made["ANTHROPIC_CUSTOM_HEADERS"] = f"{CLIENT_HEADER}: {at.client}"
    return made


def codex_settings(at: Endpoint) -> dict[str, Any]:
    """https://developers.openai.com/codex/config-reference."""
    provider: dict[str, Any] = {"name": "Tokamac", "base_url": at.openai, "wire_api": "responses"}
    provider |= {"http_headers": at.headers, "stream_idle_timeout_ms": LONGEST_WAIT_MS}
    if at.key != KEY:
        provider["env_key"] = "TOKAMAC_API_KEY"
    made = {"model": at.model, "model_provider": "tokamac", "model_providers": {"tokamac": provider}}
    known = {"model_context_window": at.context, "model_auto_compact_token_limit": at.compact_at}
    return made | {name: value for name, value in known.items() if value is not None}


def opencode_config(at: Endpoint) -> dict[str, Any]:
    """https://opencode.ai/docs/providers."""
    limit = {} if at.context is None else {"limit": {"context": at.context, "output": at.reply}}
    options: dict[str, Any] = {"baseURL": at.openai, "apiKey": at.key} | ({"headers": at.headers} if at.headers else {})
    options |= dict.fromkeys(("timeout", "headerTimeout", "chunkTimeout"), False)
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Tokamac", "options": options, "models": {at.model: limit}}
    named = f"tokamac/{at.model}"
    return {"provider": {"tokamac": provider}, "model": named, "small_model": named}


def pi_extension(at: Endpoint) -> str:
    """https://github.com/earendil-works/pi, packages/coding-agent/docs."""
    free = dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0)
    model = {
        "id": at.model,
        "name": at.model,
        "reasoning": False,
        "input": ["text"],
        "cost": free,
        "maxTokens": at.reply,
    }
    if at.context is not None:
        model["contextWindow"] = at.context
    spoken = {"api": "openai-completions", "compat": {"supportsDeveloperRole": False, "supportsReasoningEffort": False}}
    made = {"baseUrl": at.openai, "apiKey": at.key, "headers": at.headers, **spoken, "models": [model]}
    return f'export default function (pi) {{\n  pi.registerProvider("tokamac", {json.dumps(made)});\n}}\n'


def _leaves(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield before + name, value


@dataclass(frozen=True, slots=True)
class Start:
    """What starts an agent on a server: arguments before the user's, and what its environment has besides the user's."""

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Agent:
    """A program that ``launch`` starts.

    prompt_tokens: its own prompt, its tools included, has about so many, at four characters a token. start: given the
    server, and a folder for what it reads from a file.
    """

    title: str
    program: str
    package: str
    prompt_tokens: int
    start: Callable[[Endpoint, Path], Start]


def _codex(at: Endpoint, _: Path) -> Start:
    given = (word for name, value in _leaves(codex_settings(at)) for word in ("-c", f"{name}={json.dumps(value)}"))
    return Start(tuple(given), {"TOKAMAC_API_KEY": at.key})


def _pi(at: Endpoint, folder: Path) -> Start:
    file = folder / "pi-provider.js"
    with atomic_write(file) as writing:
        writing.write(pi_extension(at).encode())
    return Start(("--extension", str(file), "--provider", "tokamac", "--model", at.model))


AGENTS: Mapping[str, Agent] = {
    "claude": Agent(
        "Claude Code", "claude", "@anthropic-ai/claude-code", 19_000, lambda at, _: Start((), claude_environment(at))
    ),
    "codex": Agent("Codex", "codex", "@openai/codex", 10_000, _codex),
    "opencode": Agent(
        "opencode", "opencode", "opencode-ai", 8_000,
        lambda at, _: Start((), {"OPENCODE_CONFIG_CONTENT": json.dumps(opencode_config(at))}),
    ),
    "pi": Agent("pi", "pi", "@earendil-works/pi-coding-agent", 1_500, _pi),
}  # fmt: skip
