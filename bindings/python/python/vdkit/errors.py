"""What goes wrong, as exceptions."""

from __future__ import annotations

from typing import Optional


class Error(Exception):
    """An error of vdkit.

    ``file`` is the file that it is about, ``offset`` the byte offset in that file, ``hint`` what can be
    done about it, ``errno`` the number of the system's error behind it; each is None if it is not known.
    """

    def __init__(
        self,
        message: str,
        file: Optional[str] = None,
        offset: Optional[int] = None,
        hint: Optional[str] = None,
        errno: Optional[int] = None,
    ) -> None:
        super().__init__(message)
        self.file = file
        self.offset = offset
        self.hint = hint
        self.errno = errno

    def __reduce__(self):
        return type(self), (str(self), self.file, self.offset, self.hint, self.errno)


class NotFoundError(Error, FileNotFoundError):
    """A file, or one that an image names, is not there."""


class SystemCallError(Error, OSError):
    """A call of the system failed, as ``errno`` says: no permission, an I/O error, ..."""


class UsageError(Error, ValueError):
    """The call makes no sense: an unknown name, a range beyond the disk."""


class CorruptError(Error):
    """The image is damaged, or its chain is incomplete."""


class LimitError(Error):
    """It needs more memory or work than the limits allow; the image may be sound."""


class UnsupportedError(Error):
    """The image uses a feature that is not supported, or its format lacks one."""


class EncryptionKeyError(Error):
    """The image is encrypted, and there is no key for it or a wrong one."""


class ReadOnlyError(Error):
    """It was opened for reading only."""


class RefusedError(Error, PermissionError):
    """The policy for references forbids it, or other images would be damaged."""


class LockedError(Error, BlockingIOError):
    """Another process uses the file."""


class NoSpaceError(Error, OSError):
    """No space is left."""


class CancelledError(Error):
    """The job was cancelled."""
