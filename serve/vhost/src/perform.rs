//! Runs requests, on either path.
//!
//! A request runs to its end even if the monitor has disconnected: the next monitor is accepted
//! only when no request is running, and an error would reach a guest whose monitor reconnects. Only
//! a request that still waits for the export, such as for the end of a pause, is given up.

use std::time::Instant;

use vdkit_block::Error;
use vdkit_chain::Ready;
use vdkit_serve::{Change, OpKind, SlowWriteBackoff};

use crate::device::{Device, RANGE_SECTORS_MAX, RANGES_MAX, SECTOR_BYTES};
use crate::memory::{Mem, Outside, copy_in, copy_out};
use crate::request::{Kind, Request};

/// The ring's thread may run reads up to this size; larger ones are worth another thread.
const READ_HERE_MAX: u64 = 128 << 10;
/// The same for writes.
const WRITE_HERE_MAX: u64 = 64 << 10;
/// Larger requests are done in pieces of this size, which bounds their memory.
const PIECE_BYTES: u64 = 1 << 20;
/// Bytes of a discard or write-zeroes range: sector u64, sectors u32, flags u32.
const RANGE_BYTES: u64 = 16;
/// The only flag of such a range.
const RANGE_UNMAP: u32 = 1;

/// Status of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(u8)]
pub enum Status {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

/// A finished request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Finished {
    pub status: Status,
    /// Bytes of data for the guest.
    pub data: u64,
}

impl From<Status> for Finished {
    fn from(status: Status) -> Self {
        Self { status, data: 0 }
    }
}

/// A change that found no space.
pub struct Full {
    pub change: Change,
    pub at: u64,
    pub durable: bool,
    pub error: Error,
    /// Progress of the request once the change is done.
    pub progress: u64,
}

/// Result of a request that may block.
pub enum Slow {
    Finished(Finished),
    Full(Full),
    /// The monitor disconnected while the request waited for the export, such as during a pause.
    GivenUp,
}

/// The statistics kind of a request, if any.
pub fn op_kind(kind: Kind) -> Option<OpKind> {
    match kind {
        Kind::Read => Some(OpKind::Read),
        Kind::Write => Some(OpKind::Write),
        Kind::Flush => Some(OpKind::Flush),
        Kind::Discard => Some(OpKind::Discard),
        Kind::WriteZeroes => Some(OpKind::Zero),
        Kind::GetId | Kind::Unknown => None,
    }
}

/// The error of an invalid request.
fn fault(device: &Device, request: &Request) -> Option<Status> {
    let changes = matches!(request.kind, Kind::Write | Kind::Discard | Kind::WriteZeroes);
    if changes && device.export.read_only() {
        return Some(Status::IoError);
    }
    match request.kind {
        Kind::Read | Kind::Write => {
            let whole = request.bytes.is_multiple_of(SECTOR_BYTES);
            let inside = contains(device, request.sector, request.bytes / SECTOR_BYTES);
            (!whole || !inside).then_some(Status::IoError)
        }
        Kind::Unknown => Some(Status::Unsupported),
        Kind::Flush | Kind::GetId | Kind::Discard | Kind::WriteZeroes => None,
    }
}

fn contains(device: &Device, sector: u64, sectors: u64) -> bool {
    sector.checked_add(sectors).is_some_and(|end| end <= device.sectors())
}

