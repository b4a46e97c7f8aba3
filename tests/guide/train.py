"""Train the guide from its corpus: ``python -m tests.guide.train --out CHECKPOINT --minutes 60``.

Writes a bfloat16 checkpoint in Hugging Face's form (config.json, model.safetensors, tokenizer); ``make guide`` then converts it
to the 4-bit folder that ships, and scores it. Needs the ``guide`` extra (PyTorch). It computes in float32, which was 1.4 times as
fast as bfloat16 on a CPU with AVX-512's products of these. Seeded, but for the way that words are split (BPE-dropout), which the
tokenizer draws itself, for when workers meet, and for what --minutes leaves time for. The last third trains as if weights were
packed; in the last fifth declining weighs more. --resume begins with the weights of another checkpoint, for a corpus that grew;
--finishing trains like the last fifth alone. --workers N trains in N processes of one core, whose weights draw near to each other
every few steps. --student OF trains a model of an eighth of the size with the vocabulary of the checkpoint OF, which drafts for
it.

--mean averages checkpoints instead. Rounds that began with the same checkpoint can be averaged (Wortsman et al. 2022,
https://arxiv.org/abs/2203.05482): the mean declines what either declined, and loses fewer answers than either.
"""

import argparse
import json
import math
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from tests.guide.dataset import (
    END,
    PAD,
    Conversations,
    CorpusEntry,
    TrainingSample,
    batches,
    mark_id,
    read_corpus,
    read_tokenizer,
    save_tokenizer,
    train_tokenizer,
)


@dataclass(frozen=True, slots=True)
class GuideShape:
    """The model's dimensions, by their names in config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 4096

    def config(self, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
        """Return what goes into config.json."""
        fixed = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        }
        return {**fixed, **asdict(self), "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}


# What drafts for the guide.
STUDENT = GuideShape(
    hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=384
)

WEIGHTS = "model.safetensors"

ROUTED = 0.75  # the share of the layers after which, in training, the assistant mark must tell which answer is coming

GROUP, LEVELS = 64, 15  # the shipped format: 4 bits, groups of 64


class Linear(nn.Linear):
    """A layer that can train as if its weights were packed already: forward sees 4 bits, backward full precision."""

    packed = False

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) → (..., out)."""
        weight = self.weight
        if self.packed:
            # Straight-through estimator (Bengio et al. 2013).
            weight = weight + (as_packed(weight.detach()) - weight.detach())
        return F.linear(x, weight)


def as_packed(weight: Tensor) -> Tensor:
    """Return what MLX's affine 4-bit quantization, group 64, makes of ``weight`` (out, in)."""
    groups = weight.view(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    downward = low.abs() > high.abs()
    scale = ((high - low) / LEVELS).clamp_min(1e-7)
    scale = torch.where(downward, scale, -scale)
    edge = torch.where(downward, low, high)
    steps = (edge / scale).round()
    scale = torch.where(steps != 0, edge / steps, scale)
    bias = torch.where(steps != 0, edge, torch.zeros_like(edge))
    return (((groups - bias) / scale).round().clamp(0, LEVELS) * scale + bias).view_as(weight)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: GuideShape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden_size, width, bias=False)
        self.k_proj = Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """x (B, T, D) → (B, T, D)."""
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.shape.head_dim).transpose(1, 2)  # (B, H, T, head_dim)

        q, k = rotate(heads(self.q_proj(x)), cos, sin), rotate(heads(self.k_proj(x)), cos, sin)
        v = heads(self.v_proj(x))
        # Written out: on a CPU, PyTorch's fused attention takes five times as long for questions of 20 to 40 tokens.
        q = q.reshape(batch, k.shape[1], -1, self.shape.head_dim)  # the queries that share a key, one after the other
        scores = (q @ k.transpose(-1, -2)).view(batch, -1, length, length) * self.shape.head_dim**-0.5 + mask
        shares = scores.softmax(-1).view(batch, k.shape[1], -1, length)
        out = (shares @ v).view(batch, -1, length, self.shape.head_dim)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), halves rotated as in Hugging Face's Llama. x (B, H, T, D), cos and sin (T, D)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: GuideShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, D) → (B, T, D)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Dropout(nn.Module):
    """Dropout that zeroes the same channels at every position of a sequence: so much less chance is drawn for it."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, D) → (B, T, D)."""
        if not self.share:
            return x
        return x * F.dropout(x.new_ones(x.shape[0], 1, x.shape[2]), self.share)


