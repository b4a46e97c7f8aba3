"""Settings: a round trip, several windows that change them, and what can't be used."""

import fcntl
import json
import subprocess
import sys
import threading
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st
from textual.widgets import Input, OptionList, TextArea

from tests.app.conftest import Chat, Start
from tests.scripted_engine import model_spec
from tokamac.app import settings
from tokamac.app.chat.preferences import ChatOverrides, Preferences, as_settings, own_of
from tokamac.app.chat.settings_form import SAMPLING_FIELDS, THIS_CHAT, FieldError, Form, Sheet
from tokamac.app.chat.start import ChatOptions, begin
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.settings import CHAT_KV, Profile, Settings, differing, merged, why_no_name
from tokamac.app.store.store import Store
from tokamac.app.tui.screens.dialog import Tick
from tokamac.app.tui.screens.settings import ProfilesScreen, SettingsScreen, SystemScreen
from tokamac.engine.options import KVSpec, Sampling, TemplateOptions

EVERYTHING = Sampling(
    temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2, seed=3, max_tokens=99, stop=("a\n", "b"),
    stop_token_ids=(5, 6), min_tokens=4, logit_bias={9: -100, 3: 2.5}, presence_penalty=0.5, frequency_penalty=-0.25,
    xtc_probability=0.5, xtc_threshold=0.2, dry_multiplier=0.8, dry_base=2.0, dry_allowed_length=3,
    dry_sequence_breakers=("\n", "|"), order=("dry", "penalties", "top_k", "top_p", "min_p", "xtc", "temperature"),
)  # fmt: skip
TEXT = st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from('\n"\\\r\t'), max_size=30)
KEYS = st.lists(st.sampled_from(["f7", "ctrl+k", "[", '"']), max_size=3).map(tuple)


