//! Block status.

use std::io;

use crate::contexts::Context;
use crate::session::{Session, errno_of};
use crate::wire::{self, Request, chunk, errno, request_flag};

/// Maximum runs per reply: a chunk of 1 MiB with extended headers.
const RUNS_MAX: usize = 64 << 10;
/// Maximum run of the short form, a whole number of pages.
const SHORT_RUN_MAX: u64 = 0xffff_f000;

/// Answers NBD_CMD_BLOCK_STATUS.
pub fn answer(session: &Session, request: &Request, payload: &[u8]) -> io::Result<()> {
    let (replier, agreed) = (&session.replier, &session.agreed);
    let invalid = |why| replier.error(request, errno::INVAL, why);
    if agreed.contexts.is_empty() {
        return invalid("no metadata context was chosen");
    }
    let (len, ids) = if request.has(request_flag::PAYLOAD_LEN) {
        match effect(payload, agreed.contexts.len()) {
            Some(effect) => effect,
            None => return invalid("ill-formed list of contexts"),
        }
    } else {
        (request.len, (0..agreed.contexts.len() as u32).collect())
    };
    let inside = request.offset.checked_add(len).is_some_and(|end| end <= agreed.export.size());
    if len == 0 || !inside {
        return invalid("past the end of the disk");
    }
    for id in &ids {
        match describe(session, &agreed.contexts[*id as usize], *id, request, len) {
            Ok((kind, bytes)) => replier.chunk(request, kind, 0, &bytes)?,
            Err(error) => return replier.error(request, errno_of(&error), &error.to_string()),
        }
    }
    replier.end(request)
}

/// Length and context ids in a request's payload; `None` if an id is unknown or comes twice.
fn effect(payload: &[u8], contexts: usize) -> Option<(u64, Vec<u32>)> {
    let (len, ids) = payload.split_at_checked(8)?;
    if !ids.len().is_multiple_of(4) || ids.len() / 4 > contexts {
        return None;
    }
    let ids: Vec<u32> = ids.chunks_exact(4).map(|id| wire::be32(id, 0)).collect();
    let known = |(at, id): (usize, &u32)| (*id as usize) < contexts && !ids[..at].contains(id);
    if !ids.iter().enumerate().all(known) {
        return None;
    }
    Some((wire::be64(len, 0), ids))
}

/// Type and payload of one context's chunk.
fn describe(
    session: &Session,
    context: &Context,
    id: u32,
    request: &Request,
    len: u64,
) -> vdkit_block::Result<(u16, Vec<u8>)> {
    let most = if request.has(request_flag::REQ_ONE) { 1 } else { RUNS_MAX };
    let mut runs = Vec::new();
    let disk = session.export.requests(&session.client).hold()?;
    context.status(&disk, request.offset, len, &mut |len, flags| {
        runs.push((len, flags));
        runs.len() < most
    })?;
    drop(disk);
    let mut bytes = id.to_be_bytes().to_vec();
    if session.agreed.extended {
        bytes.extend((runs.len() as u32).to_be_bytes());
        for (len, flags) in runs {
            bytes.extend(len.to_be_bytes());
            bytes.extend(flags.to_be_bytes());
        }
        return Ok((chunk::BLOCK_STATUS_EXT, bytes));
    }
    for (len, flags) in runs {
        bytes.extend((len.min(SHORT_RUN_MAX) as u32).to_be_bytes());
        bytes.extend((flags as u32).to_be_bytes());
        if len > SHORT_RUN_MAX {
            // The client would take what follows for the rest of this run.
            break;
        }
    }
    Ok((chunk::BLOCK_STATUS, bytes))
}
