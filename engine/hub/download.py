"""Models of the Hugging Face hub: downloaded, and searched for, MLX first, then what can be loaded or converted."""

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..errors import DownloadError, ModelNotFoundError, ModelUnsupportedError, TokamacError
from ..events import LoadProgress
from ..files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_WEIGHTS, exists, expanded, is_dir, to_disk
from ..gguf.library import ollama_file
from ..gguf.places import GgufVariant, find_gguf, suitable, variants
from ..model.safetensors import find_shards
from ..model.weights import MEDUSA_FILE, MTP_FILE, VISION_FILE
from ..perf import hardware
from .cache import (
    ModelOnDisk,
    Repo,
    cache_folder,
    gguf_here,
    list_models,
    meant,
    remove_model,
    repo_of,
    whole_adapter,
    whole_snapshot,
)
from .names import EMBEDDED, ID, folder_name

if TYPE_CHECKING:
    from hashlib import _Hash

    from huggingface_hub import ModelInfo
    from huggingface_hub.hf_api import ExpandModelProperty_T, RepoSibling

# resolve("guide")                          assets/guide/model; "guide-draft" is assets/guide/draft
# resolve("~/models/mine")                  that folder
# resolve("mlx-community/Qwen3-4B-4bit")    its snapshot in the Hugging Face cache, downloaded unless whole
# resolve("org/name@v1.0")                  a branch, a tag or a commit

# A file downloads to blobs/<etag>.incomplete, is renamed after its checksum, then linked into the snapshot;
# refs/<revision> is written after the last file. The bytes are fetched here, with HTTP Range, because the
# client (2.4) restarts a file after an interruption; its ``hf_hub_download`` then finds and links them.


__all__ = [
    "ModelOnDisk", "Repo", "find", "list_models", "pull", "remove_model", "repo_of", "resolve", "resolve_adapter",
]  # fmt: skip

Progress = Callable[[LoadProgress], None]
Cancelled = Callable[[], bool]

ADVICE = "What has arrived is kept: the same command resumes from there."

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)

# What a model needs and no more: no code, no pickles, no second copy of the weights in other formats or in subfolders.
WANTED = ("model*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")

BESIDE = (MTP_FILE, MEDUSA_FILE, VISION_FILE)  # heads for further tokens and towers, where a model has them

# What an embedding model's states go through (embedding.py).
POOLED = re.compile(r"\d_\w+/(config\.json|model\.safetensors)", re.ASCII)

# What an adapter needs: its weights in either format, and its config.
ADAPTER_WANTED = (PEFT_WEIGHTS, ADAPTER_WEIGHTS, ADAPTER_CONFIG)

OTHER_WEIGHTS = {".bin", ".gguf", ".npz", ".onnx", ".pt", ".safetensors"}

RETRIES = 5  # attempts without a new byte before a connection is given up

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
RETRY_S = 0.5  # wait before the first new attempt; each one after waits this much longer


def resolve(model: str | Path, *, progress: Progress | None = None, cancelled: Cancelled | None = None) -> Path:
    """Return the folder of ``model``; an id that isn't whole on disk is downloaded.

    Args:
        progress: Receives the bytes so far and in all.
        cancelled: Polled; True ends the download and keeps the bytes received.

    Raises:
        TokamacError: ModelNotFoundError, ModelDamagedError, ModelUnsupportedError or DownloadError.
    """
    return find(model) or pull(str(model), progress=progress, cancelled=cancelled)


def resolve_adapter(
    adapter: str | Path, *, progress: Progress | None = None, cancelled: Cancelled | None = None
) -> Path:
    """``resolve`` for an adapter; raises the same errors."""
    path = expanded(adapter)
    if str(adapter).strip() and is_dir(path):
        return path
    if exists(path) or isinstance(adapter, Path) or _is_path(str(adapter)):
        what = "a file, not the folder of an adapter" if exists(path) else "no folder"
        raise ModelNotFoundError(f"{adapter} is {what}", "Name the folder that the adapter was saved to.")
    if ID.fullmatch(str(adapter)) is None:
        raise ModelNotFoundError(
            f"there is no adapter {str(adapter)!r}", "Name a folder, or a Hugging Face id such as org/name."
        )
    repo = repo_of(str(adapter))
    return whole_adapter(repo) or download(repo, progress, cancelled, adapter=True)


