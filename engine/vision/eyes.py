"""A model's eyes: a prompt's pictures among its tokens, and their features for the passes that need them.

A picture's tokens have ids below zero, made of its hash and their places in it: so whatever compares prompts by ids
(prompt cache, segments on disk, drafts) tells pictures apart, and a common prefix ends where two of them differ.
"""

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ..errors import ModelDamagedError, ModelError, PictureError
from ..files import CONFIG_BYTES, read_bytes
from ..gguf.places import TABLE
from ..kv.costs import AttentionDevice
from .cost import PicturePrice, TowerCost, TowerShape, cost_of
from .families import FAMILIES, PictureFamily, PicturePlan
from .picture import MOST, Picture, decoded, extent
from .positions import PictureGroups, Places, placed, take_deep, take_given, use_planes, why_no_planes

if TYPE_CHECKING:
    from mlx import nn

    from ..model.safetensors import StoredTensor

PREPARING = threading.Lock()
FEATURE_BYTES = 256 << 20  # of pictures seen before, held for other prompts
SETTINGS = ("preprocessor_config.json", "processor_config.json")  # newer files hold the first's content in a part


@dataclass(frozen=True, slots=True, eq=False)
class ShownPicture:
    picture: Picture
    plan: PicturePlan
    own: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"{self.picture.digest} {self.plan.size}"


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """The pictures of one prompt. where: their tokens' places. groups: by place, whose it is, from 1."""

    eyes: "Eyes"
    pictures: tuple[ShownPicture, ...]
    where: "np.ndarray[Any, np.dtype[np.int64]]"
    groups: "np.ndarray[Any, np.dtype[np.int32]]"
    positions: "np.ndarray[Any, np.dtype[np.int32]] | None" = None
    shift: int = 0

    @property
    def whole(self) -> bool:
        """Whether no pass cuts a picture."""
        return bool(self.eyes.family.sees_ahead)

    def end_of_part(self, begin: int, end: int) -> int:
        """Return where a pass from ``begin`` may end, at ``end`` or near."""
        if not self.whole or not 0 < end < len(self.groups) or not (own := self.groups[end]):
            return end
        places = np.flatnonzero(self.groups == own)
        first, last = int(places[0]), int(places[-1]) + 1
        if first == end:
            return end
        return first if first > begin else last

    def unseen(self, begin: int, end: int | None = None) -> Iterator[ShownPicture]:
        numbers = self.groups[begin:end]
        for number, each in enumerate(self.pictures, 1):
            if not self.eyes.has_seen(each) and (numbers == number).any():
                yield each

    def needs(self, begin: int) -> tuple[int, int]:
        # Bytes of the tower, where it is not loaded, and of seeing any picture from ``begin`` on.
        working = max((self.eyes.cost(each.plan).working for each in self.unseen(begin)), default=0)
        return (self.eyes.tower_bytes if working else 0), working

    def operations(self, begin: int) -> int:
        return sum(self.eyes.cost(each.plan).operations for each in self.unseen(begin))

    def call(self, model: Any, part: Sequence[int], caches: list[Any], begin: int) -> mx.array:
        eyes, end = self.eyes, begin + len(part)
        low, high = np.searchsorted(self.where, (begin, end))
        ids = mx.array([[eyes.stands if each < 0 else each for each in part]])
        given = deep = None
        if high > low:
            given, deep = eyes.embed(ids, self, int(low), int(high), begin)
        takes = given is not None and eyes.family.takes_embeddings
        more: dict[str, Any] = {"input_embeddings": given} if takes else {}
        groups = None
        if self.whole and high > low:
            padded = np.zeros(max(end, len(self.groups)), np.int32)
            padded[: len(self.groups)] = self.groups
            groups = PictureGroups(mx.array(padded[:end]), eyes.family.sees_ahead == "slides")
        with placed(self._places(begin, end), groups, deep, given):
            logits: mx.array = model(ids, cache=caches, **more)
        return logits

    def _places(self, begin: int, end: int) -> Places | None:
        if self.positions is None:
            return None
        known = self.positions.shape[1]
        later = np.broadcast_to(
            np.arange(max(begin, known), end, dtype=np.int32) + self.shift, (3, max(0, end - max(begin, known)))
        )
        return Places(mx.array(np.concatenate([self.positions[:, begin:end], later], axis=1)))


