"""What the session asks of the engine beside replies: drafts read ahead, counts, prices, a title. Pure; a reply goes before all."""

from collections.abc import Callable, Sequence

from tokamac.app.backend.wire import Load, Priced
from tokamac.app.store.values import Attachment
from tokamac.app.tui import thinking
from tokamac.app.tui.ahead import Ahead
from tokamac.app.tui.attachments import Draft
from tokamac.app.tui.counts import Counts
from tokamac.app.tui.life import Life
from tokamac.app.tui.phase import Phase
from tokamac.app.tui.prices import Prices, path, questions
from tokamac.app.tui.steps import Notice, Step
from tokamac.app.tui.talk import Talk
from tokamac.app.tui.titles import IDLE_S, Titles
from tokamac.app.tui.tree import Tree
from tokamac.engine.events import Message
from tokamac.engine.hub_names import GUIDE
from tokamac.engine.options import TemplateOptions


class Beside(Life):
    """One conversation and its engine, as far as no reply is asked for."""

    def __init__(self, load: Load, system: str, clock: Callable[[], float]) -> None:
        super().__init__(load, clock)
        self.system = system
        self.talk = Talk()
        self.ahead = Ahead()
        self.prices = Prices()
        self.counts = Counts()
        self.titles = Titles()
        self._template = TemplateOptions()
        self._told_untold: set[str] = set()  # what was said that models can't be told
        self._told_of = ""  # the model of which it was said that it is not given all of this conversation

    @property
    def template(self) -> TemplateOptions:
        """What the chat template is to be told."""
        return self._template

    @template.setter
    def template(self, template: TemplateOptions) -> None:
        if template != self._template:
            self._template = template
            self.ahead.forget()
            self.prices.forget()
        self._tell_template()

    def _tell_template(self) -> TemplateOptions:
        """Return what of the template's options the loaded model can be told; prices and what is read ahead follow it."""
        able, _ = thinking.told(self._template, self.info)
        self.ahead.template = self.prices.template = able
        return able

    def _tell_untold(self) -> list[Step]:
        """Say, once for each model and option, what its chat template can't be told."""
        _, why = thinking.told(self._template, self.info)
        new = [each for each in why if each not in self._told_untold]
        self._told_untold.update(new)
        return [Notice(f"{each[0].upper()}{each[1:]}.", "warning") for each in new]

    def pause(self, text: str, attachments: tuple[Attachment, ...] = ()) -> list[Step]:
        """Have the draft, in which the user pauses, read ahead: as ``submit`` would send it, and if nothing else is to do.

        What goes with it is counted. A model that was unloaded is loaded for it.
        """
        self.idle.seen()
        asked = Draft(text.strip(), attachments).whole
        if self.phase is Phase.UNLOADED:
            return self.start() if asked else []
        counts = self.counts.ask(self.info, attachments) if self.phase is Phase.IDLE else []
        free = self.phase is Phase.IDLE and self.load.prompt_cache
        ahead = self.ahead.pause(asked, self.talk.request(self.system, asked)) if free else []
        return [*counts, *self._before_title(ahead)]

    def tokens(self, attachment: Attachment) -> int | None:
        """Return how many tokens an attachment takes of the model that is loaded; None while that is unknown."""
        return self.counts.of(self.info, attachment)

    def point(self, key: int | None) -> list[Step]:
        """Ask what could be done with the message ``key``, at which the user points, and what it would take; None: at none."""
        asked = [] if key is None or self.phase is not Phase.IDLE else questions(self.talk, self.system, key, self.info)
        return self._before_title(self.prices.ask(asked))

    def price_paths(self, keys: Sequence[int]) -> list[Step]:
        """Ask what it would take to go on along the paths through the messages ``keys``, in place of what was asked to price."""
        asked = [path(self.talk, self.system, key) for key in keys] if self.phase is Phase.IDLE else []
        return self._before_title(self.prices.ask(asked))

    def entitle(self) -> list[Step]:
        """Have the model give the chat a title, if it can have one and nobody uses the chat. To be called now and then.

        The guide can't: it only knows about the app. Nor where prompts are not kept, so that nothing is read ahead.
        """
        able = self.phase is Phase.IDLE and self.load.prompt_cache and self.load.model != GUIDE
        quiet = self.idle.quiet_s(self.phase_since) >= IDLE_S
        return self.titles.ask(self.talk.turns[0]) if able and quiet and self.titles.wanted else []

    def _hold(self, tree: Tree) -> None:
        """Hold another conversation, of which nothing was asked or said yet."""
        self.talk, self._told_of = Talk(tree), ""
        self.titles.opened()
        self._forget()

    def _tell_left_out(self, messages: Sequence[Message]) -> list[Step]:
        """Say, once for each model and conversation, how many system messages of those to be sent its template does not take."""
        if self.info is None or self.info.later_system or self._told_of == self.info.name:
            return []
        many = sum(each.role == "system" for each in messages[1:])
        if not many:
            return []
        self._told_of = self.info.name
        what = "1 system message" if many == 1 else f"{many} system messages"
        why = f"the chat template of {self.info.name} takes none after others"
        return [Notice(f"Left out of the prompt: {what} of this chat; {why}.", "warning")]

    def _before_title(self, steps: list[Step]) -> list[Step]:
        """Return ``steps``; where they ask anything, a title is stopped first."""
        return [*self.titles.stop(), *steps] if steps else []

    def _priced(self, event: Priced) -> list[Step]:
        return [*self.prices.priced(event), *self.ahead.priced(event), *self.titles.priced(event)]

    def _begin_ahead(self) -> list[Step]:
        """Have the engine read, in idle time, the conversation that it finds new."""
        ready = self.phase is Phase.IDLE and self.load.prompt_cache
        return self._before_title(self.ahead.begin(self.talk.request(self.system, "")) if ready else [])

    def _forget(self) -> None:
        self.ahead.forget()
        self.prices.forget()
        self.counts.forget()
        self.titles.forget()
