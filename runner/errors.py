"""The one exception that separates what a user can mend from a fault of the program, and paths as users write them."""

from pathlib import Path


class UsageError(ValueError):
    """what the user can mend; printed as one line, exit code 2"""


def user_path(text: str, name: str) -> Path:
    """A path with `~` expanded; `name` is the flag and its value, for the message.

    Raises:
        UsageError: `~user` names nobody.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{name}: there is no such user; write the path out") from error
