"""The package as its users see it."""

import errno
import io
import mmap
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import vdkit

MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("folder")


def run_python(program):
    """What another interpreter does, which may hang or end by a signal."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


def test_reading_and_writing(image):
    with vdkit.open(image, writable=True) as disk:
        assert (disk.size, len(disk), disk.format, disk.writable) == (4 * MIB, 4 * MIB, "qcow2", True)
        assert disk[MIB : MIB + 5] == b"hello" and disk[MIB] == b"h" and disk[-1] == b"\0"
        disk.write(0, bytearray(b"x" * 10))
        disk.write(10, memoryview(b"yz"))
        assert disk[:12] == b"x" * 10 + b"yz"
        disk.write_zeroes(0, 5)
        disk.discard(MIB * 2, MIB)
        disk.flush()
        assert disk[:6] == b"\0" * 5 + b"x"
        with pytest.raises(IndexError):
            disk[4 * MIB]
        with pytest.raises(vdkit.errors.UsageError):
            disk.read(4 * MIB - 1, 2)
        with pytest.raises(ValueError):
            disk[0:10:2]
        disk.resize(5 * MIB)
        with pytest.raises(vdkit.errors.UsageError):
            disk.resize(MIB)
        disk.resize(MIB, shrink=True)
    disk.close()
    with pytest.raises(vdkit.Error):
        disk.read(0, 1)
    assert "closed" in repr(disk)


def test_snapshots(image):
    with vdkit.open(image, writable=True) as disk:
        disk.snapshot("one")
        disk.write(MIB, b"HELLO")
        assert [one["name"] for one in disk.snapshots] == ["one"]
    with vdkit.open(image, snapshot="one") as disk:
        assert disk[MIB : MIB + 5] == b"hello"
    with vdkit.open(image, writable=True) as disk:
        disk.revert("one")
        assert disk[MIB : MIB + 5] == b"hello"
        disk.delete_snapshot("one")
        assert disk.snapshots == [] and disk.bitmaps == []


def test_a_raw_file_object(image):
    with vdkit.open(image) as disk:
        raw = disk.raw(buffering=0)
        assert isinstance(raw, io.RawIOBase) and raw.seekable() and not raw.writable()
        assert raw.seek(-3 * MIB, io.SEEK_END) == MIB and raw.read(5) == b"hello" and raw.tell() == MIB + 5
        buffer = bytearray(7)
        raw.seek(MIB - 1)
        assert raw.readinto(buffer) == 7 and bytes(buffer) == b"\0hello\0"
        raw.seek(0)
        assert len(raw.readall()) == 4 * MIB and raw.read(1) == b""
        buffered = disk.raw()
        buffered.seek(MIB)
        assert buffered.peek(5)[:5] == b"hello"
        with pytest.raises(ValueError):
            raw.seek(-1)
    with vdkit.open(image, writable=True) as disk, disk.raw() as file:
        file.seek(100)
        file.write(b"by the file")
        file.flush()
        assert disk[100:111] == b"by the file"
        raw = disk.raw(buffering=0)
        raw.seek(-3, io.SEEK_END)
        assert raw.write(b"beyond") == 3
        with pytest.raises(vdkit.errors.NoSpaceError):
            raw.write(b"ond")


def test_extents(image):
    with vdkit.open(image) as disk:
        extents = disk.extents()
        assert sum(one.length for one in extents) == disk.size
        data = [one for one in extents if not one.zero]
        assert len(data) == 1 and data[0].offset == MIB and data[0].file == image
        with open(image, "rb") as file:
            file.seek(data[0].file_offset)
            assert file.read(5) == b"hello"
        assert "<svg" in extents._repr_html_() and "extents" in repr(extents)
        assert disk.extents(0, 10)[0].end == 10


def test_bitmap_ranges(image):
    subprocess.run(["qemu-img", "bitmap", "--add", "-g", "64K", image, "since"], check=True)
    with vdkit.open(image, writable=True) as disk:
        assert disk.bitmap_ranges("since") == []
        disk.write(MIB + 100_000, b"x")
        disk.write(3 * MIB - 1, b"yz")  # the end of one piece and the start of the next
        wanted = [vdkit.Range(MIB + 65536, 65536), vdkit.Range(3 * MIB - 65536, 131072)]
        assert disk.bitmap_ranges("since") == wanted and wanted[0].end == MIB + 131072
        with pytest.raises(vdkit.errors.UsageError, match="none"):
            disk.bitmap_ranges("none")
    with vdkit.open(image) as disk:
        assert disk.bitmap_ranges("since") == wanted
    vdkit.create("a.vhd", "vhd", MIB)
    with vdkit.open("a.vhd") as disk, pytest.raises(vdkit.errors.UnsupportedError):
        disk.bitmap_ranges("since")


def test_extents_as_a_strip(image):
    """In a notebook: a rectangle for each extent, as wide as its share of the disk, with its place as title."""
    import xml.etree.ElementTree

    vdkit.create("top.qcow2", "qcow2", backing="a.qcow2", backing_format="qcow2")
    with vdkit.open("top.qcow2", writable=True) as disk:
        disk.write(2 * MIB, bytes([1]) * MIB)
        extents = disk.extents()
    svg, text = extents._repr_html_().split("</svg>")
    cells = list(xml.etree.ElementTree.fromstring(svg + "</svg>"))
    assert len(cells) == len(extents) and text == f"&lt;{len(extents)} extents, 1,052,672 bytes of data&gt;"
    assert abs(sum(float(cell.get("width")) for cell in cells) - 1000) < 1
    (own,) = [cell for cell in cells if cell[0].text == "2,097,152 to 3,145,728: data of image 0"]
    assert (float(own.get("x")), float(own.get("width"))) == (500, 250)
    (below,) = [cell for cell in cells if "data of image 1" in cell[0].text]
    assert len({cell.get("fill") for cell in (own, below, cells[0])}) == 3
    with vdkit.open(image) as disk:
        assert disk.extents(0, 0)._repr_html_() == "<em>no extents</em>"


def test_jobs(image):
    told = []
    done = vdkit.convert(image, "b.vmdk", "vmdk", verify=True, progress=lambda *both: told.append(both))
    assert done.virtual_size == 4 * MIB and told and told[-1][0] <= told[-1][1]
    assert vdkit.compare(image, "b.vmdk")
    vdkit.convert(image, "c.qcow2", "qcow2", compress=True, options={"compression_type": "zstd"})
    with vdkit.open("c.qcow2") as disk:
        assert any(one.compressed for one in disk.extents())
    with open("d.raw", "wb") as file:
        file.truncate(4 * MIB)
    assert not vdkit.compare(image, "d.raw") and vdkit.compare(image, "d.raw").first_difference == MIB
    vdkit.convert(image, "d.raw", "raw", into=True)
    assert vdkit.compare(image, "d.raw", strict=True)
    assert vdkit.check(image) and vdkit.check(image, repair="all").repaired == 0
    assert vdkit.measure(image, "qcow2").required < vdkit.measure(image, "raw").fully_allocated
    verdict = vdkit.inspect(image, "qcow2")
    assert verdict and verdict.format == "qcow2"
    assert not vdkit.inspect(image, "vmdk")
    assert "qcow2" in vdkit.formats()


def test_chains(image):
    vdkit.create("top.qcow2", "qcow2", backing="a.qcow2", backing_format="qcow2")
    info = vdkit.info("top.qcow2")
    assert info.backing_filename == "a.qcow2" and [one.format for one in info.chain] == ["qcow2"] * 2
    with vdkit.open("top.qcow2", writable=True) as disk:
        disk.write(0, b"top")
        assert {one.depth for one in disk.extents() if not one.zero} == {0, 1}
    with vdkit.open("top.qcow2", backing=False) as disk:
        assert disk[MIB : MIB + 5] == b"\0" * 5
    committed = vdkit.commit("top.qcow2")
    assert os.path.samefile(committed.base, "a.qcow2") and committed.emptied
    with vdkit.open(image) as disk:
        assert disk[:3] == b"top"
    assert vdkit.rebase("top.qcow2").backing is None
    assert vdkit.info("top.qcow2").backing_filename is None
    os.mkdir("elsewhere")
    vdkit.create("elsewhere/up.qcow2", "qcow2", backing="../a.qcow2", backing_format="qcow2")
    with pytest.raises(vdkit.errors.RefusedError) as refused:
        vdkit.open("elsewhere/up.qcow2")
    assert refused.value.hint and refused.value.file == "elsewhere/up.qcow2"
    vdkit.open("elsewhere/up.qcow2", folders=["."]).close()


def test_errors(image):
    vdkit.create("sound.raw", "raw", MIB)
    with pytest.raises(vdkit.Error) as missing:
        vdkit.open("missing.qcow2")
    assert missing.value.file == "missing.qcow2" and missing.value.offset is None
    assert missing.value.errno == errno.ENOENT and isinstance(missing.value, FileNotFoundError)
    assert pickle.loads(pickle.dumps(missing.value)).errno == errno.ENOENT
    with pytest.raises(OSError) as looping:
        os.symlink("loop.qcow2", "loop.qcow2")
        vdkit.open("loop.qcow2")
    assert isinstance(looping.value, vdkit.errors.SystemCallError) and looping.value.errno == errno.ELOOP
    assert str(looping.value).startswith("loop.qcow2: cannot open: ")
    with open(image, "r+b") as file:
        file.seek(20)
        file.write(b"\0\0\0\1")
    with pytest.raises(vdkit.errors.CorruptError) as damaged:
        vdkit.open(image)
    assert damaged.value.offset == 20 and damaged.value.errno is None
    again = pickle.loads(pickle.dumps(damaged.value))
    assert (str(again), again.offset) == (str(damaged.value), 20)
    with pytest.raises(vdkit.errors.UsageError):
        vdkit.create("x", "nonsense", MIB)
    with vdkit.open("sound.raw", format="raw") as disk:
        for length in (1, 2 * MIB):
            with pytest.raises(vdkit.errors.UsageError) as beyond:
                disk.read(MIB, length)
            assert beyond.value.file == "sound.raw"
    names = "backing, cache, folders, format, keys, lock, snapshot, writable"
    for opens in (vdkit.open, vdkit.info, vdkit.check):
        with pytest.raises(TypeError, match=f"'nonsense' is no option .* {names}$"):
            opens(image, nonsense=1)
    with pytest.raises(vdkit.errors.UsageError):
        vdkit.open(image, cache="nonsense")
    vdkit.create("locked.qcow2", "qcow2", MIB)
    with vdkit.open("locked.qcow2", writable=True):
        with pytest.raises(vdkit.errors.LockedError):
            vdkit.open("locked.qcow2", writable=True)
        vdkit.open("locked.qcow2", lock=False).close()


class Faulty(io.BytesIO):
    """Fails after so many reads."""

    left = 1000

    def read(self, size=-1):
        self.left -= 1
        if self.left < 0:
            raise OSError("no more reads")
        return super().read(min(size, 1000))  # short reads are allowed


def test_file_objects_as_sources(image):
    with open(image, "rb") as file:
        data = file.read()
    with vdkit.open(Faulty(data)) as disk:
        assert disk[MIB : MIB + 5] == b"hello" and not disk.writable
    faulty = Faulty(data)
    with vdkit.open(faulty) as disk:
        faulty.left = 0
        with pytest.raises(vdkit.Error, match="no more reads"):
            disk.read(MIB, 5)
    vdkit.convert(io.BytesIO(data), "from-memory.raw", "raw")
    assert vdkit.compare("from-memory.raw", image)


def test_file_objects_of_others(image):
    import fsspec
    import zipfile

    with open(image, "rb") as file:
        data = file.read()
    memory = fsspec.filesystem("memory")
    memory.pipe("/disk.qcow2", data)
    with memory.open("/disk.qcow2") as file, vdkit.open(file) as disk:
        assert disk[MIB : MIB + 5] == b"hello"
    with zipfile.ZipFile("z.zip", "w") as archive:
        archive.write(image)
    with zipfile.ZipFile("z.zip") as archive, archive.open(image) as file, vdkit.open(file) as disk:
        assert disk[MIB : MIB + 5] == b"hello"


def test_a_resize_and_writes_wait_for_each_other():
    vdkit.create("a.vhdx", "vhdx", 2048 * MIB, options={"block_size": "1M"})
    with vdkit.open("a.vhdx", writable=True) as disk:

        def work():
            for at in range(0, 2048 * MIB, MIB):
                disk.write(at, b"kept")

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.002)
        disk.resize(200 * 1024 * MIB)  # the table of blocks moves
        thread.join()
    with vdkit.open("a.vhdx") as disk:
        assert all(disk[at : at + 4] == b"kept" for at in range(0, 2048 * MIB, MIB))


def test_many_threads(image):
    bad = []
    with vdkit.open(image, writable=True) as disk:

        def work(number):
            rng = random.Random(number)
            for _ in range(100):
                at = number * 256 * 1024 + rng.randrange(200 * 1024)
                data = bytes([number + 1]) * rng.randrange(1, 9000)
                disk.write(at, data)
                if disk.read(at, len(data)) != data:
                    bad.append((number, at))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not bad and vdkit.check(image)


def test_other_threads_run_meanwhile(image):
    """The interpreter's lock is released while a read waits: here, for a server in this process whose disk
    is a file object, so that it cannot answer otherwise."""
    script = """
