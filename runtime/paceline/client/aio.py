"""The SDK for asyncio: the methods of `JobClient` and `Job` as coroutines.

The back ends block, so each call runs on a thread of its own and the coroutine waits for it. The
threads are daemons, so they do not keep a program from ending. A canceled call goes on in its
thread until it returns; a canceled iteration ends with the next item.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from queue import SimpleQueue
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from paceline.client.client import JobClient
from paceline.client.job import Job

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
_END = object()


async def in_thread(call: Callable[[], R]) -> R:
    """Run `call` on a new daemon thread and wait for it.

    An exception of `call` is raised here.

    Args:
        call: A blocking function. It is not interrupted if this coroutine is canceled.

    Returns:
        The result of `call`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def work() -> None:
        try:
            result = call()
        except BaseException as error:
            _post(loop, done, error=error)
        else:
            _post(loop, done, result=result)

    threading.Thread(target=work, name="paceline-call", daemon=True).start()
    return await done


def _post(
    loop: asyncio.AbstractEventLoop,
    done: asyncio.Future[Any],
    *,
    result: Any = None,
    error: BaseException | None = None,
) -> None:
    """Set the result or the exception of a future on its loop, unless it was canceled."""

    def settle() -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)


async def each(make: Callable[[], Generator[R]]) -> AsyncGenerator[R]:
    """Yield the items of a blocking generator.

    One daemon thread creates, drives and closes the generator. It computes the next item only when
    that is awaited. An exception of the generator is raised here.

    Args:
        make: Creates the generator.

    Yields:
        The items.
    """
    wanted: SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]] | None]
    wanted = SimpleQueue()

    def work() -> None:
        items = make()
        while (asked := wanted.get()) is not None:
            try:
                _post(*asked, result=next(items, _END))
            except BaseException as error:
                _post(*asked, error=error)
        items.close()

    threading.Thread(target=work, name="paceline-items", daemon=True).start()
    loop = asyncio.get_running_loop()
    try:
        while True:
            done: asyncio.Future[Any] = loop.create_future()
            wanted.put((loop, done))
            if (item := await done) is _END:
                return
            yield item
    finally:
        wanted.put(None)


class _Async(Generic[S]):
    """Base class of the wrappers that turn the methods of a blocking object into coroutines."""

    def __init__(self, blocking: S) -> None:
        self.blocking = blocking

    def __repr__(self) -> str:
        return f"<{type(self).__name__} before {self.blocking!r}>"


def _call(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[_Async[S], P], Coroutine[Any, Any, R]]:
    @functools.wraps(method)
    async def call(before: _Async[S], /, *words: P.args, **named: P.kwargs) -> R:
        return await in_thread(lambda: method(before.blocking, *words, **named))

    return call


def _items(
    method: Callable[Concatenate[S, P], Generator[R]],
) -> Callable[Concatenate[_Async[S], P], AsyncGenerator[R]]:
    @functools.wraps(method)
    def items(before: _Async[S], /, *words: P.args, **named: P.kwargs) -> AsyncGenerator[R]:
        return each(lambda: method(before.blocking, *words, **named))

    return items


def _job(
    method: Callable[Concatenate[S, P], Job],
) -> Callable[Concatenate[_Async[S], P], Coroutine[Any, Any, AsyncJob]]:
    @functools.wraps(method)
    async def job(before: _Async[S], /, *words: P.args, **named: P.kwargs) -> AsyncJob:
        return AsyncJob(await in_thread(lambda: method(before.blocking, *words, **named)))

    return job


class AsyncJob(_Async[Job]):
    """A `Job` for asyncio: its methods are coroutines, and `logs` is for `async for`."""

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.blocking.name

    status = _call(Job.status)
    wait = _call(Job.wait)
    logs = _items(Job.logs)
    events = _call(Job.events)
    rounds = _call(Job.rounds)
    scale = _call(Job.scale)
    suspend = _call(Job.suspend)
    resume = _call(Job.resume)
    delete = _call(Job.delete)


class AsyncJobClient(_Async[JobClient]):
    """A `JobClient` for asyncio that wraps one: `AsyncJobClient(JobClient.local())`."""

    train = _job(JobClient.train)
    submit = _job(JobClient.submit)
    list_jobs = _call(JobClient.list_jobs)
    get_job = _job(JobClient.get_job)
    get_job_logs = _items(JobClient.get_job_logs)
    get_job_events = _call(JobClient.get_job_events)
    wait_for_job_status = _call(JobClient.wait_for_job_status)
    delete_job = _call(JobClient.delete_job)
