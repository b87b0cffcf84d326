//! Messages with file descriptors over a Unix socket.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::wire::{BODY_MAX, FDS_MAX, HEADER_BYTES, flag, invalid};

/// Timeout for the rest of a message that has begun, and for sending an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A received message.
#[derive(Debug)]
pub struct Message {
    pub request: u32,
    pub flags: u32,
    pub body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Message {
    pub fn needs_reply(&self) -> bool {
        self.flags & flag::NEED_REPLY != 0
    }
}

/// One end of a socket.
#[derive(Debug)]
pub struct Channel {
    socket: UnixStream,
}

impl Channel {
    pub fn new(socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        Ok(Self { socket })
    }

    /// Receives a message; `None` if the peer has disconnected between two messages.
    pub fn recv(&self) -> io::Result<Option<Message>> {
        let mut header = [0; HEADER_BYTES];
        let mut fds = Vec::new();
        let got = self.recv_with_fds(&mut header, &mut fds)?;
        if got == 0 {
            return Ok(None);
        }
        (&self.socket).read_exact(&mut header[got..])?;
        let number = |at: usize| {
            let bytes: [u8; 4] = std::array::from_fn(|byte| header[at + byte]);
            u32::from_ne_bytes(bytes)
        };
        let (request, flags, size) = (number(0), number(4), number(8) as usize);
        if flags & flag::VERSION_MASK != flag::VERSION {
            return Err(invalid("a message of an unknown version"));
        }
        if size > BODY_MAX {
            return Err(invalid("a message that is longer than any known"));
        }
        let mut body = vec![0; size];
        (&self.socket).read_exact(&mut body)?;
        Ok(Some(Message { request, flags, body, fds }))
    }

    fn recv_with_fds(&self, buf: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = retry_on_intr(|| {
            let mut parts = [IoSliceMut::new(buf)];
            recvmsg(&self.socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(invalid("a message with too many files"));
        }
        Ok(received.bytes)
    }

    /// Sends a message. Descriptors go with its first byte.
    pub fn send(
        &self,
        request: u32,
        flags: u32,
        body: &[u8],
        fd: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
        bytes.extend(request.to_ne_bytes());
        bytes.extend((flags | flag::VERSION).to_ne_bytes());
        bytes.extend((body.len() as u32).to_ne_bytes());
        bytes.extend(body);
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let (parts, flags) = ([IoSlice::new(&bytes)], SendFlags::NOSIGNAL);
        let sent = retry_on_intr(|| sendmsg(&self.socket, &parts, &mut control, flags))?;
        (&self.socket).write_all(&bytes[sent..])
    }

    pub fn close(&self) {
        // It may be closed already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
