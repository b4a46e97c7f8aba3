"""The guide's training text: its corpus read, questions varied, and conversations as token ids with weights of what is learned.

The corpus (assets/guide/corpus) is plain text that a person edits:

    [entry-id]
    ? a phrasing of the question          several, one a line
    ? another phrasing
    ~ (stop|halt) the (reply|answer)      only trained on: one wording of each (a|b) is drawn each time
    = the answer, on one line
    + a key fact | another way to say it  a right answer holds each such line, in one of its wordings
    ? the next question of the same conversation, in a dialogue
    = ...

Lines beginning with ``#`` are comments. Entries whose id begins with ``oos-`` are out of scope: their answer declines. Questions
are varied, so that the model learns what is asked and not how.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

GUIDE = Path(__file__).parents[2] / "assets" / "guide"
NEWCOMERS = Path(__file__).with_name("newcomers.txt")
# Phrasing i of a turn is held out of training when i % 5 == 3: a fifth, spread over all questions.
HELD_OUT_EVERY, HELD_OUT_AT = 5, 3


class CorpusError(ValueError):
    """A line of the corpus is not in the format; the message begins with file and line."""


@dataclass(slots=True)
class CorpusTurn:
    """One question in several phrasings, its answer, and the facts (each in several wordings) that a right answer holds."""

    phrasings: list[str] = field(default_factory=list)
    answer: str = ""
    facts: list[list[str]] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)

    @property
    def trained(self) -> tuple[str, ...]:
        """Phrasings the model learns from, and patterns of more."""
        kept = (text for i, text in enumerate(self.phrasings) if i % HELD_OUT_EVERY != HELD_OUT_AT)
        return (*kept, *self.patterns)

    @property
    def held_out(self) -> tuple[str, ...]:
        """Phrasings the model is scored on and never sees."""
        return tuple(self.phrasings[HELD_OUT_AT::HELD_OUT_EVERY])

    def is_right(self, reply: str) -> bool:
        """Whether a reply holds every key fact, in one of its wordings."""
        text = reply.casefold()
        return all(any(wording.casefold() in text for wording in fact) for fact in self.facts)


@dataclass(frozen=True, slots=True)
class CorpusEntry:
    """A question with its answer, or a dialogue of several."""

    id: str
    file: str
    turns: list[CorpusTurn]

    @property
    def out_of_scope(self) -> bool:
        """Whether the guide should decline."""
        return self.id.startswith("oos-")


def normalised(text: str) -> str:
    """Return the words of a question, without case and punctuation: two questions of the same words are the same."""
    return " ".join(re.sub(r"[^a-z0-9+\- ]", " ", text.lower()).split())


def read_corpus(folder: Path = GUIDE / "corpus") -> list[CorpusEntry]:
    """Return every entry of every ``.txt`` file of the folder. Raises CorpusError."""
    entries: dict[str, CorpusEntry] = {}
    for path in sorted(folder.glob("*.txt")):
        for entry in _read_file(path):
            if entry.id in entries:
                raise CorpusError(f"{path.name}: [{entry.id}] is also in {entries[entry.id].file}")
            entries[entry.id] = entry
    return list(entries.values())


def read_newcomers(path: Path = NEWCOMERS) -> list[CorpusEntry]:
    """Return the newcomers' questions: entries of one turn, with the facts of a right reply and no answer. Raises CorpusError."""
    entries: list[CorpusEntry] = []
    for number, line in enumerate(map(str.strip, path.read_text(encoding="utf-8").splitlines()), 1):
        mark, _, text = line.partition(" ")
        if line.startswith("[") and line.endswith("]"):
            entries.append(CorpusEntry(line[1:-1], path.name, [CorpusTurn()]))
        elif entries and mark == "?" and text and not entries[-1].turns[0].phrasings:
            entries[-1].turns[0].phrasings.append(text)
        elif entries and mark == "+" and text:
            entries[-1].turns[0].facts.append([wording.strip() for wording in text.split("|")])
        elif line and not line.startswith("#"):
            raise CorpusError(f"{path.name}:{number}: expected [id], one '? question' or '+ fact': {line[:60]}")
    if incomplete := [entry.id for entry in entries if not (entry.turns[0].phrasings and entry.turns[0].facts)]:
        raise CorpusError(f"{path.name}: without a question or a fact: {incomplete}")
    return entries