def find(model: str | Path) -> Path | None:
    """Return the folder of a model that is whole on disk, else None. Raises ModelNotFoundError for no valid name."""
    if (found := _local(model)) is not None:
        return found
    repo = repo_of(str(model))
    if (folder := whole_snapshot(repo)) is not None:
        return folder
    gguf = gguf_here(repo)
    return None if gguf is None else _folder_of(gguf)


def pull(model: str, *, progress: Progress | None = None, cancelled: Cancelled | None = None) -> Path:
    """Update a model from the hub, even if it is on disk. Raises like ``resolve``."""
    if model in EMBEDDED:
        return _embedded(model)
    found = download(repo_of(model), progress, cancelled)
    return _folder_of(found) if found.suffix == ".gguf" else found


def gguf_variants(model: str) -> tuple[tuple[GgufVariant, ...], GgufVariant | None]:
    """Return a repository's GGUF models, and the one that ``pull`` takes here, if any. Raises like ``resolve``."""
    repo = repo_of(model)
    with quiet_client():
        try:
            _, siblings = _siblings(repo)
        except Exception as error:
            raise translate(error, repo) from error
    found = variants({item.rfilename: item.size or 0 for item in siblings})
    return found, _suitable(found) if found and not _has_weights(siblings) else None


def _suitable(found: Sequence[GgufVariant]) -> GgufVariant:
    from ..perf.memory import array_budget

    return suitable(found, array_budget())


def _folder_of(gguf: Path) -> Path:
    from ..gguf.checkpoint import folder_of

    return folder_of(gguf)


def _local(model: str | Path) -> Path | None:
    if isinstance(model, str) and model in EMBEDDED:
        return _embedded(model)
    if not str(model).strip():
        return None
    path = expanded(model)
    if (gguf := find_gguf(path)) is not None:
        return _folder_of(gguf)
    if is_dir(path):
        return path
    if exists(path):
        raise ModelNotFoundError(
            f"{path} is a file, and no GGUF model", "Name a GGUF file, or the folder that holds config.json."
        )
    if isinstance(model, str) and (kept := ollama_file(model)) is not None:
        return _folder_of(kept)
    if isinstance(model, Path) or _is_path(model):
        hint = "Check the path, or name a Hugging Face id such as org/name."
        if str(path) in EMBEDDED:
            hint = f"The embedded model is just {path}: no slash, and no Path."
        raise ModelNotFoundError(f"there is no folder {path}", hint)
    return None


def _embedded(model: str) -> Path:
    from tokamac.assets import asset_path

    folder = asset_path("guide", EMBEDDED[model])
    if not folder.is_dir():
        raise ModelNotFoundError("the embedded model is not installed", "Install Tokamac again, or name another model.")
    return folder


def _is_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or model in (".", "..") or "\\" in model or model.endswith("/")


def disk_full(repo: Repo, needed: int, free: int) -> DownloadError:
    from ..files import sizes

    wanted, left = sizes(needed, free)
    return DownloadError(
        f"{repo} needs {wanted} and {cache_folder()} has {left} free",
        "Free some space (`tokamac models list` shows what is there), or set HF_HOME to a folder on another disk.",
    )


def is_transport_error(error: BaseException) -> bool:
    # Recognised by name: the client brings its own httpx, or httpx2.
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def translate(error: Exception, repo: Repo) -> Exception:
    from huggingface_hub import errors as hub
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, TokamacError):
        return error
    if isinstance(error, hub.GatedRepoError):
        return _gated(repo)
    if isinstance(error, hub.RepositoryNotFoundError | hub.HFValidationError):  # of no such name, or none can have it
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
            f"{repo} is not complete on disk, and HF_HUB_OFFLINE forbids the network", "Unset HF_HUB_OFFLINE."
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
            f"the hub lists {name} in {repo} but does not have the file", "Try another revision or another model."
        )
    if status in (401, 403):
        return DownloadError(
            f"the hub refuses {repo} (HTTP {status})", "Check HF_TOKEN, and that its account may read the model."
        )
    if status == 429:
        return DownloadError("the hub says there were too many requests (HTTP 429)", _then("Wait some minutes.", repo))
    return DownloadError(f"the hub failed (HTTP {status}) at {name}", _then("Try again later.", repo))


