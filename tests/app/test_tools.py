"""Tools: what they read and refuse, how a reply's calls are answered, and what of it a user sees."""

import io
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from tests.app.conftest import PATIENCE_S, Chat, reply_of
from tests.scripted_engine import model_spec
from tokamac.app import settings
from tokamac.app.backend.protocol import Generate, Load, Loaded, ReplyEvent
from tokamac.app.chat.attachments import Draft
from tokamac.app.chat.conversation import NOT_RUN, Reply, Tree, Turn, messages
from tokamac.app.chat.preferences import Preferences
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import (
    Ask,
    AskConsent,
    EnginePhase,
    Moved,
    Notice,
    Opened,
    Resumed,
    RunTool,
    Step,
    ToolAnswered,
)
from tokamac.app.commands import ask, loading
from tokamac.app.commands.ask import AskTools
from tokamac.app.serve.answering import ServedReply
from tokamac.app.settings import McpServer, Settings, ToolSettings
from tokamac.app.store.values import ToolResult
from tokamac.app.tools import builtin
from tokamac.app.tools.builtin import AllowedFolders, Clock, ListFolder, ReadFile, SearchFiles, evaluate, shown
from tokamac.app.tools.calls import (
    LONGEST_RESULT,
    Decision,
    Tool,
    ToolError,
    bounded,
    call_lines,
    decision_of,
    result_of,
)
from tokamac.app.tools.toolbox import McpConnection, McpError, McpTool, Toolbox, UnknownToolError
from tokamac.app.tui.markdown.turns import ReplyMessage, ToolMessage, UserMessage
from tokamac.app.tui.screens.dialog import ConsentScreen, ToolsScreen
from tokamac.engine.errors import OptionError
from tokamac.engine.events import Event, Finished, Message, TextChunk, ToolCall, ToolCallDelta
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import KVSpec, Sampling, TemplateOptions, ToolSpec

# The tools built in ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "home"
    (made / "src" / "deep").mkdir(parents=True)
    (made / ".ssh").mkdir()
    (made / ".ssh" / "id_rsa").write_text("SECRET")
    (made / "server.pem").write_text("SECRET")
    (made / "notes.md").write_text("one\ntwo Needle\nthree\n")
    (made / "src" / "a.py").write_text("needle = 1\n")
    (made / "src" / "skipped.log").write_text("needle\n")
    (made / "src" / ".gitignore").write_text("*.log\n/deep/\n")
    (made / "src" / "deep" / "b.py").write_text("needle = 2\n")
    (made / "image.bin").write_bytes(b"\x00\x01needle")
    (tmp_path / "outside.txt").write_text("SECRET")
    (made / "link.txt").symlink_to(tmp_path / "outside.txt")
    return made


def told(tool: Tool, **arguments: Any) -> str:
    return result_of(tool, ToolCall(tool.spec.name, json.dumps(arguments), "1")).text


def test_a_file_is_read_whole_or_in_part(folder: Path) -> None:
    read = ReadFile(AllowedFolders([folder]))
    assert told(read, path="notes.md") == "one\ntwo Needle\nthree"
    assert told(read, path=str(folder / "notes.md"), from_line=2, lines=1) == "two Needle\n[lines 2 to 2 of 3]"
    (folder / "long.txt").write_text("x" * 99 + "\n" + "0123456789\n" * 20_000)
    text = told(read, path="long.txt")
    assert len(text) <= LONGEST_RESULT
    assert text.endswith("of 20001]")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("../outside.txt", "outside of the folders"), ("link.txt", "outside of the folders"),
        ("/etc/passwd", "outside of the folders"), (".ssh/id_rsa", "hidden from tools"),
        ("server.pem", "usually hold secrets"), ("nothing.txt", "there is no"), ("src", "is a folder"),
        ("image.bin", "binary"), ("a\0b", "NUL"),
    ],
)  # fmt: skip
def test_what_may_not_be_read_is_refused_with_a_reason(folder: Path, path: str, why: str) -> None:
    text = told(ReadFile(AllowedFolders([folder])), path=path)
    assert why in text
    assert "SECRET" not in text


def test_a_hidden_folder_is_read_once_the_user_allows_it(folder: Path) -> None:
    read = ReadFile(AllowedFolders([folder, folder / ".ssh"]))
    (folder / ".ssh" / "config").write_text("Host a")
    assert told(read, path=str(folder / ".ssh" / "config")) == "Host a"


def test_a_folder_is_listed_without_what_is_hidden(folder: Path) -> None:
    assert told(ListFolder(AllowedFolders([folder]))).split("\n") == [
        "src/", "image.bin  8 bytes", "link.txt  6 bytes", "notes.md  21 bytes", "[2 hidden]",
    ]  # fmt: skip


def test_a_search_heeds_gitignore_and_follows_no_link(folder: Path) -> None:
    search = SearchFiles(AllowedFolders([folder]))
    assert told(search, text="needle") == "notes.md:2: two Needle\nsrc/a.py:1: needle = 1"
    assert told(search, text=r"^need.e = \d", regex=True, files="*.py") == "src/a.py:1: needle = 1"
    assert told(search, text="needle", path="src") == "src/a.py:1: needle = 1"
    assert told(search, text="SECRET") == "no line matches"
    assert "no regular expression" in told(search, text="(", regex=True)


