//! In-memory transport for s2n-tls, so that its calls never wait for a socket.
//!
//! The library takes its transport as two C functions with a pointer. The `unsafe` code of this
//! crate is only here: it passes and dereferences that pointer.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::io::Read;
use std::sync::Arc;
use std::task::Poll;

use errno::{Errno, set_errno};
use parking_lot::Mutex;
use s2n_tls::connection::Connection;
use s2n_tls::error::Error;

/// Maximum buffered incoming ciphertext: several records.
const INCOMING_BYTES_MAX: usize = 128 << 10;

/// Ciphertext in both directions.
#[derive(Default)]
struct Buffers {
    incoming: VecDeque<u8>,
    outgoing: Vec<u8>,
}

/// A connection and its buffers. The connection is never exposed, since it holds the buffers'
/// address.
pub(super) struct Wired {
    /// Dropped before the buffers.
    connection: Connection,
    buffers: Arc<Mutex<Buffers>>,
}

impl fmt::Debug for Wired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wired").finish_non_exhaustive()
    }
}

impl Wired {
    /// Attaches buffers to a connection.
    pub(super) fn new(mut connection: Connection) -> Result<Self, Error> {
        let buffers = Arc::new(Mutex::new(Buffers::default()));
        let context = Arc::as_ptr(&buffers).cast_mut().cast::<c_void>();
        connection.set_receive_callback(Some(receive))?;
        connection.set_send_callback(Some(send))?;
        // SAFETY: the functions above take the pointer for what it is, a `Mutex<Buffers>`. It is
        // valid as long as the connection, which `Self` drops before its own share of the buffers.
        unsafe {
            connection.set_receive_context(context)?;
            connection.set_send_context(context)?;
        }
        Ok(Self { connection, buffers })
    }

    /// Passes ciphertext to the session. Returns how much fitted.
    pub(super) fn take_in(&mut self, ciphertext: &[u8]) -> usize {
        let incoming = &mut self.buffers.lock().incoming;
        let room = INCOMING_BYTES_MAX.saturating_sub(incoming.len()).min(ciphertext.len());
        incoming.extend(&ciphertext[..room]);
        room
    }

    pub(super) fn has_output(&self) -> bool {
        !self.buffers.lock().outgoing.is_empty()
    }

    /// Takes the ciphertext to send.
    pub(super) fn give_out(&mut self, out: &mut Vec<u8>) {
        out.append(&mut self.buffers.lock().outgoing);
    }

    pub(super) fn negotiate(&mut self) -> Poll<Result<(), Error>> {
        self.connection.poll_negotiate().map_ok(|_| ())
    }

    pub(super) fn recv(&mut self, buf: &mut [u8]) -> Poll<Result<usize, Error>> {
        self.connection.poll_recv(buf)
    }

    pub(super) fn send(&mut self, bytes: &[u8]) -> Poll<Result<usize, Error>> {
        self.connection.poll_send(bytes)
    }

    /// Sends a close_notify.
    pub(super) fn shutdown_send(&mut self) -> Poll<Result<(), Error>> {
        self.connection.poll_shutdown_send().map_ok(|_| ())
    }
}

/// Return value of recv(2) and send(2) that would block.
const WOULD_BLOCK: c_int = -1;

/// The library's `recv`: returns buffered input.
///
/// # Safety
/// `context` points to a `Mutex<Buffers>`, `buf` to `len` writable bytes.
unsafe extern "C" fn receive(context: *mut c_void, buf: *mut u8, len: u32) -> c_int {
    // SAFETY: `Wired::new` gave this pointer, and the connection that calls has not been dropped.
    let buffers = unsafe { &*context.cast::<Mutex<Buffers>>() };
    let incoming = &mut buffers.lock().incoming;
    if incoming.is_empty() {
        set_errno(Errno(libc::EAGAIN));
        return WOULD_BLOCK;
    }
    let len = (len as usize).min(c_int::MAX as usize);
    // SAFETY: the library asks for `len` bytes at `buf`, its own buffer, which it has initialized.
    let buf = unsafe { std::slice::from_raw_parts_mut(buf, len) };
    // Reading from memory cannot fail.
    incoming.read(buf).map_or(0, |got| got as c_int)
}

/// The library's `send`: buffers everything.
///
/// # Safety
/// `context` points to a `Mutex<Buffers>`, `buf` to `len` readable bytes.
unsafe extern "C" fn send(context: *mut c_void, buf: *const u8, len: u32) -> c_int {
    // SAFETY: as in `receive`.
    let buffers = unsafe { &*context.cast::<Mutex<Buffers>>() };
    let len = (len as usize).min(c_int::MAX as usize);
    // SAFETY: the library hands over `len` bytes at `buf`, and waits for this call.
    let bytes = unsafe { std::slice::from_raw_parts(buf, len) };
    buffers.lock().outgoing.extend_from_slice(bytes);
    len as c_int
}
