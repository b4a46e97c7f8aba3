"""What can go wrong with the hub, in words that say what to do; the client's own log stays off the screen."""

import errno
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from tokamac.engine.errors import DownloadError, ModelNotFoundError, TokamacError
from tokamac.engine.hub_cache import Repo, cache_folder, whole_snapshot
from tokamac.engine.hub_names import meant

ADVICE = "What has arrived is kept: the same command goes on from there."

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def disk_full(repo: Repo, needed: int, free: int) -> DownloadError:
    """Return the error for a download that does not fit."""
    from tokamac.engine.limits.ladder import told_apart

    wanted, left = told_apart(needed, free)
    return DownloadError(
        f"{repo} needs {wanted} and {cache_folder()} has {left} free",
        "Free some space (`tokamac models list` shows what is there), or set HF_HOME to a folder on another disk.",
    )


def is_transport_error(error: BaseException) -> bool:
    """Whether the connection failed. Told by name: the client brings its own httpx, or httpx2."""
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def translate(error: Exception, repo: Repo) -> Exception:
    """Return what the user should read of ``error``; itself when it is nothing known."""
    from huggingface_hub import errors as hub
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, TokamacError):
        return error
    if isinstance(error, hub.GatedRepoError):
        return _gated(repo)
    if isinstance(error, hub.RepositoryNotFoundError):
        near = meant(repo.id, cache_folder())
        return ModelNotFoundError(
            f"there is no folder {repo.id}, and no such model on Hugging Face (or it is private)",
            f"{'Check the spelling.' if near is None else f'Did you mean {near}?'} For a private model set HF_TOKEN.",
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return ModelNotFoundError(f"{repo.id} has no revision {repo.revision}", "Leave @… out for the newest.")
    if isinstance(error, hub.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return translate(error.__cause__, repo)  # the client's word for "not here, and the hub did not answer"
    if isinstance(error, hub.OfflineModeIsEnabled):
        return DownloadError(
            f"{repo} is not whole on disk, and HF_HUB_OFFLINE forbids the network", "Unset HF_HUB_OFFLINE."
        )
    if isinstance(error, HfHubHTTPError):
        return _refused(error.response.status_code, str(error.response.url), repo)
    if is_transport_error(error):
        return _unreachable(error, repo)
    if isinstance(error, OSError) and error.errno is not None:
        return _disk(error, repo)
    return error


def _gated(repo: Repo) -> DownloadError:
    if os.environ.get("HF_TOKEN"):
        return DownloadError(
            f"{repo.id} is gated and your HF_TOKEN has no access to it",
            f"Ask for it at https://huggingface.co/{repo.id}.",
        )
    return DownloadError(
        f"{repo.id} is gated: its makers want their terms accepted",
        f"Accept them at https://huggingface.co/{repo.id}, then set HF_TOKEN to a token from https://huggingface.co/settings/tokens.",
    )


def _refused(status: int, url: str, repo: Repo) -> DownloadError:
    name = url.split("?", maxsplit=1)[0].rpartition("/")[2]
    if status == 404:
        return DownloadError(
            f"the hub lists {name} of {repo} but does not have it", "Try another revision or another model."
        )
    if status in (401, 403):
        return DownloadError(
            f"the hub refuses {repo} (HTTP {status})", "Check HF_TOKEN, and that its account may read the model."
        )
    if status == 429:
        return DownloadError("the hub says there were too many requests (HTTP 429)", _then("Wait some minutes.", repo))
    return DownloadError(f"the hub failed (HTTP {status}) at {name}", _then("Try again later.", repo))


def _then(do: str, repo: Repo) -> str:
    """Return what to do, and that an attempt will go on where this one ended, if anything has arrived."""
    arrived = (repo.folder / "blobs").glob("*" if whole_snapshot(repo) is None else "*.incomplete")
    return f"{do} {ADVICE}" if any(path.stat().st_size for path in arrived) else do


def _unreachable(error: Exception, repo: Repo) -> DownloadError:
    from huggingface_hub import constants

    reason = " ".join(str(error).split()) or type(error).__name__
    return DownloadError(f"no connection to {constants.ENDPOINT} ({reason})", _then("Check the network.", repo))


def _disk(error: OSError, repo: Repo) -> DownloadError:
    if error.errno in _FULL:
        return DownloadError(
            f"the disk is full: {cache_folder()} has no room for the rest of {repo}",
            _then("Free some space, or set HF_HOME to a folder on another disk.", repo),
        )
    if error.errno in _DENIED:
        return DownloadError(f"{error.filename or cache_folder()} can't be written", "Check its owner, or set HF_HOME.")
    return DownloadError(f"{repo} can't be downloaded: {error}", _then("Check the disk that HF_HOME is on.", repo))


@contextmanager
def quiet_client() -> Iterator[None]:
    """Keep the client's log lines and warnings off the screen: what matters of them is said in our errors."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
