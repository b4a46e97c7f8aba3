"""How few tokens a text can have, known before it is encoded."""

import string
from dataclasses import dataclass

LETTERS = (string.ascii_letters + string.digits).encode()
COUNTED = 4  # contexts' tokens that are counted exactly: who asks how much too long a prompt is may shorten it
PIECE = 1 << 20  # characters that are counted without letting other threads run


def letters_in(text: str) -> int:
    """Return the number of ASCII letters and digits."""
    written = text.encode("utf-8", "surrogatepass")
    return len(written) - len(written.translate(None, LETTERS))


@dataclass(frozen=True, slots=True)
class LongestPieces:
    """The most that a token of the vocabulary stands for; 0 where the tokenizer may leave out parts of a text.

    letters: ASCII letters and digits. The longest pieces are white space and rules; those of words are much shorter.
    """

    characters: int = 0
    letters: int = 0

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the text's tokens; 0 where there is none."""
        if not self.characters:
            return 0
        letters = sum(letters_in(text[at : at + PIECE]) for at in range(0, len(text), PIECE))
        return max(-(-len(text) // self.characters), -(-letters // max(1, self.letters)))
