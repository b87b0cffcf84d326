//! libguestfs and its tools, which call `qemu-img` for new images, for information and for copies. Their
//! appliance boots without KVM, with the kernel that `scripts/fetch-guest` has fetched.

use std::path::PathBuf;
use std::process::Command;

use vdkit_guest::Kernel;
use vdkit_testkit::guest::require_guest;
use vdkit_testkit::{require_peer, require_root};

use crate::{Stage, said};

/// supermin copies modules from /lib/modules only: the guest's are laid over it, in a namespace.
const SCRIPT: &str =
    r#"mount -t overlay -o "lowerdir=$1:/usr/lib" none /usr/lib && shift && exec "$@""#;

struct Appliance {
    stage: Stage,
    release: String,
    kernel: PathBuf,
}

impl Appliance {
    fn new() -> Option<Self> {
        let peers = ["guestfish", "virt-sparsify", "depmod", "qemu-img", "qemu-system-x86_64"];
        if !require_root() || !require_guest() || !peers.iter().all(|peer| require_peer(peer)) {
            return None;
        }
        let stage = Stage::new();
        let Kernel { image: kernel, modules: from, .. } = Kernel::fetched();
        let release = release(&std::fs::read(&kernel).unwrap());
        let modules = stage.path(&format!("lib/modules/{release}"));
        std::fs::create_dir_all(stage.path("lib/modules")).unwrap();
        stage.run("cp", &["-r", &from.display().to_string(), &modules.display().to_string()]);
        stage.run("depmod", &["-b", &stage.text(""), &release]);
        std::fs::create_dir(stage.path("cache")).unwrap();
        Some(Self { stage, release, kernel })
    }

    fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let lower = self.stage.text("lib");
        let mut all = vec!["--mount", "sh", "-c", SCRIPT, "sh", &lower, program];
        all.extend(arguments);
        let mut command = self.stage.command("unshare", &all);
        command
            .env("LIBGUESTFS_BACKEND", "direct")
            .env("LIBGUESTFS_BACKEND_SETTINGS", "force_tcg")
            .env("LIBGUESTFS_CACHEDIR", self.stage.path("cache"))
            .env("TMPDIR", self.stage.path("cache"))
            .env("SUPERMIN_KERNEL", &self.kernel)
            .env("SUPERMIN_MODULES", format!("/lib/modules/{}", self.release));
        command
    }

    fn run(&self, program: &str, arguments: &[&str]) -> String {
        said(self.command(program, arguments))
    }

    /// A qcow2 image with a file system that has a file, and the traces of a larger one.
    fn used_disk(&self) {
        self.stage.run("qemu-img", &["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"]);
        let disk = ["--format=qcow2", "-a", "disk.qcow2"];
        let steps = "run : part-disk /dev/sda mbr : mkfs ext4 /dev/sda1 : mount /dev/sda1 / : \
                     fill 7 8M /trace : sync : rm /trace : write /hello world";
        let all: Vec<_> = disk.into_iter().chain(steps.split_whitespace()).collect();
        self.run("guestfish", &all);
        self.stage.sound("disk.qcow2", "qcow2", 64 << 20);
    }

    /// Whether the file is still there.
    fn assert_hello(&self, image: &str) {
        let arguments = ["--ro", "--format=qcow2", "-a", image, "-m", "/dev/sda1", "cat", "/hello"];
        assert_eq!(self.run("guestfish", &arguments).trim(), "world");
        self.stage.assert_called(&["create -f qcow2 -o backing_file=", "overlay1.qcow2"]);
    }
}

/// The release in a kernel's boot header: the offset of a text, counted from 512.
fn release(kernel: &[u8]) -> String {
    let at = usize::from(u16::from_le_bytes([kernel[0x20e], kernel[0x20f]])) + 0x200;
    let text: Vec<u8> = kernel[at..].iter().copied().take_while(|&b| b != b' ' && b != 0).collect();
    String::from_utf8(text).unwrap()
}

