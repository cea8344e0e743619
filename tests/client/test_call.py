"""The rules of retries, time limits and hedging, at times that a test says."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from kvtools.client import Options, TimeLimitError, UnavailableError
from kvtools.client.call import Attempt, Call
from kvtools.client.endpoint import endpoint_of
from kvtools.client.http_answer import Answer, Request
from kvtools.client.options import OptionArguments
from kvtools.client.replicas import Replicas

ASK = Request("POST", "/v1/tables:lookup", {}, b"x")


def call(replicas: int = 1, deadline: float = 10, **options: object) -> Call:
    group = Replicas([endpoint_of(f"http://host{i}:1") for i in range(replicas)])
    return Call(ASK, group, Options(**options), deadline)  # type: ignore[arg-type]


def answer(status: int = 200, **headers: str) -> Answer:
    return Answer(status, {name.replace("_", "-"): text for name, text in headers.items()}, np.empty(0, np.uint8))


def started(one: Call, now: float) -> Attempt:
    (attempt,) = one.due(now)
    attempt.connected = True
    return attempt


def name(attempt: Attempt) -> str:
    return attempt.replica.endpoint.host


def test_an_answer_ends_the_call() -> None:
    one = call()
    attempt = started(one, 0)
    assert one.due(0.1) == [] and one.wake == 10
    one.answered(attempt, answer(), 0.2)
    assert one.done and one.error is None and one.answer is not None and one.replica is attempt.replica
    assert attempt.replica.under_way == 0


@pytest.mark.parametrize("status", [400, 404, 413, 500])
def test_what_a_server_says_of_the_request_is_not_asked_again(status: int) -> None:
    one = call(replicas=2)
    one.answered(started(one, 0), answer(status), 0.1)
    assert one.done and one.answer is not None and one.answer.status == status


def test_another_replica_is_tried_at_once() -> None:
    one = call(replicas=3)
    first = started(one, 0)
    one.failed(first, OSError("refused"), 0.1)
    second = started(one, 0.1)
    one.answered(second, answer(503), 0.2)
    third = started(one, 0.2)
    assert len({name(first), name(second), name(third)}) == 3
    one.answered(third, answer(), 0.3)
    assert one.done and one.error is None


def test_the_same_server_is_tried_after_a_time_that_doubles() -> None:
    one = call(backoff=1, backoff_limit=100, retries=3)
    waits, now = [], 0.0
    for _ in range(3):
        one.failed(started(one, now), OSError("refused"), now)
        assert one.due(now) == []
        waits.append(one.wake - now)
        now = one.wake
    for wait, longest in zip(waits, (1, 2, 4), strict=True):
        assert longest / 2 <= wait <= longest
    one.failed(started(one, now), OSError("no route"), now)
    assert one.done and isinstance(one.error, UnavailableError)
    assert "host0" in str(one.error) and "no route" in str(one.error)


@pytest.mark.parametrize(("text", "seconds"), [("2", 2), ("Wed, 21 Oct 2015 07:28:00 GMT", 0), ("soon", 0)])
def test_a_server_that_names_a_time_is_left_alone_until_then(text: str, seconds: float) -> None:
    one = call(backoff=0.01)
    one.answered(started(one, 0), answer(429, retry_after=text), 0)
    assert one.due(0) == [] and seconds <= one.wake <= seconds + 0.01
    assert started(one, one.wake)


def test_a_time_beyond_the_limit_is_an_error_at_once() -> None:
    one = call(deadline=10)
    one.answered(started(one, 0), answer(503, retry_after="60"), 0.1)
    assert one.done and isinstance(one.error, UnavailableError) and one.error.retry_after == 60


def test_no_answer_within_the_limit() -> None:
    one = call(deadline=10)
    attempt = started(one, 0)
    assert one.due(10) == []
    assert isinstance(one.error, TimeLimitError) and isinstance(one.error, TimeoutError)
    assert one.stopped == [attempt] and attempt.replica.under_way == 0


def test_a_connection_that_does_not_come_about_is_given_up() -> None:
    one = call(replicas=2, connect_timeout=1)
    (first,) = one.due(0)
    assert one.wake == 1
    (second,) = one.due(1)
    assert one.stopped == [first] and name(first) != name(second)


def test_an_attempt_that_takes_too_long_is_repeated() -> None:
    one = call(replicas=2, attempt_timeout=3)
    first = started(one, 0)
    assert one.due(2.9) == []
    second = started(one, 3)
    assert one.stopped == [first] and name(first) != name(second)
    one.answered(second, answer(), 4)
    assert one.done and one.error is None


def test_an_attempt_that_takes_too_long_is_repeated_though_nobody_says_that_it_is_connected() -> None:
    one = call(replicas=2, attempt_timeout=0.3, connect_timeout=1)
    (first,) = one.due(0)
    assert one.wake == 0.3
    (second,) = one.due(0.3)
    assert one.stopped == [first] and name(first) != name(second)


def test_a_replica_that_answers_nobody_within_the_limit_rests_and_is_looked_at_anew() -> None:
    one = call(replicas=2, deadline=10, rest=5)
    silent = started(one, 0).replica
    silent.checked = True
    one.due(10)
    assert re.search(rf"no answer within 10 s \({silent.endpoint.shown} did not answer\); raise", str(one.error))
    assert not silent.checked
    assert one.replicas.take(14) is not silent and one.replicas.take(14) is not silent


def test_a_replica_that_answers_others_meanwhile_does_not_rest() -> None:
    group = Replicas([endpoint_of(f"http://host{i}:1") for i in range(2)])
    one, *others = (Call(ASK, group, Options(), 10) for _ in range(4))
    replica = started(one, 0).replica
    replica.checked = True
    for other, attempt in [(other, started(other, 1)) for other in others]:  # of all replicas
        other.answered(attempt, answer(), 2)
    one.due(10)
    assert replica.checked and replica in {group.take(10), group.take(10)}


def test_a_replica_that_loses_hedges_rests_if_it_answers_nobody() -> None:
    group = Replicas([endpoint_of(f"http://host{i}:1") for i in range(2)])
    hung = group.all[0]
    for at in range(0, 60, 10):
        hung.checked = True
        one = Call(ASK, group, Options(hedge=0.5), at + 10)
        first = started(one, at)
        one.answered(started(one, at + 0.5) if first.replica is hung else first, answer(), at + 0.6)
        assert hung.checked == (first.replica is not hung)
        assert (hung.rests_until > at + 0.6) == (at == 40)  # the third time


def test_an_idle_connection_that_was_closed_costs_no_attempt() -> None:
    one = call(retries=0)
    one.failed(started(one, 0), ConnectionResetError(), 0.1, stale=True)
    again = started(one, 0.1)
    assert again.fresh
    one.answered(again, answer(), 0.2)
    assert one.done and one.error is None


def test_a_hedge_goes_to_another_replica_and_the_first_answer_counts() -> None:
    one = call(replicas=2, hedge=0.5)
    first = started(one, 0)
    assert one.due(0.4) == [] and one.wake == 0.5
    second = started(one, 0.5)
    assert name(first) != name(second)
    assert one.due(0.6) == []  # never a third
    one.answered(second, answer(), 0.7)
    assert one.done and one.replica is second.replica and one.stopped == [first]
    assert first.replica.under_way == second.replica.under_way == 0


def test_when_one_of_a_hedged_pair_fails_the_other_may_still_answer() -> None:
    one = call(replicas=2, hedge=0.5)
    first = started(one, 0)
    second = started(one, 0.5)
    one.failed(second, OSError("reset"), 0.6)
    assert not one.done
    one.answered(first, answer(), 0.7)
    assert one.done and one.error is None


def test_one_call_in_ten_is_hedged_over_time() -> None:
    group = Replicas([endpoint_of(f"http://host{i}:1") for i in range(2)])
    hedged = 0
    for _ in range(300):
        one = Call(ASK, group, Options(hedge=0.5), 10)
        first = started(one, 0)
        hedged += len(one.due(0.5))
        one.answered(first, answer(), 1)
    assert 30 <= hedged <= 45


def test_p95_is_known_after_some_answers() -> None:
    group = Replicas([endpoint_of(f"http://host{i}:1") for i in range(2)])
    options = Options(hedge="p95")
    for number in range(128):
        one = Call(ASK, group, options, 10)
        one.answered(started(one, 0), answer(), number / 128)
    assert group.p95 == pytest.approx(0.95, abs=0.02)
    one = Call(ASK, group, options, 10)
    started(one, 0)
    assert one.wake == group.p95


def test_the_replica_with_the_least_to_do_is_asked() -> None:
    group = Replicas([endpoint_of(f"http://host{i}:1") for i in range(3)])
    taken = [group.take(0) for _ in range(6)]
    assert all(taken.count(replica) == 2 for replica in group.all)
    group.release(taken[4])
    assert group.take(0) is taken[4]


def test_a_replica_that_failed_rests() -> None:
    one = call(replicas=2, rest=5)
    first = started(one, 0)
    one.failed(first, OSError("refused"), 0)
    for now in (1.0, 4.9):
        assert one.replicas.take(now) is not first.replica
    assert first.replica in {one.replicas.take(5), one.replicas.take(5)}


def test_the_log_says_when_others_stand_in_for_a_replica_and_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    group = Replicas([endpoint_of(f"http://host{i}:1") for i in range(2)])
    hung = group.all[0]
    for at in range(0, 200, 10):
        one = Call(ASK, group, Options(hedge=0.5), at + 10)
        first = started(one, at)
        one.answered(started(one, at + 0.5) if first.replica is hung else first, answer(), at + 0.6)
    said = "http://host0:1 does not answer (3 requests were given up): its replicas are asked in its place"
    assert caplog.messages == [said]  # once
    back = Call(ASK, group.only(hung), Options(), 300)
    back.answered(started(back, 200), answer(), 201)
    assert caplog.messages == [said, "http://host0:1 answers again"]
    for _ in range(2):
        alone = call(retries=0)
        alone.failed(started(alone, 0), OSError("refused"), 0.1)  # which the call's error says
    busy = Call(ASK, group, Options(), 400)
    busy.answered(started(busy, 300), answer(503), 301)
    assert len(caplog.messages) == 2
    lost = Call(ASK, group, Options(), 500)
    lost.failed(started(lost, 400), ConnectionRefusedError("refused"), 401)
    assert re.fullmatch(r"http://host.:1 does not answer \(refused\): .*", caplog.messages[-1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout": 0}, "got timeout=0"),
        ({"hedge": "p50"}, "got hedge='p50'"),
        ({"retries": -1}, "got retries=-1"),
        ({"timeout": None}, "got timeout=None"),
        ({"retries": "2"}, "got retries='2', expected an integer"),
        ({"max_keys": 1.5}, "got max_keys=1.5"),
        ({"idle": "5"}, "got idle='5'"),
        ({"api_key": b"key"}, "api_key is bytes, expected text"),
        ({"rule": "crc"}, "got rule='crc'"),
        ({"shard_down": "zeros"}, "got shard_down='zeros'"),
        ({"api_key": "a\r\nX: b"}, "api_key has characters"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], said: str) -> None:
    from kvtools.errors import UsageError

    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        Options(**options)  # type: ignore[arg-type]


def test_checkers_of_types_know_the_options() -> None:
    told = {name: hint.__forward_arg__ for name, hint in OptionArguments.__annotations__.items()}
    assert told == {field.name: field.type for field in dataclasses.fields(Options)}


def test_a_key_is_in_no_text() -> None:
    assert "secret" not in repr(Options(api_key="secret"))