/// Runs a request without waiting, or returns `None` with nothing done.
pub fn fast(
    device: &Device,
    backoff: &SlowWriteBackoff,
    mem: &Mem,
    request: &Request,
    bounce: &mut Vec<u8>,
) -> Option<Finished> {
    if let Some(status) = fault(device, request) {
        return Some(status.into());
    }
    match request.kind {
        Kind::Read if request.bytes <= READ_HERE_MAX => fast_read(device, mem, request, bounce),
        Kind::Write if request.bytes <= WRITE_HERE_MAX && !device.writes_durable() => {
            if backoff.applies() {
                return None;
            }
            let data = room(bounce, request.bytes);
            if copy_in(mem, &request.data, 0, data).is_err() {
                return Some(Status::IoError.into());
            }
            let began = Instant::now();
            // The blocking path retries and reports the error.
            let Some(Ok(())) = device.export.write_ready(data, at(request)) else { return None };
            backoff.record(began.elapsed(), data.len());
            Some(Status::Ok.into())
        }
        Kind::GetId => {
            let id = device.id();
            let len = id.len().min(request.bytes as usize);
            Some(match copy_out(mem, &request.data, 0, &id[..len]) {
                Ok(()) => Finished { status: Status::Ok, data: len as u64 },
                Err(Outside) => Status::IoError.into(),
            })
        }
        _ => None,
    }
}

fn fast_read(
    device: &Device,
    mem: &Mem,
    request: &Request,
    bounce: &mut Vec<u8>,
) -> Option<Finished> {
    let data = room(bounce, request.bytes);
    match device.export.read_ready(data, at(request)) {
        Some(Ok(Ready::Bytes)) => {}
        Some(Ok(Ready::Zero)) => data.fill(0),
        Some(Err(_)) | None => return None,
    }
    Some(match copy_out(mem, &request.data, 0, data) {
        Ok(()) => Finished { status: Status::Ok, data: request.bytes },
        Err(Outside) => Status::IoError.into(),
    })
}

/// `bytes` bytes of a reusable buffer.
fn room(bounce: &mut Vec<u8>, bytes: u64) -> &mut [u8] {
    let bytes = bytes as usize;
    if bounce.len() < bytes {
        bounce.resize(bytes, 0);
    }
    &mut bounce[..bytes]
}

/// Byte offset of a request on the disk. Its range was checked.
fn at(request: &Request) -> u64 {
    request.sector * SECTOR_BYTES
}

/// Runs a request, or its rest from `progress`. May block.
pub fn slow(
    device: &Device,
    mem: &Mem,
    request: &Request,
    progress: u64,
    bounce: &mut Vec<u8>,
) -> Slow {
    if let Some(status) = fault(device, request) {
        return Slow::Finished(status.into());
    }
    match request.kind {
        Kind::Read => read(device, mem, request, bounce),
        Kind::Write => write(device, mem, request, progress, bounce),
        Kind::Flush => flush(device, progress),
        Kind::Discard => discard(device, mem, request),
        Kind::WriteZeroes => write_zeroes(device, mem, request, progress),
        Kind::GetId | Kind::Unknown => Slow::Finished(Status::Unsupported.into()),
    }
}

/// Flushes, unless the export has done so after a wait for space.
fn flush(device: &Device, progress: u64) -> Slow {
    if progress > 0 {
        return Slow::Finished(Status::Ok.into());
    }
    match device.requests().flush() {
        Ok(()) => Slow::Finished(Status::Ok.into()),
        Err(error) if device.export.keeps(&error) => {
            let change = Change::Flush { requests: 1 };
            Slow::Full(Full { change, at: 0, durable: false, error, progress: 1 })
        }
        Err(error) => failed(device, &error),
    }
}

fn failed(device: &Device, error: &Error) -> Slow {
    if matches!(error, Error::Interrupted) && device.client.has_left() {
        return Slow::GivenUp;
    }
    tracing::warn!(export = device.export.name(), "{error}");
    Slow::Finished(Status::IoError.into())
}

fn read(device: &Device, mem: &Mem, request: &Request, bounce: &mut Vec<u8>) -> Slow {
    let mut done = 0;
    while done < request.bytes {
        let data = room(bounce, (request.bytes - done).min(PIECE_BYTES));
        if let Err(error) = device.requests().read(data, at(request) + done) {
            return failed(device, &error);
        }
        if copy_out(mem, &request.data, done, data).is_err() {
            return Slow::Finished(Status::IoError.into());
        }
        done += data.len() as u64;
    }
    Slow::Finished(Finished { status: Status::Ok, data: done })
}

