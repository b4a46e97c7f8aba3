"""Ways to find packed words for a weight that look at what goes through it: GPTQ and AWQ."""
