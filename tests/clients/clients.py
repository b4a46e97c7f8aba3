"""Which clients there are, what they are installed from, and how a turn of each is run."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "TOKAMAC_CLIENTS"
HERE = Path(__file__).parent
PROMPT = "Read notes.md"


def folder() -> Path:
    """Return where the clients lie: ``$TOKAMAC_CLIENTS``, else a folder of the user's cache."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokamac-clients"


@dataclass(frozen=True)
class Client:
    """A client. packages: of the registry. module: a file or folder that shows it is there. requests: that a turn takes at least.

    model: the script that it is answered by. is_plain: it has no tools.
    """

    name: str
    packages: tuple[str, ...]
    module: str
    requests: int = 2
    model: str = "calls"
    is_plain: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def is_js(self) -> bool:
        return self.name in JS

    @property
    def is_there(self) -> bool:
        lies = folder() / "js/node_modules" if self.is_js else folder() / "py/lib"
        return (lies / self.module).exists() if self.is_js else any(lies.glob(f"*/site-packages/{self.module}"))

    def command(self, url: str) -> list[str]:
        bin = folder() / "js/node_modules/.bin"
        match self.name:
            case "claude_code":
                return [str(bin / "claude"), "-p", PROMPT]
            case "codex":
                provider = f'{{name="Tokamac", base_url="{url}/v1", wire_api="responses"}}'
                given = ["model_provider=tokamac", f"model_providers.tokamac={provider}"]
                options = [part for each in given for part in ("-c", each)]
                return [str(bin / "codex"), "exec", "--skip-git-repo-check", "-m", self.model, *options, PROMPT]
        driver = (
            ["node", str(HERE / "drive.mjs")]
            if self.is_js
            else [str(folder() / "py/bin/python"), str(HERE / "drive.py")]
        )
        return [*driver, self.name, url, self.model, *(["plain"] if self.is_plain else [])]

    def environment(self, url: str, home: Path) -> Mapping[str, str]:
        """Return what it sees: nothing of the user's, and no way out of this machine but ``url``."""
        claude = {
            "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": self.model,
            "ANTHROPIC_SMALL_FAST_MODEL": self.model, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
        }  # fmt: skip
        quiet = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none"}
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "CLIENTS": str(folder()),
            **quiet,
            **(claude if self.name == "claude_code" else {}),
        }


AGENTS, CALLING = ("claude_code", "codex"), ("instructor", "smolagents")  # those whose every turn is a call
JS = ("openai_js", "anthropic_js", "ai_openai", "ai_compatible", "ai_anthropic", *AGENTS)
CLIENTS = (
    Client("openai_chat", ("openai",), "openai"), Client("openai_responses", ("openai",), "openai"),
    Client("anthropic", ("anthropic",), "anthropic"), Client("openai_agents", ("openai-agents",), "agents", 4),
    Client("pydantic_ai", ("pydantic-ai-slim[openai,anthropic]",), "pydantic_ai", 4),
    Client("langchain", ("langchain-openai",), "langchain_openai"),
    Client("langgraph", ("langgraph", "langchain-openai"), "langgraph", 3), Client("litellm", ("litellm",), "litellm"),
    Client("instructor", ("instructor",), "instructor", 1), Client("smolagents", ("smolagents[openai]",), "smolagents"),
    Client("dspy", ("dspy",), "dspy", 1),
    Client("llama_index", ("llama-index-llms-openai-like", "llama-index-core"), "llama_index", 1),
    Client("ollama", ("ollama",), "ollama"), Client("openai_js", ("openai",), "openai"),
    Client("anthropic_js", ("@anthropic-ai/sdk",), "@anthropic-ai/sdk"),
    Client("ai_openai", ("ai", "@ai-sdk/openai", "zod"), "@ai-sdk/openai"),
    Client("ai_compatible", ("ai", "@ai-sdk/openai-compatible", "zod"), "@ai-sdk/openai-compatible"),
    Client("ai_anthropic", ("ai", "@ai-sdk/anthropic", "zod"), "@ai-sdk/anthropic"),
    Client("claude_code", ("@anthropic-ai/claude-code",), "@anthropic-ai/claude-code", 2, "claude-code"),
    Client("codex", ("@openai/codex",), "@openai/codex", 2, "codex"),
)  # fmt: skip
