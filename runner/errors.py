"""The one exception that separates what a user can mend from a fault of the program."""


class UsageError(ValueError):
    """what the user can mend; printed as one line, exit code 2"""
