"""Other people's readers of disk images agree, and their readers of file systems take our file object."""

import random
import subprocess

import vdkit
from dissect.hypervisor.disk.qcow2 import QCow2
from dissect.hypervisor.disk.vdi import VDI
from dissect.hypervisor.disk.vhdx import VHDX
from dissect.hypervisor.disk.vhd import VHD
from dissect.hypervisor.disk.vmdk import VMDK

READERS = {"qcow2": QCow2, "vdi": VDI, "vhdx": VHDX, "vhd": VHD, "vmdk": VMDK}
KIB = 1 << 10


def streams(format, path):
    """Dissect's reader of an image, as a file object."""
    reader = READERS[format]
    if format == "vmdk":
        return reader(path)
    opened = reader(path.open("rb"))
    return opened.open() if hasattr(opened, "open") else opened


def random_image(rng, format, path):
    options = {}
    if format == "qcow2":
        options = {"cluster_size": rng.choice(["4K", "64K"]), "compat": rng.choice(["0.10", "1.1"])}
    size = vdkit.create(str(path), format, rng.randrange(1, 64) * 64 * KIB, options=options)
    with vdkit.open(path, writable=True, format=format) as disk:
        for _ in range(rng.randrange(20)):
            at = rng.randrange(size)
            disk.write(at, rng.randbytes(min(rng.randrange(1, 70 * KIB), size - at)))
    return size


def test_random_images_read_the_same(tmp_path):
    rng = random.Random(27)
    for turn in range(60):
        format = rng.choice(sorted(READERS))
        path = tmp_path / f"{turn}.{format}"
        size = random_image(rng, format, path)
        theirs = streams(format, path)
        with vdkit.open(path, format=format) as ours:
            for _ in range(10):
                at = rng.randrange(size)
                length = min(rng.randrange(1, 100 * KIB), size - at)
                theirs.seek(at)
                assert theirs.read(length) == ours.read(at, length), (turn, format, at, length)


def test_a_file_system_by_our_file_object(tmp_path):
    from dissect.extfs import ExtFS

    folder = tmp_path / "content"
    folder.mkdir()
    (folder / "hello.txt").write_text("hello from ext4\n")
    subprocess.run(
        ["mke2fs", "-q", "-t", "ext4", "-d", str(folder), str(tmp_path / "fs.raw"), "8M"], check=True
    )
    vdkit.convert(tmp_path / "fs.raw", tmp_path / "fs.qcow2", "qcow2", compress=True)
    with vdkit.open(tmp_path / "fs.qcow2") as disk:
        fs = ExtFS(disk.raw())
        assert fs.get("hello.txt").open().read() == b"hello from ext4\n"
