//! The mounts of this process. Source: proc_pid_mountinfo(5).

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Device number as major and minor. Artificial for file systems without a device.
    pub device: (u32, u32),
    /// The mount point.
    pub point: PathBuf,
    /// Type of the file system: ext4, xfs.
    pub kind: String,
    /// The device, or what replaces it.
    pub source: String,
    /// Options of the mount and of the file system, each once.
    pub options: Vec<String>,
}

/// Parses a device number such as `8:1`.
pub fn device_number(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Every mount of this process, in order. Empty if the kernel's table cannot be read.
pub fn all() -> Vec<Mount> {
    parse(&std::fs::read("/proc/self/mountinfo").unwrap_or_default())
}

/// The mount that contains an absolute path without links: the last one of the deepest.
pub fn of<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    let within = mounts.iter().filter(|mount| path.starts_with(&mount.point));
    within.max_by_key(|mount| mount.point.components().count())
}

/// Parses every mount, in order. Skips lines that cannot be parsed.
fn parse(table: &[u8]) -> Vec<Mount> {
    table.split(|byte| *byte == b'\n').filter_map(line).collect()
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`
fn line(line: &[u8]) -> Option<Mount> {
    let mut words = line.split(|byte| *byte == b' ').map(unescaped);
    let text = |word: OsString| word.to_string_lossy().into_owned();
    let device = device_number(words.nth(2)?.to_str()?)?;
    let point = words.nth(1)?.into();
    let own = text(words.next()?);
    // Any number of optional fields, up to a hyphen.
    words.find(|word| word == "-")?;
    let (kind, source) = (text(words.next()?), text(words.next()?));
    let mut options: Vec<String> = Vec::new();
    for option in own.split(',').chain(text(words.next().unwrap_or_default()).split(',')) {
        if !option.is_empty() && !options.iter().any(|there| there == option) {
            options.push(option.to_owned());
        }
    }
    Some(Mount { device, point, kind, source, options })
}

/// Blanks, backslashes and similar bytes are written as three octal digits.
fn unescaped(word: &[u8]) -> OsString {
    let mut plain = Vec::with_capacity(word.len());
    let mut rest = word;
    while let [first, tail @ ..] = rest {
        let digits = tail.get(..3).filter(|d| d.iter().all(|d| (b'0'..=b'7').contains(d)));
        rest = match digits {
            Some(digits) if *first == b'\\' => {
                let code = digits.iter().fold(0u32, |code, d| code * 8 + u32::from(d - b'0'));
                plain.push(code as u8);
                &tail[3..]
            }
            _ => {
                plain.push(*first);
                tail
            }
        };
    }
    OsString::from_vec(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"\
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
22 27 0:20 / /srv/a\\040b rw,nosuid - tmpfs tmp\\134fs rw,size=1k
23 27 7:0 / /srv rw - ext4 /dev/loop0 rw,nobarrier
24 27 7:1 / /srv rw master:2 propagate_from:1 - xfs /dev/loop1 rw,attr2
nonsense
25 27 7:2 / /srvx rw - btrfs /dev/loop2 rw
";

    #[test]
    fn mounts_are_read() {
        let mounts = parse(TABLE);
        assert_eq!(mounts.len(), 5);
        assert_eq!(mounts[0].options, ["rw", "relatime", "discard"]);
        assert_eq!(mounts[1].point, Path::new("/srv/a b"));
        assert_eq!(mounts[1].source, "tmp\\fs");
        assert_eq!((mounts[3].device, mounts[3].kind.as_str()), ((7, 1), "xfs"));
        assert_eq!(unescaped(b"a\\040\\134b\\0"), "a \\b\\0");
    }

    #[test]
    fn the_deepest_and_last_mount_wins() {
        let mounts = parse(TABLE);
        let kind = |path: &str| of(&mounts, Path::new(path)).map(|mount| mount.kind.as_str());
        assert_eq!(kind("/etc/passwd"), Some("ext4"));
        assert_eq!(kind("/srv/disk"), Some("xfs"));
        assert_eq!(kind("/srv/a b/disk"), Some("tmpfs"));
        assert_eq!(kind("/srvx/disk"), Some("btrfs"));
        assert_eq!(of(&[], Path::new("/")), None);
    }

    #[test]
    fn the_root_is_on_something() {
        assert!(of(&all(), Path::new("/")).is_some_and(|mount| !mount.kind.is_empty()));
    }
}
