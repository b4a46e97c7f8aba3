"""What ``bench --kv-quality`` reads unless it is given a file: a page of several kinds of text, about 1,500 tokens, our own.

Prose, a list that is asked about later, code, a table and a dialogue: packing keys and values shows where a model
looks far back. The story and the figures in it are invented.
"""

TEXT = """\
A language model answers in two phases that have little in common. In the first it reads: the whole prompt goes \
through every layer at once, many tokens side by side, and the chip is busy with arithmetic. In the second it \
writes: one token, then the next, and each of them needs all the weights again. Nothing but the order of events ties \
the two together, and yet a person at the keyboard feels them as a single thing, the speed of the machine.

What the first phase leaves behind for the second is a store of keys and values. For every token that was read, each \
layer keeps one vector that says what the token offers and one that says what it carries. A new token asks a \
question of all the keys, weighs the values by how well they match, and goes on with the mixture. Without the store \
the model would have to read the conversation from its beginning for every word it writes. With it, a word costs one \
pass. The price is memory, and it grows with every token: at a context of a few thousand tokens the store of a large \
model is as heavy as a film.

So people make it smaller. Numbers that came with sixteen bits are written down with eight, or four, a group of them \
sharing one scale and one offset. The keys suffer more than the values. A key is compared, and a small error in it \
can move the attention to another place; a value is averaged with others, and its errors cancel in part. That is why \
eight bits for the keys and four for the values may do better than six for both, although the bytes are the same.

Here is what was in the drawer of the ferryman's desk on the morning the inspector came:

1. a brass key with a red ribbon, for the boathouse;
2. three letters from Marisol, tied with string, the last one unopened;
3. a tide table for the year 1911, with the ninth of October underlined;
4. a pipe, a knife and eleven copper coins;
5. the photograph of a dog named Harrow, who had been dead for six years.

The inspector wrote everything down in the order in which he found it. He was a slow man, and people took him for a \
stupid one, which had been of use to him more than once. "You have not read the last letter," he said.

"No," said the ferryman.

"May I ask why?"

"You may ask." He looked out at the water. It had risen in the night, and the posts of the landing stage stood up to \
their necks in it. "She writes that she is coming, or she writes that she is not. As long as it is closed, I can \
have breakfast."

The inspector thought about this for some time. Then he took the tide table, and put his finger on the day that was \
underlined. "And the ninth of October? What happened then?"

"Nothing happened then. That is why I underlined it."

Later, when the inspector told the story at home, he could still name every object: the brass key with the red \
ribbon, the three letters from Marisol, the tide table for the year 1911, the pipe, the knife and the eleven copper \
coins, and last of all the photograph of the dog named Harrow. His wife asked which of them had mattered. "The dog," \
he said, "of course."

The same afternoon, a long way off and a hundred years later, somebody wrote a function to find out how often each \
word of a text appears, and was not content with it:

```python
from collections import Counter


def most_frequent(text: str, count: int = 10) -> list[tuple[str, int]]:
    \"\"\"Return the words that appear most often, and how often, in falling order.\"\"\"
    words = (word.strip(".,;:!?\\"'()").lower() for word in text.split())
    counted = Counter(word for word in words if word)
    return counted.most_common(count)


def test_most_frequent() -> None:
    assert most_frequent("The cat saw the dog. The dog slept.", 2) == [("the", 3), ("dog", 2)]
```

It is short, and it is right for English, more or less. But a hyphen at the end of a line makes two words of one, an \
apostrophe is kept in the middle and dropped at the edge, and a language without spaces has one word only. The \
function `most_frequent` would say so politely, with a list of length one.

Measured on four machines, reading and writing (tokens a second):

| machine | memory, GB/s | reading | writing | context |
| --- | --- | --- | --- | --- |
| small laptop | 100 | 240 | 18.5 | 4,096 |
| large laptop | 400 | 760 | 71.0 | 4,096 |
| workstation | 800 | 1,490 | 136.2 | 8,192 |
| server card | 3,350 | 11,800 | 402.7 | 8,192 |

The column for writing follows the column for memory almost exactly: four times the bandwidth, four times the \
tokens. The column for reading does not, since reading waits for arithmetic and not for memory. The server card is \
the odd one out. At 3,350 gigabytes a second it should write more than five hundred tokens, and it stops at 402.7, \
because between two layers it has to wait for itself.

Question: which of the four machines writes 71.0 tokens a second?
Answer: the large laptop.
Question: what was tied to the brass key in the drawer?
Answer: a red ribbon.
Question: and how many letters were there, and from whom?
Answer: three letters, from Marisol, the last one unopened.

Whoever reads a page like this one from the top can give these answers without effort, because everything needed is \
still in sight. For the model it is in sight as well, in the keys and the values of tokens it read a thousand \
positions ago. If those were written down too coarsely, it will not fall silent. It will say, in the same even \
voice, that the ribbon was green.
"""
