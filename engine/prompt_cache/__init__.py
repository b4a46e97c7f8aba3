"""The prompt cache: never compute the same prefix twice, in memory, across branches, across restarts.

tree   token runs with shared beginnings, and what is kept of each; pure Python
store  the live caches and the tree around them: take, put, mark, within a budget of bytes
"""
