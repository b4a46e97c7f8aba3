"""The key of a conversion: what an unfinished one must have been made of, and how, for another run to go on with it."""

import json
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import xxhash

from tokamac.engine.adapters import Adapter
from tokamac.engine.device import device_kind, may_use_tf32
from tokamac.engine.regular_files import open_regular
from tokamac.quant.files import checksum
from tokamac.quant.options import Options
from tokamac.quant.provenance import PACKAGES, version_of

FORMAT = 1
"""Of the unfinished folder. Another number is another key, so what another version wrote is not gone on with."""

READ_WHOLE = ("*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja")


def conversion_key(folder: Path, options: Options, adapter: Adapter | None = None) -> str:
    """Return 32 hexadecimal digits that tell a conversion of ``folder`` with ``options`` from any other.

    Of the source: small files whole; of the weights, headers, sizes and times of change. Of the options: all but ``verify``, which
    no weight depends on; a calibration text and an adapter by their content. Versions and the device count too: they decide how
    values are rounded. Raises OSError where a file can't be read.
    """
    versions = {name: version_of(name) for name in PACKAGES}
    small = sorted({file for pattern in READ_WHOLE for file in folder.glob(pattern) if file.is_file()})
    facts = {
        "format": FORMAT,
        "versions": versions,
        "device": str(mx.default_device()),
        "tf32": may_use_tf32(device_kind()),
        "options": {**_options(options), "adapter": None if adapter is None else adapter.digest},
        "files": {file.name: checksum(file) for file in small},
        "weights": {file.name: _weights(file) for file in sorted(folder.glob("*.safetensors"))},
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())


def _options(options: Options) -> dict[str, object]:
    facts = {name: value for name, value in asdict(options).items() if name != "verify"}
    text = options.calibration
    return {**facts, "calibration": checksum(text) if isinstance(text, Path) else text}


def _weights(file: Path) -> tuple[int, int, str]:
    at = file.stat()
    with open_regular(file) as opened:
        header_bytes = 8 + int.from_bytes(opened.read(8), "little")
    return at.st_size, at.st_mtime_ns, checksum(file, 0, min(header_bytes, at.st_size))
