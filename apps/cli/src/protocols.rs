//! Names that use a protocol of QEMU or another program, with the way to do the same with vdkit.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use crate::commands::is_export;
use crate::failure::{Exit, Failure, quoted};

/// The answer to one kind of name. `NAME` stands for the name itself, quoted for a shell.
struct Protocol {
    /// What comes before the colon.
    schemes: &'static [&'static str],
    read: &'static str,
    /// How to write it, if it differs from reading.
    write: &'static str,
}

const fn of(schemes: &'static [&'static str], read: &'static str, write: &'static str) -> Protocol {
    Protocol { schemes, read, write }
}

/// Schemes that the registry opens. Commands that open files without it refuse them.
const NBD: &[&str] = &["nbd", "nbds", "nbd+unix", "nbds+unix"];

const PROTOCOLS: &[Protocol] = &[
    of(
        &["s3"],
        "have it sent: 'aws s3 cp NAME - | vdkit convert - TARGET'",
        "send it: 'vdkit convert SOURCE -O raw - | aws s3 cp - NAME'",
    ),
    of(
        &["gs"],
        "have it sent: 'gcloud storage cat NAME | vdkit convert - TARGET'",
        "send it: 'vdkit convert SOURCE -O raw - | gcloud storage cp - NAME'",
    ),
    of(
        NBD,
        "'vdkit convert NAME FILE' makes a file of it first",
        "'vdkit convert SOURCE NAME' writes to an export; its server makes it",
    ),
    of(
        &["rbd"],
        "have it sent: 'rbd export POOL/IMAGE - | vdkit convert - TARGET'; or map it ('rbd map') and name the device",
        "send it: 'vdkit convert SOURCE -O raw - | rbd import - POOL/IMAGE'; or map it ('rbd map') and name the device",
    ),
    of(
        &["ssh", "sftp", "scp"],
        "have it sent: 'ssh HOST cat FILE | vdkit convert - TARGET'",
        "send it: 'vdkit convert SOURCE -O raw - | ssh HOST \"cat > FILE\"'",
    ),
    of(
        &["ftp", "ftps", "tftp"],
        "have it sent: 'curl NAME | vdkit convert - TARGET'",
        "send it: 'vdkit convert SOURCE -O raw - | curl -T - NAME'",
    ),
    of(
        &["http", "https"],
        "only 'vdkit convert' reads URLs: 'vdkit convert NAME FILE' first",
        "nothing writes to a URL: make a file and send that",
    ),
    of(
        &["iscsi", "iser"],
        "log in ('iscsiadm') and name the device",
        "log in ('iscsiadm') and name the device",
    ),
    of(
        &["nfs", "gluster", "gluster+tcp", "smb", "cifs"],
        "mount it, and name the file there",
        "mount it, and name the file there",
    ),
    of(
        &["file"],
        "leave out 'file:' and name the file itself",
        "leave out 'file:' and name the file itself",
    ),
    of(
        &["json", "driver", "fat", "vvfat", "blkdebug", "host_device", "null-co", "null-aio"],
        "that is a name for QEMU: name the file or device itself; -f names its format",
        "that is a name for QEMU: name the file or device itself; -O names its format ('null:' writes nothing)",
    ),
];

/// The protocol of a name such as `s3://bucket/key` or `rbd:pool/image`.
fn protocol_of(name: &str) -> Option<(&'static str, &'static Protocol)> {
    let (before, _) = name.split_once(':')?;
    PROTOCOLS.iter().find_map(|protocol| {
        let scheme = protocol.schemes.iter().find(|known| known.eq_ignore_ascii_case(before))?;
        Some((*scheme, protocol))
    })
}

/// The error and the hint for a name that uses a protocol.
pub(crate) fn unread(name: &str) -> Option<(String, String)> {
    if name == "-" {
        return Some((
            "-: only 'vdkit convert' reads standard input".to_owned(),
            "make a file of it first: 'vdkit convert - FILE'".to_owned(),
        ));
    }
    let (scheme, protocol) = protocol_of(name)?;
    let message = match scheme {
        "http" | "https" => format!("{name}: this command does not read URLs"),
        scheme if NBD.contains(&scheme) => {
            format!("{name}: this command does not use NBD exports")
        }
        _ => format!("{name}: vdkit does not read '{scheme}:' names"),
    };
    Some((message, protocol.read.replace("NAME", &quoted(name))))
}

/// Refuses a target whose name uses a protocol: vdkit would otherwise create a file of that name in
/// the current folder.
///
/// # Errors
/// Exit code 2, with how to write there.
pub(crate) fn refuse_target(target: &Path) -> Result<(), Failure> {
    let name = target.display().to_string();
    match name.as_str() {
        "/dev/stdout" | "/dev/stdin" | "/dev/fd/0" | "/dev/fd/1" => {
            let message = format!("{name}: is no file that an image could be put in");
            return Err(
                Failure::usage(message).hint("'vdkit convert SOURCE -' writes to standard output")
            );
        }
        _ if target.metadata().is_ok_and(|found| found.file_type().is_fifo()) => {
            return Err(Failure::failed(format!("{name}: is a pipe")).hint(
                "'vdkit convert SOURCE - > PIPE' (or '- | PROGRAM') sends the disk through it in order",
            ));
        }
        _ => {}
    }
    let written = |scheme| target.exists() || (NBD.contains(&scheme) && is_export(target));
    let Some((scheme, protocol)) = protocol_of(&name).filter(|(scheme, _)| !written(*scheme))
    else {
        return Ok(());
    };
    Err(Failure::Told(
        Exit::Usage,
        format!("{name}: vdkit does not write to '{scheme}:' names"),
        Some(format!(
            "{}; a file of this name is written as './{name}'",
            protocol.write.replace("NAME", &quoted(&name))
        )),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_protocols_are_told_from_names_of_files() {
        for name in ["s3://b/k", "S3:b/k", "nbd+unix:///x?socket=s", "rbd:p/i", "json:{}", "-"] {
            assert!(unread(name).is_some(), "{name}");
        }
        for name in ["a:b", "./s3:x", "disk.qcow2", "c:\\disk.vhd", ""] {
            assert!(unread(name).is_none(), "{name}");
            assert!(refuse_target(Path::new(name)).is_ok(), "{name}");
        }
        let schemes: Vec<_> = PROTOCOLS.iter().flat_map(|protocol| protocol.schemes).collect();
        let unique: std::collections::BTreeSet<_> = schemes.iter().collect();
        assert_eq!(schemes.len(), unique.len());
        assert!(unread("s3://b/a k").unwrap().1.contains("aws s3 cp 's3://b/a k' -"));
    }
}
