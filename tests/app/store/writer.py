"""A process that writes into a store and says after each step what is stored: ``-m tests.app.store.writer WHAT FILE
[COUNT]``."""

import itertools
import json
import sys
from pathlib import Path

from tokamac.app.store.store import Store
from tokamac.app.store.values import StoreError


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def replies(store: Store) -> None:
    """Chat for ever: a prompt, a reply in checkpoints, its end."""
    for number in itertools.count():
        chat = store.new_chat(model="m").id
        prompt = store.add_message(chat, None, "user", f"prompt {number} " + "word " * 50)
        say(id=prompt.id, text=prompt.text, state="complete")
        reply = store.begin_reply(chat, prompt.id).id
        text = ""
        for step in range(4):
            text += f"part {step} " * 40
            store.checkpoint(reply, text)
            say(id=reply, text=text, state="stopped")
        if number % 2:
            say(id=reply, text=store.finish_reply(reply, text).text, state="complete")


def many(store: Store, count: int) -> None:
    """Add messages to the one chat that is there, and a setting for each."""
    chat = store.chats()[0].id
    beginning = store.tree(chat)[0].id
    name = store.new_chat().id  # unlike that of any other process
    for number in range(count):
        message = store.add_message(chat, beginning, "user", f"{name} {number}")
        store.set_settings(chat, {f"{name} {number}": number})
        say(id=message.id, text=message.text)


def fill(store: Store) -> None:
    """Write until nothing more fits; then say what the error was."""
    chat = store.new_chat().id
    try:
        while True:
            message = store.add_message(chat, None, "user", "x" * 20_000)
            say(id=message.id)
    except StoreError as error:
        say(error=error.message, hint=error.hint)


def limited_fill(store: Store) -> None:
    """As ``fill``, where no file may be larger than a megabyte."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    fill(store)


def main(what: str, file: str, count: str = "0") -> None:
    with Store.open(Path(file)) as store:
        say(open=True)
        if what == "many":
            many(store, int(count))
        else:
            {"replies": replies, "fill": fill, "limited_fill": limited_fill}[what](store)


if __name__ == "__main__":
    main(*sys.argv[1:])
