# Runs inside a Debian: removes the packages, then what they are configured by.
set -euxo pipefail
packages="vdkit libvdkit0 libvdkit-dev python3-vdkit"
dpkg --remove $packages
! command -v vdkit
dpkg --purge $packages
! dpkg-query --show $packages