def test_a_pattern_that_takes_for_ever_is_given_up(folder: Path) -> None:
    (folder / "evil.txt").write_text("a" * 60 + "b")
    assert "takes too long" in told(SearchFiles(AllowedFolders([folder])), text="(a|a)*$", regex=True)


def test_a_search_is_bounded_whether_or_not_anything_matches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = SearchFiles(AllowedFolders([folder]))
    monkeypatch.setattr(builtin, "MOST_FILES", 2)
    assert (
        told(search, text="needle", files="*.nothing") == "no line matches\n[stopped early: search in a smaller folder]"
    )
    monkeypatch.undo()
    monkeypatch.setattr(builtin, "SEARCH_S", 0.0)
    assert told(search, text="e", path="notes.md").endswith("[stopped early: search in a smaller folder]")


@pytest.mark.parametrize(
    ("expression", "value"),
    [("6 * 7", "42"), ("2 ** 100 % 97", "16"), ("(3 + 4) / 2", "3.5"), ("sqrt(16)", "4"), ("2^10", "1024"),
     ("factorial(20)", "2432902008176640000"), ("max(1, 2, 3)", "3"), ("-7 // 2", "-4")],
)  # fmt: skip
def test_arithmetic(expression: str, value: str) -> None:
    assert shown(evaluate(expression)) == value


@pytest.mark.parametrize(
    "expression",
    ["9 ** 9 ** 9", "__import__('os')", "(1).__class__", "[x for x in (1,)]", "1 / 0", "factorial(10**9)", "'a' * 9",
     "1 if 1 else 2",      "(-8) ** 0.5", "1e308 * 10", "1" + " + 1" * 400, "", "open('x')", "True", "10 ** -400 * 1e400"],
)  # fmt: skip
def test_what_is_no_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(ToolError):
        evaluate(expression)


def test_the_clock_tells_the_weekday_and_the_zone() -> None:
    assert Clock(lambda: datetime(2026, 11, 23, 9, 5, tzinfo=UTC)).run({}) == "Monday, 2026-11-23 09:05:00 +0000 (UTC)"


def test_results_are_safe_and_bounded() -> None:
    assert "\x1b" not in bounded("a\x1b[2Jb")
    assert bounded("x" * (LONGEST_RESULT + 5)).endswith("[… 5 more characters were left out]")
    assert len(bounded("\x1b[1m" * LONGEST_RESULT)) < LONGEST_RESULT


def test_wrong_arguments_are_told_to_the_model(folder: Path) -> None:
    read = ReadFile(AllowedFolders([folder]))
    for arguments, why in (
        ({}, "is missing"),
        ({"path": 3}, "type string"),
        ({"path": "a", "x": 1}, "no argument 'x'"),
    ):
        assert why in told(read, **arguments)
    assert "type integer" in told(read, path="notes.md", lines=True)


def test_a_call_is_shown_in_full_and_safe() -> None:
    lines = call_lines(ToolCall("run\x1b[2J", '{"a": "x\\ny\\u001b[31m", "b": [1]}'))
    assert len(lines) == 4
    assert lines[2:] == ["  │ y�[31m", "  b: [1]"]  # later lines of a value don't pass for another argument
    assert not any("\x1b" in line for line in lines)
    hidden = json.dumps({"a\x9d": "safe\x1b]and all is deleted\x07 \x9dand sent\x9c", "b\x1b[1": ["\x9dforce"]})
    shown = "\n".join(call_lines(ToolCall("run", hidden)))
    assert all(text in shown for text in ("and all is deleted", "and sent", "b�[1: ", "force"))


def test_decisions_are_words_or_their_letters() -> None:
    assert [decision_of(text) for text in ("o", "Chat", "a", "d", "y", "no", "", "maybe")] == [
        "once", "chat", "always", "deny", "once", "deny", "deny", None,
    ]  # fmt: skip


# The session ----------------------------------------------------------------------------------------------------------------

METRICS = Metrics(5, 0, 5, 3, 0.5, 0.4, 1.0, 12.5, 4.0, None, None, None, None, None, None, None, None)
CALL, OTHER = ToolCall("add", '{"a": 1}', "a"), ToolCall("look", "{}", "b")
SPECS = (ToolSpec("add"), ToolSpec("look"))


def ready(*, takes: bool = True) -> Session:
    session = Session(Load("guide"), Sampling(), "", lambda: 0.0)
    session.offer(SPECS)
    session.start()
    session.on_event(Loaded(model_spec("m", takes_tools=takes, later_system=True)))
    return session


def finish(session: Session, *calls: ToolCall, text: str = "") -> list[Step]:
    reason: Any = "tool_calls" if any(not each.problem for each in calls) else "stop"
    return session.on_event(ReplyEvent(reply_of(session), Finished(reason, text, METRICS, tool_calls=calls)))


def asked(steps: list[Step]) -> list[Generate]:
    return [step.request for step in steps if isinstance(step, Ask) and isinstance(step.request, Generate)]


