"""One model on several machines: rank 0 decides everything, the others repeat its passes on their part of the weights.

    Engine ── Runner ── SharedModel, SharedOperations ──▶ Team ══ a pipe, or ssh ══▶ follower ── Replay ── its part of the model
                              └────────────── MLX's own collectives, inside the pass ──────────────┘

Rank 0 is the engine as anywhere: schedule, sampling, guesses, prompt cache, memory. What it does to a model and to caches is told
to the followers as records, in order (mirror.py); they do the same to theirs. So nothing that depends on a clock, on memory or on a
user has to be agreed on: it was decided before it was told.
"""
