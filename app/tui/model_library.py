"""What the chat knows of models that it may use: on disk, to download, on their way here, and what this machine makes of them."""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tokamac.app.backend.protocol import Loaded, WhatIf
from tokamac.app.backend.subprocess import Puller, PullLine, PullRefused, Removed, models_command, remove_arguments
from tokamac.app.chat.jobs import Download, Downloads, DownloadStage
from tokamac.app.chat.models import FILE as FOLDERS
from tokamac.app.chat.models import (
    CatalogueOffer,
    Estimates,
    Folders,
    LocalModels,
    ModelRow,
    best_guess,
    hub_cache,
    is_folder,
    lasting,
    look,
    must_be_downloaded,
    rows,
    short_name,
)
from tokamac.app.sanitise import sanitise_line
from tokamac.app.units import size
from tokamac.engine import metrics as rates

if TYPE_CHECKING:
    from tokamac.app.tui.screens.chat import ChatScreen


REST_S = 0.3
"""The list is up for so long before anything is weighed: who knows what they want is gone by then, and loads it undelayed."""

REPLY_LOOK_S = 0.5
"""How often it is asked whether the reply has ended that a new model waits for."""


class ModelLibrary:
    """Lives as long as the chat, so that downloads go on while no screen shows them.

    watcher: called after every change, while a screen shows the stock.
    """

    def __init__(self, chat: "ChatScreen") -> None:
        self._chat = chat
        self._folders = Folders(chat.memory.home / FOLDERS)
        self._offers: list[CatalogueOffer] = []
        self.disk = LocalModels()
        self.looked = False
        self.watcher: Callable[[], None] | None = None
        self._wanted: str | None = None  # a model that has arrived, and is loaded once no reply runs
        self.estimates = Estimates(chat.what_ifs.ask)
        self.downloads = Downloads(
            models_command(),
            time.monotonic,
            spawn=lambda work: chat.run_worker(work, group="downloads"),
            changed=self._changed,
            ended=self._ended,
        )
        chat.what_ifs.listeners.append(self.heard)

    def rows(self, text: str) -> list[ModelRow]:
        """Return what there is to choose from that fits ``text``."""
        return rows(text, self.disk, self._catalogue(), self.estimates, self.downloads.all)

    def look(self) -> None:
        """Look at the disk, aside, and have what is found weighed."""
        self._chat.run_worker(self._look(), group="look", exclusive=True)

    def must_be_downloaded(self, model: str) -> bool:
        """Whether ``model`` is an id that is not whole on this disk."""
        return must_be_downloaded(model, hub_cache())

    def forget_folder(self, folder: str) -> None:
        """Take a folder off the list; its files stay."""
        self._folders.forget(folder)
        self.look()

    def choose_another(self) -> None:
        """Load nothing that was wanted earlier: the user chooses a model now."""
        self._wanted = None
        self.downloads.only_bring()

    def remove(self, model: str) -> None:
        """Take a model of the cache off the disk, aside, and say how that went."""
        self._chat.run_worker(self._remove(model), group="remove")

    def heard(self, event: WhatIf | Loaded) -> None:
        """Take an answer, or note that the engine is new and what folder it loaded."""
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
        """Return how far downloads are, in a few words that change seldom; nothing where there are none."""
        going = self.downloads.running
        if going is None:
            return ""
        share = rates.share(going.done, going.total)
        at = "" if share is None else f" {100 * share:.0f} %"
        left = "" if going.left_s is None else f", {_minutes(going.left_s)} left"
        return f"downloading {short_name(going.model)}{at}{left}"

    # What goes on ---------------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        self.disk = await asyncio.to_thread(look, hub_cache(), self._folders.all())
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
                    said = f"{short_name(model)} is removed: {size(freed_bytes)} freed."
                case PullRefused(error, hint):
                    said = f"{error}. {hint}"
                case _:
                    pass

        try:
            await Puller(models_command()).run(remove_arguments(model, unfinished=False), take)
        except OSError as error:
            said = f"{short_name(model)} was not removed: {error}"
        self._changed_on_disk(model)
        self._chat.notify(sanitise_line(said), markup=False, timeout=8)

    def _changed_on_disk(self, model: str) -> None:
        """Whatever was known of ``model`` holds no longer."""
        self.estimates.forget(model)
        self.look()

    def _want(self) -> None:
        names = [each.model for each in self.disk.models if each.whole]
        load = self._chat.session.engine.load
        self.estimates.want(names, load.kv, load.memory)

    def _catalogue(self) -> list[CatalogueOffer]:
        if not self._offers:
            from tokamac.engine.perf.catalogue import catalogue
            from tokamac.engine.perf.memory import machine_total

            found = [
                CatalogueOffer(each.id, each.published_bytes) for entry in catalogue() for each in entry.repositories
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
            self._chat.notify(why, severity="error", markup=False, timeout=20)
        elif download.stage is DownloadStage.CANCELLING:
            freed = f"{size(download.freed)} had arrived and is removed" if download.freed else "nothing had arrived"
            self._chat.notify(f"{name} is not downloaded: {freed}.", markup=False, timeout=4)
        elif download.loads:
            self._wanted = download.model
            self._chat.run_worker(self._load(download.model), group="downloads")
        else:
            self._tell_here(download.model)

    def _tell_here(self, model: str) -> None:
        loads = self._chat.session.keymap.key("choose_model")
        self._chat.notify(f"{short_name(model)} is here. {loads} loads it.", markup=False, timeout=8)

    async def _load(self, model: str) -> None:
        """Have a model loaded that has arrived; a reply that is being written is not cut off for it."""
        while self._chat.session.engine.replying:
            await asyncio.sleep(REPLY_LOOK_S)
        if model == self._wanted:
            load_model(self._chat, model)
        else:
            self._tell_here(model)


def _minutes(seconds: float) -> str:
    minutes = round(seconds / 60)
    return "under a minute" if minutes < 1 else f"{minutes} min"


def load_model(chat: "ChatScreen", model: str) -> None:
    """Load a model that is here; the conversation and the draft stay. What is on its way here replaces it no more."""
    chat.stock.choose_another()
    chat.picked = model = lasting(model)
    chat.perform(chat.session.choose(chat.session.engine.load.of(model, chat.memory.settings.adapters.get(model))))
