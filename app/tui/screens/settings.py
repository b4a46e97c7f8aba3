"""Ctrl+T: all settings. Ctrl+S: the system prompt, for this or every chat, and a library of prompts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Button, Input, Label, OptionList, Static, TextArea
from textual.widgets.option_list import Option

from tokamac.engine.errors import ModelNotFoundError
from tokamac.engine.events import ModelSpec
from tokamac.engine.options import Sampling

from ...chat import setup
from ...chat.controller import ChatController, RefusedError
from ...chat.listing import excerpt
from ...chat.preferences import Written
from ...chat.settings_form import NOT_SET, SWITCH, THE_APP, THIS_CHAT, Field, Form, Sheet, described, summary
from ...models.local import require
from ...settings import Profile, default_models_folder
from ...text.sanitise import sanitise, sanitise_line
from ..theme import AUTOMATIC, FAINT
from ..widgets.prompt_input import TextBox, TextInput
from .dialog import Dialog, ListDialog, Tick, has_words

ONLY_HERE = "For this chat only"
NOT_USED = "Your draft; it is not applied yet. Ctrl+S applies it."
Prompts = Mapping[str, str]  # system prompts by name


class SystemScreen(Dialog[Written]):
    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("ctrl+s", "save", "Use", id="system.save", priority=True),
        Binding("ctrl+d", "delete", "Delete", id="system.delete"),
        Binding("ctrl+z", "undo", "Undo", id="system.undo"),
    ]

    def __init__(
        self,
        current: Written,
        prompts: Prompts,
        keep: Callable[[Prompts], None],
        *,
        draft: Written | None,
        leave: Callable[[Written | None], None],
    ) -> None:
        super().__init__()
        self._current = current
        self._draft = draft
        self._hand_over = leave
        self._prompts = dict(prompts)
        self._keep = keep
        self._deleted: list[tuple[str, str]] = []
        self._replacing = ""  # the name that another Enter overwrites

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box", can_focus=False) as box:
            box.border_title = "System prompt"
            yield Static(
                "Instructions for the model, before the conversation. Empty means none.", classes="note", markup=False
            )
            if self._draft is not None:
                yield Static(NOT_USED, id="draft", markup=False)
            shown = self._draft or self._current
            yield TextBox(sanitise(shown.text), compact=True, tab_behavior="focus", id="system")
            yield Tick(ONLY_HERE, value=shown.own, id="own")
            yield Label("Library", classes="group later")
            yield Static("", id="state", classes="note", markup=False)
            yield OptionList(markup=False, compact=True, id="library")
            with Horizontal(classes="field"):
                yield Label("Save it as")
                yield TextInput(placeholder="a name; Enter saves", id="name", compact=True)
            with Horizontal(classes="buttons"):
                yield Button("Apply", variant="primary", id="save", compact=True)
                if self._draft is not None:
                    yield Button("Discard", id="discard", compact=True)
                yield Button("Close", id="cancel", compact=True)

    def on_mount(self) -> None:
        self.say_keys("Ctrl+S applies", "Esc closes")
        self.query_one("#system").focus()
        self._list("Enter inserts · Ctrl+D deletes · Ctrl+Z restores" if self._prompts else "Empty so far.")

    def _list(self, state: str) -> None:
        listed = self.query_one("#library", OptionList)
        listed.clear_options()
        for name in sorted(self._prompts):
            note = Content.styled(f"  {excerpt(self._prompts[name])}", FAINT)
            listed.add_option(Option(Content(sanitise_line(name)) + note))
        listed.display = bool(self._prompts)
        self.query_one("#state", Static).update(state)

    @on(OptionList.OptionSelected)
    def picked(self, event: OptionList.OptionSelected) -> None:
        name = sorted(self._prompts)[event.option_index]
        self.query_one("#system", TextArea).text = sanitise(self._prompts[name])
        self.query_one("#name", Input).value = sanitise_line(name)
        self.query_one("#system").focus()

    @on(Input.Submitted, "#name")
    def named(self, event: Input.Submitted) -> None:
        name, text = event.value.strip(), self._text
        if not name or not text:
            self._say("Enter a name." if text else "Write the system prompt first.")
        elif self._prompts.get(name, text) != text and self._replacing != name:
            self._replacing = name
            self._say(f"{sanitise_line(name)} already exists. Press Enter again to overwrite it.")
        else:
            self._change({**self._prompts, name: text}, f"Saved as {sanitise_line(name)}.")

    def action_delete(self) -> None:
        index = self.query_one("#library", OptionList).highlighted
        if index is not None and self.query_one("#library").has_focus:
            name = sorted(self._prompts)[index]
            self._deleted.append((name, self._prompts[name]))
            self._change(
                {key: text for key, text in self._prompts.items() if key != name}, "Deleted. Ctrl+Z restores it."
            )

    def action_undo(self) -> None:
        if self._deleted:
            name, text = self._deleted.pop()
            self._change({name: text, **self._prompts}, f"{sanitise_line(name)} is restored.")

    def _change(self, prompts: dict[str, str], state: str) -> None:
        self._prompts = prompts
        self._replacing = ""
        self._keep(prompts)
        self._list(state)

    def _say(self, text: str) -> None:
        self.query_one("#state", Static).update(text)

    @property
    def _text(self) -> str:
        return self.query_one("#system", TextArea).text.strip()

    @property
    def _written(self) -> Written:
        return Written(self._text, self.query_one("#own", Tick).value)

    @on(Button.Pressed, "#save")
    def action_save(self) -> None:
        self.dismiss(self._written)

    @on(Button.Pressed, "#discard")
    def discard(self) -> None:
        self.query_one("#system", TextArea).text = sanitise(self._current.text)
        self.query_one("#own", Tick).value = self._current.own
        self.query_one("#draft").display = self.query_one("#discard").display = False
        self.query_one("#system").focus()

    @on(Button.Pressed, "#cancel")
    def action_leave(self) -> None:
        holds = sanitise(self._current.text).strip()
        self._hand_over(None if self._text == holds else self._written)
        self.dismiss(None)


EVERY_CHAT = "These apply to every chat without settings of its own."
OWN = "These apply to this chat only."
NOT_LOADED = "No model is loaded: what it can take is not known yet."
CHANGES = "Left and Right change it"
KEYS = ("Enter changes", "Ctrl+R: default", "Ctrl+Z undoes", "Esc saves and closes")
NAME_WIDE, TEXT_WIDE = 20, 18  # cells for a setting's name and its text; the rest of the row is its note
OWN_FIELD = Field("own", ONLY_HERE, EVERY_CHAT, str.strip, choices=SWITCH)
THEME_FIELD, KEYS_FIELD = (
    Field(name, name.capitalize(), f"Enter opens the list of {name if name == 'keys' else 'themes'}", str.strip)
    for name in ("theme", "keys")
)
APART = (OWN_FIELD, THEME_FIELD, KEYS_FIELD)  # rows that are no part of the sheet's texts


class SettingsScreen(ListDialog[Sheet]):
    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("ctrl+t,ctrl+s", "save", "Save", id="settings.save", show=False, priority=True),
        Binding("ctrl+r", "reset", "Default", id="settings.reset", priority=True),
        Binding("ctrl+z", "undo", "Undo", id="settings.undo", priority=True),
        Binding("left", "walk(-1)", "Choice before", id="settings.left", show=False, priority=True),
        Binding("right", "walk(1)", "Next choice", id="settings.right", show=False, priority=True),
    ]

    def __init__(
        self,
        current: Sheet,
        everywhere: Sheet,
        info: ModelSpec | None = None,
        *,
        do: Callable[[str, str], None] = lambda _, __: None,
        profile: str = "",
        chosen_apart: Callable[[], Mapping[str, bool]] = lambda: {"theme": False, "keys": False},
    ) -> None:
        super().__init__()
        self._do = do
        self._chosen_apart = chosen_apart
        self._everywhere = everywhere
        self._info = info
        self._current = current
        self._profile = profile
        self._form = Form(info)
        self.texts = self._form.texts(current) | {"own": _switched(current.own)}
        self._before = dict(self.texts)
        self._undone: list[dict[str, str]] = []
        self._fields = {field.name: field for field in (*self._form.fields.values(), *APART)}
        recommended = Sheet() if info is None else Sheet(sampling=Sampling().resolved(info.recommended))
        self._hints = {**self._form.texts(recommended), "models_folder": str(default_models_folder())}
        self._cautions: Mapping[str, str] = {}
        self._problem = ""

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield TextInput(placeholder="Type to search", id="search", compact=True)
            yield OptionList(markup=False, compact=True)
            yield Static("", id="about", classes="note", markup=False)
            yield TextInput(id="value", compact=True)

    def on_mount(self) -> None:
        self.say_keys(*KEYS)

    def on_screen_resume(self) -> None:
        self._list(self._chosen)

    @property
    def _editing(self) -> bool:
        return bool(self.query_one("#value", TextInput).display)

    @property
    def _chosen(self) -> str:
        option = self.query_one(OptionList).highlighted_option
        return "" if option is None else option.id or ""

    @on(Input.Changed, "#search")
    def search(self) -> None:
        self._list()

    def _list(self, at: str = "") -> None:
        self._cautions = self._form.cautions(self.texts)
        listed, wanted = self.query_one(OptionList), self.query_one("#search", TextInput).value.casefold()
        options = list(self._options(wanted.split()))
        names = [option.id or "" for option in options]
        begins = (name for name in names if name and _begins(self._fields[name], wanted))
        at = at if at in filter(None, names) else next(begins, next(filter(None, names), ""))
        listed.clear_options()
        listed.add_options(options)
        listed.highlighted = names.index(at) if at else None
        many = sum(self._differs(name) for name in self._form.fields)
        title = (
            "Settings",
            f"profile {sanitise_line(self._profile)}" if self._profile else "",
            f"● {many} differ" if many else "",
        )
        self.query_one(".box").border_title = " · ".join(filter(None, title))
        self._tell_about()

    def _options(self, words: Sequence[str]) -> Iterator[Option]:
        for scope, groups in groupby(self._form.groups, key=lambda group: group.scope):
            rows: list[Option] = []
            if scope == THIS_CHAT:
                rows += [self._option(OWN_FIELD)] if has_words(words, scope, ONLY_HERE, "own") else []
                rows += [_line(NOT_LOADED, "$text-warning")] if self._info is None and not words else []
            for group in groups:
                fields = [
                    each
                    for each in group.fields
                    if has_words(words, scope, group.title, each.name, each.label, each.note)
                ]
                rows += [_line(f"  {group.title}", FAINT)] if fields and group.title else []
                if group.part == "kv" and self._info is not None and fields:
                    rows += [
                        _line(f"  Here: {sanitise_line(note.text)}", "$text-warning") for note in self._info.model_notes
                    ]
                rows += map(self._option, fields)
            rows += [
                self._option(each) for each in APART[1:] if scope == THE_APP and has_words(words, scope, each.label)
            ]
            if rows:
                yield _line(scope, "bold $text-primary")
                yield from rows

    def _differs(self, name: str) -> bool:
        return self.texts[name] != self._form.defaults[name]

    def _option(self, field: Field) -> Option:
        name, chosen = field.name, self._chosen_apart()
        differs = chosen[name] if name in chosen else name in self._form.fields and self._differs(name)
        text, hint = self._text(name), self._hints.get(name, "")
        value = Content(text.ljust(TEXT_WIDE)) if text else Content.styled((hint or NOT_SET).ljust(TEXT_WIDE), FAINT)
        caution = self._cautions.get(name, "")
        note = Content.styled(f" {caution or field.note}", "$text-warning" if caution else FAINT)
        wide = (text or hint) and (len(text or hint) >= TEXT_WIDE or self.has_class("-tight"))
        mark = Content.styled("● " if differs else "  ", "$text-primary")
        return Option(mark + Content(field.label.ljust(NAME_WIDE)) + value + (Content("") if wide else note), name)

    def _text(self, name: str) -> str:
        if name == THEME_FIELD.name:
            return self.app.theme if self._chosen_apart()["theme"] else f"{AUTOMATIC} ({self.app.theme})"
        if name == KEYS_FIELD.name:
            return "yours" if self._chosen_apart()["keys"] else "default"
        return sanitise_line(self.texts.get(name, ""))

    @on(OptionList.OptionHighlighted)
    def _tell_about(self) -> None:
        about, name = self.query_one("#about", Static), self._chosen
        if (field := self._fields.get(name)) is None:
            about.update("" if self.query_one(OptionList).option_count else "No matches.")
            return
        caution = self._cautions.get(name, "")
        note = (OWN if self.texts["own"] == SWITCH[0] else EVERY_CHAT) if name == "own" else field.note
        style = "$text-error" if self._problem else "$text-warning" if caution else FAINT
        usual = f"Default: {self._form.defaults[name] or NOT_SET}" if name in self._form.fields else ""
        rest = " · ".join(filter(None, (usual, CHANGES if field.choices else "")))
        about.update(Content.styled(self._problem or caution or note, style) + "\n" + Content.styled(rest, FAINT))

    # Changes --------------------------------------------------------------------------------------------------------------

    @on(OptionList.OptionSelected)
    @on(Input.Submitted, "#search")
    def change(self) -> None:
        field = self._fields.get(self._chosen)
        if field is None or self._editing:
            return
        if field.choices:
            self.action_walk(1)
        elif field in APART:
            self._do(field.name, "")
        else:
            self._edit(field)

    def _edit(self, field: Field) -> None:
        value = self.query_one("#value", TextInput)
        value.value, value.placeholder = self.texts[field.name], self._hints.get(field.name, "")
        value.display = True
        value.focus()
        value.action_select_all()
        self.say_keys("Enter accepts", "Esc goes back")

    def _end_edit(self) -> None:
        self.query_one("#value", TextInput).display = False
        self.query_one("#search").focus()
        self.say_keys(*KEYS)
        self._problem = ""
        self._tell_about()

    @on(Input.Submitted, "#value")
    def edited(self, event: Input.Submitted) -> None:
        name = self._chosen
        if self._change(name, event.value.strip()):
            self._end_edit()

    def action_walk(self, by: int) -> None:
        field = self._fields.get(self._chosen)
        if field is not None and field.choices:
            text = self.texts[field.name].strip().lower()
            at = field.choices.index(text) + by if text in field.choices else 0
            self._change(field.name, field.choices[at % len(field.choices)])

    def action_reset(self) -> None:
        name = self._chosen
        if name in self._form.fields:
            self._change(name, self._form.defaults[name])
        elif name == "theme":
            self._do("theme", AUTOMATIC)
            self._list(name)

    def action_undo(self) -> None:
        if self._undone:
            self.texts = self._undone.pop()
            self._list(self._chosen)

    def _change(self, name: str, text: str) -> bool:
        texts = {**self.texts, name: text}
        if name == "own" and text != SWITCH[0] and self._current.own:
            usual, here = self._form.texts(self._everywhere), (g for g in self._form.groups if g.scope == THIS_CHAT)
            texts |= {each.name: usual[each.name] for group in here for each in group.fields}
        self._problem = next(iter(self._form.problems(texts).values()), "")
        if self._problem:
            self._tell_about()
            return False
        self._undone.append(self.texts)
        self.texts = texts
        self._list(name)
        return True

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        listing = action in ("move", "page", "walk", "reset", "undo")
        return not (listing and self._editing) and super().check_action(action, parameters)

    def action_leave(self) -> None:
        search = self.query_one("#search", TextInput)
        if self._editing:
            self._end_edit()
        elif search.value:
            search.value = ""
        else:
            self.action_save()

    def action_save(self) -> None:
        sheet = self._form.read(self.texts, own=self.texts["own"] == SWITCH[0])
        self.dismiss(None if self.texts == self._before else sheet)


def _switched(on: bool) -> str:
    return SWITCH[not on]


def _begins(field: Field, wanted: str) -> bool:
    return any(each.casefold().startswith(wanted) for each in (field.name, field.label))


def _line(text: str, style: str) -> Option:
    return Option(Content.styled(text, style), disabled=True)


NO_PROFILE = "The settings of every chat, and the model that is loaded."
EMPTY = (
    "No profiles yet. A profile is a model, its settings and a system prompt under a name, to be chosen again at once."
)
LABELS = 20  # cells for the name of a setting in the preview


class ProfilesScreen(Dialog[str]):
    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("ctrl+d", "delete", "Delete", id="profiles.delete", priority=True),
        Binding("ctrl+z", "undo", "Undo", id="profiles.undo", priority=True),
    ]

    def __init__(self, chat: ChatController) -> None:
        super().__init__()
        self._chat = chat
        self._names: list[str] = []
        self._deleted: list[tuple[str, Profile]] = []
        self._replacing = ""  # the name that another Enter overwrites

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box", can_focus=False) as box:
            box.border_title = "Profiles"
            yield OptionList(markup=False, compact=True, id="profiles")
            yield Static("", id="preview", markup=False)
            with Horizontal(classes="field"):
                yield Label("Save this chat's as")
                yield TextInput(placeholder="a name; Enter saves", id="name", compact=True)
            yield Static("", id="state", classes="note", markup=False)

    def on_mount(self) -> None:
        self.say_keys("Enter applies", "Ctrl+D deletes", "Tab: save", "Esc closes")
        self._list(self._chat.preferences.profile)
        self.query_one("#profiles" if self._names[1:] else "#name").focus()

    def _list(self, at: str) -> None:
        preferences = self._chat.preferences
        known, now = preferences.profiles(), preferences.profile
        self._names = ["", *sorted(known, key=str.casefold)]
        listed = self.query_one("#profiles", OptionList)
        listed.clear_options()
        for name in self._names:
            mark = Content.styled("● " if name == now else "  ", "$text-primary")
            note = summary(known[name]) if name else "no profile"
            listed.add_option(Option(mark + (sanitise_line(name) or "none") + Content.styled(f"  {note}", FAINT)))
        listed.highlighted = self._names.index(at) if at in self._names else 0
        self._preview()

    @property
    def _pointed_at(self) -> str:
        at = self.query_one("#profiles", OptionList).highlighted
        return "" if at is None else self._names[at]

    @on(OptionList.OptionHighlighted)
    def highlighted(self) -> None:
        self._preview()

    def _preview(self) -> None:
        profile = self._chat.preferences.settings.profiles.get(self._pointed_at)
        lines = [Content.styled(EMPTY if len(self._names) == 1 else NO_PROFILE, FAINT)]
        if profile is not None:
            said = described(profile)
            lines = [Content.styled(label.ljust(LABELS), FAINT) + text for label, text in said]
            try:
                require(profile.model or "", self._pointed_at)
            except ModelNotFoundError as error:
                lines.append(Content.styled(error.one_line(), "$text-warning"))
        self.query_one("#preview", Static).update(Content("\n").join(lines))

    @on(OptionList.OptionSelected)
    def picked(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._names[event.option_index])

    @on(Input.Submitted, "#name")
    def named(self, event: Input.Submitted) -> None:
        name = event.value.strip()
        taken = name in self._chat.preferences.profiles() and name != self._chat.preferences.profile
        if taken and self._replacing != name:
            self._replacing = name
            self._say(f"{sanitise_line(name)} already exists. Press Enter again to overwrite it.")
            return
        self._replacing = ""
        try:
            said = setup.save_profile(self._chat, name, again=taken)
        except RefusedError as error:
            self._say(error.one_line())
            return
        event.input.value = ""
        self._list(name)
        self._say(said)
        self.query_one("#profiles").focus()

    def action_delete(self) -> None:
        name = self._pointed_at
        if name and self.query_one("#profiles").has_focus:
            self._deleted.append((name, self._chat.preferences.settings.profiles[name]))
            setup.delete_profile(self._chat, name)
            self._list("")
            self._say(f"{sanitise_line(name)} is deleted. Ctrl+Z restores it.")

    def action_undo(self) -> None:
        if self._deleted:
            name, profile = self._deleted.pop()
            problem = self._chat.preferences.keep_profile(name, profile)
            self._list(name)
            self._say(problem or f"{sanitise_line(name)} is restored.")

    def _say(self, text: str) -> None:
        self.query_one("#state", Static).update(text)
