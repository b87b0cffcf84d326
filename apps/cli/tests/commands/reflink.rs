//! Where the bytes of two formats lie at multiples of the file system's blocks, a conversion between
//! them writes metadata and nothing else.

use crate::common::{Scratch, peer};

const MIB: u64 = 1 << 20;
const DISK: u64 = 64 * MIB;

/// VDI with its blocks of 1 MiB, VHDX, fixed VHD and flat VMDK, and qcow2 and raw besides.
#[test]
fn payloads_are_shared_between_formats() {
    for kind in ["xfs", "btrfs"] {
        let Some(disk) = vdkit_testkit::fs::mounted(kind, 512 << 20) else { return };
        let scratch = Scratch::new();
        let path = |name: &str| disk.path().join(name).display().to_string();
        let raw = path("disk.raw");
        scratch.ok(&["create", &raw, "64M"]);
        for block in 0..64 {
            let (at, byte) = (format!("{block}M"), (block + 1).to_string());
            scratch.ok(&["write", "-f", "raw", &raw, &at, "1M", "--pattern", &byte]);
        }
        let vhd = "subformat=fixed,force_size=on";
        let flat = "subformat=monolithicFlat";
        for (source, target, format, options) in [
            ("disk.raw", "a.vdi", "vdi", "static=off"),
            ("a.vdi", "b.qcow2", "qcow2", "cluster_size=64K"),
            ("b.qcow2", "c.vhd", "vpc", vhd),
            ("c.vhd", "d.vhdx", "vhdx", "block_size=1M"),
            ("d.vhdx", "e.vmdk", "vmdk", flat),
            ("e.vmdk", "f.vdi", "vdi", "static=on"),
            ("f.vdi", "g.vhd", "vpc", vhd),
            ("g.vhd", "h.vmdk", "vmdk", flat),
            ("h.vmdk", "i.raw", "raw", "preallocation=off"),
            ("disk.raw", "j.vhd", "vpc", vhd),
            ("disk.raw", "k.vmdk", "vmdk", flat),
            ("disk.raw", "l.vhdx", "vhdx", "subformat=dynamic"),
            ("disk.raw", "m.vhdx", "vhdx", "subformat=fixed"),
            ("disk.raw", "n.vhdx", "vhdx", "block_size=1M"),
            ("l.vhdx", "o.raw", "raw", "preallocation=off"),
            ("l.vhdx", "p.qcow2", "qcow2", "cluster_size=64K"),
            ("p.qcow2", "q.vhdx", "vhdx", "block_size=32M"),
        ] {
            let (source, target) = (path(source), path(target));
            let arguments = ["-O", format, "-o", options, &source, &target];
            let json = scratch.json_of("convert", 0, &arguments);
            let moved = &json["moved"];
            assert_eq!(moved["reflinked"], DISK, "{kind}: {source} to {target}: {moved}");
            let by_hand = moved["read"].as_u64().unwrap() + moved["written"].as_u64().unwrap();
            assert_eq!(by_hand, 0, "{kind}: {source} to {target}: {moved}");
            let wanted = ["compare", "-q", "-f", "raw", "-F", format, &raw, &target];
            match format {
                // QEMU goes by the geometry of a VHD, unless it knows who made it.
                "vpc" => drop(scratch.ok(&["compare", &raw, &target])),
                _ => drop(peer(disk.path(), "qemu-img", &wanted)),
            }
            scratch.ok(&["check", "-f", format, &target]);
        }
    }
}
