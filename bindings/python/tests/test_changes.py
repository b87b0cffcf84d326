"""Changes of existing images, encrypted images, and servers for others than plain NBD clients."""

import errno
import os
import socket
import struct
import subprocess
import sys

import pytest
import vdkit

pytestmark = pytest.mark.usefixtures("folder")

MIB = 1 << 20
# Keys that take no time.
LUKS = {"encrypt.format": "luks", "encrypt.iter-time": 10}


def test_changing_bitmaps(image):
    with vdkit.open(image, writable=True) as disk:
        disk.add_bitmap("since", 65536)
        disk.write(MIB + 100_000, b"x")
        wanted = [vdkit.Range(MIB + 65536, 65536)]
        assert disk.bitmap_ranges("since") == wanted
        disk.enable_bitmap("since", False)
        disk.write(3 * MIB, b"y")
        assert disk.bitmap_ranges("since") == wanted
        disk.enable_bitmap("since")
        disk.write(3 * MIB, b"z")
        assert [one.offset for one in disk.bitmap_ranges("since")] == [MIB + 65536, 3 * MIB]
        disk.clear_bitmap("since")
        assert disk.bitmap_ranges("since") == []
        with pytest.raises(vdkit.errors.UsageError):
            disk.add_bitmap("since")
        disk.add_bitmap("other")
        disk.remove_bitmap("since")
        assert [one["name"] for one in disk.bitmaps] == ["other"]
    with vdkit.open(image) as disk, pytest.raises(vdkit.errors.ReadOnlyError):
        disk.add_bitmap("more")


def test_amending():
    vdkit.create("old.qcow2", "qcow2", MIB, options={"compat": "0.10"})
    assert vdkit.amend("old.qcow2", {"compat": "1.1"}) == ["compat"]
    assert vdkit.amend("old.qcow2", {"lazy_refcounts": True}) == ["lazy_refcounts"]
    with pytest.raises(vdkit.errors.UsageError):
        vdkit.amend("old.qcow2", {"nonsense": 1})


def test_compacting(image):
    with vdkit.open(image, writable=True) as disk:
        disk.write(2 * MIB, os.urandom(MIB))
        disk.write(2 * MIB, bytes(MIB))
    kept = vdkit.compact(image, zero_scan=False)
    assert kept.json["zero-clusters"] == 0
    told = []
    done = vdkit.compact(image, progress=lambda *both: told.append(both))
    assert done.json["zero-clusters"] >= MIB // 4096 and done.allocated_after < done.allocated_before
    assert told and vdkit.check(image)
    with vdkit.open(image) as disk:
        assert disk[MIB : MIB + 5] == b"hello"


def test_jobs_of_a_disk_tell_their_progress():
    vdkit.create("grows.luks", "luks", MIB, options={"iter-time": 10}, key="first")
    told = []
    with vdkit.open("grows.luks", format="luks", keys=["first"], writable=True) as disk:
        disk.resize(64 * MIB, progress=lambda *both: told.append(both))
        assert disk.size == 64 * MIB and told[-1] == (63 * MIB, 63 * MIB)


def test_encrypted_images():
    with pytest.raises(vdkit.errors.EncryptionKeyError):
        vdkit.create("base.qcow2", "qcow2", MIB, options=LUKS)
    with pytest.raises(vdkit.errors.UsageError):
        vdkit.create("base.qcow2", "qcow2", MIB, key="first")
    assert not os.path.exists("base.qcow2")
    vdkit.create("base.qcow2", "qcow2", MIB, options=LUKS, key="first")
    with vdkit.open("base.qcow2", keys=["first"], writable=True) as disk:
        disk.write(4096, b"secret")
    with pytest.raises(vdkit.errors.EncryptionKeyError), vdkit.open("base.qcow2") as disk:
        disk.read(4096, 6)

    on_base = {"backing": "base.qcow2", "backing_format": "qcow2"}
    size = vdkit.create("over.qcow2", "qcow2", options=LUKS, key="second", keys=["first"], **on_base)
    assert size == MIB
    both = {"keys": ["first", b"second"]}
    target = {"target_key": b"third", "target_backing": "base.qcow2", "target_backing_format": "qcow2"}
    vdkit.convert("over.qcow2", "copy.qcow2", "qcow2", options=LUKS, verify=True, **target, **both)
    assert vdkit.info("copy.qcow2").backing_filename == "base.qcow2"
    with vdkit.open("copy.qcow2", keys=["third", "first"]) as disk:
        assert disk[4096:4102] == b"secret"
        assert all(one.depth == 1 for one in disk.extents() if not one.zero)

    vdkit.create("into.qcow2", "qcow2", MIB, options=LUKS, key="fourth")
    vdkit.convert("over.qcow2", "into.qcow2", into=True, target_key="fourth", **both)
    with vdkit.open("into.qcow2", keys=["fourth"]) as disk:
        assert disk[4096:4102] == b"secret"
    with pytest.raises(vdkit.errors.UsageError):
        vdkit.convert("over.qcow2", "into.qcow2", into=True, options=LUKS, target_key="fourth", **both)


