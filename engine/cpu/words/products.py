"""Words of products, and of the embedding of tokens."""

OUTS = 4  # rows of W in a piece of work

ROWS_AT_ONCE = 8  # rows of x that a thread prepares at once

# Words of a kernel's arguments. Addresses, and: bytes of a row of W, x and y; how scales are stored; groups in a row;
# sixteens in a group; rows of x; of W.
WEIGHTS, ROW_BYTES, SCALES, BIASES, STORED, GROUPS, BLOCKS, X, X_BYTES, Y, Y_BYTES, COUNT, WIDTH = range(13)


PER_MATRIX = 3  # words of one of several matrices: its first piece, kernel and arguments

# Beyond the words of a product's arguments: addresses of ids and of the rows that are written, and their bytes.
IDS, OUT, OUT_BYTES = range(13, 16)
