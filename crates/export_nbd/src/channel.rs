//! A connection's bytes: a socket, or one inside TLS.

use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

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

    /// All of a header, then all of the data behind it.
    ///
    /// # Errors
    /// What the socket says.
    fn send_both(&self, head: &[u8], data: &[u8]) -> io::Result<()> {
        self.send(head)?;
        self.send(data)
    }

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

impl Socket {
    /// Some of the bytes, those of one slice behind those of another.
    fn send_some(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let socket = match self {
            Self::Unix(socket) => socket.as_fd(),
            Self::Tcp(socket) => socket.as_fd(),
        };
        let send =
            || sendmsg(socket, slices, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL);
        Ok(rustix::io::retry_on_intr(send)?)
    }
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

    /// In one call, so that the peer is woken once.
    fn send_both(&self, head: &[u8], data: &[u8]) -> io::Result<()> {
        let sent = self.send_some(&[IoSlice::new(head), IoSlice::new(data)])?;
        if sent < head.len() {
            self.send(&head[sent..])?;
        }
        self.send(&data[sent.saturating_sub(head.len())..])
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_and_its_data_arrive_whole_however_small_the_sockets_buffer() {
        let (here, there) = UnixStream::pair().unwrap();
        // Far less than what is sent, so that a call takes a part of it.
        rustix::net::sockopt::set_socket_send_buffer_size(&here, 4096).unwrap();
        let (socket, data) = (Socket::Unix(here), vec![7; 3_000_000]);
        let receiving = std::thread::spawn(move || {
            let mut all = Vec::new();
            (&there).read_to_end(&mut all).map(|_| all)
        });
        for (head, data) in [(&b"head"[..], &data[..]), (b"alone", b""), (b"", b"data")] {
            socket.send_both(head, data).unwrap();
        }
        drop(socket);
        let all = receiving.join().unwrap().unwrap();
        let wanted = [b"head", &data[..], b"alonedata"].concat();
        assert!(all == wanted, "{} bytes", all.len());
    }

    #[test]
    fn a_peer_that_is_gone_is_an_error() {
        let (here, there) = UnixStream::pair().unwrap();
        drop(there);
        let sent = Socket::Unix(here).send_both(b"head", b"data");
        assert_eq!(sent.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
