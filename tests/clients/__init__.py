"""Real clients against the server: ``make clients`` installs them outside the repository, ``make test-clients`` runs them.

clients  which there are, and how each is run        install       `python -m tests.clients.install`
drive    one turn of each, by its own Python or Node  record        `python -m tests.clients.record`: tests/app/serve/fixtures
test_clients   marked `clients`; says which are absent
"""