def wordings(pattern: str) -> Iterator[str]:
    """Yield every wording of a pattern."""
    parts = re.split(r"\(([^()]*\|[^()]*)\)", pattern)  # at odd places the alternatives
    for chosen in product(*(part.split("|") if at % 2 else [part] for at, part in enumerate(parts))):
        yield " ".join("".join(chosen).split()).replace(" ,", ",")


def _read_file(path: Path) -> list[CorpusEntry]:
    entries: list[CorpusEntry] = []
    for number, line in enumerate(map(str.strip, path.read_text(encoding="utf-8").splitlines()), 1):
        if line.startswith("[") and line.endswith("]"):
            entries.append(CorpusEntry(line[1:-1], path.name, [CorpusTurn()]))
        elif line and not line.startswith("#"):
            _read_line(f"{path.name}:{number}", line, entries)
    for entry in entries:
        for turn in entry.turns:
            if not turn.answer or not turn.facts:
                raise CorpusError(f"{path.name}: [{entry.id}] has a question without an answer or without a fact")
            if not turn.is_right(turn.answer):
                raise CorpusError(f"{path.name}: [{entry.id}] its own answer lacks a fact: {turn.facts}")
    return entries


def _read_line(where: str, line: str, entries: list[CorpusEntry]) -> None:
    mark, _, text = line.partition(" ")
    text = text.strip()
    if not entries or mark not in {"?", "~", "=", "+"} or not text:
        raise CorpusError(f"{where}: expected [id], '? question', '~ pattern', '= answer' or '+ fact': {line[:60]}")
    turns = entries[-1].turns
    turn = turns[-1]
    asking = bool(turn.phrasings) and not turn.answer
    if mark == "?":
        if turn.answer:
            turns.append(turn := CorpusTurn())
        turn.phrasings.append(text)
    elif mark == "~":
        if not asking:
            raise CorpusError(f"{where}: a pattern stands between the questions and their answer")
        turn.patterns.append(text)
    elif mark == "=":
        if not asking:
            raise CorpusError(f"{where}: an answer follows its questions, and there is only one")
        turn.answer = text
    else:
        if not turn.answer:
            raise CorpusError(f"{where}: a fact follows its answer")
        turn.facts.append([wording.strip() for wording in text.split("|") if wording.strip()])


SWAP_SHARE = 0.35  # of the words that have synonyms, how many are swapped, in the questions in which any are

# Ways to begin a question that ask for the same thing: what a question begins with, and what may stand there instead.
OPENINGS = (
    (
        r"(?:how do I|how can I|how to|how could I|how would I) ",
        "how do I |how can I |how to |what's the way to |I want to |is there a way to |I'd like to |steps to |help me |"
        "show me how to |tell me how to ||what should I do to |I need to |can I ",
    ),
    (
        r"(?:what is|what's|define|explain|tell me about|describe) (?!the difference)",
        "what is |what's |define |explain |tell me about |describe |what do you know about ||what about |I keep reading about |"
        "give me a short explanation of |what does one mean by |meaning of |teach me ",
    ),
    (r"(?:why is|why are|why does|why do) ", "why is |how come |why would |what makes |why does |reason why "),
    (r"(?:which|what) (?=command|key|flag|option|setting)", "which |what |name the |tell me the |what's the "),
    (r"(?:can I|could I|may I|is it possible to) ", "can I |could I |is it possible to |am I able to |may I "),
    (r"does it ", "does it |does tokamac |does the app |will it "),
)

POLITE = (
    "please tell me ", "hey, ", "hi, ", "can you tell me ", "I want to know ", "quick question: ", "so, ", "um, ", "ok: ",
)  # fmt: skip
THANKS = (" please", " thanks", ", thanks", " pls", " ?")

