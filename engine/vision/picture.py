"""A picture of a message: its bytes, known by their hash; opened by Pillow within limits."""

import base64
import binascii
import hashlib
import io
import os
import re
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import PictureError
from ..files import NotRegularError, TooLargeError, expanded, read_bytes, size
from ..requirements import pip_install

BYTES = 32 << 20  # of a file
PIXELS = 64 << 20  # of a picture: decoded, 3 bytes each
SIDE = 1 << 15
MOST = 64  # pictures in a conversation
EXTENTS = 4096  # pictures whose extent is remembered

# First bytes of what is read, and of what people try beside it.
KINDS = (
    ("PNG", re.compile(rb"\x89PNG\r\n\x1a\n")),
    ("JPEG", re.compile(rb"\xff\xd8\xff")),
    ("WEBP", re.compile(rb"RIFF....WEBP", re.DOTALL)),
    ("GIF", re.compile(rb"GIF8[79]a")),
    ("BMP", re.compile(rb"BM")),
)
OTHERS = (
    ("SVG", re.compile(rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*(<!DOCTYPE svg[^>]*>\s*)?<svg", re.DOTALL)),
    ("HEIC or AVIF", re.compile(rb"....ftyp(hei|hev|mif|avi|msf)", re.DOTALL)),
    ("TIFF", re.compile(rb"II\*\0|MM\0\*")),
    ("PDF", re.compile(rb"%PDF")),
)
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
READABLE = "Give a PNG, JPEG, WebP, GIF or BMP file."
TURNS = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")  # where a PNG tells how it is turned


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture's file, held (``encoded``, base64) or named (``path``). Made by ``Picture.of``."""

    digest: str
    name: str = "picture"
    path: str = ""
    encoded: str = field(default="", repr=False)

    @classmethod
    def of(cls, given: object, name: str = "") -> "Picture":
        """Raises PictureError."""
        if isinstance(given, Picture):
            return given
        if isinstance(given, str | os.PathLike):
            data, name = read(Path(given)), name or Path(given).name
        elif isinstance(given, bytes | bytearray | memoryview):
            data = bytes(given)
        else:
            raise PictureError(f"a picture is given as a {type(given).__name__}", "Give a path or bytes.")
        kind_of(data, name or "the picture")
        return cls(hashlib.sha256(data).hexdigest(), name or "picture", encoded=base64.b64encode(data).decode("ascii"))

    @classmethod
    def of_base64(cls, text: str, name: str = "picture") -> "Picture":
        """Raises PictureError."""
        if len(text) > BYTES * 4 // 3 + 4:
            raise PictureError(f"{name} is larger than {size(BYTES)}", "Scale it down.")
        try:
            return cls.of(base64.b64decode(text, validate=True), name)
        except (binascii.Error, ValueError) as error:
            if isinstance(error, PictureError):
                raise
            raise PictureError(f"{name} is not base64", "Send the file's bytes as base64.") from error

    @property
    def data(self) -> bytes:
        """The file. Raises PictureError if it changed."""
        found = base64.b64decode(self.encoded) if self.encoded else read(Path(self.path))
        if hashlib.sha256(found).hexdigest() != self.digest:
            raise PictureError(f"{self.name} has changed since it was attached", "Attach it again.")
        return found


def read(path: Path) -> bytes:
    try:
        return read_bytes(expanded(path), BYTES)
    except TooLargeError as error:
        raise PictureError(f"{path.name} is larger than {size(BYTES)}", "Scale it down.") from error
    except NotRegularError as error:
        raise PictureError(f"{path} is not a file", READABLE) from error
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise PictureError(f"{path} can't be read: {why}", "Check the path.") from error


def kind_of(data: bytes, name: str) -> str:
    """Return Pillow's name of a format. Raises PictureError."""
    if not data:
        raise PictureError(f"{name} is empty", READABLE)
    if len(data) > BYTES:
        raise PictureError(f"{name} is larger than {size(BYTES)}", "Scale it down.")
    head = data[:4096]
    for kind, begins in KINDS:
        if begins.match(head):
            return kind
    for kind, begins in OTHERS:
        if begins.match(head):
            raise PictureError(f"{name} is {kind}, which is not read", READABLE)
    raise PictureError(f"{name} is not a picture", READABLE)


def pillow() -> Any:
    try:
        from PIL import Image, ImageFile, ImageOps  # noqa: F401
    except ImportError as error:
        raise PictureError("pictures need Pillow", f"Install it: {pip_install('tokamac[vision]')}.") from error
    import PIL

    return PIL


_extents: OrderedDict[str, tuple[int, int]] = OrderedDict()  # by digest


def extent(picture: Picture) -> tuple[int, int]:
    """Return (width, height) as shown: of a picture that was opened before, without a look at its bytes."""
    if (known := _extents.get(picture.digest)) is not None:
        return known
    image = _opened(picture, data := picture.data)
    # A PNG may tell how it is turned behind its pixels: to ask for that Pillow decodes all of it.
    asks = image.format != "PNG" or any(each in data for each in TURNS)
    turned = asks and _guarded(picture, lambda: image.getexif().get(0x0112, 1)) in (5, 6, 7, 8)
    found = (image.height, image.width) if turned else (image.width, image.height)
    _extents[picture.digest] = found
    while len(_extents) > EXTENTS:
        _extents.popitem(last=False)
    return found


def decoded(picture: Picture) -> Any:
    """Return Pillow's RGB image of the first frame, turned as EXIF says, without alpha."""
    image = _opened(picture, picture.data)
    turn = pillow().ImageOps.exif_transpose
    return _guarded(picture, lambda: turn(image).convert("RGB"))


def _opened(picture: Picture, data: bytes) -> Any:
    kind, library = kind_of(data, picture.name), pillow().Image
    image = _guarded(picture, lambda: library.open(io.BytesIO(data), formats=(kind,)))
    if not (0 < image.width <= SIDE and 0 < image.height <= SIDE and image.width * image.height <= PIXELS):
        raise PictureError(
            f"{picture.name} has {image.width:,} × {image.height:,} pixels, and {PIXELS >> 20} million are the most",
            "Scale it down.",
        )
    return image


def _guarded(picture: Picture, work: Any) -> Any:
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of bombs, which are bounded here, and of odd metadata
            return work()
    except Exception as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise PictureError(f"{picture.name} can't be read: {reason}", READABLE) from error
