"""One model on several machines: rank 0 decides, others repeat its passes on their weights."""

#     Engine ── Runner ── SharedModel, SharedOperations ──▶ Team ══ a pipe, or ssh ══▶ follower ── Replay ── its part of
#     the model
#                               └────────────── MLX's own collectives, inside the pass ──────────────┘
#
# Operations on model and caches reach followers as ordered records (mirror.py), so nothing that depends on a
# clock, memory or a user needs agreement.
