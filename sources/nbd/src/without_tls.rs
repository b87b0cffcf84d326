//! What stands for TLS in builds without the feature `tls`: no `nbds` URI can be opened.

use std::convert::Infallible;
use std::io;
use std::time::Instant;

use crate::channel::Socket;
use crate::uri::{Place, TlsNames};

#[derive(Clone, Debug)]
pub(crate) struct Tls(Infallible);

impl Tls {
    /// # Errors
    /// Always `InvalidInput`.
    pub(crate) fn new(_names: &TlsNames, _place: &Place) -> io::Result<Self> {
        let why = "this build has no TLS; build it with the feature tls";
        Err(io::Error::new(io::ErrorKind::InvalidInput, why))
    }

    pub(crate) fn start(&self, _socket: Socket, _until: Instant) -> io::Result<TlsStream> {
        match self.0 {}
    }
}

#[derive(Debug)]
pub(crate) struct TlsStream(Infallible);

impl TlsStream {
    pub(crate) fn socket(&self) -> &Socket {
        match self.0 {}
    }

    pub(crate) fn recv(&self, _buf: &mut [u8]) -> io::Result<usize> {
        match self.0 {}
    }

    pub(crate) fn send_both(&self, _head: &[u8], _payload: &[u8]) -> io::Result<()> {
        match self.0 {}
    }
}
