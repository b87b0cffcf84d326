"""Disk images (qcow2, raw, VMDK, VHD, VHDX, VDI and others): read, write, convert, check, serve.

>>> import vdkit
>>> vdkit.create("first.qcow2", "qcow2", 1 << 20)
1048576
>>> with vdkit.open("first.qcow2", writable=True) as disk:
...     disk.write(512, b"hello")
...     disk[512:517]
b'hello'
>>> vdkit.convert("first.qcow2", "second.vmdk", "vmdk").virtual_size
1048576

Images are untrusted: opening one follows references only within its own folder, unless ``folders`` allows
others. Errors are those of :mod:`vdkit.errors`. Functions that may wait release the interpreter's lock;
Ctrl-C ends a job of the main thread. A disk that is not closed is flushed when it is collected, with a
:class:`ResourceWarning`; a child of ``fork`` opens its own disks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import math
import operator
import os
import shutil
import tempfile
import warnings
import weakref
from typing import (
    TYPE_CHECKING,
    Any,
    BinaryIO,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Protocol,
    Sequence,
    TypedDict,
    Union,
    cast,
)

from . import _vdkit, errors
from ._raw import _ALL, RawDisk, _ReadAhead
from ._reports import (
    Checked,
    Committed,
    Compacted,
    Compared,
    Converted,
    Extent,
    Extents,
    Info,
    KeySlot,
    Measured,
    Range,
    Rebased,
    Verdict,
)
from ._vdkit import __version__
from .errors import Error

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Bar",
    "Checked",
    "Committed",
    "Compacted",
    "Compared",
    "Converted",
    "Disk",
    "Error",
    "Extent",
    "Extents",
    "Info",
    "KeySlot",
    "Measured",
    "Opening",
    "Range",
    "RawDisk",
    "Rebased",
    "Verdict",
    "add_key",
    "amend",
    "check",
    "commit",
    "compact",
    "compare",
    "convert",
    "create",
    "errors",
    "formats",
    "info",
    "inspect",
    "key_slots",
    "measure",
    "open",
    "rebase",
    "remove_key",
    "serve",
    "serve_vhost_user",
]

Path = Union[str, "os.PathLike[str]"]
Options = Dict[str, Any]
Source = Union[Path, "Disk", BinaryIO]
Key = Union[bytes, str]

# Extents that are asked for at a time.
_EXTENTS = 1 << 20


class Bar(Protocol):
    """A progress bar, such as one of ``tqdm``."""

    n: float
    total: Optional[float]

    def update(self, n: float) -> Any:
        """Adds to ``n``."""


Progress = Union[Callable[[int, int], Any], Bar]


class _Opening(TypedDict, total=False):
    """What all functions that open images take, whatever their own parameters are called."""

    writable: bool
    cache: Optional[str]
    """"writeback", "none", ..."""
    snapshot: Optional[str]
    """Opens an internal snapshot, by name or id."""
    keys: Sequence[Key]
    """For encrypted images."""
    folders: Optional[Sequence[Path]]
    """Folders that references may lead to, beside the image's own."""
    lock: bool
    """False for an image that another process writes."""


class _OpeningOver(_Opening, total=False):
    backing: Union[Path, None, bool]
    """A path instead of the backing image that the image names, or False for none."""


class _OpeningAs(_Opening, total=False):
    format: Optional[str]
    """The image's format; otherwise it is found."""


class Opening(_OpeningOver, _OpeningAs, total=False):
    """How images are opened: what :func:`open` takes by name, and all that open images."""


def _key(key: Key) -> List[int]:
    return list(key.encode() if isinstance(key, str) else key)


def _opening(others: _Opening) -> Dict[str, Any]:
    opening = cast(Opening, others)
    known = Opening.__annotations__
    for name in opening:
        if name not in known:
            raise TypeError(f"{name!r} is no option of opening an image; there are {', '.join(sorted(known))}")
    backing, folders, keys = opening.get("backing"), opening.get("folders"), opening.get("keys", ())
    if isinstance(keys, (str, bytes)):
        raise TypeError("keys is a list of passphrases")
    return {
        "writable": opening.get("writable", False),
        "format": opening.get("format"),
        "cache": opening.get("cache"),
        "snapshot": opening.get("snapshot"),
        "backing": None if backing is None or isinstance(backing, bool) else os.fspath(backing),
        "alone": backing is False,
        "keys": [_key(key) for key in keys],
        "folders": None if folders is None else [os.fspath(folder) for folder in folders],
        "lock": opening.get("lock", True),
    }