def test_converted_models_go_to_a_visible_folder_or_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKAMAC_DATA_DIR", str(tmp_path / "data"))
    assert Settings().models_path == tmp_path / "data" / "models"
    monkeypatch.delenv("TOKAMAC_DATA_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Settings().models_path == tmp_path / "Models" / "tokamac"
    assert Settings(models_folder="~/elsewhere").models_path == tmp_path / "elsewhere"


@given(
    st.builds(
        Settings,
        model=TEXT,
        theme=TEXT,
        system=TEXT,
        panel=st.booleans(),
        unload_after_min=st.none() | st.integers(0, 999),
        memory_gb=st.none() | st.floats(0.5, 512),
        parallel=st.integers(1, 256),
        models_folder=TEXT.filter(lambda text: text[:2] in ("~", "~/") or text[:1] != "~"),  # ~nobody is refused
        system_prompts=st.dictionaries(TEXT, TEXT, max_size=3),
        keys=st.dictionaries(TEXT, KEYS, max_size=3),
    ),
    st.dictionaries(
        TEXT.map("x".__add__), st.integers() | TEXT | st.booleans() | st.lists(TEXT, max_size=2), max_size=3
    ),
)
def test_what_is_written_is_read(chosen: Settings, unknown: dict[str, Any]) -> None:
    written = settings.dumps(chosen, tomlkit.dumps(unknown))
    read = settings.loads(written)
    assert read.settings == chosen
    assert len(read.warnings) == len(unknown)
    assert {key: value for key, value in tomllib.loads(written).items() if key in unknown} == unknown


BY_HAND = """\
# Mine. Do not touch.
titles = "words"  # the model's are odd
theme = "nord"

future = [
    1,  # of a later version
]
panel = true  # wide screen

[keys]  # as in vim
# leave is far away
leave = ["f10"]
explain = [1]

[system_prompts]
terse = 'Be brief.'   # for Monday
[sampling]
top_k = 5 # five
seed = 3
"""

CHANGED = """\
# Mine. Do not touch.
titles = "words"  # the model's are odd

future = [
    1,  # of a later version
]
panel = false  # wide screen
memory_gb = 14.0

[keys]  # as in vim
# leave is far away
leave = ["f10"]
explain = [1]

[system_prompts]
terse = 'Be brief.'   # for Monday
long = \"\"\"
Be
long.\"\"\"
[sampling]
# five
seed = 4
"""


def test_comments_order_and_unknown_keys_survive_a_change() -> None:
    read = settings.loads(BY_HAND).settings
    prompts = {**read.system_prompts, "long": "Be\nlong."}
    chosen = replace(read, theme="", panel=False, memory_gb=14.0, sampling=Sampling(seed=4), system_prompts=prompts)
    written = settings.dumps(chosen, BY_HAND)
    assert written == CHANGED
    assert settings.loads(written).settings == chosen
    assert settings.dumps(chosen, written) == written, "nothing to change"


def test_a_default_that_has_a_comment_is_written() -> None:
    assert settings.dumps(Settings(), "panel = false  # narrow\nkeep_awake = false\n") == "panel = true  # narrow\n"


@pytest.mark.parametrize("text", [
    'kv.window = 512  # half\nkv.keep = 4\ntheme = "nord"\n', 'sampling = {top_k = 5}\nkv = {window = 512, keep = 4}\n',
    "[kv]\nwindow = 512\n[other]\nx = 1\n[kv.more]\ny = 1\n", "kv = 3\nsampling = []\n",
])  # fmt: skip
def test_tables_are_changed_however_they_are_written(text: str) -> None:
    chosen = replace(
        settings.loads(text).settings, kv=KVSpec(8, 8, window=256, keep=8), sampling=Sampling(seed=1), theme="light"
    )
    written = settings.dumps(chosen, text)
    assert settings.loads(written).settings == chosen
    assert "# half" in written or "# half" not in text
    assert [each for each in ("[kv.more]", "[other]") if each in text and each not in written] == []


def test_of_options_that_can_not_hold_together_the_chosen_ones_are_written() -> None:
    text = "[kv]\nwindow = 100\nkeep = 200\n"
    read = settings.loads(text)
    assert read.settings.kv == KVSpec(window=100, keep="system"), "the first one holds"
    assert "keep = 200" in read.warnings[0]
    chosen = replace(read.settings, kv=KVSpec(window=300, keep="system"))
    assert settings.loads(settings.dumps(chosen, text)) == settings.LoadedSettings(chosen)


def test_reading_loads_no_editor_of_toml(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(BY_HAND)
    code = "import sys; from pathlib import Path; from tokamac.app import settings; import tokamac.app.tui.app"
    code += "; print(settings.load(Path(sys.argv[1])).settings.theme, 'tomlkit' in sys.modules)"
    arguments = [sys.executable, "-c", code, tmp_path / "settings.toml"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout == "nord False\n"


@pytest.mark.parametrize("sampling", [EVERYTHING, replace(EVERYTHING, dry_sequence_breakers=(), logprobs=2)])
def test_every_option_is_written_and_read(tmp_path: Path, sampling: Sampling) -> None:
    path = tmp_path / "deep" / "settings.toml"
    chosen = Settings(sampling=sampling, kv=KVSpec(8, 4, window=512, keep="system"))
    settings.save(path, chosen)
    assert settings.load(path) == settings.LoadedSettings(chosen)
    assert [file.name for file in path.parent.iterdir()] == ["settings.toml"]


def test_a_bias_and_an_order_are_written_as_lists(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('[sampling]\nlogit_bias = [[9, -100]]\norder = ["dry"]\nstop_token_ids = [5]\n')
    read = settings.load(path)
    assert read.settings.sampling == Sampling(logit_bias={9: -100}, stop_token_ids=(5,))
    assert [warning for warning in read.warnings if "order" in warning and "leaves out" in warning]


def test_the_form_has_every_option_but_those_of_single_requests() -> None:
    assert [field.name for field in SAMPLING_FIELDS] != []
    assert {field.name for field in SAMPLING_FIELDS} == {each.name for each in fields(Sampling)} - {
        "logprobs",
        "json_schema",
        "loop_grace",
    }


def filled(**texts: str) -> Sheet:
    """Read the form with these texts, and the defaults in the other fields."""
    return Form().read({**Form().defaults, **texts})


@pytest.mark.parametrize("sampling", [Sampling(), EVERYTHING])
def test_what_the_form_shows_it_reads(sampling: Sampling) -> None:
    form = Form()
    assert form.read(form.texts(Sheet(sampling=sampling))).sampling == sampling
    assert filled(**{field.name: "" for field in SAMPLING_FIELDS}).sampling == Sampling(dry_sequence_breakers=())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("logit_bias", "5"), ("logit_bias", "a=1"), ("stop_token_ids", "end"), ("min_tokens", "few"),
        ("temperature", "99"), ("thinking", "loud"), ("keywords", "style"), ("key_bits", "7"),
        ("models_folder", "here"), ("models_folder", "~nobody-of-that-name"), ("panel", "perhaps"), ("titles", "me"),
    ],
)  # fmt: skip
def test_what_is_no_value_is_refused_at_its_field(name: str, text: str) -> None:
    form = Form()
    with pytest.raises(FieldError) as caught:
        filled(**{name: text})
    assert caught.value.name == name
    assert form.problems({**form.defaults, name: text, "top_k": "many"}).keys() == {name, "top_k"}


def test_values_that_are_wrong_together_are_told_at_one_of_them() -> None:
    form = Form()
    problems = form.problems({**form.defaults, "min_tokens": "10", "max_tokens": "5"})
    assert list(problems) == ["max_tokens"]
    assert "above max tokens" in problems["max_tokens"]


def test_a_chat_stored_before_there_were_more_options_is_read() -> None:
    stored = {
        "temperature": 0.3, "top_p": None, "top_k": None, "min_p": None, "repetition_penalty": None, "seed": 4,
        "max_tokens": None, "stop": ["end"],
    }  # fmt: skip
    assert own_of({"sampling": stored}) == ChatOverrides(Sampling(temperature=0.3, seed=4, stop=("end",)))


def test_of_a_chats_own_only_what_was_changed_is_stored() -> None:
    assert as_settings(ChatOverrides(Sampling(top_k=5, logit_bias={1: 2})))["sampling"] == {
        "top_k": 5,
        "logit_bias": ((1, 2.0),),
    }
    template = TemplateOptions("off", 100, {"a": [1, "b\n"]})
    for own in (ChatOverrides(EVERYTHING), ChatOverrides(Sampling()), ChatOverrides(EVERYTHING, "", template)):
        assert own_of(json.loads(json.dumps(as_settings(own)))) == own
    assert set(as_settings(ChatOverrides()).values()) == {None}


def test_no_file_is_the_defaults(tmp_path: Path) -> None:
    assert settings.load(tmp_path / "none.toml") == settings.LoadedSettings(Settings())


def test_damaged_files_are_moved_aside_and_replace_none(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    (tmp_path / "settings.damaged3.toml").symlink_to(tmp_path / "gone")
    asides = ["settings.damaged.toml", "settings.damaged2.toml", "settings.damaged4.toml"]
    for number, name in enumerate(asides):
        path.write_bytes(b"theme = \xff%d" % number)
        (warning,) = settings.load(path).warnings
        assert "damaged" in warning
        assert f"it is now {name}," in warning
        assert not path.exists()
    assert [(tmp_path / name).read_bytes() for name in asides] == [b"theme = \xff%d" % number for number in range(3)]


def test_where_too_many_are_set_aside_the_damaged_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "MOST_ASIDE", 2)
    path = tmp_path / "settings.toml"
    for _ in range(2):
        path.write_text("theme = [")
        (warning,) = settings.load(path).warnings
    assert "too many" in warning
    assert path.read_text() == "theme = ["


def test_unknown_keys_are_named_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('modle = "x"\nsampling = {temprature = 1}\n[future]\na = 2020-01-01\n')
    read = settings.load(path)
    assert [word in " ".join(read.warnings) for word in ("modle", "temprature", "future")] == [True] * 3
    settings.save(path, read.settings)
    assert tomllib.loads(path.read_text())["future"]["a"].year == 2020
    assert tomllib.loads(path.read_text())["sampling"] == {"temprature": 1}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("model = 3", "model"), ("[sampling]\ntemperature = -1\ntop_p = 0.5", "temperature"),
        ('[sampling]\ntop_k = "many"', "top_k"), ("[kv]\nkey_bits = 7", "key_bits"), ("sampling = 3", "sampling"),
        ('titles = "nobody"', "titles"), ("unload_after_min = -1", "unload_after_min"),
        ("parallel = 0", "not a number of replies at once"), ('keys = "f7"', "keys"),
        ('models_folder = "~nobody-of-that-name/m"', "no home folder for ~nobody-of-that-name/m"),
        ('[tools]\nfolders = ["~nobody-of-that-name/m"]', "no home folder for ~nobody-of-that-name/m"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_used_is_named_and_those_beside_it_hold(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(f'theme = "nord"\n{line}\n')
    read = settings.load(path)
    assert named in read.warnings[0]
    assert read.settings == Settings(theme="nord", sampling=Sampling(top_p=0.5 if "top_p" in line else None))


@pytest.mark.parametrize("folder", ["~nobody-of-that-name/m", "circle", "a\\u0000b"])
def test_a_chat_starts_whatever_its_tools_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "settings.toml").write_text(f'[tools]\nfolders = ["{folder}"]\n')
    begun = begin(ChatOptions("guide", settings_path=tmp_path / "settings.toml", log_path=tmp_path / "engine.log"))
    assert len(begun.warnings) == folder.startswith("~")
    assert begun.preferences.toolbox.names


@pytest.mark.parametrize(
    ("line", "named"),
    [("system_prompts.terse = 3", "terse"), ("keys.explain = [1]", "explain"), ('keys.help = [""]', "help")],
)
def test_an_entry_of_no_use_is_named_and_written_back(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(f'{line}\nsystem_prompts.brief = "Be brief."\nkeys.leave = "f10"\n')
    before = tomllib.loads(path.read_text())
    read = settings.load(path)
    (warning,) = read.warnings
    assert named in warning
    assert read.settings.system_prompts == {"brief": "Be brief."}
    assert read.settings.keys == {"leave": ("f10",)}
    settings.save(path, read.settings)
    assert tomllib.loads(path.read_text()) == before


def test_a_text_of_several_lines_is_written_as_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    settings.save(path, Settings(system_prompts={"Code review": 'Look for "bugs".\nSay \\n where.\n'}))
    assert '"""\nLook for "bugs".\nSay \\\\n where.\n"""' in path.read_text()
    assert settings.load(path).settings.system_prompts == {"Code review": 'Look for "bugs".\nSay \\n where.\n'}


# In the chat ----------------------------------------------------------------------------------------------------------------


async def choose(c: Chat, temperature: str, *, own: bool) -> str:
    """Set the temperature in the form, for this chat only or not; return what the form said before."""
    screen = await c.opened("ctrl+t", SettingsScreen)
    await c.find_setting("own")
    if (screen.texts["own"] == "on") is not own:
        await c.pilot.press("enter")
    before = screen.texts["temperature"]
    await c.write_setting("temperature", temperature)
    await c.close_settings()
    return before


@pytest.mark.parametrize("text", ["", "soon", "-1", "1.5", "²", "9" * 5000])
def test_minutes_that_are_no_number_are_refused_in_a_line(text: str) -> None:
    with pytest.raises(FieldError, match=r"^Unload after: .{1,60} is not valid"):
        filled(unload_after_min=text)


@pytest.mark.parametrize(("limit", "minutes", "read"), [("", " 7 ", (None, 7)), ("14.5", "auto", (14.5, None))])
def test_memory_settings_are_read(limit: str, minutes: str, read: tuple[float | None, int | None]) -> None:
    values = filled(memory_gb=limit, unload_after_min=minutes).settings
    assert (values.memory_gb, values.unload_after_min) == read


@pytest.mark.parametrize("limit", ["0", "-3", "nan", "inf", "1e9"])
def test_a_memory_limit_that_is_no_size_is_refused(limit: str) -> None:
    with pytest.raises(FieldError, match="not a memory size"):
        filled(memory_gb=limit)


def test_a_memory_limit_is_kept_and_named_where_it_is_none(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    settings.save(path, Settings(memory_gb=14.5))
    assert settings.load(path).settings.memory_bytes == 14_500_000_000
    path.write_text("memory_gb = 14\n")  # as a person writes it
    assert settings.load(path) == settings.LoadedSettings(Settings(memory_gb=14.0))
    path.write_text('memory_gb = "much"\n')
    read = settings.load(path)
    assert read.settings.memory_bytes is None
    assert "memory_gb is 'much'" in read.warnings[0]


async def test_a_chat_keeps_its_own_sampling_and_others_have_that_of_every_chat(chat: Start, tmp_path: Path) -> None:
    async with chat("fast") as c:
        await c.ask("one")
        await choose(c, "0.25", own=True)
        assert c.session.sampling.temperature == 0.25
        await c.pilot.press("ctrl+n")
        assert c.session.sampling == Sampling()
        await choose(c, "0.5", own=False)
        assert settings.load(tmp_path / "settings.toml").settings.sampling == Sampling(temperature=0.5)
        with Store.open(tmp_path / "chats" / "chats.db") as store:
            first = store.chats()[0].id
    async with chat("fast", chat=first) as c:
        await c.until(lambda: c.session.turns)
        assert c.session.sampling.temperature == 0.25
        await c.pilot.press("ctrl+t")
        await c.until(lambda: "These apply to this chat only" in c.screen_text())
        await c.pilot.press("escape")
        assert await choose(c, "0.5", own=False) == "0.5", (
            "given up, it has what every chat has, not the other way round"
        )
        await c.pilot.press("ctrl+n")
        assert c.session.sampling.temperature == 0.5
    with Store.open(tmp_path / "chats" / "chats.db") as store:
        assert store.chat(first).settings == {}


async def test_what_a_chat_without_a_message_has_of_its_own_is_kept_with_its_first(chat: Start, tmp_path: Path) -> None:
    async with chat("fast") as c:
        await choose(c, "0.25", own=True)
        await c.ask("one")
    with Store.open(tmp_path / "chats" / "chats.db") as store:
        assert store.chats()[0].settings["sampling"]["temperature"] == 0.25
    assert not (tmp_path / "settings.toml").exists() or "0.25" not in (tmp_path / "settings.toml").read_text()


async def test_the_command_line_goes_before_what_a_chat_has_of_its_own_until_something_is_chosen(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("one")
        await choose(c, "0.25", own=True)
    async with chat("fast", resume=True, sampling=Sampling(temperature=0.0), system="Shout.") as c:
        await c.until(lambda: c.session.turns)
        assert (c.session.sampling.temperature, c.session.system) == (0.0, "Shout.")
        await choose(c, "0.75", own=True)
        assert (c.session.sampling.temperature, c.session.system) == (0.75, "Shout.")


@pytest.mark.parametrize(
    "stored",
    [
        {"sampling": {"temperature": 99}},
        {"sampling": {"heat": 1}},
        {"sampling": 3, "system": 4},
        {"template": {"thinking": "x"}},
    ],
)
def test_what_can_not_be_read_of_a_chats_own_does_not_hold(stored: dict[str, Any]) -> None:
    assert own_of(stored) == ChatOverrides()


def named(screen: SystemScreen) -> list[str]:
    listed = screen.query_one("#library", OptionList)
    return [str(listed.get_option_at_index(i).prompt).split("  ")[0] for i in range(listed.option_count)]


async def test_system_prompts_are_named_picked_replaced_deleted_and_restored(chat: Start, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    async with chat("fast", size=(100, 40)) as c:
        screen = await c.opened("ctrl+s", SystemScreen)
        for name, text in (("terse", "Be brief."), ("[b]odd[/]", "Be\nodd.")):
            screen.query_one("#system", TextArea).text = text
            screen.query_one("#name", Input).value = name
            screen.query_one("#name", Input).focus()
            await c.pilot.press("enter")
        assert named(screen) == ["[b]odd[/]", "terse"]
        assert settings.load(file).settings.system_prompts == {"terse": "Be brief.", "[b]odd[/]": "Be\nodd."}
        screen.query_one("#system", TextArea).text = "Be briefer."
        screen.query_one("#name", Input).value = "terse"
        await c.pilot.press("enter")
        assert "Press Enter again to overwrite it" in c.screen_text()
        assert settings.load(file).settings.system_prompts["terse"] == "Be brief."
        await c.pilot.press("enter")
        assert settings.load(file).settings.system_prompts["terse"] == "Be briefer."
        screen.query_one("#library").focus()
        await c.pilot.press("home", "ctrl+d")
        assert named(screen) == ["terse"]
        await c.pilot.press("ctrl+z")
        assert named(screen) == ["[b]odd[/]", "terse"]
        await c.pilot.press("escape")
        assert c.session.system == "", "a library is not yet a choice"
        screen = await c.opened("ctrl+s", SystemScreen)
        screen.query_one("#library").focus()
        await c.pilot.press("end", "enter", "ctrl+s")
        await c.until(lambda: c.session.system == "Be briefer.")
    assert settings.load(file).settings.system == "Be briefer."


async def test_a_chat_has_its_own_system_prompt(chat: Start, tmp_path: Path) -> None:
    async with chat("fast") as c:
        await c.ask("one")
        screen = await c.opened("ctrl+s", SystemScreen)
        screen.query_one("#system", TextArea).text = "Only here."
        screen.query_one("#own", Tick).value = True
        await c.pilot.press("ctrl+s")
        await c.until(lambda: c.session.system == "Only here.")
        await c.pilot.press("ctrl+n")
        assert c.session.system == ""
    async with chat("fast", resume=True) as c:
        await c.until(lambda: c.session.system == "Only here.")
        screen = await c.opened("ctrl+s", SystemScreen)
        assert screen.query_one("#own", Tick).value
    assert settings.load(tmp_path / "settings.toml").settings.system == ""


def test_a_chat_keeps_its_system_prompt_unless_told_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[kv]\nwindow = 512\n")
    assert settings.load(file).settings.kv == KVSpec(window=512, keep="system")
    file.write_text("[kv]\nwindow = 512\nkeep = 4\n")
    read = settings.load(file).settings
    assert read.kv == KVSpec(window=512)
    file.write_text(settings.dumps(read))
    assert settings.load(file).settings == read
    assert "kv" not in settings.dumps(Settings()).replace("[kv]", "")


# Settings that several windows change: what one changes is written, what others changed stays.

PROMPTS = st.dictionaries(st.sampled_from("abcd"), st.sampled_from("xyz"), max_size=4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokamac" / "settings.toml"


def window(path: Path) -> Preferences:
    read = settings.load(path)
    return Preferences(read.settings, path, told=read.warnings)


def stored(path: Path) -> Settings:
    return settings.load(path).settings


def test_two_windows_keep_what_the_other_changed(path: Path) -> None:
    settings.save(path, Settings(system_prompts={"old": "Old."}))
    a, b = window(path), window(path)
    assert b.keep(replace(b.settings, system_prompts={"old": "Old.", "terse": "Be brief."})) == ""
    assert b.keep(replace(b.settings, theme="nord")) == ""
    assert a.keep(replace(a.settings, panel=False)) == ""
    assert stored(path) == Settings(panel=False, theme="nord", system_prompts={"old": "Old.", "terse": "Be brief."}), (
        "both windows' changes"
    )
    assert a.keep(replace(a.settings, system_prompts={"own": "Mine."})) == ""
    assert stored(path).system_prompts == {"terse": "Be brief.", "own": "Mine."}, "the deleted one alone is gone"
    assert a.settings.theme == "", "what the other window chose does not hold here"


def test_what_was_written_by_hand_meanwhile_stays(path: Path) -> None:
    a = window(path)
    path.parent.mkdir(parents=True)
    path.write_text('unload_after_min = 5\nfuture = 1\n[sampling]\ntop_k = 5\n[keys]\nleave = "f10"\n')
    assert a.keep(replace(a.settings, sampling=Sampling(temperature=0.5))) != "", "an unknown key is named"
    assert stored(path) == Settings(
        unload_after_min=5, sampling=Sampling(temperature=0.5, top_k=5), keys={"leave": ("f10",)}
    )
    assert "future = 1\n" in path.read_text()
    assert a.keep(replace(a.settings, panel=False)) == "", "and named once"


def test_what_can_not_hold_together_is_what_was_chosen_last(path: Path) -> None:
    held, wanted, other = KVSpec(), KVSpec(keep=600), KVSpec(window=512, keep=4)
    with pytest.raises(Exception, match="keep"):
        replace(other, keep=600)
    assert merged(Settings(kv=other), Settings(kv=held), Settings(kv=wanted)).kv == wanted


@given(now=PROMPTS, held=PROMPTS, wanted=PROMPTS)
def test_entries_are_merged_name_by_name(now: dict[str, str], held: dict[str, str], wanted: dict[str, str]) -> None:
    def of(prompts: dict[str, str]) -> Settings:
        return Settings(system_prompts=prompts)

    found = merged(of(now), of(held), of(wanted)).system_prompts
    for name in "abcd":
        changed = held.get(name) != wanted.get(name)
        assert found.get(name) == (wanted if changed else now).get(name)


def test_a_file_that_is_damaged_meanwhile_is_moved_aside_and_said(path: Path) -> None:
    settings.save(path, Settings(theme="nord", system_prompts={"terse": "Be brief."}))
    a = window(path)
    path.write_text("theme = [")
    said = a.keep(replace(a.settings, panel=False))
    assert "damaged" in said
    assert "settings.damaged.toml" in said
    assert path.with_name("settings.damaged.toml").read_text() == "theme = ["
    assert stored(path) == Settings(theme="nord", panel=False, system_prompts={"terse": "Be brief."})


def test_a_damaged_file_that_can_not_be_moved_is_not_written_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = window(path)
    path.parent.mkdir(parents=True)
    path.write_text("theme = [")
    monkeypatch.setattr(settings, "MOST_ASIDE", 2)
    path.with_name("settings.damaged.toml").write_text("an older one")
    said = a.keep(replace(a.settings, panel=False))
    assert "could not be written" in said
    assert "damaged" in said
    assert path.read_text() == "theme = ["


def test_a_file_that_can_not_be_read_is_left_alone_and_the_change_is_written_later(path: Path) -> None:
    a = window(path)
    path.mkdir(parents=True)
    assert "could not be written" in a.keep(replace(a.settings, theme="nord"))
    assert path.is_dir()
    path.rmdir()
    assert a.keep(replace(a.settings, panel=False)) == ""
    assert stored(path) == Settings(theme="nord", panel=False)


def test_a_window_with_the_lock_is_waited_for_but_not_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = window(path)
    path.parent.mkdir(parents=True)
    with path.with_name(".settings.toml.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(settings, "PATIENCE_S", 0.05)
        assert "another tokamac keeps it busy" in a.keep(replace(a.settings, panel=False))
        assert not path.exists()
        monkeypatch.setattr(settings, "PATIENCE_S", 60.0)
        release = threading.Timer(0.1, lambda: fcntl.flock(other, fcntl.LOCK_UN))
        release.start()
        assert a.keep(replace(a.settings, panel=False)) == ""
        release.join()
    assert stored(path) == Settings(panel=False)


def test_many_windows_at_once_lose_nothing(path: Path) -> None:
    windows = [window(path) for _ in range(6)]

    def work(number: int) -> None:
        for step in range(5):
            held = windows[number].settings
            prompts = {**held.system_prompts, f"{number}-{step}": "x"}
            assert windows[number].keep(replace(held, system_prompts=prompts)) == ""

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(windows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(stored(path).system_prompts) == {f"{number}-{step}" for number in range(6) for step in range(5)}


async def test_the_library_shows_and_keeps_what_another_window_saved(chat: Start, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    async with chat("fast", size=(100, 40)) as c:
        other = window(file)
        assert other.keep(replace(other.settings, theme="nord", system_prompts={"theirs": "Be theirs."})) == ""
        await c.pilot.press("ctrl+b")
        assert (stored(file).panel, stored(file).theme) == (False, "nord")
        screen = await c.opened("ctrl+s", SystemScreen)
        assert screen.query_one("#library", OptionList).option_count == 1
        screen.query_one("#system", TextArea).text = "Be mine."
        screen.query_one("#name", Input).value = "mine"
        screen.query_one("#name", Input).focus()
        await c.pilot.press("enter")
        assert stored(file).system_prompts == {"theirs": "Be theirs.", "mine": "Be mine."}


# Profiles ---------------------------------------------------------------------------------------------------------------------

PROFILES = """# mine
profile = "coding"
[profiles.coding]  # for code
model = "steady"
temperature = 0.25 # cool
temprature = 1
window = 50
keep = 100
tools = "clock"

[keys]
explain = "f8"

[profiles."two words"]
system = "Be brief."
top_k = "default"
"""


def test_a_profile_is_read_and_what_is_wrong_with_it_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(PROFILES)
    read = settings.load(path)
    assert read.settings.profiles == {
        "coding": Profile("steady", options={"temperature": 0.25, "window": 50}),
        "two words": Profile(system="Be brief.", options={"top_k": "default"}),
    }
    found = [warning.partition(":")[0] for warning in read.warnings]
    assert found == ["settings.toml line 6", "settings.toml line 9", "settings.toml line 8"]
    assert "did you mean temperature?" in read.warnings[0]


def test_a_profile_is_changed_in_place_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(PROFILES)
    known = settings.load(path).settings
    changed = Profile("slow", "Say\nwhy.", options={"temperature": 0.5, "stop": ("a", "b")})
    settings.save(path, replace(known, profiles={"coding": changed, "new": Profile("fast")}))
    text = path.read_text()
    assert settings.load(path).settings.profiles == {"coding": changed, "new": Profile("fast")}
    assert all(kept in text for kept in ("# mine", "# for code", "# cool", "temprature = 1", 'explain = "f8"'))
    assert "two words" not in text


def test_what_a_profile_does_not_name_is_as_in_the_settings() -> None:
    profile = Profile(options={"temperature": 0.25, "top_k": "default"})
    assert profile.over(Sampling(top_k=5, top_p=0.5)) == Sampling(temperature=0.25, top_p=0.5)
    assert profile.over(CHAT_KV) is CHAT_KV
    for kept, everywhere in ((Sampling(top_k=5), Sampling(seed=1)), (KVSpec(window=50), CHAT_KV), (CHAT_KV, KVSpec())):
        assert Profile(options=differing(kept, everywhere)).over(everywhere) == kept
    assert Profile(options=differing(Sampling(top_k=5), Sampling())).over(Sampling(top_k=9)) == Sampling(top_k=5)


@pytest.mark.parametrize("name", ["", "none", "save it", "x" * 50, "a\nb"])
def test_a_name_that_no_profile_can_have_is_refused(name: str) -> None:
    assert why_no_name(name)
    assert not why_no_name("Code review")


async def test_a_profile_is_saved_applied_shown_and_goes_on_in_new_chats(chat: Start, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    async with chat("fast", size=(120, 40)) as c:
        await c.send("/profile nothing")
        await c.until(lambda: "There are no profiles yet" in c.notices)
        c.app.chat.preferences.choose_system("Be brief.", own=True)
        c.app.chat.preferences.give(c.session)
        await choose(c, "0.25", own=True)
        await c.send("/profile save terse")
        await c.until(lambda: "Saved the profile terse" in c.notices)
        expected = Profile("fast", "Be brief.", options={"temperature": 0.25})
        assert settings.load(file).settings.profiles == {"terse": expected}
        await c.until(lambda: "· terse" in c.screen_text())
        await c.pilot.press("ctrl+n")
        assert (c.session.system, c.session.sampling.temperature, c.session.profile) == ("Be brief.", 0.25, "terse")
        await choose(c, "0.5", own=True)
        assert c.session.profile == "terse*"
        await c.send("/profile none")
        await c.until(lambda: c.session.profile == "")
        assert (c.session.system, c.session.sampling) == ("", Sampling())
        await c.send("/profile trse")
        await c.until(lambda: "did you mean terse" in c.notices)
        await c.ask("one")
        await c.send("/profile terse")
        await c.until(lambda: c.session.profile == "terse")
        held = c.held
    async with chat("steady") as c:  # the last one goes on; the model is the one that was asked for
        await c.ready()
        assert (c.session.system, c.session.profile, c.session.engine.load.model) == ("Be brief.", "terse", "steady")
        await c.send("/profile terse")
        await c.until(lambda: c.session.engine.load.model == "fast" and c.session.engine.phase is EnginePhase.IDLE)
        await c.send("/profile delete terse")
        await c.until(lambda: "Deleted the profile terse" in c.notices)
        await c.pilot.press("ctrl+n")
        assert (c.session.system, c.session.profile) == ("", "")
    async with chat("fast", chat=held, ready=False) as c:
        await c.until(lambda: c.session.turns)
        assert (c.session.system, c.session.profile) == ("Be brief.", "terse*")


async def test_profiles_are_picked_saved_deleted_and_brought_back(chat: Start, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[profiles.away]\nmodel = "org/none"\n[profiles.hot]\ntemperature = 0.9\nkey_bits = 8\n')
    async with chat("fast", size=(100, 40)) as c:
        await c.pilot.press("ctrl+x", "p")
        screen = await c.on(ProfilesScreen)
        await c.pilot.press("down")
        await c.until(lambda: "org/none, which is not on this disk" in c.screen_text())
        await c.pilot.press("enter")
        await c.until(lambda: "The profile away needs org/none" in c.notices)
        assert c.session.profile == ""
        await c.pilot.press("ctrl+x", "p")
        screen = await c.on(ProfilesScreen)
        await c.pilot.press("down", "down")
        await c.until(lambda: "Temperature         0.9" in c.screen_text())
        await c.pilot.press("tab", *"my", "space", *"own", "enter")
        await c.until(lambda: "my own" in settings.load(file).settings.profiles)
        await c.pilot.press("tab", *"hot", "enter")
        await c.until(lambda: "hot already exists" in c.screen_text())
        screen.query_one("#profiles").focus()
        await c.pilot.press("ctrl+d")
        await c.until(lambda: "my own" not in settings.load(file).settings.profiles)
        await c.pilot.press("ctrl+z")
        await c.until(lambda: "my own" in settings.load(file).settings.profiles)
        await c.pilot.press("home", "down", "down", "enter")
        await c.until(lambda: c.session.engine.load.kv.key_bits == 8 and c.session.engine.phase is EnginePhase.IDLE)
        assert (c.session.profile, c.session.sampling.temperature) == ("hot", 0.9)
        assert settings.load(file).settings.kv == CHAT_KV


async def test_the_profile_of_the_command_line_is_for_a_run_and_flags_win(chat: Start, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[profiles.hot]\nmodel = "steady"\ntemperature = 0.9\nsystem = "Be warm."\n')
    async with chat(None, profile="hot", system="Be cold.") as c:
        assert (c.session.engine.load.model, c.session.system, c.session.sampling.temperature) == (
            "steady",
            "Be cold.",
            0.9,
        )
        await c.ask("one")
    assert settings.load(file).settings.profile == ""
    async with chat("fast", resume=True, profile="", ready=False) as c:
        await c.until(lambda: c.session.turns)
        assert c.session.profile == ""


# The sheet --------------------------------------------------------------------------------------------------------------------


def test_the_sheet_has_a_line_for_each_option_of_the_template_and_says_what_a_model_can_not_take() -> None:
    info = model_spec("qwen", thinking_modes=("on", "off"), template_names=("enable_thinking", "style", "tools"))
    form = Form(info)
    template = TemplateOptions("low", 5, {"style": "brief", "depth": 3})
    texts = form.texts(Sheet(template))
    assert (texts["option:style"], texts["keywords"]) == ('"brief"', "depth=3")
    assert form.read(texts).template.values == template.values
    assert form.cautions(texts) == {
        "thinking": "qwen only takes on, off",
        "thinking_budget": "qwen does not mark its thinking",
        "keywords": "qwen does not read depth",
    }
    assert form.problems({**texts, "option:style": "[1"}).keys() == {"option:style"}
    assert not any(name.startswith("option:") for name in Form().fields)


async def test_settings_are_searched_walked_and_reset_by_keys(chat: Start, tmp_path: Path) -> None:
    async with chat("thinking", size=(60, 20)) as c:
        screen = await c.opened("ctrl+t", SettingsScreen)
        await c.until(lambda: "Temperature" in c.screen_text())
        await c.pilot.press(*"thinking")
        await c.until(lambda: "Temperature" not in c.screen_text())
        await c.pilot.press("right")
        await c.until(lambda: "● Thinking            on" in c.screen_text() and "● 1 differ" in c.screen_text())
        await c.pilot.press("ctrl+r")
        await c.until(lambda: "● Thinking" not in c.screen_text())
        await c.pilot.press("left", "down", "enter", *"few", "enter")
        await c.until(lambda: "Thinking budget: 'few' is not valid" in c.screen_text())
        await c.pilot.press("escape", "escape")
        assert (screen.texts["thinking"], screen.texts["thinking_budget"]) == ("off", "")
        await c.pilot.press(*"nothing", "enter")
        await c.until(lambda: "No matches." in c.screen_text())
        await c.pilot.press("escape", *["pagedown"] * 7)
        await c.find_setting("models_folder")
        await c.pilot.press("enter", *"/models", "enter")
        await c.find_setting("panel")
        await c.pilot.press("right", "ctrl+s")
        await c.until(lambda: c.app.screen is c.app.view)
        read = settings.load(tmp_path / "settings.toml").settings
        assert (read.models_folder, read.panel, read.template) == ("/models", False, TemplateOptions("off"))


def test_what_the_loaded_model_can_take_comes_before_what_it_can_not() -> None:
    titles = lambda info: [each.title for each in Form(info).groups if each.scope == THIS_CHAT]  # noqa: E731
    assert titles(model_spec("plain"))[-2:] == ["Thinking", "Chat template"]
    assert titles(model_spec("qwen", thinks=True)) == ["Sampling", "Thinking", "More about sampling", "Chat template"]
