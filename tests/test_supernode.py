"""Does a node's SuperNode give every order its own answer, whatever became of the order before it?

Flower's own loop, state and messages, with a SuperLink made of functions.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: make test-engines brings it")
from fleets import LONG
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import SubStatus
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal as flower
from flwr.supernode.nodestate import NodeStateFactory

from fedbraid.deploy import supernode

pytestmark = [pytest.mark.engines, pytest.mark.quick]


class Network:
    """A SuperLink with orders for one node, of runs of which some are over."""

    def __init__(self):
        TaskIdentity._run_id = TaskIdentity._task_id = TaskIdentity._node_id = 1
        self.orders, self.objects, self.over, self.broken = [], {}, set(), set()
        self.taken, self.refused = [], []  # (run, what the answer says)

    def ask(self, run, what):
        TaskIdentity._run_id = run
        order = Message(
            RecordDict({"fedbraid": ConfigRecord({"what": what})}), dst_node_id=7, message_type="query"
        )
        order.metadata.__dict__["_message_id"] = order.object_id
        self.orders.append((remove_content_from_message(order), get_object_tree(order)))
        self.objects |= {i: part.deflate() for i, part in get_all_nested_objects(order).items()}

    def _living(self, run):
        if run in self.over:
            raise RunNotRunningException

    def receive(self):
        return self.orders.pop(0) if self.orders else None

    def pull_object(self, run, i):
        self._living(run)
        if run in self.broken:
            raise ValueError("the line is bad")
        return self.objects[i]

    def confirm_message_received(self, run, i):
        self._living(run)

    def send(self, reply, tree, took):
        said = reply.error.reason if reply.has_error() else ""
        try:
            self._living(reply.metadata.run_id)
        except RunNotRunningException:
            self.refused.append((reply.metadata.run_id, said))
            raise
        self.taken.append((reply.metadata.run_id, said))
        return {part.object_id for part in [tree, *tree.children]}, "session"

    def push_object(self, run, session, i, content):
        assert content


@pytest.fixture
def link():
    return Network()


class Node:
    """Flower's loop of a SuperNode, a turn at a time."""

    def __init__(self, link):
        factory = ObjectStoreFactory()
        self.link, self.store = link, factory.store()
        self.state = NodeStateFactory(factory).state()
        self.state.set_node_id(7)
        for run in range(5):
            self.state.store_run(Run.create_empty(run))

    def turn(self, work=None):
        """Take an order if there is one, let a worker do `work` meanwhile, and send what there is."""
        link, how = self.link, {"state": self.state, "object_store": self.store}
        run = supernode.take(
            **how, node_config={}, receive=link.receive, get_run=None, get_fab=None,
            pull_object=link.pull_object, confirm_message_received=link.confirm_message_received,
            trusted_entities=None,
        )  # fmt: skip
        if run is None:
            return
        sending = threading.Thread(
            target=supernode.send, kwargs={**how, "send": link.send, "push_object": link.push_object}
        )
        sending.start()
        time.sleep(0.3)  # long enough for a loop that sends whatever is there
        if work is not None:
            work(self)
        sending.join(LONG)
        assert not sending.is_alive()

    def work(self):
        """What a worker does with the tasks that are here."""
        for task in self.state.get_tasks(statuses=["pending"]):
            assert self.state.claim_task(task.task_id)
            assert self.state.activate_task(task.task_id)
            (order,) = self.state.get_messages_legacy(run_ids=[task.run_id], is_reply=False, limit=1)
            reply = Message(RecordDict({"fedbraid": ConfigRecord({"is": "done"})}), reply_to=order)
            flower._insert_message(reply, self.state, self.store)
            self.state.finish_task(task.task_id, SubStatus.COMPLETED, "")


@pytest.mark.parametrize("moment", ["pull_object", "confirm_message_received"])
def test_an_order_of_a_run_that_ends_does_not_hold_up_the_next_runs(moment, link, monkeypatch):
    """Run 1 ends while its order is on the way; what a worker makes of it is refused, and run 2 gets its own answer."""
    node, last = Node(link), getattr(link, moment)

    def ends(run, i):
        link.over.add(1)
        return last(run, i)

    monkeypatch.setattr(link, moment, ends)
    link.ask(1, "train")
    node.turn(Node.work)
    monkeypatch.undo()
    node.work()
    for _ in range(2):
        link.ask(2, "who are you?")
        node.turn(Node.work)
    assert link.taken == [(2, "")] * 2
    assert {run for run, _ in link.refused} == {1}
    assert not node.state.msg_store


def test_an_order_that_did_not_come_whole_is_said_to_be_lost(link):
    node = Node(link)
    link.broken.add(1)
    link.ask(1, "train")
    node.turn()
    assert [(run, "did not come whole" in said) for run, said in link.taken] == [(1, True)]
    link.broken.clear()
    link.ask(1, "train")
    node.turn(Node.work)
    assert link.taken[1:] == [(1, "")]


def test_a_task_whose_worker_was_lost_is_said_to_be_lost(link):
    """Flower tells of those whose message was read, and waits for ever for the others."""
    node = Node(link)

    def begun_and_left(node):
        (task,) = node.state.get_tasks(statuses=["pending"])
        assert node.state.claim_task(task.task_id)
        assert node.state.activate_task(task.task_id)
        node.state.task_token_store[task.task_id].active_until -= timedelta(seconds=90)

    link.ask(1, "train")
    node.turn(begun_and_left)
    assert [(run, "no worker" in said) for run, said in link.taken] == [(1, True)]
    link.ask(1, "train")
    node.turn(Node.work)
    assert link.taken[1:] == [(1, "")]


def test_an_answer_that_its_worker_never_finished_is_said_to_be_lost(link):
    node = Node(link)

    def half_sent(node):
        (task,) = node.state.get_tasks(statuses=["pending"])
        assert node.state.claim_task(task.task_id)
        assert node.state.activate_task(task.task_id)
        (order,) = node.state.get_messages_legacy(run_ids=[1], is_reply=False, limit=1)
        reply = Message(RecordDict({"fedbraid": ConfigRecord({"is": "done"})}), reply_to=order)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        node.store.preregister(1, get_object_tree(reply))
        node.state.store_message(remove_content_from_message(reply))
        node.state.finish_task(task.task_id, SubStatus.FAILED, "")

    link.ask(1, "train")
    node.turn(half_sent)
    assert [(run, "no worker" in said) for run, said in link.taken] == [(1, True)]
    assert not node.state.msg_store
