"""Make ``golden.json``: what Hugging Face transformers says of SmolLM2's Hugging Face form, in float32.

    make golden-real

For each text its token ids and the log-probability of every token but the first; and one greedy reply to a chat.
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.real.models import SMOLLM2

GOLDEN = Path(__file__).parent / "golden.json"
QUESTION = "Name three primary colors, as a list."
REPLY_TOKENS = 40
TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs, and the fox is never seen again.",
    "def mean(values):\n    return sum(values) / len(values)  # 3.14159\n",
    "a  10   200\t3 000 – naïve café, 日本 🙂",
)


def main() -> None:
    """Write the file."""
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2.hf)
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2.hf, dtype=torch.float32).eval()
    texts = [{"text": text, **_scored(model, tokenizer.encode(text))} for text in TEXTS]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([tokenizer.encode(prompt)])
    reply = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=REPLY_TOKENS)
    chat = {
        "question": QUESTION,
        "prompt": prompt,
        "reply": tokenizer.decode(reply[0, ids.shape[1] :], skip_special_tokens=True),
    }
    GOLDEN.write_text(json.dumps({"texts": texts, "chat": chat}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _scored(model: torch.nn.Module, ids: list[int]) -> dict[str, object]:
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)
    following = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return {"ids": ids, "logprobs": [round(each, 4) for each in following.tolist()]}


if __name__ == "__main__":
    main()