def _then(do: str, repo: Repo) -> str:
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
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A repository file. ``etag`` names its blob: SHA-256 for a ``large`` file, else git's SHA-1."""

    name: str
    nbytes: int
    etag: str
    large: bool

    def blob(self, repo: Repo) -> Path:
        return repo.folder / "blobs" / self.etag

    def partial(self, repo: Repo) -> Path:
        return repo.folder / "blobs" / f"{self.etag}.incomplete"

    def digest(self) -> "_Hash":
        return hashlib.sha256() if self.large else hashlib.sha1(b"blob %d\0" % self.nbytes, usedforsecurity=False)


SPEED_FILE, SPEED_KEY = "download.json", "10^6 bytes a second of the last download"

# What a download moves, and for how long, before its speed says something: small files are mostly waiting.
TELLING_BYTES, TELLING_S = 16 << 20, 2.0


def last_speed() -> float | None:
    known = hardware.read(hardware.store_file(SPEED_FILE), SPEED_KEY)
    return None if known is None else known * 1e6


class Meter:
    """Bytes of all files; reports at most 20 times per second; raises DownloadError once cancelled."""

    def __init__(self, total: int, progress: Progress, cancelled: Cancelled) -> None:
        self.total = total
        self.done = 0
        self._arrived = 0
        self._began_s = time.monotonic()
        self._progress = progress
        self._cancelled = cancelled
        self._told_s = 0.0

    def keep_speed(self) -> None:
        took_s = time.monotonic() - self._began_s
        if self._arrived >= TELLING_BYTES and took_s >= TELLING_S:
            speed = {SPEED_KEY: self._arrived / took_s / 1e6}
            hardware.keep(hardware.store_file(SPEED_FILE), speed)

    def receive(self, nbytes: int) -> None:
        self._arrived += nbytes
        self.add(nbytes)

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        now = time.monotonic()
        if now - self._told_s >= 0.05 or self.done >= self.total:
            self._told_s = now
            self._progress(LoadProgress("download", self.done, self.total))
        if self._cancelled():
            raise DownloadError("the download was stopped", ADVICE if self.done else "")


def download(
    repo: Repo, progress: Progress | None = None, cancelled: Cancelled | None = None, *, adapter: bool = False
) -> Path:
    """Download a repository, or its adapter files alone; return its folder, or a GGUF model's first file.

    Raises DownloadError, ModelNotFoundError, ModelDamagedError or ModelUnsupportedError.
    """
    with quiet_client():
        try:
            commit, files = _listing(repo, ADAPTER_WANTED if adapter else WANTED)
            snapshot = repo.snapshot(commit)
            missing = [file for file in files if not _is_there(snapshot / file.name, file)]
            lacking = _check_disk_space(repo, missing)
            total = sum(file.nbytes for file in _contents(files))
            meter = Meter(total, progress or (lambda _: None), cancelled or (lambda: False))
            meter.add(meter.total - lacking)
            try:
                for file in sorted(missing, key=lambda file: (file.name.endswith(".safetensors"), file.name)):
                    _fetch(repo, commit, file, meter)
            finally:
                meter.keep_speed()
            gguf = next((snapshot / file.name for file in files if file.name.endswith(".gguf")), None)
            if not adapter and gguf is None:
                find_shards(snapshot)
            _record(repo, commit)
        except Exception as error:
            raise translate(error, repo) from error
    return gguf or snapshot


def _siblings(repo: Repo) -> tuple[str, "Sequence[RepoSibling]"]:
    from huggingface_hub import HfApi, constants

    timeout = constants.HF_HUB_ETAG_TIMEOUT
    info = HfApi().model_info(repo.id, revision=repo.revision, files_metadata=True, timeout=timeout)
    return info.sha or "", info.siblings or []


def _has_weights(siblings: "Iterable[RepoSibling]") -> bool:
    names = [item.rfilename for item in siblings]
    return any(fnmatch(name, WANTED[0]) and "/" not in name for name in names)