def _pairs(options: Optional[Options]) -> List[str]:
    def text(value: Any) -> str:
        if isinstance(value, bool):
            return "on" if value else "off"
        return str(value).replace(",", ",,")

    return [f"{key}={text(value)}" for key, value in (options or {}).items()]


def _wanted(
    options: Optional[Options],
    key: Optional[Key],
    backing: Optional[str],
    backing_format: Optional[str],
    opening: _Opening,
) -> Dict[str, Any]:
    """What a new image shall be."""
    return {
        "options": _pairs(options),
        "key": None if key is None else _key(key),
        "backing": backing,
        "backing_format": backing_format,
        "opening": _opening(opening),
    }


class Disk:
    """An open disk: an image with those that it stands on. Made by :func:`open`; may be used from many
    threads at once."""

    def __init__(self, disk: _vdkit.Disk, name: str) -> None:
        self._disk = disk
        self._pid = os.getpid()
        self._files: "weakref.WeakSet[Any]" = weakref.WeakSet()
        self.name = name
        """The path, or the name of the file object."""

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:
        # Also at the interpreter's end, when modules are gone. A child of fork() leaves its parent's
        # disks alone.
        disk = getattr(self, "_disk", None)
        if disk is None or self._is_inherited(getpid) or not disk.is_open:
            return
        try:
            if disk.writable:
                warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self)
        finally:
            self.close()

    def _is_inherited(self, getpid: Callable[[], int] = os.getpid) -> bool:
        return self._pid != getpid()

    def _check_process(self) -> None:
        if self._is_inherited():
            raise errors.UsageError(f"{self.name}: the parent of this process opened it", self.name)

    def __enter__(self) -> "Disk":
        return self

    def __exit__(self, *_exception: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        try:
            return f"<vdkit.Disk {self.name!r}, {self.format}, {self.size:,} bytes>"
        except Error:
            return f"<vdkit.Disk {self.name!r}, closed>"

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, range_: Union[slice, int]) -> bytes:
        """Bytes by a slice, such as ``disk[0:512]``, or one of them."""
        if not isinstance(range_, slice):
            number = operator.index(range_)
            at = number + self.size if number < 0 else number
            if not 0 <= at < self.size:
                raise IndexError(range_)
            return self.read(at, 1)
        start, stop, step = range_.indices(self.size)
        if step != 1:
            raise ValueError("a disk has no steps")
        return self.read(start, max(stop - start, 0))

    @property
    def size(self) -> int:
        """Bytes of the disk."""
        return self._disk.size

    @property
    def format(self) -> str:
        """The format of the image."""
        return self._disk.format

    @property
    def writable(self) -> bool:
        return self._disk.writable

    @property
    def info(self) -> Info:
        """What the image's header says: that of the file that is open, whatever has its name by now."""
        return Info._of(json.loads(self._disk.describe()))

    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes; a range beyond the end is an error."""
        return self._disk.read(offset, length)

    def readinto(self, offset: int, buffer: Any) -> int:
        """Fills a writable buffer, such as a ``bytearray`` or a NumPy array, as far as the disk has bytes;
        returns how many. The interpreter copies nothing."""
        return self._disk.readinto(offset, buffer, _ALL)

    def write(self, offset: int, data: Any) -> None:
        """Writes all of ``data``, bytes or any other buffer; durable after the next :meth:`flush`."""
        self._disk.write(offset, data)

    def write_zeroes(self, offset: int, length: int, unmap: bool = True) -> None:
        """Makes bytes read as zero, without writing them where the format can say so."""
        self._disk.write_zeroes(offset, length, unmap)

    def discard(self, offset: int, length: int) -> None:
        """Frees space, as a hint: the bytes then read as zero or as before."""
        self._disk.discard(offset, length)

    def flush(self) -> None:
        """Makes every write that has returned durable."""
        self._disk.flush()

    def resize(self, size: int, shrink: bool = False, *, progress: Optional[Progress] = None) -> None:
        """Changes the size; durable on return. Other threads may use the disk meanwhile: they see its old
        size until then. ``shrink`` allows losing what lies beyond. ``progress``: as for :func:`convert`."""
        self._disk.resize(size, shrink, progress)

    def extents(self, offset: int = 0, length: Optional[int] = None) -> Extents:
        """Where each run of bytes lies."""
        end = self.size if length is None else offset + length
        rows: List[Extent] = []
        while offset < end:
            rows += [Extent(*row) for row in self._disk.extents(offset, end - offset, _EXTENTS)]
            offset = rows[-1].end
        return Extents(rows)

    @property
    def snapshots(self) -> List[Dict[str, Any]]:
        """The internal snapshots."""
        return json.loads(self._disk.snapshots())

    def snapshot(self, name: str, *, progress: Optional[Progress] = None) -> None:
        """Takes an internal snapshot; durable on return."""
        self._disk.snapshot("create", name, progress)

    def revert(self, name: str, *, progress: Optional[Progress] = None) -> None:
        """Takes the disk back to a snapshot, by name or id."""
        self._disk.snapshot("apply", name, progress)

    def delete_snapshot(self, name: str, *, progress: Optional[Progress] = None) -> None:
        """Deletes a snapshot, by name or id."""
        self._disk.snapshot("delete", name, progress)

    @property
    def bitmaps(self) -> List[Dict[str, Any]]:
        """The dirty bitmaps."""
        return self.info.bitmaps

    def add_bitmap(self, name: str, granularity: Optional[int] = None) -> None:
        """Adds a dirty bitmap, which marks what is written from now on; durable on return. ``granularity``:
        bytes of the disk for each of its bits, a power of two."""
        self._disk.bitmap("add", name, granularity)

    def clear_bitmap(self, name: str) -> None:
        """Clears a dirty bitmap."""
        self._disk.bitmap("clear", name, None)

    def enable_bitmap(self, name: str, enabled: bool = True) -> None:
        """Lets a dirty bitmap mark what is written from now on, or no more."""
        self._disk.bitmap("enable" if enabled else "disable", name, None)

    def remove_bitmap(self, name: str) -> None:
        """Removes a dirty bitmap."""
        self._disk.bitmap("remove", name, None)

    def bitmap_ranges(self, name: str) -> List[Range]:
        """What a dirty bitmap marks, in order: the ranges that were written since it was added or cleared."""
        return [Range(*row) for row in self._disk.bitmap_ranges(name)]

    def raw(self, buffering: int = 1 << 18) -> Union["RawDisk", io.BufferedIOBase]:
        """The disk as a seekable binary file object, for everything that reads one.

        The buffer of ``buffering`` bytes is filled as far as reads go on in order: a read elsewhere begins with
        8 KiB. 0 gives the file without a buffer.
        """
        file: Any
        if not buffering:
            file = RawDisk(self)
        else:
            buffered = io.BufferedRandom if self.writable else io.BufferedReader
            file = buffered(_ReadAhead(self, buffering), buffering)
        self._files.add(file)
        return file

    def close(self) -> None:
        """Flushes and closes, also the file objects that :meth:`raw` gave; may be called again. A child of
        ``fork`` closes nothing of its parent's."""
        if self._is_inherited():
            return
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._disk.close)
            # Each is closed whatever the others raise.
            for file in list(self._files):
                last_first.callback(file.close)

    def _flush_files(self) -> None:
        """For who takes the disk over: what file objects have buffered is written."""
        for file in list(self._files):
            if not file.closed:
                file.flush()


