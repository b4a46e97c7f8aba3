import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.hub.hub_server import CLIENT, Hub, safetensors, serve
from tests.waiting import PATIENCE_S


@pytest.fixture
def hub() -> Iterator[Hub]:
    weights = {f"model-0000{n}-of-00002.safetensors": safetensors(400_000, n) for n in (1, 2)}
    index = {"metadata": {}, "weight_map": {f"w{n}": name for n, name in enumerate(weights)}}
    files = {
        "config.json": b'{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}',
        "tokenizer.json": b'{"model": {}}' * 50,
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        **weights,
        "pytorch_model.bin": b"pickle" * 100,
        "modeling_tiny.py": b"import os",
        "README.md": b"# tiny",
        "onnx/model.json": b"{}",
        "consolidated.safetensors": safetensors(50_000),
    }
    with serve(Hub(files=files)) as running:
        yield running


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    return {
        **kept,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "5",
        "HF_HUB_ETAG_TIMEOUT": "5",
        "NO_PROXY": "127.0.0.1",
    }


@pytest.fixture
def client(environment: dict[str, str]) -> Callable[..., dict[str, Any]]:
    def run(*arguments: str, **changes: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, str(CLIENT), *arguments],
            env={**environment, **changes},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == "", done.stderr
        outcome: dict[str, Any] = json.loads(done.stdout)
        return outcome

    return run