import sys, vdkit
with open(sys.argv[1], "rb") as file, vdkit.open(file) as slow, vdkit.serve(slow) as uri:
    with vdkit.open(uri) as disk:
        assert disk[1 << 20 : (1 << 20) + 5] == b"hello"
"""
    subprocess.run([sys.executable, "-c", script, image], check=True, timeout=300)


def test_what_progress_raises_ends_the_job():
    with open("big.raw", "wb") as file:
        for _ in range(200):
            file.write(os.urandom(MIB))

    class Enough(Exception):
        pass

    def progress(done, total):
        raise Enough

    with pytest.raises(Enough):
        vdkit.convert("big.raw", "never.qcow2", "qcow2", compress=True, progress=progress)
    assert not os.path.exists("never.qcow2")


def test_ctrl_c_ends_a_job():
    program = (
        "import os, signal, threading, time, vdkit\n"
        # Whoever runs the tests in the background ignores it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with open('big.raw', 'wb') as file:\n"
        "    for _ in range(400): file.write(os.urandom(1 << 20))\n"
        "threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "try:\n"
        "    vdkit.convert('big.raw', 'c.qcow2', 'qcow2', compress=True, format_='')\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', os.path.exists('c.qcow2'))\n"
    ).replace(", format_=''", "")
    done = run_python(program)
    assert done.stdout == "interrupted False\n", done


def test_ctrl_c_ends_the_wait_for_a_server():
    program = (
        "import os, signal, socket, threading, vdkit\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "mute = socket.create_server(('127.0.0.1', 0))\n"
        "uri = f'nbd://127.0.0.1:{mute.getsockname()[1]}'\n"
        "for wait in (vdkit.open, vdkit.info):\n"
        "    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "    try:\n"
        "        wait(uri)\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted')\n"
    )
    done = run_python(program)
    assert done.stdout == "interrupted\n" * 2, done


def test_a_second_ctrl_c_ends_the_process():
    # The job waits for a server that says nothing, and looks at no signal.
    done = run_python(
        "import os, signal, socket, threading, vdkit\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "mute = socket.create_server(('127.0.0.1', 0))\n"
        "for seconds in (0.2, 0.4, 3):\n"
        "    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "vdkit.check(f'nbd://127.0.0.1:{mute.getsockname()[1]}')\n"
    )
    assert done.returncode == -signal.SIGINT and done.stderr == "", done


def test_what_a_signal_handler_raises_ends_a_creation():
    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    previous = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(Alarm):
            vdkit.create("full.qcow2", "qcow2", 512 * MIB, options={"preallocation": "full"})
            signal.pause()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    # What was not made leaves nothing behind; what was made is whole.
    assert not os.path.exists("full.qcow2") or vdkit.check("full.qcow2")


def test_serving(image):
    sys.path.append("/usr/lib/python3/dist-packages")  # Debian packages it for its own Python alone
    import nbd

    with vdkit.serve(image) as uri:
        handle = nbd.NBD()
        handle.connect_uri(uri)
        assert handle.pread(5, MIB) == b"hello" and handle.is_read_only()
        handle.shutdown()
    with vdkit.serve(image, "tcp:127.0.0.1:0", name="disk", read_only=False) as uri:
        handle = nbd.NBD()
        handle.connect_uri(uri)
        handle.pwrite(b"HELLO", MIB)
        handle.shutdown()
    with vdkit.open(image) as disk:
        assert disk[MIB : MIB + 5] == b"HELLO"


def test_tqdm(image):
    import tqdm

    with tqdm.tqdm(file=io.StringIO()) as bar:
        vdkit.convert(image, "t.raw", "raw", progress=lambda done, total: bar.update(done - bar.n))
        assert bar.n > 0
    with tqdm.tqdm(file=io.StringIO()) as bar:
        vdkit.convert(image, "u.raw", "raw", progress=bar)
        assert isinstance(bar.n, int) and 0 < bar.n <= bar.total


def test_numpy_free_buffers(image):
    """Whatever has the buffer protocol is filled and written."""
    import array

    with vdkit.open(image, writable=True) as disk:
        raw = disk.raw(buffering=0)
        numbers = array.array("I", range(1024))
        raw.write(numbers)
        raw.seek(0)
        back = array.array("I", [0] * 1024)
        assert raw.readinto(back) == 4096 and back == numbers


def test_what_takes_a_disk_keeps_its_writes(image):
    for act in (
        lambda disk: vdkit.convert(disk, "taken.raw", "raw"),
        lambda disk: vdkit.convert(disk, "no/folder", "raw"),
        lambda disk: vdkit.convert(disk, "x", "nonsense"),
        lambda disk: vdkit.measure(disk, "raw"),
        lambda disk: vdkit.serve(disk, "nonsense").__enter__(),
    ):
        text = os.urandom(8)
        with vdkit.open(image, writable=True) as disk:
            disk.write(0, text)
            try:
                act(disk)
            except vdkit.Error:
                pass
        with vdkit.open(image) as disk:
            assert disk[:8] == text


def test_what_takes_a_disk_gets_what_file_objects_have_buffered(image):
    disk = vdkit.open(image, writable=True)
    file = disk.raw()
    file.write(b"buffered")
    vdkit.convert(disk, "b.raw", "raw")
    assert open("b.raw", "rb").read(8) == b"buffered"


def test_closing_closes_each_file_object(image):
    disk = vdkit.open(image, writable=True)
    files = [disk.raw() for _ in range(3)]
    for number, file in enumerate(files):
        file.seek(number * MIB)
        file.write(b"kept")
    disk.resize(2 * MIB, shrink=True)  # the last one's bytes have no place any more
    with pytest.raises((vdkit.Error, OSError, ValueError)):
        disk.close()
    with vdkit.open(image) as disk:
        assert disk[:4] == disk[MIB : MIB + 4] == b"kept"


def test_memory_that_is_no_single_run(image):
    with vdkit.open(image, writable=True) as disk:
        disk.write(0, memoryview(b"a-b-c-")[::2])
        assert disk[:3] == b"abc"
        with pytest.raises(BufferError):
            disk.readinto(0, memoryview(bytearray(6))[::2])


def test_a_disk_is_compared_with_itself_while_another_thread_closes_it(image):
    for _ in range(20):
        disk = vdkit.open(image)
        closing = threading.Thread(target=disk.close)
        closing.start()
        try:
            assert vdkit.compare(disk, disk).identical
        except vdkit.Error as error:
            assert "closed" in str(error)
        closing.join()


def test_a_disk_that_is_not_closed_keeps_its_writes(image):
    disk = vdkit.open(image, writable=True)
    disk.write(0, b"kept")
    with pytest.warns(ResourceWarning):
        del disk
    with vdkit.open(image) as disk:
        assert disk[:4] == b"kept"
    with vdkit.open(image, writable=True) as disk:
        file = disk.raw()
        file.write(b"buffered")
    assert file.closed
    with vdkit.open(image) as disk:
        assert disk[:8] == b"buffered"


def test_closing_waits_for_writes(image):
    for turn in range(12):
        disk, done = vdkit.open(image, writable=True), []

        def work():
            try:
                for at in range(0, MIB, 4096):
                    disk.write(at, bytes([turn + 1]) * 4096)
                    done.append(at)
            except vdkit.Error:
                pass

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.002)
        disk.close()
        thread.join()
        with vdkit.open(image) as again:
            for at in done:
                assert again[at] == bytes([turn + 1]), (turn, at)
        assert vdkit.check(image)


def test_a_server_that_nobody_stops(image, tmp_path):
    import nbd

    with open(image, "rb") as file:
        data = file.read()

    class Slow(io.BytesIO):
        def read(self, size=-1):
            time.sleep(0.01)
            return super().read(size)

    # What the server's threads read takes the interpreter's lock, also while it is dropped.
    slow = vdkit.open(Slow(data))
    server = vdkit._vdkit.serve(slow._disk, f"unix:{tmp_path}/s", "", True, False, None)
    client = nbd.NBD()
    client.connect_uri(server.uri)
    reads = [client.aio_pread(nbd.Buffer(4096), at * 4096) for at in range(16)]
    assert len(reads) == 16
    del server
    writable = vdkit.open(image, writable=True)
    served = vdkit._vdkit.serve(writable._disk, f"unix:{tmp_path}/t", "", False, False, None)
    del served
    with vdkit.open(image, writable=True) as again:
        assert again.size > 0


def test_file_objects_that_misbehave(image):
    with open(image, "rb") as file:
        data = file.read()

    class Ends(io.BytesIO):
        ends = False

        def read(self, size=-1):
            return b"" if self.ends else super().read(size)

    ends = Ends(data)
    with vdkit.open(ends) as disk:
        ends.ends = True
        with pytest.raises(vdkit.Error, match="ended after 0 of"):
            disk.read(MIB, 5)

    class Interrupts(Ends):
        def read(self, size=-1):
            if self.ends:
                raise KeyboardInterrupt
            return super().read(size)

    interrupts = Interrupts(data)
    with vdkit.open(interrupts) as disk:
        interrupts.ends = True
        with pytest.raises(KeyboardInterrupt):
            disk.read(MIB, 5)

    class Names(Ends):
        def read(self, size=-1):
            if self.ends:
                raise ValueError(threading.get_ident())
            return super().read(size)

    # Each thread gets what its own read raised.
    names = Names(data)
    with vdkit.open(names) as disk:
        names.ends = True
        wrong = []

        def read_and_note():
            for _ in range(50):
                with pytest.raises(vdkit.Error) as found:
                    disk.read(MIB, 5)
                if str(found.value.__cause__) != str(threading.get_ident()):
                    wrong.append(found.value.__cause__)

        threads = [threading.Thread(target=read_and_note) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    with pytest.raises(vdkit.errors.UsageError):
        vdkit.open(io.BytesIO(data), writable=True)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("act", ["disk.read(MIB, 5)", "disk.close()", "vdkit.serve(disk, 'unix:x.sock')"])
def test_a_file_object_that_uses_the_disk_over_it(image, tmp_path, compress, act):
    copy = tmp_path / "copy.qcow2"
    vdkit.convert(image, copy, "qcow2", compress=compress)
    done = run_python(
        "import io, vdkit\n"
        "MIB = 1 << 20\n"
        "disk = None\n"
        "class Uses(io.BytesIO):\n"
        "    def read(self, size=-1):\n"
        "        if disk:\n"
        "            assert disk.size and disk.format and not disk.writable\n"
        f"            {act}\n"
        "        return super().read(size)\n"
        f"opened = vdkit.open(Uses(open({str(copy)!r}, 'rb').read()))\n"
        "disk = opened\n"
        "try:\n"
        "    opened.read(MIB, 5)\n"
        "except vdkit.Error as error:\n"
        "    assert isinstance(error.__cause__, vdkit.errors.UsageError), error\n"
        "    assert 'stands on' in str(error.__cause__), error.__cause__\n"
        "disk = None\n"
        "opened.read(MIB, 5)\n"
        "opened.close()\n"
        "print('done')\n"
    )
    assert done.stdout == "done\n", done


def test_a_source_whose_seek_returns_nothing(image):
    class Silent(io.BytesIO):
        def seek(self, offset, whence=0):
            super().seek(offset, whence)

    with open(image, "rb") as file, vdkit.open(image) as disk:
        with vdkit.open(Silent(file.read())) as copy:
            assert copy.read(MIB, 5) == disk.read(MIB, 5)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, vdkit.open(mapped) as copy:
            assert copy.read(MIB, 5) == disk.read(MIB, 5)


def test_numbers_that_are_no_offset(image, tmp_path):
    copy = tmp_path / "copy.qcow2"
    shutil.copy(image, copy)
    with vdkit.open(copy, writable=True) as disk:
        for wrong in (
            lambda: disk.read(-1, 4),
            lambda: disk.read(1 << 70, 1),
            lambda: disk.read(0, -1),
            lambda: disk.readinto(-1, bytearray(4)),
            lambda: disk.write(-1, b"x"),
            lambda: disk.write_zeroes(0, 1 << 64),
            lambda: disk.discard(-1, 1),
            lambda: disk.resize(-1),
            lambda: disk.extents(-1, 1),
            lambda: disk.add_bitmap("marks", -1),
            lambda: vdkit.create(tmp_path / "new.qcow2", "qcow2", -1),
        ):
            with pytest.raises(vdkit.errors.UsageError):
                wrong()
        with pytest.raises(TypeError):
            disk.read("0", 4)
    assert not (tmp_path / "new.qcow2").exists()
    with vdkit.open(copy) as disk:
        for buffering in 0, 4096:
            file = disk.raw(buffering)
            # Buffers refuse more than an offset of a file.
            file.seek((1 << 62) if buffering else (1 << 64))
            assert file.read(5) == b"" and file.readinto(bytearray(5)) == 0


def test_closing_a_disk_closes_its_files(image):
    disk = vdkit.open(image)
    files = [disk.raw(), disk.raw(0)]
    assert files[0].peek(1)
    disk.close()
    for file in files:
        assert file.closed
        with pytest.raises(ValueError):
            file.read(1)


def test_small_things(image):
    with pytest.raises(FileNotFoundError):
        vdkit.open("missing.qcow2")
    with vdkit.open(os.fsencode(image)) as disk:
        with pytest.raises(vdkit.errors.UsageError):
            disk.read(0, 1 << 40)
        raw = disk.raw(buffering=0)
        with pytest.raises(io.UnsupportedOperation):
            raw.write(b"x")
        with pytest.raises(ValueError):
            raw.seek(0, 7)
        raw.close()
        with pytest.raises(ValueError):
            raw.read(1)
    raw.close()
    assert vdkit.info(image) == vdkit.info(image)
    with pytest.raises(TypeError):
        vdkit.open(image, keys="abc")
    with open("guest.raw", "wb") as file:
        file.truncate(MIB)
    with vdkit.open("guest.raw", writable=True, format="raw") as disk, open(image, "rb") as header:
        disk.write(0, header.read(4096))
        disk.flush()
        assert disk.info.format == "raw" and disk.info.virtual_size == MIB


def test_a_disk_that_is_open_at_the_end_keeps_its_writes(image):
    program = (
        "import vdkit\n"
        f"disk = vdkit.open({image!r}, writable=True)\n"
        "closed = vdkit.open('empty.raw')\n"
        "closed.close()\n"
        "disk.write(0, b'at the end')\n"
    )
    with open("empty.raw", "wb") as file:
        file.truncate(MIB)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    with vdkit.open(image) as disk:
        assert disk[:10] == b"at the end"


def test_where_no_thread_can_be_started_jobs_say_so():
    program = (
        "import vdkit\n"
        "for job in (lambda: vdkit.create('no-thread.qcow2', 'qcow2', 1 << 20), lambda: vdkit.info('x')):\n"
        "    try:\n"
        "        job()\n"
        "    except vdkit.errors.SystemCallError as error:\n"
        "        print(error)\n"
    )
    # More than an address space has.
    stacks = {**os.environ, "RUST_MIN_STACK": str(1 << 48)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=stacks)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all(line.startswith("cannot start a thread: ") for line in lines), done
    assert not os.path.exists("no-thread.qcow2")


def test_results_print_in_one_line(image):
    with open(image, "r+b") as file:
        file.truncate(os.path.getsize(image) - 8192)
    checked = vdkit.check(image)
    assert not checked and len(repr(checked)) < 100


def test_the_stub_is_of_the_module():
    """Names and parameters of what is compiled, as type checkers see them."""
    import ast
    import inspect
    import pathlib

    stub = ast.parse(pathlib.Path(vdkit.__file__).with_name("_vdkit.pyi").read_text())
    owners = [(vdkit._vdkit, stub)]
    owners += [(getattr(vdkit._vdkit, one.name), one) for one in stub.body if isinstance(one, ast.ClassDef)]
    for owner, node in owners:
        noted = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
        there = {name for name, one in vars(owner).items() if name[0] != "_" and inspect.isroutine(one)}
        assert there - {"open", "open_file"} == set(noted) - {"open", "open_file"}
        for name, one in noted.items():
            parameters = [it for it in inspect.signature(getattr(owner, name)).parameters if it != "self"]
            assert parameters == [it.arg for it in one.args.args if it.arg != "self"], name


def test_each_function_says_what_it_does():
    for name in vdkit.__all__:
        assert getattr(vdkit, name).__doc__, name
