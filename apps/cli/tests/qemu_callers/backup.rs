//! virtnbdbackup: backups of a domain that is shut off, through our `qemu-nbd`, and of a running one
//! whose disk vdkit made and whose restored disk vdkit makes.

use vdkit_testkit::require_peer;

use crate::libvirt::Libvirt;

/// Defines the domain `guest` with a disk of 64 MiB. It has no system: the emulator writes on behalf of the
/// guest where a test asks it to. KVM is not asked for, because some machines have it without it working.
fn define(libvirt: &Libvirt) {
    libvirt.volume("disk.qcow2", 64, "<format type='qcow2'/><compat>1.1</compat>");
    let xml = format!(
        "<domain type='qemu'><name>guest</name><memory unit='MiB'>64</memory>\
         <os><type arch='x86_64' machine='pc'>hvm</type></os><features><acpi/></features>\
         <devices><emulator>{}</emulator><disk type='file' device='disk'>\
         <driver name='qemu' type='qcow2'/><source file='{}'/><target dev='vda' bus='virtio'/>\
         </disk></devices></domain>",
        libvirt.run("sh", &["-c", "command -v qemu-system-x86_64"]).trim(),
        libvirt.in_pool("disk.qcow2"),
    );
    let file = libvirt.stage.scratch.write("guest.xml", xml.as_bytes());
    libvirt.virsh(&["define", &file.display().to_string()]);
}

fn back_up(libvirt: &Libvirt, level: &str) {
    let said = libvirt
        .run("virtnbdbackup", &["-d", "guest", "-l", level, "-o", &libvirt.in_pool("saved")]);
    assert!(said.contains("Finished successfully"), "{said}");
}

/// Restores into a new folder, and asks QEMU whether the disk is the same.
fn restore_and_compare(libvirt: &Libvirt) {
    let [saved, restored] = ["saved", "restored"].map(|name| libvirt.in_pool(name));
    libvirt.run("virtnbdrestore", &["-i", &saved, "-o", &restored]);
    let disk = format!("{restored}/disk.qcow2");
    let stage = &libvirt.stage;
    stage.sound(&disk, "qcow2", 64 << 20);
    stage.qemu("qemu-img", &["compare", "-q", &disk, &libvirt.in_pool("disk.qcow2")]);
    stage.qemu("qemu-io", &["-r", "-c", "read -P 7 1M 4M", &disk]);
}

/// The emulator writes to the disk of the running domain.
fn guest_writes(libvirt: &Libvirt, command: &str) {
    let line = format!("qemu-io -d /machine/peripheral/virtio-disk0/virtio-backend \"{command}\"");
    let said = libvirt.virsh(&["qemu-monitor-command", "guest", "--hmp", &line]);
    assert!(!said.contains("Error") && !said.contains("failed"), "{said}");
}

#[test]
fn virtnbdbackup_copies_an_offline_domain_and_restores_it() {
    if !require_peer("virtnbdbackup") {
        return;
    }
    let Some(libvirt) = Libvirt::start() else { return };
    define(&libvirt);
    let disk = libvirt.in_pool("disk.qcow2");
    libvirt.stage.qemu("qemu-io", &["-c", "write -P 7 1M 4M", &disk]);
    back_up(&libvirt, "copy");
    restore_and_compare(&libvirt);
    // One argument, with the space: `-e 2`.
    libvirt.stage.assert_called(&["qemu-nbd -r --format=qcow2 ", "-e 2 --fork"]);
    libvirt.stage.assert_called(&["qemu-img info ", "--output json --force-share"]);
    libvirt.stage.assert_called(&["qemu-img create -f qcow2 ", "restored/disk.qcow2"]);
    libvirt.stage.assert_called(&["qemu-nbd --discard=unmap ", "restored/disk.qcow2"]);
}

#[test]
fn virtnbdbackup_saves_a_running_domain_in_full_and_incrementally() {
    if !require_peer("virtnbdbackup") {
        return;
    }
    let Some(libvirt) = Libvirt::start() else { return };
    define(&libvirt);
    libvirt.virsh(&["start", "guest"]);
    guest_writes(&libvirt, "write -P 7 1M 4M");
    back_up(&libvirt, "full");
    guest_writes(&libvirt, "write -P 9 8M 1M");
    back_up(&libvirt, "inc");
    libvirt.virsh(&["destroy", "guest"]);
    restore_and_compare(&libvirt);
    let disk = libvirt.in_pool("restored/disk.qcow2");
    let read = libvirt.stage.qemu("qemu-io", &["-r", "-c", "read -P 9 8M 1M", &disk]);
    assert!(!read.contains("failed"), "{read}");
}
