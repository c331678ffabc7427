"""Errors that a user can mend: the command line prints their message alone, without a stack trace."""

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """What was asked cannot be done as asked; the message names the value, the choices and the mend."""

    on_every_rank = True  # processes that train together all come to it


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> UsageError:
    """The error for a name that is not in a table, with the table and the nearest names in its message."""
    choices = sorted(choices)
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return UsageError(f"unknown {kind} {name!r}; known: {', '.join(choices)}.{hint}")
