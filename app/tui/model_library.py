"""Models on disk, downloading, and in the catalogue, with estimates for this machine."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from tokamac.engine import metrics as rates
from tokamac.engine.hub.download import last_speed

from ..backend.processes import (
    HubModelLine,
    Puller,
    PullLine,
    Refused,
    Removed,
    converter_command,
    models_command,
    remove_arguments,
    search_arguments,
)
from ..backend.protocol import Loaded, WhatIf
from ..chat.controller import ChatController
from ..models.jobs import (
    ConversionForm,
    ConversionJob,
    ConversionPhase,
    Conversions,
    Download,
    Downloads,
    DownloadStage,
)
from ..models.listing import CatalogueOffer, Estimates, HubModels, ModelFacts, ModelRow, StartHere, rows
from ..models.local import (
    FOLDERS_FILE,
    Folders,
    LocalModels,
    hub_cache,
    is_folder,
    lasting,
    models_on_disk,
    must_be_downloaded,
    short_name,
)
from ..text.sanitise import sanitise_line
from ..text.units import minutes, size

REST_S = 0.3  # how long the list is shown before estimates start, so that a quick choice loads without delay

ASKED_S = 10.0  # how long the question whether to quit holds

REPLY_LOOK_S = 0.5  # how often a new model checks whether the running reply has ended


SEARCHING = "searching …"
LEAST_WORDS = 3  # characters from which the hub is asked


Spawn = Callable[[Coroutine[Any, Any, None], str], object]  # in a group of its name; another look ends the one before


class HubSearch:
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
        return HubModels(tuple(self._models.values()), self._state)

    def want(self, text: str) -> None:
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
    def __init__(self, chat: ChatController, spawn: Spawn) -> None:
        self._chat = chat
        self._spawn = spawn
        self._folders = Folders(chat.preferences.home / FOLDERS_FILE)
        self._offers: list[CatalogueOffer] = []
        self._limit: int | None = None
        self.disk = LocalModels()
        self.looked = False
        self.watcher: Callable[[], None] | None = None
        self._wanted: str | None = None  # a complete download, to be loaded once no reply runs
        self.estimates = Estimates(chat.what_ifs.ask)
        self.downloads = Downloads(
            models_command(),
            time.monotonic,
            spawn=lambda work: spawn(work, "downloads"),
            changed=self._changed,
            ended=self._ended,
        )
        self.conversions: Conversions[ConversionForm] = Conversions(
            converter_command(),
            time.monotonic,
            spawn=lambda work: spawn(work, "conversion"),
            changed=self._changed,
            ended=self._converted,
        )
        self.hub = HubSearch(
            models_command(),
            spawn=lambda work: spawn(work, "hub search"),
            changed=self._found,
        )
        self._asked_s: float | None = None  # when the user was asked whether to quit
        chat.what_ifs.listeners.append(self.receive)

    @property
    def models_folder(self) -> Path:
        return self._chat.preferences.settings.models_path

    def before_quitting(self) -> str:
        now = time.monotonic()
        if not (running := self.activity()) or (self._asked_s is not None and now - self._asked_s < ASKED_S):
            return ""
        self._asked_s = now
        quits = self._chat.session.keymap.key("leave")
        return f"Still {running}. {quits} again quits and stops that; the same download or conversion resumes later."

    def rows(self, text: str) -> list[ModelRow]:
        converting = self.conversions.running
        return rows(
            text,
            self.disk,
            self._catalogue(),
            self.estimates,
            self.downloads.all,
            conversions={} if converting is None else {converting.source: self.conversions.job.brief()},
            hub=self.hub.found if text.strip() else HubModels(),
        )

    @property
    def start(self) -> StartHere | None:
        return next((each.start for each in self._catalogue() if each.start is not None), None)

    def look(self) -> None:
        self._spawn(self._look(), "look")

    def must_be_downloaded(self, model: str) -> bool:
        return must_be_downloaded(model, hub_cache())

    def forget_folder(self, folder: str) -> None:
        self._folders.forget(folder)
        self.look()

    def choose_another(self) -> None:
        """Cancel an earlier choice's pending load: the user chooses now."""
        self._wanted = None
        self.downloads.keep_unloaded()

    def choose(self, model: str) -> None:
        """Load a model; download it first where it is not on this disk."""
        if self.must_be_downloaded(model):
            self.choose_another()
            self.downloads.start(model, loads=True)
            shows = self._chat.session.keymap.key("choose_model")
            self._chat.view.tell(
                f"Downloading {sanitise_line(model)}. It loads when it is complete. {shows} shows the progress."
            )
        else:
            self.load(model)

    def load(self, model: str) -> None:
        self.choose_another()
        self._chat.chosen.model = model = lasting(model)
        self._chat.load(self._chat.session.engine.load.for_model(model, *self._chat.preferences.settings.beside(model)))

    def remove(self, model: str) -> None:
        self._spawn(self._remove(model), "remove")

    def receive(self, event: WhatIf | Loaded) -> None:
        if isinstance(event, WhatIf):
            if self.estimates.receive(event):
                self._want()
                self._tell()
            return
        self.estimates.again()
        if is_folder(model := self._chat.session.engine.load.model):
            self._folders.remember(model)
        if self.watcher is not None:
            self._want()

    def activity(self) -> str:
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
        self._chat.view.tell(sanitise_line(said))

    def _changed_on_disk(self, model: str) -> None:
        self.estimates.forget(model)
        self.look()

    def _found(self) -> None:
        if self.watcher is not None:
            self._want()
            self._tell()

    def _want(self) -> None:
        names = [each.model for each in self.disk.models if each.whole]
        names += [each.config_folder for each in self.hub.found.models if each.config_folder is not None]
        load = self._chat.session.engine.load
        self.estimates.want(names, load.kv, load.memory)

    def _catalogue(self) -> list[CatalogueOffer]:
        limit = self._chat.session.engine.load.memory
        if not self._offers or limit != self._limit:
            from tokamac.engine.perf.catalogue import standings
            from tokamac.engine.perf.what_if import nominal

            self._limit = limit
            self._offers = [
                CatalogueOffer(
                    each.repository.id,
                    each.repository.published_bytes or each.repository.weight_bytes,
                    ModelFacts(each.repository.context, each.entry.licence or "", each.repository.good_for),
                    each.group,
                    StartHere(each.repository.id, each.repository.published_bytes, last_speed())
                    if each.start
                    else None,
                )
                for each in standings(nominal(limit=limit))
            ]
        return self._offers

    def _changed(self) -> None:
        self._tell()
        self._chat.view.draw()

    def _tell(self) -> None:
        if self.watcher is not None:
            self.watcher()

    def _ended(self, download: Download) -> None:
        name = short_name(download.model)
        self._changed_on_disk(download.model)
        if download.stage is DownloadStage.FAILED:
            why = f"{sanitise_line(download.model)}: {sanitise_line(download.problem)}"
            self._chat.view.tell(why, "error")
        elif download.stage is DownloadStage.CANCELLING:
            freed = f"{size(download.freed)} deleted" if download.freed else "nothing had arrived"
            self._chat.view.tell(f"Download of {name} cancelled: {freed}.")
        elif download.loads:
            self._wanted = download.model
            self._spawn(self._load(download.model), "downloads")
        else:
            self._tell_here(download.model)

    def _converted(self, job: ConversionJob) -> None:
        form = self.conversions.form
        name = "The model" if form is None else short_name(form.source)
        if job.phase is ConversionPhase.DONE and job.converted is not None:
            folder = job.converted.path
            self._folders.remember(folder)
            loads, shows = (self._chat.session.keymap.key(action) for action in ("choose_model", "convert"))
            self._chat.view.tell(
                sanitise_line(f"{name} is converted: {folder}. {loads} loads it; {shows} shows how good it is.")
            )
        else:
            self._chat.view.tell(f"{name} was not converted. {sanitise_line(job.problem)}", "warning")
        self.look()

    def _tell_here(self, model: str) -> None:
        loads = self._chat.session.keymap.key("choose_model")
        self._chat.view.tell(f"{short_name(model)} is downloaded. {loads} loads it.")

    async def _load(self, model: str) -> None:
        while self._chat.session.engine.replying:
            await asyncio.sleep(REPLY_LOOK_S)
        if model == self._wanted:
            self.load(model)
        else:
            self._tell_here(model)
