"""What the screen asks of the engine's process: one frozen dataclass a message."""

from dataclasses import dataclass, field, replace
from typing import Literal

from tokamac.app.backend.whatif import Question
from tokamac.engine.events import Message
from tokamac.engine.options import KVSpec, Sampling, TemplateOptions


@dataclass(frozen=True, slots=True)
class Load:
    """Load ``model`` in place of whatever is loaded.

    memory: bytes that it may take; None is the system's limit. unchecked: although something of its config is computed otherwise.
    adapter: a folder or a Hugging Face id of what is added to it.
    """

    model: str
    kv: KVSpec = field(default_factory=KVSpec)
    prompt_cache: bool = True
    memory: int | None = None
    unchecked: bool = False
    adapter: str | None = None

    def of(self, model: str, adapter: str | None) -> "Load":
        """Return the request for another model with the same settings; for the same one, this.

        That this one may be unchecked, and what is added to it, says nothing of the other.
        """
        return self if model == self.model else replace(self, model=model, unchecked=False, adapter=adapter)


@dataclass(frozen=True, slots=True)
class Send:
    """Reply to a conversation. It is always whole: the engine's process remembers nothing that matters.

    continues: it ends with a reply that was cut, and the rest of that is wanted. template: what the chat template is told.
    """

    id: int
    messages: tuple[Message, ...]
    sampling: Sampling = field(default_factory=Sampling)
    continues: bool = False
    template: TemplateOptions = field(default_factory=TemplateOptions)


@dataclass(frozen=True, slots=True)
class Cancel:
    """End reply ``id`` within one token; it finishes with the reason ``cancelled``."""

    id: int


@dataclass(frozen=True, slots=True)
class Warm:
    """Compute in idle time what is certain of a conversation whose last message is still being written. Nothing is replied.

    Any request ends it, and so does another ``Warm``. Where the prompt cache is off nothing is done. template: as for ``Send``.
    """

    messages: tuple[Message, ...]
    template: TemplateOptions = field(default_factory=TemplateOptions)


Asker = Literal["draft", "actions", "title"]
"""Who wants to know a price: what is being written, what could be done with older messages, or a title that is to be read ahead."""


@dataclass(frozen=True, slots=True)
class AskPrice:
    """Tell what a reply to a conversation would take until its first token: ``Priced`` comes when the engine is free.

    A later question of the same asker replaces one that still waits. continues, template: as for ``Send``.
    """

    asker: Asker
    id: int
    messages: tuple[Message, ...]
    continues: bool = False
    template: TemplateOptions = field(default_factory=TemplateOptions)


@dataclass(frozen=True, slots=True)
class AskCount:
    """Tell how many tokens a text is: ``Counted`` comes when the engine is free."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class AskWhatIf:
    """Tell what a model would do otherwise, or elsewhere: ``WhatIf`` comes when the engine is free.

    A later question of the same kind replaces one that is not answered yet.
    """

    id: int
    question: Question


@dataclass(frozen=True, slots=True)
class Unload:
    """Give the model's memory back."""


@dataclass(frozen=True, slots=True)
class Quit:
    """End the process."""


Request = Load | Send | Cancel | Warm | AskPrice | AskCount | AskWhatIf | Unload | Quit
