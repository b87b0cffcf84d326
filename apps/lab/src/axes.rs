//! The axes that a plan may vary, and the values of each axis.

use vdkit_block::parse_size;

use crate::front::FRONTS;
use crate::layout::LAYOUTS;
use crate::profile::PROFILES;

/// The axis whose values are the user's places.
pub const BACKEND: &str = "backend";

/// Programs that create or convert images, for plans that vary the program.
pub const TOOLS: &[(&str, &str)] = &[
    ("vdkit", "the command vdkit"),
    ("qemu-img", "QEMU's qemu-img, or qemu-io to read an image"),
    ("library", "vdkit's library in the lab's own process, to read an image"),
];

/// Cache modes: [`vdkit_block::CacheMode`].
pub const CACHES: &[(&str, &str)] = &[
    ("writeback", "through the host's page cache, durable when flushed"),
    ("none", "bypasses the page cache, durable when flushed"),
    ("writethrough", "through the page cache, each write durable"),
    ("directsync", "bypasses the page cache, each write durable"),
    ("unsafe", "through the page cache, flushes do nothing"),
];

/// Content of a disk before the load begins.
pub const CONTENTS: &[(&str, &str)] = &[
    ("none", "nothing was ever written"),
    ("sparse", "64 KiB are written every 32 MiB, and nothing else"),
    ("full", "everything is written except 64 KiB every 32 MiB"),
];

/// When an image's space is allocated, for plans that vary it separately from the layout.
pub const PREALLOCATIONS: &[(&str, &str)] = &[
    ("off", "as it is written"),
    ("metadata", "the format's tables in advance, space as it is written"),
    ("falloc", "reserved in advance"),
    ("full", "written with zeroes in advance"),
];

/// Values with preallocated space and the corresponding sparse values: the axis, and both values.
pub const ALLOCATED: [(&str, &str, &str); 8] = [
    ("layout", "raw-falloc", "raw"),
    ("layout", "raw-full", "raw"),
    ("layout", "qcow2-metadata", "qcow2"),
    ("layout", "qcow2-falloc", "qcow2"),
    ("layout", "qcow2-full", "qcow2"),
    ("preallocation", "metadata", "off"),
    ("preallocation", "falloc", "off"),
    ("preallocation", "full", "off"),
];

/// Record sizes of ZFS.
pub const RECORDS: &[(&str, &str)] = &[
    ("inherited", "that of the place's data set"),
    ("4K", "4 KiB, in a separate data set (or volume)"),
    ("8K", "8 KiB, in a separate data set (or volume)"),
    ("16K", "16 KiB, in a separate data set (or volume)"),
    ("64K", "64 KiB, in a separate data set (or volume)"),
    ("128K", "128 KiB, in a separate data set (or volume)"),
];

/// The values that an axis accepts.
#[derive(Clone, Copy, Debug)]
enum Values {
    Words(fn() -> Vec<(&'static str, &'static str)>),
    Size,
    Count,
}

/// The role of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The user chooses its value: backend, layout, cache mode, front.
    Choice,
    /// A load or an image size. A good choice is good under each of them.
    Condition,
    /// The program. Programs are shown side by side and are never a part of the advice.
    Tool,
}

/// A row of the table of axes: name, role, meaning, values.
type Row = (&'static str, Role, &'static str, Values);

/// Every axis.
const AXES: &[Row] = &[
    (
        BACKEND,
        Role::Choice,
        "where images are: a folder (--on) or a device (--device)",
        Values::Words(Vec::new),
    ),
    (
        "layout",
        Role::Choice,
        "format and options of the image",
        Values::Words(|| words(LAYOUTS, |l| (l.name, l.about))),
    ),
    (
        "cache",
        Role::Choice,
        "use of the page cache, and flushes",
        Values::Words(|| CACHES.to_vec()),
    ),
    (
        "front",
        Role::Choice,
        "what the load goes through",
        Values::Words(|| words(FRONTS, |f| (f.name, f.about))),
    ),
    (
        "profile",
        Role::Condition,
        "the load",
        Values::Words(|| words(PROFILES, |p| (p.name, p.about))),
    ),
    (
        "tool",
        Role::Tool,
        "which program creates, converts or opens images",
        Values::Words(|| TOOLS.to_vec()),
    ),
    (
        "content",
        Role::Condition,
        "content of the disk before the load",
        Values::Words(|| CONTENTS.to_vec()),
    ),
    (
        "preallocation",
        Role::Choice,
        "when space is allocated",
        Values::Words(|| PREALLOCATIONS.to_vec()),
    ),
    ("record", Role::Choice, "of a ZFS data set or volume", Values::Words(|| RECORDS.to_vec())),
    ("size", Role::Condition, "size of the disk, such as 16G", Values::Size),
    ("images", Role::Condition, "number of images at once", Values::Count),
];

