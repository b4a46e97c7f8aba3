"""The models that the chat can use: on disk, downloading, in the catalogue, with estimates for this machine."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.engine import metrics as rates
from tokamac.engine.hub.download import last_speed

from ..backend.command_process import Refused
from ..backend.converter import converter_command
from ..backend.protocol import Loaded, WhatIf
from ..backend.puller import (
    HubModelLine,
    Puller,
    PullLine,
    Removed,
    models_command,
    remove_arguments,
    search_arguments,
)
from ..models.advice import Estimates
from ..models.conversions import ConversionForm, ConversionJob, ConversionPhase, Conversions
from ..models.downloads import Download, Downloads, DownloadStage
from ..models.listing import CatalogueOffer, HubModels, ModelFacts, ModelRow, best_guess, rows
from ..models.local import FOLDERS_FILE, Folders, LocalModels, hub_cache, models_on_disk, must_be_downloaded
from ..models.names import is_folder, lasting, short_name
from ..sanitise import sanitise_line
from ..units import minutes, size

if TYPE_CHECKING:
    from .screens.chat import ChatScreen


REST_S = 0.3
"""How long the list is shown before estimates start, so that a quick choice loads without delay."""

ASKED_S = 10.0
"""How long the question whether to quit holds."""

REPLY_LOOK_S = 0.5
"""How often a new model checks whether the running reply has ended."""


SEARCHING = "searching …"
LEAST_WORDS = 3
"""Characters from which the hub is asked."""


class HubSearch:
    """What Hugging Face has for the words that were searched last. ``spawn`` runs a coroutine in the background.

    changed: called after every change.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        changed: Callable[[], None],
    ) -> None:
        self._puller = Puller(command)
        self._spawn = spawn
        self._changed = changed
        self._words = ""
        self._waits = False  # these words are still to be searched
        self._at_work = False
        self._models: dict[str, HubModelLine] = {}
        self._state = ""

    @property
    def found(self) -> HubModels:
        """What is known by now."""
        return HubModels(tuple(self._models.values()), self._state)

    def want(self, text: str) -> None:
        """Search for ``text``, unless that was searched last, or is too short, or a path. What is being searched is given up."""
        words = " ".join(text.split())
        if words == self._words:
            return
        self._words, self._models = words, {}
        self._waits = len(words) >= LEAST_WORDS and not words.startswith(("/", "~", "."))
        self._state = SEARCHING if self._waits else ""
        if self._at_work:
            self._spawn(self._puller.interrupt())
        elif self._waits:
            self._at_work = True
            self._spawn(self._work())
        self._changed()

    async def _work(self) -> None:
        """Search for what is wanted last."""
        try:
            while self._waits:
                self._waits = False
                await self._search(self._words)
        finally:
            self._at_work = False

    async def _search(self, words: str) -> None:
        def take(line: PullLine) -> None:
            if words != self._words:
                return
            match line:
                case HubModelLine():
                    self._models[line.id] = line
                    self._changed()
                case Refused(error):
                    self._state = sanitise_line(error)
                case _:
                    self._state = "" if self._models else "nothing found for these words that runs here"

        try:
            await self._puller.run(search_arguments(words), take)
        except OSError as error:
            self._state = f"not searched: {error}"
        if words == self._words:
            self._state = "the search stopped early" if self._state == SEARCHING else self._state
            self._changed()


