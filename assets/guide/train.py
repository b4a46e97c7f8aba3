"""Train the guide from its corpus: ``python -m tokamac.assets.guide.train --out CHECKPOINT --minutes 60``.

Writes a bfloat16 checkpoint in Hugging Face's form (config.json, model.safetensors, tokenizer); ``make guide`` then converts it to
the 4-bit folder that ships, and scores it. Needs the ``guide`` extra (PyTorch). Seeded; a run bounded by --steps repeats exactly on
the same machine, one bounded by --minutes repeats up to the number of steps. The last third trains as if weights were packed;
in the last fifth declining weighs more. --resume begins with the weights of another checkpoint, for a corpus that grew;
--finishing trains in the manner of the last fifth alone.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tokamac.assets.guide.corpus import Entry, read_corpus
from tokamac.assets.guide.dataset import Conversations, Sample, batches
from tokamac.assets.guide.network import Llama, Router, Shape, train_packed
from tokamac.assets.guide.vocabulary import END, PAD, mark_id, read_tokenizer, save_tokenizer, train_tokenizer

PACKED_FROM = 0.65
"""Share of the training after which the model sees its weights as 4-bit ones."""


ROUTE_WEIGHT = 0.5

DECLINING_FROM, DECLINE_WEIGHT = 0.8, 20.0
"""Share of the training after which a wrongly answered question costs that much more than one wrongly declined."""

MATRIX_RATE = 8
"""The learning rate of Muon over that of AdamW."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train: bounded by steps, or by minutes."""

    out: Path
    steps: int | None
    minutes: float | None
    seed: int
    batch_tokens: int
    learning_rate: float
    warm_up: int = 80
    resume: Path | None = None
    finishing: bool = False
    dropout: float = 0.05
    weight_decay: float = 0.05

    def progress(self, step: int, seconds: float) -> float:
        """Return the share of the training that is done, 0 to 1."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        return min(1.0, seconds / 60 / (self.minutes or 1))

    def pace(self, step: int, progress: float) -> float:
        """Return the share of the learning rate to use: a warm-up, then a cosine down to a fiftieth."""
        cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))
        return min(1.0, (step + 1) / self.warm_up) * cosine


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the bfloat16 checkpoint")
    bound = parser.add_mutually_exclusive_group(required=True)
    bound.add_argument("--steps", type=int)
    bound.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=2.5e-3)
    parser.add_argument("--resume", type=Path, help="begin with the weights and the vocabulary of this checkpoint")
    parser.add_argument("--finishing", action="store_true", help="train in the manner of the last fifth from the start")
    args = parser.parse_args()
    bounds = args.out, args.steps, args.minutes, args.seed, args.batch_tokens, args.learning_rate
    train(Plan(*bounds, resume=args.resume, finishing=args.finishing))


def train(plan: Plan) -> None:
    """Run the plan and write the checkpoint."""
    torch.manual_seed(plan.seed)
    entries = read_corpus()
    model = Llama(Shape(), plan.dropout)
    if plan.resume is not None:
        tokenizer = read_tokenizer(plan.resume)
        model.load_state_dict(load_file(plan.resume / "model.safetensors"))
    else:
        tokenizer = train_tokenizer(_texts(entries))
    conversations = Conversations(entries, tokenizer, plan.seed)
    router = Router(Shape(), conversations.answers)
    optimizers = _optimizers(model, router, plan)
    route_weight = 0.0 if plan.finishing else ROUTE_WEIGHT  # the router begins anew, and can't help in a short time
    began, seen, packed, losses = time.monotonic(), 0, False, [0.0, 0.0]
    for step, batch in enumerate(_endless(conversations, plan)):
        progress = plan.progress(step, time.monotonic() - began)
        if progress >= 1:
            break
        if not packed and (plan.finishing or progress >= PACKED_FROM):
            train_packed(model)
            packed = True
        if plan.finishing or progress >= DECLINING_FROM:
            conversations.decline_weight = DECLINE_WEIGHT
        pace = plan.pace(step, progress)
        for optimizer, rate in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * pace
        parts = _step((model, router), batch, mark_id(tokenizer, PAD), route_weight)
        for optimizer, _ in optimizers:
            optimizer.step()
        seen += sum(len(sample.ids) for sample in batch)
        losses = [total + part for total, part in zip(losses, parts, strict=True)]
        if step % 50 == 49:
            text, route = (total / 50 for total in losses)
            speed = seen / (time.monotonic() - began)
            print(
                f"step {step + 1} {progress:6.1%}  text {text:.4f}  route {route:.4f}  {speed:,.0f} tokens/s",
                flush=True,
            )
            losses = [0.0, 0.0]
        if step % 200 == 199:
            save(model, tokenizer, plan.out)
    save(model, tokenizer, plan.out)


def save(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint in Hugging Face's form, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    end, pad = mark_id(tokenizer, END), mark_id(tokenizer, PAD)
    _write_json(folder / "config.json", Shape().config(end, pad))
    _write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": end, "pad_token_id": pad})
    save_tokenizer(tokenizer, folder)


def _step(models: tuple[Llama, Router], batch: list[Sample], pad: int, route_weight: float) -> tuple[float, float]:
    """Set the gradients of a batch; return its losses, per token of the answers and per answer chosen (nats)."""
    model, router = models
    ids, weights = _padded(batch, pad)
    learned = weights[:, 1:] > 0
    rows = torch.tensor([(row, at, answer) for row, sample in enumerate(batch) for at, answer in sample.routes])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        end, midway = model.hidden(ids[:, :-1])
        logits = model.head(end[learned])  # only what is learned reaches the head
        chosen = router(midway[rows[:, 0], rows[:, 1]])
    counts = weights[:, 1:][learned]
    text = (F.cross_entropy(logits.float(), ids[:, 1:][learned], reduction="none") * counts).sum() / counts.sum()
    route = F.cross_entropy(chosen.float(), rows[:, 2], label_smoothing=0.05)
    for each in models:
        each.zero_grad(set_to_none=True)
    (text + route_weight * route).backward()
    torch.nn.utils.clip_grad_norm_([*model.parameters(), *router.parameters()], 1.0)
    return float(text.detach()), float(route.detach())


def _padded(batch: list[Sample], pad: int) -> tuple[Tensor, Tensor]:
    length = max(len(sample.ids) for sample in batch)
    ids = torch.full((len(batch), length), pad)
    weights = torch.zeros((len(batch), length))
    for row, sample in enumerate(batch):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        weights[row, : len(sample.ids)] = torch.tensor(sample.weights)
    return ids, weights


def _endless(conversations: Conversations, plan: Plan) -> Iterator[list[Sample]]:
    rng = random.Random(plan.seed)
    while True:
        yield from batches(conversations.epoch(), plan.batch_tokens, rng)


def _optimizers(model: Llama, router: Router, plan: Plan) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return the optimizers with their learning rates: Muon (Jordan et al. 2024) for the layers' matrices, AdamW for the rest.

    After 200 steps Muon had the losses that AdamW alone needs half as many steps more for.
    """
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    taken = {id(parameter) for parameter in matrices}
    rest = [p for module in (model, router) for p in module.parameters() if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": plan.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    muon = torch.optim.Muon(
        matrices, lr=MATRIX_RATE * plan.learning_rate, weight_decay=plan.weight_decay, momentum=0.95
    )
    adam = torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95))
    return [(muon, MATRIX_RATE * plan.learning_rate), (adam, plan.learning_rate)]


def _texts(entries: list[Entry]) -> Iterator[str]:
    for entry in entries:
        for turn in entry.turns:
            yield from turn.trained
            yield turn.answer


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
