//! The byte stream of a connection: a socket, or TLS over one.

use std::fmt;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recv, sendmsg};
use vdkit_serve::peer_has_left;

use crate::poll::{Poll, PollLimit};
use crate::wire::Transport;

/// Spins between two polls: some hundred nanoseconds, about as long as a poll takes.
const SPINS: u32 = 16;

/// A peer that reads frees buffer space within this time. One that sends everything before it reads
/// does not.
const BRIEFLY: Duration = Duration::from_millis(2);

/// The byte stream of a client.
pub trait Channel: Transport + Send + Sync + fmt::Debug {
    /// Receives bytes that are already there; `None` if [`Transport::recv`] may have to wait.
    fn recv_ready(&self, buf: &mut [u8]) -> io::Result<Option<usize>> {
        let _ = buf;
        Ok(None)
    }

    /// Sends a header and the data after it.
    fn send_both(&self, head: &[u8], data: &[u8]) -> io::Result<()> {
        self.send(head)?;
        self.send(data)
    }

    /// Shuts down one or both directions; wakes threads that wait.
    fn shutdown(&self, how: Shutdown);

    /// Whether the peer has closed its sending direction, even if data before that is still unread.
    /// Does not wait.
    fn has_left(&self) -> bool {
        false
    }
}

/// A plain socket.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    poll: Poll,
    /// The receiving direction was shut down locally, not by the peer.
    ended_here: AtomicBool,
    /// Senders wait indefinitely by retrying: the kernel's timeout is [`BRIEFLY`].
    patient: AtomicBool,
}

impl Socket {
    /// A connected socket, polled for at most `poll_max` before a thread sleeps on it.
    pub fn new(stream: impl Into<OwnedFd>, poll_max: Duration) -> Self {
        Self::over(stream.into(), Poll::new(poll_max, PollLimit::usual()))
    }

    fn over(fd: OwnedFd, poll: Poll) -> Self {
        let ended_here = AtomicBool::new(false);
        let socket = Self { fd, poll, ended_here, patient: AtomicBool::new(true) };
        // Without a timeout, waits would be unbounded: close the socket.
        if socket.wait_at_most(None, Some(BRIEFLY)).is_err() {
            socket.shutdown(Shutdown::Both);
        }
        socket
    }

    /// Sends some bytes of the slices in one call, within the socket's timeout.
    fn send_some(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let flags = SendFlags::NOSIGNAL;
        let send = || sendmsg(&self.fd, slices, &mut SendAncillaryBuffer::default(), flags);
        match rustix::io::retry_on_intr(send) {
            Err(rustix::io::Errno::AGAIN) => Ok(0),
            sent => Ok(sent?),
        }
    }

    /// Handles a call that sent nothing.
    fn wait_for_room(&self) -> io::Result<()> {
        if !self.patient.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut fds = [PollFd::new(&self.fd, PollFlags::OUT)];
        rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, None))?;
        Ok(())
    }

    fn wait_at_most(&self, reading: Option<Duration>, writing: Option<Duration>) -> io::Result<()> {
        set_socket_timeout(&self.fd, Timeout::Recv, reading)?;
        Ok(set_socket_timeout(&self.fd, Timeout::Send, writing)?)
    }

    fn recv_with(&self, buf: &mut [u8], flags: RecvFlags) -> io::Result<usize> {
        let recv = || recv(&self.fd, &mut *buf, flags).map(|(got, _)| got);
        Ok(rustix::io::retry_on_intr(recv)?)
    }

    /// Receives without waiting.
    fn recv_now(&self, buf: &mut [u8]) -> io::Result<Option<usize>> {
        match self.recv_with(buf, RecvFlags::DONTWAIT) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            got => got.map(Some),
        }
    }

    /// Polls until `time` after `began`.
    fn poll_for(
        &self,
        buf: &mut [u8],
        began: Instant,
        time: Duration,
    ) -> io::Result<Option<usize>> {
        while began.elapsed() < time {
            for _ in 0..SPINS {
                std::hint::spin_loop();
            }
            if let Some(got) = self.recv_now(buf)? {
                return Ok(Some(got));
            }
        }
        Ok(None)
    }
}

impl Transport for Socket {
    fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        if let Some(got) = self.recv_now(buf)? {
            return Ok(got);
        }
        let began = Instant::now();
        let polled = match self.poll.begin() {
            Some((time, _permit)) => self.poll_for(buf, began, time)?,
            None => None,
        };
        let got = polled.map_or_else(|| self.recv_with(buf, RecvFlags::empty()), Ok)?;
        self.poll.waited(began.elapsed());
        Ok(got)
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match self.send_some(&[IoSlice::new(rest)])? {
                0 => self.wait_for_room()?,
                sent => rest = &rest[sent..],
            }
        }
        Ok(())
    }

    /// Waits for the peer at most [`BRIEFLY`].
    fn send_ready(&self, bytes: &[u8]) -> io::Result<(usize, bool)> {
        self.send_some(&[IoSlice::new(bytes)]).map(|sent| (sent, true))
    }

    fn set_timeout(&self, most: Option<Duration>) -> io::Result<()> {
        self.patient.store(most.is_none(), Ordering::Relaxed);
        self.wait_at_most(most, most.or(Some(BRIEFLY)))
    }
}

