"""Texts for prompts, for a chat, and for the screen to show."""

PROSE = """The river had risen in the night, and by morning the lower fields were a lake with fences standing in it. Nobody in the
village was surprised. They moved the sheep to the hill, put the boats where the carts had been, and went on with the day. The
baker's oven stood high enough to be dry, so there was bread; the school did not, so there was none of that. Children rowed from
door to door with letters and eggs. An old man who had measured every flood since he was a boy cut a new notch into the post by the
bridge, a hand below the highest, and said that the water would be gone by Sunday. It was gone by Saturday, and left the fields
brown, the cellars full of silt, and one strange boat, green, with no name on it, upside down in the middle of the square. """

QUESTIONS = (
    "Why is decode memory-bound?",
    "What is a KV cache?",
    "How do I stop a reply?",
    "What does TTFT mean?",
    "How do I convert a model?",
    "What is prefill?",
    "Which keys make a new line?",
    "What is the ceiling?",
    "How do I choose another model?",
    "What does a KV window do?",
)

_PARAGRAPHS = (
    "Decode reads **every weight once per token**, so its speed is set by memory, not by arithmetic. The chip waits "
    "for bytes: while one weight travels, a thousand products could have been made. That is why a smaller file is a "
    "faster model.",
    "Prefill is the other way round. The whole prompt goes through at once, every weight that arrives is used for "
    "*every* token of it, and the arithmetic units are the ones that are busy. A long prompt therefore costs time "
    "before the first word, not after it.",
    "Between the two stands the cache of keys and values. It grows with the conversation, it is read whole at every "
    "step, and it can be packed into fewer bits, or bounded by a window, or both. The first question about a slow "
    "reply is which phase was slow.",
)
SHOWN_PROSE = "\n\n".join(_PARAGRAPHS * 4)
