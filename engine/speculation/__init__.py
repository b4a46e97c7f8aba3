"""Tokens guessed ahead and verified in one pass: who guesses, how much, and whether it pays."""