impl Channel for Socket {
    fn recv_ready(&self, buf: &mut [u8]) -> io::Result<Option<usize>> {
        self.recv_now(buf)
    }

    /// In one call, so that the peer is woken once.
    fn send_both(&self, head: &[u8], data: &[u8]) -> io::Result<()> {
        let slices = [IoSlice::new(head), IoSlice::new(data)];
        let sent = self.send_some(&slices)?;
        if sent < head.len() {
            self.send(&head[sent..])?;
        }
        self.send(&data[sent.saturating_sub(head.len())..])
    }

    fn shutdown(&self, how: Shutdown) {
        if how == Shutdown::Read {
            self.ended_here.store(true, Ordering::SeqCst);
        }
        // The peer may be gone already.
        let _ = rustix::net::shutdown(&self.fd, how);
    }

    fn has_left(&self) -> bool {
        // At the end of the service, pending requests of connected clients are still served.
        let ended_here = self.ended_here.load(Ordering::SeqCst);
        let asks = if ended_here { PollFlags::empty() } else { PollFlags::RDHUP };
        peer_has_left(&self.fd, asks)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::poll::POLL_MAX;

    #[test]
    fn a_header_and_its_data_arrive_whole_however_small_the_sockets_buffer() {
        let (here, there) = UnixStream::pair().unwrap();
        // Far smaller than the data, so that each call sends a part.
        rustix::net::sockopt::set_socket_send_buffer_size(&here, 4096).unwrap();
        let (socket, data) = (Socket::new(here, POLL_MAX), vec![7; 3_000_000]);
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
    fn bytes_are_polled_for_before_they_are_slept_for() {
        let (here, mut there) = UnixStream::pair().unwrap();
        let limit = Box::leak(Box::new(PollLimit::new(1)));
        let hour = Duration::from_secs(3600);
        let socket = Socket::over(here.into(), Poll::new(hour, limit));
        let mut buf = [0; 8];
        // Polling alone finds bytes, and the end.
        for (sent, got) in [(&b"bytes"[..], Some(5)), (b"", None)] {
            there.write_all(sent).unwrap();
            let polled = socket.poll_for(&mut buf, Instant::now(), Duration::from_millis(1));
            assert_eq!(polled.unwrap(), got);
        }
        // A poll that finds nothing goes over into sleep.
        socket.poll.waited(Duration::from_micros(10));
        assert!(socket.poll.begin().is_some());
        socket.set_timeout(Some(Duration::from_millis(1))).unwrap();
        let slept = socket.recv(&mut buf).unwrap_err();
        assert_eq!(slept.kind(), io::ErrorKind::WouldBlock);
        there.write_all(b"bytes").unwrap();
        assert_eq!(socket.recv(&mut buf).unwrap(), 5);
        drop(there);
        assert_eq!(socket.poll_for(&mut buf, Instant::now(), hour).unwrap(), Some(0));
    }

    #[test]
    fn a_peer_has_left_before_its_last_bytes_are_read_and_not_because_we_end() {
        let (here, mut there) = UnixStream::pair().unwrap();
        let socket = Socket::new(here, POLL_MAX);
        there.write_all(b"bytes").unwrap();
        assert!(!socket.has_left());
        drop(there);
        assert!(socket.has_left());
        let (here, there) = UnixStream::pair().unwrap();
        let socket = Socket::new(here, POLL_MAX);
        socket.shutdown(Shutdown::Read);
        assert!(!socket.has_left());
        drop(there);
        assert!(socket.has_left());
    }

    #[test]
    fn a_peer_that_does_not_read_is_not_waited_for() {
        let (here, there) = UnixStream::pair().unwrap();
        let socket = Socket::new(here, POLL_MAX);
        let bytes = vec![7; 3_000_000];
        let (sent, all) = socket.send_ready(&bytes).unwrap();
        assert!(all && sent > 0 && sent < bytes.len(), "{sent} bytes");
        // Every byte is sent once.
        let mut received = vec![0; sent];
        (&there).read_exact(&mut received).unwrap();
        assert!(received.iter().all(|byte| *byte == 7));
        there.set_nonblocking(true).unwrap();
        let empty = (&there).read(&mut [0]).unwrap_err();
        assert_eq!(empty.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_peer_that_is_gone_is_an_error() {
        let (here, there) = UnixStream::pair().unwrap();
        drop(there);
        let sent = Socket::new(here, POLL_MAX).send_both(b"head", b"data");
        assert_eq!(sent.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
