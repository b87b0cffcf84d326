"""Random images, read by us, by dissect.hypervisor and by libyal's modules.

Where a reader differs, QEMU judges, and the difference must be one of FAULTS, which docs/python.md lists.
"""

import collections
import random
import signal
import subprocess
import warnings
from typing import Callable, NamedTuple

import pyqcow
import pytest
import pyvhdi
import pyvmdk
import vdkit
from dissect.hypervisor.disk.qcow2 import QCow2
from dissect.hypervisor.disk.vdi import VDI
from dissect.hypervisor.disk.vhd import VHD
from dissect.hypervisor.disk.vhdx import VHDX
from dissect.hypervisor.disk.vmdk import VMDK

KIB = 1 << 10
MIB = 1 << 20
QEMU = {"vhd": "vpc"}
READS = 10


class Image:
    """An image and how it was made: ``options`` are those of its format, ``traits`` say what else is special."""

    def __init__(self, format, path, size, options, traits):
        self.format, self.path, self.options, self.traits = format, path, options, traits
        self.size = size

    def __repr__(self):
        options = " ".join(f"{key}={value}" for key, value in sorted(self.options.items()))
        return f"{self.format} {self.size} [{options}] [{' '.join(sorted(self.traits))}]"


def content(rng, length):
    """Bytes: random ones, or such as can be compressed."""
    return rng.randbytes(length) if rng.random() < 0.5 else rng.randbytes(1) * length


def fill(rng, disk, traits):
    """Random writes, zeroes and discards."""
    for _ in range(rng.randrange(12)):
        at = rng.randrange(disk.size)
        length = min(rng.randrange(1, 200 * KIB), disk.size - at)
        act = rng.random()
        if act < 0.7:
            disk.write(at, content(rng, length))
        elif act < 0.85:
            disk.write_zeroes(at, length, unmap=rng.random() < 0.5)
            traits.add("zeroed")
        else:
            disk.discard(at, length)
            traits.add("discarded")


def options_of(rng, format):
    """Options of a format, for us and for qemu-img alike."""
    if format == "qcow2":
        options = {"cluster_size": rng.choice(["512", "4K", "16K", "64K", "256K"])}
        options["compat"] = rng.choice(["0.10", "1.1", "1.1"])
        if options["compat"] == "1.1":
            options["refcount_bits"] = rng.choice(["1", "16", "64"])
            if options["cluster_size"] in ("16K", "64K", "256K") and rng.random() < 0.15:
                options["extended_l2"] = "on"
            if rng.random() < 0.3:
                options["compression_type"] = "zstd"
        return options
    if format == "vmdk":
        kinds = ["monolithicSparse", "monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat"]
        return {"subformat": rng.choice(kinds + ["streamOptimized"])}
    if format == "vhdx":
        return {"subformat": rng.choice(["dynamic", "dynamic", "fixed"]), "block_size": rng.choice(["1M", "2M"])}
    if format == "vhd":
        return {"subformat": rng.choice(["dynamic", "dynamic", "fixed"]), "force_size": "on"}
    return {"static": rng.choice(["on", "off"])}


