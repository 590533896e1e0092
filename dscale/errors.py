"""The exceptions that DScale defines for itself; a bad argument is a plain ValueError."""


class ClosedError(ValueError):
    """An engine was asked for something after `close()`."""


class FetchError(RuntimeError):
    """A file that DScale fetches could not be had, or is not the one it should be."""
