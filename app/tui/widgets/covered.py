"""Containers of which nothing is seen: what they hold covers them, so that Textual need not draw them line by line."""

from textual.containers import Horizontal, Vertical


class Columns(Horizontal):
    """Side by side."""

    BLANK = True


class Stack(Vertical):
    """One above the other."""

    BLANK = True
