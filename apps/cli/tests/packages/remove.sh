# Runs inside a Debian: removes the packages, then what they are configured by.
set -euxo pipefail
packages="vdkit libvdkit0 libvdkit-dev python3-vdkit"
dpkg --remove $packages
if command -v vdkit; then exit 1; fi
dpkg --purge $packages
if dpkg-query --show vdkit; then exit 1; fi