KEPT_SHARE = 0.4  # of nonsense questions that could, how many keep one telling word

COINED_SHARE = 0.35  # of foreign words, how many are coined

FILLER_LINE = "a an the is are was do does did of in on for to it its my me i you your we that this there be can could would should"
FILLERS = frozenset(FILLER_LINE.split())
QUESTION_WORDS = frozenset(["what", "why", "how", "which", "when", "where", "who", "tell", "explain", "show", "give"])


def vary(question: str, rng: random.Random) -> str:
    """Return the question as another hand might type it: case, punctuation, fillers, a politeness, now and then a slip."""
    text = wording(question, rng)
    if rng.random() < 0.35:
        text = reopen(text, rng)
    if rng.random() < 0.6:
        text = swap_synonyms(text, rng)
    if rng.random() < 0.3:
        text = drop_fillers(text, rng)
    if rng.random() < 0.25:
        text = drop_words(text, rng)
    if rng.random() < 0.12:
        text = slip(text, rng)
    if rng.random() < 0.10:
        text = rng.choice(POLITE) + text[:1].lower() + text[1:]
    if rng.random() < 0.5:
        text = text.rstrip("?.! ")
    if rng.random() < 0.06:
        text += rng.choice(THANKS)
    case = rng.random()
    if case < 0.35:
        text = text.lower()
    elif case < 0.6:
        text = text[:1].upper() + text[1:]
    elif case < 0.62:
        text = text.upper()
    return text


def wording(pattern: str, rng: random.Random) -> str:
    """Return one wording of a pattern: of each ``(a|b|)`` one alternative, which may be empty."""
    text = re.sub(r"\(([^()]*\|[^()]*)\)", lambda group: rng.choice(group[1].split("|")), pattern)
    return " ".join(text.split()).replace(" ,", ",")


def reopen(text: str, rng: random.Random) -> str:
    """Begin the question in another way that asks the same."""
    for opening, others in OPENINGS:
        if found := re.match(opening, text, re.IGNORECASE):
            return rng.choice(others.split("|")) + text[found.end() :]
    return text


def swap_synonyms(text: str, rng: random.Random) -> str:
    """Put other words of the same meaning for some, but leave alone what belongs to a flag, a path or code."""
    pattern, others = synonyms()

    def swapped(found: re.Match[str]) -> str:
        return rng.choice(others[found[0].lower()]) if rng.random() < SWAP_SHARE else found[0]

    return pattern.sub(swapped, text)


