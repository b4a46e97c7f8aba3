"""``tokamac chat --plain``: what the full screen has a panel or a dialog for, versions of a chat, and copying."""

import os
import re
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from tests.app.commands.conftest import Run
from tests.app.plain.plain_chat import OBEYED, Terminal, children, last_path, piped, spawn
from tests.waiting import PATIENCE_S, until
from tokamac.app import INTERRUPTED
from tokamac.app.backend import protocol
from tokamac.app.backend.processes import LineProcess
from tokamac.app.chat import external_programs
from tokamac.app.chat.attachments import Draft
from tokamac.app.chat.controller import Composer
from tokamac.app.chat.conversation import Reply, Tree
from tokamac.app.chat.external_programs import FILE, copy_text
from tokamac.app.chat.figures import LISTED_FIGURES
from tokamac.app.chat.recording import LEFT
from tokamac.app.plain import commands as plain_commands
from tokamac.app.plain import view as plain_view
from tokamac.app.plain.commands import MODEL_FIRST, run_aside
from tokamac.app.plain.console import LineBox
from tokamac.app.plain.view import outline
from tokamac.app.store import messages
from tokamac.app.store.store import Store
from tokamac.app.store.values import Attachment

pytestmark = pytest.mark.usefixtures("data")

OWN_BITS = ("--kv-bits", "8,4", "--kv-group-size", "32")
OWN_WINDOW = ("--kv-window", "512", "--kv-keep", "64")

STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: (print("heard", flush=True), sys.exit(130)))
print("begun", flush=True)
time.sleep(60)
"""


# The guide --------------------------------------------------------------------------------------------------------------


def test_the_guide_answers_beside_the_chat_which_stays_as_it_is(data: Path) -> None:
    status, out, err = piped("/guide\nhi\n/guide What is prefill?\nho\n", "entitles")
    assert status == 0
    assert err == "Write the question after the command: /guide What does --kv-bits 8,4 do?\n"
    replies = out.split("\n\n")
    assert [reply.partition(" ")[0].strip() for reply in replies if reply.startswith(("Title", "Decode"))] == [
        "Title:",
        "Decode",
        "Title:",
    ]
    assert [m.text for m in last_path(data) if m.role == "user"] == ["hi", "ho"]


def test_ctrl_c_stops_the_guide_and_not_the_chat(terminal: Callable[..., Terminal], data: Path) -> None:
    chat = terminal("fast", "--plain")
    chat.say("/guide What is prefill?\n")
    until(lambda: len(children(chat.process.pid)) == 2)
    chat.type("\x03")
    chat.until("The guide was stopped.")
    chat.say("hi\n")
    chat.until("fast: Decode reads")
    chat.until("you> ")
    assert len(children(chat.process.pid)) == 1
    chat.type("\x04")
    assert chat.left() == 0
    assert [m.state for m in last_path(data)] == ["complete", "complete"]


def test_the_chats_own_engine_is_heard_however_much_the_guide_says(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, heard_s = 100.0, list[float]()
    monkeypatch.setattr(plain_commands, "time", SimpleNamespace(monotonic=lambda: now_s))
    said: plain_commands.Events = SimpleQueue()
    for _ in range(10):
        said.put(protocol.Heartbeat())
    told = plain_commands.as_they_come(said, meanwhile=lambda: heard_s.append(now_s))
    for _ in range(10):
        assert next(told) == protocol.Heartbeat()
        now_s += 0.4
    assert [round(each - 100, 1) for each in heard_s] == [1.2, 2.4, 3.6]


# Figures ----------------------------------------------------------------------------------------------------------------


def test_gauges_are_lines_with_names_and_units_and_each_is_explained() -> None:
    _, out, err = piped("hi\n/gauges\n/gauges decode rate\n/gauges KV\n/gauges nosuch\n", "fast")
    lines = out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("weights: "))
    told = dict(line.split(": ", 1) for line in lines[at : at + len(LISTED_FIGURES)])
    assert len(told) == len(LISTED_FIGURES)
    units = {"time to first token": "m?s", "weights": "GB", "time per token (ITL)": "ms, p99 .*"}
    assert [name for name, unit in units.items() if not re.search(rf"\d {unit}$", told[name])] == []
    assert told["context"].endswith("tokens (context length 32,768)")
    assert told["share of the ceiling"].endswith("ceiling 350 tok/s)")
    explained = lines[at + len(LISTED_FIGURES) :]
    assert explained[0] == f"decode rate: {told['decode rate']}"
    assert explained[2] == "How: decode rate = (generated tokens − 1) ÷ (last token − first token)"
    assert any(line.startswith("From: generated tokens: 128 (") for line in explained)
    assert f"KV cache: {told['KV cache']}" in explained
    assert err == "There is no figure nosuch. /gauges lists them.\n"


def test_the_reply_of_a_turn_is_explained_and_its_line_is_shown_again() -> None:
    _, out, err = piped("/explain\nhi\n/explain\n/explain 1\n/explain 2\n/explain last\n/end\n", "fast")
    assert out.count("\nTook ") + out.startswith("Took ") == 2
    assert re.search(r"\n\(([\d,.]+ tok/s · 128 tokens|128 tokens in [\d.]+ m?s) · first token [^)]* s\)\n", out)
    assert err.splitlines() == [
        "There is no reply to explain yet.",
        "There is no turn 2. This chat has 1.",
        "There is no turn last. This chat has 1.",
    ]


def test_steps_are_listed_and_each_is_explained_with_its_likely_tokens() -> None:
    _, out, err = piped("hi\n/steps\n/steps 2\n/steps 999\n/steps two\n", "fast")
    assert re.search(r"^\d+ steps: the prompt in 1 piece, then 128 tokens$", out, re.MULTILINE)
    assert "A usual step took " in out
    told = out[out.index("Step 2 of") :].splitlines()
    assert told[0].endswith("token 1 of the reply")
    assert any(line.startswith("out") and "78% likely, the likeliest" in line for line in told)
    assert any(line.startswith("weights") and "2.26 GB read" in line for line in told)
    assert "This reply has 129 steps." in err
    assert "Write the number of a step after the command" in err


def test_a_reply_goes_on_from_a_step_with_another_token() -> None:
    _, out, err = piped("hi\n/steps 3 1\n/branches\n", "fast")
    assert "A new version of the reply goes on from “…Deco" in err
    assert "2 of 2" in out or "2." in out


# The model --------------------------------------------------------------------------------------------------------------


def test_unload_gives_the_memory_back_and_the_next_prompt_loads_again() -> None:
    status, out, err = piped("/unload\n/unload\nhi\n", "fast")
    assert status == 0
    assert err.splitlines() == ["The model is unloaded. It reloads when you send a prompt.", "No model is loaded."]
    assert "every weight once per token" in out


def test_models_are_listed_and_searched_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    _, out, err = piped("/models\n/models search qwen3\n/models something\n", "fast")
    assert "guide: " in out
    assert "no connection to http://127.0.0.1:9" in err
    assert "/models search WORDS searches Hugging Face" in err


def test_profiles_are_saved_listed_applied_and_deleted(home: Path) -> None:
    lines = (
        "/settings top_k 40", "/system Be brief.", "/profile save terse", "/settings top_k default", "/profile none", "/system",
        "/profile terse", "/system", "/profile", "/profile delete terse", "/profile terse",
    )  # fmt: skip
    _, out, err = piped("".join(f"{line}\n" for line in lines), "fast")
    assert [line for line in out.splitlines() if line in ("Be brief.", "No system prompt.")] == [
        "No system prompt.",
        "Be brief.",
    ]
    assert "* terse: fast · system prompt Be brief. · top-k 40" in out
    assert "Deleted the profile terse." in err
    assert "There are no profiles yet." in err
    assert "terse" not in (home / "settings.toml").read_text()


ASKED = {
    "": ("--context", "4096", "--prompt", "2048", *OWN_BITS, *OWN_WINDOW),
    " --context 1024": ("--context", "1024", *OWN_BITS, *OWN_WINDOW),
    " --context 1024 --kv-bits 16": ("--context", "1024", "--kv-bits", "16", *OWN_WINDOW),
    " --context 1024 --kv-window=32": ("--context", "1024", *OWN_BITS, "--kv-window", "32"),
    " --context 1024 --kv-keep 8": ("--context", "1024", *OWN_BITS, "--kv-window", "512", "--kv-keep", "8"),
}


def test_what_if_says_what_the_command_says(tokamac: Run) -> None:
    _, out, err = piped("".join(f"/whatif guide{written}\n" for written in ASKED), "fast", *OWN_BITS, *OWN_WINDOW)
    found = [tokamac("inspect", "guide", "--table", *asked) for asked in ASKED.values()]
    budget = re.compile(r" of [0-9.]+ GB: ")  # what this machine has free changes
    assert budget.sub("", out) == budget.sub("", "".join(each.out for each in found))
    assert all(each.out.count("as it is") > 1 for each in found)
    assert err == "".join(each.err for each in found)


def test_what_if_says_so_where_it_was_stopped_or_killed(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("fast", "--plain")

    def stop(asked: int) -> None:
        # It could end by itself, which is no stop: there are moments of a program's start at which Python loses Ctrl-C.
        os.kill(asked, signal.SIGSTOP)
        chat.type("\x03")

    for end, said in (
        (stop, "Stopped."),
        (lambda asked: os.kill(asked, signal.SIGKILL), "The comparison failed: killed by SIGKILL"),
    ):
        chat.until("you> ")
        until(lambda: children(chat.process.pid))
        engine = set(children(chat.process.pid))
        chat.type("/whatif guide\n")
        until(lambda: len(children(chat.process.pid)) == 2)
        (asked,) = set(children(chat.process.pid)) - engine
        end(asked)
        chat.until(said)
    assert chat.leave() == 0


def test_what_if_refuses_as_the_command_does() -> None:
    status, out, err = piped(
        '/whatif nosuch\n/whatif guide --nosuch\n/whatif "guide\n/whatif --kv-bits 4 guide\n', "fast"
    )
    assert (status, out) == (0, "")
    unknown, flag, quotes, behind, first = err.splitlines()
    assert "nosuch" in unknown
    assert "--nosuch" in flag
    assert quotes.endswith("Close the quotation marks.")
    assert "unrecognized arguments" in behind
    assert first == MODEL_FIRST.format("whatif")


def test_convert_plans_and_alone_does_it(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "tiny 8"
    asked = f"/convert {tiny} --bits 8 -o '{target}' --no-verify\n"
    status, out, err = piped(asked, "fast")
    assert status == 0
    assert "8 bits" in out
    assert err == "/convert without arguments runs this plan. Ctrl-C stops it; /convert resumes it.\n"
    assert not target.exists()
    _, out, err = piped(f"{asked}/convert\n/convert\n", "fast")
    assert f"/model {target} loads it." in err
    assert "Not compared with the source." in out
    assert (target / "config.json").exists()
    assert "fast" in err.splitlines()[-1]  # what was planned is done: alone, it is the chat's model again


def test_a_conversion_goes_on_while_one_chats(tiny: Path, tmp_path: Path, terminal: Callable[..., Terminal]) -> None:
    target = tmp_path / "tiny-8"
    chat = terminal("fast", "--plain")
    chat.say(f"/convert {tiny} --bits 8 -o {target} --no-verify\n")
    chat.until("in the background. /jobs shows")
    chat.say("/convert\nhi\n")
    chat.until("Converting")
    chat.until("every weight once per token")
    chat.until("tiny-8 loads it.")  # above an empty prompt, or before the next
    assert (target / "config.json").exists()
    chat.type("/jobs\n")
    chat.until("No downloads or conversions.")
    assert chat.leave() == 0


ENDLESS = """
import json, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
print(json.dumps({"event": "progress", "done": 340, "total": 1000}), flush=True)
if "slow" in sys.argv[-1]:
    time.sleep(60)
