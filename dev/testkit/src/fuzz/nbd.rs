//! Any bytes as an NBD client: the server answers, refuses or hangs up, and serves others as before.

use std::io::{Read, Write};
use std::net::Shutdown;

use vdkit_nbd_wire::errno::{INVAL as EINVAL, NOSPC as ENOSPC, NOTSUP as ENOTSUP};

use crate::Rng;
use crate::nbd::Rig;
use crate::nbd::client::{
    BLOCK_STATUS, CACHE, Client, DF, FAST_ZERO, FLUSH, FUA, NO_HOLE, PAYLOAD_LEN, READ, REQ_ONE,
    STYLES, Style, TRIM, WRITE, WRITE_ZEROES,
};

/// Bytes of the disk.
const DISK: u64 = 1 << 20;
/// Offsets and lengths of requests come in these units.
const AT_UNIT: u64 = 17;
const LEN_UNIT: u64 = 33;
/// Bytes of the input that one request takes.
const REQUEST_BYTES: usize = 8;
const REQUESTS_MAX: usize = 64;

/// The first byte says how the others are taken: as what a client sends from its first byte on,
/// after its flags or after an agreement; or as requests in one of three styles, whose answers are
/// compared with a model.
///
/// # Panics
/// If the server breaks the protocol, does not do as it answered, lets no other client in
/// afterwards, keeps the connection, or leaves an image that is not clean.
pub fn nbd_session(input: &[u8]) {
    let Some((how, rest)) = input.split_first() else { return };
    let rig = Rig::new(DISK);
    let style = STYLES[usize::from(*how) / 2 % STYLES.len()];
    let mut model = vec![0; DISK as usize];
    let known = how.is_multiple_of(2);
    if known {
        requests(&rig, style, rest, &mut model);
    } else {
        noise(&rig, how / 8, style, rest);
    }
    rig.settles_at(0);
    let mut other = rig.client(Style::Structured);
    let found = other.read(0, DISK as usize).expect("a disk that can be read");
    assert!(!known || found == model, "the disk is not what was answered");
    drop(other);
    rig.end();
}

/// Sends bytes as they are.
fn noise(rig: &Rig, how: u8, style: Style, bytes: &[u8]) {
    let mut client = match how % 3 {
        0 => Client::dial(rig.path()),
        1 => {
            let mut client = Client::dial(rig.path());
            client.put(&3u32.to_be_bytes());
            client
        }
        _ => rig.client(style),
    };
    // It may hang up before it has received all of it.
    let _ = client.socket.write_all(bytes);
    let _ = client.socket.shutdown(Shutdown::Write);
    let mut sink = [0; 4096];
    loop {
        match client.socket.read(&mut sink) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => {
                let reset = error.kind() == std::io::ErrorKind::ConnectionReset;
                assert!(reset, "the server neither answers nor hangs up: {error}");
                return;
            }
        }
    }
}

/// One request.
struct Asked {
    command: u16,
    flags: u16,
    at: u64,
    len: u64,
    fill: u8,
}

impl Asked {
    fn new(bytes: &[u8; REQUEST_BYTES], style: Style) -> Self {
        const COMMANDS: [u16; 9] =
            [READ, WRITE, FLUSH, TRIM, CACHE, WRITE_ZEROES, BLOCK_STATUS, 8, 77];
        let [command, flags, at, more_at, len, more_len, fill, far] = *bytes;
        let command = COMMANDS[usize::from(command) % COMMANDS.len()];
        let at = u64::from(u16::from_le_bytes([at, more_at])) * AT_UNIT;
        let len = 1 + u64::from(u16::from_le_bytes([len, more_len & 0x0f])) * LEN_UNIT;
        // The length of what follows cannot be lied about: the rest would be no requests.
        let payload = style == Style::Extended && command == WRITE;
        let flags = u16::from(flags) & 0x5f | if payload { PAYLOAD_LEN } else { 0 };
        let at = if far == 0xff { u64::MAX - at } else { at };
        Self { command, flags, at, len, fill }
    }

