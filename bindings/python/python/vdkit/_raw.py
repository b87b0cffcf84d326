"""A disk as a file object."""

from __future__ import annotations

import io
import operator
from typing import TYPE_CHECKING, Any, Optional

from . import errors

if TYPE_CHECKING:
    from . import Disk

# Longer than any buffer, and any disk.
_ALL = (1 << 63) - 1


class RawDisk(io.RawIOBase):
    """A disk as a seekable binary file. Closing it does not close the disk."""

    def __init__(self, disk: Disk) -> None:
        super().__init__()
        self._of = disk
        self._disk = disk._disk
        self._at = 0
        self._writable = disk.writable
        self.name = disk.name

    def _check(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return self._writable

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check()
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._check()
        if whence == io.SEEK_SET and offset >= 0:
            self._at = operator.index(offset)
            return self._at
        if whence not in (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END):
            raise ValueError(f"whence {whence}")
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at}.get(whence)
        base = self._of.size if base is None else base
        if base + offset < 0:
            raise ValueError("a negative offset")
        self._at = base + offset
        return self._at

    def _left(self, length: int) -> int:
        return max(0, min(length, self._of.size - self._at))

    def readinto(self, buffer: Any) -> int:
        self._check()
        if self._at > _ALL:
            return 0
        length = self._disk.readinto(self._at, buffer, _ALL)
        self._at += length
        return length

    def read(self, size: int = -1) -> bytes:
        self._check()
        length = self._left(self._of.size if size is None or size < 0 else size)
        data = self._of.read(self._at, length) if length else b""
        self._at += length
        return data

    def readall(self) -> bytes:
        return self.read()

    def write(self, data: Any) -> int:
        self._check()
        if not self._writable:
            raise io.UnsupportedOperation("not writable")
        self._of._check_process()
        view = memoryview(data).cast("B")
        length = self._left(len(view))
        if length < len(view) and not length:
            raise errors.NoSpaceError(f"{self.name}: the disk ends at {self._of.size}", self.name, self._at)
        self._of.write(self._at, view[:length])
        self._at += length
        return length

    def truncate(self, size: Optional[int] = None) -> int:
        self._check()
        size = self._at if size is None else size
        self._of._check_process()
        self._of.resize(size, shrink=True)
        return size

    def flush(self) -> None:
        # Also from a finalizer, in a child of fork() that has nothing to flush.
        if self._writable and not self._of._is_inherited() and self._of._disk.is_open:
            self._of.flush()


class _ReadAhead(RawDisk):
    """A disk beneath a buffer, which it need not fill: random reads would cost as much as the buffer."""

    _FIRST = 8 << 10
    _PAGE = 4 << 10

    def __init__(self, disk: Disk, buffering: int) -> None:
        super().__init__(disk)
        self._most = buffering
        self._window, self._end = self._FIRST, -1

    def readinto(self, buffer: Any) -> int:
        self._check()
        at = self._at
        if at > _ALL:
            return 0
        if len(buffer) > self._most:
            # Memory of a caller who reads more than the buffer holds.
            length = self._disk.readinto(at, buffer, _ALL)
        else:
            ahead = at == self._end
            self._window = min(self._window * 4, self._most) if ahead else self._FIRST - at % self._PAGE
            length = self._disk.readinto(at, buffer, self._window)
        self._at = self._end = at + length
        return length
