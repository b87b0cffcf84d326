//! Copies access rights to a file that replaces another.

use std::ffi::CStr;
use std::fs::File;

use rustix::fs::{Gid, Mode, Uid, XattrFlags};
use rustix::io::Errno;

/// The access control list. If a file has one, the group bits of its mode are the list's mask.
const ACCESS_LIST: &CStr = c"system.posix_acl_access";

/// Maximum bytes of all names of extended attributes, and of one value (Linux's limit).
const ATTRIBUTE_BYTES_MAX: usize = 64 << 10;

/// Attributes about the old file's content, or about its layer in an overlay file system; wrong for
/// other content.
const NOT_PASSED_ON: [&[u8]; 4] =
    [b"security.capability", b"security.evm", b"security.ima", b"trusted.overlay."];

/// Attribute namespaces that are copied. Others belong to the file system.
const PASSED_ON: [&[u8]; 3] = [b"user.", b"security.", b"trusted."];

/// Whether an errno means that an attribute is absent, or cannot be read or set here.
fn is_beyond_us(errno: Errno) -> bool {
    // (A list that names users outside our user namespace is invalid here.)
    matches!(errno, Errno::OPNOTSUPP | Errno::NODATA | Errno::PERM | Errno::ACCESS | Errno::INVAL)
}

/// Copies the old file's owner, mode, access control list and extended attributes to a new file, as
/// far as permitted. Until then the new file is private to its owner. No user without access to the
/// old file gains access to the new one.
pub(crate) fn pass_on(old: &File, new: &File) -> Result<(), Errno> {
    let stat = rustix::fs::fstat(old)?;
    let (owner, group) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
    let owned = rustix::fs::fchown(new, Some(owner), Some(group)).is_ok();
    let grouped = owned || rustix::fs::fchown(new, None, Some(group)).is_ok();
    // Before the mode and the list, which may deny writing even to us.
    pass_on_attributes(old, new)?;
    let listed = pass_on_list(old, new)?;
    // After the owner: chown clears mode bits.
    rustix::fs::fchmod(new, new_mode(Mode::from_raw_mode(stat.st_mode), owned, grouped, listed))
}

/// The old file's mode, less what would admit others than before if the new file does not have its
/// owner, its group or its access control list.
fn new_mode(old: Mode, owned: bool, grouped: bool, listed: bool) -> Mode {
    let mut mode = old;
    if !owned {
        // A set-uid program would run as us, not as the old owner.
        mode -= Mode::SUID | Mode::SGID;
    }
    if !grouped {
        // Members of the old group are among the others now, and members of the new one get in.
        let of_group = Mode::from_raw_mode((mode & Mode::RWXG).as_raw_mode() >> 3);
        mode -= Mode::RWXG | (Mode::RWXO - of_group);
    }
    if !listed {
        // Nobody knows whom the list kept out.
        mode -= Mode::RWXG | Mode::RWXO;
    }
    mode
}

/// Copies the access control list, or removes the one inherited from the folder if the old file has
/// none. Returns `false` if the list could not be copied.
fn pass_on_list(old: &File, new: &File) -> Result<bool, Errno> {
    let mut value = vec![0; ATTRIBUTE_BYTES_MAX];
    match rustix::fs::fgetxattr(old, ACCESS_LIST, &mut value[..]) {
        Ok(len) => {
            match rustix::fs::fsetxattr(new, ACCESS_LIST, &value[..len], XattrFlags::empty()) {
                Ok(()) => Ok(true),
                Err(errno) if is_beyond_us(errno) => Ok(false),
                Err(errno) => Err(errno),
            }
        }
        Err(Errno::NODATA | Errno::OPNOTSUPP) => match rustix::fs::fremovexattr(new, ACCESS_LIST) {
            Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(true),
            Err(errno) => Err(errno),
        },
        Err(errno) => Err(errno),
    }
}

fn pass_on_attributes(old: &File, new: &File) -> Result<(), Errno> {
    let mut names = vec![0; ATTRIBUTE_BYTES_MAX];
    let len = match rustix::fs::flistxattr(old, &mut names[..]) {
        Ok(len) => len,
        Err(errno) if is_beyond_us(errno) => return Ok(()),
        Err(errno) => return Err(errno),
    };
    let mut value = vec![0; ATTRIBUTE_BYTES_MAX];
    for name in names[..len].split_inclusive(|byte| *byte == 0) {
        let begins = |kinds: &[&[u8]]| kinds.iter().any(|kind| name.starts_with(kind));
        if !begins(&PASSED_ON) || begins(&NOT_PASSED_ON) {
            continue;
        }
        let Ok(name) = CStr::from_bytes_with_nul(name) else { continue };
        let copied = rustix::fs::fgetxattr(old, name, &mut value[..])
            .and_then(|len| rustix::fs::fsetxattr(new, name, &value[..len], XattrFlags::empty()));
        match copied {
            Ok(()) => {}
            Err(errno) if is_beyond_us(errno) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_gets_in_who_was_kept_out() {
        let mode = |old, owned, grouped, listed| {
            new_mode(Mode::from_raw_mode(old), owned, grouped, listed).as_raw_mode()
        };
        assert_eq!(mode(0o4664, true, true, true), 0o4664);
        assert_eq!(mode(0o6755, false, true, true), 0o755);
        // The group could do more than others, or less.
        assert_eq!(mode(0o664, true, false, true), 0o604);
        assert_eq!(mode(0o604, true, false, true), 0o600);
        assert_eq!(mode(0o646, true, false, true), 0o604);
        assert_eq!(mode(0o664, true, true, false), 0o600);
    }
}
