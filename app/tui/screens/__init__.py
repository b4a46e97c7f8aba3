"""The screens and dialogs of the chat, one file per group."""
