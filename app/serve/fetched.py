"""Pictures that a request names by a web address, fetched where the server was told to (``--fetch-images``)."""

import base64
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..tools import web
from ..tools.calls import ToolError
from .request import PICTURES, RequestError

MOST_FETCHED = 8  # pictures of a request, in all within web.DEADLINE_S
LISTS = ("messages", "input")


def with_pictures(given: Mapping[str, Any], fetch: Callable[..., bytes] = web.fetch_picture) -> Mapping[str, Any]:
    """Return a request with the pictures in place of their addresses. Raises RequestError."""
    return _Fetching(fetch).of(given)


class _Fetching:
    def __init__(self, fetch: Callable[..., bytes]) -> None:
        self._fetch, self._found = fetch, dict[str, str]()
        self._until_s = time.monotonic() + web.DEADLINE_S

    def of(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**given, **{name: self._within(given[name], name) for name in LISTS if name in given}}

    def _within(self, value: Any, name: str) -> Any:
        if isinstance(value, list):
            return [self._within(each, f"{name}[{at}]") for at, each in enumerate(value)]
        if not isinstance(value, dict):
            return value
        found = {key: self._within(each, f"{name}.{key}") for key, each in value.items()}
        if value.get("type") not in PICTURES:
            return found
        match value:
            case {"image_url": str(url)}:
                found["image_url"] = self._data(url, f"{name}.image_url")
            case {"image_url": {"url": str(url)}}:
                found["image_url"] |= {"url": self._data(url, f"{name}.image_url.url")}
            case {"source": {"type": "url", "url": str(url)}}:
                data = self._data(url, f"{name}.source.url").partition(",")[2]
                found["source"] = {"type": "base64", "data": data}
        return found

    def _data(self, url: str, name: str) -> str:
        if not web.is_address(url):
            return url
        if url not in self._found:
            if len(self._found) == MOST_FETCHED:
                raise RequestError(f"more than {MOST_FETCHED} pictures to fetch", "Send their bytes.", param=name)
            left_s = max(0.1, self._until_s - time.monotonic())
            try:
                picture = self._fetch(url, deadline_s=left_s)
            except ToolError as error:
                raise RequestError(error.message, error.hint, param=name, code="invalid_image") from None
            self._found[url] = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        return self._found[url]
