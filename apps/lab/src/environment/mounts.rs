//! Reads mounts from `/proc/self/mountinfo` (proc_pid_mountinfo(5)).

use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Device number as major and minor. Artificial for file systems without a device.
    pub device: (u32, u32),
    /// The mount point.
    pub point: PathBuf,
    /// Type of the file system.
    pub kind: String,
    /// Name of the device, or what replaces it.
    pub source: String,
    /// Options of the mount and of the file system.
    pub options: String,
}

/// Parses a device number such as `8:1`.
pub fn number(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Decodes blanks and similar bytes, which are written as three octal digits.
fn unescape(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let mut all = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let digits = (bytes[at] == b'\\').then(|| bytes.get(at + 1..at + 4)).flatten();
        let octal = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|octal| u8::from_str_radix(octal, 8).ok()) {
            Some(byte) => {
                all.push(byte);
                at += 4;
            }
            None => {
                all.push(bytes[at]);
                at += 1;
            }
        }
    }
    all
}

/// Every mount of this process, in order.
pub fn all() -> Vec<Mount> {
    parse(&std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default())
}

/// Parses every mount, in order. Skips lines that cannot be parsed.
fn parse(text: &str) -> Vec<Mount> {
    let line = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let left: Vec<&str> = left.split(' ').collect();
        let mut right = right.split(' ');
        let kind = right.next()?.to_owned();
        let source = String::from_utf8_lossy(&unescape(right.next()?)).into_owned();
        let mut options = (*left.get(5)?).to_owned();
        for option in right.next().unwrap_or_default().split(',') {
            if !options.split(',').any(|there| there == option) && !option.is_empty() {
                options.push(',');
                options.push_str(option);
            }
        }
        Some(Mount {
            device: number(left.get(2)?)?,
            point: std::ffi::OsString::from_vec(unescape(left.get(4)?)).into(),
            kind,
            source,
            options,
        })
    };
    text.lines().filter_map(line).collect()
}

/// The mount that contains a path: the last one of the deepest.
pub fn of<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    let within = mounts.iter().filter(|mount| path.starts_with(&mount.point));
    within.max_by_key(|mount| mount.point.components().count())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
31 23 0:28 / /mnt/a\\040b rw,noatime shared:1 - tmpfs tmp\\134fs rw,mode=755
nonsense
32 23 7:3 / /mnt/a\\040b/c rw master:2 propagate_from:1 - xfs /dev/loop3 rw,attr2
";

    #[test]
    fn mounts_are_read() {
        let mounts = parse(TEXT);
        assert_eq!(mounts.len(), 3);
        assert_eq!(mounts[0].options, "rw,relatime,discard");
        assert_eq!(mounts[1].point, Path::new("/mnt/a b"));
        assert_eq!(mounts[1].source, "tmp\\fs");
        assert_eq!((mounts[2].device, mounts[2].kind.as_str()), ((7, 3), "xfs"));
        let of = |path: &str| of(&mounts, Path::new(path)).unwrap().kind.clone();
        assert_eq!(
            (of("/mnt/a b/c/d"), of("/mnt/a b/d"), of("/mnt/a")),
            ("xfs".into(), "tmpfs".into(), "ext4".into())
        );
    }
}