@cache
def synonyms() -> tuple[re.Pattern[str], dict[str, list[str]]]:
    """Return a pattern that finds the words of synonyms.txt, and for each (in lower case) the others of its lines."""
    others: dict[str, list[str]] = {}
    for line in (GUIDE / "synonyms.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            words = [word.strip() for word in line.split(",")]
            for word in words:
                others.setdefault(word.lower(), []).extend(other for other in words if other != word)
    longest_first = sorted(others, key=len, reverse=True)
    pattern = rf"(?<![\w./=`-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w/=(`-]|\.\w)"
    return re.compile(pattern, re.IGNORECASE), others


def drop_words(text: str, rng: random.Random) -> str:
    """Leave out about one word in six of a question of four or more: so no single word is relied on.

    A name of two words goes whole or not at all: half of one names something else.
    """
    words = re.findall(r"hugging face\S*|\S+", text, re.IGNORECASE)
    if len(words) < 4:
        return text
    return " ".join(word for word in words if rng.random() >= 1 / 6) or text


def drop_fillers(text: str, rng: random.Random) -> str:
    """Leave out some of the words that carry little."""
    words = [word for word in text.split() if word.lower() not in FILLERS or rng.random() < 0.5]
    return " ".join(words) or text


def slip(text: str, rng: random.Random) -> str:
    """Make one typing error inside a word of five letters or more: a swap, a loss or a doubling."""
    places = [match.start() for match in re.finditer(r"(?<=\w\w)\w(?=\w\w)", text)]
    if not places:
        return text
    at = rng.choice(places)
    kind = rng.randrange(3)
    if kind == 0:
        return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    return text[:at] + text[at + 1 :] if kind == 1 else text[:at] + text[at] + text[at:]


def nonsense(question: str, words: Sequence[str], rng: random.Random) -> str:
    """Replace a question's telling words by foreign ones: it looks asked, and is about nothing we know.

    Now and then one of several telling words stays, since a word that we know doesn't make a question ours. A question of
    little words only ("who are you?") gets two foreign ones.
    """
    asked = wording(question, rng).split()
    telling = [at for at, word in enumerate(asked) if not is_little(word)]
    kept = rng.choice(telling) if len(telling) > 1 and rng.random() < KEPT_SHARE else None
    for at in telling:
        if at != kept:
            asked[at] = foreign_word(words, rng)
    if not telling:
        asked += [foreign_word(words, rng) for _ in range(2)]
    return " ".join(asked)


def foreign_word(words: Sequence[str], rng: random.Random) -> str:
    """Return one of the words, or one coined from two of them: no list holds all the words that we don't know."""
    word = rng.choice(words)
    if rng.random() >= COINED_SHARE:
        return word
    other = rng.choice(words)
    return word[: len(word) // 2 + 1] + other[len(other) // 2 :]


def is_little(word: str) -> bool:
    """Whether a word says nothing of what a question is about."""
    return word.lower().strip("?,.") in FILLERS | QUESTION_WORDS


VOCABULARY = 4096
SYSTEM, USER, ASSISTANT, END, PAD = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
SPECIAL = (SYSTEM, USER, ASSISTANT, END, PAD)

# Each turn ends where the next begins, so a conversation's tokens are a prefix of its continuation's: caches can be kept.
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Return a BPE tokenizer of VOCABULARY tokens, the special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = _decoder()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of an earlier checkpoint."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = _decoder()
    return tokenizer


def _decoder() -> decoders.Decoder:
    # Every text is encoded with a space before it (so a word is one token wherever it stands); a reply is shown without it.
    return decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])


def mark_id(tokenizer: Tokenizer, mark: str) -> int:
    """Return the token id of one of the SPECIAL marks. Raises ValueError when the tokenizer lacks it."""
    token: int | None = tokenizer.token_to_id(mark)
    if token is None:
        raise ValueError(f"the tokenizer has no {mark}")
    return token


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, its config and the chat template, as Hugging Face tools expect them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


SYSTEM_PROMPTS = (
    "Answer briefly.", "You are a helpful assistant.", "You are guide, the small model inside Tokamac.",
    "Be concise and clear.", "You are a helpful, honest assistant. Answer in plain words.", "Explain things simply.",
    "You are an expert on local language models.", "Keep your answers short.",
    "Answer the user's questions about Tokamac.", "You are a terminal assistant. Use short sentences.",
    "Help the user with this program.", "Answer as well as you can.",
)  # fmt: skip
NONSENSE_SHARE = 0.2  # of in-scope questions, how many are copied as nonsense that must be declined

CHAINED_SHARE = 0.04  # of all questions, how many come again in chains

DIALOGUE_SHARE = 0.5  # of the ways to ask a dialogue's questions, how many an epoch takes

# Of questions asked alone, how many end after so many tokens of the answer: which answer it is shows there, and
# reciting the rest is learned from far fewer examples.
OPENING_SHARE, OPENING_TOKENS = 0.95, (3, 6)

DECLINED_OPENING_SHARE = 0.995  # the same, of questions that are declined: they share one answer, which is soon learned

# Of questions, how many are cut into other tokens than usual, and of BPE's merges, how many are left out there
# (BPE-dropout, Provilkov et al. 2020, https://arxiv.org/abs/1910.13267): so words that were never seen are known by
# their parts.
SPLIT_SHARE, MERGES_LEFT_OUT = 0.3, 0.1

PATTERN_DRAWS, OUTSIDE_PATTERN_DRAWS = 2, 3  # how many wordings of a pattern an epoch draws,
PIECE = 0.25  # the share of an epoch that is made at once: which answers need more is known anew for the next piece

