//! Many requests in flight: `queue FILE` says how many pieces of 64 KiB are all zero.

use std::sync::Arc;

use vdkit::{Disk, GuestOffset, OpenOptions, Queue, Request};

const PIECE: u64 = 64 << 10;
const IN_FLIGHT: u64 = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Some(file) = std::env::args().nth(1) else { return Err("usage: queue FILE".into()) };
    let disk = Arc::new(Disk::open(&vdkit::registry(), &file, &OpenOptions::read_only())?);
    let pieces = disk.guest_bytes() / PIECE;
    let queue: Queue = Queue::new(disk, 4)?;
    let read = |piece, buffer| {
        queue.submit(piece, Request::Read { at: GuestOffset(piece * PIECE), buffer });
    };
    let mut next = IN_FLIGHT.min(pieces);
    (0..next).for_each(|piece| read(piece, vec![0; PIECE as usize]));
    let mut zero = 0;
    while queue.outstanding() > 0 {
        // A program with an event loop waits there until `queue.as_fd()` is readable, and here not at all.
        for mut done in queue.reap(IN_FLIGHT as usize, None) {
            let buffer = done.buffer.take().expect("a read has one");
            done.result()?;
            zero += u64::from(buffer.iter().all(|&byte| byte == 0));
            if next < pieces {
                read(next, buffer);
                next += 1;
            }
        }
    }
    println!("{zero} of {pieces} pieces are zero");
    Ok(())
}
