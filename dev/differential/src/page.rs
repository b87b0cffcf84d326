//! The page for users.

use crate::{allowed, cases};

/// Options that are read and checked, and change nothing.
const WITHOUT_EFFECT: &[(&str, &str)] = &[
    (
        "`convert -m`, `-W`, `-C`; `--aio`, `-n` of `bench`; `--no-drain`",
        "the engine chooses threads, order and mover itself",
    ),
    ("`convert --salvage`", "a read error still ends the conversion, as without it"),
    ("`convert --target-is-zero`", "zeroes are written all the same"),
    (
        "`rebase -c`, `-T`",
        "copied clusters are not compressed; the backing images' cache mode stays",
    ),
    (
        "`-o nocow`, `extent_size_hint`; `preallocation` of vdi, vpc, vhdx and vmdk",
        "the engine has no such option",
    ),
    (
        "limits of a `throttle-group`",
        "requests are as fast as they can be; `info` describes the node beneath a filter",
    ),
    (
        "`lazy-refcounts`, `l2-cache-size`, `overlap-check`, `locking`, `discard` and other run-time options of nodes",
        "the engine always does what they ask for, or does not need them",
    ),
    (
        "`qemu-nbd --aio`, `--detect-zeroes`, `-A`, `-v`",
        "the allocation depth is always there; written zeroes are stored as such",
    ),
];

/// What QEMU's programs have and these do not.
const MISSING: &[&str] = &[
    "`qemu-nbd`: `-c` and `-d` (the kernel's client), `--list`, `--tls-authz`, `--selinux-label`, `--offset` of formats other than raw",
    "`blkdebug:` and `blkverify:` names, and network protocols other than NBD",
    "writing qcow, qed and parallels images, and legacy AES encryption of new ones",
    "`amend` of a key slot by its number, other than the first free one",
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
