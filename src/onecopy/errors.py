"""The errors onecopy raises, by what the reader can do about them.

Each also derives from the built-in that a PyTorch user would catch in the same place.
"""


class OnecopyError(Exception):
    """Base of every error raised by onecopy.

    A traceback ends with the name under which docs/trouble.md says more: the class's own, in small letters.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"More: docs/trouble.md#{type(self).__name__.lower()}")


class SettingsError(OnecopyError, ValueError):
    """A setting that cannot work, found before any work starts. The message says what would."""


class UsageError(OnecopyError, RuntimeError):
    """A call that a sharded model cannot honour. The message says which call can."""


class NeedsWholeError(UsageError):
    """An operation needs the whole parameter where only this rank's slice is at hand."""


class MismatchError(OnecopyError, RuntimeError):
    """Ranks were given different models or different settings. Raised alike on every rank."""


class CollectiveError(OnecopyError, RuntimeError):
    """A collective failed: a rank died or its connection broke. Names the collective, its unit and the ranks."""


class CollectiveTimeout(CollectiveError):
    """A collective did not finish in time. Names the collective, its unit and the ranks that are missing."""


class RecoveryError(OnecopyError, RuntimeError):
    """A lost rank cannot be brought back from its peers' memory. Says what nobody holds any more."""


class OffloadError(OnecopyError, OSError):
    """Something could not be moved off the device. Names the directory, the bytes and the system's reason."""


class CheckpointError(OnecopyError, RuntimeError):
    """A checkpoint could not be saved or loaded. Raised alike on every rank; earlier checkpoints are untouched."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete or its bytes changed. The message names it and what is wrong with it."""


class NotFiniteError(OnecopyError, ArithmeticError):
    """Losses, gradients, weights or optimizer states hold nan or inf. Names the first of them, and the rank."""


class WriteError(OnecopyError, OSError):
    """A file that a run leaves behind could not be written: a disk is full, for instance. Names the file."""


class MissingPackageError(OnecopyError, ImportError):
    """A package that an integration works with is not installed. Names the extra that brings it."""
