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
        applies: |case, difference| {
            let code = difference.what == What::Code && difference.ours == "0";
            let said = difference.what == What::Stdout && !difference.ours.is_empty();
            case.has("help") && (code || said || difference.what == What::Stderr)
        },
    },
    Allowed {
        id: "dd-onto-itself",
        reason: "`dd` from a raw image onto itself is refused; QEMU fills the image with zeroes.",
        applies: |case, _| case.has("if=full.raw") && case.has("of=full.raw"),
    },
    Allowed {
        id: "crash",
        reason: "`snapshot --create`, `--apply` and `--delete` take a name here; QEMU refuses one after these \
                 long names, and crashes without one.",
        applies: |case, difference| {
            let refused = difference.what != What::Code || difference.theirs != "0";
            let long = ["--create", "--apply", "--delete", "--creat", "--appl", "--delet"];
            case.subcommand() == "snapshot"
                && refused
                && long.iter().any(|word| case.mentions(word))
        },
    },
    Allowed {
        id: "targets",
        reason: "A conversion that fails leaves no target behind, and an empty one if the target is written in \
                 place (a file with several names, say); QEMU leaves a half-made one.",
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
        id: "nodes",
        reason: "Where a node of a format stands on one of another format (`driver=raw,file.driver=qcow2`), `map` is \
                 refused, and `info` lists the snapshots of the node beneath only there. A part of `null-co` is \
                 shown as a smaller whole. A backing image that is given may be such a node, also where QEMU \
                 refuses it.",
        applies: |case, _| {
            let beneath = ["file.driver=qcow2", "size=64k,file.driver=null-co"];
            let given = ["backing.file.driver=qcow2", "backing.file.driver=raw"];
            matches!(case.subcommand(), "map" | "info")
                && beneath.iter().any(|node| case.mentions(node))
                || given.iter().any(|node| case.mentions(node))
        },
    },
    Allowed {
        id: "depth",
        reason: "An error anywhere in a chain says once that a backing file could not be opened; QEMU says it for \
                 each image above.",
        applies: |_, difference| {
            let again = "Could not open backing file: ";
            difference.what == What::Stderr
                && difference.theirs.replacen(again, "", 1) == difference.ours
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
            let without =
                |line: &str| line.strip_suffix(" 0").unwrap_or(line).trim_end().to_owned();
            difference.what == What::Stdout
                && case.mentions("snapshot")
                && difference.theirs.contains("ICOUNT")
                && difference.theirs.lines().map(without).eq(difference.ours.lines().map(without))
        },
    },
    Allowed {
        id: "bitmaps",
        reason: "`amend -o compat=0.10` of an image with bitmaps is refused; QEMU makes all bitmaps invalid.",
        applies: |case, difference| {
            matches!(difference.what, What::Code | What::Stderr | What::Image)
                && case.subcommand() == "amend"
                && case.mentions("compat=0.10")
                && case.has("a.qcow2")
        },
    },
    Allowed {
        id: "repair",
        reason: "Counts of repaired clusters are those of vdkit's repair, which rebuilds no refcounts of an \
                 image that is only marked dirty or corrupt.",
        applies: |case, difference| {
            let bad = ["leak.qcow2", "dirty.qcow2", "corrupt.qcow2"];
            difference.what == What::Stdout
                && bad.iter().any(|name| case.has(name))
                && (case.has("-r") || case.mentions("repair"))
        },
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
    Allowed {
        id: "stream",
        reason: "A stream-optimized VMDK is refused for writing when it is opened; QEMU opens it, and its first \
                 write fails.",
        applies: |case, difference| {
            difference.what == What::Stdout
                && case.subcommand() == "bench"
                && case.has("stream.vmdk")
        },
    },
    Allowed {
        id: "blkdebug-events",
        reason: "`blkdebug:` stands beneath the format and sees requests, not what the format does: it raises \
                 `read_aio`, `write_aio`, `l1_update`, `l2_load`, `l2_update`, `refblock_load`, `refblock_update`, \
                 `reftable_load` and `reftable_update` by what the bytes hold (qcow2, raw), `pwritev`, \
                 `pwritev_zero`, `pwritev_done`, `flush_to_os`, `flush_to_disk` and `none`. Rules for other events \
                 never count. `check` raises `l2_load` too.",
        applies: |case, _| {
            case.mentions("l2.rules") && matches!(case.subcommand(), "check" | "map")
        },
    },
    Allowed {
        id: "blkdebug-flush",
        reason: "A flush that fails, by rules of `blkdebug:` too, is a failure of the command; QEMU ends some commands \
                 without a flush, or does not look at its result.",
        applies: |case, _| case.mentions("flush.rules"),
    },
    Allowed {
        id: "blkverify-info",
        reason: "`info blkverify:…` names the raw copy beneath and does not describe the image.",
        applies: |case, difference| {
            case.subcommand() == "info"
                && case.mentions("blkverify:")
                && difference.what == What::Stdout
        },
    },
];