fn find(name: &str) -> Option<&'static Row> {
    AXES.iter().find(|(known, ..)| *known == name)
}

/// The default role of an axis, which a plan may override. An unknown axis is a choice.
pub fn role(name: &str) -> Role {
    find(name).map_or(Role::Choice, |(_, role, ..)| *role)
}

fn words<T>(
    table: &[T],
    row: fn(&T) -> (&'static str, &'static str),
) -> Vec<(&'static str, &'static str)> {
    table.iter().map(row).collect()
}

/// The names of all axes.
pub fn names() -> Vec<&'static str> {
    AXES.iter().map(|(name, ..)| *name).collect()
}

/// The meaning of an axis.
pub fn about(name: &str) -> Option<&'static str> {
    find(name).map(|(.., about, _)| *about)
}

/// The meaning of an axis's value.
pub fn about_value(axis: &str, value: &str) -> Option<&'static str> {
    let (.., values) = find(axis)?;
    let Values::Words(words) = values else { return None };
    words().into_iter().find(|(word, _)| *word == value).map(|(_, about)| about)
}

/// Whether an axis accepts this value.
///
/// # Errors
/// What it can have.
pub fn check(axis: &str, value: &str) -> Result<(), String> {
    let Some((.., values)) = find(axis) else {
        return Err(format!("unknown axis '{axis}'; known: {}", names().join(", ")));
    };
    match values {
        Values::Words(words) => {
            let known: Vec<&str> = words().into_iter().map(|(word, _)| word).collect();
            // Any name is valid for a backend: backends are named after the user's places.
            if known.is_empty() || known.contains(&value) {
                return Ok(());
            }
            Err(format!("unknown {axis} '{value}'; known: {}", known.join(", ")))
        }
        Values::Size => match parse_size(value) {
            Ok(bytes) if bytes >= 1 << 20 && bytes % (1 << 20) == 0 => Ok(()),
            _ => Err(format!("{axis} '{value}' is not a size of whole MiB, such as 16G")),
        },
        Values::Count => match value.parse::<u32>() {
            Ok(1..=256) => Ok(()),
            _ => Err(format!("{axis} '{value}' is not a number from 1 to 256")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_checked_by_axis() {
        assert_eq!(check("cache", "none"), Ok(()));
        assert_eq!(check("size", "16G"), Ok(()));
        assert_eq!(check("images", "8"), Ok(()));
        assert_eq!(check(BACKEND, "anything"), Ok(()));
        for (axis, value, words) in [
            ("cache", "fast", "writethrough"),
            ("color", "red", "unknown axis 'color'; known: backend, layout"),
            ("size", "1", "whole MiB"),
            ("size", "big", "whole MiB"),
            ("images", "0", "from 1"),
            ("images", "1000", "to 256"),
            ("layout", "qcow3", "qcow2"),
        ] {
            let told = check(axis, value).unwrap_err();
            assert!(told.contains(words), "{told}");
        }
    }

    #[test]
    fn each_value_has_its_meaning_once() {
        for (axis, .., values) in AXES {
            let Values::Words(words) = values else { continue };
            let words = words();
            for (word, about) in &words {
                assert!(!about.is_empty() && words.iter().filter(|w| w.0 == *word).count() == 1);
                assert_eq!(about_value(axis, word), Some(*about));
            }
        }
    }
}
