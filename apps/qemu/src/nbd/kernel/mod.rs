//! `-c` and `-d`: a disk of this server as a device of the kernel, by the kernel's generic netlink
//! family `nbd` (`linux/nbd-netlink.h`).
//!
//! ```text
//!   server ◄── socket ── negotiation ──► its descriptor goes to the kernel, which sends the
//!                                        requests of /dev/nbdN from then on
//! ```

mod netlink;

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use netlink::{Attributes, Netlink};
use vdkit::nbd_client::{ExportInfo, open_simple};

use crate::failure::{Failure, system_words};

const FAMILY: &str = "nbd";

/// Commands.
const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;

mod attribute {
    pub(super) const INDEX: u16 = 1;
    pub(super) const SIZE_BYTES: u16 = 2;
    pub(super) const BLOCK_SIZE_BYTES: u16 = 3;
    pub(super) const SERVER_FLAGS: u16 = 5;
    pub(super) const SOCKETS: u16 = 7;
    /// In `SOCKETS`, and in each item.
    pub(super) const SOCKET_ITEM: u16 = 1;
    pub(super) const SOCKET_FD: u16 = 1;
}

/// Bytes of a sector of the device.
const SECTOR_BYTES: u64 = 512;

/// The number of a device of the kernel's nbd.
///
/// # Errors
/// It is missing, or no such device.
pub fn index(device: &Path, verb: &str) -> Result<u32, Failure> {
    let found = device.canonicalize().map_err(|error| {
        let hint = "\nThe kernel's nbd makes these devices; 'modprobe nbd' loads it.";
        Failure::new(format!("{verb} {}: {}{hint}", device.display(), system_words(&error)))
    })?;
    let name = found.file_name().unwrap_or_default().to_string_lossy();
    let number = name.strip_prefix("nbd").and_then(|number| number.parse().ok());
    number.filter(|_| found.parent() == Some(Path::new("/dev"))).ok_or_else(|| {
        Failure::new(format!("{} is no device of the kernel's nbd (/dev/nbd0 …)", device.display()))
    })
}

/// The attributes that attach a socket to a device.
fn connecting(index: u32, exported: &ExportInfo, socket: impl AsFd) -> Attributes {
    let fd = socket.as_fd().as_raw_fd() as u32;
    let item = Attributes::default().with_u32(attribute::SOCKET_FD, fd);
    let sockets = Attributes::default().with_nested(attribute::SOCKET_ITEM, &item);
    Attributes::default()
        .with_u32(attribute::INDEX, index)
        .with_u64(attribute::SIZE_BYTES, exported.bytes / SECTOR_BYTES * SECTOR_BYTES)
        .with_u64(attribute::BLOCK_SIZE_BYTES, SECTOR_BYTES)
        .with_u64(attribute::SERVER_FLAGS, exported.flags.into())
        .with_nested(attribute::SOCKETS, &sockets)
}

fn command<F: AsFd>(
    kernel: &mut Netlink<F>,
    command: u8,
    attributes: &Attributes,
) -> Result<(), Failure> {
    let family = kernel.family(FAMILY).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Failure::new(
            "the kernel has no nbd client (generic netlink family 'nbd'): load it with 'modprobe nbd'",
        ),
        _ => Failure::new(format!("generic netlink: {}", system_words(&error))),
    })?;
    kernel.request(family, command, attributes).map(drop).map_err(Failure::from)
}

/// Connects to the server at a socket, and gives the connection to the kernel as this device.
///
/// # Errors
/// The kernel's nbd is not there, or the device is in use.
pub fn attach(device: &Path, server: &Path, export: &str) -> Result<(), Failure> {
    let index = index(device, "Failed to open")?;
    let mut kernel = Netlink::connect()?;
    let socket = UnixStream::connect(server)?;
    let exported = open_simple(socket.try_clone()?, export)?;
    command(&mut kernel, CONNECT, &connecting(index, &exported, &socket)).map_err(|failure| {
        Failure::new(format!("Failed to attach {}: {}", device.display(), failure.text))
    })
}

/// Detaches a device.
///
/// # Errors
/// The kernel's nbd is not there, or the device is not attached.
pub fn detach(device: &Path) -> Result<(), Failure> {
    let wanted = Attributes::default().with_u32(attribute::INDEX, index(device, "Cannot open")?);
    command(&mut Netlink::connect()?, DISCONNECT, &wanted).map_err(|failure| {
        Failure::new(format!("Failed to detach {}: {}", device.display(), failure.text))
    })
}

