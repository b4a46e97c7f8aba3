"""Embeddings of texts: OpenAI's interface (https://platform.openai.com/docs/api-reference/embeddings), and Ollama's two."""

import base64
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..backend.protocol import Embedded
from .request import Fields, RequestError, ServedModel

MOST_TEXTS = 2048  # of one request, as OpenAI's
TOGETHER = 32  # texts that the engine is asked for at once: replies take turns in between


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts to embed. prompt: name of the model's prompt before each, None is its default. truncate: cut long ones."""

    texts: tuple[str, ...]
    prompt: str | None = None
    dimensions: int | None = None
    truncate: bool = False


class OpenAIEmbeddings:
    """A request and its answer; ``prompt_name`` is sentence-transformers' word for what goes before each text."""

    def __init__(self, body: Mapping[str, Any], model: ServedModel) -> None:
        """Parse the request. Raises RequestError."""
        given = Fields(body)
        model.check_name(given.text("model"))
        self._model = model.id
        self._packed = given.one_of("encoding_format", ("float", "base64")) == "base64"
        texts = _texts(given, "input")
        if not texts:
            raise RequestError("input is empty", "Give a text or several.", param="input")
        self.request = EmbeddingRequest(
            texts, given.text("prompt_name"), given.whole("dimensions", 1), given.flag("truncate")
        )
        given.idle("user")
        given.done()
        self._ignored = given.ignored

    def answer(self, made: Sequence[Embedded], load_s: float) -> dict[str, Any]:  # noqa: ARG002
        vectors = [vector for each in made for vector in each.vectors]
        tokens = sum(sum(each.tokens) for each in made)
        data = [
            {"object": "embedding", "index": at, "embedding": vector if self._packed else floats(vector)}
            for at, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        told = {"object": "list", "data": data, "model": self._model, "usage": usage}
        return {**told, "tokamac": {"ignored": list(self._ignored)}} if self._ignored else told


class OllamaEmbeddings:
    """A request and its answer. old: of /api/embeddings, which takes one text."""

    def __init__(self, body: Mapping[str, Any], model: ServedModel, *, old: bool = False) -> None:
        """Parse the request. Raises RequestError."""
        given = Fields(body)
        self._began_s, self._old, self._model = time.monotonic(), old, given.text("model") or model.id
        texts = (given.text("prompt") or "",) if old else _texts(given, "input")
        self.request = EmbeddingRequest(
            () if texts == ("",) else texts, None, given.whole("dimensions", 0) or None, given.flag("truncate", True)
        )

    def answer(self, made: Sequence[Embedded], load_s: float) -> dict[str, Any]:
        vectors = [floats(vector) for each in made for vector in each.vectors]
        if self._old:
            return {"embedding": vectors[0] if vectors else []}
        return {
            "model": self._model,
            "embeddings": vectors,
            "total_duration": round((load_s + time.monotonic() - self._began_s) * 1e9),
            "load_duration": round(load_s * 1e9),
            "prompt_eval_count": sum(sum(each.tokens) for each in made),
        }


def floats(vector: str) -> list[float]:
    """Return the numbers of a vector: little-endian float32 in base64."""
    raw = base64.b64decode(vector)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def _texts(given: Fields, field: str) -> tuple[str, ...]:
    value = given.raw(field)
    if isinstance(value, list) and any(isinstance(each, int | list) for each in value):
        raise RequestError(
            f"{field} holds token ids, which mean something else to this model", "Send texts.", param=field,
            code="unsupported_value",
        )  # fmt: skip
    texts = given.texts(field) or ()
    if len(texts) > MOST_TEXTS:
        raise RequestError(f"{field} has more than {MOST_TEXTS:,} texts", "Ask several times.", param=field)
    return texts
