"""Chat templates of models that are published without one: their makers give the format as a program instead, which is not run.

What a chat template can be told of thinking, found from the template itself.

Families differ in the name (``enable_thinking``, ``thinking``, ``reasoning_effort``, ``thinking_budget``), in what it may be, and
some read a word in the system message instead. So whatever name a template reads is tried on a short conversation: what changes
nothing there is no switch, and what the template refuses is no mode of it.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokamac.engine.options import THINKING, Thinking

FLAGS = ("enable_thinking", "thinking", "enable_reasoning", "reasoning", "think", "use_thinking", "is_thinking")
"""Names that are true or false: Qwen 3, GLM 4.5, SmolLM 3, EXAONE 4, Hunyuan; DeepSeek V3.1, Granite 3.2, Kimi K2.5; others."""
EFFORTS = ("reasoning_effort", "thinking_effort", "effort")
"""Names that are a level: gpt-oss, Solar Open, Mistral Small 4."""
LEVELS: tuple[Thinking, ...] = ("low", "medium", "high")
NO_EFFORT = ("none", "off", "no_think", "disabled")
"""Levels that are no thinking, where the template itself has that word."""
CHOICES = ("thinking_option", "thinking_mode", "reasoning_mode")
"""Names that are one of two words, and"""
CHOICE_WORDS = (("on", "off"), ("enabled", "disabled"), ("thinking", "chat"), ("/think", "/no_think"))
"""those words, of which the template itself has one."""
BUDGET = "thinking_budget"
"""A number of tokens, 0 for none: Seed-OSS."""
KNOWN = frozenset({*FLAGS, *EFFORTS, *CHOICES, BUDGET})
"""All of these names."""
SYSTEM_WORDS = (("/think", "/no_think"), ("detailed thinking on", "detailed thinking off"))
"""What the system message may say of it, where the template looks for that: Nemotron Nano 2, Ling."""

SECONDS = 1.0
"""All tries together; a real template needs a few milliseconds."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a template is told. keywords: beside the messages; word: at the end of the system message."""

    keywords: Mapping[str, Any] = field(default_factory=dict)
    word: str = ""


Render = Callable[[Told], str | None]
"""Renders a short conversation with a system message; None where the template fails."""


def find_switches(names: Iterable[str], words: Iterable[str], render: Render) -> dict[Thinking, Told]:
    """Return how a template is told each mode of thinking that it knows.

    names: that it reads beside the messages. words: the texts in it.
    """
    read, said = frozenset(names), frozenset(words)
    render = _for_a_second(render)
    found = _flag(read, render) or _choice(read, said, render)
    found |= _effort(read, said, render, found)
    if "off" not in found:
        found |= _budget(read, render)
    if not found:
        found = _system_word(said, render)
    return {mode: found[mode] for mode in THINKING if mode in found}


def _for_a_second(render: Render) -> Render:
    ends = time.monotonic() + SECONDS
    return lambda told: render(told) if time.monotonic() < ends else None


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def _two(on: Told, off: Told, render: Render) -> dict[Thinking, Told]:
    return {"on": on, "off": off} if _differ(render(on), render(off)) else {}


def _flag(read: frozenset[str], render: Render) -> dict[Thinking, Told]:
    tried = (_two(Told({name: True}), Told({name: False}), render) for name in FLAGS if name in read)
    return next(filter(None, tried), {})


def _choice(read: frozenset[str], said: frozenset[str], render: Render) -> dict[Thinking, Told]:
    tried = (
        _two(Told({name: on}), Told({name: off}), render)
        for name in CHOICES
        if name in read
        for on, off in CHOICE_WORDS
        if on in said or off in said
    )
    return next(filter(None, tried), {})


def _effort(
    read: frozenset[str], said: frozenset[str], render: Render, found: Mapping[Thinking, Told]
) -> dict[Thinking, Told]:
    """Return the levels that the template tells apart. found: how thinking is turned on and off, where it is known already."""
    on = dict(found["on"].keywords) if "on" in found else {}
    for name in EFFORTS:
        if name not in read:
            continue
        told = {level: Told({**on, name: level}) for level in LEVELS}
        texts = {level: text for level in LEVELS if (text := render(told[level])) is not None}
        none = [Told({name: word}) for word in NO_EFFORT if word in said]
        off = [each for each in none if all(_differ(render(each), text) for text in texts.values())]
        if len({*texts.values()}) < 2 and not (off and texts):
            continue
        levels: dict[Thinking, Told] = {level: told[level] for level in texts}
        if found:
            return levels
        if not off:
            return {"on": Told(), **levels}  # it always thinks
        return {"on": levels["medium" if "medium" in levels else [*levels][-1]], "off": off[0], **levels}
    return {}


def _budget(read: frozenset[str], render: Render) -> dict[Thinking, Told]:
    return _two(Told(), Told({BUDGET: 0}), render) if BUDGET in read else {}


def _system_word(said: frozenset[str], render: Render) -> dict[Thinking, Told]:
    for on, off in SYSTEM_WORDS:
        if not any(off in text for text in said):
            continue
        with_on, with_off = render(Told(word=on)), render(Told(word=off))
        if with_on and with_off and with_on.replace(on, "") != with_off.replace(off, ""):
            return {"on": Told(word=on), "off": Told(word=off)}
    return {}


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
