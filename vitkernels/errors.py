"""Errors that a user can fix: the command line prints their message alone, without a traceback."""

import difflib
from collections.abc import Iterable

# Exit status of a run that was interrupted after writing a checkpoint and can be resumed (EX_TEMPFAIL of sysexits.h).
EXIT_INTERRUPTED = 75
_MOST_LISTED = 30  # number of names that an error message lists if it can suggest a few of them


class UsageError(ValueError):
    """A request that cannot be carried out as stated; the message names the value, the choices and the fix.

    Args:
        message: the sentence to show. Its wording may change between versions.
        code: a stable dotted name of the failure, such as "attention.shape", for programs and tests to match.
        fields: the values that the failure is about, by name; as stable as the code.
    """

    on_every_rank = True  # all processes of a distributed run raise it together

    def __init__(self, message: str = "", *, code: str = "usage", **fields):
        self.args = (message,)  # as super().__init__(message) does, which torch.compile cannot trace
        self.code = code
        self.fields = fields


def unknown_name(kind: str, name: object, choices: Iterable[str]) -> UsageError:
    """Return the error for a name, or another object, that is not among `choices`.

    The message suggests the nearest, and lists all choices, or counts them if there are many.
    """
    choices = sorted(choices)
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.5) if isinstance(name, str) else []
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    if near and len(choices) > _MOST_LISTED:
        message = f"unknown {kind} {name!r}.{hint} {len(choices)} names are known."
    else:
        known = f"known: {', '.join(choices)}" if choices else "no known name resembles it"
        message = f"unknown {kind} {name!r}; {known}.{hint}"
    return UsageError(message, code="unknown_name", kind=kind, name=name, choices=choices, near=near)