def _gguf_of(repo: Repo, siblings: "Sequence[RepoSibling]") -> tuple[str, ...]:
    found = variants({item.rfilename: item.size or 0 for item in siblings})
    if not found or (repo.variant is None and _has_weights(siblings)):
        if repo.variant is not None:
            raise ModelNotFoundError(f"{repo.id} has no GGUF files", f"Leave :{repo.variant} out.")
        return ()
    if repo.variant is None:
        return _suitable(found).files
    named = [each for each in found if each.is_called(repo.variant)]
    if len(named) != 1:
        names = ", ".join(each.name for each in found)
        raise ModelNotFoundError(f"{repo.id} has no one GGUF file {repo.variant}", f"It has {names:.400}.")
    return named[0].files


def _listing(repo: Repo, wanted: tuple[str, ...]) -> tuple[str, list[RemoteFile]]:
    commit, siblings = _siblings(repo)
    gguf = _gguf_of(repo, siblings) if wanted is WANTED else ()
    files = [
        RemoteFile(item.rfilename, item.lfs.size, item.lfs.sha256, large=True)
        if item.lfs
        else RemoteFile(item.rfilename, item.size or 0, item.blob_id or "", large=False)
        for item in siblings
        if (item.rfilename in gguf if gguf else _is_wanted(item.rfilename, wanted))
    ]
    if not gguf and not any(
        file.name.endswith(".safetensors") and file.name not in BESIDE and "/" not in file.name for file in files
    ):
        kinds = {Path(item.rfilename).suffix for item in siblings} & OTHER_WEIGHTS
        has = f" (only {', '.join(sorted(kinds))} files)" if kinds else ""
        raise ModelUnsupportedError(
            f"{repo} has no {' or '.join(each for each in wanted if each.endswith('.safetensors'))} weights{has}",
            "Choose a safetensors version, for example from mlx-community.",
        )
    for name, value in (("commit", commit), *((file.name, file.etag) for file in files)):
        if not _HASH.fullmatch(value):  # it becomes a part of a path
            raise DownloadError(
                f"the hub gives no valid hash for {name} of {repo} ({value!r:.60})",
                "Try again later, or check HF_ENDPOINT.",
            )
    return commit, files


def _is_wanted(name: str, wanted: tuple[str, ...]) -> bool:
    plain = "/" not in name and any(fnmatch(name, pattern) for pattern in (*wanted, *BESIDE))
    return plain or POOLED.fullmatch(name) is not None


def _is_there(path: Path, file: RemoteFile) -> bool:
    if not path.exists():
        return False
    if path.stat().st_size == file.nbytes:
        return True
    path.resolve().unlink()
    path.unlink(missing_ok=True)
    return False


def _check_disk_space(repo: Repo, missing: list[RemoteFile]) -> int:
    """Return the bytes to fetch. Raises DownloadError where they don't fit on the disk."""
    (repo.folder / "blobs").mkdir(parents=True, exist_ok=True)
    needed = sum(file.nbytes - _arrived(repo, file) for file in _contents(missing))
    free = shutil.disk_usage(repo.folder).free
    if needed > free:
        raise disk_full(repo, needed, free)
    return needed


def _contents(files: Iterable[RemoteFile]) -> Iterable[RemoteFile]:
    return {file.etag: file for file in files}.values()


def _arrived(repo: Repo, file: RemoteFile) -> int:
    blob, partial = file.blob(repo), file.partial(repo)
    if blob.exists() and blob.stat().st_size == file.nbytes:
        return file.nbytes
    arrived = partial.stat().st_size if partial.exists() else 0
    return arrived if arrived <= file.nbytes else 0


def _fetch(repo: Repo, commit: str, file: RemoteFile, meter: Meter) -> None:
    from huggingface_hub import constants, hf_hub_download

    with _locked(repo, file):
        blob = file.blob(repo)
        if not blob.exists() or blob.stat().st_size != file.nbytes:
            _fetch_blob(repo, commit, file, meter)
    hf_hub_download(repo.id, file.name, revision=commit, etag_timeout=constants.HF_HUB_ETAG_TIMEOUT)