def open(source: Union[Path, BinaryIO], **opening: Unpack[Opening]) -> Disk:
    """Opens an image and what it stands on.

    ``source``: a path, an NBD URI, or a seekable binary file object (which is read only). By name:
    ``writable``; ``format`` (otherwise it is found); ``cache`` ("writeback", "none", ...); ``snapshot``, by
    name or id; ``backing``, a path instead of the backing image that the image names, or False for none;
    ``keys`` for encrypted images; ``folders`` that references may lead to, beside the image's own; ``lock``
    (False for an image that another process writes).
    """
    if hasattr(source, "read") and hasattr(source, "seek"):
        if opening.get("writable"):
            raise errors.UsageError("a disk over a file object is read only")
        name = _label(source)
        return Disk(_vdkit.Disk.open_file(source, name, _opening(opening)), name)
    path = os.fsdecode(source)
    return Disk(_vdkit.Disk.open(path, _opening(opening)), path)


def _label(file: Any) -> str:
    """The name of a file object, for messages: printable also where a file's name is not UTF-8."""
    name = getattr(file, "name", type(file).__name__)
    text = os.fsdecode(name) if isinstance(name, bytes) else str(name)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@contextlib.contextmanager
def _opened(source: Source, **opening: Unpack[Opening]) -> Iterator[Disk]:
    if isinstance(source, Disk):
        if opening:
            raise errors.UsageError("an open disk has no more options")
        yield source
    else:
        with open(source, **opening) as disk:
            yield disk