print(json.dumps({"event": "pulled", "id": sys.argv[-1], "path": "/there", "bytes": 1000}), flush=True)
"""


def test_what_runs_beside_the_chat_is_listed_and_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_view, "models_command", lambda: [sys.executable, "-c", ENDLESS])
    jobs = plain_view.BackgroundJobs(lambda: None)
    jobs.download("org/slow")
    jobs.download("org/quick")
    until(lambda: "34 %" in jobs.lines()[0])
    assert jobs.lines()[1] == "waiting to download org/quick"
    asks = jobs.before_quitting()
    assert asks.startswith("Still downloading org/slow: 34 % of 1.00 kB")
    assert jobs.before_quitting() == ""
    assert jobs.stop(1) == "Stopping the download of org/slow. /pull org/slow resumes it."
    until(lambda: len(jobs.lines()) == 1)
    assert jobs.lines() == ["stopped downloading org/slow: 34 % of 1.00 kB"]
    assert jobs.news() == ["org/quick is downloaded, 1.00 kB. /model org/quick loads it."]
    assert not jobs.busy
    jobs.download("org/slow")
    until(lambda: jobs.busy)
    jobs.close()
    assert children(os.getpid()) == []


def test_what_needs_the_screen_says_so_and_what_does_the_same() -> None:
    _, out, err = piped("/panel\nhi\n/end\n", "fast")
    assert (
        err == "/panel needs the full screen: quit, and open it with tokamac chat. Here, /gauges prints the figures.\n"
    )
    assert out.count("every weight once per token") == 2
    assert "you: hi\nfast: Decode reads" in out


# Processes --------------------------------------------------------------------------------------------------------------


def test_ctrl_c_asks_a_command_to_stop_and_it_ends_by_itself() -> None:
    said: list[str] = []
    asked: list[str] = []

    def take(line: str) -> None:
        said.append(line)
        if line == "begun":
            os.kill(os.getpid(), signal.SIGINT)

    process = LineProcess([sys.executable, "-c", STUBBORN], lambda line: line.decode().strip())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        end = run_aside(process, [], take, meanwhile=lambda: None, stopping=lambda: asked.append("stop"))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert (end.status, said, asked) == (INTERRUPTED, ["begun", "heard"], ["stop"])


def test_nothing_is_kept_of_what_was_asked_of_others(data: Path) -> None:
    piped("/guide hi\n/gauges\n/panel\n", "fast")
    with Store.open(data) as store:
        assert store.chats() == []


PATIENT = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""


def test_the_engine_is_heard_while_a_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_commands, "HEAR_S", 0.01)
    enough, heard = tmp_path / "enough", 0

    def hear() -> None:
        nonlocal heard
        heard += 1
        if heard == 3:
            enough.touch()

    process = LineProcess([sys.executable, "-c", PATIENT], bytes.decode)
    assert run_aside(process, [str(enough)], print, meanwhile=hear).status == 0
    assert heard >= 3


# An editor that is open until the chat's engine is gone, or for half a minute.
EDITOR = """#!/bin/sh
engine() { pgrep -P $PPID -f scripted_engine; }
engine > "$0.first"
looks=0
while engine > /dev/null && [ $looks -lt 300 ]; do sleep 0.1; looks=$((looks + 1)); done
echo edited
echo words > "$1"
"""


def test_the_engine_is_heard_while_an_editor_has_the_terminal(tmp_path: Path) -> None:
    """And an unused one is let go: else it would seem busy, and to hang. What there is to say of it comes after."""
    (tmp_path / "settings.toml").write_text("unload_after_min = 1\n")
    editor = tmp_path / "editor"
    editor.write_text(EDITOR)
    editor.chmod(0o700)
    own = {"EDITOR": str(editor), "VISUAL": "", "TEST_SETTINGS": str(tmp_path / "settings.toml")}
    hasty = {"TEST_HASTE": "30"}  # a minute is two seconds: it is not over before the editor is open
    chat = spawn("fast", env={**os.environ, **own, **hasty})
    out, err = chat.communicate("hi\n/editor\n", timeout=PATIENCE_S)
    assert chat.returncode == 0
    assert (tmp_path / "editor.first").read_text().strip().isdecimal()
    assert "has been unloaded" in err
    assert out.count("every weight once per token") == 2
    assert out.index("edited\n") < out.index("words\n")


# `tokamac chat --plain`: versions of a chat as an outline, an edit that keeps what is for the next prompt, chats
# deleted and brought back.


def prompts(data: Path) -> list[tuple[str, list[str]]]:
    """The prompts of the chat used last, and the texts that went with them."""
    return [(m.text, [each.text for each in m.attachments]) for m in last_path(data) if m.role == "user"]


# Versions ---------------------------------------------------------------------------------------------------------------


def reply(tree: Tree, prompt: int, text: str) -> int:
    key = tree.answer(prompt).key
    tree.end(key, Reply(text, model="org/m"))
    return key


def test_what_has_no_version_beside_it_is_not_in_the_outline() -> None:
    tree = Tree()
    first = tree.ask("a", None).key
    second = tree.ask("b", reply(tree, first, "A")).key
    reply(tree, second, "B")
    assert outline(tree).lines == ()
    reply(tree, second, "")
    assert outline(tree).lines == (
        "1. turn 2, m, version 1 of 2: B",
        "2. turn 2, m, version 2 of 2, shown now: no text",
    )


def test_versions_stand_inside_the_version_that_they_follow() -> None:
    tree = Tree()
    first = tree.ask("a", None).key
    reply(tree, tree.ask("c", reply(tree, first, "A")).key, "C")
    reply(tree, tree.ask("d\x1b[2J\nd", 2).key, "D")
    last = tree.ask("", None, (Attachment("notes.md", "text"),)).key
    reply(tree, last, "x" * 50)
    found = outline(tree)
    assert found.lines == (
        "1. turn 1, you, version 1 of 2: a",
        "  2. turn 2, you, version 1 of 2: c",
        "  3. turn 2, you, version 2 of 2: d� d",
        "4. turn 1, you, version 2 of 2, shown now: notes.md",
    )
    assert [tree.nodes[key].prompt for key in found.keys] == ["a", "c", "d\x1b[2J\nd", ""]


def test_a_path_longer_than_pythons_stack_is_listed() -> None:
    tree = Tree()
    for number in range(2000):
        head = tree.ask(str(number), tree.head).key
        reply(tree, head, "x")
    reply(tree, tree.ask("other", None).key, "y")
    assert len(outline(tree).lines) == 2


def test_branches_lists_the_versions_and_goes_to_one_and_the_chat_goes_on_there(data: Path) -> None:
    status, out, err = piped("one\n/again\n/edit uno\n/branches\n/branches 2\n/branches 9\nand two\n", "fast")
    assert status == 0
    lines = out.splitlines()
    at = lines.index("1. turn 1, you, version 1 of 2: one")
    assert [line.split(":")[0] for line in lines[at : at + 4]] == [
        "1. turn 1, you, version 1 of 2",
        "  2. turn 1, fast, version 1 of 2",
        "  3. turn 1, fast, version 2 of 2",
        "4. turn 1, you, version 2 of 2, shown now",
    ]
    assert lines[at + 4] == "you (version 1 of 2): one"
    assert lines[at + 5].startswith("fast (version 1 of 2): Decode reads")
    assert "There is no version 9: /branches lists them, 1 to 4." in err
    assert [text for text, _ in prompts(data)] == ["one", "and two"]


def test_numbers_stay_those_that_were_listed(data: Path) -> None:
    """The versions that /again makes stand before the prompt "uno", which was the second of the list."""
    piped("one\n/edit uno\n/branches\n/branches 1\n/again\n/branches 2\nmore\n", "fast")
    assert [text for text, _ in prompts(data)] == ["uno", "more"]


def test_a_chat_without_versions_says_so() -> None:
    _, out, err = piped("/branches\none\n/branches\n/branches 1\n", "fast")
    assert "version 1" not in out
    assert err.count("There is only one version") == 3


# Editing ----------------------------------------------------------------------------------------------------------------


def test_an_edit_leaves_what_is_attached_to_the_next_prompt(data: Path, notes: Path) -> None:
    status, _, err = piped(f"one\n/attach {notes}\n/edit uno\nand these?\n", "fast")
    assert (status, err.count("\n")) == (0, 1)
    assert prompts(data) == [("uno", []), ("and these?", ["keys and values"])]


def test_an_edit_that_is_not_written_takes_nothing(data: Path, notes: Path) -> None:
    _, _, err = piped(f"one\n/attach {notes}\n/edit\nand these?\n", "fast")
    assert "Write the new prompt after the command" in err
    assert prompts(data) == [("one", []), ("and these?", ["keys and values"])]


def test_what_is_attached_during_an_edit_goes_with_the_edit() -> None:
    line, later, now = LineBox(), Attachment("later.md", "l"), Attachment("now.md", "n")
    composer = Composer(line)
    composer.hold(Draft("words", (later,)))
    composer.begin_edit(1, Draft("old"))
    assert composer.unsent == Draft("words", (later,))
    line.draft = Draft("old", (now,))
    composer.begin_edit(2, line.draft)  # another one, and nothing of the first is for the next prompt
    composer.give_back(Draft("waited"))
    composer.end_edit()
    assert line.draft == Draft("waited\n\nwords", (later,))
    assert composer.editing is None
    composer.end_edit()
    assert line.draft.text == "waited\n\nwords"


# Deleting ---------------------------------------------------------------------------------------------------------------


def titles(data: Path, *, deleted: bool = False) -> list[str]:
    with Store.open(data) as store:
        return [chat.title for chat in store.chats(deleted=deleted)]


def test_this_chat_is_deleted_and_another_begins(data: Path) -> None:
    status, _, err = piped("about apples\n/delete\nabout pears\n", "fast")
    assert status == 0
    assert "Deleted: about apples (" in err
    assert titles(data) == ["about pears"]
    assert titles(data, deleted=True) == ["about apples"]


def test_the_chat_that_was_deleted_last_comes_back_and_is_open(data: Path) -> None:
    _, _, err = piped("apples\n/delete\npears\n/delete\n/restore\nmore\n/restore\n/restore\n", "fast")
    assert err.count("Restored: ") == 2
    assert err.splitlines()[-1] == "No chat is deleted."
    assert titles(data, deleted=True) == []
    with Store.open(data) as store:
        pears = next(chat for chat in store.chats() if chat.title == "pears")
        assert [m.text for m in store.path(pears.id) if m.role == "user"] == ["pears", "more"]


def test_a_chat_is_deleted_and_brought_back_by_its_place_in_the_list_or_its_id(data: Path) -> None:
    piped("apples\n/new\npears\n/chats apples\n/delete 1\nplums\n", "fast")
    assert (titles(data), titles(data, deleted=True)) == (["pears"], ["apples"])
    with Store.open(data) as store:
        (apples,) = store.chats(deleted=True)
        (pears,) = store.chats()
    _, _, err = piped(f"/delete {apples.id}\n/restore {apples.id[:6]}\nfigs\n/restore {pears.id}\n/delete zz\n", "fast")
    assert [re.split("[:.]", line)[0] for line in err.splitlines()[:3]] == [
        "This chat is already deleted",
        "Restored",
        "This chat is not deleted",
    ]
    assert "No chat has an id that begins with zz" in err
    assert [text for text, _ in prompts(data)] == ["apples", "figs"]


def test_a_chat_is_pinned_put_into_a_folder_and_its_context_pruned_in_lines(data: Path) -> None:
    written = "apples\n/pin\n/folder work\n/folder\n/chats\n/context\n/context 1\n/context\n/context 9\n"
    status, out, err = piped(written, "fast")
    assert (status, "1. apples, just now, " in out, ", pinned, in work (" in out) == (0, True, True)
    assert "Folders: work (1)." in out
    assert re.search(r"^1\. prompt, \d+ tokens: apples$", out, re.MULTILINE)
    assert re.search(r"^1\. prompt, \d+ tokens, left out: apples$", out, re.MULTILINE)
    assert re.search(r"^2\. reply, [\d,]+ tokens, left out: ", out, re.MULTILINE)
    assert "Pinned: apples" in err
    assert "Moved to the folder work." in err
    assert "the next prompt recomputes nothing." in err
    assert "There is no part 9: /context lists them, 1 to 2." in err
    with Store.open(data) as store:
        (chat,) = store.chats()
        assert (chat.folder, chat.settings["left_out"]) == ("work", [[1, ""]])


def test_a_number_beyond_the_list_is_not_the_beginning_of_an_id(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "ID_CHARS", "3")  # which is in every other id
    with Store.open(data) as store:
        store.add_message(store.new_chat().id, None, "user", "apples")
    status, _, err = piped("/delete 3\n/chats\n/delete 33\n/open 2\n/restore 0\n", "fast")
    assert status == 0
    said = [f"There is no number {number} in the last list. /chats lists them." for number in (3, 33, 2, 0)]
    assert err.splitlines() == said
    assert titles(data) == ["apples"]
    piped("/delete 33333333\n", "fast")  # a whole id, which is no number of a list
    assert titles(data, deleted=True) == ["apples"]


def test_a_number_of_thousands_of_digits_is_refused_and_the_chat_goes_on(data: Path) -> None:
    endless = "1" * 5000
    status, _, err = piped(f"one\n/again\n/open {endless}\n/delete {endless}\n/branches {endless}\ntwo\n", "fast")
    assert status == 0
    first, second, third = err.splitlines()
    assert first == second
    assert "is no id of a chat" in first
    assert third == f"There is no version {'1' * 40}: /branches lists them, 1 to 2."
    assert [text for text, _ in prompts(data)] == ["one", "two"]


def test_a_path_that_can_be_none_is_refused_and_the_chat_goes_on(data: Path) -> None:
    paths = ("~nobody-of-that-name/x", "a" * 300)
    lines = [f"/{command} {path}.md" for command in ("attach", "import", "export") for path in paths]
    status, _, err = piped("\n".join(["one", *lines, f"/explain {'1' * 5000}", "two", ""]), "fast")
    assert status == 0
    assert [re.sub("a{99,}…a{50,}", "a…a", line).partition(":")[0] for line in err.splitlines()] == [
        "There is no file ~nobody-of-that-name/x.md. Check its path.",
        "a…a.md can't be read",
        "~nobody-of-that-name/x.md can't be read",
        "a…a.md can't be read",
        "~nobody-of-that-name/x.md can't be written",
        "a…a.md can't be written",
        f"There is no turn {'1' * 40}. This chat has 1.",
    ]
    assert [text for text, _ in prompts(data)] == ["one", "two"]


def test_what_is_attached_is_deleted_with_the_chat_and_comes_back_with_it(data: Path, notes: Path) -> None:
    _, _, err = piped(f"apples\n/attach {notes}\n/delete\npears\n/restore\nand these?\n", "fast")
    assert "). This is a new chat. /restore restores the old one with your unsent prompt.\n" in err
    assert err.count(LEFT) == 0
    assert prompts(data) == [("apples", []), ("and these?", ["keys and values"])]


def test_there_is_nothing_to_delete_in_a_chat_in_which_nothing_was_said(data: Path) -> None:
    _, _, err = piped("/delete\n/restore\n", "fast")
    assert err.splitlines() == ["There is nothing to delete yet.", "No chat is deleted."]
    assert titles(data) == []


# `tokamac chat --plain`: copying by a tool of the system's, or into a private file; the terminal is asked for
# nothing.


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing copies: the machine is reached over SSH."""
    monkeypatch.setenv("SSH_CONNECTION", "1")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the system's tools are, none as yet."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    return tools


