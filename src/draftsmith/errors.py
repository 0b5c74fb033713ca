"""The one exception that users see as a sentence instead of a traceback."""


class UserError(ValueError):
    """Bad input. The message is one sentence that names the offending value and the mend; the CLI
    prints it and exits 2."""
