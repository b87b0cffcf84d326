//! Every shape of the `<disk>` element, in a small domain, against libvirt's schema.

use std::process::Command;

use vdkit_libvirt::{DiskBacking, DiskSource, LibvirtDisk, is_known};
use vdkit_testbase::require_peer;

/// The validator's errors for a domain with this disk; `None` if it is valid.
fn faults(disk: &str) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("domain.xml");
    // The user replaces the placeholder.
    let disk = disk.replace("uuid='UUID'", "uuid='2c4cf1b0-9ab6-4a02-8f17-2d26a0c0a4a9'");
    let domain = format!(
        "<domain type='kvm'><name>guest</name><memory unit='MiB'>512</memory><vcpu>1</vcpu>\
         <os><type arch='x86_64' machine='pc'>hvm</type></os><devices>{disk}</devices></domain>"
    );
    std::fs::write(&file, domain).unwrap();
    let output = Command::new("virt-xml-validate").arg(&file).arg("domain").output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    (!output.status.success()).then_some(told)
}

fn backing(path: &str, device: bool, format: &str) -> DiskBacking {
    DiskBacking { path: path.into(), device, format: format.into() }
}

#[test]
fn libvirts_schema_knows_what_we_write() {
    if !require_peer("virt-xml-validate") || !require_peer("xmllint") {
        return;
    }
    // The check can fail.
    let sound = LibvirtDisk::new(DiskSource::File("/srv/a.qcow2".into()), "qcow2").xml();
    assert_eq!(faults(&sound), None);
    assert!(faults(&sound.replace("/srv/a.qcow2", "a.qcow2")).is_some());

    let sources = [
        DiskSource::File("/srv/it's & \"<so>\".qcow2".into()),
        DiskSource::Device("/dev/vg/a".into()),
        DiskSource::Nbd("/run/s.sock".into(), "export".into()),
        DiskSource::Nbd("/run/s.sock".into(), String::new()),
        DiskSource::VhostUser("/run/v.sock".into()),
    ];
    let caches = ["none", "writeback", "writethrough", "directsync", "unsafe"];
    for (i, source) in sources.into_iter().enumerate() {
        for (bus, cache) in ["virtio", "scsi", "sata", "ide", "virtio"].into_iter().zip(caches) {
            let mut disk = LibvirtDisk::new(source.clone(), "qcow2");
            (disk.bus, disk.cache) = (bus.to_owned(), cache.to_owned());
            disk.allocated = i % 2 == 0;
            disk.discard = cache != "unsafe";
            disk.map_cache_bytes = (bus == "sata").then_some(1 << 30);
            if bus == "scsi" {
                disk.backing =
                    vec![backing("/srv/b.vhd", false, "vhd"), backing("/dev/vg/c", true, "raw")];
            }
            disk.encrypted = bus == "ide" && i < 2;
            assert_eq!(faults(&disk.xml()), None, "{}", disk.xml());
        }
    }
}

#[test]
fn libvirt_has_the_formats_that_are_called_known_and_no_other() {
    if !require_peer("virt-xml-validate") || !require_peer("xmllint") {
        return;
    }
    for format in [
        "raw",
        "qcow2",
        "qcow",
        "qed",
        "vdi",
        "vhd",
        "vhdx",
        "vmdk",
        "luks",
        "bochs",
        "cloop",
        "dmg",
        "parallels",
    ] {
        let disk = LibvirtDisk::new(DiskSource::File("/srv/a".into()), format).xml();
        assert_eq!(faults(&disk).is_none(), is_known(format), "{format}: {disk}");
    }
}
