"""Text, tables and JSON for the results of ``engine.perf``."""
