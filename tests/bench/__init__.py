"""What ``make bench`` measures, and how BENCHMARKS.md is written. No figure in that file is typed by hand.

    python -m tests.bench [--model MODEL] [--only NAME] [--real] [--quick] [--output FILE]

    stats    medians, ranges, ratios taken in pairs     plan      what is measured, on which model, how often
    report   rows, targets, verdicts, Markdown          machine   what the figures were measured on
    remote   an object in a process of its own          terminal  a program in a pseudo-terminal
    servers  the engine, the bare loop and mlx-lm       kv_lab    caches, measured in the engine's process
    prompt_lab  the prompt cache, measured there; mlx-lm's; a disk that is written

    decode, peer, screen, start, turns, prompt_cache, kv, flat    the sections
    real     SmolLM2 beside the guide; and LONG, what `make bench-real` measures: conversions of real models

A section is a module's ``measure_NAME(plan)`` and a line in ``__main__.SECTIONS``; one that takes an hour is in ``LONG`` too.

Every peer and every engine has a process of its own, and only one of them works at a time.
"""
