"""The dialog that an action opens on the screen, and what comes of it."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from textual.screen import Screen

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import Price

from ..backend.client import BackendEvent, Died
from ..backend.processes import ShellCommand, ShellEnding, ShellError, user_shell, working_folder
from ..backend.protocol import Loaded, LookedAt, StopLooking, WhatIf
from ..chat import actions, commands, setup
from ..chat.actions import LEADER
from ..chat.attachments import AttachError, Draft, output_of, pasted_picture, read_named, shell_command, unescaped
from ..chat.background import PATH, ContextUse, PriceQuestion
from ..chat.controller import ChatController, History, RefusedError, UserChoice, first_question, recording_of
from ..chat.external_programs import NotTakenError, copied_picture, open_address
from ..chat.listing import ChatSearch, MeaningSearch, excerpt
from ..chat.preferences import Written
from ..chat.session import Session
from ..chat.settings_form import Sheet
from ..chat.steps import EnginePhase, Revised, Step, TurnBegun
from ..store.values import StoreError
from ..text.sanitise import sanitise, sanitise_line
from ..tools.calls import Line
from ..tools.web import is_address
from .theme import AUTOMATIC
from .widgets.prompt_input import Prompt

if TYPE_CHECKING:
    from ..chat.conversation import Reply
    from .model_library import ModelLibrary
    from .screens.chats import Pick


class PathPrices:
    """What going on from each message would cost, as far as it is known; asks about the others while the engine is idle."""

    def __init__(self, session: Session, perform: Callable[[list[Step]], None]) -> None:
        self._session = session
        self._perform = perform
        self._asked: set[int] = set()
        self._known: dict[int, Price] = {}
        self._unpriced: set[int] = set()  # there is no price of these: they are not asked about again

    def look_up(self, keys: Sequence[int]) -> Mapping[int, Price]:
        prices = self._session.prices
        self._known |= {key: each.price for each in prices.known for key in self._own([each.question])}
        self._unpriced.update(self._own(prices.unpriced))
        missing = [key for key in keys if key not in self._known and key not in self._unpriced]
        if self._session.engine.phase is EnginePhase.IDLE and not set(self._own(prices.waiting)).issuperset(missing):
            self._asked.update(missing)
            self._perform(self._session.price_paths(missing))
        return self._known

    def _own(self, questions: Sequence[PriceQuestion]) -> Iterator[int]:
        return (each.key for each in questions if each.id == PATH and each.key is not None and each.key in self._asked)


class Dialogs:
    """Opens dialogs above ``screen``. Their modules are imported when they are first wanted: the chat opens sooner."""

    def __init__(self, chat: ChatController, screen: Screen[None], library: "Callable[[], ModelLibrary]") -> None:
        self.automatic_theme = ""  # the one by the terminal's background
        self._chat = chat
        self._screen = screen
        self._library = library
        self._folded: set[str] = set()  # folders in the list of chats

    @property
    def library(self) -> "ModelLibrary":
        return self._library()

    def pass_on(self, event: BackendEvent) -> None:
        """Hand an answer of the engine's process to the dialogs that asked."""
        if isinstance(event, WhatIf | Loaded):
            for listener in self._chat.what_ifs.listeners:
                listener(event)
        stack = self._screen.app.screen_stack
        if len(stack) < 2:
            return
        match event:
            case WhatIf() | Loaded():
                from .screens.whatif import WhatIfScreen

                for screen in stack:
                    if isinstance(screen, WhatIfScreen):
                        screen.ask(again=True) if isinstance(event, Loaded) else screen.receive(event)
            case LookedAt() | Died():
                from .screens.explain import StepsScreen

                for screen in stack:
                    if isinstance(screen, StepsScreen):
                        screen.receive(event) if isinstance(event, LookedAt) else screen.lost()

    # Chats ----------------------------------------------------------------------------------------------------------------

    def find_meaning(self, words: str) -> None:
        self.chats(words, by_meaning=True)

    def chats(self, words: str, *, by_meaning: bool = False) -> None:
        from .screens.chats import Background, ChatsScreen

        chat, recording = self._chat, recording_of(self._chat)

        def closed(pick: "Pick | None") -> None:
            recording.look_up_title()  # the list can change it
            chat.view.draw()
            if pick is not None:
                chat.attempt(lambda: commands.open_at(chat, pick.chat, pick.message))

        listed = ChatsScreen(
            ChatSearch(recording.file),
            recording.chat,
            chat.session.keymap,
            background=lambda: Background(recording.running, recording.waiting),
            changed=recording.look,
            folded=self._folded,
            words=words,
            by_meaning=by_meaning,
            meaning=lambda: MeaningSearch.here(recording.file, chat.preferences.settings, chat.preferences.home),
        )
        self._screen.app.push_screen(listed, closed)

    def delete_open(self, open_: str) -> bool:
        """Delete the open chat, for the list of chats; return whether it is deleted."""
        chat, restores = self._chat, self._chat.session.keymap.key("restore_chat")
        if chat.recording is None:
            return False
        try:
            found = chat.recording.store.chat(open_)
            commands.delete(chat, found, back=f"Ctrl+Z, or {restores} once the list is closed,")
        except TokamacError as error:
            chat.view.tell(error.one_line(), "warning")
            return False
        return True

    def branches(self, _: str) -> None:
        from .screens.chats import BranchesScreen

        chat, tree = self._chat, self._chat.session.conversation.tree
        if not tree.nodes:
            chat.view.tell("There are no messages yet.")
            return

        def chosen(key: int | None) -> None:
            if key is not None:
                commands.jump(chat, key)
            else:  # the selected message has prices again
                chat.perform(chat.session.select(chat.view.selected))

        prices = PathPrices(chat.session, chat.perform)
        self._screen.app.push_screen(BranchesScreen(tree, prices.look_up), chosen)

    def context(self, _: str) -> None:
        from .screens.dialog import ContextScreen

        chat, draft, selected = self._chat, self._chat.composer.written, self._chat.view.selected
        prompt = None if selected is None else chat.session.conversation.prompt_of(selected)

        def use() -> ContextUse:
            if steps := chat.session.count_context(draft):
                chat.perform(steps)
            return chat.session.context_use(draft)

        def prune(key: int, file: str) -> None:
            chat.perform(chat.session.prune(key, file))

        screen = ContextScreen(use, prune, None if prompt is None else prompt.key)
        self._screen.app.push_screen(screen, lambda _: chat.view.draw())

    def edit_earlier(self, _: str) -> None:
        from .screens.dialog import PromptsScreen

        asked = commands.asked_before(self._chat)[::-1]

        def chosen(index: int | None) -> None:
            if index is not None:
                self._chat.view.ask(
                    asked[index].key, Draft(sanitise(asked[index].prompt), asked[index].attachments), ""
                )

        prompts = [sanitise(turn.prompt) for turn in asked]
        self._screen.app.push_screen(PromptsScreen("Edit an earlier prompt", prompts), chosen)

    # Links ----------------------------------------------------------------------------------------------------------------

    def links(self, _: str) -> None:
        from .screens.dialog import LinksScreen

        def chosen(choice: tuple[str, bool] | None) -> None:
            if choice is not None:
                (self.open_link if choice[1] else self._copy_link)(choice[0])

        self._screen.app.push_screen(LinksScreen(commands.links_of(self._chat)), chosen)

    def open_link(self, address: str) -> None:
        """Open it in the browser, on a thread, or copy it where there is none."""

        def run() -> None:
            try:
                open_address(address)
            except NotTakenError:
                self._screen.app.call_from_thread(self._copy_link, address)

        self._screen.run_worker(run, thread=True, group="links")

    def _copy_link(self, address: str) -> None:
        self._chat.view.tell(f"{address}\n{self._chat.copy(address)}")

    # Models ---------------------------------------------------------------------------------------------------------------

    def choose_model(self, name: str) -> None:
        if name:
            self.library.choose(setup.full_name(self._chat, name))
        else:
            self.models("")

    def models(self, written: str) -> None:
        from .screens.model import ModelScreen

        chat = self._chat

        def chosen(model: str | None) -> None:
            chat.what_ifs.end()
            if model is not None:
                self.library.choose(model)

        words = written.removeprefix("search ").strip()

        def unload() -> None:
            chat.view.open("unload")

        self._screen.app.push_screen(ModelScreen(self.library, chat.session, self.what_if, unload, text=words), chosen)

    def what_if(self, model: str) -> None:
        # plotext takes a tenth of a second to import: not before it is wanted.
        from .screens.whatif import WhatIfScreen, known_names

        chat, model = self._chat, model or self._chat.session.engine.load.model
        start, names = first_question(chat.session, model), known_names(model)
        screen = WhatIfScreen(chat.what_ifs.ask, start, names, busy=lambda: chat.session.engine.busy)
        self._screen.app.push_screen(screen, lambda _: chat.what_ifs.end())

    def convert(self, model: str) -> None:
        from .screens.model import ConvertScreen

        library, source = self.library, model or self._chat.session.engine.load.model
        screen = ConvertScreen(source, library.conversions, library.models_folder)
        self._screen.app.push_screen(screen, lambda folder: library.load(folder) if folder is not None else None)

    def pull(self, model: str) -> None:
        self.library.downloads.start(model)

    # Settings -------------------------------------------------------------------------------------------------------------

    def system_prompt(self, _: str) -> None:
        from .screens.settings import SystemScreen

        chat, preferences = self._chat, self._chat.preferences
        drafts = preferences.system_drafts

        def now() -> str | None:
            return None if chat.recording is None else chat.recording.chat

        earlier = drafts.get(now())

        def keep(prompts: Mapping[str, str]) -> None:
            chat.save_settings(replace(preferences.settings, system_prompts=dict(prompts)))

        def leave(draft: Written | None) -> None:
            drafts.keep(now(), draft)
            if draft is not None and draft != earlier:
                shows = chat.session.keymap.key("system_prompt")
                chat.view.tell(
                    f"Not applied. Your text stays in this chat as a draft until you quit tokamac. {shows} shows it."
                )

        def chosen(written: Written | None) -> None:
            if written is not None:
                drafts.keep(now(), None)
                chat.apply_choice(preferences.choose_system(written.text, own=written.own))
                where = "this chat" if written.own else "every chat without its own"
                applies = f"The system prompt applies to {where}, from the next message on."
                chat.view.tell(applies if written.text else f"No system prompt in {where}.")

        current = Written(chat.session.system, preferences.own.system is not None)
        screen = SystemScreen(current, preferences.library(), keep, draft=earlier, leave=leave)
        self._screen.app.push_screen(screen, chosen)

    def settings(self, _: str) -> None:
        from .screens.settings import SettingsScreen

        chat, known = self._chat, self._chat.preferences.settings

        def chosen_apart() -> dict[str, bool]:
            now = chat.preferences.settings
            return {"theme": bool(now.theme), "keys": bool(now.keys)}

        screen = SettingsScreen(
            setup.current_sheet(chat),
            Sheet(known.template, known.sampling),
            chat.session.engine.info,
            do=partial(commands.do, chat),
            profile=chat.session.profile,
            chosen_apart=chosen_apart,
        )
        self._screen.app.push_screen(screen, self.apply)

    def apply(self, sheet: Sheet | None) -> None:
        """Save what was changed in the settings, and say it."""
        if sheet is not None:
            self._chat.view.tell(f"Saved: {setup.changed_settings(self._chat, sheet)}.")
            setup.apply_sheet(self._chat, sheet)
            self._chat.view.draw()

    def profile(self, _: str) -> None:
        from .screens.settings import ProfilesScreen

        def chosen(name: str | None) -> None:
            if name is not None:
                self._chat.attempt(lambda: setup.use_profile(self._chat, name))

        self._screen.app.push_screen(ProfilesScreen(self._chat), chosen)

    def tools(self, _: str) -> None:
        from .screens.dialog import ToolsScreen

        chat = self._chat
        setup.listed_tools(chat)  # or it says why there are none
        screen = ToolsScreen(
            lambda: setup.listed_tools(chat),
            lambda name: setup.switch_tools(chat, [name], on=None),
            lambda name: setup.ask_again(chat, [name]),
        )
        self._screen.app.push_screen(screen)

    def keys(self, _: str) -> None:
        from .screens.help import KeysScreen

        self._screen.app.push_screen(KeysScreen(self._chat))

    def leader(self, _: str) -> None:
        from .screens.help import LeaderScreen

        known = self._chat.preferences.keymap
        screen = LeaderScreen(known.key(LEADER), [action for action in known.actions if action.chord])
        self._screen.app.push_screen(screen, lambda action: commands.do(self._chat, action) if action else None)

    def theme(self, name: str) -> None:
        from .screens.help import ThemeScreen

        app = self._screen.app
        if not name:
            screen = ThemeScreen(self._chat.preferences.settings.theme, self.automatic_theme)
            app.push_screen(screen, lambda theme: self._keep_theme(theme) if theme else None)
        elif name == AUTOMATIC:
            self._keep_theme(AUTOMATIC)
            app.theme = self.automatic_theme
        elif name in app.available_themes:
            app.theme = name
        else:
            known = ", ".join([AUTOMATIC, *sorted(app.available_themes)])
            raise RefusedError(f"There is no theme {sanitise_line(name):.40}. There are: {known}.")

    def _keep_theme(self, theme: str) -> None:
        chosen, known = "" if theme == AUTOMATIC else theme, self._chat.preferences.settings
        if chosen != known.theme:
            self._chat.save_settings(replace(known, theme=chosen))

    # Figures and help -----------------------------------------------------------------------------------------------------

    def explain(self, _: str) -> None:
        self.explain_reply(self._chat.view.selected)

    def explain_reply(self, key: int | None) -> None:
        """Explain the reply that belongs to the message ``key``, or the last one that was measured."""
        from .screens.explain import ExplainScreen

        session = self._chat.session
        known = {
            turn.reply_key: turn.reply
            for turn in session.turns
            if turn.reply is not None and turn.reply.metrics is not None
        }
        if not known:
            raise RefusedError("There is no reply to explain yet.")
        node = session.conversation.reply_at(key)
        index = [*known].index(node.key) if node is not None and node.key in known else len(known) - 1

        def go_on(asked: "tuple[Literal['what_if', 'steps'], int] | None") -> None:
            match asked:
                case ("steps", shown):
                    self._walk([*known][shown])
                case ("what_if", _):
                    self.what_if("")

        replies = [session.engine.with_ceiling(reply) for reply in known.values()]
        self._screen.app.push_screen(ExplainScreen(replies, index), go_on)

    def sure(self, _: str) -> None:
        self.steps("", tinted=True)

    def steps(self, _: str, *, tinted: bool = False) -> None:
        conversation, node = self._chat.session.conversation, self._chat.selected()
        found = None if node is None else conversation.reply_at(node.key) or conversation.reply_at(None)
        if found is None:
            raise RefusedError("There is no reply to walk through yet.")
        self._walk(found.key, tinted=tinted)

    def _walk(self, key: int, *, tinted: bool = False) -> None:
        from ..chat.reply_steps import ReplySteps, why_not
        from .screens.explain import StepsScreen

        session, bridge = self._chat.session, self._chat.bridge
        found = session.conversation.tree.nodes[key]
        if found.reply is None:
            raise RefusedError("The reply is still being written. Its steps are there when it ends.")
        shown = ReplySteps(found.reply)

        def ask() -> None:
            shown.begin()
            if why := why_not(session, found.reply):
                shown.receive(LookedAt(key, ended=True, error=why))
            else:
                bridge.ask(shown.question(key, session.prompt_before(key), session.template))

        conversation = session.conversation

        def closed(begun: "Reply | None") -> None:
            bridge.ask(StopLooking())
            if shown.tokens:
                conversation.looked[key] = shown.tokens
            if begun is not None:
                self._chat.reply(lambda: session.branch_from(key, begun))

        screen = StepsScreen(shown, ask, lambda: bridge.ask(StopLooking()), number=key, tinted=tinted)
        self._screen.app.push_screen(screen, closed)

    def help(self, _: str) -> None:
        from .screens.help import HelpScreen

        screen = HelpScreen(self._chat.preferences.keymap.actions)
        self._screen.app.push_screen(screen, lambda asks: self.ask_guide("") if asks else None)

    def ask_guide(self, question: str) -> None:
        """Ask the embedded guide, in a process of its own: the chat and its model stay as they are."""
        from .screens.help import GuideScreen

        self._screen.app.push_screen(GuideScreen(self._chat.bridge.another(), question, private=self._chat.private))

    ACTIONS: ClassVar[Mapping[str, Callable[["Dialogs", str], None]]] = {
        "chats": chats,
        "open": chats,
        "find_meaning": find_meaning,
        "branches": branches,
        "context": context,
        "edit_earlier": edit_earlier,
        "links": links,
        "choose_model": choose_model,
        "models": models,
        "jobs": models,
        "pull": pull,
        "what_if": what_if,
        "convert": convert,
        "system_prompt": system_prompt,
        "settings": settings,
        "profile": profile,
        "tools": tools,
        "keys": keys,
        "leader": leader,
        "theme": theme,
        "explain": explain,
        "steps": steps,
        "sure": sure,
        "help": help,
        "ask_guide": ask_guide,
    }