def _fetch_blob(repo: Repo, commit: str, file: RemoteFile, meter: Meter) -> None:
    from huggingface_hub import hf_hub_url

    partial = file.partial(repo)
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
    partial.replace(file.blob(repo))


class _Transfer:
    def __init__(self, url: str, file: RemoteFile, out: BinaryIO, meter: Meter) -> None:
        self._url, self._file, self._out, self._meter = url, file, out, meter
        self._digest = file.digest()
        out.seek(0)
        while block := out.read(1 << 20):
            self._digest.update(block)
        self._arrived = out.tell()

    @property
    def intact(self) -> bool:
        return self._arrived == self._file.nbytes and self._digest.hexdigest() == self._file.etag

    def run(self) -> None:
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
                self._meter.receive(len(chunk))

    def _start_over(self) -> None:
        self._meter.add(-self._arrived)
        self._out.truncate(0)
        self._digest, self._arrived = self._file.digest(), 0


@contextmanager
def _locked(repo: Repo, file: RemoteFile) -> Iterator[None]:
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
    if repo.revision == commit:
        return
    repo.reference.parent.mkdir(parents=True, exist_ok=True)
    temporary = repo.reference.with_name(f".{repo.reference.name}.{secrets.token_hex(8)}")
    temporary.write_text(commit, encoding="ascii")
    temporary.replace(repo.reference)


# The hub's list gives size, licence and downloads; each config.json, cached in a folder of its own, gives the
# context length. Hub text is untrusted: whoever displays it must sanitise it.


