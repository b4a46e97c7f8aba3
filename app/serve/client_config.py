"""What to paste into editors and agents so that they use this server: each in the form that its own documents have."""

import json

KEY = "none"
"""What a client that insists on a key is given where none is needed."""


def client_config(host: str, port: int, model: str, key: str = KEY) -> str:
    """Return it as text. model: as clients should name it; key: or the words that stand for the token."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    url = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
    return "\n\n".join(f"# {title}\n{text}" for title, text in _sections(url, model, key))


def _sections(url: str, model: str, key: str) -> list[tuple[str, str]]:
    openai = f"{url}/v1"
    asked = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    proven = "" if key == KEY else f" -H 'Authorization: Bearer {key}'"
    continue_dev = f"models:\n  - name: {model}\n    provider: openai\n    model: {model}\n    apiBase: {openai}\n    apiKey: {key}"
    zed = json.dumps(
        {
            "language_models": {
                "openai_compatible": {
                    "Tokamac": {
                        "api_url": openai,
                        "available_models": [{"name": model, "max_tokens": 32768}],
                    }
                }
            }
        },
        indent=2,
    )
    opencode = json.dumps(
        {
            "provider": {
                "tokamac": {
                    "npm": "@ai-sdk/openai-compatible",
                    "options": {"baseURL": openai, "apiKey": key},
                    "models": {model: {}},
                }
            }
        },
        indent=2,
    )
    codex = (
        f'model = "{model}"\nmodel_provider = "tokamac"\n\n[model_providers.tokamac]\nname = "Tokamac"\n'
        f'base_url = "{openai}"\nwire_api = "responses"'
    )
    llm = f"- model_id: tokamac\n  model_name: {model}\n  api_base: {openai}"
    in_zed = "Zed: settings.json"
    if key != KEY:  # those three keep keys outside of their settings
        codex += f'\nenv_key = "TOKAMAC_API_KEY"\n# and in the shell: export TOKAMAC_API_KEY={key}'
        llm += f"\n  api_key_name: tokamac\n# and once: llm keys set tokamac --value {key}"
        in_zed += f", and in the shell: export TOKAMAC_API_KEY={key}"
    return [
        ("try it", f"curl {openai}/chat/completions{proven} -d '{asked}'"),
        ("programs that use OpenAI's client", f"export OPENAI_BASE_URL={openai} OPENAI_API_KEY={key}"),
        (
            "Claude Code, and programs that use Anthropic's client",
            f"export ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key} ANTHROPIC_MODEL={model}",
        ),
        ("Codex: ~/.codex/config.toml", codex),
        ("Continue: ~/.continue/config.yaml", continue_dev),
        (in_zed, zed),
        ("opencode: opencode.json", opencode),
        ("aider", f"aider --model openai/{model} --openai-api-base {openai} --openai-api-key {key}"),
        ("llm: extra-openai-models.yaml", llm),
    ]