@dataclass(slots=True)
class Eyes:
    """What a loaded model sees with. Its tower is read when the first picture is to be seen."""

    family: PictureFamily
    folder: Path
    model: Any
    name: str
    token_id: int
    salt: str
    dtype: mx.Dtype | None
    shape: TowerShape
    device: AttentionDevice
    seen_s: float = 0.0
    operations_per_s: float | None = None  # of the last picture
    _ready: bool = False
    _tower: "nn.Module | None" = None
    _features: "OrderedDict[str, mx.array]" = field(default_factory=OrderedDict)

    def read(
        self, pictures: Sequence[Picture], text: str, encode: Callable[[str], list[int]]
    ) -> tuple[list[int], Sight]:
        """Any thread. Raises PictureError."""
        if len(pictures) > MOST:
            raise PictureError(
                f"the conversation has {len(pictures)} pictures, and {MOST} are the most", "Leave some out."
            )
        marks = text.count(self.family.mark)
        if marks != len(pictures):
            raise PictureError(
                f"the chat template of {self.name} writes {marks} of {len(pictures)} pictures", "Use another model."
            )
        self._prepare()
        plans = [self.family.plan(*extent(each)) for each in pictures]
        pieces = text.split(self.family.mark)
        written = pieces[0] + "".join(plan.text + piece for plan, piece in zip(plans, pieces[1:], strict=True))
        return self._placed(encode(written), pictures, plans)

    def _prepare(self) -> None:
        """Change the language model where its family needs it: not before a picture comes, for steps compiled without."""
        family = self.family
        with PREPARING:
            if self._ready:
                return
            if family.sections:
                use_planes(self.model, family.sections, interleaved=family.interleaved)
            if family.deep_layers:
                take_deep(list(self._inner.model.layers[: family.deep_layers]))
            if not family.takes_embeddings:
                take_given(self._inner.model.embed_tokens)
            self._ready = True

    @property
    def stands(self) -> int:
        """What the model is given as the id of a picture's token."""
        return self.token_id if self.family.stands is None else self.family.stands

    @property
    def _inner(self) -> Any:
        return self.model.language_model if "language_model" in self.model else self.model

    def _placed(
        self, ids: list[int], pictures: Sequence[Picture], plans: Sequence[PicturePlan]
    ) -> tuple[list[int], Sight]:
        where = np.flatnonzero(np.array(ids, np.int64) == self.token_id)
        if len(where) != sum(plan.tokens for plan in plans):
            raise PictureError(f"the tokenizer of {self.name} does not fit its pictures", "Download the model again.")
        groups, begin, seen = np.zeros(len(ids), np.int32), 0, []
        for number, (picture, plan) in enumerate(zip(pictures, plans, strict=True), 1):
            own = ids_of(f"{picture.digest} {self.salt}", plan.tokens)
            places = where[begin : begin + plan.tokens]
            groups[places] = number
            for place, each in zip(places.tolist(), own, strict=True):
                ids[place] = each
            begin += plan.tokens
            seen.append(ShownPicture(picture, plan, own))
        positions, shift = (None, 0) if not self.family.sections else in_planes(groups, [plan.grid for plan in plans])
        return ids, Sight(self, tuple(seen), where, groups, positions, shift)

    def embed(self, ids: mx.array, sight: Sight, low: int, high: int, begin: int) -> tuple[mx.array, mx.array | None]:
        words: mx.array = self._inner.model.embed_tokens(ids)
        parts, at = [], 0
        for each in sight.pictures:
            first, last = max(low, at), min(high, at + each.plan.tokens)
            if first < last:
                parts.append(self.features(each)[first - at : last - at])
            at += each.plan.tokens
        features = mx.concatenate(parts).astype(words.dtype) / self.family.embedding_scale()
        places = mx.array(sight.where[low:high] - begin)
        width = words.shape[-1]
        words[0, places] = features[:, :width].astype(words.dtype)
        layers = features.shape[-1] // width - 1
        if not layers:
            return words, None
        deep = mx.zeros((layers, *words.shape[1:]), words.dtype)
        deep[:, places] = features[:, width:].reshape(-1, layers, width).transpose(1, 0, 2)
        return words, deep

    def cost(self, plan: PicturePlan) -> TowerCost:
        return cost_of(self.shape, self.family, plan, 2 if self.dtype is None else self.dtype.size, self.device)

    @property
    def tower_bytes(self) -> int:
        return 0 if self._tower is not None else self.shape.nbytes

    def price(self, picture: Picture) -> tuple[PicturePrice, int]:
        """Raises PictureError."""
        size = extent(picture)
        plan = self.family.plan(*size)
        return PicturePrice(size, plan.size, plan.tokens), self.cost(plan).operations

    def has_seen(self, seen: ShownPicture) -> bool:
        return seen.key in self._features

    def forget(self) -> int:
        freed = sum(each.nbytes for each in self._features.values())
        self._features.clear()
        return freed

    def features(self, seen: ShownPicture) -> mx.array:
        """Return (tokens, width). Raises PictureError, ModelDamagedError."""
        key = seen.key
        if (known := self._features.get(key)) is not None:
            self._features.move_to_end(key)
            return known
        began_s = time.perf_counter()
        pixels = self.family.pixels(decoded(seen.picture), seen.plan)
        tower = self._tower if self._tower is not None else self._read_tower()
        computing_s = time.perf_counter()
        made: mx.array = tower(mx.array(pixels), seen.plan.grid)
        mx.eval(made)
        mx.clear_cache()
        if len(made) != seen.plan.tokens:
            raise ModelDamagedError(f"the tower of {self.name} makes {len(made)} tokens, not {seen.plan.tokens}", "")
        self._features[key] = made
        while len(self._features) > 1 and sum(each.nbytes for each in self._features.values()) > FEATURE_BYTES:
            self._features.popitem(last=False)
        ended_s = time.perf_counter()
        self.seen_s += ended_s - began_s
        self.operations_per_s = self.cost(seen.plan).operations / max(ended_s - computing_s, 1e-9)
        return made

    def _read_tower(self) -> "nn.Module":
        tower = build_tower(self.family, tower_weights(self.folder, self.family), self.name)
        if self.dtype is not None:
            tower.set_dtype(self.dtype)
        mx.eval(tower.parameters())
        if self.device.kind == "cpu":
            from ..cpu.layers import use_kernels

            use_kernels(tower, logits=None)
        self._tower = tower
        return tower


