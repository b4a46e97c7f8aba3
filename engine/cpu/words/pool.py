"""Words of the state that the threads of a pool share."""

# Words of the state, each in a cache line of its own.
LINE = 8
OPEN, NEXT, INSIDE, SLEEPING, ENDED, KERNEL_AT, ARGUMENTS_AT, PIECES, SIZE, NUMBER, MUTEX, CONDITION = (
    LINE * index for index in range(12)
)
# Beyond CONDITION there is room: a mutex takes 40 bytes, a condition 48, and zeros are what both begin as.
WORDS = LINE * 14

# Turns in which an idle worker looks for work before it sleeps: some 0.2 ms where nobody else wants the core.
WATCH = 300

SPIN = 200  # looks in a row before a core is yielded, a few nanoseconds each