fn write(
    device: &Device,
    mem: &Mem,
    request: &Request,
    progress: u64,
    bounce: &mut Vec<u8>,
) -> Slow {
    let durable = device.writes_durable();
    let mut done = progress;
    while done < request.bytes {
        let data = room(bounce, (request.bytes - done).min(PIECE_BYTES));
        if copy_in(mem, &request.data, done, data).is_err() {
            return Slow::Finished(Status::IoError.into());
        }
        let here = at(request) + done;
        done += data.len() as u64;
        match device.requests().write(data, here, durable) {
            Ok(()) => {}
            Err(error) if device.export.keeps(&error) => {
                let change = Change::Write(data.to_vec());
                return Slow::Full(Full { change, at: here, durable, error, progress: done });
            }
            Err(error) => return failed(device, &error),
        }
    }
    Slow::Finished(Status::Ok.into())
}

/// A range to discard or zero.
#[derive(Clone, Copy)]
struct Range {
    at: u64,
    len: u64,
    flags: u32,
}

/// All ranges of a request; nothing is done unless all are valid.
fn ranges(device: &Device, mem: &Mem, request: &Request) -> Result<Vec<Range>, Status> {
    let count = request.bytes / RANGE_BYTES;
    if !request.bytes.is_multiple_of(RANGE_BYTES) || count == 0 || count > u64::from(RANGES_MAX) {
        return Err(Status::IoError);
    }
    let mut bytes = vec![0; request.bytes as usize];
    copy_in(mem, &request.data, 0, &mut bytes).map_err(|Outside| Status::IoError)?;
    let (entries, _) = bytes.as_chunks::<{ RANGE_BYTES as usize }>();
    let parse = |entry: &[u8; RANGE_BYTES as usize]| {
        let sector = u64::from_le_bytes(std::array::from_fn(|byte| entry[byte]));
        let sectors = u32::from_le_bytes(std::array::from_fn(|byte| entry[8 + byte]));
        let flags = u32::from_le_bytes(std::array::from_fn(|byte| entry[12 + byte]));
        if !contains(device, sector, u64::from(sectors)) || sectors > RANGE_SECTORS_MAX {
            return Err(Status::IoError);
        }
        let unknown = match request.kind {
            Kind::WriteZeroes => flags & !RANGE_UNMAP,
            _ => flags,
        };
        if unknown != 0 {
            return Err(Status::Unsupported);
        }
        let len = u64::from(sectors) * SECTOR_BYTES;
        Ok(Range { at: sector * SECTOR_BYTES, len, flags })
    };
    entries.iter().map(parse).collect()
}

fn discard(device: &Device, mem: &Mem, request: &Request) -> Slow {
    let ranges = match ranges(device, mem, request) {
        Ok(ranges) => ranges,
        Err(status) => return Slow::Finished(status.into()),
    };
    for range in ranges {
        if let Err(error) = device.requests().discard(range.at, range.len, false) {
            return failed(device, &error);
        }
    }
    Slow::Finished(Status::Ok.into())
}

fn write_zeroes(device: &Device, mem: &Mem, request: &Request, progress: u64) -> Slow {
    let ranges = match ranges(device, mem, request) {
        Ok(ranges) => ranges,
        Err(status) => return Slow::Finished(status.into()),
    };
    let durable = device.writes_durable();
    for (index, range) in ranges.into_iter().enumerate().skip(progress as usize) {
        let may_unmap = range.flags & RANGE_UNMAP != 0;
        match device.requests().zero(range.at, range.len, may_unmap, durable) {
            Ok(()) => {}
            Err(error) if device.export.keeps(&error) => {
                let change = Change::Zero { len: range.len, may_unmap };
                let progress = index as u64 + 1;
                return Slow::Full(Full { change, at: range.at, durable, error, progress });
            }
            Err(error) => return failed(device, &error),
        }
    }
    Slow::Finished(Status::Ok.into())
}