    /// The error that the protocol asks for, whatever the disk is like.
    fn fault(&self, style: Style) -> Option<u32> {
        let allowed = FUA
            | match self.command {
                READ if style != Style::Simple => DF,
                WRITE if style == Style::Extended => PAYLOAD_LEN,
                WRITE_ZEROES => NO_HOLE | FAST_ZERO,
                BLOCK_STATUS => REQ_ONE,
                _ => 0,
            };
        let inside = self.at.checked_add(self.len).is_some_and(|end| end <= DISK);
        match self.command {
            _ if self.flags & !allowed != 0 => Some(EINVAL),
            FLUSH => None,
            READ | CACHE | TRIM | BLOCK_STATUS if !inside => Some(EINVAL),
            WRITE | WRITE_ZEROES if !inside => Some(ENOSPC),
            // Simple replies have no room for it, so nothing was agreed on.
            BLOCK_STATUS if style == Style::Simple => Some(EINVAL),
            READ | WRITE | TRIM | CACHE | WRITE_ZEROES | BLOCK_STATUS => None,
            _ => Some(EINVAL),
        }
    }

    fn range(&self) -> std::ops::Range<usize> {
        self.at as usize..(self.at + self.len) as usize
    }
}

/// One request after the other, each answered as it must be.
fn requests(rig: &Rig, style: Style, input: &[u8], model: &mut [u8]) {
    let mut client = match style {
        Style::Simple => rig.client(style),
        _ => rig.client_with(style, &["base:allocation"]),
    };
    let (all, _) = input.as_chunks::<REQUEST_BYTES>();
    for bytes in all.iter().take(REQUESTS_MAX) {
        let asked = Asked::new(bytes, style);
        let done = ask(&mut client, &asked, model);
        match (asked.fault(style), done) {
            (None, Ok(())) => {}
            (None, Err(ENOTSUP)) if asked.flags & FAST_ZERO != 0 => {}
            (Some(wanted), Err(error)) if wanted == error => {}
            (wanted, done) => panic!(
                "command {} flags {:#x} at {} of {} bytes: {done:?} instead of {wanted:?}",
                asked.command, asked.flags, asked.at, asked.len
            ),
        }
    }
}

/// Sends a request, and compares the answer with the model or updates the model.
fn ask(client: &mut Client, asked: &Asked, model: &mut [u8]) -> Result<(), u32> {
    let &Asked { command, flags, at, len, fill } = asked;
    match command {
        READ => {
            let (found, _) = client.read_with(flags, at, len as usize)?;
            assert!(found == model[asked.range()], "{len} bytes at {at} are wrong");
        }
        WRITE => {
            let mut bytes = vec![0; len as usize];
            let mut rng = Rng::new(u64::from(fill));
            bytes.iter_mut().for_each(|byte| *byte = rng.below(256) as u8);
            client.run(WRITE, flags, at, len, &bytes)?;
            model[asked.range()].copy_from_slice(&bytes);
        }
        WRITE_ZEROES => {
            client.run(command, flags, at, len, b"")?;
            model[asked.range()].fill(0);
        }
        TRIM => {
            client.run(command, flags, at, len, b"")?;
            let found = client.read(at, len as usize)?;
            let was = &mut model[asked.range()];
            let kept = found.iter().zip(&*was).all(|(now, was)| *now == 0 || now == was);
            assert!(kept, "{len} trimmed bytes at {at} became something else");
            was.copy_from_slice(&found);
        }
        BLOCK_STATUS => {
            for runs in client.status(flags, at, len)? {
                let mut from = at;
                for (run, state) in runs {
                    let end = (from + run).min(at + len);
                    let zero = model[from as usize..end as usize].iter().all(|byte| *byte == 0);
                    assert!(state & 2 == 0 || zero, "{run} bytes at {from} are said to be zero");
                    from = end;
                }
                assert!(from > at, "a status of nothing");
            }
        }
        _ => client.run(command, flags, if command == FLUSH { 0 } else { at }, len, b"")?,
    }
    Ok(())
}
