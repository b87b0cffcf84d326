//! The one table of differences that may stay.

use std::fmt;

use crate::cases::Case;
use crate::twins::{Difference, What};

/// A difference that may stay.
pub struct Allowed {
    /// Its name.
    pub id: &'static str,
    /// Why it may stay, for users.
    pub reason: &'static str,
    /// Whether it explains a difference.
    pub applies: fn(&Case, &Difference) -> bool,
}

impl fmt::Debug for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id)
    }
}

/// All of them.
pub const ALL: &[Allowed] = &[
    Allowed {
        id: "messages",
        reason: "A message on stderr that programs do not match is in vdkit's own words. If a command line has \
                 two mistakes, vdkit may name the other one.",
        applies: |case, difference| {
            let ours = difference.ours.is_empty() || difference.ours == "a message";
            let theirs = difference.theirs.is_empty() || difference.theirs == "a message";
            let two = ["bad", "help", "17", "-n"].iter().any(|word| case.mentions(word));
            // A failure is silent only if that was asked for.
            let quiet = case.has("-q") || case.mentions("--q");
            let silent = difference.failed && difference.ours.is_empty() && !quiet;
            difference.what == What::Stderr && !silent && (theirs || (ours && two))
        },
    },
    Allowed {
        id: "help",
        reason: "`-o help` describes the options in vdkit's own words. It prints them also if another option is \
                 wrong.",
        applies: |case, _| case.has("help"),
    },
    Allowed {
        id: "dd-onto-itself",
        reason: "`dd` from a raw image onto itself is refused; QEMU fills the image with zeroes.",
        applies: |case, _| case.has("if=full.raw") && case.has("of=full.raw"),
    },
    Allowed {
        id: "crash",
        reason: "QEMU's program crashes on this command line (`snapshot` with `--create`, `--apply` or \
                 `--delete` without a value).",
        applies: |case, _| {
            case.subcommand() == "snapshot"
                && ["--create", "--apply", "--delete", "--creat", "--appl", "--delet"]
                    .iter()
                    .any(|word| case.mentions(word))
        },
    },
    Allowed {
        id: "targets",
        reason: "A conversion that fails leaves no target behind; QEMU leaves a half-made one.",
        applies: |case, difference| {
            difference.what == What::Files
                && difference.failed
                && matches!(case.subcommand(), "convert" | "dd" | "create")
                && difference.ours.len() < difference.theirs.len()
        },
    },
    Allowed {
        id: "layout",
        reason: "Images have the same content and options, but not the same layout: file lengths, host \
                 offsets and the end offset differ.",
        applies: |_, difference| {
            let told =
                ["file length:", "Image end offset:", "\"image-end-offset\":", "\"virtual-size\":"];
            let differing = difference
                .theirs
                .lines()
                .zip(difference.ours.lines())
                .filter(|(theirs, ours)| theirs != ours);
            difference.what == What::Stdout
                && difference.theirs.lines().count() == difference.ours.lines().count()
                && differing.clone().count() > 0
                && differing.into_iter().all(|(theirs, _)| {
                    told.iter().any(|start| theirs.trim_start().starts_with(start))
                })
        },
    },
    Allowed {
        id: "legacy",
        reason: "vdkit reads qcow, qed and parallels images and does not write them.",
        applies: |case, _| {
            ["qed", "a.qcow", "a.parallels"]
                .iter()
                .any(|word| case.has(word) || case.has(&format!("a.{word}")))
                && !matches!(case.subcommand(), "info" | "map" | "compare" | "measure")
        },
    },
    Allowed {
        id: "fixed-vhd",
        reason: "A fixed VHD is recognized by its footer; QEMU takes it for raw unless `-f vpc` is given.",
        applies: |case, _| case.has("fixed.vpc"),
    },
    Allowed {
        id: "sectors",
        reason: "`map` of a raw file that ends within a sector ends with the sector; QEMU's ends with the file.",
        applies: |case, difference| {
            difference.what == What::Stdout
                && case.subcommand() == "map"
                && (case.has("text")
                    || case.mentions("file")
                    || case.has("flat.vmdk")
                    || case.has("cut.qcow2"))
        },
    },
    Allowed {
        id: "icount",
        reason: "A snapshot that vdkit makes has no instruction count; QEMU stores 0.",
        applies: |case, difference| {
            difference.what == What::Stdout
                && case.subcommand() == "create"
                && difference.theirs.contains("ICOUNT")
        },
    },
    Allowed {
        id: "bitmaps",
        reason: "`amend -o compat=0.10` of an image with bitmaps is refused; QEMU makes all bitmaps invalid.",
        applies: |case, _| {
            case.subcommand() == "amend" && case.mentions("compat=0.10") && case.has("a.qcow2")
        },
    },
    Allowed {
        id: "repair",
        reason: "Counts of repaired clusters are those of vdkit's repair.",
        applies: |case, _| case.has("leak.qcow2") && (case.has("-r") || case.mentions("repair")),
    },
    Allowed {
        id: "self",
        reason: "An image that is to stand on itself is refused as such; QEMU reports a lock.",
        applies: |case, difference| {
            difference.what == What::Stderr
                && case.subcommand() == "rebase"
                && difference.theirs.contains("lock")
        },
    },
    Allowed {
        id: "unwritten-luks",
        reason: "What was never written to a LUKS image reads as noise, which depends on its key.",
        applies: |case, difference| difference.what == What::Image && case.has("n.luks"),
    },
    Allowed {
        id: "placement",
        reason: "After a conversion, clusters lie at other offsets, and raw targets have other holes.",
        applies: |case, difference| {
            difference.what == What::Stdout
                && case.subcommand() == "convert"
                && case.commands.get(difference.step).is_some_and(|words| words[0] == "map")
        },
    },
];
