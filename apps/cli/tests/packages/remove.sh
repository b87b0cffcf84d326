# Runs inside a Debian: removes the packages, then what they are configured by.
set -euxo pipefail
packages="vdkit libvdkit0 libvdkit-dev python3-vdkit"
dpkg --remove $packages
if command -v vdkit; then exit 1; fi
dpkg --purge $packages
if dpkg-query --show vdkit; then exit 1; fi

# What units.sh left, if this Debian could be booted: images and what names them are the administrator's.
if [ -e /root/units.log ]; then
  wants=/etc/systemd/system/sockets.target.wants
  if [ -L $wants/vdkit-serve@one.socket ]; then exit 1; fi
  rmdir --ignore-fail-on-non-empty $wants
  rm /etc/vdkit/serve/one.conf /var/lib/vdkit-serve/one/disk.qcow2
  rm -r /etc/vdkit /var/lib/vdkit-serve /var/lib/private/vdkit-serve
fi
