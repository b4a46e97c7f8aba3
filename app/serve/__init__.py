"""A local HTTP server on the engine, with the interfaces of OpenAI and of Anthropic: for editors, agents and scripts."""