/// This needs no appliance.
#[test]
fn guestfish_makes_images_and_reads_their_headers() {
    if !require_peer("guestfish") || !require_peer("qemu-img") {
        return;
    }
    let stage = Stage::new();
    let mut command = stage.command(
        "guestfish",
        &"-- disk-create a.qcow2 qcow2 64M preallocation:metadata compat:1.1 clustersize:131072 : \
          disk-create over.qcow2 qcow2 -1 backingfile:a.qcow2 backingformat:qcow2 : \
          disk-format over.qcow2 : disk-virtual-size over.qcow2 : disk-has-backing-file over.qcow2"
            .split_whitespace()
            .collect::<Vec<_>>(),
    );
    command.env("LIBGUESTFS_BACKEND", "direct");
    let found = said(command);
    assert_eq!(found.lines().collect::<Vec<_>>(), ["qcow2", "67108864", "true"]);
    stage.sound("a.qcow2", "qcow2", 64 << 20);
    stage.assert_called(&[
        "create -f qcow2 -o preallocation=metadata,compat=1.1,cluster_size=131072",
    ]);
    stage.assert_called(&["create -f qcow2 -o backing_file=", "backing_fmt=qcow2"]);
    stage.assert_called(&["info --output json ", "over.qcow2"]);
}

#[test]
fn virt_sparsify_copies_a_disk() {
    let Some(appliance) = Appliance::new() else { return };
    let stage = &appliance.stage;
    stage.run("qemu-img", &["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"]);
    stage.qemu("qemu-io", &["-c", "write -P 7 1M 4M", "disk.qcow2"]);
    appliance.run("virt-sparsify", &["--format", "qcow2", "--compress", "disk.qcow2", "new.qcow2"]);
    stage.qemu("qemu-img", &["compare", "-q", "disk.qcow2", "new.qcow2"]);
    stage.sound("new.qcow2", "qcow2", 64 << 20);
    stage.assert_called(&["create -f qcow2 -o backing_file=", "backing_fmt=qcow2,compat=1.1"]);
    stage.assert_called(&["convert -f qcow2 -O qcow2 -c ", "new.qcow2"]);
}

#[test]
#[ignore = "boots the appliance four times"]
fn virt_sparsify_frees_space_in_place_and_in_a_copy() {
    let Some(appliance) = Appliance::new() else { return };
    let stage = &appliance.stage;
    appliance.used_disk();
    let allocated = |image: &str| {
        let text = stage.qemu("qemu-img", &["map", "--output=json", image]);
        let extents: serde_json::Value = serde_json::from_str(&text).unwrap();
        let data = extents.as_array().unwrap().iter().filter(|extent| extent["data"] == true);
        data.map(|extent| extent["length"].as_u64().unwrap()).sum::<u64>()
    };
    assert!(allocated("disk.qcow2") > 8 << 20);
    appliance.run("virt-sparsify", &["--format", "qcow2", "disk.qcow2", "new.qcow2"]);
    appliance.run("virt-sparsify", &["--in-place", "--format", "qcow2", "disk.qcow2"]);
    for image in ["new.qcow2", "disk.qcow2"] {
        assert!(allocated(image) < 8 << 20, "{image}: {}", allocated(image));
        stage.sound(image, "qcow2", 64 << 20);
        appliance.assert_hello(image);
    }
}

#[test]
#[ignore = "boots the appliance five times"]
fn virt_resize_virt_make_fs_and_virt_format_work_on_our_images() {
    let Some(appliance) = Appliance::new() else { return };
    let stage = &appliance.stage;
    appliance.used_disk();
    stage.run("qemu-img", &["create", "-q", "-f", "qcow2", "large.qcow2", "128M"]);
    let formats = ["--format", "qcow2", "--output-format", "qcow2"];
    let images = ["--expand", "/dev/sda1", "disk.qcow2", "large.qcow2"];
    appliance.run("virt-resize", &[formats, images].concat());
    appliance.assert_hello("large.qcow2");
    let make = ["--format=qcow2", "--size=+10M", "--type=ext4", "bin", "tree.qcow2"];
    appliance.run("virt-make-fs", &make);
    stage.assert_called(&["create -f qcow2 -o preallocation=metadata ", "tree.qcow2"]);
    appliance.run("virt-format", &["--format=qcow2", "--filesystem=ext4", "-a", "large.qcow2"]);
    for image in ["large.qcow2", "tree.qcow2"] {
        stage.qemu("qemu-img", &["check", "-q", image]);
    }
}
