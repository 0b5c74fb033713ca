"""The one exception that users see as a sentence instead of a traceback, and what others say."""


class UserError(ValueError):
    """Bad input. The message is one sentence that names the offending value and the mend; the CLI
    prints it and exits 2."""


def first_line(error: BaseException) -> str:
    """First line of what an error says; its type where it says nothing."""
    return str(error).strip().split("\n")[0].rstrip(" \r.;") or type(error).__name__
