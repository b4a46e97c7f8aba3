"""Bring a repository of the hub to disk: a plan first, then file by file, each one able to go on where it stopped.

    listing ─▶ what is missing ─▶ room on the disk? ─▶ small files, then weights: blobs/<etag>.incomplete ─▶ checked ─▶
    blobs/<etag> ─▶ linked into the snapshot ─▶ whole? ─▶ refs/<revision>

Nothing is ever whole by its name alone: a blob is renamed after its checksum, a revision recorded after its last file.
The bytes are fetched here, over HTTP with Range, because today's client (2.4) starts a file over after an interruption;
its own ``hf_hub_download`` then finds and links them, so that the cache stays the one all Hugging Face tools share.
"""

import hashlib
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tokamac.engine.durable import to_disk
from tokamac.engine.errors import DownloadError, ModelUnsupportedError
from tokamac.engine.events import LoadProgress
from tokamac.engine.hub_cache import Repo, cache_folder
from tokamac.engine.hub_errors import ADVICE, disk_full, is_transport_error, quiet_client, translate
from tokamac.engine.shards import find_shards

if TYPE_CHECKING:
    from hashlib import _Hash

# What a model needs and no more: no code, no pickles, no second copy of the weights in other formats or in subfolders.
WANTED = ("model*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")

ADAPTER_WANTED = ("adapter_model.safetensors", "adapters.safetensors", "adapter_config.json")
"""What an adapter needs: its weights in either format, and its config."""

OTHER_WEIGHTS = {".bin", ".gguf", ".npz", ".onnx", ".pt", ".safetensors"}

RETRIES = 5
"""Attempts without a new byte before a connection is given up."""

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
RETRY_S = 0.5
"""Wait before the first new attempt; each one after waits this much longer."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository. ``etag`` names its blob: the SHA-256 of a ``large`` file, else git's SHA-1."""

    name: str
    nbytes: int
    etag: str
    large: bool

    def digest(self) -> "_Hash":
        """Return a digest that has seen none of the contents; at the end its hexdigest must be the etag."""
        return hashlib.sha256() if self.large else hashlib.sha1(b"blob %d\0" % self.nbytes, usedforsecurity=False)


class Meter:
    """Bytes so far, of all files; reports at most 20 times a second, and raises DownloadError once cancelled."""

    def __init__(self, total: int, progress: Callable[[LoadProgress], None], cancelled: Callable[[], bool]) -> None:
        self.total = total
        self.done = 0
        self._progress = progress
        self._cancelled = cancelled
        self._told_s = 0.0

    def add(self, nbytes: int) -> None:
        """Count bytes that are on disk now; negative ones are gone again."""
        self.done += nbytes
        now = time.monotonic()
        if now - self._told_s >= 0.05 or self.done >= self.total:
            self._told_s = now
            self._progress(LoadProgress("download", self.done, self.total))
        if self._cancelled():
            raise DownloadError("the download was stopped", ADVICE if self.done else "")


def download(
    repo: Repo, progress: Callable[[LoadProgress], None], cancelled: Callable[[], bool], *, adapter: bool = False
) -> Path:
    """Return the repository's folder, whole. adapter: of an adapter's files alone.

    Raises DownloadError, ModelNotFoundError, ModelDamagedError or ModelUnsupportedError.
    """
    with quiet_client():
        try:
            commit, files = _listing(repo, ADAPTER_WANTED if adapter else WANTED)
            snapshot = repo.snapshot(commit)
            missing = [file for file in files if not _is_there(snapshot / file.name, file)]
            lacking = _check_room(repo, missing)
            meter = Meter(sum(file.nbytes for file in _contents(files)), progress, cancelled)
            meter.add(meter.total - lacking)
            for file in sorted(missing, key=lambda file: (file.name.endswith(".safetensors"), file.name)):
                _fetch(repo, commit, file, meter)
            if not adapter:
                find_shards(snapshot)
            _record(repo, commit)
        except Exception as error:
            raise translate(error, repo) from error
    return snapshot


