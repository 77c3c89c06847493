"""Flower's SuperNode, which takes an order when the one before has its answer, and not before.

Flower's own loop takes an order and then sends whatever answers are there. Where a run ends while an order of it is on
the way, the order stays behind, and so may an answer to it: that one goes out in place of the next order's, which then
lies on the node until yet another order comes. And an order that did not come whole, or whose worker was lost before it
read it, never gets an answer at all. Here each of them gets one, an error at least, so that a server knows whom to ask again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode, Status, SubStatus
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store.object_store import NoObjectInStoreError
from flwr.supernode import start_client_internal as flower
from flwr.supernode.cli import flower_supernode

LOOK = 0.1  # seconds between two looks for an answer
UNFINISHED = (Status.PENDING, Status.STARTING, Status.RUNNING)
NOT_WHOLE = "the order did not come whole, as when the line is bad or its run has ended"
NO_WORKER = "no worker answered the order, as when it is killed"

_take, _send = flower._pull_and_store_message, flower._push_messages


def take(receive: Callable[[], Any], state: Any, object_store: Any, **how: Any) -> int | None:
    """Its run, if an order came; one that did not come whole is there with its answer."""
    came: list[Any] = []

    def noted() -> Any:
        came[:] = [receive()]
        return came[0]

    run: int | None = _take(receive=noted, state=state, object_store=object_store, **how)
    if run is not None or not any(came):
        return run
    order = came[0][0]
    answer(order, NOT_WHOLE, state, object_store)
    return int(order.metadata.run_id)


def send(state: Any, object_store: Any, **how: Any) -> None:
    """Send answers until no order is without one."""
    while True:
        over = not state.get_tasks(statuses=UNFINISHED)  # asked first: a worker answers, then ends its task
        orders, answers = _here(state, answers=False), _here(state, answers=True)
        if any(_is_whole(one, object_store) for one in answers):
            _send(state=state, object_store=object_store, **how)
        elif not orders:
            return
        elif over:
            for order in orders:
                answer(order, NO_WORKER, state, object_store)
        else:
            time.sleep(LOOK)


def answer(order: Message, why: str, state: Any, object_store: Any) -> None:
    """In place of what will never come: that it will not. Whoever is still at it is not listened to any more."""
    for task in state.get_tasks(statuses=UNFINISHED):
        state.finish_task(task.task_id, SubStatus.FAILED, why)
    for one in _here(state, answers=True):
        state.delete_messages(message_ids=[one.metadata.message_id])
        object_store.delete(one.metadata.message_id)
    object_store.delete(order.metadata.message_id)
    state.store_message(order)
    error = Message(Error(ErrorCode.CLIENT_APP_CRASHED, why), reply_to=order)
    flower._insert_message(error, state, object_store)


def _here(state: Any, answers: bool) -> list[Message]:
    with state.lock_msg_store:
        found = [entry.message for entry in state.msg_store.values()]
    return [one for one in found if bool(one.metadata.reply_to_message_id) == answers]


def _is_whole(reply: Message, object_store: Any) -> bool:
    try:
        tree = object_store.get_object_tree(reply.metadata.message_id)
    except NoObjectInStoreError:
        return False
    return all(object_store.get(part.object_id) for part in iterate_object_tree(tree))


def main() -> None:
    flower._pull_and_store_message, flower._push_messages = take, send
    sys.argv[0] = "flower-supernode"
    flower_supernode()


if __name__ == "__main__":
    main()
