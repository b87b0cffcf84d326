//! The byte stream of a connection: a socket, or TLS over one.

use std::io::{self, IoSlice};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, sendmsg, socket_with,
};

use crate::tls::TlsStream;
use crate::uri::Place;
use crate::wire::{self, Transport, keep_alive, time_left};

/// A plain socket.
#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

impl Socket {
    /// Connects to a server.
    ///
    /// # Errors
    /// Errors of the system; `TimedOut` after `until`.
    pub(crate) fn connect(place: &Place, until: Instant) -> io::Result<Self> {
        match place {
            Place::Unix(path) => Self::unix(path, until),
            Place::Tcp { host, port } => {
                let addresses: Vec<_> = (host.as_str(), *port).to_socket_addrs()?.collect();
                Self::first_of(&addresses, until)
            }
        }
    }

    /// Connects to the first of these addresses that answers. Each has an equal share of the time
    /// that is left, so that one without an answer leaves time for the others.
    ///
    /// # Errors
    /// That of the last address; `TimedOut` after `until`.
    pub(crate) fn first_of(addresses: &[SocketAddr], until: Instant) -> io::Result<Self> {
        let mut failed = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
        for (address, shares) in addresses.iter().zip((1..=addresses.len() as u32).rev()) {
            match TcpStream::connect_timeout(address, time_left(until)? / shares) {
                Ok(stream) => return Self::tcp(stream),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    /// A connected socket.
    pub(crate) fn over(stream: impl Into<OwnedFd>) -> Self {
        Self(stream.into())
    }

    fn unix(path: &Path, until: Instant) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let (socket, address) = (Self::over(socket), SocketAddrUnix::new(path)?);
        // While as many clients wait as the server's queue takes, connecting waits as a send does.
        socket.set_timeout(Some(time_left(until)?))?;
        match rustix::io::retry_on_intr(|| connect(&socket.0, &address)) {
            Ok(()) => Ok(socket),
            Err(Errno::AGAIN) => Err(io::ErrorKind::TimedOut.into()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        keep_alive(&stream)?;
        Ok(Self::over(stream))
    }

    fn recv_with(&self, buf: &mut [u8], flags: RecvFlags) -> io::Result<usize> {
        let got = rustix::io::retry_on_intr(|| recv(&self.0, &mut *buf, flags));
        Ok(got.map(|(got, _)| got)?)
    }

    /// Sends all bytes of a header and of a payload.
    fn send_both(&self, mut head: &[u8], mut payload: &[u8]) -> io::Result<()> {
        while !head.is_empty() || !payload.is_empty() {
            let slices = [IoSlice::new(head), IoSlice::new(payload)];
            let flags = SendFlags::NOSIGNAL;
            let mut control = SendAncillaryBuffer::default();
            let sent =
                rustix::io::retry_on_intr(|| sendmsg(&self.0, &slices, &mut control, flags))?;
            let of_head = sent.min(head.len());
            head = &head[of_head..];
            payload = &payload[sent - of_head..];
        }
        Ok(())
    }

    /// Makes the last close of a TCP connection a reset: the kernel drops what it has not sent,
    /// instead of trying for minutes.
    fn reset_at_close(&self) {
        // An error means that the connection has ended already.
        let _ = sockopt::set_socket_linger(&self.0, Some(Duration::ZERO));
    }

    fn shutdown(&self) {
        // An error means that the connection has ended already.
        let _ = rustix::net::shutdown(&self.0, Shutdown::Both);
    }
}

impl Transport for Socket {
    fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.recv_with(buf, RecvFlags::empty())
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.send_both(bytes, &[])
    }

    /// Sends what the socket has room for.
    fn send_ready(&self, bytes: &[u8]) -> io::Result<(usize, bool)> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::io::retry_on_intr(|| rustix::net::send(&self.0, bytes, flags)) {
            Err(Errno::AGAIN) => Ok((0, true)),
            sent => Ok((sent?, true)),
        }
    }

    fn set_timeout(&self, most: Option<Duration>) -> io::Result<()> {
        for side in [Timeout::Recv, Timeout::Send] {
            sockopt::set_socket_timeout(&self.0, side, most)?;
        }
        Ok(())
    }
}

/// A connection's byte stream. At most one thread receives and one sends at a time.
#[derive(Debug)]
pub(crate) enum Channel {
    /// Without TLS.
    Plain(Socket),
    /// Within TLS.
    Tls(Box<TlsStream>),
}

impl Channel {
    fn socket(&self) -> &Socket {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => stream.socket(),
        }
    }

    /// Receives some bytes; 0 at the end.
    ///
    /// # Errors
    /// Errors of the socket; `WouldBlock` after the time limit; `InvalidData` if TLS fails.
    pub(crate) fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.recv(buf),
            Self::Tls(stream) => stream.recv(buf),
        }
    }

    /// As [`Channel::recv`], for bytes that the peer is about to send: one system call receives more
    /// of them.
    ///
    /// # Errors
    /// As [`Channel::recv`].
    pub(crate) fn recv_much(&self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.recv_with(buf, RecvFlags::WAITALL),
            Self::Tls(stream) => stream.recv(buf),
        }
    }

    /// Sends all bytes of a header and of a payload.
    ///
    /// # Errors
    /// As [`Channel::recv`].
    pub(crate) fn send(&self, head: &[u8], payload: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(socket) => socket.send_both(head, payload),
            Self::Tls(stream) => stream.send_both(head, payload),
        }
    }

    /// Time limit of each call of [`Channel::recv`], and of each wait for room in
    /// [`Channel::send`].
    pub(crate) fn set_timeout(&self, most: Option<Duration>) -> io::Result<()> {
        self.socket().set_timeout(most)
    }

    /// Ends both directions; wakes threads that wait.
    pub(crate) fn shutdown(&self) {
        self.socket().shutdown();
    }

    /// As [`Channel::shutdown`]. Bytes that were not sent by then never are, once this is dropped.
    pub(crate) fn abort(&self) {
        self.socket().reset_at_close();
        self.shutdown();
    }

    /// Fills `buf` before `until`.
    ///
    /// # Errors
    /// Errors of the socket; `UnexpectedEof`; `TimedOut`.
    pub(crate) fn recv_exact(&self, buf: &mut [u8], until: Instant) -> io::Result<()> {
        wire::recv_exact(buf, until, |rest, left| {
            self.set_timeout(Some(left))?;
            self.recv(rest)
        })
    }
}