def ids_of(key: str, count: int) -> tuple[int, ...]:
    made = np.frombuffer(hashlib.shake_128(key.encode()).digest(4 * count), "<i4") | np.int32(-(1 << 31))
    return tuple(made.tolist())


def in_planes(
    groups: "np.ndarray[Any, np.dtype[np.int32]]", grids: Sequence[tuple[int, int]]
) -> tuple["np.ndarray[Any, np.dtype[np.int32]]", int]:
    """Return positions (3, T), and the shift of what follows."""
    positions, place, at = np.zeros((3, len(groups)), np.int32), 0, 0
    while place < len(groups):
        own = int(groups[place])
        if not own:
            positions[:, place], place, at = at, place + 1, at + 1
            continue
        rows, columns = grids[own - 1]
        each = np.indices((rows, columns), np.int32).reshape(2, -1)
        positions[0, place : place + rows * columns] = at
        positions[1:, place : place + rows * columns] = each + at
        place, at = place + rows * columns, at + max(rows, columns)
    return positions, at - len(groups)


def settings_of(folder: Path) -> dict[str, Any]:
    """Raises ModelDamagedError."""
    found: dict[str, Any] = {}
    for name in SETTINGS:
        try:
            read = json.loads(read_bytes(folder / name, CONFIG_BYTES))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            raise ModelDamagedError(f"{folder / name} can't be read: {error}", "Download the model again.") from error
        if isinstance(read, dict):
            inner = read.get("image_processor")
            found |= inner if isinstance(inner, dict) else read
    return found


def told_of(folder: Path, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]] | str:
    """Return config and picture settings of a model, or why it has none. Raises ModelDamagedError."""
    if not (folder / TABLE).is_file():
        return config, settings_of(folder)
    from ..gguf.projector import settings_beside

    return settings_beside(folder, config.get("text_config") or config)


def family_of(folder: Path, config: Mapping[str, Any]) -> PictureFamily | str:
    """Return how a model's pictures are seen, or why they are not."""
    try:
        if isinstance(told := told_of(folder, config), str):
            return told
        config, settings = told
        kind, vision = str(config.get("model_type")), config.get("vision_config")
        if not isinstance(vision, dict) or not vision:
            return "it was made to read text alone"
        if kind not in FAMILIES:
            return f"pictures for {kind} are not supported yet"
        return FAMILIES[kind](config, settings)
    except (PictureError, ModelError) as error:
        return error.message
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        return f"its picture settings can't be right ({' '.join(str(error).split())[:80]})"


