"""The prompt cache: never compute the same prefix twice, in memory, across branches, across restarts."""
