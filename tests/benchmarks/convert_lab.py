"""Conversions in a process of their own, ours and mlx-lm's: how long each takes, and the most memory its process ever had."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.servers import resident_peak
from tests.engine.seeded import CONFIG, write_tokenizer

SHARD_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Run:
    """One conversion. peak_bytes: of the whole process, libraries included; device_bytes: what MLX held at most."""

    seconds: float
    peak_bytes: int
    device_bytes: int


class ConvertLab:
    """Converts once. Libraries are imported before the clock starts."""

    def __init__(self) -> None:
        import mlx_lm.convert  # noqa: F401  # both sides begin with the same libraries in memory

        import tokamac.quant.conversion  # noqa: F401

    def ours(self, source: Path, out: Path, asked: dict[str, Any]) -> Run:
        """Convert with Tokamac."""
        from tokamac.quant import convert

        return _timed(lambda: convert(source, out, **asked))

    def theirs(self, source: Path, out: Path, group_size: int) -> Run:
        """Convert with mlx_lm, to 4 bits."""
        from mlx_lm.convert import convert

        return _timed(lambda: convert(str(source), str(out), quantize=True, q_bits=4, q_group_size=group_size))


def _timed(convert: Any) -> Run:
    import mlx.core as mx

    mx.reset_peak_memory()
    began = time.perf_counter()
    convert()
    seconds = time.perf_counter() - began
    return Run(seconds, resident_peak(), mx.get_peak_memory())


def write_source(folder: Path, **changes: Any) -> int:
    """Write a seeded llama in bfloat16, in shards of about 100 MB; return the bytes of its weights."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from tokamac.engine.model.skeleton import skeleton_model

    folder.mkdir(parents=True)
    config = {**CONFIG, **changes, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    mx.random.seed(11)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = total = 0
    for name, hollow in tree_flatten(skeleton_model(config, 2).parameters()):
        if filled and filled + hollow.nbytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append((name, tuple(hollow.shape)))
        filled, total = filled + hollow.nbytes, total + hollow.nbytes
    where = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        arrays = {name: (mx.random.normal(shape) * 0.02).astype(mx.bfloat16) for name, shape in names}
        mx.save_safetensors(str(folder / file), arrays, {"format": "pt"})
        where.update(dict.fromkeys(arrays, file))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


class QualityLab:
    """How far converted folders are from their source, on conversations that the embedded model was made for."""

    def __init__(self, source: Path, tokens: int, texts: int) -> None:
        self._source = source
        self._ids = list(_conversations(source, tokens, texts))

    def kl(self, folder: Path) -> float:
        """Return the mean KL divergence in nats a token."""
        from tokamac.quant.evaluation import verify
        from tokamac.quant.streaming import Streamed, streamable_folder

        found = []
        for ids in self._ids:
            compared = verify(Streamed(streamable_folder(self._source)), Streamed(streamable_folder(folder)), ids)
            if compared.quality.kl is None:
                raise ValueError(f"{folder} gives values that are not numbers")
            found.append(compared.quality.kl)
        return sum(found) / len(found)


def _conversations(source: Path, tokens: int, texts: int) -> Any:
    """Yield held-out questions with their answers, as the model's template writes them, each text of ``tokens`` tokens."""
    from tests.guide.dataset import read_corpus
    from tests.guide.evaluate import held_out_cases
    from tokamac.engine.events import Message
    from tokamac.engine.model.config import read_config
    from tokamac.engine.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source, read_config(source), source.name)
    cases = list(held_out_cases(read_corpus()))
    for number in range(texts):
        ids: list[int] = []
        messages: list[Message] = []
        for case in cases[number * len(cases) // texts :]:
            messages += [Message("user", case.question), Message("assistant", case.turn.answer)]
            ids = tokenizer.encode(tokenizer.render(messages, reply=False))
            if len(ids) >= tokens:
                break
        yield ids[:tokens]