def tower_weights(folder: Path, family: PictureFamily) -> dict[str, mx.array]:
    if (folder / TABLE).is_file():
        from ..gguf.projector import arrays_beside

        return arrays_beside(folder)
    weights: dict[str, mx.array] = {}
    for shard in _tower_files(folder):
        stored: Any = mx.load(str(shard))
        weights.update((own, array) for name, array in stored.items() if (own := family.own_name(name)) is not None)
    return weights


def build_tower(family: PictureFamily, weights: dict[str, mx.array], name: str) -> "nn.Module":
    """Raises ModelDamagedError."""
    from mlx import nn
    from mlx.utils import tree_flatten

    from ..model.loader import packing_of

    try:
        tower = family.tower()
        shapes = {path: array.shape for path, array in tree_flatten(tower.parameters())}
        fitted = {
            path: _flat(array, shapes.get(path))
            for path, array in weights.items()
            if path.rpartition(".")[2] != "position_ids"
        }

        def packed(path: str, leaf: Any) -> bool | dict[str, Any]:
            return f"{path}.scales" in fitted and packing_of(path, leaf, fitted)

        nn.quantize(tower, class_predicate=packed)
        tower.eval()
        tower.load_weights(list(fitted.items()), strict=True)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, ZeroDivisionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelDamagedError(
            f"the part of {name} that sees is not whole: {reason}", "Download or convert the model again."
        ) from error
    return tower


def _flat(array: mx.array, wanted: tuple[int, ...] | None) -> mx.array:
    if wanted is None or array.ndim <= 2 or len(wanted) != 2:
        return array
    if array.shape[1] != 3 and array.shape[-1] == 3:
        array = mx.moveaxis(array, -1, 1)
    return array.reshape(array.shape[0], -1)


EXAMPLE = (1024, 768)
SIZES = (*((side, side) for side in (32, 256, 512, 1024, 2048, 4096)), (3840, 2160), (1080, 2400), (4096, 512))


def tokens_of_pictures(folder: Path, config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    # Of a picture of EXAMPLE's size, and the fewest and most of others.
    if isinstance(family := family_of(folder, config), str):
        return None
    found = [family.plan(*size).tokens for size in (EXAMPLE, *SIZES)]
    return found[0], min(found), max(found)


def stored_tower(folder: Path, family: PictureFamily) -> "dict[str, StoredTensor]":
    from ..model.safetensors import StoredTensor, locate_tensors

    if (folder / TABLE).is_file():  # a projector's blocks become half precision: shapes are those of the tower
        from mlx.utils import tree_flatten

        made: Any = tree_flatten(family.tower().parameters())
        return {name: StoredTensor(folder, 0, array.shape, 2) for name, array in made}
    stored = locate_tensors(_tower_files(folder))
    return {own: each for name, each in stored.items() if (own := family.own_name(name)) is not None}


def _tower_files(folder: Path) -> list[Path]:
    from ..model.safetensors import find_shards
    from ..model.weights import VISION_FILE

    return [*find_shards(folder), *filter(Path.is_file, (folder / VISION_FILE,))]


def open_eyes(
    folder: Path,
    config: Mapping[str, Any],
    model: Any,
    *,
    name: str,
    token_id: Callable[[str], int | None],
    dtype: mx.Dtype | None,
    device: AttentionDevice,
) -> Eyes | str:
    """Return a model's eyes, or why it has none."""
    family = family_of(folder, config)
    if isinstance(family, str):
        return family
    if not (stored := stored_tower(folder, family)):
        return "the part of it that sees is not in its folder"
    token = token_id(family.token)
    if token is None:
        return f"its tokenizer has no {family.token}"
    if family.sections and (why := why_no_planes(model, family.sections)):
        return why
    told = told_of(folder, config)
    assert not isinstance(told, str)  # or there was no family
    salt = hashlib.sha256(json.dumps(told[1], sort_keys=True, default=str).encode()).hexdigest()[:16]
    group_size = int((config.get("quantization") or {}).get("group_size") or 64)
    vision = {**family.usual, **told[0]["vision_config"]}
    shape = TowerShape.of(stored, vision, group_size, wide=dtype is not None and dtype.size == 4)
    return Eyes(family, folder, model, name, token, salt, dtype, shape, device)
