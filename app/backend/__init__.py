"""The engine in a child process: wire protocol, the child's loop, the app's client."""