def test_a_call_asks_runs_and_is_answered_and_the_model_goes_on() -> None:
    session = ready()
    (first,) = asked(session.submit("What is it?"))
    assert first.template.tools == SPECS
    assert AskConsent(CALL) in finish(session, CALL, text="I add.")
    assert session.engine.phase is EnginePhase.TOOLS
    assert session.consent("another", "once") == []
    assert session.consent("a", "once") == [RunTool(CALL)]
    result = ToolResult(CALL, "2")
    answered, *rest = session.tool_ended(result)
    assert isinstance(answered, ToolAnswered)
    (second,) = asked(rest)
    assert second.messages == (
        Message("user", "What is it?"),
        Message("assistant", "I add.", tool_calls=(CALL,)),
        Message("tool", "2", tool_call_id="a", name="add"),
    )
    finish(session, text="It is 2.")
    assert session.engine.phase is EnginePhase.IDLE
    (third,) = asked(session.submit("Sure?"))
    assert third.messages[:3] == second.messages
    assert [each.content for each in third.messages[3:]] == ["It is 2.", "Sure?"]


def test_a_reply_that_begins_with_a_call_is_written_from_its_first_piece_on() -> None:
    session = ready()
    session.submit("What is it?")
    assert session.engine.phase is EnginePhase.PREFILL
    assert session.on_event(ReplyEvent(reply_of(session), ToolCallDelta("add", '{"a"', "a"))) == []
    assert session.engine.phase is EnginePhase.DECODING


def test_what_is_denied_or_unknown_or_unreadable_is_told_to_the_model() -> None:
    session = ready()
    session.submit("a")
    finish(session, CALL, ToolCall("gone", "{}", "c"), ToolCall("", "{", "d", problem="no JSON"))
    (request,) = asked(session.consent("a", "deny"))
    texts = [each.content for each in request.messages if each.role == "tool"]
    assert texts[0] == "The user did not allow this call."
    assert "There is no tool 'gone'" in texts[1]
    assert "could not be read: no JSON" in texts[2]


def test_a_tool_that_is_allowed_in_the_chat_asks_no_more() -> None:
    session = ready()
    session.submit("a")
    finish(session, CALL, CALL)
    assert session.consent("a", "chat") == [RunTool(CALL)]
    steps = session.tool_ended(ToolResult(CALL, "1"))
    assert RunTool(CALL) in steps


@pytest.mark.parametrize(("decision", "then"), [("chat", AskConsent(CALL)), ("always", RunTool(CALL))])
def test_what_is_allowed_in_a_chat_is_not_in_another_unless_it_always_is(decision: Decision, then: Step) -> None:
    session = ready()
    session.submit("a")
    session.new_chat()
    assert AskConsent(CALL) in finish(session, CALL), "of the chat that goes on in the background"
    session.consent("a", decision)
    session.tool_ended(ToolResult(CALL, "1"))
    assert RunTool(CALL) in finish(session, CALL)
    session.tool_ended(ToolResult(CALL, "1"))
    finish(session, text="Done.")
    session.submit("b")
    assert then in finish(session, CALL)


def test_a_call_of_a_chat_in_the_background_is_run_whatever_tools_the_open_one_has(tmp_path: Path) -> None:
    preferences = Preferences(Settings(), tmp_path / "settings.toml")
    preferences.toolbox = Toolbox(Settings(), tmp_path, tmp_path / "log")
    preferences.choose_tools([])
    ended: queue.SimpleQueue[ToolResult] = queue.SimpleQueue()
    preferences.run_tool(ToolCall("calculate", '{"expression": "6 * 7"}', "a"), ended.put)
    result = ended.get(timeout=PATIENCE_S)
    assert (result.text, result.outcome) == ("42", "done")


def test_stopping_answers_what_is_left_and_the_chat_goes_on() -> None:
    session = ready()
    session.submit("a")
    finish(session, CALL, OTHER)
    session.consent("a", "once")
    steps = session.stop()
    results = [step.result for step in steps if isinstance(step, ToolAnswered)]
    assert [each.outcome for each in results] == ["failed", "refused"]
    ran, not_run = ("".join(row.row.content.plain for row in ToolMessage(each).rows(99)) for each in results)
    assert "it may have had an effect" in ran
    assert "not run" not in ran
    assert "not run" in not_run
    assert session.engine.phase is EnginePhase.IDLE
    assert session.tool_ended(ToolResult(CALL, "late")) == []
    (request,) = asked(session.submit("b"))
    assert [each.role for each in request.messages] == ["user", "assistant", "tool", "tool", "user"]
    assert "while this call ran" in request.messages[2].content
    assert "before this call was run" in request.messages[3].content


def test_calls_without_end_are_ended() -> None:
    session = ready()
    session.tools.most = 2
    session.tools.allowed = {"add"}
    session.submit("a")
    steps: list[Step] = finish(session, CALL)
    for _ in range(4):
        if any(isinstance(step, RunTool) for step in steps):
            steps = session.tool_ended(ToolResult(CALL, "1"))
        if asked(steps):
            steps = finish(session, CALL)
    assert session.engine.phase is EnginePhase.IDLE
    assert [step.text for step in steps if isinstance(step, Notice)] == ["Stopped: the model made more than 2 calls."]


def test_a_call_that_can_not_be_read_goes_back_to_the_model_once() -> None:
    session, bad = ready(), ToolCall("", "{", "d", problem="no JSON")
    (asked_first,) = asked(session.submit("a"))
    (again,) = asked(finish(session, bad))
    assert [each.content for each in again.messages if each.role == "tool"] == [
        "Your call could not be read: no JSON. Write it again, in the right form."
    ]
    assert len(again.messages) == len(asked_first.messages) + 2
    steps = finish(session, replace(bad, id="e"))
    assert asked(steps) == []
    assert [step.text for step in steps if isinstance(step, Notice)] == [
        "Stopped: the model's calls could not be read, twice in a row."
    ]
    session.submit("b")
    assert asked(finish(session, bad)), "of another prompt, it is told again"


