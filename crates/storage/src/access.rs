//! Who may use a file, passed on to the file that takes its place.

use std::ffi::CStr;
use std::fs::File;

use rustix::fs::{Gid, Mode, Uid, XattrFlags};
use rustix::io::Errno;

/// The access control list. Where a file has one, the group's bits of its mode are the list's mask.
const ACCESS_LIST: &CStr = c"system.posix_acl_access";

/// Bytes of all names of extended attributes, and of one value, at most: Linux takes no more.
const ATTRIBUTE_BYTES_MAX: usize = 64 << 10;

/// Attributes that are about the bytes of the old file, or about its place in a file system of layers;
/// on other bytes they would be wrong.
const NOT_PASSED_ON: [&[u8]; 4] =
    [b"security.capability", b"security.evm", b"security.ima", b"trusted.overlay."];

/// Kinds of attributes that mean on the new file what they meant on the old one. Others are the file
/// system's own.
const PASSED_ON: [&[u8]; 3] = [b"user.", b"security.", b"trusted."];

/// Whether an errno says that an attribute is not there, or cannot be had or set by us or here.
fn is_beyond_us(errno: Errno) -> bool {
    // (A list that names users who do not exist in our user namespace is invalid here.)
    matches!(errno, Errno::OPNOTSUPP | Errno::NODATA | Errno::PERM | Errno::ACCESS | Errno::INVAL)
}

/// Gives a new file, which is its owner's alone so far, the old one's owner, mode, access control list
/// and extended attributes, as far as we may. Whoever could not use the old file can never use the new
/// one.
pub(crate) fn pass_on(old: &File, new: &File) -> Result<(), Errno> {
    let stat = rustix::fs::fstat(old)?;
    let (owner, group) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
    let owned = rustix::fs::fchown(new, Some(owner), Some(group)).is_ok();
    let grouped = owned || rustix::fs::fchown(new, None, Some(group)).is_ok();
    // Before the mode and the list, which may let nobody write, not even us.
    pass_on_attributes(old, new)?;
    let mut mode = Mode::from_raw_mode(stat.st_mode);
    if !owned {
        // A program would run as us then, not as the old owner.
        mode -= Mode::SUID | Mode::SGID;
    }
    // Without the group, or without the list, the group's bits would let others in than they did.
    if !grouped || !pass_on_list(old, new)? {
        mode -= Mode::RWXG;
    }
    // After the owner: a change of owner clears bits of the mode.
    rustix::fs::fchmod(new, mode)
}

/// Gives the new file the old one's access control list, or none where that has none: the folder may
/// have given it one. `false` where the list could not be passed on.
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
