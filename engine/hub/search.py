"""Search Hugging Face for models that run here: MLX models first, then safetensors that can be loaded or converted.

A search has two steps: the hub's list says size, licence and downloads; then each model's config.json says for how many tokens it
was made. The configs are kept in a folder of their own, so that a model can be weighed before it is downloaded. What the hub says
is foreign text: whoever shows it makes it safe.
"""

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DownloadError
from .download import is_transport_error, quiet_client
from .names import folder_name

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo
    from huggingface_hub.hf_api import ExpandModelProperty_T

MOST = 24
"""Models that a search finds at most."""
COMMUNITY = "mlx-community/"
WRITES = ("text-generation", "image-text-to-text", "any-to-any", "audio-text-to-text", None)
"""What the hub calls models that write text; None is one whose author did not say."""
OTHER_FORMATS = ("gguf", "onnx", "exl2", "exl3", "openvino", "coreml", "bitnet")
FIELDS: "list[ExpandModelProperty_T]" = ["safetensors", "usedStorage", "downloads", "tags", "pipeline_tag", "config"]
REACHED_S = 5.0
"""How long the hub may take to say that it is there. Its client would try for half a minute where there is no network."""
DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
"""Of the types that a checkpoint's tensors have; all others take one byte."""
CONFIG_BYTES = 1 << 20
AT_ONCE = 6
MOST_CONFIGS = 300
"""Configs that are kept; the oldest go first."""
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
"""What a model's name and tags say that it is good for: the first that matches."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub. None is unknown.

    Attributes:
        nbytes: of its weights.
        context: tokens it was made for.
        licence: as the hub abbreviates it.
        downloads: of the last month.
        good_for: a short phrase; "" where nothing says.
        mlx: it is in MLX's format. Any other is loaded as it is, or converted.
        config_folder: holds its config.json; None until that has come.
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
    """Return what a model's name and tags say that it is good for; "" where nothing does."""
    said = re.sub(r"[_./]", "-", " ".join([name, *tags]).lower())
    return next((phrase for pattern, phrase in PURPOSES if re.search(pattern, said)), "")


def search(words: str, configs: Path) -> Iterator[HubModel]:
    """Yield what the hub finds for ``words``, best first; then each again once its config is known, which is put below ``configs``.

    Raises DownloadError where the hub does not answer.
    """
    import huggingface_hub.hf_api  # noqa: F401  # sets the level of its log, which is then lowered

    with quiet_client():
        try:
            _reach()
            found = _listed(words)
        except Exception as error:
            raise _refused(error) from error
        yield from found
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for model in pool.map(lambda each: _with_config(each, configs), found):
                if model.config_folder is not None:
                    yield model
    _prune(configs)


def _reach() -> None:
    """Raise what the client raises where the hub can't be reached, and at once."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # public, but not listed in __all__

    get_session().head(constants.ENDPOINT, timeout=REACHED_S)


def _listed(words: str) -> list[HubModel]:
    """Return MLX models, mlx-community's first, then others; each by its downloads."""
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
    """Whether a listed model writes text, in a format and of a kind that is known here."""
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
    """Return the bytes of the weights: from the tensors' types, but never more than the repository holds."""
    stored = info.used_storage
    types = info.safetensors.parameters if info.safetensors is not None else {}
    weights = sum(number * DTYPE_BYTES.get(dtype, 1) for dtype, number in types.items())
    known = [size for size in (weights, stored) if size]
    return min(known, default=None)


def _with_config(model: HubModel, configs: Path) -> HubModel:
    """Return the model with what its config.json says; unchanged where that can't be had."""
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
    """Remove the configs of the oldest searches."""
    try:
        folders = sorted(configs.iterdir(), key=lambda folder: folder.stat().st_mtime)
        for folder in folders[:-MOST_CONFIGS]:
            (folder / "config.json").unlink(missing_ok=True)
            folder.rmdir()
    except OSError:
        return  # they are small


def _refused(error: Exception) -> Exception:
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
    """Return a model as plain values, for JSON."""
    names = ("id", "nbytes", "context", "licence", "downloads", "good_for", "mlx")
    folder = None if model.config_folder is None else str(model.config_folder)
    return {**{name: getattr(model, name) for name in names}, "config_folder": folder}
