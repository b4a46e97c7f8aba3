"""How to switch a chat template's thinking, found from the template itself; and templates of models published without one.

Families differ in the name (``enable_thinking``, ``thinking``, ``reasoning_effort``, ``thinking_budget``), in its values, and some
read a word in the system message instead. So whatever name a template reads is tried on a short conversation: one that changes
nothing there is no switch, and a value that the template refuses is no mode of it. The makers of some models give the format as a
program instead of a template; it is not run, its template is here.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..options import THINKING, Thinking

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
"""Words in the system message, where the template looks for them: Nemotron Nano 2, Ling."""

SECONDS = 1.0
"""For all tries together; a real template needs a few milliseconds."""


@dataclass(frozen=True, slots=True)
class TemplateArguments:
    """What a template is given beside the messages. keywords: by name; word: at the end of the system message."""

    keywords: Mapping[str, Any] = field(default_factory=dict)
    word: str = ""


Render = Callable[[TemplateArguments], str | None]
"""Renders a short conversation with a system message; None where the template fails."""

Switches = dict[Thinking, TemplateArguments]


def find_switches(names: Iterable[str], words: Iterable[str], render: Render) -> Switches:
    """Return the arguments for each mode of thinking that a template has.

    Args:
        names: What it reads beside the messages.
        words: The texts in it.
        render: Tries a switch.
    """
    read, texts = frozenset(names), frozenset(words)
    ends = time.monotonic() + SECONDS

    def in_time(switch: TemplateArguments) -> str | None:
        return render(switch) if time.monotonic() < ends else None

    found = _first_pair(_flags_and_choices(read, texts), in_time)
    found |= _find_efforts(read, texts, in_time, found)
    if "off" not in found and BUDGET in read:
        found |= _first_pair([(TemplateArguments(), TemplateArguments({BUDGET: 0}))], in_time)
    if not found:
        found = _find_system_word(texts, in_time)
    return {mode: found[mode] for mode in THINKING if mode in found}


def _flags_and_choices(
    read: frozenset[str], texts: frozenset[str]
) -> Iterator[tuple[TemplateArguments, TemplateArguments]]:
    for name in FLAGS:
        if name in read:
            yield TemplateArguments({name: True}), TemplateArguments({name: False})
    for name in CHOICES:
        for on, off in CHOICE_WORDS:
            if name in read and (on in texts or off in texts):
                yield TemplateArguments({name: on}), TemplateArguments({name: off})


def _first_pair(pairs: Iterable[tuple[TemplateArguments, TemplateArguments]], render: Render) -> Switches:
    """Return the first pair that makes a difference, as on and off."""
    return next(({"on": on, "off": off} for on, off in pairs if _differ(render(on), render(off))), {})


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def _find_efforts(read: frozenset[str], texts: frozenset[str], render: Render, found: Switches) -> Switches:
    """Return the levels that the template tells apart. found: how thinking is turned on and off, where that is known."""
    on = dict(found["on"].keywords) if "on" in found else {}
    for name in EFFORTS:
        if name not in read:
            continue
        switches = {level: TemplateArguments({**on, name: level}) for level in LEVELS}
        rendered = {level: text for level in LEVELS if (text := render(switches[level])) is not None}
        none = [TemplateArguments({name: word}) for word in NO_EFFORT if word in texts]
        off = [each for each in none if all(_differ(render(each), text) for text in rendered.values())]
        if len({*rendered.values()}) < 2 and not (off and rendered):
            continue
        levels: Switches = {level: switches[level] for level in rendered}
        if found:
            return levels
        if not off:
            return {"on": TemplateArguments(), **levels}  # it always thinks
        return {"on": levels["medium" if "medium" in levels else [*levels][-1]], "off": off[0], **levels}
    return {}


def _find_system_word(texts: frozenset[str], render: Render) -> Switches:
    for on, off in SYSTEM_WORDS:
        if not any(off in text for text in texts):
            continue
        with_on, with_off = render(TemplateArguments(word=on)), render(TemplateArguments(word=off))
        if with_on and with_off and with_on.replace(on, "") != with_off.replace(off, ""):
            return {"on": TemplateArguments(word=on), "off": TemplateArguments(word=off)}
    return {}


BAR, SPACE = "\uff5c", "\u2581"

DEEPSEEK = (
    # The reply to the last user begins with thinking, unless that is turned off; earlier replies lose theirs.
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
