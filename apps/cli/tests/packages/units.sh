# Runs in a booted Debian: images are served by the units.
set -euxo pipefail
trap 'journalctl --no-pager --lines 40' ERR
client() { # COMMAND NAME ARGUMENTS
  vdkit "$1" -f raw "nbd+unix:///?socket=/run/vdkit-serve/$2.sock" "${@:3}"
}

# An image in the instance's own folder, which root made.
mkdir -p /etc/vdkit/serve /var/lib/vdkit-serve/one
vdkit create /var/lib/vdkit-serve/one/disk.qcow2 64M
echo 'IMAGE=disk.qcow2' > /etc/vdkit/serve/one.conf
systemctl enable --now vdkit-serve@one.socket
client write one 1M 64K --pattern 0xaa
client read one 1M 4 --hex | grep 'aa aa aa aa'
systemctl is-active vdkit-serve@one.service
systemctl show -P StatusText vdkit-serve@one.service | grep 'serving disk.qcow2'
vdkit ctl /run/vdkit-serve/one/control.sock stats
[ "$(stat -c %u /proc/"$(systemctl show -P MainPID vdkit-serve@one.service)")" != 0 ]
systemctl stop vdkit-serve@one.service
vdkit check /var/lib/vdkit-serve/one/disk.qcow2
vdkit read /var/lib/vdkit-serve/one/disk.qcow2 1M 4 --hex | grep 'aa aa aa aa'
# What root puts there later is the service's too.
systemctl stop vdkit-serve@one.socket
vdkit create /var/lib/vdkit-serve/one/later.qcow2 64M
echo 'IMAGE=later.qcow2' > /etc/vdkit/serve/one.conf
systemctl start vdkit-serve@one.socket
client write one 0 64K --pattern 0xcc
systemctl stop vdkit-serve@one.service
echo 'IMAGE=disk.qcow2' > /etc/vdkit/serve/one.conf
# The socket is there still: the next client starts it again.
client read one 1M 4 --hex | grep 'aa aa aa aa'
systemctl is-active vdkit-serve@one.service

# An image elsewhere, for a group; read-only options; another group's clients.
groupadd --system images
mkdir -p /srv/images /etc/systemd/system/vdkit-serve@two.service.d
vdkit create /srv/images/two.qcow2 64M
chgrp -R images /srv/images
chmod 0660 /srv/images/two.qcow2
printf '%s\n' 'IMAGE=/srv/images/two.qcow2' 'OPTIONS=--cache none --name two' > /etc/vdkit/serve/two.conf
printf '%s\n' '[Service]' 'SupplementaryGroups=images' 'ReadWritePaths=/srv/images' \
  > /etc/systemd/system/vdkit-serve@two.service.d/image.conf
systemctl daemon-reload
systemctl start vdkit-serve@two.service
client write two 0 64K --pattern 0xbb
systemctl stop vdkit-serve@two.socket vdkit-serve@two.service
vdkit read /srv/images/two.qcow2 0 4 --hex | grep 'bb bb bb bb'

# An image that is not there is an error of the start.
echo 'IMAGE=missing.qcow2' > /etc/vdkit/serve/none.conf
if systemctl start vdkit-serve@none.service; then exit 1; fi
journalctl -u vdkit-serve@none.service | grep 'missing.qcow2'

# The first one stays enabled, for remove.sh.
systemctl stop vdkit-serve@none.socket
rm -r /etc/vdkit/serve/two.conf /etc/vdkit/serve/none.conf
rm -r /etc/systemd/system/vdkit-serve@two.service.d /srv/images
rm -rf /var/lib/private/vdkit-serve/two /var/lib/private/vdkit-serve/none
groupdel images
echo 'the units serve'
