//! TLS 1.3 with pre-shared keys, as `vdkit_nbd_wire` does it without a socket.

use std::io;

use vdkit_nbd_wire::psk::{Keys, PskSession};

use super::Session;

/// A new connection.
pub(super) fn session(keys: &Keys) -> io::Result<PskSession> {
    PskSession::server(keys)
}

impl Session for PskSession {
    fn is_handshaking(&self) -> bool {
        self.is_handshaking()
    }

    fn take_in(&mut self, ciphertext: &[u8]) -> io::Result<usize> {
        self.take_in(ciphertext)
    }

    fn has_output(&self) -> bool {
        self.has_output()
    }

    fn give_out(&mut self, out: &mut Vec<u8>) -> io::Result<()> {
        self.give_out(out);
        Ok(())
    }

    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.read(buf)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write(bytes)
    }

    fn say_goodbye(&mut self) {
        self.say_goodbye();
    }
}
