"""Average checkpoints of one model: ``python -m tokamac.assets.guide.mean --out CHECKPOINT CHECKPOINT CHECKPOINT …``.

Weights of rounds that began with the same checkpoint can be averaged (Wortsman et al. 2022, https://arxiv.org/abs/2203.05482): the
mean declines what either declined, and loses fewer answers than either. Config and tokenizer come from the first.
"""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def main() -> None:
    """Parse the command line and average."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the mean")
    parser.add_argument("checkpoints", type=Path, nargs="+", help="folders that train.py wrote")
    args = parser.parse_args()
    average(args.checkpoints, args.out)


def average(checkpoints: list[Path], out: Path) -> None:
    """Write the mean of the checkpoints' weights, in bfloat16. Raises ValueError where they are not of one model."""
    several = [load_file(folder / WEIGHTS) for folder in checkpoints]
    if any(weights.keys() != several[0].keys() for weights in several):
        raise ValueError("the checkpoints hold other weights")
    shutil.copytree(checkpoints[0], out, dirs_exist_ok=True)
    mean = {
        name: torch.stack([weights[name].float() for weights in several]).mean(0).to(torch.bfloat16)
        for name in several[0]
    }
    save_file(mean, out / WEIGHTS, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
