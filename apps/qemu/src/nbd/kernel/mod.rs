//! `-c` and `-d`: a disk of this server as a device of the kernel, by the kernel's generic netlink
//! family `nbd` (`linux/nbd-netlink.h`).
//!
//! ```text
//!   server ◄── socket ── negotiation (here) ──► its descriptor goes to the kernel, which sends the
//!                                               requests of /dev/nbdN from then on
//! ```

mod netlink;

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use netlink::{Attributes, Netlink};

use crate::failure::{Failure, system_words};

/// The family's name.
const FAMILY: &str = "nbd";

/// Commands.
const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;

/// Attributes of a command.
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

/// Numbers of the negotiation (doc/proto.md of NBD).
const OLD_MAGIC: &[u8; 8] = b"NBDMAGIC";
const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const FIXED_NO_ZEROES: u32 = 3;
const GO: u32 = 7;
const ACKNOWLEDGED: u32 = 1;
const INFO: u32 = 3;
const INFO_EXPORT: u16 = 0;
/// The longest answer to an option that is read.
const REPLY_BYTES_MAX: u32 = 64 << 10;

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

/// What a server says of its export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Exported {
    bytes: u64,
    /// The transmission flags.
    flags: u16,
}

/// Negotiates with a server up to the first request.
fn negotiate(server: &mut (impl Read + Write), name: &str) -> io::Result<Exported> {
    let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let mut greeting = [0; 18];
    server.read_exact(&mut greeting)?;
    if greeting[..8] != *OLD_MAGIC || greeting[8..16] != *OPTION_MAGIC {
        return Err(bad("this is no NBD server of the newer style"));
    }
    server.write_all(&FIXED_NO_ZEROES.to_be_bytes())?;
    let mut option = OPTION_MAGIC.to_vec();
    option.extend(GO.to_be_bytes());
    // The name with its length, and no requests for information.
    option.extend((name.len() as u32 + 6).to_be_bytes());
    option.extend((name.len() as u32).to_be_bytes());
    option.extend(name.as_bytes());
    option.extend([0, 0]);
    server.write_all(&option)?;
    let mut exported = None;
    loop {
        let mut head = [0; 20];
        server.read_exact(&mut head)?;
        let word =
            |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let magic = u64::from(word(0)) << 32 | u64::from(word(4));
        let (kind, len) = (word(12), word(16));
        if magic != REPLY_MAGIC || len > REPLY_BYTES_MAX {
            return Err(bad("the server's answer is none of NBD"));
        }
        let mut data = vec![0; len as usize];
        server.read_exact(&mut data)?;
        match (kind, &data[..]) {
            (ACKNOWLEDGED, _) => {
                return exported.ok_or_else(|| bad("the server did not tell its size"));
            }
            (INFO, [k0, k1, bytes @ .., f0, f1])
                if u16::from_be_bytes([*k0, *k1]) == INFO_EXPORT && bytes.len() == 8 =>
            {
                let bytes = bytes.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
                exported = Some(Exported { bytes, flags: u16::from_be_bytes([*f0, *f1]) });
            }
            (INFO, _) => {}
            _ => return Err(bad("the server refuses the export")),
        }
    }
}

/// The attributes that attach a socket to a device.
fn connecting(index: u32, exported: Exported, socket: impl AsFd) -> Attributes {
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
    let mut socket = UnixStream::connect(server)?;
    let exported = negotiate(&mut socket, export)?;
    command(&mut kernel, CONNECT, &connecting(index, exported, &socket)).map_err(|failure| {
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
        let exported = Exported { bytes: (5 << 20) + 3, flags: 0x0105 };
        let bytes = message(0x21, CONNECT, 2, &connecting(3, exported, &socket));
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

    #[test]
    fn the_servers_size_and_flags_are_read() {
        let (mut client, mut server) = UnixStream::pair().unwrap();
        let reply = |kind: u32, data: &[u8]| {
            let mut bytes = REPLY_MAGIC.to_be_bytes().to_vec();
            bytes.extend(GO.to_be_bytes());
            bytes.extend(kind.to_be_bytes());
            bytes.extend((data.len() as u32).to_be_bytes());
            bytes.extend(data);
            bytes
        };
        let mut said = [&OLD_MAGIC[..], OPTION_MAGIC, &[0, 3]].concat();
        said.extend(reply(INFO, &[0, 3, 0, 0, 0, 1, 0, 0, 16, 0, 0, 16, 0, 0]));
        said.extend(reply(INFO, &[0, 0, 0, 0, 0, 0, 0, 80, 0, 0, 1, 5]));
        said.extend(reply(ACKNOWLEDGED, &[]));
        server.write_all(&said).unwrap();
        let exported = negotiate(&mut client, "x").unwrap();
        assert_eq!(exported, Exported { bytes: 80 << 16, flags: 0x105 });
        drop(client);
        let mut heard = Vec::new();
        server.read_to_end(&mut heard).unwrap();
        let option = [&[0, 0, 0, 3][..], OPTION_MAGIC, &[0, 0, 0, 7, 0, 0, 0, 7, 0, 0, 0, 1]];
        assert_eq!(heard, [&option.concat()[..], b"x\0\0"].concat());
    }
}
