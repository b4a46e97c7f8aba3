"""Words of a decode step."""

SILU, GELU, GELU_TANH = range(3)

# Words of a model, and of a layer. Rows; a row's numbers, and those between the products of a feed-forward block; of a
# head, those that are rotated, and whether pairs stand side by side; how many rotations, and the address of their
# cosines and sines; then addresses of buffers: the sum of what layers add, what is normed of it, what one adds, gates
# and what they gate, both in one; and of the last norm's weights.
COUNT, DIMS, INNER, ROPE_DIMS, PAIRED, ROPES, ROPES_AT, ACTIVATION, HIDDEN, NORMED, ADDED, GATED, ACTED, LAST_NORM = (
    range(14)
)
# Where the embedding's kernel and its arguments stand, and attention's kernels; how many words in all.
EMBEDDING, WRITE, ATTEND, MODEL = 14, 16, 17, 18

# Addresses: weights of the norms before attention and before feed-forward, and of those of what either adds, and the
# biases of what either adds; weights of the heads' norms; biases of what the first products give. 0: none. Then which
# rotation, and how many words in all.
BEFORE, AFTER, ADDED_BIAS, QUERY_NORM, KEY_NORM, JOINED_BIAS, GATED_BIAS, ROPE, LAYER = 0, 2, 4, 6, 7, 8, 9, 10, 11

RUNS = 4  # groups of products in a layer, each with rows of its own. The head's stands after those of all layers.
# Words of products that share their rows: kernel, arguments, pieces, pieces at once; what prepares the rows, and how
# many such.
RUN = 6
PREPARATION = 2  # words of what prepares rows: kernel and arguments; its pieces are rows

# Numbers of a model. What embeddings, what layers add and logits are multiplied by; what bounds logits, or 0; what is
# added to the mean of squares.
EMBEDDED, RESIDUAL, LOGITS, SOFTCAP, EPS = range(5)
