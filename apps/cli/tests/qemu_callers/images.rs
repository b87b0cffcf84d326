//! Programs that make images: cloud-localds and vmdb2.

use vdkit_testkit::require_peer;

use crate::Stage;

#[test]
fn cloud_localds_makes_seeds_of_every_format() {
    if !require_peer("cloud-localds") || !require_peer("genisoimage") || !require_peer("qemu-img") {
        return;
    }
    let stage = Stage::new();
    stage.scratch.write("user", b"#cloud-config\npassword: pass\n");
    stage.scratch.write("meta", b"instance-id: i1\nlocal-hostname: h\n");
    for format in ["qcow2", "vmdk", "vdi", "vpc"] {
        let seed = format!("seed.{format}");
        stage.run("cloud-localds", &["-d", format, &seed, "user", "meta"]);
        stage.assert_called(&[&format!("qemu-img convert -f raw -O {format} "), &seed]);
        // An ISO 9660 file system starts with its identifier at 32 KiB.
        let raw = stage.path("seed.raw");
        stage.qemu("qemu-img", &["convert", "-f", format, "-O", "raw", &seed, "seed.raw"]);
        assert_eq!(&std::fs::read(raw).unwrap()[32769..32774], b"CD001", "{format}");
    }
}

#[test]
fn vmdb2_makes_an_image_and_partitions_it() {
    if !require_peer("vmdb2") || !require_peer("parted") {
        return;
    }
    let stage = Stage::new();
    // No kpartx and no mkfs: they need the kernel's device mapper.
    let steps = "steps:\n  - mkimg: \"{{ output }}\"\n    size: 64M\n  \
                 - mklabel: gpt\n    device: \"{{ output }}\"\n  \
                 - mkpart: primary\n    device: \"{{ output }}\"\n    start: 10%\n    end: 100%\n    tag: /\n";
    stage.scratch.write("steps", steps.as_bytes());
    stage.run("vmdb2", &["steps", "--output", "disk.img", "--log", "log"]);
    let image = std::fs::read(stage.path("disk.img")).unwrap();
    assert_eq!((image.len(), &image[512..520]), (64 << 20, &b"EFI PART"[..]));
    stage.assert_called(&["qemu-img create -f raw disk.img 64M"]);
}