def test_a_server_names_arguments_of_another_type() -> None:
    reply = ServedReply(0)
    reply.add(ToolCall("add", '{"a": "x"}', "c", mistyped=("a",)))
    reply.add(Finished("tool_calls", "", METRICS))
    assert reply.figures["mistyped"] == {"c": ["a"]}


def test_regenerating_and_continuing_keep_to_the_right_place() -> None:
    session = ready()
    session.tools.allowed = {"add"}
    session.submit("a")
    finish(session, CALL)
    session.tool_ended(ToolResult(CALL, "1"))
    session.on_event(ReplyEvent(reply_of(session), Finished("length", "It is", METRICS)))
    (more,) = asked(session.continue_reply())
    assert [each.role for each in more.messages] == ["user", "assistant", "tool", "assistant"]
    assert more.continues
    finish(session, text="It is 1.")
    (anew,) = asked(session.regenerate())
    assert [each.role for each in anew.messages] == ["user"]


def test_a_reply_branches_after_the_results_of_calls_that_it_follows() -> None:
    session = ready()
    session.tools.allowed = {"add"}
    session.submit("a")
    finish(session, CALL)
    session.tool_ended(ToolResult(CALL, "1"))
    finish(session, text="It is 1.")
    key = session.turns[-1].reply_key
    before = session.prompt_before(key)
    moved, *steps = session.branch_from(key, Reply("It"))
    assert isinstance(moved, Moved)
    assert [len(turn.results) for turn in moved.turns] == [0]
    (request,) = asked(steps)
    assert (request.messages, request.continues) == ((*before, Message("assistant", "It")), True)
    assert [each.role for each in before] == ["user", "assistant", "tool"]
    finish(session, text="It may be 1.")
    assert [len(turn.results) for turn in session.turns] == [0, 1]
    assert session.turns[-1].reply_place == (2, 2)


def test_a_chat_that_is_shown_again_while_its_calls_are_answered_is_shown_as_it_is() -> None:
    session = ready()
    session.tools.allowed = {"add", "look"}
    session.submit("a")
    finish(session, CALL, OTHER)
    first = session.conversation
    session.new_chat()
    assert session.show(first) == [Opened(tuple(first.turns))], "none of its replies grows"
    session.tool_ended(ToolResult(CALL, "1"))
    session.new_chat()
    assert session.show(first) == [Opened(tuple(first.turns))]
    assert asked(session.tool_ended(ToolResult(OTHER, "2")))
    session.new_chat()
    opened, resumed = session.show(first)
    assert isinstance(opened, Opened)
    assert resumed == Resumed(replace(first.turns[-1], reply=Reply(""))), "the reply to them"


def test_a_model_without_tools_is_told_none_and_the_user_once() -> None:
    session = ready(takes=False)
    steps = session.submit("a")
    (request,) = asked(steps)
    assert request.template.tools == ()
    assert "can't call tools" in "".join(step.text for step in steps if isinstance(step, Notice))
    finish(session, text="b")
    assert not [step for step in session.submit("c") if isinstance(step, Notice)]


def test_a_call_that_nobody_answered_is_answered_for_the_model() -> None:
    turns = [Turn("a", Reply("", calls=(CALL,)), key=1), Turn("b", key=3)]
    assert messages("", turns)[2] == Message("tool", NOT_RUN, tool_call_id="a", name="add")


def test_a_tree_keeps_results_in_turns_of_their_own() -> None:
    tree = Tree()
    asked_at = tree.ask("a", None)
    reply = tree.answer(asked_at.key)
    tree.end(reply.key, Reply("", calls=(CALL, OTHER)))
    first = tree.add_result(reply.key, ToolResult(CALL, "1"))
    second = tree.add_result(first.key, ToolResult(OTHER, "2"))
    tree.end(tree.answer(second.key).key, Reply("done"))
    one, two = tree.turns()
    assert one.prompt == "a"
    assert [each.text for each in two.results] == ["1", "2"]
    assert two.reply.text == "done"


def test_what_a_call_brought_is_in_the_context_and_left_out_with_its_prompt() -> None:
    session = ready()
    session.submit("What is it?")
    finish(session, CALL)
    session.consent("a", "once")
    session.tool_ended(ToolResult(CALL, "2"))
    finish(session, text="It is 2.")
    rows = session.context_use(Draft("and?")).rows
    assert [(row.kind, row.name, row.key) for row in rows] == [
        ("tools", "add, look", 0),
        ("prompt", "What is it?", 1), ("reply", "add(1)", 1), ("result", "2", 1), ("reply", "It is 2.", 1),
        ("draft", "and?", 0),
    ]  # fmt: skip
    session.prune(1)
    assert session.conversation.request("", "and?") == (Message("user", "and?"),)
    session.submit("b")
    finish(session, CALL)
    session.prune(6)
    (request,) = asked(session.consent("a", "deny"))
    assert [each.role for each in request.messages] == ["user", "assistant", "tool"], "it is being answered"


# Settings, the toolbox and servers ------------------------------------------------------------------------------------------