class ModelLibrary:
    """Lives as long as the chat, so that downloads continue while no screen shows them.

    watcher: called after every change, while a screen shows the library.
    """

    def __init__(self, chat: "ChatScreen") -> None:
        self._chat = chat
        self._folders = Folders(chat.preferences.home / FOLDERS_FILE)
        self._offers: list[CatalogueOffer] = []
        self.disk = LocalModels()
        self.looked = False
        self.watcher: Callable[[], None] | None = None
        self._wanted: str | None = None  # a complete download, to be loaded once no reply runs
        self.estimates = Estimates(chat.what_ifs.ask, last_speed)
        self.downloads = Downloads(
            models_command(),
            time.monotonic,
            spawn=lambda work: chat.run_worker(work, group="downloads"),
            changed=self._changed,
            ended=self._ended,
        )
        self.conversions: Conversions[ConversionForm] = Conversions(
            converter_command(),
            time.monotonic,
            spawn=lambda work: chat.run_worker(work, group="conversion"),
            changed=self._changed,
            ended=self._converted,
        )
        self.hub = HubSearch(
            models_command(),
            spawn=lambda work: chat.run_worker(work, group="hub search"),
            changed=self._found,
        )
        self._flat = ""  # the text whose rows were listed before the catalogue was in order: they keep their places
        self._asked_s: float | None = None  # when the user was asked whether to quit
        chat.what_ifs.listeners.append(self.heard)

    @property
    def models_folder(self) -> Path:
        """Where converted models go."""
        return self._chat.preferences.settings.models_path

    def before_quitting(self) -> str:
        """Return what would be interrupted, as a question; "" where nothing would, or the user was asked a moment ago."""
        now = time.monotonic()
        if not (running := self.activity()) or (self._asked_s is not None and now - self._asked_s < ASKED_S):
            return ""
        self._asked_s = now
        quits = self._chat.session.keymap.key("leave")
        return f"Still {running}. {quits} again quits and stops that; the same download or conversion resumes later."

    def rows(self, text: str) -> list[ModelRow]:
        """Return the models to choose from that match ``text``."""
        converting = self.conversions.running
        if self.estimates.advice is None or not text.strip():
            self._flat = text
        return rows(
            text,
            self.disk,
            self._catalogue(),
            self.estimates,
            self.downloads.all,
            conversions={} if converting is None else {converting.source: self.conversions.job.brief()},
            hub=self.hub.found if text.strip() else HubModels(),
            ungrouped=bool(text.strip()) and text == self._flat,
        )

    def look(self) -> None:
        """Look at the disk in the background, and estimate what is found."""
        self._chat.run_worker(self._look(), group="look", exclusive=True)

    def must_be_downloaded(self, model: str) -> bool:
        """Whether ``model`` is an id that is not complete on this disk."""
        return must_be_downloaded(model, hub_cache())

    def forget_folder(self, folder: str) -> None:
        """Take a folder off the list; its files stay."""
        self._folders.forget(folder)
        self.look()

    def choose_another(self) -> None:
        """Load no earlier choice: the user chooses a model now."""
        self._wanted = None
        self.downloads.keep_unloaded()

    def load(self, model: str) -> None:
        """Load a model from this disk; the conversation and the draft stay. A model that is downloading replaces it no more."""
        self.choose_another()
        self._chat.chosen.model = model = lasting(model)
        self._chat.load(self._chat.session.engine.load.of(model, *self._chat.preferences.settings.beside(model)))

    def remove(self, model: str) -> None:
        """Delete a model of the cache in the background, and tell the result."""
        self._chat.run_worker(self._remove(model), group="remove")

    def heard(self, event: WhatIf | Loaded) -> None:
        """Take an answer, or note that the engine is new and which folder it loaded."""
        if isinstance(event, WhatIf):
            if self.estimates.take(event):
                self._want()
                self._tell()
            return
        self.estimates.again()
        if is_folder(model := self._chat.session.engine.load.model):
            self._folders.remember(model)
        if self.watcher is not None:
            self._want()

    def activity(self) -> str:
        """Return the progress of what runs in the background in a few words that change rarely; "" where nothing does."""
        converting = self.conversions.running
        job = "" if converting is None else f"{short_name(converting.source)}: {self.conversions.job.brief()}"
        return " · ".join(part for part in (self._downloading(), job) if part)

    def _downloading(self) -> str:
        going = self.downloads.running
        if going is None:
            return ""
        share = rates.share(going.done, going.total)
        at = "" if share is None else f" {100 * share:.0f} %"
        left = "" if going.left_s is None else f", {minutes(going.left_s)} left"
        return f"downloading {short_name(going.model)}{at}{left}"

    # In the background ----------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        self.disk = await asyncio.to_thread(models_on_disk, hub_cache(), self._folders.all(), self.models_folder)
        self.looked = True
        self._tell()
        await asyncio.sleep(REST_S)
        if self.watcher is not None:
            self._want()
            self._tell()

    async def _remove(self, model: str) -> None:
        said = f"{short_name(model)} was not removed."

        def take(line: PullLine) -> None:
            nonlocal said
            match line:
                case Removed(_, freed_bytes):
                    said = f"{short_name(model)} is removed; {size(freed_bytes)} freed."
                case Refused(error, hint):
                    said = f"{error}. {hint}"
                case _:
                    pass

        try:
            await Puller(models_command()).run(remove_arguments(model, unfinished=False), take)
        except OSError as error:
            said = f"{short_name(model)} was not removed: {error}"
        self._changed_on_disk(model)
        self._chat.tell(sanitise_line(said))

    def _changed_on_disk(self, model: str) -> None:
        """Forget what was known of ``model``."""
        self.estimates.forget(model)
        self.look()

    def _found(self) -> None:
        """Estimate what the hub has, and show it."""
        if self.watcher is not None:
            self._want()
            self._tell()

    def _want(self) -> None:
        names = [each.model for each in self.disk.models if each.whole]
        names += [each.config_folder for each in self.hub.found.models if each.config_folder is not None]
        load = self._chat.session.engine.load
        self.estimates.want(names, load.kv, load.memory)

    def _catalogue(self) -> list[CatalogueOffer]:
        if not self._offers:
            from tokamac.engine.perf.catalogue import catalogue
            from tokamac.engine.perf.memory import machine_total

            found = [
                CatalogueOffer(
                    each.id, each.published_bytes, ModelFacts(each.context, entry.licence or "", each.good_for)
                )
                for entry in catalogue()
                for each in entry.repositories
            ]
            self._offers = best_guess(found, machine_total())
        return self._offers

    def _changed(self) -> None:
        self._tell()
        self._chat.show()

    def _tell(self) -> None:
        if self.watcher is not None:
            self.watcher()

    def _ended(self, download: Download) -> None:
        name = short_name(download.model)
        self._changed_on_disk(download.model)
        if download.stage is DownloadStage.FAILED:
            why = f"{sanitise_line(download.model)}: {sanitise_line(download.problem)}"
            self._chat.tell(why, "error")
        elif download.stage is DownloadStage.CANCELLING:
            freed = f"{size(download.freed)} deleted" if download.freed else "nothing had arrived"
            self._chat.tell(f"Download of {name} cancelled: {freed}.")
        elif download.loads:
            self._wanted = download.model
            self._chat.run_worker(self._load(download.model), group="downloads")
        else:
            self._tell_here(download.model)

    def _converted(self, job: ConversionJob) -> None:
        """Tell what came of a conversion that no dialog shows."""
        form = self.conversions.form
        name = "The model" if form is None else short_name(form.source)
        if job.phase is ConversionPhase.DONE and job.converted is not None:
            folder = job.converted.path
            self._folders.remember(folder)
            loads, shows = (self._chat.session.keymap.key(action) for action in ("choose_model", "convert"))
            self._chat.tell(
                sanitise_line(f"{name} is converted: {folder}. {loads} loads it; {shows} shows how good it is.")
            )
        else:
            self._chat.tell(f"{name} was not converted. {sanitise_line(job.problem)}", "warning")
        self.look()

    def _tell_here(self, model: str) -> None:
        loads = self._chat.session.keymap.key("choose_model")
        self._chat.tell(f"{short_name(model)} is downloaded. {loads} loads it.")

    async def _load(self, model: str) -> None:
        """Load a downloaded model; a running reply is not cut off for it."""
        while self._chat.session.engine.replying:
            await asyncio.sleep(REPLY_LOOK_S)
        if model == self._wanted:
            self.load(model)
        else:
            self._tell_here(model)
