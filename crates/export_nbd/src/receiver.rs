//! Bytes that were received and not yet used.

use std::io;

use crate::buffer::Buffer;
use crate::channel::Channel;

/// Received at once. A request with a payload that does not fit goes through a buffer of its own.
const RECEIVE_BYTES: usize = 256 << 10;

/// What was received and not yet used.
pub struct Receiver {
    buf: Box<[u8]>,
    start: usize,
    end: usize,
    /// The last request had a large payload, and so may the next: nothing is received that does not
    /// belong to what is wanted, so that such a payload is not copied once more.
    frugal: bool,
}

impl Receiver {
    /// One that has received nothing.
    pub fn new() -> Self {
        let buf = vec![0; RECEIVE_BYTES].into_boxed_slice();
        Self { buf, start: 0, end: 0, frugal: false }
    }

    /// Bytes that wait.
    pub fn available(&self) -> usize {
        self.end - self.start
    }

    /// What waits.
    pub fn bytes(&self) -> &[u8] {
        &self.buf[self.start..self.end]
    }

    /// Bytes that were used.
    pub fn consume(&mut self, bytes: usize) {
        self.start += bytes;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Notes what the last request's payload was like.
    pub fn expect_large(&mut self, large: bool) {
        self.frugal = large;
    }

    /// Room behind what waits, as far as it is wanted, where `needed` bytes fit in one piece.
    fn room(&mut self, needed: usize) -> &mut [u8] {
        if self.start + needed > self.buf.len() {
            self.buf.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let most = if self.frugal { self.start + needed } else { self.buf.len() };
        &mut self.buf[self.end..most]
    }

    /// Receives until `needed` bytes wait in one piece; `false` where the connection ends before.
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

    /// As [`Receiver::fill`], without waiting: whether `needed` bytes are there. [`Receiver::fill`]
    /// finds the end of the connection, and errors.
    pub fn fill_ready(&mut self, channel: &dyn Channel, needed: usize) -> bool {
        while self.available() < needed {
            match channel.recv_ready(self.room(needed)) {
                Ok(Some(got)) if got > 0 => self.end += got,
                _ => return false,
            }
        }
        true
    }

    /// Receives a payload into a buffer, what waits here first.
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
    use std::net::Shutdown;
    use std::time::Duration;

    use parking_lot::Mutex;

    use super::*;

    /// Has everything at once, and notes how much it was asked for.
    #[derive(Debug, Default)]
    struct Ready {
        bytes: Mutex<Vec<u8>>,
        asked: Mutex<Vec<usize>>,
    }

    impl Channel for Ready {
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
        // The first brought the second's header and the beginning of the third with it; the third's
        // rest and nothing else was copied to where it is used.
        let asked = channel.asked.lock().clone();
        assert_eq!(asked, [RECEIVE_BYTES, 3 * (28 + PAYLOAD) - RECEIVE_BYTES]);
        *channel.bytes.lock() = stream[..28 + PAYLOAD].to_vec();
        channel.asked.lock().clear();
        assert!(receiver.fill(&channel, 28).unwrap());
        assert_eq!(receiver.available(), 28);
        receiver.consume(28);
        receiver.take_payload(&channel, &mut buffer, PAYLOAD).unwrap();
        assert_eq!(*channel.asked.lock(), [28, PAYLOAD]);
        // Small ones are received together again.
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