def random_image(rng, folder, number):
    format = rng.choice(["qcow2", "qcow2", "vmdk", "vmdk", "vhd", "vhdx", "vdi"])
    options, traits = options_of(rng, format), set()
    size = rng.randrange(1, 12 * MIB // 512) * 512
    if rng.random() < 0.5:
        size = size // (64 * KIB) * 64 * KIB + 64 * KIB
    if format == "vhdx":
        size = max(size, 3 * MIB)
    path = folder / f"{number}.{format}"
    if format == "qcow2" and rng.random() < 0.2:
        on_another(rng, path, size, options, traits)
    elif rng.random() < 0.1 or options.get("subformat") == "streamOptimized" or rng.random() < 0.25:
        converted(rng, path, format, size, options, traits)
    else:
        vdkit.create(path, format, size, options=options)
        with vdkit.open(path, writable=True, format=format) as disk:
            fill(rng, disk, traits)
            if format == "qcow2" and options.get("refcount_bits") != "1" and rng.random() < 0.1:
                disk.snapshot("one")
                traits.add("snapshot")
                fill(rng, disk, traits)
    with vdkit.open(path, format=format) as disk:
        return Image(format, path, disk.size, options, traits)


def on_another(rng, path, size, options, traits):
    """An overlay whose backing image is shorter, as long, or longer."""
    base, format = path.with_suffix(".base"), rng.choice(["qcow2", "raw"])
    below = rng.choice([size, max(512, size // 2 // 512 * 512), size + MIB])
    vdkit.create(base, format, below)
    with vdkit.open(base, writable=True, format=format) as disk:
        fill(rng, disk, set())
    vdkit.create(path, "qcow2", size, options=options, backing=base.name, backing_format=format)
    traits.add("backing")
    if below < size:
        traits.add("short backing")
    with vdkit.open(path, writable=True) as disk:
        fill(rng, disk, traits)


def converted(rng, path, format, size, options, traits):
    """An image that a conversion made: ours or QEMU's."""
    raw = path.with_suffix(".raw")
    vdkit.create(raw, "raw", size)
    with vdkit.open(raw, writable=True, format="raw") as disk:
        fill(rng, disk, set())
    compress = options.get("subformat") == "streamOptimized" or (format == "qcow2" and rng.random() < 0.6)
    if compress:
        traits.add("compressed")
    if rng.random() < 0.3:
        traits.add("by qemu-img")
        given = ",".join(f"{key}={value}" for key, value in options.items())
        command = ["qemu-img", "convert", "-f", "raw", "-O", QEMU.get(format, format), "-o", given]
        subprocess.run(command + ["-c"] * compress + [str(raw), str(path)], check=True)
    else:
        vdkit.convert(raw, path, format, options=options, compress=compress)
    raw.unlink()


def dissect(image):
    if image.format == "vmdk":
        return VMDK(image.path)
    if image.format == "qcow2":
        return QCow2(image.path).open()
    file = image.path.open("rb")
    if image.format == "vdi":
        return VDI(file).open()
    return {"vhd": VHD, "vhdx": VHDX}[image.format](file)


class Libyal:
    """One of libyal's files, with what a Python file has."""

    def __init__(self, image):
        kind = {"qcow2": pyqcow.file, "vmdk": pyvmdk.handle, "vhd": pyvhdi.file, "vhdx": pyvhdi.file}[image.format]
        self._files = [kind()]
        self._files[0].open(str(image.path))
        if image.format == "vmdk":
            self._files[0].open_extent_data_files()
        self.seek, self.read = self._files[0].seek_offset, self._files[0].read_buffer


READERS = {"dissect": dissect, "libyal": Libyal}


def readers(image):
    yield "dissect", dissect
    if image.format != "vdi" and "backing" not in image.traits:
        yield "libyal", Libyal


def places(rng, size):
    """Where to read: anywhere, at the ends, and all of a short disk."""
    for _ in range(READS):
        at = rng.choice([0, rng.randrange(size), rng.randrange(size), rng.randrange(size) // 4096 * 4096])
        yield at, min(rng.choice([1, 512, 4096, rng.randrange(1, 300 * KIB), 3 * MIB]), size - at)


def difference(reader, image, ours, places):
    """What a reader says otherwise than we, if anything."""

    def endless(*_):
        raise RuntimeError("does not end")

    signal.signal(signal.SIGVTALRM, endless)
    # Processor time, of which a slow machine takes several times more than a fast one.
    signal.setitimer(signal.ITIMER_VIRTUAL, 5)
    try:
        theirs = reader(image)
        for at, length in places:
            theirs.seek(at)
            found, wanted = theirs.read(length), ours.read(at, length)
            if found != wanted:
                first = next((i for i, (a, b) in enumerate(zip(found, wanted)) if a != b), min(len(found), length))
                return f"{len(found)} of {length} bytes at {at}, other from {at + first} on"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return None


def qemu_agrees(image, ours):
    """Whether QEMU's reader and ours see the same disk."""
    raw = image.path.with_suffix(".judged")
    source = f"driver={QEMU.get(image.format, image.format)},file.filename={image.path}"
    if image.format == "vhd":
        source += ",force_size_calc=current_size"
    command = ["qemu-img", "convert", "--image-opts", source, "-O", "raw", str(raw)]
    subprocess.run(command, check=True)
    same = raw.read_bytes() == ours.read(0, ours.size)
    raw.unlink()
    return same


class Fault(NamedTuple):
    """A difference of a reader that is known: in which images, and how it shows itself."""

    reader: str
    name: str
    """As in docs/python.md."""
    fits: Callable[[Image, str], bool]


def qcow2(image, **options):
    return image.format == "qcow2" and options.items() <= image.options.items()


FAULTS = [
    Fault(
        "dissect",
        "VMDK whose size is no multiple of 8 KiB",
        lambda image, text: image.format == "vmdk" and image.size % 8192 != 0 and "IndexError" in text,
    ),
    Fault(
        "dissect",
        "VDI read across blocks",
        lambda image, text: image.format == "vdi" and image.options["static"] == "off" and "bytes at" in text,
    ),
    Fault(
        "dissect",
        "VHDX read across blocks",
        lambda image, text: image.format == "vhdx" and "bytes at" in text,
    ),
    Fault("dissect", "qcow2 with extended L2 entries", lambda image, _: qcow2(image, extended_l2="on")),
    Fault(
        "dissect",
        "qcow2 of version 2 on a qcow2",
        lambda image, text: qcow2(image, compat="0.10") and "backing" in image.traits and "Invalid name" in text,
    ),
    Fault(
        "dissect",
        "qcow2 on a shorter backing image",
        lambda image, text: qcow2(image) and "short backing" in image.traits and "bytes at" in text,
    ),
    Fault(
        "libyal",
        "qcow2 with zstd",
        lambda image, text: qcow2(image, compression_type="zstd") and "unsupported incompatible" in text,
    ),
    Fault(
        "libyal",
        "qcow2 with extended L2 entries",
        lambda image, text: qcow2(image, extended_l2="on") and "unsupported incompatible" in text,
    ),
    Fault(
        "libyal",
        "qcow2 with compressed clusters",
        lambda image, text: qcow2(image) and "compressed" in image.traits and "bytes at" in text,
    ),
]


def test_random_images_read_the_same(tmp_path, request):
    rng = random.Random(27)
    met, unknown = collections.Counter(), []
    for number in range(request.config.getoption("--images")):
        image = random_image(rng, tmp_path, number)
        with vdkit.open(image.path, format=image.format) as ours:
            found = [
                (name, difference(reader, image, ours, list(places(rng, image.size))))
                for name, reader in readers(image)
            ]
            found = [(name, text) for name, text in found if text]
            if found or number % 50 == 0:
                assert qemu_agrees(image, ours), image
        for name, text in found:
            known = [fault for fault in FAULTS if fault.reader == name and fault.fits(image, text)]
            if known:
                met[f"{name}: {known[0].name}"] += 1
            else:
                unknown.append((name, image, text))
        for path in tmp_path.iterdir():
            path.unlink()
    print(f"\n{number + 1} images; differences that are known: {dict(met)}")
    assert not unknown, "\n".join(f"{name}: {image}: {text}" for name, image, text in unknown)


def small(path, format, size, writes, **options):
    """A small image with a byte at each of the places, written in this order; and its disk's bytes."""
    vdkit.create(path, format, size, options=options)
    wanted = bytearray(size)
    with vdkit.open(path, writable=True, format=format) as disk:
        for number, at in enumerate(writes, 1):
            wanted[at] = number
            disk.write(at, bytes([number]))
    return Image(format, path, size, options, set()), bytes(wanted)


def overlay(path, backing_format, **options):
    """An overlay of 128 KiB on 64 KiB with a byte."""
    base, wanted = small(path.with_suffix(".base"), backing_format, 64 * KIB, [5])
    name = base.path.name
    vdkit.create(path, "qcow2", 128 * KIB, options=options, backing=name, backing_format=backing_format)
    return Image("qcow2", path, 128 * KIB, options, {"backing"}), wanted + bytes(64 * KIB)


def packed(path):
    """Two compressed clusters, each of one value."""
    wanted = b"\1" * 64 * KIB + b"\2" * 64 * KIB
    path.with_suffix(".raw").write_bytes(wanted)
    vdkit.convert(path.with_suffix(".raw"), path, "qcow2", compress=True)
    return Image("qcow2", path, 128 * KIB, {}, {"compressed"}), wanted


# For each fault the smallest image that shows it, and what to read of it.
SMALLEST = {
    "VMDK whose size is no multiple of 8 KiB": (lambda path: small(path, "vmdk", 512, [5]), 0, 512),
    "VDI read across blocks": (lambda path: small(path, "vdi", 2 * MIB, [MIB, 0]), 0, 2 * MIB),
    "VHDX read across blocks": (
        lambda path: small(path, "vhdx", 3 * MIB, [MIB, 0], block_size="1M"), 512 * KIB, MIB,
    ),
    "qcow2 with extended L2 entries": (
        lambda path: small(path, "qcow2", 64 * KIB, [5], extended_l2=True), 0, 64 * KIB,
    ),
    "qcow2 of version 2 on a qcow2": (lambda path: overlay(path, "qcow2", compat="0.10"), 0, 512),
    "qcow2 on a shorter backing image": (lambda path: overlay(path, "raw"), 0, 128 * KIB),
    "qcow2 with zstd": (lambda path: small(path, "qcow2", 64 * KIB, [5], compression_type="zstd"), 0, 512),
    "qcow2 with compressed clusters": (packed, 0, 128 * KIB),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.reader}: {fault.name}")
def test_the_smallest_image_of_a_fault(tmp_path, fault):
    """We read it as it was written, and QEMU agrees. The reader's fault may be mended some day."""
    make, at, length = SMALLEST[fault.name]
    image, wanted = make(tmp_path / "smallest")
    with vdkit.open(image.path, format=image.format) as ours:
        assert ours.read(0, image.size) == wanted and qemu_agrees(image, ours)
        found = difference(READERS[fault.reader], image, ours, [(at, length)])
    if found is None:
        warnings.warn(f"{fault.reader} reads it rightly: take '{fault.name}' out of docs/python.md")
