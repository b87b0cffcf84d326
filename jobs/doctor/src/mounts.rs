//! The file system of a path, from the kernel's mount table. Source: proc(5), "mountinfo".

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// One mounted file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mounted {
    /// Mount point.
    pub(super) point: PathBuf,
    /// Type: ext4, xfs.
    pub(super) kind: String,
    /// Options of the mount and of the file system.
    pub(super) options: Vec<String>,
}

impl Mounted {
    /// The file system of an absolute path without links.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let list = std::fs::read("/proc/self/mountinfo").ok()?;
        within(&list, path)
    }

    /// A mount option that disables flushes to the device.
    ///
    /// Sources: ext4(5) `barrier`, `nobarrier`; xfs(5) `nobarrier` (until Linux 4.18); btrfs(5)
    /// `nobarrier`.
    pub(super) fn without_flushes(&self) -> Option<&str> {
        let known = ["nobarrier", "barrier=0", "barrier=none"];
        self.options.iter().map(String::as_str).find(|option| known.contains(option))
    }

    /// Whether its content is lost on power loss.
    pub(super) fn volatile(&self) -> bool {
        ["tmpfs", "ramfs"].contains(&self.kind.as_str())
    }
}

/// The last (topmost) mount with the longest mount point above `path`.
fn within(list: &[u8], path: &Path) -> Option<Mounted> {
    let lines = list.split(|byte| *byte == b'\n').filter_map(parse);
    lines.filter(|mount| path.starts_with(&mount.point)).fold(
        None,
        |best: Option<Mounted>, mount| match &best {
            Some(best) if depth(&best.point) > depth(&mount.point) => Some(best.clone()),
            _ => Some(mount),
        },
    )
}

fn depth(path: &Path) -> usize {
    path.components().count()
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`
fn parse(line: &[u8]) -> Option<Mounted> {
    let mut words = line.split(|byte| *byte == b' ');
    let point = words.nth(4)?;
    let own = words.next()?;
    // Any number of optional fields, up to a hyphen.
    words.find(|word| *word == b"-")?;
    // The source (a device, a data set) is between the two.
    let (kind, system) = (words.next()?, words.nth(1)?);
    let text = |word: &[u8]| String::from_utf8_lossy(&unescaped(word)).into_owned();
    let options = text(own) + "," + &text(system);
    Some(Mounted {
        point: PathBuf::from(OsString::from_vec(unescaped(point))),
        kind: text(kind),
        options: options.split(',').map(str::to_owned).collect(),
    })
}

/// Blanks and backslashes are escaped as three octal digits.
fn unescaped(word: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(word.len());
    let mut rest = word;
    while let [first, tail @ ..] = rest {
        let digits = tail.get(..3).filter(|d| d.iter().all(|d| (b'0'..=b'7').contains(d)));
        match digits {
            Some(digits) if *first == b'\\' => {
                let code = digits.iter().fold(0u32, |code, d| code * 8 + u32::from(d - b'0'));
                plain.push(code as u8);
                rest = &tail[3..];
            }
            _ => {
                plain.push(*first);
                rest = tail;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &[u8] = b"\
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
22 21 0:20 / /srv/a\\040b rw,nosuid - tmpfs none rw,size=1k
23 21 7:0 / /srv rw - ext4 /dev/loop0 rw,nobarrier
24 21 7:1 / /srv rw master:1 shared:7 - xfs /dev/loop1 rw
broken line
25 21 7:2 / /srvx rw - btrfs /dev/loop2 rw
";

    #[test]
    fn the_deepest_and_last_mount_wins() {
        let kind = |path: &str| within(LIST, Path::new(path)).map(|mount| mount.kind);
        assert_eq!(kind("/etc/passwd").as_deref(), Some("ext4"));
        assert_eq!(kind("/srv/disk").as_deref(), Some("xfs"));
        assert_eq!(kind("/srv/a b/disk").as_deref(), Some("tmpfs"));
        assert_eq!(kind("/srvx/disk").as_deref(), Some("btrfs"));
        assert_eq!(within(b"", Path::new("/")), None);
    }

    #[test]
    fn options_of_both_kinds_are_seen() {
        let list = b"23 21 7:0 / /srv rw - ext4 /dev/loop0 rw,nobarrier\n";
        let mount = within(list, Path::new("/srv/x")).unwrap();
        assert_eq!(mount.without_flushes(), Some("nobarrier"));
        let root = within(LIST, Path::new("/x")).unwrap();
        assert_eq!(root.options, ["rw", "relatime", "rw", "discard"]);
        assert_eq!((root.without_flushes(), root.volatile()), (None, false));
        assert!(within(LIST, Path::new("/srv/a b/c")).unwrap().volatile());
    }

    #[test]
    fn escapes_are_octal() {
        assert_eq!(unescaped(b"a\\040\\134b\\0"), b"a \\b\\0");
    }

    #[test]
    fn the_root_is_on_something() {
        assert!(Mounted::of(Path::new("/")).is_some_and(|mount| !mount.kind.is_empty()));
    }
}
