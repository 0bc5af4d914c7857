"""The client for code without asyncio: the same client, run on an event loop of its own thread.

Methods, arguments and errors are those of AsyncClient, AsyncAdmin and AsyncStream, and so are their docstrings.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

from tokenmill_client.admin import AsyncAdmin
from tokenmill_client.admin_records import Action
from tokenmill_client.aio import DEFAULT_ADDRESS, AsyncClient
from tokenmill_client.options import GenerateOptions, OutputForm
from tokenmill_client.records import Delta, Output, RequestInfo, Usage
from tokenmill_client.retry import RetryPolicy
from tokenmill_client.security import Tls
from tokenmill_client.stream import AsyncStream

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")


class _LoopThread:
    """An event loop in a daemon thread, so that a program that forgets `close` still ends."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tokenmill-client", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> bool:
        return self._loop.is_closed()

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        if self.stopped:
            coroutine.close()
            raise RuntimeError("This client is closed.")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C ends the wait; the call must end with it. For an error of the call itself this does nothing.
            future.cancel()
            raise

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Blocking(Generic[A]):
    """An asynchronous object and the thread that runs it."""

    def __init__(self, thread: _LoopThread, asynchronous: A) -> None:
        self._thread = thread
        self._async = asynchronous


def _blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[_Blocking[A], P], R]:
    @functools.wraps(method)
    def call(self: _Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._thread.run(method(self._async, *args, **kwargs))

    return call


def _blocking_iterator(
    method: Callable[Concatenate[A, P], AsyncIterator[R]],
) -> Callable[Concatenate[_Blocking[A], P], Iterator[R]]:
    @functools.wraps(method)
    def call(self: _Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        items = method(self._async, *args, **kwargs)

        async def next_or_none() -> R | None:
            return await anext(items, None)

        while (item := self._thread.run(next_or_none())) is not None:
            yield item

    return call


class Stream(_Blocking[AsyncStream], Iterator[Delta]):
    __doc__ = AsyncStream.__doc__

    @property
    def request_id(self) -> str:
        return self._async.request_id

    @property
    def output(self) -> Output:
        """What has come so far, of the first choice."""
        return self._async.output

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What has come so far, of each choice; how many there are is known with the first delta."""
        return self._async.outputs

    @property
    def usage(self) -> Usage:
        """Of all choices, their prompt counted once."""
        return self._async.usage

    result = _blocking(AsyncStream.result)
    results = _blocking(AsyncStream.results)
    close = _blocking(AsyncStream.aclose)

    def __next__(self) -> Delta:
        delta = self._thread.run(self._next_or_none())
        if delta is None:
            raise StopIteration
        return delta

    async def _next_or_none(self) -> Delta | None:
        return await anext(self._async, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Admin(_Blocking[AsyncAdmin]):
    """Found as `Client.admin`."""

    list_requests: Callable[..., Iterator[RequestInfo]] = _blocking_iterator(AsyncAdmin.list_requests)
    get_request = _blocking(AsyncAdmin.get_request)
    cancel_requests = _blocking(AsyncAdmin.cancel_requests)
    update_request = _blocking(AsyncAdmin.update_request)
    retry_request = _blocking(AsyncAdmin.retry_request)
    get_policy = _blocking(AsyncAdmin.get_policy)
    set_policy = _blocking(AsyncAdmin.set_policy)
    reset_policy = _blocking(AsyncAdmin.reset_policy)
    pause_queue = _blocking(AsyncAdmin.pause_queue)
    resume_queue = _blocking(AsyncAdmin.resume_queue)
    drain_executor = _blocking(AsyncAdmin.drain_executor)
    undrain_executor = _blocking(AsyncAdmin.undrain_executor)
    list_actions: Callable[..., Iterator[Action]] = _blocking_iterator(AsyncAdmin.list_actions)
    list_executors = _blocking(AsyncAdmin.list_executors)
    get_load = _blocking(AsyncAdmin.get_load)


class Client(_Blocking[AsyncClient]):
    """AsyncClient without asyncio. Safe to share between threads."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float = 30.0,
        retry: RetryPolicy | None = None,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """Raises OSError or ValueError when the files for TLS or the token are not right."""
        client = AsyncClient(address, timeout=timeout, retry=retry, token=token, tls=tls)
        super().__init__(_LoopThread(), client)
        self.admin = Admin(self._thread, self._async.admin)

    @property
    def address(self) -> str:
        return self._async.address

    def generate(self, prompt: str | None = None, *, output: OutputForm = "both", **options: Unpack[GenerateOptions]) -> Stream:
        return Stream(self._thread, self._async.generate(prompt, output=output, **options))

    def attach(self, request_id: str, next_index: int = 0, *, output: OutputForm = "both", timeout: float | None = None) -> Stream:
        return Stream(self._thread, self._async.attach(request_id, next_index, output=output, timeout=timeout))

    generate.__doc__ = AsyncClient.generate.__doc__
    attach.__doc__ = AsyncClient.attach.__doc__

    submit = _blocking(AsyncClient.submit)
    get_request = _blocking(AsyncClient.get_request)
    cancel = _blocking(AsyncClient.cancel)
    tokenize = _blocking(AsyncClient.tokenize)
    list_models = _blocking(AsyncClient.list_models)
    wait_ready = _blocking(AsyncClient.wait_ready)
    is_serving = _blocking(AsyncClient.is_serving)

    def close(self) -> None:
        """Ends every stream; their requests are cancelled unless detached."""
        if not self._thread.stopped:
            self._thread.run(self._async.close())
            self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