TOML = """
[tools]
allowed = ["clock"]
folders = ["~/notes"]
calls = 3

[mcp.files]
command = "python"
args = ["-m", "files"]
env = { TOKEN = "x" }
seconds = 5

[mcp.wrong]
command = 3
"""


def test_settings_name_servers_and_what_is_allowed() -> None:
    read = settings.loads(TOML)
    assert read.settings.tools == ToolSettings(("clock",), ("~/notes",), 3)
    assert read.settings.mcp == {"files": McpServer("python", ("-m", "files"), (("TOKEN", "x"),), 5.0)}
    assert len(read.warnings) == 1
    assert settings.dumps(read.settings, TOML) == TOML
    more = replace(read.settings, tools=replace(read.settings.tools, allowed=("clock", "calculate")))
    assert settings.loads(settings.dumps(more, TOML)).settings == more


def test_names_that_nobody_has_are_refused(tmp_path: Path) -> None:
    box = Toolbox(Settings(), tmp_path, tmp_path / "log")
    with pytest.raises(UnknownToolError, match="there is no tool 'x'"):
        box.check(["clock", "x"])


def test_a_server_takes_no_name_and_so_no_consent_of_another_tool(tmp_path: Path) -> None:
    how = McpServer("unused")
    box = Toolbox(Settings(mcp={"read": how, "a": how, "a_b": how}), tmp_path, tmp_path / "log")

    class Listed(McpConnection):
        def tools(self) -> list[McpTool]:
            names = {"read": ["file"], "a": ["c", "b_c", "d e", "d_e"], "a_b": ["c", "x"]}[self.name]
            return [McpTool(ToolSpec(f"{self.name}_{name}".replace(" ", "_")), name, self) for name in names]

    box.servers = {name: Listed(name, how, tmp_path / "log") for name in box.servers}
    assert [box.start(name) for name in box.servers] == [0, 3, 1]
    assert [spec.name for spec in box.specs(["a_b", "a", "a"])] == ["a_b_x", "a_c", "a_b_c", "a_d_e"]


SERVER = '''
import base64, os, sys, time
from mcp.server import MCPServer
from mcp.server.mcpserver import Image
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGBgAAAABQABpfZFQAAAAABJRU5ErkJggg=="
app = MCPServer("probe")

@app.tool()
def shout(text: str, times: int = 1) -> str:
    """Shout a text."""
    return text.upper() * times + os.environ.get("PROBE", "")

@app.tool()
def look() -> list:
    """Look."""
    return ["a dot", Image(data=base64.b64decode(DOT), format="png")]

@app.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("no luck")

@app.tool()
def hang() -> str:
    """Take for ever."""
    time.sleep(600)
    return ""

@app.tool()
def die() -> str:
    """End the server."""
    os._exit(3)

if len(sys.argv) > 1:
    app.run("streamable-http", port=int(sys.argv[1]))
else:
    app.run("stdio")
'''


@pytest.fixture
def server(tmp_path: Path) -> Callable[..., McpConnection]:
    pytest.importorskip("mcp")
    script = tmp_path / "server.py"
    script.write_text(SERVER)

    def make() -> McpConnection:
        how = McpServer(sys.executable, (str(script),), (("PROBE", "!"),), 30.0)
        return McpConnection("probe", how, tmp_path / "mcp.log")

    return make


def test_a_server_tells_its_tools_and_is_called_and_survives_its_death(server: Callable[..., McpConnection]) -> None:
    connection = server()
    tools = {tool.spec.name: tool for tool in connection.tools()}
    assert set(tools) == {"probe_shout", "probe_look", "probe_fail", "probe_hang", "probe_die"}
    assert tools["probe_shout"].spec.description == "Shout a text."
    assert told(tools["probe_shout"], text="ab", times=2) == "ABAB!"
    seen = result_of(tools["probe_look"], ToolCall("probe_look", "{}", "1"))
    assert (seen.text, seen.attachments[0].kind, seen.as_message.pictures[0].data[:4]) == (
        "a dot",
        "picture",
        b"\x89PNG",
    )
    assert told(tools["probe_fail"]).startswith("Error: ")
    assert "type integer" in told(tools["probe_shout"], text="a", times="2")
    assert "probe" in told(tools["probe_die"])
    assert told(tools["probe_shout"], text="c") == "C!"  # it was started again
    connection.close()