#[cfg(test)]
mod tests {
    use std::thread;

    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

    use super::netlink::{message, tests::answer};
    use super::*;

    const ERROR: u16 = 2;

    #[test]
    #[cfg(target_endian = "little")]
    fn the_command_to_attach_is_as_the_kernel_documents_it() {
        let (socket, _peer) = UnixStream::pair().unwrap();
        let mut exported = ExportInfo::default();
        (exported.bytes, exported.flags) = ((5 << 20) + 3, 0x0105);
        let bytes = message(0x21, CONNECT, 2, &connecting(3, &exported, &socket));
        let mut wanted = vec![84, 0, 0, 0, 0x21, 0, 5, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0];
        wanted.extend([8, 0, 1, 0, 3, 0, 0, 0]);
        wanted.extend([12, 0, 2, 0, 0, 0, 0x50, 0, 0, 0, 0, 0]);
        wanted.extend([12, 0, 3, 0, 0, 2, 0, 0, 0, 0, 0, 0]);
        wanted.extend([12, 0, 5, 0, 5, 1, 0, 0, 0, 0, 0, 0]);
        wanted.extend([16, 0, 7, 0x80, 12, 0, 1, 0x80, 8, 0, 1, 0]);
        wanted.extend(socket.as_raw_fd().to_le_bytes());
        wanted[0] = wanted.len() as u8;
        assert_eq!(bytes, wanted);
    }

    /// A peer in the place of the kernel: it knows the family or not, and answers the command with
    /// an error number. Returns what it got.
    fn with_peer(family: Option<u16>, error: i32) -> (Result<(), Failure>, Vec<Vec<u8>>) {
        // Messages stay apart, as with netlink, and the end is seen.
        let kind = SocketType::SEQPACKET;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        let peer = thread::spawn(move || {
            let mut got = Vec::new();
            let mut buffer = [0; 4096];
            let send = |bytes: &[u8]| {
                rustix::net::send(&theirs, bytes, SendFlags::empty()).unwrap();
            };
            let receive =
                |buffer: &mut [u8]| rustix::net::recv(&theirs, buffer, RecvFlags::empty());
            while let Ok((len @ 1.., _)) = receive(&mut buffer) {
                let number = got.len() as u32 + 1;
                got.push(buffer[..len].to_vec());
                let code = match (got.len(), family) {
                    (1, None) => -2_i32,
                    (1, Some(family)) => {
                        // Four bytes of the command come before the attributes.
                        let body =
                            [&[1, 2, 0, 0], &[6, 0, 1, 0][..], &family.to_ne_bytes()].concat();
                        send(&answer(0x10, number, &[&body[..], &[0, 0]].concat()));
                        0
                    }
                    _ => -error,
                };
                send(&answer(ERROR, number, &code.to_ne_bytes()));
            }
            got
        });
        let mut kernel = Netlink::over(ours);
        let wanted = Attributes::default().with_u32(attribute::INDEX, 4);
        let done = command(&mut kernel, DISCONNECT, &wanted);
        drop(kernel);
        (done, peer.join().unwrap())
    }

    #[test]
    fn a_command_goes_to_the_family_that_the_kernel_names() {
        let (done, got) = with_peer(Some(0x1c), 0);
        done.unwrap();
        assert_eq!(got.len(), 2);
        assert_eq!(got[1][4..6], 0x1c_u16.to_ne_bytes());
        assert_eq!(got[1][16], DISCONNECT);
        let attributes = Attributes::received(&got[1][20..]);
        assert_eq!(attributes.get(attribute::INDEX), Some(&4_u32.to_ne_bytes()[..]));
    }

    #[test]
    fn a_kernel_without_nbd_is_told_how_to_get_it() {
        let (done, got) = with_peer(None, 0);
        assert!(done.unwrap_err().text.contains("modprobe nbd"));
        assert_eq!(got.len(), 1);
        let busy = 16;
        let (done, _) = with_peer(Some(0x1c), busy);
        assert!(done.unwrap_err().text.contains("busy"));
        let missing = index(Path::new("/dev/nothing"), "Failed to open").unwrap_err().text;
        assert!(missing.starts_with("Failed to open /dev/nothing: No such file"), "{missing}");
        assert!(index(Path::new("/dev/null"), "Failed to open").is_err());
    }
}
