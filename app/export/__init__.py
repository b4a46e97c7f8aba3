"""A conversation as a page or a picture to share. Nothing in these files runs, and nothing is fetched when they are opened.

formats   which suffix is which format, and under which name a chat is exported
entries   what of a conversation is shown: the branch it stands on, as safe text
html      one page of its own
svg       one picture, drawn from text

Markdown and JSON, which come back in, are the store's own (``app/store/export``).
"""
