"""The plain chat in a script whose model does not load: commands are done, a prompt ends it, and the status tells."""

from pathlib import Path

import pytest

from tests.cli.plain_chat import last_path, piped
from tokamac.app.plain.repl import ENDED


@pytest.fixture(autouse=True)
def _kept(data: Path, home: Path) -> None:
    """What is kept is the test's own."""


def test_without_a_model_commands_are_done_and_the_status_tells() -> None:
    status, out, err = piped("/model nobody\n/chats\n/system Be brief.\n/system\n", "nobody")
    assert (status, out) == (1, "No chats yet.\nBe brief.\n")
    assert "no scenario is called 'nobody'" in err
    assert ENDED not in err


def test_a_prompt_that_no_model_answers_ends_the_chat_and_that_is_said() -> None:
    status, out, err = piped("/model nobody\n/chats\ntwo\n/chats\n", "nobody")
    assert (status, out) == (1, "No chats yet.\n")
    assert err.splitlines()[-1] == ENDED


def test_another_model_may_be_chosen_and_the_status_still_tells(data: Path) -> None:
    status, _, err = piped("/model nobody\n/model steady\ntwo\n", "nobody")
    assert status == 1
    assert "steady is loaded." in err
    assert [message.text for message in last_path(data) if message.role == "user"] == ["two"]


def test_a_mistyped_model_leaves_the_one_that_was_loaded(data: Path) -> None:
    status, out, err = piped("/model nobody\n/title Kept\nhello\n/model\n", "fast")
    assert status == 1
    assert "Going back to fast." in err
    assert out.splitlines()[-1] == "fast"
    assert [message.text for message in last_path(data) if message.role == "user"] == ["hello"]


@pytest.mark.parametrize("model", ["dies-loading", "dies-decoding"])
def test_where_nobody_types_no_restart_is_promised_that_does_not_come(model: str) -> None:
    status, _, err = piped("one\ntwo\nthree\n", model)
    assert status == 1
    assert err.count("The engine stopped") == 2
    assert "when you send a prompt" not in err
    assert err.splitlines()[-1] == ENDED
