//! Reading a result back.

use parking_lot::Mutex;
use vdkit_block::{Error, GuestOffset, Monitor, Result};
use vdkit_chain::Disk;

use crate::source::Source;

const CHUNK_BYTES: u64 = 1 << 20;

/// Reads every byte of both and compares them; no map and no hole is trusted.
///
/// # Errors
/// [`Error::Corrupt`] at the first chunk that differs.
pub(crate) fn verify(
    source: &Source,
    target: &Disk,
    threads: usize,
    monitor: &Monitor<'_>,
) -> Result<u64> {
    let bytes = source.bytes();
    let state = Mutex::new((0u64, None::<Error>));
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|| verify_chunks(source, target, bytes, &state, monitor));
        }
        verify_chunks(source, target, bytes, &state, monitor);
    });
    match state.into_inner().1 {
        Some(error) => Err(error),
        None => Ok(bytes),
    }
}

fn verify_chunks(
    source: &Source,
    target: &Disk,
    bytes: u64,
    state: &Mutex<(u64, Option<Error>)>,
    monitor: &Monitor<'_>,
) {
    let (mut want, mut got) = (Vec::new(), Vec::new());
    loop {
        let at = {
            let mut state = state.lock();
            if state.0 >= bytes || state.1.is_some() {
                return;
            }
            let at = state.0;
            state.0 += CHUNK_BYTES;
            at
        };
        let len = CHUNK_BYTES.min(bytes - at) as usize;
        want.resize(len, 0);
        got.resize(len, 0);
        let same = monitor
            .cancel
            .check()
            .and_then(|()| source.read_at(&mut want, at))
            .and_then(|()| target.read_at(&mut got, GuestOffset(at)))
            .and_then(|()| match want.iter().zip(&got).position(|(a, b)| a != b) {
                None => Ok(()),
                Some(differs) => Err(Error::corrupt(
                    target.name(),
                    at + differs as u64,
                    "guest byte",
                    format!("{:#04x}", got[differs]),
                    format!("{:#04x}, as in the source", want[differs]),
                )),
            });
        if let Err(error) = same {
            state.lock().1.get_or_insert(error);
            return;
        }
        monitor.progress.update(at + len as u64, bytes);
    }
}