def formats() -> List[str]:
    """The names of all formats."""
    return _vdkit.formats()


def create(
    path: Path,
    format: str,
    size: Optional[int] = None,
    *,
    options: Optional[Options] = None,
    key: Optional[Key] = None,
    backing: Optional[str] = None,
    backing_format: Optional[str] = None,
    replace: bool = False,
    progress: Optional[Progress] = None,
    **opening: Unpack[_Opening],
) -> int:
    """Makes a new image, and returns the bytes of its disk.

    ``options``: those of the format, such as ``{"cluster_size": "4K", "lazy_refcounts": True}``. ``key``: the
    passphrase of an encrypted image, such as a qcow2 image with ``{"encrypt.format": "luks"}``. ``backing``:
    the image that it stands on, by a name from its own folder; its size is taken if none is given. By name,
    for opening the backing image: ``keys``, ``folders``, ``lock``. Nothing is left behind after an error.
    """
    wanted = _wanted(options, key, backing, backing_format, opening)
    return _vdkit.create(os.fspath(path), format, size, wanted, replace, progress)


def convert(
    source: Source,
    target: Path,
    format: Optional[str] = None,
    *,
    options: Optional[Options] = None,
    target_key: Optional[Key] = None,
    target_backing: Optional[str] = None,
    target_backing_format: Optional[str] = None,
    compress: bool = False,
    verify: bool = False,
    into: bool = False,
    progress: Optional[Progress] = None,
    **opening: Unpack[_OpeningOver],
) -> Converted:
    """Copies a disk into a new image of another format, or ``into`` an existing image, file or device.

    ``source``: a path, a file object, or a disk (which is closed afterwards); ``opening`` as for
    :func:`open`. ``target_key``: the passphrase of an encrypted target. ``target_backing``: an image of the
    source's chain, by a name from the target's folder; only the differences to it are written. ``progress`` is
    called with the bytes done and all bytes, or is a bar of ``tqdm``; what it raises ends the job.
    """
    with _opened(source, **opening) as disk:
        disk._flush_files()
        wanted = _wanted(options, target_key, target_backing, target_backing_format, opening)
        report = _vdkit.convert(
            disk._disk, os.fspath(target), format, wanted, compress, verify, into, progress
        )
    found = json.loads(report)
    return Converted(found["virtual-size"], found["seconds"], found)


def check(
    path: Path, *, repair: str = "", progress: Optional[Progress] = None, **opening: Unpack[Opening]
) -> Checked:
    """Checks an image's metadata; ``repair``: "leaks", or "all" that can be repaired."""
    found = json.loads(_vdkit.check(os.fspath(path), _opening(opening), repair, progress))
    fixed = (found["corruptions-fixed"], found["leaks-fixed"])
    return Checked(
        found["corruptions"] - fixed[0],
        found["leaks"] - fixed[1],
        sum(fixed),
        found["findings"],
        found,
    )


