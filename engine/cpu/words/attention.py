"""Words of caches, and of an attention over them."""

# Words of a cache. A side is keys or values; its words stand from KEYS or VALUES on.
# Of its layout (a window of 0 grows); slots of its own; tokens of the prefixes that it shares, and how many those are.
WINDOW, KEEP, SPARE, CAPACITY, PREFIX_TOKENS, PREFIXES, KEYS = range(7)
# Addresses of its arrays and of the kernel that reads them; bits (32: plain); channels rotated together, or 0; bytes of
# a token; its groups; sixteens in a group; whether the order is that of words of 4 bits.
NUMBERS, SCALES, BIASES, KERNEL, BITS, ROTATED, TOKEN_BYTES, GROUPS, BLOCKS, SWAPS, SIDE = range(11)
VALUES = KEYS + SIDE
PARTS = VALUES + SIDE
PART = 7  # from PARTS on, for each prefix: tokens, and three addresses of its keys and of its values

# Words of one pass's attention. Key-value heads, query heads that share one, a head's numbers; rows; which layer of how
# many; the table of (cache's words, position) by row and layer; addresses and row bytes of queries, new keys and
# values, and of what comes out; address of scale and soft cap.
(
    HEADS,
    REPEATS,
    SIZE,
    ROWS,
    LAYER,
    LAYERS,
    TABLE,
    QUERIES,
    NEW_BYTES,
    NEW_KEYS,
    NEW_VALUES,
    OUT,
    OUT_BYTES,
    TUNING,
    ALL,
) = range(15)