def _listing(repo: Repo, wanted: tuple[str, ...]) -> tuple[str, list[RemoteFile]]:
    """Return the commit that the revision stands for, and those of its files that are wanted, by pattern."""
    from huggingface_hub import HfApi, constants

    timeout = constants.HF_HUB_ETAG_TIMEOUT
    info = HfApi().model_info(repo.id, revision=repo.revision, files_metadata=True, timeout=timeout)
    siblings = info.siblings or []
    files = [
        RemoteFile(item.rfilename, item.lfs.size, item.lfs.sha256, large=True)
        if item.lfs
        else RemoteFile(item.rfilename, item.size or 0, item.blob_id or "", large=False)
        for item in siblings
        if "/" not in item.rfilename and any(fnmatch(item.rfilename, pattern) for pattern in wanted)
    ]
    if not any(file.name.endswith(".safetensors") for file in files):
        kinds = {Path(item.rfilename).suffix for item in siblings} & OTHER_WEIGHTS
        has = f" (only {', '.join(sorted(kinds))} files)" if kinds else ""
        raise ModelUnsupportedError(
            f"{repo} has no {' or '.join(each for each in wanted if each.endswith('.safetensors'))} weights{has}",
            "Choose a safetensors version, for example from mlx-community.",
        )
    for name, value in (("commit", info.sha or ""), *((file.name, file.etag) for file in files)):
        if not _HASH.fullmatch(value):  # it becomes a part of a path
            raise DownloadError(
                f"the hub names the contents of {name} of {repo} by no hash ({value!r:.60})",
                "Try again later, or check HF_ENDPOINT.",
            )
    return str(info.sha), files


def _is_there(path: Path, file: RemoteFile) -> bool:
    """Whether a file is on disk at its full length; one that is not is taken away, contents too, to be fetched anew."""
    if not path.exists():
        return False
    if path.stat().st_size == file.nbytes:
        return True
    path.resolve().unlink()
    path.unlink(missing_ok=True)
    return False


def _blob(repo: Repo, file: RemoteFile) -> Path:
    return repo.folder / "blobs" / file.etag


def _partial(repo: Repo, file: RemoteFile) -> Path:
    return repo.folder / "blobs" / f"{file.etag}.incomplete"


def _check_room(repo: Repo, missing: list[RemoteFile]) -> int:
    """Return the bytes that are still to be fetched. Raises DownloadError where the disk has no room for them."""
    (repo.folder / "blobs").mkdir(parents=True, exist_ok=True)
    needed = sum(file.nbytes - _arrived(repo, file) for file in _contents(missing))
    free = shutil.disk_usage(repo.folder).free
    if needed > free:
        raise disk_full(repo, needed, free)
    return needed


def _contents(files: Iterable[RemoteFile]) -> Iterable[RemoteFile]:
    """Return one file for each content: files that are alike are fetched once."""
    return {file.etag: file for file in files}.values()


def _arrived(repo: Repo, file: RemoteFile) -> int:
    """Return the bytes of a file that are on disk already; those of a blob or a part that is too long are of no use."""
    blob, partial = _blob(repo, file), _partial(repo, file)
    if blob.exists() and blob.stat().st_size == file.nbytes:
        return file.nbytes
    arrived = partial.stat().st_size if partial.exists() else 0
    return arrived if arrived <= file.nbytes else 0


def _fetch(repo: Repo, commit: str, file: RemoteFile, meter: Meter) -> None:
    """Put one file in its place in the cache."""
    from huggingface_hub import constants, hf_hub_download

    with _locked(repo, file):
        blob = _blob(repo, file)
        if not blob.exists() or blob.stat().st_size != file.nbytes:
            _fetch_blob(repo, commit, file, meter)
    hf_hub_download(repo.id, file.name, revision=commit, etag_timeout=constants.HF_HUB_ETAG_TIMEOUT)


