"""Collect Pillow's warnings about an image, in any number of threads.

`warnings.catch_warnings` does not suit threads: it replaces the filters of the process and later restores those that it
found. If two threads overlap, the second one finds and restores the filters of the first one, which then stay.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()  # of the next three names
_collecting = 0  # number of threads that collect
_filter: Any = None  # the entry of warnings.filters that lets all of Pillow's warnings through
_show_others: Any = None  # the function that _show replaces
_thread = threading.local()  # its attribute `found` is what this thread collects, None between images


@contextmanager
def collected() -> Iterator[list[str]]:
    """Yield a list that gets the warnings of this thread; those of other threads are shown as usual."""
    global _collecting
    found: list[str] = []
    with _lock:
        _collecting += 1
        _install()  # each time, because other code may have replaced the filters since
    _thread.found = found
    try:
        yield found
    finally:
        _thread.found = None
        with _lock:
            _collecting -= 1
            if _collecting == 0:
                _remove()


def _install() -> None:
    global _filter, _show_others
    if [*warnings.filters[:1]] != [_filter]:
        warnings.filterwarnings("always", module=r"PIL\.\w")
        _filter = warnings.filters[0]
    if warnings.showwarning is not _show:
        _show_others, warnings.showwarning = warnings.showwarning, _show


def _remove() -> None:
    if _filter in warnings.filters:
        warnings.filters.remove(_filter)  # type: ignore[attr-defined]  # a list, which typeshed calls a sequence
    if warnings.showwarning is _show:
        warnings.showwarning = _show_others


def _show(message: Warning | str, *args: Any, **keywords: Any) -> None:
    """Collect a warning if this thread collects, else show it: the replacement of warnings.showwarning."""
    found = getattr(_thread, "found", None)
    if found is None:
        _show_others(message, *args, **keywords)
    else:
        found.append(str(message))
