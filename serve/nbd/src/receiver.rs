//! Receive buffer of a connection.

use std::io;

use crate::buffer::Buffer;
use crate::channel::Channel;

/// Maximum bytes received at once. A larger payload gets its own buffer.
const RECEIVE_BYTES: usize = 256 << 10;

/// Bytes received but not consumed.
pub struct Receiver {
    buf: Box<[u8]>,
    start: usize,
    end: usize,
    /// The last request had a large payload, so the next may too. Receive only what is needed, so
    /// that such a payload is not copied again.
    frugal: bool,
}

impl Receiver {
    /// An empty buffer.
    pub fn new() -> Self {
        let buf = vec![0; RECEIVE_BYTES].into_boxed_slice();
        Self { buf, start: 0, end: 0, frugal: false }
    }

    /// Number of unconsumed bytes.
    pub fn available(&self) -> usize {
        self.end - self.start
    }

    /// The unconsumed bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.buf[self.start..self.end]
    }

    /// Consumes bytes.
    pub fn consume(&mut self, bytes: usize) {
        self.start += bytes;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Notes whether the last payload was large.
    pub fn expect_large(&mut self, large: bool) {
        self.frugal = large;
    }

    /// Space behind the unconsumed bytes, moved so that `needed` bytes are contiguous.
    fn room(&mut self, needed: usize) -> &mut [u8] {
        if self.start + needed > self.buf.len() {
            self.buf.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let most = if self.frugal { self.start + needed } else { self.buf.len() };
        &mut self.buf[self.end..most]
    }

    /// Receives until `needed` contiguous bytes are there; `false` if the connection ends before.
    pub fn fill(&mut self, channel: &dyn Channel, needed: usize) -> io::Result<bool> {
        while self.available() < needed {
            let got = channel.recv(self.room(needed))?;
            if got == 0 {
                return Ok(false);
            }
            self.end += got;
        }
        Ok(true)
    }

    /// As [`Receiver::fill`] without waiting: whether `needed` bytes are there. Leaves errors and
    /// the end of the connection to [`Receiver::fill`].
    pub fn fill_ready(&mut self, channel: &dyn Channel, needed: usize) -> bool {
        while self.available() < needed {
            match channel.recv_ready(self.room(needed)) {
                Ok(Some(got)) if got > 0 => self.end += got,
                _ => return false,
            }
        }
        true
    }

    /// Receives a payload into a buffer, starting with the unconsumed bytes.
    pub fn take_payload(
        &mut self,
        channel: &dyn Channel,
        buffer: &mut Buffer,
        payload: usize,
    ) -> io::Result<()> {
        let room = buffer.room(payload);
        let mut done = self.available().min(payload);
        room[..done].copy_from_slice(&self.bytes()[..done]);
        self.consume(done);
        while done < payload {
            match channel.recv(&mut room[done..])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                got => done += got,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use parking_lot::Mutex;
    use rustix::net::Shutdown;

    use super::*;
    use crate::wire::Transport;

    /// Returns all bytes at once, and records the requested lengths.
    #[derive(Debug, Default)]
    struct Ready {
        bytes: Mutex<Vec<u8>>,
        asked: Mutex<Vec<usize>>,
    }

    impl Transport for Ready {
        fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
            let mut bytes = self.bytes.lock();
            let got = bytes.len().min(buf.len());
            buf[..got].copy_from_slice(&bytes[..got]);
            bytes.drain(..got);
            self.asked.lock().push(buf.len());
            Ok(got)
        }

        fn send(&self, _: &[u8]) -> io::Result<()> {
            Ok(())
        }

        fn set_timeout(&self, _: Option<Duration>) -> io::Result<()> {
            Ok(())
        }
    }

    impl Channel for Ready {
        fn shutdown(&self, _: Shutdown) {}
    }

    #[test]
    fn behind_a_large_payload_a_header_comes_alone() {
        const PAYLOAD: usize = 100_000;
        let stream: Vec<u8> = (0..3 * (28 + PAYLOAD)).map(|at| (at / 7) as u8).collect();
        let channel = Ready { bytes: Mutex::new(stream.clone()), ..Ready::default() };
        let (mut receiver, mut buffer) = (Receiver::new(), Buffer::default());
        for request in stream.chunks(28 + PAYLOAD) {
            assert!(receiver.fill(&channel, 28).unwrap());
            assert_eq!(receiver.bytes()[..28], request[..28]);
            receiver.consume(28);
            receiver.expect_large(true);
            receiver.take_payload(&channel, &mut buffer, PAYLOAD).unwrap();
            assert!(buffer.bytes() == &request[28..]);
        }
        // The first receive also got the second header and the start of the third payload. Only the
        // rest of the third was received directly into its buffer.
        let asked = channel.asked.lock().clone();
        assert_eq!(asked, [RECEIVE_BYTES, 3 * (28 + PAYLOAD) - RECEIVE_BYTES]);
        *channel.bytes.lock() = stream[..28 + PAYLOAD].to_vec();
        channel.asked.lock().clear();
        assert!(receiver.fill(&channel, 28).unwrap());
        assert_eq!(receiver.available(), 28);
        receiver.consume(28);
        receiver.take_payload(&channel, &mut buffer, PAYLOAD).unwrap();
        assert_eq!(*channel.asked.lock(), [28, PAYLOAD]);
        // Small requests are received together again.
        receiver.expect_large(false);
        *channel.bytes.lock() = stream[..28 * 10].to_vec();
        assert!(receiver.fill(&channel, 28).unwrap());
        assert_eq!(receiver.available(), 280);
    }

    #[test]
    fn an_end_within_a_payload_is_an_error_and_one_within_a_header_the_end() {
        let channel = Ready { bytes: Mutex::new(vec![1; 1000]), ..Ready::default() };
        let (mut receiver, mut buffer) = (Receiver::new(), Buffer::default());
        receiver.expect_large(true);
        assert!(receiver.fill(&channel, 28).unwrap());
        receiver.consume(28);
        let cut = receiver.take_payload(&channel, &mut buffer, 70_000).unwrap_err();
        assert_eq!(cut.kind(), io::ErrorKind::UnexpectedEof);
        assert!(!receiver.fill(&channel, 28).unwrap());
    }
}