def compare(
    a: Source, b: Source, *, strict: bool = False, progress: Optional[Progress] = None
) -> Compared:
    """Compares what two disks hold; ``strict``: different sizes differ."""
    with _opened(a) as one, _opened(b) as other:
        found = json.loads(_vdkit.compare(one._disk, other._disk, strict, progress))
    return Compared(found["identical"], found["first-difference"], found["sizes-differ"], found)


def measure(
    source: Source,
    format: str,
    *,
    options: Optional[Options] = None,
    progress: Optional[Progress] = None,
    **opening: Unpack[_OpeningOver],
) -> Measured:
    """Tells how many bytes an image of a format would have."""
    with _opened(source, **opening) as disk:
        found = json.loads(_vdkit.measure(disk._disk, format, _pairs(options), progress))
    return Measured(found["required"], found["fully-allocated"], found)


def commit(
    overlay: Path,
    *,
    to: Optional[Path] = None,
    force: bool = False,
    progress: Optional[Progress] = None,
    **opening: Unpack[Opening],
) -> Committed:
    """Writes an overlay's data into the image that it stands on, or ``to`` a deeper one of its chain."""
    base = None if to is None else os.fspath(to)
    found = json.loads(_vdkit.commit(os.fspath(overlay), _opening(opening), base, force, progress))
    return Committed(found["base"], found["emptied"], found["seconds"], found)


def rebase(
    overlay: Path,
    backing: Optional[str] = None,
    backing_format: Optional[str] = None,
    *,
    header_only: bool = False,
    force: bool = False,
    progress: Optional[Progress] = None,
    **opening: Unpack[_OpeningAs],
) -> Rebased:
    """Puts an overlay on another image, by a name from its folder, or on none, and keeps what its disk
    holds (unless ``header_only``)."""
    report = _vdkit.rebase(
        os.fspath(overlay), _opening(opening), backing, backing_format, header_only, force, progress
    )
    found = json.loads(report)
    return Rebased(found["backing"], found["copied"], found["seconds"], found)


def compact(
    path: Path,
    *,
    zero_scan: bool = True,
    progress: Optional[Progress] = None,
    **opening: Unpack[Opening],
) -> Compacted:
    """Makes an image smaller on the host, in place; can be repeated after an interruption. ``zero_scan``
    reads its data too, and frees what is zero."""
    found = json.loads(_vdkit.compact(os.fspath(path), _opening(opening), zero_scan, progress))
    return Compacted(found["allocated-before"], found["allocated-after"], found)


def amend(
    path: Path, options: Options, *, progress: Optional[Progress] = None, **opening: Unpack[Opening]
) -> List[str]:
    """Changes options of an existing image, such as ``{"lazy_refcounts": True}``; returns the names of those
    that changed. Can be repeated after an interruption."""
    report = _vdkit.amend(os.fspath(path), _opening(opening), _pairs(options), progress)
    return json.loads(report)["changed"]


def key_slots(
    path: Path, *, progress: Optional[Progress] = None, **opening: Unpack[Opening]
) -> List[KeySlot]:
    """The key slots of an encrypted image, and which of them the ``keys`` open. ``progress``, here and in the
    functions below: the slots that were tried, and all."""
    found = json.loads(_vdkit.keys(os.fspath(path), _opening(opening), progress))
    return [
        KeySlot(one["slot"], one["active"], one["iterations"], one["slot"] in found["opened"])
        for one in found["slots"]
    ]


def add_key(
    path: Path,
    key: Key,
    *,
    replace: bool = False,
    milliseconds: int = 2000,
    progress: Optional[Progress] = None,
    **opening: Unpack[Opening],
) -> int:
    """Adds a passphrase to an encrypted image that one of the ``keys`` opens, and returns its slot; durable on
    return. ``replace``: the slots of that one of the ``keys`` are wiped then. ``milliseconds``: how long
    trying the new passphrase takes on this machine."""
    report = _vdkit.key_add(
        os.fspath(path), _opening(opening), _key(key), milliseconds, replace, progress
    )
    return json.loads(report)["added-slot"]


def remove_key(
    path: Path,
    slot: int,
    *,
    force: bool = False,
    progress: Optional[Progress] = None,
    **opening: Unpack[Opening],
) -> None:
    """Wipes a key slot. One of the ``keys`` must open another slot, unless ``force``."""
    _vdkit.key_remove(os.fspath(path), _opening(opening), slot, force, progress)


