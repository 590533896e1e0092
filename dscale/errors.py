"""The exceptions that DScale defines for itself, and one that is raised in several places; a bad
argument is a plain ValueError."""


class ClosedError(ValueError):
    """An engine was asked for something after `close()`, or in a fork of its process."""


class FetchError(RuntimeError):
    """A file that DScale fetches could not be had, or is not the one it should be."""


def not_finite(tokens: int) -> ArithmeticError:
    """Why a request fails whose logits behind so many tokens are not finite."""
    return ArithmeticError(
        f"model: expected finite logits, got NaN or infinity behind {tokens} tokens"
    )
