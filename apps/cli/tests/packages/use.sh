# Runs inside a Debian, as root: installs the packages, and uses each as its users do.
set -euxo pipefail
dpkg --install /root/packages/*.deb
mkdir -p /root/work
cd /root/work

bash /root/source/scripts/readme-examples /usr/bin/vdkit
vdkit create disk.qcow2 64M
vdkit write disk.qcow2 1M 5 --pattern 0x68

cc -Wall -Werror -o extents /usr/share/doc/libvdkit-dev/examples/extents.c $(pkg-config --cflags --libs vdkit)
./extents disk.qcow2 | grep data
cc -o extents-static -static /usr/share/doc/libvdkit-dev/examples/extents.c $(pkg-config --static --cflags --libs vdkit)
diff <(./extents disk.qcow2) <(./extents-static disk.qcow2)

python3 -c 'import vdkit'
python3 - <<'END'
import importlib.metadata
import vdkit

assert importlib.metadata.version("vdkit") == vdkit.__version__
with vdkit.open("disk.qcow2") as disk:
    assert disk[1 << 20 : (1 << 20) + 5] == b"hhhhh"
END
cd /
rm -r /root/work
