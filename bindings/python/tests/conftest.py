"""Options of the tests, and what they share."""

import pytest
import vdkit

MIB = 1 << 20


def pytest_addoption(parser):
    parser.addoption("--images", type=int, default=150, help="how many random images other readers read too")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def image(folder):
    vdkit.create("a.qcow2", "qcow2", 4 * MIB, options={"cluster_size": "4K", "lazy_refcounts": True})
    with vdkit.open("a.qcow2", writable=True) as disk:
        disk.write(MIB, b"hello")
    return "a.qcow2"
