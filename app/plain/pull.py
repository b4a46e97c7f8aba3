"""Plain ``/pull``: a model is downloaded, and waited for."""

from tokamac.app.backend.line_process import Ended
from tokamac.app.backend.puller import Line, Progress, Pulled, Puller, Refused, models_command, pull_arguments
from tokamac.app.exit_status import INTERRUPTED
from tokamac.app.plain.aside import run_aside
from tokamac.app.plain.ending import why
from tokamac.app.plain.progress import Rarely
from tokamac.app.plain.repl import Repl
from tokamac.app.tui.models import hub_cache, is_id, must_be_downloaded
from tokamac.app.tui.units import size


def pull(repl: Repl, model: str) -> None:
    """Download a model; what has arrived stays where that is stopped."""
    say = repl.console.note
    if not is_id(model):
        say("Write /pull and a Hugging Face id, such as org/name.")
        return
    if not must_be_downloaded(model, hub_cache()):
        say(f"{model} is here already. /model {model} loads it.")
        return
    say(f"Downloading {model}. Ctrl-C stops it; the same command goes on from there.")
    download = _Download(repl, model)
    try:
        end = run_aside(Puller(models_command()), pull_arguments(model), download.take, meanwhile=repl.driver.rest)
    except OSError as error:
        say(f"{model} was not downloaded: {error}")
    else:
        say(download.result(end))


class _Download:
    """Hears a download, and says now and then how far it is."""

    def __init__(self, repl: Repl, model: str) -> None:
        self._console = repl.console
        self._model = model
        self._rarely = Rarely()
        self._said = ""

    def take(self, line: Line) -> None:
        match line:
            case Progress(done, total):
                if self._rarely.due():
                    of = "" if total is None else f" of {size(total)}"
                    self._console.note(f"downloading {self._model}: {size(done)}{of}")
            case Pulled(bytes=nbytes):
                self._said = f"{self._model} is here, {size(nbytes)}. /model {self._model} loads it."
            case Refused(error, hint):
                self._said = f"{self._model} was not downloaded: {error}. {hint}".strip()
            case _:
                pass

    def result(self, end: Ended) -> str:
        """Return what came of it, as a sentence."""
        if end.status == INTERRUPTED:
            return f"Stopped: /pull {self._model} goes on from there."
        return self._said or f"{self._model} was not downloaded: {why(end)}"