def test_a_key_for_a_target_without_encryption_is_refused(image):
    vdkit.create("plain.raw", "raw", 4 * MIB)
    vdkit.create("plain.qcow2", "qcow2", 4 * MIB)
    for target, format in [("plain.raw", "raw"), ("plain.raw", None), ("plain.qcow2", None)]:
        with pytest.raises(vdkit.errors.UsageError, match="is not encrypted") as refused:
            vdkit.convert(image, target, format, into=True, target_key="secret")
        assert refused.value.file == target
        with vdkit.open(target, format=format or target.split(".")[1]) as disk:
            assert disk[MIB : MIB + 5] == bytes(5)


def active(image, *keys):
    return [(slot.number, slot.opened) for slot in vdkit.key_slots(image, keys=keys) if slot.active]


def test_key_slots():
    vdkit.create("e.qcow2", "qcow2", MIB, options=LUKS, key="first")
    told = []
    quick = {"milliseconds": 10, "progress": lambda *both: told.append(both)}
    assert vdkit.add_key("e.qcow2", "second", keys=["first"], **quick) == 1
    assert told and told[-1][0] <= told[-1][1]
    assert active("e.qcow2", "second") == [(0, False), (1, True)]
    assert vdkit.add_key("e.qcow2", b"third", replace=True, keys=["second"], **quick) == 2
    assert active("e.qcow2", "first", "second") == [(0, True), (2, False)]
    with pytest.raises(vdkit.errors.EncryptionKeyError):
        vdkit.remove_key("e.qcow2", 0, keys=["first"])
    vdkit.remove_key("e.qcow2", 0, keys=["third"])
    assert active("e.qcow2", "third") == [(2, True)]
    with pytest.raises(vdkit.errors.EncryptionKeyError):
        vdkit.add_key("e.qcow2", "more", keys=["first"])
    vdkit.create("plain.qcow2", "qcow2", MIB)
    with pytest.raises(vdkit.errors.UnsupportedError):
        vdkit.key_slots("plain.qcow2")


def test_ctrl_c_ends_a_change_of_keys():
    vdkit.create("e.qcow2", "qcow2", MIB, options=LUKS, key="first")
    program = (
        "import os, signal, threading, vdkit\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "try:\n"
        "    vdkit.add_key('e.qcow2', 'second', keys=['first'], milliseconds=1500)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "interrupted\n", done
    assert active("e.qcow2", "first") == [(0, True)]


@pytest.fixture
def certificates(folder):
    """A folder with an authority, and certificates of it for a server and a client."""
    script = r"""
        set -e
        mkdir pki
        cd pki
        openssl req -x509 -newkey rsa:2048 -nodes -keyout ca-key.pem -out ca-cert.pem -days 2 -subj /CN=ca \
            -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign
        echo 'subjectAltName=DNS:localhost' > ext
        for name in server client; do
            openssl req -newkey rsa:2048 -nodes -keyout $name-key.pem -out $name.csr -subj /CN=localhost
            openssl x509 -req -in $name.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial \
                -out $name-cert.pem -days 2 -extfile ext
        done
    """
    subprocess.run(["bash", "-c", script], check=True, capture_output=True)
    return "pki"


def test_serving_with_tls(image, certificates):
    with vdkit.serve(image, tls=certificates, report_no_space=True) as uri:
        assert uri.startswith("nbds+unix:")
        for other in (uri, uri.replace("nbds", "nbd")):
            with pytest.raises(vdkit.Error):
                vdkit.open(other)
        with vdkit.open(f"{uri}&tls-certificates={certificates}") as disk:
            assert disk[MIB : MIB + 5] == b"hello"
    with pytest.raises(vdkit.errors.NotFoundError) as missing, vdkit.serve(image, tls="nowhere"):
        pass
    assert (missing.value.file, missing.value.errno) == ("nowhere", errno.ENOENT)


def test_serving_a_guest(image):
    with vdkit.serve_vhost_user(image) as uri:
        scheme, path = uri.split(":", 1)
        assert scheme == "vhost-user"
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.connect(path)
            monitor.sendall(struct.pack("<III", 1, 1, 0))  # asks for the features
            reply = monitor.recv(20, socket.MSG_WAITALL)
        features = struct.unpack("<IIIQ", reply)[3]
        assert features >> 5 & 1  # read only
    assert not os.path.exists(path)
    with vdkit.open(image, writable=True) as disk:  # its lock is free
        with pytest.raises(vdkit.Error):
            vdkit.serve_vhost_user(disk, "no/folder/socket").__enter__()
