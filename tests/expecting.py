"""Expect errors by their stable code and fields, and leave their wording free."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vitkernels.errors import UsageError


@contextmanager
def error(code: str, kind: type[UsageError] = UsageError, **fields) -> Iterator[pytest.ExceptionInfo]:
    """Expect `kind` with this code, and with these values among its fields."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code, f"code {caught.value.code!r}: {caught.value}"
    found = {name: caught.value.fields.get(name) for name in fields}
    assert found == fields, f"fields {caught.value.fields}: {caught.value}"
