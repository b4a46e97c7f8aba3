"""What the chat template is told in a chat: read from /thinking, said in few words, cut to what the model knows. Pure."""

from collections.abc import Iterator
from dataclasses import replace

from tokamac.app.backend.wire import ModelInfo
from tokamac.app.tui import units
from tokamac.app.tui.digits import whole_number
from tokamac.engine.errors import OptionError
from tokamac.engine.options import THINKING, TemplateOptions

DEFAULT = "default"
"""Thinking as the chat template has it, for as long as the model likes."""
USAGE = f"Use {', '.join(THINKING)}, {DEFAULT}, or a number of tokens."


def chosen(text: str, now: TemplateOptions, info: ModelInfo | None) -> TemplateOptions:
    """Return ``now`` with what /thinking was given. info: of the loaded model; None: nobody knows what it can be told.

    Raises OptionError for what that can't be, and for what the model can't be told.
    """
    word = text.strip().lower()
    if word == DEFAULT:
        return replace(now, thinking=None, thinking_budget=None)
    budget = whole_number(word)
    mode = next((mode for mode in THINKING if mode == word), None)
    if budget is None and mode is None:
        raise OptionError(f"there is no thinking {word!r:.40}", USAGE)
    other = replace(now, thinking=mode) if budget is None else replace(now, thinking_budget=budget)
    if budget is not None and other.thinking == "off":
        other = replace(other, thinking=None)  # a budget is for a model that thinks
    asked = TemplateOptions(mode, budget)
    if info is not None and (why := next(_untold(asked, info), None)) is not None:
        raise OptionError(why, _known(info))
    return other


def told(wanted: TemplateOptions, info: ModelInfo | None) -> tuple[TemplateOptions, tuple[str, ...]]:
    """Return what of ``wanted`` the loaded model can be told, and a sentence for each part that it can't."""
    if info is None:
        return wanted, ()
    thinking = wanted.thinking if wanted.thinking in info.thinking_modes else None
    budget = wanted.thinking_budget if info.thinks else None
    values = {name: value for name, value in wanted.values.items() if name in info.template_names}
    return TemplateOptions(thinking, budget, values), tuple(_untold(wanted, info))


def _untold(wanted: TemplateOptions, info: ModelInfo) -> Iterator[str]:
    template = f"the chat template of {info.name}"
    if wanted.thinking is not None and wanted.thinking not in info.thinking_modes:
        modes = ", ".join(info.thinking_modes)
        why = f"{template} knows {modes} alone" if modes else f"{template} has no switch for it"
        yield f"thinking {wanted.thinking} can't be had: {why}"
    if wanted.thinking_budget is not None and not info.thinks:
        yield f"a thinking budget can't be had: {info.name} marks no thinking"
    for name in wanted.values:
        if name not in info.template_names:
            yield f"the template option {name} can't be had: {template} does not read it"


def _known(info: ModelInfo) -> str:
    return f"It knows: {', '.join(info.thinking_modes)}." if info.thinking_modes else "Another model may have one."


def state(options: TemplateOptions) -> str:
    """Return in few words what is set, for the status line: ``thinking off``, ``thinking ≤ 2k``; "" where nothing is."""
    if options.thinking == "off":
        return "thinking off"
    parts: list[str] = [] if options.thinking is None else [options.thinking]
    if options.thinking_budget is not None:
        parts.append(f"≤ {units.short(options.thinking_budget)}")
    thinking = f"thinking {' '.join(parts)}" if parts else ""
    others = (
        f"{len(options.keywords)} template option{'' if len(options.keywords) == 1 else 's'}"
        if options.keywords
        else ""
    )
    return ", ".join(part for part in (thinking, others) if part)


def sentences(options: TemplateOptions, info: ModelInfo | None) -> str:
    """Return what is set and what the loaded model knows, for /thinking alone."""
    mode = "as the chat template has it" if options.thinking is None else options.thinking
    budget = options.thinking_budget
    said = [f"Thinking: {mode}.", f"Budget: {'none' if budget is None else f'{units.count(budget)} tokens'}."]
    if options.keywords:
        said.append(f"Template options: {', '.join(options.keywords)}.")
    if info is not None:
        modes = ", ".join(info.thinking_modes)
        said.append(
            f"{info.name} knows: {modes}." if modes else f"The chat template of {info.name} has no switch for it."
        )
    return " ".join(said)


def budget_spent(tokens: int) -> str:
    """Return what to say of thinking that a budget of so many tokens ended."""
    return f"ended at its budget of {units.count(tokens)} tokens"
