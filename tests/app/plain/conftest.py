"""The fixtures of tests/app/commands."""

from tests.app.commands.conftest import _own_settings, data, endless, home, notes, start, terminal, tiny, tokamac

__all__ = ["_own_settings", "data", "endless", "home", "notes", "start", "terminal", "tiny", "tokamac"]
