"""Speculative decoding: drafters, draft lengths, and whether drafting pays."""
