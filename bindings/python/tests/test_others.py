"""Other people's readers of partitions and file systems take our file object; so does NumPy our bytes."""

import io
import subprocess

import numpy
import pytest
import vdkit

MIB = 1 << 20
# More than a buffer of the file object holds, and no multiple of anything.
LETTER = b"a file of several clusters\n" * 30000


@pytest.fixture
def content(tmp_path):
    folder = tmp_path / "content"
    (folder / "etc").mkdir(parents=True)
    (folder / "etc" / "hostname").write_text("of-vdkit\n")
    (folder / "etc" / "os-release").write_text('ID=vdkit\nNAME="A guest of vdkit"\n')
    (folder / "etc" / "letter").write_bytes(LETTER)
    # What makes a folder a Linux system for dissect.target.
    for name in ("var", "opt", "usr"):
        (folder / name).mkdir()
    return folder


def ext4(folder, image):
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", str(folder), str(image), "8M"], check=True)


def ntfs(folder, image):
    with image.open("wb") as file:
        file.truncate(8 * MIB)
    subprocess.run(["mkfs.ntfs", "-q", "-F", "-f", str(image)], check=True, capture_output=True)
    letter = folder / "etc" / "letter"
    subprocess.run(["ntfscp", "-q", str(image), str(letter), "letter"], check=True, capture_output=True)


def packed(tmp_path, raw, **options):
    """The disk as a compressed image."""
    image = tmp_path / "fs.qcow2"
    vdkit.convert(raw, image, "qcow2", compress=True, options=options)
    return image


def test_ext4(tmp_path, content):
    from dissect.extfs import ExtFS

    ext4(content, tmp_path / "fs.raw")
    with vdkit.open(packed(tmp_path, tmp_path / "fs.raw")) as disk:
        assert ExtFS(disk.raw()).get("etc/letter").open().read() == LETTER


def test_ntfs_in_a_partition(tmp_path, content):
    from dissect.ntfs import NTFS
    from dissect.volume.disk import Disk

    ntfs(content, tmp_path / "fs.raw")
    whole = tmp_path / "disk.raw"
    whole.write_bytes(bytes(MIB) + (tmp_path / "fs.raw").read_bytes() + bytes(MIB))
    subprocess.run(["sfdisk", "-q", str(whole)], input=b"label: gpt\nstart=2048, size=16384\n", check=True)
    with vdkit.open(packed(tmp_path, whole, compression_type="zstd", cluster_size="4K")) as disk:
        (partition,) = Disk(disk.raw()).partitions
        assert partition.offset == MIB
        assert NTFS(partition.open()).mft.get("letter").open().read() == LETTER


def test_a_whole_system(tmp_path, content):
    from dissect.target import Target
    from dissect.target.containers.raw import RawContainer

    ext4(content, tmp_path / "fs.raw")
    with vdkit.open(packed(tmp_path, tmp_path / "fs.raw")) as disk:
        target = Target()
        target.disks.add(RawContainer(disk.raw()))
        target.apply()
        assert target.hostname == "of-vdkit" and target.version.strip() == "A guest of vdkit"
        assert target.fs.path("/etc/letter").read_bytes() == LETTER


def test_numpy(tmp_path):
    path = tmp_path / "n.qcow2"
    vdkit.create(path, "qcow2", 4 * MIB)
    numbers = numpy.arange(MIB // 4, dtype="<u4").reshape(512, 512)
    with vdkit.open(path, writable=True) as disk:
        disk.write(MIB, numbers)
        back = numpy.zeros_like(numbers)
        assert disk.readinto(MIB, back) == MIB and (back == numbers).all()
        # What the disk has, and no more.
        assert disk.readinto(4 * MIB - 8, back) == 8 and disk.readinto(4 * MIB, back) == 0
        with pytest.raises((ValueError, BufferError)):
            disk.readinto(MIB, back[:, ::2])
        with pytest.raises((TypeError, BufferError)):
            disk.readinto(MIB, bytes(4))
        with pytest.raises(TypeError):
            disk.readinto(MIB, None)
        # What is not one run of bytes is copied.
        for scattered in numbers.T, numbers[:, ::2]:
            disk.write(0, scattered)
            assert disk[: scattered.nbytes] == scattered.tobytes()
        disk.write_zeroes(0, MIB)
        file = disk.raw()
        file.seek(MIB)
        assert file.readinto(back) == MIB and (back == numbers).all()
        assert (numpy.frombuffer(disk[MIB : 2 * MIB], "<u4") == numbers.ravel()).all()
        # A part of an array, by a view.
        part = memoryview(back).cast("B")[4096:8192]
        disk.readinto(0, part)
        assert not back.ravel()[1024:2048].any() and back.ravel()[2048] == 2048


def test_the_buffer_is_filled_as_reads_go_on(tmp_path):
    """Whatever the order of reads, a buffered file gives what an unbuffered one does."""
    import random

    rng = random.Random(5)
    raw = tmp_path / "a.raw"
    data = rng.randbytes(MIB + 333)
    raw.write_bytes(data + bytes(-len(data) % 512))
    with vdkit.open(raw, format="raw") as disk:
        for buffering in (1, 1000, 1 << 14, 1 << 18):
            ours, plain = disk.raw(buffering), io.BytesIO(raw.read_bytes())
            for _ in range(300):
                if rng.random() < 0.5:
                    at = rng.randrange(MIB + 2000)
                    assert ours.seek(at) == plain.seek(at)
                length = rng.choice([0, 1, 511, 4096, 4097, 1 << 14, 1 << 18, rng.randrange(MIB)])
                assert ours.read(length) == plain.read(length) and ours.tell() == plain.tell()
                if rng.random() < 0.2:
                    assert ours.readline() == plain.readline()


@pytest.mark.parametrize("compression", ["zlib", "zstd"])
def test_long_reads_of_compressed_images(tmp_path, compression):
    """Several threads decompress: every byte comes to its place, wherever the read begins."""
    raw = tmp_path / "a.raw"
    data = b"".join(number.to_bytes(4, "big") * 16 for number in range(MIB * 3 // 64)) + bytes(512)
    raw.write_bytes(data)
    options = {"compression_type": compression}
    vdkit.convert(raw, tmp_path / "a.qcow2", "qcow2", compress=True, options=options)
    with vdkit.open(tmp_path / "a.qcow2") as disk:
        for at in (0, 1, 65535, 65536, 100_000, 2 * MIB - 7):
            for length in (128 << 10, (128 << 10) + 1, 300_001, MIB, len(data)):
                length = min(length, len(data) - at)
                assert disk.read(at, length) == data[at : at + length], (at, length)
        with pytest.raises(vdkit.errors.UsageError):
            disk.read(MIB, len(data))
        with pytest.raises(vdkit.errors.UsageError):
            disk.read(1 << 62, 1)
    # A damaged cluster in another thread's share is an error, and no panic.
    with vdkit.open(tmp_path / "a.qcow2") as disk:
        at = disk.extents()[30].file_offset
    with (tmp_path / "a.qcow2").open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * 64)
    with vdkit.open(tmp_path / "a.qcow2") as disk:
        with pytest.raises(vdkit.errors.CorruptError):
            disk.read(0, len(data))
