"""Answers as they come in: one whose parts are still on their way keeps no other waiting, and one that cannot be read
is its sender's trouble alone.

Flower's `pull_messages` takes answers one after another, waits for each part of each, from a second up to two hours,
and raises whatever a broken one raises; and nothing is left of what it had when the SuperLink fails in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.superlink.grid.http_grid import HttpGrid

from fedbraid.errors import WireError

WORKERS = 4  # requests at once
PATIENCE = 30.0  # seconds that one request may be tried for; Flower would try for ever


@dataclass
class Letter:
    """An answer that the SuperLink has announced, and what is here of it."""

    id: str
    parts: list[str]
    contents: dict[str, bytes] = field(default_factory=dict)


class Mailbox:
    """What a grid's nodes have answered."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        if isinstance(grid, HttpGrid):
            grid._retry_invoker.max_time = PATIENCE
        self.letters: dict[str, Letter] = {}  # by the message that each answers, as the SuperLink says

    def pull(self, ids: Sequence[str]) -> list[tuple[str, Message | WireError]]:
        """The answers that are here, to which of these messages, and in place of those that never will be, why."""
        if not isinstance(self.grid, HttpGrid):
            return [(m.metadata.reply_to_message_id, m) for m in self.grid.pull_messages(ids)]
        self._look(self.grid, [i for i in ids if i not in self.letters])
        done: list[tuple[str, Message | WireError]] = []
        broken: httpx.HTTPError | None = None
        if not self.letters:
            return done
        with ThreadPoolExecutor(WORKERS) as pool:
            tasks = {to: pool.submit(_fetch, self.grid, letter) for to, letter in self.letters.items()}
        for to, task in tasks.items():
            try:
                found = task.result()
            except httpx.HTTPError as error:  # what is here stays here
                broken = error
                continue
            if found is not None:
                done.append((to, found))
                del self.letters[to]
        if broken is not None and not done:
            raise broken
        return done

    def _look(self, grid: HttpGrid, ids: list[str]) -> None:
        if not ids:
            return
        found = grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=ids))
        for about, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            parts = [part.object_id for part in iterate_object_tree(tree)]
            self.letters[about.metadata.reply_to_message_id] = Letter(about.metadata.message_id, parts)


def _fetch(grid: HttpGrid, letter: Letter) -> Message | WireError | None:
    """What there is of it: the whole answer, or why there is none, or None while parts are on their way."""
    client, run = grid._runtime_client, grid.run.run_id
    for part in letter.parts:
        if part in letter.contents:
            continue
        answer = client.PullObject(PullObjectRequest(node=grid.node, run_id=run, object_id=part))
        if not answer.object_found:
            return WireError("a part of its answer never came")
        if not answer.object_available:
            return None
        letter.contents[part] = answer.object_content
    client.ConfirmMessageReceived(
        ConfirmMessageReceivedRequest(node=grid.node, run_id=run, message_object_id=letter.id)
    )
    return _read(letter)


def _read(letter: Letter) -> Message | WireError:
    try:
        message: Any = inflate_object_from_contents(letter.id, letter.contents)
    except Exception as error:  # whatever Flower makes of bytes that it did not write
        return WireError(f"its answer cannot be read: {type(error).__name__}: {error}")
    if not isinstance(message, Message) or not (message.has_error() or message.has_content()):
        return WireError("its answer is no message with content")
    return message
