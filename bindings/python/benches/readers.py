"""Times the package vdkit beside dissect.hypervisor and libyal's modules: the same reads of the same images.

    PYTHONPATH=FOLDER_WITH_VDKIT python3 bindings/python/benches/readers.py [--mib 256] [--rounds 9] [--only WORD]

The images are made in --folder (/dev/shm), so that no disk is measured. In each round every reader runs once,
in turn; a ratio is the median over the rounds of its time by ours. Before, each reader's bytes are compared.
"""

import argparse
import hashlib
import os
import pathlib
import random
import statistics
import tempfile
import time

import pyqcow
import pyvhdi
import pyvmdk
import vdkit
from dissect.hypervisor.disk.qcow2 import QCow2
from dissect.hypervisor.disk.vdi import VDI
from dissect.hypervisor.disk.vhd import VHD
from dissect.hypervisor.disk.vhdx import VHDX
from dissect.hypervisor.disk.vmdk import VMDK

MIB = 1 << 20


def pattern(rng, length):
    """Bytes of which a third can be compressed away, as in programs and texts."""
    words = [rng.randbytes(24) + bytes(8) for _ in range(4096)]
    return b"".join(rng.choices(words, k=length // 32))


def images(folder, mib):
    """(name, format, path) of each image."""
    rng = random.Random(27)
    raw = folder / "disk.raw"
    with raw.open("wb") as file:
        for _ in range(mib):
            file.write(pattern(rng, MIB))
    sparse = folder / "sparse.raw"
    with sparse.open("wb") as file:
        file.truncate(mib * MIB * 4)
        for at in range(0, mib * MIB * 4, 16 * MIB):
            file.seek(at)
            file.write(rng.randbytes(64 << 10))

    def made(name, format, source=raw, compress=False, **options):
        path = folder / f"{name}.{format}"
        vdkit.convert(source, path, format, compress=compress, options=options)
        return name, format, path

    yield made("plain", "qcow2")
    yield made("small-clusters", "qcow2", cluster_size="4K")
    yield made("zlib", "qcow2", compress=True)
    yield made("zstd", "qcow2", compress=True, compression_type="zstd")
    yield made("sparse", "qcow2", source=sparse)
    yield chain(folder, rng, mib)
    yield made("plain", "vmdk")
    yield made("stream", "vmdk", compress=True, subformat="streamOptimized")
    yield made("plain", "vhd")
    yield made("plain", "vhdx")
    yield made("plain", "vdi")


def chain(folder, rng, mib):
    """Three overlays on the plain image, each with a part of the data."""
    below = folder / "plain.qcow2"
    for depth in range(3):
        path = folder / f"chain-{depth}.qcow2"
        vdkit.create(path, "qcow2", backing=below.name, backing_format="qcow2")
        with vdkit.open(path, writable=True) as disk:
            for at in rng.sample(range(mib * 16), mib * 2):
                disk.write(at << 16, pattern(rng, 1 << 16))
        below = path
    return "chain", "qcow2", below


class Libyal:
    """One of libyal's files with what a Python file has."""

    def __init__(self, file, path):
        self._opened, self._file = file, file
        file.open(str(path))
        if hasattr(file, "open_extent_data_files"):
            file.open_extent_data_files()
        self.seek, self.read, self.close = file.seek_offset, file.read_buffer, file.close


def dissect(format, path):
    if format == "vmdk":
        return VMDK(path)
    if format == "qcow2":
        return QCow2(path).open()
    file = path.open("rb")
    return {"vdi": lambda: VDI(file).open(), "vhd": lambda: VHD(file), "vhdx": lambda: VHDX(file)}[format]()


def readers(name, format, path):
    """The readers of an image, ours first: each a function that opens a file object."""
    yield "vdkit", lambda: vdkit.open(path, format=format).raw()
    yield "dissect", lambda: dissect(format, path)
    libyal = {"qcow2": pyqcow.file, "vmdk": pyvmdk.handle, "vhd": pyvhdi.file, "vhdx": pyvhdi.file}.get(format)
    # libqcow knows neither zstd nor, by its Python module, backing files by name.
    if libyal and name not in ("zstd", "chain"):
        yield "libyal", lambda: Libyal(libyal(), path)


def sequential(size, length):
    def run(file):
        done = 0
        while done < size:
            done += len(file.read(length))

    return run


def at_random(size, length, count):
    rng = random.Random(4)
    places = [rng.randrange(size // 4096) * 4096 for _ in range(count)]

    def run(file):
        for at in places:
            file.seek(at)
            file.read(length)

    return run


def digest(file, size):
    """What a reader reads, in pieces of a MiB; or the error."""
    found = hashlib.sha1()
    try:
        for _ in range(0, size, MIB):
            found.update(file.read(MIB))
    except Exception as error:
        return repr(error)
    return found.hexdigest()


def measure(work, openers, rounds):
    """Seconds of each opener by round, opening included."""
    times = {name: [] for name, _ in openers}
    for turn in range(rounds + 1):
        for name, opener in openers:
            begun = time.perf_counter()
            work(opener())
            if turn:
                times[name].append(time.perf_counter() - begun)
    return times


def show(image, work, times):
    ours = times.pop("vdkit")
    line = f"| {image} | {work} | {statistics.median(ours) * 1000:.1f} ms |"
    for name in ("dissect", "libyal"):
        theirs = times.get(name)
        line += f" {statistics.median(a / b for a, b in zip(theirs, ours)):.1f} |" if theirs else " – |"
    print(line, flush=True)


def conversions(name, format, path, size, rounds):
    """A conversion into a raw file: ours, and a loop over the peer's reads."""

    def ours(_):
        vdkit.convert(path, target, "raw")

    def theirs(file):
        with open(target, "wb") as out:
            for _ in range(0, size, MIB):
                out.write(file.read(MIB))

    target = path.with_suffix(".out")
    openers = [("vdkit", lambda: None)] + list(readers(name, format, path))[1:]
    times = {one: [] for one, _ in openers}
    for turn in range(rounds + 1):
        for one, opener in openers:
            target.unlink(missing_ok=True)
            begun = time.perf_counter()
            (ours if one == "vdkit" else theirs)(opener())
            if turn:
                times[one].append(time.perf_counter() - begun)
    target.unlink()
    return times


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--mib", type=int, default=256)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--folder", default="/dev/shm")
    arguments.add_argument("--only", default="", help="only rows with this in their names")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        print(f"vdkit {vdkit.__version__}, {os.cpu_count()} processors, {given.mib} MiB, {given.rounds} rounds")
        print("\n| image | work | vdkit | dissect, times ours | libyal, times ours |\n|---|---|---|---|---|")
        for name, format, path in images(pathlib.Path(folder), given.mib):
            with vdkit.open(path, format=format) as disk:
                size = disk.size
            openers = list(readers(name, format, path))
            found = {reader: digest(opener(), size) for reader, opener in openers}
            for reader in [reader for reader in found if found[reader] != found["vdkit"]]:
                print(f"| {name}.{format} | {reader} reads it wrongly, or not at all: {found[reader]} |")
                openers = [(one, opener) for one, opener in openers if one != reader]
            works = {
                "read(1 MiB), in order": sequential(size, MIB),
                "read(64 KiB), in order": sequential(size, 64 << 10),
                "read(4 KiB), in order": sequential(size // 8, 4096),
                "read(4 KiB), at random": at_random(size, 4096, 4096),
            }
            for work, run in works.items():
                if given.only in f"{name}.{format} {work}":
                    show(f"{name}.{format}", work, measure(run, openers, given.rounds))
            if given.only in f"{name}.{format} convert":
                show(f"{name}.{format}", "convert to raw", conversions(name, format, path, size, given.rounds))


if __name__ == "__main__":
    main()