MOST = 24  # models that a search finds at most
COMMUNITY = "mlx-community/"
# What the hub calls models that write text; None is one whose author did not say.
WRITES = ("text-generation", "image-text-to-text", "any-to-any", "audio-text-to-text", None)
OTHER_FORMATS = ("gguf", "onnx", "exl2", "exl3", "openvino", "coreml", "bitnet")
FIELDS: "list[ExpandModelProperty_T]" = ["safetensors", "usedStorage", "downloads", "tags", "pipeline_tag", "config"]
# How long the hub may take to say that it is there. Its client would try for half a minute where there is no network.
REACHED_S = 5.0
# Of the types that a checkpoint's tensors have; all others take one byte.
DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
CONFIG_BYTES = 1 << 20
AT_ONCE = 6
MOST_CONFIGS = 300  # configs that are kept; the oldest go first
# What a model's name and tags say that it is good for: the first that matches.
PURPOSES = (
    (r"\bcod(er|e|ing)\b|codestral|devstral|starcoder", "writing code"),
    (r"\bmath\b|prover", "mathematics"),
    (r"reason|thinking|\br1\b|\bqwq\b|\bo1\b", "reasoning step by step"),
    (r"translat", "translation"),
    (r"\bmedical\b|\bmed\b|medgemma", "medical texts"),
    (r"roleplay|role-play|storytell|creative", "stories and role play"),
    (r"embed|rerank", "search, not chat"),
    (r"\bvl\b|vision|image-text-to-text|any-to-any|multimodal|omni", "chat (text only here)"),
    (r"instruct|\bchat\b|conversational|\bit\b", "general chat"),
)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub. None is unknown.

    Attributes:
        nbytes: Of its weights.
        context: Tokens it was trained for.
        downloads: In the last month.
        mlx: In MLX's format; others are loaded as they are, or converted.
        config_folder: Holds its config.json; None until fetched.
    """

    id: str
    nbytes: int | None
    context: int | None
    licence: str | None
    downloads: int | None
    good_for: str
    mlx: bool
    config_folder: Path | None = None


def good_for(name: str, tags: Sequence[str] = ()) -> str:
    said = re.sub(r"[_./]", "-", " ".join([name, *tags]).lower())
    return next((phrase for pattern, phrase in PURPOSES if re.search(pattern, said)), "")


def search(words: str, configs: Path) -> Iterator[HubModel]:
    """Yield models best first, then each again with its config (below ``configs``). Raises DownloadError."""
    import huggingface_hub.hf_api  # noqa: F401  # sets the level of its log, which is then lowered

    with quiet_client():
        try:
            _reach()
            found = _listed(words)
        except Exception as error:
            raise _search_failed(error) from error
        yield from found
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for model in pool.map(lambda each: _with_config(each, configs), found):
                if model.config_folder is not None:
                    yield model
    _prune(configs)


def _reach() -> None:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # public, but not listed in __all__

    get_session().head(constants.ENDPOINT, timeout=REACHED_S)


def _listed(words: str) -> list[HubModel]:
    from huggingface_hub import HfApi

    api = HfApi()
    infos: dict[str, ModelInfo] = {}
    for tags, kind in ((["mlx"], None), (["safetensors"], "text-generation")):
        listed = api.list_models(
            search=words, filter=tags, pipeline_tag=kind, sort="downloads", limit=MOST, expand=FIELDS
        )
        infos.update({info.id: info for info in listed if info.id not in infos and _may_run(info)})
    found = [_of(info) for info in infos.values()]
    found.sort(key=lambda each: (not each.mlx, not each.id.startswith(COMMUNITY), -(each.downloads or 0)))
    return found[:MOST]


def _may_run(info: "ModelInfo") -> bool:
    from ..architectures import find_classes
    from ..model.config import normalise

    tags = {tag.lower() for tag in info.tags or ()}
    if info.pipeline_tag not in WRITES or tags.intersection(OTHER_FORMATS) or "embed" in info.id.lower():
        return False
    kind = (info.config or {}).get("model_type")
    if not isinstance(kind, str):
        return "mlx" in tags  # its own config.json will say
    try:
        find_classes(normalise({"model_type": kind}))
    except Exception:  # mlx-lm's own choice of errors, and those of a config that has no more than this
        return "mlx" in tags
    return True


def _of(info: "ModelInfo") -> HubModel:
    tags = [tag.lower() for tag in info.tags or ()]
    licence = next((tag.partition(":")[2] for tag in tags if tag.startswith("license:")), None)
    purpose = good_for(info.id, [tag for tag in [*tags, info.pipeline_tag or ""] if ":" not in tag])
    return HubModel(info.id, _nbytes(info), None, licence, info.downloads, purpose, "mlx" in tags)


def _nbytes(info: "ModelInfo") -> int | None:
    stored = info.used_storage
    types = info.safetensors.parameters if info.safetensors is not None else {}
    weights = sum(number * DTYPE_BYTES.get(dtype, 1) for dtype, number in types.items())
    known = [size for size in (weights, stored) if size]
    return min(known, default=None)


def _with_config(model: HubModel, configs: Path) -> HubModel:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]  # public, not in __all__

    folder = configs / folder_name(model.id)
    try:
        url = hf_hub_url(model.id, "config.json")
        with get_session().stream("GET", url, headers=build_hf_headers(), follow_redirects=True) as response:
            response.raise_for_status()
            body = b""
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > CONFIG_BYTES:
                    return model
        from ..model.config import context_length, normalise

        config = json.loads(body)
        context = context_length(normalise(config))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_bytes(body)
    except Exception:  # one answer among many: gated, gone, or no JSON
        return model
    return replace(model, context=context, config_folder=folder)


def _prune(configs: Path) -> None:
    try:
        folders = sorted(configs.iterdir(), key=lambda folder: folder.stat().st_mtime)
        for folder in folders[:-MOST_CONFIGS]:
            (folder / "config.json").unlink(missing_ok=True)
            folder.rmdir()
    except OSError:
        return  # they are small


def _search_failed(error: Exception) -> Exception:
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    if isinstance(error, hub.OfflineModeIsEnabled):
        return DownloadError("HF_HUB_OFFLINE forbids the network", "Models on this disk can still be used.")
    if is_transport_error(error):
        return DownloadError(f"no connection to {constants.ENDPOINT}", "Models on this disk can still be used.")
    if isinstance(error, hub.HfHubHTTPError):
        return DownloadError(f"the hub failed (HTTP {error.response.status_code})", "Try again later.")
    return error


def plain(model: HubModel) -> dict[str, Any]:
    names = ("id", "nbytes", "context", "licence", "downloads", "good_for", "mlx")
    folder = None if model.config_folder is None else str(model.config_folder)
    return {**{name: getattr(model, name) for name in names}, "config_folder": folder}
