"""Batched replies: whose turn it is, and how their tokens are computed together."""
