"""Local HTTP server with the OpenAI and Anthropic APIs, for editors, agents and scripts."""
