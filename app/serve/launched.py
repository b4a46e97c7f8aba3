"""The fixed prompts of agents that ``tokamac launch`` started: kept from their first request, for their next start."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import platformdirs

from tokamac.engine.files import atomic_write, read_text

from .clients import AGENTS

# What is kept is what the agent itself sent to this machine: its system prompt and tools, by agent and by folder that it
# was started in, because its prompt names that. Files are the user's alone.

CLIENT = re.compile(rf"({'|'.join(AGENTS)})\.[0-9a-f]{{8}}\.[0-9a-f]{{8}}")  # the agent, its folder, this start
LONGEST = 8 << 20  # bytes
ASKED = {"role": "user", "content": "."}


def state_folder() -> Path:
    return platformdirs.user_state_path("tokamac") / "launch"


def file_of(client: str, folder: Path) -> Path:
    return folder / f"{client.rpartition('.')[0]}.json"


class FirstPrompts:
    """Keeps the first prompt with tools of each start."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._folder, self._note = folder, note
        self._known: set[str] = set()

    def see(self, client: str, path: str, body: Mapping[str, Any]) -> None:
        if client in self._known or not CLIENT.fullmatch(client) or (fixed := fixed_part(path, body)) is None:
            return
        self._known.add(client)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with atomic_write(file_of(client, self._folder)) as file:
                file.write(json.dumps({"path": path, "body": fixed}).encode())
        except OSError as error:
            self._note(f"the agent's prompt can't be kept for its next start: {error.strerror or error}")


def kept_prompt(client: str, folder: Path) -> tuple[str, dict[str, Any]] | None:
    """Return the path and body of the request that reads a kept prompt, or None."""
    try:
        kept = json.loads(read_text(file_of(client, folder), LONGEST))
        return str(kept["path"]), dict(kept["body"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fixed_part(path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a request of only what precedes the user's first message; None without tools, or later in a conversation."""
    listed = "input" if path == "/v1/responses" else "messages"
    items = body.get(listed)
    if not body.get("tools") or not isinstance(items, list) or not all(isinstance(each, dict) for each in items):
        return None
    if any(each.get("role") not in ("system", "developer", "user") for each in items):
        return None
    system = [each for each in items if each["role"] != "user"]
    fixed = {name: body[name] for name in ("system", "instructions", "tools") if body.get(name)}
    most = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    return {**fixed, listed: [*system, ASKED], most: 1}
