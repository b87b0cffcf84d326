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
        reason: "A message on stderr that programs do not match is in vdkit's own words, or QEMU prints a \
                 warning where vdkit has nothing to warn of.",
        applies: |_, difference| {
            difference.what == What::Stderr
                && [&difference.theirs, &difference.ours]
                    .iter()
                    .all(|text| text.is_empty() || *text == "a message")
        },
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
                && case.subcommand() != "info"
        },
    },
    Allowed {
        id: "progress",
        reason: "Progress begins when the images are open; QEMU prints its first line before.",
        applies: |case, difference| {
            difference.what == What::Stdout
                && (case.has("-p") || case.mentions("--p"))
                && difference.ours.trim().is_empty()
                && difference.theirs.trim().is_empty()
        },
    },
];
