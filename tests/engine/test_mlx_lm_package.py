"""mlx-lm's models come without its package, which is the real one for whoever asks it for anything."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.helpers import write_model, write_tokenizer
from tokamac.engine.architectures import BY_ARCHITECTURE, BY_TYPE

# What a reply needs none of. ``requests`` and ``httpx`` come with the hub's client.
HEAVY = ("transformers", "huggingface_hub", "torch", "httpx", "requests", "mlx_lm.utils", "mlx_lm.generate")


def run(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_names_of_mlx_lms_models_are_its_own() -> None:
    from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

    assert BY_TYPE == MODEL_REMAPPING
    assert BY_ARCHITECTURE == MODEL_ARCHITECTURE_REMAPPING


@pytest.mark.parametrize("asked", ["mlx_lm", "mlx_lm.generate", "mlx_lm.tuner.lora"])
def test_others_find_the_whole_package(asked: str) -> None:
    code = (
        "import sys; from importlib import import_module; from tokamac.engine.mlx_lm_package import find_models\n"
        "if sys.argv[2]: find_models(); import mlx_lm.models.cache\n"
        "found = import_module(sys.argv[1]); import mlx_lm; from mlx_lm import generate\n"
        "print(found.__name__, found is sys.modules[sys.argv[1]], found.__spec__.origin, sorted(dir(mlx_lm)))\n"
        "print(generate.__qualname__, generate is mlx_lm.generate, mlx_lm.convert.__qualname__, mlx_lm.__version__)\n"
        "print(mlx_lm.models.cache is sys.modules['mlx_lm.models.cache'])"
    )
    assert run(code, asked, "late") == run(code, asked, "") != ""


def test_a_reply_imports_no_transformers(tmp_path: Path) -> None:
    write_tokenizer(write_model(tmp_path / "model"))
    code = (
        "import sys, json; from tokamac.engine import Engine, Sampling\n"
        "with Engine.load(sys.argv[1]) as engine: list(engine.generate('Hi', Sampling(max_tokens=2)))\n"
        "print(json.dumps([name for name in json.loads(sys.argv[2]) if name in sys.modules]))"
    )
    assert json.loads(run(code, str(tmp_path / "model"), json.dumps(HEAVY)).splitlines()[-1]) == []


WRITING = ["numba", "numpy", "jinja2", "tokenizers", "regex", "tokamac.engine.runner"]  # what makes a reply


@pytest.mark.parametrize(
    ("command", "needless"),
    [
        (
            ["ask", "hi", "-m", "guide", "--max-tokens", "1"],
            [*HEAVY, "numba", "asyncio", "tokamac.app.backend.protocol"],
        ),
        (["inspect", "guide"], [*HEAVY, *WRITING]),
        (["models", "list"], WRITING),  # huggingface_hub knows what lies in its cache
    ],
)
def test_a_command_imports_what_it_needs(command: list[str], needless: list[str]) -> None:
    code = (
        "import sys, json; from tokamac.app import cli; assert cli.main(json.loads(sys.argv[1])) == 0\n"
        "print(json.dumps([name for name in json.loads(sys.argv[2]) if name in sys.modules]))"
    )
    run(code, json.dumps(command), "[]")  # compiles what no test before it had compiled
    assert json.loads(run(code, json.dumps(command), json.dumps(needless)).splitlines()[-1]) == []
