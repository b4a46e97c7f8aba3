"""The engine in a process of its own: the language it speaks (wire), its loop (child), the app's end (client)."""