def _fetch_blob(repo: Repo, commit: str, file: RemoteFile, meter: Meter) -> None:
    """Fetch the contents, from where an earlier attempt stopped, and name the blob once its checksum is right."""
    from huggingface_hub import hf_hub_url

    partial = _partial(repo, file)
    if partial.exists() and partial.stat().st_size > file.nbytes:
        partial.unlink()
    with partial.open("a+b") as out:
        transfer = _Transfer(hf_hub_url(repo.id, file.name, revision=commit), file, out, meter)
        transfer.run()
        out.flush()
        to_disk(out.fileno())
    if not transfer.intact:
        partial.unlink()
        raise DownloadError(f"the checksum of {file.name} of {repo} is wrong", "Try again: it is fetched anew.")
    partial.replace(_blob(repo, file))


class _Transfer:
    """One file on its way to the end of ``out``, which may hold its beginning already."""

    def __init__(self, url: str, file: RemoteFile, out: BinaryIO, meter: Meter) -> None:
        self._url, self._file, self._out, self._meter = url, file, out, meter
        self._digest = file.digest()
        out.seek(0)
        while block := out.read(1 << 20):
            self._digest.update(block)
        self._arrived = out.tell()

    @property
    def intact(self) -> bool:
        """Whether what has arrived is the file."""
        return self._arrived == self._file.nbytes and self._digest.hexdigest() == self._file.etag

    def run(self) -> None:
        """Fetch until all has arrived; a broken connection is taken up again where it broke."""
        fruitless = 0
        while self._arrived < self._file.nbytes:
            before, failure = self._arrived, None
            try:
                self._request()
            except Exception as error:
                if not is_transport_error(error):
                    raise
                failure = error
            fruitless = 0 if self._arrived > before else fruitless + 1
            if fruitless >= RETRIES:
                raise failure or DownloadError(
                    f"the hub sends only a part of {self._file.name}", ADVICE if self._arrived else "Try again later."
                )
            if failure:
                time.sleep(RETRY_S * (fruitless + 1))

    def _request(self) -> None:
        from huggingface_hub import constants
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, but not listed in __all__
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}  # compressed bytes can't be counted or resumed
        if self._arrived:
            headers["Range"] = f"bytes={self._arrived}-"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        ask = get_session().stream("GET", self._url, headers=headers, timeout=timeout, follow_redirects=True)
        with ask as response:
            hf_raise_for_status(response)
            if self._arrived and response.status_code != 206:
                self._start_over()
            for chunk in response.iter_bytes():
                self._out.write(chunk)
                self._digest.update(chunk)
                self._arrived += len(chunk)
                self._meter.add(len(chunk))

    def _start_over(self) -> None:
        """The server sends all of it again."""
        self._meter.add(-self._arrived)
        self._out.truncate(0)
        self._digest, self._arrived = self._file.digest(), 0


@contextmanager
def _locked(repo: Repo, file: RemoteFile) -> Iterator[None]:
    """Hold the lock that the hub's own client takes for this blob, so that no two programs write to it."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    lock = cache_folder() / ".locks" / repo.folder.name / f"{file.etag}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    manager = WeakFileLock(lock, timeout=1.0)
    try:
        manager.__enter__()
    except TimeoutError as error:
        raise DownloadError(
            f"another program is downloading {file.name} of {repo}", "Wait until it is done, then try again."
        ) from error
    try:
        yield
    finally:
        manager.__exit__(None, None, None)


def _record(repo: Repo, commit: str) -> None:
    """Note which commit the revision stands for: from now on it is found without a network."""
    if repo.revision == commit:
        return
    repo.reference.parent.mkdir(parents=True, exist_ok=True)
    temporary = repo.reference.with_name(f".{repo.reference.name}.{secrets.token_hex(8)}")
    temporary.write_text(commit, encoding="ascii")
    temporary.replace(repo.reference)
