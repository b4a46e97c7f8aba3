"""The conversation on the screen. It follows the end until the reader scrolls away, and again when they come back to it.

One widget that draws its own rows: a layout of the screen for each new row, or a widget for each paragraph, would cost a model
on the same cores a tenth of its speed.
"""

from collections.abc import Sequence

from textual import events
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from tokamac.app.tui.conversation import Reply, Turn
from tokamac.app.tui.pace import SHARE_BESIDE_GPU, Pace
from tokamac.app.tui.prose.messages import ReplyMessage, UserMessage
from tokamac.app.tui.prose.page import Message, Page
from tokamac.app.tui.prose.welcome import Welcome
from tokamac.app.tui.widgets.painter import Canvas, Painter, selected_in
from tokamac.engine.events import TextKind

WIDEST = 96  # cells: longer lines are hard to read
NARROWEST = 8
SIDE = 2
SEEN_CELLS = 0.5  # a change of the scroll bar's length that the eye sees


class Transcript(ScrollView, can_focus=False):
    """The turns, oldest first. Tab goes to the messages: Up and Down choose one, Enter unfolds its thinking."""

    FOCUS_ON_CLICK = False

    def __init__(self) -> None:
        super().__init__()
        self._page = Page()
        self._reply: ReplyMessage | None = None
        self._grown = False
        self._pace = Pace(SHARE_BESIDE_GPU)
        self._following = True
        self._canvas = Canvas()
        self._chosen: ReplyMessage | None = None

    # What the chat says ---------------------------------------------------------------------------------------------------

    @property
    def following(self) -> bool:
        """Whether the end stays in view."""
        return self.max_scroll_y == 0 or self._following

    @property
    def messages(self) -> list[Message]:
        """What is shown, oldest first."""
        return self._page.messages

    @property
    def replies(self) -> list[ReplyMessage]:
        """The model's part of it."""
        return [message for message in self.messages if isinstance(message, ReplyMessage)]

    def begin(self, turn: Turn, model: str, *, share: float, again: bool) -> None:
        """Show a prompt and room for its reply, drawn with ``share`` of a core; ``again``: in place of the last reply."""
        if again and self.replies:
            self._page.pop()
        else:
            if not self.replies:
                self._page.clear()
            self._page.append(UserMessage(turn.prompt, turn.key, turn.place))
        self._reply = ReplyMessage(model, turn.reply_key, turn.reply_place)
        self._page.append(self._reply)
        self._pace = Pace(share)
        self._choose(None)
        self._let_go_of_selection()
        self.can_focus = True
        self.follow()

    def show_turns(self, turns: Sequence[Turn]) -> None:
        """Show another conversation, or another path of this one, at its end."""
        self._page.clear()
        self._reply = self._chosen = None
        for turn in turns:
            self._page.append(UserMessage(turn.prompt, turn.key, turn.place))
            if turn.reply is not None:
                message = ReplyMessage(turn.reply.model, turn.reply_key, turn.reply_place)
                message.end(turn.reply)
                self._page.append(message)
        self.can_focus = bool(turns)
        self._let_go_of_selection()
        if not turns:
            self._welcome()
        self.follow()

    def add(self, text: str, kind: TextKind) -> None:
        """Append to the running reply."""
        if self._reply is not None:
            self._reply.add(text, kind)
            self._grown = True
            self.look()

    def look(self, *, now: bool = False) -> None:
        """Draw what was added, if it is time; ``now``: it is, since something else is drawn as well."""
        if self._reply is not None and self._grown and self._pace.is_due(now=now):
            self._grown = False
            self._update(self._reply)

    def end(self, reply: Reply) -> None:
        """Close the running reply."""
        ended, self._reply, self._grown = self._reply, None, False
        if ended is not None:
            ended.end(reply)
            self._update(ended)

    def page(self, direction: int) -> None:
        """Scroll a page up (−1) or down (1). Where all is in view there is nothing to scroll, and following goes on."""
        if self.max_scroll_y > 0:
            self.scroll_relative(y=direction * max(1, self.container_size.height - 1), animate=False)

    def follow(self) -> None:
        """Jump to the end and stay there."""
        self._following = True
        self._show()

    # Size and place -------------------------------------------------------------------------------------------------------

    def on_resize(self) -> None:
        """Lay everything out for the room there is now; the reader keeps their place."""
        width = max(NARROWEST, min(WIDEST, self.size.width - 2 * SIDE))
        if not self.replies:
            self._page.clear()
            self._page.fit(width)
            self._welcome()
        elif width != self._page.width:
            index, within = self._page.at(self.scroll_offset.y)
            before = self._page.rows_of(index)
            self._page.fit(width)
            self._let_go_of_selection()
            if not self._following:
                self._set_height()
                self._scroll(self._page.start(index) + within * self._page.rows_of(index) // max(1, before))
        self._show()

    def _welcome(self) -> None:
        self._page.append(Welcome(self.size.height))

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Scrolling away from the end stops following; scrolling to it follows on."""
        self._following = round(new_value) >= self.max_scroll_y
        self._move_bar(exact=self._reply is None or not self._following)
        if round(old_value) != round(new_value):
            self.refresh()

    def release_anchor(self) -> None:
        """The reader takes the scroll bar, and must have it where the page is."""
        super().release_anchor()
        self._move_bar(exact=True)

    def _move_bar(self, *, exact: bool) -> None:
        """Set the scroll bar; unless ``exact``, only by steps that the eye sees, for it is drawn as a whole for the smallest."""
        bar, height, rows = self.vertical_scrollbar, self.container_size.height, self._page.height
        drawn, thumb = (height * height / max(1, high) for high in (bar.window_virtual_size, rows))
        if self.show_vertical_scrollbar and (exact or abs(thumb - drawn) >= SEEN_CELLS):
            bar.window_virtual_size, bar.position = rows, self.scroll_y

    def _scroll(self, y: int) -> None:
        self.scroll_target_y = self.scroll_y = y

    def _set_height(self) -> None:
        """Tell Textual how high the page is. Only when the scroll bar comes or goes need the screen be laid out for that."""
        size = Size(self.size.width, self._page.height)
        if (size.height > self.container_size.height) != self.show_vertical_scrollbar:
            self.virtual_size = size
        else:
            self.set_reactive(Widget.virtual_size, size)

    def _update(self, message: Message) -> None:
        self._page.update(message)
        self._show()

    def _show(self) -> None:
        """Bring the page's height, the end and the rows that changed to the screen."""
        following = self._following
        self._set_height()
        if following:
            self._scroll(self.max_scroll_y)
        self._move_bar(exact=self._reply is None)
        top, height = self.scroll_offset.y, self.size.height
        changed = [y for y in range(height) if not self._canvas.shows(self._page, top + y)]
        if changed:
            self.refresh(Region(0, changed[0], self.size.width, changed[-1] - changed[0] + 1))

    # Drawing --------------------------------------------------------------------------------------------------------------

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the strips in ``crop``. What was painted before is taken as it is, its escape sequences included."""
        painter, top = self._painter(), self.scroll_offset.y
        rows = range(top + crop.y, top + crop.bottom)
        strips = [self._canvas.strip(painter, self._page, y, selected_in(self, y)) for y in rows]
        background = self.background_colors[1]
        for line_filter in self.get_line_filters():
            strips = [strip.apply_filter(line_filter, background) for strip in strips]
        if crop.column_span == (0, self.size.width):
            return strips
        return [strip.crop(*crop.column_span) for strip in strips]

    def render_line(self, y: int) -> Strip:
        """Return line ``y`` for Textual to find out which character is under the mouse."""
        y += self.scroll_offset.y
        row = self._page.row(y)
        return self._painter().blank() if row is None else self._painter().located(row, y)

    def _painter(self) -> Painter:
        width, room = self.size.width, self._page.width
        return Painter(self.visual_style, self.app.theme, width, max(0, (width - room) // 2), room)

    # Selection ------------------------------------------------------------------------------------------------------------

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """Return the selected text as it was written: rows that were only wrapped are joined again."""
        return self._page.copy(selection.get_span), "\n"

    def _let_go_of_selection(self) -> None:
        """Rows have moved: what was selected is elsewhere now."""
        if self.text_selection is not None:
            self.screen.clear_selection()

    # Choosing -------------------------------------------------------------------------------------------------------------

    @property
    def chosen(self) -> int | None:
        """The key of the message that is pointed at by the keyboard."""
        return None if self._chosen is None else self._chosen.key

    def choose(self, key: int) -> None:
        """Point at the message ``key``, if it is shown, and bring it into view."""
        self._choose(next((message for message in self._choosable if message.key == key), None))

    @property
    def _choosable(self) -> list[UserMessage | ReplyMessage]:
        return [message for message in self.messages if isinstance(message, UserMessage | ReplyMessage)]

    def on_click(self, event: events.Click) -> None:
        """Unfold or fold the thinking that was clicked."""
        y = self.scroll_offset.y + event.y
        if self.text_selection is not None or not 0 <= y < self._page.height:
            return
        index, within = self._page.at(y)
        message = self.messages[index]
        if isinstance(message, ReplyMessage) and message.is_thinking(within):
            self._toggle(message)

    def on_focus(self) -> None:
        """Choose the last message, unless one is chosen."""
        if self._chosen is None and self._choosable:
            self._choose(self._choosable[-1])

    def on_blur(self) -> None:
        """Choose none."""
        self._choose(None)

    def on_key(self, event: events.Key) -> None:
        """Choose another one, or unfold or fold its thinking."""
        if self._chosen is None:
            return
        match event.key:
            case "enter" | "space" if isinstance(self._chosen, ReplyMessage):
                self._toggle(self._chosen)
            case "up" | "down":
                messages = self._choosable
                index = messages.index(self._chosen) + (1 if event.key == "down" else -1)
                self._choose(messages[max(0, min(len(messages) - 1, index))])
            case _:
                return
        event.stop()
        event.prevent_default()

    def _toggle(self, message: ReplyMessage) -> None:
        if not message.thinking:
            return
        message.thinking.toggle()
        self._let_go_of_selection()
        self._following = False  # what was clicked stays where it is
        self._update(message)
        self._following = self.scroll_offset.y >= self.max_scroll_y

    def _choose(self, message: UserMessage | ReplyMessage | None) -> None:
        before, self._chosen = self._chosen, message
        for each in (before, message):
            if each is not None and each in self.messages:
                each.chosen = each is message
                self._update(each)
        if message is not None:
            self._bring_into_view(message)

    def _bring_into_view(self, message: Message) -> None:
        y = self._page.start(self.messages.index(message))
        if not self.scroll_offset.y <= y < self.scroll_offset.y + self.size.height - 1:
            self._scroll(y)