class Layer(nn.Module):
    """Attention and MLP, each on a normalised residual; ``dropout`` on what they add."""

    def __init__(self, shape: GuideShape, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """x (B, T, D) → (B, T, D)."""
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin, mask))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """Embedding, layers and final norm: ``model.`` in a checkpoint."""

    def __init__(self, shape: GuideShape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class Llama(nn.Module):
    """The whole model, its head tied to the embedding."""

    def __init__(self, shape: GuideShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.model = Decoder(shape, dropout)
        self.dropout = Dropout(dropout)
        self.route_after = int(ROUTED * shape.num_hidden_layers)
        frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(_initialise)

    def hidden(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids (B, T) → two of (B, T, D): the end, normalised and ready for the head, and the state after ``route_after`` layers."""
        length = ids.shape[1]
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        mask = torch.full((length, length), float("-inf")).triu(1)
        x = self.dropout(self.model.embed_tokens(ids))
        midway = x
        for index, layer in enumerate(self.model.layers, 1):
            x = layer(x, cos, sin, mask)
            midway = x if index == self.route_after else midway
        return self.model.norm(x), midway

    def head(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) → logits (..., V)."""
        return F.linear(hidden, self.model.embed_tokens.weight)


class Router(nn.Module):
    """Names the answer that is about to begin, from the state at the assistant mark. Training only: it is not saved.

    Without it the model learns the answers by heart long before it learns which question asks for which.
    """

    def __init__(self, shape: GuideShape, answers: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.out = nn.Linear(shape.hidden_size, answers)

    def forward(self, state: Tensor) -> Tensor:
        """state (N, D) → logits (N, answers)."""
        return self.out(self.norm(state))


def train_packed(model: nn.Module) -> None:
    """From now on, let every linear layer see its weights as they will ship."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.packed = True


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        std = 0.02 if isinstance(module, nn.Embedding) else module.weight.shape[1] ** -0.5 * 0.7
        nn.init.normal_(module.weight, std=std)


PACKED_FROM = 0.65  # share of the training after which the model sees its weights as 4-bit ones

# What naming the answer weighs, and the steps in which only the router learns from it: it begins anew with each round.
ROUTE_WEIGHT, ROUTE_FROM = 0.5, 120

MEET_EVERY = 20  # the steps after which workers that train together draw near

# Share of the training after which a wrongly answered question costs that much more than one wrongly declined.
DECLINING_FROM, DECLINE_WEIGHT = 0.8, 20.0

DROPOUT = 0.08

MATRIX_RATE = 8  # the learning rate of Muon over that of AdamW


@dataclass(frozen=True, slots=True)
class TrainingPlan:
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
    workers: int = 1
    student: Path | None = None
    weight_decay: float = 0.05

    @property
    def shape(self) -> GuideShape:
        """Return the model's dimensions."""
        return GuideShape() if self.student is None else STUDENT

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
    """Parse the command line, and train or average."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the bfloat16 checkpoint")
    bound = parser.add_mutually_exclusive_group(required=True)
    bound.add_argument("--mean", type=Path, nargs="+", metavar="CHECKPOINT", help="average these instead of training")
    bound.add_argument("--steps", type=int)
    bound.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=2.5e-3)
    parser.add_argument("--resume", type=Path, help="begin with the weights and the vocabulary of this checkpoint")
    parser.add_argument("--finishing", action="store_true", help="train in the manner of the last fifth from the start")
    parser.add_argument("--workers", type=int, default=1, help="processes of one core that train together")
    parser.add_argument("--student", type=Path, metavar="OF", help="train what drafts for this checkpoint")
    args = parser.parse_args()
    if args.mean:
        average(args.mean, args.out)
        return
    bounds = args.out, args.steps, args.minutes, args.seed, args.batch_tokens, args.learning_rate
    train(
        TrainingPlan(*bounds, resume=args.resume, finishing=args.finishing, workers=args.workers, student=args.student)
    )


def train(plan: TrainingPlan) -> None:
    """Run the plan and write the checkpoint."""
    if plan.workers > 1:
        torch.set_num_threads(1)  # before the fork: threads don't survive it
    entries = read_corpus()
    vocabulary = plan.resume or plan.student
    tokenizer = train_tokenizer(_texts(entries)) if vocabulary is None else read_tokenizer(vocabulary)
    torch.manual_seed(plan.seed)
    model = Llama(plan.shape, DROPOUT if plan.student is None else 0.0)  # a student is to know the answers by heart
    if plan.resume is not None:
        model.load_state_dict(grown(load_file(plan.resume / WEIGHTS), model))
    router = Router(plan.shape, Conversations(entries, tokenizer, plan.seed).answers)
    centre = Centre.of(model, router)
    if plan.workers == 1:
        _work(0, plan, tokenizer, (model, router), centre)
    else:
        arguments = plan, tokenizer, (model, router), centre
        torch.multiprocessing.start_processes(_work, arguments, nprocs=plan.workers, start_method="fork")
    centre.give(model, router)
    save(model, plan.shape, tokenizer, plan.out)


def grown(weights: dict[str, Tensor], model: Llama) -> dict[str, Tensor]:
    """Return an earlier checkpoint's weights for a model of as many layers, or of two more that change nothing yet.

    A new layer stands behind the second and behind the fourth, a copy of it that adds nothing to the residual.
    """
    if weights.keys() == model.state_dict().keys():
        return weights
    came_from = [0, 1, 1, 2, 3, 3, 4, 5]
    found = {name: value for name, value in weights.items() if ".layers." not in name}
    for layer, old in enumerate(came_from):
        for name in (name for name in weights if name.startswith(f"model.layers.{old}.")):
            new = layer > 0 and came_from[layer - 1] == old
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            key = name.replace(f".{old}.", f".{layer}.", 1)
            found[key] = torch.zeros_like(weights[name]) if new and adds else weights[name].clone()
    return found


@dataclass(frozen=True, slots=True)
class Centre:
    """The weights that workers share: each now and then goes half the way to them, and they half the way to it.

    Elastic averaging (Zhang et al. 2015, https://arxiv.org/abs/1412.6651): no worker waits for another.
    """

    weights: dict[str, Tensor]
    lock: Any

    @classmethod
    def of(cls, *modules: nn.Module) -> "Centre":
        """Begin with the modules' weights."""
        named = {f"{at}.{name}": p for at, each in enumerate(modules) for name, p in each.named_parameters()}
        return cls(
            {name: p.detach().clone().share_memory_() for name, p in named.items()}, torch.multiprocessing.Lock()
        )

    def meet(self, *modules: nn.Module) -> None:
        """Move the modules' weights and these towards each other."""
        with self.lock, torch.no_grad():
            for at, each in enumerate(modules):
                for name, parameter in each.named_parameters():
                    shared = self.weights[f"{at}.{name}"]
                    shared.lerp_(parameter, 0.5)
                    parameter.copy_(shared)

    def give(self, *modules: nn.Module) -> None:
        """Set the modules' weights to these."""
        with torch.no_grad():
            for at, each in enumerate(modules):
                for name, parameter in each.named_parameters():
                    parameter.copy_(self.weights[f"{at}.{name}"])


def _work(number: int, plan: TrainingPlan, tokenizer: Tokenizer, models: tuple[Llama, Router], centre: Centre) -> None:
    """Train as one of the plan's workers."""
    torch.manual_seed(plan.seed + number)
    model, router = models
    conversations = Conversations(read_corpus(), tokenizer, plan.seed + number)
    optimizers = _optimizers(model, router, plan)
    route_weight = 0.0 if plan.finishing else ROUTE_WEIGHT  # the router begins anew, and can't help in a short time
    began, seen, packed, losses = time.monotonic(), 0, False, [0.0, 0.0]
    for step, batch in enumerate(_endless(conversations, plan, number)):
        progress = plan.progress(step, time.monotonic() - began)
        if progress >= 1:
            break
        if not packed and (plan.finishing or progress >= PACKED_FROM):
            train_packed(model)
            packed = True
        if plan.student is None and (plan.finishing or progress >= DECLINING_FROM):
            conversations.decline_weight = DECLINE_WEIGHT
        pace = plan.pace(step, progress)
        for optimizer, rate in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * pace
        text, route, alone = _step(models, batch, mark_id(tokenizer, PAD), route_weight, step >= ROUTE_FROM)
        for answer, loss in alone:
            conversations.learned(answer, loss)
        for optimizer, _ in optimizers:
            optimizer.step()
        seen += sum(len(sample.ids) for sample in batch)
        losses = [losses[0] + text, losses[1] + route]
        if step % MEET_EVERY == MEET_EVERY - 1:
            centre.meet(model, router)
        if step % 50 == 49 and number == 0:
            text, route = (total / 50 for total in losses)
            speed = seen / (time.monotonic() - began) * plan.workers
            print(
                f"step {step + 1} {progress:6.1%}  text {text:.4f}  route {route:.4f}  {speed:,.0f} tokens/s",
                flush=True,
            )
            losses = [0.0, 0.0]
            save(model, plan.shape, tokenizer, plan.out)
    centre.meet(model, router)


def save(model: Llama, shape: GuideShape, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the checkpoint in Hugging Face's form, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    end, pad = mark_id(tokenizer, END), mark_id(tokenizer, PAD)
    _write_json(folder / "config.json", shape.config(end, pad))
    _write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": end, "pad_token_id": pad})
    save_tokenizer(tokenizer, folder)


def average(checkpoints: list[Path], out: Path) -> None:
    """Write the mean of the checkpoints' weights; config and tokenizer come from the first. Raises ValueError for other models."""
    several = [load_file(folder / WEIGHTS) for folder in checkpoints]
    if any(weights.keys() != several[0].keys() for weights in several):
        raise ValueError("the checkpoints hold other weights")
    shutil.copytree(checkpoints[0], out, dirs_exist_ok=True)
    mean = {
        name: torch.stack([each[name].float() for each in several]).mean(0).to(torch.bfloat16) for name in several[0]
    }
    save_file(mean, out / WEIGHTS, metadata={"format": "pt"})


def _step(
    models: tuple[Llama, Router], batch: list[TrainingSample], pad: int, route_weight: float, teaches: bool
) -> tuple[float, float, list[tuple[int, float]]]:
    """Set the gradients of a batch; return its losses, per token of the answers and per answer chosen (nats).

    And of each question asked alone, its answer and the loss of that, summed. teaches: whether the model learns from the router.
    """
    model, router = models
    ids, weights = _padded(batch, pad)
    learned = weights[:, 1:] > 0
    rows = torch.tensor([(row, at, answer) for row, sample in enumerate(batch) for at, answer in sample.routes])
    end, midway = model.hidden(ids[:, :-1])
    logits = model.head(end[learned])  # only what is learned reaches the head
    marks = midway[rows[:, 0], rows[:, 1]]
    chosen = router(marks if teaches else marks.detach())
    counts = weights[:, 1:][learned]
    each_token = F.cross_entropy(logits, ids[:, 1:][learned], reduction="none")
    text = (each_token * counts).sum() / counts.sum()
    route = F.cross_entropy(chosen, rows[:, 2], label_smoothing=0.05)
    for each in models:
        each.zero_grad(set_to_none=True)
    (text + route_weight * route).backward()
    torch.nn.utils.clip_grad_norm_([*model.parameters(), *router.parameters()], 1.0)
    by_row = torch.zeros(len(batch)).index_add_(0, learned.nonzero()[:, 0], each_token.detach()).tolist()
    alone = [(sample.routes[0][1], loss) for sample, loss in zip(batch, by_row, strict=True) if len(sample.routes) == 1]
    return float(text.detach()), float(route.detach()), alone


def _padded(batch: list[TrainingSample], pad: int) -> tuple[Tensor, Tensor]:
    length = max(len(sample.ids) for sample in batch)
    ids = torch.full((len(batch), length), pad)
    weights = torch.zeros((len(batch), length))
    for row, sample in enumerate(batch):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        weights[row, : len(sample.ids)] = torch.tensor(sample.weights)
    return ids, weights


def _endless(conversations: Conversations, plan: TrainingPlan, number: int) -> Iterator[list[TrainingSample]]:
    rng = random.Random(plan.seed + number)
    while True:
        yield from batches(conversations.piece(), plan.batch_tokens, rng)


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal, for matrices (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

    ``torch.optim.Muon`` does it in bfloat16 always: emulated, six times the time of all else in a step.
    """

    # The Newton-Schulz polynomial of the method's author, which is applied five times.
    STEPS = (3.4445, -4.7750, 2.0315)

    def __init__(self, matrices: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    def step(self, closure: Any = None) -> None:
        """Move each matrix that has a gradient."""
        with torch.no_grad():
            for group in self.param_groups:
                for matrix in (each for each in group["params"] if each.grad is not None):
                    self._move(matrix, group["lr"], group["momentum"], group["weight_decay"])

    def _move(self, matrix: Tensor, rate: float, momentum: float, weight_decay: float) -> None:
        average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
        average.lerp_(matrix.grad, 1 - momentum)
        matrix.mul_(1 - rate * weight_decay)
        tall = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
        matrix.add_(self._orthogonal(matrix.grad.lerp(average, momentum)), alpha=-rate * tall)

    def _orthogonal(self, update: Tensor) -> Tensor:
        """update (out, in) → about the nearest matrix whose singular values are all one."""
        tall = update.shape[0] > update.shape[1]
        x = update.T if tall else update
        x = x / x.norm().clamp_min(1e-7)
        a, b, c = self.STEPS
        for _ in range(5):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if tall else x


def _optimizers(model: Llama, router: Router, plan: TrainingPlan) -> list[tuple[torch.optim.Optimizer, float]]:
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
    muon = Muon(matrices, MATRIX_RATE * plan.learning_rate, plan.weight_decay)
    adam = torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95))
    return [(muon, MATRIX_RATE * plan.learning_rate), (adam, plan.learning_rate)]


def _texts(entries: list[CorpusEntry]) -> Iterator[str]:
    for entry in entries:
        for turn in entry.turns:
            yield from turn.trained
            yield turn.answer


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
