"""The engine in a process of its own: the language it speaks (protocol), its loop (child), the app's end (client)."""