MOST_SENT = 200


class PromptActions:
    """What is done with the input box ``prompt`` of ``screen``."""

    def __init__(self, chat: ChatController, screen: Screen[None], prompt: Prompt) -> None:
        self._chat = chat
        self._screen = screen
        self._prompt = prompt
        self._history = History()

    def forget(self) -> None:
        """Forget what was sent before."""
        self._history = History()

    def is_prompt(self, text: str) -> bool:
        """Whether what is being written will go to the model, rather than be obeyed here."""
        if self._chat.composer.editing is not None:
            return True
        return text != "/" and actions.parse(text) is None and shell_command(text) is None

    def submit(self, draft: Draft) -> None:
        """Send ``draft``, in place of an edited prompt, or run the command in it."""
        chat, prompt, words = self._chat, self._prompt, Draft(draft.text.strip(), draft.attachments)
        self._history.forget()
        if why := chat.still_attaching():
            prompt.give_back(draft.text, draft.attachments)
            chat.view.tell(why)
        elif not words.whole:
            chat.view.tell("Write a message first. Enter sends it.")
        elif chat.composer.editing is not None:
            self._send_edit(chat.composer.editing, words)
        elif (named := commands.written_prompt(chat, draft.text.strip())) is not None:
            self._send_file(*named, draft)
        elif (command := actions.parse(draft.text)) is not None:
            prompt.attachments += draft.attachments  # they are not the command's
            self._obey(command, draft.text.rstrip())
        elif (to_run := shell_command(draft.text)) is not None:
            prompt.attachments += draft.attachments
            commands.do(chat, "shell", to_run)
        else:
            chat.perform(chat.session.submit(unescaped(words.text), words.attachments))

    def _send_edit(self, key: int, draft: Draft) -> None:
        chat = self._chat
        if chat.session.conversation.tree.nodes[key].is_reply:
            steps = chat.session.revise(key, draft.text)
        else:
            steps = chat.session.edit(key, draft.text, draft.attachments)
        if any(isinstance(step, TurnBegun | Revised) for step in steps):
            chat.composer.end_edit()
            if any(isinstance(step, Revised) for step in steps):
                self._prompt.attachments += draft.attachments  # a reply has none
        else:
            self._prompt.give_back(draft.text, draft.attachments)
        chat.perform(steps)

    def _send_file(self, name: str, arguments: str, draft: Draft) -> None:
        """Send a prompt that is a file, or give back what named it."""
        try:
            commands.send_prompt(self._chat, name, arguments, draft.attachments)
        except TokamacError as error:
            self._prompt.give_back(draft.text, draft.attachments)
            self._chat.view.tell(error.one_line(), "warning")

    def prompt_files(self, _: str) -> None:
        """Choose a prompt that is a file: its command is written in the input box."""
        from .screens.dialog import PromptsScreen

        listed = commands.listed_prompts(self._chat)
        if not listed:
            raise RefusedError(f"You have no prompts yet. /prompts edit NAME writes one. {commands.EXAMPLE}")

        def chosen(index: int | None) -> None:
            if index is not None:
                self._prompt.give_back(f"/{listed[index][0]} ")
            self._prompt.focus()

        rows = [f"/{name}  {told}" for name, told in listed]
        screen = PromptsScreen("Your prompts", rows, "/prompts edit NAME", "/prompts save NAME")
        self._screen.app.push_screen(screen, chosen)

    def _obey(self, command: actions.Command, text: str) -> None:
        """Run the slash command that was written as ``text``, or give it back."""
        why = actions.refused(command, command.action, self._chat.session.keymap.key("help"))
        if why or command.action is None:
            self._prompt.give_back(text)
            self._chat.view.tell(why)
        else:
            commands.do(self._chat, command.action.id, command.argument)

    def send(self, _: str) -> None:
        self._prompt.submit()

    def newline(self, _: str) -> None:
        self._prompt.insert("\n")

    def undo(self, _: str) -> None:
        self._prompt.undo()
        self._prompt.focus()

    def redo(self, _: str) -> None:
        self._prompt.redo()
        self._prompt.focus()

    def editor(self, _: str) -> None:
        text = self._chat.view.edited(self._prompt.text)
        self._prompt.put(Draft(text, self._prompt.attachments))
        self._prompt.focus()

    def attach(self, path: str) -> None:
        """Attach the file or the web page at ``path``; without one, begin to name it."""
        if is_address(path):
            commands.fetch_page(self._chat, path, self._prompt.attach)
        elif path:
            self._screen.run_worker(self._read(path))
        else:
            self._prompt.name_file()
        self._prompt.focus()

    async def _read(self, path: str) -> None:
        chat = self._chat
        chat.reading.append(path)
        chat.view.draw()
        try:  # aside: a file may be on a slow disk, a PDF takes seconds
            self._prompt.attach(await asyncio.to_thread(read_named, path, Path()))
        except AttachError as error:
            chat.view.tell(error.one_line(), "warning")
        finally:
            chat.reading.remove(path)
            chat.view.draw()

    def paste(self, _: str) -> None:
        self._screen.run_worker(self._paste())
        self._prompt.focus()

    async def _paste(self) -> None:
        try:
            self._prompt.attach(pasted_picture(await asyncio.to_thread(copied_picture)))
        except AttachError as error:
            self._chat.view.tell(error.one_line(), "warning")
        except NotTakenError as error:
            if self._screen.app.clipboard:
                self._prompt.action_paste()
            else:
                self._chat.view.tell(f"There is no picture to paste: {error}. The terminal's own key pastes text.")
        self._chat.view.draw()

    def detach(self, name: str) -> None:
        named = [each for each in self._prompt.attachments if name in ("", each.name)]
        if not named:
            raise RefusedError(f"Nothing called {name} is attached." if name else "Nothing is attached.")
        self._prompt.detach(named[-1])
        self._chat.view.draw()

    def shell(self, text: str) -> None:
        """Ask whether to run a shell command, whose output is attached then; without one, begin to write it."""
        from .screens.dialog import AFTERWARDS, ChoiceScreen

        prompt, folder = self._prompt, working_folder()
        if self._chat.shell is not None:
            raise RefusedError(self._chat.still_attaching())
        if not text:
            prompt.type("" if prompt.text else "!")
            self._chat.view.tell("Write the command after the !, at the start of the prompt: !ls")
            return

        def answered(answer: int | None) -> None:
            if answer == 0:
                self._screen.run_worker(self._run(ShellCommand(text, folder)))
            else:
                prompt.give_back(f"!{text}")
            prompt.focus()

        where = f"It runs in {sanitise_line(str(folder))} with {sanitise_line(Path(user_shell()).name)}."
        lines: tuple[Line, ...] = (("!", sanitise(text)), ("", where), ("note", AFTERWARDS))
        choice = UserChoice("Run this command?", lines, ("Run it", "Don't run it"))
        self._screen.app.push_screen(ChoiceScreen(choice), answered)

    async def _run(self, command: ShellCommand) -> None:
        chat = self._chat
        chat.shell = command
        chat.view.draw()
        try:
            output = await asyncio.to_thread(command.run)
        except ShellError as error:
            chat.view.tell(error.one_line(), "warning")
        else:
            if output.text or output.ending is not ShellEnding.STOPPED:
                self._prompt.attach(output_of(output))
            if output.how:
                chat.view.tell(f"{excerpt(command.text)}: {output.how}.", "warning")
        finally:
            command.stop()  # where the app quits
            chat.shell = None
        chat.view.draw()

    def earlier(self, _: str) -> None:
        """Take back the prompt queued last; else recall what was sent before."""
        chat, prompt = self._chat, self._prompt
        if chat.session.queued and chat.composer.editing is not None:
            chat.view.tell("The queued prompt stays queued: send or cancel the edit, then take it back.")
        elif chat.session.queued:
            chat.perform(chat.session.take_back())
        elif (before := self._history.older(prompt.draft, self._sent)) is not None:
            prompt.put(before)
            chat.view.draw()
        else:
            prompt.action_cursor_up()

    def later(self, _: str) -> None:
        if (after := self._history.newer(self._prompt.draft)) is not None:
            self._prompt.put(after)
            self._chat.view.draw()
        else:
            self._prompt.action_cursor_down()

    def search_prompts(self, _: str) -> None:
        """Choose from what was sent in all chats; it replaces what is written, which undo brings back."""
        from .screens.dialog import PromptsScreen

        prompt, sent = self._prompt, self._sent()
        if not sent:
            raise RefusedError("You have sent no prompts yet.")

        def chosen(index: int | None) -> None:
            if index is not None:
                prompt.replace(sent[index], prompt.document.start, prompt.document.end)
                prompt.move_cursor(prompt.document.end)
            prompt.focus()

        regenerates = f"{self._chat.session.keymap.key('regenerate')} regenerates a reply"
        screen = PromptsScreen("Prompts you sent", sent, "Ctrl+R: older", regenerates)
        self._screen.app.push_screen(screen, chosen)

    def _sent(self) -> list[str]:
        """Return what the user sent, newest first: in all chats where they are saved."""
        chat = self._chat
        sent = [turn.prompt for turn in reversed(chat.session.turns) if turn.prompt]
        if chat.recording is not None:
            try:
                sent = chat.recording.store.history(MOST_SENT)
            except StoreError as error:
                chat.view.tell(error.one_line(), "warning")
        return [sanitise(text) for text in sent]

    ACTIONS: ClassVar[Mapping[str, Callable[["PromptActions", str], None]]] = {
        "send": send,
        "newline": newline,
        "undo": undo,
        "redo": redo,
        "editor": editor,
        "attach": attach,
        "detach": detach,
        "paste": paste,
        "shell": shell,
        "earlier": earlier,
        "later": later,
        "search_prompts": search_prompts,
        "prompt_files": prompt_files,
    }
