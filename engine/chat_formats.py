"""Chat templates of models that are published without one: their makers give the format as a program instead, which is not run."""

from collections.abc import Mapping
from typing import Any

BAR, SPACE = "\uff5c", "\u2581"

DEEPSEEK = (
    # The reply to the last user is thought out first, unless that is turned off; of earlier ones the thoughts are left out.
    "{%- set thinks = thinking is not defined or thinking %}"
    "{%- set last = namespace(user=-1) %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}"
    "{%- endfor %}"
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{ '<|User|>' + message.content }}"
    "{%- elif message.role == 'assistant' %}{{ '<|Assistant|>' }}"
    "{%- if loop.index0 > last.user and (thinks or message.reasoning_content) %}"
    "{{- '<think>' + (message.reasoning_content or '') }}"
    "{%- endif %}"
    "{{- '</think>' + message.content + '<|end_of_sentence|>' }}"
    "{%- else %}{{ message.content }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|Assistant|>' + ('<think>' if thinks else '</think>') }}{% endif %}"
).replace("|Assistant|", f"{BAR}Assistant{BAR}").replace("|User|", f"{BAR}User{BAR}").replace(
    "|end_of_sentence|", f"{BAR}end{SPACE}of{SPACE}sentence{BAR}"
)  # fmt: skip
"""As ``encoding_dsv4.py`` in DeepSeek's repositories writes conversations without tools; V3.2's program does the same."""

UNPUBLISHED = {"deepseek_v32": DEEPSEEK, "deepseek_v4": DEEPSEEK}


def template_of(config: Mapping[str, Any]) -> str | None:
    """Return the chat template of a model that is published without one, or None where none is known."""
    return UNPUBLISHED.get(str(config.get("model_type")))
