"""The errors and warnings of the package, so that callers can catch them by type.

Bad arguments raise plain ``ValueError`` and ``TypeError``: these types are for the choice of a backend.
"""


class UnknownBackendError(ValueError):
    """A backend was named that does not exist."""


class BackendUnavailableError(RuntimeError):
    """A backend was forced, and cannot run this call; or no backend can."""


class SparseAttnWarning(UserWarning):
    """Base of the package's warnings."""


class FallbackWarning(SparseAttnWarning):
    """The automatic choice landed on something slower than this device deserves."""


class PluginWarning(SparseAttnWarning):
    """A third party's backend could not be announced, and is left out."""