def info(path: Path, **opening: Unpack[Opening]) -> Info:
    """What the headers of an image and of those beneath it say. No data is read."""
    return Info._of(json.loads(_vdkit.describe(os.fspath(path), _opening(opening))))


def inspect(path: Path, format: Optional[str] = None, *, strict: bool = False) -> Verdict:
    """Judges an image from a stranger, within limits of time and memory, without opening what it names.

    ``format``: what it must be. ``strict``: findings that only warn refuse it too.
    """
    found = json.loads(_vdkit.inspect(os.fspath(path), format, strict))
    return Verdict(found["verdict"] == "accept", found.get("format"), found["findings"], found)


@contextlib.contextmanager
def serve(
    source: Source,
    address: Optional[str] = None,
    *,
    name: str = "",
    read_only: bool = True,
    tls: Optional[Path] = None,
    report_no_space: bool = False,
    drain: float = 1.0,
    **opening: Unpack[Opening],
) -> Iterator[str]:
    """Serves a disk to NBD clients while the block runs; gives the URI.

    ``address``: "unix:PATH" or "tcp:HOST:PORT"; without one, a Unix socket in a new folder. ``tls``: a folder
    with server-cert.pem and server-key.pem, as libvirt and QEMU name them; clients without TLS are refused
    then, and with ca-cert.pem there also those without a certificate of that authority. A write for which no
    space is left waits until there is some, or fails if ``report_no_space``. A disk that is given is closed
    afterwards. At the end, requests that have begun have ``drain`` seconds. A child of ``fork`` that leaves the
    block ends nothing.
    """
    # Also a TypeError for what is no number at all: at the end of the block it would leave the server running.
    if math.isnan(drain):
        raise errors.UsageError("drain is no number of seconds")
    with contextlib.ExitStack() as stack:
        address = address or f"unix:{_new_socket(stack)}"
        disk = _to_serve(stack, source, read_only, opening)
        folder = None if tls is None else os.fspath(tls)
        server = _vdkit.serve(disk, address, name, read_only, report_no_space, folder)
        _stop_last(stack, server, drain)
        yield server.uri


@contextlib.contextmanager
def serve_vhost_user(
    source: Source,
    path: Optional[Path] = None,
    *,
    read_only: bool = True,
    report_no_space: bool = False,
    **opening: Unpack[Opening],
) -> Iterator[str]:
    """Serves a disk as a virtio disk of one virtual machine while the block runs; gives "vhost-user:PATH".

    Its monitor (QEMU, Cloud Hypervisor, crosvm, ...) connects by vhost-user-blk to the Unix socket ``path``;
    without one, to a socket in a new folder. Otherwise as :func:`serve`; at the end, requests that have begun
    are waited for.
    """
    with contextlib.ExitStack() as stack:
        path = _new_socket(stack) if path is None else os.fspath(path)
        disk = _to_serve(stack, source, read_only, opening)
        server = _vdkit.serve_vhost_user(disk, path, read_only, report_no_space)
        _stop_last(stack, server, 0.0)
        yield server.uri


def _stop_last(stack: contextlib.ExitStack, server: _vdkit.Server, drain: float) -> None:
    # Also if the block is never left: once the interpreter has begun to end, threads that read from a
    # file object would wait for it for ever.
    stop = functools.partial(server.stop, drain)
    atexit.register(stop)
    stack.callback(atexit.unregister, stop)
    stack.callback(stop)


def _new_socket(stack: contextlib.ExitStack) -> str:
    folder = tempfile.mkdtemp(prefix="vdkit-")
    owner = os.getpid()

    def remove() -> None:
        # A child of fork() that leaves the block would take the socket from its parent's clients.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    stack.callback(remove)
    return f"{folder}/socket"


def _to_serve(
    stack: contextlib.ExitStack, source: Source, read_only: bool, opening: Opening
) -> _vdkit.Disk:
    if not (read_only or isinstance(source, Disk)):
        opening = {"writable": True, **opening}
    disk = stack.enter_context(_opened(source, **opening))
    disk._flush_files()
    return disk._disk