# How often a question is drawn whose answer is hardly ever missed, and one that is missed most, at least and at most.
NEED = (0.4, 4.0)

# and how many questions for one answer at least, where it has patterns: one that few phrasings ask for is learned as
# well.
LEAST_DRAWS = 60

Exchange = tuple[str, str]  # question, answer


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One conversation: token ids, for each how much predicting it counts, and where which answer begins.

    routes: (position of an assistant mark, number of the answer that follows it), for learned answers.
    """

    ids: list[int]
    weights: list[float]
    routes: list[tuple[int, int]]


class Conversations:
    """Makes the conversations of an epoch, another set each time."""

    def __init__(self, entries: Sequence[CorpusEntry], tokenizer: Tokenizer, seed: int) -> None:
        self.decline_weight = 1.0  # of the token that begins to decline: which way a doubtful question goes
        self._rng = random.Random(seed)
        self._tokenizer = tokenizer
        self._splitter = Tokenizer.from_str(tokenizer.to_str())
        self._splitter.model.dropout = MERGES_LEFT_OUT
        self._single = [entry for entry in entries if len(entry.turns) == 1 and not entry.out_of_scope]
        self._dialogues = [entry for entry in entries if len(entry.turns) > 1]
        self._outside = [entry for entry in entries if entry.out_of_scope]
        self._outside_words = foreign_words(entries)
        self._decline = self._outside[0].turns[0].answer
        answers = {turn.answer: None for entry in entries for turn in entry.turns}
        self._answers = {answer: number for number, answer in enumerate(answers)}
        self._held_out = {normalised(text) for entry in entries for turn in entry.turns for text in turn.held_out}
        self._losses: dict[int, float] = {}
        self._ids = {mark: mark_id(tokenizer, mark) for mark in (SYSTEM, USER, ASSISTANT, END, PAD)}

    @property
    def answers(self) -> int:
        """How many different answers there are."""
        return len(self._answers)

    def number(self, answer: str) -> int:
        """The number of an answer."""
        return self._answers[answer]

    def learned(self, answer: int, loss: float) -> None:
        """Note the loss of an answer by its number: the higher it stays, the oftener its questions are drawn."""
        self._losses[answer] = 0.9 * self._losses.get(answer, loss) + 0.1 * loss

    def _need(self) -> Callable[[str], float]:
        """Return how often to draw a question for an answer: by its loss over the mean of all that the guide answers."""
        asked = [self.number(entry.turns[0].answer) for entry in self._single]
        known = [self._losses[number] for number in asked if number in self._losses]
        if len(known) < len(asked) / 2:
            return lambda _: 1.0
        mean = sum(known) / len(known)
        least, most = NEED
        return lambda answer: min(most, max(least, self._losses.get(self.number(answer), mean) / mean))

    def piece(self) -> list[TrainingSample]:
        """Return a piece of a pass over all trained phrasings alone, the dialogues, and chains of unrelated questions."""
        rng = self._rng
        exchanges = list(self._all_exchanges(PIECE))
        samples = [
            self._encode([exchange], opening=rng.random() < self._opening_share(exchange)) for exchange in exchanges
        ]
        samples += [
            self._encode(dialogue) for dialogue in self._all_dialogues() if rng.random() < PIECE * DIALOGUE_SHARE
        ]
        rng.shuffle(exchanges)
        chained = exchanges[: int(len(exchanges) * CHAINED_SHARE)]
        while chained:  # unrelated questions in a row: the last one counts, whatever came before
            length = rng.choice((2, 2, 3, 3, 4, 6))
            samples.append(self._encode(chained[:length]))
            del chained[:length]
        if rng.random() < PIECE:
            samples.append(self._long(exchanges))
        rng.shuffle(samples)
        return samples

    def _all_exchanges(self, share: float = 1.0) -> Iterator[Exchange]:
        need = self._need()
        for entry in (*self._single, *self._outside):
            turn = entry.turns[0]
            draws = OUTSIDE_PATTERN_DRAWS if entry.out_of_scope else PATTERN_DRAWS
            written = len(turn.trained) - len(turn.patterns)
            if turn.patterns and not entry.out_of_scope:
                draws = max(draws, -(-(LEAST_DRAWS - written) // len(turn.patterns)))
            often = share * (1.0 if entry.out_of_scope else need(turn.answer))
            texts = (*turn.trained, *turn.patterns * (draws - 1))
            for text in (text for text in texts for _ in range(int(often + self._rng.random()))):
                yield self._draw(text), turn.answer
                if not entry.out_of_scope and self._rng.random() < NONSENSE_SHARE:
                    yield self._draw(nonsense(text, self._outside_words, self._rng)), self._decline

    def _opening_share(self, exchange: Exchange) -> float:
        return DECLINED_OPENING_SHARE if exchange[1] == self._decline else OPENING_SHARE

    def _draw(self, text: str) -> str:
        """Return the question as another hand might type it, but never as one that is held out."""
        for _ in range(20):
            drawn = vary(text, self._rng)
            if normalised(drawn) not in self._held_out:
                return drawn
        raise ValueError(f"every way to vary this question is held out: {text}")

    def _all_dialogues(self) -> Iterator[list[Exchange]]:
        for entry in self._dialogues:
            for _ in range(max(len(turn.trained) for turn in entry.turns)):
                yield [(self._draw(self._rng.choice(turn.trained)), turn.answer) for turn in entry.turns]

    def _long(self, exchanges: Sequence[Exchange]) -> TrainingSample:
        """One conversation that fills the context, so that far positions are learned too."""
        chosen = [self._rng.choice(exchanges) for _ in range(44)]
        sample = self._encode(chosen)
        routes = [route for route in sample.routes if route[0] < 4095]
        return TrainingSample(sample.ids[:4096], sample.weights[:4096], routes)

    def _encode(self, exchanges: Sequence[Exchange], *, opening: bool = False) -> TrainingSample:
        ids: list[int] = []
        weights: list[float] = []
        routes: list[tuple[int, int]] = []

        def add(mark: str, text: str, learn: bool) -> None:
            splits = mark == USER and self._rng.random() < SPLIT_SHARE
            tokenizer = self._splitter if splits else self._tokenizer
            body = [*tokenizer.encode(text, add_special_tokens=False).ids, self._ids[END]]
            ids.extend([self._ids[mark], *body])
            first = self.decline_weight if text == self._decline else 1.0
            weights.extend([0.0, *([first, *[1.0] * (len(body) - 1)] if learn else [0.0] * len(body))])

        if self._rng.random() < 0.35:
            add(SYSTEM, self._rng.choice(SYSTEM_PROMPTS), False)
        for question, answer in exchanges:
            add(USER, question, False)
            routes.append((len(ids), self.number(answer)))
            add(ASSISTANT, answer, True)
        if opening:  # cut inside the last answer
            end = routes[-1][0] + 1 + self._rng.randint(*OPENING_TOKENS)
            del ids[end:], weights[end:]
        return TrainingSample(ids, weights, routes)


def foreign_words(entries: Sequence[CorpusEntry]) -> list[str]:
    """Return the words that are trained on in out-of-scope questions and stand nowhere else in the corpus."""
    outside: set[str] = set()
    inside: set[str] = set()
    for entry in entries:
        found = outside if entry.out_of_scope else inside
        for turn in entry.turns:
            for text in (*turn.trained, "" if entry.out_of_scope else turn.answer):
                found.update(re.findall(r"[a-z]{3,}", text.lower()))
    return sorted(outside - inside)


def batches(samples: Sequence[TrainingSample], tokens: int, rng: random.Random) -> list[list[TrainingSample]]:
    """Group samples of like length into batches of about ``tokens`` padded tokens, in random order."""
    ordered = sorted(samples, key=lambda sample: len(sample.ids) + rng.random() * 8)
    groups: list[list[TrainingSample]] = [[]]
    for sample in ordered:
        if groups[-1] and (len(groups[-1]) + 1) * len(sample.ids) > tokens:
            groups.append([])
        groups[-1].append(sample)
    rng.shuffle(groups)
    return groups
