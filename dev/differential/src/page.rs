//! The page for users.

use crate::{allowed, cases};

/// Options that are read and checked, and change nothing.
const WITHOUT_EFFECT: &[(&str, &str)] = &[
    (
        "`convert -m`, `-W`, `-C`; `--aio`, `-n` of `bench`; `--no-drain`",
        "the engine chooses threads, order and mover itself",
    ),
    (
        "`-o preallocation` of vdi, vpc, vhdx and vmdk",
        "QEMU's own changes neither the length of the file nor what is allocated for the disk",
    ),
    (
        "limits of a `throttle-group`",
        "requests are as fast as they can be; `info` describes the node beneath a filter",
    ),
    (
        "`lazy-refcounts`, `l2-cache-size`, `overlap-check`, `discard` and other run-time options of nodes",
        "the engine always does what they ask for, or does not need them",
    ),
    (
        "`reconnect-delay`, `open-timeout` of `nbd` nodes",
        "the client reconnects by its own rules (`reconnect` in the URI)",
    ),
    (
        "`blkdebug`: `immediately`, `align`, `max-transfer`, `opt-write-zero`, `max-write-zero`, `opt-discard`, `max-discard`, `take-child-perms`",
        "the engine chooses the size of its requests; a request fails when it is made",
    ),
    (
        "`qemu-nbd --aio`, `--detect-zeroes`, `-A`",
        "the allocation depth is always there; written zeroes are stored as such",
    ),
];

/// What QEMU's programs have and these do not.
const MISSING: &[&str] = &[
    "a test of `qemu-nbd -c` and `-d` with a kernel that has nbd, which the test machine's has not: tests hold the \
     netlink messages against the kernel's documents, and the exchange against a stand-in for the kernel",
    "`qemu-nbd`: `--selinux-label`, `authz-pam` objects",
    "network protocols other than NBD; a backing file that an image names by a protocol other than `file:`, or by a \
     `json:` that is not on files",
    "`map` and `resize` of a format on another format (`driver=raw,file.driver=qcow2,…`); `convert -n` into an image with \
     a `backing` or `data-file` node of its own; a `data-file` node that is not a whole file",
    "writing qcow, qed and parallels images, and legacy AES encryption of new ones",
];

/// Programs that call `qemu-img` or `qemu-nbd`, and what they did with vdkit under these names.
const CALLERS: &[(&str, &str)] = &[
    (
        "libvirt 9.0.0",
        "directory pool: `vol-create-as` (qcow2, raw, vmdk, vdi, vpc; backing volume, allocation, preallocated \
         metadata), `vol-clone`, `vol-create-from`, `vol-resize`, `vol-info`; LUKS and qcow2 volumes encrypted by a \
         secret",
    ),
    (
        "virtnbdbackup 1.9.15",
        "copy of a domain that is shut off, full and incremental backup of a running one (TCG), restore of each",
    ),
    (
        "oslo.utils 10.2.0",
        "`QemuImgInfo` reads the same from both programs' `info`; `format_inspector` finds the images safe",
    ),
    ("cloud-localds 0.33", "seeds as qcow2, vmdk, vdi and vpc"),
    (
        "vmdb2 0.26",
        "`mkimg`, `mklabel` and `mkpart`; `kpartx` needs a device mapper, which the test machine lacks",
    ),
    (
        "libguestfs 1.48.6, guestfs-tools 1.48.2",
        "`disk-create`, `disk-format`, read-only drives; `virt-sparsify` (copy, `--compress`, `--in-place`), \
         `virt-resize`, `virt-make-fs`, `virt-format`",
    ),
];

/// docs/qemu-compat.md.
pub fn text() -> String {
    let mut text = String::from(
        "# vdkit as qemu-img and qemu-nbd\n\n\
         <!-- Made by `make qemu-compat`; do not edit. -->\n\n\
         Called by the name `qemu-img` (a link to `vdkit`; also `vdkit qemu-img …`), vdkit takes the options of QEMU \
         10.0's program and gives its answers: the same stdout, JSON, exit codes and images. `make \
         install-qemu-names` makes the links. With `VDKIT_REFS=strict` in the environment, an image opens only files \
         below its own folder.\n\n\
         Both programs run the same command lines in twin folders (`dev/differential`). These are the differences \
         that are left:\n\n| difference | why |\n|---|---|\n",
    );
    for entry in allowed::ALL {
        text += &format!("| {} | {} |\n", entry.id, entry.reason);
    }
    text += "\n## Accepted without effect\n\n| what | why |\n|---|---|\n";
    for (what, why) in WITHOUT_EFFECT {
        text += &format!("| {what} | {why} |\n");
    }
    text += "\n## Not there\n\n";
    for what in MISSING {
        text += &format!("- {what}\n");
    }
    text += "\n## Tried with\n\n\
             These programs run in `apps/cli/tests/qemu_callers` with vdkit first on PATH; QEMU's own programs judge \
             the images.\n\n| program | what was run |\n|---|---|\n";
    for (program, what) in CALLERS {
        text += &format!("| {program} | {what} |\n");
    }
    text += "\n## What is compared\n\n| subcommand | options |\n|---|---|\n";
    for (name, options) in cases::covered() {
        text += &format!("| {name} | {} |\n", options.join(", "));
    }
    let all = cases::all();
    text += &format!(
        "\n{} command lines: each option alone, in each spelling that `getopt_long` takes, each pair of options of a \
         subcommand, wrong ones, names of images, and commands in turn. `make test` runs a part of them, `cargo bench \
         -p vdkit-cli --bench qemu_differential` all.\n",
        all.len()
    );
    text
}