def test_a_server_is_reached_over_http(server: Callable[..., McpConnection], tmp_path: Path) -> None:
    del server  # its script is there
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = [sys.executable, tmp_path / "server.py", str(port)]
    with subprocess.Popen(script, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert any("running on" in line for line in process.stderr)
        how = McpServer(url=f"http://127.0.0.1:{port}/mcp", headers=(("X-Key", "$HOME"),), seconds=60.0)
        connection = McpConnection("far", how, tmp_path / "mcp.log")
        tools = {tool.spec.name: tool for tool in connection.tools()}
        assert told(tools["far_shout"], text="ab") == "AB"
        connection.close()
        process.kill()
    for wrong in ({}, {"command": "a", "url": "http://b"}, {"url": "file:///b"}):
        with pytest.raises(OptionError):
            McpServer(**wrong)


def test_a_slow_server_costs_one_call(server: Callable[..., McpConnection]) -> None:
    connection = server()
    tools = {tool.spec.name: tool for tool in connection.tools()}
    connection.server = replace(connection.server, seconds=0.5)  # to start, it may take longer
    assert "did not answer within 0.5 s" in told(tools["probe_hang"])
    connection.close()


def test_a_server_that_is_not_there_is_one_sentence(server: Callable[..., McpConnection], tmp_path: Path) -> None:
    del server  # mcp is there
    how = Settings(mcp={"gone": McpServer(str(tmp_path / "no-such-program"), seconds=20.0)})
    box = Toolbox(how, tmp_path, tmp_path / "log")
    said: list[str] = []
    box._start("gone", said.append)
    assert said[0].startswith("gone has no tools here: the MCP server gone could not be started")
    assert box.state_of("gone").startswith("failed: the MCP server gone could not be started")
    box.start_later(["gone"], lambda _, text: said.append(text))
    assert box.state_of("gone").startswith("failed: ")  # nothing tries it again by itself
    box.retry(["gone"])
    assert box.state_of("gone") == "not started"
    box.close()


def test_a_server_that_ends_is_quoted(server: Callable[..., McpConnection], tmp_path: Path) -> None:
    del server  # mcp is there
    for name, code, why in (
        (
            "loud",
            "print('a log'); raise SystemExit('no \x1b[2Jtoken: set PROBE_TOKEN')",
            "could not be started: no �token: set",
        ),
        ("mute", "raise SystemExit(3)", "could not be started: Connection closed"),
    ):
        connection = McpConnection(name, McpServer(sys.executable, ("-c", code), seconds=60.0), tmp_path / "mcp.log")
        with pytest.raises(McpError, match=re.escape(f"the MCP server {name} {why}")):
            connection.tools()


def test_servers_added_changed_or_removed_are_noticed(server: Callable[..., McpConnection], tmp_path: Path) -> None:
    del server  # its script is there
    how = McpServer(sys.executable, (str(tmp_path / "server.py"),))
    box = Toolbox(Settings(mcp={"a": how}), tmp_path, tmp_path / "log")
    assert box.start("a") == 5
    box.update({"a": how, "b": how, "no name": how})
    assert [(name, box.state_of(name)) for name in box.servers] == [("a", "running, 5 tools"), ("b", "not started")]
    box.update({"a": replace(how, seconds=9.0)})
    assert [(name, box.state_of(name)) for name in box.servers] == [("a", "not started")]
    with pytest.raises(McpError, match="not in the settings any more"):
        box.start("b")
    box.close()


async def test_a_server_that_is_added_while_the_chat_runs_is_listed(chat: Callable[..., Any], tmp_path: Path) -> None:
    async with chat("calls") as running:
        await running.ready()
        running.app.view.do("tools")
        await running.on(ToolsScreen)
        with (tmp_path / "settings.toml").open("a") as file:
            file.write('[mcp.mine]\ncommand = "no-such-program"\n[mcp.wrong]\nargs = []\n')
        await running.until(lambda: "not started" in running.screen_text(), "the new server")
        assert "mine" in running.screen_text()
        assert "[mcp] wrong" in running.notices


def test_tools_are_listed_with_their_server_and_consent(server: Callable[..., McpConnection], tmp_path: Path) -> None:
    del server  # its script is there
    how = McpServer(sys.executable, (str(tmp_path / "server.py"),))
    box = Toolbox(Settings(mcp={"probe": how}), tmp_path, tmp_path / "log")
    before = {each.name: each for each in box.listed(["clock", "probe"], {"calculate"}, {"clock"})}
    assert [each.consent for each in before.values()] == [*["asks"] * 3, "chat", "always", *["asks"] * 4]
    assert (before["clock"].on, before["calculate"].on, before["probe"].about) == (True, False, "not started")
    box.start("probe")
    after = box.listed(["probe"], (), {"probe_shout"})
    at = next(at for at, each in enumerate(after) if each.server)
    assert after[at].about == "running, 5 tools"
    shout = after[at + 1]
    assert (shout.name, shout.switch, shout.on, shout.of_server) == ("probe_shout", "probe", True, True)
    assert shout.consent == "always"
    box.close()
    assert box.state_of("probe") == "ended, 5 tools; a call starts it again"


# On the screen --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "work"
    home.mkdir()
    (home / "notes.md").write_text("bring\x1b[2J milk\nand bread\n")
    monkeypatch.chdir(home)
    return home


async def choose(chat: Chat, *keys: str) -> None:
    await chat.until(lambda: isinstance(chat.app.screen, ConsentScreen), "the question")
    await chat.pilot.press(*keys)


async def test_a_user_allows_a_call_denies_another_and_reads_what_came(chat: Callable[..., Any], at_home: Path) -> None:
    del at_home
    async with chat("calls") as running:
        await running.ready()
        running.app.view.do("tools", "on read_file calculate")
        assert "tools 2" in running.screen_text()
        await running.send("What shall I bring?")
        await choose(running)
        text = running.screen_text()
        assert "read_file" in text
        assert "path: notes.md" in text
        await running.pilot.press("enter")  # nothing is chosen yet: what is being typed allows nothing
        assert isinstance(running.app.screen, ConsentScreen)
        await running.pilot.press("down", "enter")
        await running.until(
            lambda: isinstance(running.app.screen, ConsentScreen) and running.app.screen.call.name == "calculate",
            "the second",
        )
        await running.pilot.press("up", "enter")  # the last choice denies
        await running.until(lambda: len(running.session.turns) == 2 and running.session.turns[1].reply, "the reply")
        results = running.session.turns[1].results
        assert [each.outcome for each in results] == ["done", "refused"]
        assert "\x1b" not in results[0].text
        shown = [message for message in running.transcript.messages if isinstance(message, ToolMessage)]
        assert len(shown) == 2
        assert 'read_file("notes.md") · 2 lines' in running.screen_text() or shown[0].folded
        shown[0].toggle()
        assert any("and bread" in row.row.content.plain for row in shown[0].rows(60))
        held = running.held
        assert held is not None
        stored = running.recording.store.path(held)
        assert [each.role for each in stored] == ["user", "assistant", "tool", "tool", "assistant"]
        assert running.recording.store.chat(held).settings["tools"] == ["read_file", "calculate"]
        running.app.view.do("new_chat")
        assert running.session.tools.specs == ()
        running.app.chat.open_chat(held)
        assert [spec.name for spec in running.session.tools.specs] == ["read_file", "calculate"]
        assert [len(turn.results) for turn in running.session.turns] == [0, 2]


async def test_always_is_kept_and_escape_stops(chat: Callable[..., Any], at_home: Path, tmp_path: Path) -> None:
    del at_home
    async with chat("calls") as running:
        await running.ready()
        running.app.view.do("tools", "on")
        await running.send("And?")
        await choose(running, "down", "down", "down", "enter")
        await running.until(
            lambda: isinstance(running.app.screen, ConsentScreen) and running.app.screen.call.name == "calculate",
            "the second",
        )
        assert settings.load(tmp_path / "settings.toml").settings.tools.allowed == ("read_file",)
        await running.pilot.press("escape")
        await running.phase(EnginePhase.IDLE)
        assert [each.outcome for each in running.session.turns[1].results] == ["done", "refused"]
        assert not isinstance(running.app.screen, ConsentScreen)


async def test_the_list_turns_tools_on_and_off_and_forgets_consent(chat: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(
        f'[tools]\nallowed = ["list_folder"]\n[mcp.gone]\ncommand = "{tmp_path}/no-such"\n'
    )
    async with chat("calls", size=(80, 24)) as running:
        await running.ready()
        running.session.conversation.allowed.add("read_file")
        running.app.view.do("tools")
        await running.on(ToolsScreen)
        await running.until(lambda: "allowed in this chat" in running.screen_text(), "the list")
        assert "always allowed" in running.screen_text()
        await running.pilot.press("space", "down", "enter")
        await running.until(lambda: running.app.chat.preferences.tools == ("read_file", "list_folder"), "two")
        assert "Tools on in this chat: read_file, list_folder" in running.screen_text()
        await running.pilot.press("a", "up", "a", "space")
        assert running.app.chat.preferences.tools == ("list_folder",)
        assert running.session.conversation.allowed == set()
        assert settings.load(tmp_path / "settings.toml").settings.tools.allowed == ()
        assert "allowed" not in running.screen_text()
        await running.pilot.press("end", "space")
        await running.until(lambda: "failed: " in running.screen_text(), "why the server did not start")
        await running.pilot.press("escape")
        assert [spec.name for spec in running.session.tools.specs] == ["list_folder"]


async def test_a_call_in_the_background_names_its_chat_alone_allowed(chat: Callable[..., Any], at_home: Path) -> None:
    del at_home
    async with chat("calls") as running:
        await running.ready()
        running.app.view.do("tools", "on")
        await running.send("What shall I bring?")
        await running.on(ConsentScreen)
        first = running.session.conversation
        call = running.app.screen.call
        await running.app.pop_screen()
        running.app.view.do("new_chat")
        running.app.chat.perform([AskConsent(call)])
        await running.on(ConsentScreen)
        text = running.screen_text()
        assert "In the chat “What shall I bring?”, in the background:" in text
        assert "Allow read_file in that chat" in text
        await running.pilot.press("down", "down", "enter")
        await running.until(lambda: first.allowed == {"read_file"}, "what is allowed")
        assert running.session.conversation.allowed == set()
        await running.until(
            lambda: isinstance(running.app.screen, ConsentScreen) and running.app.screen.call.name == "calculate",
            "the second",
        )
        assert [each.outcome for each in first.turns[-1].results] == ["done"]  # though it is off in the new chat
        assert "milk" in first.turns[-1].results[0].text
        await running.pilot.press("escape")


async def test_a_chat_opened_again_shows_each_once(
    chat: Callable[..., Any], at_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del at_home
    goes_on = threading.Event()
    async with chat("calls") as running:
        await running.ready()
        running.app.view.do("tools", "on read_file calculate")
        running.session.conversation.allowed |= {"read_file", "calculate"}
        box = running.app.chat.preferences.toolbox
        runs = box.run

        def run(call: ToolCall) -> ToolResult:
            if call.name == "calculate":
                goes_on.wait(PATIENCE_S)
            return runs(call)

        monkeypatch.setattr(box, "run", run)
        await running.send("What shall I bring?")
        await running.until(lambda: (call := running.session.tools.running) and call.name == "calculate", "the second")
        held = running.held
        running.app.view.do("new_chat")
        running.app.chat.open_chat(held)
        shown = running.transcript.messages
        kinds = [UserMessage, ReplyMessage, ToolMessage]
        assert [(type(each), each.key) for each in shown] == list(zip(kinds, (1, 2, 3), strict=True))
        await running.pilot.press("tab", "e", "enter")  # what acts on the last message finds it
        goes_on.set()
        await running.phase(EnginePhase.IDLE)
        kinds += [ToolMessage, ReplyMessage]
        await running.until(lambda: [type(each) for each in running.transcript.messages] == kinds, "the reply")
        assert [each.key for each in running.transcript.messages] == [1, 2, 3, 4, 5]


async def test_a_call_that_is_being_written_is_told(chat: Callable[..., Any]) -> None:
    """Its arguments may take the model a minute, and nothing of them is the answer's text."""
    async with chat("calls-slowly") as running:
        await running.ready()
        running.app.view.do("tools", "on read_file calculate")
        await running.send("And?")
        await running.until(lambda: "writing a call of read_file ·" in running.screen_text(), "the first call")
        await running.until(lambda: "writing a call of calculate ·" in running.screen_text(), "the second")
        await choose(running)
        assert "writing" not in running.screen_text()
        assert running.session.conversation.progress.called == ""


async def test_a_model_that_calls_for_ever_is_ended(chat: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('[tools]\nallowed = ["calculate"]\ncalls = 2\n')
    async with chat("calls-for-ever") as running:
        await running.ready()
        running.app.view.do("tools", "calculate")
        await running.send("And?")
        await running.until(lambda: "more than 2 calls" in running.notices, "the notice")
        assert running.session.engine.phase is EnginePhase.IDLE
        assert os.fspath(tmp_path)


# One answer of a command -----------------------------------------------------------------------------------------------------


def test_a_command_runs_what_is_allowed_and_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    box = Toolbox(Settings(), tmp_path, tmp_path / "log")
    call = ToolCall("calculate", '{"expression": "6 * 7"}', "a")
    allowed = AskTools(box, ["calculate"], ToolSettings(), allow=True)
    (result,) = allowed.answer([call])
    assert result.as_message == Message("tool", "42", tool_call_id="a", name="calculate")
    refused = AskTools(box, ["calculate"], ToolSettings(), allow=False)  # nobody types in a test
    assert [each.text for each in refused.answer([call])] == ["The user did not allow this call."]
    assert "--allow-tools" in capsys.readouterr().err


@pytest.mark.parametrize(
    "long", [f"{'+'.join('7' * 200)}+6*7+{'+'.join('7' * 60)}", f"{'please ' * 190}send it {'thanks ' * 100}"]
)
def test_a_command_asks_for_a_call_with_all_of_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], long: str
) -> None:
    keyboard = io.StringIO("d\n")
    for stream in (keyboard, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", keyboard)
    tools = AskTools(Toolbox(Settings(), tmp_path, tmp_path / "log"), ["calculate"], ToolSettings(), allow=False)
    call = ToolCall("calculate", json.dumps({"expression": f"{long}\n2\x1b[8m"}), "a")
    tools.answer([call])
    assert f"call:\ncalculate\n  expression: {long}\n  │ 2�[8m\nallow it?" in capsys.readouterr().err


class CallingEngine:
    """Ends every reply with a call. told: the results it was given."""

    def __init__(self, problem: str = "") -> None:
        self.problem, self.told, self.spec = problem, list[str](), SimpleNamespace(sees=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def cancel(self) -> None:
        """Nothing runs."""

    def generate(self, messages: Sequence[Message], *_: object, template: TemplateOptions) -> Iterator[Event]:
        assert template.tools
        self.told = [each.content for each in messages if each.role == "tool"]
        call = ToolCall("calculate", '{"expression": "6 * 7"}', "a", problem=self.problem)
        yield TextChunk("I look.", "answer")
        yield Finished("tool_calls", "I look.", METRICS, tool_calls=(call,))


def answered(monkeypatch: pytest.MonkeyPatch, box: Toolbox, engine: CallingEngine | None = None) -> int:
    """The status of ``tokamac ask --json``, of a model that calls for ever."""
    monkeypatch.setattr(loading, "load", lambda *_, **__: engine or CallingEngine())
    tools = AskTools(box, ["calculate"], ToolSettings(calls=2), allow=True)
    options = ask.parser().parse_args(["why?", "--json", "--tools", "calculate"])
    options.sharing = None  # as without --nodes
    how = KVSpec(), TemplateOptions()
    return ask._answer(options, (Draft("why?"), None), Sampling(), how, tools, kept=None)


def test_a_command_says_that_a_model_that_calls_for_ever_gave_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answered(monkeypatch, Toolbox(Settings(), tmp_path, tmp_path / "log")) == 1
    assert "stopped without an answer: the model made more than 2 calls" in capsys.readouterr().err


def test_a_command_tells_a_model_once_that_its_call_can_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = CallingEngine("no JSON")
    assert answered(monkeypatch, Toolbox(Settings(), tmp_path, tmp_path / "log"), engine) == 1
    assert engine.told == ["Your call could not be read: no JSON. Write it again, in the right form."]
    assert "stopped without an answer: the model's calls could not be read, twice in a row" in capsys.readouterr().err


def test_ctrl_c_ends_a_command_while_a_call_is_answered_and_the_last_line_is_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    box = Toolbox(Settings(), tmp_path, tmp_path / "log")

    def interrupted(_: ToolCall) -> ToolResult:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it was not heard")

    monkeypatch.setattr(box, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answered(monkeypatch, box)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["event"], last["reason"], last["text"]) == ("finished", "cancelled", "")
