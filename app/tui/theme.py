"""Tokamac's own two themes, and which to begin with. Textual's are in the palette beside them."""

import os
from collections.abc import Mapping

from textual.theme import Theme

_DARK = {
    "prose-code": "#8bd5ca",
    "prose-faint": "#7a8194",
    "prose-marker": "#ff8f6b",
    "prose-heading": "#ffb199",
    "footer-key-foreground": "#ff8f6b",
    "input-selection-background": "#ff8f6b 35%",
    "screen-selection-background": "#ff8f6b 35%",
    "block-cursor-text-style": "none",
}
_LIGHT = {
    "prose-code": "#0f766e",
    "prose-faint": "#6b7280",
    "prose-marker": "#c2410c",
    "prose-heading": "#9a3412",
    "footer-key-foreground": "#c2410c",
    "input-selection-background": "#c2410c 25%",
    "screen-selection-background": "#c2410c 25%",
    "block-cursor-text-style": "none",
}
DARK = Theme(
    name="tokamac-dark",
    primary="#ff8f6b",
    secondary="#8bd5ca",
    accent="#ffb199",
    warning="#e9c46a",
    error="#ef6f6c",
    success="#8fd694",
    foreground="#dfe3ec",
    background="#12141b",
    surface="#181b24",
    panel="#1f2330",
    dark=True,
    variables=_DARK,
)
LIGHT = Theme(
    name="tokamac-light",
    primary="#c2410c",
    secondary="#0f766e",
    accent="#9a3412",
    warning="#a16207",
    error="#b91c1c",
    success="#15803d",
    foreground="#1f2430",
    background="#fbfaf8",
    surface="#f3f1ed",
    panel="#e9e6e0",
    dark=False,
    variables=_LIGHT,
)


# Every theme must know the prose colours; in foreign themes they come from what all themes have.
FALLBACKS = {
    "prose-code": "secondary",
    "prose-faint": "foreground-muted",
    "prose-marker": "primary",
    "prose-heading": "primary",
}


def first_theme(environment: Mapping[str, str] = os.environ) -> str:
    """Return the theme for a terminal that no one has chosen one for: light where it says that its background is."""
    background = environment.get("COLORFGBG", "").rpartition(";")[2]
    return LIGHT.name if background in ("7", "15") else DARK.name
