"""The gRPC services that others specify and grpcio brings: health (grpc.health.v1) and reflection.

As grpcio brings them, bytes that are no message give UNKNOWN and a traceback, and a client that watches the health
keeps the server from ending until its time of grace is over. Here such bytes give INVALID_ARGUMENT, and streams end
with the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvtools.server.protos import POOL, SERVICES

_HELD_UP = 0.5  # a timer that is so late, in s, was of a loop that did not look at connections either
_TO_BE_TOLD = 0.02  # what those that watch the health get to hear of the end before their streams do, in s


class Health:
    """What is told to those that ask for the health, or watch it."""

    def __init__(self, servicer: Any, states: Any, ending: asyncio.Event) -> None:
        self._servicer = servicer
        self._states = states
        self._ending = ending

    async def tell(self, ready: bool) -> None:
        """Tell whether requests are answered."""
        for service in ("", *SERVICES):
            await self._servicer.set(service, self._states.SERVING if ready else self._states.NOT_SERVING)

    async def end(self) -> None:
        """Tell that they are answered no more, and end the streams."""
        await self._servicer.enter_graceful_shutdown()
        await asyncio.sleep(_TO_BE_TOLD)
        self._ending.set()


async def one_message(requests: AsyncIterator[bytes], context: Any, limit: float) -> bytes:
    """Return the message of a request that has one; ends the request where it is not there in `limit` seconds.

    gRPC itself has no limit for that: half a message would keep a connection, and the server from ending, for ever.
    """
    task = asyncio.current_task()
    assert task is not None
    loop = task.get_loop()
    expired = False
    timer: asyncio.TimerHandle

    def expire() -> None:
        nonlocal expired, timer
        if loop.time() - timer.when() > _HELD_UP:  # so the message may have come, and nobody had looked
            timer = loop.call_later(limit, expire)
            return
        expired = True
        task.cancel()

    timer = loop.call_later(limit, expire)
    try:
        async for message in requests:
            return message
    except asyncio.CancelledError:
        if not expired:
            raise
        if hasattr(task, "uncancel"):
            task.uncancel()
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"the message was not there after {limit:g} s")
    finally:
        timer.cancel()
    return b""  # as grpcio makes it of none, for messages without fields


def add_services(server: Any, limit: float) -> Health:
    """Add both to a server that has not started; messages of requests have to be there in `limit` seconds."""
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

    ending = asyncio.Event()
    adding = _Adding(server, ending, limit)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, adding)
    for module in (health_pb2, reflection_pb2):
        POOL.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection_servicer = reflection.aio.ReflectionServicer(names, pool=POOL)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflection_servicer, adding)
    return Health(servicer, health_pb2.HealthCheckResponse, ending)


class _Adding:
    """Stands for a server where services are added to it."""

    def __init__(self, server: Any, ending: asyncio.Event, limit: float) -> None:
        self._server = server
        self._ending = ending
        self._limit = limit

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._server.add_generic_rpc_handlers(tuple(_Handlers(each, self._ending, self._limit) for each in handlers))

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Do nothing: the generic handlers are all that a server of grpc.aio asks."""


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, handlers: Any, ending: asyncio.Event, limit: float) -> None:
        self._handlers = handlers
        self._ending = ending
        self._limit = limit

    def service(self, details: Any) -> Any:
        found = self._handlers.service(details)
        if found is None:
            return None
        parse, serialize = found.request_deserializer, found.response_serializer
        if found.request_streaming:
            answer = _conversation(found.stream_stream, parse, self._ending)
            return grpc.stream_stream_rpc_method_handler(answer, response_serializer=serialize)
        if found.response_streaming:
            answer = _stream(found.unary_stream, parse, self._ending, self._limit)
            return grpc.stream_stream_rpc_method_handler(answer, response_serializer=serialize)
        answer = _single(found.unary_unary, parse, self._limit)
        return grpc.stream_unary_rpc_method_handler(answer, response_serializer=serialize)


async def _parsed(parse: Callable[[bytes], Any], data: bytes, context: Any) -> Any:
    try:
        return parse(data)
    except (DecodeError, ValueError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is no message of this method")


def _single(method: Callable[..., Any], parse: Callable[[bytes], Any], limit: float) -> Callable[..., Any]:
    async def answer(requests: AsyncIterator[bytes], context: Any) -> Any:
        return await method(await _parsed(parse, await one_message(requests, context, limit), context), context)

    return answer


def _stream(
    method: Callable[..., Any], parse: Callable[[bytes], Any], ending: asyncio.Event, limit: float
) -> Callable[..., Any]:
    async def answer(requests: AsyncIterator[bytes], context: Any) -> None:
        request = await _parsed(parse, await one_message(requests, context, limit), context)
        task = asyncio.ensure_future(method(request, context))
        try:
            await _first(task, ending)
        finally:
            await _cancel(task)

    return answer


def _conversation(
    method: Callable[..., Any], parse: Callable[[bytes], Any], ending: asyncio.Event
) -> Callable[..., Any]:
    async def parsed(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        while True:
            task = asyncio.ensure_future(anext(requests, None))
            if not await _first(task, ending):
                await _cancel(task)
                return
            data = task.result()
            if data is None:
                return
            yield await _parsed(parse, data, context)

    async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async for response in method(parsed(requests, context), context):
            yield response

    return answer


async def _first(task: asyncio.Future[Any], ending: asyncio.Event) -> bool:
    """Wait for a task or the end; tells whether the task is done."""
    end = asyncio.ensure_future(ending.wait())
    try:
        await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        end.cancel()
    return task.done()


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
