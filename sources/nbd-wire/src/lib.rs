//! What both sides of the NBD protocol share. The client (`vdkit-nbd-client`) and the server
//! (`vdkit-nbd`) are on different floors and do not import one another; both import this crate.
//!
//! | what | where |
//! |---|---|
//! | the protocol's numbers, by the section names of the NBD project's `doc/proto.md` | here |
//! | a connection's byte stream, with TLS or without: [`Transport`] | here |
//! | TLS without a socket (feature `tls`) | `tls` |
//! | the same with pre-shared keys (feature `tls-psk`) | `psk`, `wires` |
//!
//! All integers of the protocol are big-endian.

#![allow(missing_docs, reason = "the names are the protocol's own")]

#[cfg(feature = "tls-psk")]
pub mod psk;
#[cfg(feature = "tls")]
pub mod tls;
#[cfg(feature = "tls-psk")]
mod wires;

use std::io;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::net::sockopt;

/// First word of a server ("NBDMAGIC").
pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Before the server's flags and each option ("IHAVEOPT").
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Second word of a server that knows only the oldstyle negotiation.
pub const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
/// Before each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Before a request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Before a request with an extended header.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Before a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Before a chunk of a structured reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;
/// Before a chunk with an extended header.
pub const EXTENDED_CHUNK_MAGIC: u32 = 0x6e8a_278c;

/// Handshake flags, of both sides.
pub mod handshake {
    /// Fixed newstyle.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// No padding after the answer to NBD_OPT_EXPORT_NAME.
    pub const NO_ZEROES: u16 = 2;
}

/// Options of the handshake.
pub mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options.
pub mod answer {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    /// Bit of all types that report an error.
    pub const ERROR: u32 = 1 << 31;
    pub const UNSUPPORTED: u32 = ERROR + 1;
    pub const POLICY: u32 = ERROR + 2;
    pub const INVALID: u32 = ERROR + 3;
    pub const PLATFORM: u32 = ERROR + 4;
    pub const TLS_REQUIRED: u32 = ERROR + 5;
    pub const UNKNOWN: u32 = ERROR + 6;
    pub const SHUTDOWN: u32 = ERROR + 7;
    pub const BLOCK_SIZE_REQUIRED: u32 = ERROR + 8;
    pub const TOO_BIG: u32 = ERROR + 9;
    pub const EXTENDED_HEADERS_REQUIRED: u32 = ERROR + 10;
}

/// Pieces of information about an export.
pub mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags.
pub mod flag {
    pub const HAS_FLAGS: u16 = 1;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const ROTATIONAL: u16 = 1 << 4;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_RESIZE: u16 = 1 << 9;
    pub const SEND_CACHE: u16 = 1 << 10;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// Requests.
pub mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
    /// Number of request types.
    pub const KINDS: usize = 8;
}

/// Flags of requests.
pub mod request_flag {
    pub const FUA: u16 = 1;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Types of chunks.
pub mod chunk {
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// Bit of all types that report an error.
    pub const ERROR_BIT: u16 = 1 << 15;
    pub const ERROR: u16 = ERROR_BIT + 1;
    pub const ERROR_OFFSET: u16 = ERROR_BIT + 2;
    /// Flag of the last chunk of a reply.
    pub const DONE: u16 = 1;
}

/// Errors in replies.
pub mod errno {
    pub const PERM: u32 = 1;
    pub const IO: u32 = 5;
    pub const NOMEM: u32 = 12;
    pub const INVAL: u32 = 22;
    pub const NOSPC: u32 = 28;
    pub const OVERFLOW: u32 = 75;
    pub const NOTSUP: u32 = 95;
    pub const SHUTDOWN: u32 = 108;
}

/// The largest payload in bytes of a request or chunk, unless the server names a smaller one.
pub const PAYLOAD_MAX: u32 = 32 << 20;
/// The longest name or other string, in bytes.
pub const STRING_MAX: usize = 4096;
/// The port that IANA assigned.
pub const PORT: u16 = 10809;

/// Bytes of a request header.
pub const REQUEST_BYTES: usize = 28;
/// Bytes of a request with an extended header.
pub const EXTENDED_REQUEST_BYTES: usize = 32;
/// Bytes of a simple reply header.
pub const SIMPLE_REPLY_BYTES: usize = 16;
/// Bytes of a chunk header.
pub const CHUNK_BYTES: usize = 20;
/// Bytes of a chunk with an extended header.
pub const EXTENDED_CHUNK_BYTES: usize = 32;

/// Time without traffic after which the kernel asks whether the other host still answers.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Lets the kernel notice that the other host is dead: about half a minute after the last traffic.
///
/// # Errors
/// Errors of the system.
pub fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEP_ALIVE)?;
    sockopt::set_tcp_keepintvl(stream, KEEP_ALIVE / 3)?;
    Ok(sockopt::set_tcp_keepcnt(stream, 3)?)
}

/// The time that is left until a deadline.
///
/// # Errors
/// `TimedOut` after it.
pub fn time_left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Fills `buf` before `until` by `recv`, which gets the time that is left and returns 0 at the end.
///
/// # Errors
/// Errors of `recv`, but for `WouldBlock`, which says that a timeout has passed; `UnexpectedEof`;
/// `TimedOut`.
pub fn recv_exact(
    buf: &mut [u8],
    until: Instant,
    mut recv: impl FnMut(&mut [u8], Duration) -> io::Result<usize>,
) -> io::Result<()> {
    let mut done = 0;
    while done < buf.len() {
        match recv(&mut buf[done..], time_left(until)?) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => done += got,
            // The socket's timeout has passed, but perhaps not the deadline.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A connection's byte stream: a socket, or TLS over one. At most one thread receives and one sends
/// at a time.
pub trait Transport {
    /// Receives some bytes; 0 at the end.
    ///
    /// # Errors
    /// Errors of the socket; `WouldBlock` after the time limit; `InvalidData` if TLS fails.
    fn recv(&self, buf: &mut [u8]) -> io::Result<usize>;

    /// Sends all bytes.
    fn send(&self, bytes: &[u8]) -> io::Result<()>;

    /// Sends what is possible without waiting for long. Returns how many bytes were taken, and
    /// whether these were all sent. If not, call [`Transport::send`], even with no bytes: it sends
    /// the rest first.
    fn send_ready(&self, bytes: &[u8]) -> io::Result<(usize, bool)> {
        self.send(bytes).map(|()| (bytes.len(), true))
    }

    /// Time limit of each call that waits.
    fn set_timeout(&self, most: Option<Duration>) -> io::Result<()>;
}

/// Percent-encodes text for a part of a URI.
pub fn percent(text: impl AsRef<[u8]>) -> String {
    let mut out = String::new();
    for byte in text.as_ref() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(byte) {
            out.push(char::from(*byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_dead_host_is_noticed_within_a_minute() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        keep_alive(&stream).unwrap();
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        let asked = sockopt::tcp_keepintvl(&stream).unwrap();
        let count = sockopt::tcp_keepcnt(&stream).unwrap();
        let all = sockopt::tcp_keepidle(&stream).unwrap() + asked * count;
        assert!(all <= Duration::from_secs(60), "{all:?}");
    }
}
