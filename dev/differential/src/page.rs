//! The page for users.

use crate::{allowed, cases};

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
