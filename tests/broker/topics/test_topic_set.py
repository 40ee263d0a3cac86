"""What is known of several topics that are dequeued as one."""

from __future__ import annotations

from queen.broker.topics.multi_dequeue import TopicSet

A, B = ("ns", "a"), ("ns", "b")


def test_a_topic_that_was_found_empty_is_not_searched_until_it_gets_items() -> None:
    topic_set = TopicSet("ns", frozenset())
    topic_set.items_due(A, 0.0, 1.0)
    assert topic_set.look(1.0) == {A}
    topic_set.found_empty({A})
    assert topic_set.look(2.0) == set()
    topic_set.items_due(A, 3.0, 3.0)
    assert topic_set.look(3.0) == {A}


def test_notifications_during_a_search_are_not_forgotten() -> None:
    topic_set = TopicSet("ns", frozenset())
    topic_set.items_due(A, 0.0, 1.0)
    topic_set.items_due(B, 0.0, 1.0)
    looked = topic_set.look(1.0)
    topic_set.items_due(A, 1.0, 1.0)
    assert topic_set.changed
    topic_set.found_empty(looked)
    assert topic_set.look(1.0) == {A}


def test_delayed_items_count_from_their_time_on() -> None:
    topic_set = TopicSet("ns", frozenset())
    topic_set.items_due(B, 9.0, 1.0)
    topic_set.items_due(A, 5.0, 1.0)
    assert (topic_set.look(1.0), topic_set.next_at) == (set(), 5.0)
    assert (topic_set.look(5.0), topic_set.next_at) == ({A}, 9.0)
    assert topic_set.look(9.0) == {A, B}


def test_names_choose_and_none_means_all() -> None:
    assert TopicSet("ns", frozenset()).covers(A)
    assert TopicSet("ns", frozenset({"a"})).covers(A)
    assert not TopicSet("ns", frozenset({"b"})).covers(A)


def test_of_many_delayed_items_of_a_topic_the_first_is_remembered() -> None:
    topic_set = TopicSet("ns", frozenset())
    for at in (9.0, 8.0, 8.5, 7.0, 20.0):
        topic_set.items_due(A, at, 1.0)
    assert (topic_set.next_at, topic_set.look(7.0)) == (7.0, {A})
    topic_set.found_empty({A})
    topic_set.items_due(A, 30.0, 7.0)
    assert topic_set.look(10.0) == {A}
    topic_set.found_empty({A})
    assert (topic_set.next_at, topic_set.look(30.0)) == (30.0, {A})
