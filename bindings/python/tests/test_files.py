"""Disks and the files beneath them: shared file objects, names, files that are renamed; progress of copies."""

import io
import os
import threading
import time

import pytest
import vdkit

pytestmark = pytest.mark.usefixtures("folder")

MIB = 1 << 20


class Interleaved(io.BytesIO):
    """Lets other threads run between a seek and the read that follows it."""

    def seek(self, *where):
        at = super().seek(*where)
        time.sleep(0.0005)
        return at


def test_two_threads_convert_from_one_file_object(folder):
    data = b"".join(number.to_bytes(4, "big") * 128 for number in range(8 * MIB // 512))
    file = Interleaved(data)
    failures = []

    def convert(name):
        try:
            with vdkit.open(file, format="raw") as disk:
                vdkit.convert(disk, name, "raw")
        except Exception as error:  # shown by the assertion
            failures.append(error)

    names = ["one.raw", "two.raw"]
    threads = [threading.Thread(target=convert, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for name in names:
        with open(name, "rb") as made:
            assert made.read() == data, f"{name} is another disk"


def test_a_file_object_that_opens_a_disk_over_itself():
    class Opens(io.BytesIO):
        opens = False

        def read(self, size=-1):
            if self.opens:
                vdkit.open(self, format="raw")
            return super().read(size)

    file = Opens(bytes(MIB))
    with vdkit.open(file, format="raw") as disk:
        file.opens = True
        with pytest.raises(vdkit.Error) as found:
            disk.read(0, 512)
        assert isinstance(found.value.__cause__, vdkit.errors.UsageError)
        file.opens = False
        # Another disk over it is opened as before.
        with vdkit.open(file, format="raw") as other:
            assert other.read(0, 512) == disk.read(0, 512)


@pytest.mark.parametrize("name", [b"not-utf8-\xff.raw", os.fsdecode(b"not-utf8-\xff.raw")])
def test_a_file_object_whose_name_is_not_utf8(name):
    with open(name, "wb") as file:
        file.write(b"x" * MIB)
    with open(name, "rb") as file, vdkit.open(file, format="raw") as disk:
        assert disk.read(0, 1) == b"x"
        assert disk.name.encode() == b"not-utf8-\\udcff.raw"


def test_a_disk_describes_the_file_that_it_has_open(image, tmp_path, monkeypatch):
    vdkit.create("other.qcow2", "qcow2", 64 * MIB)
    with vdkit.open(image, writable=True) as disk:
        disk.add_bitmap("own")
        os.replace("other.qcow2", image)
        assert disk.info.virtual_size == 4 * MIB and disk.info.filename == image
        assert [one["name"] for one in disk.bitmaps] == ["own"]
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert disk.info.virtual_size == 4 * MIB and disk.info.format == "qcow2"
        disk.resize(8 * MIB)
        assert disk.info.virtual_size == 8 * MIB
    with pytest.raises(vdkit.errors.UsageError):
        disk.info


def test_a_disk_over_a_file_object_describes_itself(image):
    with open(image, "rb") as file, vdkit.open(file) as disk:
        found = disk.info
    named = vdkit.info(image)
    assert (found.format, found.virtual_size, found.cluster_size) == ("qcow2", 4 * MIB, 4096)
    assert (found.bitmaps, found.snapshots) == (named.bitmaps, named.snapshots)


def test_the_images_of_a_chain_are_described(image):
    vdkit.create("over.qcow2", "qcow2", backing=image, backing_format="qcow2")
    with vdkit.open("over.qcow2") as disk:
        assert disk.info == vdkit.info("over.qcow2")
        assert [one.filename for one in disk.info.chain] == ["over.qcow2", image]


def test_progress_of_a_verified_copy_goes_one_way(image):
    told = []
    vdkit.convert(image, "v.raw", "raw", verify=True, progress=lambda *both: told.append(both))
    assert told == sorted(told) and told[-1] == (8 * MIB, 8 * MIB)
