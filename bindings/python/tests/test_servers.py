"""Servers: who ends them, and what is refused before one starts."""

import os
import signal
import subprocess
import sys

import pytest
import vdkit

MIB = 1 << 20


def child(act):
    """Whether `act` returns in a child of fork, which then ends without leaving the parent's blocks."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # who waits here for a thread of the parent waits for ever
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_that_drops_a_file_writes_nothing_of_its_parents(image):
    with vdkit.open(image, writable=True) as disk:
        file, plain = disk.raw(), disk.raw(0)
        file.write(b"kept")
        disk.write(2 * MIB, b"not flushed")
        with open(image, "rb") as stored:
            before = stored.read()

        def drop():
            plain.close()
            with pytest.raises(vdkit.errors.UsageError, match="the parent of this process"):
                file.close()
            with pytest.raises(vdkit.errors.UsageError, match="the parent of this process"):
                disk.flush()
            disk.close()

        assert child(drop)
        with open(image, "rb") as stored:
            assert stored.read() == before
        file.flush()
        assert disk[:4] == b"kept"
    assert not vdkit.check(image).corruptions


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_changes_no_snapshots_and_bitmaps_of_its_parents(image, tmp_path):
    with vdkit.open(image, writable=True) as disk:
        disk.snapshot("kept")
        disk.add_bitmap("marks")

        def change():
            for act in (
                lambda: disk.snapshot("new"),
                lambda: disk.revert("kept"),
                lambda: disk.delete_snapshot("kept"),
                lambda: disk.add_bitmap("new"),
                lambda: disk.clear_bitmap("marks"),
                lambda: disk.enable_bitmap("marks", False),
                lambda: disk.remove_bitmap("marks"),
            ):
                with pytest.raises(vdkit.errors.UsageError, match="the parent of this process"):
                    act()
            assert [one["name"] for one in disk.snapshots] == ["kept"]
            assert disk.bitmap_ranges("marks") == []
            with pytest.raises(vdkit.errors.UsageError, match="the parent of this process"):
                vdkit._vdkit.serve(disk._disk, f"unix:{tmp_path}/s", "", False, False, None)

        assert child(change)
        disk.write(3 * MIB, b"more")
    assert not os.path.exists(f"{tmp_path}/s")
    checked = vdkit.check(image)
    assert not checked.corruptions and not checked.leaks
    with vdkit.open(image) as disk:
        assert [one["name"] for one in disk.snapshots] == ["kept"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("serve", [vdkit.serve, vdkit.serve_vhost_user])
def test_a_child_that_leaves_the_block_ends_no_server(image, serve):
    serving = serve(image)
    uri = serving.__enter__()
    socket = uri.split("socket=")[-1].replace("vhost-user:", "")
    assert os.path.exists(socket), uri
    assert child(lambda: serving.__exit__(None, None, None))
    assert os.path.exists(socket)
    if serve is vdkit.serve:
        with vdkit.open(uri) as disk:
            assert disk[MIB : MIB + 5] == b"hello"
    serving.__exit__(None, None, None)
    assert not os.path.exists(os.path.dirname(socket))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_that_collects_a_server_does_not_end_it(image, tmp_path):
    disk = vdkit.open(image)
    servers = [vdkit._vdkit.serve(disk._disk, f"unix:{tmp_path}/s", "", True, False, None)]
    uri = servers[0].uri
    assert child(servers.clear)
    with vdkit.open(uri) as disk:
        assert disk[MIB : MIB + 5] == b"hello"
    servers[0].stop(1.0)
    assert not os.path.exists(f"{tmp_path}/s")


def test_a_time_that_is_none_is_refused_before_anything_is_served(image, tmp_path):
    for drain, error in [("x", TypeError), (None, TypeError), (float("nan"), ValueError)]:
        with pytest.raises(error), vdkit.serve(image, f"unix:{tmp_path}/d", drain=drain):
            pytest.fail("served")
        assert not os.path.exists(f"{tmp_path}/d")


def test_progress_that_cannot_be_told_is_refused_before_a_job_begins(image):
    disk = vdkit.open(image)
    for job in (
        lambda: vdkit.create("new.raw", "raw", MIB, progress=5),
        lambda: vdkit.convert(image, "new.raw", "raw", progress="x"),
        lambda: vdkit.convert(disk, "new.raw", "raw", progress=[]),
        lambda: vdkit.check(image, repair="all", progress=object()),
    ):
        with pytest.raises(TypeError, match="progress"):
            job()
        assert not os.path.exists("new.raw")
    assert disk[MIB : MIB + 5] == b"hello"
    disk.close()


SERVED = """
import io, subprocess, sys, vdkit
# A copy of its bytes keeps the interpreter's lock, for which all other threads wait meanwhile.
serving = vdkit.serve(vdkit.open(io.BytesIO(bytes(64 << 20)), format="raw"))
uri = serving.__enter__() + "&reconnect=0"
client = subprocess.Popen([sys.executable, "-c", sys.argv[1], uri], stdout=subprocess.PIPE)
client.stdout.readline()
"""
CLIENT = """
import sys, threading, vdkit
disk = vdkit.open(sys.argv[1], format="raw")
def reads():
    try:
        while True:
            disk.read(0, 32 << 20)
            print("reads", flush=True)
    except (vdkit.Error, OSError):
        pass
for _ in range(6):
    threading.Thread(target=reads).start()
"""


def test_a_server_that_is_not_left_ends_with_its_program():
    # Its threads need the interpreter, which they cannot have once that has begun to end.
    for _ in range(2):
        subprocess.run([sys.executable, "-c", SERVED, CLIENT], check=True, timeout=60)