def tool(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)


@pytest.mark.usefixtures("far")
def test_without_a_tool_what_is_copied_is_in_a_private_file(home: Path) -> None:
    _, out, err = piped("hi\n/copy\n", "hostile")
    file = home / FILE
    assert str(file) in err
    assert file.read_text().startswith("before ")
    assert not OBEYED.search(file.read_text())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "\x1b" not in out + err  # the terminal is asked for nothing
    _, _, err = piped("hi\n/code\n", "fast")
    assert file.read_text() == "ceiling_tps = bandwidth_gbs * 1e9 / bytes_per_step\n"
    assert "Not copied (over SSH, " in err
    assert f"). The text, 51 characters, is in {file}." in err


@pytest.mark.usefixtures("far", "home")
def test_of_several_code_blocks_it_is_said_which_is_copy_text() -> None:
    _, _, err = piped("hi\n/again\nho\n/code\n/code\n/code\n", "fast")
    assert [line.partition(".")[0] for line in err.splitlines()] == [
        f"Code block {which} of 2" for which in ("2", "1", "2")
    ]


def test_a_tool_of_the_system_gets_the_text(tmp_path: Path, tools: Path) -> None:
    for name in ("pbcopy", "wl-copy"):
        tool(tools / name, f"/bin/cat > {tmp_path}/taken")
    assert copy_text("naïve", tmp_path / "home").startswith("Copied 5 characters (")
    assert (tmp_path / "taken").read_text() == "naïve"
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("", "this system has no pbcopy, and no wl-copy under Wayland"),
        ("/bin/cat > /dev/null; exit 3", "wl-copy failed with exit status 3"),
        ("exec /bin/sleep 60", "wl-copy did not finish within 0.1 s"),
    ],
)
def test_where_no_tool_takes_the_text_it_is_said_why(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    monkeypatch.setattr(external_programs, "PATIENCE_S", 0.1 if "sleep" in script else external_programs.PATIENCE_S)
    if script:
        tool(tools / "wl-copy", script)
    file = tmp_path / external_programs.FILE
    assert copy_text("naïve", tmp_path) == f"Not copied ({why}). The text, 5 characters, is in {file}."
    assert file.read_text() == "naïve"


def test_keys_are_listed_set_and_reset_in_lines(tmp_path: Path) -> None:
    lines = "/keys\n/keys explain f18, leader y\n/keys explain f3\n/keys explian f3\n/keys explain default\n"
    status, out, err = piped(lines, "fast")
    assert status == 0
    assert "explain (Explain): F2, Ctrl+X E\n" in out
    assert "explain (Explain): F18, Ctrl+X Y." in err
    assert "explain keeps its keys: f3 is already a key of what_if." in err
    assert "there is no such action; the nearest: explain" in err
    assert err.rstrip().endswith("explain (Explain): F2, Ctrl+X E.")


def test_a_reply_is_revised_in_lines_and_the_old_one_is_kept(data: Path) -> None:
    status, out, _ = piped("hi\n/revise My own words.\nmore\n/branches\n", "fast")
    assert status == 0
    assert "(version 2 of 2): My own words.\n(edited by you)" in out
    assert [message.text for message in last_path(data)][1] == "My own words."
    assert "fast, edited by you, version 2 of 2, shown now: My own words." in out
