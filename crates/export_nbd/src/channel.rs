//! A connection's bytes: a socket, or one inside TLS.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// A stream of bytes in both directions. One thread receives, one sends, at a time.
pub trait Channel: Send + Sync + fmt::Debug {
    /// Some bytes; none at the end.
    ///
    /// # Errors
    /// What the socket says; `WouldBlock` after the time that was set.
    fn recv(&self, buf: &mut [u8]) -> io::Result<usize>;

    /// All of the bytes.
    ///
    /// # Errors
    /// What the socket says.
    fn send(&self, bytes: &[u8]) -> io::Result<()>;

    /// How long a [`Channel::recv`] and a [`Channel::send`] may wait.
    ///
    /// # Errors
    /// What the socket says.
    fn set_timeout(&self, most: Option<Duration>) -> io::Result<()>;

    /// Ends one or both directions, also for whoever is waiting in another thread.
    fn shutdown(&self, how: Shutdown);
}

/// A plain socket.
#[derive(Debug)]
pub enum Socket {
    /// On this machine.
    Unix(UnixStream),
    /// From anywhere.
    Tcp(TcpStream),
}

impl Channel for Socket {
    fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            let got = match self {
                Self::Unix(socket) => (&*socket).read(buf),
                Self::Tcp(socket) => (&*socket).read(buf),
            };
            match got {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                got => return got,
            }
        }
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Unix(socket) => (&*socket).write_all(bytes),
            Self::Tcp(socket) => (&*socket).write_all(bytes),
        }
    }

    fn set_timeout(&self, most: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(socket) => {
                socket.set_read_timeout(most)?;
                socket.set_write_timeout(most)
            }
            Self::Tcp(socket) => {
                socket.set_read_timeout(most)?;
                socket.set_write_timeout(most)
            }
        }
    }

    fn shutdown(&self, how: Shutdown) {
        // A peer that is gone already is no error here.
        let _ = match self {
            Self::Unix(socket) => socket.shutdown(how),
            Self::Tcp(socket) => socket.shutdown(how),
        };
    }
}
