"""``tokamac`` as a program, with the scripted engine behind the chat: MODEL is the name of a scenario."""

import sys

from tokamac.app import cli
from tokamac.app.backend import client

command = client.child_command
client.child_command = lambda *, scripted=True: command(scripted=True)
sys.exit(cli.main())
